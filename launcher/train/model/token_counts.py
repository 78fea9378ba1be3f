"""Whether a model divides its loss by the number of targets of the whole step, as the Trainer assumes.

The Trainer hands `num_items_in_batch` to every model whose forward takes further keywords, and then divides
by neither the accumulation nor the ranks. T5, BART and the classification heads of transformers 5.23 take the
keywords and ignore the number: their loss and gradients are too large by accumulation x ranks, and an
evaluation's loss by the ranks. Clipping and Adam hide most of it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def takes_token_counts(model: Any) -> bool:
    """Whether the forward of `model` (without an adapter around it) hands its keywords to a loss.

    Read from its source: a call with `**` of something named like a loss. True where there is no source to
    read, which is what the Trainer assumes of all.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(model).forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return True
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        "loss" in ast.unparse(call.func).lower() and any(word.arg is None for word in call.keywords)
        for call in calls
    )
