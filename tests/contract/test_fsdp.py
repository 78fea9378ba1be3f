"""FSDP2 over one and two CPU ranks learns what one process of plain PyTorch learns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from engine_runs import prepared
from forked import KILL, Forks
from grounds import tokenizer_of_1024_words, write_rows

from launcher.recipe.optimizer_needs import IN_SHARDS

if not find_spec("torch"):  # not imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

FSDP = {"engine": "fsdp"}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SOURCE = {"train": [{"path": "rows.jsonl"}], "max_length": 32}
STEPS = 6


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    """A tokenizer of 1024 words, a model, and rows of every format that is trained here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("ground")
    tokenizer_of_1024_words().save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder / "model")
    mixture = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**mixture)).save_pretrained(folder / "experts")
    pairs = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w{i + 3} w7 w8 <new>"} for i in range(64)]
    answers = [
        {"prompt": f"w{i} w{i + 1}", "chosen": f" w{i + 2} w7", "rejected": f" w{i + 3}"} for i in range(64)
    ]
    labelled = [{"text": f"w{i} w{i + 1} w{i % 3}", "label": "ab"[i % 2]} for i in range(64)]
    for name, rows in (("rows", pairs), ("answers", answers), ("labelled", labelled)):
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def recipe(said: dict[str, Any]) -> dict[str, Any]:
    trainer = {
        "max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "linear", "logging_steps": 1,
        "save_steps": 3, "report_to": "none", "per_device_train_batch_size": 2, **said.get("trainer", {}),
    }  # fmt: skip
    model = said.get("model", {"config": LLAMA, "tokenizer": "tokenizer"})
    base = {
        "data": SOURCE,
        "precision": "fp32",
        "global_batch_size": 8,
        "sharding": FSDP,
        "python": "hooks.py",
    }
    return {**base, **said, "trainer": trainer, "model": model}


def planned(
    said: dict[str, Any], ground: Path, folder: Path, forks: Forks, world: int = 2
) -> tuple[Path, Mapping[str, str]]:
    """(A run directory with prepared data, the environment of its ranks.)"""
    return prepared(recipe(said), ground, folder, forks, world)


def trained(said: dict[str, Any], ground: Path, folder: Path, forks: Forks, world: int = 2) -> Path:
    out, env = planned(said, ground, folder, forks, world)
    ended = forks.run(out, world, env)
    assert set(ended.codes) == {0}, ended.said
    return out


def alone(said: dict[str, Any], ground: Path, folder: Path, forks: Forks) -> Path:
    """The same run by one process."""
    return trained({**said, "sharding": {"engine": "ddp"}}, ground, folder, forks, world=0)


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def weights(out: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    kind = "adapter" if (out / "adapter").is_dir() else "model"
    found: dict[str, Any] = {}
    for file in (out / kind).glob("*.safetensors"):
        found |= load_file(file)
    return found


def check_alike(one: Path, two: Path, *, half: bool) -> None:
    """The same curve, and the same tensors under the same names; in 16 bits the curve alone, about."""
    import torch

    assert losses(two) == pytest.approx(losses(one), rel=3e-2 if half else 2e-4)
    assert len(set(losses(one))) == STEPS
    expected, found = weights(one), weights(two)
    assert found.keys() == expected.keys() != set()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        if not half:
            torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3)


SAVED = {"name_or_path": "model", "tokenizer": "tokenizer"}
CLASSES = {**SOURCE, "train": [{"path": "labelled.jsonl"}], "eval": {"split": 0.2}, "metrics": ["accuracy"]}
ANSWERS = {**SOURCE, "train": [{"path": "answers.jsonl"}]}
AGAIN = {"activation_checkpointing": True}
OFFLOADED = {**FSDP, "offload_param": "cpu"}
NF4 = {**SAVED, "quantization": "nf4"}
ALIKE: dict[str, dict[str, Any]] = {
    "weights from a folder": {"model": SAVED},
    "LoRA over weights from a folder": {"model": SAVED, "adapter": LORA},
    "tied": {"model": {"config": {**LLAMA, "tie_word_embeddings": True}, "tokenizer": "tokenizer"}},
    "random, recomputed": {"trainer": AGAIN},
    "LoRA, recomputed": {"adapter": LORA, "trainer": AGAIN},
    "4-bit, LoRA": {"model": {**SAVED, "quantization": "nf4"}, "adapter": LORA},
    "4-bit experts, LoRA, recomputed": {
        "model": {"name_or_path": "experts", "tokenizer": "tokenizer", "quantization": "nf4"},
        "adapter": LORA,
        "trainer": AGAIN,
    },
    "LoRA, added token": {"adapter": LORA, "model": {**SAVED, "add_tokens": ["<new>"]}},
    "classes": {"task": "sequence-classification", "model": SAVED, "data": CLASSES},
    "DPO": {"task": "dpo", "model": SAVED, "data": ANSWERS},
    "DPO, random, precomputed": {
        "task": "dpo",
        "data": ANSWERS,
        "trainer": {"precompute_ref_log_probs": True},
    },
    "DPO, LoRA": {"task": "dpo", "adapter": LORA, "data": ANSWERS},
    "offloaded": {"model": SAVED, "sharding": OFFLOADED},
    "offloaded, bf16, LoRA, recomputed": {
        "sharding": OFFLOADED,
        "precision": "bf16",
        "adapter": LORA,
        "trainer": AGAIN,
    },
    "offloaded, 4-bit, LoRA": {"sharding": OFFLOADED, "model": NF4, "adapter": LORA},
    "offloaded, tied": {
        "sharding": OFFLOADED,
        "model": {"config": {**LLAMA, "tie_word_embeddings": True}, "tokenizer": "tokenizer"},
    },
    "bf16": {"precision": "bf16"},
    "bf16, 4-bit, LoRA": {"precision": "bf16", "model": {**SAVED, "quantization": "nf4"}, "adapter": LORA},
    "bf16, 4-bit, bfloat16 norms, LoRA": {
        "precision": "bf16",
        "model": {**SAVED, "quantization": "nf4", "kbit_norms": "bfloat16"},
        "adapter": LORA,
    },
    "bf16, LoRA, recomputed": {"precision": "bf16", "adapter": LORA, "trainer": AGAIN},
    "bf16-true": {"precision": "bf16-true"},
    "fp16-true": {"precision": "fp16-true", "trainer": {"adam_epsilon": 1e-4}},
    "bf16-true, LoRA": {"precision": "bf16-true", "adapter": LORA, "model": SAVED},
    **{optim: {"trainer": {"optim": optim}} for optim in sorted({*IN_SHARDS} - {"adamw_torch_fused"})},
}
UNCOUNTED = ("DPO",)
"""Whose plan counts more than the trained model: the reference beside it."""
SHORT = ("LoRA over weights from a folder",)
CASES = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in ALIKE]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_process_learns(name, ground, tmp_path, forks):
    said = ALIKE[name]
    one = alone(said, ground, tmp_path / "one", forks)
    two = trained(said, ground, tmp_path / "two", forks)
    check_alike(one, two, half="16" in name)
    told, alone_told = (json.loads((out / "result.json").read_text()) for out in (two, one))
    assert (told["distributed_type"], told["processes"]) == ("FSDP", 2)
    if "eval" in said.get("data", {}):
        assert told["eval"]["eval_accuracy"] == alone_told["eval"]["eval_accuracy"]
        # Rows that are repeated to fill the last batch of the ranks count in its loss.
        assert told["eval"]["eval_loss"] == pytest.approx(alone_told["eval"]["eval_loss"], rel=0.05)
        return
    if name in UNCOUNTED:
        return
    if name.startswith("offloaded"):  # over CPU processes nothing tells the host's memory from a device's
        moved = [told["memory"]["components"][kind] for kind in ("gradients", "optimizer")]
        assert moved == [{"predicted": 0, "measured": None}] * 2
        return
    # Each rank holds what the plan says: its share. (An evaluation leaves norm and head gathered.)
    components = told["memory"]["components"]
    rows = 2048 if "added token" in name else 0  # two rows with their states: too few to be planned
    for kind in ("weights", "gradients", "optimizer"):
        expected = pytest.approx(components[kind]["predicted"], rel=0.02, abs=rows)
        assert components[kind]["measured"] == expected, kind


@pytest.mark.parametrize("adapter", cases({"full": None, "LoRA": LORA}, "LoRA", named=True))
@pytest.mark.parametrize("world", cases([0, 2], 0))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(world, adapter, ground, tmp_path, forks):
    """Dropout is on, and layers are recomputed: the masks come from the random states that were saved."""
    said: dict[str, Any] = {
        "model": {"config": {**LLAMA, "attention_dropout": 0.1}, "tokenizer": "tokenizer"},
        "trainer": {**AGAIN, "save_steps": 2},
    }
    if adapter is not None:
        said["adapter"] = {**adapter, "lora_dropout": 0.1}
    straight = trained(said, ground, tmp_path / "straight", forks, world)
    out, env = planned(said, ground, tmp_path / "killed", forks, world)
    ended = forks.run(out, world, {**env, KILL: "5"})
    assert -9 in ended.codes, ended.said
    assert losses(out) == losses(straight)[:5]
    ended = forks.run(out, world, {**env, "EFFILAUNCH_RESUME": "auto"})
    assert set(ended.codes) == {0}, ended.said
    last = (out / "logs" / f"rank-{max(0, world - 1)}.log").read_text()
    assert "resuming from" in last
    assert losses(out) == losses(straight)
    assert_same(weights(out), weights(straight))


MOVED = """
import os
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

made = FSDPParam.__init__

def counted(self, *args, **given):
    made(self, *args, **given)
    with open(f"moved-{os.environ['RANK']}", "a") as file:
        print(self.offload_to_cpu, file=file)

FSDPParam.__init__ = counted
"""


def test_an_offloaded_run_goes_on_where_it_was_killed(ground, tmp_path, forks):
    """Each shard is one that FSDP2 moves; the curve is that of shards that stay, to the last digit."""
    said = {"model": SAVED, "adapter": LORA, "trainer": {"save_steps": 2}}
    stays = trained(said, ground, tmp_path / "stays", forks)
    out, env = planned({**said, "sharding": OFFLOADED}, ground, tmp_path / "killed", forks)
    with (out.parent / "hooks.py").open("a") as hooks:
        hooks.write(MOVED.replace("moved-", f"{tmp_path}/moved-"))
    ended = forks.run(out, 2, {**env, KILL: "5"})
    assert -9 in ended.codes, ended.said
    for rank in range(2):
        assert set((tmp_path / f"moved-{rank}").read_text().split()) == {"True"}
    ended = forks.run(out, 2, {**env, "EFFILAUNCH_RESUME": "auto"})
    assert set(ended.codes) == {0}, ended.said
    assert "resuming from" in (out / "logs" / "rank-1.log").read_text()
    assert losses(out) == losses(stays)
    assert_same(weights(out), weights(stays))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert found.keys() == expected.keys() != set()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def in_shards(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """The weights that the ranks wrote into a checkpoint, put together by torch."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint / "pytorch_model_fsdp_0", folder / "whole.pt")
    found: dict[str, Any] = torch.load(folder / "whole.pt", weights_only=True)["model"]
    return found


def test_what_is_saved_is_what_was_trained(ground, tmp_path, forks):
    """The model in the end against the shards of the last checkpoint, and as from_pretrained reads it."""
    from transformers import AutoModelForCausalLM

    out = trained({"model": SAVED}, ground, tmp_path / "run", forks)
    last = out / "checkpoints" / f"checkpoint-{STEPS}"
    assert not list(last.glob("*.safetensors")), "checkpoints are shards"
    shards = in_shards(last, tmp_path)
    assert_same(weights(out), shards)
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    assert_same(dict(loaded.state_dict()), shards)


@pytest.mark.slow
def test_a_checkpoint_of_weights_alone_is_a_model(ground, tmp_path, forks):
    out = trained({"trainer": {"save_only_model": True}}, ground, tmp_path / "run", forks)
    from safetensors.torch import load_file

    assert_same(load_file(out / "checkpoints" / f"checkpoint-{STEPS}" / "model.safetensors"), weights(out))


@pytest.mark.slow
def test_the_best_checkpoint_is_what_stays(ground, tmp_path, forks):
    """A learning rate that ruins the model: the first evaluation is the best."""
    said = {
        "data": {**SOURCE, "eval": {"split": 0.1}},
        "trainer": {
            "learning_rate": 5.0, "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 1,
            "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 6,
        },
    }  # fmt: skip
    out = trained(said, ground, tmp_path / "run", forks)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert best < STEPS
    result = json.loads((out / "result.json").read_text())
    assert (result["eval"]["step"], result["eval"]["eval_loss"]) == (best, evaluated[best])
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(
        out / "checkpoints" / f"checkpoint-{best}" / "pytorch_model_fsdp_0", tmp_path / "best.pt"
    )
    assert_same(weights(out), torch.load(tmp_path / "best.pt", weights_only=True)["model"])


BUILT_FOR_CUDA = """
import torch

torch._C._get_accelerator = lambda *_: torch.device("cuda")
"""


def test_a_torch_for_cuda_shards_over_cpus_too(ground, tmp_path, forks):
    """FSDP2 alone would shard over devices that are not there: 'Found no NVIDIA driver'."""
    out, env = planned({"trainer": {"max_steps": 1}}, ground, tmp_path / "run", forks, world=0)
    with (out.parent / "hooks.py").open("a") as hooks:
        hooks.write(BUILT_FOR_CUDA)
    ended = forks.run(out, 0, env)
    assert ended.codes == (0,), ended.said
    assert len(losses(out)) == 1


def changed(out: Path, **settings: Any) -> None:
    """Another value for settings of a plan that was written."""
    file = out / "plan.json"
    plan = json.loads(file.read_text())
    for name, value in settings.items():
        plan["settings"][name]["value"] = value
    file.write_text(json.dumps(plan))


@pytest.mark.slow
def test_layers_are_recomputed_with_the_same_dropout(ground, tmp_path, forks):
    """The Trainer's checkpointing changes nothing; FSDP's own, as accelerate has it, changes gradients."""
    model = {"config": {**LLAMA, "attention_dropout": 0.5}, "tokenizer": "tokenizer"}
    said = {"model": model, "global_batch_size": 4}
    plain = trained(said, ground, tmp_path / "plain", forks)
    again = trained({**said, "trainer": AGAIN}, ground, tmp_path / "again", forks)
    assert losses(again) == losses(plain)
    out, env = planned(said, ground, tmp_path / "own", forks)
    changed(out, **{"fsdp.activation_checkpointing": True})
    ended = forks.run(out, 2, env)
    assert ended.codes == (0, 0), ended.said
    assert losses(out)[0] == losses(plain)[0], "the first forward pass is the same"
    assert losses(out)[1] != losses(plain)[1]
