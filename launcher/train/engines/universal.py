"""Convert a ZeRO checkpoint for other ranks or another stage.

`python -m launcher.train.engines.universal FROM TO RUN_DIR`.

DeepSpeed's converter takes the shares apart; what it leaves out is added here, so that one folder is read by
every stage from 1 on (deepspeed 0.19.8):

- of stage 3 it writes no `step.pt`, and tensors without their shapes, which stages 1 and 2 ask for;
- each stage looks for the file of its own name next to them (engine.py _get_all_ckpt_names), and stage 3 for
  the step and the parameter groups at another place in optimizer_state.pt.

What stage 3 restores incorrectly is fixed by `launcher.train.engines.deepspeed`.
Runs on the CPU, alone, in a process of its own. TO appears when it is finished; FROM stays as it is.
RUN_DIR/logs gets its status.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from launcher.errors import EffilaunchError
from launcher.files.checkpoint import MANIFEST, SCHEMA_VERSION, Manifest, read_manifest, sha256_of
from launcher.files.rank_status import CONVERT_STAGE
from launcher.files.safe_files import write_json
from launcher.train.checkpoint.disk import publish, sync_tree
from launcher.train.checkpoint.pickles import check_pickles, save_members_by_value
from launcher.train.progress import LEAST_S, Progress, bars_in_status
from launcher.train.status import status_of_stage

STATES = "zero/optimizer_state.pt"
"""Below the universal folder: the parameter groups, the step and the scale of the loss."""
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""What stages 1 and 2 look for, and what stage 3 does."""
LATEST = "latest_universal"
"""File of a converted checkpoint with the universal folder's name."""
STAGES = ("deepspeed.runtime.zero.config", "ZeroStageEnum")
"""(module, name) of the enumeration whose members checkpoints hold."""
_TENSORS = ("fp32", "exp_avg", "exp_avg_sq")
_MAKING = ".making"


def universal_folder(checkpoint: Path) -> Path | None:
    """The universal part of a converted checkpoint; None for one that was saved by a run."""
    latest = checkpoint / LATEST
    return checkpoint / latest.read_text("utf-8").strip() if latest.is_file() else None


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; 0, an error's own exit code, or 1 for the unforeseen."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 3:
        print("usage: python -m launcher.train.engines.universal FROM TO RUN_DIR", file=sys.stderr)
        return 2
    source, target, run_dir = (Path(text).absolute() for text in arguments)
    try:
        with status_of_stage(run_dir, CONVERT_STAGE), bars_in_status():
            convert(source, target)
    except EffilaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def convert(source: Path, target: Path) -> None:
    """Write the universal form of a complete checkpoint. RecipeError where its pickles hold code."""
    begun = time.monotonic()
    save_members_by_value(STAGES)
    check_pickles(source)
    manifest = read_manifest(source)
    assert manifest is not None, "the caller has verified the checkpoint"
    tag = (source / "latest").read_text("utf-8").strip()
    making = target.parent / _MAKING
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    for name in manifest.files:
        if not name.startswith(f"{tag}/"):
            _link(source / name, making / name)
    _take_apart(source / tag, making, f"{tag}_universal")
    complete_universal(making / f"{tag}_universal")
    sync_tree(making)
    write_json(making / MANIFEST, _manifest(making, manifest, time.monotonic() - begun))
    publish(making, target)


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the filesystem has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _take_apart(source: Path, folder: Path, tag: str) -> None:
    """DeepSpeed's own converter, from inside `folder`: it looks files up by patterns made of their paths."""
    from deepspeed.checkpoint import ds_to_universal

    (folder / "source").symlink_to(source)
    before = Path.cwd()
    os.chdir(folder)
    try:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder="source",
                output_folder=tag,
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # a key that only Megatron's checkpoints hold
            )
        )
    finally:
        os.chdir(before)
    (folder / "source").unlink()


def complete_universal(folder: Path) -> None:
    """Add what the converter left out, and take out what no stage reads: other weights, rank 0's shares."""
    models = sorted(folder.glob("*model_states.pt"))
    model = _load(models[0])
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    states = _load(folder / STATES)
    step = _step(folder, states, next(iter(shapes)))
    for name, shape in shapes.items():
        for what in _TENSORS:
            file = folder / "zero" / name / f"{what}.pt"
            tensor = _load(file)
            if not isinstance(tensor, dict):
                torch.save({"cat_dim": 0, "param": tensor.view(shape).clone()}, file)
        torch.save(step, folder / "zero" / name / "step.pt")
    for other in (path for path in (folder / "zero").iterdir() if path.is_dir() and path.name not in shapes):
        shutil.rmtree(other)
    torch.save(_common(states, model, step), folder / STATES)
    buffers = {name: model["module"][name] for name in model["buffer_names"] if name in model["module"]}
    for file in models:
        file.unlink()
    for twin in MODEL_FILES:
        torch.save({**model, "module": buffers, "frozen_param_fragments": None}, folder / twin)


def _step(folder: Path, states: Mapping[str, Any], name: str) -> Any:
    """How often the optimizer has stepped: a tensor of torch's AdamW, a number of DeepSpeedCPUAdam."""
    inner = states.get("optimizer_state_dict")
    if inner is not None:
        return inner["state"][0]["step"]
    return _load(folder / "zero" / name / "step.pt")


def _common(states: Mapping[str, Any], model: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """What optimizer_state.pt holds for every stage."""
    groups = states["param_groups"]
    scale = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    return {
        **{name: states[name] for name in scale if name in states},
        "ds_version": model["ds_version"],
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }


def _load(file: Path) -> Any:
    """Read a file that `check_pickles` has let pass, or that was made of one."""
    return torch.load(file, map_location="cpu", weights_only=False)


def _manifest(folder: Path, source: Manifest, seconds: float) -> dict[str, Any]:
    """As a save writes it; hashes of files that are the same are taken over."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: asdict(source.files[name]) for name in names if name in source.files}
    others = set(names) - files.keys()
    size = sum((folder / name).stat().st_size for name in others)
    with Progress("Hashing what was converted", size, "B", least_s=LEAST_S) as progress:
        hashes = sha256_of(folder, others, progress.add)
    for name, digest in hashes.items():
        if isinstance(digest, OSError):
            raise digest
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return {
        "schema_version": SCHEMA_VERSION,
        "step": source.step,
        "world_size": source.world_size,
        "files": dict(sorted(files.items())),
        "bytes": sum(int(facts["bytes"]) for facts in files.values()),
        "seconds": round(seconds, 3),
        "elapsed": source.elapsed,
        "data": source.data,
        "versions": dict(source.versions),
    }


if __name__ == "__main__":
    sys.exit(main())
