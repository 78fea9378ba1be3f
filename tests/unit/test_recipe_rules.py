"""Rules between the keys of a recipe: what a task reads, learns and measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import RecipeError
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
    "dpo": ["preference"],
    "reward": ["preference"],
}


def load(folder: Path, *, task: str = "causal-lm", source: str = "path: a.jsonl", data: str = "",
         model: str = "", more: str = "") -> LoadedRecipe:  # fmt: skip
    file = folder / "r.yaml"
    lines = [f"task: {task}", f"model: {{name_or_path: m{model and ', ' + model}}}"]
    lines.append(f"data: {{train: [{{{source}}}]{data and ', ' + data}}}")
    file.write_text("\n".join(lines) + f"\n{more}\n", encoding="utf-8")
    return load_recipe(file)


def problems(folder: Path, **parts: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(folder, **parts)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize("task", NAMES)
def test_each_task_reads_its_formats_and_no_others(tmp_path, task):
    for form in ("text", "instruction", "prompt-completion", "chat", "preference", "classification", "image"):
        source = f"path: a.jsonl, format: {form}"
        if form in FORMATS[task]:
            assert load(tmp_path, task=task, source=source).recipe.data.train[0].format == form
        else:
            (only,) = problems(tmp_path, task=task, source=source)
            expected = f"r.yaml:3: data.train[0].format: is {form}, but task {task} reads {FORMATS[task][0]}"
            assert only.startswith(expected)
            assert f"({form} rows are for `task: " in only


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
    ("task", "hint"),
    [
        ("grpo", "trl trains it: GRPOTrainer and RLOOTrainer generate while they train"),
        ("PPO", "trl trains it: GRPOTrainer"),
        ("kto", "trl trains it with KTOTrainer"),
        ("orpo", "trl trains it under trl.experimental"),
        ("vlm", "axolotl and LLaMA-Factory train models that read images and text"),
        ("image_text_to_text", "axolotl and LLaMA-Factory"),
    ],
)
def test_tasks_of_others_are_refused_with_a_pointer(tmp_path, task, hint):
    (only,) = problems(tmp_path, task=task)
    assert only.startswith(f"r.yaml:1: task: {task} is not a task here ({hint}")


def test_the_pointers_name_trainers_that_trl_has():
    trl = pytest.importorskip("trl")
    for name in ("GRPOTrainer", "RLOOTrainer", "KTOTrainer", "DPOTrainer"):
        assert hasattr(trl, name)


@pytest.mark.parametrize(
    ("task", "meant"),
    [("sft", "causal-lm"), ("clm", "causal-lm"), ("lm", "causal-lm"), ("seq2seq", "seq2seq-lm"),
     ("text-classification", "sequence-classification"), ("vit", "image-classification"),
     ("causal_lm", "causal-lm"), ("preference", "dpo")],
)  # fmt: skip
def test_other_words_for_a_task(tmp_path, task, meant):
    (only,) = problems(tmp_path, task=task)
    expected = f'r.yaml:1: task: is "{task}" (text), expected one of {", ".join(NAMES)}'
    assert only == f"{expected} (did you mean {meant}?)"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"task": "dpo", "data": "packing: true"}, "data.packing: is only for task causal-lm"),
        (
            {"task": "seq2seq-lm", "data": "padding_free: true"},
            "data.padding_free: is only for task causal-lm",
        ),
        ({"task": "seq2seq-lm", "data": "fim: {rate: 0.5}"}, "data.fim: is only for task causal-lm"),
        ({"task": "dpo", "data": "overlong: drop"}, "data.overlong: is drop, but trl cuts preference rows"),
        ({"data": "eval: [{path: b, weight: 2}]"}, "data.eval[0].weight: is only for training rows"),
        ({"task": "dpo", "data": "loss_on: all"}, "data.loss_on: is only for task causal-lm"),
        ({"task": "dpo", "data": "streaming: true"}, "data.streaming: is only for task causal-lm"),
        ({"task": "seq2seq-lm", "data": "overlong: split"}, "data.overlong: is split, which is only for"),
        (
            {"source": "path: a, format: chat", "data": "overlong: split"},
            "data.overlong: is split, but only text rows can be split",
        ),
        (
            {"source": "path: a, format: chat", "data": "fim: {rate: 1}"},
            "data.fim: needs text rows, but those of `data.train[0]` are chat",
        ),
        (
            {"source": "path: a, format: text", "data": "loss_on: completion"},
            "data.loss_on: is completion, but the text rows of `data.train[0]` can only learn all",
        ),
        ({"data": "packing: true, padding_free: true"}, "data.padding_free: excludes `data.packing`"),
        ({"data": "metrics: [perplexity]"}, "data.metrics: needs `data.eval`"),
        (
            {
                "data": "eval: [{path: b}], metrics: [accuracy]",
                "more": "trainer: {prediction_loss_only: true}",
            },
            "trainer.prediction_loss_only: is true",
        ),
        (
            {"data": "eval: {split: 0.1}, metrics: [perplexty]"},
            'data.metrics[0]: is "perplexty" (text), expected one of perplexity, accuracy (did you',
        ),
        ({"data": "eval: {split: 0.1}, metrics: [bleu]"}, "(it is a metric of task seq2seq-lm)"),
        (
            {"data": "eval: {split: 0.1}, metrics: [zzz]"},
            "(`python:` names a file with a compute_metrics of yours)",
        ),
        (
            {"task": "dpo", "data": "eval: {split: 0.1}, metrics: [accuracy]"},
            "expected nothing: task dpo has",
        ),
        (
            {"data": "eval: {split: 0.1, metrics: [accuracy]}"},
            "data.eval.metrics: unknown key (write `data.metrics`)",
        ),
        (
            {"data": "eval: [{path: a.jsonl, metrics: [accuracy]}]"},
            "data.eval[0].metrics: unknown key (write `data.metrics`)",
        ),
        ({"source": "path: a.jsonl, weight: 0"}, "data.train[0].weight: is 0, expected more than 0"),
        (
            {"source": "path: a.jsonl, weight: .inf"},
            "data.train[0].weight: is Infinity, expected a finite number",
        ),
        ({"source": "path: a.jsonl, split: test"}, "data.train[0].split: is only for a data set of the hub"),
        ({"source": "path: 'https://huggingface.co/datasets/a/b'"}, "(write `path: a/b`)"),
        ({"source": "path: 's3://a/b.jsonl'"}, "data.train[0].path: a URL is not read (write a file, "),
        ({"source": "path: ''"}, "data.train[0].path: is empty (name a file)"),
        (
            {"source": "path: a, columns: {texts: b}"},
            "data.train[0].columns.texts: unknown field, expected one of"
            " text, instruction, output, input, prompt, completion, messages, tools (did you mean `text`?)",
        ),
        (
            {"source": "path: a, format: text, columns: {completion: b}"},
            "data.train[0].columns.completion: unknown",
        ),
        ({"data": "streaming: true"}, "data.streaming: needs `trainer.max_steps`"),
        (
            {"data": "streaming: true", "more": "trainer: {num_train_epochs: 1}"},
            "(write `max_steps:` in place of `num_train_epochs:`)",
        ),
        (
            {"data": "streaming: true, eval: {split: 0.1}", "more": "trainer: {max_steps: 5}"},
            "data.eval: cannot be cut from rows that are streamed",
        ),
        *(
            (
                {
                    "data": "streaming: true, eval: [{path: b.jsonl}]",
                    "more": f"trainer: {{max_steps: 5, {name}: epoch}}",
                },
                f"trainer.{name}: is epoch, but a stream is one epoch without end (write steps",
            )
            for name in ("eval_strategy", "save_strategy", "logging_strategy")
        ),
        (
            {"task": "image-classification", "more": "trainer: {remove_unused_columns: true}"},
            "trainer.remove_unused_columns: is true, but images are read from columns",
        ),
        (
            {"more": "trainer: {include_num_input_tokens_seen: all}"},
            "trainer.include_num_input_tokens_seen: not allowed under `trainer:`",
        ),
        ({"more": "early_stopping: {patience: 1}"}, "early_stopping: needs `data.eval`"),
        (
            {"more": "trainer: {push_to_hub: true}"},
            "trainer.push_to_hub: needs `hub_model_id`: the repository would be called `checkpoints`",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\ntrainer: {load_best_model_at_end: false}",
            },
            "trainer.load_best_model_at_end: is false, but `early_stopping` ends with the best checkpoint",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\ntrainer: {eval_strategy: no}",
            },
            "trainer.eval_strategy: is no, but `early_stopping` needs evaluations",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\ntrainer: {save_strategy: steps}",
            },
            "early_stopping: needs equal strategies, but `eval_strategy` is epoch and `save_",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\n"
                "trainer: {eval_strategy: steps, eval_steps: 4, save_steps: 6}",
            },
            "early_stopping: needs `save_steps` (6) to be a multiple of `eval_steps` (4)",
        ),
        (
            {
                "data": "eval: {split: 0.1}",
                "more": "early_stopping: {patience: 1}\n"
                "trainer: {eval_strategy: steps, eval_steps: 0.1, save_steps: 500}",
            },
            "early_stopping: needs `save_steps` (500) to be a multiple of `eval_steps` (0.1)",
        ),
        (
            {"data": "eval: {split: 0.1}", "more": "early_stopping: {patience: 0}"},
            "early_stopping.patience: is 0, expected at least 1",
        ),
        ({"model": "add_tokens: [a, a]"}, 'model.add_tokens[1]: "a" (text) is given twice'),
        ({"model": "add_tokens: ['']"}, 'model.add_tokens[0]: is "" (text), expected at least 1'),
        (
            {"model": "gguf_file: a.gguf", "task": "seq2seq-lm"},
            "model.gguf_file: is only for causal language models",
        ),
        (
            {"task": "image-classification", "data": "max_length: 64"},
            "data.max_length: means nothing for images",
        ),
        (
            {"task": "image-classification", "model": "tokenizer: a"},
            "model.tokenizer: means nothing for images",
        ),
        ({"data": "fim: {rate: 2}"}, "data.fim.rate: is 2, expected at most 1"),
        ({"data": "packng: true"}, "data.packng: unknown key (did you mean `packing`?)"),
        (
            {"task": "dpo", "more": "trainer: {loss_type: [sigmoid, ipo], loss_weights: [1.0]}"},
            "trainer.loss_weights: has 1 entries for 2 of `loss_type` (give one weight for each loss)",
        ),
        (
            {"task": "dpo", "more": "trainer: {loss_type: exo_pair}"},
            "trainer.loss_type: is exo_pair, which needs `label_smoothing`",
        ),
        (
            {"task": "dpo", "more": "trainer: {loss_type: aot, use_weighting: true}"},
            "trainer.use_weighting: cannot weigh the pairs of aot losses",
        ),
        (
            {"task": "dpo", "more": "trainer: {label_smoothing_factor: 0.1}"},
            "trainer.label_smoothing_factor: has no effect: the loss of trl's trainer does not read it",
        ),
        (
            {"task": "reward", "more": "trainer: {label_smoothing_factor: 0.1}"},
            "trainer.label_smoothing_factor: has no effect: the loss of trl's trainer does not read it",
        ),
    ],
)
def test_rule(tmp_path, parts, expected):
    (only,) = problems(tmp_path, **parts)
    assert expected in only
    assert only.startswith("r.yaml:")


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
        {"data": "fim: null, loss_on: null, metrics: []", "more": "early_stopping: null"},
    ],
)  # fmt: skip
def test_what_the_rules_let_through(tmp_path, parts):
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
def test_what_is_a_data_set_of_the_hub(tmp_path, text, expected):
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
    ("line", "hint"),
    [
        ("early_stopping_patience: 3", "write `early_stopping.patience`"),
        ("sample_packing: true", "write `data.packing`"),
        ("sequence_len: 8", "write `data.max_length`"),
        ("cutoff_len: 8", "write `data.max_length`"),
        ("val_set_size: 0.1", "write `data.eval`"),
        ("num_epochs: 1", "did you mean `trainer.num_train_epochs`?"),
        ("datasets: []", "write `data.train`"),
        ("train_on_inputs: false", "write `data.loss_on`"),
        ("output_dir: out", "`run --output-dir` decides it"),
        ("stage: sft", "write `task` for what is trained, `sharding.zero_stage` for ZeRO"),
        ("rl: dpo", "write `task: dpo`"),
        ("bf16: true", "write `precision: bf16`"),
        ("trainer: {early_stopping_patience: 3}", "write `early_stopping.patience`"),
        ("trainer: {max_seq_length: 3}", "write `data.max_length`"),
        ("trainer: {packing: true}", "write `data.packing`"),
        ("trainer: {metric_for_best_modell: a}", "did you mean `metric_for_best_model`?"),
        ("trainer: {beta: 0.1}", "it is a key of `task: dpo`"),
        ("trainer: {predict_with_generate: true}", "it is a key of `task: seq2seq-lm`"),
    ],
)
def test_spellings_of_other_tools(tmp_path, line, hint):
    (only,) = problems(tmp_path, more=line)
    assert only.endswith(f"({hint})")


@pytest.mark.parametrize("key", ["max_length: 5", "sync_ref_model: true", "padding_free: true"])
def test_dpo_fields_that_are_decided_elsewhere(tmp_path, key):
    (only,) = problems(tmp_path, task="dpo", more=f"trainer: {{{key}}}")
    assert f"trainer.{key.partition(':')[0]}: not allowed under `trainer:` (" in only


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
    with pytest.raises(RecipeError, match="what is measured is loss, perplexity") as caught:
        load_recipe(file)
    assert caught.value.problems[0].line == 3


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ("init_lora_weights: corda", "reads data before the run"),
        ("init_lora_weights: eva", "as if nothing were asked for"),
        ("init_lora_weights: loftq", "needs `loftq_config` with loftq_bits and loftq_iter"),
        ("init_lora_weights: loftq, loftq_config: {loftq_bits: 4}", "with loftq_iter"),
    ],
)
def test_beginnings_of_an_adapter_that_need_more_than_a_name(tmp_path, adapter, expected):
    (only,) = problems(tmp_path, more=f"adapter: {{type: lora, {adapter}}}")
    assert "adapter.init_lora_weights" in only
    assert expected in only


@pytest.mark.parametrize(
    "init", ["pissa", "olora", "gaussian", "true", "loftq, loftq_config: {loftq_bits: 4, loftq_iter: 1}"]
)
def test_other_beginnings_are_taken(tmp_path, init):
    load(tmp_path, more=f"adapter: {{type: lora, init_lora_weights: {init}}}")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *((name, "hardware.devices_per_node") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")),
        *((name, "hardware.devices_per_node") for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK")),
        ("MASTER_ADDR", "launch.hostfile"),
        ("MASTER_PORT", "launch.hostfile"),
        ("CUDA_VISIBLE_DEVICES", "the shell"),
        ("EFFILAUNCH_RESUME", "the shell"),
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
    (only,) = problems(tmp_path, more=f"launch: {{env: {{{name}: '1'}}}}")
    assert f"launch.env.{name}" in only
    assert instead in only


def test_other_variables_are_taken(tmp_path):
    names = (
        "NCCL_DEBUG", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "HF_HOME",
        "PYTORCH_ALLOC_CONF", "TORCH_DISTRIBUTED_DEBUG", "ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE",
        "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "MY_RANK",
    )  # fmt: skip
    env = dict.fromkeys(names, "1")
    assert load(tmp_path, more=f"launch: {{env: {env}}}").recipe.launch.env == env
