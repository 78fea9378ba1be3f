"""Models and their processing for every task: tiny random weights, the real libraries, no network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.errors import RecipeError
from launcher.rows.sources import Detected, Row
from launcher.train.model.adapters import attach_adapter, linear_suffixes
from launcher.train.model.models import head_modules, label_order, load_model
from launcher.train.model.processing import load_processing
from launcher.train.tasks import train_task

sys.path.insert(0, str(Path(__file__).parent))
from plans import TINY_LLAMA, generate
from task_models import CONFIGS, LABELS, LORA, SIZES, TINY_VIT, batch_for, job_for, load, train_steps

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("task", CONFIGS)
def test_a_random_model_of_every_task_learns_and_is_read_back(tmp_path, task):
    processing, model = load(job_for(tmp_path / "run", task))
    batch = batch_for(task, processing)
    losses = train_steps(model, batch)
    assert losses[-1] < losses[0]
    for part in (model, processing):
        part.save_pretrained(tmp_path / "saved")
    again, loaded = load(job_for(tmp_path / "again", task, model__name_or_path=str(tmp_path / "saved")))
    assert type(loaded) is type(model)
    batch = {name: value for name, value in batch.items() if name != "attention_mask"}
    with torch.no_grad():
        found, expected = (one.eval()(**batch) for one in (loaded, model))
    name = "last_hidden_state" if task == "embedding" else "logits"
    torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
    assert type(again) is type(processing)


@pytest.mark.parametrize("task", CONFIGS)
def test_lora_on_every_task(tmp_path, task):
    job = job_for(tmp_path / "run", task, adapter=LORA)
    processing, base = load(job)
    batch = batch_for(task, processing)
    heads = head_modules(base)
    model = attach_adapter(job, base, processing)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or ".modules_to_save." in name for name in trained)
    if "classification" in task:
        assert heads == ["classifier"]
        assert {name for name in trained if "classifier" in name} == {
            f"base_model.model.classifier.modules_to_save.default.{part}" for part in ("weight", "bias")
        }
    losses = train_steps(model, batch)
    assert losses[-1] < losses[0] - 0.01
    model.save_pretrained(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (
        written["task_type"]
        == {
            "causal-lm": "CAUSAL_LM",
            "dpo": "CAUSAL_LM",
            "kto": "CAUSAL_LM",
            "grpo": "CAUSAL_LM",
            "reward": "SEQ_CLS",
            "seq2seq-lm": "SEQ_2_SEQ_LM",
            "sequence-classification": "SEQ_CLS",
            "token-classification": "TOKEN_CLS",
            "image-classification": None,
            "embedding": "FEATURE_EXTRACTION",
            "reranker": "SEQ_CLS",
        }[task]
    )


def test_heads_that_peft_does_not_know_are_trained(tmp_path):
    """DeBERTa's pooler is new and comes before the classifier; peft knows `classifier` and `score` alone."""
    config = {"model_type": "deberta-v2", **SIZES, "pooler_hidden_size": 32}
    changes = {
        "model__config": config,
        "adapter": {**LORA, "target_modules": ["query_proj"]},
        "model__attn_implementation": "eager",
    }
    job = job_for(tmp_path / "run", "sequence-classification", **changes)
    processing, base = load(job)
    assert head_modules(base) == ["pooler", "classifier"]
    model = attach_adapter(job, base, processing)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "base_model.model.pooler.modules_to_save.default.dense.weight" in trained
    losses = train_steps(model, batch_for("sequence-classification", processing))
    assert losses[-1] < losses[0]


def test_labels_of_the_data_make_the_head(tmp_path):
    for task in ("sequence-classification", "image-classification"):
        _, model = load(job_for(tmp_path / task, task))
        assert model.config.id2label == dict(enumerate(LABELS))
        assert model.config.problem_type == "single_label_classification"


def saved_classifier(folder: Path, labels: tuple[str, ...]) -> str:
    processing, model = load(job_for(folder / "run", "sequence-classification"), labels)
    for part in (model, processing):
        part.save_pretrained(folder / "saved")
    return str(folder / "saved")


def test_the_checkpoints_order_of_the_same_labels_is_kept(tmp_path):
    saved = saved_classifier(tmp_path, ("owl", "cat", "dog"))
    job = job_for(tmp_path / "next", "sequence-classification", model__name_or_path=saved)
    assert label_order(job, ["cat", "dog", "owl"]) == ("owl", "cat", "dog")
    assert label_order(job, ["dog", "cat"]) == ("dog", "cat"), "other labels: the order of the data"


def test_a_head_for_other_labels_is_new_and_said_so(tmp_path, capsys):
    saved = saved_classifier(tmp_path, ("owl", "cat", "dog"))
    job = job_for(tmp_path / "same", "sequence-classification", model__name_or_path=saved)
    capsys.readouterr()
    load(job, ("owl", "cat", "dog"))
    assert (
        "the classification head classifier starts from the checkpoint's weights" in capsys.readouterr().out
    )
    _, model = load(job, ("yes", "no"))
    assert model.classifier.out_features == 2
    said = capsys.readouterr().out
    assert "newly initialised, not from the checkpoint: classifier.bias, classifier.weight\n" in said


def test_other_sizes_than_the_heads_are_refused(tmp_path):
    saved = saved_classifier(tmp_path, ("owl", "cat", "dog"))
    path = Path(saved) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 64}))
    job = job_for(tmp_path / "next", "sequence-classification", model__name_or_path=saved)
    with pytest.raises(RecipeError, match=r"position_embeddings.weight is \(128, 32\) in the checkpoint"):
        load(job, ("yes", "no"))


def test_a_decoder_classifies_a_padded_batch(tmp_path):
    """Without pad_token_id in its configuration it refuses batches, or scores the padding."""
    task = "sequence-classification"
    processing, model = load(job_for(tmp_path / "run", task, model__config=TINY_LLAMA))
    assert model.config.pad_token_id == processing.pad_token_id
    both = processing(
        ["one red bird sings", "two"], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    alone = processing(["two"], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        together = model(**both).logits[1]
        assert torch.allclose(together, model(**alone).logits[0], atol=1e-5)


def words_that_end(folder, *spare):
    """A tokenizer of words that writes its EOS, which also pads, after each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    core = Tokenizer(
        models.WordLevel({w: n for n, w in enumerate(("a", "b", "</s>", *spare))}, unk_token="a")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    made.save_pretrained(folder)
    return {
        "tiny": False,
        "model__tokenizer": str(folder),
        "model__config": {**TINY_LLAMA, "pad_token_id": 2},
    }


@pytest.mark.parametrize("task", ["reward", "sequence-classification", "reranker"])
def test_a_classifier_reads_the_end_where_the_tokenizer_pads_with_it(tmp_path, task):
    words = words_that_end(tmp_path / "words", "<pad>")
    processing, model = load(job_for(tmp_path / "run", task, **words))
    both = processing(["a b b", "b"], padding=True, return_tensors="pt", return_token_type_ids=False)
    assert both["input_ids"][1].tolist() == [1, 2, 3, 3]
    assert model.config.pad_token_id == processing.pad_token_id == 3
    with torch.no_grad():
        every = model.score(model.model(**both).last_hidden_state)
        assert torch.equal(model(**both).logits, torch.stack([every[0, 3], every[1, 1]]))


def test_a_row_that_ends_with_the_only_pad_token_is_refused_and_an_added_one_helps(tmp_path):
    words = words_that_end(tmp_path / "words")
    rows = [Row({"text": "a b", "text_pair": None, "label": "yes"}, "rows.jsonl", 4)]
    for number, more in enumerate(({}, {"model__add_tokens": ["<|pad|>"]})):
        job = job_for(tmp_path / f"run{number}", "sequence-classification", **words, **more)
        processing = load_processing(job)
        encode = train_task(job.task.name).encoder(
            job, processing, Detected("classification", {}), ("no", "yes")
        )
        if more:
            assert encode(rows).columns["input_ids"] == [[0, 1, 2]]
            assert load(job)[1].config.pad_token_id == processing.pad_token_id == 3
            continue
        with pytest.raises(RecipeError) as caught:
            encode(rows)
        (problem,) = caught.value.problems
        assert (problem.code, problem.line, problem.path) == ("pad-at-end", 4, "model.add_tokens")


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_quantised_classifier_keeps_its_head(tmp_path, quantization):
    """Upstream's own choice quantises BERT's classifier, which then cannot be trained."""
    kbit = {"model__device_map": "local", "model__prepare_for_kbit": True, "adapter": LORA}
    job = job_for(tmp_path / "run", "sequence-classification", model__quantization=quantization, **kbit)
    processing, base = load(job)
    assert type(base.classifier) is torch.nn.Linear
    assert type(base.bert.pooler.dense) is not torch.nn.Linear
    model = attach_adapter(job, base, processing)
    losses = train_steps(model, batch_for("sequence-classification", processing))
    assert losses[-1] < losses[0]


def test_seq2seq_from_scratch_starts_decoding_with_the_pad_token(tmp_path):
    processing, model = load(job_for(tmp_path / "run", "seq2seq-lm"))
    assert model.config.decoder_start_token_id == processing.pad_token_id
    assert model.config.eos_token_id == processing.eos_token_id


def test_images_are_made_as_large_as_the_model_wants(tmp_path):
    from PIL import Image

    job = job_for(tmp_path / "run", "image-classification")
    processor, model = load(job)
    assert type(processor).__name__ == "ViTImageProcessorPil"
    picture = Image.fromarray(np.zeros((50, 70, 3), dtype=np.uint8))
    pixels = processor(picture, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32)
    assert model(pixel_values=pixels).logits.shape == (1, 3)


def test_a_checkpoint_without_an_image_processor_is_refused(tmp_path):
    _, model = load(job_for(tmp_path / "run", "image-classification"))
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(RecipeError, match=r"no image processor in"):
        load_processing(
            job_for(tmp_path / "next", "image-classification", model__name_or_path=str(tmp_path / "saved"))
        )


@pytest.mark.parametrize("model_type", ["vit", "swin"])
def test_reentrant_checkpointing_of_an_image_model(tmp_path, model_type):
    """Swin's patch embedding gives a tuple, on which upstream's hook fails; pixels are tensors everywhere."""
    swin = {"model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1],
            "num_heads": [2, 2], "window_size": 4}  # fmt: skip
    changes: dict[str, Any] = {
        "model__config": TINY_VIT if model_type == "vit" else swin,
        "model__enable_input_require_grads": True,
        "trainer__activation_checkpointing": True,
        "adapter": LORA,
    }
    job = job_for(tmp_path / "run", "image-classification", **changes)
    processing, base = load(job)
    model = attach_adapter(job, base, processing)
    model.get_base_model().activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": True}
    )
    model.train()
    model(**batch_for("image-classification", processing)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_linear_layers_are_listed_by_their_last_names(tmp_path):
    _, vit = load(job_for(tmp_path / "vit", "image-classification"))
    assert linear_suffixes(vit) == ["classifier", "fc1", "fc2", "k_proj", "o_proj", "q_proj", "v_proj"]
    gpt2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 32, "n_layer": 1, "n_head": 2}
    _, model = load(job_for(tmp_path / "gpt2", "causal-lm", model__config=gpt2))
    assert linear_suffixes(model) == ["c_attn", "c_fc", "c_proj", "lm_head"]


def test_a_gguf_file_is_for_causal_models_only(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.train.model.models.model_reference", lambda job: "unused")
    job = job_for(tmp_path / "run", "seq2seq-lm", model__name_or_path="x", model__gguf_file="x.gguf")
    with pytest.raises(RecipeError, match="not a seq2seq-lm model"):
        load_model(job, None)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_generate_says_the_label_of_a_text(tmp_path, adapter):
    task = "sequence-classification"
    job = job_for(tmp_path / "run", task, **({"adapter": adapter} if adapter else {}))
    processing, base = load(job)
    model = attach_adapter(job, base, processing)
    batch = processing(
        ["one red bird", "two"], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    train_steps(model, {**batch, "labels": torch.tensor([2, 0])}, steps=30)
    folder = tmp_path / "run" / ("adapter" if adapter else "model")
    for part in (model, processing):
        part.save_pretrained(folder)
    (tmp_path / "run" / "data.json").write_text(json.dumps({"labels": LABELS}))
    assert [generate(tmp_path / "run", text) for text in ("one red bird", "two")] == ["owl", "cat"]


def test_generate_of_seq2seq_gives_the_whole_answer(tmp_path):
    job = job_for(tmp_path / "run", "seq2seq-lm")
    processing, model = load(job)
    source = processing("a long prompt of many words, longer than its answer", return_tensors="pt")
    target = processing("yes sir" + processing.eos_token, return_tensors="pt")
    train_steps(model, {"input_ids": source["input_ids"], "labels": target["input_ids"]}, steps=60)
    for part in (model, processing):
        part.save_pretrained(tmp_path / "run" / "model")
    assert generate(tmp_path / "run", "a long prompt of many words, longer than its answer") == "yes sir"


def test_generate_says_the_label_of_a_picture(tmp_path):
    from PIL import Image

    job = job_for(tmp_path / "run", "image-classification", adapter=LORA)
    processing, base = load(job)
    model = attach_adapter(job, base, processing)
    pictures = {"black": (0, 0, 0), "white": (255, 255, 255)}
    for name, colour in pictures.items():
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{name}.png")
    opened = [Image.open(tmp_path / f"{name}.png").convert("RGB") for name in pictures]
    pixels = processing(opened, return_tensors="pt")
    train_steps(model, {**pixels, "labels": torch.tensor([2, 0])}, steps=20)
    for part in (model, processing):
        part.save_pretrained(tmp_path / "run" / "adapter")
    (tmp_path / "run" / "data.json").write_text(json.dumps({"labels": LABELS}))
    assert [generate(job.run_dir, str(tmp_path / f"{name}.png")) for name in pictures] == ["owl", "cat"]
    with pytest.raises(RecipeError, match="cannot be read as an image") as caught:
        generate(job.run_dir, "a cat")
    assert "path of an image" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "start"), [("chat", "user"), ("text", "hello"), ("instruction", "### Inst")]
)
def test_generate_puts_a_prompt_as_the_rows_were(tmp_path, found, start):
    """The recipe may say `auto`; what the rows were stands in data.json."""
    from launcher.train.results.generate import _encode

    job = job_for(tmp_path / "run", "causal-lm", data__train=[{"path": "x", "format": "auto", "columns": {}}])
    (job.run_dir / "data.json").write_text(json.dumps({"formats": [found]}))
    tokenizer = load_processing(job)
    ids = _encode(job, tokenizer, "hello")["input_ids"][0]
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith(start)
