"""The trackers of `trainer.report_to`: upstream's callbacks, with the plan, a run name and a folder.

An error of a tracker never ends a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from launcher.files.redaction import hide_in, hider, secret_values
from launcher.files.safe_files import parse_json, write_json
from launcher.train.job import Job, rank

FOLDER = "tracking"
"""In RUN_DIR: the run's id, and what wandb and TensorBoard write."""
INIT_S = 30.0
"""Time for wandb to reach its server, unless WANDB_INIT_TIMEOUT is set."""
FINISH_S = 60.0
"""Time to upload at the end, unless WANDB_FINISH_TIMEOUT is set. The rest stays on the disk."""
_FACTS = ("recipe", "model", "hardware", "batch", "schedule", "memory", "time")
"""Parts of plan.json that are logged besides settings and fixes."""


def attach_trackers(job: Job, trainer: Any) -> Any:
    """Wrap the trackers of the trainer: guarded, with the plan and the run's name; the trainer."""
    args, handler = trainer.args, trainer.callback_handler
    names = {INTEGRATION_TO_CALLBACK[name]: name for name in args.report_to}
    if not names:
        return trainer
    identity = identify(job, unique="trackio" in args.report_to)
    if args.run_name is None:
        args.run_name = identity["name"]
    if getattr(args, "trackio_static_space_id", False) is None:
        args.trackio_static_space_id = False  # else each push to the hub creates a Space of the logs
    for place, callback in enumerate(handler.callbacks):
        name = names.get(type(callback))
        if name is not None:
            handler.callbacks[place] = _KINDS.get(name, Tracker)(job, name, callback, identity["id"])
    return trainer


def end_trackers(trainer: Any, memory: Mapping[str, Any] | None = None) -> None:
    """Log the measured memory, and close the trackers. memory: of result.json."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Tracker):
            callback.end(trainer.state.global_step, {} if memory is None else memory_bytes(memory))


def finish_wandb(code: int) -> None:
    """Report the exit status to wandb, which would take every end for a success."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        with contextlib.suppress(Exception):
            wandb.finish(exit_code=code)


def identify(job: Job, *, unique: bool) -> dict[str, str]:
    """The run's `id` and `name` for its trackers: the same in every attempt, also of a resumed run.

    unique: whether the name must be unique among all runs.
    """
    path = job.run_dir / FOLDER / "run.json"
    readable = True
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return {"id": str(found["id"]), "name": str(found["name"])}
    except OSError as error:
        readable = isinstance(error, FileNotFoundError)
    except (ValueError, KeyError, TypeError):
        pass  # damaged: it is replaced
    recipe = Path(job.plan.get("recipe") or job.run_dir)
    # The recipe of a submitted job is in the run directory itself, whose parent has the recipe's name.
    stem = job.run_dir.parent.name if recipe.is_relative_to(job.run_dir) else recipe.stem
    made = {"id": secrets.token_hex(4), "name": f"{stem}-{job.run_dir.name}"}
    if unique:
        made["name"] += f"-{made['id']}"
    if rank() == 0 and readable:
        with contextlib.suppress(OSError):  # a full disk: the next attempt would have another id
            path.parent.mkdir(exist_ok=True)
            write_json(path, made)
    return made


def described(job: Job) -> dict[str, Any]:
    """The plan as a tracker's configuration, in JSON types; `${ENV:NAME}` is not resolved."""
    settings: dict[str, Any] = {}
    for dotted, entry in job.plan["settings"].items():
        place = settings
        *sections, last = dotted.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = {name: entry.get(name) for name in ("value", "source", "by")}
    fixes = {
        fix["id"]: {name: fix.get(name) for name in ("title", "reason", "changed")}
        for fix in job.plan.get("fixes", ())
    }
    facts = {name: job.plan[name] for name in _FACTS if name in job.plan}
    known = {"run_dir": str(job.run_dir), **facts, "settings": settings, "fixes": fixes}
    return dict(hide_in(known, hider(secret_values(os.environ))))


def memory_bytes(memory: Mapping[str, Any], before: str = "") -> dict[str, int]:
    """The bytes in `memory` of plan.json or result.json, under names such as `save/measured`."""
    found: dict[str, int] = {}
    for name, value in memory.items():
        if isinstance(value, Mapping) and name != "tokens":
            found |= memory_bytes(value, f"{before}{name}/")
        elif isinstance(value, int) and not isinstance(value, bool) and name != "steps":
            found[f"{before}{name}"] = value
    return found


class Tracker(TrainerCallback):
    """One of upstream's callbacks. After an error it is not called any more, and the run continues.

    `on_train_end`, which closes it, is delayed until `end`: the last evaluation and the measured memory come
    after training.
    """

    def __init__(self, job: Job, name: str, callback: Any, run_id: str) -> None:
        self.job, self.name, self.callback, self.id = job, name, callback, run_id
        self._broken = False
        self._close: Callable[[], Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        first = state.is_world_process_zero
        if first:
            self.attempt(self.prepare, args)
        self.attempt(self.callback.on_train_begin, args, state, control, **kwargs)
        if first:
            self.attempt(self.log_plan, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close = lambda: self.callback.on_train_end(args, state, control, **kwargs)

    def end(self, step: int, measured: Mapping[str, int]) -> None:
        """Log the measured bytes, if any, and let upstream close the tracker."""
        if measured and rank() == 0:
            self.attempt(self.log_measured, step, {f"memory/{name}": size for name, size in measured.items()})
        if self._close is not None:
            self.attempt(self._close)

    def attempt(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `work` returns; None if it fails, or failed before."""
        if self._broken:
            return None
        try:
            return work(*args, **kwargs)
        except Exception as error:
            self._broken = True
            text = f"{type(error).__name__}: {error}"
            print(f"WARNING: the run continues without {self.name}: {text}", flush=True)
            return None

    def prepare(self, args: Any) -> None:
        """Called before upstream begins; this and the next two on rank 0 alone."""

    def log_plan(self, step: int) -> None:
        """Called when upstream has begun."""

    def log_measured(self, step: int, sizes: Mapping[str, int]) -> None:
        """Called before upstream ends; bytes by name."""


def _passed_on(event: str) -> Callable[..., Any]:
    def pass_on(self: Tracker, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.attempt(getattr(self.callback, event), args, state, control, **kwargs)

    return pass_on


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    if _event not in vars(Tracker):
        setattr(Tracker, _event, _passed_on(_event))


class Wandb(Tracker):
    """The wandb run is started here, with its id and folder; upstream uses an existing one."""

    def prepare(self, args: Any) -> None:
        import wandb

        if wandb.run is not None:  # started by a hook
            return
        asked = self._asked(args)
        try:
            wandb.init(**asked, resume="allow")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            print(f"WARNING: wandb could not start, and logs offline now: {text}", flush=True)
            wandb.teardown()  # the id is in use until then
            wandb.init(**asked, mode="offline")

    def _asked(self, args: Any) -> dict[str, Any]:
        """Arguments of wandb.init: upstream's project, and the rest unless the environment sets it."""
        import wandb

        folder = self.job.run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        asked = {"project": os.environ.get("WANDB_PROJECT", "huggingface"), "name": args.run_name}
        asked |= {} if os.environ.get("WANDB_DIR") else {"dir": str(folder)}
        asked |= {} if os.environ.get("WANDB_RUN_ID") else {"id": self.id}
        if os.environ.get("WANDB_NAME") and not self.job.trainer.run_name:
            del asked["name"]
        limits = {"init_timeout": INIT_S, "finish_timeout": FINISH_S}
        if os.environ.get("WANDB_LOG_MODEL", "false") != "false":  # uploading weights takes longer
            del limits["finish_timeout"]
        known = {
            name: seconds
            for name, seconds in limits.items()
            if name in wandb.Settings.model_fields and not os.environ.get(f"WANDB_{name.upper()}")
        }
        return {**asked, "settings": wandb.Settings(**known)}

    def log_plan(self, step: int) -> None:
        import wandb

        wandb.config.update({"effilaunch": described(self.job)}, allow_val_change=True)

    def log_measured(self, step: int, sizes: Mapping[str, int]) -> None:
        import wandb

        assert wandb.run is not None, "upstream has begun one"
        wandb.run.summary.update({f"effilaunch/{name}": size for name, size in sizes.items()})


class Trackio(Tracker):
    """Trackio finds a run to continue by its name."""

    def log_plan(self, step: int) -> None:
        import trackio

        trackio.config["effilaunch"] = described(self.job)

    def log_measured(self, step: int, sizes: Mapping[str, int]) -> None:
        import trackio

        trackio.log({f"effilaunch/{name}": size for name, size in sizes.items()})


class Tensorboard(Tracker):
    """The plan as text, the measured memory as numbers."""

    def prepare(self, args: Any) -> None:
        if not os.environ.get("TENSORBOARD_LOGGING_DIR"):
            self.callback.logging_dir = str(self.job.run_dir / FOLDER / "tensorboard")

    def log_plan(self, step: int) -> None:
        for name, text in plan_texts(self.job).items():
            self.callback.tb_writer.add_text(f"effilaunch/{name}", text, step)

    def log_measured(self, step: int, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            self.callback.tb_writer.add_scalar(f"effilaunch/{name}", size, step)


_KINDS = {"wandb": Wandb, "trackio": Trackio, "tensorboard": Tensorboard}


def plan_texts(job: Job) -> dict[str, str]:
    """Settings, fixes and predicted memory as tables in Markdown."""
    settings = [
        (dotted, json.dumps(entry["value"]), f"{entry['source']}, {entry['by']}")
        for dotted, entry in job.plan["settings"].items()
    ]
    fixes = [(fix["id"], fix["title"], fix["reason"]) for fix in job.plan.get("fixes", ())]
    memory = job.plan.get("memory") or {}
    return {
        "settings": _table(("setting", "value", "source"), settings),
        "fixes": _table(("fix", "what", "why"), fixes) if fixes else "none",
        "memory": _table(("of one device", "bytes predicted"), list(memory_bytes(memory).items())),
    }


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |"
        for row in lines
    )
