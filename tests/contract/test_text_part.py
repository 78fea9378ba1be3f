"""The text model of checkpoints for text and images: planned, loaded alone, trained, saved and merged.

The oracle is the whole model of transformers on text alone: its logits are those of the text model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.errors import RecipeError
from launcher.models.text_part import UNEQUAL, image_text_types, text_part
from launcher.planner.narrow import narrow_config
from launcher.train.results.merge import merge

sys.path.insert(0, str(Path(__file__).parent))
from plans import LORA, trained
from task_models import job_for, load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

WRAPPERS = (
    "gemma3", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe", "mistral3", "llava", "idefics3", "smolvlm",
    "minicpm_ocr",
)  # fmt: skip
MORE: dict[str, dict[str, Any]] = {"gemma4": {"vision_config": {"model_type": "gemma4_vision"}}}
"""What the class does not have by default."""
ALL = {**LORA, "target_modules": "all-linear"}
ATTENTION = {**LORA, "target_modules": ["q_proj", "v_proj"]}
CHANGES = {"model.config": None, "model.text_only": True}


def save_wrapper(folder: Path, kind: str) -> Any:
    """A small model of random weights of this type, with its tokenizer, in `folder`; the model."""
    config = transformers.AutoConfig.for_model(kind, **MORE.get(kind, {})).to_dict() | {"model_type": kind}
    built = transformers.AutoConfig.for_model(**narrow_config(config))
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(built).float().eval()
    model.save_pretrained(folder)
    processing, _ = load(job_for(folder / "run", "causal-lm"))
    processing.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory):
    """Folder and model of a type, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, save_wrapper(folder, kind)
        return made[kind]

    return get


def logits(model: Any) -> Any:
    ids = torch.arange(5, 29).reshape(2, 12)
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_model_is_that_of_the_checkpoint_and_is_saved_alone(kind, wrappers, tmp_path):
    folder, whole = wrappers(kind)
    job = job_for(tmp_path / "run", "causal-lm", model__name_or_path=str(folder), model__config=None,
                  model__text_only=True)  # fmt: skip
    _, model = load(job)
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in whole.parameters())
    assert torch.equal(logits(model), logits(whole))
    model.save_pretrained(tmp_path / "saved")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_it_trains_with_an_adapter_and_merges(kind, wrappers, tmp_path):
    folder, _ = wrappers(kind)
    run = trained(
        tmp_path / "run",
        {**CHANGES, "model.name_or_path": str(folder), "adapter": ATTENTION, "trainer.max_steps": 3},
    )
    found = merge(run, run / "merged", "float32", lambda _: "a card\n")
    assert found.sum.is_none
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "merged")
    assert type(merged).__name__.endswith("ForCausalLM")
    assert not torch.allclose(logits(merged), logits(wrappers(kind)[1]))


@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification"])
def test_weights_that_the_checkpoint_lacks_are_refused(task, wrappers, tmp_path):
    """Under other names than those of TEXT_KEYS every weight would start at random."""
    from safetensors.torch import load_file, save_file

    folder, _ = wrappers("llava")
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (moved / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": value for name, value in weights.items()}, moved / "model.safetensors")
    job = job_for(tmp_path / "run", task, model__name_or_path=str(moved), model__config=None,
                  model__text_only=True)  # fmt: skip
    with pytest.raises(RecipeError) as caught:
        load(job)
    assert caught.value.problems[0].code == "weights-missing"


@pytest.mark.parametrize(("kind", "text"), [("gemma3", "gemma3_text"), ("qwen3_5", "qwen3_5_text")])
def test_a_plan_has_the_text_model_alone(kind, text, wrappers, tmp_path, capsys, monkeypatch):
    folder, _ = wrappers(kind)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {folder}}}\nadapter: {{type: lora, target_modules: [q_proj, v_proj]}}\n"
        f"data: {{train: [{{path: {rows}}}], max_length: 64}}\ntrainer: {{max_steps: 2}}\n"
    )
    capsys.readouterr()  # what loading the models printed
    assert main(["plan", str(recipe), "--on", "1xA100-80GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["settings"]["model.text_only"]["value"] is True
    _, model = load(job_for(tmp_path / "run", "causal-lm", model__name_or_path=str(folder),
                            model__config=None, model__text_only=True))  # fmt: skip
    assert model.config.model_type == text
    assert plan["model"]["params"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("llava", {"model_type": "llama", "vocab_size": 32064}),
        pytest.param("lfm2_vl", {"model_type": "lfm2"}, marks=pytest.mark.slow),
    ],
)
def test_tiny_fills_in_the_sizes_that_a_published_text_config_leaves_to_its_class(
    kind, text, tmp_path, capsys
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {tmp_path}}}\nadapter: {{type: lora}}\n"
        f"data: {{train: [{{path: {rows}}}], max_length: 64}}\n"
    )
    assert main(["run", str(recipe), "--tiny", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["params"] < 2_000_000
    assert plan["settings"]["model.config"]["value"]["num_hidden_layers"] == 2


@pytest.mark.parametrize("kind", sorted({*image_text_types()} - {*UNEQUAL}))
def test_the_text_part_is_the_one_that_transformers_would_load(kind):
    found = image_text_types()[kind]
    config = {"model_type": kind, "text_config": {"model_type": found["text"]}}
    if found["text"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        part = text_part(kind, config, "causal-lm")
        assert (part.wrapper, part.config["model_type"]) == (kind, found["text"])
        assert part.config["tie_word_embeddings"] is found["tied"]
    elif found["text"] is not None:
        with pytest.raises(RecipeError) as caught:
            text_part(kind, config, "causal-lm")
        assert caught.value.problems[0].code == "multimodal-model"


def test_text_models_that_compute_otherwise_than_in_their_checkpoint_are_refused():
    for kind in UNEQUAL:
        with pytest.raises(RecipeError) as caught:
            text_part(kind, {"model_type": kind, "text_config": {"model_type": "cohere2"}}, "causal-lm")
        assert caught.value.problems[0].code == "multimodal-model"
