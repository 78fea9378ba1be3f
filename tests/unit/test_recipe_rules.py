"""Rules between the keys of a recipe; tests/golden/messages.txt has the messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.errors import Problem, RecipeError
from launcher.recipe.data_paths import is_glob, is_hub_id, is_loaded_hub_id, is_url
from launcher.recipe.loading import LoadedRecipe, load_recipe
from launcher.tasks import TASKS

NAMES = tuple(task.name for task in TASKS)
FORMATS = {
    "token-classification": ["tokens"],
    "causal-lm": ["text", "instruction", "prompt-completion", "chat"],
    "seq2seq-lm": ["prompt-completion", "instruction"],
    "sequence-classification": ["classification"],
    "image-classification": ["image"],
    "image-text-to-text": ["image-chat", "image-prompt"],
    "dpo": ["preference"],
    "reward": ["preference"],
    "kto": ["unpaired-preference", "unpaired-instruction", "unpaired-chat"],
    "grpo": ["prompt"],
    "embedding": ["positive-pair", "scored-pair"],
    "reranker": ["relevance", "ranking", "positive-pair"],
}


CLASSES = {"task": "sequence-classification"}


def load(folder: Path, *, task: str = "causal-lm", source: str = "path: a.jsonl", data: str = "",
         model: str = "", more: str = "") -> LoadedRecipe:  # fmt: skip
    file = folder / "r.yaml"
    lines = [f"task: {task}", f"model: {{name_or_path: m{model and ', ' + model}}}"]
    lines.append(f"data: {{train: [{{{source}}}]{data and ', ' + data}}}")
    file.write_text("\n".join(lines) + f"\n{more}\n", encoding="utf-8")
    return load_recipe(file)


def refused(folder: Path, **parts: str) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load(folder, **parts)
    assert all(problem.file == f"{folder}/r.yaml" and problem.line for problem in caught.value.problems)
    return caught.value.problems


def problems(folder: Path, **parts: str) -> list[tuple[str, str | None]]:
    """(code, path) of each; the messages are in tests/golden/messages.txt."""
    return [(problem.code, problem.path) for problem in refused(folder, **parts)]


def test_every_task_but_that_of_hooks_reads_rows() -> None:
    assert set(FORMATS) == {task.name for task in TASKS if not task.made_by_hooks}


@pytest.mark.parametrize("task", FORMATS)
def test_each_task_reads_its_formats_and_no_others(tmp_path, task):
    for form in ("text", "instruction", "prompt-completion", "chat", "preference", "classification", "image"):
        source = f"path: a.jsonl, format: {form}"
        more = "reward: [{function: numeric_answer}]" if task == "grpo" else ""
        if form in FORMATS[task]:
            assert load(tmp_path, task=task, source=source).recipe.data.train[0].format == form
        else:
            (only,) = refused(tmp_path, task=task, source=source, more=more)
            assert (only.code, only.path) == ("conflict", "data.train[0].format")
            assert FORMATS[task][0] in only.message


def test_everything_a_recipe_of_the_new_keys_can_say(tmp_path):
    (tmp_path / "hooks.py").write_text("def callbacks(): return []\n", encoding="utf-8")
    loaded = load(
        tmp_path,
        source="path: 'data/**/*.jsonl', format: text, weight: 2, columns: {text: content}",
        model="add_tokens: ['<a>', '<b>']",
        data="eval: [{path: org/name, split: test, name: en, revision: main}], metrics: [perplexity],"
        " packing: true, overlong: split, loss_on: all, fim: {rate: 0.5, spm_rate: 0.5},"
        " max_truncated: 0.5",
        more="early_stopping: {patience: 2}\npython: hooks.py\n",
    )
    recipe = loaded.recipe
    assert recipe.data.train[0].path == f"{tmp_path}/data/**/*.jsonl"
    assert recipe.data.eval[0].path == "org/name"
    assert recipe.data.fim.rate == 0.5
    assert recipe.python == f"{tmp_path}/hooks.py"
    assert (recipe.early_stopping.patience, recipe.early_stopping.threshold) == (2, 0.0)
    assert recipe.model.add_tokens == ["<a>", "<b>"]


@pytest.mark.parametrize(
    ("task", "alternative"),
    [
        ("PPO", "GRPOTrainer"),
        ("rloo", "RLOOTrainer"),
        ("orpo", "trl.experimental"),
    ],
)
def test_unsupported_tasks_are_refused_with_an_alternative(tmp_path, task, alternative):
    (only,) = refused(tmp_path, task=task)
    assert (only.code, only.path) == ("unsupported", "task")
    assert alternative in only.hint


def test_the_alternatives_name_trainers_that_trl_has():
    trl = pytest.importorskip("trl")
    for name in ("GRPOTrainer", "RLOOTrainer", "DPOTrainer"):
        assert hasattr(trl, name)


@pytest.mark.parametrize(
    ("task", "meant"),
    [("sft", "causal-lm"), ("clm", "causal-lm"), ("lm", "causal-lm"), ("seq2seq", "seq2seq-lm"),
     ("text-classification", "sequence-classification"), ("vit", "image-classification"),
     ("causal_lm", "causal-lm"), ("preference", "dpo")],
)  # fmt: skip
def test_other_names_of_a_task(tmp_path, task, meant):
    (only,) = refused(tmp_path, task=task)
    assert (only.code, only.path) == ("wrong-choice", "task")
    assert meant in only.hint
    assert all(name in only.message for name in NAMES)


@pytest.mark.parametrize(
    ("parts", "code", "path"),
    [
        ({"task": "dpo", "data": "packing: true"}, "conflict", "data.packing"),
        ({"task": "seq2seq-lm", "data": "padding_free: true"}, "conflict", "data.padding_free"),
        ({"task": "seq2seq-lm", "data": "fim: {rate: 0.5}"}, "conflict", "data.fim"),
        ({"task": "dpo", "data": "overlong: drop"}, "conflict", "data.overlong"),
        ({"data": "eval: [{path: b, weight: 2}]"}, "conflict", "data.eval[0].weight"),
        ({"task": "dpo", "data": "loss_on: all"}, "conflict", "data.loss_on"),
        ({"task": "dpo", "data": "streaming: true"}, "conflict", "data.streaming"),
        ({"task": "seq2seq-lm", "data": "overlong: split"}, "conflict", "data.overlong"),
        ({"source": "path: a, format: chat", "data": "overlong: split"}, "conflict", "data.overlong"),
        ({"source": "path: a, format: chat", "data": "fim: {rate: 1}"}, "conflict", "data.fim"),
        ({"source": "path: a, format: text", "data": "loss_on: completion"}, "conflict", "data.loss_on"),
        ({"data": "packing: true, padding_free: true"}, "conflict", "data.padding_free"),
        ({"data": "metrics: [perplexity]"}, "conflict", "data.metrics"),
        (
            {
                "data": "eval: [{path: b}], metrics: [accuracy]",
                "more": "trainer: {prediction_loss_only: true}",
            },
            "conflict",
            "trainer.prediction_loss_only",
        ),
        (
            {"data": "eval: {split: 0.1}, metrics: 8", "more": "trainer: {metric_for_best_model: accuracy}"},
            "wrong-type",
            "data.metrics",
        ),
        ({"data": "eval: {split: 0.1}, metrics: [perplexty]"}, "wrong-choice", "data.metrics[0]"),
        ({"data": "eval: {split: 0.1}, metrics: [bleu]"}, "wrong-choice", "data.metrics[0]"),
        ({"data": "eval: {split: 0.1}, metrics: [zzz]"}, "wrong-choice", "data.metrics[0]"),
        (
            {"task": "dpo", "data": "eval: {split: 0.1}, metrics: [accuracy]"},
            "wrong-choice",
            "data.metrics[0]",
        ),
        ({"data": "problem_type: regression"}, "conflict", "data.problem_type"),
        (
            {"task": "token-classification", "data": "problem_type: regression"},
            "conflict",
            "data.problem_type",
        ),
        ({**CLASSES, "data": "problem_type: ordinal"}, "wrong-choice", "data.problem_type"),
        ({**CLASSES, "data": "eval: {split: 0.1}, metrics: [mse]"}, "wrong-choice", "data.metrics[0]"),
        (
            {**CLASSES, "data": "problem_type: regression, eval: {split: 0.1}, metrics: [mse, f1]"},
            "wrong-choice",
            "data.metrics[1]",
        ),
        (
            {
                **CLASSES,
                "data": "problem_type: multi_label_classification, eval: {split: 0.1}, metrics: [r2]",
            },
            "wrong-choice",
            "data.metrics[0]",
        ),
        (
            {
                **CLASSES,
                "data": "problem_type: regression",
                "more": "trainer: {label_smoothing_factor: 0.1}",
            },
            "conflict",
            "trainer.label_smoothing_factor",
        ),
        ({"data": "eval: {split: 0.1, metrics: [accuracy]}"}, "unknown-key", "data.eval.metrics"),
        ({"data": "eval: [{path: a.jsonl, metrics: [accuracy]}]"}, "unknown-key", "data.eval[0].metrics"),
        ({"source": "path: a.jsonl, weight: 0"}, "wrong-value", "data.train[0].weight"),
        ({"source": "path: a.jsonl, weight: .inf"}, "wrong-type", "data.train[0].weight"),
        ({"source": "path: a.jsonl, split: test"}, "conflict", "data.train[0].split"),
        ({"source": "path: folder/*.jsonl, revision: main"}, "conflict", "data.train[0].revision"),
        ({"source": "path: org/rows, header: false"}, "conflict", "data.train[0].header"),
        ({"source": "path: 'https://huggingface.co/datasets/a/b'"}, "unsupported", "data.train[0].path"),
        ({"source": "path: 's3:a/b.jsonl'"}, "unsupported", "data.train[0].path"),
        ({"source": "path: 's3://a/b.jsonl', split: test"}, "conflict", "data.train[0].split"),
        ({"more": "runtime: {mirror: runs}"}, "wrong-value", "runtime.mirror"),
        ({"more": "runtime: {mirror: 'http://a/b'}"}, "unsupported", "runtime.mirror"),
        ({"more": "runtime: {mirror: 'memory://a'}"}, "unsupported", "runtime.mirror"),
        ({"more": "runtime: {mirror: 's3://a/{step}'}"}, "wrong-value", "runtime.mirror"),
        ({"more": "runtime: {mirror: 's3://id:swordfish@a/b'}"}, "secret-in-recipe", "runtime.mirror"),
        (
            {"more": "runtime: {mirror: '${ENV:NOT_SET_:s3://id:swordfish@a/b}'}"},
            "secret-in-recipe",
            "runtime.mirror",
        ),
        ({"source": "path: ''"}, "wrong-value", "data.train[0].path"),
        ({"source": "path: a, columns: {texts: b}"}, "unknown-key", "data.train[0].columns.texts"),
        (
            {"source": "path: a, format: text, columns: {completion: b}"},
            "unknown-key",
            "data.train[0].columns.completion",
        ),
        ({"data": "streaming: true"}, "conflict", "data.streaming"),
        ({"data": "streaming: true", "more": "trainer: {num_train_epochs: 1}"}, "conflict", "data.streaming"),
        (
            {"data": "streaming: true, eval: {split: 0.1}", "more": "trainer: {max_steps: 5}"},
            "conflict",
            "data.eval",
        ),
        (
            {
                "data": "streaming: true, eval: [{path: b.jsonl}]",
                "more": "trainer: {max_steps: 5, eval_strategy: epoch}",
            },
            "conflict",
            "trainer.eval_strategy",
        ),
        (
            {
                "data": "streaming: true, eval: [{path: b.jsonl}]",
                "more": "trainer: {max_steps: 5, save_strategy: epoch}",
            },
            "conflict",
            "trainer.save_strategy",
        ),
        (
            {
                "data": "streaming: true, eval: [{path: b.jsonl}]",
                "more": "trainer: {max_steps: 5, logging_strategy: epoch}",
            },
            "conflict",
            "trainer.logging_strategy",
        ),
        (
            {"task": "image-classification", "more": "trainer: {remove_unused_columns: true}"},
            "conflict",
            "trainer.remove_unused_columns",
        ),
        (
            {"more": "trainer: {include_num_input_tokens_seen: all}"},
            "owned-key",
            "trainer.include_num_input_tokens_seen",
        ),
        ({"more": "early_stopping: {patience: 1}"}, "conflict", "early_stopping"),
        ({"more": "trainer: {push_to_hub: true}"}, "conflict", "trainer.push_to_hub"),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\ntrainer: {load_best_model_at_end: false}",
            },
            "conflict",
            "trainer.load_best_model_at_end",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\ntrainer: {eval_strategy: no}",
            },
            "conflict",
            "trainer.eval_strategy",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\ntrainer: {save_strategy: steps}",
            },
            "conflict",
            "early_stopping",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\n"
                "trainer: {eval_strategy: steps, eval_steps: 4, save_steps: 6}",
            },
            "conflict",
            "early_stopping",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\n"
                "trainer: {eval_strategy: steps, eval_steps: 0.1, save_steps: 500}",
            },
            "conflict",
            "early_stopping",
        ),
        (
            {"data": "eval: {split: 0.1}", "more": "early_stopping: {patience: 0}"},
            "wrong-value",
            "early_stopping.patience",
        ),
        ({"model": "add_tokens: [a, a]"}, "wrong-value", "model.add_tokens[1]"),
        ({"model": "add_tokens: ['']"}, "wrong-value", "model.add_tokens[0]"),
        ({"model": "gguf_file: a.gguf", "task": "seq2seq-lm"}, "conflict", "model.gguf_file"),
        ({"task": "image-classification", "data": "max_length: 64"}, "conflict", "data.max_length"),
        ({"task": "image-classification", "model": "tokenizer: a"}, "conflict", "model.tokenizer"),
        ({"data": "fim: {rate: 2}"}, "wrong-value", "data.fim.rate"),
        ({"data": "packng: true"}, "unknown-key", "data.packng"),
        (
            {"task": "dpo", "more": "trainer: {loss_type: [sigmoid, ipo], loss_weights: [1.0]}"},
            "conflict",
            "trainer.loss_weights",
        ),
        ({"task": "dpo", "more": "trainer: {loss_type: exo_pair}"}, "conflict", "trainer.loss_type"),
        (
            {"task": "dpo", "more": "trainer: {loss_type: apo_zero, f_divergence_type: forward_kl}"},
            "conflict",
            "trainer.f_divergence_type",
        ),
        (
            {"task": "dpo", "more": "trainer: {loss_type: robust, label_smoothing: 0.5}"},
            "conflict",
            "trainer.label_smoothing",
        ),
        (
            {"task": "dpo", "more": "trainer: {loss_type: sft, precompute_ref_log_probs: true}"},
            "conflict",
            "trainer.precompute_ref_log_probs",
        ),
        (
            {"task": "kto", "more": "trainer: {per_device_train_batch_size: 1}"},
            "conflict",
            "trainer.per_device_train_batch_size",
        ),
        (
            {"task": "kto", "more": "trainer: {per_device_eval_batch_size: 1}"},
            "conflict",
            "trainer.per_device_eval_batch_size",
        ),
        (
            {"task": "kto", "more": "trainer: {precompute_ref_log_probs: true}"},
            "conflict",
            "trainer.precompute_ref_log_probs",
        ),
        (
            {"task": "kto", "more": "trainer: {label_smoothing_factor: 0.1}"},
            "conflict",
            "trainer.label_smoothing_factor",
        ),
        ({"task": "kto", "data": "overlong: drop"}, "conflict", "data.overlong"),
        (
            {"task": "dpo", "more": "trainer: {loss_type: aot, use_weighting: true}"},
            "conflict",
            "trainer.use_weighting",
        ),
        (
            {"task": "dpo", "more": "trainer: {label_smoothing_factor: 0.1}"},
            "conflict",
            "trainer.label_smoothing_factor",
        ),
        (
            {"task": "reward", "more": "trainer: {label_smoothing_factor: 0.1}"},
            "conflict",
            "trainer.label_smoothing_factor",
        ),
    ],
)
def test_rule(tmp_path, parts, code, path):
    assert problems(tmp_path, **parts) == [(code, path)]


@pytest.mark.parametrize(
    ("trainer", "code"),
    [
        ("num_iterations: 0", "wrong-value"),
        ("steps_per_generation: 0", "wrong-value"),
        ("epsilon: -1", "wrong-value"),
        ("delta: 0", "wrong-value"),
        ("top_entropy_quantile: 2", "wrong-value"),
        ("loss_type: foo", "wrong-choice"),
        ("scale_rewards: foo", "wrong-choice"),
        ("importance_sampling_level: foo", "wrong-choice"),
        ("multi_objective_aggregation: foo", "wrong-choice"),
    ],
)
def test_what_grpos_trainer_would_find_in_its_first_step(tmp_path, trainer, code):
    more = f"reward: [{{function: numeric_answer}}]\ntrainer: {{{trainer}}}"
    assert problems(tmp_path, task="grpo", more=more) == [(code, f"trainer.{trainer.split(':')[0]}")]


def test_sampling_is_said_in_one_place(tmp_path):
    more = "reward: [{function: numeric_answer}]\ntrainer: {generation_kwargs: {top_k: 3, bad_words_ids: []}}"
    assert problems(tmp_path, task="grpo", more=more) == [("conflict", "trainer.generation_kwargs.top_k")]


@pytest.mark.parametrize("option", ["vllm_tensor_parallel_size: 0", "vllm_gpu_memory_utilization: 0"])
def test_vllm_needs_a_share_and_a_rank(tmp_path, option):
    more = "reward: [{function: numeric_answer}]\ngeneration: {backend: vllm-colocate}\n"
    more += f"trainer: {{{option}}}"
    assert problems(tmp_path, task="grpo", more=more) == [("wrong-value", f"trainer.{option.split(':')[0]}")]


@pytest.mark.parametrize(
    ("reward", "code", "path"),
    [
        ("{function: 'rewards.py:'}", "wrong-value", "reward[0].function"),
        ("{function: exact_match}, {function: exact_match, weight: 2}", "conflict", "reward[1].function"),
        ("{function: exact_match, weight: 1.0e+300}", "wrong-value", "reward[0].weight"),
        ("{function: exact_match, time_limit: 1.0e+300}", "wrong-value", "reward[0].time_limit"),
        ("{function: length, arguments: {tokens: .inf}}", "wrong-value", "reward[0].arguments.tokens"),
        ("{function: format, arguments: {tags: ['']}}", "wrong-value", "reward[0].arguments.tags"),
    ],
)
def test_rewards_that_cannot_work(tmp_path, reward, code, path):
    assert problems(tmp_path, task="grpo", more=f"reward: [{reward}]") == [(code, path)]


@pytest.mark.parametrize(
    "parts",
    [
        {"data": "packing: false, padding_free: false", "task": "dpo"},
        {"data": "overlong: truncate", "task": "dpo"},
        {"data": "overlong: drop", "task": "seq2seq-lm"},
        {"source": "path: a.jsonl, weight: 0.5", "data": "eval: [{path: b.jsonl, weight: 1.0}]"},
        {"data": "eval: {split: 0.1}, metrics: [rougeL, bleu]", "task": "seq2seq-lm"},
        {"data": "eval: {split: 0.1}", "more": "early_stopping: {patience: 1}\n"
         "trainer: {eval_strategy: steps, eval_steps: 4}"},
        {"data": "streaming: true, eval: [{path: b.jsonl}]", "more": "trainer: {max_steps: 5}"},
        {"data": "streaming: true, eval: [{path: b.jsonl}]", "more": "trainer: {max_steps: 5}\n"
         "early_stopping: {patience: 1}"},
        {"data": "eval: {split: 0.1}", "more": "trainer: {eval_strategy: steps, save_steps: 250,"
         " load_best_model_at_end: true}"},
        {"data": "eval: {split: 0.1}", "more": "trainer: {eval_strategy: steps, eval_steps: 30,"
         " load_best_model_at_end: true}"},
        {"data": "eval: {split: 0.1}", "more": "trainer: {eval_strategy: steps, eval_steps: 0.1,"
         " save_steps: 0.3, load_best_model_at_end: true}"},
        {"task": "image-classification", "more": "trainer: {remove_unused_columns: false}"},
        {"model": "quantization: int8", "task": "image-classification"},
        {"model": "quantization: nf4", "task": "seq2seq-lm", "more": "adapter: {r: 8}"},
        {"task": "dpo", "model": "gguf_file: a.gguf"},
        {"task": "dpo", "more": "trainer: {loss_type: exo_pair, label_smoothing: 0.001, beta: 0.2}"},
        {"task": "reward", "more": "trainer: {label_smoothing_factor: 0.0}"},
        {"task": "dpo", "more": "trainer: {loss_type: [sft, sigmoid], precompute_ref_log_probs: true}"},
        {
            "task": "kto",
            "more": "trainer: {loss_type: apo_zero_unpaired, per_device_train_batch_size: 1, "
            "precompute_ref_log_probs: true}",
        },
        {
            "task": "kto",
            "more": "trainer: {train_sampling_strategy: sequential, precompute_ref_log_probs: true}",
        },
        {"data": "fim: null, loss_on: null, metrics: []", "more": "early_stopping: null"},
    ],
)  # fmt: skip
def test_what_the_rules_accept(tmp_path, parts):
    load(tmp_path, **parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True), ("HuggingFaceH4/ultra_feedback-2.0", True), ("./org/name", False),
        ("/org/name", False), ("org/name/inner", False), ("name", False), ("here/name", False),
        ("data/train.jsonl", False), ("data/train.csv.gz", False), ("data/*", False), ("~/name", False),
        ("package:a/b", False), ("org/na me", False), ("org/-name", False), ("org/a..b", False),
        ("org/" + "n" * 97, False), ("", False), ("a\0/b", False),
    ],
)  # fmt: skip
def test_what_is_a_hub_dataset(tmp_path, text, expected):
    (tmp_path / "here").mkdir()
    assert is_hub_id(text, tmp_path) is expected


def test_after_loading_every_local_path_is_absolute(tmp_path, monkeypatch):
    """So that worker and recipe agree on what is of the hub, wherever the worker runs."""
    (tmp_path / "here").mkdir()
    paths = ("org/name", "here/name", "./org/name", "/org/name", "~/name", "data/*", "a.csv", "package:a/b")
    monkeypatch.chdir("/")
    for path in paths:
        loaded = load(tmp_path, source=f"path: '{path}'").recipe.data.train[0].path
        assert is_loaded_hub_id(loaded) is is_hub_id(path, tmp_path) is (path == "org/name"), path


def test_patterns_and_urls():
    assert [is_glob(text) for text in ("a/*.jsonl", "a?.csv", "[ab].txt", "package:a/*", "a.csv")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert [is_url(text) for text in ("https://a/b", "hf://a/b", "hub:a/b", "package:a", "a/b.csv")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("early_stopping_patience: 3", "early_stopping.patience"),
        ("sample_packing: true", "data.packing"),
        ("sequence_len: 8", "data.max_length"),
        ("cutoff_len: 8", "data.max_length"),
        ("val_set_size: 0.1", "data.eval"),
        ("num_epochs: 1", "trainer.num_train_epochs"),
        ("datasets: []", "data.train"),
        ("train_on_inputs: false", "data.loss_on"),
        ("output_dir: out", "run --output-dir"),
        ("stage: sft", "sharding.zero_stage"),
        ("rl: dpo", "task: dpo"),
        ("bf16: true", "precision: bf16"),
        ("trainer: {early_stopping_patience: 3}", "early_stopping.patience"),
        ("trainer: {max_seq_length: 3}", "data.max_length"),
        ("trainer: {packing: true}", "data.packing"),
        ("trainer: {metric_for_best_modell: a}", "metric_for_best_model"),
        ("trainer: {beta: 0.1}", "task: dpo"),
        ("trainer: {predict_with_generate: true}", "task: seq2seq-lm"),
    ],
)
def test_names_of_other_tools(tmp_path, line, key):
    (only,) = refused(tmp_path, more=line)
    assert only.code == "unknown-key"
    assert f"`{key}`" in only.hint


@pytest.mark.parametrize("key", ["max_length: 5", "sync_ref_model: true", "padding_free: true"])
def test_dpo_fields_that_are_decided_elsewhere(tmp_path, key):
    found = problems(tmp_path, task="dpo", more=f"trainer: {{{key}}}")
    assert found == [("owned-key", f"trainer.{key.partition(':')[0]}")]


def test_a_best_metric_that_nothing_measures_is_refused(tmp_path):
    text = (
        "model: {name_or_path: huggyllama/llama-7b}\n"
        "data: {train: [{path: a.jsonl}], eval: {split: 0.1}, metrics: [perplexity]}\n"
        "trainer: {max_steps: 10, metric_for_best_model: NAME}\n"
    )
    file = tmp_path / "r.yaml"
    for good in ("loss", "eval_loss", "perplexity", "eval_perplexity"):
        file.write_text(text.replace("NAME", good))
        load_recipe(file)
    file.write_text(text.replace("NAME", "eval_f9"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    (only,) = caught.value.problems
    assert (only.code, only.path, only.line) == ("conflict", "trainer.metric_for_best_model", 3)
    assert "loss, perplexity" in only.message


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        ("dpo", "eval_rewards/accuracies", "eval_accuracy"),
        ("kto", "rewards/margins", "eval_rewards/accuracies"),  # KTOTrainer of trl 1.16 reports none
        ("reward", "eval_accuracy", "eval_rewards/accuracies"),
        ("grpo", "eval_rewards/exact_match/mean", "eval_rewards/margins"),
    ],
)
def test_a_best_metric_that_trl_does_not_report_is_refused(tmp_path, task, good, bad):
    more = {"reward": [{"function": "exact_match"}]} if task == "grpo" else {}
    rows = {"train": [{"path": "a.jsonl"}], "eval": {"split": 0.1}}
    best = {"eval_strategy": "steps", "load_best_model_at_end": True}
    for name, expected in ((good, []), (bad, ["trainer.metric_for_best_model"])):
        said = {"trainer": {**best, "max_steps": 10, "metric_for_best_model": name}, "data": rows, **more}
        (tmp_path / "r.yaml").write_text(
            yaml.safe_dump({"task": task, "model": {"name_or_path": "a/b"}, **said})
        )
        try:
            load_recipe(tmp_path / "r.yaml")
            found = []
        except RecipeError as error:
            found = [problem.path for problem in error.problems]
        assert found == expected


@pytest.mark.parametrize(
    ("adapter", "code"),
    [
        ("init_lora_weights: corda", "unsupported"),
        ("init_lora_weights: eva", "unsupported"),
        ("init_lora_weights: pissa_niter_16", "unsupported"),
        ("init_lora_weights: loftq", "conflict"),
        ("init_lora_weights: loftq, loftq_config: {loftq_bits: 4}", "conflict"),
    ],
)
def test_initialisations_of_an_adapter_that_need_more_than_a_name(tmp_path, adapter, code):
    found = problems(tmp_path, more=f"adapter: {{type: lora, {adapter}}}")
    assert found == [(code, "adapter.init_lora_weights")]


@pytest.mark.parametrize(
    "init", ["pissa", "olora", "gaussian", "true", "loftq, loftq_config: {loftq_bits: 4, loftq_iter: 1}"]
)
def test_other_initialisations_are_accepted(tmp_path, init):
    load(tmp_path, more=f"adapter: {{type: lora, init_lora_weights: {init}}}")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *((name, "hardware.devices_per_node") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")),
        *((name, "hardware.devices_per_node") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK")),
        ("MASTER_ADDR", "launch.hostfile"),
        ("MASTER_PORT", "launch.hostfile"),
        ("CUDA_VISIBLE_DEVICES", "shell"),
        ("CUDA_DEVICE_ORDER", "nvidia-smi"),
        ("EFFILAUNCH_RESUME", "shell"),
        ("ACCELERATE_USE_FSDP", "`sharding`"),
        ("ACCELERATE_USE_DEEPSPEED", "`sharding`"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "`sharding`"),
        ("FSDP_VERSION", "`sharding`"),
        ("ACCELERATE_USE_CPU", "--on cpu"),
        ("ACCELERATE_MIXED_PRECISION", "`precision`"),
        ("ACCELERATE_DYNAMO_BACKEND", "trainer.torch_compile"),
        ("PARALLELISM_CONFIG_TP_SIZE", "sharding.tp_size"),
    ],
)
def test_variables_of_the_run_itself_are_refused(tmp_path, name, instead):
    (only,) = refused(tmp_path, more=f"launch: {{env: {{{name}: '1'}}}}")
    assert (only.code, only.path) == ("owned-key", f"launch.env.{name}")
    assert instead in only.hint


def test_other_variables_are_accepted(tmp_path):
    names = (
        "NCCL_DEBUG", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "HF_HOME",
        "PYTORCH_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG", "ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE",
        "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "MY_RANK",
    )  # fmt: skip
    env = dict.fromkeys(names, "1")
    assert load(tmp_path, more=f"launch: {{env: {env}}}").recipe.launch.env == env


@pytest.mark.parametrize(
    ("url", "swept", "codes"),
    [
        ("s3://a/b", "seed=1", ["wrong-value"]),
        ("s3://a/{name}", "seed=1", []),
        ("s3://a/b", "runtime.mirror=s3://a/c", []),
    ],
)
def test_the_runs_of_a_sweep_have_a_mirror_each(tmp_path, url, swept, codes):
    file = tmp_path / "r.yaml"
    file.write_text(
        f"model: {{name_or_path: m}}\ndata: {{train: [{{path: a.jsonl}}]}}\nruntime: {{mirror: '{url}'}}\n"
    )
    try:
        load_recipe(file, (), (swept,))
        found = []
    except RecipeError as error:
        found = [problem.code for problem in error.problems]
    assert found == codes
