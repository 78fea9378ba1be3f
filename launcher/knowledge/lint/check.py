"""Collect the findings of a DeepSpeed config, and apply their edits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from launcher.knowledge.lint.consistency import check_blocks, check_conflicts, check_effects
from launcher.knowledge.lint.document import Document, Edit, Finding, Node, read_json
from launcher.knowledge.lint.keys import RENAMED, check_keys, known_keys, sections_with, spellings, vocabulary
from launcher.knowledge.lint.values import check_autos, check_types
from launcher.recipe.field_tables import trainer_fields
from launcher.recipe.suggestions import close_key

OWN = frozenset(
    {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "activation_checkpointing"}
)
"""Keys that only a DeepSpeed config has."""
_FEWEST = 3
"""From this number of keys on, a file without a known key is not a DeepSpeed config."""
_FEWEST_FIELDS = 3
"""From this number of TrainingArguments fields on, a file is not a DeepSpeed config."""


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    any_of: frozenset[str] = frozenset()
    """One of them is enough."""
    all_of: frozenset[str] = frozenset()
    """All of these together, if no top-level key is DeepSpeed's: such names are common."""


def _kind(name: str, any_of: str = "", all_of: str = "") -> _Kind:
    return _Kind(name, frozenset(any_of.split()), frozenset(all_of.split()))


KINDS = (
    _kind("an adapter's adapter_config.json", "peft_type"),
    _kind("a tokenizer's tokenizer_config.json", "tokenizer_class added_tokens_decoder chat_template"),
    _kind("a tokenizer.json", all_of="added_tokens model normalizer"),
    _kind("a model's config.json", "model_type architectures", "hidden_size num_hidden_layers"),
    _kind("a processor's config", "image_processor_type feature_extractor_type processor_class"),
    _kind("an index of a model's weights", "weight_map"),
    _kind("a model's generation_config.json", "_from_model_config", "transformers_version eos_token_id"),
    _kind("a checkpoint's trainer_state.json", "log_history"),
    _kind("accelerate's own config", "compute_environment distributed_type"),
    _kind("a package.json", "devDependencies", "name version"),
    _kind("a recipe of effilaunch", all_of="model data"),
    _kind("LLaMA-Factory's arguments", "model_name_or_path finetuning_type"),
)


def another_kind(document: Document) -> Finding | None:
    """Return the single finding of a file that is not a DeepSpeed config, else None."""
    root = document.root
    if root is None or not root.members:
        return None
    keys = {member.key: member.node for member in root.members}
    if keys.keys() & OWN:
        return None
    below = _wrapped(keys)
    name = below or _named(keys) or _arguments(keys) or _nothing_known(keys)
    if name is None:
        return None
    hint = (
        f"move the object under `{below}` into its own file"
        if below
        else "pass the file that is set as `deepspeed` in TrainingArguments or as `--deepspeed_config`"
    )
    what = f"contains a DeepSpeed config under `{below}`" if below else f"is {name}"
    return document.found(root.start, "", "ds-not-a-config", f"not a DeepSpeed config: it {what}", hint)


def _named(keys: Mapping[str, Node]) -> str | None:
    known = spellings(known_keys()).keys() | RENAMED.keys() | vocabulary()["removed"].keys()
    for kind in KINDS:
        together = kind.all_of and kind.all_of <= keys.keys() and not keys.keys() & known
        if kind.any_of & keys.keys() or together:
            return kind.name
    return None


def _arguments(keys: Mapping[str, Node]) -> str | None:
    fields = keys.keys() & trainer_fields().keys() - spellings(known_keys()).keys()
    return "TrainingArguments as JSON" if len(fields) >= _FEWEST_FIELDS else None


def _nothing_known(keys: Mapping[str, Node]) -> str | None:
    """Describe a file without any key that DeepSpeed knows or a misspelling of one."""
    known = spellings(known_keys())
    removed = vocabulary()["removed"]
    if len(keys) < _FEWEST:
        return None
    for key in keys:
        misplaced = "_" in key and sections_with(key)  # `type` and `name` are everybody's
        if key in known or key in RENAMED or key in removed or misplaced or close_key(key, known):
            return None
    return f"another kind of file: DeepSpeed knows none of its {len(keys)} keys"


def _wrapped(keys: Mapping[str, Node]) -> str | None:
    """Return the key whose value is a DeepSpeed config."""
    for key, node in keys.items():
        if OWN & {member.key for member in node.members or ()}:
            return key
    return None


LARGEST = 100_000
"""Bytes; real configs are below a tenth of it."""
MOST = 500
"""Findings per rule that are reported."""
Rule = Callable[[Document], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    check_keys,
    check_types,
    check_autos,
    check_blocks,
    check_conflicts,
    check_effects,
)


def lint_text(text: str, file: str, *more: Rule) -> list[Finding]:
    """Findings of a ds_config's text; `more` are rules besides RULES."""
    document = read_json(text, file)
    found = list(document.findings)
    root = document.root
    if root is None:
        return found
    if root.members is None:
        what = "a list" if root.kind == "list" else "a single value"
        message = f"{what}; a DeepSpeed config is a JSON object"
        return [*found, document.found(root.start, "", "ds-not-an-object", message, 'write {"…": …}')]
    other = another_kind(document)
    if other is not None:
        return [other]
    for rule in (*RULES, *more):
        found += islice(rule(document), MOST)
    return sorted(found, key=lambda finding: (finding.line, finding.column, finding.code))


def decoded(raw: bytes, file: str) -> tuple[str | None, Finding | None]:
    """Return the text of a file, or the finding that explains why it is unreadable."""
    if len(raw) > LARGEST:
        return None, _whole(file, f"larger than {LARGEST} bytes, which no DeepSpeed config is")
    if b"\0" in raw:
        return None, _whole(file, "binary or UTF-16 content; a DeepSpeed config is JSON in UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"byte {raw[error.start]:#04x} is not valid UTF-8"
        return None, Finding(file, line, column, "", "ds-json-syntax", message, "save the file as UTF-8")
    if file.endswith((".yaml", ".yml")) and not text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        hint = "convert it to JSON; to check a recipe, use `effilaunch validate`"
        return None, _whole(file, "this is YAML; DeepSpeed and the Trainer read only JSON", hint)
    return text, None


def _whole(file: str, message: str, hint: str | None = None) -> Finding:
    return Finding(file, 1, 1, "", "ds-json-syntax", message, hint)


def lint_bytes(raw: bytes, file: str, *more: Rule) -> list[Finding]:
    """As `lint_text`, from what a file holds."""
    text, finding = decoded(raw, file)
    return [finding] if finding is not None else lint_text(text or "", file, *more)


# A recipe's plan decides these, so a base profile may leave them open.
PLAN_DECIDES = frozenset({"ds-auto-unresolved", "ds-no-batch-size", "ds-no-zero-block"})


def read_profile(raw: bytes, file: str) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return a recipe's base profile, or the findings that make it unusable."""
    wrong = [f for f in lint_bytes(raw, file) if f.severity == "error" and f.code not in PLAN_DECIDES]
    if wrong:
        return None, wrong
    root = read_json(raw.decode("utf-8"), file).root
    profile: dict[str, Any] | None = None if root is None else root.plain()
    return profile, []


ROUNDS = 20
"""A fixed key may reveal the next mistake; each round applies all edits that do not overlap."""


def apply_fixes(text: str, file: str, *more: Rule) -> tuple[str, list[Finding]]:
    """Return the fixed text and the remaining findings. Ambiguous mistakes are not changed."""
    left = lint_text(text, file, *more)
    for _ in range(ROUNDS):
        groups = [finding for finding in left if finding.edits]
        # First what is no strict JSON: without its only key, `{"a": 1,}` would be no JSON at all.
        form = [finding for finding in groups if finding.code.startswith("ds-json")]
        changed = applied(text, [finding.edits for finding in form or groups])
        if changed == text:
            break
        text, left = changed, lint_text(changed, file, *more)
    return text, left


def applied(text: str, groups: Sequence[Sequence[Edit]]) -> str:
    """The text after all edits of each group that touches none of the groups before it."""
    taken: list[Edit] = []  # by their place; no two touch
    for group in groups:
        if not any(_touches(edit, taken) for edit in group):
            for edit in group:
                insort(taken, edit, key=_start)
    parts, at = [], 0
    for edit in taken:
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])


_start = attrgetter("start")


def _touches(edit: Edit, taken: Sequence[Edit]) -> bool:
    """Whether one of the edits, sorted by their place, overlaps this one or ends where it starts."""
    after = bisect_left(taken, edit.start, key=_start)
    before = after > 0 and taken[after - 1].end >= edit.start
    return before or (after < len(taken) and taken[after].start <= edit.end)
