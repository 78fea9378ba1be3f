"""The keys that a plan has as the recipe has them, each declared once.

The sections of the recipe (recipe/schema.py) and of the plan (plan/settings.py) inherit these classes: type,
default and meaning are the key's everywhere. What else holds of it is its `Key`: the copy into the plan
(planner/record.py), the rules of a resume (planner/resuming.py), the name of the prepared samples
(train/data/prepare.py) and the tasks that read it (recipe/rules.py) follow from that. What the planner
decides from a key (`auto`, or absent) has a declaration of its own in plan/settings.py.
"""

# Without `from __future__ import annotations`: the annotations are read, and need not be evaluated then.
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import get_annotations
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen

from launcher.tasks.task import Task

Verdict = Literal["free", "note", "states", "samples", "refuse"]
"""What a resume does with another value: nothing · a message · it asks the engine that reads the checkpoint ·
it compares the prepared samples, and refuses where rows are streamed · it refuses."""

PLACE = "the place in the data that the checkpoint names would be another one"
FIX = "restore the value, or start a new run in another --output-dir"


class _Always:
    """No value: all plans have the setting."""


ALWAYS = _Always()


@dataclass(frozen=True, slots=True)
class Resume:
    """What another value means for a run that is resumed."""

    verdict: Verdict
    reason: str
    fix: str = FIX


REPORTED = Resume("free", "changes what is reported, not what is learned")
DERIVED = Resume("free", "follows from the settings that are compared, and is in no checkpoint")
OF_START = Resume("free", "who starts the run, not what it learns")
ROUNDED = Resume("note", "the numbers are rounded differently from here on")
EVALUATED = Resume("note", "evaluations before and after may not be comparable")


@dataclass(frozen=True, slots=True)
class Key:
    """What holds of a key beside its type, default and meaning."""

    resume: Resume | None = None
    """None: as the pattern of its section says in planner/resuming.py."""
    absent: str | None = "schema default"
    """The reason in the plan where the recipe leaves it out; None: the plan then has no such setting."""
    before: object = ALWAYS
    """What plans did that were made before there was such a setting."""
    decides_samples: bool = False
    """Whether other values give other prepared samples."""
    read_by: Callable[[Task], bool] | None = None
    """The tasks that read it, the others refuse it; None: all."""
    unread: str = ""
    """Why the others do not read it."""

    def is_read_by(self, task: Task) -> bool:
        return self.read_by is None or self.read_by(task)


def has_tokens(task: Task) -> bool:
    return task.reads_tokens


def joins_rows(task: Task) -> bool:
    """Whether its samples may hold more than one row, or part of one."""
    return task.flattens


def has_choice(task: Task) -> bool:
    """Whether `data.loss_on` has more than one value."""
    return bool(task.learns)


def has_problem_types(task: Task) -> bool:
    return bool(task.problem_metrics)


NO_TOKENS = "images are not tokenised"


class RunKeys:
    """Keys of a recipe outside its sections."""

    on_oom: Annotated[Literal["fail", "adapt"], Key(OF_START)] = "fail"
    """What a run does when memory runs out; `adapt`: it continues with less: a smaller micro-batch with more
    accumulation, then activation checkpointing, then ZeRO and offload."""
    seed: Annotated[int, Ge(0), Key(Resume("refuse", PLACE))] = 42
    """Seed of data order, splits, adapter initialisation and dropout; owns `trainer.seed`."""


class ModelKeys:
    """Of `model`."""

    name_or_path: Annotated[str | None, Key(absent="not asked for")] = None
    """Hub id, folder, or `package:NAME/inner/path` of an installed Python package; this or
    `model.config`."""
    revision: Annotated[str | None, Key(absent="not asked for")] = None
    """Branch, tag or commit of the hub id."""
    gguf_file: Annotated[
        str | None,
        Key(absent="not asked for", read_by=lambda task: task.gguf,
            unread="it trains on checkpoints in safetensors"),
    ] = None  # fmt: skip
    """A GGUF file inside `name_or_path`; dequantised once and cached."""
    tokenizer: Annotated[str | None, Key(absent="not asked for", read_by=has_tokens, unread=NO_TOKENS)] = None
    """Tokenizer, where it is not next to the model: hub id, folder, GGUF file or `package:` path."""
    chat_template: Annotated[
        str | None, Key(absent="not asked for", read_by=has_tokens, unread=NO_TOKENS)
    ] = None
    """A Jinja template (file or inline) for a tokenizer without one."""
    add_tokens: Annotated[
        list[Annotated[str, MinLen(1)]],
        Key(absent="not asked for", read_by=has_tokens, unread=NO_TOKENS),
    ] = []  # noqa: RUF012  pydantic copies it
    """Tokens to add to the tokenizer; their embedding rows are trained and saved, with an adapter, too."""
    rope_parameters: Annotated[
        dict[str, Any] | None,
        Key(Resume("refuse", "the model would place its tokens elsewhere"), absent="not asked for",
            before=None, read_by=lambda task: task.reads_tokens and not task.sees_images,
            unread="it trains no text model alone"),
    ] = None  # fmt: skip
    """Longer contexts than the checkpoint's: `rope_type` (`linear`, `dynamic`, `yarn`, `llama3`), `factor`
    and that type's other fields, as in transformers."""
    cache_dir: Annotated[str | None, Key(DERIVED, absent="not asked for")] = None
    """Folder of the hub cache, as in from_pretrained."""
    trust_remote_code: Annotated[bool, Key(DERIVED, absent="not asked for")] = False
    """Run model code from the hub repository."""


class DataKeys:
    """Of `data`."""

    metrics: Annotated[
        list[str],
        Key(EVALUATED, absent="the evaluation loss is always reported"),
    ] = []  # fmt: skip  # noqa: RUF012
    """Metrics on the evaluation rows besides the loss; the names depend on the task."""
    max_length: Annotated[
        int, Ge(8), Le(1_000_000_000),
        Key(decides_samples=True, read_by=has_tokens, unread=NO_TOKENS),
    ] = 2048  # fmt: skip
    """Maximum tokens of a sample; `data.overlong` decides about longer ones, and their number is reported."""
    overlong: Annotated[
        Literal["truncate", "split", "drop"] | None,
        Key(absent="text is split, other rows are truncated", decides_samples=True,
            read_by=has_tokens, unread=NO_TOKENS),
    ] = None  # fmt: skip
    """What happens to a row longer than `max_length`; absent: `split` (several samples) for text rows,
    `truncate` for others."""
    packing: Annotated[
        bool,
        Key(absent="each row is a sample of its own, not joined with others into packs",
            read_by=joins_rows, unread="its samples are padded"),
    ] = False  # fmt: skip
    """Fill samples with whole documents up to `max_length`, without attention between them."""
    loss_on: Annotated[
        Literal["completion", "assistant", "all"] | None,
        Key(absent="by row format, decided when the rows are read", decides_samples=True,
            read_by=has_choice, unread="the loss is where the task puts it"),
    ] = None  # fmt: skip
    """Tokens that contribute to the loss; absent: `completion` for prompt/completion and instruction rows,
    `assistant` for chat rows, `all` for text."""
    loss_on_inserted: Annotated[
        bool,
        Key(Resume("samples", PLACE), absent="the rows do not hold what the template inserts", before=True,
            decides_samples=True, read_by=has_choice,
            unread="only chats of task causal-lm are rendered for it"),
    ] = False  # fmt: skip
    """Whether text that the chat template inserts into an answer, such as an empty `<think></think>` block,
    contributes to the loss; `false`: masked, and counted. With `loss_on: all` it contributes."""
    streaming: Annotated[
        bool,
        Key(absent="rows are tokenised once, before the run", decides_samples=True,
            read_by=joins_rows, unread="its rows are read before training"),
    ] = False  # fmt: skip
    """Read the rows during training instead of before it; needs `trainer.max_steps`."""
    max_truncated: Annotated[float, Ge(0), Le(1), Key(REPORTED, read_by=has_tokens, unread=NO_TOKENS)] = 0.2
    """Largest share of tokens lost to `max_length`; above it, a run stops at its start."""
    max_dropped: Annotated[
        float, Ge(0), Le(1), Key(REPORTED, before=1.0, read_by=has_tokens, unread=NO_TOKENS)
    ] = 0.05
    """Largest share of a source's rows that may be dropped (empty, without target tokens, pairs of equal
    answers); above it, a run stops at its start. Rows dropped by `overlong: drop` or `format_row` do not
    count."""
    special_tokens_in_text: Annotated[
        Literal["keep", "escape", "refuse"] | None,
        Key(Resume("samples", PLACE),
            absent="kept as the tokenizer reads them; rows with some are a warning", before=None,
            decides_samples=True, read_by=has_tokens, unread=NO_TOKENS),
    ] = None  # fmt: skip
    """Special tokens in the texts of rows, such as `<|im_end|>` in a user's message: `keep` reads them as the
    control tokens that they are, `escape` as plain text, and `refuse` stops at the row; absent: `keep`, with
    a warning that names the first row."""
    num_proc: Annotated[Annotated[int, Ge(1)] | None, Key(DERIVED, absent="one per core, at most 8")] = None
    """Processes for tokenisation; absent: one per core, at most 8."""


_OWN_PART = Resume("refuse", "each rank has written the states of its own part of the model")
_Size = Annotated[int, Ge(1), Le(999_999)]
_Ranks = Key(_OWN_PART, absent="each device has a copy's work", before=1)


class ShardingKeys:
    """Of `sharding`."""

    nvme_path: Annotated[str | None, Key(DERIVED, absent="nothing is offloaded to a disk", before=None)] = (
        None
    )
    """Folder on a local disk for offload to `nvme`, relative to the recipe; overrides the base profile's."""
    tp_size: Annotated[_Size, _Ranks] = 1
    """Devices that share each layer's matrices (tensor parallelism), engine `deepspeed`; `ddp` for one
    copy."""
    sp_size: Annotated[_Size, _Ranks] = 1
    """Devices that share each sample's tokens (Ulysses sequence parallelism), engine `deepspeed`."""
    optim_in_backward: Annotated[
        bool, Key(DERIVED, absent="the optimizer steps after the backward pass", before=False)
    ] = False  # fmt: skip
    """Update each weight in the backward pass, as soon as its gradient is complete, which is freed then: one
    process, one micro-batch a step, `trainer.max_grad_norm: 0`, and no adapter."""
    cp_size: Annotated[_Size, _Ranks] = 1
    """Devices that share each sample's tokens (context parallelism of torch), engine `fsdp`; untested."""


class LaunchKeys:
    """Of `launch`."""

    hostfile: Annotated[str | None, Key(absent=None)] = None
    """A file with one host per line, `HOST slots=N`, including this one: the run starts on the others over
    ssh. Without `hardware` and --on, the file also sets the number of nodes and devices."""
    min_nodes: Annotated[Annotated[int, Ge(1), Le(999_999)] | None, Key(absent=None)] = None
    """The run continues with fewer nodes, at least so many, when nodes are lost or do not come: at the same
    global batch, from the last complete checkpoint. `plan` shows each size with its memory. Absent: a lost
    node ends the run."""
    max_restarts: Annotated[int, Ge(0), Le(1000), Key(absent="a run that fails stays ended")] = 0
    """How often in a row a failed run is restarted from its last complete checkpoint, with pauses of 10 s to
    5 minutes. A new checkpoint resets the count. Failures that would repeat (the recipe, memory, a full disk)
    are not restarted. 0: never."""
    hang_factor: Annotated[
        float, Ge(0), Le(1_000_000),
        Key(absent="a step that takes 20 times the median, and minutes, comes to no end"),
    ] = 20.0  # fmt: skip
    """A run hangs when a step takes this many times the median, and at least 5 minutes: it is stopped, the
    rank that is behind is named, and it is restarted where max_restarts allows it. 0: never."""


class RuntimeKeys:
    """Of `runtime`."""

    mirror: Annotated[str | None, Key(DERIVED, absent=None)] = None
    """URL of an object store, such as `s3://bucket/runs/tune`, `gs://…` or another one that fsspec writes:
    complete checkpoints and the result are copied there in the background, and `--resume auto` continues from
    there on an empty disk. A URL is the place of one run; `{name}` in it is the name of the run directory."""


SHARED: Mapping[str, type] = {
    "": RunKeys, "model": ModelKeys, "data": DataKeys, "sharding": ShardingKeys, "launch": LaunchKeys,
    "runtime": RuntimeKeys,
}  # fmt: skip
"""Section -> the class that declares the keys which its plan has as the recipe has them."""


def keys_of(kind: type) -> Iterator[tuple[str, Key]]:
    """(attribute, its Key) of the class's own declarations that have one."""
    for name, annotation in get_annotations(kind).items():
        for part in getattr(annotation, "__metadata__", ()):
            if isinstance(part, Key):
                yield name, part


def shared_keys() -> Iterator[tuple[str, Key]]:
    """(dotted name, its Key) of every shared key."""
    for section, kind in SHARED.items():
        for name, key in keys_of(kind):
            yield f"{section}.{name}".lstrip("."), key
