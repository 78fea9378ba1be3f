"""axolotl's YAML as keys of a recipe: each key, its defaults, its data sets, and what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from axolotl_cases import CASES, FILE, FULL, MXFP4
from every import every
from migration_tables import HANDLED

from launcher.errors import RecipeError
from launcher.importing import axolotl
from launcher.importing.axolotl import TABLES
from launcher.importing.axolotl_rows import TYPES
from launcher.importing.join import import_files
from launcher.importing.reading import Effect, Reading


def read(values: dict[str, Any], file: str = "a.yaml") -> Reading:
    return axolotl.read(yaml.safe_dump(values, sort_keys=False), file)


def dropped(reading: Reading) -> dict[str, Effect]:
    return {entry.key: entry.effect for entry in reading.dropped}


def test_every_mapped_key_has_a_case() -> None:
    assert {*TABLES} | {row[0] for row in HANDLED["axolotl"]} == set(CASES)


@every("key", CASES)
def test_a_key_is_taken(key: str) -> None:
    more, to, expected = CASES[key]
    reading = read({**FILE, **more})
    assert reading.value(to) == expected
    assert not reading.refusals
    if key in more:
        assert key in reading.seen
        assert reading.taken[to].place.file == "a.yaml"


@every("key", [*CASES, "made_up"])
def test_no_key_vanishes(key: str) -> None:
    more, *_ = CASES.get(key, ({"made_up": 1}, "", None))
    values = {**FILE, **more}
    assert set(values) <= read(values).seen


def test_every_key_of_axolotl_is_taken_or_listed() -> None:
    """Whatever the value is: none is lost, and none ends the reading."""
    for value in ("x", 3, [1], {"a": 1}, True):
        keys = list(axolotl.tool().keys)
        for at in range(0, len(keys), 15):
            some = keys[at : at + 15]
            assert set(some) <= read({**FILE, **dict.fromkeys(some, value)}).seen, value


def test_the_tables_name_keys_of_axolotl_once() -> None:
    left = [
        name for part in ("keys", "unused") for entry in axolotl.tool().left[part] for name in entry.names
    ]
    known = set(axolotl.tool().keys) | {"debug", "gc_steps", "eval_table_max_new_tokens", "flash_attn_d512"}
    assert len(left) - len(set(left)) == 0
    assert set(left) - known == set()
    taken = {*TABLES} | {row[0] for row in HANDLED["axolotl"]}
    assert not taken & {name for entry in axolotl.tool().left["keys"] for name in entry.names}


def test_what_axolotl_uses_where_the_file_is_silent() -> None:
    reading = read(FILE)
    expected = {
        "data.max_length": 512,
        "data.overlong": "split",
        "trainer.num_train_epochs": 1.0,
        "trainer.optim": "adamw_torch_fused",
        "trainer.lr_scheduler_type": "cosine",
        "trainer.warmup_steps": 0.03,
        "trainer.per_device_train_batch_size": 1,
        "trainer.gradient_accumulation_steps": 1,
        "trainer.save_total_limit": 4,
        "trainer.save_strategy": "epoch",
        "trainer.average_tokens_across_devices": False,
        "adapter.lora_dropout": 0.0,
        "precision": "auto",
    }
    assert {key: reading.value(key) for key in expected} == expected
    assert all(reading.taken[key].is_default for key in expected)
    assert "trainer.eval_strategy" not in reading.taken
    assert read({**FILE, "datasets": [{"path": "o/a", "type": "alpaca"}]}).value("data.overlong") == "drop"


def test_all_parameters_are_loaded_in_16_bits_but_with_deepspeed() -> None:
    assert read(FULL).value("precision") == "bf16"
    assert read(FULL).value("model.dtype") == "bfloat16"
    assert read({**FULL, "bf16": True}).value("model.dtype") == "bfloat16"
    sharded = read({**FULL, "bf16": True, "deepspeed": "z.json"})
    assert "model.dtype" not in sharded.taken
    assert set(sharded.names) == {"z.json"}
    assert read({**FULL, "bf16": "full"}).value("precision") == "bf16-true"
    assert read({**FULL, "bf16": False}).value("precision") == "fp32"
    assert "model.dtype" not in read({**FULL, "bf16": False}).taken


def test_lora_with_4_bits_is_not_quantised_there() -> None:
    reading = read({**FILE, "load_in_4bit": True})
    assert "model.quantization" not in reading.taken
    assert dropped(reading)["load_in_4bit"] is Effect.NONE


def test_evaluations_and_saves_that_axolotl_leaves_out() -> None:
    base = {**FILE, "val_set_size": 0.1}
    assert read(base).value("trainer.eval_strategy") == "no"
    one = read({**base, "evals_per_epoch": 1, "saves_per_epoch": 1})
    assert one.value("trainer.eval_strategy") == "no"
    assert one.value("trainer.save_strategy") == "epoch"
    assert dropped(one)["evals_per_epoch"] is Effect.NONE
    without = read({**FILE, "evals_per_epoch": 4, "early_stopping_patience": 2})
    assert not {key for key in without.taken if "eval_st" in key or "early" in key}
    assert dropped(without)["early_stopping_patience"] is Effect.NONE
    assert dropped(without)["evals_per_epoch"] is Effect.NONE


def test_a_stream_is_not_saved_by_epochs() -> None:
    reading = read({**FILE, "streaming": True, "max_steps": 9})
    assert "trainer.save_strategy" not in reading.taken


def test_early_stopping_without_evaluations_during_the_run() -> None:
    reading = read({**FILE, "val_set_size": 0.1, "early_stopping_patience": 2})
    assert "early_stopping.patience" not in reading.taken
    assert dropped(reading)["early_stopping_patience"] is Effect.NONE


def test_no_number_of_steps() -> None:
    reading = read({**FILE, "max_steps": -1, "num_epochs": 2})
    assert reading.value("trainer.num_train_epochs") == 2
    assert "trainer.max_steps" not in reading.taken


def test_pairs_have_no_keys_of_texts() -> None:
    more = {"rl": "dpo", "sample_packing": True, "pad_to_multiple_of": 8, "train_on_inputs": True}
    reading = read({**FILE, **more, "datasets": [{"path": "org/p", "type": "chat_template.default"}]})
    assert not {"data.packing", "data.loss_on", "data.pad_to_multiple_of"} & set(reading.taken)
    assert {"sample_packing", "train_on_inputs", "pad_to_multiple_of"} <= set(dropped(reading))


def test_targets_that_all_linear_does_not_have() -> None:
    linear = read({**FILE, "lora_target_modules": ["q_proj"]})
    assert linear.value("adapter.target_modules") == "all-linear"
    assert dropped(linear)["lora_target_modules"] is Effect.NONE
    head = read({**FILE, "lora_target_modules": ["q_proj", "lm_head"]})
    assert dropped(head)["lora_target_modules"] is Effect.TRAINING
    nothing = read({**FILE, "lora_target_linear": False})
    assert dropped(nothing)["adapter.target_modules"] is Effect.NEEDED
    rank = read({key: value for key, value in FILE.items() if key != "lora_r"})
    assert dropped(rank)["adapter.r"] is Effect.NEEDED


def test_an_adapter_that_goes_on_has_its_own_fields() -> None:
    reading = read({**FILE, "lora_model_dir": "old"})
    assert {key for key in reading.taken if key.startswith("adapter.")} == {"adapter.type", "adapter.path"}
    assert dropped(reading)["lora_r"] is Effect.NONE
    full = read({**FILE, "adapter": None})
    assert not any(key.startswith("adapter.") for key in full.taken)
    assert "lora_r" in dropped(full)


@every(("more", "key"), [
    ({"rl": "ppo"}, "rl"), ({"reward_model": True, "num_labels": 2}, "num_labels"),
    ({"rl": "grpo", "trl": {"reward_funcs": ["r.f"], "async_prefetch": True}}, "trl.async_prefetch"),
    ({"rl": "grpo", "trl": {"reward_funcs": ["org/model"]}}, "trl.reward_funcs"),
    ({"rl": "orpo"}, "rl"), ({"rl": "simpo"}, "rl"), ({"rl": "reinforce"}, "rl"),
    ({"process_reward_model": True}, "process_reward_model"), ({"diffusion_lm": {"x": 1}}, "diffusion_lm"),
    ({"gptq": True}, "gptq"), ({"fp8": True}, "fp8"), ({"adapter": "mixlora"}, "adapter"),
    ({"relora": True}, "relora"), ({"adapter": "qlora"}, "adapter"),
    ({"reinit_weights": True}, "reinit_weights"),
    ({"datasets": [{"path": "org/x"}]}, "datasets[0].type"),
    ({"skip_prepare_dataset": True}, "skip_prepare_dataset"),
    ({"adapter": None, "load_in_8bit": True}, "load_in_8bit"),
    ({"model_type": "LlamaForSequenceClassification"}, "model_type"),
    ({"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins"), ({"qat": {"a": 1}}, "qat"),
        ({"processor_type": "AutoProcessor", "rl": "dpo"}, "processor_type"),
    ({"nf4_backend": "other"}, "nf4_backend"),
])  # fmt: skip
def test_another_kind_of_training_is_refused(more: dict[str, Any], key: str) -> None:
    reading = read({**FILE, **more})
    assert [problem.path for problem in reading.refusals] == [key]
    assert reading.refusals[0].file == "a.yaml"
    assert reading.refusals[0].line is not None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("fsdp_cpu_ram_efficient_loading", True),
        ("fsdp_sync_module_states", True),
        ("state_dict_type", "FULL_STATE_DICT"),
        ("final_state_dict_type", "SHARDED_STATE_DICT"),
        ("fsdp_sharding_strategy", "SHARD_GRAD_OP"),
    ],
)
def test_options_of_fsdp_that_only_move_memory_are_listed(option: str, value: Any) -> None:
    reading = read({**FILE, "fsdp_config": {option: value}})
    assert not reading.refusals
    assert reading.value("sharding.engine") == "fsdp"
    listed = {entry.key.partition(": ")[0]: entry.effect for entry in reading.dropped}
    assert listed[f"fsdp_config.{option}"] is Effect.NONE
    off = read({**FILE, "fsdp_config": {option: False}})
    assert option.endswith("strategy") or f"fsdp_config.{option}" not in dropped(off)


@pytest.mark.parametrize("option", ["offload_params", "fsdp_offload_params"])
def test_offload_of_fsdp_is_that_of_the_recipe(option: str) -> None:
    reading = read({**FILE, "fsdp_config": {option: True}})
    assert (reading.value("sharding.engine"), reading.value("sharding.offload_param")) == ("fsdp", "cpu")
    off = read({**FILE, "fsdp_config": {option: False}})
    assert off.value("sharding.offload_param") is None


@pytest.mark.parametrize(
    "more",
    [
        {"adapter": "lora", "load_in_8bit": True},
        {"bf16": False, "fp16": True},
    ],
)
def test_what_fsdp_does_not_train_here_is_imported_without_the_engine(
    more: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({**FILE, **more, "fsdp_config": {"offload_params": True}}))
    made = import_files([str(file)])
    assert "sharding.engine" not in made.taken
    assert made.taken["trainer.learning_rate"].value == FILE["learning_rate"]
    listed = {entry.key: entry.effect for entry in made.dropped}
    assert listed["fsdp_config"] is listed["fsdp_config.offload_params"] is Effect.NONE


def test_qlora_over_fsdp_is_imported_as_such(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    more = {"adapter": "qlora", "load_in_4bit": True, "fsdp_config": {"offload_params": True}}
    file.write_text(yaml.safe_dump({**FILE, **more}))
    made = import_files([str(file)])
    assert made.taken["sharding.engine"].value == "fsdp"


SWANLAB = "axolotl.integrations.swanlab.SwanLabPlugin"
PLUGINS = "axolotl.integrations"


@pytest.mark.parametrize(
    ("more", "key", "effect", "word"),
    [
        ({"plugins": [SWANLAB], "swanlab_project": "p"}, "swanlab_project", Effect.NONE, "not carried over"),
        ({"swanlab_project": "p"}, "swanlab_project", Effect.NONE, "plugins does not name"),
        ({"plugins": [f"{PLUGINS}.grokfast.GrokfastPlugin"], "grokfast_alpha": 0.9}, "grokfast_alpha",
         Effect.TRAINING, "not carried over"),
        ({"grokfast_alpha": 0.9}, "grokfast_alpha", Effect.NONE, "plugins does not name"),
        ({"plugins": [f"{PLUGINS}.kernels.KernelsPlugin"], "use_scattermoe": True}, "use_scattermoe",
         Effect.NONE, "speed and memory"),
        ({"plugins": ["mine.Plugin"], "my_loss": 3}, "my_loss", Effect.TRAINING, "mine.Plugin may read it"),
        ({"my_loss": 3}, "my_loss", Effect.NONE, "no key of axolotl"),
    ],
)  # fmt: skip
def test_a_key_of_a_plugin_is_said_to_be_read_by_it(
    more: dict[str, Any], key: str, effect: Effect, word: str
) -> None:
    (entry,) = [entry for entry in read({**FILE, **more}).dropped if entry.key == key]
    assert entry.effect is effect
    assert word in entry.reason


def test_swanlab_tracks_where_its_plugin_is_on() -> None:
    on = {"use_swanlab": True, "swanlab_project": "p"}
    assert read({**FILE, **on, "plugins": [SWANLAB]}).value("trainer.report_to") == ["swanlab"]
    without = read({**FILE, **on})
    assert without.value("trainer.report_to") is None
    assert "plugins does not name" in next(e.reason for e in without.dropped if e.key == "use_swanlab")


def test_switches_that_are_off_refuse_nothing() -> None:
    off = dict.fromkeys(("reward_model", "gptq", "fp8", "relora", "rl", "qat", "reinit_weights"), False)
    assert not read({**FILE, **off, "use_dft": "no"}).refusals
    assert set(off) <= read({**FILE, **off}).seen


HOOKED = {
    "alpaca": "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\nDo\n\n"
    "### Input:\nit\n\n### Response:\n",
    "alpaca:chatml": "<|im_start|>system\nBelow is an instruction that describes a task, paired with an "
    "input that provides further context. Write a response that appropriately "
    "completes the request.<|im_end|>\n"
    "<|im_start|>user\nDo\nit<|im_end|>\n<|im_start|>assistant\n",
    "alpaca_w_system.load_instruct": "Be kind\n\n### Instruction:\nDo\n\n### Input:\nit\n\n### Response:\n",
    "alpaca_w_system": "SYSTEM: Be kind\nUSER: Do\nit\nASSISTANT:",
}


def format_row(reading: Reading) -> Any:
    names: dict[str, Any] = {}
    exec(compile(reading.texts["_hooks.py"], "hooks.py", "exec"), names)
    return names["format_row"]


@pytest.mark.parametrize("kind", HOOKED)
def test_a_pattern_becomes_a_hook_that_makes_the_same_prompt(kind: str) -> None:
    reading = read({**FILE, "datasets": [{"path": "org/a", "type": kind}]})
    assert reading.value("data.train") == [{"path": "org/a", "format": "prompt-completion"}]
    assert reading.value("python") == "_hooks.py"
    row = {"instruction": "Do", "input": "it", "output": "Done {x}", "system": "Be kind"}
    assert format_row(reading)(row) == {"prompt": HOOKED[kind], "completion": "Done {x}"}
    assert format_row(reading)({"text": "other"}) == {"text": "other"}


def test_every_pattern_is_python_that_runs() -> None:
    for kind, prompt in TYPES.items():
        reading = read({**FILE, "datasets": [{"path": "org/a", "type": kind}]})
        row = dict.fromkeys((prompt.instruction, prompt.output), "{a} \" '\\ \n") | {"input": None}
        assert "{a}" in format_row(reading)(row)["prompt"]


def test_a_pattern_of_the_file_itself() -> None:
    kind = {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction} {input}\nA:",
            "no_input_format": "Q: {instruction}\nA:", "system_prompt": "S\n"}  # fmt: skip
    reading = read({**FILE, "datasets": [{"path": "org/a", "type": kind}]})
    assert format_row(reading)({"q": "Who?", "a": "I"}) == {"prompt": "S\nQ: Who?\nA:", "completion": "I"}
    for bad in ("{instruction", "{other}", "{instruction.__class__}", "{0}"):
        reading = read({**FILE, "datasets": [{"path": "org/a", "type": {**kind, "format": bad}}]})
        assert dropped(reading)["datasets[0].type"] is Effect.NEEDED
        assert not reading.texts


def test_two_prompts_that_no_column_tells_apart() -> None:
    two = [{"path": "org/a", "type": "alpaca"}, {"path": "org/b", "type": "alpaca:chat"}]
    reading = read({**FILE, "datasets": two})
    assert dropped(reading)["python"] is Effect.NEEDED
    assert not reading.texts


def test_chats_and_their_columns() -> None:
    def source(**more: Any) -> Reading:
        return read({**FILE, "datasets": [{"path": "org/c", "type": "chat_template", **more}]})

    assert source().value("data.train") == [{"path": "org/c", "format": "chat"}]
    named = source(
        field_messages="conversations",
        message_property_mappings={"role": "from", "content": "value"},
        roles={"user": ["human"], "assistant": ["gpt"]},
        roles_to_train=["gpt"],
        train_on_eos="turn",
    )
    assert named.value("data.train") == [
        {"path": "org/c", "format": "chat", "columns": {"messages": "conversations"}}
    ]
    assert not named.dropped
    other = source(
        message_field_role="speaker", message_field_content="says", roles={"user": ["U"], "assistant": ["A"]}
    )
    row = {"messages": [{"speaker": "U", "says": "hi"}, {"speaker": "A", "says": "ho"}]}
    assert format_row(other)(row) == {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    }
    for key, value in {"roles_to_train": ["user", "assistant"], "train_on_eos": "all", "shards": 4,
                       "split_thinking": True, "message_field_training": "t"}.items():  # fmt: skip
        assert dropped(source(**{key: value}))[f"datasets[0].{key}"] is Effect.TRAINING
    assert dropped(source(chat_template="llama3"))["datasets[0].chat_template"] is Effect.TRAINING
    assert not source(chat_template="tokenizer_default").dropped
    assert dropped(read({**FILE, "chat_template": "llama3"}))["chat_template"] is Effect.NONE


def test_preferences() -> None:
    rows = {"path": "org/p", "type": "chat_template.default", "field_messages": "conv", "field_chosen": "c"}
    reading = read({**FILE, "rl": "ipo", "datasets": [rows]})
    assert reading.value("trainer.loss_type") == "ipo"
    assert reading.value("data.overlong") == "truncate"
    assert reading.value("data.train")[0] == {
        "path": "org/p", "format": "preference", "columns": {"prompt": "conv", "chosen": "c"}}  # fmt: skip
    other = read({**FILE, "rl": "dpo", "datasets": [{"path": "org/p", "type": "zephyr.nectar"}]})
    assert dropped(other)["datasets[0].type"] is Effect.NEEDED
    assert dropped(other)["data.train"] is Effect.NEEDED


def made_of(reading: Reading, row: dict[str, Any]) -> dict[str, Any]:
    """A row as the hook of an import makes it."""
    hooks: dict[str, Any] = {}
    exec(reading.texts["_hooks.py"], hooks)
    return hooks["format_row"](row)


@pytest.mark.parametrize(
    ("kind", "row", "prompt", "chosen"),
    [
        (
            "chatml.intel",
            {"system": "Be brief.", "question": "Hi?", "chosen": "Yes.", "rejected": "No."},
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
            "Yes.<|im_end|>",
        ),
        (
            "llama3.argilla_chat",
            {
                "chosen": [{"content": "Hi?"}, {"content": "Yes."}],
                "rejected": [{"content": "Hi?"}, {"content": "No."}],
            },
            "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "Yes.<|eot_id|>",
        ),
        (
            {"field_prompt": "q", "prompt_format": "Q: {prompt}\n", "chosen_format": "A: {chosen}",
             "rejected_format": "A: {rejected}"},
            {"q": "Hi?", "chosen": "Yes.", "rejected": "No."},
            "Q: Hi?\n",
            "A: Yes.",
        ),
    ],
)  # fmt: skip
def test_pairs_become_what_axolotl_makes_of_them(
    kind: object, row: dict[str, Any], prompt: str, chosen: str
) -> None:
    reading = read({**FILE, "rl": "dpo", "datasets": [{"path": "org/p", "type": kind}]})
    assert reading.value("data.train") == [{"path": "org/p", "format": "preference"}]
    made = made_of(reading, row)
    assert (made["prompt"], made["chosen"]) == (prompt, chosen)
    assert made["rejected"] == chosen.replace("Yes.", "No.")


@pytest.mark.parametrize(
    "kind", [{"prompt_format": "{prompt} {system}"}, {"chosen_format": "+{chosen}"}, {"prompt_format": "{x"}]
)
def test_patterns_that_no_hook_here_makes_must_be_set(kind: dict[str, str]) -> None:
    reading = read({**FILE, "rl": "dpo", "datasets": [{"path": "org/p", "type": kind}]})
    assert dropped(reading)["datasets[0].type"] is Effect.NEEDED


@pytest.mark.parametrize(
    ("kind", "row", "prompt", "completion"),
    [
        (
            "llama3.argilla",
            {"instruction": "Hi?", "completion": "Yes.", "label": True},
            "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "Yes.<|eot_id|>",
        ),
        (
            "chatml.argilla_chat",
            {"completion": [{"content": "Hi?"}, {"content": "Yes."}], "label": False},
            "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
            "Yes.<|im_end|>",
        ),
        (
            {
                "field_prompt": "q",
                "field_completion": "a",
                "field_label": "good",
                "completion_format": "{completion}!",
            },
            {"q": "Hi?", "a": "Yes.", "good": True},
            "Hi?",
            "Yes.!",
        ),
    ],
)
def test_labelled_answers_become_what_axolotl_makes_of_them(
    kind: object, row: dict[str, Any], prompt: str, completion: str
) -> None:
    reading = read({**FILE, "rl": "kto", "datasets": [{"path": "org/p", "type": kind}]})
    assert reading.value("task") == "kto"
    assert reading.value("data.train") == [{"path": "org/p", "format": "unpaired-preference"}]
    made = made_of(reading, row)
    assert (made["prompt"], made["completion"]) == (prompt, completion)
    assert made["label"] is row.get("label", True)


def test_rollouts() -> None:
    section = {
        "reward_funcs": ["rwd.format_reward", "rwd.correct"], "reward_weights": [1.0, 2.0], "beta": 0.001,
        "num_generations": 4, "max_completion_length": 128, "temperature": 0.7, "top_p": 0.95,
        "use_vllm": True, "vllm_mode": "server", "vllm_server_host": "node2", "scale_rewards": False,
        "epsilon_high": 0.3, "sync_ref_model": False, "ref_model_sync_steps": 64,
        "chat_template_kwargs": {"a": 1},
    }  # fmt: skip
    rows = [{"path": "org/sums", "type": "rwd.transform"}]
    more = {"rl": "gdpo", "trl": section, "vllm": {"gpu_memory_utilization": 0.8}, "datasets": rows}
    reading = read({**FILE, **more, "sequence_len": 512})
    found = {key: taken.value for key, taken in reading.taken.items()}
    assert not reading.refusals
    assert found["task"] == "grpo"
    assert found["reward"] == [
        {"function": "rwd.py:format_reward"}, {"function": "rwd.py:correct", "weight": 2.0}
    ]  # fmt: skip
    sampling = {key.partition(".")[2]: value for key, value in found.items() if key.startswith("generation.")}
    assert sampling == {
        "num_generations": 4, "max_completion_length": 128, "temperature": 0.7, "top_p": 0.95,
        "backend": "vllm-server",
    }  # fmt: skip
    names = ("beta", "epsilon_high", "scale_rewards", "multi_objective_aggregation", "vllm_server_host")
    assert [found[f"trainer.{name}"] for name in names] == [0.001, 0.3, "none", "normalize_then_sum", "node2"]
    assert found["data.train"] == [{"path": "org/sums", "format": "prompt"}]
    assert dropped(reading) == {
        "sequence_len": Effect.NONE, "datasets[0].type": Effect.NEEDED, "data.max_length": Effect.NEEDED,
        "trl.ref_model_sync_steps": Effect.NONE, "trl.chat_template_kwargs": Effect.TRAINING,
        "vllm.gpu_memory_utilization": Effect.NONE,
    }  # fmt: skip


def test_vllm_in_the_same_processes_has_a_share_of_the_memory() -> None:
    section = {"reward_funcs": ["r.f"], "use_vllm": True, "max_completion_length": 64}
    reading = read({**FILE, "rl": "grpo", "trl": {**section, "vllm_mode": "colocate"}})
    assert reading.value("generation.backend") == "vllm-colocate"
    assert reading.value("trainer.vllm_gpu_memory_utilization") == 0.9
    assert dropped(read({**FILE, "rl": "grpo", "trl": section}))["generation.backend"] is Effect.NEEDED
    nothing = dropped(read({**FILE, "rl": "grpo", "trl": {}}))
    assert nothing["reward"] is nothing["generation.max_completion_length"] is Effect.NEEDED


@pytest.mark.parametrize(
    ("more", "key", "effect"),
    [
        ({"rl": "grpo", "trl": "rewards.f"}, "trl", Effect.NEEDED),
        ({"rl": "grpo", "trl": {"reward_funcs": ["r.f"]}, "vllm": [1]}, "vllm", Effect.NEEDED),
        ({"rl": "grpo", "trl": {"reward_funcs": [["r.f"]], "reward_weights": [1]}}, "trl.reward_funcs",
         Effect.NEEDED),
        ({"rl": "grpo", "trl": {"use_vllm": "maybe"}}, "trl.use_vllm", Effect.TRAINING),
        ({"reward_model": "yes please"}, "reward_model", Effect.TRAINING),
        ({"batch_flattening": "maybe"}, "batch_flattening", Effect.TRAINING),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_kind_has_a_line(more: dict[str, Any], key: str, effect: Effect) -> None:
    reading = read({**FILE, **more})
    assert (dropped(reading)[key], reading.refusals) == (effect, [])


def test_padding_that_axolotl_decides_is_left_to_the_plan() -> None:
    reading = read({**FILE, "batch_flattening": "auto"})
    assert (dropped(reading)["batch_flattening"], reading.value("data.padding_free")) == (Effect.NONE, None)


def test_arguments_of_the_section_are_taken() -> None:
    section = {"reward_funcs": ["r.f"], "scale_rewards": "batch", "vllm_enable_sleep_mode": True}
    reading = read({**FILE, "rl": "grpo", "trl": {**section, "use_vllm": True, "vllm_mode": "colocate"}})
    assert reading.value("trainer.scale_rewards") == "batch"
    assert reading.value("trainer.vllm_enable_sleep_mode") is True


def test_the_loss_of_kto_needs_two_rows() -> None:
    given = {**FILE, "rl": "kto", "datasets": [{"path": "org/p", "type": "chatml.ultra"}]}
    even = read({**given, "micro_batch_size": 1, "gradient_accumulation_steps": 4})
    sizes = ("trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps")
    assert [even.value(name) for name in sizes] == [2, 2]
    assert dropped(even)["micro_batch_size"] is Effect.TRAINING
    odd = read({**given, "micro_batch_size": 1, "gradient_accumulation_steps": 3})
    assert dropped(odd)[sizes[0]] is Effect.NEEDED
    assert sizes[0] not in odd.taken
    enough = read({**given, "micro_batch_size": 2, "gradient_accumulation_steps": 1})
    assert [enough.value(name) for name in sizes] == [2, 1]


def test_a_reward_model() -> None:
    rows = [{"path": "org/p", "type": "bradley_terry.chat_template"}]
    more = {"reward_model": True, "num_labels": 1, "model_type": "AutoModelForSequenceClassification"}
    reading = read({**FILE, **more, "center_rewards_coefficient": 0.01, "datasets": rows})
    assert not reading.refusals
    assert reading.value("task") == "reward"
    assert reading.value("trainer.center_rewards_coefficient") == 0.01
    assert reading.value("data.overlong") == "drop"
    assert dropped(reading)["sequence_len"] is Effect.TRAINING
    made = made_of(reading, {"system": "S", "input": "Q", "chosen": "C", "rejected": "R"})
    assert made["prompt"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert made["chosen"] == [{"role": "assistant", "content": "C"}]
    (problem,) = read({**FILE, "num_labels": 3}).refusals
    assert (problem.path, problem.line is not None) == ("num_labels", True)


@pytest.mark.parametrize("strategy", [None, "drop", "raise", "truncate"])
def test_long_pairs_are_cut_here_and_listed_where_axolotl_does_not(strategy: str | None) -> None:
    rows = {"path": "org/p", "type": "chat_template.default"}
    given = {} if strategy is None else {"excess_length_strategy": strategy}
    reading = read({**FILE, "rl": "dpo", "datasets": [rows], **given})
    assert reading.value("data.overlong") == "truncate"
    listed = {"excess_length_strategy": Effect.TRAINING} if strategy != "truncate" else {}
    assert dropped(reading) == listed


TEXTS = {"pretraining_dataset": "org/texts", "max_steps": 5}


@pytest.mark.parametrize(
    ("more", "packing", "overlong", "listed"),
    [
        ({}, None, "truncate", set()),
        ({"sample_packing": False}, None, "truncate", set()),
        ({"sample_packing": True}, True, "split", set()),
        ({"sample_packing": True, "pretrain_multipack_attn": True}, True, "split", set()),
        (
            {"sample_packing": True, "pretrain_multipack_attn": False},
            True,
            "split",
            {"pretrain_multipack_attn"},
        ),
        ({"pretraining_sample_concatenation": True}, True, "truncate", {"pretraining_sample_concatenation"}),
    ],
)
def test_texts_are_packed_where_the_file_says_so(
    more: dict[str, Any], packing: bool | None, overlong: str, listed: set[str]
) -> None:
    reading = read({**{key: FILE[key] for key in FILE if key != "datasets"}, **TEXTS, **more})
    assert (reading.value("data.packing"), reading.value("data.overlong")) == (packing, overlong)
    assert {key for key, effect in dropped(reading).items() if effect is Effect.TRAINING} == listed
    assert set(more) <= reading.seen


def test_of_several_pretraining_datasets_the_first_is_read() -> None:
    several = [{"path": "org/a"}, {"path": "org/b"}]
    reading = read({**FILE, **TEXTS, "pretraining_dataset": several})
    assert [source["path"] for source in reading.value("data.train")] == ["org/a"]
    assert dropped(reading)["pretraining_dataset[1]"] is Effect.NONE


def test_of_several_streamed_and_packed_data_sets_axolotl_reads_the_first() -> None:
    rows = [{"path": f"org/{name}", "type": "alpaca"} for name in "ab"]
    streamed = {**FILE, "datasets": rows, "streaming": True, "max_steps": 5}
    assert dropped(read({**streamed, "sample_packing": True}))["datasets[1]"] is Effect.TRAINING
    assert "datasets[1]" not in dropped(read(streamed))


def test_a_name_of_a_column_is_no_secret() -> None:
    rows = {"path": "org/p", "type": "chat_template", "template_thinking_key": "reasoning_content"}
    entry = read({**FILE, "datasets": [rows]}).dropped[0]
    assert (entry.key, entry.value) == ("datasets[0].template_thinking_key", "reasoning_content")


def test_turns_of_preferences_that_are_called_otherwise() -> None:
    def said(**entry: Any) -> dict[str, Effect]:
        rows = {"path": "org/p", "type": "chat_template.default", **entry}
        return dropped(read({**FILE, "rl": "dpo", "datasets": [rows], "excess_length_strategy": "truncate"}))

    same = {"roles": {"user": ["user"], "assistant": ["assistant", "gpt"]}}
    assert not said(**same, message_property_mappings={"role": "role", "content": "content"})
    assert said(roles={"user": ["asker"]}) == {"datasets[0].roles": Effect.NEEDED}
    found = said(message_property_mappings={"role": "from", "content": "content"})
    assert found == {"datasets[0].message_property_mappings": Effect.NEEDED}


def test_where_rows_lie(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text('{"text": "a"}\n')
    file = str(tmp_path / "a.yaml")

    def first(**entry: Any) -> tuple[Any, dict[str, Effect]]:
        reading = read({**FILE, "datasets": [{"type": "completion", **entry}]}, file)
        return (reading.value("data.train") or [None])[0], dropped(reading)

    assert first(path="rows.jsonl", ds_type="json")[0] == {"path": "rows.jsonl", "format": "text"}
    assert first(path="json", data_files="rows.jsonl")[0] == {"path": "rows.jsonl", "format": "text"}
    assert first(path="set", split="test")[0] == {"path": "set/test.jsonl", "format": "text"}
    assert first(path="set", data_files=["test.jsonl"])[0] == {"path": "set/test.jsonl", "format": "text"}
    assert first(path="org/x", split="train[:10%]", weight=0.5)[0] == {
        "path": "org/x", "format": "text", "weight": 0.5}  # fmt: skip
    assert first(path="org/x", split="train[:10%]")[1]["datasets[0].path split"] is Effect.TRAINING
    assert first(path="imdb")[1]["datasets[0].path"] is Effect.NEEDED
    assert first(path="s3://b/x.json")[1]["datasets[0].path"] is Effect.NEEDED
    assert first(path="org/x", data_files="a.json")[1]["datasets[0].data_files"] is Effect.NEEDED
    assert first(path="https://huggingface.co/datasets/org/x", field="body")[0] == {
        "path": "org/x", "format": "text", "columns": {"text": "body"}}  # fmt: skip
    several = read({**FILE, "datasets": [{"path": "org/x", "type": "completion", "name": ["a", "b"]}]})
    assert [source["name"] for source in several.value("data.train")] == ["a", "b"]


def test_a_number_of_evaluation_rows_is_asked_for_and_keeps_what_needs_them() -> None:
    assert dropped(read({**FILE, "val_set_size": "many"})) == {"data.eval": Effect.NEEDED}
    reading = read({**FILE, "val_set_size": 32, "evals_per_epoch": 4, "early_stopping_patience": 2})
    assert dropped(reading) == {"data.eval": Effect.NEEDED}
    assert reading.value("trainer.eval_strategy") == "steps"
    assert reading.value("early_stopping.patience") == 2
    assert reading.value("trainer.per_device_eval_batch_size") == 1
    tests = {"test_datasets": [{"path": "imdb", "type": "completion"}], "early_stopping_patience": 2}
    reading = read({**FILE, **tests, "eval_steps": 5})
    assert reading.value("early_stopping.patience") == 2
    assert dropped(reading)["data.eval"] is Effect.NEEDED


def test_added_tokens_keep_their_blanks() -> None:
    special = {"special_tokens": {"additional_special_tokens": [" [/INST]"]}}
    reading = read({**FILE, "tokens": [" a", "b "], **special})
    assert reading.value("model.add_tokens") == [" a", "b ", " [/INST]"]


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ({"type": "sharegpt"}, "datasets[0].type", "refuses"),
        ({"type": "text"}, "datasets[0].type", "no such type"),
        ({"type": "oasst"}, "datasets[0].type", "own code"),
        ({"type": "my.module"}, "datasets[0].type", "own code"),
    ],
)
def test_a_type_without_a_hook_has_its_own_reason(more: dict[str, Any], key: str, words: str) -> None:
    reading = read({**FILE, "datasets": [{"path": "org/x", **more}]})
    assert words in next(entry.reason for entry in reading.dropped if entry.key == key)


def test_preferences_without_a_type_are_read_as_they_are() -> None:
    pairs = {**FILE, "rl": "dpo", "datasets": [{"path": "org/x"}], "skip_prepare_dataset": True}
    reading = read(pairs)
    assert not reading.refusals
    assert reading.value("data.train") == [{"path": "org/x", "format": "preference"}]
    assert dropped(reading) == {"skip_prepare_dataset": Effect.TRAINING}
    odd = read({**pairs, "datasets": [{"path": "org/x", "type": "text"}]})
    assert "no such type" in next(e.reason for e in odd.dropped if e.key == "datasets[0].type")


def test_weights_in_another_form_are_no_quantisation_when_they_are_dequantised() -> None:
    reading = read({**FILE, **MXFP4})
    assert (reading.refusals, dropped(reading)) == ([], {"model_quantization_config": Effect.NEEDED})
    kept = read({**FILE, "model_quantization_config": "Mxfp4Config"})
    assert [problem.path for problem in kept.refusals] == ["model_quantization_config"]


def test_variables_are_no_values() -> None:
    variables = {"base_model": "${MODEL}", "learning_rate": "$LR", "wandb_name": "run-${N}"}
    rows = [{"path": "${DATA}/a.jsonl", "type": "completion"}, *FILE["datasets"]]
    reading = read({**FILE, **variables, "datasets": rows, "tokens": ["$"]})
    needed = {"model.name_or_path", "trainer.learning_rate", "datasets[0].path"}
    found = dropped(reading)
    assert {key for key, effect in found.items() if effect is Effect.NEEDED} == needed
    assert found["wandb_name"] is Effect.NONE
    assert not {"model.name_or_path", "trainer.learning_rate"} & reading.taken.keys()


def test_a_variable_in_the_name_of_a_repository_is_one_loss() -> None:
    reading = read({**FILE, "hub_model_id": "${REPOSITORY}"})
    assert [one.key for one in reading.dropped if "hub" in one.key] == ["hub_model_id"]
    assert not [key for key in reading.taken if "hub" in key]


def test_columns_that_axolotl_does_not_read_are_left_out(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    row = {"id": 3, "prompt": "b", "messages": turns, "tools": [], "system": "s", "good": True}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    file = yaml.safe_dump({**FILE, "datasets": [{"path": "rows.jsonl", "type": "chat_template"}]})
    (source,) = axolotl.read(file, str(tmp_path / "a.yaml")).value("data.train")
    assert source["columns"] == {"prompt": None, "good": None}


def test_a_strategy_for_long_rows_that_is_none() -> None:
    reading = read({**FILE, "excess_length_strategy": {"a": "hf_" + "a" * 30}})
    assert dropped(reading)["excess_length_strategy"] is Effect.NEEDED
    assert "hf_aaa" not in str(reading)


def test_secrets_are_not_repeated() -> None:
    reading = read({**FILE, "comet_api_key": "abcdefghijkl", "hub_model_id": "me/it"})
    assert "abcdefghijkl" not in str(reading)
    assert "comet_api_key" in dropped(reading)


def test_yaml_as_axolotl_reads_it() -> None:
    text = """\
base: &base {path: org/rows, type: completion}
base_model: org/model
learning_rate: 1
learning_rate: 2e-5
bf16: no
adapter:
datasets:
  - <<: *base
    split: train
"""
    reading = axolotl.read(text, "a.yaml")
    assert reading.value("trainer.learning_rate") == 2e-5
    assert reading.taken["trainer.learning_rate"].place.line == 4
    assert any(entry.key == "learning_rate" and "duplicate" in entry.reason for entry in reading.dropped)
    assert reading.value("precision") == "fp32"
    assert reading.value("data.train") == [{"path": "org/rows", "format": "text"}]
    for bad in ("a: [", "base_model: x\n---\nbase_model: y\n", "a: !!python/object:os.system x\n"):
        with pytest.raises(RecipeError):
            axolotl.read(bad, "a.yaml")


@pytest.mark.parametrize("value", ["many", -1, 0, [], {}, [[1]], "\x1b[31m", "9" * 400, 1e308, True, ".nan"])
def test_hostile_values_are_listed(value: Any) -> None:
    for key in ("lora_r", "micro_batch_size", "sequence_len", "learning_rate", "val_set_size", "num_epochs",
                "datasets", "special_tokens", "deepspeed", "warmup_steps", "evals_per_epoch", "seed",
                "batch_size", "context_parallel_size", "test_datasets", "peft", "plugins"):  # fmt: skip
        reading = axolotl.read(yaml.safe_dump({**FILE, key: value}), "a.yaml")
        assert key in reading.seen, (key, value)


def test_whose_file_it_is() -> None:
    assert axolotl.is_recipe(FILE)
    assert axolotl.is_recipe({"base_model": "x", "sequence_len": 1})
    assert not axolotl.is_recipe({"base_model": "x"})
    assert not axolotl.is_recipe({"model_name_or_path": "x", "datasets": []})
    assert read(FILE).dropped == []
    near = read({**FILE, "gradient_acumulation_steps": 2}).dropped[-1]
    assert near.effect is Effect.NONE
    assert near.hint == "did you mean gradient_accumulation_steps?"


def test_a_learning_rate_that_is_no_number_is_asked_for_once() -> None:
    made = read({**FILE, "learning_rate": float("nan")})
    assert [entry.key for entry in made.dropped if "learning_rate" in entry.key] == ["learning_rate"]


_QLORA = {"adapter": "qlora", "load_in_4bit": True, "bf16": True}


@pytest.mark.parametrize(
    ("more", "norms"),
    [
        ({}, "bfloat16"),
        ({"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True}, "bfloat16"),
        ({"bf16": "auto"}, "bfloat16"),
        ({"bf16": None}, "bfloat16"),
        ({"bf16": False, "fp16": True}, None),
        ({"load_in_4bit": False, "adapter": "lora"}, None),
        ({"lora_modules_to_save": ["embed_tokens", "lm_head"]}, None),
    ],
)
def test_norms_of_a_quantised_model_are_in_16_bits_there(more: dict[str, Any], norms: str | None) -> None:
    reading = read({**FILE, **_QLORA, **more})
    assert reading.value("model.kbit_norms") == norms
    assert reading.value("precision") == ("fp16" if "fp16" in more else "bf16")


def test_offloaded_activations_are_offloaded() -> None:
    for value in ("offload", "offload_disk", "unsloth"):
        reading = read({**FILE, "gradient_checkpointing": value})
        assert reading.value("trainer.activation_checkpointing") is True, value
        assert reading.value("sharding.offload_activations") == "cpu", value
    for value, place in ((True, "cpu"), ("legacy", "cpu"), ("disk", "cpu"), (False, None)):
        reading = read({**FILE, "gradient_checkpointing": True, "activation_offloading": value})
        assert reading.value("sharding.offload_activations") == place, value
