"""Try a finished run: the base model with what was trained, on one prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job, read_job


def generate(run_dir: Path, prompt: str, max_new_tokens: int = 64) -> str:
    """The model's greedy answer to `prompt`, without the prompt and special tokens; a classifier's label.

    A tokenizer with a chat template that was trained on conversations gets the prompt as a user's turn.
    RecipeError when the run directory holds neither an adapter nor a model, or one that reads images.
    """
    import torch
    from transformers import AutoTokenizer

    job = read_job(run_dir)
    _refuse_images(job)
    folder = _trained_folder(job)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), **_trust(job))
    model = _trained_model(job, folder, tokenizer)
    device = _settle(model)
    inputs = _encode(job, tokenizer, prompt).to(device)
    with torch.inference_mode():
        if job.value("task") == "sequence-classification":
            best = int(model(**inputs).logits[0].argmax())
            return str(model.config.id2label[best])
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=stop_tokens(tokenizer, model.generation_config.eos_token_id),
        )
    # A decoder of its own begins with a start token; a causal LM goes on after the prompt.
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return str(tokenizer.decode(output[0, start:], skip_special_tokens=True))


def stop_tokens(tokenizer: Any, configured: int | Sequence[int] | None) -> list[int]:
    """Ids that end an answer: EOS, those that the checkpoint lists, and the one that closes a turn."""
    found = {tokenizer.eos_token_id, closing_token(tokenizer)}
    found |= set(configured) if isinstance(configured, Sequence) else {configured}
    return sorted(number for number in found if number is not None)


def closing_token(tokenizer: Any) -> int | None:
    """The special token that the chat template writes after the assistant's words, None without one."""
    from launcher.train.data.turns import Template

    if not tokenizer.chat_template:
        return None
    template, answer = Template(tokenizer, None), "effilaunch-answer"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    text = template.attempt(turns)
    if text is None or answer not in text:
        return None
    rest = text.rpartition(answer)[2]
    places = {rest.find(token): token for token in template.special if token in rest}
    return int(tokenizer.convert_tokens_to_ids(places[min(places)])) if places else None


def _trust(job: Job) -> dict[str, bool]:
    """Said either way: where nothing is said, transformers asks at the terminal."""
    return {"trust_remote_code": bool(job.value("model.trust_remote_code"))}


def _refuse_images(job: Job) -> None:
    if job.value("task") != "image-classification":
        return
    raise RecipeError(
        Problem(
            "prompt-for-images",
            "the model reads images, not a prompt",
            file=str(job.run_dir),
            hint="transformers' pipeline('image-classification') reads the folder model/",
        )
    )


def _trained_folder(job: Job) -> Path:
    for kind, file in (("adapter", "adapter_config.json"), ("model", "config.json")):
        folder = job.run_dir / kind
        if (folder / file).is_file():
            return folder
    raise RecipeError(
        Problem(
            "not-trained",
            "holds neither adapter/ nor model/",
            file=str(job.run_dir),
            hint="run the recipe to its end first",
        )
    )


def _trained_model(job: Job, folder: Path, tokenizer: Any) -> Any:
    from launcher.train.models import auto_class, load_model

    if folder.name == "model":
        return auto_class(job.value("task")).from_pretrained(str(folder), dtype="auto", **_trust(job))
    from peft import PeftModel

    # The embedding grows by the run's added tokens here, as it did for training.
    base = load_model(job, tokenizer, _prepared(job).get("labels"), distributed=False)
    return PeftModel.from_pretrained(base, str(folder))


def _prepared(job: Job) -> dict[str, Any]:
    """What the preparation of the rows wrote down; nothing for a run without it."""
    path = job.run_dir / "data.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _settle(model: Any) -> Any:
    """Evaluation mode, and on the GPU where there is one; quantised and spread models stay in place."""
    import torch

    model.eval()
    placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    if torch.cuda.is_available() and not placed:
        model.to("cuda")
    return next(model.parameters()).device


def _encode(job: Job, tokenizer: Any, prompt: str) -> Any:
    """The prompt as the training rows had it, whose formats the preparation found."""
    asked = [source.get("format") for source in job.value("data.train")]
    formats = set(_prepared(job).get("formats") or asked)
    if "chat" in formats and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    if "instruction" in formats:
        from launcher.train.data.formats import instruction_prompt

        prompt = instruction_prompt(prompt)
    return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
