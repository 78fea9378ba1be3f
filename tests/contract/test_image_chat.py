"""Rows with images: samples and batches equal to the processor's own, and images that are refused."""

from __future__ import annotations

import base64
import functools
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

import torch
from every import every
from PIL import Image
from plans import prepared, write_run
from transformers import ProcessorMixin
from vision_models import EVERY, chat, colour_rows, config, image_bytes, save_base, write_rows

from launcher.errors import RecipeError
from launcher.report.result_text import prepared_text
from launcher.rows.image_rows import has_image, made_up_chat, made_up_prompt
from launcher.rows.sources import Row
from launcher.train.data.build import build_data
from launcher.train.data.gate import check_first_batch
from launcher.train.data.image_chat import ImageBatches, image_inputs, image_tokens
from launcher.train.data.store import open_samples
from launcher.train.job import read_job
from launcher.train.model.processing import load_processing
from launcher.train.model.processors import image_mark, with_sizes
from launcher.train.results.trained import trained_processing

pytestmark = pytest.mark.filterwarnings("ignore")
TASK = "image-text-to-text"
IMAGE = {"type": "image"}
MADE_UP = {"data.train": [{"path": "unused.jsonl", "format": "auto"}], "data.max_length": 512}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFILAUNCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Name of a family -> a checkpoint of it."""
    root = tmp_path_factory.mktemp("bases")
    return functools.cache(lambda name: save_base(root / name, name))


def settings(rows: Path, base: Path, **changes):
    given = {"task": TASK, "tiny": False, "model.config": None, "model.name_or_path": str(base)}
    given |= {"data.train": [{"path": str(rows), "format": "auto"}], "data.max_length": 512}
    return given | {key.replace("__", "."): value for key, value in changes.items()}


def samples_of(folder: Path, given):
    """(processor, record, samples) of prepared rows."""
    run = prepared(folder, given)
    record = json.loads((run / "data.json").read_text())
    return load_processing(read_job(run)), record, open_samples(Path(record["folder"]) / "train.arrow")


def problem_of(folder: Path, base, rows, **changes):
    with pytest.raises(RecipeError) as caught:
        samples_of(folder / "run", settings(write_rows(folder, rows), base("qwen3_vl"), **changes))
    (problem,) = caught.value.problems
    return problem


# --- equal to the processor -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_is_the_processors_own(tmp_path, base, name):
    rows = colour_rows(tmp_path)
    processor, _, samples = samples_of(tmp_path / "run", settings(write_rows(tmp_path, rows), base(name)))
    chosen = [0, 6, 1]  # one, two and one image; all with images, which `apply_chat_template` asks for
    batch = ImageBatches(processor)([samples[number] for number in chosen])
    talks = []
    for number in chosen:
        files = iter(rows[number]["images"])
        user, answer = rows[number]["messages"]
        parts = [
            {"type": "image", "image": Image.open(tmp_path / next(files))} if part == IMAGE else part
            for part in user["content"]
        ]
        answer = {**answer, "content": [{"type": "text", "text": answer["content"]}]}
        talks.append([{**user, "content": parts}, answer])
    more = {"padding": True, "padding_side": "right"}
    # SmolVLM's own method asks for its video processor, which needs torchvision.
    own = ProcessorMixin.apply_chat_template(
        processor, talks, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=more
    )
    assert set(own) == set(batch) - {"labels"}
    # The template ends with a line break after the closing token, which no answer needs.
    for key, value in own.items():
        assert batch[key].shape == value.shape, key
        assert torch.equal(batch[key], value), key


@pytest.mark.parametrize("name", EVERY)
def test_targets_are_the_answers_alone(tmp_path, base, name):
    rows = colour_rows(tmp_path)
    processor, record, samples = samples_of(
        tmp_path / "run", settings(write_rows(tmp_path, rows), base(name))
    )
    tokenizer = processor.tokenizer
    for row, sample in zip(rows, samples, strict=True):
        targets = [
            token for token, label in zip(sample["input_ids"], sample["labels"], strict=True) if label != -100
        ]
        assert tokenizer.decode(targets) == row["messages"][1]["content"] + tokenizer.eos_token
        assert len(sample["image_spans"]) == 2 * len(row["images"])
        ids = set(processor.image_token_ids)
        inside = [n for n, token in enumerate(sample["input_ids"]) if token in ids]
        spans = sample["image_spans"]
        assert all(any(spans[n] <= place < spans[n + 1] for n in range(0, len(spans), 2)) for place in inside)
        assert bool(inside) is bool(row["images"])
    assert record["splits"]["train"]["counts"]["kept"] == len(rows)


def test_with_loss_on_all_no_image_token_is_a_target(tmp_path, base):
    rows = write_rows(tmp_path, colour_rows(tmp_path))
    _, _, samples = samples_of(tmp_path / "run", settings(rows, base("qwen3_vl"), data__loss_on="all"))
    sample = samples[0]
    start, end = sample["image_spans"]
    masked = [n for n, label in enumerate(sample["labels"]) if label == -100]
    assert masked == list(range(start, end))


# --- forms of rows --------------------------------------------------------------------------------------


def _forms(folder: Path):
    """Rows that say the same in other ways."""
    content = image_bytes()
    (folder / "a.png").write_bytes(content)
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    answer = "Red."
    tagged = [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": answer}]
    shared = [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": answer}]
    return {
        "part-path": {"messages": chat({**IMAGE, "path": "a.png"}, "Which?", answer=answer)},
        "part-url-file": {
            "messages": chat({**IMAGE, "url": f"file://{folder}/a.png"}, "Which?", answer=answer)
        },
        "part-base64": {"messages": chat({**IMAGE, "base64": uri}, "Which?", answer=answer)},
        "part-openai": {
            "messages": chat({"type": "image_url", "image_url": {"url": uri}}, "Which?", answer=answer)
        },
        "part-content": {"messages": chat({"type": "image_url", "content": uri}, "Which?", answer=answer)},
        "part-value": {"messages": chat({"type": "image_url", "value": uri}, "Which?", answer=answer)},
        "column": {"messages": chat(IMAGE, "Which?", answer=answer), "images": ["a.png"]},
        "column-bytes": {"messages": chat(IMAGE, "Which?", answer=answer), "images": [{"path": "a.png"}]},
        "trl-text": {"messages": [{"role": "user", "content": "Which?"}, tagged[1]], "images": ["a.png"]},
        "llamafactory": {"messages": tagged, "images": ["a.png"]},
        "sharegpt": {"conversations": shared, "images": ["a.png"]},
        "llava": {"id": "1", "image": "a.png", "conversations": shared},
        "qwen-vl": {"conversations": [{**shared[0], "value": "<img>a.png</img>Which?"}, shared[1]]},
        "prompt": {"prompt": "<image>Which?", "completion": answer, "images": ["a.png"]},
        "absolute": {"messages": tagged, "images": [str(folder / "a.png")]},
    }


def test_every_form_of_a_row_gives_the_same_sample(tmp_path, base):
    found = {}
    for name, row in _forms(tmp_path).items():
        columns = {"messages": "conversations" if "conversations" in row else "messages"}
        columns["images"] = "image" if "image" in row else "images"
        assert has_image(Row(row, "", 1), columns)
        rows = write_rows(tmp_path, [row], f"{name}.jsonl")
        processor, record, samples = samples_of(tmp_path / name, settings(rows, base("qwen3_vl")))
        batch = ImageBatches(processor)([samples[0]])
        found[name] = (samples[0]["input_ids"], samples[0]["labels"], batch["pixel_values"].sum().item())
        notes = record["splits"]["train"]["counts"]["notes"]
        assert notes == ({"images-without-mark": 1} if name == "trl-text" else {})
    assert len({str(value) for value in found.values()}) == 1, found


def test_parquet_with_the_bytes_of_images(tmp_path, base):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "Red."}]
    images = [[{"bytes": image_bytes(), "path": "a.png"}]]
    pq.write_table(pa.table({"messages": [messages], "images": images}), tmp_path / "rows.parquet")
    processor, _, samples = samples_of(
        tmp_path / "run", settings(tmp_path / "rows.parquet", base("qwen3_vl"))
    )
    assert samples[0]["image_contents"] == [image_bytes()]
    assert ImageBatches(processor)([samples[0]])["image_grid_thw"].shape == (1, 3)


def test_made_up_rows_are_rows_of_the_task(tmp_path):
    draw = random.Random(0)
    assert {len(made_up_chat(draw, n)["images"]) for n in range(8)} == {1, 2}
    assert set(made_up_prompt(draw, 0)) == {"prompt", "completion", "images"}
    _, record, samples = samples_of(
        tmp_path / "run", {"task": TASK, "model.config": config("qwen3_vl")} | MADE_UP
    )
    assert (record["formats"], samples.num_rows) == (["image-chat"], 64)


# --- images that are refused ----------------------------------------------------------------------------


def _bad(folder: Path, name: str) -> str:
    """The path of an image that cannot be trained on."""
    path = folder / f"{name}.png"
    if name == "truncated":
        path.write_bytes(image_bytes(200, kind="PNG")[:150])
    elif name == "text":
        path.write_text("no image")
    elif name == "16-bit":
        Image.new("I;16", (30, 30), 4000).save(path)
    elif name == "animated":
        frames = [Image.new("RGB", (30, 30), colour) for colour in ("red", "blue")]
        frames[0].save(path.with_suffix(".gif"), save_all=True, append_images=frames[1:])
        return f"{name}.gif"
    elif name == "bomb":
        Image.new("1", (10_000, 10_000)).save(path)
    return path.name


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("missing", "image-missing"), ("truncated", "bad-image"), ("text", "bad-image"),
        ("16-bit", "bad-image"), ("animated", "image-animated"), ("bomb", "image-too-large"),
    ],
)  # fmt: skip
def test_a_bad_image_is_one_error_with_file_and_row(tmp_path, base, name, code):
    (tmp_path / "good.png").write_bytes(image_bytes())
    rows = [{"messages": chat(IMAGE, "a"), "images": [one]} for one in ("good.png", _bad(tmp_path, name))]
    problem = problem_of(tmp_path, base, rows)
    assert (problem.code, problem.file, problem.line) == (code, str(tmp_path / "rows.jsonl"), 2)
    assert problem.message


@pytest.mark.parametrize("url", ["https://example.com/a.png", "s3://bucket/a.png"])
def test_addresses_are_refused(tmp_path, base, url):
    problem = problem_of(tmp_path, base, [{"messages": chat({**IMAGE, "url": url}, "a")}])
    assert (problem.code, problem.line) == ("image-url", 1)


@pytest.mark.parametrize(
    ("messages", "images"),
    [
        (chat("<image><image>a"), 1), (chat("<image>a"), 2), (chat("<image>a"), 0), (chat(IMAGE, "a"), 2),
        (chat(IMAGE, IMAGE, "a"), 1), (chat(IMAGE, "a <|image_pad|>"), 1),
    ],
)  # fmt: skip
def test_another_number_of_images_than_of_marks_is_refused(tmp_path, base, messages, images):
    (tmp_path / "a.png").write_bytes(image_bytes())
    problem = problem_of(tmp_path, base, [{"messages": messages, "images": ["a.png"] * images}])
    assert (problem.code, problem.line) == ("image-count", 1)


def test_a_source_without_any_image_is_refused_unless_the_recipe_agrees(tmp_path, base):
    texts = [{"messages": chat("Which?")}, {"messages": chat("Why?")}]
    problem = problem_of(tmp_path, base, texts)
    assert (problem.code, problem.path) == ("no-images", "data.train[0].path")
    rows = write_rows(tmp_path, texts)
    agreed = [{"path": str(rows), "format": "auto", "columns": {"images": None}}]
    given = settings(rows, base("qwen3_vl")) | {"data.train": agreed}
    assert len(samples_of(tmp_path / "agreed", given)[2]) == 2


def test_an_image_of_the_assistant_is_refused(tmp_path, base):
    (tmp_path / "a.png").write_bytes(image_bytes())
    messages = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": "<image>"}]
    problem = problem_of(tmp_path, base, [{"messages": messages, "images": ["a.png"]}])
    assert problem.code == "image-in-answer"


def test_a_template_without_images_is_refused(tmp_path, base):
    (tmp_path / "a.png").write_bytes(image_bytes())
    text_only = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    rows = [{"messages": chat(IMAGE, "a"), "images": ["a.png"]}]
    assert problem_of(tmp_path, base, rows, model__chat_template=text_only).code == "chat-template-images"


@pytest.mark.parametrize(
    ("mode", "kind", "colour"), [("CMYK", "JPEG", (10, 20, 30, 0)), ("RGBA", "PNG", (200, 30, 30, 128))]
)
def test_images_that_rgb_cannot_hold_are_converted_and_counted(tmp_path, base, mode, kind, colour):
    (tmp_path / "a").write_bytes(image_bytes(mode=mode, kind=kind, colour=colour))
    rows = write_rows(tmp_path, [{"messages": chat(IMAGE, "a"), "images": ["a"]}])
    _, record, _ = samples_of(tmp_path / "run", settings(rows, base("qwen3_vl")))
    assert record["splits"]["train"]["counts"]["notes"] == {f"image-converted: {mode}": 1}


def test_an_image_is_turned_as_its_camera_says(tmp_path, base):
    image = Image.new("RGB", (60, 30))
    exif = image.getexif()
    exif[274] = 6  # turned by a quarter
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(buffer.getvalue())
    rows = write_rows(tmp_path, [{"messages": chat(IMAGE, "a"), "images": ["a.jpg"]}])
    _, _, samples = samples_of(tmp_path / "run", settings(rows, base("qwen3_vl")))
    assert samples[0]["image_sizes"] == [30, 60]


# --- lengths --------------------------------------------------------------------------------------------


def test_a_row_whose_image_would_be_cut_is_left_out(tmp_path, base):
    (tmp_path / "a.png").write_bytes(image_bytes())
    long = "word " * 40
    rows = [
        {"messages": chat(IMAGE, "Which?"), "images": ["a.png"]},
        {"messages": chat(long, IMAGE), "images": ["a.png"]},  # the image ends beyond max_length
        {"messages": chat(IMAGE, "Which?", answer=long), "images": ["a.png"]},  # only the answer does
    ]
    given = settings(write_rows(tmp_path, rows), base("qwen3_vl"), data__max_length=64)
    _, record, samples = samples_of(tmp_path / "run", given)
    counts = record["splits"]["train"]["counts"]
    assert counts["dropped"] == {"image-cut": 1}
    assert (counts["kept"], counts["truncated"]) == (2, 1)
    assert [len(sample["input_ids"]) <= 64 for sample in samples] == [True, True]


def test_image_sizes_decide_the_tokens_of_an_image(tmp_path, base):
    (tmp_path / "a.png").write_bytes(image_bytes(120))
    rows = write_rows(tmp_path, [{"messages": chat(IMAGE, "Which?"), "images": ["a.png"]}])
    tokens = {}
    for pixels in (9 * 28 * 28, 4 * 28 * 28):
        given = settings(rows, base("qwen3_vl"), model__image_sizes={"max_pixels": pixels})
        _, _, samples = samples_of(tmp_path / f"{pixels}", given)
        tokens[pixels] = image_tokens(samples[0])
    assert tokens == {9 * 28 * 28: 6, 4 * 28 * 28: 2}


def test_a_size_comes_before_the_value_that_a_processor_class_has(tmp_path, base):
    """Gemma 3's class never pans and scans, whatever its image processor is set to."""
    from launcher.train.model.processors import read_processor, save_processing

    wide, folder = Image.new("RGB", (900, 300)), str(base("gemma3"))
    sizes = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2}
    crops = []
    for given in ({}, {"do_pan_and_scan": False}, sizes):
        processor = read_processor(folder, {}, given)
        crops.append(len(image_inputs(processor, [[wide]])["pixel_values"]))
    assert crops == [1, 1, 3]
    save_processing(processor, tmp_path / "adapter")
    assert type(processor).__name__ == "Gemma3Processor"
    assert "images_kwargs" not in json.loads((tmp_path / "adapter" / "processor_config.json").read_text())
    given = settings(tmp_path / "rows.jsonl", base("gemma3"), model__image_sizes=sizes)
    saved = trained_processing(read_job(write_run(tmp_path, given)), tmp_path / "adapter")
    assert len(image_inputs(saved, [[wide]])["pixel_values"]) == 3


def test_a_size_that_the_image_processor_does_not_read_is_refused(tmp_path, base):
    (tmp_path / "a.png").write_bytes(image_bytes())
    rows = [{"messages": chat(IMAGE, "a"), "images": ["a.png"]}]
    problem = problem_of(tmp_path, base, rows, model__image_sizes={"max_side": 5})
    assert (problem.code, problem.path) == ("image-size", "model.image_sizes.max_side")


def test_an_image_that_changed_since_is_found(tmp_path, base):
    (tmp_path / "a.png").write_bytes(image_bytes(40))
    rows = write_rows(tmp_path, [{"messages": chat(IMAGE, "Which?"), "images": ["a.png"]}])
    processor, _, samples = samples_of(tmp_path / "run", settings(rows, base("qwen3_vl")))
    (tmp_path / "a.png").write_bytes(image_bytes(90))
    with pytest.raises(RecipeError) as caught:
        ImageBatches(processor)([samples[0]])
    assert caught.value.problems[0].code == "image-changed"


@pytest.mark.parametrize("kind", ["InternVLProcessor", "SmolVLMProcessor"])
def test_a_processor_without_video_keeps_its_own_fields(tmp_path, kind):
    import transformers

    from launcher.train.model.processors import make_processor, read_processor, save_processing
    from launcher.train.tiny import tiny_tokenizer

    field = "image_seq_len" if kind == "SmolVLMProcessor" else "image_seq_length"
    named = dict.fromkeys(
        ("start_image_token", "end_image_token", "context_image_token", "video_token"), "<i>"
    )
    images = (
        transformers.SmolVLMImageProcessorPil if "Smol" in kind else transformers.GotOcr2ImageProcessorPil
    )
    made = make_processor(
        getattr(transformers, kind),
        image_processor=images(),
        tokenizer=tiny_tokenizer(512, named),
        **{field: 7},
    )
    save_processing(made, tmp_path)
    assert getattr(read_processor(str(tmp_path), {}, {}), field) == 7


# --- what people see ------------------------------------------------------------------------------------


def test_the_record_has_thumbnails_and_the_places_of_tokens(tmp_path, base):
    rows = [*colour_rows(tmp_path), {"messages": chat("Hi")}]
    (tmp_path / "0-0.png").write_bytes(image_bytes(400))
    _, record, samples = samples_of(tmp_path / "run", settings(write_rows(tmp_path, rows), base("qwen3_vl")))
    for shown, sample in zip(record["samples"], samples, strict=False):
        spans = sample["image_spans"]
        found = [one["tokens"] for one in shown["images"]]
        assert found == [[spans[n] + 1, spans[n + 1]] for n in range(0, len(spans), 2)]
    counts = [image_tokens(sample) for sample in samples]
    found = record["splits"]["train"]["image_tokens"]
    assert (found["mean"], found["max"]) == (round(sum(counts) / len(counts), 2), max(counts))
    shown = next(one for one in prepared_text(record, []).splitlines() if "of images" in one)
    assert shown.split()[-1] == f"{max(counts):,}"
    first = record["samples"][0]["images"][0]
    assert first["size"] == [400, 408]
    with Image.open(io.BytesIO(base64.b64decode(first["thumbnail"].partition(",")[2]))) as small:
        assert (small.format, small.size) == ("JPEG", (157, 160))
    assert len(first["thumbnail"]) < 10_000


def test_the_first_batch_is_told_and_a_processor_that_changed_is_refused(tmp_path, base, capsys):
    rows = write_rows(tmp_path, colour_rows(tmp_path))
    given = settings(rows, base("qwen3_vl"))
    processor, _, samples = samples_of(tmp_path / "run", given)
    job = read_job(tmp_path / "run")
    data = build_data(job, processor)
    check_first_batch(job, processor, data, 7)
    chosen = [samples[number] for number in range(7)]
    total, images = sum(len(one["input_ids"]) for one in chosen), sum(map(image_tokens, chosen))
    assert f"7 samples, 7 images; {images:,} of {total:,} tokens" in capsys.readouterr().out
    processor.image_processor = with_sizes(processor.image_processor, {"min_pixels": 28 * 28 * 25})
    with pytest.raises(RecipeError) as caught:
        check_first_batch(job, processor, data, 7)
    assert caught.value.problems[0].code == "image-tokens"


def test_a_sample_that_stops_a_run_names_its_image(tmp_path, base):
    rows = write_rows(tmp_path, colour_rows(tmp_path))
    processor, *_ = samples_of(tmp_path / "run", settings(rows, base("qwen3_vl")))
    job = read_job(tmp_path / "run")
    data = build_data(job, processor)
    own = data.collate
    lost = replace(
        data, collate=lambda samples: (batch := own(samples)) | {"labels": batch["labels"] * 0 - 100}
    )
    with pytest.raises(RecipeError) as caught:
        check_first_batch(job, processor, lost, 4)
    (problem,) = caught.value.problems
    assert problem.code == "no-targets"
    assert f"[image 1: {tmp_path / '0-0.png'}, 40 x 48 pixels, tokens " in problem.message
    assert processor.image_token not in problem.message


@every("name", ["qwen3_vl", "gemma3", "gemma4"])
def test_tokens_of_images_in_a_text_can_be_escaped(tmp_path, base, name):
    (tmp_path / "a.png").write_bytes(image_bytes())

    def made(text, asked):
        rows = write_rows(tmp_path, [{"messages": chat({**IMAGE, "path": "a.png"}, text)}])
        given = settings(rows, base(name), data__special_tokens_in_text=asked)
        return samples_of(tmp_path / f"{asked}-{len(text)}", given)

    processor, _, plain = made("Which?", "escape")
    text = f"Which {image_mark(processor)}?"
    with pytest.raises(RecipeError) as caught:
        made(text, "keep")
    assert caught.value.problems[0].code == "image-count"
    _, _, escaped = made(text, "escape")
    tokens = [
        [one in processor.image_token_ids for one in found[0]["input_ids"]] for found in (plain, escaped)
    ]
    assert sum(tokens[0]) == sum(tokens[1]) > 0
    assert processor.tokenizer.decode(escaped[0]["input_ids"]).count(text) == 1
