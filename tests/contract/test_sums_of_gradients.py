"""Where torch adds gradients of one value in place, and where their sum gets memory of its own.

The replay of models/layers/tape.py counts by it. On a GPU the engine and the products are the same.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

WIDTH = 32


def additions(parts: tuple[object, ...], *shape: int, autocast: bool = False) -> list[str]:
    """How the gradients of a value that all `parts` read are added."""
    x = torch.randn(*shape, WIDTH, requires_grad=True) * 2
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total = sum(part(x).float().sum() for part in parts)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        total.backward()
    whole = [*shape, WIDTH]
    return [
        event.name.removeprefix("aten::")
        for event in profiled.events()
        if event.name in ("aten::add", "aten::add_") and event.input_shapes[0] == whole
    ]


def product(rows: int = 16):
    weight = torch.randn(rows, WIDTH)
    return lambda x: torch.nn.functional.linear(x, weight)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("parts", "shape", "autocast", "how"),
    [
        ((product(), product(4)), (2, 8), False, "add"),  # the gradient of rows is a view of that of a matrix
        ((double, product()), (2, 8), False, "add"),  # the last one that read the value comes first
        ((product(), double), (2, 8), False, "add_"),
        ((double, double), (2, 8), False, "add_"),
        ((product(), product(4)), (8,), False, "add_"),  # a matrix itself
        ((product(), product(4)), (2, 8), True, "add_"),  # a copy in the dtype of the value
    ],
)  # fmt: skip
def test_a_gradient_that_is_a_view_is_not_added_to(parts, shape, autocast, how) -> None:
    assert additions(parts, *shape, autocast=autocast) == [how]


def test_three_products_are_added_apart_once() -> None:
    assert additions((product(), product(4), product(8)), 2, 8) == ["add", "add_"]
