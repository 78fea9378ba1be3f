"""docs/planner.gif: the planner's page as it answers, recorded from the page itself.

Call it after a change to the page (needs Chromium, npm and Pillow):

    python docs/planner_picture.py

The file's comment has the state of each scene and the memory that the page shows, which a test compares with
the planner.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "browser")]
from chromium import Chromium, find_chromium  # noqa: E402

from tools import planner_site  # noqa: E402

WIDTH, HEIGHT = 1180, 920
RECIPE = """\
model:
  name_or_path: meta-llama/Llama-3.1-8B
data:
  train:
    - path: rows.jsonl
  max_length: 4096
trainer:
  learning_rate: 2.0e-5
"""
_AREA = "document.querySelector('textarea')"
_PLANNED = "document.body.dataset.planned"
_SHOWN = """({state: location.hash, memory: [...document.querySelectorAll('#table tr')].filter(row =>
  row.firstElementChild.textContent === 'device memory').flatMap(row =>
  [...row.querySelectorAll('td b')].map(one => one.textContent))})"""


def _slider(key: str, place: int) -> str:
    one = f"document.querySelector('[data-key=\"{key}\"]')"
    return f"{one}.value = {place}; {one}.dispatchEvent(new Event('input'))"


SCENES = (
    (
        f"{_AREA}.style.height = '15rem'; {_AREA}.style.minHeight = 0; {_AREA}.value = {RECIPE!r};"
        f" {_AREA}.dispatchEvent(new Event('input')); const path = document.querySelector('.path');"
        " path.value = 'tune.yaml'; path.dispatchEvent(new Event('change'))",
        2600,
    ),
    (
        "[...document.querySelectorAll('#problems li')].find(one => one.textContent.includes('adapter'))"
        ".querySelector('button').click()",
        2200,
    ),
    (_slider("data.max_length", 6), 1800),
    (_slider("model.quantization", 3), 2200),
    (
        "document.getElementById('add-hardware').click();"
        " const one = document.querySelectorAll('#hardware select')[1]; one.value = 'H100-80GB';"
        " one.dispatchEvent(new Event('change'))",
        2800,
    ),
)
"""What is done on the page, and for how many milliseconds its answer is shown."""


def frames(browser: Chromium, address: str) -> tuple[list[Image.Image], list[dict[str, Any]]]:
    """The page after each scene; its state, and the memory that it shows."""
    browser.open(address, width=WIDTH)
    browser.resize(WIDTH, HEIGHT)
    _wait(browser)
    on = "[...document.querySelectorAll('#hardware button')].pop().click()"  # one device is left
    browser.ask(f"{_PLANNED} = ''; {on}; null")
    _wait(browser)
    found, shown = [], []
    for script, _ in SCENES:
        browser.ask(f"{_PLANNED} = ''; {{ {script} }}; null")
        _wait(browser)
        shot = browser.call(
            "Page.captureScreenshot", clip={"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        )
        found.append(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))
        shown.append(browser.ask(_SHOWN))
    return found, shown


def _wait(browser: Chromium) -> None:
    end = time.monotonic() + 240
    while not browser.ask(_PLANNED):
        if time.monotonic() > end:
            raise SystemExit(f"the page does not plan: {browser.complaints()}")
        time.sleep(0.1)


def main() -> None:
    program = find_chromium()
    if program is None:
        raise SystemExit("needs Debian's package chromium")
    with tempfile.TemporaryDirectory() as folder:
        planner_site.build(Path(folder) / "site")
        browser = Chromium(program, Path(folder) / "profile")
        try:
            with planner_site.served(Path(folder) / "site") as address:
                shots, shown = frames(browser, address)
        finally:
            browser.close()
    few = [shot.quantize(200, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE) for shot in shots]
    target = ROOT / "docs" / "planner.gif"
    times = [milliseconds for _, milliseconds in SCENES]
    few[0].save(
        target,
        save_all=True,
        append_images=few[1:],
        duration=times,
        loop=0,
        optimize=True,
        comment=json.dumps(shown),
    )


if __name__ == "__main__":
    main()
