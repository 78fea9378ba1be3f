"""`--to vllm`: the model, or the adapter, and the command that serves it.

What vLLM takes was read in its source (config/lora.py, lora/peft_helper.py, entrypoints/openai/cli_args.py),
not tried: it needs a GPU.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RecipeError
from launcher.files.safe_files import read_json, write_json
from launcher.train.exports.plain import check_plain, facts, read_settings, stops, write_plain
from launcher.train.exports.target import ExportRequest, Target, TrainedSource, shown
from launcher.train.model.processing import hub_options, model_reference
from launcher.train.model.processors import save_processing, tokenizer_of
from launcher.train.results.trained import ADAPTER, is_trained

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""
_UNREAD = {
    "modules_to_save": "whole modules besides the matrices",
    "use_dora": "DoRA's magnitudes",
    "rank_pattern": "ranks of single layers",
    "alpha_pattern": "alphas of single layers, which vLLM would silently replace by one for all",
    "target_parameters": "adapters on parameters, such as those of experts",
    "trainable_token_indices": "trained rows of added tokens",
    "lora_bias": "biases",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "an activated adapter",
    "megatron_config": "Megatron's layers",
}
"""Fields of adapter_config.json -> what they mean; vLLM's PEFTHelper refuses them or does not read them."""
CHANGE_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Values of init_lora_weights (their beginnings) that subtract the initial adapter from the base or replace
the base; vLLM adds the trained adapter to the published base."""
SERVE = "serve.sh"


class VLLM(Target):
    name = "vllm"
    options = ("dtype", "adapter")

    def check(self, asked: ExportRequest, source: TrainedSource) -> None:
        if asked.adapter:
            check_adapter(source)

    def write(self, asked: ExportRequest, source: TrainedSource, part: Path) -> dict[str, Any]:
        if asked.adapter:
            record = _write_adapter(asked, source, part)
        else:
            merged = write_plain(asked, source, part)
            record = {"merged": merged, **facts(source, part), "compared": check_plain(source, part)}
        template = part / "chat_template.jinja"
        tokenizer = tokenizer_of(source.processing)
        if record["chat_template"] and not template.is_file():
            template.write_text(tokenizer.chat_template, encoding="utf-8")
        words = command(asked, source, record, has_template=template.is_file())
        (part / SERVE).write_text(f"#!/bin/sh\nexec {shown(words)}\n", encoding="utf-8")
        (part / SERVE).chmod(0o755)
        return {**record, "command": [word for word in words if word != "\\\n "], "notes": _notes(record)}


def check_adapter(source: TrainedSource) -> None:
    """RecipeError for an adapter that vLLM refuses, or of which it would leave something out."""
    if is_trained(source.folder) != ADAPTER:
        message, hint = "the run has no adapter: it trained the whole model", "leave --adapter out"
        raise RecipeError(Problem("usage", message, hint=hint))
    config = read_json(source.folder / "adapter_config.json")
    found = [f"{name} ({what})" for name, what in _UNREAD.items() if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append(f"bias: {config['bias']}")
    if config.get("peft_type") != "LORA":
        found.append(f"peft_type {config.get('peft_type')}")
    if (config.get("r") or 0) > RANKS[-1]:
        found.append(f"a rank of {config['r']}, more than {RANKS[-1]}")
    if source.job.model.quantization != "none":
        found.append(f"a base that was quantised to {source.job.model.quantization['type']} while it trained")
    if source.job.model.gguf_file or source.job.model.config:
        found.append("a base that is no folder or hub id of plain weights")
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(CHANGE_BASE):
        found.append(f"init_lora_weights: {start}, which changed the base's weights before training")
    if source.job.model.text_only:
        found.append("a base for text and images, whose layers have other names than the text model's")
    if source.job.model.rope_parameters:
        found.append("longer contexts (model.rope_parameters) than the base's configuration")
    if source.job.model.add_tokens:
        found.append("added tokens, for which the base has no rows")
    if found:
        message = f"vLLM cannot serve this adapter as it was trained: it has {'; '.join(found)}"
        hint = "leave --adapter out: the adapter is merged, which keeps all of it"
        raise RecipeError(Problem("export-adapter", message, file=str(source.folder), hint=hint))


def _write_adapter(asked: ExportRequest, source: TrainedSource, part: Path) -> dict[str, Any]:
    """The adapter with the tokenizer, the template and the ends that it was trained with."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy2(source.folder / name, part / name)
    save_processing(source.processing, part)
    from launcher.train.model.models import load_config

    config = load_config(source.job)
    write_json(part / "config.json", config.to_dict())
    settings = read_settings(part)
    ends = stops(source, settings)
    write_json(part / "generation_config.json", {**settings, "eos_token_id": ends})
    record = facts(source, part)
    (part / "config.json").unlink()  # the base has it: with it the folder would look like a whole model
    reference, dtype = model_reference(source.job), source.job.model.dtype
    base = {"pretrained_model_name_or_path": reference, "dtype": dtype, **hub_options(source.job)}
    return {"merged": None, **record, "dtype": dtype, "compared": check_plain(source, part, base)}


def command(
    asked: ExportRequest, source: TrainedSource, record: dict[str, Any], *, has_template: bool
) -> list[str]:
    """The arguments of `vllm serve`, with line breaks for the script."""
    folder = str(asked.output)
    more = "\\\n "
    model = str(model_reference(source.job)) if asked.adapter else folder
    words = ["vllm", "serve", model]
    if asked.adapter:
        rank = read_json(source.folder / "adapter_config.json")["r"]
        if source.job.model.revision:
            words += [more, "--revision", str(source.job.model.revision)]
        words += [more, "--tokenizer", folder, more, "--enable-lora"]
        words += [more, "--lora-modules", f"{asked.name}={folder}"]
        words += [more, "--max-lora-rank", str(next(one for one in RANKS if one >= rank))]
    else:
        words += [more, "--served-model-name", asked.name]
    # vLLM's `auto` would turn float32 into 16 bits.
    words += [more, "--dtype", str(record["dtype"])]
    if record["positions"]:
        words += [more, "--max-model-len", str(record["positions"])]
    words += [more, "--generation-config", folder]
    if has_template:
        words += [more, "--chat-template", f"{folder}/chat_template.jinja"]
    if source.job.model.trust_remote_code:
        words += [more, "--trust-remote-code"]
    return words


def _notes(record: dict[str, Any]) -> list[str]:
    """What the command cannot set."""
    notes = []
    bos = record["bos"]
    if bos["tokenizer_adds"] and bos["template_writes"]:
        notes.append(
            "use /v1/chat/completions: a rendered prompt sent to /v1/completions begins with two BOS tokens, "
            'unless the request says "add_special_tokens": false'
        )
    if not record["chat_template"]:
        notes.append("use /v1/completions: the model was not trained on conversations")
    if record["trained_length"] and (record["positions"] or 0) > record["trained_length"]:
        notes.append(
            f"the rows had at most {record['trained_length']} tokens; --max-model-len is the model's own "
            "limit, and a smaller one takes less memory"
        )
    return notes
