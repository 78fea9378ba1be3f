"""What a recipe of embeddings or a reranker asks for, against the model and the losses."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from launcher.errors import RecipeError
from launcher.inputs.planning_facts import gather
from launcher.planner.planner import make_plan
from launcher.planner.tiny import tiny_recipe
from launcher.recipe.loading import load_recipe
from launcher.rows.own_formats import OWN_FORMATS
from launcher.train.tasks.embedding import EncodeTexts
from launcher.train.tiny import tiny_tokenizer

RECIPE = """\
task: {task}
model: {{name_or_path: google-bert/bert-large-uncased, cache_dir: {cache_dir}}}
data: {{train: [{{path: rows.jsonl}}], max_length: 128}}
{more}
"""


def loaded(folder, more, task="embedding", cache_dir="null"):
    file = folder / "r.yaml"
    file.write_text(RECIPE.format(task=task, more=more, cache_dir=cache_dir))
    return load_recipe(file)


def test_more_dimensions_than_the_model_has_are_refused(tmp_path):
    more = "embedding: {matryoshka_dims: [1025, 64]}"
    with pytest.raises(RecipeError) as caught:
        make_plan(*gather(loaded(tmp_path, more), "1xRTX4090-24GB"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("matryoshka-width", "embedding.matryoshka_dims")
    make_plan(*gather(loaded(tmp_path, more.replace("1025", "1024")), "1xRTX4090-24GB"))


def test_a_narrow_model_has_dimensions_of_its_own_width(tmp_path):
    found = loaded(tmp_path, "embedding: {matryoshka_dims: [1024, 256, 64]}")
    tiny = tiny_recipe(found, {"model_type": "bert", "hidden_size": 1024, "num_attention_heads": 16})
    width = tiny.recipe.model.config["hidden_size"]
    assert tiny.recipe.embedding.matryoshka_dims == [width, width // 2, width // 4]
    assert tiny.recipe.trainer["per_device_train_batch_size"] == 2


ALONE = {
    "one": "global_batch_size: 1",
    "micro": "trainer: {per_device_train_batch_size: 1}",
    "cached": "global_batch_size: 1\nembedding: {loss: CachedMultipleNegativesRankingLoss, negatives: 0}",
    "scored": "global_batch_size: 1\nembedding: {loss: CoSENTLoss}",
}


@pytest.mark.parametrize("name", ALONE)
def test_micro_batches_of_one_row_that_is_compared_with_others_are_refused(tmp_path, name):
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, ALONE[name])
    (problem,) = caught.value.problems
    path = "trainer.per_device_train_batch_size" if name == "micro" else "global_batch_size"
    assert (problem.code, problem.path, problem.file) == ("no-negatives", path, str(tmp_path / "r.yaml"))


def test_micro_batches_of_one_row_on_several_devices_are_refused(tmp_path):
    found = loaded(tmp_path, "global_batch_size: 4")
    assert make_plan(*gather(found, "2xRTX4090-24GB")).batch.micro == 2
    with pytest.raises(RecipeError) as caught:
        make_plan(*gather(found, "4xRTX4090-24GB"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("batch-too-small", "global_batch_size")


@pytest.mark.parametrize("section", ["negatives: 1", "loss: TripletLoss", "loss: CosineSimilarityLoss"])
def test_one_row_with_negatives_or_a_label_of_its_own_can_be_learned(tmp_path, section):
    found = loaded(tmp_path, f"global_batch_size: 1\nembedding: {{{section}}}")
    assert make_plan(*gather(found, "1xRTX4090-24GB")).batch.micro == 1


@pytest.mark.parametrize(
    ("task", "section", "told"),
    [
        ("embedding", "", True),
        ("embedding", "embedding: {prompts: {query: 'q: '}}", False),
        ("reranker", "", False),
    ],
)
def test_prompts_in_the_hub_cache_that_are_not_trained_with_are_a_warning(tmp_path, task, section, told):
    repo = tmp_path / "models--google-bert--bert-large-uncased"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    config = {"prompts": {"query": "find this: ", "document": ""}}
    (repo / "snapshots" / "abc" / "config_sentence_transformers.json").write_text(json.dumps(config))
    found = loaded(tmp_path, section, task, cache_dir=tmp_path)
    warnings = make_plan(*gather(found, "1xRTX4090-24GB")).warnings
    assert any("find this: " in warning for warning in warnings) == told


@pytest.mark.parametrize("task", ["embedding", "reranker"])
def test_label_smoothing_that_no_loss_reads_is_refused(tmp_path, task):
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, "trainer: {label_smoothing_factor: 0.1}", task)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("conflict", "trainer.label_smoothing_factor")


def test_made_up_rows_have_the_negatives_that_are_trained():
    settings = SimpleNamespace(loss="MultipleNegativesRankingLoss", prompts={}, negatives=1)
    job = SimpleNamespace(tiny=True, embedding=settings)
    made = OWN_FORMATS["positive-pair"].make(random.Random(0), 0)
    negatives = [made[f"negative_{n}"] for n in range(1, 33)]
    row = SimpleNamespace(values={**made, "positives": [made["positive"]], "negatives": negatives})
    encode = EncodeTexts(job, tiny_tokenizer(512), ("anchor", "positive", "negative_1"), 64, False)
    batch = encode([row])
    assert (batch.kept, len(batch.columns["lengths"][0])) == (1, 3)


def test_a_sampling_that_no_sampler_reads_is_refused(tmp_path):
    more = "trainer: {train_sampling_strategy: group_by_length}\nembedding: {batch_sampler: no_duplicates}"
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, more)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("conflict", "trainer.train_sampling_strategy")
    loaded(tmp_path, more.replace("no_duplicates", "batch_sampler"))


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ("{train: 5}", "data.train"),
        ("{train: [{path: rows.jsonl, format: []}]}", "data.train[0].format"),
        ("{train: [{path: rows.jsonl}], metrics: [[]]}", "data.metrics[0]"),
    ],
)
def test_values_of_a_wrong_kind_are_the_problem_of_their_key(tmp_path, data, path):
    file = tmp_path / "r.yaml"
    file.write_text(
        f"task: embedding\nmodel: {{name_or_path: m}}\ndata: {data}\nembedding: {{negatives: 1}}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert path in {problem.path for problem in caught.value.problems}
