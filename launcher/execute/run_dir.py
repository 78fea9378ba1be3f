"""The run directory: made once, never overwritten, compared before it is continued."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.render.bundle import Bundle, dump_json

MARKER = "COMPLETED"
"""Written last by rank 0: a run is done only when this file says so."""

# Settings that may differ between a run and its continuation: they change its length and its reports.
MAY_CHANGE = (
    "trainer.max_steps",
    "trainer.num_train_epochs",
    "trainer.logging_",
    "trainer.save_",
    "trainer.eval_",
    "trainer.report_to",
    "trainer.run_name",
    "launch.env.",
    "on_oom",
)


def default_run_dir(recipe_file: str, root: Path) -> Path:
    """`runs/<recipe-stem>/<UTC time>` under `root`."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = root / "runs" / Path(recipe_file).stem
    candidate = folder / stamp
    number = 1
    while candidate.exists():
        number += 1
        candidate = folder / f"{stamp}-{number}"
    return candidate


def latest_run_dir(recipe_file: str, root: Path) -> Path:
    """The newest run directory of this recipe; RecipeError when there is none."""
    folder = root / "runs" / Path(recipe_file).stem
    found = sorted(p for p in folder.glob("*") if (p / "plan.json").is_file())
    if not found:
        raise RecipeError(
            Problem("nothing-to-resume", f"no run directory under {folder}", hint="drop --resume")
        )
    return found[-1]


def write_run_dir(bundle: Bundle, run_dir: Path, *, resume: bool, same_run: bool = True) -> None:
    """Write the bundle's files. A non-empty folder is refused (exit 2), unless it is resumed.

    same_run: whether a resumed run must have the settings that it was started with.
    """
    try:
        occupied = run_dir.exists() and any(run_dir.iterdir())
        if occupied and not resume:
            raise RecipeError(
                Problem(
                    "run-dir-not-empty",
                    f"the run directory {run_dir} is not empty",
                    hint="name another --output-dir, or --resume auto to continue that run",
                )
            )
        if resume and same_run:
            _check_same_run(bundle, run_dir)
        for name in ("logs", "checkpoints"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        for name, text in bundle.files.items():
            if name == "recipe.yaml" and (run_dir / name).exists():
                continue
            write_file(run_dir / name, text)
    except OSError as error:
        raise RecipeError(
            Problem(
                "run-dir-unwritable",
                f"cannot write the run directory {run_dir}: {error.strerror}",
                hint="name another with --output-dir",
            )
        ) from error
    (run_dir / "command.sh").chmod(0o755)


def write_file(path: Path, text: str) -> None:
    """Write aside, then rename: a file is whole or absent."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _check_same_run(bundle: Bundle, run_dir: Path) -> None:
    """RecipeError when the plan on disk would train something else than this bundle."""
    path = run_dir / "plan.json"
    if not path.is_file():
        raise RecipeError(Problem("nothing-to-resume", f"{run_dir} holds no plan.json", hint="drop --resume"))
    old = {key: s["value"] for key, s in json.loads(path.read_text("utf-8"))["settings"].items()}
    new = {key: s["value"] for key, s in json.loads(bundle.files["plan.json"])["settings"].items()}
    problems = [
        Problem(
            "resume-differs",
            f"the run was started with {old.get(key)!r}, the recipe now says {new.get(key)!r}",
            path=key,
            hint="restore the value, or start a new run",
        )
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE)
    ]
    if problems:
        raise RecipeError(problems)


def record_bound(run_dir: Path, bound: dict[str, Any]) -> None:
    """Add the values that were bound late to environment.json."""
    path = run_dir / "environment.json"
    write_file(path, dump_json({**json.loads(path.read_text("utf-8")), "bound": bound}))
