"""All findings of one text, sorted by place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from launcher.lint.blocks import check_blocks
from launcher.lint.combinations import check_combinations
from launcher.lint.conflicts import check_conflicts
from launcher.lint.finding import Finding
from launcher.lint.other_files import another_kind
from launcher.lint.positions import Document, read_json
from launcher.lint.types import check_autos, check_types
from launcher.lint.unknown import check_keys
from launcher.lint.without_effect import check_effects

LARGEST = 100_000
"""Bytes; the largest ds_config that anybody has is a tenth of it."""
MOST = 500
"""Findings that one rule may have; nobody reads more."""
Rule = Callable[[Document], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    check_keys,
    check_types,
    check_autos,
    check_blocks,
    check_conflicts,
    check_effects,
    check_combinations,
)


def lint_text(text: str, file: str, *more: Rule) -> list[Finding]:
    """Findings of a ds_config's text; `more` are rules besides RULES."""
    document = read_json(text, file)
    found = list(document.findings)
    root = document.root
    if root is None:
        return found
    if root.members is None:
        message = f"holds {'a list' if root.items is not None else 'one value'}; a ds_config is an object"
        return [*found, document.found(root.start, "", "ds-not-an-object", message, 'write {"…": …}')]
    other = another_kind(document)
    if other is not None:
        return [other]
    for rule in (*RULES, *more):
        found += islice(rule(document), MOST)
    return sorted(found, key=lambda finding: (finding.line, finding.column, finding.code))


def decoded(raw: bytes, file: str) -> tuple[str | None, Finding | None]:
    """The text of a file, or the one finding that says why there is none."""
    if len(raw) > LARGEST:
        return None, _whole(file, f"more than {LARGEST} bytes are no ds_config")
    if b"\0" in raw:
        return None, _whole(file, "a binary file (or UTF-16), not JSON in UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"byte {raw[error.start]:#04x} is no UTF-8"
        return None, Finding(file, line, column, "", "ds-json-syntax", message, "save the file as UTF-8")
    if file.endswith((".yaml", ".yml")) and not text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        hint = "write the same as JSON; a recipe is checked by `effilaunch validate`"
        return None, _whole(file, "YAML: DeepSpeed and the Trainer read a ds_config as JSON alone", hint)
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
    """A recipe's base profile, or what forbids it as one."""
    wrong = [f for f in lint_bytes(raw, file) if f.severity == "error" and f.code not in PLAN_DECIDES]
    if wrong:
        return None, wrong
    root = read_json(raw.decode("utf-8"), file).root
    profile: dict[str, Any] | None = None if root is None else root.plain()
    return profile, []
