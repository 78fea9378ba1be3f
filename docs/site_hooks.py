"""Hooks of mkdocs: what the site needs beyond the pages as a repository shows them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # mkdocs runs this file without it
from tools.planner_site import NoPlannerSite, build  # noqa: E402

_PLANNER = "plan/index.html"
"""On the site alone; docs/plan-page.md names it."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


def on_config(config: Any) -> Any:
    """Headings get the anchors that a repository's page has."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files that are no page become the file's path: the site has no copy of the sources."""
    folder = (ROOT / "docs" / page.file.src_path).parent

    def named(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = (folder / target.split("#")[0]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return found[0]
        file = f"`{path.relative_to(ROOT)}`"
        return file if text.strip("`") in file else f"{text} ({file})"

    return _LINK.sub(named, markdown).replace(f"`{_PLANNER}`", f'<a href="{_PLANNER}">{_PLANNER}</a>')


def on_post_build(*, config: Any, **_: Any) -> None:
    """The planner's page, which docs/plan-page.md links to."""
    try:
        build(Path(config.site_dir) / "plan")
    except NoPlannerSite as why:
        raise PluginError(f"the planner's page cannot be made: {why}") from None
