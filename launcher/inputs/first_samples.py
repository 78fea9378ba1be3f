"""Prepare the first rows of a recipe as `prepare` does, where the model's tokenizer is on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from launcher.errors import EffilaunchError, RecipeError
from launcher.machine.software import require_modules
from launcher.models.model_config import has_processing
from launcher.recipe.data_paths import is_loaded_hub_id, is_url
from launcher.render.bundle import Bundle, dump_json

ROWS = 100
"""Of each source."""
_NEEDED = ("transformers", "datasets")
_LACKS = frozenset({"tokenizer-missing", "processor-missing", "remote-code"})
"""What is wrong with this machine, or with what `init` cannot decide, and not with the rows."""
_OF_ALL_ROWS = frozenset(
    {"too-much-truncated", "too-much-dropped", "nothing-left", "one-class", "eval-split"}
)
"""What the rows after the first may put right."""


def try_first_rows(bundle: Bundle, *, has_more: bool) -> str | None:
    """Why the first rows were not rendered, tokenised and masked; None where they were, and are right.

    has_more: there may be more than ROWS rows. RecipeError as `prepare`, at the file and line.
    """
    if sys.platform == "emscripten":
        return "rows are prepared in a process of their own, and WebAssembly has none"
    from launcher.execute.run_dir import scratch_run_dir, write_run_dir  # there they cannot be imported
    from launcher.execute.start import prepare_data

    plan = bundle.plan
    name = plan.model.tokenizer or plan.model.name_or_path
    if any(is_loaded_hub_id(source["path"]) or is_url(source["path"]) for source in plan.data.train):
        return "the rows are not on this machine"
    if plan.model.gguf_file or name is None or not has_processing(str(name)):
        return f"the tokenizer of {name} is not on this machine"
    try:
        require_modules(_NEEDED)
        with scratch_run_dir("init") as run_dir:
            cache = {"EFFILAUNCH_CACHE": str(run_dir / "cache"), "HF_HUB_OFFLINE": "1"}
            files = {**bundle.files, "plan.json": _first_rows(json.loads(bundle.files["plan.json"]))}
            tried = replace(bundle, files=files, env={**bundle.env, **cache})
            write_run_dir(tried, run_dir, resume=False)
            prepare_data(tried, run_dir, samples=0, echo=lambda _: None)
    except RecipeError as error:
        codes = {problem.code for problem in error.problems}
        if codes <= _LACKS | (_OF_ALL_ROWS if has_more else frozenset()):
            return str(error.problems[0].message)
        raise
    except EffilaunchError as error:  # a package that is missing, a full disk
        return str(error.problems[0].message)
    return None


def _first_rows(plan: dict[str, Any]) -> str:
    """plan.json of the first rows of each source."""
    for key in ("data.train", "data.eval"):
        given = plan["settings"][key]["value"]
        if isinstance(given, list):
            plan["settings"][key]["value"] = [{**source, "first": ROWS} for source in given]
    return dump_json(plan)
