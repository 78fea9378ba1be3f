"""An accelerate config, and the options of `accelerate launch`, which are the same things."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.errors import RecipeError
from launcher.importing.arguments import as_bool, as_number, take_fsdp_option
from launcher.importing.reading import Effect, Reading, shown
from launcher.recipe.yaml_reader import parse_yaml

TOOL = "accelerate config"
_PRECISION = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}
_ENGINES = {"MULTI_GPU": "ddp", "DEEPSPEED": "deepspeed", "FSDP": "fsdp", "NO": "ddp", "FALSE": "ddp"}
_RANK_KEYS = (
    "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "same_network",
    "main_training_function", "debug", "enable_cpu_affinity", "command_file", "commands", "role", "tee",
    "log_dir", "monitor_interval", "quiet", "no_python", "num_cpu_threads_per_process",
    "tpu_env", "tpu_name", "tpu_zone", "tpu_vm", "tpu_use_sudo", "downcast_bf16",
)  # fmt: skip
_BLOCKS = ("deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config")
_OF_KIND = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP"}
_OTHER_BLOCKS = ("megatron_lm_config", "fp8_config", "mpirun_config")
# What accelerate refuses beside a DeepSpeed file of its own.
_IN_FILE = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
    "gradient_clipping", "zero3_save_16bit_model",
)  # fmt: skip
_IDLE_DS = ("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
            "deepspeed_moe_layer_cls_names", "deepspeed_inclusion_filter",
            "deepspeed_exclusion_filter")  # fmt: skip
Taker = Callable[[Reading, str, Any, int | None], None]


def tells(data: Any) -> bool:
    """Whether a mapping that was read is an accelerate config."""
    return isinstance(data, dict) and ("distributed_type" in data or "compute_environment" in data)


def read(text: str, file: str) -> Reading:
    """Read a config. RecipeError when it is no YAML mapping."""
    document = parse_yaml(text, file, last_wins=True)
    wrong = [problem for problem in document.problems if problem.code != "duplicate-key"]
    if wrong:
        raise RecipeError(wrong)
    data = document.data
    reading = Reading(TOOL, file)
    for problem in document.problems:
        key, reason = problem.path or "", f"{problem.message}: the last one counts there"
        reading.drop(key, "", problem.line, Effect.NONE, reason)
    kind = str(data.get("distributed_type")).upper().rpartition(".")[2]
    for key, value in data.items():
        line = document.lines.get(key)
        if key in _BLOCKS and isinstance(value, Mapping):
            reading.know(key)
            _take_block(reading, key, value, document.lines, kind)
        else:
            take_option(reading, key, value, line)
    if kind == "DEEPSPEED":
        finish_deepspeed(reading, document.lines.get("distributed_type"))
        _check_file(reading, data, document.lines)
    return reading


def take_option(reading: Reading, key: str, value: Any, line: int | None) -> bool:
    """Take one top-level key, or option of `accelerate launch`; False where accelerate has no such one."""
    plain = key.replace("-", "_")
    if plain in _TOP:
        if value is None or value == {} or value == []:
            reading.know(key)
        else:
            _TOP[plain](reading, key, value, line)
        return True
    if plain in _RANK_KEYS or plain.startswith("tpu_"):
        reading.know(key)
        return True
    if plain in _OTHER_BLOCKS and (value is None or value == {}):
        reading.know(key)
        return True
    if plain in (*_OTHER_BLOCKS, "use_megatron_lm", "tpu_use_cluster", "tpu", "use_mps_device"):
        if value is False or as_bool(value) is False:
            reading.know(key)
        else:
            reading.refuse(key, line, "asks for what nothing here does; the engines are DeepSpeed, FSDP, DDP")
        return True
    if plain in _DEEPSPEED:
        _DEEPSPEED[plain](reading, key, value, line)
        return True
    if plain.startswith("fsdp_"):
        take_fsdp_option(reading, key, plain, value, line)
        return True
    if plain.startswith("parallelism_config_"):
        _parallel(reading, key, plain, value, line)
        return True
    if plain.startswith("dynamo_"):
        _dynamo(reading, key, plain, value, line)
        return True
    reading.drop(key, value, line, Effect.NONE, "no key of accelerate 1.15, which refuses it")
    return False


def is_option(name: str) -> bool:
    """Whether accelerate launch has such an option."""
    known = (*_TOP, *_RANK_KEYS, *_DEEPSPEED, "use_megatron_lm")
    return name in known or name.startswith(("fsdp_", "parallelism_config_", "dynamo_", "tpu_"))


def finish_deepspeed(reading: Reading, line: int | None) -> None:
    """accelerate's own stage, where the file has neither one nor a DeepSpeed file."""
    if not reading.names:
        reading.take("sharding.zero_stage", 2, line, "zero_stage: 2", default=True)


def _take_block(
    reading: Reading, block: str, values: Mapping[str, Any], lines: Mapping[str, int], kind: str
) -> None:
    for key, value in values.items():
        said, line = f"{block}.{key}", lines.get(f"{block}.{key}")
        if value is None:
            reading.know(said)
        elif _OF_KIND.get(block, kind) != kind:
            reading.drop(said, value, line, Effect.NONE, f"distributed_type is {kind}")
        elif block == "fsdp_config":
            take_fsdp_option(reading, said, key, value, line)
        elif block == "parallelism_config":
            _parallel(reading, said, key, value, line)
        elif block == "dynamo_config":
            _dynamo(reading, said, key, value, line)
        elif key in _DEEPSPEED:
            _DEEPSPEED[key](reading, said, value, line)
        else:
            reading.drop(said, value, line, Effect.NONE, "no key of accelerate 1.15, which ignores it there")


def _check_file(reading: Reading, data: Mapping[str, Any], lines: Mapping[str, int]) -> None:
    """accelerate refuses to be told twice: by its file and by DeepSpeed's."""
    block = data.get("deepspeed_config")
    if not isinstance(block, Mapping) or not block.get("deepspeed_config_file"):
        return
    twice = [f"deepspeed_config.{key}" for key in _IN_FILE if block.get(key) not in (None, "auto")]
    if str(data.get("mixed_precision")).lower() in ("bf16", "fp16"):
        twice.append("mixed_precision")
    where = lines.get("deepspeed_config.deepspeed_config_file")
    for key in twice:
        reading.refuse(key, lines.get(key), f"is given beside deepspeed_config_file (line {where}), which "
                       "accelerate refuses", "keep it in one of the two")  # fmt: skip


def _distributed(reading: Reading, key: str, value: Any, line: int | None) -> None:
    kind = str(value).upper().rpartition(".")[2]
    if kind in _ENGINES:
        reading.take("sharding.engine", _ENGINES[kind], line, f"{key}: {kind}")
    else:
        reading.refuse(key, line, f"is {shown(value)}, which nothing here starts",
                       "MULTI_GPU, DEEPSPEED, FSDP and NO are read")  # fmt: skip


def _environment(reading: Reading, key: str, value: Any, line: int | None) -> None:
    if str(value).rpartition(".")[2].upper() != "LOCAL_MACHINE":
        reading.refuse(key, line, f"is {shown(value)}: nothing here starts jobs there")
    reading.know(key)


def _mixed(reading: Reading, key: str, value: Any, line: int | None) -> None:
    name = _PRECISION.get(str(value).lower())
    if name is None:
        reading.refuse(key, line, f"is {shown(value)}, which nothing here trains with", "no, bf16 or fp16")
    else:
        reading.take("precision", name, line, f"{key}: {shown(value)}")


def take_count(to: str) -> Taker:
    """A number of machines, processes or the like; -1 says nothing."""

    def take(reading: Reading, key: str, value: Any, line: int | None) -> None:
        number = as_number(value)
        if isinstance(number, int) and number > 0:
            reading.take(to, number, line, key)
        elif number == -1:
            reading.know(key)
        else:
            reading.drop(key, value, line, Effect.NEEDED, "expected a number from 1")

    return take


def _cpu(reading: Reading, key: str, value: Any, line: int | None) -> None:
    reading.know(key)
    if as_bool(value):
        reading.take("hardware.device", "cpu", line, f"{key}: true")


def _gpu_ids(reading: Reading, key: str, value: Any, line: int | None) -> None:
    if str(value).lower() == "all":
        reading.know(key)
        return
    reading.drop(key, value, line, Effect.NONE, "which devices of a machine are used",
                 f"set CUDA_VISIBLE_DEVICES={shown(value)} in the shell that starts the run")  # fmt: skip


def _switch(engine: str) -> Taker:
    def take(reading: Reading, key: str, value: Any, line: int | None) -> None:
        reading.know(key)
        if as_bool(value):
            reading.take("sharding.engine", engine, line, f"{key}: true")

    return take


def _restarts(reading: Reading, key: str, value: Any, line: int | None) -> None:
    number = as_number(value)
    reading.know(key)
    if isinstance(number, int) and number > 0:
        reading.take("launch.max_restarts", number, line, key, note="from the last checkpoint")


def _stage(reading: Reading, key: str, value: Any, line: int | None) -> None:
    number = as_number(value)
    if number in (0, 1, 2, 3):
        reading.take("sharding.zero_stage", int(number), line, key)
    else:
        reading.drop(key, value, line, Effect.NEEDED, "expected a stage from 0 to 3")


def _offload(to: str) -> Taker:
    def take(reading: Reading, key: str, value: Any, line: int | None) -> None:
        if value in ("cpu", "nvme"):
            reading.take(to, value, line, key)
        elif str(value).lower() in ("none", "false"):
            reading.know(key)
        else:
            reading.drop(key, value, line, Effect.NEEDED, "expected none, cpu or nvme")

    return take


def _nvme(reading: Reading, key: str, value: Any, line: int | None) -> None:
    before = reading.value("sharding.nvme_path")
    if before not in (None, value):
        reading.drop(key, value, line, Effect.NONE, "one folder holds all that is offloaded to nvme")
    elif str(value).lower() == "none":
        reading.know(key)
    else:
        reading.take("sharding.nvme_path", value, line, key)


def _number(to: str) -> Taker:
    def take(reading: Reading, key: str, value: Any, line: int | None) -> None:
        number = as_number(value)
        if str(value) == "auto":
            reading.know(key)
        elif number is None:
            reading.drop(key, value, line, Effect.NEEDED, "expected a number")
        else:
            reading.take(to, number if to.endswith("steps") else float(number), line, key)

    return take


def _file(reading: Reading, key: str, value: Any, line: int | None) -> None:
    reading.know(key)
    if str(value).lower() != "none":
        reading.name_file(str(value), line)


def _hostfile(reading: Reading, key: str, value: Any, line: int | None) -> None:
    reading.take("launch.hostfile", str(value), line, key)


def _idle(reading: Reading, key: str, value: Any, line: int | None) -> None:
    reading.know(key)  # placement, loading and saving: a run does them by itself


def _parallel(reading: Reading, said: str, key: str, value: Any, line: int | None) -> None:
    plain = key.removeprefix("parallelism_config_")
    number = as_number(value)
    reading.know(said)
    if plain in ("tp_size", "cp_size", "sp_size") and isinstance(number, int):
        if number > 1:
            reading.take(f"sharding.{plain}", number, line, said)
    elif plain not in ("dp_shard_size", "dp_replicate_size") or number not in (None, 1):
        reading.drop(said, value, line, Effect.NONE, "how the same work is laid out on the devices")


def _dynamo(reading: Reading, said: str, key: str, value: Any, line: int | None) -> None:
    plain = key.removeprefix("dynamo_")
    reading.know(said)
    if plain == "backend" and str(value).upper() not in ("NO", "FALSE"):
        reading.take("trainer.torch_compile", True, line, f"{said}: {value}")
        reading.take("trainer.torch_compile_backend", str(value).lower(), line, said)
    elif plain == "mode" and value != "default":
        reading.take("trainer.torch_compile_mode", value, line, said)
    elif plain.startswith("use_") and as_bool(value):
        reading.drop(said, value, line, Effect.NONE, "speed only: torch.compile decides it here")


_TOP: dict[str, Taker] = {
    "distributed_type": _distributed,
    "compute_environment": _environment,
    "mixed_precision": _mixed,
    "num_processes": take_count("hardware.total"),
    "num_machines": take_count("hardware.num_nodes"),
    "use_cpu": _cpu,
    "cpu": _cpu,
    "gpu_ids": _gpu_ids,
    "multi_gpu": _switch("ddp"),
    "use_deepspeed": _switch("deepspeed"),
    "use_fsdp": _switch("fsdp"),
    "max_restarts": _restarts,
    "use_parallelism_config": _idle,
}
_DEEPSPEED: dict[str, Taker] = {
    "zero_stage": _stage,
    "offload_optimizer_device": _offload("sharding.offload_optimizer"),
    "offload_param_device": _offload("sharding.offload_param"),
    "offload_optimizer_nvme_path": _nvme,
    "offload_param_nvme_path": _nvme,
    "gradient_accumulation_steps": _number("trainer.gradient_accumulation_steps"),
    "gradient_clipping": _number("trainer.max_grad_norm"),
    "deepspeed_config_file": _file,
    "deepspeed_hostfile": _hostfile,
    **dict.fromkeys(_IDLE_DS, _idle),
}
