"""An imported recipe as YAML, with comments where a value is not from the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from launcher.importing.join import Imported
from launcher.importing.reading import Effect, Taken, without_tokens
from launcher.recipe import yaml_writer
from launcher.recipe.data_paths import is_file, is_hub_id, is_package, is_url
from launcher.tasks.grpo import KEY

ORDER = (
    "task", "model", "adapter", "data", KEY, "generation", "precision", "sharding",
    "global_batch_size", "trainer", "early_stopping", "python", "hardware", "launch", "runtime",
    "on_oom", "seed",
)  # fmt: skip
_INNER = {
    "model": ("name_or_path", "config", "revision", "tokenizer", "quantization", "dtype"),
    "adapter": ("type", "path", "r", "lora_alpha", "lora_dropout", "target_modules"),
    "data": ("train", "eval", "max_length", "overlong", "packing", "loss_on"),
    "sharding": ("engine", "zero_stage", "offload_optimizer", "offload_param", "config"),
    "trainer": ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
                "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_steps", "optim"),
    "hardware": ("num_nodes", "devices_per_node", "device"),
}  # fmt: skip
_LOCAL = ("model.name_or_path", "model.tokenizer", "adapter.path", "launch.hostfile", "model.chat_template")


def recipe_text(made: Imported, name: str, folder: Path) -> str:
    """The recipe as YAML.

    name: prefix of the files next to it; folder: of the recipe, which its paths are relative to.
    """
    taken = _placed(made, name, folder)
    head = [f"From {', '.join(map(_plain, dict.fromkeys(made.files)))} by `effilaunch import`.", *made.notes]
    of_adapter = [value for key, value in taken.items() if key.startswith("adapter.")]
    if of_adapter:
        taken.setdefault("adapter.type", Taken("lora", of_adapter[0].place, "adapter"))
    data: dict[str, Any] = {}
    if todo := [_plain(str(entry)) for entry in made.dropped if entry.effect is Effect.NEEDED]:
        data["todo"] = todo
    for key in sorted(taken, key=_rank):
        *path, last = key.split(".", 2)  # launch.env.NAME is the deepest
        section = data
        for step in path:
            section = section.setdefault(step, {})
        section[last] = taken[key].value
    notes = {key: said for key, value in taken.items() if (said := _comment(value))}
    return yaml_writer.recipe_text(data, notes, head)


def files_of(made: Imported, name: str) -> dict[str, str]:
    """The other files of the recipe: name -> text."""
    return {f"{name}{suffix}": text for suffix, text in made.texts.items()}


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _rank(key: str) -> tuple[int, int]:
    """The order of the shipped recipes; other keys come after them as they are."""
    section, _, inner = key.partition(".")
    order = _INNER.get(section, ())
    return (
        ORDER.index(section) if section in ORDER else len(ORDER),
        order.index(inner) if inner in order else len(order),
    )


def _comment(taken: Taken) -> str:
    file = Path(taken.place.file).name
    text = f"the default there ({file})" if taken.is_default else ""
    text += "; " if text and taken.note else ""
    where = f" ({file}:{taken.place.line})" if taken.place.line and not taken.is_default else ""
    return without_tokens(_plain(text + (taken.note + where if taken.note else "")))


def _placed(made: Imported, name: str, folder: Path) -> dict[str, Taken]:
    """Values with the names of the files next to the recipe, and paths relative to its folder."""
    placed: dict[str, Taken] = {}
    for key, taken in made.taken.items():
        value = taken.value
        if isinstance(value, str) and value in made.texts:
            value = f"{name}{value}"
        elif key in ("data.train", "data.eval") and isinstance(value, list):
            value = [{**source, "path": _path(source.get("path"), taken, folder)} for source in value]
        elif key == KEY:
            value = [
                {**entry, "function": _function(entry["function"], taken, made, name, folder)}
                for entry in value
            ]
        elif key in _LOCAL:
            value = _path(value, taken, folder)
        placed[key] = Taken(value, taken.place, taken.said, taken.is_default, taken.note)
    return placed


def _function(function: str, taken: Taken, made: Imported, name: str, folder: Path) -> str:
    """`FILE.py:NAME` as the recipe names it."""
    file, _, inner = function.rpartition(":")
    placed = f"{name}{file}" if file in made.texts else _path(file, taken, folder)
    return f"{placed}:{inner}"


def _path(text: Any, taken: Taken, folder: Path) -> Any:
    """A relative path, of what exists next to the imported file or else here, relative to `folder`.

    What does not exist yet is a path if it looks like one: `./out`, `rows.jsonl`, `rewards.py`.
    """
    if not isinstance(text, str) or not text or text.startswith(("/", "~")) or len(text) > 4000:
        return text
    if is_url(text) or is_package(text):
        return text
    is_path = is_file(text) or text.startswith(("./", "../")) or text.endswith((".py", ".jinja"))
    for base in (Path(taken.place.file).parent, Path()):
        try:
            found = (base / text).exists() or any(base.glob(text)) if "*" in text else (base / text).exists()
        except (OSError, ValueError, NotImplementedError):
            return text
        if found and not (is_hub_id(text, base) and not (base / text).exists()):
            return _relative(base / text, folder)
    return _relative(Path(text), folder) if is_path and folder.absolute() != Path().absolute() else text


def _relative(path: Path, folder: Path) -> str:
    there = os.path.relpath(path.absolute(), folder.absolute())
    return there if there.startswith(".") or "/" not in there else f"./{there}"
