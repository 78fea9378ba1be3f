"""Every problem that `launcher/recipe` can report: its code, place and the values that its message names.

They are compared with golden/problems.txt. A sentence may be reworded: golden/messages.txt shows the
sentences, and no test compares it. After a new rule, or a deliberate change of what a problem names:

EFFILAUNCH_UPDATE_GOLDEN=1 .venv/bin/pytest tests/unit/test_recipe_messages.py
"""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import launcher.recipe
from launcher.errors import Problem, RecipeError
from launcher.recipe.hook_file import read_hooks
from launcher.recipe.loading import load_recipe
from launcher.recipe.reward_rules import check_reward_files
from launcher.recipe.schema import RewardFunction
from launcher.tasks import task_named

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PROBLEMS, SENTENCES = GOLDEN / "problems.txt", GOLDEN / "messages.txt"
UPDATE = "EFFILAUNCH_UPDATE_GOLDEN"
HOW = f"{UPDATE}=1 .venv/bin/pytest tests/unit/test_recipe_messages.py"
NOT_COMPARED = f"# Sentences to read. No test compares them; written by {HOW}\n\n"
VALUES = re.compile(
    r"""
    "(?:[^"\\]|\\.)*" | `[^`]*` | (?<!\w)'[^']*' |  # quoted
    \w+://[^\s,()]+ | \$\{[^}]*\} | --\w[\w-]* |  # URLs, references, options
    [\w@.-]+(?:,\ [\w@.-]+){2,} |               # a list of three or more choices
    (?<![\w-])[\w-]*\d(?:[\w.:-]*\w)? |         # numbers, sizes, times, versions, dtypes
    \w+(?:\.\w+)+ | \w*_\w* | \w*[a-z][A-Z]\w*  # names of keys, files, classes
    """,
    re.VERBOSE,
)
"""What a message names, as opposed to the words around it."""
MODULES = [
    importlib.import_module(f"launcher.recipe.{module.name}")
    for module in pkgutil.iter_modules(launcher.recipe.__path__)
    if module.name
    not in ("source_tables", "sweep", "launch_file")  # see test_submit_cli.py and test_own_command.py
]
BUILDERS = ("Problem", "_conflict", "_problem")
"""Functions whose calls construct a problem."""

BASE = {"model": "{name_or_path: m}", "data": "{train: [{path: a.jsonl}]}"}
EVAL = "{train: [{path: a.jsonl}], eval: {split: 0.1}}"
TOKEN = "hf_" + "a1B2" * 8


def data(source: str = "path: a.jsonl", **more: str) -> str:
    """A `data:` section with one source."""
    return f"{{train: [{{{source}}}]{''.join(f', {key}: {value}' for key, value in more.items())}}}"


REGRESSION = {"task": "sequence-classification", "data": data(problem_type="regression")}
RECIPES: list[dict[str, str]] = [
    {**REGRESSION, "trainer": "{label_smoothing_factor: 0.1}"},
    {"todo": "x"},
    {"todo": "[choose a learning rate]"},
    {"task": "grpo"}, {"task": "orpo"}, {"task": "vlm"}, {"task": "sft"},
    *({"task": name} for name in ("gspo", "dapo", "gkd", "masked-lm", "asr")),
    {"sharding": "{pp_size: 2, ep_size: 2}"},
    {"model": "{config: {model_type: llama}, rope_parameters: {rope_type: ntk, factor: 2}}"},
    {"model": "{name_or_path: m, rope_parameters: {rope_type: yarn, factor: 0.5, low_freq_factor: 1}}"},
    {"model": "{name_or_path: m, rope_parameters:"
     " {rope_type: llama3, low_freq_factor: 4, high_freq_factor: 1}}"},
    {"trainer": f"{{run_name: {TOKEN}}}"},
    {"trainer": "{run_name: '${ENV:HF_TOKEN}'}"},
    {"launch": "{slurm: {account: '${ENV:NOT_SET_:me}', setup: [\"echo '${ENV:NOT_SET_:me}'\"]}}"},
    {"launch": f"{{slurm: {{setup: [export HF_TOKEN={TOKEN}]}}}}"},
    {"launch": "{env: {'1A': x, RANK: '0', MASTER_ADDR: a, CUDA_VISIBLE_DEVICES: '0', FSDP_VERSION: '2'}}"},
    {"trainer": "{output_dir: a, bf16: true}"},
    {"global_batch_size": "8", "trainer": "{gradient_accumulation_steps: 2}"},
    {"trainer": "{max_steps: 2, num_train_epochs: 1}"},
    {"trainer": "{max_steps: 0}"},
    {"model": "{name_or_path: m, compile_blocks: true}", "trainer": "{torch_compile: true}"},
    {"model": "{name_or_path: m, kbit_norms: bfloat16}"},
    {"model": "{}"},
    {"model": "{name_or_path: m, config: llama}"},
    {"adapter": "{path: a, r: 8}"},
    {"adapter": "{init_lora_weights: corda}"}, {"adapter": "{init_lora_weights: eva}"},
    {"adapter": "{init_lora_weights: pissa_niter_4}"},
    {"adapter": "{init_lora_weights: loftq}"},
    {"trainer": "{eval_strategy: steps}"},
    {"trainer": "{load_best_model_at_end: true}"},
    {"data": EVAL, "early_stopping": "{patience: 1}", "trainer": "{save_strategy: steps}"},
    {"data": EVAL, "early_stopping": "{patience: 1}",
     "trainer": "{eval_strategy: steps, eval_steps: 4, save_steps: 6}"},
    {"data": EVAL, "trainer": "{metric_for_best_model: eval_f9}"},
    {"early_stopping": "{patience: 1}"},
    {"data": EVAL, "early_stopping": "{patience: 1}",
     "trainer": "{load_best_model_at_end: false, eval_strategy: no, save_strategy: no}"},
    {"trainer": "{push_to_hub: true}"},
    {"trainer": "{optim: adamw_torch_xla}"}, {"trainer": "{optim: galore_adamw}"},
    {"data": data("path: 's3:a/b'")}, {"data": data("path: 'hf://a/b'")}, {"data": data("path: ''")},
    {"data": data("path: '${ENV:NOT_SET_:s3://key:swordfish@a/b.jsonl}'")},
    {"data": data("path: a.jsonl, split: test")},
    {"data": data("path: a.jsonl, revision: main")},
    {"runtime": "{mirror: /mnt/runs}"}, {"runtime": "{mirror: 'https://a/b'}"},
    {"runtime": "{mirror: 's3://a/{run}'}"},
    {"runtime": "{mirror: '${ENV:NOT_SET_:s3://key:swordfish@a/b}'}"},
    {"data": data("path: a.jsonl, format: image")},
    {"data": "{train: [{path: a.jsonl}], eval: [{path: b.jsonl, weight: 2}]}"},
    {"data": data("path: a.jsonl, columns: {texts: b, zzz: c}")},
    {"task": "seq2seq-lm", "data": data(padding_free="true")},
    {"task": "seq2seq-lm", "model": "{name_or_path: m, gguf_file: a.gguf}"},
    {"task": "image-classification", "data": data(max_length="64")},
    {"model": "{name_or_path: m, freeze: [vision], image_sizes: {max_pixels: 1}}"},
    {"embedding": "{loss: CoSENTLoss}"},
    {"task": "embedding", "embedding": "{loss: TripletLoss, negatives: 2, scale: 3.0, mini_batch_size: 4}"},
    {
        "task": "embedding",
        "data": data("path: a, format: scored-pair", eval="{split: 0.1}", metrics="[pearson]"),
    },
    {"task": "embedding", "embedding": "{matryoshka_dims: [64, 64], loss: CosineSimilarity}"},
    {"task": "embedding", "embedding": "{matryoshka_dims: [64, 64]}"},
    {"task": "reranker", "reranker": "{documents: 4}"},
    {"task": "dpo", "data": data(pad_to_multiple_of="8"), "trainer": "{pad_to_multiple_of: 8}"},
    {"task": "reranker", "data": data(pad_to_multiple_of="8")},
    {"model": "{name_or_path: m, add_tokens: [a, a]}"},
    {"data": data("path: a.jsonl, format: text", loss_on="completion")},
    {"data": data("path: a.jsonl, format: token-ids", loss_on="all")},
    {"data": data(packing="true", padding_free="true")},
    {"task": "dpo", "data": data(overlong="drop")},
    {"data": data("path: a.jsonl, format: chat", overlong="split", fim="{rate: 1}")},
    {"data": data(metrics="[perplexity]")},
    {"data": data(eval="{split: 0.1}", metrics="[accuracy]"), "trainer": "{prediction_loss_only: true}"},
    {"data": data(eval="{split: 0.1}", metrics="[perplexty, bleu, zzz]")},
    {"task": "dpo", "data": data(eval="{split: 0.1}", metrics="[accuracy]")},
    {"data": data(streaming="true", eval="{split: 0.1}"), "trainer": "{logging_strategy: epoch}"},
    {"data": data(streaming="true"), "trainer": "{num_train_epochs: 1}"},
    # rewards
    {"reward": "[{function: length}]", "generation": "{top_k: 1}"},
    {"task": "grpo", "generation": "{max_completion_length: 4096}", "trainer": "{vllm_server_host: a}",
     "reward": "[{function: exact_mtch}, {function: zzz}, {function: length, weight: 0},"
     " {function: exact_match, arguments: {a: 1, column: 3}}, {function: r.py:f, arguments: {prompts: 1}},"
     " {function: regular_expression, arguments: {pattern: '('}}]"},
    {"task": "grpo", "reward": "[{function: exact_match}]", "generation": "{backend: vllm-server}",
     "trainer": "{ds3_gather_for_generation: false, vllm_gpu_memory_utilization: 0.5, num_generations: 2}"},
    {"task": "grpo", "reward": "[{function: 'r.py:'}, {function: exact_match}, {function: exact_match}]",
     "trainer": "{generation_kwargs: {top_k: 3}, loss_type: foo, num_iterations: 0}"},
    {"task": "grpo", "reward": "[{function: length}]", "data": data(special_tokens_in_text="escape")},
    {"task": "own", "model": "{name_or_path: m, quantization: nf4}", "adapter": "{r: 8}"},
    # the schema
    {"data": "{eval: {splt: 0.1}}"},
    {"zzz": "1", "batch_size": "8", "learning_rate": "1", "model_name": "x", "stage": "sft"},
    {"output_dir": "o", "evaluation_strategy": "no", "data": "1"},
    {"seed": "-1", "precision": "[]", "fixes": "{disable: a}"},
    {"data": "{train: [], max_length: '2048', packing: yes}"},
    {"data": "{train: {path: a.jsonl}, max_dropped: .inf, max_truncated: 2}", "python": "3", "seed": "2.0"},
    {"model": "{name_or_path: m, dtype: fp32, add_tokens: [''], lora_alpha: 3}"},
    # fields of trainer and adapter
    {"trainer": "{max_steps: true, learning_rate: '1e-4', num_train_epochs: 0, beta: 0.1, lr: 1}"},
    {"trainer": "{save_strategy: step, group_by_length: true, gradient_checkpointing: true, qqqq: 0, r: 8}"},
    {"trainer": "{activation_checkpointing_kwargs: {use_reentrent: true}, dispatch_batche: 1}"},
    {"trainer": "{max_seq_length: 3, lr_scheduler_kwargs: {a: [.inf]}, weight_decay: .nan, run_name: 3}"},
    {"trainer": "{lr_scheduler_kwargs: num_cycles}"},
    {"trainer": "{accelerator_config: {gradient_accumulation_kwargs: {num_steps: 3}, even_batch: true}}"},
    {"trainer": "{optim: sgd, optim_args: 'momentum:0.9,lr=2'}"},
    {"trainer": "{lr_scheduler_type: warmup_stable_decay}"},
    {"trainer": "{lr_scheduler_type: polynomial, lr_scheduler_kwargs: {power: abc}}"},
    {"trainer": "{optim: sgd, optim_args: 'momentum=much'}"},
    {
        "trainer": "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0e-3}, "
        "learning_rate: 1.0e-4}"
    },
    {"task": "dpo", "trainer": "{max_length: 8, ld_alpha: 1.5, predict_with_generate: true}"},
    {"adapter": "{rank: 8, bias: some, lora_dropout: 2, task_type: A, eva_config: {rho: 2}, max_steps: 1}"},
    {"adapter": "{rank_pattern: {q: 0}, alpha_pattern: {q: 0}, trainable_token_indices: [-1]}"},
    # references
    {"trainer": "{run_name: '${ENV:NOT_SET_}', hub_model_id: '${ENV:'}"},
    # Slurm
    {"launch": "{slurm: {gres: a, gpus_per_node: 2, setup: ['#SBATCH --x'], time: abc, mem: 64GB,"
     " partition: $P, qos: ''}}"},
    {"launch": "{slurm: {time: '0', partition: \"a\\n\", options: {time: 1, tim: 1, m: 1, mail: 1, --x: 1,"
     " hold: false, comment: ''}}}"},
    {"launch": "{slurm: {nodes: 2, comment: a, prepare: {gres: a, nodes: 1}}}"},
]  # fmt: skip
TEXTS = {
    "empty": "",
    "list": "[]",
    "mapping": "{}",
    "syntax": "model: [1\nseed: 2\n",
    "tab": "model:\n\ta: 1\n",
    "colon": "model: a: b\n",
    "control character": "a: 1\nb: \x07\n",
    "depth": "[" * 70 + "]" * 70,
    "alias": "model: &a [*a]\n",
    "tag": "seed: !!int abc\nfixes: !!set {a}\nhardware: !!python/name:a [1]\n",
    "keys": "[1]: 2\n'': 1\nseed: 1\nseed: 2\nmodel: {<<: 3}\n",
    "values": 'python: "a\\0b"\nseed: ' + "9" * 30 + "\n",
    "extends type": "extends: 3\n",
    "extends absent": "extends: llama3_8b_ful\n",
    "extends absent too": "extends: nowhere\n",
    "extends cycle": "extends: r.yaml\n",
}
OVERRIDES = [
    "seed",
    "extends=a",
    "seed=[1",
    "data.train[3].path=x",
    "model[0]=1",
    "data.train.path=x",
    "seed=\ud800",
]
HOOKS = {
    "syntax": "x = 1\ndef f(row:\n",
    "bytes": "x = '\0'\n",
    "none": "",
    "misnomer": "def format_rows(row): pass\n",
    "arguments": "def format_row(): pass\n",
    "coroutine": "async def format_row(row): pass\n",
    "of another task": "def make_datasets(): pass\n",
    "no class": "def Trainer(): pass\n",
    "no base class": "class Trainer: pass\n",
    "owned method": "class Trainer(B):\n    def get_train_dataloader(self): pass\n",
    "loss of a Trainer": "class Trainer(B):\n    def compute_loss(self, model, inputs): pass\n",
}


REWARDS = {
    "syntax": "x = 1\ndef f(x:\n",
    "none": "def g(**columns): pass\n",
    "coroutine": "async def f(**columns): pass\n",
    "positional": "def f(x, /, **columns): pass\n",
    "columns": "\ndef f(completions): pass\n",
}


def attempt(call: object, *arguments: object) -> list[Problem]:
    try:
        return list(call(*arguments) or ())  # type: ignore[operator]
    except RecipeError as error:
        return error.problems


def cases(folder: Path) -> dict[str, list[Problem]]:
    """Name of a case -> its problems."""
    file = folder / "r.yaml"

    def load(text: str, *overrides: str) -> list[Problem]:
        file.write_text(text, encoding="utf-8")
        return attempt(lambda: load_recipe(file, overrides).of_jobs)  # what `submit` refuses, else none

    found = {}
    for parts in RECIPES:
        text = "".join(f"{key}: {value}\n" for key, value in {**BASE, **parts}.items())
        name = "; ".join(f"{key}: {value}" for key, value in parts.items())
        found[name.replace(TOKEN, "TOKEN").replace("\n", "\\n")] = load(text)
    found |= {f"text: {name}": load(text) for name, text in TEXTS.items()}
    good = "".join(f"{key}: {value}\n" for key, value in BASE.items())
    found |= {f"--set {override}": load(good, override) for override in OVERRIDES}
    file.write_text(good + "runtime: {mirror: 's3://a/b'}\n")
    found["sweep of one mirror"] = attempt(load_recipe, file, [], ["seed=1"])
    file.write_bytes(b"\xff\xfe")
    found["not UTF-8"] = attempt(load_recipe, file)
    found["folder"] = attempt(load_recipe, folder)
    found["absent"] = attempt(load_recipe, folder / "nowhere.yaml")
    found["misspelt"] = attempt(load_recipe, folder / "rr.yaml")
    for number in range(34):
        (folder / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    (folder / "34.yaml").write_text(good)
    found["extends depth"] = attempt(load_recipe, folder / "0.yaml")
    hooks = folder / "hooks.py"
    for name, text in HOOKS.items():
        hooks.write_text(text, encoding="utf-8")
        found[f"hooks: {name}"] = attempt(read_hooks, hooks, task_named("causal-lm"))
    rewards = folder / "rewards.py"
    for name, text in REWARDS.items():
        rewards.write_text(text, encoding="utf-8")
        found[f"rewards: {name}"] = attempt(check_reward_files, [RewardFunction(function=f"{rewards}:f")])
    absent = [RewardFunction(function=f"{folder}/nowhere.py:f")]
    found["rewards: absent"] = attempt(check_reward_files, absent)
    hooks.write_text("def make_model(config): return None", encoding="utf-8")
    found["hooks: some of those needed"] = attempt(read_hooks, hooks, task_named("own"))
    hooks.write_bytes(b"\xff")
    found["hooks: not UTF-8"] = attempt(read_hooks, hooks, task_named("causal-lm"))
    found["hooks: folder"] = attempt(read_hooks, folder, task_named("causal-lm"))
    found["hooks: absent"] = attempt(read_hooks, folder / "nowhere.py", task_named("causal-lm"))
    return found


def named_values(text: str) -> list[str]:
    """What a sentence names, sorted: it may name it in any order."""
    found = []
    for match in VALUES.findall(text.replace("e.g.", "")):
        found += [match[1:-1]] if match[0] in "\"'`" else match.split(", ")
    return sorted(found)


def asserted(problem: Problem) -> str:
    """One line: code, file:line, path, values."""
    place = f"{problem.file or '-'}:{problem.line}" if problem.line is not None else problem.file or "-"
    values = named_values(problem.message) + named_values(problem.hint or "")
    return f"  {problem.code}  {place}  {problem.path or '-'}  {json.dumps(sorted(values))}"


def without_folder(problem: Problem, folder: Path) -> Problem:
    """The same for every folder in which the cases are."""

    def cut(text: str | None) -> str | None:
        return text and text.replace(f"{folder}/", "").replace(str(folder), ".")

    texts = {name: cut(getattr(problem, name)) for name in ("message", "file", "path", "hint")}
    return replace(problem, **texts)


def blocks_of(found: dict[str, list[Problem]], line_of: Callable[[Problem], str]) -> str:
    """Each case with a line for each of its problems, in ASCII."""
    blocks = ["\n".join([name, *map(line_of, problems)]) for name, problems in found.items()]
    return "\n\n".join(blocks).encode("ascii", "backslashreplace").decode() + "\n"


def sentences(found: dict[str, list[Problem]]) -> str:
    return blocks_of(found, lambda problem: f"  {problem.code}: {problem}")


def difference(golden: str, found: dict[str, list[Problem]]) -> str:
    """What differs from the golden file, with the sentences of the cases in which it does; or nothing."""
    now = blocks_of(found, asserted)
    if now == golden:
        return ""
    lines = difflib.unified_diff(golden.splitlines(), now.splitlines(), "golden", "now", lineterm="", n=1)
    known = set(golden.rstrip("\n").split("\n\n"))
    changed = {
        name: problems
        for name, problems in found.items()
        if blocks_of({name: problems}, asserted).rstrip("\n") not in known
    }
    return "\n".join([*lines, "", "the sentences now:", sentences(changed)])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Problem]], set[tuple[str, int]]]:
    """Problems of each case, and (module, line) of each call that constructed a problem."""
    folder = tmp_path_factory.mktemp("messages")
    calls: set[tuple[str, int]] = set()

    def recorded(build: object) -> object:
        def wrapper(*arguments: object, **named: object) -> object:
            caller = sys._getframe(1)
            calls.add((caller.f_globals["__name__"], caller.f_lineno))
            return build(*arguments, **named)  # type: ignore[operator]

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name in BUILDERS:
                build = vars(module).get(name)
                # the schema's `_problem` and the reader's method are no mere constructors
                if callable(build) and (name == "Problem" or build.__code__.co_argcount >= 3):
                    patch.setattr(module, name, recorded(build))
        found = {
            name: [without_folder(problem, folder) for problem in problems]
            for name, problems in cases(folder).items()
        }
    return found, calls


def test_every_problem_is_as_recorded(seen):
    if os.environ.get(UPDATE):
        PROBLEMS.write_text(blocks_of(seen[0], asserted), encoding="utf-8")
        SENTENCES.write_text(NOT_COMPARED + sentences(seen[0]), encoding="utf-8")
    if shown := difference(PROBLEMS.read_text("utf-8"), seen[0]):
        pytest.fail(f"{shown}\nif that is meant: {HOW}", pytrace=False)


PROBLEM = Problem(
    "wrong-choice",
    'is "fp32" (string), expected one of auto, float32, float16',
    "r.yaml",
    3,
    "model.dtype",
    "did you mean `float32`? transformers 5.23.0 has 2",
)


def test_a_reworded_sentence_is_no_difference():
    reworded = replace(
        PROBLEM,
        message='expects auto, float32, float16 and not "fp32"',
        hint="there are 2 in transformers 5.23.0; perhaps float32",
    )
    assert difference(blocks_of({"case": [PROBLEM]}, asserted), {"case": [reworded]}) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"code": "wrong-value"},
        {"file": "base.yaml"},
        {"line": 4},
        {"line": None},
        {"path": "model.torch_dtype"},
        {"message": 'is "fp16" (string), expected one of auto, float32, float16'},
        {"message": 'is "fp32" (string), expected one of auto, float32, bfloat16'},
        {"hint": "did you mean `float16`? transformers 5.23.0 has 2"},
        {"hint": "did you mean `float32`? transformers 5.24.0 has 2"},
        {"hint": "did you mean `float32`? transformers 5.23.0 has 3"},
        {"hint": None},
    ],
    ids=lambda changed: ",".join(changed),
)
def test_what_a_problem_names_is_compared(changed):
    golden = blocks_of({"other": [PROBLEM], "case": [PROBLEM]}, asserted)
    problem = replace(PROBLEM, **changed)
    shown = difference(golden, {"other": [PROBLEM], "case": [problem]})
    assert f"{problem.code}: {problem}" in shown
    assert shown.count("case") == 2  # in the diff, and above its sentence
    assert "other" not in shown.partition("the sentences now")[2]


def test_a_problem_more_or_less_is_a_difference():
    golden = blocks_of({"case": [PROBLEM]}, asserted)
    for found in ({"case": []}, {"case": [PROBLEM, PROBLEM]}, {}, {"case": [PROBLEM], "new": [PROBLEM]}):
        assert difference(golden, found) != ""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("keep one of the two, or remove it", []),
        ("expected one of none, all, lora-only", ["all", "lora-only", "none"]),
        ("1-12:00:00, 64GB or UTF-8: 3.", ["1-12:00:00", "3", "64GB", "UTF-8"]),
        ("a list, with one entry: begin it with `- `", ["- "]),
        ("is -1, expected at least 1e-4", ["-1", "1e-4"]),
        ("a key of `task: dpo`, e.g. data.max_length", ["data.max_length", "task: dpo"]),
        ("set s3://bucket/a.jsonl or ${ENV:NAME} (--output-dir)",
         ["${ENV:NAME}", "--output-dir", "s3://bucket/a.jsonl"]),
        ("a setting of CoSENTLoss and AnglELoss", ["AnglELoss", "CoSENTLoss"]),
        ("is 'abc', not all of a node's memory", ["abc"]),
        ('is "a \\" 3" (string)', ['a \\" 3']),
    ],
)  # fmt: skip
def test_values_are_what_a_message_names(text, values):
    assert named_values(text) == values


def test_every_case_has_problems(seen):
    assert [name for name, problems in seen[0].items() if not problems] == []


def test_every_problem_has_a_case(seen):
    """A new rule needs a recipe above that triggers it."""
    missing = []
    for module in MODULES:
        for node in ast.walk(ast.parse(Path(module.__file__).read_text("utf-8"))):
            builds = isinstance(node, ast.Call) and getattr(node.func, "id", "") in BUILDERS
            if builds and len(node.args) + len(node.keywords) >= 3:
                lines = range(node.lineno, node.end_lineno + 1)
                if not any((module.__name__, line) in seen[1] for line in lines):
                    missing.append(f"{module.__name__}:{node.lineno}")
    assert missing == []
