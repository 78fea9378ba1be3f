"""A model's configuration: from a folder, a GGUF file, the hub's cache, the hub or the shipped facts."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.facts.hub_client import (
    HubAnswer,
    ask_config,
    ask_model_type,
    hub_cache,
    hub_endpoint,
    hub_token,
    is_offline,
)
from launcher.facts.probe import resolve_path, shipped_model_config, shipped_model_names
from launcher.facts.safe_files import (
    LARGEST_CONFIG,
    LARGEST_TEXT,
    exists,
    expanded,
    is_file,
    read_bytes,
    read_json,
    read_text,
)

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
    except (OSError, ValueError, RuntimeError):  # e.g. a name that no file system would take
        raise _missing(name_or_path, "no folder has such a name") from None
    if is_folder:
        return _of_folder(name_or_path, folder, gguf_file)
    if _HUB_ID.fullmatch(name_or_path) is None:
        raise _missing(name_or_path, "there is no such folder, and it is no name of a repository")
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
    raise _missing(name_or_path, "neither a folder, nor in the hub cache, nor in the shipped facts")


def _of_folder(name: str, folder: Path, gguf_file: str | None) -> tuple[dict[str, Any], str]:
    if gguf_file is not None:
        path = folder / gguf_file
        if not path.is_file():
            raise _missing(name, f"the folder has no file {gguf_file!r}")
        from launcher.facts.gguf_header import read_gguf_config

        return read_gguf_config(path), "GGUF header"
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.gguf")))
        hint = f"in a recipe, set model.gguf_file to one of: {found}" if found else CONFIG_HINT
        raise _missing(name, "the folder has no config.json", hint)
    return _read_json(folder / "config.json"), "folder"


CONFIG_HINT = "give a folder with config.json, download the model, or set model.config"


def _missing(name: str, why: str, hint: str = CONFIG_HINT) -> RecipeError:
    return RecipeError(
        Problem(
            "model-config-missing",
            f"no configuration found for model {name!r}: {why}",
            path="model.name_or_path",
            hint=hint,
        )
    )


def _offline(name: str) -> Problem:
    why = (
        f"neither a folder, nor in {hub_cache(os.environ)}, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    )
    return Problem(
        "hub-offline",
        f"no configuration found for model {name!r}: {why}",
        path="model.name_or_path",
        hint="unset it once to download the model, or name a folder with config.json" + _alike(name),
    )


_NAME = "model.name_or_path"
REFUSALS = {
    "gated": Problem(
        "hub-gated",
        "the repository is gated or private",
        path=_NAME,
        hint="accept its terms on {page}, then `hf auth login` or set HF_TOKEN",
    ),
    "token-refused": Problem(
        "hub-token-refused",
        "the token of this login is not valid there",
        path=_NAME,
        hint="log in again with `hf auth login`, or correct HF_TOKEN",
    ),
    "absent": Problem(
        "hub-model-absent",
        "there is no such repository that this login may see",
        path=_NAME,
        hint="check the name; a private repository needs `hf auth login` or HF_TOKEN",
    ),
    "no-revision": Problem(
        "hub-revision-absent",
        "the repository has no such revision",
        path="model.revision",
        hint="correct model.revision",
    ),
    "no-file": Problem(
        "hub-config-absent",
        "the repository has no config.json",
        path=_NAME,
        hint="name a repository that transformers can load; a GGUF file is read from a folder",
    ),
    "unreachable": Problem(
        "hub-unreachable",
        "the hub cannot be reached",
        path=_NAME,
        hint="try again, download the model where there is a network, or name a folder with config.json",
    ),
    "error": Problem(
        "hub-error",
        "the hub's answer is no configuration",
        path=_NAME,
        hint="try again later, or name a folder with config.json",
    ),
}
"""State of the hub's answer -> why it gives no configuration, and what to do."""
NOT_HERE = frozenset(
    {"model-config-missing", "hub-offline", *(problem.code for problem in REFUSALS.values())}
)
"""Codes of a configuration that cannot be had on this machine, which says nothing about the recipe."""


def _refused(name: str, revision: str, answer: HubAnswer) -> Problem:
    """Why the hub did not give a model's configuration, and what to do."""
    place = re.sub(r"(?<=//)[^/@\s]*@", "", hub_endpoint(os.environ))
    refusal = REFUSALS[answer.state]
    hint = str(refusal.hint).format(page=f"{place}/{name}")
    model_type = None
    if answer.state == "gated":
        model_type = ask_model_type(name, os.environ)
        if hub_token(os.environ):
            hint = f"ask for access on {place}/{name}; the account of the token that is used here has none"
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
    """Models that plan without the hub: of the same architecture, else of a similar name."""
    from difflib import get_close_matches

    configs = {known: shipped_model_config(known) or {} for known in shipped_model_names()}
    same = [known for known, config in configs.items() if config.get("model_type") == model_type]
    if same:
        return f"; models of the same architecture ({model_type}) that plan without it: {', '.join(same)}"
    last = {known.rpartition("/")[2].lower(): known for known in configs}
    near = [last[word] for word in get_close_matches(name.rpartition("/")[2].lower(), last)]
    return f"; models with a similar name that plan without it: {', '.join(near)}" if near else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise _missing(str(path.parent), f"config.json cannot be read ({reason})") from problem
    if not isinstance(value, dict):
        raise _missing(str(path.parent), "config.json holds no mapping")
    return value


def _cached_config(name: str, revision: str, cache_dir: str | None) -> dict[str, Any] | None:
    path = _snapshot(name, revision, cache_dir) / "config.json"
    return _read_json(path) if is_file(path) else None


def _snapshot(name: str, revision: str, cache_dir: str | None) -> Path:
    """Where a model lies in the hub's cache layout: models--ORG--NAME/{refs,snapshots}."""
    root = expanded(cache_dir) if cache_dir else hub_cache(os.environ)
    repo = root / f"models--{name.replace('/', '--')}"
    try:
        commit = read_text(repo / "refs" / revision, LARGEST_TEXT).strip()
    except (OSError, ValueError):  # a commit, or not in the cache
        commit = revision
    return repo / "snapshots" / commit


def has_chat_template(name_or_path: str) -> bool | None:
    """Whether the tokenizer's files here have a chat template; None where there are none."""
    places = [resolve_path(name_or_path), _snapshot(name_or_path, "main", None)]
    for folder in places:
        if any(exists(folder / name) for name in ("chat_template.jinja", "chat_template.json")):
            return True
        settings = folder / "tokenizer_config.json"
        with contextlib.suppress(OSError, ValueError):
            return b'"chat_template"' in read_bytes(settings, LARGEST_CONFIG)
    return None
