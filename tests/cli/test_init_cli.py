"""`init`: flags, questions on a terminal, a look at the data; nothing is written that does not plan."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from patience import Deadline, patience

from launcher.cli import main
from launcher.commands import init
from launcher.inputs.data_survey import goals_of, look, rows_for
from launcher.machine.hardware import Hardware
from launcher.models.model_config import shipped_model_config
from launcher.planner.starting import GOALS

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x" * 3600}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
MESSAGES_ON_BOTH_SIDES = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
PAIR = {"prompt": "two and two", "completion": "four"}
SCORED = {"sentence1": "a", "sentence2": "b", "score": 0.5}
RANKER = "cross-encoder/ms-marco-MiniLM-L12-v2"
GPU = "1xRTX4090-24GB"


def called(capsys, *argv):
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_rows(name: str, *rows: object, times: int = 1) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows * times), encoding="utf-8")
    return name


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(data: str, goal: str, model: str = "Qwen/Qwen3-0.6B", on: str = GPU) -> tuple[str, ...]:
    return ("init", "--model", model, "--data", data, "--on", on, "--goal", goal)


class Typed(io.StringIO):
    """A terminal on which these lines are typed."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch):
    """A call of `init` that answers its questions; a machine with one RTX 4090."""

    def call(*lines: str, words: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(sys, "stdin", Typed("".join(line + "\n" for line in lines)))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        return main(["init", *words])

    found = Hardware(1, 1, "RTX4090-24GB", 24564 * 2**20, (8, 9))
    monkeypatch.setattr(init.probe, "probe_hardware", lambda: found)
    return call


def test_flags_alone(capsys, here):
    write_rows("rows.jsonl", CHAT, times=1204)
    code, out, _ = called(capsys, *flags("rows.jsonl", "chat"))
    assert code == 0
    assert out.startswith("wrote qwen3_0_6b_chat.yaml: Full fine-tune of Qwen/Qwen3-0.6B on conversations")
    for words in (
        "  device memory  ",
        "`effilaunch plan qwen3_0_6b_chat.yaml` shows it whole",
        "effilaunch run qwen3_0_6b_chat.yaml --tiny",
        "effilaunch validate",
    ):
        assert words in out
    text = Path("qwen3_0_6b_chat.yaml").read_text()
    assert "# Data: 1,204 rows, chat messages, the longest about 900 tokens by a guess" in text
    assert "- path: rows.jsonl\n" in text
    assert called(capsys, "validate", "qwen3_0_6b_chat.yaml")[0] == 0
    assert called(capsys, "plan", "qwen3_0_6b_chat.yaml")[0] == 0


def test_json(capsys):
    write_rows("rows.jsonl", PAIR, times=3)
    code, out, _ = called(capsys, *flags("rows.jsonl", "instructions"), "--json")
    said = json.loads(out)
    assert code == 0
    assert said.keys() == {
        "schema_version", "command", "path", "goal", "task", "model", "hardware", "method", "rows",
        "not_checked", "next",
    }  # fmt: skip
    assert said["rows"] == {
        "path": "rows.jsonl", "format": "prompt-completion", "columns": {}, "count": 3, "more": False,
        "longest_characters": 15, "longest_tokens": 4,
    }  # fmt: skip
    assert Path(said["path"]).is_file()


def test_tokens_are_counted_by_the_models_tokenizer_where_it_is_there(capsys, here):
    tokenizers = pytest.importorskip("tokenizers")
    (here / "model").mkdir()
    (here / "model/config.json").write_text(json.dumps(shipped_model_config("huggyllama/llama-7b")))
    answer = "请把下面的句子翻译成英文。今天天气很好我们去公园散步。" * 10
    write_rows("rows.jsonl", PAIR, {"prompt": "", "completion": answer}, times=2)

    def tokens() -> int:
        said = json.loads(called(capsys, *flags("rows.jsonl", "instructions", "./model"), "--json")[1])
        return said["rows"]["longest_tokens"]

    assert tokens() == -(-len(answer.encode()) // 4)
    alphabet = tokenizers.models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>")
    tokenizers.Tokenizer(alphabet).save(str(here / "model/tokenizer.json"))
    assert tokens() == len(answer)
    assert "by the model's tokenizer" in Path("model_instructions_2.yaml").read_text()
    (here / "model/tokenizer.json").write_text("{")
    assert tokens() == -(-len(answer.encode()) // 4)


def test_what_was_not_tokenised_is_told(capsys):
    write_rows("rows.jsonl", PAIR)
    said = json.loads(called(capsys, *flags("rows.jsonl", "instructions"), "--json")[1])
    assert "Qwen/Qwen3-0.6B" in said["not_checked"]


@pytest.mark.slow
@pytest.mark.parametrize("eos", [True, False])
def test_the_first_rows_are_prepared_where_the_tokenizer_is_there(eos, capsys, here):
    pytest.importorskip("transformers")
    from grounds import tokenizer_of_1024_words

    tokenizer_of_1024_words().save_pretrained(here / "model")
    (here / "model/config.json").write_text(json.dumps(shipped_model_config("huggyllama/llama-7b")))
    if not eos:
        config = json.loads((here / "model/tokenizer_config.json").read_text())
        (here / "model/tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    write_rows("rows.jsonl", {"prompt": "w1 w2", "completion": "w3"}, times=150)
    code, out, _ = called(capsys, *flags("rows.jsonl", "instructions", "./model"), "--json")
    said = json.loads(out)
    assert [path.name for path in here.glob("*.yaml")] == ["model_instructions.yaml"] * eos
    if eos:
        assert (code, said["not_checked"]) == (0, None)
    else:
        assert (code, [error["code"] for error in said["errors"]]) == (2, ["eos-missing"])


@pytest.mark.parametrize(
    ("goal", "row", "task", "model"),
    [
        ("instructions", {"instruction": "a", "input": "b", "output": "c"}, "causal-lm", "Qwen/Qwen3-0.6B"),
        ("instructions", PAIR, "seq2seq-lm", "google-t5/t5-large"),
        ("chat", SHAREGPT, "causal-lm", "Qwen/Qwen3-0.6B"),
        ("chat", MESSAGES_ON_BOTH_SIDES, "causal-lm", "Qwen/Qwen3-0.6B"),
        ("text", {"text": "a"}, "causal-lm", "Qwen/Qwen3-0.6B"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo", "Qwen/Qwen3-0.6B"),
        ("reward-model", {"prompt": "a", "chosen": "b", "rejected": "c"}, "reward", "Qwen/Qwen3-0.6B"),
        ("feedback", {"prompt": "a", "completion": "b", "label": True}, "kto", "Qwen/Qwen3-0.6B"),
        ("feedback", {**CHAT, "label": False}, "kto", "Qwen/Qwen3-0.6B"),
        ("reasoning", {"prompt": "2 + 3 =", "answer": 5}, "grpo", "Qwen/Qwen3-0.6B"),
        ("embeddings", {"anchor": "a", "positive": "b"}, "embedding", "BAAI/bge-base-en-v1.5"),
        ("embeddings", {"query": "a", "pos": ["b"], "neg": ["c", "d"]}, "embedding", "BAAI/bge-base-en-v1.5"),
        ("embeddings", SCORED, "embedding", "BAAI/bge-base-en-v1.5"),
        ("ranking", {"query": "a", "document": "b", "score": 1}, "reranker", RANKER),
        ("ranking", {"query": "a", "documents": ["b", "c"] * 5, "labels": [1, 0] * 5}, "reranker", RANKER),
        ("ranking", {"query": "a", "pos": ["b"], "neg": ["c", "d"] * 5}, "reranker", RANKER),
        (
            "classify",
            {"tokens": ["Ada", "ran"], "labels": ["B-PER", "O"]},
            "token-classification",
            "google-bert/bert-large-uncased",
        ),
    ],
)  # fmt: skip
def test_goals(capsys, goal, row, task, model):
    write_rows("rows.jsonl", row, times=5)
    if "label" in row:  # rows of one label teach nothing
        write_rows("rows.jsonl", row, {**row, "label": not row["label"]}, times=5)
    second = goal == "reward-model" or (goal == "ranking" and "pos" in row)
    assert goal in goals_of(look("rows.jsonl"), {})[: 1 + second]
    code, out, err = called(capsys, *flags("rows.jsonl", goal, model), "--json")
    assert code == 0, err
    assert json.loads(out)["task"] == task
    assert called(capsys, "validate", json.loads(out)["path"])[0] == 0


def test_what_prepare_refuses_is_not_written(capsys):
    write_rows(
        "rows.jsonl", {"query": "a", "pos": "b", "neg": ["c"]}, {"query": "a", "pos": "b", "neg": ["c", "d"]}
    )
    code, _, err = called(capsys, *flags("rows.jsonl", "embeddings", "BAAI/bge-base-en-v1.5"))
    assert (code, "rows.jsonl:2" in err, list(Path().glob("*.yaml"))) == (2, True, []), err


def test_a_text_with_its_answer_is_no_text(capsys):
    row = {"text": "Write a function that adds two numbers.", "code": "def add(a, b): return a + b"}
    write_rows("rows.jsonl", row)
    assert goals_of(look("rows.jsonl"), {}) == []
    code, _, err = called(capsys, *flags("rows.jsonl", "instructions"))
    assert (code, "--columns prompt=text --columns completion=code?" in err) == (2, True), err
    code, out, err = called(capsys, *flags("rows.jsonl", "text"), "--json")
    assert (code, json.loads(out)["rows"]["format"]) == (0, "text"), err


@pytest.mark.parametrize(
    ("labels", "problem", "metrics"),
    [
        ([0.25, 1.5], "regression", ["rmse", "spearman"]),
        ([["good"], ["good", "cheap"]], "multi_label_classification", ["f1_micro", "f1"]),
        ([1, 0], None, ["accuracy", "f1"]),
    ],
)
def test_the_labels_decide_the_problem_type(capsys, labels, problem, metrics):
    rows = [{"text": f"row {number}", "label": labels[number % 2]} for number in range(300)]
    write_rows("rows.jsonl", *rows)
    code, out, err = called(
        capsys, *flags("rows.jsonl", "classify", "google-bert/bert-large-uncased"), "--json"
    )
    assert code == 0, err
    written = json.loads(out)["path"]
    data = yaml.safe_load(Path(written).read_text())["data"]
    assert (data.get("problem_type"), data["metrics"]) == (problem, metrics)
    assert called(capsys, "validate", written)[0] == 0


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        ({"prompt": "2 + 3 =", "answer": "5"}, {"function": "numeric_answer"}),
        (
            {"prompt": "Capital?", "solution": "Rome"},
            {"function": "exact_match", "arguments": {"column": "solution"}},
        ),
    ],
)
def test_the_answers_of_the_rows_decide_the_reward(capsys, row, entry):
    write_rows("rows.jsonl", row, times=300)
    written = json.loads(called(capsys, *flags("rows.jsonl", "reasoning"), "--json")[1])["path"]
    recipe = yaml.safe_load(Path(written).read_text())
    assert recipe["reward"] == [entry]
    assert recipe["data"]["max_length"] > recipe["generation"]["max_completion_length"]
    assert recipe["global_batch_size"] % recipe["generation"]["num_generations"] == 0
    write_rows("rows.jsonl", {"prompt": "Write a poem."}, times=3)
    assert "reasoning" not in goals_of(look("rows.jsonl"), {})


def test_labels_in_csv_and_pictures_in_folders(capsys):
    Path("rows.csv").write_text("text,label\nfine,good\nawful,bad\n", encoding="utf-8")
    bert = flags("rows.csv", "classify", "google-bert/bert-large-uncased")
    assert json.loads(called(capsys, *bert, "--json")[1])["task"] == "sequence-classification"
    for label in ("cat", "dog"):
        Path("pictures", label).mkdir(parents=True)
        Path("pictures", label, "1.png").touch()
    vit = flags("pictures", "classify", "google/vit-large-patch16-224")
    said = json.loads(called(capsys, *vit, "--json")[1])
    assert (said["task"], said["rows"]["format"], said["rows"]["count"]) == (
        "image-classification",
        "image",
        2,
    )
    Path("rows.csv").write_text("text,label\nfine,good\nawful,good\n", encoding="utf-8")
    code, _, err = called(capsys, *bert)
    assert (code, "every row has the label 'good'" in err) == (2, True)


def test_rows_with_images_are_for_a_model_that_sees_them(capsys):
    talk = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]
    part = [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}, talk[1]]
    Path("a.png").write_bytes(b"")
    for row, form in (
        ({"messages": talk, "images": ["a.png"]}, "image-chat"),
        ({"messages": part}, "image-chat"),
        ({"prompt": "<image>What is it?", "completion": "A cat.", "images": ["a.png"]}, "image-prompt"),
    ):
        write_rows("rows.jsonl", row, times=3)
        assert goals_of(look("rows.jsonl"), {})[0] == "images"
        sight = look("rows.jsonl")
        assert rows_for(sight, "images", {}).format == form
    for row in ({"messages": [{**talk[0], "content": "Hi"}, talk[1]]}, PAIR):
        write_rows("rows.jsonl", row, times=3)
        assert "images" not in goals_of(look("rows.jsonl"), {})


@pytest.mark.slow
def test_a_recipe_for_images(capsys, here):
    pytest.importorskip("torch")
    talk = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]
    Path("a.png").write_bytes(b"")
    write_rows("rows.jsonl", {"messages": talk, "images": ["a.png"]}, times=300)
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 600}  # fmt: skip
    tower = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "image_size": 28,
             "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}  # fmt: skip
    Path("vlm").mkdir()
    Path("vlm/config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": text, "vision_config": tower})
    )
    given = flags("rows.jsonl", "images", "vlm")
    code, out, err = called(capsys, *given, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["task"] == "image-text-to-text"
    data = yaml.safe_load(Path(said["path"]).read_text())["data"]
    assert (data["train"][0]["format"], data["max_length"], data["metrics"]) == (
        "image-chat",
        2048,
        ["accuracy"],
    )


def test_a_flag_that_is_missing_is_named_where_nobody_can_be_asked(capsys, here):
    code, out, err = called(capsys, "init", "--model", "Qwen/Qwen3-0.6B", "--goal", "chat")
    assert (code, out) == (2, "")
    assert "init needs --data" in err
    assert "init needs --on" in err
    assert "--model" not in err
    code, out, _ = called(capsys, "init", "--json")
    assert [error["code"] for error in json.loads(out)["errors"]] == ["usage"] * 4
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n", "holds no rows"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 7}\n', "a.jsonl:2: column text holds"),
        ("a.jsonl", b'{"text": "x"}\n["text"]\n', "a.jsonl:2"),
        ("a.txt", b"one\n\xff\xfe\n", "not UTF-8"),
        ("a.csv", b'text\n"open\n', "a.csv:2: is not CSV"),
        ("a.json", b"[1, 2]", "row 1 is a JSON number"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 5000)[:-20], "cut off or damaged"),
        ("a.pdf", b"%PDF", "unknown kind of file"),
    ],
)
def test_data_that_is_empty_or_broken(capsys, here, name, content, said):
    Path(name).write_bytes(content)
    code, _, err = called(capsys, *flags(name, "text"))
    assert (code, said in err) == (2, True), err
    assert [path.name for path in here.iterdir()] == [name]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("rows.jsnl", "did you mean"),
        ("https://example.org/rows.jsonl", "a URL is not read"),
        ("package:no_such_package/rows.jsonl", "no Python package"),
        ("x" * 5000, "error"),
        ("a\0b", "error"),
    ],
)
def test_data_that_is_not_there(capsys, here, data, said):
    write_rows("rows.jsonl", PAIR)
    code, _, err = called(capsys, *flags(data, "text"))
    assert (code, said in err) == (2, True), err
    assert [path.name for path in here.iterdir()] == ["rows.jsonl"]


def test_a_package_that_reads_the_file_may_be_missing(capsys, monkeypatch):
    Path("rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = called(capsys, *flags("rows.parquet", "text"))
    assert (code, "reading it needs the package pyarrow (pip install pyarrow" in err) == (4, True), err


def test_parquet(capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), "rows.parquet")
    code, out, _ = called(capsys, *flags("rows.parquet", "text"), "--json")
    assert (code, json.loads(out)["rows"]["count"]) == (0, 2)


def test_a_data_set_of_the_hub_is_not_looked_at(capsys):
    code, out, _ = called(capsys, *flags("HuggingFaceH4/no_robots", "chat"), "--json")
    assert code == 0
    assert json.loads(out)["rows"]["count"] is None
    assert "path: HuggingFaceH4/no_robots" in Path("qwen3_0_6b_chat.yaml").read_text()


def test_columns_have_to_be_named_and_are_suggested(capsys, here):
    write_rows("rows.jsonl", {"task_id": 1, "prompt": "a", "canonical_solution": "b"})
    code, _, err = called(capsys, *flags("rows.jsonl", "instructions"))
    assert (code, "did you mean --columns completion=canonical_solution?" in err) == (2, True), err
    words = (*flags("rows.jsonl", "instructions"), "--columns")
    assert called(capsys, *words, "completion=canonical_solution")[0] == 0
    assert "columns: {completion: canonical_solution}" in Path("qwen3_0_6b_instructions.yaml").read_text()
    assert called(capsys, *words, "completion")[0] == 2
    assert called(capsys, *words, "completion=other")[0] == 2
    assert called(capsys, *words, "=other")[0] == 2
    for number, name in enumerate(("Answer: long", " answer", "it's the answer #1, short"), start=2):
        write_rows("rows.jsonl", {"prompt": "a", name: "b"})
        code, _, err = called(capsys, *flags("rows.jsonl", "instructions"))
        proposed = shlex.split(err[err.index("--columns") : err.rindex("?")])
        assert (code, proposed) == (2, ["--columns", f"completion={name}"])
        assert called(capsys, *flags("rows.jsonl", "instructions"), *proposed)[0] == 0
        written = yaml.safe_load(Path(f"qwen3_0_6b_instructions_{number}.yaml").read_text())
        assert written["data"]["train"][0]["columns"] == {"completion": name}
    Path("rows.csv").write_text("prompt,completion,\na,b,a remark of some words\n")
    assert called(capsys, *flags("rows.csv", "instructions"))[0] == 2
    assert called(capsys, *flags("rows.csv", "instructions"), "--columns", "=")[0] == 0, "of an empty name"


def test_rows_that_are_for_something_else(capsys):
    write_rows("rows.jsonl", CHAT)
    code, _, err = called(capsys, *flags("rows.jsonl", "preferences"))
    assert (code, "its rows are for goal chat" in err, "(--goal chat)" in err) == (2, True, True), err
    write_rows("both.jsonl", {"prompt": "a", "completion": "b", "instruction": "c", "output": "d"})
    code, _, err = called(capsys, *flags("both.jsonl", "instructions"))
    assert (code, "can be read as instruction and as prompt-completion" in err) == (2, True), err


@pytest.mark.parametrize(
    ("model", "on", "code", "said"),
    [
        ("Qwen/Qwen2.5-7B", "1x8GB", 3, "nothing fits"),
        ("no/such-model", GPU, 2, "no configuration found"),
        ("google-bert/bert-large-uncased", GPU, 2, "does not support"),
        ("Qwen/Qwen3-0.6B", "8xZ9", 2, "no device 'Z9'"),
        ("x" * 5000, GPU, 2, "no configuration found"),
        ("a\0b.gguf", GPU, 2, "no configuration found"),
        ("meta-llama/Llama-3.1-70B", GPU, 3, "nothing fits"),
    ],
)
def test_nothing_is_written_that_does_not_plan(capsys, here, model, on, code, said):
    write_rows("rows.jsonl", {"prompt": "two and two", "completion": "four", "answer": 4})
    for goal in ("instructions", "reasoning"):  # completions need a length of their own
        done, _, err = called(capsys, *flags("rows.jsonl", goal, model, on))
        assert (done, said in err) == (code, True), err
        assert "effilaunch-" not in err, err
    assert [path.name for path in here.iterdir()] == ["rows.jsonl"]


def test_nothing_is_overwritten(capsys, here):
    write_rows("rows.jsonl", PAIR)
    Path("mine.yaml").write_text("mine")
    words = flags("rows.jsonl", "instructions")
    code, _, err = called(capsys, *words, "--output", "mine.yaml")
    assert (code, "mine.yaml: is there already" in err) == (2, True)
    assert Path("mine.yaml").read_text() == "mine"
    for name in ("qwen3_0_6b_instructions.yaml", "qwen3_0_6b_instructions_2.yaml"):
        assert called(capsys, *words)[0] == 0
        assert Path(name).is_file()
    for name in ("no/such/folder.yaml", "x" * 5000, "a\0b"):
        code, _, err = called(capsys, *words, "--output", name)
        assert (code, "cannot be written" in err) == (2, True), err


def test_paths_are_relative_to_the_recipe_where_they_lie_below_it(capsys, here):
    Path("data").mkdir()
    write_rows("data/rows.jsonl", PAIR)
    Path("recipes").mkdir()
    words = flags("data/rows.jsonl", "instructions")
    assert called(capsys, *words, "--output", "a.yaml")[0] == 0
    assert "path: data/rows.jsonl\n" in Path("a.yaml").read_text()
    assert called(capsys, *words, "--output", "recipes/b.yaml")[0] == 0
    assert f"path: {here}/data/rows.jsonl\n" in Path("recipes/b.yaml").read_text()
    for name in ("a.yaml", "recipes/b.yaml"):
        code, out, _ = called(capsys, "validate", name)
        assert (code, "warning" in out) == (0, False), out


def test_questions_with_what_is_found_as_defaults(capsys, typed):
    write_rows("rows.jsonl", CHAT, times=1204)
    assert typed("rows.jsonl", "", "", "") == 0
    said = capsys.readouterr()
    assert "1,204 rows with the columns messages" in said.err
    assert f"Goal ({', '.join(GOALS)}) [chat]: " in said.err
    assert "1,204 rows, chat messages, the longest about 900 tokens by a guess" in said.err
    assert f"cpu) [{GPU}]: " in said.err
    assert ".gguf file) [Qwen/Qwen3-8B]: " in said.err
    assert Path("qwen3_8b_chat.yaml").is_file()


def test_a_wrong_answer_is_told_why_and_asked_again(capsys, typed):
    write_rows("rows.jsonl", CHAT, times=3)
    write_rows("broken.jsonl", CHAT)
    with Path("broken.jsonl").open("a") as stream:
        stream.write("{\n")
    answers = (
        "", "rows.jsonlines", "broken.jsonl", "rows.jsonl",
        "sing", "preferences", "chat",
        "8xZ9", GPU,
        "no/such-model", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-0.6B",
    )  # fmt: skip
    assert typed(*answers) == 0
    said = capsys.readouterr().err
    for words in (
        "an answer is needed", "did you mean", "broken.jsonl:2", "'sing' is not one of instructions, chat",
        "its rows are for goal chat", "no device 'Z9'", "no configuration found", "nothing fits",
    ):  # fmt: skip
        assert words in said
    assert Path("qwen3_0_6b_chat.yaml").is_file()


def test_columns_are_asked_for(capsys, typed):
    write_rows("rows.jsonl", {"task_id": 1, "prompt": "a", "canonical_solution": "b"})
    assert typed("rows.jsonl", "instructions", "completion=x", "", "", "Qwen/Qwen3-0.6B") == 0
    said = capsys.readouterr().err
    assert "Columns (FIELD=COLUMN …) [completion=canonical_solution]: " in said
    assert "no column x" in said or "do not make rows" in said
    assert "columns: {completion: canonical_solution}" in Path("qwen3_0_6b_instructions.yaml").read_text()
    write_rows("rows.jsonl", {"prompt": "a", "Answer: long": "b"})
    assert typed("rows.jsonl", "instructions", "'completion=x", "", "", "Qwen/Qwen3-0.6B") == 0
    assert "['completion=Answer: long']: " in capsys.readouterr().err
    assert '{completion: "Answer: long"}' in Path("qwen3_0_6b_instructions_2.yaml").read_text()


def test_only_what_no_flag_says_is_asked(capsys, typed):
    write_rows("rows.jsonl", CHAT)
    assert typed("cpu", words=("--data", "rows.jsonl", "--goal", "chat", "--model", "Qwen/Qwen3-0.6B")) == 0
    said = capsys.readouterr().err
    assert "Hardware" in said
    assert "Model" not in said
    assert "device: cpu" in Path("qwen3_0_6b_chat.yaml").read_text()


def test_answers_that_end_leave_nothing(capsys, typed, here):
    write_rows("rows.jsonl", CHAT)
    assert typed("rows.jsonl", "chat") == 130
    assert "nothing was written" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["rows.jsonl"]


def test_a_gpu_that_no_catalogue_has_is_proposed_by_its_memory(typed, monkeypatch):
    found = Hardware(1, 2, "NVIDIA TITAN Xp", 12196 * 2**20, (6, 1))
    monkeypatch.setattr(init.probe, "probe_hardware", lambda: found)
    assert init.found_here() == "2x12GB"


def test_control_characters_of_a_file_reach_no_terminal(capsys, typed):
    write_rows("rows.jsonl", {"text": "a", "\x1b[2Jcolumn": "b"})
    assert typed("rows.jsonl", "", "", "Qwen/Qwen3-0.6B") == 0
    assert "\x1b[2J" not in "".join(capsys.readouterr())


def test_ctrl_c_on_a_real_terminal_leaves_nothing(here):
    write_rows("rows.jsonl", CHAT)
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    head, tail = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "launcher", "init", "--data", "rows.jsonl"],
        stdin=tail, stdout=tail, stderr=tail, cwd=here, env=environ, start_new_session=True,
    )  # fmt: skip
    os.close(tail)
    seen, deadline = "", Deadline(60)
    while "Goal (" not in seen and not deadline.passed():
        if select.select([head], [], [], 0.2)[0]:
            seen += os.read(head, 4096).decode()
    assert "Goal (" in seen, seen
    child.send_signal(signal.SIGINT)
    assert child.wait(patience(120)) == 130
    os.close(head)
    assert [path.name for path in here.iterdir()] == ["rows.jsonl"]


def test_a_column_that_is_not_read_is_left_out_in_so_many_words(capsys, here):
    row = {"prompt": "a", "completion": "b", "system": "Be brief."}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = called(capsys, *flags("rows.jsonl", "instructions"))
    assert (code, "column system" in err) == (2, True), err
    code, _, err = called(capsys, *flags("rows.jsonl", "instructions"), "--columns", "system=")
    assert code == 0, err
    assert "columns: {system: null}" in Path("qwen3_0_6b_instructions.yaml").read_text()
