"""The modules that follow the model in a SentenceTransformer, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import parse_json, write_json
from launcher.machine.software import installed_versions
from launcher.tasks.reranker import SCORER
from launcher.train.job import Job
from launcher.train.model.models import load_config
from launcher.train.model.processing import hub_options, model_reference

IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
"""What CrossEncoder.predict puts on the score."""
_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
_POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
_KNOWN = ("Transformer", "Pooling", "Normalize")
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Key of a 1_Pooling/config.json of older sentence-transformers -> the mode that it turns on."""


@dataclass(frozen=True, slots=True)
class Modules:
    """What follows the model."""

    pooling: Mapping[str, Any]
    """Arguments of Pooling without the width."""
    normalize: bool
    prompts: Mapping[str, str]
    """Of the saved result."""
    max_length: int
    default_prompt: str | None = None
    """Name of the prompt that the saved result uses where none is asked for."""

    def make(self, width: int) -> list[Any]:
        """Pooling, and Normalize where it is asked for. width: of the hidden states."""
        from sentence_transformers.base.modules import Normalize
        from sentence_transformers.sentence_transformer.modules import Pooling

        return [Pooling(width, **self.pooling), *([Normalize()] if self.normalize else [])]

    def write(self, folder: Path, width: int) -> None:
        """Write the files that make a SentenceTransformer of a saved model."""
        rows = [("", _TRANSFORMER), ("1_Pooling", _POOLING)]
        rows += [("2_Normalize", _NORMALIZE)] if self.normalize else []
        listed = [
            {"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(rows)
        ]
        for path, _ in rows[1:]:
            (folder / path).mkdir(exist_ok=True)
        write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": width, **self.pooling})
        if self.normalize:
            write_json(folder / "2_Normalize" / "config.json", {})
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": self.max_length})
        more = {
            "prompts": dict(self.prompts),
            "default_prompt_name": self.default_prompt,
            "similarity_fn_name": "cosine",
        }
        _write_config(folder, "SentenceTransformer", more)
        (folder / "modules.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def write_scorer(job: Job, folder: Path) -> None:
    """Write the files that make a CrossEncoder of a saved model or adapter."""
    config = {**SCORER, "max_seq_length": job.data.max_length}
    write_json(folder / "sentence_bert_config.json", config)
    _write_config(folder, "CrossEncoder", {"prompts": {}, "activation_fn": activation_of(job)})
    listed = [{"idx": 0, "name": "0", "path": "", "type": _TRANSFORMER}]
    (folder / "modules.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def activation_of(job: Job) -> str:
    """What CrossEncoder.predict puts on the score that the loss has trained."""
    return IDENTITY if job.reranker.loss == "MSELoss" else SIGMOID


def _write_config(folder: Path, kind: str, more: Mapping[str, Any]) -> None:
    named = {
        "sentence-transformers": "sentence_transformers",
        "transformers": "transformers",
        "torch": "pytorch",
    }
    versions = installed_versions()
    config = {
        "model_type": kind,
        "__version__": {name: versions[package] for package, name in named.items() if package in versions},
        "default_prompt_name": None,
        **more,
    }
    write_json(folder / "config_sentence_transformers.json", config)


def modules_of(job: Job) -> Modules:
    """The modules of a plan: those of the checkpoint, else those of the recipe, else the usual ones.

    RecipeError for a checkpoint with modules that are not trained here, or other ones than the recipe's.
    """
    asked = job.embedding
    listed = _published(job, "modules.json")
    pooling: dict[str, Any] = {}
    normalize = True
    if listed:
        kinds = [str(one.get("type", "")).rpartition(".")[2] for one in listed]
        _refuse_others(kinds)
        normalize = "Normalize" in kinds
        if "Pooling" in kinds:
            pooling = _pooling_of(
                _published(job, f"{listed[kinds.index('Pooling')]['path']}/config.json") or {}
            )
        _refuse_other("pooling", asked.pooling, pooling.get("pooling_mode"))
        _refuse_other("normalize", asked.normalize, normalize)
    if not pooling:
        pooling = {"pooling_mode": asked.pooling or _usual(job), "include_prompt": True}
    saved = _published(job, "config_sentence_transformers.json") or {}
    given = saved.get("prompts")
    prompts: dict[str, str] = given if isinstance(given, dict) else {}
    if asked.prompts:
        prompts = {name: text for name, text in asked.prompts.items() if text}
        if prompts and not pooling["include_prompt"]:
            message = "the checkpoint pools without its prompts, which is not supported here"
            hint = "remove embedding.prompts"
            raise RecipeError(Problem("pooled-prompt", message, path="embedding.prompts", hint=hint))
    chosen = normalize if asked.normalize is None else asked.normalize
    default = saved.get("default_prompt_name")
    return Modules(pooling, chosen, prompts, job.data.max_length, default if default in prompts else None)


def _refuse_other(key: str, asked: Any, published: Any) -> None:
    """RecipeError where the recipe asks for another module than the checkpoint was trained with."""
    if None not in (asked, published) and asked != published:
        message = f"is {asked}, but the checkpoint was trained with {published}"
        hint = "remove the line, or use a checkpoint without modules.json"
        raise RecipeError(Problem("module-differs", message, path=f"embedding.{key}", hint=hint))


def saved_modules(job: Job, folder: Path) -> Modules:
    """The modules that were saved with a result or a checkpoint; those of the plan where none were."""
    if not (folder / "modules.json").is_file():
        return modules_of(job)

    def read(name: str) -> Any:
        return parse_json((folder / name).read_text(encoding="utf-8"))

    kinds = [str(one["type"]).rpartition(".")[2] for one in read("modules.json")]
    pooling = _pooling_of(read("1_Pooling/config.json"))
    prompts = read("config_sentence_transformers.json")["prompts"]
    return Modules(pooling, "Normalize" in kinds, prompts, job.data.max_length)


def _pooling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of Pooling of a published 1_Pooling/config.json, old or new."""
    mode = config.get("pooling_mode")
    if mode is None:
        modes = [new for old, new in _MODES.items() if config.get(old)]
        mode = (modes or ["mean"])[0] if len(modes) < 2 else modes
    return {"pooling_mode": mode, "include_prompt": bool(config.get("include_prompt", True))}


def _usual(job: Job) -> str:
    """lasttoken for a model that only reads what comes before; those that fill in masks read all tokens."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = type(load_config(job))
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    return "lasttoken" if causal else "mean"


def _refuse_others(kinds: list[str]) -> None:
    others = [kind for kind in kinds if kind not in _KNOWN]
    if others:
        message = f"the checkpoint has the module {others[0]}, which is not trained here"
        hint = f"use a checkpoint of {', '.join(_KNOWN)}"
        raise RecipeError(Problem("sentence-module", message, path="model.name_or_path", hint=hint))


def _published(job: Job, name: str) -> Any:
    """The content of a JSON file beside the weights of the base model; None where there is none."""
    from transformers.utils import cached_file

    reference = model_reference(job)
    if reference is None:
        return None
    options = {key: value for key, value in hub_options(job).items() if key != "trust_remote_code"}
    found = cached_file(
        reference,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )
    return None if found is None else parse_json(Path(found).read_text(encoding="utf-8"))
