"""Conversations with images to samples, and samples to batches, through the model's processor.

A sample holds token ids in which the processor has expanded each image to its tokens, labels, and the images'
files: decoded pixels would fill a disk, so the processor makes them when a batch is collated.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.rows.class_names import IGNORED
from launcher.rows.image_rows import MARK, WITHOUT_MARK
from launcher.rows.images import ImageFile, Opened, open_image, open_of_row, thumbnail
from launcher.rows.messages import Message
from launcher.rows.sources import Row, bad_row
from launcher.train.data.chat import EncodeChat, Talk
from launcher.train.data.encoded import EncodedBatch, Piece, decode_pieces, has_target
from launcher.train.data.rendered import Outline
from launcher.train.data.template import Span, Template
from launcher.train.model.processors import around_image, image_mark

_KINDS = "mm_token_type_ids"
PER_TOKEN = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""What processors give for each token besides its id: which ones are an image's."""
_OF_TEXT = ("input_ids", "attention_mask", "labels", *PER_TOKEN)
_PLACES = ("offset_mapping", "text_replacement_offsets")
CUT = "image-cut"
"""Reason for leaving out a row: `data.max_length` would cut an image."""


class ImageTemplate(Template):
    """A chat template for messages whose texts have marks: it renders them as lists of text and images."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None, *, images: bool = True) -> None:
        """images: False renders a mark as the text that it is."""
        super().__init__(tokenizer, tools)
        self.images = images

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return super().render([self._in_parts(message) for message in messages], prompt=prompt)

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        return super().render_marked([self._in_parts(message) for message in messages])

    def _in_parts(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(content.split(MARK) if self.images else [content]):
            parts += [{"type": "image"}] * (number > 0)
            parts += [{"type": "text", "text": text}] if text else []
        return {**message, "content": parts}


@contextmanager
def listening(processor: Any) -> Iterator[list[str]]:
    """The texts that a processor gives its tokenizer."""
    own = processor.tokenizer
    heard: list[str] = []

    class Listening:
        def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
            heard.extend([text] if isinstance(text, str) else text)
            return own(text, *args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

    processor.tokenizer = Listening()
    try:
        yield heard
    finally:
        processor.tokenizer = own


def replacements(text: str, mark: str, heard: Sequence[str]) -> list[dict[str, Any]] | None:
    """Where each mark was and where the text for its image is, as `text_replacement_offsets` says it.

    heard: what the tokenizer was given. None where more than the marks was replaced.
    """
    parts = text.split(mark)
    found = len(heard) == 1 and re.fullmatch("(.+?)".join(map(re.escape, parts)), heard[0], re.DOTALL)
    if not found:
        return None
    starts = [match.start() for match in re.finditer(re.escape(mark), text)]
    spans = zip(starts, map(found.span, range(1, len(parts))), strict=True)
    return [{"span": (start, start + len(mark)), "new_span": new} for start, new in spans]


class EncodeImageChat(EncodeChat):
    """Encoder of conversations with images: canonical rows {messages, tools, train, images, unmarked}.

    Tokens of images are never targets. A row whose image `max_length` would cut is left out, not cut.
    """

    def __init__(self, processor: Any, *args: Any, **options: Any) -> None:
        super().__init__(processor.tokenizer, *args, **options)
        self.processor = processor
        self._image_ids = {number for number in processor.image_token_ids if number is not None}
        self._mark = image_mark(processor)
        self._checked = False
        self._require_images()

    def _require_images(self) -> None:
        """RecipeError for a template that renders no image, or no text beside one."""
        talk: list[Message] = [{"role": "user", "content": f"{MARK}qzASKzq"}]
        talk.append({"role": "assistant", "content": "qzANSWERzq"})
        text = ImageTemplate(self.tokenizer, None).attempt(talk) or ""
        found = text.count(self._mark), text.count("qzASKzq"), text.count("qzANSWERzq")
        if found != (1, 1, 1):
            message = f"{self.rendered.origin} does not render a message with an image and a text: it writes "
            message += f"{found[0]} tokens {self._mark} for one image"
            hint = "give the template of the model's processor as model.chat_template"
            raise RecipeError(Problem("chat-template-images", message, path="model.chat_template", hint=hint))

    def _template(self, row: Row) -> Template:
        return ImageTemplate(self.tokenizer, row.values.get("tools"))

    def _outline(
        self, template: Template, messages: list[Message], text: str, row: Row, found: Counter[str]
    ) -> Outline:
        # Marks come out of the template as text, where an image would be in another message's words.
        plain = ImageTemplate(self.tokenizer, row.values.get("tools"), images=False)
        return self.rendered.check(plain, messages, plain.render(messages), row, found)

    def __call__(self, rows: Sequence[Row]) -> EncodedBatch:
        batch = EncodedBatch()
        for number, row in enumerate(rows):
            talk = self._talk(row, batch.notes)
            if isinstance(talk, str):
                batch.dropped[talk] += 1
            else:
                self._add(batch, number, row, talk)
        return batch

    def _add(self, batch: EncodedBatch, number: int, row: Row, talk: Talk) -> None:
        files: list[ImageFile] = row.values["images"]
        opened = [open_of_row(row, file) for file in files]
        self._check_number(row, talk.text, len(files))
        made = self._processed(talk.text, opened)
        ids = [int(number) for number in made["input_ids"][0]]
        places = [(int(start), int(end)) for start, end in made["offset_mapping"][0]]
        moved = made["text_replacement_offsets"][0]
        images = [_tokens_in(places, one["new_span"]) for one in moved]
        labels = self._labels(ids, places, [_shifted(span, moved) for span in talk.spans])
        for place in {n for start, end in images for n in range(start, end)} | self._image_places(ids):
            labels[place] = IGNORED
        if talk.answered:
            ids, labels = self._with_end(ids, labels)
        batch.tokens += len(ids)
        if (reason := self._lost(batch, ids, labels, images)) is not None:
            batch.dropped[reason] += 1
            return
        batch.notes.update(f"image-converted: {one.mode}" for one in opened if one.mode)
        batch.notes.update([WITHOUT_MARK] * row.values["unmarked"])
        sample = {"input_ids": ids, "labels": labels}
        for name in PER_TOKEN:
            if name in made:
                sample[name] = [*map(int, made[name][0]), *[0] * len(ids)][: len(ids)]
        batch.keep(number, {name: values[: self.max_length] for name, values in sample.items()} | {
            "image_spans": [place for span in images for place in span],
            "image_sizes": [side for one in opened for side in one.size],
            "image_paths": [file.path for file in files],
            "image_contents": [file.content for file in files],
        })  # fmt: skip
        batch.pixels.append(_pixels(made))

    def _lost(
        self, batch: EncodedBatch, ids: list[int], labels: list[int], images: Sequence[Span]
    ) -> str | None:
        """Why a sample is left out; a row that is cut is counted."""
        over = len(ids) - self.max_length
        if over > 0 and self.overlong == "drop":
            return "overlong"
        if over > 0 and images and images[-1][1] > self.max_length:
            return CUT
        if over > 0:
            batch.truncated += 1
            batch.tokens_lost += over
        return None if has_target(labels[: self.max_length]) else "no-targets"

    def _check_number(self, row: Row, text: str, images: int) -> None:
        token = self._mark
        if (written := text.count(token)) != images:
            message = f"the rendered conversation has {written} tokens {token} for {images} images"
            hint = f"take {token} out of the row's own text"
            raise bad_row(row, message, hint, code="image-count")

    def _processed(self, text: str, opened: Sequence[Opened]) -> Mapping[str, Any]:
        """What the processor makes of a rendered conversation with its images, as `apply_chat_template`."""
        begin = self.tokenizer.bos_token
        with listening(self.processor) as heard:
            made: Mapping[str, Any] = self.processor(
                text=[text],
                images=[[one.image for one in opened]] if opened else None,
                add_special_tokens=not (begin and text.startswith(begin)),
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
                padding=False,
                return_tensors="pt",
                **_kinds_of_tokens(self.processor),
            )
        if opened and not self._checked:
            self._refuse_mixed(made, opened)
            self._checked = True
        if "text_replacement_offsets" in made and opened:
            return made
        moved = replacements(text, self._mark, heard)
        if moved is None or "offset_mapping" not in made:
            kind = type(self.processor).__name__
            message = f"{kind} does not say which text it gives its tokenizer for an image"
            raise RecipeError(Problem("processor-unsupported", message, path="model.name_or_path"))
        return {**made, "text_replacement_offsets": [moved]}

    def _refuse_mixed(self, made: Mapping[str, Any], opened: Sequence[Opened]) -> None:
        """RecipeError for a processor whose other inputs depend on the text: a batch is made without it."""
        alone = image_inputs(self.processor, [[one.image for one in opened]])
        found = {name: value for name, value in made.items() if name not in (*_OF_TEXT, *_PLACES)}
        mixed = {
            name
            for name in found.keys() | alone.keys()
            if name not in found or name not in alone or _shape(found[name]) != _shape(alone[name])
        }
        if mixed:
            kind = type(self.processor).__name__
            message = f"{kind} makes {', '.join(sorted(mixed))} of text and images together, "
            message += "which is not supported"
            raise RecipeError(Problem("processor-unsupported", message, path="model.name_or_path"))

    def _image_places(self, ids: Sequence[int]) -> set[int]:
        return {place for place, number in enumerate(ids) if number in self._image_ids}


def _kinds_of_tokens(processor: Any) -> dict[str, bool]:
    """What asks a processor for `mm_token_type_ids`: some give them to those who ask alone."""
    return {f"return_{_KINDS}": True} if _KINDS in processor.model_input_names else {}


def _pixels(made: Mapping[str, Any]) -> int:
    """Number of pixel values that a processor made, including padding."""
    values = (value for name, value in made.items() if name not in (*_OF_TEXT, *_PLACES))
    return sum(value.numel() for value in values if getattr(value, "is_floating_point", bool)())


def _shape(value: Any) -> Any:
    return tuple(value.shape) if hasattr(value, "shape") else len(value)


def _tokens_in(places: Sequence[Span], span: Span) -> Span:
    """The tokens of a range of characters: (first, one after the last)."""
    inside = [n for n, (start, end) in enumerate(places) if end > span[0] and start < span[1] and end > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _shifted(span: Span, moved: Sequence[Mapping[str, Any]]) -> Span:
    """A range of characters after the images before it were expanded."""
    ends = [one["span"][1] for one in moved]
    gained = [0, *(one["new_span"][1] - one["span"][1] for one in moved)]
    start, end = (place + gained[bisect_right(ends, place)] for place in span)
    return start, end


def image_inputs(processor: Any, images: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The model's inputs for the images of some conversations, at least one image in each.

    Pixels are float32, also of a processor that rounds them: the model decides in what it computes.
    """
    texts = [marks(processor, len(one)) for one in images]
    made = processor(text=texts, images=[list(one) for one in images], padding=True, return_tensors="pt")
    return {name: _float32(value) for name, value in made.items() if name not in _OF_TEXT}


def marks(processor: Any, images: int) -> str:
    """What the templates of a processor write for this many images beside each other."""
    begin, end = around_image(processor)
    return f"{begin}{image_mark(processor)}{end}" * images


def _float32(value: Any) -> Any:
    return value.float() if hasattr(value, "is_floating_point") and value.is_floating_point() else value


def prompt_inputs(processor: Any, turns: Sequence[Message], images: Sequence[Any]) -> Any:
    """The model's inputs for a conversation that asks for an answer; turns have a mark for each image."""
    text = ImageTemplate(processor.tokenizer, None).render(turns, prompt=True)
    begin = processor.tokenizer.bos_token
    made = processor(
        text=[text],
        images=[list(images)] if images else None,
        add_special_tokens=not (begin and text.startswith(begin)),
        return_tensors="pt",
        **_kinds_of_tokens(processor),
    )
    for name, value in made.items():
        made[name] = _float32(value)
    return made


class ImageBatches:
    """Samples to padded batches, with the pixels that the processor makes of their images.

    fill: a batch without images gets a black one at the end of its shortest sample, where no mask and no loss
    sees it. Ranks whose batch leaves the tower out would neither gather its parameters nor have gradients of
    them, and those that wait for both would wait forever.
    """

    def __init__(self, processor: Any, pad_to_multiple_of: int | None = None, *, fill: bool = False) -> None:
        self.processor = processor
        self._blank = _blank(processor) if fill else None
        self._pad = processor.tokenizer.pad_token_id
        self._multiple = pad_to_multiple_of or 1

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """input_ids, attention_mask, labels and columns of PER_TOKEN, each int64 [batch, longest], and the
        inputs of the images. RecipeError where an image changed since the rows were prepared."""
        import torch

        lengths = torch.tensor([len(one["input_ids"]) for one in samples])
        images = [found for one in samples if (found := _opened(one))]
        if not images and self._blank is not None:
            image, tokens = self._blank
            samples, images = _appended(samples, int(lengths.argmin()), tokens), [[image]]
        longest = max(len(sample["input_ids"]) for sample in samples)
        width = -(-longest // self._multiple) * self._multiple
        fill = {"input_ids": self._pad, "labels": IGNORED} | dict.fromkeys(PER_TOKEN, 0)
        batch = {
            name: torch.tensor([[*one[name], *[value] * (width - len(one[name]))] for one in samples])
            for name, value in fill.items()
            if name in samples[0]
        }
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).to(torch.int64)
        return batch | (image_inputs(self.processor, images) if images else {})


def _blank(processor: Any) -> tuple[Any, dict[str, list[int]]]:
    """A black image, and the columns of its tokens, none of them a target."""
    from PIL import Image

    image = Image.new("RGB", (64, 64))
    made = processor(
        text=[marks(processor, 1)], images=[[image]], add_special_tokens=False, return_tensors="pt"
    )
    tokens = {name: made[name][0].tolist() for name in ("input_ids", *PER_TOKEN) if name in made}
    return image, {**tokens, "labels": [IGNORED] * len(tokens["input_ids"])}


def _appended(
    samples: Sequence[Mapping[str, Any]], place: int, tokens: Mapping[str, list[int]]
) -> list[Mapping[str, Any]]:
    """The samples, one of them with more tokens at its end."""
    one = samples[place]
    longer = {**one, **{name: [*one[name], *more] for name, more in tokens.items() if name in one}}
    return [*samples[:place], longer, *samples[place + 1 :]]


def files_of(sample: Mapping[str, Any]) -> list[ImageFile]:
    """The files of a sample's images."""
    pairs = zip(sample["image_paths"], sample["image_contents"], strict=True)
    return [ImageFile(path, content) for path, content in pairs]


def _opened(sample: Mapping[str, Any]) -> list[Any]:
    """A sample's images. RecipeError where one has another size than its tokens were made for."""
    sides, images = sample["image_sizes"], []
    for number, file in enumerate(files_of(sample)):
        opened = open_image(file)
        if opened.size != (was := tuple(sides[2 * number : 2 * number + 2])):
            message = f"{file.name} is {opened.size} pixels large, and was {was} when the rows were prepared"
            raise RecipeError(Problem("image-changed", message, hint="prepare the rows again"))
        images.append(opened.image)
    return images


def image_pieces(tokenizer: Any, sample: Mapping[str, Any]) -> list[Piece]:
    """The text of a sample, with a note at the place of each image: its file, size and tokens."""
    ids, labels = sample["input_ids"], sample["labels"]
    spans, sides = sample["image_spans"], sample["image_sizes"]
    pieces: list[Piece] = []
    done = 0
    for number, file in enumerate(files_of(sample)):
        start, end = spans[2 * number : 2 * number + 2]
        width, height = sides[2 * number : 2 * number + 2]
        pieces += decode_pieces(tokenizer, ids[done:start], labels[done:start])
        where = f"tokens {start + 1} to {end}"
        pieces.append((f"[image {number + 1}: {file.name}, {width} x {height} pixels, {where}]", False))
        done = end
    return pieces + decode_pieces(tokenizer, ids[done:], labels[done:])


def shown_images(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`TrainTask.shown_images` of a sample."""
    spans, sides = sample["image_spans"], sample["image_sizes"]
    return [
        {
            "name": file.name,
            "size": sides[2 * number : 2 * number + 2],
            "tokens": [spans[2 * number] + 1, spans[2 * number + 1]],
            "thumbnail": thumbnail(file),
        }
        for number, file in enumerate(files_of(sample))
    ]


def check_expansion(processor: Any, samples: Sequence[Mapping[str, Any]]) -> int:
    """The tokens of images in these samples. RecipeError where the processor, as it is now, makes another
    number of them than the samples have: the model would place other images, or fail in a step."""
    found = 0
    for sample in samples:
        images = _opened(sample)
        if not images:
            continue
        text = marks(processor, len(images))
        made = processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        ids = {number for number in processor.image_token_ids if number is not None}
        now, held = (sum(int(n) in ids for n in one) for one in (made["input_ids"][0], sample["input_ids"]))
        if now != held:
            names = ", ".join(file.name for file in files_of(sample))
            message = f"the sample of {names} has {held} tokens of images, and the processor makes {now}"
            hint = "the processor or model.image_sizes changed: prepare the rows again"
            raise RecipeError(Problem("image-tokens", message, path="model.image_sizes", hint=hint))
        found += held
    return found


def image_tokens(sample: Mapping[str, Any]) -> int:
    """Tokens of a sample that images take."""
    spans: list[int] = sample["image_spans"]
    return sum(spans[1::2]) - sum(spans[::2])
