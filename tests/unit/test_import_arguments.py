"""TrainingArguments of any version, LoRA and bitsandbytes as recipe keys."""

from __future__ import annotations

import pytest
from every import every

from launcher.importing.adapters import take_default_targets
from launcher.importing.arguments import (
    PEFT_DEFAULTS,
    RENAMED,
    TRANSFORMERS_DEFAULTS,
    fill_defaults,
    take_adapter,
    take_argument,
)
from launcher.importing.conversions import as_bool, as_number
from launcher.importing.reading import Effect, Given, Reading
from launcher.recipe.field_tables import TRAINER_OWNED, trainer_fields
from launcher.recipe.suggestions import TRAINER_REMOVED

TOKEN = "hf_" + "Zq" * 14


def reading(**given: object) -> Reading:
    made = Reading("test", "x.yaml")
    for line, (name, value) in enumerate(given.items(), 1):
        assert take_argument(made, Given(name, value, line)), name
    return made


def taken(made: Reading) -> dict[str, object]:
    return {key: value.value for key, value in made.taken.items()}


def effects(made: Reading) -> dict[str, Effect]:
    return {item.key: item.effect for item in made.dropped}


@every(
    ("name", "value", "key", "wanted"),
    [
        ("learning_rate", "2e-5", "trainer.learning_rate", 2e-5),
        ("learning_rate", 0.001, "trainer.learning_rate", 0.001),
        ("evaluation_strategy", "no", "trainer.eval_strategy", "no"),
        ("eval_strategy", False, "trainer.eval_strategy", "no"),
        ("save_strategy", "EPOCH", "trainer.save_strategy", "epoch"),
        ("bf16", "True", "precision", "bf16"),
        ("fp16", "yes", "precision", "fp16"),
        ("seed", "7", "seed", 7),
        ("max_steps", "1e3", "trainer.max_steps", 1000),
        ("warmup_ratio", "0.03", "trainer.warmup_steps", 0.03),
        ("gradient_checkpointing", "on", "trainer.activation_checkpointing", True),
        ("gradient_checkpointing_kwargs", '{"use_reentrant": false}',
         "trainer.activation_checkpointing_kwargs", {"use_reentrant": False}),
        ("group_by_length", True, "trainer.train_sampling_strategy", "group_by_length"),
        ("per_gpu_train_batch_size", 3, "trainer.per_device_train_batch_size", 3),
        ("dispatch_batches", "no", "trainer.accelerator_config", {"dispatch_batches": False}),
        ("include_inputs_for_metrics", True, "trainer.include_for_metrics", ["inputs"]),
        ("no_cuda", True, "hardware.device", "cpu"),
        ("use_liger", True, "trainer.use_liger_kernel", True),
        ("fsdp", "full_shard auto_wrap", "sharding.engine", "fsdp"),
        ("fsdp", "no_shard", "sharding.engine", "ddp"),
        ("deepspeed", "ds.json", "sharding.engine", "deepspeed"),
        ("report_to", ["wandb"], "trainer.report_to", ["wandb"]),
        ("beta", "0.2", "trainer.beta", 0.2),
        ("adam_beta2", ".95", "trainer.adam_beta2", 0.95),
    ],
)  # fmt: skip
def test_a_value_becomes_its_recipe_key(name: str, value: object, key: str, wanted: object) -> None:
    made = reading(**{name: value})
    assert taken(made)[key] == wanted
    assert made.taken[key].place.line == 1
    assert made.seen == {name}


@pytest.mark.parametrize(
    ("name", "value", "effect"),
    [
        ("output_dir", "out", Effect.NONE),
        ("overwrite_output_dir", True, Effect.NONE),
        ("local_rank", 0, Effect.NONE),
        ("optim", "adamw_hf", Effect.TRAINING),
        ("learning_rate", "fast", Effect.NEEDED),
        ("warmup_ratio", 1.0, Effect.TRAINING),
        ("remove_unused_columns", "False", Effect.NONE),
        ("do_eval", True, Effect.NONE),
        ("hub_token", TOKEN, Effect.NONE),
        ("push_to_hub_token", TOKEN, Effect.NONE),
        ("run_name", TOKEN, Effect.NONE),
    ],
)
def test_what_has_no_recipe_key_is_listed(name: str, value: object, effect: Effect) -> None:
    made = reading(**{name: value})
    assert (taken(made), effects(made)) == ({}, {name: effect})
    assert TOKEN not in repr(made)


def test_every_field_of_any_version_is_taken_dropped_or_known() -> None:
    for name in {*trainer_fields(), *TRAINER_REMOVED, *TRAINER_OWNED, *RENAMED}:
        for value in ("0.5", True, 3, None, "no", ["a"], {"a": 1}, TOKEN):
            made = Reading("test", "x.yaml")
            assert take_argument(made, Given(name, value, 1)), name
            assert name in made.seen or made.dropped, (name, value)
    assert not take_argument(Reading("test", "x.yaml"), Given("no_such_field", 1, 1))


def test_old_names_of_the_table_have_a_converter_or_a_reason() -> None:
    moved = {name for name, text in TRAINER_REMOVED.items() if text.startswith("write `")}
    # nothing but the precision that backends go with, and a tokenizer that no TrainingArguments ever had
    backends = {"half_precision_backend", "fp16_backend", "fp16_opt_level"}
    for name in moved - {"tokenizer", "torchdynamo", "push_to_hub_organization", *backends}:
        value = {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "warmup_ratio": 0.5}.get(
            name, True
        )
        value = 2 if "batch_size" in name else value
        value = "epoch" if name == "evaluation_strategy" else value
        value = "you/model" if "model_id" in name else "gloo" if name == "xpu_backend" else value
        assert reading(**{name: value}).taken, name


def test_null_is_absent_and_a_default_is_marked() -> None:
    made = reading(learning_rate=None, max_steps=-1, do_train=True)
    fill_defaults(made, TRANSFORMERS_DEFAULTS)
    assert taken(made) == TRANSFORMERS_DEFAULTS
    assert all(value.is_default for value in made.taken.values())
    assert made.dropped == []


def test_a_number_of_steps_excludes_the_epochs_and_names_its_own() -> None:
    made = reading(max_steps=50, eval_strategy="steps", logging_steps=7, save_strategy="steps")
    fill_defaults(made, TRANSFORMERS_DEFAULTS)
    assert "trainer.num_train_epochs" not in made.taken
    assert (made.value("trainer.eval_steps"), made.value("trainer.save_steps")) == (7, 500)


def test_warm_up_by_steps_goes_before_a_share() -> None:
    for order in (("warmup_ratio", "warmup_steps"), ("warmup_steps", "warmup_ratio")):
        values = {"warmup_ratio": 0.1, "warmup_steps": 20}
        made = reading(**{name: values[name] for name in order})
        assert made.value("trainer.warmup_steps") == 20
        assert effects(made) == {"warmup_ratio": Effect.NONE}
    assert reading(warmup_ratio=0.1, warmup_steps=0).value("trainer.warmup_steps") == 0.1
    assert reading(warmup_steps=0, warmup_ratio=0.1).value("trainer.warmup_steps") == 0.1


def test_what_cannot_be_trained_here_is_refused_with_the_line() -> None:
    for given in ({"bf16": True, "fp16": True}, {"do_train": False}):
        made = reading(**given)
        assert [problem.line for problem in made.refusals] == [len(given)]


def test_offload_of_fsdp_is_that_of_the_recipe() -> None:
    made = reading(fsdp="full_shard offload")
    assert (made.value("sharding.engine"), made.value("sharding.offload_param")) == ("fsdp", "cpu")
    assert effects(made) == {}


def test_bf16_false_takes_away_a_default_of_bf16_and_fp16_false_does_not() -> None:
    for name, wanted in (("bf16", "fp32"), ("fp16", "bf16")):
        made = reading(**{name: False})
        fill_defaults(made, {"precision": "bf16"})
        assert made.value("precision") == wanted


def test_switches_and_numbers_as_text() -> None:
    assert [as_bool(text) for text in ("YES", "off", "1", "maybe")] == [True, False, True, None]
    assert [as_number(text) for text in ("2e-5", "3", "nan", True, "x", [1])] == [
        2e-5,
        3,
        None,
        None,
        None,
        None,
    ]
    assert isinstance(as_number("12"), int)


def test_fields_of_lora() -> None:
    made = Reading("test", "x.py")
    fields = {"r": "64", "lora_alpha": 16, "target_modules": ["all-linear"], "use_dora": "true",
              "modules_to_save": None, "task_type": "TaskType.SEQ_CLS", "inference_mode": False,
              "bias": "some"}  # fmt: skip
    for name, value in fields.items():
        assert take_adapter(made, name, Given(name, value, 1))
    fill_defaults(made, PEFT_DEFAULTS)
    assert taken(made) == {
        "adapter.r": 64, "adapter.lora_alpha": 16, "adapter.lora_dropout": 0.0, "adapter.use_dora": True,
        "adapter.target_modules": "all-linear", "task": "sequence-classification",
    }  # fmt: skip
    assert effects(made) == {"bias": Effect.TRAINING}
    assert made.seen == set(fields)
    assert not take_adapter(made, "ia3_dim", Given("ia3_dim", 1, 1))


def test_a_task_type_of_another_kind_is_refused() -> None:
    made = Reading("test", "x.py")
    take_adapter(made, "task_type", Given("task_type", "QUESTION_ANS", 4))
    assert made.refusals[0].line == 4


def test_layers_that_nobody_names_are_those_of_peft_literally() -> None:
    made = Reading("test", "x.py")
    made.take("model.name_or_path", "bigcode/starcoder", Given("model", None, 1))
    take_default_targets(made)
    assert made.value("adapter.target_modules") == ["c_attn"]
    unknown = Reading("test", "x.py")
    unknown.take("model.name_or_path", "nobody/nothing", Given("model", None, 1))
    take_default_targets(unknown)
    assert "adapter.target_modules" not in unknown.taken
    assert effects(unknown) == {"adapter.target_modules": Effect.NEEDED}
