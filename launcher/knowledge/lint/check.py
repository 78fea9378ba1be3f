"""Collect the findings of a DeepSpeed config, and apply their edits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Any

from launcher.knowledge.lint.consistency import check_blocks, check_conflicts, check_effects
from launcher.knowledge.lint.document import Document, LintFinding, Node, TextEdit, read_json
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


KINDS = (
    ("an adapter's adapter_config.json", "peft_type", ""),
    ("a tokenizer's tokenizer_config.json", "tokenizer_class added_tokens_decoder chat_template", ""),
    ("a tokenizer.json", "", "added_tokens model normalizer"),
    ("a model's config.json", "model_type architectures", "hidden_size num_hidden_layers"),
    ("a processor's config", "image_processor_type feature_extractor_type processor_class", ""),
    ("an index of a model's weights", "weight_map", ""),
    ("a model's generation_config.json", "_from_model_config", "transformers_version eos_token_id"),
    ("a checkpoint's trainer_state.json", "log_history", ""),
    ("accelerate's own config", "compute_environment distributed_type", ""),
    ("a package.json", "devDependencies", "name version"),
    ("a recipe of effilaunch", "", "model data"),
    ("LLaMA-Factory's arguments", "model_name_or_path finetuning_type", ""),
)
"""Kind of file; keys of which one is enough; common keys that count all together, if no top-level key is
DeepSpeed's."""


def another_kind(document: Document) -> LintFinding | None:
    """Return the single finding of a file that is not a DeepSpeed config, else None."""
    root = document.root
    if root is None or not root.members:
        return None
    keys = {member.key: member.node for member in root.members}
    if keys.keys() & OWN:
        return None
    inside = [key for key, node in keys.items() if OWN & {member.key for member in node.members or ()}]
    if inside:
        what = f"contains a DeepSpeed config under `{inside[0]}`"
        hint = f"move the object under `{inside[0]}` into its own file"
    elif name := _named(keys) or _nothing_known(keys):
        what = f"is {name}"
        hint = "pass the file that is set as `deepspeed` in TrainingArguments or as `--deepspeed_config`"
    else:
        return None
    return document.report("", "ds-not-a-config", f"not a DeepSpeed config: it {what}", hint)


def _named(keys: Mapping[str, Node]) -> str | None:
    known = spellings(known_keys()).keys() | RENAMED.keys() | vocabulary()["removed"].keys()
    for name, any_of, all_of in KINDS:
        together = all_of and keys.keys() >= set(all_of.split()) and not keys.keys() & known
        if keys.keys() & set(any_of.split()) or together:
            return name
    return None


def _nothing_known(keys: Mapping[str, Node]) -> str | None:
    """Describe a file without any key that DeepSpeed knows or a misspelling of one."""
    known = spellings(known_keys())
    removed = vocabulary()["removed"]
    if len(keys.keys() & trainer_fields().keys() - known.keys()) >= _FEWEST_FIELDS:
        return "TrainingArguments as JSON"
    if len(keys) < _FEWEST:
        return None
    for key in keys:
        misplaced = "_" in key and sections_with(key)  # other files have `type` and `name`, too
        if key in known or key in RENAMED or key in removed or misplaced or close_key(key, known):
            return None
    return f"another kind of file: DeepSpeed knows none of its {len(keys)} keys"


LARGEST = 100_000
"""Bytes; real configs are below a tenth of it."""
MOST = 500
"""Findings per rule that are reported."""
Rule = Callable[[Document], Iterator[LintFinding]]
RULES: tuple[Rule, ...] = (
    check_keys,
    check_types,
    check_autos,
    check_blocks,
    check_conflicts,
    check_effects,
)


def lint_text(text: str, file: str, *more: Rule) -> list[LintFinding]:
    """Findings of a ds_config's text; `more` are rules besides RULES."""
    document = read_json(text, file, in_part=True)
    found = list(document.findings)
    root = document.root
    if root is None:
        return found
    if root.members is None and document.is_broken:
        return found
    if root.members is None:
        what = "a list" if root.kind == "list" else "a single value"
        message = f"{what}; a DeepSpeed config is a JSON object"
        return [*found, document.found(root.start, "", "ds-not-an-object", message, 'write {"…": …}')]
    other = another_kind(document)
    if other is not None:
        return found if document.is_broken else [other]
    # What a text that ends too early does not have may stand in the rest.
    for rule in (check_keys, check_types) if document.is_cut else (*RULES, *more):
        found += islice(rule(document), MOST)
    if document.is_broken:  # what an edit does to a text that cannot be read is not known
        found = [replace(finding, edits=()) for finding in found]
    return sorted(found, key=lambda finding: (finding.line, finding.column, finding.code))


def decoded(raw: bytes, file: str) -> tuple[str | None, LintFinding | None]:
    """Return the text of a file, or the finding that explains why it is unreadable."""
    if len(raw) > LARGEST:
        return None, _of_file(file, f"larger than {LARGEST} bytes, which no DeepSpeed config is")
    if b"\0" in raw:
        return None, _of_file(file, "binary or UTF-16 content; a DeepSpeed config is JSON in UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"byte {raw[error.start]:#04x} is not valid UTF-8"
        return None, LintFinding(file, line, column, "", "ds-json-syntax", message, "save the file as UTF-8")
    if file.endswith((".yaml", ".yml")) and not text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        hint = "convert it to JSON; to check a recipe, use `effilaunch validate`"
        return None, _of_file(file, "this is YAML; DeepSpeed and the Trainer read only JSON", hint)
    return text, None


def _of_file(file: str, message: str, hint: str | None = None) -> LintFinding:
    return LintFinding(file, 1, 1, "", "ds-json-syntax", message, hint)


def lint_bytes(raw: bytes, file: str, *more: Rule) -> list[LintFinding]:
    """`lint_text` of a file's content."""
    text, finding = decoded(raw, file)
    return [finding] if finding is not None else lint_text(text or "", file, *more)


# A recipe's plan decides these, so a base profile may leave them open.
PLAN_DECIDES = frozenset({"ds-auto-unresolved", "ds-no-batch-size", "ds-no-zero-block", "ds-not-enabled"})


def read_profile(raw: bytes, file: str) -> tuple[dict[str, Any] | None, list[LintFinding]]:
    """Return a recipe's base profile, or the findings that make it unusable."""
    wrong = [f for f in lint_bytes(raw, file) if f.severity == "error" and f.code not in PLAN_DECIDES]
    if wrong:
        return None, wrong
    root = read_json(raw.decode("utf-8"), file).root
    profile: dict[str, Any] | None = None if root is None else root.plain()
    return profile, []


ROUNDS = 20
"""A fixed key may reveal the next mistake; each round applies all edits that do not overlap."""


def apply_fixes(text: str, file: str, *more: Rule) -> tuple[str, list[LintFinding]]:
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


def applied(text: str, groups: Sequence[Sequence[TextEdit]]) -> str:
    """The text after all edits of each group that touches none of the groups before it."""
    taken: list[TextEdit] = []  # by their place; no two touch
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


def _touches(edit: TextEdit, taken: Sequence[TextEdit]) -> bool:
    """Whether one of the edits, sorted by their place, overlaps this one or ends where it starts."""
    after = bisect_left(taken, edit.start, key=_start)
    before = after > 0 and taken[after - 1].end >= edit.start
    return before or (after < len(taken) and taken[after].start <= edit.end)
