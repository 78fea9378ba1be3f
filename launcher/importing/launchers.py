"""The options of deepspeed, accelerate launch and torchrun: how many processes, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.importing.accelerate import finish_deepspeed, take_count, take_option
from launcher.importing.arguments import as_number
from launcher.importing.found import Effect, Reading
from launcher.importing.shell import Word

Options = dict[str, tuple[Word, Word | None]]
"""Name, `-` as `_` -> its word, and its value's."""
_SHORT = {"-H": "hostfile", "-i": "include", "-e": "exclude", "-m": "module", "-q": "quiet", "-t": "tee",
          "-r": "redirects", "-h": "help"}  # fmt: skip
SWITCHES = {
    "deepspeed": (
        "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
        "bind_cores_to_rank", "quiet"),
    "accelerate": (
        "help", "quiet", "cpu", "multi_gpu", "tpu", "enable_cpu_affinity", "dynamo_use_fullgraph",
        "dynamo_use_dynamic", "dynamo_use_regional_compilation", "use_deepspeed", "use_fsdp",
        "use_parallelism_config", "use_megatron_lm", "same_network", "module", "no_python", "tpu_cluster",
        "no_tpu_cluster", "tpu_use_sudo", "downcast_bf16", "fp8_use_autocast_during_eval", "debug"),
    "torchrun": ("standalone", "module", "no_python", "run_path", "virtual_local_rank", "use_env"),
}  # fmt: skip
"""Options without a value (deepspeed 0.19, accelerate 1.15, torchrun and torch.distributed.launch)."""
_NODES_OPEN = "the number of machines is known only when the line is run"
_COUNT_OPEN = "the number of devices is known only when the line is run"


def split_options(tool: str, words: Sequence[Word]) -> tuple[Options, list[Word]]:
    """The launcher's options, and the words from the script on."""
    options: Options = {}
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "--":
        word = words[at]
        at += 1
        name, equals, text = word.text.partition("=")
        plain = _SHORT.get(name, name.lstrip("-").replace("-", "_"))
        if equals:
            options[plain] = (word, Word(text, word.line, word.open))
        elif plain in SWITCHES[tool] or at >= len(words):
            options[plain] = (word, None)
        else:
            options[plain] = (word, words[at])
            at += 1
        if plain == "module" and tool != "deepspeed":
            break
    return options, list(words[at:])


def take_launcher(reading: Reading, tool: str, options: Options) -> None:
    """Take a launcher's options."""
    _TAKERS[tool](reading, options)


def _deepspeed(reading: Reading, options: Options) -> None:
    for name, (word, value) in options.items():
        text = "" if value is None else value.text
        if value is not None and value.open:
            reading.drop(f"--{name}", text, word.line, Effect.NONE, _COUNT_OPEN)
        elif name == "hostfile":
            reading.take("launch.hostfile", text, word.line, "hostfile")
        elif name == "num_nodes":
            take_count("hardware.num_nodes")(reading, name, text, word.line)
        elif name in ("num_gpus", "num_accelerators"):
            take_count("hardware.devices_per_node")(reading, name, text, word.line)
        elif name == "include":
            _include(reading, text, word.line)
        elif name == "exclude":
            reading.drop("exclude", text, word.line, Effect.NONE, "which devices of a machine are used",
                         "set CUDA_VISIBLE_DEVICES in the shell that starts the run")  # fmt: skip
        elif name == "autotuning" and text:
            reading.refuse("autotuning", word.line, "measures, and does not train")
        else:
            reading.know(name)


def _include(reading: Reading, text: str, line: int) -> None:
    """`localhost:0,1`, or `host1:0,1@host2:0,1`."""
    hosts = [part.partition(":")[2] for part in text.split("@") if part]
    counts = {len(slots.split(",")) for slots in hosts if slots}
    reading.know("include")
    if len(counts) == 1 and all(hosts):
        reading.take("hardware.devices_per_node", counts.pop(), line, f"include: {text}")
        if len(hosts) > 1:
            reading.take("hardware.num_nodes", len(hosts), line, f"include: {text}")
    else:
        reading.drop("include", text, line, Effect.NONE, "machines with different numbers of devices")


def _accelerate(reading: Reading, options: Options) -> None:
    for name, (word, value) in options.items():
        if name == "config_file" and value is not None:
            reading.know(name)
            if value.open:
                reading.drop(f"--{name}", value.text, word.line, Effect.NEEDED, "known only when it is run",
                             "give the file as a FILE too")  # fmt: skip
            else:
                reading.name_file(value.text, word.line)
        elif name.startswith("aws_"):
            reading.drop(
                name, "" if value is None else value.text, word.line, Effect.NONE, "not for jobs here"
            )
        elif name in ("module", "help", "mpirun_hostfile", "mpirun_ccl") or name == "env":
            reading.know(name)
        elif name.startswith(("fp8_", "megatron_lm_")):
            reading.refuse(name, word.line, "asks for what nothing here trains with")
        elif value is not None and value.open:
            reading.drop(f"--{name}", value.text, word.line, Effect.NONE, "known only when the line is run")
        else:
            take_option(reading, name, True if value is None else value.text, word.line)
    line = next((word.line for word, _ in options.values()), None)
    named = "config_file" in options or "deepspeed_config_file" in options
    if reading.value("sharding.engine") == "deepspeed" and not named:
        finish_deepspeed(reading, line)
    if "config_file" not in options and "num_processes" not in options and "cpu" not in options:
        reading.drop("accelerate launch", "", line, Effect.NONE, "accelerate's own default config may have "
                     "applied (~/.cache/huggingface/accelerate/default_config.yaml)",
                     "give it as a FILE too")  # fmt: skip


def _torchrun(reading: Reading, options: Options) -> None:
    for name, (word, value) in options.items():
        text = "" if value is None else value.text
        is_open = value is not None and value.open
        if name == "nnodes":
            _nodes(reading, text, word.line, is_open=is_open)
        elif name == "nproc_per_node":
            if isinstance(as_number(text), int) and not is_open:
                take_count("hardware.devices_per_node")(reading, name, text, word.line)
            else:
                reading.drop(f"--{name}", text, word.line, Effect.NONE, _COUNT_OPEN, "name them with --on")
        elif name == "max_restarts":
            take_option(reading, name, text, word.line)
        else:
            reading.know(name)
    if "nproc_per_node" not in options:
        reading.take("hardware.devices_per_node", 1, None, "nproc_per_node: 1", default=True)


def _nodes(reading: Reading, text: str, line: int, *, is_open: bool) -> None:
    low, _, high = text.partition(":")
    number = as_number(high or low)
    reading.know("nnodes")
    if is_open or not isinstance(number, int):
        reading.drop("--nnodes", text, line, Effect.NONE, _NODES_OPEN, "name them with --on")
        return
    reading.take("hardware.num_nodes", number, line, "nnodes")
    if high and high != low:
        reading.drop("nnodes", text, line, Effect.NONE, "a run keeps its number of machines")


_TAKERS: dict[str, Callable[[Reading, Options], None]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
}
