"""The metrics of `data.metrics` and the user's own.

Except perplexity, which follows from the evaluation loss (see trainers.py) and needs no predictions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.errors import MachineError, Problem, RecipeError
from launcher.recipe.field_tables import METRICS
from launcher.tasks.task import Task
from launcher.train.job import Job

Scores = dict[str, float]

# The Trainer adds these itself, under `eval_`.
_TAKEN = ("loss", "perplexity", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def asked_metrics(job: Job) -> list[str]:
    """Names in `data.metrics`. RecipeError for one that the task does not have."""
    task = job.task.name
    names = list(job.data.metrics)
    for name in names:
        if name not in METRICS[task]:
            known = ", ".join(METRICS[task]) or "none"
            raise RecipeError(
                Problem(
                    "unknown-metric", f"{task} has no metric {name!r}; it has {known}", path="data.metrics"
                )
            )
    return names


def check_metrics(job: Job) -> None:
    """Import the packages of the metrics. MachineError with what to install, before anything is loaded."""
    missing: dict[str, tuple[str, ImportError]] = {}
    for name in asked_metrics(job):
        if name not in job.task.metric_packages:
            continue
        module, package = job.task.metric_packages[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing.setdefault(package, (name, error))
    problems = [
        Problem(
            "metric-package-missing",
            f"the metric {name} needs {package}, which cannot be imported: {error}",
            path="data.metrics",
            hint="pip install 'effilaunch[metrics]'",
        )
        for package, (name, error) in missing.items()
    ]
    if problems:
        raise MachineError(problems)


def make_scores(
    job: Job, named: Callable[[Sequence[str], Any, Any], Scores], own: Callable[[Any], Any] | None
) -> Callable[[Any], Scores] | None:
    """compute_metrics for the Trainer: the recipe's metrics and the user's `own`; None without any.

    named: the task's scores of (names, predictions, targets). The returned function takes an EvalPrediction.
    RecipeError if `own` returns a reserved name.
    """
    names = [name for name in asked_metrics(job) if name != "perplexity"]
    if not names and own is None:
        return None

    def scores(prediction: Any) -> Scores:
        found: Scores = {}
        if names:
            predictions = prediction.predictions
            predictions = predictions[0] if isinstance(predictions, tuple) else predictions
            found = named(names, predictions, prediction.label_ids)
        if own is not None:
            found |= _own_scores(own(prediction), {*found, *_TAKEN})
        return found

    return scores


def keep_predictions(task: Task, *, generates: bool) -> Callable[[Any, Any], Any] | None:
    """What the Trainer keeps of the logits in an evaluation (preprocess_logits_for_metrics).

    Language models: token ids [batch, length], unshifted, as logits of all steps would fill the memory.
    None if predictions are small: classes, and generated text.
    """
    return argmax_tokens if task.keeps_token_predictions and not generates else None


def argmax_tokens(logits: Any, labels: Any) -> Any:
    """argmax over the vocabulary; outputs may be more than the logits [batch, length, vocab]."""
    if isinstance(logits, (tuple, list)):
        # A loss of experts has no dimensions, hidden states of an encoder come after the logits.
        logits = next(part for part in logits if hasattr(part, "ndim") and part.ndim == 3)
    return logits.argmax(dim=-1)


def token_accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of target tokens that are the argmax. Both [rows, length], unshifted; -100 is no target."""
    guesses, targets = predictions[:, :-1], labels[:, 1:]
    counted = targets != -100
    count = int(counted.sum())
    return float(((guesses == targets) & counted).sum() / count) if count else 0.0


def class_scores(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> Scores:
    """Scores of predicted classes. `predictions`: logits [rows, classes]; `labels`: [rows].

    f1, precision and recall are macro averages, in which a class that was never predicted counts 0.
    """
    classes = predictions.argmax(axis=-1)
    found: Scores = {}
    for name in names:
        if name == "accuracy":
            found[name] = float((classes == labels).mean())
            continue
        from sklearn import metrics

        if name == "matthews_correlation":
            found[name] = float(metrics.matthews_corrcoef(labels, classes))
        else:
            score = getattr(metrics, f"{name}_score")
            found[name] = float(score(labels, classes, average="macro", zero_division=0))
    return found


def regression_scores(names: Sequence[str], predictions: np.ndarray, targets: np.ndarray) -> Scores:
    """Errors and correlations; of several scores a row, their mean. Both [rows] or [rows, scores].

    NaN for a correlation with a constant, and for r2 of constant targets.
    """
    guesses, wanted = (
        np.asarray(values, dtype=np.float64).reshape(len(targets), -1) for values in (predictions, targets)
    )
    error = guesses - wanted
    found: Scores = {}
    for name in names:
        if name == "rmse":
            found[name] = float(np.sqrt(np.mean(error**2, axis=0)).mean())
        elif name in ("mse", "mae"):
            found[name] = float(np.mean(error**2 if name == "mse" else np.abs(error)))
        elif name == "r2":
            spread = np.sum((wanted - wanted.mean(axis=0)) ** 2, axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                explained = 1 - np.sum(error**2, axis=0) / spread
            found[name] = float(np.where(spread > 0, explained, np.nan).mean())
        else:
            pairs = zip(guesses.T, wanted.T, strict=True)
            found[name] = float(np.mean([_correlation(name, *pair) for pair in pairs]))
    return found


def _correlation(name: str, guesses: np.ndarray, targets: np.ndarray) -> float:
    """Pearson's correlation, of ranks for `spearman`."""
    if name == "spearman":
        from scipy.stats import rankdata

        guesses, targets = rankdata(guesses), rankdata(targets)
    spreads = [values - values.mean() for values in (guesses, targets)]
    size = float(np.sqrt(np.sum(spreads[0] ** 2) * np.sum(spreads[1] ** 2)))
    return float(np.sum(spreads[0] * spreads[1])) / size if size > 0 else float("nan")


def label_scores(names: Sequence[str], predictions: np.ndarray, targets: np.ndarray) -> Scores:
    """Scores of rows with several labels: logits and 0 or 1, both [rows, labels]. A logit of 0 or more, a
    probability of at least one half, applies.

    accuracy: the share of rows of which every label is right. f1, precision and recall are macro averages,
    f1_micro counts all labels together; a label that neither applies nor is predicted counts 0.
    """
    guesses, wanted = predictions >= 0, targets > 0.5
    found: Scores = {}
    for name in names:
        if name == "accuracy":
            found[name] = float((guesses == wanted).all(axis=-1).mean())
            continue
        from sklearn import metrics

        kind, _, average = name.partition("_")
        score = getattr(metrics, f"{kind}_score")
        found[name] = float(score(wanted, guesses, average=average or "macro", zero_division=0))
    return found


def text_scores(names: Sequence[str], written: Sequence[str], wanted: Sequence[str]) -> Scores:
    """Scores of texts: exact_match and rouge in 0..1, bleu and chrf in 0..100, as usually reported.

    Space around a text does not count for exact_match; rouge is the mean F-measure without stemming.
    """
    found: Scores = {}
    rouge = [name for name in names if name.startswith("rouge")]
    for name in names:
        if name == "exact_match":
            same = [one.strip() == other.strip() for one, other in zip(written, wanted, strict=True)]
            found[name] = float(np.mean(same))
        elif name in ("bleu", "chrf"):
            import sacrebleu

            score = getattr(sacrebleu, f"corpus_{name}")(list(written), [list(wanted)])
            found[name] = float(score.score)
    if rouge:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(rouge, use_stemmer=False)
        rows = [scorer.score(target, text) for target, text in zip(wanted, written, strict=True)]
        found |= {name: float(np.mean([row[name].fmeasure for row in rows])) for name in rouge}
    return found


def decoded(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """Texts without special tokens; -100 is padding."""
    filled = np.where(ids == -100, tokenizer.pad_token_id, ids)
    texts: list[str] = tokenizer.batch_decode(filled, skip_special_tokens=True)
    return texts


def _own_scores(returned: Any, taken: set[str]) -> Scores:
    """The user's metrics, checked. RecipeError for another type or a reserved name."""
    if not isinstance(returned, Mapping):
        raise _bad_scores(f"compute_metrics returned {type(returned).__name__}, expected a dict of numbers")
    found: Scores = {}
    for name, value in returned.items():
        short = str(name).removeprefix("eval_")
        if short in taken:
            raise _bad_scores(f"compute_metrics returned {name!r}, which is measured already")
        try:
            found[short] = float(value)
        except (TypeError, ValueError):
            raise _bad_scores(
                f"compute_metrics returned {type(value).__name__} for {name!r}, expected a number"
            ) from None
    return found


def _bad_scores(message: str) -> RecipeError:
    return RecipeError(Problem("hook-result", message, path="python"))
