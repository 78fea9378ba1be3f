"""No key of the recipe is ignored: each is a setting that the worker or the written files are made from.

Counted are real reads alone, by syntax: `job.data.x`, `plan.data.x`, `job.fields(job.adapter)`, and for what
is inside a setting `source["x"]` or `source.get("x")`. A name that is only in a message is not read.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from factories import facts, recipe
from pydantic import BaseModel

from launcher.errors import DoesNotFit
from launcher.machine.hardware import parse_hardware
from launcher.planner.elastic import plan_on
from launcher.planner.planner import make_plan
from launcher.recipe.keys import SHARED, shared_keys
from launcher.recipe.schema import Recipe
from launcher.render.bundle import render
from launcher.schedulers import queue_named
from launcher.schedulers.queue import PlannedRun, Submission

ROOT = Path(__file__).resolve().parents[1]
BASE = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: rows.jsonl}], eval: {split: 0.5}, max_length: 512}
trainer: {max_steps: 10}
"""
# Of a job that `submit` makes: read by the scripts alone, see test_every_key_of_a_scheduler_changes_a_file.
SLURM_JOB = {
    "partition": "gpu",
    "account": "ab123",
    "qos": "high",
    "reservation": "r",
    "time": "30",
    "constraint": "a100",
    "cpus_per_task": "4",
    "mem": "64G",
    "nodelist": "n1",
    "exclude": "n2",
    "options": "{exclusive: true}",
}
SLURM = {
    **{f"launch.slurm.{key}": value for key, value in SLURM_JOB.items()},
    **{f"launch.slurm.prepare.{key}": value for key, value in SLURM_JOB.items()},
    "launch.slurm.prepare": "false",
    "launch.slurm.gpus_per_node": "a100:8",
    "launch.slurm.gres": "gpu:8",
    "launch.slurm.setup": "[module load cuda]",
    "launch.slurm.array_limit": "2",
}
KUBERNETES = {
    f"launch.kubernetes.{key}": value
    for key, value in {
        "kind": "job",
        "image": "other",
        "runs": "/data/others",
        "volumes": "[{claim: other, path: /data}]",
        "secrets": "[hf]",
        "image_pull_secrets": "[registry]",
        "namespace": "team",
        "cpus": "4",
        "memory": "64Gi",
        "shm": "16Gi",
        "device": "amd.com/gpu",
        "node_selector": "{gpu: a100}",
        "tolerations": "[{operator: Exists}]",
        "service_account": "trainer",
        "priority_class": "high",
        "labels": "{team: a}",
        "setup": "[module load cuda]",
        "prepare": "false",
        "restarts": "1",
    }.items()
}
SKYPILOT = {
    f"launch.skypilot.{key}": value
    for key, value in {
        "infra": "aws",
        "accelerator": "H100",
        "spot": "false",
        "image": "docker:i",
        "cpus": "8",
        "memory": "64",
        "disk": "512",
        "mounts": "{/data: volume}",
        "runs": "/data/runs",
        "secrets": "[HF_TOKEN]",
        "setup": "[nvidia-smi]",
        "restarts": "1",
    }.items()
}
RAY = {
    f"launch.ray.{key}": value
    for key, value in {
        "cpus_per_node": "96",
        "resources": "{rack: 1}",
        "runtime_env": "{pip: [x]}",
        "python": "python3.12",
        "wait_seconds": "60",
        "prepare": "false",
    }.items()
}
OF_QUEUES = {**SLURM, **KUBERNETES, **SKYPILOT, **RAY}
# Which cluster is asked: tests/process/test_kubernetes.py, tests/cluster/test_ray.py.
NO_FILE = {"launch.kubernetes.context", "launch.ray.address"}
GENERATION = {
    "num_generations": "4",
    "max_completion_length": "100",
    "temperature": "0.5",
    "top_p": "0.9",
    "top_k": "10",
    "min_p": "0.1",
    "repetition_penalty": "1.1",
    "backend": "vllm-colocate",
}


def kinds(annotation: Any) -> list[Any]:
    """The parts of a union, and what a list or an annotation holds."""
    arguments = get_args(annotation)
    if not arguments or isinstance(arguments[0], str):
        return [annotation]
    return [kind for argument in arguments if argument is not type(None) for kind in kinds(argument)]


def another(name: str) -> str:
    """Another value of a shared key than its default, as YAML has it."""
    section, _, key = name.rpartition(".")
    kind = SHARED[section]
    default, annotation = getattr(kind, key), get_annotations(kind)[key]
    told = get_args(annotation)[0]
    for choices in (told, *get_args(told)):
        if get_origin(choices) is Literal:
            return next(one for one in get_args(choices) if one != default)
    if isinstance(default, bool):
        return str(not default).lower()
    if isinstance(default, (int, float)):
        return str(default / 2 if default < 1 and default else default + 1)
    return "[other]" if default == [] else "2" if int in kinds(told) else "other"


# A value that differs from the default, for each leaf of the schema.
CHANGED: dict[str, str] = {
    **{name: another(name) for name, _ in shared_keys()},
    "task": "sequence-classification",
    "model.config": "huggyllama/llama-7b",
    "model.gguf_file": "a.gguf",
    "model.quantization": "nf4",
    "model.quantization.type": "nf4",
    "model.quantization.double_quant": "false",
    "model.quantization.compute_dtype": "float16",
    "model.kbit_norms": "bfloat16",
    "model.dtype": "float32",
    "model.attn_implementation": "eager",
    "model.loss": "full",
    "model.compile_blocks": "true",
    "model.rope_parameters": "{rope_type: linear, factor: 2}",
    "model.vocab_multiple": "128",
    "model.device_map": "auto",
    "model.freeze": "[vision]",
    "model.image_sizes": "{max_pixels: 100000}",
    "adapter.type": "lora",
    "adapter.path": "/tmp/adapter",
    "adapter.cast_input_dtype_enabled": "true",
    "adapter.autocast_adapter_dtype": "false",
    "data.train": "[{path: other.jsonl}]",
    "data.eval": "[{path: other.jsonl}]",
    "data.eval.split": "0.25",
    "data.metrics": "[perplexity]",
    "data.problem_type": "regression",
    "data.padding_free": "false",
    "data.pad_to_multiple_of": "32",
    "data.fim": "{rate: 0.5}",
    "data.fim.rate": "0.25",
    "data.fim.spm_rate": "0.25",
    "embedding.loss": "AnglELoss",
    "embedding.negatives": "2",
    "embedding.scale": "50.0",
    "embedding.triplet_margin": "1.0",
    "embedding.mini_batch_size": "8",
    "embedding.gather_across_devices": "true",
    "embedding.matryoshka_dims": "[64]",
    "embedding.pooling": "cls",
    "embedding.normalize": "false",
    "embedding.prompts.query": "'q: '",
    "embedding.prompts.document": "'d: '",
    "embedding.batch_sampler": "batch_sampler",
    "reranker.loss": "MSELoss",
    "reranker.documents": "4",
    "precision": "fp32",
    "sharding.engine": "deepspeed",
    "sharding.zero_stage": "3",
    "sharding.offload_optimizer": "cpu",
    "sharding.offload_param": "cpu",
    "sharding.offload_activations": "cpu",
    "sharding.config": "zero2",
    "global_batch_size": "128",
    "trainer": "{max_steps: 10, weight_decay: 0.1}",
    "hardware.num_nodes": "2",
    "hardware.devices_per_node": "2",
    "hardware.device": "A100-40GB",
    "launch.launcher": "accelerate",
    "launch.env": "{NCCL_DEBUG: INFO}",
    "launch.min_nodes": "1",
    "launch.max_nodes": "4",
    "launch.hostfile": "hosts",
    "fixes.disable": "[use-cache-off]",
    **OF_QUEUES,
    "reward": "[{function: exact_match}]",
    **{f"generation.{key}": value for key, value in GENERATION.items()},
    "early_stopping.patience": "2",
    "early_stopping.threshold": "0.5",
    "python": "hooks.py",
    "runtime.mirror": "s3://bucket/runs",
}
# Reads whose name is not written at the place of the call: (file, what is read there) -> the names.
SPOTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("train/data/prepare.py", "name"): (),  # names the cache, which is no use of a value
    ("render/bundle.py", "key"): (),  # plan.json itself
}
# Sections that are read as a whole: by `fields`, and launch.env by render/command.py.
SECTIONS = ("trainer.", "adapter.", "fsdp.", "launch.env.")
# Settings that only say what follows from others.
SAID = {
    "global_batch_size": "the product of the batch, which is rendered",
    "runtime.training_arguments_first": "the worker always makes them first",
}
# Names by which the worker holds a source, and a setting that is a mapping.
SOURCES = ("source", "settings")
MAPPINGS = (*SOURCES, "fim", "held_out", "asked", "prompts")


LISTED = ("RemoteVolume", "DataSource", "RewardFunction")


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of all fields of a section and of the sections inside it."""
    found = []
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        inner = [kind for kind in kinds(field.annotation) if isinstance(kind, type)]
        sections = [kind for kind in inner if issubclass(kind, BaseModel) and kind.__name__ not in LISTED]
        if not sections or len(kinds(field.annotation)) - len(sections) > 1:
            found.append(dotted)
        for section in sections:
            found += leaves(section, dotted + ".")
    return found


HOLDERS = ("job", "self", "self._job", "self.job", "plan", "planned", "own")
WHOLE = {"precision", "seed", "tiny", "on_oom", "task", "reward"}
"""Settings without a section."""


def holds(node: ast.expr) -> bool:
    return ast.unparse(node) in HOLDERS or ast.unparse(node).endswith((".job", ".plan"))


def calls(code: str) -> Iterator[tuple[str, ast.expr]]:
    """(at | fields, its argument) of every read of settings by text, or of a whole section."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder = node.func.value
            named = holder.value if ast.unparse(holder).endswith(".settings") else holder  # type: ignore[attr-defined]
            if node.func.attr in ("at", "fields") and holds(named):
                yield node.func.attr, node.args[0]


def settings_read(code: str, task: str = "") -> set[str]:
    """Dotted names that are read as attributes, or by a name at the place of the call.

    task: the one whose module this is, which gets its own section as `section`.
    """
    found = {
        str(argument.value)
        for kind, argument in calls(code)
        if kind == "at" and isinstance(argument, ast.Constant)
    }
    tree = ast.parse(code)
    names = {  # `trainer = plan.trainer`, from which fields are read then
        target.id: node.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and holds(node.value.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    } | ({"section": task} if task else {})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        section = node.value
        if holds(section) and node.attr in WHOLE:
            found.add(node.attr)
        elif isinstance(section, ast.Attribute) and holds(section.value) and not holds(section):
            found |= {f"{section.attr}.{name}" for name in (node.attr, node.attr.removesuffix("_type"))}
        elif isinstance(section, ast.Name) and section.id in names:
            found.add(f"{names[section.id]}.{node.attr}")
    return found


def fields_read(code: str, holders: Iterable[str]) -> set[str]:
    """Keys taken out of a name (or an attribute) in `holders`, by subscript or `.get`."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            holder, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            holder, key = node.func.value, node.args[0]
        else:
            continue
        name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", None)
        if name in holders and isinstance(key, ast.Constant):
            found.add(key.value)
    return found


def modules(*folders: str) -> dict[str, str]:
    """File below launcher/ -> its code."""
    base = ROOT / "launcher"
    files = [file for folder in folders for file in sorted((base / folder).rglob("*.py"))]
    return {str(file.relative_to(base)): file.read_text("utf-8") for file in files}


def all_read(found: dict[str, str]) -> set[str]:
    tasks = {file: Path(file).stem if Path(file).parent.name == "tasks" else "" for file in found}
    return {name for file, code in found.items() for name in settings_read(code, tasks[file])} | {
        name for names in SPOTS.values() for name in names
    }


def is_read(name: str, read: set[str]) -> bool:
    return name in read or name.startswith(SECTIONS)


# `run` itself does what on_oom and launch.max_restarts say: a worker that is gone cannot; and it watches.
OF_THE_RUN = ("execute/attempts.py", "execute/fewer_nodes.py", "execute/start.py")
# The engine of a plan renders its configuration; `engine_of` finds it.
RENDERED = ("engines/__init__.py", "engines/deepspeed_config.py")
# The encoders of the worker ask whether the section fits a row.
ROW_CHECKS = ("tasks/embedding.py", "tasks/reranker.py")
OTHERS = modules("execute", "engines", "tasks")
NAMED = (*OF_THE_RUN, *RENDERED, *ROW_CHECKS)
READERS = {**modules("train", "rows", "render"), **{name: OTHERS[name] for name in NAMED}}


@cache  # not at import: seconds of CPU in every process that collects
def settings_of_worker() -> set[str]:
    return all_read(READERS)


def test_every_read_is_by_a_written_name_or_listed():
    spots = {
        (file, ast.unparse(argument))
        for file, code in READERS.items()
        for _, argument in calls(code)
        if not isinstance(argument, (ast.Constant, ast.Attribute))
    }
    assert spots == set(SPOTS), "list the read with its names in SPOTS"


def test_sections_are_read_whole():
    named = {
        argument.attr
        for code in READERS.values()
        for kind, argument in calls(code)
        if kind == "fields" and isinstance(argument, ast.Attribute)
    }
    assert {f"{name}." for name in named - {"deepspeed"}} | {"launch.env."} == set(SECTIONS)
    assert "dict(plan.launch.env)" in READERS["render/command.py"]


def test_a_name_that_is_only_written_somewhere_is_not_read():
    code = """
problem = Problem("x", path="data.fake")
names = ("data.fake", "data.other")
kept = {"data.fake": other.data.fake, "weight": row["weight"], "name": row.get("name")}
real = job.data.real or self._job.data.more
fields = source["path"], chosen.settings.get("split"), settings.get("revision")
settings["format"] = source
"""
    assert settings_read(code) == {"data.real", "data.more"}
    assert fields_read(code, SOURCES) == {"path", "split", "revision"}
    assert not is_read("data.fake", settings_of_worker())


@pytest.mark.parametrize(
    "name", ["data.num_proc", "data.max_truncated", "data.overlong", "model.add_tokens", "python.file"]
)
def test_a_read_that_is_taken_out_is_missed(name):
    """The name stays in the code, as it does in messages."""
    without = {file: code.replace(f"job.{name}", f'str("{name}")') for file, code in READERS.items()}
    assert any(name in code for code in without.values())
    assert is_read(name, settings_of_worker())
    assert not is_read(name, all_read(without))


def test_the_table_has_every_leaf_of_the_schema():
    # a name, a list, a whole section, false
    short_forms = {"model.quantization", "data.eval", "data.fim", "launch.slurm.prepare"}
    assert set(leaves(Recipe)) == (set(CHANGED) - short_forms) | NO_FILE


def test_the_worker_reads_every_field_of_a_source():
    from launcher.recipe.schema import DataSource

    read = {name for code in modules("train", "rows").values() for name in fields_read(code, SOURCES)}
    assert set(DataSource.model_fields) <= read


def planned(folder: Path, text: str, **facts_changes: Any) -> dict[str, Any]:
    loaded = recipe(folder, text)
    on = "8xA100-80GB"
    if loaded.recipe.hardware is not None:
        section = loaded.recipe.hardware
        on = f"{section.num_nodes}x{section.devices_per_node}x{section.device}"
    if loaded.recipe.model.device_map:
        on = "A100-80GB"
    if loaded.recipe.sharding.config:
        facts_changes["profile"] = {"zero_optimization": {"stage": 2}}
    try:
        plan = plan_on(loaded, facts(on, **facts_changes))
    except DoesNotFit as error:
        plan = error.nearest_miss
    found: dict[str, Any] = json.loads(render(plan).files["plan.json"])
    return found


ROLLOUTS = {"task": "grpo", "adapter": "null", "reward": "[{function: numeric_answer}]",
            "data.max_length": "1024"}  # fmt: skip
# What a leaf needs beside it to make sense.
_EMBEDDING = {"task": "embedding"}
_TWO_NODES = {"hardware.num_nodes": "2", "hardware.device": "A100-80GB"}
CONTEXT: dict[str, dict[str, str]] = {
    "reward": ROLLOUTS,
    **{f"generation.{key}": ROLLOUTS for key in GENERATION},
    **{
        f"embedding.{key}": _EMBEDDING
        for key in (
            "loss",
            "negatives",
            "scale",
            "gather_across_devices",
            "matryoshka_dims",
            "pooling",
            "normalize",
            "prompts.query",
            "prompts.document",
            "batch_sampler",
        )
    },
    "embedding.triplet_margin": {**_EMBEDDING, "embedding.loss": "TripletLoss"},
    "embedding.mini_batch_size": {**_EMBEDDING, "embedding.loss": "CachedMultipleNegativesRankingLoss"},
    "reranker.loss": {"task": "reranker"},
    "reranker.documents": {"task": "reranker", "reranker.loss": "LambdaLoss"},
    "sharding.tp_size": {"adapter": "null"},
    "sharding.cp_size": {"data.eval": "null"},
    "sharding.optim_in_backward": {
        "adapter": "null",
        "trainer.max_grad_norm": "0",
        "precision": "bf16-true",
        "global_batch_size": "1",
        "hardware.num_nodes": "1",
        "hardware.devices_per_node": "1",
        "hardware.device": "H200-141GB",
    },
    "sharding.nvme_path": {"sharding.offload_optimizer": "nvme", "sharding.nvme_path": "/tmp/other"},
    "task": {"adapter": "null"},
    "model.freeze": {"task": "image-text-to-text"},
    "model.image_sizes": {"task": "image-text-to-text"},
    "model.quantization.double_quant": {"model.quantization.type": "nf4"},
    "model.quantization.compute_dtype": {"model.quantization.type": "nf4"},
    "model.kbit_norms": {"model.quantization": "nf4", "precision": "bf16", "sharding.engine": "ddp"},
    "adapter.path": {"adapter": "{}"},
    "data.fim": {"data.train": "[{path: a.txt, format: text}]"},
    "data.fim.rate": {"data.train": "[{path: a.txt, format: text}]"},
    "data.fim.spm_rate": {"data.fim.rate": "0.5", "data.train": "[{path: a.txt, format: text}]"},
    "data.problem_type": {"task": "sequence-classification", "adapter": "null"},
    "data.streaming": {"data.eval": "null"},
    "sharding.offload_param": {"sharding.zero_stage": "3"},
    "early_stopping.threshold": {"early_stopping.patience": "2"},
    "hardware.num_nodes": {"hardware.device": "A100-80GB"},
    "hardware.devices_per_node": {"hardware.device": "A100-80GB"},
    "launch.launcher": {"sharding.engine": "deepspeed"},
    "launch.min_nodes": _TWO_NODES,
    "launch.max_nodes": {**_TWO_NODES, "launch.min_nodes": "1"},
}


def with_values(changes: dict[str, str]) -> str:
    import yaml

    data = yaml.safe_load(BASE)
    for dotted, text in changes.items():
        keys = dotted.split(".")
        holder = data
        for key in keys[:-1]:
            if not isinstance(holder.get(key), dict):
                holder[key] = {}
            holder = holder[key]
        value = yaml.safe_load(text)
        if value is None:
            holder.pop(keys[-1], None)
        else:
            holder[keys[-1]] = value
    return yaml.safe_dump(data)


@pytest.mark.parametrize("leaf", sorted(OF_QUEUES))
def test_every_key_of_a_scheduler_changes_a_file(leaf, tmp_path):
    queue = leaf.split(".")[1]
    assert files_of(queue, tmp_path, {}) != files_of(queue, tmp_path, {leaf: OF_QUEUES[leaf]})


def files_of(queue: str, folder: Path, changes: dict[str, str]) -> dict[str, str]:
    """What `submit --to` this scheduler writes for a sweep."""
    loaded = recipe(folder, with_values(changes))
    plan = make_plan(loaded, facts("8xA100-80GB"))
    runs = (PlannedRun(Path("/s/0"), plan, {"seed": 1}),)
    hardware = parse_hardware("8xA100-80GB")
    return queue_named(queue).render(
        Submission("job", "python", "/", Path("/s"), hardware, loaded.recipe.launch, runs)
    )


@pytest.mark.parametrize("leaf", sorted(set(CHANGED) - set(OF_QUEUES)))
def test_every_leaf_changes_a_file_or_is_read_by_the_worker(leaf, tmp_path):
    (tmp_path / "hooks.py").write_text("def format_row(row):\n    return row\n")
    context = CONTEXT.get(leaf, {})
    hooks = {"hooks": ("format_row",)} if leaf == "python" else {}
    before = planned(tmp_path, with_values(context))
    instead = {"model.name_or_path": "null"} if leaf == "model.config" else {}
    after = planned(tmp_path, with_values({**context, leaf: CHANGED[leaf], **instead}), **hooks)
    if leaf == "adapter.type":
        assert after["settings"]["adapter.type"]["value"] == "lora"
        return
    changed = {
        key
        for key in before["settings"].keys() | after["settings"].keys()
        if before["settings"].get(key, {}).get("value") != after["settings"].get(key, {}).get("value")
    }
    own = next((name for name in prefixes(leaf) if name in changed), None)
    if own is not None and own not in SAID:
        assert is_read(own, settings_of_worker()), f"{leaf} changes the setting {own}, which nothing reads"
        if own != leaf and own.count(".") == 1 and not own.startswith(SECTIONS):
            assert leaf.rpartition(".")[2] in keys_of_mappings(), f"of {own} nothing reads {leaf}"
        return
    decided = ("batch", "command", "ds_config", "env", "hardware", "schedule")
    read = {key for key in changed if is_read(key, settings_of_worker())}
    assert read or any(before[key] != after[key] for key in decided), f"{leaf} decides nothing: {changed}"


# Keys whose `auto` the search fills in, and those whose `auto` the device, the rows or a library decides.
SEARCHED = (
    "model.kbit_norms",
    "model.quantization",
    "sharding.engine",
    "sharding.offload_activations",
    "sharding.offload_optimizer",
    "sharding.offload_param",
    "sharding.zero_stage",
)
DECIDED_ELSEWHERE = {"launch.launcher", "model.device_map", "model.dtype"}


def test_every_auto_of_the_schema_is_filled_in_somewhere():
    schema = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text("utf-8"))
    autos = {
        f"{section}.{name}"
        for section in ("model", "sharding", "launch")
        for name, field in schema["$defs"][f"{section.title()}Section"]["properties"].items()
        if '"auto"' in json.dumps(field)
    }
    assert autos == DECIDED_ELSEWHERE.union(SEARCHED)


def around(leaf):
    """What else a recipe needs so that the norms of a base, or a stage, are searched for."""
    if leaf == "sharding.zero_stage":
        return {"sharding.engine": "deepspeed"}
    return CONTEXT[leaf] if leaf == "model.kbit_norms" else {}


@pytest.mark.parametrize("leaf", SEARCHED)
def test_auto_is_filled_in_by_the_search(leaf, tmp_path):
    found = planned(tmp_path, with_values({**around(leaf), leaf: "auto"}))["settings"][leaf]
    assert found["value"] != "auto"
    assert found["source"] == "search"
    assert found["reason"]


@cache
def keys_of_mappings() -> set[str]:
    return {name for code in modules("train", "rows").values() for name in fields_read(code, MAPPINGS)}


def prefixes(leaf: str) -> list[str]:
    """The dotted name itself, then what it lies in, from the inside out."""
    words = leaf.split(".")
    return [".".join(words[:count]) for count in range(len(words), 0, -1)]


@pytest.mark.parametrize("leaf", ["task", "data.packing", "early_stopping.patience", "sharding.zero_stage"])
def test_every_setting_of_a_plan_is_read_or_says_what_follows(leaf, tmp_path):
    settings = planned(tmp_path, with_values({**CONTEXT.get(leaf, {}), leaf: CHANGED[leaf]}))["settings"]
    assert {name for name in settings if not is_read(name, settings_of_worker())} == set(SAID)
