"""An accelerate config, and the keys of a TRL recipe that go to `accelerate launch`, with the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.importing.arguments import take_fsdp_option
from launcher.importing.conversions import (
    Taker,
    To,
    as_bool,
    as_number,
    choice,
    count,
    ignore,
    number,
    offload,
    on,
    real,
    several,
    stage,
    take_nvme,
)
from launcher.importing.reading import Effect, Given, Reading, read_yaml, shown

TOOL = "accelerate config"
_ENGINE = choice(
    {"multi_gpu": "ddp", "deepspeed": "deepspeed", "fsdp": "fsdp", "no": "ddp", "false": "ddp"},
    ", which nothing here starts",
    "MULTI_GPU, DEEPSPEED, FSDP and NO are read",
)
_PRECISION = choice(
    {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"},
    ", which nothing here trains with",
    "no, bf16 or fp16",
)
_RANK_KEYS = (
    "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "same_network",
    "main_training_function", "debug", "enable_cpu_affinity", "command_file", "commands", "role", "tee",
    "log_dir", "monitor_interval", "quiet", "no_python", "num_cpu_threads_per_process",
    "tpu_env", "tpu_name", "tpu_zone", "tpu_vm", "tpu_use_sudo", "downcast_bf16",
)  # fmt: skip
_OF_KIND = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP"}
_OTHER_ENGINES = (
    "megatron_lm_config", "fp8_config", "mpirun_config", "use_megatron_lm", "tpu", "use_mps_device",
)  # fmt: skip
# Keys that accelerate refuses together with deepspeed_config_file.
_IN_FILE = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
    "gradient_clipping", "zero3_save_16bit_model",
)  # fmt: skip


def is_config(data: Any) -> bool:
    """Whether a mapping is an accelerate config."""
    return isinstance(data, dict) and ("distributed_type" in data or "compute_environment" in data)


def read(text: str, file: str) -> Reading:
    """Read a config. Raises RecipeError if it is no YAML mapping."""
    reading, document = read_yaml(text, file, TOOL)
    data = document.data
    kind = str(data.get("distributed_type")).upper().rpartition(".")[2]
    for key, value in data.items():
        given = Given(key, value, document.lines.get(key))
        if key in _BLOCKS and isinstance(value, Mapping):
            reading.know(key)
            for name, item in value.items():
                _take_inner(reading, Given(f"{key}.{name}", item, document.lines.get(f"{key}.{name}")), kind)
        else:
            take_option(reading, given)
    if kind == "DEEPSPEED":
        finish_deepspeed(reading, document.lines.get("distributed_type"))
        _check_file(reading, data, document.lines)
    return reading


def take_option(reading: Reading, given: Given) -> None:
    """Take one top-level key, or option of `accelerate launch`."""
    plain, value = given.name.replace("-", "_"), given.value
    prefix = next((prefix for prefix in _PREFIXES if plain.startswith(prefix)), None)
    if plain in _OPTIONS and plain not in _DEEPSPEED and value in (None, {}, []):
        reading.know(given.name)
    elif plain in _OPTIONS:
        _OPTIONS[plain](reading, given)
    elif plain in _OTHER_ENGINES:
        if (value in (None, {}) and plain.endswith("_config")) or as_bool(value) is False:
            reading.know(given.name)
        else:
            reading.refuse(given, "is another engine; the engines here are DeepSpeed, FSDP and DDP")
    elif prefix is not None:
        _PREFIXES[prefix](reading, given)
    else:
        reading.drop(given, Effect.NONE, "no key of accelerate 1.15, which refuses it")


def is_option(name: str) -> bool:
    """Whether accelerate launch has such an option."""
    return name in (*_OPTIONS, "use_megatron_lm") or name.startswith(tuple(_PREFIXES))


def finish_deepspeed(reading: Reading, line: int | None) -> None:
    """accelerate's default stage, where the file has neither one nor a DeepSpeed file."""
    if not reading.names:
        reading.default("sharding.zero_stage", 2, "zero_stage", line=line)


def _take_inner(reading: Reading, given: Given, kind: str) -> None:
    """One key of a block."""
    block = given.name.partition(".")[0]
    if given.value is None:
        reading.know(given.name)
    elif _OF_KIND.get(block, kind) != kind:
        reading.drop(given, Effect.NONE, f"distributed_type is {kind}")
    else:
        _BLOCKS[block](reading, given)


def _of_deepspeed(reading: Reading, given: Given) -> None:
    key = given.name.rpartition(".")[2]
    if key in _DEEPSPEED:
        _DEEPSPEED[key](reading, given)
    else:
        reading.drop(given, Effect.NONE, "no key of accelerate 1.15, which ignores it there")


def _check_file(reading: Reading, data: Mapping[str, Any], lines: Mapping[str, int]) -> None:
    """accelerate refuses a setting that is both in its file and in DeepSpeed's."""
    block = data.get("deepspeed_config")
    if not isinstance(block, Mapping) or not block.get("deepspeed_config_file"):
        return
    twice = [f"deepspeed_config.{key}" for key in _IN_FILE if block.get(key) not in (None, "auto")]
    if str(data.get("mixed_precision")).lower() in ("bf16", "fp16"):
        twice.append("mixed_precision")
    where = lines.get("deepspeed_config.deepspeed_config_file")
    message = f"is given together with deepspeed_config_file (line {where}), which accelerate refuses"
    for key in twice:
        reading.refuse(Given(key, None, lines.get(key)), message, "keep it in one of the two")


def _gpu_ids(reading: Reading, given: Given) -> None:
    if str(given.value).lower() == "all":
        reading.know(given.name)
    else:
        hint = f"set CUDA_VISIBLE_DEVICES={shown(given.value)} in the shell that starts the run"
        reading.drop(given, Effect.NONE, "which devices of a node are used", hint)


def _restarts(value: Any) -> int | None:
    number = as_number(value)
    return number if isinstance(number, int) and number > 0 else None


def _file(reading: Reading, given: Given) -> None:
    reading.know(given.name)
    if str(given.value).lower() != "none":
        reading.name_file(str(given.value), given.line)


def _option_of(prefix: str, rows: Mapping[str, Taker], reason: str) -> Taker:
    """What takes the options of a block: `rows` by their names without the prefix, others for one reason."""

    def take(reading: Reading, given: Given) -> None:
        plain = given.name.rpartition(".")[2].replace("-", "_").removeprefix(prefix)
        reading.know(given.name)
        if plain in rows:
            rows[plain](reading, given)
        elif as_bool(given.value) is not False and (as_number(given.value) != 1 or plain[:3] != "dp_"):
            reading.drop(given, Effect.NONE, reason)

    return take


def _backend(reading: Reading, given: Given) -> None:
    if str(given.value).upper() not in ("NO", "FALSE"):
        reading.take("trainer.torch_compile", True, given)
        reading.take("trainer.torch_compile_backend", str(given.value).lower(), given)


_parallel = _option_of(
    "parallelism_config_",
    {name: To(f"sharding.{name}", several, effect=Effect.NONE) for name in ("tp_size", "cp_size", "sp_size")},
    "how the same work is distributed over the devices",
)
_dynamo = _option_of(
    "dynamo_",
    {
        "backend": _backend,
        "mode": To("trainer.torch_compile_mode", lambda value: None if value == "default" else value),
    },
    "speed only: torch.compile decides it here",
)
_BLOCKS: dict[str, Taker] = {
    "deepspeed_config": _of_deepspeed,
    "fsdp_config": take_fsdp_option,
    "parallelism_config": _parallel,
    "dynamo_config": _dynamo,
}
_PREFIXES: dict[str, Taker] = {
    "fsdp_": take_fsdp_option,
    "parallelism_config_": _parallel,
    "dynamo_": _dynamo,
    "tpu_": ignore,
}
_DEEPSPEED: dict[str, Taker] = {
    "zero_stage": To("sharding.zero_stage", stage),
    "offload_optimizer_device": To("sharding.offload_optimizer", offload),
    "offload_param_device": To("sharding.offload_param", offload),
    "offload_optimizer_nvme_path": take_nvme,
    "offload_param_nvme_path": take_nvme,
    "gradient_accumulation_steps": To("trainer.gradient_accumulation_steps", number),
    "gradient_clipping": To("trainer.max_grad_norm", real),
    "deepspeed_config_file": _file,
    "deepspeed_hostfile": To("launch.hostfile", str),
    # placement, loading and saving
    **dict.fromkeys(("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
                     "deepspeed_moe_layer_cls_names", "deepspeed_inclusion_filter",
                     "deepspeed_exclusion_filter"), ignore),
}  # fmt: skip
"""Keys of deepspeed_config, and options."""
_OPTIONS: dict[str, Taker] = {
    "distributed_type": To("sharding.engine", _ENGINE),
    "compute_environment": To("", choice({"local_machine": None}, ": nothing here starts jobs there")),
    "mixed_precision": To("precision", _PRECISION),
    "num_processes": To("hardware.total", count),
    "num_machines": To("hardware.num_nodes", count),
    "use_cpu": To("hardware.device", on("cpu")),
    "cpu": To("hardware.device", on("cpu")),
    "gpu_ids": _gpu_ids,
    "multi_gpu": To("sharding.engine", on("ddp")),
    "use_deepspeed": To("sharding.engine", on("deepspeed")),
    "use_fsdp": To("sharding.engine", on("fsdp")),
    "max_restarts": To("launch.max_restarts", _restarts, comment="from the last checkpoint"),
    **dict.fromkeys(("use_parallelism_config", *_RANK_KEYS), ignore),
    **_DEEPSPEED,
}
