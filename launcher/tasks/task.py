"""What a task is, for everything that plans: rows, head, loss, arguments, and how other tools name it.

The half that trains is `launcher/train/tasks/`. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from launcher.errors import Problem
from launcher.tasks.rows import PREFERENCE, RowFormat

Architecture = Literal["decoder", "encoder", "encoder-decoder", "image-encoder", "vision-language"]
HeadKind = Literal["language-model", "classifier", "token-classifier", "none", "own"]


@dataclass(frozen=True, slots=True)
class ArgumentTable:
    """A class of another project whose fields `trainer:` has for one task, besides TrainingArguments."""

    name: str
    """Stem of the shipped table in launcher/recipe/tables/."""
    package: str
    module: str
    """File of the class in the package: `trainer/dpo_config.py`."""
    class_name: str


class Task:
    """A task with the defaults that most tasks share; a subclass sets what is different."""

    name: ClassVar[str]
    """As in `task:` of a recipe."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Names of other tools that `did you mean` leads here."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that the workers import besides those of every run."""
    extra: ClassVar[str | None] = None
    """The extra of this project that installs them."""
    section: ClassVar[str | None] = None
    """The section of the recipe that only this task reads."""
    made_by_hooks: ClassVar[bool] = False
    """Whether the hooks of `python:` make its model, its datasets and its batches."""

    hooks: ClassVar[tuple[str, ...]] = (
        "format_row", "compute_metrics", "callbacks", "compute_loss", "optimizer", "data_collator",
        "make_model", "prepare_model", "Trainer",
    )  # fmt: skip
    """Names in recipe/hooks.py that the file of `python:` may define for it."""
    needed_hooks: ClassVar[tuple[str, ...]] = ()
    """Those that it must define."""

    # --- rows -----------------------------------------------------------------------------------
    row_formats: ClassVar[tuple[RowFormat, ...]]
    """Formats of rows that it can train on, the most usual first."""
    learns: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Format -> values of `data.loss_on` that it can have, the default first; empty: there is no choice."""
    unread_fields: ClassVar[tuple[str, ...]] = ()
    """Optional fields of its formats that another task alone reads."""
    unread_columns: ClassVar[Mapping[str, str]] = {}
    """Columns beside its formats that decide what is learned and that it does not read -> what they hold."""
    overlong: ClassVar[Mapping[str, str]] = {"split": "which is only for the text rows of task causal-lm"}
    """Values of `data.overlong` that this task refuses -> why."""
    reads_tokens: ClassVar[bool] = True
    """False: rows are images, and no key about tokens means anything."""
    sees_images: ClassVar[bool] = False
    """Whether its samples have images beside their tokens: a processor makes them, not a tokenizer alone."""
    own_padding: ClassVar[str] = ""
    """What else pads; empty where `data.pad_to_multiple_of` does, and the plan may choose a multiple."""
    pads_as_asked: ClassVar[bool] = False
    """Whether what else pads takes a multiple, as `trainer.pad_to_multiple_of`."""
    classifies: ClassVar[bool] = False
    """Whether labels are classes, which the configuration of the model names."""
    prepared_by: ClassVar[tuple[str, ...]] = ()
    """Packages whose version decides what the samples are, besides tokenizers."""
    decides_samples: ClassVar[tuple[str, ...]] = ()
    """Keys of its section that decide what the prepared samples are."""
    prepared_by_ranks: ClassVar[bool] = True
    """Whether the ranks of a run may prepare its data; False where preparing waits for all of them."""

    # --- model ----------------------------------------------------------------------------------
    architectures: ClassVar[tuple[Architecture, ...]] = ("decoder",)
    """Kinds of model families that can learn it."""
    model_class: ClassVar[str]
    """The AutoModel class of transformers that has its head."""
    head: ClassVar[HeadKind] = "classifier"
    """Logits of the vocabulary for each token, of the labels for each sample or for each token; none: the
    model ends with its hidden states; own: whatever the model has."""
    num_labels: ClassVar[int | None] = None
    """Logits of the head where no row decides it."""
    head_in_checkpoint: ClassVar[bool] = False
    """Whether a published checkpoint of the family holds the head."""
    peft_task: ClassVar[str | None] = None
    """`task_type` of peft; None: peft has none, and its plain model passes all arguments on."""
    gguf: ClassVar[bool] = False
    """Whether a GGUF file, which holds a causal language model, can be the base."""

    # --- loss -----------------------------------------------------------------------------------
    causal_loss: ClassVar[bool] = False
    """Whether the loss is transformers' own for causal language models, which Liger's kernels, `model.loss:
    chunked` and compiled blocks were measured with."""
    flattens: ClassVar[bool] = False
    """Whether the samples of a batch can be laid in one row, and attention `varlen` keeps them apart."""
    tensor_parallel: ClassVar[bool] = False
    """Whether tp_size, sp_size and cp_size were tested with it."""
    tiled_logits: ClassVar[bool] = False
    """Whether logits exist a tile at a time only (trl 1.16, add_fused_lm_head), in evaluations too."""
    casts_logits: ClassVar[bool] = True
    """Whether the model casts its logits to float32 outside of autocast."""
    sequences_per_sample: ClassVar[int] = 1
    """Rows of a micro-batch that one sample makes."""
    has_reference: ClassVar[bool] = False
    """Whether its losses compare the model with a frozen one."""
    rolls_out: ClassVar[bool] = False
    """Whether the model writes its own training samples, which the functions of `reward:` score."""
    untraceable: ClassVar[str] = ""
    """Why the memory of a step cannot be traced; empty where it can."""

    # --- arguments ------------------------------------------------------------------------------
    argument_table: ClassVar[ArgumentTable | None] = None
    """Where the fields come from that `trainer:` has for this task."""
    owned_arguments: ClassVar[Mapping[str, str]] = {}
    """Fields of that table that the launcher decides itself or that do nothing -> what to do instead."""
    loss_arguments: ClassVar[tuple[str, ...]] = ()
    """Fields of that table that decide what is minimised: a resumed run has them unchanged."""
    trainer_defaults: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Fields of `trainer:` -> (value, reason) where the recipe leaves them out."""
    adapter_dropout: ClassVar[bool] = True
    """False: the Trainer disables dropout, and that of an adapter would bypass it."""

    # --- metrics --------------------------------------------------------------------------------
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names that `data.metrics` may hold, besides the evaluation loss."""
    problem_metrics: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Value of `data.problem_type` -> those of the metrics that it has."""
    smaller_is_better: ClassVar[tuple[str, ...]] = ("perplexity",)
    """Metrics of which the smallest value is the best."""
    metric_packages: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Metric -> (module, the package that brings it), for those that need one."""
    generated_metrics: ClassVar[tuple[str, ...]] = ()
    """Those that read generated text."""
    own_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of metrics that the Trainer itself reports of an evaluation, `*` for any text."""
    keeps_token_predictions: ClassVar[bool] = False
    """Whether metrics read a predicted token for each position."""

    # --- other tools (import) ---------------------------------------------------------------------
    known_as: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Tool -> its names for this task: a command of `trl`, a stage of LLaMA-Factory, an `rl` of axolotl."""
    known_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Tool -> keys that only its files for this task have."""
    tool_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Tool -> recipe key -> what the tool uses where its file is silent."""

    # --- a first recipe (init), the result (generate, model card) ---------------------------------
    goals: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Goal of `init` -> the formats with which it is this task."""
    goal_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of which rows for its goals have one, where the formats alone fit other rows too."""
    first_models: ClassVar[tuple[str, ...]] = ()
    """Models that `init` proposes, the largest first; empty: the usual text models."""
    first_least_batch: ClassVar[int] = 1
    """Samples of a device and step at least."""
    first_room: ClassVar[int] = 0
    """Tokens of a sample besides those of its row."""
    samples_are: ClassVar[str] = "samples"
    first_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora")
    """What `init` may propose to train."""
    first_metrics: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Goal -> metrics of a first recipe."""
    first_rates: ClassVar[Mapping[str, float]] = {}
    """`full` and `adapter` -> learning rate of a first recipe, where it is not the usual one."""
    first_rate_note: ClassVar[str] = ""
    first_arguments: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Fields of `trainer:` of a first recipe -> (value, comment)."""
    compares_texts: ClassVar[bool] = False
    """Whether the result answers with a number for two texts."""
    library: ClassVar[str] = "transformers"
    """The hub's name of the library that loads the result."""
    example_code: ClassVar[str] = ""
    """Python of the model card where it is not that of transformers: `PLACE` for the arguments that load the
    result, `TEXTS` for two texts."""
    generates: ClassVar[bool] = False
    """Whether evaluations can generate text (`predict_with_generate`)."""
    pipeline: ClassVar[str | None] = None
    """The hub's name for what the result does."""
    pipeline_options: ClassVar[str] = ""
    """Arguments that the example of the model card gives after its input."""
    tags: ClassVar[tuple[str, ...]] = ()
    """Of the model card."""
    example_input: ClassVar[str] = "a text"

    @property
    def example_texts(self) -> tuple[str, ...]:
        """What `generate` gets after the run directory in an example."""
        if self.compares_texts:
            return ("What is the capital of Italy?", "Rome is the capital of Italy.")
        return ("Hello",)

    def first_keys(self, rows: Mapping[str, Sequence[object]]) -> dict[str, tuple[object, str]]:
        """Further keys of a first recipe (section, or `data.` key) -> (value, comment).

        rows: field of the format, and name of each other column -> the values in the first rows.
        """
        return {}

    def default_rate(self, *, adapter: bool) -> tuple[float, str] | None:
        """(learning rate, reason) where the Trainer's own default is another one than is usual here."""
        return None

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        """Problems between fields of `trainer:` that the Trainer would find only when it is built."""
        return []

    def needs_reference(self, trainer: Mapping[str, Any]) -> bool:
        """Whether each step of a run with these fields of `trainer:` runs a frozen reference model."""
        return self.has_reference and not precomputes(trainer)

    def extra_forwards(self, trainer: Mapping[str, Any]) -> int:
        """Forward passes without gradients that each micro-batch has besides the one of training."""
        return int(self.needs_reference(trainer))

    def least_batch(self, trainer: Mapping[str, Any]) -> tuple[int, str]:
        """(the smallest micro-batch that its loss can have, why)."""
        return 1, ""

    def least_batch_of(self, settings: Any) -> tuple[int, str]:
        """As `least_batch`, of a plan's settings."""
        return self.least_batch(settings.fields(settings.trainer))

    def misfit(self, form: str, section: Any) -> Problem | None:
        """The problem of rows of one of its formats with its own section, in which every key has a value."""
        return None

    def row_misfit(self, values: Mapping[str, Any], section: Any) -> Problem | None:
        """The same of the canonical values of a row."""
        return None

    def check_section(self, given: Mapping[str, Any], rest: Mapping[str, Any]) -> list[Problem]:
        """Problems of the task's own section of a recipe, and of whole sections that it does not read.

        rest: the recipe as it is written.
        """
        return []

    def section_values(self, given: Any) -> dict[str, tuple[Any, str]]:
        """Settings of the task's own section -> (value, reason). given: the recipe's section, or None."""
        return {}

    def sequences(self, settings: Any) -> int:
        """Rows of a micro-batch that one sample makes. settings: those of a plan."""
        return self.sequences_per_sample

    def mini_batch(self, settings: Any) -> int | None:
        """Rows whose activations are held at a time; None: those of all rows of a micro-batch."""
        return None

    def compares(self, settings: Any) -> bool:
        """Whether the samples of a micro-batch are compared with each other, or weighed against each other:
        its size decides what is learned, and accumulation does not replace it. So no device chooses it."""
        return False

    loss_unit: ClassVar[str] = "rows"
    """What its loss is a mean of: `rows`, or `targets`, the tokens with a label."""

    counted_by_trainer: ClassVar[bool] = False
    """Whether transformers' own Trainer takes the loss of a step over its targets."""

    def loss_over(self, settings: Any) -> str:
        """What the loss of a step is a mean of, each by itself and weighing the same for every micro-batch,
        evaluation batch and number of ranks; `micro-batch` where there is nothing like that."""
        return "micro-batch" if self.compares(settings) else self.loss_unit

    @property
    def architecture_suffix(self) -> str:
        """How class names of models with this head end: ForCausalLM."""
        return self.model_class.removeprefix("AutoModel")

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of its row formats."""
        return tuple(one.name for one in self.row_formats)

    @property
    def adds_head(self) -> bool:
        """Whether it has a head of labels: trained whole beside an adapter, and saved with it."""
        return self.head in ("classifier", "token-classifier")

    @property
    def writes(self) -> bool:
        """Whether the model writes text, token by token."""
        return self.head == "language-model"

    @property
    def ranks_answers(self) -> bool:
        """Whether a row holds a chosen and a rejected answer."""
        return PREFERENCE in self.row_formats

    @property
    def labels_answers(self) -> bool:
        """Whether a row holds one answer and a label that says good or bad."""
        return self.head == "language-model" and "label" in self.row_formats[0].needed

    def format_with(self, field: str) -> str:
        """The first of its formats whose rows have this field."""
        return next(one.name for one in self.row_formats if field in one.needed)

    def reports(self, metric: str) -> bool:
        """Whether each evaluation has this metric, whatever `data.metrics` says."""
        return metric == "loss" or any(fnmatchcase(metric, name) for name in self.own_metrics)

    @property
    def is_encoder_decoder(self) -> bool:
        return self.architectures == ("encoder-decoder",)


TRL_PADS = "trl pads to the longest row of a batch, unless a multiple is asked for"
"""`own_padding` of the tasks whose batches trl makes."""


class TrlTask(Task):
    """A task with a trainer of trl, whose samples are batches of its own collator."""

    packages = ("trl",)
    extra = "dpo"
    hooks = ("format_row", "compute_metrics", "callbacks", "optimizer", "prepare_model", "Trainer")
    own_padding, pads_as_asked = TRL_PADS, True
    prepared_by = ("trl",)
    adapter_dropout = False
    owned_arguments = {
        "max_length": "write `data.max_length`",
        "dataset_num_proc": "write `data.num_proc`",
        "trust_remote_code": "write `model.trust_remote_code`",
        "model_init_kwargs": "`model` decides it",
    }
    smoothing_hint: ClassVar[str]
    """What to do about a `label_smoothing_factor`, which trl's losses do not read."""

    def check_trainer(self, trainer: Mapping[str, Any]) -> list[Problem]:
        if trainer.get("label_smoothing_factor") in (None, 0):
            return []
        path, message = (
            "trainer.label_smoothing_factor",
            "has no effect: the loss of trl's trainer does not read it",
        )
        return [Problem("conflict", message, path=path, hint=self.smoothing_hint)]


ANSWER_METRICS = (
    "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
    "logits/chosen", "logits/rejected", "entropy", "aux_loss",
)  # fmt: skip
"""Of trl's trainers with a reference (`_metrics` in trl 1.16)."""
FIXED_REFERENCE = dict.fromkeys(
    ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    "remove it: the reference is the model before training, and stays so",
)
"""Fields of trl's that would move the reference."""


class PairTask(TrlTask):
    """A task on a chosen and a rejected answer."""

    row_formats = (PREFERENCE,)
    sequences_per_sample = 2
    owned_arguments = {**TrlTask.owned_arguments, "pad_token": "the tokenizer decides it"}
    samples_are = "pairs"


def precomputes(trainer: Mapping[str, Any]) -> bool:
    """Whether the log-probabilities of the reference are computed before training, which then has none."""
    return bool(trainer.get("precompute_ref_log_probs"))


def columns_needed(trainer: Mapping[str, Any]) -> list[Problem]:
    """The problem of removing the columns that a sample is made of."""
    if trainer.get("remove_unused_columns") is not True:
        return []
    message = "is true, but the samples are made of columns that no model knows"
    path = "trainer.remove_unused_columns"
    return [Problem("conflict", message, path=path, hint="remove it")]
