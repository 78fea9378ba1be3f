"""The values of a first recipe: what `init` writes for a goal, a model, rows and hardware. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.machine.hardware import Hardware
from launcher.models.model import ModelSpec
from launcher.tasks import DEFAULT_TASK, TASKS, task_named

_ORDER = (
    "instructions", "chat", "text", "preferences", "classify", "images", "feedback", "reward-model",
    "reasoning", "embeddings", "ranking",
)  # fmt: skip
GOALS: Mapping[str, tuple[str, ...]] = {
    goal: tuple(dict.fromkeys(form for task in TASKS for form in task.goals.get(goal, ())))
    for goal in _ORDER
    if any(goal in task.goals for task in TASKS)
}
"""What a model shall learn -> the formats of rows that teach it."""
METHODS = ("full", "lora", "qlora")
SMALL = 1_000_000_000
"""Parameters below which all of them are trained where that fits: an adapter of such a model saves little."""
BYTES_PER_TOKEN = 4
"""UTF-8 bytes that a token stands for, about: 4 Latin letters, 2 Cyrillic ones, 1.3 Chinese characters."""
SHORTEST, LONGEST = 256, 4096
"""Tokens: data.max_length is chosen between these."""
MANY_ROWS, FEW_ROWS = 10_000, 200
"""Rows from which on one epoch is enough; rows below which none are held out."""
_EVALUATED = 1000
"""Rows held out, at most about."""
_BATCH = 32
_STEPS = 50
"""Steps that a run should have at least, before the batch is made smaller."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

CHATML = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The chat template for a model that has none."""
_CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True, slots=True)
class Rows:
    """What was seen of the data."""

    path: str
    """As the recipe shall say it."""
    format: str
    """A format, or `auto` where nobody looked."""
    columns: Mapping[str, str | None]
    """Field -> column, where they differ."""
    count: int | None
    """None where nobody looked."""
    longest: Sequence[str] | None
    """The texts of the longest row; None where nobody looked, and for pictures."""
    more: bool = False
    """Whether there are more rows than were counted."""
    first: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Field of the format, and each other column -> the values in the first rows."""
    counted_tokens: int | None = None
    """Tokens of the longest row by the model's tokenizer; None where it is not on this machine."""

    @property
    def longest_tokens(self) -> int | None:
        """Tokens of the longest row: counted, else a guess."""
        if self.counted_tokens is not None or self.longest is None:
            return self.counted_tokens
        return -(-sum(len(text.encode("utf-8", "replace")) for text in self.longest) // BYTES_PER_TOKEN)

    @property
    def tokens_by(self) -> str:
        """How `longest_tokens` was found."""
        return "by a guess" if self.counted_tokens is None else "by the model's tokenizer"


@dataclass(frozen=True, slots=True)
class StartAnswers:
    """What the questions were answered with."""

    goal: str
    task: str
    model: Mapping[str, str]
    """name_or_path, and gguf_file where the weights lie in one."""
    spec: ModelSpec
    rows: Rows
    hardware: Hardware
    has_template: bool
    """Whether the model's tokenizer has, or probably has, a chat template."""
    packs: bool = True
    """Whether the model keeps packed texts apart."""
    precision: str = "auto"
    """fp32 where the device has no bf16 and the model overflows fp16."""


def task_of(goal: str, fmt: str, tasks: Sequence[str]) -> str:
    """The task for a goal with rows of a format; tasks: those that the model's family can learn, if known."""
    fitting = [task for task in TASKS if goal in task.goals]
    fitting = [task for task in fitting if fmt in task.goals[goal]] or fitting
    return next((task for task in fitting if task.name in tasks), fitting[0]).name


def methods(start: StartAnswers) -> tuple[str, ...]:
    """What to train, in the order in which it is tried: the first that fits is written."""
    if (allowed := task_named(start.task).first_methods) != METHODS:
        return allowed
    of_encoders = "encoder" in task_named(start.task).architectures
    if start.goal == "text" or of_encoders or start.spec.params < SMALL:
        return METHODS
    return ("lora", "qlora")


def first_length(start: StartAnswers) -> int:
    """data.max_length that holds the longest row, with some room for the guess, or the usual 2048."""
    longest, task = start.rows.longest_tokens, task_named(start.task)
    if start.goal == "text" or longest is None or task.sees_images:
        length = 2048
    else:
        length = SHORTEST
        while length < min(longest * 1.25 + task.first_room, LONGEST):
            length *= 2
    return min(length, start.spec.max_position_embeddings or length)


def draft(
    start: StartAnswers, method: str, length: int, missed: Sequence[str] = ()
) -> tuple[dict[str, object], dict[str, str]]:
    """The recipe's values, and the reasons of some of them by dotted path.

    missed: methods that were tried before this one, and do not fit.
    """
    notes: dict[str, str] = {}
    data: dict[str, object] = {} if start.task == DEFAULT_TASK else {"task": start.task}
    data["model"] = _model(start, method, notes)
    if method != "full":
        data["adapter"] = _adapter(start, notes)
        others = " and ".join(_NAMED[name] for name in missed)
        verb = "does" if len(missed) == 1 else "do"
        notes["adapter"] = _WHY[method] + (f"; {others} {verb} not fit this hardware" if others else "")
    data["data"] = _data(start, length, notes)
    data["precision"] = start.precision
    notes["precision"] = (
        "bf16 where the device has it" if start.precision == "auto"
        else "there is no bf16 on this device, and the model overflows fp16"
    )  # fmt: skip
    data["global_batch_size"] = _batch_size(start)
    notes["global_batch_size"] = _batch_words(start)
    _add_keys(start, data, notes)
    data["trainer"] = _trainer(start, method, notes)
    hardware = start.hardware
    data["hardware"] = {
        "num_nodes": hardware.num_nodes,
        "devices_per_node": hardware.devices_per_node,
        "device": hardware.device,
    }
    return data, notes


def _add_keys(start: StartAnswers, data: dict[str, object], notes: dict[str, str]) -> None:
    """The keys of the task alone; metrics only where rows are held out."""
    section = data["data"]
    assert isinstance(section, dict)
    for key, (value, note) in task_named(start.task).first_keys(start.rows.first).items():
        within = key.startswith("data.")
        if key == "data.metrics" and "eval" not in section:
            continue
        (section if within else data)[key.removeprefix("data.")] = value
        if note:
            notes[key] = note


_WHY = {
    "lora": "a small adapter is trained, and the weights stay",
    "qlora": "a small adapter is trained over 4-bit weights",
}
_NAMED = {"full": "a full fine-tune", "lora": "LoRA over 16-bit weights"}


def _model(start: StartAnswers, method: str, notes: dict[str, str]) -> dict[str, object]:
    model: dict[str, object] = dict(start.model)
    if method == "qlora":
        model["quantization"] = "nf4"
        notes["model.quantization"] = "the weights in 4 bits: in 16 they do not fit this hardware"
    if start.goal == "chat" and not start.has_template:
        model["add_tokens"] = list(_CHATML_TOKENS)
        model["chat_template"] = CHATML
        notes["model.chat_template"] = (
            "ChatML, for a model without a template of its own; leave both keys out where it has one"
        )
    return model


def _adapter(start: StartAnswers, notes: dict[str, str]) -> dict[str, object]:
    experts = any(start.spec.config.get(name) for name in _EXPERTS)
    if experts:
        notes["adapter.target_modules"] = (
            "attention alone: adapters on experts need a copy of a layer's experts, and its gradient"
        )
    return {
        "type": "lora",
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05 if task_named(start.task).adapter_dropout else 0.0,
        "target_modules": _attention(start.spec) if experts else "all-linear",
    }


def _attention(spec: ModelSpec) -> list[str]:
    """Its linear layers: DeepSeek-V3 has no q_proj."""
    names = [linear.name for linear in spec.linears if ".self_attn." in linear.path and not linear.skipped]
    return list(dict.fromkeys(names)) or ["q_proj", "k_proj", "v_proj", "o_proj"]


def _data(start: StartAnswers, length: int, notes: dict[str, str]) -> dict[str, object]:
    rows = start.rows
    source: dict[str, object] = {"path": rows.path, "format": rows.format}
    if rows.columns:
        source["columns"] = dict(rows.columns)
        notes["data.train[0].columns"] = "field of the format: column of the file"
    section: dict[str, object] = {"train": [source]}
    if rows.count is not None and rows.count >= FEW_ROWS:
        share = min(0.05, _EVALUATED / rows.count)
        share = float(f"{share:.1g}")
        section["eval"] = {"split": share}
        held_out = f"{100 * share:g} %" if rows.more else f"about {round(rows.count * share):,}"
        of = "of the rows" if rows.more else f"of {rows.count:,} rows"
        notes["data.eval"] = f"{held_out} {of} are held out, to evaluate on; the others are trained on"
        if metrics := task_named(start.task).first_metrics.get(start.goal):
            section["metrics"] = list(metrics)
    if task_named(start.task).reads_tokens:
        section["max_length"] = length
        notes["data.max_length"] = _length_words(start, length)
    if start.goal == "text" and start.packs:
        section["packing"] = True
        notes["data.packing"] = "texts are laid end to end, and none sees another"
    return section


def _length_words(start: StartAnswers, length: int) -> str:
    """Why samples are as long as they are."""
    longest, most = start.rows.longest_tokens, start.spec.max_position_embeddings
    if start.goal == "text":
        return "tokens; longer texts become several samples"
    if longest is None:
        return "tokens; the rows were not looked at"
    if task_named(start.task).sees_images:
        found = f"the longest text has about {longest:,}, {start.rows.tokens_by}"
        return f"tokens, those of images included; {found}"
    guessed = f"the longest row has about {longest:,}, {start.rows.tokens_by}"
    if longest <= length:
        return f"tokens; {guessed}"
    return f"tokens, all that the model has; {guessed}" if length == most else f"tokens; {guessed}: cut"


def _epochs(start: StartAnswers) -> int:
    if start.goal == "text" or task_named(start.task).own_metrics or start.rows.count is None:
        return 1
    return 3 if start.rows.count < MANY_ROWS else 1


def _batch_size(start: StartAnswers) -> int:
    """A multiple of the devices, 32 or so; less where few rows would make few steps."""
    size, devices = _BATCH, start.hardware.num_devices
    least = task_named(start.task).first_least_batch
    samples = (start.rows.count or MANY_ROWS) * _epochs(start)
    while size > max(4, least) and samples < size * _STEPS:
        size //= 2
    return max(least, -(-size // devices)) * devices


def _batch_words(start: StartAnswers) -> str:
    kind = "packs" if start.goal == "text" else task_named(start.task).samples_are
    return f"{kind} a step, over all devices"


def _trainer(start: StartAnswers, method: str, notes: dict[str, str]) -> dict[str, object]:
    rate = _rate(start, method)
    notes["trainer.learning_rate"] = (
        "usual for "
        + ("LoRA" if method != "full" else "training all parameters")
        + task_named(start.task).first_rate_note
    )
    trainer: dict[str, object] = {"num_train_epochs": _epochs(start), "learning_rate": rate}
    for name, (value, note) in task_named(start.task).first_arguments.items():
        trainer[name], notes[f"trainer.{name}"] = value, note
    trainer |= {
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "logging_steps": 10 if (start.rows.count or MANY_ROWS) > 1000 else 1,
        "save_total_limit": 2,
    }
    notes["trainer.warmup_steps"] = "below 1: a share of all steps"
    return trainer


def _rate(start: StartAnswers, method: str) -> float:
    full, params = method == "full", start.spec.params
    own = task_named(start.task).first_rates.get("full" if full else "adapter")
    if own is not None:
        return own
    if full:
        return 2e-5 if params < SMALL else 1e-5
    return 1e-4 if params > 30 * SMALL else 2e-4
