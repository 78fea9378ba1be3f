"""Push complete checkpoints and the result to the hub, without keeping a rank or a stop waiting.

Upstream (transformers 5.23, trainer.py push_to_hub and _push_from_checkpoint) copies weights next to the
checkpoints and pushes that folder in the background, including what is just being written there, and
checkpoints that retention removes meanwhile. From FSDP's shards it pushes no weights, not even at the end.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RunFailed
from launcher.train.job import rank

PUSHING = ".pushing"
"""In RUN_DIR: hard links to the files of the checkpoint being pushed, which retention cannot remove."""
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
        uploads: list[dict[str, Any]] = []
        if any(folder.glob("*.safetensors")):  # from_pretrained does not read FSDP's shards
            uploads.append({"commit_message": message, "ignore_patterns": list(NO_WEIGHTS)})
        if strategy in ("checkpoint", "all_checkpoints"):
            name = "last-checkpoint" if strategy == "checkpoint" else folder.name
            uploads.append({"commit_message": f"{message}, checkpoint", "path_in_repo": name})
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        # A daemon: a stopped run does not wait. An interrupted upload leaves nothing on the hub.
        self._thread = threading.Thread(
            target=self._send, args=(before, trainer, self._linked(folder), uploads), name="push", daemon=True
        )
        self._thread.start()

    def result(self, trainer: Any, folder: Path) -> None:
        """Push the result and wait for it. RunFailed if that fails: the weights are on this disk."""
        if rank() != 0:
            return
        if self._thread is not None:
            self._thread.join()
        _write_card(trainer, folder)
        try:
            how = {"commit_message": "End of training", "ignore_patterns": list(NO_WEIGHTS)}
            _upload(trainer, folder, how)
        except Exception as error:
            raise RunFailed(
                Problem(
                    "push-failed",
                    f"the result was not pushed to {trainer.hub_model_id}: {error}",
                    file=str(folder),
                    path="trainer.push_to_hub",
                    hint=f"`hf upload {trainer.hub_model_id} {folder}` pushes this complete folder; so does "
                    "`effilaunch run RECIPE --resume auto`, after the steps since the last checkpoint",
                )
            ) from error

    def _send(
        self, before: threading.Thread | None, trainer: Any, folder: Path, uploads: list[dict[str, Any]]
    ) -> None:
        if before is not None:
            before.join()
        try:
            for upload in uploads:
                _upload(trainer, folder, upload)
        except Exception as error:
            print(f"WARNING: {folder.name} was not pushed to {trainer.hub_model_id}: {error}", flush=True)
        finally:
            shutil.rmtree(self._aside / folder.name, ignore_errors=True)

    def _linked(self, folder: Path) -> Path:
        """Hard links to the files; the folder itself if the filesystem has no links."""
        try:
            return Path(shutil.copytree(folder, self._aside / folder.name, copy_function=os.link))
        except (OSError, shutil.Error):
            return folder


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
    except Exception as error:
        print(f"WARNING: no model card was written: {error}", flush=True)
    finally:
        trainer.args.output_dir = before
