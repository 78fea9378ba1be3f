"""Push complete checkpoints and the result to the hub, without keeping a rank or a stop waiting.

Upstream (transformers 5.23, trainer.py push_to_hub and _push_from_checkpoint) copies weights next to the
checkpoints and pushes that folder in the background, including what is just being written there, and
checkpoints that retention removes meanwhile. From FSDP's shards it pushes no weights, not even at the end.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RunFailed
from launcher.files.rank_status import PUSH_FAILED, PUSHING
from launcher.files.safe_files import write_json
from launcher.train.job import rank
from launcher.train.model.adapters import CARD, hide_base

ADAPTER = "adapter_config.json"
NO_WEIGHTS = (
    "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "global_step*", "latest*", "zero_to_fp32.py",
    "pytorch_model_fsdp*", "trainer_state.json", "training_args.bin", "manifest.json", "plan.json",
)  # fmt: skip
"""Files of a checkpoint that only a resumed run needs."""


class Pusher:
    """Pushes the checkpoints and the result of one run, from rank 0."""

    def __init__(self, run_dir: Path) -> None:
        self._aside = run_dir / PUSHING
        self._thread: threading.Thread | None = None
        if rank() == 0:
            shutil.rmtree(self._aside, ignore_errors=True)  # of a run that was killed

    def checkpoint(self, trainer: Any, folder: Path) -> None:
        """Push a complete checkpoint in the background, by `trainer.hub_strategy`.

        It is skipped while the one before is being pushed, or waits with `trainer.hub_always_push`. A failure
        is a warning.
        """
        strategy = trainer.args.hub_strategy.value
        if rank() != 0 or strategy == "end":
            return
        before = self._thread if self._thread is not None and self._thread.is_alive() else None
        if before is not None and not trainer.args.hub_always_push:
            print(f"{folder.name} is not pushed: the one before is still being pushed", flush=True)
            return
        message = f"Training in progress, step {trainer.state.global_step}"
        uploads: list[tuple[Path, dict[str, Any]]] = []
        if any(folder.glob("*.safetensors")):  # from_pretrained does not read FSDP's shards
            how: dict[str, Any] = {"commit_message": message, "ignore_patterns": list(NO_WEIGHTS)}
            try:
                uploads.append((self._published(trainer, folder), how))
            except OSError as error:  # shutil.Error is one
                print(f"WARNING: {folder.name} is not pushed: {error}", flush=True)
                return
        if strategy in ("checkpoint", "all_checkpoints"):
            name = "last-checkpoint" if strategy == "checkpoint" else folder.name
            how = {"commit_message": f"{message}, checkpoint", "path_in_repo": name}
            uploads.append((self._linked(folder, folder.name), how))
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        # A daemon: a stopped run does not wait. An interrupted upload leaves nothing on the hub.
        self._thread = threading.Thread(
            target=self._send, args=(before, trainer, folder.name, uploads), name="push", daemon=True
        )
        self._thread.start()

    def expect_result(self) -> None:
        """Called before the run counts as finished: `.pushing/` stays until its result is pushed."""
        self._aside.mkdir(exist_ok=True)

    def result(self, trainer: Any, folder: Path) -> None:
        """Push the finished result and wait for it, from rank 0. RunFailed if that fails."""
        if self._thread is not None:
            self._thread.join()
        _write_card(trainer, folder)
        pushed = folder
        try:
            pushed = self._published(trainer, folder)
            how = {"commit_message": "End of training", "ignore_patterns": list(NO_WEIGHTS)}
            _upload(trainer, pushed, how)
        except Exception as error:
            words = ["hf", "upload", trainer.hub_model_id, str(pushed), "."]
            if trainer.args.hub_revision:
                words += ["--revision", trainer.args.hub_revision]
            command = shlex.join(words)
            raise RunFailed(
                Problem(
                    PUSH_FAILED,
                    f"the run has finished, but its result was not pushed to {trainer.hub_model_id}: {error}",
                    file=str(folder),
                    path="trainer.push_to_hub",
                    hint=f"`{command}` pushes it; {folder} is complete, and nothing has to be trained again",
                )
            ) from error
        shutil.rmtree(self._aside, ignore_errors=True)

    def _send(
        self,
        before: threading.Thread | None,
        trainer: Any,
        name: str,
        uploads: list[tuple[Path, dict[str, Any]]],
    ) -> None:
        if before is not None:
            before.join()
        try:
            for folder, how in uploads:
                _upload(trainer, folder, how)
        except Exception as error:
            print(f"WARNING: {name} was not pushed to {trainer.hub_model_id}: {error}", flush=True)
        finally:
            for folder, _ in uploads:
                if folder.parent == self._aside:
                    shutil.rmtree(folder, ignore_errors=True)

    def _linked(self, folder: Path, name: str, *without: str) -> Path:
        """Hard links to the files; the folder itself if the filesystem has no links."""
        aside, ignore = self._aside / f"{name}-begun", shutil.ignore_patterns(*without)
        try:
            shutil.copytree(folder, aside, ignore=ignore, copy_function=os.link)
        except (OSError, shutil.Error):
            shutil.rmtree(aside, ignore_errors=True)
            return folder
        return aside.rename(self._aside / name)

    def _published(self, trainer: Any, folder: Path) -> Path:
        """What is pushed of weights: of an adapter to a base in a folder without the path of that folder."""
        name, base = f"{folder.name}-weights", _local_base(trainer)
        if base is None or not (folder / ADAPTER).is_file():
            return self._linked(folder, name, *NO_WEIGHTS)
        aside = self._aside / f"{name}-begun"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(folder, aside, ignore=shutil.ignore_patterns(*NO_WEIGHTS))
        config = json.loads((aside / ADAPTER).read_text("utf-8"))
        write_json(aside / ADAPTER, {**config, "base_model_name_or_path": None})  # no hub id would be true
        hide_base(aside / CARD, base, Path(base).name)
        return aside.rename(self._aside / name)


def _local_base(trainer: Any) -> str | None:
    """The folder that the model was loaded from; None for a hub id."""
    base = str(getattr(trainer.model_config, "_name_or_path", None) or "")
    return base if base and Path(base).is_dir() else None


def _upload(trainer: Any, folder: Path, how: dict[str, Any]) -> None:
    from huggingface_hub import HfApi

    args = trainer.args
    HfApi(token=args.hub_token).upload_folder(
        repo_id=trainer.hub_model_id, folder_path=folder, revision=args.hub_revision, **how
    )


def _write_card(trainer: Any, folder: Path) -> None:
    """Write the model card; if that fails, the result is pushed without one."""
    before, trainer.args.output_dir = trainer.args.output_dir, str(folder)
    try:
        trainer.create_model_card(model_name=trainer.hub_model_id.split("/")[-1])
        if (base := _local_base(trainer)) is not None:
            hide_base(folder / CARD, base, Path(base).name)
    except Exception as error:
        print(f"WARNING: no model card was written: {error}", flush=True)
    finally:
        trainer.args.output_dir = before
