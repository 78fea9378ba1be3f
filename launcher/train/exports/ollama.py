"""`--to ollama`: a GGUF file and a Modelfile whose template was shown to render what was trained.

Ollama's own import of safetensors is not used: it knows tokenizers by a list of six checksums and takes the
rest for a default one. Without TEMPLATE it guesses one from the template in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.exports.gguf import GGUF
from launcher.train.exports.go_template import TemplatePieces, pieces_of, strips
from launcher.train.exports.plain import bos_facts
from launcher.train.exports.target import ExportRequest, TrainedSource
from launcher.train.model.processors import tokenizer_of
from launcher.train.results.generate import is_chat, is_instruction

MODELFILE = "Modelfile"
_CONTEXT = 4096
"""Tokens of a conversation for which Ollama makes room, if the model has so many positions."""


class Ollama(GGUF):
    name = "ollama"

    def check(self, asked: ExportRequest, source: TrainedSource) -> None:
        template(source)
        super().check(asked, source)

    def write(self, asked: ExportRequest, source: TrainedSource, part: Path) -> dict[str, Any]:
        record = super().write(asked, source, part)
        text, notes = template(source)
        lines = [f"FROM ./{record['file']}", f'TEMPLATE """{text}"""']
        lines += [f"PARAMETER stop {json.dumps(end['text'])}" for end in record["stop_tokens"]]
        if record["positions"]:
            length = max(_CONTEXT, record["trained_length"] or 0)
            lines.append(f"PARAMETER num_ctx {min(record['positions'], length)}")
        (part / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["ollama", "create", asked.name, "-f", f"{asked.output}/{MODELFILE}"]
        return {**record, "template": text, "command": command, "notes": [*record["notes"], *notes]}


def template(source: TrainedSource) -> tuple[str, list[str]]:
    """The Go template, and what it does not do. RecipeError where none was shown to render the same."""
    tokenizer = tokenizer_of(source.processing)
    if is_instruction(source.job) and not is_chat(source.job, source.processing):
        from launcher.rows.formats import instruction_prompt

        before, after = instruction_prompt("\u2039prompt\u203a").split("\u2039prompt\u203a")
        return f"{before}{{{{ .Prompt }}}}{after}", [
            "a system prompt has no place in the training rows' form"
        ]
    if not is_chat(source.job, source.processing):
        return "{{ .Prompt }}", [
            "the model was not trained on conversations: use `ollama run` for single texts"
        ]
    found = pieces_of(tokenizer)
    if found is None:
        message = "the chat template depends on more than the roles of the turns, so no Go template was found"
        hint = "use --to gguf with llama.cpp's server, or --to vllm: both render the trained template itself"
        raise RecipeError(Problem("export-template", message, path="model.chat_template", hint=hint))
    return _text(found, tokenizer), _notes(found, tokenizer)


def _text(found: TemplatePieces, tokenizer: Any) -> str:
    bos = tokenizer.bos_token or ""
    return found.go(bos if bos_facts(tokenizer)["tokenizer_adds"] else "")


def _notes(found: TemplatePieces, tokenizer: Any) -> list[str]:
    notes = ["tools and reasoning are not rendered: TEMPLATE has the roles system, user and assistant"]
    if not found.takes_system:
        notes.append("the trained template takes no system prompt, and TEMPLATE leaves one out")
    if strips(tokenizer, found):
        notes.append("the trained template strips white space around texts; Ollama's templates cannot")
    return notes
