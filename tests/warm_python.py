"""An interpreter whose programs are forks of a process that has imported the training stack (`forked.py`).

It is started in its place, with the same words: it asks for the fork, hands it its streams and environment,
passes signals on and ends as it does. What is no use to fork (options, our own command line) runs in the
real interpreter. The launchers of several ranks, which are 6 seconds of imports themselves, are stood in for:
the ranks are forks, and what happens when one of them fails is what torch's launcher does and prints.

Standard library alone, and little of it: a start takes 30 ms.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

SERVER = ""
PYTHON = ""
"""The socket of the forking process, the real interpreter: written here by who makes a copy of this file."""
LAUNCHERS = ("deepspeed.launcher.runner", "launcher.train.loopback", "torch.distributed.run")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LEAVE_S = 30.0
"""As torch's launcher gives the other ranks when one has failed."""
# In the command line's process the interpreter is this one, so that the runs that it starts are forks too.
COMMAND_LINE = (
    "import sys; sys.executable = sys.argv[1]; del sys.argv[1]; from launcher.cli import entry; entry()"
)


class Started:
    """A fork that runs what an interpreter would with these words."""

    def __init__(
        self, words: list[str], env: dict[str, str], fds: tuple[int, int, int] = (0, 1, 2), *,
        prelude: str | None = None, imports: tuple[str, ...] = (), server: str | None = None,
    ) -> None:  # fmt: skip
        self.code: int | None = None
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(server or SERVER)
        order = {"words": words, "env": env, "cwd": os.getcwd(), "prelude": prelude, "imports": imports}  # noqa: PTH109
        text = json.dumps(order).encode() + b"\n"
        sent = socket.send_fds(self.connection, [text], list(fds))
        if sent < len(text):  # even nothing cannot be sent to who has answered and closed
            self.connection.sendall(text[sent:])
        self._said = b""
        self.pid: int = self._answer()["pid"]

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.code is None and select.select([self.connection], [], [], 0)[0]:
            self.code = self._answer()["code"]
            self.connection.close()
        return self.code

    def wait(self, limit_s: float | None = None) -> int | None:
        if self.code is None:
            select.select([self.connection], [], [], limit_s)
        return self.poll()

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _answer(self) -> dict[str, int]:
        while b"\n" not in self._said:
            more = self.connection.recv(2**16)
            if not more:
                raise RuntimeError("the forking process has ended")
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        found: dict[str, int] = json.loads(line)
        return found


def main(words: list[str]) -> int:
    if words[:1] == ["-m"] and words[1] in ("launcher", "launcher.cli"):
        os.execv(PYTHON, [PYTHON, "-c", COMMAND_LINE, sys.argv[0], *words[2:]])
    if words[:1] == ["-u"]:  # as torchrun starts its ranks
        words = words[1:]
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
        os.execv(PYTHON, [PYTHON, *words])
    if words[:1] == ["-m"] and words[1] in LAUNCHERS:
        return launch(words[2:])
    return as_it_ends(passing_on([Started(words, dict(os.environ))]))


def passing_on(started: list[Started]) -> list[Started]:
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: [one.send(number) for one in started])
    return started


def as_it_ends(started: list[Started]) -> int:
    """Its exit code; where a signal ended it, this process ends by the same."""
    (one,) = started
    while one.wait() is None:
        pass
    assert one.code is not None
    if one.code < 0:
        signal.signal(-one.code, signal.SIG_DFL) if one.code != -signal.SIGKILL else None
        os.kill(os.getpid(), -one.code)
    return one.code


def launch(words: list[str]) -> int:
    """Start the ranks that a launcher's words ask for, and end as it would."""
    given = dict(zip(words, words[1:], strict=False))  # noqa: RUF007
    if "--config_file" in given:
        with open(given["--config_file"], encoding="utf-8") as file:  # noqa: PTH123
            (line,) = [line for line in file if line.startswith("num_processes:")]
        count = int(line.partition(":")[2])
    else:
        count = int(given.get("--num_gpus") or given["--nproc_per_node"])
    port = given.get("--main_process_port") or given["--master_port"]
    module = given.get("--module") or given.get("-m")
    program = ["-m", module] if module else [words[-2]]
    common = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}  # fmt: skip
    ranks = passing_on([
        Started([*program, words[-1]], {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ])  # fmt: skip
    while None in [rank.code for rank in ranks]:
        select.select([rank.connection for rank in ranks if rank.code is None], [], [])
        if any(rank.poll() for rank in ranks):
            return failed(ranks)
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def failed(ranks: list[Started]) -> int:
    """The others are told to end, and after a while killed; what torch's launcher says of it."""
    for rank in ranks:
        rank.send(signal.SIGTERM)
    until = time.monotonic() + LEAVE_S
    for rank in ranks:
        if rank.wait(max(0.0, until - time.monotonic())) is None:
            rank.send(signal.SIGKILL)
            rank.wait()
    say("E1122 10:00:00.1 1 torch/distributed/elastic/multiprocessing/api.py:1000] failed (exitcode")
    for number, rank in enumerate(ranks):
        say(f"  rank      : {number} (local_rank: {number})")
        say(f"  exitcode  : {rank.code} (pid: {rank.pid})")
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
