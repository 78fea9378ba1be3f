"""A step of every engine on GPUs that are not there: what each rank does is written down, and judged.

`absent_cuda.py` and `absent_groups.py` say what stands for what, and what is not covered. A rank is run as
the first, the second or the last of 8 or 512, each in its own environment, and the records are compared: a
collective that one rank alone calls, or with other tensors, is where a real run would hang.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from grounds import make_base, write_rows

from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import bind
from launcher.files.rank_status import PREPARES
from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render

if not find_spec("torch"):  # not imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

from absent_ranks import PER_NODE, AbsentRanks, Ran

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    **{f"zero{stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in range(4)},
}
LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LORA},
    "int8": {"adapter": LORA, "model": {"name_or_path": "model", "quantization": "int8"}},
    "nf4": {"adapter": LORA, "model": {"name_or_path": "model", "quantization": "nf4"}},
}
CHUNKED = {"model": {"name_or_path": "model", "loss": "chunked"}}
REFUSED = {("fsdp", "int8"), ("zero3", "int8")}
"""By the planner: no run to look at."""
QUICK = {"ddp", "fsdp", "zero2", "zero3"}
"""Engines whose every form is run by `make test`; of the others one form."""
SLOW = pytest.mark.slow(5)
WHOLE = [
    pytest.param(
        engine, form, marks=() if engine in QUICK or form == "full" else (SLOW,), id=f"{engine}-{form}"
    )
    for engine in ENGINES
    for form in FORMS
    if (engine, form) not in REFUSED
]
AT_512 = [
    pytest.param(engine, "lora", marks=() if engine == "ddp" else (SLOW,), id=engine) for engine in ENGINES
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[AbsentRanks]:
    home = str(tmp_path_factory.mktemp("absent-home"))
    kept = {name: text for name, text in os.environ.items() if not name.startswith("EFFILAUNCH_")}
    with AbsentRanks({**kept, "EFFILAUNCH_CACHE": home, "HOME": home, "XDG_CACHE_HOME": home}) as found:
        yield found


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    """A model with its tokenizer, rows for two steps of 512 ranks, and few to evaluate."""
    folder = make_base(tmp_path_factory.mktemp("ground"), hidden_size=32)
    rows = [
        {"prompt": f"w{i % 900} w{7 * i % 900}", "completion": f" w{3 * i % 900} w7"} for i in range(2048)
    ]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "few.jsonl", rows[:8])
    return folder


def planned(
    ground: Path, folder: Path, world: int, said: Mapping[str, Any], hooks: str = ""
) -> tuple[Path, dict[str, str]]:
    """(A run directory, the environment of its ranks) of nodes with 8 H100s each."""
    for path in ground.iterdir():
        (folder / path.name).symlink_to(path)
    steps = 1 if world == PER_NODE and not hooks else 2
    data = {"train": [{"path": "rows.jsonl"}], "eval": [{"path": "few.jsonl"}], "max_length": 32}
    data |= said.get("data", {})
    evaluates = {"eval_strategy": "steps", "eval_steps": steps} if data["eval"] else {}
    recipe = {
        "model": {"name_or_path": "model"},
        "global_batch_size": 2 * world,
        **said,
        "data": data,
        "trainer": {
            "per_device_train_batch_size": 1, "max_steps": steps, "logging_steps": 1, "save_steps": steps,
            **evaluates, "report_to": "none", "dataloader_num_workers": 0,
        },
    }  # fmt: skip
    if hooks:
        (folder / "hooks.py").write_text(hooks)
        recipe["python"] = "hooks.py"
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    nodes = world // PER_NODE
    on = "8xH100-80GB" if nodes == 1 else f"{nodes}x8xH100-80GB"
    loaded, facts = gather(load_recipe(folder / "r.yaml"), on)
    bundle = render(make_plan(loaded, facts))
    out = folder / "out"
    write_run_dir(bundle, out, resume=False)
    late = {"run_dir": str(out), "devices": "0,1,2,3,4,5,6,7", "node_rank": "0", "master_addr": "127.0.0.1"}
    _, _, env = bind(bundle, late)
    return out, {**env, PREPARES: "1"}


# --- judgements: each is a list of what is wrong ------------------------------------------------------


def different_collectives(ran: list[Ran]) -> list[str]:
    """Where the ranks' collectives part: one is missing, or has another group, dtype, shape or operation."""
    first = ran[0].of("collective")
    found = []
    for other in ran[1:]:
        theirs = other.of("collective")
        for number in range(max(len(first), len(theirs))):
            pair = [events[number] if number < len(events) else None for events in (first, theirs)]
            if _signature(pair[0]) != _signature(pair[1]):
                places = [None if event is None else (event["op"], event["by"]) for event in pair]
                found.append(f"collective {number}: rank 0 {places[0]}, rank {other.rank} {places[1]}")
                break
    return found


def _signature(event: dict[str, Any] | None) -> Any:
    """What must be the same on every rank; pickled objects are of any length."""
    if event is None:
        return None
    tensors = event["tensors"]
    if event["op"] == "scatter" or (tensors and tensors[0][0] == "uint8"):
        tensors = ["objects"]
    group = tuple(rank - event["ranks"][0] for rank in event["ranks"])  # another rank has its own one
    return event["op"], event["backend"], group, str(tensors), event["reduce"]


def different_groups(ran: list[Ran]) -> list[str]:
    """Groups are made by all ranks, in the same order."""
    made = [[(event["backend"], event["ranks"]) for event in one.of("group")] for one in ran]
    return [f"rank {one.rank}" for one, groups in zip(ran, made, strict=True) if groups != made[0]]


def on_wrong_device(ran: list[Ran]) -> list[str]:
    """NCCL takes tensors of the rank's own GPU, gloo those of the host."""
    found = []
    for one in ran:
        own = {"nccl": [f"cuda:{one.rank % PER_NODE}"], "gloo": ["cpu"]}
        found += [
            f"rank {one.rank}: {event['op']} of {event['devices']} over {event['backend']}, {event['by']}"
            for event in one.of("collective")
            if event["devices"] != own[event["backend"]] and event["devices"]
        ]
    return found


def other_contexts(ran: list[Ran]) -> list[str]:
    """A process opens its own GPU alone, after it has set it."""
    return [
        f"rank {one.rank}: cuda:{event['gpu']}, {event['by']}"
        for one in ran
        for event in one.of("context")
        if event["gpu"] != one.rank % PER_NODE or not event["was_set"]
    ]


def mixed_devices(ran: list[Ran]) -> list[str]:
    return [f"{event['what']}, {event['by']}" for one in ran for event in one.of("mixed")]


def waits_in_steps(ran: list[Ran]) -> list[str]:
    """Where our code, or a hook, lets the host wait for the device within steps, but for `KNOWN_WAITS`."""
    return sorted({
        event["by"]
        for one in ran
        for event in one.of("wait")
        if event["phase"] == "train" and _is_ours(event["by"]) and event["by"] not in KNOWN_WAITS
    })  # fmt: skip


KNOWN_WAITS = {
    "launcher/train/trainers.py:_gather_counts",  # where it logs
    "launcher/train/idle_adapters.py:_settle",  # until each adapter has had a gradient, in the first steps
    "launcher/train/memory_meter.py:<listcomp>",  # the contexts of all ranks, after the first step
    "launcher/train/memory_meter.py:gathered",
}
"""Places that may wait within steps, with when they do."""


def _is_ours(place: str) -> bool:
    return place.startswith(("launcher/", "/"))


def emptied_caches(ran: list[Ran]) -> list[str]:
    """A step that gives memory back to the driver asks for it again in the next one."""
    return [
        event["by"]
        for one in ran
        for event in one.of("allocator")
        if event["what"] == "empty_cache" and event["phase"] == "train"
    ]


JUDGEMENTS = (
    different_collectives, different_groups, on_wrong_device, other_contexts, mixed_devices, waits_in_steps,
    emptied_caches,
)  # fmt: skip


def check(ran: list[Ran], count: int) -> None:
    assert [one.code for one in ran] == [0] * count, ran[-1].said
    assert {judge.__name__: wrong for judge in JUDGEMENTS if (wrong := judge(ran))} == {}
    for one in ran:
        seen = {event["phase"] for event in one.of("collective")}
        assert {"train", "evaluate", "save", "finish"} <= seen
        assert len(one.of("context")) == 1


# --- the runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "form"), WHOLE)
def test_ranks_of_a_node_do_the_same(engine: str, form: str, ground, ranks, tmp_path: Path) -> None:
    out, env = planned(ground, tmp_path, 8, {"sharding": ENGINES[engine], **FORMS[form]})
    check(ranks.run(out, 8, (0, 7), env), 2)


@pytest.mark.parametrize(("engine", "form"), AT_512)
def test_512_ranks_do_the_same(engine: str, form: str, ground, ranks, tmp_path: Path) -> None:
    out, env = planned(ground, tmp_path, 512, {"sharding": ENGINES[engine], **FORMS[form]})
    ran = ranks.run(out, 512, (0, 1, 511), env)
    check(ran, 3)
    for one in ran:  # the ranks agree after the first step whether to stop, on the host
        agreed = [event for event in one.of("collective") if "callbacks.py" in event["by"]]
        assert {event["backend"] for event in agreed} == {"gloo"}


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "streamed": (ENGINES["ddp"], {"data": {"streaming": True}, **CHUNKED}),
    "packed": (ENGINES["fsdp"], {"data": {"packing": True}, **CHUNKED}),
    "offload": ({**ENGINES["zero3"], "offload_optimizer": "cpu", "offload_param": "cpu"}, {}),
    "activations": ({**ENGINES["fsdp"], "offload_activations": "cpu"}, CHUNKED),
}
"""Name -> sharding, sections of the recipe."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "streamed" else (SLOW,)) for name in OTHERS]
)
def test_ranks_of_other_runs_do_the_same(name: str, ground, ranks, tmp_path: Path) -> None:
    sharding, said = OTHERS[name]
    out, env = planned(ground, tmp_path, 8, {"sharding": sharding, **said})
    check(ranks.run(out, 8, (0, 7), env), 2)


PARALLEL = {
    "tensor": ({**ENGINES["zero1"], "tp_size": 2}, (0, 1)),
    "sequence": ({**ENGINES["zero2"], "sp_size": 2}, (0, 7)),
}
"""Name -> sharding, ranks that are run. Two groups of tensor parallelism have other rows, and DeepSpeed
compares those of a group: here with rank 0's. Not `cp_size`: torch shards the kernels of CUDA alone."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in PARALLEL])
def test_ranks_that_share_a_copy_do_the_same(name: str, ground, ranks, tmp_path: Path) -> None:
    sharding, chosen = PARALLEL[name]
    out, env = planned(ground, tmp_path, 8, {"sharding": sharding, "global_batch_size": 8})
    ran = ranks.run(out, 8, chosen, env)
    check(ran, 2)
    for one in ran:
        assert 2 in {len(event["ranks"]) for event in one.of("collective") if event["phase"] == "train"}


STOPPED = """
import os
import signal

from transformers import TrainerCallback


class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if os.environ["RANK"] == "0" and "EFFILAUNCH_RESUME" not in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)


def callbacks():
    return [Stop()]
"""


def test_one_rank_that_is_stopped_stops_the_others_after_the_same_step(ground, ranks, tmp_path: Path) -> None:
    out, env = planned(ground, tmp_path, 8, {"sharding": ENGINES["ddp"], **FORMS["lora"]}, STOPPED)
    ran = ranks.run(out, 8, (0, 7), env)
    assert [one.code for one in ran] == [0, 0], ran[-1].said
    assert different_collectives(ran) == []
    for one in ran:
        assert {event["step"] for event in one.of("collective")} == {0, 1}
        assert {event["phase"] for event in one.of("collective")} >= {"train", "save"}
        assert "evaluate" not in {event["phase"] for event in one.of("collective")}


@SLOW
def test_ranks_of_a_resumed_run_do_the_same_and_its_result_opens_one_context(
    ground, ranks, tmp_path: Path
) -> None:
    out, env = planned(ground, tmp_path, 8, {"sharding": ENGINES["ddp"], **FORMS["lora"]}, STOPPED)
    assert [one.code for one in ranks.run(out, 8, (0, 7), env)] == [0, 0]
    again, env = resumed(out, tmp_path), {**env, "EFFILAUNCH_RESUME": "auto"}
    check(ran := ranks.run(again, 8, (0, 7), env), 2)
    for one in ran:
        steps = {event["step"] for event in one.of("collective") if event["phase"] == "train"}
        assert steps == {1, 2}
    finished = again.with_name("after-rank-0")
    (finished / "COMPLETED").touch()  # as the supervisor does
    answered = ranks.call(finished, "generate", str(finished), "w1 w2", "--max-new-tokens", "2")
    assert answered.code == 0, answered.said
    assert [event["gpu"] for event in answered.of("context")] == [0]


def resumed(out: Path, folder: Path) -> Path:
    """The run directory that all ranks would have left: rank 0's, with what the last rank wrote alone."""
    again = folder / "again" / "out"
    shutil.copytree(folder / "after-rank-0", again)
    for path in out.rglob("rng_state_*"):
        shutil.copy(path, again / "checkpoints" / path.parent.name)
    return again


BROKEN = """
import os

import torch
import torch.distributed as dist
from transformers import TrainerCallback


class Break(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step != 1:
            return
        dist.all_reduce(torch.zeros(1))
        loss = torch.zeros(3, device="cuda")
        loss.sum().item()
        loss + torch.zeros(3)
        torch.cuda.empty_cache()
        torch.zeros(1, device=f"cuda:{(torch.cuda.current_device() + 1) % 8}")
        if os.environ["RANK"] == "0":
            dist.new_group(backend="gloo")
            dist.all_reduce(loss)


def callbacks():
    return [Break()]
"""


def test_each_fault_is_found_by_its_judgement(ground, ranks, tmp_path: Path) -> None:
    """A CPU tensor for NCCL, a collective and a group of one rank, a wait, mixed devices, another context."""
    out, env = planned(ground, tmp_path, 8, {"sharding": ENGINES["ddp"], **FORMS["lora"]}, BROKEN)
    ran = ranks.run(out, 8, (0, 7), env)
    assert [one.code for one in ran] == [0, 0], ran[-1].said
    wrong = {judge.__name__: judge(ran) for judge in JUDGEMENTS}
    hook = f"{tmp_path / 'hooks.py'}:on_step_end"
    assert wrong["on_wrong_device"] == [
        f"rank {rank}: allreduce of ['cpu'] over nccl, {hook}" for rank in (0, 7)
    ]
    assert [f"rank 0 ('allreduce', '{hook}'), rank 7" in one for one in wrong["different_collectives"]] == [
        True
    ]
    assert wrong["different_groups"] == ["rank 7"]
    assert wrong["other_contexts"] == [f"rank 0: cuda:1, {hook}", f"rank 7: cuda:0, {hook}"]
    assert wrong["mixed_devices"] == [f"aten::add.Tensor, {hook}"] * 2
    assert hook in wrong["waits_in_steps"]
    assert wrong["emptied_caches"] == [hook] * 2
