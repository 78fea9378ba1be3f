from __future__ import annotations

import pytest
from counted_work import LINEAR, cpu_growth, function_calls


def nothing() -> None:
    pass


def test_calls_of_python_and_of_builtins_are_counted():
    assert function_calls(nothing) < function_calls(lambda: [nothing() for _ in range(10)]) - 9
    assert function_calls(lambda: [len("") for _ in range(10)]) >= 10


@pytest.mark.parametrize(
    ("work", "size", "is_linear"),
    [
        (lambda numbers: sum(number * number for number in numbers), 50_000, True),
        (lambda numbers: sum(number in numbers for number in numbers), 300, False),
    ],
    ids=["linear", "quadratic"],
)
def test_growth_tells_linear_from_quadratic(work, size, is_linear):
    assert (cpu_growth(work, lambda size: list(range(size)), size) < LINEAR) is is_linear
