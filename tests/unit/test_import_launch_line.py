"""Launch lines: shell, launchers, flags."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.importing import launch_line
from launcher.importing.flags import OWN, Flag, read_flags, take_flags
from launcher.importing.found import KEEP_OUT, Effect, Reading
from launcher.importing.shell import Word, read_script

TOKEN = "hf_" + "Zq" * 14


def read(text: str) -> Reading:
    assert launch_line.tells(text)
    return launch_line.read(text, "run.sh")


def taken(made: Reading) -> dict[str, Any]:
    return {key: value.value for key, value in made.taken.items()}


def words(text: str) -> list[list[tuple[str, int, bool]]]:
    return [[(word.text, word.line, word.open) for word in one] for one in read_script(text).commands]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a b \\\n  c", [[("a", 1, False), ("b", 1, False), ("c", 2, False)]]),
        ("a 'b c' \"d e\"f\\ g", [[("a", 1, False), ("b c", 1, False), ("d ef g", 1, False)]]),
        ("M=x/y\na $M ${M}z", [[("a", 2, False), ("x/y", 2, False), ("x/yz", 2, False)]]),
        ("A='-x 1'\na $A \"$A\"", [[("a", 2, False), ("-x", 2, False), ("1", 2, False), ("-x 1", 2, False)]]),
        ("M=1\nM=2\na $M", [[("a", 3, False), ("$M", 3, True)]]),
        ("a $(pwd)/b `date`", [[("a", 1, False), ("$(pwd)/b", 1, True), ("`date`", 1, True)]]),
        ("a ${N:-8} ${M}", [[("a", 1, False), ("8", 1, False), ("${M}", 1, True)]]),
        ("a # b\nc", [[("a", 1, False)], [("c", 2, False)]]),
        ("a > log 2>&1 && b &", [[("a", 1, False)], [("b", 1, False)]]),
        ("a --p=<your_port> c", [[("a", 1, False), ("--p=<your_port>", 1, True), ("c", 1, False)]]),
        ("a <<EOF\nb c\nEOF\nd", [[("a", 1, False)], [("d", 4, False)]]),
        ("a \\\r\n b", [[("a", 1, False), ("b", 2, False)]]),
        (
            "for i in 1 2; do\nM=$i\ndone\na $M",
            [
                [("for", 1, False), ("i", 1, False), ("in", 1, False), ("1", 1, False), ("2", 1, False)],
                [("do", 1, False)],
                [("done", 3, False)],
                [("a", 4, False), ("$M", 4, True)],
            ],
        ),
    ],
)
def test_words_of_a_script_with_their_lines(text: str, wanted: list[Any]) -> None:
    assert words(text) == wanted


@given(st.text(alphabet="a$'\"\\\n #<>&|;(){}`=-1", max_size=40))
def test_any_text_is_read_to_its_end(text: str) -> None:
    for command in read_script(text).commands:
        assert command
        assert all(1 <= word.line <= text.count("\n") + 1 for word in command)


@pytest.mark.parametrize(
    ("text", "key", "wanted"),
    [
        ("torchrun --nproc_per_node=4 train.py --learning_rate 2e-5", "hardware.devices_per_node", 4),
        ("torchrun --nnodes 2 --nproc-per-node 8 t.py", "hardware.num_nodes", 2),
        ("torchrun --nnodes=1:4 --nproc-per-node 8 t.py", "hardware.num_nodes", 4),
        ("torchrun --max-restarts=3 --nproc-per-node 8 t.py", "launch.max_restarts", 3),
        ("torchrun train.py", "hardware.devices_per_node", 1),
        ('CMD="torchrun --nproc_per_node 2 t.py"\neval "$CMD"', "hardware.devices_per_node", 2),
        ("CMD='torchrun --nproc_per_node 2 t.py'\neval $CMD", "hardware.devices_per_node", 2),
        ("torchrun train.py --lr 1", "sharding.engine", "ddp"),
        ("python -m torch.distributed.run --nproc_per_node 2 t.py", "hardware.devices_per_node", 2),
        ("deepspeed --num_gpus 8 --num_nodes=2 t.py", "hardware.devices_per_node", 8),
        ("deepspeed --num_gpus 8 --num_nodes=2 t.py", "hardware.num_nodes", 2),
        ("deepspeed --num_gpus 8 t.py", "sharding.engine", "ddp"),
        ("deepspeed t.py --deepspeed ds.json", "sharding.engine", "deepspeed"),
        ("deepspeed -i localhost:0,1,3 t.py", "hardware.devices_per_node", 3),
        ("deepspeed --include=a:0,1@b:0,1 t.py", "hardware.num_nodes", 2),
        ("deepspeed --hostfile hosts t.py", "launch.hostfile", "hosts"),
        ("accelerate launch --num_processes 16 --num_machines 2 t.py", "hardware.total", 16),
        ("accelerate launch --mixed_precision=fp16 t.py", "precision", "fp16"),
        ("accelerate launch --use_deepspeed t.py", "sharding.zero_stage", 2),
        ("accelerate launch --use_deepspeed --zero_stage 3 t.py", "sharding.zero_stage", 3),
        (
            "accelerate launch --use_deepspeed --offload-param-device cpu t.py",
            "sharding.offload_param",
            "cpu",
        ),
        ("accelerate launch --use_fsdp t.py", "sharding.engine", "fsdp"),
        ("accelerate launch --cpu t.py", "hardware.device", "cpu"),
        ("CUDA_VISIBLE_DEVICES=0,1,2 python train.py", "hardware.devices_per_node", 3),
        ("NCCL_DEBUG=INFO python train.py", "launch.env.NCCL_DEBUG", "INFO"),
        ("export WANDB_PROJECT=p\npython train.py", "launch.env.WANDB_PROJECT", "p"),
        (
            "#SBATCH -p gpu\n#SBATCH --nodes=2 --time 1:00:00\nsrun python train.py",
            "launch.slurm.partition",
            "gpu",
        ),
        ("#SBATCH --nodes=2 --time 1:00:00\nsrun -n 2 python train.py", "hardware.num_nodes", 2),
        ("#SBATCH --nodes=2 --time 1:00:00\nsrun python train.py", "launch.slurm.time", "1:00:00"),
        ("#SBATCH --gres=gpu:a100:4\npython train.py", "hardware.devices_per_node", 4),
        ("#SBATCH --gres=gpu:a100:4\npython train.py", "launch.slurm.gres", "gpu:a100:4"),
        ("#SBATCH --gpus-per-node=a100:2\npython train.py", "hardware.devices_per_node", 2),
        ("#SBATCH -c 8\npython train.py", "launch.slurm.cpus_per_task", 8),
        ("nohup conda run -n env python -u train.py --seed 3 > log &", "seed", 3),
    ],
)
def test_launchers_and_their_surroundings(text: str, key: str, wanted: Any) -> None:
    made = read(text)
    assert taken(made)[key] == wanted
    assert not made.refusals


@pytest.mark.parametrize(
    ("flags", "key", "wanted"),
    [
        ("--learning_rate 2e-5", "trainer.learning_rate", 2e-5),
        ("--learning-rate=2e-5", "trainer.learning_rate", 2e-5),
        ("--lr 1e-3", "trainer.learning_rate", 1e-3),
        ("--epochs 2", "trainer.num_train_epochs", 2),
        ("--bf16", "precision", "bf16"),
        ("--fp16 True", "precision", "fp16"),
        ("--no_dataloader_pin_memory", "trainer.dataloader_pin_memory", False),
        ("--report_to wandb tensorboard", "trainer.report_to", ["wandb", "tensorboard"]),
        ("--lr_scheduler_kwargs '{\"num_cycles\": 2}'", "trainer.lr_scheduler_kwargs", {"num_cycles": 2}),
        ("--model_name_or_path a/b", "model.name_or_path", "a/b"),
        ("--base_model a/b", "model.name_or_path", "a/b"),
        ("--model_revision x", "model.revision", "x"),
        ("--torch_dtype bfloat16", "model.dtype", "bfloat16"),
        ("--use_flash_attn", "model.attn_implementation", "flash_attention_2"),
        ("--attn_implementation sdpa", "model.attn_implementation", "sdpa"),
        ("--trust_remote_code True", "model.trust_remote_code", True),
        ("--model_max_length 512", "data.max_length", 512),
        ("--block_size 1024", "data.packing", True),
        ("--dataset_name a/b --dataset_config_name c", "data.train", [{"path": "a/b", "name": "c"}]),
        ("--train_file t.jsonl", "data.train", [{"path": "t.jsonl"}]),
        ("--train_file t.jsonl --validation_file v.jsonl", "data.eval", [{"path": "v.jsonl"}]),
        ("--dataset_name a/b --validation_split_percentage 5", "data.eval", {"split": 0.05}),
        ("--preprocessing_num_workers 8", "data.num_proc", 8),
        ("--lora_rank 64", "adapter.r", 64),
        ("--lora_r 8", "adapter.lora_alpha", 8),
        ("--lora_r 8 --lora_target_modules q_proj v_proj", "adapter.target_modules", ["q_proj", "v_proj"]),
        ("--lora_r 8 --lora_modules all", "adapter.target_modules", "all-linear"),
        (
            "--bits 4 --bf16 --quant_type fp4 --double_quant False",
            "model.quantization",
            {"type": "fp4", "double_quant": False, "compute_dtype": "bfloat16"},
        ),
        ("--bits 8", "model.quantization", {"type": "int8"}),
        (
            "--load_in_4bit",
            "model.quantization",
            {"type": "fp4", "double_quant": False, "compute_dtype": "float32"},
        ),
        (
            "--use_4bit_quantization True --use_nested_quant True",
            "model.quantization",
            {"type": "nf4", "double_quant": True, "compute_dtype": "float16"},
        ),
        ("--use_8bit_quantization True", "model.quantization", {"type": "int8"}),
        ("--use_peft_lora True --lora_r 8 --modules_to_save lm_head", "adapter.modules_to_save", ["lm_head"]),
        ("--packing True", "data.packing", True),
        ("--use_reentrant False", "trainer.activation_checkpointing_kwargs", {"use_reentrant": False}),
        ("--use_gradient_checkpointing True", "trainer.activation_checkpointing", True),
        ("--warmup_ratio 0.1", "trainer.warmup_steps", 0.1),
        ("--fsdp 'full_shard auto_wrap'", "sharding.engine", "fsdp"),
        ("--max_grad_norm 0.3", "trainer.learning_rate", 5e-5),
    ],
)
def test_flags_of_a_script(flags: str, key: str, wanted: Any) -> None:
    made = read(f"python train.py {flags}")
    assert taken(made)[key] == wanted


@pytest.mark.parametrize(
    ("flags", "key", "effect"),
    [
        ("--num_layers 3", "--num_layers", Effect.TRAINING),
        ("--seq_length 3", "--seq_length", Effect.TRAINING),
        ("--dataset x", "--dataset", Effect.TRAINING),
        ("--batch_size 8", "--batch_size", Effect.TRAINING),
        ("--max_train_samples 10", "max_train_samples", Effect.TRAINING),
        ("--learning_rate $LR", "--learning_rate", Effect.NEEDED),
        ("--learning_rate", "learning_rate", Effect.NEEDED),
        ("--output_dir $OUT", "--output_dir", Effect.NONE),
        ("--model_name_or_path $1", "model.name_or_path", Effect.NEEDED),
        ("--dataset_name imdb", "dataset_name", Effect.NEEDED),
        ("--data_path s3://x/y.json", "data_path", Effect.NEEDED),
        (f"--hub_token {TOKEN}", "hub_token", Effect.NONE),
        (f"--my_key {TOKEN}", "--my_key", Effect.TRAINING),
        ("--learning_rate 1", "data.max_length", Effect.TRAINING),
    ],
)
def test_what_is_not_known_here_is_listed_and_never_guessed(flags: str, key: str, effect: Effect) -> None:
    made = read(f"python train.py {flags}")
    assert (key, effect) in {(entry.key, entry.effect) for entry in made.dropped}
    assert TOKEN not in repr(made)


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY"])
def test_a_secret_of_the_environment_is_named_and_not_shown(name: str) -> None:
    secret = "0123456789abcdef0123456789"
    made = read(f"export {name}={secret}\n{name}={secret} python train.py --seed 1")
    assert secret not in repr(made)
    assert {entry.key for entry in made.dropped if not entry.value} >= {name}
    assert not [key for key in made.taken if key.startswith("launch.env")]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("torchrun a.py\ntorchrun b.py", 2, "2 trainings"),
        ('CMD="accelerate launch $1"\neval "$CMD"', 2, "made when the script runs"),
        ("echo deepspeed is nice", None, "no command"),
    ],
)
def test_none_or_two_trainings_are_an_error(text: str, line: int | None, word: str) -> None:
    with pytest.raises(RecipeError, match=word) as caught:
        launch_line.read(text, "run.sh")
    assert caught.value.problems[0].line == line


@pytest.mark.parametrize(
    "text",
    [
        "deepspeed --autotuning run t.py",
        "accelerate launch --use_megatron_lm t.py",
        "deepspeed llava/train/train_mem.py --model_name_or_path m --learning_rate 1",
        "accelerate launch train.py --learning_rate 1 --vision_tower v",
        "accelerate launch train_dreambooth.py --learning_rate 1",
        "accelerate launch src/open_r1/grpo.py --config c.yaml",
        "trl grpo --config x.yaml",
        "accelerate launch --fp8_format E4M3 t.py",
        "python train.py --do_train False",
        "accelerate launch --use_fsdp --fsdp_offload_params true t.py",
        "accelerate launch --use_fsdp --mixed_precision fp16 t.py",
    ],
)
def test_what_nothing_here_does_is_refused(text: str) -> None:
    assert read(text).refusals


@pytest.mark.parametrize(
    ("text", "tool", "file", "overrides"),
    [
        ("trl sft --config c.yaml --learning_rate 1e-4", "TRL recipe", "c.yaml", {"learning_rate": "1e-4"}),
        (
            "trl sft --model_name_or_path m --use_peft",
            "TRL recipe",
            None,
            {"model_name_or_path": "m", "use_peft": True},
        ),
        (
            "accelerate launch --num_processes 2 -m trl.scripts.sft --config c.yaml",
            "TRL recipe",
            "c.yaml",
            {},
        ),
        ("accelerate launch trl/scripts/dpo.py --config c.yaml", "TRL recipe", "c.yaml", {}),
        ("accelerate launch scripts/run_sft.py c.yaml --seed=3", "TRL recipe", "c.yaml", {"seed": "3"}),
        ("accelerate launch src/open_r1/sft.py --config c.yaml", "TRL recipe", "c.yaml", {}),
        ("axolotl train c.yml --micro_batch_size 2", "axolotl recipe", "c.yml", {"micro_batch_size": "2"}),
        ("accelerate launch -m axolotl.cli.train c.yml", "axolotl recipe", "c.yml", {}),
        ("llamafactory-cli train c.yaml lora_rank=4", "LLaMA-Factory recipe", "c.yaml", {"lora_rank": "4"}),
        ("FORCE_TORCHRUN=1 lmf train c.yaml", "LLaMA-Factory recipe", "c.yaml", {}),
    ],
)
def test_a_recipe_that_a_line_starts(text: str, tool: str, file: str, overrides: dict[str, Any]) -> None:
    (call,) = read(text).calls
    assert (call.tool, call.file, call.overrides) == (tool, file, overrides)


def test_a_switch_is_no_secret() -> None:
    made = read("python train.py --learning_rate 1e-4 --append_concat_token False --my_token hunter2")
    shown = {entry.key: (entry.value, entry.reason) for entry in made.dropped}
    assert shown["--append_concat_token"] == ("False", OWN)
    assert shown["--my_token"] == ("", KEEP_OUT)


def test_the_default_is_not_written_where_the_line_says_another() -> None:
    assert "trainer.learning_rate" not in read("python train.py --learning_rate $LR").taken


def test_flags_need_no_values() -> None:
    flags, loose = read_flags([Word(text, 1) for text in ("x", "--a", "--b", "1", "2", "--c=3")])
    assert [(flag.name, flag.value) for flag in flags] == [("a", True), ("b", ["1", "2"]), ("c", "3")]
    assert [word.text for word in loose] == ["x"]


_FLAGS = [
    "learning_rate",
    "bf16",
    "model_name_or_path",
    "dataset_name",
    "lora_r",
    "bits",
    "quant_type",
    "foo",
    "use_peft",
    "load_in_4bit",
    "report_to",
    "block_size",
    "hub_token",
    "no_cuda",
    "deepspeed",
    "fsdp",
    "validation_file",
    "dataset_split",
    "q_lora",
    "target_modules",
    "warmup_ratio",
]


@given(st.dictionaries(st.sampled_from(_FLAGS), st.sampled_from([True, "1", "x", "a/b", TOKEN, ["a", "b"]])))
def test_no_flag_vanishes(values: dict[str, Any]) -> None:
    made = Reading("launch line", "run.sh")
    take_flags(made, [Flag(name, value, 1) for name, value in values.items()])
    told = {key.lstrip("-").partition(":")[0] for key in made.seen} | {entry.path for entry in made.refusals}
    assert set(values) <= told
    assert TOKEN not in repr(made)


def test_rows_with_a_source_length_are_of_seq2seq() -> None:
    made = read(
        "torchrun run_summarization.py --model_name_or_path a/b --max_source_length 512 "
        "--max_target_length 64 --train_file x.jsonl --predict_with_generate"
    )
    assert (made.value("task"), made.value("data.max_length")) == ("seq2seq-lm", 512)
    assert "--max_target_length" in {entry.key for entry in made.dropped if entry.effect is Effect.TRAINING}


@pytest.mark.parametrize(
    ("script", "task"),
    [
        ("examples/run_glue.py", "sequence-classification"),
        ("run_image_classification.py", "image-classification"),
        ("run_translation.py", "seq2seq-lm"),
        ("run_clm.py", None),
    ],
)
def test_examples_of_transformers_say_their_task(script: str, task: str | None) -> None:
    made = read(f"torchrun {script} --model_name_or_path a/b --train_file x.jsonl --learning_rate 1e-5")
    assert made.value("task") == task
