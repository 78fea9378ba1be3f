"""A served page in a real browser: it follows the run, keeps what was opened, and asks nobody else."""

from __future__ import annotations

import json

import pytest
from patience import wait_until
from reports import data, metrics, write_run
from test_report_in_chromium import CONTRAST, OUTSIDE

from launcher.report.live import serving

pytestmark = pytest.mark.browser
HOSTILE = "</script><img src=x onerror='window.ran = 1'>"
DRAWN = "Number(document.body.dataset.drawn || 0)"


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "run", metrics=metrics(17), data=data())
    (folder / "logs" / "rank-0.log").write_text(f"started\n{HOSTILE}\nloss 3.5\n")
    return folder


def until(browser, expression):
    return wait_until(lambda: browser.ask(expression), 60, expression)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_the_page_follows_the_run(browser, run, tmp_path, width, dark):
    with serving([run], ["run"], 0) as address:
        browser.open(address, width=width, dark=dark)
        until(browser, "document.querySelector('#log-text').innerText.includes('loss 3.5')")
        browser.screenshot(tmp_path / f"live-{width}.png")
        assert browser.ask(OUTSIDE) == []
        assert [text for text in browser.ask(CONTRAST) if text[1] < text[2]] == []
        browser.ask("document.querySelector('#decisions details').open = true")
        browser.ask("document.querySelector('#log-search').value = 'loss'")
        rows = [{"step": step, "loss": 0.0625} for step in range(18, 40)]
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in rows))
        with (run / "logs" / "rank-0.log").open("a") as stream:
            stream.write("loss 0.0625\nanother line\n")
        until(browser, f"{DRAWN} > 0 && document.querySelector('header').innerText.includes('0.0625')")
        until(browser, "document.querySelector('#log-text').innerText.trim() === 'loss 3.5\\nloss 0.0625'")
        assert browser.ask("document.querySelector('#decisions details').open") is True
        assert browser.ask("document.querySelector('#log-search').value") == "loss"
        assert browser.ask("window.ran") is None
        assert browser.complaints() == []
        own = address.split("?")[0]
        assert all(asked.startswith((own, "data:")) for asked in browser.requests())
        roles = ("combobox", "searchbox", "region")
        unnamed = [role for role, said in browser.named() if role in roles and not said.strip()]
        assert unnamed == []
        browser.open("about:blank")


def test_text_of_a_log_is_text(browser, run):
    with serving([run], ["run"], 0) as address:
        browser.open(address)
        until(browser, "document.querySelector('#log-text').innerText.includes('onerror')")
        assert browser.ask("document.images.length") == 0
        assert browser.ask("window.ran") is None
        browser.open("about:blank")
