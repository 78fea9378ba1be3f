"""accelerate configs as recipe keys."""

from __future__ import annotations

from typing import Any

import pytest
from every import every

from launcher.errors import RecipeError
from launcher.importing import accelerate
from launcher.importing.reading import Effect, Reading

TOKEN = "hf_" + "Zq" * 14


def read(text: str) -> Reading:
    return accelerate.read(text, "acc.yaml")


def taken(made: Reading) -> dict[str, Any]:
    return {key: value.value for key, value in made.taken.items()}


@every(
    ("text", "key", "wanted"),
    [
        ("distributed_type: MULTI_GPU", "sharding.engine", "ddp"),
        ("distributed_type: 'NO'", "sharding.engine", "ddp"),
        ("distributed_type: no", "sharding.engine", "ddp"),
        ("distributed_type: FSDP", "sharding.engine", "fsdp"),
        ("distributed_type: DEEPSPEED", "sharding.engine", "deepspeed"),
        ("distributed_type: DEEPSPEED", "sharding.zero_stage", 2),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3", "sharding.zero_stage", 3),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  offload_optimizer_device: cpu",
            "sharding.offload_optimizer",
            "cpu",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  offload_param_device: nvme\n"
            "  offload_param_nvme_path: /n",
            "sharding.nvme_path",
            "/n",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: 4}",
            "trainer.gradient_accumulation_steps",
            4,
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: 1}",
            "trainer.max_grad_norm",
            1.0,
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_hostfile: /h}", "launch.hostfile", "/h"),
        ("distributed_type: MULTI_GPU\nnum_processes: 16", "hardware.total", 16),
        ("distributed_type: MULTI_GPU\nnum_machines: 2", "hardware.num_nodes", 2),
        ("distributed_type: 'NO'\nuse_cpu: yes", "hardware.device", "cpu"),
        ("distributed_type: MULTI_GPU\nmixed_precision: no", "precision", "fp32"),
        ("distributed_type: MULTI_GPU\nmixed_precision: false", "precision", "fp32"),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16", "precision", "bf16"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}", "sharding.engine", "ddp"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}",
            "trainer.activation_checkpointing",
            True,
        ),
        (
            "distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_tp_size: 2",
            "sharding.tp_size",
            2,
        ),
        (
            "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR}",
            "trainer.torch_compile",
            True,
        ),
        (
            "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR}",
            "trainer.torch_compile_backend",
            "inductor",
        ),
    ],
)
def test_a_key_becomes_its_recipe_key(text: str, key: str, wanted: Any) -> None:
    made = read(text)
    assert taken(made)[key] == wanted
    assert not made.refusals


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("distributed_type: MEGATRON_LM", 1),
        ("distributed_type: XLA", 1),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: MULTI_GPU", 1),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8", 2),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: d\n  zero_stage: 2",
            4,
        ),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
            "  deepspeed_config_file: d.json",
            2,
        ),
    ],
)
def test_what_is_not_here_or_contradicts_itself_is_refused(text: str, line: int) -> None:
    assert read(text).refusals[0].line == line


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("distributed_type: MULTI_GPU\nno_such_key: 1", "no_such_key"),
        ("distributed_type: MULTI_GPU\ngpu_ids: 0,1", "gpu_ids"),
        ("distributed_type: MULTI_GPU\ndeepspeed_config: {zero_stage: 3}", "deepspeed_config.zero_stage"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}",
            "fsdp_config.fsdp_sharding_strategy",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: false}",
            "fsdp_config.fsdp_reshard_after_forward",
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}", "fsdp_config.fsdp_version"),
    ],
)
def test_what_changes_nothing_is_listed(text: str, key: str) -> None:
    assert [(entry.key, entry.effect) for entry in read(text).dropped] == [(key, Effect.NONE)]


def test_no_key_of_a_written_config_vanishes() -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: DEEPSPEED\n"
        "downcast_bf16: 'no'\ngpu_ids: all\nmachine_rank: 0\nmain_process_ip: 10.0.0.1\n"
        "main_process_port: 29500\nmain_training_function: main\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: -1\nrdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\n"
        "tpu_use_sudo: false\nuse_cpu: false\nmegatron_lm_config: {}\nfp8_config:\n"
        f"tracker_token: {TOKEN}\ndeepspeed_config:\n  zero3_init_flag: true\n  zero_stage: 3\n"
        "  deepspeed_multinode_launcher: standard\n  made_up: 1\n"
    )
    made = read(text)
    names = [line.partition(":")[0].strip() for line in text.splitlines()]
    told = {key.rpartition(".")[2] for key in made.seen}
    assert [name for name in names if name not in told] == []
    assert TOKEN not in repr(made)


def test_a_file_of_deepspeed_is_followed() -> None:
    made = read("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: d.json")
    assert made.names["d.json"].line == 3
    assert "sharding.zero_stage" not in made.taken


def test_of_two_equal_keys_the_last_counts_as_it_does_there() -> None:
    made = read("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_processes: 4")
    assert (taken(made)["hardware.total"], made.dropped[0].place.line) == (4, 3)


@pytest.mark.parametrize("text", ["a: [", "a: {"])
def test_broken_yaml_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(RecipeError):
        read(text)


def test_offload_under_fsdp_is_taken_and_loading_is_listed() -> None:
    options = "fsdp_offload_params: true\n  fsdp_cpu_ram_efficient_loading: true\n  fsdp_state_dict_type: x"
    made = read(f"distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  {options}\n")
    assert not made.refusals
    assert (made.value("sharding.engine"), made.value("precision")) == ("fsdp", "bf16")
    assert made.value("sharding.offload_param") == "cpu"
    listed = {(entry.key.rpartition(".")[2], entry.effect, entry.place.line) for entry in made.dropped}
    names = ("fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type")
    assert {(name, Effect.NONE, line) for line, name in enumerate(names, start=5)} <= listed
