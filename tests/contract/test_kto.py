"""KTO: samples as trl makes them, its trainer under the plan's values, and rows in every form."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from launcher.errors import RecipeError
from launcher.train.memory_meter import Meter
from launcher.train.training import final_metrics, fit, make_arguments, make_trainer

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import make_ground, planned
from grounds import write_rows
from small import Rows, job, llama, lora, metrics, tokenizer

KTO = {
    "task": "kto",
    "trainer.learning_rate": 5e-3,
    "trainer.per_device_train_batch_size": 4,
    "trainer.per_device_eval_batch_size": 4,
    "trainer.train_sampling_strategy": "random",
    "data.max_length": 24,
}
MESSAGES = {
    "prompt": [{"role": "user", "content": "w1 w2"}],
    "completion": [{"role": "assistant", "content": "w9 w2"}],
    "label": True,
}


def labelled(count: int) -> list[dict]:
    """w40 ends the good answers, which two of three are."""
    return [
        {
            "prompt": f"w{i % 20}",
            "completion": f" w{2 * i % 30} {'w40' if i % 3 else 'w41 w42'}",
            "label": i % 3 != 0,
        }
        for i in range(count)
    ]


def talking():
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
    return words


def encoded(folder: Path, rows: list[dict], words=None, **changes):
    from launcher.rows.sources import Row
    from launcher.train.tasks.kto import encode_labelled

    numbered = [Row(values, "answers.jsonl", number) for number, values in enumerate(rows, 1)]
    return encode_labelled(job(folder / "encoded", KTO | changes), words or tokenizer(), numbered)


def prepared(folder: Path, count: int = 32):
    from datasets import Dataset

    return Dataset.from_dict(encoded(folder, labelled(count)).columns)


def run(folder: Path, changes: dict, model):
    work = job(folder, KTO | changes)
    data = Rows(prepared(folder), prepared(folder, 8))
    trainer = make_trainer(work, make_arguments(work), model, tokenizer(), data)
    return trainer, fit(work, trainer, Meter(on_cuda=False))


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder) if "loss" in row]


# --- beside trl


def test_no_default_of_trl_changes_a_run(tmp_path):
    from transformers import TrainingArguments
    from trl import KTOConfig

    upstream = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    differing = {
        field.name
        for field in dataclasses.fields(KTOConfig)
        if field.name in upstream
        and field.default_factory is dataclasses.MISSING
        and field.default != upstream[field.name]
    }
    assert differing == {
        "learning_rate", "bf16", "gradient_checkpointing", "logging_steps", "train_sampling_strategy",
    }  # fmt: skip
    args = make_arguments(job(tmp_path, KTO))
    assert isinstance(args, KTOConfig)
    assert (args.bf16, args.gradient_checkpointing, args.max_length) == (False, False, 24)
    assert args.train_sampling_strategy == "random"


@pytest.mark.parametrize("rows", [labelled(4), [MESSAGES]], ids=["text", "messages"])
def test_samples_are_those_of_trl(tmp_path, rows):
    from datasets import Dataset
    from trl import KTOTrainer

    words = talking()
    args = make_arguments(job(tmp_path, KTO | {"trainer.train_sampling_strategy": "sequential"}))
    rows_of_trl = Dataset.from_list(rows)
    plain = KTOTrainer(
        llama(), ref_model=llama(), args=args, train_dataset=rows_of_trl, processing_class=words
    )
    ours = encoded(tmp_path, rows, words)
    names = ("prompt_ids", "completion_ids", "label")
    assert ours.columns == {name: list(plain.train_dataset[name]) for name in names}
    assert ours.kept == len(rows)


@pytest.mark.parametrize("kind", ["apo_zero_unpaired", "precomputed", "lora"])
def test_losses_are_those_of_the_plain_trainer(tmp_path, kind):
    """20 steps of two micro-batches in the order of the rows, beside trl's trainer on the same rows."""
    from datasets import Dataset
    from trl import KTOTrainer

    changes = {"trainer.max_steps": 20, "trainer.gradient_accumulation_steps": 2}
    changes |= {"trainer.train_sampling_strategy": "sequential"}
    changes |= {
        "apo_zero_unpaired": {"trainer.loss_type": "apo_zero_unpaired"},
        "precomputed": {"trainer.precompute_ref_log_probs": True},
        "lora": {"adapter.type": "lora"},
    }[kind]
    new = (lambda: lora(llama(), task_type="CAUSAL_LM")) if kind == "lora" else llama
    run(tmp_path / "ours", changes, new())
    args = make_arguments(job(tmp_path / "plain", KTO | changes))
    initial = {} if kind in ("lora", "precomputed") else {"ref_model": llama()}
    rows = Dataset.from_list(labelled(32))
    plain = KTOTrainer(new(), args=args, train_dataset=rows, processing_class=tokenizer(), **initial)
    plain.train()
    theirs = [row["loss"] for row in plain.state.log_history if "loss" in row]
    assert len(theirs) == 20
    assert losses(tmp_path / "ours") == pytest.approx(theirs, rel=1e-5)


def test_shuffled_batches_have_pairs_of_their_own(tmp_path):
    trainer, _ = run(tmp_path, {"trainer.max_steps": 1}, llama())
    assert trainer.args.train_sampling_strategy == "random"
    batch = next(iter(trainer.get_train_dataloader()))
    answers, pairs = (
        [
            row[mask == 1].tolist()
            for row, mask in zip(batch[f"{name}input_ids"], batch[f"{name}completion_mask"], strict=True)
        ]
        for name in ("", "KL_")
    )
    assert len(answers) == 4
    assert pairs == answers[-1:] + answers[:-1]


# --- metrics of each side


def sums_of_answers(trainer, rows, model, shift: int = 0) -> list[float]:
    """Log-probability of the whole answer `shift` rows before each row, after its prompt, by itself."""
    import torch

    found = []
    for number, row in enumerate(rows):
        ids = torch.tensor([row["prompt_ids"] + rows[number - shift]["completion_ids"]])
        trainer.model.load_state_dict(model.state_dict())
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, :-1].float()
        each = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(float(each[len(row["prompt_ids"]) - 1 :].sum()))
    return found


def loss_of(ratios: list[float], labels: list[bool], term: float) -> list[float]:
    return [
        1 - 1 / (1 + math.exp(-(a - term if good else term - a)))
        for a, good in zip(ratios, labels, strict=True)
    ]


@pytest.mark.parametrize(
    ("micro", "loss_type", "once"),
    [
        (1, "apo_zero_unpaired", False), (4, "apo_zero_unpaired", False), (3, "kto", False),
        (4, "kto", False), (4, "kto", True), (9, "kto", False),
    ],
)  # fmt: skip
def test_losses_and_metrics_are_means_over_rows(tmp_path, micro, loss_type, once):
    """9 rows, of which 6 are good, unevenly over the micro-batches. The rate is 0: nothing changes.

    once: the reference is computed before, of the model itself.
    """
    changes = {"trainer.per_device_train_batch_size": micro, "trainer.per_device_eval_batch_size": 4,
               "trainer.gradient_accumulation_steps": -(-9 // micro), "trainer.learning_rate": 0.0,
               "trainer.max_steps": 1, "trainer.train_sampling_strategy": "sequential",
               "trainer.eval_on_start": True, "trainer.beta": 1.0,
               "trainer.loss_type": loss_type, "trainer.precompute_ref_log_probs": once}  # fmt: skip
    rows = prepared(tmp_path, 9)
    work = job(tmp_path, KTO | changes)
    frozen, model = llama(), llama()
    frozen.model.norm.weight.data *= 1 if once else 2  # rewards are not 0
    trainer = make_trainer(work, make_arguments(work), model, tokenizer(), Rows(rows, rows))
    if not once:
        trainer.ref_model.load_state_dict(frozen.state_dict())
    fit(work, trainer, Meter(on_cuda=False))
    own, other = (sums_of_answers(trainer, rows, one) for one in (llama(), frozen))
    ratios = [a - b for a, b in zip(own, other, strict=True)]
    expected: dict[str, float] = {}
    labels = rows["label"][:]
    for side, label in (("chosen", True), ("rejected", False)):
        logps = [value for found, value in zip(labels, own, strict=True) if found == label]
        differences = [value for found, value in zip(labels, ratios, strict=True) if found == label]
        expected[f"logps/{side}"] = sum(logps) / len(logps)
        expected[f"rewards/{side}"] = sum(differences) / len(differences)
    expected["rewards/margins"] = expected["rewards/chosen"] - expected["rewards/rejected"]
    logged = [row for row in metrics(tmp_path) if "eval_loss" in row or "loss" in row]
    assert len(logged) == 2
    for row, prefix in zip(logged, ("eval_", ""), strict=True):
        assert {key: row[prefix + key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5), (
            prefix
        )
        groups = [rows] if prefix else [rows.select(range(i, min(i + micro, 9))) for i in range(0, 9, micro)]
        losses, terms, first = [], [], 0
        for group in groups:
            before, after = (sums_of_answers(trainer, group, one, 1) for one in (llama(), frozen))
            term = max(0.0, sum(before) - sum(after)) / len(group) * (loss_type == "kto")
            here = slice(first, first := first + len(group))
            losses += loss_of(ratios[here], labels[here], term)
            terms += [term] * len(group)
        assert row[f"{prefix}loss"] == pytest.approx(sum(losses) / 9, rel=1e-4)
        assert row[f"{prefix}kl"] == pytest.approx(sum(terms) / 9, rel=5e-3, abs=1e-5), (
            "a small difference of sums"
        )


# --- learning


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_good_answers_become_likelier_than_bad_ones(tmp_path, adapter):
    changes = {"trainer.max_steps": 16, "trainer.eval_strategy": "steps", "trainer.eval_steps": 16}
    changes |= {"adapter.type": "lora"} if adapter else {}
    model = lora(llama(), task_type="CAUSAL_LM") if adapter else llama()
    trainer, _ = run(tmp_path, changes, model)
    first, *_, last = [row for row in metrics(tmp_path) if "loss" in row]
    assert first["loss"] == pytest.approx(0.5, abs=1e-3)
    assert last["loss"] < 0.49
    assert last["rewards/margins"] > 0.1
    assert {"kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"} <= last.keys()
    found = final_metrics(job(tmp_path, KTO), trainer)
    assert found["eval_rewards/margins"] > 0.05


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_resume_continues_exactly(tmp_path, monkeypatch, kind):
    saving = {"trainer.save_strategy": "steps", "trainer.save_steps": 3, "trainer.max_steps": 12}
    saving |= {"adapter.type": "lora"} if kind == "lora" else {}
    new = (lambda: lora(llama(), task_type="CAUSAL_LM")) if kind == "lora" else llama
    run(tmp_path / "whole", saving, new())
    shutil.copytree(tmp_path / "whole", tmp_path / "halved")
    for step in (12, 9, 6):  # from step 3, in the first of two epochs
        shutil.rmtree(tmp_path / "halved" / "checkpoints" / f"checkpoint-{step}", ignore_errors=True)
    monkeypatch.setenv("EFFILAUNCH_RESUME", "auto")
    trainer, _ = run(tmp_path / "halved", saving, new())
    keys = ("step", "loss", "grad_norm", "tokens", "kl")
    whole, halved = (
        [[row[key] for key in keys] for row in metrics(tmp_path / name)] for name in ("whole", "halved")
    )
    assert trainer.state.global_step == 12
    assert halved == whole


# --- rows and labels


def canonical_of(values: dict):
    from launcher.rows.recognise import canonical, detect
    from launcher.rows.sources import Row

    row = Row(values, "answers.jsonl", 3)
    detected = detect([row], "auto", {}, "kto", "answers.jsonl")
    return detected.format, canonical(row, detected).values


SYSTEM = {"role": "system", "content": "s"}
ASKED = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "unpaired-preference"),
        ({"prompt": [ASKED], "completion": [ANSWER], "label": 1}, "unpaired-preference"),
        ({"prompt": [ASKED], "completion": "b", "label": "True"}, "unpaired-preference"),
        ({"prompt": [ASKED], "completion": [ASKED, ANSWER], "label": True}, "unpaired-preference"),
        ({"prompt": "a", "completion": [ASKED, ANSWER], "label": True}, "unpaired-preference"),
        ({"prompt": [SYSTEM], "completion": [ASKED, ANSWER], "label": True}, "unpaired-preference"),
        ({"instruction": "a", "input": "", "output": "b", "kto_tag": True}, "unpaired-instruction"),
        ({"messages": [ASKED, ANSWER], "label": True}, "unpaired-chat"),
        (
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "kto_tag": True,
            },
            "unpaired-chat",
        ),
    ],
)
def test_rows_of_each_tool(values, form):
    found, shaped = canonical_of(values)
    assert found == form
    assert shaped["label"] is True
    if isinstance(shaped["prompt"], list):
        opening = [SYSTEM] if values.get("prompt") == [SYSTEM] else []
        assert (shaped["prompt"], shaped["completion"]) == ([*opening, ASKED], [ANSWER])
    else:
        assert (shaped["prompt"].count("a") > 0, shaped["completion"]) == (True, "b")


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "a", "completion": "b", "label": 0.5},
        {"prompt": "a", "completion": "b", "label": "perhaps"},
        {"prompt": "a", "completion": "b", "label": None},
        {"prompt": "a", "completion": "b", "label": [1]},
        {"prompt": "c", "completion": [ASKED, ANSWER], "label": True},
        {"messages": [ANSWER], "label": True},
        {"messages": [ASKED, ANSWER, ASKED], "label": True},
        {"prompt": [ASKED], "completion": [{**ANSWER, "train": False}], "label": True},
    ],
)
def test_rows_that_say_nothing_are_refused_with_their_line(values):
    with pytest.raises(RecipeError) as caught:
        canonical_of(values)
    assert (caught.value.problems[0].file, caught.value.problems[0].line) == ("answers.jsonl", 3)


@pytest.mark.parametrize(
    ("good", "bad", "weights", "warns"),
    [
        (5, 5, (1, 1), False),
        (9, 3, (1, 1), True),
        (9, 3, (1, 3), False),  # 9 / 3 is the upper end for the rarer label
        (9, 3, (1, 2.26), False),
        (9, 3, (1, 2.2), True),
        (3, 9, (3.5, 1), False),
        (3, 9, (4.5, 1), True),
    ],
)
def test_the_balance_of_the_labels_is_judged_as_trl_does(tmp_path, good, bad, weights, warns):
    import pyarrow

    from launcher.train.tasks.kto import check_labels

    given = dict(zip(("trainer.desirable_weight", "trainer.undesirable_weight"), weights, strict=True))
    line = check_labels(job(tmp_path, KTO | given), pyarrow.array([True] * good + [False] * bad))
    assert line.startswith("WARNING") == warns
    assert f"{good} good" in line


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_kind_are_an_error_with_their_number(tmp_path, label):
    from datasets import Dataset

    from launcher.train.data.gate import check_first_batch

    rows = [{**row, "label": label} for row in labelled(6)]
    data = Rows(Dataset.from_dict(encoded(tmp_path, rows).columns))
    with pytest.raises(RecipeError) as caught:
        check_first_batch(job(tmp_path, KTO), tokenizer(), data, 2)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("one-class", "data.train")
    assert "6" in problem.message


def test_commands_that_read_rows_import_no_trl():
    """`run`, `plan` and `prepare` read the first rows in their own process."""
    code = "import sys; import launcher.rows.recognise\n"
    code += "print(sorted({'torch', 'trl', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_two_ranks_of_each_engine_learn_the_same(tmp_path, monkeypatch):
    """KL means are taken over the ranks; the reference is copied, sharded or loaded again."""
    import yaml
    from launched import effilaunch
    from library_cases import CASES, LENGTH, make_ground

    monkeypatch.chdir(make_ground(CASES["kto"], tmp_path))
    learned = {}
    for name, stage in (("ddp", None), ("deepspeed", 2), ("deepspeed", 3), ("fsdp", None)):
        recipe = {
            "task": "kto",
            "model": {"name_or_path": "model"},
            "precision": "fp32",
            "data": {"train": [{"path": "rows.jsonl"}], "max_length": LENGTH},
            "sharding": {"engine": name} | ({"zero_stage": stage} if stage else {}),
            "global_batch_size": 8,
            "trainer": {"max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no"},
            "hardware": {"device": "cpu", "devices_per_node": 2},
        }
        out = tmp_path / f"{name}-{stage}"
        file = out.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(recipe))
        effilaunch("run", file, "--output-dir", out, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        learned[out.name] = losses(out)
    expected = learned["ddp-None"]
    assert len(set(expected)) == 4
    for name, found in learned.items():
        assert found == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_pairs_that_are_computed_once_are_made_by_one_of_two_ranks(tmp_path, forks):
    (tmp_path / "ground").mkdir()
    ground = make_ground(tmp_path / "ground")
    write_rows(ground / "labelled.jsonl", labelled(8))
    trainer = {"precompute_ref_log_probs": True, "train_sampling_strategy": "sequential", "max_steps": 2}
    forks.load("launcher.train.tasks.kto")
    said = {
        "task": "kto",
        "data": {"train": [{"path": "labelled.jsonl"}], "max_length": 32},
        "trainer": trainer,
    }
    out, env = planned(said, ground, tmp_path / "run", forks)
    made = tmp_path / "made"
    ended = forks.run(out, 2, {**env, "KL_PAIRS_MADE": str(made)}, prelude="counted_pairs")
    assert ended.codes == (0, 0), ended.said
    assert made.read_text().split() == ["0"] * 4, "8 rows in micro-batches of 2"
