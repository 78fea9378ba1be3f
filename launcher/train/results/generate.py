"""Generate with the result of a finished run: for one prompt or in a conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.tasks import FORMATS
from launcher.train.job import Job, read_job
from launcher.train.model.processors import tokenizer_of
from launcher.train.results.trained import (
    check_readable,
    place_of,
    prepared_record,
    settle,
    slow_places,
    trained_folder,
    trained_model,
    trained_processing,
)
from launcher.train.tasks import train_task

Turns = list[dict[str, Any]]
"""Messages; for a model of images and text, those with images have their paths under `images`."""
_KEPT_FOR_CONTEXT = 0.5
"""Share of the model's positions for earlier turns when a conversation gets too long."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The loaded result of a finished run."""

    job: Job
    processing: Any
    """Tokenizer, or image processor."""
    model: Any
    device: Any
    folder: Path
    """Of the weights."""

    @property
    def chats(self) -> bool:
        """Whether prompts are turns of a conversation, like the training rows."""
        return is_chat(self.job, self.processing)

    @property
    def writes(self) -> bool:
        """Whether it answers with text; a classifier answers with a label."""
        return self.job.task.writes


def is_chat(job: Job, processing: Any) -> bool:
    """Whether the training rows were conversations, and the tokenizer has the template of them."""
    rendered = any(FORMATS[name].rendered for name in _formats(job) if name in FORMATS)
    return rendered and bool(getattr(processing, "chat_template", None))


def is_instruction(job: Job) -> bool:
    """Whether the training rows were instructions, which have a template of this program."""
    return "instruction" in _formats(job)


def load_trained(run_dir: Path, say: Callable[[str], None], checkpoint: str | None = None) -> Trained:
    """Load the result of a run on one device, or over all devices; `say` gets a warning about slow places.

    checkpoint: the name of a checkpoint to use instead of the result. RecipeError without an adapter, a model
    or such a checkpoint.
    """
    job = read_job(run_dir)
    folder = trained_folder(job, checkpoint)
    check_readable(folder)
    processing = trained_processing(job, folder)
    place = place_of(job, folder)
    model = trained_model(job, folder, processing, device_map="auto" if place == "auto" else None)
    slow = slow_places(model)
    if slow is not None:
        say(slow)
    return Trained(job, processing, model, settle(model, place), folder)


def answer(
    trained: Trained,
    prompt: str,
    max_new_tokens: int,
    before: Sequence[dict[str, Any]] = (),
    write: Callable[[str], None] | None = None,
    images: Sequence[str] = (),
    second: str | None = None,
) -> str:
    """The model's greedy answer, without the prompt and special tokens; a classifier's label.

    A tokenizer with a chat template that was trained on conversations gets the prompt as a user's turn; for
    an image model the prompt is a file's path. RecipeError for an unreadable image or a too long prompt.
    before: earlier turns of the conversation, for a chat model. write: gets the answer piece by piece.
    images: paths of images that the prompt is about, at the marks <image> in it or before it.
    """
    import torch

    model = trained.model
    _check_texts(trained.job, second)
    if second is not None:
        with torch.inference_mode():
            return train_task(trained.job.task.name).reply_to_pair(trained, (prompt, second))
    if images and not trained.job.task.sees_images:
        message = f"task {trained.job.task.name} was not trained on text with images"
        raise RecipeError(Problem("usage", message, hint="leave --image out"))
    inputs = _encode(trained.job, trained.processing, prompt, before, images).to(trained.device)
    limit = _free_positions(trained, inputs)
    with torch.inference_mode():
        if not trained.writes:
            reply = train_task(trained.job.task.name).reply(model, trained.processing, prompt, inputs)
            if write is not None:
                write(reply)
            return reply
        tokenizer = tokenizer_of(trained.processing)
        output = model.generate(
            **inputs,
            max_new_tokens=min(max_new_tokens, limit),
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=stop_tokens(trained.processing, model.generation_config.eos_token_id),
            streamer=None if write is None else _streamer(tokenizer, write),
        )
    # A separate decoder begins with a start token; a causal LM continues after the prompt.
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return str(tokenizer.decode(output[0, start:], skip_special_tokens=True))


def _check_texts(job: Job, second: str | None) -> None:
    """RecipeError where a second text is missing, or has no meaning."""
    if job.task.compares_texts and (second is None or not second.strip()):
        message = f"task {job.task.name} compares two texts, and one is given"
        raise RecipeError(Problem("usage", message, hint='effilaunch generate RUN_DIR "TEXT" "TEXT"'))
    if second is not None and not job.task.compares_texts:
        message = f"two texts are given, and task {job.task.name} takes one"
        raise RecipeError(Problem("usage", message, hint="quote the prompt, or leave the second text out"))


def _free_positions(trained: Trained, inputs: Any) -> int:
    """Positions left for an answer. RecipeError if the prompt takes all.

    A model with a table of positions fails beyond it; one with rotary positions writes nonsense.
    """
    limit = _positions(trained)
    if limit is None or "input_ids" not in inputs:
        return sys.maxsize
    taken = int(inputs["input_ids"].shape[1])
    apart = trained.model.config.is_encoder_decoder  # its answer has separate positions
    if taken > limit - (trained.writes and not apart):
        message = f"the prompt has {taken:,} tokens, the model has {limit:,} positions"
        hint = "shorten it" + ("; the answer needs positions too" if trained.writes else "")
        raise RecipeError(Problem("prompt-too-long", message, hint=hint))
    return limit - 1 if apart else limit - taken


def _positions(trained: Trained) -> int | None:
    found = getattr(trained.model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def converse(
    trained: Trained,
    read: Callable[[], str | None],
    write: Callable[[str], None],
    max_new_tokens: int,
    first: str | None = None,
    images: Sequence[str] = (),
) -> int:
    """Answer prompts until `read` returns None; the number of answers. images: those of the first prompt.

    A chat model sees the earlier turns, of which the oldest are dropped if they have too many tokens. Ctrl-C
    ends the current answer, not the conversation.
    """
    turns: Turns = []
    answered = 0
    prompt = read() if first is None else first
    while prompt is not None:
        if prompt.strip():
            turns = _recent(trained, turns, write)
            reply, complete = _answer_turn(trained, prompt, turns, write, max_new_tokens, images)
            answered += complete
            if trained.chats:
                asked = {"role": "user", "content": prompt, **({"images": images} if images else {})}
                turns += [asked, {"role": "assistant", "content": reply}]
            images = ()
        prompt = read()
    return answered


def _answer_turn(
    trained: Trained, prompt: str, turns: Turns, write: Callable[[str], None], max_new_tokens: int,
    images: Sequence[str],
) -> tuple[str, bool]:  # fmt: skip
    """The answer, and whether it is complete. An error of this prompt is written like an answer."""
    pieces: list[str] = []

    def collect(piece: str) -> None:
        pieces.append(piece)
        write(piece)

    complete = True
    try:
        answer(trained, prompt, max_new_tokens, turns, collect, images)
    except RecipeError as error:  # e.g. a missing image
        write(str(error))
        complete = False
    except KeyboardInterrupt:
        write(" …")
        complete = False
    write("\n")
    return "".join(pieces), complete


def _recent(trained: Trained, turns: Turns, write: Callable[[str], None]) -> Turns:
    """The newest turns that leave positions for a question and its answer; writes how many are dropped."""
    limit = _positions(trained)
    if not turns or limit is None:
        return turns
    kept = turns
    while kept and _length(trained, kept) > limit * _KEPT_FOR_CONTEXT:
        kept = kept[2:]
    if len(kept) < len(turns):
        write(f"(the oldest {len(turns) - len(kept)} turns are dropped: {limit} tokens fit)\n")
    return kept


def _length(trained: Trained, turns: Turns) -> int:
    if trained.job.task.sees_images:
        return int(_about_images(trained.processing, turns)["input_ids"].shape[1])
    return len(trained.processing.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"])


def _streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """transformers' TextStreamer for `write`, without the prompt."""
    from transformers import TextStreamer

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    return Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)


def stop_tokens(processing: Any, configured: int | Sequence[int] | None) -> list[int]:
    """Ids that end an answer: EOS, those of the checkpoint, and the one that closes a turn."""
    found = {tokenizer_of(processing).eos_token_id, closing_token(processing)}
    found |= set(configured) if isinstance(configured, Sequence) else {configured}
    return sorted(number for number in found if number is not None)


def closing_token(processing: Any) -> int | None:
    """The special token after the assistant's text in the chat template, None without one."""
    from launcher.train.data.image_chat import ImageTemplate
    from launcher.train.data.template import Template

    tokenizer = tokenizer_of(processing)
    if not tokenizer.chat_template:
        return None
    kind = Template if processing is tokenizer else ImageTemplate
    template, answer = kind(tokenizer, None), "effilaunch-answer"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    text = template.attempt(turns)
    if text is None or answer not in text:
        return None
    rest = text.rpartition(answer)[2]
    places = {rest.find(token): token for token in template.special if token in rest}
    return int(tokenizer.convert_tokens_to_ids(places[min(places)])) if places else None


def _encode(
    job: Job, processing: Any, prompt: str, before: Sequence[dict[str, Any]] = (), images: Sequence[str] = ()
) -> Any:
    """The prompt in the format of the training rows, as the preparation found it."""
    if not job.task.reads_tokens:
        return _image(processing, prompt)
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes that a terminal could not decode
        hint = "give the prompt in UTF-8"
        raise RecipeError(
            Problem("usage", "the prompt is no valid text: it has a surrogate character", hint=hint)
        )
    if job.task.sees_images:
        return _about_images(processing, [*before, {"role": "user", "content": prompt, "images": images}])
    formats = _formats(job)
    if "chat" in formats and processing.chat_template:
        turns = [*before, {"role": "user", "content": prompt}]
        return processing.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    if is_instruction(job):
        from launcher.rows.formats import instruction_prompt

        prompt = instruction_prompt(prompt)
    return processing(prompt, return_tensors="pt", return_token_type_ids=False)


def _about_images(processor: Any, turns: Turns) -> Any:
    """The inputs of a conversation with images. RecipeError for an image that cannot be read, and where
    their number is not that of the marks."""
    from launcher.rows.image_rows import MARK, TAG
    from launcher.rows.images import ImageFile, open_image
    from launcher.train.data.image_chat import prompt_inputs

    messages, opened = [], []
    for turn in turns:
        paths, text = turn.get("images", ()), turn["content"]
        if turn["role"] == "user" and text.count(TAG) not in (0, len(paths)):
            message = f"the prompt has {text.count(TAG)} marks {TAG} for {len(paths)} images"
            raise RecipeError(Problem("image-count", message, hint="give --image once for each mark"))
        marked = text.replace(TAG, MARK) if TAG in text and paths else MARK * len(paths) + text
        messages.append({"role": turn["role"], "content": marked})
        opened += [open_image(ImageFile(str(Path(path).absolute()))).image for path in paths]
    return prompt_inputs(processor, messages, opened)


def _formats(job: Job) -> set[str]:
    asked = [source.get("format") for source in job.data.train]
    return set(prepared_record(job).get("formats") or asked)


def _image(processor: Any, path: str) -> Any:
    """A file's pixels. RecipeError if it cannot be read as an image."""
    from PIL import Image

    try:
        with Image.open(path.strip()) as image:
            return processor(image.convert("RGB"), return_tensors="pt")
    except (OSError, ValueError) as error:
        raise RecipeError(
            Problem(
                "bad-image",
                f"cannot be read as an image: {error}",
                file=path.strip(),
                hint="this model reads images: give the path of an image file as the prompt",
            )
        ) from error
