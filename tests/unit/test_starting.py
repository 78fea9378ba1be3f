"""What `init` writes plans: every goal with a model of every family, on small and large hardware."""

from __future__ import annotations

import json
import re
from collections import defaultdict

import pytest

from launcher.cli import main
from launcher.errors import DoesNotFit, RecipeError
from launcher.files.shipped import facts_file
from launcher.inputs.fitting_method import default_model, fit, model_keys
from launcher.machine.hardware import Hardware, parse_hardware, with_host_memory
from launcher.parsing import parse
from launcher.planner.starting import GOALS, LONGEST, Rows, StartAnswers, draft, first_length
from launcher.recipe.yaml_writer import recipe_text

MACHINES = ("cpu", "1xT4-16GB", "1xRTX4090-24GB", "8xA100-80GB", "2x8xH100-80GB", "3x48GB")
FORMATS = {goal: formats[0] for goal, formats in GOALS.items()} | {"instructions": "prompt-completion"}
IN_CLOSED_FORM = tuple(goal for goal in GOALS if goal != "images")
"""Goals whose models plan without torch (images: tests/cli/test_init_cli.py)."""
SHIPPED = json.loads(facts_file("models.json").read_text("utf-8"))["models"]
TOO_LARGE = {name for name, model in SHIPPED.items() if model["params"] > 25e9}
"""Models that do not fit the small machines."""


def machine(text: str) -> Hardware:
    return with_host_memory(parse_hardware(text), 64 * 2**30)


def rows(goal: str, **changes) -> Rows:
    values = {"format": FORMATS[goal], "columns": {}, "count": 1204, "longest": 3600, **changes}
    if isinstance(values["longest"], int):
        values["longest"] = ["x" * values["longest"]]
    values.setdefault("first", {"answer": ["4", "7"]} if goal == "reasoning" else {})
    return Rows("rows.jsonl", **values)


def smallest():
    """Of each family."""
    families = {}
    for name in sorted(SHIPPED, key=lambda name: SHIPPED[name]["params"]):
        families.setdefault(SHIPPED[name]["config"]["model_type"], name)
    return families.values()


def on_one_machine():
    """A model of each family for each goal they can learn, the machines in turn."""
    number = 0
    for model in smallest():
        later = IN_CLOSED_FORM[5:]
        for goal in (*IN_CLOSED_FORM[:5], *later[number % len(later) :][:1]):
            pictures = "vit" in model
            if pictures and goal != "classify":
                continue
            number += 1
            yield model, goal, MACHINES[number % len(MACHINES)]


@pytest.mark.slow(share=4)
def test_every_goal_model_and_machine(tmp_path):
    """A plan, or the reason why there is none: too little memory, or a family that cannot learn it."""
    outcomes = defaultdict(list)
    for model, goal, label in on_one_machine():
        seen = rows(goal, format="image", longest=None) if "vit" in model else rows(goal)
        try:
            fit(model, goal, seen, machine(label))
            outcomes["planned"].append((model, label))
        except DoesNotFit:
            if goal in IN_CLOSED_FORM[:5]:  # rollouts and batches of texts need more than the rows
                outcomes["misses"].append((model, label))
        except RecipeError as error:
            outcomes[error.problems[0].code].append((model, label))
    assert set(outcomes) == {"planned", "misses", "unknown-architecture", "multimodal-model"}, outcomes
    assert len(outcomes["planned"]) > 100
    assert {model for model, _ in outcomes["misses"]} <= TOO_LARGE


@pytest.mark.parametrize("label", ["cpu", "1xT4-16GB", "8xA100-80GB"])
def test_the_model_that_is_proposed_fits(label):
    for goal in IN_CLOSED_FORM:
        assert default_model(goal, rows(goal), machine(label)), (goal, label)
    image = rows("classify", format="image", longest=None)
    assert default_model("classify", image, machine(label)) == "google/vit-large-patch16-224"
    assert default_model("chat", rows("chat"), machine("1x1GB")) == ""


@pytest.mark.parametrize(
    ("model", "goal", "label", "method"),
    [
        ("Qwen/Qwen3-0.6B", "chat", "1xRTX4090-24GB", "full"),
        ("Qwen/Qwen3-8B", "chat", "1xRTX4090-24GB", "lora"),
        ("Qwen/Qwen3-8B", "chat", "1xT4-16GB", "qlora"),
        ("meta-llama/Llama-3.1-70B", "instructions", "1xH100-80GB", "qlora"),
        ("meta-llama/Llama-3.1-8B", "text", "8xH100-80GB", "full"),
        ("meta-llama/Llama-3.1-8B", "text", "1xRTX4090-24GB", "lora"),
        ("google-bert/bert-large-uncased", "classify", "1xV100-16GB", "full"),
    ],
)
def test_what_fits_is_trained(model, goal, label, method):
    assert fit(model, goal, rows(goal), machine(label)).method == method


def test_the_reason_names_what_did_not_fit():
    fitting = fit("meta-llama/Llama-2-13b-hf", "text", rows("text"), machine("1xRTX4090-24GB"))
    assert (fitting.method, fitting.missed) == ("qlora", ("full", "lora"))
    _, notes = draft(fitting.start, fitting.method, fitting.length, fitting.missed)
    assert notes["adapter"].endswith("a full fine-tune and LoRA over 16-bit weights do not fit this hardware")


def test_a_family_that_cannot_pack_gets_texts_that_are_not_packed(tmp_path):
    """The gated delta rule of Qwen3.5 carries a document's state into the next one."""
    config = {
        "model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32000,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    fitting = fit(str(tmp_path), "text", rows("text"), machine("1xRTX4090-24GB"))
    data, _ = draft(fitting.start, fitting.method, fitting.length)
    assert "packing" not in data["data"]
    packed = fit("EleutherAI/pythia-1b", "text", rows("text"), machine("1xRTX4090-24GB"))
    assert draft(packed.start, packed.method, packed.length)[0]["data"]["packing"] is True


def start(goal="chat", model="Qwen/Qwen3-0.6B", label="1xRTX4090-24GB", **changes) -> StartAnswers:
    return fit(model, goal, rows(goal, **changes), machine(label)).start


@pytest.mark.parametrize(
    ("characters", "tokens"), [(0, 256), (400, 256), (1000, 512), (3600, 2048), (20_000, LONGEST)]
)
def test_the_length_holds_the_longest_row(characters, tokens):
    assert first_length(start(longest=characters)) == tokens


def test_texts_of_other_scripts_have_more_tokens():
    for text, length in (("x" * 1600, 512), ("ж" * 1600, 1024), ("汉" * 1600, 2048)):
        assert first_length(start(longest=[text])) == length


def test_the_length_is_no_longer_than_the_model_can_see():
    assert first_length(start("instructions", "openai-community/gpt2", longest=20_000)) == 1024


def test_a_shorter_length_is_taken_where_only_that_fits_and_it_holds_the_rows():
    fitting = fit("meta-llama/Llama-3.1-8B", "chat", rows("chat"), machine("1x16GB"))
    assert fitting.length == 1024 < first_length(fitting.start)


@pytest.mark.parametrize(
    ("count", "label", "size", "epochs"),
    [
        (10, "cpu", 4, 3), (200, "cpu", 8, 3), (5000, "cpu", 32, 3), (50_000, "3x48GB", 33, 1),
        (50_000, "8x8xH100-80GB", 64, 1),
    ],
)  # fmt: skip
def test_batch_and_epochs_follow_rows_and_devices(count, label, size, epochs):
    data, _ = draft(start(count=count, label=label), "full", 1024)
    assert (data["global_batch_size"], data["trainer"]["num_train_epochs"]) == (size, epochs)


def test_rows_are_held_out_where_there_are_enough():
    assert "eval" not in draft(start(count=199), "full", 1024)[0]["data"]
    assert draft(start(count=200), "full", 1024)[0]["data"]["eval"] == {"split": 0.05}
    assert draft(start(count=200_000), "full", 1024)[0]["data"]["eval"] == {"split": 0.005}
    note = draft(start(count=240), "full", 1024)[1]["data.eval"]
    assert re.findall(r"\d+", note) == ["12", "240"]
    note = draft(start(count=200_000, more=True), "full", 1024)[1]["data.eval"]
    assert re.findall(r"[\d.]+", note) == ["0.5"]


def test_a_base_model_gets_a_chat_template_and_a_chat_model_keeps_its_own(tmp_path):
    base, _ = draft(start(model="EleutherAI/pythia-1b"), "full", 1024)
    assert base["model"]["add_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert "add_generation_prompt" in base["model"]["chat_template"]
    for model in ("Qwen/Qwen3-0.6B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"):
        assert "chat_template" not in draft(start(model=model), "full", 1024)[0]["model"]


def test_a_model_that_overflows_fp16_gets_fp32_where_there_is_no_bf16():
    fitting = fit("google/gemma-3-1b-pt", "instructions", rows("instructions"), machine("1xT4-16GB"))
    assert draft(fitting.start, fitting.method, fitting.length)[0]["precision"] == "fp32"
    fitting = fit("google/gemma-3-1b-pt", "instructions", rows("instructions"), machine("1xL4-24GB"))
    assert draft(fitting.start, fitting.method, fitting.length)[0]["precision"] == "auto"


def test_a_folder_of_gguf_files_is_a_model(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "x.Q4.gguf").touch()
    found = {"name_or_path": str(tmp_path / "one"), "gguf_file": "x.Q4.gguf"}
    assert model_keys(str(tmp_path / "one")) == found
    assert model_keys(str(tmp_path / "one" / "x.Q4.gguf")) == found
    (tmp_path / "one" / "y.gguf").touch()
    with pytest.raises(RecipeError, match="several GGUF files"):
        model_keys(str(tmp_path / "one"))
    assert model_keys("Qwen/Qwen3-8B") == {"name_or_path": "Qwen/Qwen3-8B"}


def test_the_goals_of_the_command_line_are_those_of_the_plan():
    for goal in GOALS:
        assert parse(["init", "--goal", goal])[1]["goal"] == goal
    assert main(["init", "--goal", "sing"]) == 2


def test_recipes_tell_their_reasons():
    begun = start("instructions", "Qwen/Qwen3-8B")
    text = recipe_text(*draft(begun, "lora", 1024))
    for words in (
        "# tokens; the longest row has about 900",
        "# usual for LoRA",
        "# a small adapter is trained",
    ):
        assert words in text
