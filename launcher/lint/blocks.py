"""The optimizer and scheduler blocks: their types, and parameters that their classes do not take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from launcher.lint import vocabulary
from launcher.lint.finding import Edit, Finding
from launcher.lint.positions import Document, Member
from launcher.recipe.suggestions import close_key

_GONE = ("onebitadam", "zerooneadam", "onebitlamb", "deepspeed_adam", "cpuadam", "fusedadam")


def check_blocks(document: Document) -> Iterator[Finding]:
    """Findings of `optimizer` and of `scheduler`."""
    yield from _optimizer(document)
    yield from _scheduler(document)


def offloads(document: Document) -> bool:
    """Whether the optimizer is on the CPU."""
    device = document.member("zero_optimization.offload_optimizer.device")
    old = document.member("zero_optimization.cpu_offload")
    return (device is not None and device.node.value in ("cpu", "nvme")) or (
        old is not None and old.node.value is True
    )


def _named(document: Document, block: str) -> tuple[Member, str] | None:
    member = document.member(f"{block}.type")
    if member is None or not isinstance(member.node.value, str) or member.node.value == "auto":
        return None
    return member, member.node.value


def _unknown_type(document: Document, block: str, member: Member, names: Sequence[str], what: str) -> Finding:
    name = member.node.value
    near = close_key(name, names)
    edits = (Edit(member.node.start, member.node.end, f'"{near}"'),) if near else ()
    hint = f"did you mean {near}?" if near else f"one of {', '.join(names)}"
    where = f"{block}.type"
    return document.found(member.node.start, where, f"ds-{block}-type", what, hint, edits=edits)


def _optimizer(document: Document) -> Iterator[Finding]:
    table: dict[str, Any] = vocabulary.table()["optimizers"]
    named = _named(document, "optimizer")
    if named is None:
        return
    member, name = named
    row = table.get(name.lower()) if table.get(name.lower(), {}).get("any_case") else table.get(name)
    if row is None and name.lower() in _GONE:
        yield document.found(
            member.node.start,
            "optimizer.type",
            "ds-optimizer-type",
            f"DeepSpeed {vocabulary.version()} has no {name}; building the engine fails",
            "write Adam or AdamW: offload chooses the one for the CPU",
        )
    elif row is None:
        said = f"neither DeepSpeed {vocabulary.version()} nor torch has an optimizer {name}"
        yield _unknown_type(document, "optimizer", member, ["AdamW", "Adam", "Lamb", "Lion", *table], said)
    elif row.get("device"):
        yield from _params(document, name, _taken(document, row), name.lower() == "muon")


def _taken(document: Document, row: dict[str, Any]) -> list[str]:
    """The parameters that the class takes which this file would get."""
    own = document.member("optimizer.params.torch_adam")
    if own is not None and own.node.value is True and "torch" in row:
        return list(row["torch"])
    return list(row["offload"] if offloads(document) and "offload" in row else row["device"])


def _params(document: Document, name: str, taken: Sequence[str], silent: bool) -> Iterator[Finding]:
    params = document.member("optimizer.params")
    for member in (params.node.members or ()) if params is not None else ():
        where = f"optimizer.params.{member.key}"
        if member.key == "max_grad_norm":
            clipped = document.member("gradient_clipping") is not None
            yield document.found(
                member.start,
                where,
                "ds-max-grad-norm-param",
                "`max_grad_norm` is no parameter of an optimizer; building the engine fails",
                "remove it: `gradient_clipping` is here"
                if clipped
                else "write `gradient_clipping` at the top",
                edits=document.removal(where) if clipped else (),
            )
        elif member.key not in taken:
            near = close_key(member.key, taken) or {"learning_rate": "lr"}.get(member.key)
            effect = "it is dropped without a word" if silent else "building the engine fails"
            hint = f"did you mean `{near}`?" if near else f"known here: {', '.join(taken)}"
            free = near is not None and params is not None and params.node.get(near) is None
            edits = (Edit(member.start, member.end, f'"{near}"'),) if free else ()
            message = f"`{member.key}` is no parameter of {name} here; {effect}"
            yield document.found(member.start, where, "ds-typo-nested", message, hint, edits=edits)


def _scheduler(document: Document) -> Iterator[Finding]:
    table: dict[str, dict[str, bool]] = vocabulary.table()["schedulers"]
    named = _named(document, "scheduler")
    if named is None:
        return
    member, name = named
    row = table.get(name)
    if row is None:
        said = f"neither DeepSpeed {vocabulary.version()} nor torch has a scheduler {name}"
        yield _unknown_type(document, "scheduler", member, list(table), said)
        return
    params = document.member("scheduler.params")
    given = {} if params is None else {m.key: m for m in params.node.members or ()}
    for key, inner in given.items():
        if key not in row:
            near = close_key(key, row)
            edits = (Edit(inner.start, inner.end, f'"{near}"'),) if near and near not in given else ()
            message = f"`{key}` is no parameter of {name}; building the engine fails"
            hint = f"did you mean `{near}`?" if near else f"known here: {', '.join(row)}"
            where = f"scheduler.params.{key}"
            yield document.found(inner.start, where, "ds-typo-nested", message, hint, edits=edits)
    for key, needed in row.items():
        if needed and key not in given:
            code = "ds-total-steps" if key == "total_num_steps" else "ds-scheduler-params"
            message = f"{name} needs `{key}`; building the engine fails without it"
            yield document.found(member.node.start, "scheduler.params", code, message, f"write `{key}`")
    warmup = given.get("warmup_num_steps")
    steps = None if warmup is None else warmup.node.value
    if warmup is not None and isinstance(steps, int) and not isinstance(steps, bool) and steps <= 0:
        message = f"DeepSpeed {vocabulary.version()} refuses {steps} warm-up steps"
        where = "scheduler.params.warmup_num_steps"
        yield document.found(warmup.node.start, where, "ds-warmup-zero", message, "write 1 or more")
