"""What becomes of LLaMA-Factory's keys: tables for its reader, and for the page about coming from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.facts.safe_files import parse_json
from launcher.importing.arguments import (
    TRANSFORMERS_DEFAULTS,
    as_bool,
    as_number,
    fill_defaults,
    take_adapter,
    take_argument,
    take_quantization,
)
from launcher.importing.key_tables import (
    Key,
    Left,
    Peer,
    Row,
    Tool,
    close_peer,
    if_on,
    is_off,
    leave_keys,
    leave_rest,
    load_tool,
    open_peer,
    rows_of,
    switch,
    take_keys,
    text,
    texts,
    tokens,
    whole,
)
from launcher.importing.reading import Effect, Place, Reading, shown
from launcher.importing.row_sources import (
    Exchange,
    Ranked,
    Shape,
    Turns,
    evaluation_share,
    source_at,
    take_hooks,
)
from launcher.recipe.field_tables import trainer_fields
from launcher.tasks import TASKS, task_of_tool, words_of_tool


def revision(value: Any) -> str | None:
    """A branch or a commit; main says nothing."""
    name = text(value)
    return None if name == "main" else name


KEYS: tuple[Key, ...] = (
    Key("model_name_or_path", "model.name_or_path", text),
    Key("model_revision", "model.revision", revision),
    Key("cache_dir", "model.cache_dir", text),
    Key("trust_remote_code", "model.trust_remote_code", if_on),
    Key("enable_liger_kernel", "trainer.use_liger_kernel", if_on),
    Key("preprocessing_num_workers", "data.num_proc", whole),
    Key("cutoff_len", "data.max_length", tokens, "2048 where it is absent"),
    Key("streaming", "data.streaming", if_on, "needs max_steps"),
)
LORA_KEYS: tuple[Key, ...] = (
    Key("lora_rank", "adapter.r", None, "8 where it is absent"),
    Key("lora_alpha", "adapter.lora_alpha", None, "twice the rank where it is absent"),
    Key("lora_dropout", "adapter.lora_dropout", None, "0 where it is absent"),
    Key("use_rslora", "adapter.use_rslora", switch),
    Key("use_dora", "adapter.use_dora", switch),
    Key("additional_target", "adapter.modules_to_save", texts),
)
"""With finetuning_type: lora, and no adapter that goes on."""
DPO_KEYS: tuple[Key, ...] = (
    Key("pref_beta", "trainer.beta", None, "0.1 where it is absent"),
    Key("pref_loss", "trainer.loss_type", None, "orpo and simpo are refused"),
    Key("dpo_label_smoothing", "trainer.label_smoothing"),
    Key("ld_alpha", "trainer.ld_alpha"),
)
"""With stage: dpo."""
HANDLED: tuple[Row, ...] = (
    ("stage", "task", "sft and pt are causal-lm, dpo is dpo; all others are refused"),
    ("finetuning_type", "adapter.type", "lora where it is absent; full: none; freeze and oft are refused"),
    ("lora_target", "adapter.target_modules", "all is all-linear, also where it is absent"),
    ("pissa_init", "adapter.init_lora_weights", "pissa_niter_16"),
    ("pissa_iter", "adapter.init_lora_weights", "-1: pissa"),
    ("adapter_name_or_path", "adapter.path", "one of them"),
    ("quantization_bit", "model.quantization", "4: nf4 with double quantisation; 8: int8"),
    ("quantization_type", "model.quantization", ""),
    ("double_quantization", "model.quantization", ""),
    ("quantization_method", "model.quantization", "bnb alone"),
    ("flash_attn", "model.attn_implementation", "fa2, sdpa, disabled: eager; auto says nothing"),
    ("add_tokens", "model.add_tokens", ""),
    ("add_special_tokens", "model.add_tokens", ""),
    ("pure_bf16", "precision", "bf16-true"),
    ("bf16", "precision", "fp32 where neither bf16 nor fp16 is there"),
    ("fp16", "precision", ""),
    ("disable_gradient_checkpointing", "trainer.activation_checkpointing", "false where it is true"),
    ("use_reentrant_gc", "trainer.activation_checkpointing_kwargs", "where it is there"),
    ("packing", "data.packing", "pt packs where it is absent"),
    ("neat_packing", "data.packing", ""),
    ("template", "model.chat_template", "listed: the tokenizer's is used"),
    ("train_on_prompt", "data.loss_on", "all"),
    ("mask_history", "data.loss_on", "completion"),
    ("dataset", "data.train", "by dataset_info.json"),
    ("dataset_dir", "data.train", "where dataset_info.json lies: data where it is absent"),
    ("eval_dataset", "data.eval", ""),
    ("val_size", "data.eval", "a share"),
    ("mix_strategy", "data.train", "concat"),
    ("compute_accuracy", "data.metrics", "accuracy"),
    ("early_stopping_steps", "early_stopping.patience", ""),
    ("disable_shuffling", "trainer.train_sampling_strategy", "sequential"),
    ("do_train", "", "must be true"),
)
"""(key, recipe key, note) of what the reader looks at itself. All others are TrainingArguments."""

_SAME = Effect.NONE
_OTHER = Effect.TRAINING
LEFT: tuple[Left, ...] = (
    Left(_SAME, "read from the model", "use_fast_tokenizer resize_vocab init_special_tokens"),
    Left(_SAME, "`run --output-dir` decides it", "output_dir overwrite_output_dir adapter_folder"),
    Left(_SAME, "prepared data is kept by `prepare`", """overwrite_cache preprocessing_batch_size
        data_shared_file_system"""),
    Left(_SAME, "10,000 rows are shuffled at a time here", "buffer_size"),
    Left(_SAME, "speed and memory only; the planner chooses", """low_cpu_mem_usage offload_folder use_kv_cache
        use_unsloth use_unsloth_gc use_v1_kernels device_map quantization_device_map use_kt kt_weight_path
        kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size
        compute_dtype block_diag_attn model_max_length"""),
    Left(_SAME, "not part of a run: `generate`, `merge` and `eval` do it", """infer_backend infer_dtype
        export_dir export_size export_device export_quantization_bit export_quantization_dataset
        export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id
        vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen
        sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend eval_num_beams do_sample
        temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
        skip_special_tokens predict_with_generate generation_max_length generation_num_beams
        generation_config"""),
    Left(_SAME, "`report` draws the curves", "plot_loss print_param_status"),
    Left(_SAME, "tokens per second are always reported", "include_effective_tokens_per_second"),
    Left(_SAME, "the launcher sets it", "ray_num_workers ray_init_kwargs master_addr master_port"),
    Left(_SAME, "for looking at the tool", """enable_torch_profiler profiler_output_dir profiler_wait_steps
        profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes
        profiler_profile_memory profiler_with_stack profile_modules"""),
    Left(_SAME, "no tracker here is SwanLab", """use_swanlab swanlab_project swanlab_workspace
        swanlab_run_name swanlab_mode swanlab_logdir swanlab_lark_webhook_url"""),
    Left(_SAME, "of a model that sees or hears", """freeze_vision_tower freeze_multi_modal_projector
        freeze_language_model image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches
        video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate
        media_dir"""),
    Left(_SAME, "each evaluation is over all rows", "eval_on_each_dataset"),
    Left(_SAME, "the adapter is saved as peft has it", "pissa_convert"),
    Left(_SAME, "of an adapter that is not LoRA", "module_dropout oft_rank oft_block_size oft_target"),
    Left(_SAME, "of a kind of training that this file does not ask for", """pref_bco_weight kto_chosen_weight
        kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
        ppo_whiten_rewards reward_model reward_model_adapters reward_model_quantization_bit reward_model_type
        freeze_trainable_layers freeze_trainable_modules freeze_extra_modules loraplus_lr_embedding
        galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise
        apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
        apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode
        badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose asft_alpha eaft_alpha
        hyper_parallel_args fp8_backend fp8_enable_fsdp_float8_all_gather"""),
    Left(_OTHER, "all rows are used: a recipe has no limit of rows", "max_samples"),
    Left(_OTHER, "sources are laid one after another; `weight` of a source says how often", """mix_strategy
        interleave_probs"""),
    Left(_OTHER, "one rate for all parameters here", "loraplus_lr_ratio"),
    Left(_OTHER, "the model is trained as its checkpoint describes it", """rope_scaling shift_attn
        moe_aux_loss_coef upcast_layernorm upcast_lmhead_output new_special_tokens_config
        split_special_tokens"""),
    Left(_OTHER, "the chat template alone makes the text", "default_system tool_format preserve_thinking"),
    Left(_OTHER, "an adapter goes on, none is laid over it", "create_new_adapter"),
    Left(_OTHER, "the reference is the model before training", """ref_model ref_model_adapters
        ref_model_quantization_bit"""),
    Left(_OTHER, "the loss of the supervised answer is not added", "pref_ftx"),
    Left(_OTHER, "padding never contributes to the loss here", "ignore_pad_token_for_loss"),
    Left(_OTHER, "an optimizer of its own, which is not here", """use_galore use_apollo use_badam
        use_adam_mini use_muon"""),
    Left(_OTHER, "a loss of its own, which is not here", "use_dft_loss use_asft_loss use_eaft_loss"),
    Left(None, "another kind of training", """use_llama_pro use_mca use_hyper_parallel mixture_of_depths"""),
    Left(None, "8-bit floats are not trained here", "fp8"),
    Left(None, "it starts at random", "train_from_scratch",
         "write model.config in place of model.name_or_path"),
    Left(None, "rows that are tokens already are not read", "tokenized_path"),
)  # fmt: skip
"""Keys that stay behind."""
OPTIONS: tuple[tuple[str, str], ...] = (
    ("use_galore", """galore_target galore_rank galore_update_interval galore_scale galore_proj_type
        galore_layerwise"""),
    ("use_apollo", """apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj
        apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front"""),
    ("use_badam", """badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio
        badam_mask_mode badam_verbose"""),
    ("use_asft_loss", "asft_alpha"),
    ("use_eaft_loss", "eaft_alpha"),
    ("loraplus_lr_ratio", "loraplus_lr_embedding"),
)  # fmt: skip
"""A key of LEFT that changes the training, and the keys that are read with it alone."""
SECRETS = ("hf_hub_token", "ms_hub_token", "om_hub_token", "swanlab_api_key", "swanlab_lark_secret")


INFO = "dataset_info.json"
_ADDRESSES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_ROLES = {
    "user_tag": ("user", {"human", "user"}),
    "assistant_tag": ("assistant", {"gpt", "chatgpt", "assistant", "model"}),
    "observation_tag": ("tool", {"tool", "observation", "function"}),
    "system_tag": ("system", {"system"}),
}
"""Tag -> (role, words that are read here as that role)."""
_PAIRS = (("from", "value"), ("role", "content"))
_FAR = {
    "ms_hub_url": "on ModelScope alone",
    "om_hub_url": "on Modelers alone",
    "script_url": "made by a script",
    "cloud_file_name": "in a cloud",
}
_UNREAD = ("images", "videos", "audios", "kto_tag")
_LARGEST = 16 * 1024 * 1024


@dataclass(slots=True)
class _Rows:
    """What the data sets came to."""

    stage: str
    shapes: dict[str, Shape] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


def tells_info(data: Any) -> bool:
    """Whether a JSON is a dataset_info.json."""
    if not isinstance(data, Mapping) or not data:
        return False
    return all(
        isinstance(entry, Mapping) and any(name in entry for name in _ADDRESSES) for entry in data.values()
    )


def take_rows(peer: Peer, stage: str, info: tuple[Mapping[str, Any], str] | None) -> None:
    """Take the sources of training and evaluation.

    info: a dataset_info.json that was given as a file of its own, and its name.
    """
    rows = _Rows(stage)
    directory = peer.get("dataset_dir")
    directory = "data" if directory is None else str(directory)
    entries, folder = info or _find_info(peer, directory)
    base = Path(folder).parent if info else Path(folder)
    for key, to in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        names = peer.listed(key)
        found = [_source(peer, key, name, entries, base, directory, rows) for name in names]
        sources = [source for source in found if source is not None]
        if sources:
            peer.reading.take(to, sources, peer.line(key), f"{key}: {shown(peer.values[key])}")
    if "data.train" not in peer.reading.taken:
        peer.reading.needs("data.train", peer.line("dataset"), "no data set could be taken")
    _take_share(peer)
    take_hooks(peer.reading, "dataset", peer.line("dataset"), rows.shapes, rows.plain)


def _find_info(peer: Peer, directory: str) -> tuple[Mapping[str, Any] | None, str]:
    """dataset_info.json beside the recipe, in its dataset_dir, or below a folder above: LLaMA-Factory's."""
    if directory == "ONLINE":
        return {}, ""
    home = Path(peer.reading.file).absolute().parent
    for folder in (
        home / directory,
        *(above / directory for above in home.parents),
        Path(directory).absolute(),
        home,
    ):
        try:
            file = folder / INFO
            if file.is_file() and file.stat().st_size <= _LARGEST:
                data = parse_json(file.read_text(encoding="utf-8"))
                if tells_info(data):
                    return data, str(folder)
        except (OSError, ValueError):
            continue
    return None, ""


def _source(
    peer: Peer,
    key: str,
    name: str,
    entries: Mapping[str, Any] | None,
    base: Path,
    directory: str,
    rows: _Rows,
) -> dict[str, Any] | None:
    line, said = peer.line(key), f"{key}: {name}"
    if directory == "ONLINE":
        entry: Mapping[str, Any] = {"hf_hub_url": name}
    elif entries is None:
        reason = f"where its rows are stands in LLaMA-Factory's {INFO}, which is not here"
        peer.reading.drop(said, name, line, Effect.NEEDED, reason, f"give that {INFO} as a FILE, too")
        return None
    elif name not in entries:
        peer.reading.drop(said, name, line, Effect.NEEDED, f"the {INFO} has no such data set")
        return None
    else:
        entry = {key: value for key, value in entries[name].items() if value is not None}
    source = _address(peer, said, line, entry, base)
    shape = None if source is None else _shape(peer, said, line, entry, rows)
    if source is None or shape is None:
        return None
    form, columns, hook = shape
    if hook is not None:
        rows.shapes[source["path"]] = hook
    else:
        rows.plain.append(source["path"])
    if "num_samples" in entry:
        reason = "all rows are used: a recipe has no limit of rows"
        peer.reading.drop(f"{said} num_samples", entry["num_samples"], line, Effect.TRAINING, reason)
    return {**source, "format": form, **({"columns": columns} if columns else {})}


def _address(
    peer: Peer, said: str, line: int | None, entry: Mapping[str, Any], base: Path
) -> dict[str, Any] | None:
    """LLaMA-Factory's own order: the hub's address, then a script, then a file."""
    reading = peer.reading
    if "hf_hub_url" in entry:
        given = {"name": entry.get("subset"), "split": entry.get("split", "train")}
        if "folder" in entry:
            reason, hint = "a folder inside a data set of the hub", "download it, and name the folder"
            reading.drop(f"{said} folder", entry["folder"], line, Effect.NEEDED, reason, hint)
            return None
        return source_at(reading, said, line, entry["hf_hub_url"], given)
    for key, where in _FAR.items():
        if key in entry:
            reason = f"its rows are {where}: download them"
            reading.drop(said, entry[key], line, Effect.NEEDED, reason, "and name the file in data.train")
            return None
    file = entry.get("file_name")
    if not isinstance(file, str):
        reading.drop(said, file, line, Effect.NEEDED, "the data set has no address")
        return None
    home = Path(reading.file).absolute().parent
    return source_at(reading, said, line, os.path.relpath(base.absolute() / file, home))


def _shape(
    peer: Peer, said: str, line: int | None, entry: Mapping[str, Any], rows: _Rows
) -> tuple[str, dict[str, str], Shape | None] | None:
    """(format, columns, hook); columns that are given take the defaults of all others away."""
    columns = entry.get("columns")
    columns = {str(k): str(v) for k, v in columns.items() if v} if isinstance(columns, Mapping) else _COLUMNS
    tags = entry.get("tags")
    tags = {**_TAGS, **tags} if isinstance(tags, Mapping) else _TAGS
    unread = [name for name in _UNREAD if name in columns]
    if unread:
        peer.reading.refuse(said, line, f"has {', '.join(unread)}, which no task here learns")
        return None
    ranking, formatting = bool(entry.get("ranking")), str(entry.get("formatting", "alpaca"))
    if ranking != peer.reading.task.ranks_answers:
        what = (
            "ranks answers, which stage: dpo learns" if ranking else "has no ranking, which stage: dpo needs"
        )
        peer.reading.refuse(said, line, what)
        return None
    if formatting == "alpaca":
        return _alpaca(peer, said, line, columns, rows)
    if formatting not in ("sharegpt", "openai") or "messages" not in columns:
        peer.reading.drop(
            said, formatting, line, Effect.NEEDED, "expected messages in a column of the data set"
        )
        return None
    if rows.stage == "pt":
        reason = "of messages stage: pt takes the first alone"
        peer.reading.drop(said, formatting, line, Effect.NEEDED, reason, "write a format_row")
        return None
    return _messages(peer, said, line, columns, tags, ranking)


def _alpaca(
    peer: Peer, said: str, line: int | None, columns: Mapping[str, str], rows: _Rows
) -> tuple[str, dict[str, str], Shape | None] | None:
    prompt = columns.get("prompt")
    if prompt is None:
        peer.reading.drop(said, "", line, Effect.NEEDED, "its columns name no prompt")
    elif rows.stage == "pt":
        return "text", {} if prompt == "text" else {"text": prompt}, None
    elif peer.reading.task.ranks_answers:
        if "chosen" in columns and "rejected" in columns:
            return (
                "preference",
                {},
                Ranked(prompt, columns["chosen"], columns["rejected"], columns.get("query", "")),
            )
        peer.reading.drop(said, "", line, Effect.NEEDED, "its columns name no chosen and rejected")
    elif "response" not in columns:
        peer.reading.drop(said, "", line, Effect.NEEDED, "its columns name no response")
    else:
        names = (columns.get(name, "") for name in ("query", "history", "system", "tools"))
        return "chat", {}, Exchange(prompt, columns["response"], *names)
    return None


def _messages(
    peer: Peer,
    said: str,
    line: int | None,
    columns: Mapping[str, str],
    tags: Mapping[str, str],
    ranking: bool,
) -> tuple[str, dict[str, str], Shape | None] | None:
    pair = (str(tags["role_tag"]), str(tags["content_tag"]))
    plain = pair in _PAIRS and all(str(tags[tag]) in words for tag, (_, words) in _ROLES.items())
    if pair == ("role", "content"):  # there these words are for templates to know
        plain = str(tags["user_tag"]) in ("user", "human") and str(tags["assistant_tag"]) in (
            "assistant",
            "gpt",
        )
    if ranking:
        if not plain or "chosen" not in columns or "rejected" not in columns or "system" in columns:
            peer.reading.drop(said, "", line, Effect.NEEDED, "ranked answers with names of their own",
                              "write a format_row that makes prompt, chosen and rejected")  # fmt: skip
            return None
        names = {"prompt": columns["messages"], "chosen": columns["chosen"], "rejected": columns["rejected"]}
        return "preference", {field: column for field, column in names.items() if field != column}, None
    if plain and "system" not in columns:
        names = {
            "messages": columns["messages"],
            **({"tools": columns["tools"]} if "tools" in columns else {}),
        }
        return "chat", {field: column for field, column in names.items() if field != column}, None
    roles = tuple((str(tags[tag]), role) for tag, (role, _) in _ROLES.items())
    hook = Turns(
        columns["messages"], pair[0], pair[1], roles, columns.get("system", ""), columns.get("tools", "")
    )
    return "chat", {}, hook


def _take_share(peer: Peer) -> None:
    size = peer.get("val_size")
    if size is None or is_off(size):
        return
    if "data.eval" in peer.reading.taken:
        peer.drop("val_size", Effect.NONE, "eval_dataset is given, too")
        return
    share = evaluation_share(peer.reading, "val_size", peer.line("val_size"), size)
    if share is not None:
        peer.take("data.eval", {"split": share}, "val_size", note="other rows of the same number")


__all__ = ["mapping_rows", "read", "tells", "tells_info"]

_MARKS = ("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target", "lora_rank")
_KERNELS = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}


def tells(data: Mapping[str, Any]) -> bool:
    """Whether a YAML's keys are LLaMA-Factory's."""
    if "model_name_or_path" not in data:
        return False
    return any(key in data for key in _MARKS) or isinstance(data.get("dataset"), str)


def mapping_rows() -> list[Row]:
    """(key of LLaMA-Factory, key of a recipe, note), for a page."""
    return rows_of((*KEYS, *LORA_KEYS, *DPO_KEYS), HANDLED, LEFT)


def read(
    text: str,
    file: str,
    overrides: Mapping[str, Any] | None = None,
    place: Place | None = None,
    info: tuple[Mapping[str, Any], str] | None = None,
) -> Reading:
    """Read a recipe of LLaMA-Factory.

    overrides: what the launch line at `place` says over the file; info: the content and the name of a
    dataset_info.json, where it is not looked for beside the recipe. RecipeError when the file is no YAML; a
    kind of training that is not here is among the reading's refusals.
    """
    peer = open_peer(text, file, _tool(), overrides)
    stage = _take_stage(peer)
    if "model_name_or_path" not in peer.values:
        peer.reading.needs("model.name_or_path", None, "model_name_or_path is not there")
    take_keys(peer, KEYS)
    _take_model(peer)
    _take_adapter(peer)
    _take_bits(peer)
    take_rows(peer, stage, info)
    _take_packing(peer, stage)
    _take_learnt(peer, stage)
    _take_training(peer)
    on = [(key, names) for key, names in OPTIONS if not is_off(peer.values.get(key))]
    leave_keys(
        peer, [Left(Effect.TRAINING, f"an option of {key}, which is not here", names) for key, names in on]
    )
    leave_keys(peer, LEFT)
    _take_arguments(peer)
    fill_defaults(peer.reading, TRANSFORMERS_DEFAULTS)
    leave_rest(peer, trainer_fields())
    return close_peer(peer, overrides or (), place)


def _tool() -> Tool:
    return load_tool("llamafactory", "LLaMA-Factory", "refuses it")


def _take_stage(peer: Peer) -> str:
    stage = str(peer.get("stage") or "sft")
    task = task_of_tool("llamafactory", stage)
    if task is None:
        known = ", ".join(words_of_tool("llamafactory"))
        peer.refuse("stage", f"is {shown(stage)}; import reads the stages {known}")
    elif "stage" in peer.values:
        peer.take("task", task.name, "stage")
    if as_bool(peer.get("do_train")) is not True:
        peer.refuse("do_train", "is not true: this file does not train", "write do_train: true if it should")
    if task is not None and task.ranks_answers:
        take_keys(peer, DPO_KEYS)
        for to, value in task.tool_defaults["llamafactory"].items():
            peer.default(to, value, "pref_beta")
        if str(peer.values.get("pref_loss")) in ("orpo", "simpo"):
            peer.refuse("pref_loss", f"is {shown(peer.values['pref_loss'])}, which is not here", "sigmoid is")
    else:
        for key in DPO_KEYS:
            if key.name in peer.values and not is_off(peer.values[key.name]):
                peer.drop(key.name, Effect.NONE, "of stage: dpo alone")
    return stage


def _take_model(peer: Peer) -> None:
    kernel = peer.get("flash_attn")
    if str(kernel) in _KERNELS:
        peer.take("model.attn_implementation", _KERNELS[str(kernel)], "flash_attn")
    elif kernel is not None and kernel != "auto":
        peer.drop("flash_attn", Effect.NONE, "a kernel that is not here; the planner chooses one")
    tokens = [*peer.listed("add_tokens"), *peer.listed("add_special_tokens")]
    if tokens:
        key = "add_tokens" if "add_tokens" in peer.values else "add_special_tokens"
        peer.take("model.add_tokens", tokens, key, "add_special_tokens")
    if peer.switch("disable_gradient_checkpointing"):
        peer.take("trainer.activation_checkpointing", False, "disable_gradient_checkpointing")
    reentrant = as_bool(peer.get("use_reentrant_gc"))
    if reentrant is not None and "trainer.activation_checkpointing" not in peer.reading.taken:
        peer.take("trainer.activation_checkpointing_kwargs", {"use_reentrant": reentrant}, "use_reentrant_gc")


def _take_adapter(peer: Peer) -> None:
    kind = str(peer.get("finetuning_type") or "lora")
    folder = peer.listed("adapter_name_or_path")
    if kind not in ("lora", "full"):
        peer.refuse("finetuning_type", f"is {shown(kind)}, and of adapters there is only LoRA here")
    if kind != "lora" or folder:
        why = "the adapter goes on with its own" if folder else "all parameters are trained"
        for name in (*(key.name for key in LORA_KEYS), "lora_target", "pissa_init", "pissa_iter"):
            if name in peer.values and not is_off(peer.values[name]):
                peer.drop(name, Effect.NONE, why)
    if kind != "lora":
        return
    if "finetuning_type" in peer.values:
        peer.take("adapter.type", "lora", "finetuning_type")
    peer.default("adapter.type", "lora", "finetuning_type")
    if folder:
        if len(folder) != 1:
            peer.refuse("adapter_name_or_path", "names several adapters, which would be merged first")
        else:
            peer.take("adapter.path", folder[0], "adapter_name_or_path")
        return
    take_keys(peer, LORA_KEYS)
    rank = peer.reading.value("adapter.r") or 8
    for to, value, name in (("r", 8, "lora_rank"), ("lora_alpha", 2 * rank, "lora_alpha"),
                            ("lora_dropout", 0.0, "lora_dropout")):  # fmt: skip
        peer.default(f"adapter.{to}", value, name)
    _take_targets(peer)


def _take_targets(peer: Peer) -> None:
    target = peer.get("lora_target")
    names = [part.strip() for part in target.split(",")] if isinstance(target, str) else target
    if names in (None, ["all"], []):
        if target is None:
            peer.default("adapter.target_modules", "all-linear", "lora_target: all")
        else:
            peer.take("adapter.target_modules", "all-linear", "lora_target")
    else:
        take_adapter(peer.reading, "target_modules", names, peer.line("lora_target"), "lora_target")
    steps = as_number(peer.get("pissa_iter"))
    if peer.switch("pissa_init"):
        count = 16 if steps is None else int(steps)
        name = "pissa" if count == -1 else f"pissa_niter_{count}"
        peer.take("adapter.init_lora_weights", name, "pissa_init", "pissa_iter")


def _take_bits(peer: Peer) -> None:
    bits, kind = as_number(peer.get("quantization_bit")), str(peer.get("quantization_type") or "nf4")
    method = str(peer.get("quantization_method") or "bnb").lower()
    double = as_bool(peer.get("double_quantization"))
    if "quantization_bit" not in peer.values:
        return
    if method not in ("bnb", "bitsandbytes"):
        peer.refuse("quantization_method", f"is {shown(method)}: only bitsandbytes quantises here")
    elif bits == 8:
        take_quantization(peer.reading, "int8", peer.line("quantization_bit"), "quantization_bit: 8")
    elif bits == 4 and kind in ("nf4", "fp4"):
        take_quantization(
            peer.reading,
            kind,
            peer.line("quantization_bit"),
            "quantization_bit: 4",
            double_quant=double is not False,
        )
    else:
        what = f"is {shown(peer.values['quantization_bit'])}, and bitsandbytes has 8 and 4 (nf4, fp4)"
        peer.refuse("quantization_bit", what)


def _take_packing(peer: Peer, stage: str) -> None:
    """For pt it packs by itself; documents of a pack see each other there, but with neat_packing."""
    packing, neat = as_bool(peer.get("packing")), peer.switch("neat_packing")
    packed = neat or packing is True or (packing is None and stage == "pt")
    key = "neat_packing" if neat else "packing"
    if packed and key in peer.values:
        peer.take("data.packing", True, key)
    elif packed:
        peer.default("data.packing", True, key)
    if packed and not neat and not peer.reading.task.ranks_answers:
        reason = "documents of a pack see each other there; here none sees another"
        peer.reading.drop("packing", "true", peer.line("packing"), Effect.TRAINING, reason)
    peer.default("data.max_length", 2048, "cutoff_len")
    if packed and stage == "pt":
        peer.default("data.overlong", "split", "packing: true")
    else:
        note = "" if stage == "pt" else "cut at the end; there prompt and answer are cut in proportion"
        peer.default("data.overlong", "truncate", "cutoff_len: 2048", note)


def _take_learnt(peer: Peer, stage: str) -> None:
    prompt, history = peer.switch("train_on_prompt"), peer.switch("mask_history")
    if stage == "sft" and prompt:
        peer.take("data.loss_on", "all", "train_on_prompt")
    elif stage == "sft" and history:
        peer.take("data.loss_on", "completion", "mask_history")
    elif prompt or history:
        key = "train_on_prompt" if prompt else "mask_history"
        peer.drop(key, Effect.NONE, "of stage: sft alone")
    template, hint = peer.get("template"), "look with `effilaunch prepare RECIPE --show 1`"
    if stage == "pt" and template is not None:
        peer.drop("template", Effect.NONE, "texts are learnt as they are")
    elif template is not None:
        reason = "LLaMA-Factory's own text of that template; the tokenizer's chat template is used"
        peer.drop("template", Effect.TRAINING, reason, hint)
    thinking = as_bool(peer.get("enable_thinking"))
    if thinking is False:
        peer.drop("enable_thinking", Effect.TRAINING, "the chat template alone makes the text", hint)
    if str(peer.get("mix_strategy") or "concat") != "concat":
        reason = "sources are laid one after another; `weight` of a source says how often it is seen"
        peer.drop("mix_strategy", Effect.TRAINING, reason)


def _take_training(peer: Peer) -> None:
    if peer.switch("pure_bf16"):
        peer.take("precision", "bf16-true", "pure_bf16")
        for key in ("bf16", "fp16"):
            peer.get(key)
    if peer.switch("compute_accuracy"):
        if "data.eval" in peer.reading.taken and not peer.reading.task.own_metrics:
            peer.take("data.metrics", ["accuracy"], "compute_accuracy")
        else:
            peer.drop("compute_accuracy", Effect.NONE, "nothing is evaluated")
    patience = as_number(peer.get("early_stopping_steps"))
    if patience is not None and patience >= 1:
        peer.take("early_stopping.patience", int(patience), "early_stopping_steps")
    elif patience is None and "early_stopping_steps" in peer.values:
        peer.drop("early_stopping_steps", Effect.TRAINING, "expected a number of evaluations")
    if peer.switch("disable_shuffling"):
        peer.take("trainer.train_sampling_strategy", "sequential", "disable_shuffling")
    for key in SECRETS:
        if key in peer.values:
            peer.drop(key, Effect.NONE, "a secret: set it in the environment")


def _take_arguments(peer: Peer) -> None:
    """What is left, of TrainingArguments; fields that only another task has are none of them."""
    general, others = trainer_fields(), {name for task in TASKS for name in trainer_fields(task.name)}
    for name in list(peer.values):
        if name in peer.reading.seen or (name in others and name not in general):
            continue
        take_argument(peer.reading, name, peer.values[name], peer.line(name))
