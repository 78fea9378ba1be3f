"""Rules of `reward:` and `generation:`, and the files of reward functions, parsed without running them."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import LARGEST_TEXT, read_text
from launcher.recipe.suggestions import close_key, describe
from launcher.tasks import TASKS
from launcher.tasks.grpo import KEY, SHIPPED_REWARDS
from launcher.tasks.task import Task

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that trl gives every reward function, beside the columns of the rows."""
_LENGTH = 512
_SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
           "vllm_group_port")  # fmt: skip
_COLOCATED = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode",
              "vllm_max_model_length", "vllm_model_impl")  # fmt: skip
_GENERATE = ("cache_implementation", "use_transformers_continuous_batching",
             "transformers_continuous_batching_config")  # fmt: skip
_UNREAD: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "transformers": ("vllm_*", ("vllm_",)),
    "vllm-colocate": ("of a server", (*_SERVER, *_GENERATE)),
    "vllm-server": ("of the process itself", (*_COLOCATED, *_GENERATE)),
}
"""Backend -> fields of `trainer:`, by the start of their names, that it does not read."""


def check_rewards(
    data: Mapping[str, Any], trainer: Mapping[str, Any], task: Task, max_length: object
) -> Iterator[Problem]:
    """Problems of the two sections. max_length: `data.max_length`, where the recipe sets it."""
    entries, generation = data.get(KEY), data.get("generation")
    if not task.rolls_out:
        owners = " and ".join(other.name for other in TASKS if other.rolls_out)
        for name, value in ((KEY, entries or None), ("generation", generation)):
            if value is not None:
                yield Problem("conflict", f"is only for task {owners}", path=name, hint="remove it")
        return
    if not entries:
        hint = "e.g. reward: [{function: numeric_answer}], or {function: rewards.py:NAME}"
        message = f"task {task.name} needs functions that score completions"
        yield Problem("missing-key", message, path=KEY, hint=hint)
    seen: list[Any] = []
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, Mapping) and isinstance(entry.get("function"), str):
            yield from _check_entry(entry, f"reward[{index}]")
            call = (entry["function"], entry.get("arguments") or {})
            if call in seen:
                message = "is in the list before, with the same arguments"
                hint = "write one entry, with the sum of the weights"
                yield Problem("conflict", message, path=f"reward[{index}].function", hint=hint)
            seen.append(call)
    yield from _check_generation(generation if isinstance(generation, Mapping) else {}, trainer, max_length)


def _check_entry(entry: Mapping[str, Any], place: str) -> Iterator[Problem]:
    function, given = entry["function"], entry.get("arguments")
    given = given if isinstance(given, Mapping) else {}
    if entry.get("weight") == 0:
        hint = "remove the entry"
        yield Problem("wrong-value", "is 0: the function has no effect", path=f"{place}.weight", hint=hint)
    if ".py:" in function:
        if function.endswith(":"):
            message = f"is {describe(function)}, which names no function"
            yield Problem("wrong-value", message, path=f"{place}.function", hint="write FILE.py:NAME")
        for name in given:
            if name in GIVEN:
                message = "is what trl gives every reward function"
                yield Problem("conflict", message, path=f"{place}.arguments.{name}", hint="rename it")
        return
    known = SHIPPED_REWARDS.get(function)
    if known is None:
        near = close_key(function, SHIPPED_REWARDS)
        hint = f"did you mean {near}?" if near else "write FILE.py:NAME for a function of your own"
        message = f"is {describe(function)}, expected FILE.py:NAME or one of {', '.join(SHIPPED_REWARDS)}"
        yield Problem("wrong-choice", message, path=f"{place}.function", hint=hint)
        return
    for name, default in known.items():
        if default is None and name not in given:
            message = f"{function} needs the argument `{name}`"
            hint = f"arguments: {{{name}: ...}}"
            yield Problem("missing-key", message, path=f"{place}.arguments", hint=hint)
    for name, value in given.items():
        path = f"{place}.arguments.{name}"
        if name not in known:
            message = f"{function} has no such argument, expected {', '.join(known)}"
            yield Problem("unknown-key", message, path=path)
        elif wrong := _wrong_argument(function, name, value):
            yield Problem("wrong-value", wrong, path=path)


def _wrong_argument(function: str, name: str, value: object) -> str:
    """What is wrong with a shipped function's argument; empty where nothing is."""
    if name == "pattern":
        try:
            re.compile(value)  # type: ignore[call-overload]
        except (re.error, TypeError) as error:
            return f"is no regular expression: {error}"
        return ""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    positive = number and value >= 0  # type: ignore[operator]
    fits = {
        "column": isinstance(value, str) and bool(value),
        "ignore_case": isinstance(value, bool),
        "tolerance": positive,
        "tokens": positive and bool(value),
        "tags": isinstance(value, list)
        and bool(value)
        and all(isinstance(tag, str) and tag for tag in value),
    }[name]
    return "" if fits else f"is {describe(value)}, which {function} cannot use"


def _check_generation(
    generation: Mapping[str, Any], trainer: Mapping[str, Any], max_length: object
) -> Iterator[Problem]:
    longest, length = generation.get("max_completion_length", _LENGTH), max_length or 2048
    if isinstance(longest, int) and isinstance(length, int) and longest >= length:
        message = f"is {longest}, which leaves no token of data.max_length ({length}) to the prompt"
        path, hint = "generation.max_completion_length", f"set data.max_length above {longest}"
        yield Problem("conflict", message, path=path, hint=hint)
    backend = generation.get("backend", "transformers")
    what, starts = _UNREAD.get(str(backend), ("", ()))
    for name in trainer:
        if name.startswith(starts) if starts else False:
            message = f"has no effect: generation.backend is {backend}, which reads no settings {what}"
            yield Problem("conflict", message, path=f"trainer.{name}", hint="remove it, or set the backend")
    if backend != "transformers" and trainer.get("ds3_gather_for_generation") is False:
        message = "is false, which vLLM cannot work with"
        yield Problem("conflict", message, path="trainer.ds3_gather_for_generation", hint="remove it")


def check_reward_files(entries: Sequence[Any]) -> None:
    """RecipeError, with file and line, where a function is not in its file or cannot be called.

    entries: of the recipe, with absolute paths.
    """
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        if ".py:" in entry.function:
            problems += _check_file(entry.function, f"reward[{index}].function")
    if problems:
        raise RecipeError(problems)


def split_function(function: str) -> tuple[str, str]:
    """(file, name) of `FILE.py:NAME`."""
    file, _, name = function.rpartition(":")
    return file, name


def _check_file(function: str, path: str) -> Iterator[Problem]:
    file, name = split_function(function)

    def problem(code: str, message: str, line: int | None = None, hint: str | None = None) -> Problem:
        return Problem(code, message, file, line, path, hint)

    try:
        text = read_text(Path(file), LARGEST_TEXT)
        with warnings.catch_warnings():  # SyntaxWarning of invalid escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(text, filename=file)
    except FileNotFoundError:
        yield problem("reward-missing", "no such file", hint="the path is relative to the recipe")
        return
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        shown = getattr(error, "msg", None) or getattr(error, "strerror", None) or error
        yield problem("reward-syntax", f"is not readable Python: {shown}", getattr(error, "lineno", None))
        return
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    if name in defined:
        yield from _check_signature(defined[name], problem)
    elif any(isinstance(node, ast.AsyncFunctionDef) and node.name == name for node in ast.walk(tree)):
        yield problem("reward-signature", f"{name} is a coroutine, expected a function", hint="write `def`")
    elif not re.search(rf"\b{re.escape(name)}\b", text):  # it may be imported or assigned
        near = close_key(name, defined)
        hint = f"did you mean `{near}`?" if near else f"define `def {name}(completions, **columns):`"
        yield problem("reward-missing", f"defines no function {name}", hint=hint)


def _check_signature(node: ast.FunctionDef, problem: Any) -> Iterator[Problem]:
    """trl calls with keywords alone, and with more of them than most functions name."""
    if node.args.posonlyargs:
        message = f"{node.name} has arguments without a name; all are given by name"
        yield problem("reward-signature", message, node.lineno, "remove the `/`")
    elif node.args.kwarg is None:
        message = f"{node.name} takes no further keyword arguments, and trl gives every column of the rows"
        yield problem("reward-signature", message, node.lineno, "add `**columns` to its arguments")
