"""Text embeddings, learned from pairs of texts with the losses of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from launcher.errors import Problem
from launcher.tasks.rows import FieldKind, RowFormat
from launcher.tasks.task import Task, columns_needed

MOST_NEGATIVES = 32
NEGATIVES: tuple[str, ...] = ("negative", *(f"negative_{n}" for n in range(1, MOST_NEGATIVES + 1)))
"""Columns that hold one hard negative each, or a list of them, as `negatives` does."""
_OF_NEGATIVES: Mapping[str, FieldKind] = dict.fromkeys(NEGATIVES, "text or texts")
POSITIVE_PAIR = RowFormat(
    "positive-pair",
    "texts that belong together",
    {"anchor": "text", "positive": "text or texts"},
    {**_OF_NEGATIVES, "negatives": "list"},
    {
        "anchor": ("query", "question", "sentence1", "premise", "title"),
        "positive": ("answer", "document", "passage", "sentence2", "entailment", "pos"),
        "negative": ("contradiction", "neg"),
    },
    other_names={"anchor": "query", "positive": "pos", "negative": "neg"},
)
SCORED_PAIR = RowFormat(
    "scored-pair",
    "pairs of texts with a score",
    {"sentence1": "text", "sentence2": "text", "score": "score"},
    related={
        "sentence1": ("text1", "a", "query", "anchor", "premise"),
        "sentence2": ("text2", "b", "document", "positive", "hypothesis"),
        "score": ("label", "similarity", "rating"),
    },
)
BY_RANK = ("ndcg@10", "mrr@10", "accuracy@1")
"""Metrics of retrieval: each anchor among all positives and negatives that are held out."""
BY_SCORE = ("spearman", "pearson")
COLUMNS_KEPT: Mapping[str, tuple[Any, str]] = {
    "remove_unused_columns": (False, "the collator makes inputs of columns that no model knows")
}


_NOTHING = "a row alone has nothing to be compared with, and its loss is 0"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of sentence-transformers."""

    formats: tuple[str, ...]
    """Of the rows that it takes."""
    options: Mapping[str, Any]
    """Keys of the section that it reads -> what sentence-transformers 6.2 uses where they are absent."""
    in_batch: bool = False
    """Whether the other texts of a micro-batch are its negatives."""
    compares: bool = False
    """Whether the rows of a micro-batch are compared with each other: its size decides what is learned."""
    cached: bool = False
    """Whether it holds the activations of `mini_batch_size` texts at a time (GradCache)."""
    negatives: tuple[int, int] = (0, MOST_NEGATIVES)
    """The least and the most hard negatives of a row."""
    over: str = "rows"
    """What it is a mean of, if it compares no rows: `ordered pairs` are those of a query's documents of which
    one is more relevant."""


LOSSES: Mapping[str, Loss] = {
    "MultipleNegativesRankingLoss": Loss(
        (POSITIVE_PAIR.name,), {"scale": 20.0, "gather_across_devices": False}, in_batch=True, compares=True
    ),
    "CachedMultipleNegativesRankingLoss": Loss(
        (POSITIVE_PAIR.name,),
        {"scale": 20.0, "gather_across_devices": False, "mini_batch_size": 32},
        in_batch=True,
        compares=True,
        cached=True,
    ),
    "TripletLoss": Loss((POSITIVE_PAIR.name,), {"triplet_margin": 5.0}, negatives=(1, 1)),
    "CoSENTLoss": Loss((SCORED_PAIR.name,), {"scale": 20.0}, compares=True, negatives=(0, 0)),
    "AnglELoss": Loss((SCORED_PAIR.name,), {"scale": 20.0}, compares=True, negatives=(0, 0)),
    "CosineSimilarityLoss": Loss((SCORED_PAIR.name,), {}, negatives=(0, 0)),
}


class Embedding(Task):
    name = "embedding"
    hooks = ("format_row", "compute_metrics", "callbacks", "optimizer", "prepare_model")
    aliases = (
        "embeddings",
        "sentence-transformer",
        "sentence-transformers",
        "sentence-embedding",
        "retriever",
    )
    packages = ("sentence_transformers",)
    extra = "embedding"
    first_least_batch = 2
    section: ClassVar[str] = "embedding"
    row_formats = (POSITIVE_PAIR, SCORED_PAIR)
    unread_columns = dict.fromkeys(("score", "label", "labels", "similarity"), "a score of the pair")
    own_padding = "each text of a row is padded to the longest one of its column"
    decides_samples = ("negatives", "prompts", "loss")
    architectures = ("encoder", "decoder")
    model_class = "AutoModel"
    head = "none"
    peft_task = "FEATURE_EXTRACTION"
    untraceable = "the loss compares the texts of a batch, which a trace of the model alone does not see"
    trainer_defaults = COLUMNS_KEPT
    metrics = (*BY_RANK, *BY_SCORE)
    metric_packages = dict.fromkeys(BY_SCORE, ("scipy", "scipy"))
    goals = {"embeddings": ("positive-pair", "scored-pair")}
    first_metrics = {"embeddings": ("ndcg@10", "mrr@10")}
    first_models = ("BAAI/bge-base-en-v1.5",)
    compares_texts = True
    pipeline = "sentence-similarity"
    tags = ("sentence-transformers", "feature-extraction")
    library = "sentence-transformers"
    example_code = (
        "from sentence_transformers import SentenceTransformer\n\n"
        "model = SentenceTransformer(PLACE)\n"
        "query, document = TEXTS\n"
        "print(model.similarity(model.encode_query(query), model.encode_document(document)))"
    )

    @property
    def architecture_suffix(self) -> str:
        return "Model"

    def first_keys(self, rows: Mapping[str, Sequence[object]]) -> dict[str, tuple[object, str]]:
        if "score" not in rows:
            first = [rows[name][0] for name in (*NEGATIVES, "negatives") if rows.get(name)]
            count = sum(len(held) if isinstance(held, list | tuple) else bool(held) for held in first)
            return {self.section: ({"negatives": count}, "hard negatives of each row")} if count else {}
        return {
            self.section: ({"loss": "CoSENTLoss"}, "the rows are pairs with a score"),
            "data.metrics": (["spearman"], ""),
        }

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        return contrast_problems(trainer)

    def check_section(self, given: Mapping[str, Any], rest: Mapping[str, Any]) -> list[Problem]:
        by_format = {POSITIVE_PAIR.name: BY_RANK, SCORED_PAIR.name: BY_SCORE}
        found = [*section_problems(self.section, LOSSES, by_format, given, rest)]
        found += _alone(given, rest)
        trainer, loss = rest.get("trainer"), LOSSES.get(str(given.get("loss", next(iter(LOSSES)))))
        usual = "no_duplicates" if loss is not None and loss.in_batch else "batch_sampler"
        unique = (given.get("batch_sampler") or usual) == "no_duplicates"
        if unique and isinstance(trainer, Mapping) and trainer.get("train_sampling_strategy"):
            message = "has no effect with embedding.batch_sampler no_duplicates, which makes the batches"
            path, hint = "trainer.train_sampling_strategy", "remove it, or set the batch_sampler"
            found.append(Problem("conflict", message, path=path, hint=hint))
        dims = given.get("matryoshka_dims") or []
        if isinstance(dims, list) and len(set(map(str, dims))) < len(dims):
            path = "embedding.matryoshka_dims"
            found.append(Problem("conflict", "names a dimension twice", path=path, hint="name each once"))
        return found

    def section_values(self, given: Any) -> dict[str, tuple[Any, str]]:
        name = getattr(given, "loss", next(iter(LOSSES)))
        loss, prompts = LOSSES[name], getattr(given, "prompts", None)
        found = {
            key: (
                _given(given, key, loss.options.get(key)),
                f"the default of {name}" if key in loss.options else f"{name} does not read it",
            )
            for key in ("scale", "triplet_margin", "mini_batch_size")
        }
        sampler = "no_duplicates" if loss.in_batch else "batch_sampler"
        usual: dict[str, tuple[Any, str]] = {
            "negatives": (loss.negatives[0], "as few as the loss takes"),
            "gather_across_devices": (False, "negatives are of the same rank"),
            "matryoshka_dims": ([], "embeddings are trained in their whole width"),
            "pooling": (None, "that of the checkpoint, else mean, for decoders lasttoken"),
            "normalize": (None, "that of the checkpoint, else true"),
            "batch_sampler": (
                sampler,
                "a text twice in a micro-batch would be its own negative"
                if loss.in_batch
                else "the usual one",
            ),
        }
        found |= {key: (_given(given, key, value), reason) for key, (value, reason) in usual.items()}
        return found | {
            "loss": (name, "schema default"),
            "prompts": (prompts.model_dump() if prompts else {}, "nothing is put before the texts"),
        }

    def misfit(self, form: str, section: Any) -> Problem | None:
        return loss_misfit(self.section, LOSSES, section.loss, form)

    def row_misfit(self, values: Mapping[str, Any], section: Any) -> Problem | None:
        if "score" in values:
            if section.loss != "CosineSimilarityLoss" or -1 <= values["score"] <= 1:
                return None
            message = f"the score is {values['score']:g}, and a cosine similarity is -1 to 1"
            return Problem("score-range", message, hint="divide the scores by their largest value")
        wanted, found = section.negatives, len(values["negatives"])
        if wanted == found:
            return None
        message = f"the row has {found} negatives, the recipe trains {wanted} of each row"
        hint = f"set embedding.negatives: {found} (every row needs as many), or leave columns out with "
        hint += "`columns: {NAME: null}`"
        return Problem("negatives", message, hint=hint)

    def least_batch_of(self, settings: Any) -> tuple[int, str]:
        return (2, _NOTHING) if self.compares(settings) and not settings.embedding.negatives else (1, "")

    def sequences(self, settings: Any) -> int:
        return 2 + int(settings.embedding.negatives)

    def mini_batch(self, settings: Any) -> int | None:
        size: int | None = settings.embedding.mini_batch_size
        return size if LOSSES[settings.embedding.loss].cached else None

    def compares(self, settings: Any) -> bool:
        return LOSSES[settings.embedding.loss].compares


def _alone(given: Mapping[str, Any], rest: Mapping[str, Any]) -> Iterator[Problem]:
    """The problem of micro-batches of one row for a loss that compares rows, which have no negatives."""
    name, trainer = str(given.get("loss", next(iter(LOSSES)))), rest.get("trainer")
    loss = LOSSES.get(name)
    if loss is None or not loss.compares or given.get("negatives"):
        return
    micro = trainer.get("per_device_train_batch_size") if isinstance(trainer, Mapping) else None
    for path, size in {
        "trainer.per_device_train_batch_size": micro,
        "global_batch_size": rest.get("global_batch_size"),
    }.items():
        if size == 1 and size is not True:
            hint = "write 2 or more, or give the rows negatives" if loss.in_batch else "write 2 or more"
            yield Problem("no-negatives", f"is 1, but {name} compares rows: {_NOTHING}", path=path, hint=hint)


def prompts_unused(prompts: Mapping[str, str]) -> str:
    """The warning of a checkpoint's prompts that the recipe does not set."""
    listed = ", ".join(f"{name}: {text!r}" for name, text in prompts.items())
    return (
        f"the checkpoint has prompts ({listed}): they are saved with the result, but training puts nothing "
        "before the texts; write embedding.prompts to train with them"
    )


def loss_misfit(section: str, losses: Mapping[str, Loss], name: str, form: str) -> Problem | None:
    """The problem of rows that a loss does not take."""
    formats = losses[name].formats
    if form in formats:
        return None
    message = f"the rows are {form}, but {name} trains on {' or '.join(formats)} rows"
    fitting = " or ".join(one for one, other in losses.items() if form in other.formats)
    return Problem("format-loss", message, path=f"{section}.loss", hint=f"use {fitting}")


def contrast_problems(trainer: Mapping[str, Any]) -> list[Problem]:
    """Problems of fields that the losses of sentence-transformers do not read, or cannot work with."""
    found = columns_needed(trainer)
    if trainer.get("label_smoothing_factor") not in (None, 0):
        message = "has no effect: the losses of sentence-transformers do not read it"
        found.append(Problem("conflict", message, path="trainer.label_smoothing_factor", hint="remove it"))
    return found


def _given(section: Any, key: str, usual: Any) -> Any:
    """The value of a recipe's section, `usual` where it leaves the key out."""
    value = getattr(section, key, None)
    return usual if value is None else value


def _listed(section: Any, key: str) -> list[Any]:
    """A list of a recipe as it is written; empty where it is none, which the schema reports."""
    found = section.get(key) if isinstance(section, Mapping) else None
    return found if isinstance(found, list) else []


def section_problems(
    section: str,
    losses: Mapping[str, Loss],
    metrics: Mapping[str, tuple[str, ...]],
    given: Mapping[str, Any],
    rest: Mapping[str, Any],
) -> Iterator[Problem]:
    """Problems of a section that chooses a loss. metrics: of each format; rest: the recipe."""
    name = str(given.get("loss", next(iter(losses))))
    loss = losses.get(name)
    if loss is None:
        return  # the schema reports it
    for key in dict.fromkeys(key for other in losses.values() for key in other.options):
        if given.get(key) not in (None, False) and key not in loss.options:
            readers = " and ".join(one for one, other in losses.items() if key in other.options)
            message = f"has no effect on {name}: it is a setting of {readers}"
            yield Problem("conflict", message, path=f"{section}.{key}", hint="remove it")
    count, (least, most) = given.get("negatives"), loss.negatives
    if isinstance(count, int) and not least <= count <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        message = f"is {count}, but {name} takes {wanted} for each row"
        yield Problem("conflict", message, path=f"{section}.negatives", hint=f"set {wanted}")
    data = rest.get("data")
    train, measured = (_listed(data, key) for key in ("train", "metrics"))
    for index, source in enumerate(train):
        form = source.get("format") if isinstance(source, Mapping) else None
        if isinstance(form, str) and form in metrics and form not in loss.formats:
            message = f"is {form}, but {name} trains on {' or '.join(loss.formats)} rows"
            fitting = " or ".join(one for one, other in losses.items() if form in other.formats)
            hint = f"set {section}.loss to {fitting}"
            yield Problem("conflict", message, path=f"data.train[{index}].format", hint=hint)
    known = {metric for form in loss.formats for metric in metrics[form]}
    every = {metric for names in metrics.values() for metric in names}
    for index, metric in enumerate(measured):
        if isinstance(metric, str) and metric in every - known:
            message = f"is {metric}, which {' or '.join(loss.formats)} rows do not have"
            hint = f"use one of {', '.join(sorted(known))}"
            yield Problem("conflict", message, path=f"data.metrics[{index}]", hint=hint)
