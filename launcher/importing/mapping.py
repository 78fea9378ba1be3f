"""What becomes of the keys of each tool, as rows for the pages about coming from there."""

from __future__ import annotations

from launcher.engines.deepspeed_config import flatten
from launcher.facts.safe_files import parse_json
from launcher.importing import accelerate, axolotl, deepspeed, llamafactory, trl
from launcher.importing.reading import Reading, shown

Row = tuple[str, str, str]
"""(key there, key of the recipe or empty, note)."""

# An example of each key; the rows are what the readers make of them, so that no page can say another thing.
_DEEPSPEED = (
    '{"zero_optimization": {"stage": 3}}',
    '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}}}',
    '{"bf16": {"enabled": true}}',
    '{"fp16": {"enabled": true}}',
    '{"train_micro_batch_size_per_gpu": 4}',
    '{"gradient_accumulation_steps": 8}',
    '{"train_batch_size": 256}',
    '{"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}',
    '{"optimizer": {"type": "AdamW", "params": '
    '{"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}}',
    '{"optimizer": {"type": "Lamb", "params": {"lr": 1e-5}}}',
    '{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-5}}}',
    '{"scheduler": {"type": "WarmupDecayLR", "params": '
    '{"total_num_steps": 1000, "warmup_type": "linear", "warmup_num_steps": 100}}}',
    '{"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear", "warmup_num_steps": 100}}}',
    '{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 500000000}}',
    '{"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}',
    '{"sequence_parallel_size": 2, "zero_optimization": {"stage": 1}}',
    '{"activation_checkpointing": {"cpu_checkpointing": true}, "zero_optimization": {"stage": 1}}',
    '{"curriculum_learning": {"enabled": true}, "zero_optimization": {"stage": 1}}',
)
_ACCELERATE = (
    "distributed_type: MULTI_GPU",
    "distributed_type: DEEPSPEED",
    "distributed_type: FSDP",
    "distributed_type: MEGATRON_LM",
    "distributed_type: MULTI_GPU\nmixed_precision: bf16",
    "distributed_type: MULTI_GPU\nnum_processes: 8",
    "distributed_type: MULTI_GPU\nnum_machines: 2",
    "distributed_type: 'NO'\nuse_cpu: true",
    "distributed_type: MULTI_GPU\ngpu_ids: 0,1",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_optimizer_device: cpu}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_param_device: cpu}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: 4}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: 1.0}",
    "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_hostfile: hosts}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_state_dict_type: SHARDED_STATE_DICT}",
    "distributed_type: FSDP\nfsdp_config: {fsdp_cpu_ram_efficient_loading: true}",
    "distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_tp_size: 2}",
    "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR}",
)
_SPLIT = {"hardware.total": "hardware.devices_per_node"}
_OF_THE_REST = ("data.max_length", "data.loss_on", "adapter.target_modules")
"""What an example leaves open that is for something else."""
TOOLS = ("axolotl", "llamafactory", "trl", "deepspeed", "accelerate")


def mapping_rows(tool: str) -> list[Row]:
    """Rows of one of TOOLS, in the order that a page has them. KeyError for another."""
    made = {
        "axolotl": axolotl.mapping_rows,
        "llamafactory": llamafactory.mapping_rows,
        "trl": trl.mapping_rows,
        "deepspeed": _deepspeed_rows,
        "accelerate": _accelerate_rows,
    }
    return list(made[tool]())


def _rows(said: str, reading: Reading, base: set[str]) -> list[Row]:
    """What a reading says of one example, less what the rest of the example is for."""
    taken = [
        (said, _SPLIT.get(key, key), shown(value.value) if not isinstance(value.value, dict | list) else "")
        for key, value in reading.taken.items()
        if (key == "task" or not value.is_default) and key not in base
    ]
    refused = [(said, "", f"refused: {problem.message}") for problem in reading.refusals]
    dropped = [(said, "", f"{entry.effect.value}: {entry.reason}") for entry in reading.dropped
               if entry.key not in _OF_THE_REST]  # fmt: skip
    return refused or [*taken, *dropped]


def _deepspeed_rows() -> list[Row]:
    rows: list[Row] = []
    for text in _DEEPSPEED:
        reading = deepspeed.read(text, "ds.json")
        told = {key.rpartition(".")[2] for key in flatten(parse_json(text))}
        for key, value in reading.taken.items():
            name = value.said.partition(":")[0].partition(",")[0]
            if not value.is_default and name.rpartition(".")[2] in told:
                rows.append((value.said, key, ""))
        rows += [(entry.key, "", f"{entry.effect.value}: {entry.reason}") for entry in reading.dropped]
        rows += [(str(problem.path), "", f"refused: {problem.message}") for problem in reading.refusals]
    return list(dict.fromkeys(rows))


def _accelerate_rows() -> list[Row]:
    rows: list[Row] = []
    for text in _ACCELERATE:
        first, _, last = text.partition("\n")
        base = {"sharding.engine"} if last else set()
        rows += _rows(last or first, accelerate.read(text, "accelerate.yaml"), base)
    return list(dict.fromkeys(rows))
