"""A run that is killed again and again learns what it would have learnt undisturbed: to the last bit."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import KILL, KILL_HOOKS, Ended, Forks, free_port, launched
from grounds import tokenizer_of_1024_words, unlike_rows, write_rows

from launcher.execute.leftovers import remove_shared_buffers
from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import bind
from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render

if not (find_spec("torch") and find_spec("deepspeed")):  # neither is imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

STEPS = 27
SAVE_STEPS = 3
KILLS = 6
ROWS = 64
"""Eight steps an epoch, so that kills fall into several epochs, and not onto their borders alone."""
MODEL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "attention_dropout": 0.1,
}  # fmt: skip
LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    sharding: dict[str, Any] = field(default_factory=dict)
    world: int = 2
    """Ranks; 0: one process without a launcher."""
    micro: int = 2
    adapter: dict[str, Any] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    weights: bool = False
    """Begin from the weights of the fixture; else at random, which ZeRO-3 does differently."""
    hooks: str = ""
    """What hooks.py holds besides."""

    @property
    def recipe(self) -> dict[str, Any]:
        first: dict[str, Any] = {"name_or_path": "weights"} if self.weights else {"config": {**MODEL}}
        said: dict[str, Any] = {
            "model": {"tokenizer": "tokenizer", **first},
            "data": {"train": [{"path": "rows.jsonl"}], "max_length": 32, **self.data},
            "sharding": self.sharding,
            "precision": "fp32",
            "global_batch_size": 8,
            "trainer": {
                "max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 4,
                "logging_steps": 1, "save_steps": SAVE_STEPS, "save_total_limit": 2, "report_to": "none",
                "per_device_train_batch_size": self.micro, **self.trainer,
            },
            "python": "hooks.py",
        }  # fmt: skip
        return said if self.adapter is None else {**said, "adapter": {**self.adapter}}


ONE = Case("one", {"engine": "ddp"}, world=0, adapter=LORA)
DDP = Case("ddp", {"engine": "ddp"})
ZERO2 = Case("zero2", {"zero_stage": 2}, adapter=LORA)
ZERO3 = Case("zero3", {"zero_stage": 3})
FSDP2 = Case("fsdp2", {"engine": "fsdp"})
FSDP2_ALONE = Case("fsdp2-alone", {"engine": "fsdp"}, world=0, adapter=LORA)


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    """A tokenizer of 1024 words and rows of unlike length."""
    folder = tmp_path_factory.mktemp("ground")
    tokenizer_of_1024_words().save_pretrained(folder / "tokenizer")
    write_rows(folder / "rows.jsonl", unlike_rows(ROWS))
    return folder


@dataclass
class Run:
    """A run directory that the planner wrote, and how its ranks are started."""

    case: Case
    folder: Path
    env: Mapping[str, str]
    forks: Forks

    def start(self, **env: str) -> Ended:
        """Start all ranks and wait for them."""
        case = self.case
        return self.forks.run(self.folder, case.world, {**self.env, **env})

    def finish(self, **env: str) -> Run:
        ended = self.start(**env)
        assert set(ended.codes) == {0}, ended.said
        assert (self.folder / "COMPLETED").is_file()
        return self

    def rows(self) -> dict[int, dict[str, Any]]:
        """What was logged at each step, but for speed and memory."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        kept = ("loss", "grad_norm", "learning_rate", "tokens", "eval_loss")
        told: dict[int, dict[str, Any]] = {}
        for row in found:
            told.setdefault(row["step"], {}).update({name: row[name] for name in kept if name in row})
        return told

    def weights(self) -> dict[str, str]:
        """Digests of the weights that were saved in the end."""
        kind = "adapter" if self.case.adapter else "model"
        files = (self.folder / kind).glob("*.safetensors")
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def checkpoints(self) -> set[int]:
        found = (self.folder / "checkpoints").glob("checkpoint-*")
        return {int(path.name.removeprefix("checkpoint-")) for path in found}

    def twin(self, folder: Path) -> Run:
        """Another run of the same plan on the same prepared data, not yet started."""
        folder.mkdir()
        for path in self.folder.iterdir():
            if path.is_file() and path.name not in ("metrics.jsonl", "result.json", "COMPLETED"):
                shutil.copy(path, folder)
        for name in ("logs", "checkpoints"):
            (folder / name).mkdir()
        return Run(self.case, folder, self.env, self.forks)


def planned(case: Case, ground: Path, folder: Path, forks: Forks) -> Run:
    """The run directory of a case, its data prepared."""
    made = folder / "recipe"
    made.mkdir(parents=True)
    for name in ("tokenizer", "weights", "rows.jsonl"):
        (made / name).symlink_to(ground / name)
    (made / "hooks.py").write_text(KILL_HOOKS + case.hooks)
    (made / "r.yaml").write_text(yaml.safe_dump(case.recipe))
    loaded, facts = gather(load_recipe(made / "r.yaml"), f"{case.world}xcpu" if case.world else "cpu")
    bundle = render(make_plan(loaded, facts))
    run_dir = folder / "straight"
    write_run_dir(bundle, run_dir, resume=False)
    _, _, env = bind(bundle, {"run_dir": str(run_dir), "devices": ""})
    prepared = forks.run(run_dir, 0, env, module="prepare")
    assert prepared.codes == (0,), prepared.said
    return Run(case, run_dir, env, forks)


def kill_steps(case: Case, count: int = KILLS) -> list[int]:
    """Steps after which the ranks are killed, different for each case, always the same."""
    return sorted(random.Random(case.name).sample(range(1, STEPS), count))


def check_exact(case: Case, kills: Mapping[int, Mapping[str, str]], straight: Run, folder: Path) -> None:
    """Kill a run again and again. kills: step that is done by then -> what the ranks are told."""
    killed = straight.twin(folder / "killed")
    straight.finish()
    expected = straight.rows()
    assert list(expected) == list(range(1, STEPS + 1))
    assert len({row["loss"] for row in expected.values()}) == STEPS
    resumed: dict[str, str] = {}
    for step, told in kills.items():
        ended = killed.start(**told, **resumed)
        assert -9 in ended.codes, ended.said
        found = killed.rows()
        assert found == {n: expected[n] for n in range(1, step + 1)}, f"killed after step {step}"
        resumed = {"EFFILAUNCH_RESUME": "auto"}
    killed.finish(**resumed)
    assert killed.rows() == expected
    assert killed.weights() == straight.weights() != {}
    # At its end there is nothing left to train, and nothing is.
    killed.finish(**resumed)
    assert killed.rows() == expected
    assert killed.weights() == straight.weights()
    assert max(killed.checkpoints()) == STEPS
    assert json.loads((killed.folder / "result.json").read_text())["steps"] == STEPS


CASES = [
    pytest.param(ONE, id="one", marks=pytest.mark.slow),
    pytest.param(ZERO3, id="zero3", marks=pytest.mark.slow),
    pytest.param(DDP, id="ddp", marks=pytest.mark.slow),
    pytest.param(ZERO2, id="zero2", marks=pytest.mark.slow),
    pytest.param(FSDP2, id="fsdp2", marks=pytest.mark.slow),
    pytest.param(FSDP2_ALONE, id="fsdp2-alone", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_six_times_learns_the_same(case, ground, tmp_path, forks):
    kills = {step: {KILL: str(step)} for step in kill_steps(case)}
    assert len(kills) == KILLS
    check_exact(case, kills, planned(case, ground, tmp_path, forks), tmp_path)


@pytest.mark.slow
def test_forked_ranks_learn_what_ranks_of_their_own_learn(ground, tmp_path, forks):
    """Killed and resumed in processes that import everything themselves, each with a hash seed of its own."""
    straight = planned(ZERO3, ground, tmp_path, forks)
    fresh = straight.twin(tmp_path / "fresh")
    straight.finish()
    for told in ({KILL: "7"}, {"EFFILAUNCH_RESUME": "auto"}):
        port = free_port()
        # The plan's threads follow from this machine's cores; forked ranks have the one of their parent.
        env = {**forks.environ, **fresh.env, **told, "OMP_NUM_THREADS": forks.environ["OMP_NUM_THREADS"]}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "launcher.train.worker", str(fresh.folder)],
                env={**env, **launched(rank, ZERO3.world, port)}, stdout=subprocess.DEVNULL,
            )
            for rank in range(ZERO3.world)
        ]  # fmt: skip
        codes = [rank.wait(240) for rank in ranks]
        remove_shared_buffers(port)
        assert set(codes) == ({-9} if KILL in told else {0})
    assert fresh.rows() == straight.rows()
    assert fresh.weights() == straight.weights()


BROKEN = {
    "random states are not restored": """
from transformers import Trainer

Trainer._load_rng_state = lambda self, checkpoint: None
""",
    "one batch too many is skipped": """
from transformers import trainer

skip = trainer.skip_first_batches
trainer.skip_first_batches = lambda loader, batches: skip(loader, batches + 1)
""",
    "the optimizer begins again": """
from transformers import Trainer

Trainer._load_optimizer_and_scheduler = lambda self, checkpoint: None
""",
}


@pytest.mark.parametrize(
    "hooks",
    [
        pytest.param(hooks, id=name, marks=[pytest.mark.slow] if number else [])
        for number, (name, hooks) in enumerate(BROKEN.items())
    ],
)
def test_a_resume_that_forgets_something_would_be_seen(hooks, ground, tmp_path, forks):
    case = replace(ONE, name="broken", hooks=hooks)
    kills = {step: {KILL: str(step)} for step in (4, 5)}
    straight = planned(case, ground, tmp_path, forks)
    with pytest.raises(AssertionError, match="killed after step 5"):
        check_exact(case, kills, straight, tmp_path)


OWN_CODE = """
import torch
from torch.nn import functional
from transformers import Trainer as Base


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                moment = state.setdefault("moment", torch.zeros_like(one))
                one.add_((0.9 * moment + 0.1 * one.grad).sign(), alpha=-group["lr"] / 10)
                moment.mul_(0.99).add_(one.grad, alpha=0.01)


def optimizer(model, args):
    made = Lion([one for one in model.parameters() if one.requires_grad], args.learning_rate)
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))


def compute_loss(outputs, labels, num_items_in_batch):
    scores, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(scores.float(), targets, reduction="sum") / num_items_in_batch


class Trainer(Base):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)
"""
GRID = [
    Case("own-code", {"engine": "ddp"}, hooks=OWN_CODE),
    Case("zero3-lora-packed", {"zero_stage": 3}, adapter=LORA, data={"packing": True}),
    Case("zero2-evaluated", {"zero_stage": 2}, micro=4, data={"eval": {"split": 0.125}},
         trainer={"eval_strategy": "steps", "eval_steps": 4}),
    Case("zero1", {"zero_stage": 1}, micro=1),
    Case("fsdp2-lora", {"engine": "fsdp"}, adapter=LORA),
    Case("ddp-streamed", {"engine": "ddp"}, adapter=LORA, data={"streaming": True}),
    Case("one-saved-by-epoch", {"engine": "ddp"}, world=0,
         trainer={"save_strategy": "epoch", "save_steps": 500}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_other_shapes_of_a_run_go_on_exactly_too(case, ground, tmp_path, forks):
    kills = {step: {KILL: str(step)} for step in kill_steps(case, KILLS // 2)}
    check_exact(case, kills, planned(case, ground, tmp_path, forks), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [ZERO3, FSDP2], ids=lambda case: case.name)
def test_a_run_that_is_killed_inside_its_saves_learns_the_same(case, ground, tmp_path, forks):
    """What was being written is never gone on from: the checkpoint before it is."""
    saves = range(SAVE_STEPS, STEPS, SAVE_STEPS)
    kills = {step: {"EFFILAUNCH_DRILL": json.dumps({"fault": "kill-save", "step": step})} for step in saves}
    check_exact(case, kills, planned(case, ground, tmp_path, forks), tmp_path)


ALIKE = 1e-5
"""Relative, for losses; floats that are added in another order gave 1.5e-6 (and 5e-5 for norms)."""
ENGINES = [
    Case("ddp", {"engine": "ddp"}, micro=4, weights=True),
    Case("zero1", {"zero_stage": 1}, micro=4, weights=True),
    Case("zero2", {"zero_stage": 2}, micro=4, weights=True),
    Case("zero3", {"zero_stage": 3}, micro=4, weights=True),
    Case("fsdp2", {"engine": "fsdp"}, micro=4, weights=True),
]


@pytest.fixture(scope="module")
def weights(ground) -> None:
    """Weights of a model without dropout, since ranks would draw other masks than one process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**MODEL, "attention_dropout": 0.0})).save_pretrained(ground / "weights")


@pytest.mark.slow
@pytest.mark.usefixtures("weights")
def test_every_engine_learns_what_one_process_learns(ground, tmp_path, forks):
    """On the same weights, rows and seed: floats are added in another order, and nothing else differs."""
    one = Case("one", {"engine": "ddp"}, world=0, micro=4, weights=True)
    expected = planned(one, ground, tmp_path / "one", forks).finish().rows()
    assert list(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS]["loss"] < expected[1]["loss"] / 2, "there was something to learn"
    for case in ENGINES:
        found = planned(case, ground, tmp_path / case.name, forks).finish().rows()
        for name in ("tokens", "learning_rate"):
            assert {s: row[name] for s, row in found.items()} == {s: row[name] for s, row in expected.items()}
        for name, bound in (("loss", ALIKE), ("grad_norm", 20 * ALIKE)):
            worst = max(abs(found[s][name] / expected[s][name] - 1) for s in expected)
            assert worst < bound, (case.name, name)
