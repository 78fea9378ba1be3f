"""`on_oom: adapt` with the real libraries: engines over two CPU ranks, and a real allocation that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import cases
from checkpoints import checkpoint
from grounds import make_base, write_rows
from launched import effilaunch, losses

from launcher.knowledge.lint.check import lint_text

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.usefixtures("warm")

STEPS = 6
# A device that holds LIMIT samples once HELD steps are done, or nothing; it says what torch says of a card.
HOOKS = """
import functools
import json
import sys
from pathlib import Path

import torch
from transformers import LlamaModel, TrainerCallback

FULL = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB of which "
    "1.21 GiB is free. Including non-PyTorch memory, this process has 22.42 GiB memory in use. Of the "
    "allocated memory 20.87 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
steps = [0]
forward = LlamaModel.forward


def value(name):
    return json.loads((Path(sys.argv[-1]) / "plan.json").read_text())["settings"][name]["value"]


@functools.wraps(forward)
def limited(self, input_ids=None, **more):
    if steps[0] >= HELD and (len(input_ids) > LIMIT or not ENOUGH):
        raise torch.OutOfMemoryError(FULL)
    return forward(self, input_ids=input_ids, **more)


class Steps(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        steps[0] = state.global_step


LlamaModel.forward = limited


def callbacks():
    return [Steps()]
"""
RECIPE = """\
{task}
model: {model}
data: {{train: [{{path: rows.jsonl}}], max_length: 32, padding_free: false}}  # the hooks count rows
sharding: {sharding}
global_batch_size: 8
trainer: {{max_steps: {steps}, learning_rate: 1.0e-2, lr_scheduler_type: linear, logging_steps: 1,
          save_steps: 2, per_device_train_batch_size: {micro}, activation_checkpointing: {again}}}
python: hooks.py
on_oom: adapt
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model, a tokenizer of 1024 words and rows, all made here."""
    return make_base(tmp_path_factory.mktemp("base"))


def written(folder: Path, base: Path, hooks: str, **values: object) -> None:
    """A recipe's folder."""
    folder.mkdir(exist_ok=True)
    for name in ("model", "rows.jsonl"):
        if not (folder / name).exists():
            (folder / name).symlink_to(base / name)
    (folder / "hooks.py").write_text(hooks)
    (folder / "r.yaml").write_text(RECIPE.format(steps=STEPS, **values))


def launched(
    folder: Path,
    base: Path,
    hooks: str,
    *arguments: str,
    sharding: str = "{}",
    micro: int = 4,
    again: str = "false",
    model: str = "{name_or_path: model}",
    task: str = "task: causal-lm",
    expect: int = 0,
) -> dict:
    """The JSON of `effilaunch run`."""
    written(folder, base, hooks, sharding=sharding, micro=micro, again=again, model=model, task=task)
    return effilaunch("run", folder / "r.yaml", "--output-dir", folder / "out", *arguments, expect=expect)


def hooks(*, limit: object, held: int, enough: str = "True") -> str:
    """A device that holds `limit` samples after `held` steps, and no batch at all unless `enough`."""
    return HOOKS.replace("LIMIT", str(limit)).replace("HELD", str(held)).replace("ENOUGH", enough)


@pytest.fixture(scope="module")
def smaller_from_the_start(base, warm_module, tmp_path_factory) -> dict[int, float]:
    """The losses of a run of one process that starts with a micro-batch that fits."""
    folder = tmp_path_factory.mktemp("smaller") / "run"
    launched(folder, base, hooks(limit=2, held=0), "--on", "cpu", micro=2)
    return losses(folder / "out")


def check_adapted(folder: Path, data: dict, expected: dict[int, float]) -> dict:
    """Finished, with the same global batch, and it learnt what the run learnt that began with less."""
    out, result = folder / "out", data["result"]
    assert (out / "COMPLETED").is_file()
    assert result == json.loads((out / "result.json").read_text())
    plans = [json.loads((out / name).read_text()) for name in ("plan-1.json", "plan.json")]
    assert [plan["batch"]["global"] for plan in plans] == [8, 8]
    assert plans[1]["adapted"]["adaptations"] == result["adaptations"]
    assert result["steps"] == STEPS
    assert losses(folder / "out") == pytest.approx(expected, rel=2e-4)
    if (out / "ds_config.json").is_file():
        assert lint_text((out / "ds_config.json").read_text(), "ds_config.json") == []
    return result


ENGINES = [
    pytest.param("{zero_stage: 3}", id="zero3"),
    pytest.param("{zero_stage: 2}", id="zero2", marks=pytest.mark.slow),
    pytest.param("{engine: ddp}", id="ddp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sharding", ENGINES)
def test_two_ranks_go_on_from_their_checkpoint_with_half_the_batch(
    base, tmp_path, smaller_from_the_start, sharding
):
    folder = tmp_path / "run"
    data = launched(folder, base, hooks(limit=2, held=3), "--on", "2xcpu", sharding=sharding)
    result = check_adapted(folder, data, smaller_from_the_start)
    (entry,) = result["adaptations"]
    assert (entry["step"], entry["resumed_from"]) == (3, 2)
    assert entry["changed"]["trainer.per_device_train_batch_size"] == [4, 2]
    assert entry["changed"]["trainer.gradient_accumulation_steps"] == [1, 2]
    assert "the checkpoint of step 2; 1 step" in data["said"]
    assert result["processes"] == 2
    if "zero" in sharding:
        ds_config = json.loads((folder / "out" / "ds_config.json").read_text())
        assert ds_config["train_micro_batch_size_per_gpu"] == 2
        assert ds_config["gradient_accumulation_steps"] == 2
        before = json.loads((folder / "out" / "ds_config-1.json").read_text())
        assert before["train_micro_batch_size_per_gpu"] == 4
    logs = [(folder / "out" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    # The launcher ends the other rank when one has failed, perhaps before that one has said why.
    assert any("torch.OutOfMemoryError: CUDA out of memory" in log for log in logs), (
        "the failed try's log stays"
    )
    assert all("resuming from" in log for log in logs)


@pytest.mark.slow
def test_an_adapted_run_is_continued_by_hand(base, tmp_path):
    """With the recipe that it was started with, and more steps than before."""
    folder = tmp_path / "run"
    given = ("--on", "2xcpu", "--set", "trainer.save_total_limit=1")
    launched(folder, base, hooks(limit=2, held=3), *given, sharding="{engine: ddp}")
    more = ("--resume", "auto", "--set", f"trainer.max_steps={STEPS + 2}")
    data = launched(folder, base, hooks(limit=2, held=0), *given, *more, sharding="{engine: ddp}")
    assert data["result"]["steps"] == STEPS + 2
    assert len(data["result"]["adaptations"]) == 1
    assert sorted(losses(folder / "out")) == list(range(1, STEPS + 3))
    assert "out of memory before" in data["said"]


# So large that two ranks need less under ZeRO-2 than under DDP, although DeepSpeed has buffers of its own.
LARGE = """{config: {model_type: llama, vocab_size: 16384, hidden_size: 1024, intermediate_size: 2048,
                 num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2,
                 max_position_embeddings: 64}, tokenizer: model}"""


@pytest.mark.slow
def test_zero_begins_again_where_ddp_was_too_large(base, tmp_path):
    """DeepSpeed cannot read a checkpoint of DDP: it is put aside, and what is lost is said."""
    folder = tmp_path / "run"
    enough = "value('sharding.engine') == 'deepspeed'"
    data = launched(
        folder, base, hooks(limit=1, held=3, enough=enough), "--on", "2xcpu", "--set", "trainer.max_steps=4",
        sharding="{engine: ddp}", micro=1, again="true", model=LARGE,
    )  # fmt: skip
    out, result = folder / "out", data["result"]
    (entry,) = result["adaptations"]
    assert entry["changed"]["sharding.engine"] == ["ddp", "deepspeed"]
    assert (entry["step"], entry["resumed_from"]) == (3, 0)
    assert "3 steps are lost: of the checkpoints, DeepSpeed cannot read those of ddp" in data["said"]
    assert (out / "checkpoints-1" / "checkpoint-2" / "trainer_state.json").is_file()
    assert (result["distributed_type"], result["steps"]) == ("DEEPSPEED", 4)
    assert lint_text((out / "ds_config.json").read_text(), "ds_config.json") == []
    before = [json.loads(line) for line in (out / "metrics-1.jsonl").read_text().splitlines()]
    again = losses(folder / "out")
    assert [row["step"] for row in before] == [1, 2, 3]
    assert [again[row["step"]] for row in before] == pytest.approx([row["loss"] for row in before], rel=1e-3)


@pytest.mark.slow
def test_stage_2_goes_on_from_a_checkpoint_of_stage_1(base, tmp_path, smaller_from_the_start):
    folder = tmp_path / "run"
    hook = hooks(limit=1, held=3, enough="value('sharding.zero_stage') == 2")
    data = launched(folder, base, hook, "--on", "2xcpu", sharding="{zero_stage: 1}", micro=1, again="true")
    result = check_adapted(folder, data, smaller_from_the_start)
    (entry,) = result["adaptations"]
    assert entry["changed"]["sharding.zero_stage"] == [1, 2]
    assert entry["resumed_from"] == 2


@pytest.mark.slow
def test_two_ranks_with_nothing_left_end_with_the_list(base, tmp_path):
    folder = tmp_path / "run"
    data = launched(
        folder, base, hooks(limit=1, held=0, enough="False"), "--on", "2xcpu", sharding="{zero_stage: 3}",
        micro=2, again="true", expect=5,
    )  # fmt: skip
    (problem,) = data["errors"]
    assert problem["code"] == "cuda-oom"
    assert (
        "nothing is left to try. Tried: micro-batch 2 ran out of memory: 1 with accumulation 4"
        in (problem["message"])
    )
    assert not (folder / "out" / "COMPLETED").exists()
    adapted = json.loads((folder / "out" / "plan.json").read_text())["adapted"]
    assert len(adapted["adaptations"]) == 1


ROWS = {
    "embedding": [{"anchor": f"w{i} w{i + 1}", "positive": f"w{i + 2} w7"} for i in range(64)],
    "grpo": [{"prompt": f"w{i} w{i + 1}"} for i in range(64)],
}
COMPARED = "task: embedding\nembedding: {loss: MultipleNegativesRankingLoss}"
CACHED = "task: embedding\nembedding: {loss: CachedMultipleNegativesRankingLoss, mini_batch_size: 4}"
ROLLOUTS = """\
task: grpo
reward: [{function: regular_expression, arguments: {pattern: 'w[0-9]*[0-4] w[0-9]*$'}}]
generation: {num_generations: 4, max_completion_length: 8}
"""
HALF = {"trainer.per_device_train_batch_size": [4, 2], "trainer.gradient_accumulation_steps": [2, 4]}
ANCHORED = ("--set", "trainer.beta=0.1")
"""Without the reference, losses of completions of the same length are 0."""
OF_TASKS: dict[str, tuple[str, object, str, dict[str, list[object]], tuple[str, ...]]] = {
    "embedding": (
        COMPARED,
        99,
        "value('trainer.activation_checkpointing')",
        {"trainer.activation_checkpointing": [False, True]},
        (),
    ),
    "embedding, cached": (
        CACHED,
        99,
        "value('embedding.mini_batch_size') == 2",
        {"embedding.mini_batch_size": [4, 2]},
        (),
    ),
    # Generating, a forward pass has the completions of all micro-batches.
    "grpo": (ROLLOUTS, "(2 if torch.is_grad_enabled() else 99)", "True", HALF, ANCHORED),
}
"""Name -> (sections, rows that the device holds, whether it holds any, what is changed, arguments)."""


@pytest.mark.parametrize("name", cases(OF_TASKS, "embedding"))
def test_what_a_step_learns_stays_the_same(base, tmp_path, name):
    """Also the negatives of an anchor, and the completions of a generation."""
    pytest.importorskip("sentence_transformers" if "embedding" in name else "trl")
    task, limit, enough, changed, more = OF_TASKS[name]
    runs = {"whole": hooks(limit=99, held=0), "adapted": hooks(limit=limit, held=3, enough=enough)}
    for run, text in runs.items():
        (tmp_path / run).mkdir()
        write_rows(tmp_path / run / "rows.jsonl", ROWS[name.partition(",")[0]])
        data = launched(tmp_path / run, base, text, "--on", "cpu", *more, task=task)
    assert len({*losses(tmp_path / "whole" / "out").values()}) == STEPS
    result = check_adapted(tmp_path / "adapted", data, losses(tmp_path / "whole" / "out"))
    (entry,) = result["adaptations"]
    assert (entry["step"], entry["resumed_from"]) == (3, 2)
    sizes = {key: entry["changed"].get(key) for key in (*HALF, *changed)}
    assert sizes == {**dict.fromkeys(HALF), **changed}


# An address space of 1.25 GiB more than is in use: a batch of four asks for 1.6 GiB, one of two for half.
REAL = """
import resource
from pathlib import Path

import torch
from transformers import TrainerCallback

A_SAMPLE = 400 * 2**20


class Narrow(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 3:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 5 * 2**28
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def taking(module, arguments):
    batch = arguments[0]
    if batch.dtype == torch.int64:  # the embedding's input
        torch.empty(len(batch) * A_SAMPLE, dtype=torch.uint8)


torch.nn.modules.module.register_module_forward_pre_hook(
    lambda module, arguments: taking(module, arguments) if isinstance(module, torch.nn.Embedding) else None
)


def callbacks():
    return [Narrow()]
"""


@pytest.mark.slow
def test_a_real_allocation_that_fails_is_adapted_to(base, tmp_path, smaller_from_the_start):
    folder = tmp_path / "run"
    data = launched(folder, base, REAL, "--on", "cpu", micro=4)
    result = check_adapted(folder, data, smaller_from_the_start)
    assert [entry["resumed_from"] for entry in result["adaptations"]] == [2]
    assert result["adaptations"][0]["changed"]["trainer.per_device_train_batch_size"] == [4, 2]
    log = (folder / "out" / "logs" / "rank-0.log").read_text()
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1677721600 bytes" in log


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path, monkeypatch, capsys):
    """The one at which a process ran out of memory while it was saved."""
    from launcher.train.job import Job
    from launcher.train.training import find_checkpoint

    for step in (2, 4):
        checkpoint(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "checkpoint-10").mkdir()
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    assert find_checkpoint(Job(tmp_path, {})) == tmp_path / "checkpoints" / "checkpoint-4"
    assert "checkpoint-10 is skipped: it has no manifest.json" in capsys.readouterr().out
