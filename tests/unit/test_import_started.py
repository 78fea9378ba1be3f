"""Scripts that a launch line starts, read with its flags."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RecipeError
from launcher.importing.flags import DECIDES, OWN
from launcher.importing.found import Effect
from launcher.importing.join import Imported, import_files

HEAD = """\
import argparse, deepspeed, fire, transformers
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer
from transformers import TrainingArguments as Arguments
from peft import LoraConfig, get_peft_model
"""
CLASSES = """
@dataclass
class Model:
    model_name_or_path: str = field(default="a/b")
    use_lora: bool = field(default=False)
    lora_r: int = 8
    targets: list[str] = field(default=None)
    note: str = ""

@dataclass
class TrainingArguments(transformers.TrainingArguments):
    optim: str = field(default="adamw_8bit")
    learning_rate: float = field(default=3e-4)
    model_max_length: int = 512

parser = HfArgumentParser((Model, TrainingArguments))
model_args, args = parser.parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
if model_args.use_lora:
    model = get_peft_model(model, LoraConfig(r=model_args.lora_r, target_modules=model_args.targets))
class Mine(Trainer):
    pass
Mine(model=model, args=args)
"""
ARGPARSE = """
parser = argparse.ArgumentParser()
parser.add_argument("--model_name", "-m", dest="name", default="a/b")
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--half", action="store_true")
parser.add_argument("--other", type=int)
parser = deepspeed.add_config_arguments(parser)
a = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(a.name)
args = transformers.TrainingArguments("o", learning_rate=a.lr * 2, bf16=a.half, deepspeed=a.deepspeed_config)
Trainer(model, args)
"""
FIRE = """
def train(base_model: str = "", rate: float = 3e-4, batch: int = 8, on: bool = False):
    model = AutoModelForCausalLM.from_pretrained(base_model)
    Trainer(model, transformers.TrainingArguments("o", learning_rate=rate, bf16=on, seed=batch))
fire.Fire(train)
"""


@pytest.fixture(autouse=True)
def _within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def started(script: str, line: str, name: str = "train.py") -> Imported:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(HEAD + textwrap.dedent(script))
    Path("run.sh").write_text(line)
    return import_files(["run.sh"])


def refused(script: str, line: str) -> list[tuple[str | None, str]]:
    with pytest.raises(RecipeError) as caught:
        started(script, line)
    return [(problem.path, problem.code) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("script", "flags", "key", "wanted"),
    [
        (CLASSES, "--learning_rate 2e-5", "trainer.learning_rate", 2e-5),
        (CLASSES, "--bf16", "precision", "bf16"),
        (CLASSES, "", "trainer.learning_rate", 3e-4),
        (CLASSES, "", "trainer.optim", "adamw_8bit"),
        (CLASSES, "--optim adamw_torch", "trainer.optim", "adamw_torch"),
        (CLASSES, "", "precision", "fp32"),
        (CLASSES, "", "model.name_or_path", "a/b"),
        (CLASSES, "--model_name_or_path c/d", "model.name_or_path", "c/d"),
        (CLASSES, "--lora_r 4", "adapter.r", None),
        (CLASSES, "--use_lora --lora_r 4 --targets q k", "adapter.r", 4),
        (CLASSES, "--use_lora True --targets q k", "adapter.target_modules", ["q", "k"]),
        (CLASSES, "--use_lora False --targets q k", "adapter.target_modules", None),
        (CLASSES, "--deepspeed ds.json", "sharding.engine", "deepspeed"),
        (CLASSES, "--seed 3", "sharding.engine", "ddp"),
        (ARGPARSE, "--lr 2e-5", "trainer.learning_rate", 4e-5),
        (ARGPARSE, "", "trainer.learning_rate", 2e-4),
        (ARGPARSE, "--half", "precision", "bf16"),
        (ARGPARSE, "", "precision", "fp32"),
        (ARGPARSE, "-m c/d", "model.name_or_path", "c/d"),
        (ARGPARSE, "--model_name c/d", "model.name_or_path", "c/d"),
        (ARGPARSE, "--deepspeed --deepspeed_config ds.json", "sharding.engine", "deepspeed"),
        (FIRE, "--base_model c/d --rate 1e-3", "trainer.learning_rate", 1e-3),
        (FIRE, "--base_model c/d", "trainer.learning_rate", 3e-4),
        (FIRE, "--base_model c/d --on", "precision", "bf16"),
        (FIRE, "--base_model c/d --batch=4", "seed", 4),
        (FIRE, "--base_model c/d", "model.name_or_path", "c/d"),
    ],
)
def test_the_script_is_read_with_the_flags_of_its_line(
    script: str, flags: str, key: str, wanted: Any
) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    made = started(script, f"torchrun --nproc_per_node 2 train.py {flags}")
    found = made.taken.get(key)
    assert (found.value if found else None) == wanted
    assert made.tools[:2] == ["launch line", "training script"]


def test_a_list_of_fire_is_a_list() -> None:
    function = "def train(base_model: str = '', targets: List[str] = None):\n"
    body = """
        model = AutoModelForCausalLM.from_pretrained(base_model)
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
        Trainer(model, transformers.TrainingArguments("o"))
    fire.Fire(train)
    """
    script = "\n" + function + textwrap.dedent(body).replace("\n", "\n    ").replace("    fire.F", "fire.F")
    for given in ("'[q_proj,v_proj]'", "\"['q_proj', 'v_proj']\"", "'(q_proj, v_proj)'"):
        made = started(script, f"python train.py --base_model c/d --targets {given}")
        assert made.taken["adapter.target_modules"].value == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    "parse", ["parse_args_into_dataclasses(return_remaining_strings=True)", "parse_known_args()"]
)
def test_what_a_lenient_parser_leaves_is_listed(parse: str) -> None:
    script = CLASSES.replace("parse_args_into_dataclasses()", parse)
    made = started(script, "python train.py --made_up 1 --learning_rate 1e-5")
    assert {entry.key: entry.effect for entry in made.dropped}["--made_up"] is Effect.NONE
    assert made.taken["trainer.learning_rate"].value == 1e-5


@pytest.mark.parametrize(
    ("flags", "ok"), [("", True), ("--use_lora", True), ("--use_lora --lora_r 4", False)]
)
def test_a_quantizer_in_a_branch_that_is_not_gone_is_no_refusal(flags: str, ok: bool) -> None:
    test = "GPTQConfig(bits=4) if model_args.use_lora and model_args.lora_r == 4 else None"
    script = "from transformers import GPTQConfig\n" + CLASSES.replace(
        "model_args.model_name_or_path)", f"model_args.model_name_or_path, quantization_config={test})"
    )
    line = f"torchrun train.py {flags}"
    assert ("model.name_or_path" in started(script, line).taken) if ok else refused(script, line)


def test_an_empty_default_names_no_model() -> None:
    loads = "\n    AutoTokenizer.from_pretrained(base_model)\n    Trainer("
    script = "from transformers import AutoTokenizer\n" + FIRE.replace("\n    Trainer(", loads)
    made = started(script, "python train.py --rate 1e-3")
    assert not {"model.name_or_path", "model.tokenizer"} & made.taken.keys()
    assert {entry.key: entry.effect for entry in made.dropped}["model.name_or_path"] is Effect.NEEDED


def test_the_config_of_bits_goes_before_the_old_keywords() -> None:
    config = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')"
    before = f"load_in_4bit=True, quantization_config={config}"
    script = "from transformers import BitsAndBytesConfig\n" + CLASSES.replace(
        "model_args.model_name_or_path)", f"model_args.model_name_or_path, {before})"
    )
    made = started(script, "torchrun train.py --use_lora --targets q_proj")
    assert made.taken["model.quantization"].value["type"] == "nf4"


def test_the_config_after_a_bare_switch_is_read() -> None:
    """`--deepspeed` of deepspeed.add_config_arguments has no value."""
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    line = "deepspeed train.py --deepspeed --deepspeed_config ds.json --half"
    made = started(ARGPARSE, line)
    assert made.tools == ["launch line", "training script", "DeepSpeed config"]
    assert (made.taken["sharding.zero_stage"].value, made.taken["precision"].value) == (3, "bf16")


@pytest.mark.parametrize(
    ("flags", "key", "reason"),
    [
        ("--note x", "--note", OWN),
        ("--model_max_length 64", "--model_max_length", OWN),
        ("--use_lora --targets q", "--use_lora", DECIDES),
        ("--model_name_or_path $M", "from_pretrained", "computed at run time"),
        ("--learning_rate $LR", "--learning_rate", "known only when the line is run"),
    ],
)
def test_a_flag_that_nothing_takes_is_listed(flags: str, key: str, reason: str) -> None:
    made = started(CLASSES, f"python train.py {flags}")
    assert (key, reason) in {(entry.key, entry.reason) for entry in made.dropped}
    if "$LR" in flags:
        assert "trainer.learning_rate" not in made.taken


@pytest.mark.parametrize(
    ("script", "flags", "path"),
    [
        (CLASSES, "--made_up 1", "--made_up"),
        (CLASSES, "--bf16 x.json", "x.json"),
        (CLASSES, "--deepspeed --bf16", "--deepspeed"),
        (CLASSES, "$EXTRA", "$EXTRA"),
        (ARGPARSE, "--deepspeed ds.json", "ds.json"),
        (ARGPARSE, "--lr", "--lr"),
        (
            "from elsewhere import Model\np = HfArgumentParser((Model, Arguments))\nTrainer(args=p)",
            "",
            "train.py",
        ),
        ("p = HfArgumentParser(transformers.TrainingArguments)\n", "", "train.py"),
        ("from trl import GRPOConfig, TrlParser\np = TrlParser(GRPOConfig)\n", "", "train.py"),
        ("for batch in loader:\n    engine.step()\n", "--learning_rate 1e-4", "train.py"),
        (ARGPARSE.replace("TrainingArguments", "Config"), "--lr 1e-4", "train.py"),
    ],
)
def test_what_is_not_declared_or_trains_in_another_way_is_refused(script: str, flags: str, path: str) -> None:
    assert refused(script, f"torchrun train.py {flags}") == [(path, "import-refused")]


PASSED = """
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    use_lora: bool = False
    name: str = "a/b"

def load(path, use_lora=True, half=False, alpha=3):
    dtype = "float32"
    if half:
        dtype = "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if use_lora:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=alpha, target_modules=["q"]))
    return model

def main():
    args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    Trainer(load(args.name, use_lora=args.use_lora, half=args.bf16), args)
"""


@pytest.mark.parametrize(
    ("flags", "key", "wanted"),
    [
        ("", "model.name_or_path", "a/b"),
        ("--name c/d", "model.name_or_path", "c/d"),
        ("", "adapter.r", None),
        ("--use_lora", "adapter.r", 4),
        ("--use_lora", "adapter.lora_alpha", 3),
        ("--bf16", "model.dtype", None),  # two assignments: which one holds is not followed
    ],
)
def test_a_parameter_is_what_the_only_call_gives_it(flags: str, key: str, wanted: Any) -> None:
    found = started(PASSED, f"python train.py {flags}").taken.get(key)
    assert (found.value if found else None) == wanted


@pytest.mark.parametrize("more", ["\nload('e/f', True)\n", "\nload(*rows)\n"])
def test_a_parameter_of_several_calls_is_not_known(more: str) -> None:
    made = started(PASSED + more, "python train.py --use_lora")
    assert "model.name_or_path" not in made.taken
    assert "adapter.lora_alpha" not in made.taken or made.taken["adapter.lora_alpha"].is_default


def test_a_module_is_looked_for_as_a_file() -> None:
    made = started(CLASSES, "python -m pkg.train --learning_rate 1 --seed 3", "pkg/train.py")
    assert made.taken["seed"].value == 3


def test_places_are_those_of_the_line_and_of_the_script() -> None:
    made = started(CLASSES, "\ntorchrun train.py --seed 3 --note x")
    assert str(made.taken["seed"].place) == "run.sh:2"
    assert str(made.taken["trainer.optim"].place).startswith("train.py:")
    assert {str(entry.place) for entry in made.dropped if entry.key == "--note"} == {"run.sh:2"}


def test_an_adapter_that_is_loaded_frozen_is_asked_for() -> None:
    made = "get_peft_model(model, LoraConfig(r=model_args.lora_r, target_modules=model_args.targets))"
    script = CLASSES.replace(made, "PeftModel.from_pretrained(model, 'x')")
    read = started(script, "python train.py --use_lora")
    assert ("adapter.path", Effect.NEEDED) in {(entry.key, entry.effect) for entry in read.dropped}
    assert not [key for key in read.taken if key.startswith("adapter")]
