"""Collect the facts for the planner: hardware, model configuration, profile, versions, calibration."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from launcher.engines.deepspeed import DEEPSPEED
from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import LARGEST_TEXT, is_file, read_bytes, read_text
from launcher.files.shipped import ds_configs_dir
from launcher.inputs.first_rows import find_hooks, judged_data
from launcher.inputs.model_spec import can_trace, config_with_sizes, find_spec
from launcher.machine import probe
from launcher.machine.hardware import (
    Hardware,
    device_facts,
    parse_hardware,
    probe_processor,
    with_host_memory,
)
from launcher.machine.software import installed_versions
from launcher.memory.allocator import VARIABLES
from launcher.models.lora import adapter_fields, is_all_linear, without_adapter
from launcher.models.measured_runs import Calibration, read_calibration
from launcher.models.model import ModelSpec
from launcher.models.model_config import find_model_config, local_prompts, shipped_model_config
from launcher.models.positions import longest_row, stretched
from launcher.models.text_part import image_text_types
from launcher.plan.inputs import Facts
from launcher.plan.settings import deciding_images
from launcher.planner.record import frozen_parts
from launcher.recipe.data_paths import is_url
from launcher.recipe.fields import ADAPTER_KEYS
from launcher.recipe.loading import LoadedRecipe, with_changes
from launcher.recipe.schema import Recipe
from launcher.tasks import task_named
from launcher.tasks.embedding import prompts_unused

if TYPE_CHECKING:
    from launcher.knowledge.lint.document import LintFinding
    from launcher.plan.plan import Plan
    from launcher.rows.prepared_images import PreparedImages
    from launcher.schedulers.slurm_allocation import Allocation


_HIDDEN_PEERS = (
    "each of the {0} tasks of a node sees a GPU of its own alone (--gpus-per-task, --gpu-bind: a cgroup for "
    "each): NCCL finds no NVLink or P2P between GPUs that are hidden from each other, so it sends through "
    "host memory, slower than the planned time counts, or ends with 'invalid device ordinal'; ask for "
    "--gpus-per-node={0} --gpu-bind=none, or start one task per node"
)
"""NVIDIA/nccl issues 1066, 1948. Peers that CUDA_VISIBLE_DEVICES alone hides are reached since CUDA 10.1."""


def find_hardware(recipe: Recipe, on: str | None) -> Hardware:
    """The hardware of `--on`, else of the recipe, else of the hostfile with the devices found here."""
    if on is not None:
        asked = parse_hardware(on, "--on")
    elif recipe.hardware is not None:
        asked = recipe_hardware(recipe)
    elif recipe.launch.hostfile is not None:
        from launcher.schedulers.hostfile import equal_hosts

        hosts = equal_hosts(recipe.launch.hostfile)
        asked = replace(probe.probe_hardware(), num_nodes=len(hosts), devices_per_node=hosts[0].slots)
    else:
        return _allocated(probe.probe_hardware())
    return with_host_memory(asked, probe.host_memory_bytes())


def _allocated(found: Hardware) -> Hardware:
    """What is found here, on all nodes of the Slurm step. Several tasks per node mean one per device."""
    allocation = _allocation()
    if allocation is None or allocation.step is None:
        return found
    from launcher.machine.gpus import require_gpus

    tasks = allocation.tasks_per_node[0]
    count = tasks if tasks > 1 else found.devices_per_node
    everywhere = replace(found, num_nodes=len(allocation.hosts), devices_per_node=count)
    if tasks > 1 and not found.is_cpu and len(require_gpus().gpus) < tasks:
        everywhere = replace(everywhere, notes=(*found.notes, _HIDDEN_PEERS.format(tasks)))
    return with_host_memory(everywhere, probe.host_memory_bytes())


def _allocation() -> Allocation | None:
    """The Slurm job that this process is in."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    from launcher.schedulers.slurm_allocation import read_allocation

    return read_allocation(os.environ)


def usable_cores() -> int:
    """Cores of this node that a run may use; with one Slurm task per device, the cores of all tasks."""
    own, allocation = probe.own_cores(), _allocation()
    if allocation is None or allocation.step is None or allocation.tasks_per_node[0] == 1:
        return own
    of_job = os.environ.get("SLURM_CPUS_ON_NODE", "")
    most = int(of_job) if of_job.isdigit() else os.cpu_count() or own
    return max(own, min(own * allocation.tasks_per_node[0], most))  # each task may be bound to its own cores


def operator_warnings(plan: Plan) -> list[str]:
    """What this machine lacks for the operators that DeepSpeed compiles for the plan, and for NVMe.

    Nothing under WebAssembly, where no run starts and the checks cannot be imported.
    """
    if plan.job.engine is not DEEPSPEED or sys.platform == "emscripten":
        return []
    from launcher.knowledge.doctor.needs import cuda_ops, nvme_path

    if nvme_path(plan) is None and not cuda_ops(plan):
        return []
    from launcher.execute.start_checks import missing_for_operators  # few plans need the checks

    return missing_for_operators(plan)


def recipe_hardware(recipe: Recipe) -> Hardware:
    """The hardware section of the recipe."""
    section = recipe.hardware
    assert section is not None, "called for recipes with a hardware section"
    name, size, capability = device_facts(section.device)
    return Hardware(section.num_nodes, section.devices_per_node, name, size, capability)


def model_config(
    recipe: Recipe, *, allow_network: bool, given: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> tuple[str, dict[str, Any], str]:
    """Name of the model, its configuration, and where that was found. given: as of `gather`."""
    model = recipe.model
    if isinstance(model.config, dict):
        return str(model.config.get("model_type")), model.config, "the recipe"
    if isinstance(model.config, str):
        config = shipped_model_config(model.config)
        if config is None:
            message = f"no shipped model fact is named {model.config!r}"
            hint = "give the configuration itself, or a name from launcher/models/data/models.json"
            raise RecipeError(Problem("unknown-model-fact", message, path="model.config", hint=hint))
        return model.config, config, "shipped facts"
    assert model.name_or_path is not None, "the schema asks for one of the two"
    if model.name_or_path in given:
        config, origin = given[model.name_or_path], "a given configuration"
    else:
        config, origin = find_model_config(
            model.name_or_path,
            gguf_file=model.gguf_file,
            revision=model.revision,
            cache_dir=model.cache_dir,
            allow_network=allow_network,
        )
    check_stored_quantization(recipe, config)
    if model.rope_parameters is not None:
        config = _with_positions(config, model.rope_parameters)
    return model.name_or_path, config, origin


def _with_positions(config: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with `model.rope_parameters` in it, or in its text model's."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return stretched(config, asked)
    text = (image_text_types().get(str(config.get("model_type"))) or {}).get("text")
    return {**config, "text_config": stretched({"model_type": text, **inner}, asked)}


def check_stored_quantization(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """RecipeError where the weights of a checkpoint are quantised otherwise than the recipe says.

    transformers loads them as they are stored; memory and kernels would be those of another model.
    """
    name, stored, path = recipe.model.name_or_path, config.get("quantization_config"), "model.quantization"
    if not isinstance(stored, Mapping):
        return
    method = stored.get("quant_method")

    def refusal(path: str, message: str, hint: str) -> RecipeError:
        return RecipeError(Problem("checkpoint-quantized", message, path=path, hint=hint))

    bits = [bits for bits in (4, 8) if stored.get(f"load_in_{bits}bit")]
    if method != "bitsandbytes" or not bits:
        message = f"the weights of {name} are stored quantised ({method}), and cannot be trained here"
        hint = f"name the 16-bit or 32-bit checkpoint that it was made from, and quantise it with `{path}`"
        raise refusal("model.name_or_path", message, hint)
    kind = "int8" if bits == [8] else str(stored.get("bnb_4bit_quant_type", "fp4"))
    asked = recipe.model.asked_quantization()
    if asked is None or asked.type != kind:
        said = recipe.model.quantization if asked is None else asked.type
        raise refusal(
            path, f"is {said}, but the weights of {name} are stored as {kind}", f"write type: {kind}"
        )
    double = bool(stored.get("bnb_4bit_use_double_quant"))
    if kind != "int8" and asked.double_quant != double:
        other = "true" if double else "false"
        message = f"differs from the weights of {name}, which are stored with double_quant: {other}"
        raise refusal(f"{path}.double_quant", message, f"write double_quant: {other}")


def load_profile(recipe: Recipe) -> dict[str, Any] | None:
    """The base DeepSpeed config: a file, or a shipped one by name.

    Raises RecipeError if there is none, or with all errors that `lint` finds in it.
    """
    name = recipe.sharding.config
    if name is None:
        return None
    path = Path(name)
    if not is_file(path):
        path = ds_configs_dir() / f"{Path(name).stem}.json"
    try:
        raw = read_bytes(path, LARGEST_TEXT)
    except FileNotFoundError:
        shipped = ", ".join(sorted(p.stem for p in ds_configs_dir().glob("*.json")))
        message, hint = f"no such file: {name}", f"a file, or one of the shipped profiles: {shipped}"
        raise RecipeError(Problem("profile-missing", message, path="sharding.config", hint=hint)) from None
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise RecipeError(Problem("profile-unreadable", message, path="sharding.config")) from None
    from launcher.knowledge.lint.check import read_profile

    profile, wrong = read_profile(raw, str(path))
    if wrong:
        raise RecipeError([_refused(finding) for finding in wrong])
    return profile


def _refused(finding: LintFinding) -> Problem:
    """A finding of `lint` as a problem of the recipe."""
    unread = finding.code.startswith("ds-json") or finding.code == "ds-not-an-object"
    return Problem(
        "profile-unreadable" if unread else finding.code,
        f"column {finding.column}: {finding.message}",
        file=finding.file,
        line=finding.line,
        path="sharding.config",
        hint=finding.hint or ("it must be strict JSON" if unread else None),
    )


def _with_chat_template(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with the text of the chat template instead of its file."""
    template, path = loaded.recipe.model.chat_template, "model.chat_template"
    if template is None:
        return loaded
    if not Path(template).is_absolute():
        if "{" in template:
            return loaded
        hint = "relative paths are relative to the recipe; an inline template contains {{ … }}"
        message = f"no such file: {template}"
        raise RecipeError(Problem("chat-template-missing", message, path=path, hint=hint))
    try:
        text = read_text(template, LARGEST_TEXT)
    except (OSError, ValueError) as error:
        message = f"cannot read {template}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        hint = "name a file, or write the template itself"
        raise RecipeError(Problem("chat-template-unreadable", message, path=path, hint=hint)) from None
    model = loaded.recipe.model.model_copy(update={"chat_template": text})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"model": model}))


def _hook_facts(recipe: Recipe) -> dict[str, Any]:
    """The fields of Facts about the file of `python:`."""
    found = find_hooks(recipe)
    return {} if found is None else {"hooks": found.names, "hooks_digest": found.digest}


def find_images(recipe: Recipe) -> PreparedImages | None:
    """Statistics of the images in this recipe's rows; None if they are not prepared."""
    if not task_named(recipe.task).sees_images:
        return None
    data, model = recipe.data, recipe.model
    settings = {name: getattr(model if name.startswith("model.") else data, name.partition(".")[2], None)
                for name in deciding_images()}  # fmt: skip
    settings |= {"task": recipe.task, "python.file": recipe.python}
    sources = settings["data.train"] = [source.model_dump() for source in data.train]
    if any(is_url(source.path) for source in data.train):  # no plan reads them
        return None
    from launcher.rows import prepared_images  # few tasks have them
    from launcher.rows.sources import source_files

    try:
        files = [str(file) for source in sources for file in source_files(source)]
    except (RecipeError, OSError, ValueError, KeyError):  # missing rows, which a run reports
        return None
    return prepared_images.find(settings, files, installed_versions().get("transformers", ""))


def find_calibration(hardware: Hardware) -> Calibration:
    """The calibration from earlier runs on the same kind of device."""
    return read_calibration(probe.calibration_text(), hardware, str(probe.calibration_file()))


def _rehearsal(
    loaded: LoadedRecipe, on: str | None, config: Mapping[str, Any]
) -> tuple[LoadedRecipe, Hardware]:
    """The recipe and the hardware of `--tiny`."""
    from launcher.planner.tiny import tiny_hardware, tiny_on_cpu, tiny_on_gpus, tiny_recipe

    asked = find_hardware(loaded.recipe, on) if on or loaded.recipe.hardware else None
    if asked is not None and asked.is_cpu:  # whatever else is here
        here = with_host_memory(Hardware(1, 1, "cpu", None, None), probe.host_memory_bytes())
    else:
        here = probe.probe_hardware()
    hardware = tiny_hardware(asked, here, loaded.recipe)
    loaded = tiny_recipe(loaded, config)
    return (tiny_on_cpu(loaded) if hardware.is_cpu else tiny_on_gpus(loaded, hardware)), hardware


def _warnings(recipe: Recipe, spec: ModelSpec, calibration: Calibration | None) -> Iterator[str]:
    longest, asked = longest_row(spec.config, spec.max_position_embeddings), recipe.data.max_length
    if longest and task_named(recipe.task).reads_tokens and asked > longest:
        hint = "" if recipe.model.name_or_path is None else _stretch_hint(spec, asked)
        yield f"data.max_length {asked} exceeds the model's {longest} positions{hint}"
    if any(kind.scans for kind in spec.layout.stacks):
        yield (
            f"linear-attention layers of {spec.model_type} are counted as torch's operations, which run "
            "where flash-linear-attention, mamba-ssm and causal-conv1d are not installed; with their kernels "
            "they should hold less, which was not measured"
        )
    if (
        recipe.adapter is not None
        and recipe.adapter.path is None
        and is_all_linear(adapter_fields(recipe.adapter.model_dump())["target_modules"])
    ):
        yield from without_adapter(spec)
    if unused := _unused_prompts(recipe):
        yield unused
    if calibration is not None and calibration.skipped:
        yield f"{calibration.source}: skipped {calibration.skipped} line(s) that are not from this version"


def _stretch_hint(spec: ModelSpec, asked: int) -> str:
    """The value of `model.rope_parameters` that would be enough, for a model that takes it."""
    try:
        native = stretched(spec.config, {"rope_type": "yarn", "factor": 1.0})["max_position_embeddings"]
    except RecipeError:
        return ""
    factor = 2.0 ** math.ceil(math.log2(asked / native))
    return f"; `model.rope_parameters: {{rope_type: yarn, factor: {factor}}}` stretches them"


def _unused_prompts(recipe: Recipe) -> str | None:
    """The warning of prompts of the checkpoint that training leaves out, of a task that has any."""
    task, model = task_named(recipe.task), recipe.model
    if task.section is None or "prompts" not in task.decides_samples or model.name_or_path is None:
        return None
    given = getattr(getattr(recipe, task.section), "prompts", None)
    prompts = local_prompts(model.name_or_path, model.revision, model.cache_dir)
    return prompts_unused(prompts) if prompts and given is None else None


def gather(
    loaded: LoadedRecipe,
    on: str | None,
    *,
    tiny: bool = False,
    trace: bool = False,
    allow_network: bool = True,
    allow_torch: bool = True,
    configs: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> tuple[LoadedRecipe, Facts]:
    """The recipe to plan, rewritten for `--tiny`, and all facts about it.

    configs: configurations by the names that recipes have for their models, before any other place. trace:
    trace the real model, which model families without a closed form always need.
    """
    loaded = _with_chat_template(loaded)
    found = _found_model(
        loaded, on, tiny, allow_network=allow_network, allow_torch=allow_torch, given=configs
    )
    loaded, hardware, spec, note, warnings = found
    calibration = None if tiny else find_calibration(hardware)  # a tiny model differs from real ones
    warnings += [*([] if note is None else [note]), *_warnings(loaded.recipe, spec, calibration)]
    facts = Facts(
        hardware=hardware,
        model=spec,
        versions=installed_versions(),
        profile=load_profile(loaded.recipe),
        cpu_cores=usable_cores(),
        processor=probe_processor() if hardware.is_cpu else None,
        python=sys.executable,
        allocator=_allocator(),
        **_hook_facts(loaded.recipe),
        warnings=(*hardware.notes, *warnings),
        tiny=tiny,
        # of another node, only the devices are known
        host_bytes=probe.host_memory_bytes() if on is None and loaded.recipe.hardware is None else None,
        calibration=calibration,
        images=None if tiny else find_images(loaded.recipe),
    )
    if trace or (note is not None and not tiny and (spec.foreign or (allow_torch and can_trace()))):
        from launcher.inputs.model_trace import with_trace  # rarely needed

        facts = with_trace(loaded, facts, runs_code=trace)
    return loaded, facts


def _found_model(
    loaded: LoadedRecipe,
    on: str | None,
    tiny: bool,
    *,
    allow_network: bool,
    allow_torch: bool,
    given: Mapping[str, dict[str, Any]],
) -> tuple[LoadedRecipe, Hardware, ModelSpec, str | None, list[str]]:
    """The recipe as it is planned, the hardware, the model, the note of one that must be traced, and what is
    to be said of the rows. Arguments as of `gather`."""
    if task_named(loaded.recipe.task).made_by_hooks:
        from launcher.inputs.own_model import made_model  # few recipes need it

        if isinstance(loaded.recipe.model.config, str):
            config = model_config(loaded.recipe, allow_network=False)[1]
            loaded = with_changes(loaded, {"model.config": config}, None)
        loaded, spec, note = made_model(loaded, tiny=tiny, ask_torch=allow_torch)
        return loaded, find_hardware(loaded.recipe, on), spec, note, []
    name, config, origin = model_config(loaded.recipe, allow_network=allow_network, given=given)
    if tiny:
        config = dict(config_with_sizes(name, config, loaded.recipe.task, ask=allow_torch))
        loaded, hardware = _rehearsal(loaded, on, config)
        assert isinstance(loaded.recipe.model.config, dict), "tiny_recipe writes one"
        name, config, origin = f"{name} (tiny)", loaded.recipe.model.config, "--tiny"
    else:
        hardware = find_hardware(loaded.recipe, on)
    warnings = [] if tiny else [one for found in judged_data(loaded, on) for one in found]
    return loaded, hardware, *_find_spec(loaded.recipe, name, config, origin, ask=allow_torch), warnings


def _allocator() -> dict[str, str]:
    """Options of torch's allocator in the shell."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def _find_spec(
    recipe: Recipe, name: str, config: dict[str, Any], origin: str, *, ask: bool
) -> tuple[ModelSpec, str | None]:
    adapter = None
    if recipe.adapter is not None and recipe.adapter.path is None:
        adapter = {k: v for k, v in recipe.adapter.model_dump().items() if k not in ADAPTER_KEYS}
    freeze = frozen_parts(recipe) if task_named(recipe.task).sees_images else ()
    return find_spec(name, config, origin, recipe.task, ask=ask, adapter=adapter, freeze=freeze)


def check_model(recipe: Recipe) -> None:
    """Raise RecipeError if the model family or a module that the adapter names is unknown. No network."""
    if task_named(recipe.task).made_by_hooks:
        return
    name, config, origin = model_config(recipe, allow_network=False)
    _find_spec(recipe, name, config, origin, ask=False)
