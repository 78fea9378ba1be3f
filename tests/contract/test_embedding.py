"""Embeddings and rerankers: what their results answer, their metrics, engines, refusals and survival."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import cases

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import numpy as np
from forked import KILL, KILL_HOOKS
from grounds import tokenizer_of_1024_words, write_rows

from launcher.errors import RecipeError
from launcher.execute.run_dir import write_run_dir
from launcher.execute.start import bind
from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.recipe.loading import load_recipe
from launcher.render.bundle import render
from launcher.train.job import read_job
from launcher.train.prepare import prepare_run
from launcher.train.results.evaluate import evaluate
from launcher.train.results.generate import answer, load_trained
from launcher.train.results.merge import merge
from launcher.train.training import make_arguments
from launcher.train.worker import train

sys.path.insert(0, str(Path(__file__).parent))
from engine_runs import LORA, assert_same, column, result, weights
from library_cases import RANKED, RELEVANT, SIMILAR, SIZES, TEXTS, bare_bert, llama, one_label

QUERY, DOCUMENT = "w1 w2 w3", "w7 w8"
ROWS = {
    "texts": TEXTS,
    "similar": SIMILAR,
    "ranked": RANKED,
    "relevant": RELEVANT,
    "relevant-lists": [{**row, "query": f"w{n // 3}"} for n, row in enumerate(RELEVANT[:12])],
}
TRAINER = {"max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
HELD_OUT = {"texts": "texts", "similar": "similar", "ranked": "ranked", "relevant": "relevant-lists"}
METRICS = {
    "texts": ["ndcg@10", "mrr@10", "accuracy@1"],
    "similar": ["spearman", "pearson"],
    "ranked": ["ndcg@10", "mrr@10"],
    "relevant": ["ndcg@10", "mrr@10", "spearman"],
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    """bert/, ranker/, llama/ and published/ with their tokenizer, and the rows of each format."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder = tmp_path_factory.mktemp("ground")
    torch.manual_seed(0)
    wide = transformers.BertConfig(**{**SIZES, "hidden_size": 64})
    models = {
        "bert": bare_bert(),
        "wide": transformers.BertModel(wide, add_pooling_layer=False),
        "ranker": one_label(),
        "llama": llama("LlamaModel"),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer_of_1024_words().save_pretrained(folder / name)
    bert = Transformer(str(folder / "bert"), max_seq_length=32)
    for name, modules in {
        "published": [Pooling(32, "cls")],
        "normalized": [Pooling(32, "max"), Normalize()],
    }.items():
        SentenceTransformer(modules=[bert, *modules], device="cpu").save_pretrained(str(folder / name))
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def recipe(ground: Path, rows: str, **changes: Any) -> dict[str, Any]:
    """A recipe that trains on these rows, and is evaluated with the metrics that they have."""
    task = "embedding" if rows in ("texts", "similar") else "reranker"
    own = {"texts": {"negatives": 1}, "similar": {"loss": "CoSENTLoss"}, "ranked": {"loss": "LambdaLoss"}}
    return {
        "task": task,
        "model": {"name_or_path": str(ground / ("bert" if task == "embedding" else "ranker"))},
        "precision": "fp32",
        "global_batch_size": 4,
        task: own.get(rows, {}),
        **changes,
        "data": {
            "train": [{"path": str(ground / f"{rows}.jsonl")}],
            "eval": [{"path": str(ground / f"{HELD_OUT[rows]}.jsonl")}],
            "metrics": METRICS[rows],
            "max_length": 32,
            **changes.get("data", {}),
        },
        "trainer": {**TRAINER, **changes.get("trainer", {})},
    }


def planned(out: Path, said: Mapping[str, Any], on: str = "cpu") -> Mapping[str, str]:
    """Plan and write the run directory; the environment of its ranks."""
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(said)))
    bundle = render(make_plan(*gather(load_recipe(path), on)))
    write_run_dir(bundle, out, resume=False)
    return bind(bundle, {"run_dir": str(out), "devices": ""})[2]


def trained(out: Path, said: Mapping[str, Any]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in planned(out, said).items():
            patch.setenv(name, value)
        prepare_run(read_job(out))
        train(read_job(out))
    return out


def silent(_: object) -> str:
    return ""


def answered(run: Path) -> float:
    """The number that `generate` prints."""
    return float(answer(load_trained(run, silent), QUERY, 8, second=DOCUMENT))


def vectors(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode([QUERY, DOCUMENT])


def score(folder: Path) -> float:
    from sentence_transformers import CrossEncoder

    return float(CrossEncoder(str(folder), device="cpu").predict([(QUERY, DOCUMENT)])[0])


def check_evaluation(run: Path, metrics: list[str]) -> None:
    """`eval` gives what the end of the run gave."""
    found, expected = evaluate(run, None, None, silent).metrics, result(run)["eval"]
    for name in ("loss", *metrics):
        assert found[name] == pytest.approx(expected[f"eval_{name}"], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ("texts", {}),
        ("texts", {"adapter": LORA}),
        ("similar", {"adapter": LORA, "embedding": {"loss": "CosineSimilarityLoss", "pooling": "max"}}),
    ],
    ids=["full", "lora", "scored-lora"],
)
def test_a_result_is_a_sentence_transformer(ground, tmp_path, rows, changes):
    run = trained(tmp_path / "run", recipe(ground, rows, **changes))
    check_evaluation(run, METRICS[rows])
    folder = run / result(run)["output"]
    found = vectors(folder)
    assert np.linalg.norm(found, axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert not np.allclose(found, vectors(ground / "bert"), atol=1e-2), "it has learned"
    assert answered(run) == pytest.approx(float(found[0] @ found[1]), abs=1e-4)
    if "adapter" in changes:
        merge(run, run / "merged", "float32", silent)
        np.testing.assert_allclose(vectors(run / "merged"), found, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "loss", "adapter"),
    [
        ("relevant", "BinaryCrossEntropyLoss", None),
        ("relevant", "MSELoss", LORA),
        ("ranked", "LambdaLoss", LORA),
    ],
)
def test_a_result_is_a_cross_encoder(ground, tmp_path, rows, loss, adapter):
    changes = {"reranker": {"loss": loss}} | ({"adapter": adapter} if adapter else {})
    run = trained(tmp_path / "run", recipe(ground, rows, **changes))
    check_evaluation(run, METRICS[rows])
    assert 0 < result(run)["eval"]["eval_ndcg@10"] < 1
    found = score(run / result(run)["output"])
    assert answered(run) == pytest.approx(found, abs=1e-4)
    if adapter:
        merge(run, run / "merged", "float32", silent)
        assert score(run / "merged") == pytest.approx(found, abs=1e-6)


def test_a_decoder_pools_its_last_token(ground, tmp_path):
    model = {"name_or_path": str(ground / "llama")}
    run = trained(tmp_path / "run", recipe(ground, "texts", model=model, adapter=LORA))
    folder = run / "adapter"
    assert json.loads((folder / "1_Pooling" / "config.json").read_text())["pooling_mode"] == "lasttoken"
    found = vectors(folder)
    assert answered(run) == pytest.approx(float(found[0] @ found[1]), abs=1e-4)


def test_an_adapter_on_a_quantised_base(ground, tmp_path):
    model = {"name_or_path": str(ground / "wide"), "quantization": "nf4"}
    run = trained(tmp_path / "run", recipe(ground, "texts", model=model, adapter=LORA))
    assert len(set(column(run, "loss"))) == TRAINER["max_steps"]
    merge(run, run / "merged", "float32", silent)
    found = vectors(run / "merged")
    assert answered(run) == pytest.approx(float(found[0] @ found[1]), abs=0.05)


def test_modules_of_a_published_checkpoint_are_kept(ground, tmp_path):
    model = {"name_or_path": str(ground / "published")}
    run = trained(tmp_path / "run", recipe(ground, "texts", model=model, trainer={"learning_rate": 0.0}))
    np.testing.assert_allclose(vectors(run / "model"), vectors(ground / "published"), atol=1e-6)
    assert [path.name for path in sorted((run / "model").glob("?_*"))] == ["1_Pooling"]


@pytest.mark.parametrize("given", [None, {}, {"query": "w1: "}])
def test_prompts_of_a_published_checkpoint_are_kept_and_told(ground, tmp_path, capsys, given):
    from sentence_transformers import SentenceTransformer

    model = tmp_path / "prompted"
    whole = SentenceTransformer(str(ground / "published"), device="cpu")
    whole.prompts, whole.default_prompt_name = {"query": "w5: ", "document": ""}, "query"
    whole.save_pretrained(str(model))
    own = {"negatives": 1} if given is None else {"negatives": 1, "prompts": given}
    changes = {"model": {"name_or_path": str(model)}, "embedding": own, "trainer": {"max_steps": 1}}
    run = trained(tmp_path / "run", recipe(ground, "texts", **changes))
    warned = [*json.loads((run / "plan.json").read_text())["warnings"], *capsys.readouterr().out.splitlines()]
    assert sum("'w5: '" in line for line in warned) == (2 if given is None else 0)
    saved = json.loads((run / "model" / "config_sentence_transformers.json").read_text())
    kept = {"query": "w5: ", "document": ""} if given is None else given
    assert saved["prompts"] == kept
    assert saved["default_prompt_name"] == ("query" if kept.get("query") else None)
    vectors(run / "model")


def test_an_old_name_of_the_pooling_is_read(ground, tmp_path):
    model = tmp_path / "old"
    shutil.copytree(ground / "published", model)
    old = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(old))
    said = recipe(ground, "texts", model={"name_or_path": str(model)}, trainer={"max_steps": 1})
    run = trained(tmp_path / "run", said)
    found = json.loads((run / "model" / "1_Pooling" / "config.json").read_text())
    assert found == {"embedding_dimension": 32, "pooling_mode": "max", "include_prompt": True}


def with_dense(ground: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint with a Dense module, which sentence-transformers saved."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense

    whole = SentenceTransformer(str(ground / "published"), device="cpu")
    SentenceTransformer(modules=[*whole, Dense(32, 8)], device="cpu").save_pretrained(str(folder / "dense"))
    return {"model": {"name_or_path": str(folder / "dense")}}


PUBLISHED, NORMALIZED, ONE = "published", "normalized", {"negatives": 1}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str | None]] = {
    "other pooling": ("module-differs", "texts", {"embedding": {**ONE, "pooling": "mean"}}, PUBLISHED),
    "other length": ("module-differs", "texts", {"embedding": {**ONE, "normalize": False}}, NORMALIZED),
    "more negatives": ("negatives", "texts", {"embedding": {"negatives": 2}}, None),
    "no negatives asked for": ("negatives", "texts", {"embedding": {}}, None),
    "wide matryoshka": ("matryoshka-width", "texts", {"embedding": {"matryoshka_dims": [64, 16]}}, None),
    "one scored pair": ("no-negatives", "similar", {"global_batch_size": 1}, None),
    "loss of other rows": ("format-loss", "similar", {"embedding": {}, "data": {"metrics": []}}, None),
    "ranked by another loss": ("format-loss", "ranked", {"reranker": {}}, None),
    "more documents": ("documents", "ranked", {"reranker": {"loss": "LambdaLoss", "documents": 3}}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_the_model_is_loaded(ground, tmp_path, monkeypatch, name):
    code, rows, changes, model = REFUSED[name]
    if model is not None:
        changes = {**changes, "model": {"name_or_path": str(ground / model)}}
    check_refused(recipe(ground, rows, **changes), tmp_path, monkeypatch, code)


def test_modules_that_are_not_trained_are_refused(ground, tmp_path, monkeypatch):
    said = recipe(ground, "texts", **with_dense(ground, tmp_path))
    check_refused(said, tmp_path, monkeypatch, "sentence-module")


def check_refused(said: Mapping[str, Any], folder: Path, monkeypatch, code: str) -> None:
    monkeypatch.setattr("launcher.train.model.models.load_model", None)
    with pytest.raises(RecipeError) as caught:
        trained(folder / "run", said)
    assert [problem.code for problem in caught.value.problems] == [code]


PAIR, LIST = SIMILAR[0], RANKED[0]
COSINE = {"embedding": {"loss": "CosineSimilarityLoss"}}
BAD_ROWS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "cosine": ("score-range", "similar", {**PAIR, "score": 1.5}, COSINE),
    "probability": ("score-range", "relevant", {**RELEVANT[0], "score": -0.5}, {}),
    "relevance": ("score-range", "ranked", {**LIST, "labels": [-1.0, 1.0]}, {}),
    "equal labels": ("one-label", "ranked", {**LIST, "labels": [1.0, 1.0]}, {}),
    "one document": ("one-label", "ranked", {**LIST, "documents": ["w1"], "labels": [1.0]}, {}),
    "unlike lengths": ("bad-row", "ranked", {**LIST, "labels": [1.0]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_the_loss_cannot_take_is_named(ground, tmp_path, name):
    code, rows, bad, changes = BAD_ROWS[name]
    write_rows(tmp_path / "bad.jsonl", [ROWS[rows][0], ROWS[rows][1], bad])
    data = {"train": [{"path": str(tmp_path / "bad.jsonl")}], "eval": None, "metrics": []}
    with pytest.raises(RecipeError) as caught:
        trained(tmp_path / "run", recipe(ground, rows, data=data, **changes))
    (problem,) = caught.value.problems
    assert (problem.code, problem.line) == (code, 3)


def prepared(out: Path, said: Mapping[str, Any]) -> Mapping[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in planned(out, said).items():
            patch.setenv(name, value)
        found: Mapping[str, Any] = prepare_run(read_job(out))["splits"]["train"]["counts"]
    return found


def test_labels_that_contradict_each_other_are_found_over_all_processes(ground, tmp_path):
    rows = [{**SIMILAR[0], "sentence1": f"w{n}", "score": 0.5} for n in range(600)]
    rows += [{**rows[0], "score": 1.0}, {**rows[1], "sentence1": "w1"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    data = {"train": [{"path": str(tmp_path / "rows.jsonl")}], "eval": None, "metrics": [], "num_proc": 2}
    counts = prepared(tmp_path / "run", recipe(ground, "similar", data=data))
    assert (counts["kept"], counts["notes"]) == (602, {"contradicting-labels": 1})


def test_rows_whose_positive_is_a_negative_alone_are_refused(ground, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{**row, "negative": row["positive"]} for row in TEXTS])
    data = {"train": [{"path": str(tmp_path / "rows.jsonl")}], "eval": None, "metrics": []}
    with pytest.raises(RecipeError) as caught:
        prepared(tmp_path / "run", recipe(ground, "texts", data=data))
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == ("nothing-left", str(tmp_path / "rows.jsonl"))
    assert f"equal: {len(TEXTS)}" in problem.message


def test_metrics_of_ranking_need_several_documents_of_a_query(ground, tmp_path, monkeypatch):
    alone = {"eval": [{"path": str(ground / "relevant.jsonl")}]}
    check_refused(recipe(ground, "relevant", data=alone), tmp_path, monkeypatch, "nothing-ranked")


def test_early_stopping_by_a_metric_of_retrieval(ground, tmp_path):
    each = {
        "max_steps": 6, "learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "eval_ndcg@10",
    }  # fmt: skip
    run = trained(tmp_path / "run", recipe(ground, "texts", trainer=each, early_stopping={"patience": 2}))
    assert make_arguments(read_job(run)).greater_is_better is True
    assert result(run)["steps"] == 3, "the first evaluation, and two that are not better"
    assert len(column(run, "eval_ndcg@10")) >= 3


STOP = KILL_HOOKS.replace("SIGKILL", "SIGTERM")


@pytest.mark.parametrize("rows", cases(("texts", "ranked"), "texts"))
def test_a_preempted_run_ends_as_the_undisturbed_one(ground, tmp_path, forks, rows):
    forks.load(
        "launcher.train.contrast", f"launcher.train.tasks.{'embedding' if rows == 'texts' else 'reranker'}"
    )
    (tmp_path / "hooks.py").write_text(STOP)
    said = recipe(
        ground, rows, adapter={**LORA, "lora_dropout": 0.1}, python="hooks.py",
        trainer={"max_steps": 14, "save_strategy": "steps", "save_steps": 100},
    )  # fmt: skip
    runs = []
    for name in ("straight", "stopped"):
        out = tmp_path / name
        env = planned(out, said)
        assert forks.run(out, 0, env, module="prepare").codes == (0,)
        if name == "stopped":  # in the second epoch
            ended = forks.run(out, 0, {**env, KILL: "12"})
            assert json.loads((out / "stopped.json").read_text())["checkpoint"] == "checkpoint-13", ended.said
            env = {**env, "EFFILAUNCH_RESUME": "auto"}
        ended = forks.run(out, 0, env)
        assert ended.codes == (0,), ended.said
        runs.append(out)
    straight, stopped = runs
    assert len(set(column(straight, "loss"))) == 14
    assert column(stopped, "loss") == column(straight, "loss")
    assert_same(weights(stopped), weights(straight))


ENGINES = {
    "ddp": {"engine": "ddp"},
    "deepspeed": {"engine": "deepspeed"},
    "zero1": {"engine": "deepspeed", "zero_stage": 1},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
    "zero3": {"engine": "deepspeed", "zero_stage": 3},
    "fsdp": {"engine": "fsdp"},
}
CACHED = {"loss": "CachedMultipleNegativesRankingLoss", "negatives": 1, "mini_batch_size": 1}
ACROSS = {**ONE, "gather_across_devices": True}
SHARDED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "embedding": ("texts", {"embedding": ACROSS}, ("zero3", "fsdp")),
    "embedding cached": (
        "texts",
        {"embedding": {**CACHED, "gather_across_devices": True}},
        ("zero1", "fsdp"),
    ),
    "reranker": ("ranked", {}, ("zero3", "fsdp")),
}


@pytest.mark.parametrize("engine", ["deepspeed", "zero2", "zero3"])
def test_the_gradients_of_a_cached_loss_are_not_sharded_by_zero(ground, tmp_path, engine):
    said = recipe(ground, "texts", embedding=CACHED, sharding=ENGINES[engine])
    if engine == "deepspeed":  # the stage is open
        planned(tmp_path / "run", said, "2xcpu")
        assert read_job(tmp_path / "run").zero_stage < 2
        return
    with pytest.raises(RecipeError) as caught:
        planned(tmp_path / "run", said, "2xcpu")
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("cached-loss-sharded", "sharding.zero_stage")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_of_each_engine_learn_the_same(ground, tmp_path, forks, name):
    pytest.importorskip("deepspeed")
    rows, changes, engines = SHARDED[name]
    task = "embedding" if rows == "texts" else "reranker"
    forks.load("launcher.train.contrast", f"launcher.train.tasks.{task}")
    learned = {}
    for engine in ("ddp", *engines):
        out = tmp_path / engine
        data = {"eval": None, "metrics": []}
        said = recipe(ground, rows, sharding=ENGINES[engine], global_batch_size=8, data=data, **changes)
        env = planned(out, said, "2xcpu")
        assert forks.run(out, 0, env, module="prepare").codes == (0,)
        ended = forks.run(out, 2, env)
        assert ended.codes == (0, 0), ended.said
        learned[engine] = out
    expected = learned.pop("ddp")
    assert len(set(column(expected, "loss"))) == TRAINER["max_steps"]
    for engine, out in learned.items():
        assert column(out, "loss") == pytest.approx(column(expected, "loss"), rel=1e-5), engine
        assert column(out, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-4), engine


def test_two_ranks_take_the_same_steps_where_texts_are_repeated(ground, tmp_path, forks):
    """Half of the rows have one positive: a micro-batch has one of them at most, the others are counted."""
    forks.load("launcher.train.contrast", "launcher.train.tasks.embedding")
    rows = [{"anchor": f"w{n} w7", "positive": f"w{100 + max(n, 12)} w8"} for n in range(24)]
    write_rows(tmp_path / "repeated.jsonl", rows)
    said = recipe(
        ground, "texts", sharding=ENGINES["ddp"], global_batch_size=8, embedding={},
        data={"train": [{"path": str(tmp_path / "repeated.jsonl")}], "eval": None, "metrics": []},
    )  # fmt: skip
    said["trainer"] = {"num_train_epochs": 2, "learning_rate": 1e-3, "logging_steps": 1}
    out = tmp_path / "run"
    env = planned(out, said, "2xcpu")
    assert forks.run(out, 0, env, module="prepare").codes == (0,)
    ended = forks.run(out, 2, env)
    assert ended.codes == (0, 0), ended.said
    assert result(out)["steps"] == 2 * 3
    counts = r"epoch (\d): (\d+) of 24 rows are not trained.* (\d) of 3 micro-batches"
    counted = re.findall(counts, (out / "logs" / "rank-0.log").read_text())
    assert [epoch for epoch, _, _ in counted] == ["1", "2"]
    left = sum(int(rows) for _, rows, _ in counted)
    assert left >= 2 * (12 - 3 * 2)
    assert result(out)["tokens"] == 4 * (2 * 24 - left), "four tokens of each row that was read"
    assert column(out, "loss").count(0.0) == sum(int(steps) for _, _, steps in counted)
