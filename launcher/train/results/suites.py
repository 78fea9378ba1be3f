"""Scores of public benchmarks, by lm-eval: `python -m launcher.train.results.suites`.

The trained model and the one that it began with answer the same prompts, one after the other.
"""

from __future__ import annotations

import difflib
import gc
import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import EffilaunchError, MachineError, Problem, RecipeError, RunFailed
from launcher.machine.child import answer
from launcher.train.job import Job, read_job
from launcher.train.model.processing import first_line
from launcher.train.results.generate import Trained, load_trained
from launcher.train.results.trained import place_of, portable, prepared_record, replaced, settle

_FILES = (".yaml", ".yml")
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
_SHOWN = 4000
"""Characters of a prompt that the result has."""
BASE, TRAINED = "base", "trained"


@dataclass(frozen=True, slots=True)
class SuiteRequest:
    """The request."""

    run_dir: Path
    checkpoint: str | None
    suites: Sequence[str]
    """Names of lm-eval, or paths of YAML files or of folders with them."""
    limit: float | None
    batch_size: int
    fewshot: int | None
    seed: int | None
    with_base: bool
    allow_code: bool

    @property
    def seeds(self) -> dict[str, int]:
        """Arguments of lm-eval; without a seed its own, with which published scores were made."""
        return {} if self.seed is None else dict.fromkeys(_SEEDS, self.seed)


def scores(request: Mapping[str, Any]) -> dict[str, Any]:
    """Scores by task. RecipeError for an unknown task, and for a model that does not write text."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    asked = SuiteRequest(**{**request, "run_dir": Path(request["run_dir"])})
    job = read_job(asked.run_dir)
    check_writes(job)
    names, manager = _tasks(asked.suites)
    try:
        manager.load(names)  # with their data, before a model is loaded
    except Exception as error:  # tasks have code of their own
        raise _failed(error) from error
    found = {TRAINED: _of_trained(asked, names, manager)}
    gc.collect()
    if asked.with_base:
        found[BASE] = _of_base(asked, job, names, manager, found[TRAINED]["chats"])
    return {"suites": _side_by_side(asked, found), "weights": found[TRAINED]["weights"]}


def check_writes(job: Job) -> None:
    """RecipeError for a model that does not answer texts with texts."""
    if job.task.writes and job.task.reads_tokens and not job.task.sees_images:
        return
    message = f"lm-eval asks models for text, and the run's task is {job.task.name}"
    hint = "`effilaunch eval RUN_DIR` without --suite measures it on its held-out rows"
    raise RecipeError(Problem("suite-unsupported", message, path="task", hint=hint))


def _tasks(suites: Sequence[str]) -> tuple[list[str], Any]:
    """Names of tasks for lm-eval, and its manager that knows them."""
    import lm_eval.tasks

    paths = [Path(suite) for suite in suites if _is_path(suite)]
    for path in paths:
        if not path.exists():
            message = "no such file or folder of lm-eval tasks"
            raise RecipeError(Problem("file-missing", message, str(path), hint="name a task, or a YAML file"))
    folders = [str(path if path.is_dir() else path.parent) for path in paths]
    manager = lm_eval.tasks.TaskManager(include_path=folders or None)
    names: list[str] = []
    for suite in suites:
        names += _in_files(Path(suite), manager) if _is_path(suite) else _known(suite, manager)
    return list(dict.fromkeys(names)), manager


def _is_path(suite: str) -> bool:
    return suite.endswith(_FILES) or "/" in suite or suite in (".", "..")


def _in_files(path: Path, manager: Any) -> list[str]:
    """The tasks that a file, or the files in a folder, define."""
    inside = path.resolve()
    found = [
        name for name, entry in manager.task_index.items()
        if entry.yaml_path is not None and entry.kind.name != "TAG"
        and (Path(entry.yaml_path).resolve() == inside or inside in Path(entry.yaml_path).resolve().parents)
    ]  # fmt: skip
    if not found:
        _check_syntax(path)
        message = "defines no task of lm-eval: a YAML file with `task:` was expected"
        raise RecipeError(Problem("unknown-suite", message, str(path)))
    return sorted(found)


def _check_syntax(path: Path) -> None:
    """RecipeError with the line of a YAML file that cannot be read, which lm-eval passes over."""
    try:
        if path.is_file():
            for _ in yaml.parse(path.read_text(encoding="utf-8")):
                pass
    except (yaml.MarkedYAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        message = f"is not YAML: {getattr(error, 'problem', None) or 'it is not UTF-8 text'}"
        raise RecipeError(
            Problem("yaml-syntax", message, str(path), None if mark is None else mark.line + 1)
        ) from None


def _known(suite: str, manager: Any) -> list[str]:
    found: list[str] = manager.match_tasks([suite])
    if found:
        return found
    near = difflib.get_close_matches(suite, manager.all_tasks, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists the names"
    raise RecipeError(Problem("unknown-suite", f"lm-eval has no task {suite!r}", hint=hint))


def _of_trained(asked: SuiteRequest, names: Sequence[str], manager: Any) -> dict[str, Any]:
    trained = load_trained(asked.run_dir, _note, asked.checkpoint)
    found = _asked_of(asked, trained, names, manager, trained.chats)
    return {**found, "weights": str(trained.folder)}


def _of_base(
    asked: SuiteRequest, job: Job, names: Sequence[str], manager: Any, chats: bool
) -> dict[str, Any]:
    """The model as the run began with it, with the trained one's tokenizer: so the prompts are equal."""
    from launcher.train.model.models import load_model
    from launcher.train.results.trained import trained_folder, trained_processing

    folder = trained_folder(job, asked.checkpoint)
    processing, place = trained_processing(job, folder), place_of(job, folder)
    job = portable(job)
    if place == "auto":
        job = replaced(job, {"model.device_map": "auto"})
    model = load_model(job, processing, prepared_record(job).get("labels"), distributed=False)
    base = Trained(job, processing, model, settle(model, place), folder)
    return _asked_of(asked, base, names, manager, chats)


def _asked_of(
    asked: SuiteRequest, model: Trained, names: Sequence[str], manager: Any, chats: bool
) -> dict[str, Any]:
    """lm-eval's results for one model."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    kind = "seq2seq" if model.job.task.is_encoder_decoder else "causal"
    wrapped = HFLM(
        pretrained=model.model, tokenizer=model.processing, backend=kind, batch_size=asked.batch_size
    )
    wrapped._device = model.device  # of a model that is spread, that of its inputs
    try:
        found = lm_eval.simple_evaluate(
            wrapped, tasks=[*names], task_manager=manager, limit=asked.limit, num_fewshot=asked.fewshot,
            batch_size=asked.batch_size, apply_chat_template=chats, fewshot_as_multiturn=chats,
            confirm_run_unsafe_code=asked.allow_code, **asked.seeds,
        )  # fmt: skip
    except (EffilaunchError, MemoryError):
        raise
    except Exception as error:  # tasks download data and run code of their own
        raise _failed(error) from error
    assert found is not None, "lm-eval returns None in processes other than the first"
    dtype = str(next(model.model.parameters()).dtype).removeprefix("torch.")
    return {"found": found, "chats": chats, "dtype": dtype, "device": str(model.device)}


def _failed(error: Exception) -> EffilaunchError:
    """A download that fails is the machine's, anything else that of the task."""
    import torch

    said = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        hint = "use a smaller --batch-size, or a device that no other program uses"
        return RunFailed(Problem("suite-memory", f"the device has too little memory: {said}", hint=hint))
    if isinstance(error, ImportError):
        hint = "install it; lm-eval's extras have what tasks need: pip install 'lm-eval[ifeval,math]'"
        return MachineError(Problem("package-missing", f"a task needs another package: {said}", hint=hint))
    if "confirm_run_unsafe_code" in str(error):
        hint = "read the task, then add --allow-code"
        return RecipeError(Problem("foreign-code", "a task runs code that the model writes", hint=hint))
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        hint = "check the network, or download the data beforehand and use HF_HOME of that machine"
        return MachineError(Problem("suite-data", f"the data of a task cannot be read: {said}", hint=hint))
    hint = "for local tasks, check the YAML file and its data; see lm-eval's docs/new_task_guide.md"
    return RunFailed(Problem("suite-failed", f"lm-eval failed: {said}", hint=hint))


def _side_by_side(asked: SuiteRequest, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Task -> settings and scores of both models. RunFailed if they were asked different things."""
    import lm_eval

    own = found[TRAINED]["found"]
    prompts = _prompts(own)
    if BASE in found and _prompts(found[BASE]["found"]) != prompts:
        message = "the base model was asked other prompts than the trained one, so nothing was written"
        raise RunFailed(Problem("suite-differs", message, hint="please report this"))
    suites = {}
    for name, values in own["results"].items():
        suites[name] = {
            "lm_eval": lm_eval.__version__,
            "version": own["versions"].get(name),
            "samples": own["n-samples"].get(name, {}).get("effective"),
            "fewshot": own["n-shot"].get(name),
            "limit": asked.limit,
            "seed": asked.seed,
            "batch_size": asked.batch_size,
            "chat_template": found[TRAINED]["chats"],
            "dtype": found[TRAINED]["dtype"],
            "prompts": prompts.get(name),
            "example": _example(own["samples"].get(name)),
            "metrics": [*_metrics(name, values, own, found.get(BASE))],
        }
    return suites


def _metrics(
    name: str, values: Mapping[str, Any], own: Mapping[str, Any], base: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """Each score with its standard error, None where lm-eval has none."""
    other = {} if base is None else base["found"]["results"][name]
    better = own.get("higher_is_better", {}).get(name, {})
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = f"{metric}_stderr,{filtered}"
        yield {
            "metric": metric,
            "filter": None if filtered == "none" else filtered,
            "higher_is_better": better.get(metric),
            TRAINED: _number(value),
            f"{TRAINED}_stderr": _number(values.get(error)),
            BASE: _number(other.get(key)),
            f"{BASE}_stderr": _number(other.get(error)),
        }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None


def _prompts(found: Mapping[str, Any]) -> dict[str, str]:
    """Task -> a digest of its prompts."""
    return {
        name: hashlib.sha256("".join(sorted(one["prompt_hash"] for one in rows)).encode()).hexdigest()[:16]
        for name, rows in found["samples"].items()
    }


def _example(rows: Any) -> str | None:
    """The first prompt as the model saw it; None for a group, whose tasks have their own."""
    return str(rows[0]["arguments"][0][0])[:_SHOWN] if rows else None


def _note(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(answer(scores))
