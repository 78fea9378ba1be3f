"""How the layers of a decoder repeat: which of them stand for the others in a model of few layers.

Layers may be of several kinds (attention and state space, with and without experts). A shallow model then has
the first layers up to where each kind was there once, the last ones likewise, and whole periods between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_Facts = dict[tuple[str, str], Any]


@dataclass(frozen=True, slots=True)
class Repeats:
    """A stack of layers as `before` single ones, periods of `period` layers, and `after` single ones.

    Its depth counts periods, and two for what is before and after them: of alike layers, the layers.
    """

    before: int = 1
    period: int = 1
    after: int = 1

    def depth(self, layers: int) -> int:
        return (layers - self.before - self.after) // self.period + 2

    def chosen(self, layers: int, depth: int) -> list[int]:
        """Indices of the layers that a model of this depth has."""
        middle = self.before + (depth - 2) * self.period
        return [*range(middle), *range(layers - self.after, layers)]

    def place(self, index: int, layers: int) -> tuple[str, bool, bool]:
        """The name of a layer's place, and whether it is the first and the last layer there."""
        if index < self.before:
            return f"first{index}", True, True
        if index >= layers - self.after:
            return f"last{layers - 1 - index}", True, True
        turn = (index - self.before) % self.period
        return "middle", turn == 0, turn == self.period - 1


ALIKE = Repeats()


def find_repeats(kinds: Sequence[int]) -> Repeats:
    """The shortest way to tell a sequence of kinds; without periods all layers are `before`."""
    count = len(kinds)
    first = {kind: kinds.index(kind) for kind in kinds}
    before = max(first.values()) + 1
    last = {kind: index for index, kind in enumerate(kinds) if index >= before}
    if len(first) == 1 or not last:
        return ALIKE if len(first) == 1 else Repeats(count, 1, 0)
    after = count - min(last.values())
    middle = kinds[before : count - after]
    period = next((p for p in range(1, len(middle)) if middle[p:] == middle[:-p]), len(middle))
    if period in (0, len(middle)):
        return Repeats(count, 1, 0)
    return Repeats(before + len(middle) % period, period, after)


def kinds_of(layers: Sequence[Any]) -> list[int]:
    """A number for each layer; layers of equal modules, sizes and switches have the same."""
    facts = [_facts(layer) for layer in layers]
    values: dict[tuple[str, str], list[Any]] = {}
    for one in facts:
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    # A layer's own number is no difference.
    numbers = {
        key
        for key, given in values.items()
        if len(given) > 1 and all(type(v) is int for v in given) and len(set(given)) == len(given)
    }
    kinds: dict[frozenset[Any], int] = {}
    return [
        kinds.setdefault(frozenset((k, v) for k, v in one.items() if k not in numbers), len(kinds))
        for one in facts
    ]


def _facts(layer: Any) -> _Facts:
    """What tells a layer from others; of fractions, whether they are there."""
    found: _Facts = {}
    for path, module in layer.named_modules():
        found[path, "class"] = type(module).__qualname__
        for name, parameter in module.named_parameters(recurse=False):
            found[path, name] = str(tuple(parameter.shape))
        for name, value in vars(module).items():
            if isinstance(value, bool | int | str) and not name.startswith("_"):
                found[path, name] = value
            elif isinstance(value, float):
                found[path, name] = bool(value)
    return found
