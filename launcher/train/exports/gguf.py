"""`--to gguf`: one file for llama.cpp, written by its own converter and asked through its own runtime."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RunFailed
from launcher.train.exports import llama_cpp
from launcher.train.exports.compare import compared
from launcher.train.exports.plain import answers_of, facts, write_plain
from launcher.train.exports.probes import conversations, prompts, rendered, texts
from launcher.train.exports.target import RECORD, ExportRequest, Target, TrainedSource
from launcher.train.model.processors import tokenizer_of
from launcher.train.results.generate import is_chat
from launcher.train.results.trained import trust

CONVERTED = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""dtype -> the converter's name for it."""
OF_CONVERTER = ("f32", "bf16", "f16", "q8_0")
"""What the converter writes itself; everything else is llama-quantize's."""


class GGUF(Target):
    name = "gguf"
    options = ("dtype", "quantize", "llama_cpp")

    def check(self, asked: ExportRequest, source: TrainedSource) -> None:
        llama_cpp.find(asked.llama_cpp, quantizes=_is_quantized(asked))

    def write(self, asked: ExportRequest, source: TrainedSource, part: Path) -> dict[str, Any]:
        programs = llama_cpp.find(asked.llama_cpp, quantizes=_is_quantized(asked))
        plain = part / "plain"
        plain.mkdir()
        merged = write_plain(asked, source, plain)
        found = facts(source, plain)
        kind = asked.quantize or CONVERTED.get(str(found["dtype"]), "f16")
        file = part / f"{asked.name}-{kind}.gguf"
        source.say(f"converting to {kind} with llama.cpp's {Path(programs.convert[-1]).name}")
        _convert(programs, plain, file, kind, str(found["dtype"]))
        comparison = _compared(source, plain, programs, file)
        shutil.rmtree(plain)
        size = file.stat().st_size
        notes = []
        if other := comparison["rendered_otherwise"]:
            notes.append(
                f"llama.cpp renders {len(other)} conversations otherwise than the trained template, see "
                f"{RECORD}: send rendered prompts to /completion instead of messages"
            )
        return {"merged": merged, **found, "file": file.name, "quantize": kind, "bytes": size,
                "notes": notes, "compared": comparison}  # fmt: skip


def _is_quantized(asked: ExportRequest) -> bool:
    return asked.quantize is not None and asked.quantize not in OF_CONVERTER


def _convert(programs: llama_cpp.Programs, plain: Path, file: Path, kind: str, dtype: str) -> None:
    if kind in OF_CONVERTER:
        words = [*programs.convert, str(plain), "--outfile", str(file), "--outtype", kind]
        llama_cpp.run(words, "the converter", "gguf-failed")
        return
    assert programs.quantize is not None, "find() refuses this without llama-quantize"
    full = file.with_name("full.gguf")
    first = [*programs.convert, str(plain), "--outfile", str(full)]
    llama_cpp.run([*first, "--outtype", CONVERTED.get(dtype, "f16")], "the converter", "gguf-failed")
    llama_cpp.run([*programs.quantize, str(full), str(file), kind], "llama-quantize", "gguf-failed")
    full.unlink()


def _compared(source: TrainedSource, plain: Path, programs: llama_cpp.Programs, file: Path) -> dict[str, Any]:
    """The file beside the merged model in plain transformers, before the latter is removed."""
    from launcher.train.model.models import auto_class

    source.say("comparing: token ids of 200 texts and greedy answers to 50 prompts, in llama.cpp")
    model = auto_class(source.job.task.name).from_pretrained(str(plain), dtype="auto", **trust(source.job))
    ours = answers_of(source, model.eval())
    del model
    gc.collect()
    tokenizer, chats = tokenizer_of(source.processing), is_chat(source.job, source.processing)
    asked = prompts(source.job, source.processing)
    shown = [str(rendered(tokenizer, one) if chats else one) for one in asked]
    with llama_cpp.serving(programs.serve, file) as server:
        theirs = server.answers(texts(), shown, rendered=chats)
        unstopped = [end for end in facts(source, plain)["stop_tokens"] if not server.stops_at(end["id"])]
        other = _rendered_otherwise(server, tokenizer) if chats else []
    if unstopped:
        names = ", ".join(f"{end['text']} ({end['id']})" for end in unstopped)
        message = f"llama.cpp does not end an answer at {names}, where the trained model ends it"
        raise RunFailed(Problem("export-differs", message, hint="use --to vllm or transformers"))
    found = compared(ours, theirs, tokenizer.decode, "the GGUF file")
    return {**found, "rendered_otherwise": other}


def _rendered_otherwise(server: llama_cpp.Server, tokenizer: Any) -> list[dict[str, Any]]:
    """Conversations that llama.cpp's own engine renders otherwise, from the same template."""
    found = []
    for turns in conversations():
        wanted = rendered(tokenizer, turns)
        if wanted is None:
            continue
        text = server.render(turns)
        if text is None or text.removeprefix(tokenizer.bos_token or "") != wanted.removeprefix(
            tokenizer.bos_token or ""
        ):
            found.append({"messages": turns, "trained": wanted, "exported": text})
    return found
