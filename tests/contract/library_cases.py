"""A tiny job of each task: as a recipe of ours, and as a user of the library that owns its Trainer writes it.

A row of `CASES` is read by test_losses_of_libraries.py (same losses as the library) and by
test_kill_points.py (killed and resumed). The plain side uses nothing of ours: its own preparation,
collator, arguments and metrics.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grounds import tokenizer_of_1024_words

SEED = 42
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
LENGTH = 32
"""`data.max_length`; a few rows of each table are longer."""
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A job of one task."""

    build: Callable[[], Any]
    """A model of the task with random weights and dropout as published; called under a seed."""
    rows: Rows
    """Of data.train: JSON lines of unlike lengths."""
    plain: Callable[[Path, Rows, Mapping[str, Any]], Any]
    """(folder of model and tokenizer, rows, values of TrainingArguments) -> the library's Trainer."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the recipe besides those of every case; `data` and `trainer` are added to theirs."""
    plain_args: Mapping[str, Any] = field(default_factory=dict)
    """Values of the library's arguments that stand for `recipe`."""
    package: str = "transformers"
    """Without it the case is skipped."""
    tokenizer: Callable[[], Any] = tokenizer_of_1024_words
    """Or an image processor."""
    files: Callable[[Path], None] = lambda _: None
    """Writes the files that rows name."""
    differs: float = 1e-5
    """Relative difference of a loss from the library's that is allowed."""


def words(seed: int, low: int, high: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(1000)}" for _ in range(draw.randint(low, high)))


def word_pieces() -> Any:
    """BERT's tokenizer: several tokens for a word, [CLS] and [SEP] around a text."""
    import transformers

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokens = (*special, "w", *map(str, range(10)), *(f"##{n}" for n in range(10)))
    return transformers.BertTokenizer(vocab={token: number for number, token in enumerate(tokens)})


def llama(kind: str = "LlamaForCausalLM", **more: Any) -> Any:
    import transformers

    special = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.1}
    return getattr(transformers, kind)(transformers.LlamaConfig(**{**SIZES, **special, **more}))


def bert(kind: str, **more: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(transformers.BertConfig(**SIZES, **more))


def t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=1024, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=0,
        eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


# --- rows

PAIRS = [
    {
        "prompt": words(i, 1, 12),
        "chosen": f" w{2 * i} " + words(100 + i, 1, 12),
        "rejected": f" w{2 * i + 1} " + words(200 + i, 1, 12),
    }
    for i in range(42)
]
JUDGED = [
    {
        "prompt": words(i, 1, 12),
        "completion": f" w{i % 2} " + words(100 + i, 1, 12),
        "label": i % 4 not in (0, 3),
    }
    for i in range(42)
]
TRANSLATED = [{"prompt": words(i, 1, 40), "completion": words(100 + i, 1, 20)} for i in range(42)]
LABELLED = [{"text": words(i, 1, 9), "label": ("bad", "fine", "good")[i % 3]} for i in range(42)]
SCORED = [{"text": row["text"], "label": len(row["text"]) / 40 + i % 3} for i, row in enumerate(LABELLED)]
TOPICS = [
    {"text": row["text"], "label": [name for n, name in enumerate("abc") if (i + n) % (n + 2) == 0]}
    for i, row in enumerate(LABELLED)
]
TAGS = ("B-LOC", "B-PER", "O")


def _tagged(seed: int) -> dict[str, Any]:
    said = words(seed, 2, 9).split()
    return {"tokens": said, "labels": [TAGS[(seed + 3 * n) % 3] for n in range(len(said))]}


TAGGED = [_tagged(i) for i in range(42)]
PICTURES = [{"image": f"{i}.png", "label": ("cat", "dog", "owl")[i % 3]} for i in range(42)]
PIXELS = 32


def draw_pictures(folder: Path) -> None:
    """One for each row, of random pixels and twice the model's size."""
    import numpy
    from PIL import Image

    random_pixels = numpy.random.default_rng(0)
    for row in PICTURES:
        pixels = random_pixels.integers(0, 256, (2 * PIXELS, 2 * PIXELS, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / row["image"])


def picture_processor() -> Any:
    import transformers

    return transformers.ViTImageProcessorPil(size={"height": PIXELS, "width": PIXELS})


def vit() -> Any:
    import transformers

    sizes = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=PIXELS, patch_size=8, num_labels=3)
    return transformers.ViTForImageClassification(config)


# --- the libraries' own scripts


def means(trainer: Any, items: Callable[[Any], Any] | None = None) -> Any:
    """A Trainer whose model's loss is a mean.

    Trainer of transformers 5.23 adds micro-batches up, so that losses are twice as high here, where a model's
    forward takes **kwargs but its loss ignores `num_items_in_batch`, and else takes the mean of their means
    (test_token_counts.py). items: by which micro-batches are weighed.
    """
    trainer.model_accepts_loss_kwargs = False
    if items is None:
        return trainer
    read, lose = trainer.get_batch_samples, trainer.compute_loss
    of_step = []

    def batches(*args: Any, **kwargs: Any) -> Any:
        found, _ = read(*args, **kwargs)
        of_step[:] = [int(items(batch)) for batch in found]
        return found, None

    def loss(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        share = int(items(inputs)) / sum(of_step)
        return lose(model, inputs) * share * len(of_step)  # by which the Trainer divides

    trainer.get_batch_samples, trainer.compute_loss = batches, loss
    return trainer


def targets(batch: Any) -> Any:
    return (batch["labels"] != -100).sum()


def ordered_pairs(batch: Any) -> int:
    """Pairs of a query's documents of which one is more relevant."""
    rows = [list(row) for row in batch["label"]]
    return sum(float(one) > float(other) for row in rows for one in row for other in row)


def plain_dpo(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    import datasets
    import transformers
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=DPOConfig(**args, max_length=LENGTH, bf16=False),
        train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )


def plain_chosen(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    """DPOTrainer with the loss `sft` alone, the mean over the tokens of chosen answers."""

    def items(batch: Any) -> Any:
        return batch["completion_mask"][: len(batch["input_ids"]) // 2, 1:].sum()

    return means(plain_dpo(model, rows, args), items)


def plain_kto(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    """Rows in their order, which trl's KTOTrainer requires."""
    import datasets
    import transformers
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=KTOConfig(**args, max_length=LENGTH, bf16=False),
        train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )


def plain_reward(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    import datasets
    import transformers
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(model, dtype="float32"),
        args=RewardConfig(**args, max_length=LENGTH, bf16=False),
        train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )


def plain_seq2seq(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def encode(row: Mapping[str, Any]) -> Any:
        labels = tokenizer(row["completion"])["input_ids"]
        # This tokenizer adds no </s>; T5's own does.
        return {
            "input_ids": tokenizer(row["prompt"])["input_ids"],
            "labels": [*labels, tokenizer.eos_token_id],
        }

    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(model, dtype="float32")
    data = datasets.Dataset.from_list(list(rows)).map(encode, remove_columns=["prompt", "completion"])
    trainer = transformers.Seq2SeqTrainer(
        model=loaded,
        args=transformers.Seq2SeqTrainingArguments(**args),
        train_dataset=data,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=loaded),
    )
    return means(trainer, targets)


def plain_causal(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def encode(row: Mapping[str, Any]) -> Any:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}

    return transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=transformers.TrainingArguments(**args),
        train_dataset=datasets.Dataset.from_list(list(rows)).map(encode, remove_columns=list(rows[0])),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
    )


def plain_pictures(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    """As transformers' run_image_classification.py does it, without augmentation."""
    import torch
    import transformers
    from PIL import Image

    processor = transformers.AutoImageProcessor.from_pretrained(model)
    names = sorted({row["label"] for row in rows})

    def encode(row: Mapping[str, Any]) -> Any:
        image = Image.open(model.parent / row["image"]).convert("RGB")
        return {**processor(image, return_tensors="pt"), "label": names.index(row["label"])}

    def collate(samples: Sequence[Mapping[str, Any]]) -> Any:
        pixels = torch.cat([sample["pixel_values"] for sample in samples])
        return {"pixel_values": pixels, "labels": torch.tensor([sample["label"] for sample in samples])}

    trainer = transformers.Trainer(
        model=transformers.AutoModelForImageClassification.from_pretrained(model, dtype="float32"),
        args=transformers.TrainingArguments(**args, remove_unused_columns=False),
        train_dataset=[encode(row) for row in rows],
        data_collator=collate,
    )
    return means(trainer)


def plain_classification(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    """As transformers' run_classification.py does it."""
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    first = rows[0]["label"]
    kind = {float: "regression", list: "multi_label_classification"}.get(type(first))
    found_in = [
        label for row in rows for label in (row["label"] if isinstance(first, list) else [row["label"]])
    ]
    names = ["score"] if isinstance(first, float) else sorted(set(found_in))

    def encode(row: Mapping[str, Any]) -> Any:
        label = row["label"]
        if isinstance(label, list):
            label = [float(name in label) for name in names]
        elif isinstance(label, str):
            label = names.index(label)
        return {**tokenizer(row["text"], truncation=True, max_length=LENGTH), "label": label}

    trainer = transformers.Trainer(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(
            model, dtype="float32", num_labels=len(names), problem_type=kind
        ),
        args=transformers.TrainingArguments(**args),
        train_dataset=datasets.Dataset.from_list(list(rows)).map(encode, remove_columns=["text"]),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    return means(trainer)


def plain_tokens(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    """As transformers' run_ner.py does it, with `word_ids`."""
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    names = sorted({tag for row in rows for tag in row["labels"]})

    def encode(row: Mapping[str, Any]) -> Any:
        found = tokenizer(row["tokens"], truncation=True, max_length=LENGTH, is_split_into_words=True)
        labels, before = [], None
        for word in found.word_ids():
            labels.append(-100 if word in (None, before) else names.index(row["labels"][word]))
            before = word
        return {**found, "labels": labels}

    trainer = transformers.Trainer(
        model=transformers.AutoModelForTokenClassification.from_pretrained(
            model, dtype="float32", num_labels=len(names)
        ),
        args=transformers.TrainingArguments(**args),
        train_dataset=datasets.Dataset.from_list(list(rows)).map(encode, remove_columns=["tokens"]),
        data_collator=transformers.DataCollatorForTokenClassification(tokenizer),
    )
    return means(trainer, targets)


QUESTIONS = [{"prompt": words(i, 1, 12), "answer": f"w{i}"} for i in range(4)]
SEVEN, EVEN = r"w\d*7\b", r"w\d*[02468]$"


def plain_grpo(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
    import re

    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    def seven(completions: list[str], **_: Any) -> list[float]:
        return [float(re.search(SEVEN, text) is not None) for text in completions]

    def even(completions: list[str], **_: Any) -> list[float]:
        return [float(re.search(EVEN, text) is not None) for text in completions]

    return GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        reward_funcs=[seven, even],
        args=GRPOConfig(
            **args,
            max_completion_length=8,
            num_generations=4,
            reward_weights=[1.0, 0.5],
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )


def _grpo(**trainer: Any) -> Case:
    """Epochs of 4 prompts. Each generation serves several steps, so that kills fall between them."""
    recipe = {
        "task": "grpo",
        "reward": [
            {"function": "regular_expression", "arguments": {"pattern": SEVEN}},
            {"function": "regular_expression", "arguments": {"pattern": EVEN}, "weight": 0.5},
        ],
        "generation": {"num_generations": 4, "max_completion_length": 8},
        "trainer": trainer,
    }
    return Case(llama, QUESTIONS, plain_grpo, recipe, trainer, "trl")


def bare_bert() -> Any:
    import transformers

    return transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)


TEXTS = [
    {"anchor": words(i, 2, 12), "positive": words(100 + i, 2, 40), "negative": words(200 + i, 2, 12)}
    for i in range(42)
]
SIMILAR = [
    {"sentence1": words(i, 2, 12), "sentence2": words(100 + i, 2, 40), "score": (i % 5) / 4}
    for i in range(42)
]
RANKED = [
    {
        "query": words(i, 2, 12),
        "documents": [words(100 * n + i, 2, 40) for n in range(1, 3 + i % 3)],
        "labels": [float(n == i % 2) for n in range(2 + i % 3)],
    }
    for i in range(42)
]
RELEVANT = [
    {"query": words(i, 2, 12), "document": words(100 + i, 2, 40), "score": (i % 5) / 4} for i in range(42)
]


def plain_embedding(loss: str, dims: Sequence[int] = (), **options: Any) -> Any:
    """A SentenceTransformerTrainer as the documentation of sentence-transformers writes it."""

    def make(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
        import datasets
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.base.modules import Normalize, Transformer
        from sentence_transformers.sentence_transformer import losses
        from sentence_transformers.sentence_transformer.modules import Pooling

        options_of_bert = {"dtype": "float32", "add_pooling_layer": False}
        transformer = Transformer(str(model), max_seq_length=LENGTH, model_kwargs=options_of_bert)
        whole = SentenceTransformer(modules=[transformer, Pooling(32, "mean"), Normalize()], device="cpu")
        made = getattr(losses, loss)(whole, **options)
        made = losses.MatryoshkaLoss(whole, made, dims) if dims else made
        sampler = "batch_sampler" if "score" in rows[0] else "no_duplicates"
        return SentenceTransformerTrainer(
            model=whole,
            args=SentenceTransformerTrainingArguments(**args, batch_sampler=sampler),
            train_dataset=datasets.Dataset.from_list(list(rows)),
            loss=made,
        )

    return make


def plain_reranker(loss: str, **options: Any) -> Any:
    """A CrossEncoderTrainer as the documentation of sentence-transformers writes it."""

    def make(model: Path, rows: Rows, args: Mapping[str, Any]) -> Any:
        import datasets
        from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
        from sentence_transformers.cross_encoder import losses

        whole = CrossEncoder(str(model), num_labels=1, max_length=LENGTH, device="cpu")
        trainer = CrossEncoderTrainer(
            model=whole,
            args=CrossEncoderTrainingArguments(**args),
            train_dataset=datasets.Dataset.from_list(list(rows)),
            loss=getattr(losses, loss)(whole, **options),
        )
        return means(trainer, ordered_pairs) if loss == "LambdaLoss" else trainer

    return make


def one_label() -> Any:
    return bert("BertForSequenceClassification", num_labels=1)


_CACHED = {"loss": "CachedMultipleNegativesRankingLoss", "negatives": 1, "mini_batch_size": 1}
CASES: dict[str, Case] = {
    "grpo": _grpo(beta=0.1, num_iterations=2),
    "embedding": Case(
        bare_bert,
        TEXTS,
        plain_embedding("MultipleNegativesRankingLoss", dims=(32, 8)),
        {"task": "embedding", "embedding": {"negatives": 1, "matryoshka_dims": [32, 8]}},
        package="sentence-transformers",
    ),
    "embedding cached": Case(
        bare_bert,
        TEXTS,
        plain_embedding("CachedMultipleNegativesRankingLoss", mini_batch_size=1),
        {"task": "embedding", "embedding": _CACHED},
        package="sentence-transformers",
    ),
    "embedding scored": Case(
        bare_bert,
        SIMILAR,
        plain_embedding("CoSENTLoss"),
        {"task": "embedding", "embedding": {"loss": "CoSENTLoss"}},
        package="sentence-transformers",
    ),
    "reranker": Case(
        one_label,
        RELEVANT,
        plain_reranker("BinaryCrossEntropyLoss"),
        {"task": "reranker"},
        package="sentence-transformers",
    ),
    "reranker lists": Case(
        one_label,
        RANKED,
        plain_reranker("LambdaLoss", mini_batch_size=-1),
        {"task": "reranker", "reranker": {"loss": "LambdaLoss"}},
        package="sentence-transformers",
    ),
    "dpo": Case(llama, PAIRS, plain_dpo, {"task": "dpo", "trainer": {"beta": 0.2}}, {"beta": 0.2}, "trl"),
    "dpo, ipo": Case(
        llama,
        PAIRS,
        plain_dpo,
        {"task": "dpo", "trainer": {"loss_type": "ipo"}},
        {"loss_type": ["ipo"]},
        "trl",
    ),
    "dpo, without a reference": Case(
        llama,
        PAIRS,
        plain_chosen,
        {"task": "dpo", "trainer": {"loss_type": "sft"}},
        {"loss_type": ["sft"]},
        "trl",
    ),
    "kto": Case(
        llama,
        JUDGED,
        plain_kto,
        {
            "task": "kto",
            "trainer": {"undesirable_weight": 1.5, "train_sampling_strategy": "sequential"},
        },
        {"undesirable_weight": 1.5},
        "trl",
    ),
    "reward": Case(
        lambda: llama("LlamaForSequenceClassification", num_labels=1),
        PAIRS,
        plain_reward,
        {"task": "reward", "trainer": {"center_rewards_coefficient": 0.01}},
        {"center_rewards_coefficient": 0.01},
        "trl",
    ),
    "causal-lm": Case(llama, TRANSLATED, plain_causal, {"task": "causal-lm", "data": {"max_length": 64}}),
    "image-classification": Case(
        vit,
        PICTURES,
        plain_pictures,
        {"task": "image-classification", "data": {"max_length": None}},
        tokenizer=picture_processor,
        files=draw_pictures,
    ),
    "seq2seq-lm": Case(t5, TRANSLATED, plain_seq2seq, {"task": "seq2seq-lm", "data": {"max_length": 64}}),
    "sequence-classification": Case(
        lambda: bert("BertForSequenceClassification", num_labels=3),
        LABELLED,
        plain_classification,
        {"task": "sequence-classification"},
    ),
    "sequence-classification, regression": Case(
        lambda: bert("BertForSequenceClassification", num_labels=1),
        SCORED,
        plain_classification,
        {"task": "sequence-classification", "data": {"problem_type": "regression"}},
        tokenizer=word_pieces,
    ),
    "sequence-classification, multi-label": Case(
        lambda: bert("BertForSequenceClassification", num_labels=3),
        TOPICS,
        plain_classification,
        {"task": "sequence-classification", "data": {"problem_type": "multi_label_classification"}},
        tokenizer=word_pieces,
    ),
    "token-classification": Case(
        lambda: bert("BertForTokenClassification", num_labels=3),
        TAGGED,
        plain_tokens,
        {"task": "token-classification"},
        tokenizer=word_pieces,
    ),
}
"""Name -> job. The name is that of the task, with a word behind it where a task has several."""
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kto, without pairs": ("kto", {"task": "kto", "trainer": {"loss_type": "apo_zero_unpaired"}}),
    "embedding, cosine": (
        "embedding scored", {"task": "embedding", "embedding": {"loss": "CosineSimilarityLoss"}},
    ),
    "embedding, triplets": (
        "embedding", {"task": "embedding", "embedding": {"loss": "TripletLoss", "negatives": 1}},
    ),
}  # fmt: skip
INDEPENDENT: dict[str, Case] = {
    **{
        name: case
        for name, case in CASES.items()
        if name.partition(" ")[0] not in ("grpo", "kto", "embedding")
    },
    **{name: replace(CASES[like], recipe=recipe) for name, (like, recipe) in _OTHERS.items()},
}
"""Jobs whose loss is a mean over rows or target tokens. `plain` of those that are not in `CASES` is another
loss."""


def make_ground(case: Case, folder: Path) -> Path:
    """model/ with its tokenizer, rows.jsonl and, of 12 of them, eval.jsonl; the folder."""
    import json

    import transformers

    transformers.set_seed(0)
    case.build().save_pretrained(folder / "model")
    case.tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps(row) + "\n" for row in case.rows]
    case.files(folder)
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "eval.jsonl").write_text("".join(lines[:12]))
    return folder


def make_run(
    case: Case, ground: Path, out: Path, *, evaluated: bool = False, **trainer: Any
) -> Mapping[str, str]:
    """Plan the case's recipe with these values of `trainer:`, write its run directory and prepare its data;
    the environment of its rank."""
    import yaml

    from launcher.execute.run_dir import write_run_dir
    from launcher.execute.start import bind
    from launcher.inputs.planning_facts import gather
    from launcher.planner.planner import make_plan
    from launcher.recipe.loading import load_recipe
    from launcher.render.bundle import render
    from launcher.train.job import read_job
    from launcher.train.prepare import prepare_run

    said = {
        "model": {"name_or_path": "model"},
        "precision": "fp32",
        "seed": SEED,
        **case.recipe,
        "data": {
            "train": [{"path": "rows.jsonl"}],
            **({"eval": [{"path": "eval.jsonl"}]} if evaluated else {}),
            "max_length": LENGTH,
            **case.recipe.get("data", {}),
        },
        "trainer": {**TRAINER, **case.recipe.get("trainer", {}), **trainer},
    }
    said["data"] = {name: value for name, value in said["data"].items() if value is not None}
    recipe = ground / f"{out.name}.yaml"
    recipe.write_text(yaml.safe_dump(said))
    bundle = render(make_plan(*gather(load_recipe(recipe), "cpu")))
    write_run_dir(bundle, out, resume=False)
    _, _, env = bind(bundle, {"run_dir": str(out), "devices": ""})
    prepare_run(read_job(out))
    return env


TRAINER: dict[str, Any] = {
    "max_steps": 20, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3, "lr_scheduler_type": "linear", "logging_steps": 1, "report_to": "none",
}  # fmt: skip
"""The same on both sides."""
