"""Runs of a tiny model by one process and by several ranks, to be compared by the tests of engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import KILL, KILL_HOOKS, Ended, Forks
from grounds import tokenizer_of_1024_words, write_rows

from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import bind
from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
STEPS = 4
PLAIN = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "learning_rate": 0.5}
"""Nothing that hides a gradient of the wrong size: no clipping, no division by its own size as in Adam."""


def make_ground(folder: Path, **changes: Any) -> Path:
    """A tokenizer of 1024 words, a model, and prompts with answers of very different lengths.

    What is learnt, the answers, lies unevenly: of some rows all in the first tokens, of others at the end.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer_of_1024_words().save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})).save_pretrained(folder / "model")
    rows = []
    for i in range(48):
        asked = " ".join(f"w{(7 * i + j) % 1000}" for j in range(1 + (5 * i) % 17))
        said = " ".join(f"w{(3 * i + j) % 1000}" for j in range(1 + (11 * i) % 13))
        rows.append({"prompt": asked, "completion": " " + said})
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "eight.jsonl", rows[:8])
    even = [{"prompt": f"w{i} w{i + 1} w3", "completion": f" w{2 * i} w7 w8"} for i in range(16)]
    write_rows(folder / "even.jsonl", even)  # of one length
    write_rows(folder / "five.jsonl", rows[:5])
    return folder


def recipe(said: Mapping[str, Any]) -> dict[str, Any]:
    """What `said` says, over a plain run; None in `trainer` leaves a field out."""
    trainer = {
        "max_steps": STEPS, "logging_steps": 1, "save_steps": 2, "report_to": "none", **PLAIN,
        **said.get("trainer", {}),
    }  # fmt: skip
    trainer = {name: value for name, value in trainer.items() if value is not None}
    base = {
        "model": {"name_or_path": "model", "tokenizer": "tokenizer"},
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 32},
        "precision": "fp32",
        "global_batch_size": 4,
        "python": "hooks.py",
    }
    return {**base, **said, "trainer": trainer}


def planned(
    said: Mapping[str, Any], ground: Path, folder: Path, forks: Forks, world: int = 2, hooks: str = ""
) -> tuple[Path, Mapping[str, str]]:
    """As `prepared`, of the recipe that says `said`."""
    return prepared(recipe(said), ground, folder, forks, world, hooks)


def prepared(
    whole: Mapping[str, Any], ground: Path, folder: Path, forks: Forks, world: int, hooks: str = ""
) -> tuple[Path, Mapping[str, str]]:
    """(A run directory with prepared data, the environment of its ranks.) world 0: one process alone."""
    folder.mkdir()
    for path in ground.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "hooks.py").write_text(KILL_HOOKS + hooks)
    (folder / "r.yaml").write_text(yaml.safe_dump(dict(whole)))
    loaded, facts = gather(load_recipe(folder / "r.yaml"), f"{world}xcpu" if world else "cpu")
    bundle = render(make_plan(loaded, facts))
    out = folder / "out"
    write_run_dir(bundle, out, resume=False)
    _, _, env = bind(bundle, {"run_dir": str(out), "devices": ""})
    ended = forks.run(out, 0, env, module="prepare")
    assert ended.codes == (0,), ended.said
    return out, env


def trained(
    said: Mapping[str, Any],
    ground: Path,
    folder: Path,
    forks: Forks,
    world: int = 2,
    prelude: str | None = None,
    hooks: str = "",
) -> Path:
    """The run directory of a run that was trained to its end. hooks: what hooks.py holds besides."""
    out, env = planned(said, ground, folder, forks, world, hooks)
    ended: Ended = forks.run(out, world, env, prelude=prelude)
    assert set(ended.codes) == {0}, ended.said
    return out


def alone(said: Mapping[str, Any], ground: Path, folder: Path, forks: Forks) -> Path:
    """The same run by one process of plain PyTorch."""
    return trained({**said, "sharding": {"engine": "ddp"}}, ground, folder, forks, world=0)


def column(out: Path, name: str) -> list[float]:
    """A figure of every step."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def result(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def weights(out: Path) -> dict[str, Any]:
    """Name -> tensor of what the run saved in the end."""
    from safetensors.torch import load_file

    kind = "adapter" if (out / "adapter").is_dir() else "model"
    found: dict[str, Any] = {}
    for file in (out / kind).glob("*.safetensors"):
        found |= load_file(file)
    return found


def check_alike(one: Path, parts: Path, *, half: bool = False, norms: bool = True) -> None:
    """The same losses, gradients and tensors under the same names; in 16 bits the curve alone, about."""
    import torch

    assert len(set(column(one, "loss"))) == STEPS
    assert column(parts, "loss") == pytest.approx(column(one, "loss"), rel=2e-3 if half else 2e-6)
    if half:
        return
    if norms:
        assert column(parts, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=2e-5)
    expected, found = weights(one), weights(parts)
    twins = found.keys() - expected.keys()  # a table that is also the head is gathered twice
    assert twins <= {"lm_head.weight"}
    assert all(torch.equal(found[name], found["model.embed_tokens.weight"]) for name in twins)
    assert found.keys() - twins == expected.keys() != set()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=5e-6, msg=name)


def assert_goes_on(said: Mapping[str, Any], ground: Path, folder: Path, forks: Forks) -> None:
    """A run whose ranks kill themselves after its third step ends as one that was let alone."""
    straight = trained(said, ground, folder / "straight", forks)
    out, env = planned(said, ground, folder / "killed", forks)
    ended = forks.run(out, 2, {**env, KILL: "3"})
    assert -9 in ended.codes, ended.said
    ended = forks.run(out, 2, {**env, "EFFILAUNCH_RESUME": "auto"})
    assert ended.codes == (0, 0), ended.said
    assert "resuming from" in (out / "logs" / "rank-1.log").read_text()
    assert column(out, "loss") == column(straight, "loss")
    assert_same(weights(out), weights(straight))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert found.keys() == expected.keys() != set()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_readable(out: Path) -> None:
    """from_pretrained gives the tensors of the file, and finite scores."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out / "model")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights(out).items())
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


def assert_keeps_best(said: Mapping[str, Any], ground: Path, folder: Path, forks: Forks) -> None:
    """A rate that ruins the model: the first evaluation is the best, and its weights are the result."""
    from safetensors.torch import load_file

    trainer = {
        **said.get("trainer", {}), "learning_rate": 5.0, "eval_strategy": "steps", "eval_steps": 1,
        "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 6,
    }  # fmt: skip
    rows = {"train": [{"path": "rows.jsonl"}], "max_length": 32, "eval": [{"path": "eight.jsonl"}]}
    out = trained({**said, "trainer": trainer, "data": rows}, ground, folder / "run", forks)
    evaluated = column(out, "eval_loss")
    best = evaluated.index(min(evaluated)) + 1
    assert best < STEPS
    assert result(out)["eval"]["step"] == best
    assert_same(weights(out), load_file(out / "checkpoints" / f"checkpoint-{best}" / "model.safetensors"))
