"""Try a finished run: the base model with what was trained, on one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.train.job import Job, read_job


def generate(run_dir: Path, prompt: str, max_new_tokens: int = 64) -> str:
    """The model's greedy answer to `prompt`, without the prompt and special tokens.

    A tokenizer with a chat template that was trained on conversations gets the prompt as a user's turn.
    RecipeError when the run directory holds neither an adapter nor a model.
    """
    import torch
    from transformers import AutoTokenizer

    job = read_job(run_dir)
    folder = _trained_folder(job)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = _trained_model(job, folder, tokenizer)
    device = _settle(model)
    inputs = _encode(job, tokenizer, prompt).to(device)
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    answer = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


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
    from launcher.train.models import load_model

    if folder.name == "model":
        from transformers import AutoModelForCausalLM

        options = {"trust_remote_code": True} if job.value("model.trust_remote_code") else {}
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", **options)
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(job, tokenizer, distributed=False), str(folder))


def _settle(model: Any) -> Any:
    """Evaluation mode, and on the GPU where there is one; quantised and spread models stay in place."""
    import torch

    model.eval()
    placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    if torch.cuda.is_available() and not placed:
        model.to("cuda")
    return next(model.parameters()).device


def _encode(job: Job, tokenizer: Any, prompt: str) -> Any:
    formats = {source.get("format") for source in job.value("data.train") or []}
    if "chat" in formats and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    if "instruction" in formats:
        from launcher.train.data.formats import instruction_to_pair

        prompt = instruction_to_pair({"instruction": prompt, "output": ""})["prompt"]
    return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
