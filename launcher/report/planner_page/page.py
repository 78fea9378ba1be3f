"""The HTML of the planner's page, and the server that `plan --browser` has for it."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlencode

from launcher.report.html.elements import Markup, joined, tag
from launcher.report.html.page import page_head
from launcher.report.loopback import HttpRequest, Reply, listening

_FOLDER = Path(__file__).resolve().parent
KINDS = {"planner.js": "text/javascript", "worker.js": "text/javascript", "planner.css": "text/css"}
"""The files beside this one, and their types."""
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class PageStart:
    """What the page begins with; a link to a state of it comes before."""

    path: str
    """Of the recipe: relative paths in it start from there."""
    text: str
    on: tuple[str, ...]
    sets: tuple[str, ...] = ()
    """As of `--set`."""
    files: Mapping[str, int] | None = None
    """Name -> bytes of what runs the package in the browser; None where a server does."""


def file_text(name: str) -> str:
    """One of KINDS."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def planner_page(start: PageStart, query: str = "") -> str:
    """The file. query: what the addresses of its parts end with."""
    data = json.dumps({**asdict(start), "query": query}).replace("<", "\\u003c")
    link = tag("link", rel="stylesheet", href=f"planner.css{query}")
    head = page_head("effilaunch: plan a fine-tune", _POLICY, link)
    body = joined([
        _header(serves=start.files is None),
        tag("main", _controls(), _results(), class_="planner"),
        tag("p", tag("a", "…", href="#verdict-heading", id="summary"), class_="summary"),
        tag("script", Markup(data), type="application/json", id="start"),
        tag("script", "", type="module", src=f"planner.js{query}"),
    ])  # fmt: skip
    return f"<!DOCTYPE html>\n{tag('html', joined([head, tag('body', body)]), lang='en')}\n"


def _header(*, serves: bool) -> Markup:
    """serves: a server on the user's machine plans."""
    stays = "stays on this machine; the hub is asked about models that are not known here"
    about = (
        "The planner itself, not a formula: memory of each device, what is decided and why, the files that a "
        f"run gets. What you write {stays if serves else 'stays in this page'}."
    )
    return tag(
        "header",
        tag("p", "effilaunch plan", class_="over"),
        tag("h1", "Plan a fine-tune before a GPU is touched"),
        tag("p", about, class_="soft"),
        tag(
            "div",
            tag("progress", "", id="loading", max="1", value="0", aria_label="Loading the planner"),
            tag("span", "Loading the planner …", id="loading-text"),
            id="loading-row",
            role="status",
        ),
        tag("noscript", tag("p", "The planner needs JavaScript. `effilaunch plan RECIPE` does not.")),
    )


def _controls() -> Markup:
    """What is planned; the script fills the lists."""
    return tag(
        "div",
        tag("section", tag("h2", "Recipe", id="recipe-heading"), tag("div", "", id="recipes"), _buttons(),
            aria_labelledby="recipe-heading"),
        tag("section", tag("h2", "Hardware", id="hardware-heading"), tag("div", "", id="hardware"),
            tag("button", "Add hardware", type="button", id="add-hardware"),
            aria_labelledby="hardware-heading"),
        tag("section", tag("h2", "Try", id="try-heading"),
            tag("p", "Each is a --set; the recipe stays as it is.", class_="soft small"),
            tag("div", "", id="sliders"), tag("ul", "", id="sets", aria_label="Changes to the recipe"),
            aria_labelledby="try-heading"),
        tag("section", tag("h2", "A model that is not known here", id="model-heading"), _own_model(),
            aria_labelledby="model-heading"),
        class_="controls",
    )  # fmt: skip


def _buttons() -> Markup:
    return tag(
        "p",
        tag("label", "start from ", tag("select", "", id="shipped")),
        tag("button", "Open a file", type="button", id="open"),
        tag("input", type="file", id="file", accept=".yaml,.yml", hidden="", aria_label="A recipe"),
        tag("button", "Compare with another recipe", type="button", id="compare"),
        tag("button", "Copy link", type="button", id="link"),
        tag("span", "", id="said", role="status"),
        class_="buttons",
    )


def _own_model() -> Markup:
    return joined([
        tag("p", "Paste its config.json, or drop the file here: it counts for the model of the first recipe.",
            class_="soft small"),
        tag("label", tag("span", "config.json", class_="hidden"),
            tag("textarea", "", id="config", rows="4", spellcheck="false")),
        tag("p", "", id="config-said", role="status", class_="small"),
    ])  # fmt: skip


def _results() -> Markup:
    return tag(
        "div",
        tag("section", tag("h2", "Memory and verdict", id="verdict-heading"),
            tag("div", "", id="problems", role="alert"), tag("div", "", id="chart"),
            tag("div", "", id="table"), aria_labelledby="verdict-heading", aria_live="polite"),
        tag("div",
            tag("section", tag("h2", "Files and command", id="files-heading"), tag("div", "", id="files"),
                aria_labelledby="files-heading"),
            tag("div", "", id="sections")),
        class_="results",
    )  # fmt: skip


@contextlib.contextmanager
def serving(start: PageStart, answer: Callable[[str], str], port: int) -> Iterator[str]:
    """Serve the page in a thread until the block ends; the address with its token.

    answer: of a question of the page, both JSON. port: 0 for any that is free. RecipeError where it is taken.
    """
    token = secrets.token_urlsafe(16)
    text = planner_page(start, f"?{urlencode({'token': token})}")

    def answered(asked: HttpRequest) -> Reply:
        try:
            return Reply(answer(asked.body.decode("utf-8")), "application/json")
        except ValueError as error:  # not from this page
            return Reply(f"not understood: {error}", status=HTTPStatus.BAD_REQUEST)

    def sent(name: str, kind: str, _asked: HttpRequest) -> Reply:
        return Reply(file_text(name), kind)

    gets: dict[str, Callable[[HttpRequest], Reply]] = {"/": lambda _: Reply(text, "text/html")}
    gets |= {f"/{name}": partial(sent, name, kind) for name, kind in KINDS.items()}
    with listening(token, gets, {"/ask": answered}, port) as address:
        yield address
