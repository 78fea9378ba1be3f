"""The memory ladder climbed for real on CPU: real processes, small random models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import effilaunch

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]
# Six narrow layers over long rows: activations weigh as much as states, as they do in large models.
RECIPE = """\
model:
  config: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 256,
           num_hidden_layers: 6, num_attention_heads: 4, num_key_value_heads: 4,
           max_position_embeddings: 128, bos_token_id: 1, eos_token_id: 2}
  tokenizer: tokenizer
data: {train: [{path: rows.jsonl}], max_length: 128, eval: {split: 0.125}, metrics: [perplexity]}
global_batch_size: 8
trainer: {max_steps: 6, learning_rate: 1.0e-3, logging_steps: 1}
launch: {env: {OMP_NUM_THREADS: "1"}}
"""


@pytest.fixture
def folder(tmp_path):
    """A recipe's folder: rows of 60 words, and their tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": 4 + i for i in range(500)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": " ".join(f"w{(i + j) % 500}" for j in range(120))} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.slow
def test_memory_falls_rung_by_rung_as_predicted(folder):
    out = folder / "out"
    asked = ("fp32", "pure-16bit", "accumulation", "checkpointing")  # each is a run of its own
    given = ("--on", "cpu", "--steps", "2", "--only", ",".join(asked), "--output-dir", out)
    data = effilaunch("ladder", folder / "r.yaml", *given)
    rungs = {rung["id"]: rung for rung in data["rungs"]}
    assert [(name, rung["status"], rung["reason"]) for name, rung in rungs.items()] == [
        (name, "done", None) for name in asked
    ]
    measured = {name: rung["measured"] for name, rung in rungs.items()}
    assert measured["pure-16bit"] < 0.7 * measured["fp32"]
    assert measured["accumulation"] < 0.6 * measured["pure-16bit"]
    assert measured["checkpointing"] < 0.64 * measured["accumulation"]  # it stands on sgd, too
    for name, rung in rungs.items():
        assert rung["predicted"] == pytest.approx(rung["measured"], rel=0.2), name
        assert rung["seconds"] > 0
        assert rung["metric"]["name"] == "eval_perplexity"
        assert rung["metric"]["value"] > 1
    assert rungs["pure-16bit"]["load"] == pytest.approx(rungs["fp32"]["load"] / 2, rel=0.1)
    # Rows are prepared once, and the weights of a few steps do not stay.
    assert [path.parent.parent.name for path in sorted(out.rglob("prepare.log"))] == ["01-fp32"]
    assert not list(out.rglob("*.safetensors"))
    assert json.loads((out / "ladder.json").read_text())["rungs"] == data["rungs"]
    assert "<svg" in (out / "ladder.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_eight_method_ladder_climbs_to_its_end(tmp_path):
    """Compiles DeepSpeed's CPU operators once."""
    data = effilaunch("ladder", "vit_l16_ladder", "--tiny", "--on", "cpu", "--output-dir", tmp_path / "out")
    rungs = {rung["id"]: rung for rung in data["rungs"]}
    assert len(rungs) == 14
    assert {name: r["reason"] for name, r in rungs.items() if r["status"] != "done"} == {
        "on-device": "a CPU has no second memory: the model is built where it stays"
    }
    assert rungs["sharding"]["hardware"] == "2xcpu"
    for name, rung in rungs.items():
        if rung["status"] == "done" and name != "cpu-offload":  # on a CPU the host's memory is measured, too
            assert rung["predicted"] == pytest.approx(rung["measured"], rel=0.25), name
