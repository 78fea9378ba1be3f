"""Training scripts, read and never run."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import pytest

from launcher.importing import script
from launcher.importing.found import Effect, Reading
from launcher.importing.values import Source, Unresolved
from launcher.recipe.field_tables import trainer_fields
from launcher.recipe.suggestions import TRAINER_REMOVED

CASES = Path(__file__).parent.parent / "importing_cases"
TOKEN = "hf_" + "Zq" * 14
HEAD = "import os\nimport torch\nimport transformers\nfrom transformers import *\n"


def read(text: str) -> Reading:
    return script.read(HEAD + textwrap.dedent(text), "train.py")


def arguments(text: str, before: str = "") -> Reading:
    return read(f"{textwrap.dedent(before)}\nargs = TrainingArguments({text})\n")


def taken(made: Reading) -> dict[str, Any]:
    return {key: value.value for key, value in made.taken.items()}


def dropped(made: Reading) -> dict[str, Effect]:
    return {entry.key: entry.effect for entry in made.dropped}


@pytest.mark.parametrize(
    ("text", "before", "wanted"),
    [
        ("learning_rate=2e-5", "", 2e-5),
        ("learning_rate=2 * 1e-5", "", 2e-5),
        ("learning_rate=LR", "LR = 1e-3", 1e-3),
        ("learning_rate=LR / 2", "LR = 1e-3", 5e-4),
        ("**common", "common = dict(learning_rate=3e-4)", 3e-4),
        ("**{'learning_rate': 3e-4}", "", 3e-4),
        ("learning_rate=C['lr']", "C = {'lr': 4e-4}", 4e-4),
        ("learning_rate=float(os.environ.get('LR', '5e-4'))", "", 5e-4),
        ("learning_rate=1e-3 if True else 2e-3", "", 1e-3),
        ("learning_rate=1e-3 if N > 0 else 2e-3", "N = 4", 1e-3),
        ("learning_rate=1e-3 if N is None else 2e-3", "N = 4", 2e-3),
        (
            "learning_rate=args.lr",
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', default=6e-4)\n"
            "args = p.parse_args()",
            6e-4,
        ),
        ("learning_rate=cfg.lr", "class C:\n    lr: float = 7e-4\ncfg = C()", 7e-4),
        ("learning_rate=cfg.lr", "class C:\n    lr: float = field(default=8e-4)\ncfg = C()", 8e-4),
    ],
)
def test_values_that_are_written_out(text: str, before: str, wanted: float) -> None:
    assert taken(arguments(text, before))["trainer.learning_rate"] == pytest.approx(wanted)


def test_defaults_that_callers_may_change_are_marked() -> None:
    made = read("""
        def train(lr=1e-3, micro: int = 4):
            TrainingArguments("out", learning_rate=lr, per_device_train_batch_size=micro)
    """)
    assert made.value("trainer.per_device_train_batch_size") == 4
    assert made.taken["trainer.learning_rate"].is_default
    assert "callers may pass others" in made.taken["trainer.learning_rate"].note


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("learning_rate=compute()", ""),
        ("learning_rate=LR", "LR = 1\nLR = 2"),
        ("learning_rate=LR", "for LR in (1, 2):\n    pass"),
        ("learning_rate=LR", "if os.name:\n    LR = 1"),
        ("learning_rate=LR", ""),
        ("learning_rate=x.lr", "x = load()"),
        ("learning_rate=len(rows)", "rows = []"),
        ("learning_rate=2 ** 10 ** 9", ""),
        ("**options", "options = load()"),
    ],
)
def test_what_is_computed_is_listed_and_never_guessed(text: str, before: str) -> None:
    made = arguments(text, before)
    assert Effect.NEEDED in dropped(made).values()
    assert "trainer.learning_rate" not in made.taken


def test_enumerations_and_dtypes_by_their_last_word() -> None:
    made = arguments(
        "save_strategy=IntervalStrategy.EPOCH, lr_scheduler_type=transformers.SchedulerType.COSINE",
        "from transformers.trainer_utils import IntervalStrategy",
    )
    assert (made.value("trainer.save_strategy"), made.value("trainer.lr_scheduler_type")) == (
        "epoch",
        "cosine",
    )


def test_layers_and_ranks_that_are_computed_need_a_word() -> None:
    made = read("get_peft_model(m, LoraConfig(r=rank(), target_modules=find(m)))\nTrainingArguments('o')")
    assert {"r", "target_modules"} <= {
        key for key, effect in dropped(made).items() if effect is Effect.NEEDED
    }
    assert not {"adapter.r", "adapter.target_modules"} & made.taken.keys()


def test_a_precision_that_is_computed_needs_a_word() -> None:
    made = arguments("bf16=x.bf16", "x = load()")
    assert ("precision" in made.taken, dropped(made)["bf16"]) == (False, Effect.NEEDED)


def test_bf16_where_the_card_has_it_is_precision_auto() -> None:
    made = arguments("bf16=torch.cuda.is_bf16_supported(), fp16=not torch.cuda.is_bf16_supported()")
    assert made.value("precision") == "auto"


@pytest.mark.parametrize(
    ("text", "key", "wanted"),
    [
        ("AutoModelForCausalLM.from_pretrained('a/b')", "model.name_or_path", "a/b"),
        (
            "AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path='a/b')",
            "model.name_or_path",
            "a/b",
        ),
        ("LlamaForCausalLM.from_pretrained('a/b', revision='r')", "model.revision", "r"),
        ("AutoModelForSeq2SeqLM.from_pretrained('a/b')", "task", "seq2seq-lm"),
        ("T5ForConditionalGeneration.from_pretrained('a/b')", "task", "seq2seq-lm"),
        ("AutoModelForSequenceClassification.from_pretrained('a/b')", "task", "sequence-classification"),
        ("AutoModelForImageClassification.from_pretrained('a/b')", "task", "image-classification"),
        ("AutoModelForCausalLM.from_pretrained('a', torch_dtype=torch.float16)", "model.dtype", "float16"),
        ("AutoModelForCausalLM.from_pretrained('a', dtype='auto')", "model.dtype", "auto"),
        (
            "AutoModelForCausalLM.from_pretrained('a', attn_implementation='eager')",
            "model.attn_implementation",
            "eager",
        ),
        (
            "AutoModelForCausalLM.from_pretrained('a', use_flash_attention_2=True)",
            "model.attn_implementation",
            "flash_attention_2",
        ),
        (
            "AutoModelForCausalLM.from_pretrained('a', trust_remote_code=True)",
            "model.trust_remote_code",
            True,
        ),
        (
            "AutoModelForCausalLM.from_pretrained('a', load_in_8bit=True)",
            "model.quantization",
            {"type": "int8"},
        ),
        (
            "AutoModelForCausalLM.from_pretrained('a', load_in_4bit=True)",
            "model.quantization",
            {"type": "fp4", "double_quant": False, "compute_dtype": "float32"},
        ),
        (
            "OPTForCausalLM.from_pretrained('a', quantization_config=BitsAndBytesConfig(load_in_8bit=True))",
            "model.quantization",
            {"type": "int8"},
        ),
        ("AutoTokenizer.from_pretrained('c/d')", "model.tokenizer", "c/d"),
        ("FastLanguageModel.from_pretrained(model_name='u/m', max_seq_length=2048)", "data.max_length", 2048),
        (
            "FastLanguageModel.from_pretrained(model_name='u/m', max_seq_length=2048)",
            "model.quantization",
            {"type": "nf4", "double_quant": True},
        ),
        ("PeftModel.from_pretrained(m, 'ad', is_trainable=True)", "adapter.path", "ad"),
        ("get_peft_model(m, LoraConfig(r=4))", "adapter.r", 4),
        ("get_peft_model(m, LoraConfig(r=4))", "adapter.lora_alpha", 8),
        ("get_peft_model(m, LoraConfig(target_modules=['q']))", "adapter.target_modules", ["q"]),
        ("FastLanguageModel.get_peft_model(m, r=4)", "adapter.lora_alpha", 16),
        ("set_seed(9)", "seed", 9),
        ("m.gradient_checkpointing_enable()", "trainer.activation_checkpointing", True),
        ("m = torch.compile(m)", "trainer.torch_compile", True),
        ("os.environ['NCCL_DEBUG'] = 'INFO'", "launch.env.NCCL_DEBUG", "INFO"),
        (
            "Trainer(callbacks=[EarlyStoppingCallback(early_stopping_patience=3)])",
            "early_stopping.patience",
            3,
        ),
        ("Trainer(callbacks=[EarlyStoppingCallback(2, 0.1)])", "early_stopping.threshold", 0.1),
        ("SFTTrainer(model='a/b')", "model.name_or_path", "a/b"),
        ("SFTTrainer(max_seq_length=99, packing=True)", "data.max_length", 99),
        ("Trainer(data_collator=DataCollatorForLanguageModeling(t, mlm=False))", "data.loss_on", "all"),
        ("Trainer(data_collator=DataCollatorForCompletionOnlyLM('x'))", "data.loss_on", "completion"),
    ],
)
def test_calls_become_recipe_keys(text: str, key: str, wanted: Any) -> None:
    made = read(f"{text}\nTrainingArguments('out')\n")
    assert taken(made)[key] == wanted
    assert not made.refusals


@pytest.mark.parametrize(
    "text",
    [
        "GRPOConfig()",
        "LlavaForConditionalGeneration.from_pretrained('a')",
        "AutoModelForVision2Seq.from_pretrained('a')",
        "FastVisionModel.from_pretrained('a')",
        "RewardConfig()",
        "get_peft_model(m, IA3Config())",
        "GPTQConfig(bits=4)",
        "AutoModelForTokenClassification.from_pretrained('a')",
        "AutoModelForMaskedLM.from_pretrained('a')",
        "Trainer(data_collator=DataCollatorForLanguageModeling(t))",
        "Trainer(data_collator=DataCollatorForLanguageModeling(t, mlm=True))",
        "TrainingArguments('other')",
        "SFTConfig(dataset_kwargs={'skip_prepare_dataset': True})",
    ],
)
def test_another_kind_of_training_is_refused(text: str) -> None:
    first = "" if "SFTConfig" in text else "TrainingArguments('out')"
    assert read(f"{first}\n{text}\n").refusals


ROWS = "Trainer(train_dataset={}, eval_dataset={})\nTrainingArguments('out')\n"


@pytest.mark.parametrize(
    ("before", "train", "evaluated", "wanted_train", "wanted_eval"),
    [
        (
            "d = load_dataset('a/b', 'c')",
            "d['train']",
            "d['test']",
            [{"path": "a/b", "name": "c"}],
            [{"path": "a/b", "name": "c", "split": "test"}],
        ),
        (
            "d = load_dataset('a/b', split='train_sft')",
            "d",
            "None",
            [{"path": "a/b", "split": "train_sft"}],
            None,
        ),
        ("d = load_dataset('json', data_files='x.jsonl')", "d['train']", "None", [{"path": "x.jsonl"}], None),
        (
            "d = load_dataset('csv', data_files={'train': 'x.csv'})",
            "d['train']",
            "None",
            [{"path": "x.csv"}],
            None,
        ),
        (
            "d = load_dataset('a/b')['train']\nd = d.shuffle(seed=1)\nd = d.train_test_split(test_size=0.1)",
            "d['train']",
            "d['test']",
            [{"path": "a/b"}],
            {"split": 0.1},
        ),
        (
            "d = load_dataset('a/b', split='train').remove_columns(['x'])",
            "d",
            "None",
            [{"path": "a/b"}],
            None,
        ),
        ("d = load_from_disk('./x')", "d", "None", [{"path": "./x"}], None),
        ("d = Dataset.from_json('x.json')", "d", "None", [{"path": "x.json"}], None),
    ],
)
def test_rows_are_followed_to_where_they_are_loaded(
    before: str, train: str, evaluated: str, wanted_train: Any, wanted_eval: Any
) -> None:
    made = read(f"{before}\n{ROWS.format(train, evaluated)}")
    assert made.value("data.train") == wanted_train
    assert made.value("data.eval") == wanted_eval


@pytest.mark.parametrize(
    ("before", "key", "effect"),
    [
        ("d = load_dataset('a/b', split='train[:10%]')", "split", Effect.TRAINING),
        ("d = load_dataset('a/b').filter(lambda r: r['x'])", ".filter(…)", Effect.TRAINING),
        ("d = load_dataset('a/b').select(range(9))", ".select(…)", Effect.TRAINING),
        (
            "def f(r):\n    return {'text': r['q'] + r['a']}\nd = load_dataset('a/b').map(f)",
            "rows: f",
            Effect.NEEDED,
        ),
        ("d = load_dataset('imdb')", "load_dataset", Effect.NEEDED),
        ("d = Dataset.from_list([])", "data.train", Effect.NEEDED),
        ("d = build()", "data.train", Effect.NEEDED),
        ("d = load_dataset(args.name)", "load_dataset(path=)", Effect.NEEDED),
        ("d = load_dataset('a/b').train_test_split(test_size=1000)", "data.eval", Effect.NEEDED),
    ],
)
def test_rows_that_no_recipe_can_name_are_listed(before: str, key: str, effect: Effect) -> None:
    made = read(f"{before}\n{ROWS.format('d', 'None')}")
    assert dropped(made)[key] is effect


def test_a_type_of_4_bits_that_is_computed_is_asked_for() -> None:
    made = read("""
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=pick())
        m = AutoModelForCausalLM.from_pretrained("a/b", quantization_config=config)
        TrainingArguments("out")
    """)
    assert dropped(made)["bnb_4bit_compute_dtype"] is Effect.NEEDED


def test_functions_of_rows_on_an_unread_way_to_the_trainer_are_listed() -> None:
    """The only rows that are loaded are taken, and what is done with any rows is asked for."""
    made = read("""
        def prompt(r, args): return {"text": r["q"] + r["a"]}
        def build():
            d = load_dataset("a/b", split="train").train_test_split(test_size=0.1)
            return d["train"].map(partial(prompt, args=1)), d["test"].filter(bool)
        train, test = build()
        Trainer(train_dataset=train)
        TrainingArguments("out")
    """)
    assert made.value("data.train") == [{"path": "a/b"}]
    assert dropped(made)["rows: prompt"] is Effect.NEEDED
    assert dropped(made)[".filter(…)"] is Effect.TRAINING


def test_a_function_that_only_tokenizes_names_the_column_and_the_length() -> None:
    made = read("""
        d = load_dataset("a/b")
        d = d.map(lambda row: tokenizer(row["body"], truncation=True, max_length=256), batched=True)
        Trainer(train_dataset=d["train"])
        TrainingArguments("out")
    """)
    assert made.value("data.train") == [{"path": "a/b", "format": "text", "columns": {"text": "body"}}]
    assert made.value("data.max_length") == 256


@pytest.mark.parametrize(
    ("text", "key", "effect"),
    [
        ("Trainer(compute_metrics=f)", "compute_metrics", Effect.NONE),
        ("Trainer(callbacks=[Mine()])", "callbacks", Effect.TRAINING),
        ("Trainer(optimizers=(o, s))", "optimizers", Effect.TRAINING),
        ("Trainer(data_collator=mine)", "data_collator", Effect.TRAINING),
        ("class T(Trainer):\n    def compute_loss(self):\n        pass", "T.compute_loss", Effect.TRAINING),
        ("LoraConfig(r=4)", "LoraConfig", Effect.TRAINING),
        ("SFTTrainer(formatting_func=f)", "rows: f", Effect.NEEDED),
        ("AutoModelForCausalLM.from_pretrained(name)", "from_pretrained", Effect.NEEDED),
        (f"os.environ['HF_TOKEN'] = '{TOKEN}'", "HF_TOKEN", Effect.NONE),
        ("SFTTrainer(made_up=1)", "made_up", Effect.TRAINING),
    ],
)
def test_python_that_a_recipe_cannot_hold_is_listed(text: str, key: str, effect: Effect) -> None:
    made = read(f"{text}\nTrainingArguments('out')\n")
    assert dropped(made)[key] is effect
    assert TOKEN not in repr(made)


@pytest.mark.parametrize(
    ("text", "key", "wanted"),
    [
        ("", "trainer.learning_rate", 2e-5),
        ("", "precision", "bf16"),
        ("", "data.max_length", 1024),
        ("bf16=False", "precision", "fp32"),
        ("max_length=4096", "data.max_length", 4096),
        ("packing=True", "data.packing", True),
        ("packing=True, packing_strategy='bfd_split'", "data.overlong", "split"),
        ("completion_only_loss=False", "data.loss_on", "all"),
        ("assistant_only_loss=True", "data.loss_on", "assistant"),
        ("dataset_num_proc=4", "data.num_proc", 4),
        ("padding_free=True", "data.padding_free", True),
        ("pad_to_multiple_of=8", "data.pad_to_multiple_of", 8),
        ("eval_strategy='steps'", "trainer.eval_steps", 10),
    ],
)
def test_sft_config_has_defaults_of_its_own(text: str, key: str, wanted: Any) -> None:
    assert taken(read(f"SFTConfig({text})\n"))[key] == wanted


def test_a_text_field_of_another_name_is_a_column() -> None:
    made = read(
        "d = load_dataset('a/b')\nSFTTrainer(train_dataset=d['train'])\nSFTConfig(dataset_text_field='c')\n"
    )
    assert made.value("data.train") == [{"path": "a/b", "format": "text", "columns": {"text": "c"}}]
    assert dropped(made) == {}


def test_chats_or_not_needs_a_word() -> None:
    made = read("d = load_dataset('a/b')\nSFTTrainer(train_dataset=d['train'])\nSFTConfig()\n")
    assert dropped(made) == {"data.loss_on": Effect.NEEDED}


def test_dpo_is_its_own_task() -> None:
    made = read("DPOConfig(beta=0.3)")
    assert (made.value("task"), made.value("trainer.beta"), made.value("trainer.learning_rate")) == (
        "dpo",
        0.3,
        1e-6,
    )


def test_no_keyword_vanishes() -> None:
    names = {*trainer_fields(), *TRAINER_REMOVED}
    for value in ("0.5", "True", "None", "'no'", "3", "unknown()"):
        made = arguments(", ".join(f"{name}={value}" for name in sorted(names)))
        told = made.seen | {problem.path for problem in made.refusals}
        assert names <= told, value


def test_imports_by_other_names_are_followed() -> None:
    made = read("from transformers import TrainingArguments as TA\nTA('out', learning_rate=0.5)\n")
    assert made.value("trainer.learning_rate") == 0.5


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    read(f"open({str(target)!r}, 'w')\nTrainingArguments('out', learning_rate=open({str(target)!r}, 'w'))\n")
    assert not target.exists()


@pytest.mark.parametrize(
    "text",
    [
        "(" * 90 + "1" + ")" * 90,
        "+".join(["1"] * 400),
        "a" + ".b" * 300,
        "[" * 60 + "]" * 60,
        "9 ** 64 * 10 ** 64",
    ],
)
def test_deep_expressions_end(text: str) -> None:
    tree = ast.parse(f"x = {text}")
    source = Source(tree)
    try:
        source.value(tree.body[0].value, None)  # type: ignore[attr-defined]
    except Unresolved:
        return


def test_the_written_scripts() -> None:
    full = script.read((CASES / "trainer_full.py").read_text(), "trainer_full.py")
    assert full.value("data.train") == [
        {"path": "bigcode/the-stack-smol", "format": "text", "columns": {"text": "content"}}
    ]
    assert full.value("data.eval") == {"split": 0.05}
    assert {entry.key for entry in full.dropped} == {"output_dir", "hub_token", "WANDB_API_KEY"}
    assert "abcdefghijABCDEFGHIJ" not in repr(full)
    sft = script.read((CASES / "sft_qlora.py").read_text(), "sft_qlora.py")
    assert sft.value("adapter.target_modules") == ["q_proj", "v_proj"]
    assert sft.value("model.quantization") == {
        "type": "nf4",
        "double_quant": False,
        "compute_dtype": "bfloat16",
    }


@pytest.mark.parametrize("size", ["200", "args.test_size"])
def test_a_number_of_rows_to_evaluate_on_is_asked_for_and_no_split_is_made_up(size: str) -> None:
    made = read(f"""
        parts = load_dataset("json", data_files="x.jsonl")["train"].train_test_split(test_size={size})
        Trainer(args=TrainingArguments("o"), train_dataset=parts["train"], eval_dataset=parts["test"])
    """)
    assert taken(made)["data.train"] == [{"path": "x.jsonl"}]
    assert "data.eval" not in made.taken
    assert dropped(made)["data.eval"] is Effect.NEEDED
