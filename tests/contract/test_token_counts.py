"""A step of one batch and the same step in four micro-batches: the same loss, also where the model ignores
`num_items_in_batch`."""

from __future__ import annotations

import pytest
from cases import cases

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from small import Rows, job, llama, lora, metrics, sequences, tokenizer  # noqa: E402

from launcher.train.memory_meter import Meter  # noqa: E402
from launcher.train.model.loss import takes_token_counts  # noqa: E402
from launcher.train.training import fit, make_arguments, make_trainer  # noqa: E402

SIZES = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 2}


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0,
        **SIZES,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


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


MODELS = {
    "seq2seq-lm": t5,
    "sequence-classification": bert,
    "sequence-classification, decoder": llama_classes,
    "token-classification": bert_words,
    "token-classification, decoder": llama_words,
    "causal-lm": llama,
    "causal-lm, LoRA": lambda: lora(llama()),
}


def first_step(folder, name: str, micro: int, *, as_upstream: bool = False) -> tuple[float, float]:
    """(Loss, gradient norm) of one step over eight rows, `micro` at a time."""
    task = name.partition(",")[0]
    rows = [{"input_ids": row["input_ids"][:8], "labels": row["labels"][:8]} for row in sequences(8)]
    if task == "sequence-classification":
        rows = [{**row, "labels": number % 2} for number, row in enumerate(rows)]
    if task == "token-classification":
        rows = [{**row, "labels": [token % 2 for token in row["labels"]]} for row in rows]
    one = job(
        folder,
        {"task": task, "adapter.type": "lora" if "LoRA" in name else None, "trainer.max_steps": 1,
         "trainer.per_device_train_batch_size": micro, "trainer.gradient_accumulation_steps": 8 // micro},
    )  # fmt: skip
    transformers.set_seed(0)
    trainer = make_trainer(one, make_arguments(one), MODELS[name](), tokenizer(), Rows(rows))
    if as_upstream:
        trainer.model_accepts_loss_kwargs = True
    fit(one, trainer, Meter(on_cuda=False))
    (row,) = [row for row in metrics(folder) if "loss" in row]
    return row["loss"], row["grad_norm"]


@pytest.mark.parametrize("name", cases(MODELS, "causal-lm", "token-classification, decoder"))
def test_micro_batches_do_not_change_a_step(name, tmp_path):
    whole = first_step(tmp_path / "whole", name, 8)
    parts = first_step(tmp_path / "parts", name, 2)
    assert parts == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("name", cases([name for name in MODELS if "causal" not in name], "seq2seq-lm"))
def test_upstream_alone_multiplies_the_loss(name, tmp_path):
    """As long as this holds, `takes_token_counts` is needed."""
    loss, norm = first_step(tmp_path / "whole", name, 8)
    assert first_step(tmp_path / "parts", name, 2, as_upstream=True) == pytest.approx(
        (4 * loss, 4 * norm), rel=2e-3
    )


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
