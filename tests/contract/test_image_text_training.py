"""Vision-language models: losses of a hand-written loop, what is frozen, and results that are read again."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

import torch
from engine_runs import check_alike, column
from engine_runs import prepared as prepared_by_recipe
from plans import generate, prepared, trained, write_run
from vision_models import EVERY, colour_rows, save_base, write_rows

from launcher.errors import RecipeError
from launcher.train.data.build import build_data
from launcher.train.data.image_chat import ImageBatches
from launcher.train.job import read_job
from launcher.train.model.adapters import attach_adapter
from launcher.train.model.models import load_model
from launcher.train.model.processing import load_processing
from launcher.train.model.vision import find_parts
from launcher.train.results.evaluate import evaluate
from launcher.train.results.generate import answer, load_trained
from launcher.train.results.merge import merge

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Name of a family -> a checkpoint of it."""
    root = tmp_path_factory.mktemp("bases")
    return functools.cache(lambda name: save_base(root / name, name))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder, colour_rows(folder))


def settings(base: Path, rows: Path, **changes):
    given = {"task": "image-text-to-text", "tiny": False, "model.config": None, "data.max_length": 512}
    given |= {"model.name_or_path": str(base), "data.train": [{"path": str(rows), "format": "auto"}]}
    given |= {"trainer.max_steps": 4, "trainer.per_device_train_batch_size": 4}
    return given | {key.replace("__", "."): value for key, value in changes.items()}


def logged(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_losses_are_those_of_a_loop_of_ones_own(tmp_path, base, rows, name, adapter):
    """The same collator, the order of the Trainer's sampler, AdamW and no schedule."""
    given = settings(base(name), rows, adapter=adapter, trainer__max_grad_norm=0.0)
    run = trained(tmp_path / "run", given)
    job = read_job(run)
    processing = load_processing(job)
    data = build_data(job, processing)
    torch.manual_seed(job.seed)
    model = load_model(job, processing)
    torch.manual_seed(job.seed)
    model = attach_adapter(job, model, processing)
    model.train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(job.seed)).tolist()
    losses = []
    for step in range(4):
        batch = data.collate([data.train[number] for number in order[4 * step : 4 * step + 4]])
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert logged(run) == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_no_batch_changes_the_loss_of_a_step_or_an_evaluation(tmp_path, base, rows):
    """16 rows at a time, and 6, 6 and 4; evaluations of 16 and of 3."""
    found = []
    for micro, batch in ((16, 16), (6, 3)):
        sizes = {"trainer.per_device_train_batch_size": micro, "trainer.per_device_eval_batch_size": batch,
                 "trainer.gradient_accumulation_steps": -(-16 // micro), "trainer.max_steps": 1}  # fmt: skip
        evaluation = {"data.eval": [{"path": str(rows), "format": "auto"}], "trainer.eval_on_start": True}
        run = trained(tmp_path / f"{micro}", settings(base("smolvlm"), rows, **sizes, **evaluation))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (step,) = [line for line in lines if "loss" in line]
        first = next(line for line in lines if "eval_loss" in line)
        found.append((step["loss"], step["grad_norm"], first["eval_loss"]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_process(tmp_path, forks):
    """Steps of 12 rows, with none to two images each: 12 at a time, and 2 by each rank."""
    ground = tmp_path / "ground"
    save_base(ground / "model", "smolvlm")
    write_rows(ground, colour_rows(ground))
    ended = []
    for world, micro, batch in ((0, 12, 16), (2, 2, 3)):
        said = {
            "task": "image-text-to-text", "model": {"name_or_path": "model"}, "precision": "fp32",
            "data": {"train": [{"path": "rows.jsonl"}], "eval": [{"path": "rows.jsonl"}], "max_length": 512},
            "global_batch_size": 12, "python": "hooks.py",
            "trainer": {
                "max_steps": 4, "logging_steps": 1, "report_to": "none", "optim": "sgd", "max_grad_norm": 0.0,
                "learning_rate": 0.1, "lr_scheduler_type": "constant", "save_strategy": "no",
                "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True,
                "per_device_train_batch_size": micro, "per_device_eval_batch_size": batch,
            },
        }  # fmt: skip
        out, env = prepared_by_recipe(said, ground, tmp_path / f"{world}", forks, world)
        run = forks.run(out, world, env)
        assert set(run.codes) == {0}, run.said
        ended.append(out)
    check_alike(*ended)
    whole, parts = (column(out, "eval_loss") for out in ended)
    assert len(set(whole)) == 3
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "freeze",
    [["vision", "projector"], ["vision"], ["projector"], []],
    ids=lambda parts: "+".join(parts) or "none",
)
def test_frozen_parts_have_no_gradient_and_no_adapter(tmp_path, base, rows, name, freeze):
    given = settings(base(name), rows, adapter=LORA, model__freeze=freeze)
    job = read_job(write_run(tmp_path / "run", given))
    processing = load_processing(job)
    parts = find_parts(load_model(job, processing))
    tower = {"vision": parts["vision"], "projector": parts["projector"]}

    def part_of(parameter: str) -> str:
        plain = parameter.removeprefix("base_model.model.")
        for part in ("projector", "vision"):  # a projector may be a module of the tower
            if any(plain.startswith(f"{module}.") for module in tower[part]):
                return part
        return "language"

    for adapter in (False, True):
        model = load_model(job, processing)
        own = job if adapter else read_job(write_run(tmp_path / "full", {**given, "adapter": {}}))
        model = attach_adapter(own, model, processing)
        trainable = {part_of(n) for n, p in model.named_parameters() if p.requires_grad}
        assert trainable.isdisjoint(freeze)
        assert "language" in trainable
        assert "vision" in trainable or "vision" in freeze
        has_linear = name != "gemma3" or not adapter  # its projector is a parameter, no linear layer
        assert "projector" in trainable or "projector" in freeze or not has_linear


@pytest.mark.parametrize("name", EVERY)
def test_frozen_weights_stay_and_others_move(tmp_path, base, rows, name):
    from safetensors.torch import load_file

    run = trained(tmp_path / "run", settings(base(name), rows, trainer__max_steps=2))
    before, after = (load_file(folder / "model.safetensors") for folder in (base(name), run / "model"))
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    words = ("visual", "vision", "projector", "connector", "merger")
    assert moved
    assert not [key for key in moved if any(word in key for word in words)]


@pytest.mark.parametrize("name", EVERY)
def test_an_adapter_is_read_evaluated_and_merged(tmp_path, base, rows, name):
    given = settings(base(name), rows, adapter=LORA, data__eval={"split": 0.3}, data__metrics=["accuracy"])
    given |= {"trainer.eval_strategy": "steps", "trainer.eval_steps": 4}
    run = trained(tmp_path / "run", given)
    found = evaluate(run, None, None, print)
    last = json.loads((run / "result.json").read_text())["eval"]
    assert found.metrics["loss"] == pytest.approx(last["eval_loss"], abs=1e-5)
    assert 0 <= found.metrics["accuracy"] <= 1
    image = str(rows.parent / "0-0.png")
    prompt = "Which colour is it?"
    told = answer(load_trained(run, print), prompt, 4, images=[image])
    merged = merge(run, tmp_path / "merged", "float32", lambda _: "a card\n")
    assert merged.sum.is_none
    from transformers import AutoModelForImageTextToText, ProcessorMixin

    from launcher.train.model.processors import read_processor

    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    processor = read_processor(str(tmp_path / "merged"), {}, {})
    talk = [{"role": "user", "content": [{"type": "image", "path": image}, {"type": "text", "text": prompt}]}]
    # SmolVLM's own method asks for its video processor, which needs torchvision.
    inputs = ProcessorMixin.apply_chat_template(
        processor, talk, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    said = processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said == told


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3", "llava"])
def test_the_tower_is_not_quantised(tmp_path, base, rows, name):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    given = settings(base(name), rows, adapter=LORA, model__quantization="nf4", model__device_map="local")
    run = trained(tmp_path / "run", given | {"model.prepare_for_kbit": True, "trainer.max_steps": 2})
    job = read_job(run)
    model = load_model(job, load_processing(job))
    apart = tuple(f"{module}." for part in find_parts(model).values() for module in part)
    packed = [n for n, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert packed
    assert not [name for name in packed if name.startswith(apart) or name == "lm_head"]
    assert merge(run, tmp_path / "merged", "float32", lambda _: "a card\n").sum.is_none


def test_prompts_and_images_must_agree(tmp_path, base, rows):
    run = trained(tmp_path / "run", settings(base("qwen3_vl"), rows, trainer__max_steps=1))
    loaded = load_trained(run, print)
    image = str(rows.parent / "0-0.png")
    assert isinstance(answer(loaded, "<image>a", 2, images=[image]), str)
    assert isinstance(generate(run, "no image", 2), str)
    for prompt, images, code in (
        ("<image><image>a", [image], "image-count"), ("<image>a", [], "image-count"),
        ("a", [str(tmp_path / "absent.png")], "image-missing"),
    ):  # fmt: skip
        with pytest.raises(RecipeError) as caught:
            answer(loaded, prompt, 2, images=images)
        assert caught.value.problems[0].code == code


def test_a_model_without_a_known_tower_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(RecipeError) as caught:
        find_parts(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16)))
    assert caught.value.problems[0].code == "vision-layout"


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_without_images_runs_the_tower_and_learns_the_same(tmp_path, base, name):
    """What several ranks need: each parameter has a gradient; loss and gradients are those of the text."""
    texts = [row for row in colour_rows(tmp_path) if not row["images"]]
    rows = write_rows(tmp_path, texts)
    given = settings(base(name), rows, model__freeze=[])
    given["data.train"][0]["columns"] = {"images": None}
    job = read_job(prepared(tmp_path / "run", given))
    processing = load_processing(job)
    data = build_data(job, processing)
    samples = [data.train[number] for number in range(2)]
    model = attach_adapter(job, load_model(job, processing), processing).train()
    found = {}
    for fill in (False, True):
        model.zero_grad(set_to_none=True)
        batch = ImageBatches(processing, fill=fill)(samples)
        labels = batch.pop("labels")
        logits = model(**batch).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        found[fill] = loss.item(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    (plain, before), (filled, after) = found[False], found[True]
    assert filled == pytest.approx(plain, abs=1e-6)
    assert [name for name, grad in before.items() if grad is None], "text alone leaves the tower out"
    assert not [name for name, grad in after.items() if grad is None]
    for key, grad in after.items():
        expected = torch.zeros_like(grad) if before[key] is None else before[key]
        assert (grad - expected).abs().max() < 1e-5, (key, (grad - expected).abs().max())
