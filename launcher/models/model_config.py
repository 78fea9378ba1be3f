"""Find a model's configuration: in a folder, a GGUF file, the hub cache, the hub or the shipped facts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import (
    LARGEST_CONFIG,
    LARGEST_TEXT,
    exists,
    expanded,
    is_file,
    read_bytes,
    read_json,
    read_text,
)
from launcher.files.shipped import facts_file
from launcher.machine.hub_client import (
    HubAnswer,
    ask_config,
    ask_model_type,
    hub_cache,
    hub_endpoint,
    hub_token,
    is_offline,
)
from launcher.machine.probe import resolve_path

_NAME = "model.name_or_path"
_PROCESSING = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_HUB_ID = re.compile(r"(?!\.)[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")


def find_model_config(
    name_or_path: str,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    allow_network: bool = True,
) -> tuple[dict[str, Any], str]:
    """The model's configuration and where it was found (`folder`, `GGUF header`, `hub cache`, ...).

    RecipeError where no place has it: `model-config-missing`, `hub-offline`, or a code of REFUSALS.
    """
    try:
        folder = resolve_path(name_or_path)
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # e.g. an invalid file name
        raise _missing(name_or_path, "it is not a valid name") from None
    if is_folder:
        return _of_folder(name_or_path, folder, gguf_file)
    if _HUB_ID.fullmatch(name_or_path) is None:
        raise _missing(name_or_path, "it is neither a folder nor a valid repository name")
    asks = allow_network and gguf_file is None
    answer = None
    if gguf_file is None:
        cached = _cached_config(name_or_path, revision or "main", cache_dir)
        if cached is not None:
            return cached, "hub cache"
    if asks and not is_offline(os.environ):
        answer = ask_config(name_or_path, revision or "main", os.environ)
        if answer.config is not None:
            return answer.config, "hub"
    shipped = shipped_model_config(name_or_path)
    if shipped is not None:
        return shipped, "shipped facts"
    if answer is not None:
        raise RecipeError(_refused(name_or_path, revision or "main", answer))
    if asks:
        raise RecipeError(_offline(name_or_path))
    raise _missing(name_or_path, "it is not a folder, and not in the hub cache or the shipped facts")


def _of_folder(name: str, folder: Path, gguf_file: str | None) -> tuple[dict[str, Any], str]:
    if gguf_file is not None:
        path = folder / gguf_file
        if not path.is_file():
            raise _missing(name, f"the folder has no file {gguf_file!r}")
        from launcher.models.gguf_header import read_gguf_config

        return read_gguf_config(path), "GGUF header"
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.gguf")))
        hint = f"in a recipe, set model.gguf_file to one of: {found}" if found else CONFIG_HINT
        raise _missing(name, "the folder has no config.json", hint)
    return _read_json(folder / "config.json"), "folder"


CONFIG_HINT = "give a folder with config.json, download the model, or set model.config"


def _missing(name: str, why: str, hint: str = CONFIG_HINT) -> RecipeError:
    message = f"no configuration found for model {name!r}: {why}"
    return RecipeError(Problem("model-config-missing", message, path=_NAME, hint=hint))


def _offline(name: str) -> Problem:
    why = f"not a folder, not in {hub_cache(os.environ)}, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    hint = f"unset it to download the model once, or name a folder with config.json{_alike(name)}"
    message = f"no configuration found for model {name!r}: {why}"
    return Problem("hub-offline", message, path=_NAME, hint=hint)


def _refusal(code: str, message: str, hint: str, path: str = _NAME) -> Problem:
    return Problem(code, message, path=path, hint=hint)


REFUSALS = {
    "gated": _refusal(
        "hub-gated", "the repository is gated or private",
        "accept its terms on {page}, then `hf auth login` or set HF_TOKEN",
    ),
    "token-refused": _refusal(
        "hub-token-refused", "the hub rejects the token",
        "log in again with `hf auth login`, or correct HF_TOKEN",
    ),
    "absent": _refusal(
        "hub-model-absent", "the repository does not exist, or this login has no access",
        "check the name; a private repository needs `hf auth login` or HF_TOKEN",
    ),
    "no-revision": _refusal(
        "hub-revision-absent", "the revision does not exist", "correct model.revision", "model.revision"
    ),
    "no-file": _refusal(
        "hub-config-absent", "the repository has no config.json",
        "name a repository that transformers can load; GGUF files are read from a folder",
    ),
    "unreachable": _refusal(
        "hub-unreachable", "the hub is not reachable",
        "try again, download the model where there is a network, or name a folder with config.json",
    ),
    "error": _refusal(
        "hub-error", "the hub did not return a valid configuration",
        "try again later, or name a folder with config.json",
    ),
}  # fmt: skip
"""State of the hub's answer -> problem."""
NOT_HERE = frozenset(
    {"model-config-missing", "hub-offline", *(problem.code for problem in REFUSALS.values())}
)
"""Codes of a configuration that is not available on this machine; the recipe may be right."""


def _refused(name: str, revision: str, answer: HubAnswer) -> Problem:
    """The problem of a model whose configuration the hub did not return."""
    place = re.sub(r"(?<=//)[^/@\s]*@", "", hub_endpoint(os.environ))
    refusal = REFUSALS[answer.state]
    hint = str(refusal.hint).format(page=f"{place}/{name}")
    model_type = None
    if answer.state == "gated":
        model_type = ask_model_type(name, os.environ)
        if hub_token(os.environ):
            hint = f"request access on {place}/{name}: the account of the token has none"
    status = f"HTTP {answer.status}" if answer.status not in (None, 200) else ""
    asked = f"revision {revision!r}" if answer.state == "no-revision" else ""
    details = ", ".join(filter(None, (asked, status, answer.detail)))
    message = f"no configuration found for model {name!r} on {place}: {refusal.message}"
    return replace(
        refusal,
        message=f"{message} ({details})" if details else message,
        hint=hint + _alike(name, model_type),
    )


def _alike(name: str, model_type: str | None = None) -> str:
    """Hint: some shipped models of the same architecture, else with a similar name."""
    from difflib import get_close_matches

    known = shipped_model_names()
    same = [other for other in known if (shipped_model_config(other) or {}).get("model_type") == model_type]
    last: dict[str, str] = {}
    for other in same or known:
        last.setdefault(_without_owner(other), other)
    asked = _without_owner(name)
    begin = max((word for word in last if asked.startswith(word)), key=len, default=None)
    near = [*([begin] if begin else []), *(word for word in get_close_matches(asked, last) if word != begin)]
    near = near[:3] or list(last)[: 3 if same else 0]
    kind = f"of the same architecture ({model_type})" if same else "with a similar name"
    return f"; shipped models {kind}: {', '.join(last[word] for word in near)}" if near else ""


def _without_owner(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise _missing(str(path.parent), f"config.json cannot be read ({reason})") from problem
    if not isinstance(value, dict):
        raise _missing(str(path.parent), "config.json is not a JSON object")
    return value


def _cached_config(name: str, revision: str, cache_dir: str | None) -> dict[str, Any] | None:
    path = _snapshot(name, revision, cache_dir) / "config.json"
    return _read_json(path) if is_file(path) else None


def _snapshot(name: str, revision: str, cache_dir: str | None) -> Path:
    """Folder of a model in the hub cache: models--ORG--NAME/{refs,snapshots}."""
    root = expanded(cache_dir) if cache_dir else hub_cache(os.environ)
    repo = root / f"models--{name.replace('/', '--')}"
    try:
        commit = read_text(repo / "refs" / revision, LARGEST_TEXT).strip()
    except (OSError, ValueError):  # a commit, or not in the cache
        commit = revision
    return repo / "snapshots" / commit


def local_prompts(name_or_path: str, revision: str | None, cache_dir: str | None) -> dict[str, str]:
    """Prompts that a SentenceTransformer in a folder or in the hub cache has; empty where there is none."""
    for folder in (resolve_path(name_or_path), _snapshot(name_or_path, revision or "main", cache_dir)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            prompts = read_json(folder / "config_sentence_transformers.json").get("prompts") or {}
            return {name: text for name, text in prompts.items() if text}
    return {}


def token_counter(name_or_path: str) -> Callable[[str], int] | None:
    """A function that counts the tokens of a text, by the local tokenizer.json; None without one."""
    for folder in _local_folders(name_or_path):
        if is_file(folder / "tokenizer.json"):
            try:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception:  # it raises nothing narrower for a file that it cannot read
                return None
            return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    return None


def has_processing(name_or_path: str) -> bool:
    """Whether the files of the tokenizer or the image processor are on this machine."""
    return any(is_file(folder / name) for folder in _local_folders(name_or_path) for name in _PROCESSING)


def _local_folders(name_or_path: str) -> list[Path]:
    return [resolve_path(name_or_path), _snapshot(name_or_path, "main", None)]


def has_chat_template(name_or_path: str) -> bool | None:
    """Whether the local tokenizer files have a chat template; None without such files."""
    for folder in _local_folders(name_or_path):
        if any(exists(folder / name) for name in ("chat_template.jinja", "chat_template.json")):
            return True
        settings = folder / "tokenizer_config.json"
        with contextlib.suppress(OSError, ValueError):
            return b'"chat_template"' in read_bytes(settings, LARGEST_CONFIG)
    return None


@functools.cache
def _shipped_models() -> dict[str, Any]:
    return dict(json.loads(facts_file("models.json").read_text())["models"])


def shipped_model_names() -> tuple[str, ...]:
    """Names of the models with a shipped configuration: those it is published under, then their equals."""
    models = _shipped_models()
    return (*models, *(name for entry in models.values() for name in entry.get("names", ())))


def shipped_model_config(name: str) -> dict[str, Any] | None:
    """The shipped configuration of a model, None without one."""
    models = _shipped_models()
    if name in models:
        return dict(models[name]["config"])
    shared = next((entry for entry in models.values() if name in entry.get("names", ())), None)
    return {**shared["config"], **shared["names"][name]} if shared else None
