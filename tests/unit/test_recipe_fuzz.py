"""Malformed recipes: every one loads or is refused with placed problems, and never with another error."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import Problem, RecipeError
from launcher.files.shipped import recipes_dir
from launcher.recipe.field_tables import TASK_FORMATS, adapter_fields, trainer_fields
from launcher.recipe.loading import load_recipe
from launcher.recipe.problems import known_sections
from launcher.recipe.yaml_reader import parse_yaml
from launcher.tasks import FORMATS

EVERY_KEY = """\
task: causal-lm
model: {name_or_path: org/m, revision: main, tokenizer: org/t, chat_template: "{{ messages }}",
        quantization: {type: nf4, double_quant: true, compute_dtype: bfloat16}, dtype: auto,
        attn_implementation: sdpa, device_map: auto, add_tokens: ["<a>"], cache_dir: cache}
adapter: {type: lora, r: 8, lora_alpha: 16, lora_dropout: 0.05, target_modules: all-linear}
data:
  train:
    - {path: data/a.jsonl, format: text, weight: 0.5, columns: {text: content}}
    - {path: org/set, split: train, name: en, revision: main}
  eval: {split: 0.02}
  metrics: [perplexity]
  max_length: 512
  overlong: split
  packing: true
  loss_on: all
  fim: {rate: 0.5, spm_rate: 0.5}
  max_truncated: 0.1
  num_proc: 2
precision: bf16
sharding: {engine: deepspeed, zero_stage: 2, offload_optimizer: cpu, config: zero2}
global_batch_size: 64
trainer:
  learning_rate: 1.0e-4
  max_steps: ${ENV:STEPS:100}
  report_to: [tensorboard]
  metric_for_best_model: perplexity
  activation_checkpointing_kwargs: {use_reentrant: false}
early_stopping: {patience: 3, threshold: 0.01}
python: hooks.py
hardware: {num_nodes: 1, devices_per_node: 8, device: A100-80GB}
launch: {launcher: auto, env: {KEY: value}}
fixes: {disable: []}
seed: 7
"""
PREFERENCES = """\
task: dpo
model: {name_or_path: m}
data: {train: [{path: a.jsonl, format: preference}], eval: [{path: b.jsonl}], max_length: 64}
trainer: {beta: 0.2, loss_type: [sigmoid, sft], loss_weights: [1.0, 0.5], num_train_epochs: 1}
"""
# problems of something that is written, so that it has a line
PLACED = ("unknown-key", "wrong-type", "wrong-choice", "duplicate-key", "yaml-tag", "yaml-key", "yaml-syntax")
BASES = [EVERY_KEY, PREFERENCES, "extends: base.yaml\ntrainer: {max_steps: null}\n", "extends: ./r.yaml\n"]
BASES += [path.read_text(encoding="utf-8") for path in sorted(recipes_dir().glob("*.yaml"))]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**63, 10**30, 10**4000, -(10**400)]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["", "auto", "none", "no", "1e-4", "${ENV:X}", "${ENV:", "${ENV:X:}", "${ENV:STEPS:[1, {}]}",
         "package:", "package:a/../b", "~", "~nobody/x", "..", "/", ".", "a\0b", "\ud800", "x" * 5000,
         "hf://a", "a/b", "[*", "{", "\n", "dpo", "image", "text", "data/a.jsonl", "😀", "\u202e", "\x85",
         "\t", "grpo"]
    ),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# what a recipe may say somewhere, put where it does not belong or beside what it excludes
KEYS = sorted(
    {key for model in known_sections().values() for key in model.model_fields}
    | {*trainer_fields("dpo"), *adapter_fields()}
)
WORDS = [
    *TASK_FORMATS, *FORMATS, "auto", "none", "drop", "split", "assistant", "int8", "steps", "epoch",
    "best", "vlm", "grpo", True, False, None, 0, 1, -1, 0.5, 8, 1e-4, [], {}, [{}], [{"path": "a.jsonl"}],
    {"split": 0.1}, ["accuracy"], ["f1", 1], {"rate": 0.5}, {"patience": 1}, {"type": "nf4"},
    "${ENV:STEPS:3}", "${ENV:MISSING_}",
]  # fmt: skip
LINES = [
    "\t- a", "? [a, b]\n: c", "a: &x [*x]", "b: &y {c: 1}\nd: {<<: *y}", "<<: [1, 2]", "<<: {seed: 1}",
    "---\na: 1", "...", "!!python/object:os.system {a: b}", "seed: !!int abc", "seed: !!binary aGk=",
    "trainer: !!set {a, b}", "extends: r.yaml", "extends: [a]", "extends: nowhere", "extends: /",
    "extends: ''", "extends: base.yaml", "extends: " + "x" * 5000, "seed: 1\nseed: 2", "%YAML 9.9", "? : x",
    "'': 1", "*none", "key with spaces: 1", "a.b[0].c: 1", "trainer: {" + "a: {" * 40 + "}" * 41,
    "x: " + "[" * 3000, "x: " + "[" * 3000 + "]" * 3000, "- " * 2000 + "a", "seed: 0x" + "f" * 6000,
    "seed: 9" + "9" * 6000, "seed: 1e999", "seed: .nan", "seed: 08", "data: &d {train: [*d, *d]}",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c, *c]", "\x00", "\ufeff", "a: 'open",
    "trainer: {learning_rate: 1e-4, learning_rate: 2}", 'a: "\\ud800"', 'a: "\\0"', "#", "@", "`a",
    "task: vlm", "task: [dpo]", "task: {a: b}", "python: ''", "on_oom: [a]", "launch: {slurm: {a: [1]}}",
]  # fmt: skip
OVERRIDES = st.one_of(
    st.sampled_from(
        ["", "=", "a", "=1", "a=", ".a=1", "a.=1", "a..b=1", "a[=1", "a[0]=1", "a]=1", "[0]=1", "²[²]=²",
         "data.train[0]=1", "data.train[0].path=x", "data.train[9]=1", "data.train[-1]=1", "data[0]=1",
         "data.train[99999999999999999999]=1", "extends=x", "trainer.max_steps=1e3", "trainer=null",
         "trainer=[", "model=", "data.eval=[1]", "data.train[0].weight=2", "seed=\ud800", "seed='",
         "task=dpo", "task=grpo", "a" + ".a" * 500 + "=1", "a" + ".a" * 30 + "=" + "[" * 60 + "]" * 60,
         "trainer.learning_rate=${ENV:X}", "trainer.learning_rate=" + "[" * 500, "data.train=[]",
         "model.config={a: {b: [c]}}", "early_stopping.patience=0", "seed=&a [*a]", "\0=1", "seed=\0"]
    ),
    st.text(max_size=30),
    st.tuples(st.sampled_from(["seed", "data.max_length", "trainer.optim", "adapter.r", "data.eval"]),
              st.text(max_size=12)).map("=".join),
)  # fmt: skip


def holders(value: Any) -> list[Any]:
    """Every mapping and list inside a value."""
    found = [value] if isinstance(value, (dict, list)) else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found + [holder for item in inner for holder in holders(item)]


def change_tree(text: str, choose: random.Random, value: Any) -> str:
    """The recipe with one key dropped, renamed, moved or given another value."""
    data = parse_yaml(text, "f").data
    places = [(holder, key) for holder in holders(data)
              for key in (list(holder) if isinstance(holder, dict) else range(len(holder)))]  # fmt: skip
    if not places:
        return text
    holder, key = choose.choice(places)
    how = choose.randrange(9)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        name = "".join(choose.sample(str(key), len(str(key)))) if choose.random() < 0.5 else f"{key}x"
        holder[name] = holder.pop(key)
    elif how == 2:
        holder[key] = [holder[key]]
    elif how == 3:
        holder[key] = {"path": holder[key]}
    elif how == 4:
        target, _ = choose.choice(places)
        (target.update if isinstance(target, dict) else target.extend)(
            {f"{key}": 1} if isinstance(target, dict) else [1]
        )
    elif how == 5:
        holder[key] = value
    elif how == 6 and isinstance(holder, dict):
        holder[choose.choice(KEYS)] = choose.choice(WORDS)
    else:
        holder[key] = choose.choice(WORDS)
    # JSON is YAML, and it writes values that YAML's writer would refuse
    return json.dumps(data, indent=choose.choice([None, 1]), ensure_ascii=choose.random() < 0.5)


def change_text(text: str, choose: random.Random, line: str) -> str:
    """The recipe with characters or lines cut, doubled, swapped or put in."""
    lines = text.split("\n")
    at = choose.randrange(len(lines))
    how = choose.randrange(8)
    if how == 0:
        return text[: choose.randrange(len(text) + 1)]
    if how == 1:
        lines.insert(at, lines[at])
    elif how == 2:
        del lines[at]
    elif how == 3:
        lines[at] = choose.choice(["\t", " ", "   "]) + lines[at]
    elif how == 4:
        start = choose.randrange(len(text) + 1)
        mark = choose.choice([*":{}[],&*#?|>-%@`\"'!\t\n\\", "😀", "\x07", "\x85", "\u2028", ": ", "- "])
        return text[:start] + mark + text[start:]
    elif how == 5:
        other = choose.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines.insert(at, line)
    return "\n".join(lines)


def outcome(file: Path, overrides: list[str]) -> list[Problem] | None:
    """The problems of a recipe, None when it loads."""
    try:
        loaded = load_recipe(file, overrides)
    except RecipeError as error:
        return error.problems
    json.dumps(loaded.recipe.model_dump()).encode()  # what the plan will write
    return None


def check(folder: Path, content: bytes, overrides: list[str]) -> bool:
    """Whether the recipe loads; anything but a recipe or placed problems fails the test."""
    file = folder / "r.yaml"
    file.write_bytes(content)
    problems = outcome(file, overrides)
    if problems is None:
        return True
    assert problems
    for problem in problems:
        assert problem.code
        assert problem.message
        assert problem.file
        assert problem.file == "--set" or Path(problem.file).exists()
        assert problem.line is None or problem.line >= 1
        if problem.file == str(file) and problem.code in PLACED:
            assert problem.line is not None, problem
        json.dumps(problem.to_json())
        str(problem).encode()
    return False


@st.composite
def malformed(draw: Callable[..., Any]) -> tuple[bytes, list[str]]:
    text = draw(st.sampled_from(BASES))
    choose = random.Random(draw(st.integers(0, 2**32)))
    mode = draw(st.integers(0, 9))  # mostly changes that leave it YAML, or nothing gets past the parser
    for _ in range(draw(st.integers(1, 2)) if mode < 7 else 0):
        text = change_tree(text, choose, draw(VALUES))
    for _ in range(draw(st.integers(1, 2)) if mode > 5 else 0):
        text = change_text(text, choose, draw(st.sampled_from(LINES)))
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 19)) == 0:
        at = choose.randrange(len(content) + 1)
        content = content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at:]
    return content, draw(st.lists(OVERRIDES, max_size=2)) if mode % 3 == 0 else []


def fuzz(examples: int) -> dict[bool, int]:
    """Run that many examples; how many loaded, and how many were refused."""
    counts = {True: 0, False: 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base.yaml").write_text(EVERY_KEY, encoding="utf-8")

        @settings(max_examples=examples, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(malformed())
        def run(example: tuple[bytes, list[str]]) -> None:
            counts[check(folder, *example)] += 1

        run()
    return counts


def test_every_base_of_the_fuzz_is_a_good_recipe(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(EVERY_KEY, encoding="utf-8")
    for text in BASES:
        good = check(tmp_path, text.encode(), [])
        assert good == ("./r.yaml" not in text), text


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_each_nasty_line_alone_and_in_a_recipe(tmp_path: Path, line: str) -> None:
    for text in (line, PREFERENCES + line, f"{line}\n{PREFERENCES}"):
        check(tmp_path, text.encode("utf-8", "surrogatepass"), [])


def test_malformed_recipes_are_refused_in_words() -> None:
    counts = fuzz(500)
    assert counts[False] > 250
    assert counts[True] > 10, "the fuzz is too rough to reach what lies behind the first checks"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_malformed_recipes_are_refused_in_words() -> None:
    counts = fuzz(10_000)
    assert sum(counts.values()) >= 9_000
