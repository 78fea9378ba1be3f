"""A step of one batch and the same step in four micro-batches: the same loss, also where the model ignores
`num_items_in_batch`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cases import cases

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from library_cases import INDEPENDENT, make_ground, make_run  # noqa: E402
from small import Rows, job, llama, lora, metrics, sequences, tokenizer  # noqa: E402

from launcher.train.data.batches import make_collator  # noqa: E402
from launcher.train.job import read_job  # noqa: E402
from launcher.train.memory_meter import Meter  # noqa: E402
from launcher.train.model.loss import takes_token_counts  # noqa: E402
from launcher.train.training import fit, make_arguments, make_trainer  # noqa: E402
from launcher.train.worker import train  # noqa: E402

SIZES = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 2}


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0,
        **SIZES,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bart():
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0, bos_token_id=1,
        decoder_start_token_id=2, forced_eos_token_id=None, **SIZES,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def bert():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def bert_words():
    return transformers.BertForTokenClassification(bert().config)


def llama_words():
    config = llama().config
    config.num_labels, config.classifier_dropout = 2, 0.0
    return transformers.LlamaForTokenClassification(config)


def llama_classes():
    config = llama().config
    config.num_labels = 2
    return transformers.LlamaForSequenceClassification(config)


def mixture():
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        output_router_logits=True, router_aux_loss_coef=0.1, **SIZES,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


MODELS = {
    "seq2seq-lm": t5,
    "seq2seq-lm, BART": bart,
    "seq2seq-lm, smoothed": t5,
    "seq2seq-lm, BART smoothed": bart,
    "sequence-classification": bert,
    "sequence-classification, decoder": llama_classes,
    "token-classification": bert_words,
    "token-classification, decoder": llama_words,
    "causal-lm": llama,
    "causal-lm, LoRA": lambda: lora(llama()),
    "causal-lm, routers": mixture,
}


def rows_of(task: str) -> list[dict]:
    """Eight rows, of 3 to 10 tokens and 1 to 8 targets."""
    rows = [
        {name: values[: 3 + number] for name, values in row.items()}
        for number, row in enumerate(sequences(8))
    ]
    if task == "sequence-classification":
        return [{**row, "labels": number % 2} for number, row in enumerate(rows)]
    if task == "token-classification":
        return [{**row, "labels": [-100, *(token % 2 for token in row["labels"][1:])]} for row in rows]
    return rows


def trainer_of(folder, name: str, micro: int, accumulation: int, **changes) -> tuple:
    """(job, trainer) of one step."""
    task = name.partition(",")[0]
    one = job(
        folder,
        {"task": task, "adapter.type": "lora" if "LoRA" in name else None, "trainer.max_steps": 1,
         "trainer.label_smoothing_factor": 0.1 if "smoothed" in name else 0.0,
         "trainer.per_device_train_batch_size": micro, "trainer.gradient_accumulation_steps": accumulation,
         "trainer.train_sampling_strategy": "sequential", **changes},
    )  # fmt: skip
    transformers.set_seed(0)
    data = Rows(rows_of(task), collate=make_collator("pad", tokenizer()))
    return one, make_trainer(one, make_arguments(one), MODELS[name](), tokenizer(), data)


def first_step(folder, name: str, micro: int, *, as_upstream: bool = False) -> tuple[float, float]:
    """(Loss, gradient norm) of one step over eight rows, `micro` at a time."""
    one, trainer = trainer_of(folder, name, micro, -(-8 // micro))
    if as_upstream:
        trainer.rows_are_independent = False
    fit(one, trainer, Meter(on_cuda=False))
    (row,) = [row for row in metrics(folder) if "loss" in row]
    return row["loss"], row["grad_norm"]


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_do_not_change_a_step(name, tmp_path):
    """Of equal sizes, and of 3, 3 and 2 rows."""
    whole = first_step(tmp_path / "8", name, 8)
    for micro in (1, 3):
        assert first_step(tmp_path / f"{micro}", name, micro) == pytest.approx(whole, rel=2e-3), micro


NOT_OF_ROWS = ("seconds", "tokens_per_second", "memory")


@pytest.mark.parametrize("name", cases(INDEPENDENT, "dpo"))
def test_micro_batches_do_not_change_a_step_of_any_task(name, tmp_path, monkeypatch):
    """Of 8 rows, and of 3, 3 and 2, planned and run by a worker without dropout: all metrics."""
    case = replace(INDEPENDENT[name], rows=INDEPENDENT[name].rows[:8])
    make_ground(case, tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(re.sub(r'(dropout\w*": )[\d.]+', r"\g<1>0.0", config.read_text()))
    found = []
    for micro in (8, 3):
        sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": -(-8 // micro)}
        out = tmp_path / f"{micro}"
        env = make_run(case, tmp_path, out, max_steps=1, save_strategy="no", **sizes)
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        train(read_job(out))
        (row,) = [row for row in metrics(out) if "loss" in row]
        found.append({key: value for key, value in row.items() if not key.startswith(NOT_OF_ROWS)})
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", cases([name for name in MODELS if "causal" not in name], "seq2seq-lm"))
def test_upstream_alone_takes_the_mean_of_means(name, tmp_path):
    """As long as this holds, micro-batches are weighed here."""
    whole = first_step(tmp_path / "whole", name, 8, as_upstream=True)
    parts = first_step(tmp_path / "parts", name, 3, as_upstream=True)
    assert parts != pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize(
    "name", cases([name for name in MODELS if "routers" not in name], "causal-lm", "seq2seq-lm, BART")
)
def test_an_evaluation_is_the_mean_of_its_targets_for_each_batch(name, tmp_path):
    """Those of upstream differ."""
    found, upstream = [], []
    for batch in (1, 2, 3, 8):
        changes = {"trainer.per_device_eval_batch_size": batch}
        _, trainer = trainer_of(tmp_path / f"{batch}", name, 8, 1, **changes)
        found.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
        trainer.rows_are_independent = False
        upstream.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert found == pytest.approx([found[0]] * 4, rel=1e-6)
    assert found[-1] == pytest.approx(upstream[-1], rel=1e-6), "of one batch there is one mean"
    if "classification" not in name or "token" in name:
        assert max(upstream) / min(upstream) > 1.0001


def test_an_evaluation_reads_its_rows_as_the_recipe_says(tmp_path):
    asked = {"trainer.dataloader_in_order": False, "trainer.dataloader_num_workers": 1}
    context = {"trainer.dataloader_multiprocessing_context": "spawn"}
    _, trainer = trainer_of(tmp_path, "causal-lm", 8, 1, **asked, **context)
    loader = trainer.get_eval_dataloader(trainer.train_dataset)
    assert (loader.in_order, loader.num_workers) == (False, 1)
    assert loader.multiprocessing_context.get_start_method() == "spawn"


@pytest.mark.parametrize("name", ["seq2seq-lm, smoothed", "seq2seq-lm, BART smoothed"])
def test_smoothed_labels_are_those_that_the_decoder_should_write(name, tmp_path):
    _, trainer = trainer_of(tmp_path, name, 8, 1)
    (batch,) = trainer.get_eval_dataloader(trainer.train_dataset)
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits  # of the labels, which the batch still has
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1
    )
    found = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GPT2LMHeadModel", True), ("Gemma3ForCausalLM", True), ("MixtralForCausalLM", True),
        ("OPTForCausalLM", True), ("ViTForImageClassification", True), ("MT5ForConditionalGeneration", False),
        ("BartForConditionalGeneration", False), ("RobertaForSequenceClassification", False),
    ],
)  # fmt: skip
def test_what_a_class_does_is_read_from_its_source(kind, expected):
    found = getattr(transformers, kind)
    assert takes_token_counts(object.__new__(found)) is expected


def test_a_class_without_a_source_is_taken_as_the_trainer_takes_it():
    made = {}
    exec("class Made:\n    def forward(self, **more):\n        return None\n", made)
    assert takes_token_counts(made["Made"]()) is True
