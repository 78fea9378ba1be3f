"""The hub: what is whole is sent from where it lies, and no rank and no stop waits for it.

Upstream's own way (transformers 5.23, trainer.py push_to_hub and _push_from_checkpoint) copies weights beside
the checkpoints and sends that whole folder in the background: also what is just being written there, and
checkpoints that retention removes meanwhile. Of FSDP's shards it sends no weights, not even at the end.
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
"""In RUN_DIR: the files of the checkpoint that is being sent, linked, so that retention cannot take them."""
NO_WEIGHTS = (
    "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "global_step*", "latest*", "zero_to_fp32.py",
    "pytorch_model_fsdp*", "trainer_state.json", "training_args.bin", "manifest.json", "plan.json",
)  # fmt: skip
"""Of a checkpoint, what is of use to a run that goes on alone."""


class Pusher:
    """Sends the checkpoints and the result of one run, from rank 0; on the others nothing happens."""

    def __init__(self, run_dir: Path) -> None:
        self._aside = run_dir / PUSHING
        self._thread: threading.Thread | None = None
        if rank() == 0:
            shutil.rmtree(self._aside, ignore_errors=True)  # of a run that was killed

    def checkpoint(self, trainer: Any, folder: Path) -> None:
        """Send a whole checkpoint in the background, as `trainer.hub_strategy` says.

        While the one before is still on its way it is left out, or waits with `trainer.hub_always_push`. A
        failure is a warning: the next one follows.
        """
        strategy = trainer.args.hub_strategy.value
        if rank() != 0 or strategy == "end":
            return
        before = self._thread if self._thread is not None and self._thread.is_alive() else None
        if before is not None and not trainer.args.hub_always_push:
            print(f"{folder.name} is not pushed: the one before is still on its way", flush=True)
            return
        message = f"Training in progress, step {trainer.state.global_step}"
        uploads: list[dict[str, Any]] = []
        if any(folder.glob("*.safetensors")):  # FSDP's shards are nothing that from_pretrained reads
            uploads.append({"commit_message": message, "ignore_patterns": list(NO_WEIGHTS)})
        if strategy in ("checkpoint", "all_checkpoints"):
            name = "last-checkpoint" if strategy == "checkpoint" else folder.name
            uploads.append({"commit_message": f"{message}, checkpoint", "path_in_repo": name})
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        # A daemon: a run that is stopped does not wait. What was not sent to its end leaves nothing there.
        self._thread = threading.Thread(
            target=self._send, args=(before, trainer, self._linked(folder), uploads), name="push", daemon=True
        )
        self._thread.start()

    def result(self, trainer: Any, folder: Path) -> None:
        """Send the result, and wait for it. RunFailed where that fails: the weights are on this disk."""
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
                    hint=f"it is whole in this folder: `hf upload {trainer.hub_model_id} {folder}` sends it; "
                    "`effilaunch run RECIPE --resume auto` does so too, after the steps behind the last "
                    "checkpoint",
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
        """The same files under another name; the folder itself where the filesystem has no links."""
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
    """The model card, beside the weights; a result is pushed without one, too."""
    before, trainer.args.output_dir = trainer.args.output_dir, str(folder)
    try:
        trainer.create_model_card(model_name=trainer.hub_model_id.split("/")[-1])
    except Exception as error:
        print(f"WARNING: no model card was written: {error}", flush=True)
    finally:
        trainer.args.output_dir = before
