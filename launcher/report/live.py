"""Reports that follow their runs: a page on this machine's loopback, drawn again when a run has written.

The browser asks only this server, which only reads.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from launcher.errors import EffilaunchError, Problem, RecipeError
from launcher.execute.record import read_run
from launcher.files.rank_status import read_statuses
from launcher.files.safe_files import opened
from launcher.report.html.live_sections import SCRIPT, logs_section, ranks_section
from launcher.report.loopback import HttpRequest, Reply, listening
from launcher.report.run_pages import compare_page, hide_secrets, made, run_page, shown_record
from launcher.report.sections import Section

LOOK_S = 1.0
"""Between two looks at the files of the runs."""
ANYWAY_S = 15.0
"""After which a page is drawn again although nothing was written: a process may have ended."""
SHARE = 10
"""Times that drawing a page takes, which pass before the next: a long record costs the run little."""
_READY_S = 60.0
"""For the process that serves to import and draw the first page."""
LOG_BYTES = 4 << 20
"""Of the end of a log."""
LOG_LINES = 1000
"""Of these, or of those that were searched for, the last."""


@dataclass(slots=True)
class Live:
    """What is served: the pages of some runs, their logs, and when they changed."""

    folders: Sequence[Path]
    names: Sequence[str]
    """Of the runs, each different."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    ended: threading.Event = field(default_factory=threading.Event)
    drawing_s: float = 0.0
    """How long the last page took."""

    def page(self, nonce: str) -> str:
        """Raises EffilaunchError where a run can no longer be read."""
        begun = time.monotonic()
        try:
            return self._page(nonce)
        finally:
            self.drawing_s = time.monotonic() - begun

    def _page(self, nonce: str) -> str:
        records = [shown_record(read_run(folder), folder) for folder in self.folders]
        if len(records) > 1:
            return compare_page(records, self.names, made(), more=[self._logs()], script=(nonce, SCRIPT))
        ranks = ranks_section(read_statuses(self.folders[0]))
        return run_page(records[0], made(), more=[ranks, self._logs()], script=(nonce, SCRIPT))

    def _logs(self) -> Section:
        return logs_section(list(self.logs()))

    def logs(self) -> dict[str, Path]:
        """Name -> file; with the name of the run where there are several."""
        several = len(self.folders) > 1
        return {
            f"{name}: {path.name}" if several else path.name: path
            for name, folder in zip(self.names, self.folders, strict=True)
            for path in sorted((folder / "logs").glob("*.log"))
            if path.is_file() and not path.is_symlink()
        }

    def log(self, name: str, wanted: str) -> str | None:
        """The last lines of a log that contain `wanted`; None for a name that is none of `logs`."""
        path = self.logs().get(name)
        if path is None:
            return None
        with opened(path) as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - LOG_BYTES))
            text = hide_secrets()(stream.read().decode("utf-8", errors="replace"))
        found = [line for line in text.splitlines() if wanted.lower() in line.lower()]
        return "\n".join(found[-LOG_LINES:])

    def state(self) -> tuple[tuple[str, int, int], ...]:
        """Changes when a run writes: its files with their times and sizes."""
        found = []
        for folder in self.folders:
            for path in sorted([*folder.glob("*"), *(folder / "logs").glob("*")]):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    found.append((str(path), stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def changes(self) -> Iterator[bool]:
        """True when the page is to be drawn again, else False every LOOK_S, until the server ends."""
        before, waited = self.state(), 0.0
        while not self.ended.wait(LOOK_S):
            now, waited = self.state(), waited + LOOK_S
            due = waited >= SHARE * self.drawing_s and (now != before or waited >= ANYWAY_S)
            if due:
                before, waited = now, 0.0
            yield due

    # What the browser asks for.

    def answer_page(self, _asked: HttpRequest) -> Reply:
        try:
            return Reply(self.page(secrets.token_urlsafe(12)), "text/html")
        except EffilaunchError as error:
            return Reply(str(error), status=HTTPStatus.GONE)

    def answer_log(self, asked: HttpRequest) -> Reply:
        try:
            text = self.log(asked.query.get("name", ""), asked.query.get("search", ""))
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
        return Reply("no such log", status=HTTPStatus.NOT_FOUND) if text is None else Reply(text)

    def answer_events(self, _asked: HttpRequest) -> Reply:
        parts = (b"data: changed\n\n" if changed else b": waiting\n\n" for changed in self.changes())
        return Reply(parts, "text/event-stream")


@contextlib.contextmanager
def serving(folders: Sequence[Path], names: Sequence[str], port: int) -> Iterator[str]:
    """Serve the runs in a thread until the block ends; the address with its token.

    port: 0 for any that is free. Raises RecipeError where it is taken, or a folder is no run directory.
    """
    live = Live(folders, names)
    live.page("")
    gets = {"/": live.answer_page, "/events": live.answer_events, "/log": live.answer_log}
    with listening(live.token, gets, {}, port) as address:
        try:
            yield address
        finally:
            live.ended.set()


@contextlib.contextmanager
def serving_apart(folder: Path) -> Iterator[str]:
    """Serve a run as `serving` does, in a process of its own, which ends with the block or with this process.

    The memory, descriptors and time that connections take are not those of the run. Raises OSError where no
    process can be started, RecipeError where it cannot serve.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.report.live", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None, "stdout is a pipe"
        try:
            ready, _, _ = select.select([process.stdout], [], [], _READY_S)
            said = json.loads(process.stdout.readline() or "{}") if ready else {}
            if "address" not in said:
                message = said.get("error") or "its process did not start"
                raise RecipeError(Problem("no-page", message, file=str(folder)))
            yield said["address"]
        finally:
            process.kill()


def main() -> None:
    """`RUN_DIR`: print the address, or why there is none, as JSON; serve until standard input ends."""
    (folder,) = map(Path, sys.argv[1:])
    try:
        with serving([folder], [folder.name], 0) as address:
            print(json.dumps({"address": address}), flush=True)
            sys.stdin.read()
    except EffilaunchError as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
