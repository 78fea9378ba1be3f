"""Reports in a real browser: complete, legible, named, inside the page, without requests.

The screenshots lie in the test's folder (`--basetemp` chooses it), for people to look at.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from reports import SAMPLE, data, metrics, planned, result, write_finished, write_run

from launcher.cli import main

pytestmark = pytest.mark.browser
CHARTS_OF = {"finished": 5, "failed": 6, "never-started": 2, "compared": 5, "plan": 2, "hostile": 5}
PAGES = tuple(CHARTS_OF)
HOSTILE = "</script><script>window.ran = 1</script><img src='x' onerror='window.ran = 1'>" + "W" * 300

# Every text that is seen, with the contrast of its colour to what it stands on (WCAG 2.2, 1.4.3).
CONTRAST = """(() => {
  const rgb = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= .04045 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = node => { for (let n = node; n; n = n.parentElement) {
    const c = rgb(getComputedStyle(n).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || ['TITLE', 'DESC'].includes(node.tagName.toUpperCase())) continue;
    if (!node.getClientRects().length || node.closest('.hidden')) continue;
    const style = getComputedStyle(node), isSvg = node.ownerSVGElement;
    const front = light(rgb(isSvg ? style.fill : style.color)), back = light(behind(node));
    const ratio = (Math.max(front, back) + .05) / (Math.min(front, back) + .05);
    const px = parseFloat(style.fontSize), isLarge = px >= 24 || (px >= 18.66 && style.fontWeight >= 700);
    found.push([walk.currentNode.data.trim().slice(0, 40), ratio, isLarge ? 3 : 4.5]);
  }
  return found;
})()"""
# Each chart's width, its lines and bars, and how many of these leave it.
CHARTS = """[...document.querySelectorAll('svg[role=img]')].map(svg => {
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('path, rect.part')].map(mark => mark.getBoundingClientRect());
  const strays = marks.filter(m => m.left < box.left - 2 || m.right > box.right + 2 || m.top < box.top - 2
    || m.bottom > box.bottom + 2);
  return [svg.getAttribute('aria-label'), box.width, marks.length, strays.length];
})"""
# What sticks out of the page to the right and is in no box that scrolls.
OUTSIDE = """[...document.querySelectorAll('body *')].filter(node =>
  node.getBoundingClientRect().right > document.documentElement.clientWidth + 1
  && !node.closest('.wide, pre, .hidden, mark')).map(node => node.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Name -> the file, made as users make it."""
    folder = tmp_path_factory.mktemp("pages")
    first = write_finished(folder / "finished")
    adapted = [{"time": 1.0, "step": 12, "cause": "rank 1 was lost", "resumed_from": 10, "waited_s": 10.0}]
    failed = write_run(folder / "failed", metrics=metrics(17), restarts=adapted, data=data())
    (failed / "logs" / "launcher.log").write_text(
        "Traceback (most recent call last):\n  File \"/m.py\", line 3, in f\n    g()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", "utf-8",
    )  # fmt: skip
    never = write_run(folder / "never-started")
    other = write_finished(folder / "other", metrics=metrics(400, level=1.4), result=result(seconds=900.0))
    sample = {**SAMPLE, "file": HOSTILE, "pieces": [[HOSTILE, False], [HOSTILE, True]]}
    hostile = write_finished(folder / "hostile", data=data([sample]))
    (hostile / "recipe.yaml").write_text(HOSTILE, "utf-8")
    compared, plan = folder / "compared.html", folder / "plan.html"
    for run in (first, failed, never, hostile):
        assert main(["report", str(run)]) == 0
    assert main(["report", str(first), str(other), str(failed), "--output", str(compared)]) == 0
    assert main(["plan", "starcoder_lora", "--on", "8xA100-80GB", "--html", str(plan)]) == 0
    made = {name: folder / name / "report.html" for name in PAGES if (folder / name).is_dir()}
    return {**made, "compared": compared, "plan": plan}


@pytest.fixture(scope="module", autouse=True)
def plan_made_before():
    planned()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_a_page_is_complete_and_legible(browser, pages, tmp_path, name, width, dark):
    page = pages[name]
    browser.open(page, width=width, dark=dark)
    browser.screenshot(tmp_path / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.ask(OUTSIDE) == []
    texts = browser.ask(CONTRAST)
    assert len(texts) > 60
    assert [text for text in texts if text[1] < text[2]] == []
    background = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) is dark
    charts = browser.ask(CHARTS)
    assert len(charts) == CHARTS_OF[name]
    for said, wide, marks, strays in charts:
        assert wide > 200, said
        assert marks > 0, said
        assert strays == 0, said


@pytest.mark.parametrize("name", PAGES)
def test_screen_readers_get_names_for_everything(browser, pages, name):
    browser.open(pages[name])
    named = browser.named()
    roles = [role for role, _ in named]
    assert roles.count("main") == roles.count("navigation") == roles.count("banner") == 1
    assert roles.count("image") == CHARTS_OF[name]
    speaking = ("image", "navigation", "region", "table", "heading", "link", "columnheader", "rowheader")
    unnamed = [role for role, said in named if role in speaking and not said.strip()]
    assert unnamed in ([], ["columnheader"]), "the corner of a table of runs has no name"
    headings = [said for role, said in named if role == "heading"]
    links = [said for role, said in named if role == "link"]
    assert links
    assert set(links) <= set(headings)
    if name == "finished":
        assert "[target: " in " ".join(said for _, said in named), "the mask is said, too"


def test_nothing_is_lost_without_scripts(browser, pages, tmp_path):
    seen = []
    for script in (True, False):
        browser.open(pages["finished"], script=script)
        picture = browser.screenshot(tmp_path / f"script-{script}.png").read_bytes()
        seen.append((browser.named(), picture))
    assert seen[0] == seen[1]


def test_no_text_of_a_run_is_executed(browser, pages):
    browser.open(pages["hostile"])
    assert browser.ask("window.ran") is None
    assert browser.ask("document.scripts.length + document.images.length") == 0
    assert "</script><script>window.ran = 1" in browser.ask("document.body.innerText")


def test_details_open_and_a_printed_page_has_them_all(browser, pages):
    browser.open(pages["finished"])
    is_open = "document.querySelector('#decisions details').open"
    assert browser.ask(is_open) is False
    place = """(() => { const summary = document.querySelector('#decisions summary');
      summary.scrollIntoView({behavior: 'instant'});
      const box = summary.getBoundingClientRect(); return [box.left + 20, box.top + box.height / 2]; })()"""
    x, y = browser.ask(place)
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert browser.ask(is_open) is True
    seen = "[...document.querySelectorAll('details > :not(summary)')].map(node => node.checkVisibility())"
    assert False in browser.ask(seen)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert False not in browser.ask(seen)
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.call("Emulation.setEmulatedMedia", media="")
