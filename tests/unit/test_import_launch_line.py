"""Launch lines: shell, launchers, flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.importing import launch_line
from launcher.importing.join import import_files
from launcher.importing.reading import Effect, Given, Reading
from launcher.importing.shell import Word
from launcher.importing.transformers_examples import EXAMPLES, read_flags, take_flags
from launcher.importing.unsupported import SCRIPT

TOKEN = "hf_" + "Zq" * 14
CLM = "python run_clm.py --do_train"


def read(text: str) -> Reading:
    assert launch_line.may_train(text)
    return launch_line.read(text, "run.sh")


def taken(made: Reading) -> dict[str, Any]:
    return {key: value.value for key, value in made.taken.items()}


@every(
    ("text", "key", "wanted"),
    [
        (
            "torchrun --nproc_per_node=4 run_clm.py --do_train --learning_rate 2e-5",
            "hardware.devices_per_node",
            4,
        ),
        ("torchrun --nnodes 2 --nproc-per-node 8 run_clm.py --do_train", "hardware.num_nodes", 2),
        ("torchrun --nnodes=1:4 --nproc-per-node 8 run_clm.py --do_train", "hardware.num_nodes", 4),
        ("torchrun --max-restarts=3 --nproc-per-node 8 run_clm.py --do_train", "launch.max_restarts", 3),
        ("torchrun run_clm.py --do_train", "hardware.devices_per_node", 1),
        ('CMD="torchrun --nproc_per_node 2 run_clm.py --do_train"\n$CMD', "hardware.devices_per_node", 2),
        ("A='--nproc_per_node 2'\ntorchrun $A run_clm.py --do_train", "hardware.devices_per_node", 2),
        (
            "python -m torch.distributed.launch --nproc_per_node=8 --use_env run_clm.py --do_train",
            "hardware.devices_per_node",
            8,
        ),
        ("python -m torch.distributed.launch --use-env run_clm.py --do_train --seed 3", "seed", 3),
        (
            "python -m torch.distributed.run --nproc_per_node 2 run_clm.py --do_train",
            "hardware.devices_per_node",
            2,
        ),
        ("deepspeed --num_gpus 8 --num_nodes=2 run_clm.py --do_train", "hardware.devices_per_node", 8),
        ("deepspeed --num_gpus 8 --num_nodes=2 run_clm.py --do_train", "hardware.num_nodes", 2),
        ("deepspeed -i localhost:0,1,3 run_clm.py --do_train", "hardware.devices_per_node", 3),
        ("deepspeed --include=a:0,1@b:0,1 run_clm.py --do_train", "hardware.num_nodes", 2),
        ("deepspeed --hostfile hosts run_clm.py --do_train", "launch.hostfile", "hosts"),
        ("accelerate launch --num_processes 16 --num_machines 2 run_clm.py --do_train", "hardware.total", 16),
        ("accelerate launch --mixed_precision=fp16 run_clm.py --do_train", "precision", "fp16"),
        ("accelerate launch --use_deepspeed run_clm.py --do_train", "sharding.zero_stage", 2),
        ("accelerate launch --use_deepspeed --zero_stage 3 run_clm.py --do_train", "sharding.zero_stage", 3),
        (
            "accelerate launch --use_deepspeed --offload-param-device cpu run_clm.py --do_train",
            "sharding.offload_param",
            "cpu",
        ),
        ("accelerate launch --use_fsdp run_clm.py --do_train", "sharding.engine", "fsdp"),
        ("accelerate launch --cpu run_clm.py --do_train", "hardware.device", "cpu"),
        ("CUDA_VISIBLE_DEVICES=0,1,2 python run_clm.py --do_train", "hardware.devices_per_node", 3),
        ("NCCL_DEBUG=INFO python run_clm.py --do_train", "launch.env.NCCL_DEBUG", "INFO"),
        ("export WANDB_PROJECT=p\npython run_clm.py --do_train", "launch.env.WANDB_PROJECT", "p"),
        (
            "#SBATCH -p gpu\n#SBATCH --nodes=2 --time 1:00:00\nsrun python run_clm.py --do_train",
            "launch.slurm.partition",
            "gpu",
        ),
        ("#SBATCH --nodes=2 --time 1:00:00\nsrun -n 2 python run_clm.py --do_train", "hardware.num_nodes", 2),
        (
            "#SBATCH --nodes=2 --time 1:00:00\nsrun python run_clm.py --do_train",
            "launch.slurm.time",
            "1:00:00",
        ),
        ("#SBATCH --gres=gpu:a100:4\npython run_clm.py --do_train", "hardware.devices_per_node", 4),
        ("#SBATCH --gres=gpu:a100:4\npython run_clm.py --do_train", "launch.slurm.gres", "gpu:a100:4"),
        ("#SBATCH --gpus-per-node=a100:2\npython run_clm.py --do_train", "hardware.devices_per_node", 2),
        ("#SBATCH -c 8\npython run_clm.py --do_train", "launch.slurm.cpus_per_task", 8),
        (
            "CUDA_VISIBLE_DEVICES=0,1 nohup conda run -n env python -u run_clm.py --do_train > log &",
            "hardware.devices_per_node",
            2,
        ),
        (
            "uv run --with trl torchrun --nproc_per_node 2 run_clm.py --do_train",
            "hardware.devices_per_node",
            2,
        ),
    ],
)
def test_launchers_and_their_surroundings(text: str, key: str, wanted: Any) -> None:
    made = read(text)
    assert taken(made)[key] == wanted
    assert not made.refusals


@every(
    ("flags", "key", "wanted"),
    [
        ("--learning_rate 2e-5", "trainer.learning_rate", 2e-5),
        ("--learning-rate=2e-5", "trainer.learning_rate", 2e-5),
        ("--seed 3", "seed", 3),
        ("--bf16", "precision", "bf16"),
        ("--fp16 True", "precision", "fp16"),
        ("--no_dataloader_pin_memory", "trainer.dataloader_pin_memory", False),
        ("--report_to wandb tensorboard", "trainer.report_to", ["wandb", "tensorboard"]),
        ("--lr_scheduler_kwargs '{\"num_cycles\": 2}'", "trainer.lr_scheduler_kwargs", {"num_cycles": 2}),
        ("--model_name_or_path a/b", "model.name_or_path", "a/b"),
        ("--model_revision x", "model.revision", "x"),
        ("--torch_dtype bfloat16", "model.dtype", "bfloat16"),
        ("--trust_remote_code True", "model.trust_remote_code", True),
        ("--block_size 512", "data.max_length", 512),
        ("--seed 1", "data.max_length", 1024),
        ("--seed 1", "data.packing", True),
        ("--dataset_name a/b --dataset_config_name c", "data.train", [{"path": "a/b", "name": "c"}]),
        ("--train_file t.jsonl", "data.train", [{"path": "t.jsonl"}]),
        ("--train_file t.jsonl --validation_file v.jsonl", "data.eval", [{"path": "v.jsonl"}]),
        ("--dataset_name a/b --validation_split_percentage 5", "data.eval", {"split": 0.05}),
        ("--preprocessing_num_workers 8", "data.num_proc", 8),
        ("--warmup_ratio 0.1", "trainer.warmup_steps", 0.1),
        ("--gradient_checkpointing", "trainer.activation_checkpointing", True),
        ("--fsdp 'full_shard auto_wrap'", "sharding.engine", "fsdp"),
        ("--deepspeed ds.json", "sharding.engine", "deepspeed"),
        ("--bf16 --deepspeed ds.json", "precision", "bf16"),
        ("--max_grad_norm 0.3", "trainer.learning_rate", 5e-5),
        ("--lr_scheduler_type cosine", "sharding.engine", "ddp"),
    ],
)
def test_flags_of_a_script_that_is_known_by_its_name(flags: str, key: str, wanted: Any) -> None:
    made = read(f"{CLM} {flags}")
    assert taken(made)[key] == wanted
    assert not made.refusals


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("trl sft --no_remove_unused_columns", {"remove_unused_columns": False}),
        ("trl sft --packing --lora_target_modules q k", {"packing": True, "lora_target_modules": ["q", "k"]}),
        ("trl dpo --learning_rate 1 --run_name $N", {"learning_rate": "1"}),
    ],
)
def test_options_of_trl(text: str, overrides: dict[str, Any]) -> None:
    made = read(text)
    assert made.calls[0].overrides == overrides
    assert not made.refusals


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("trl sft --packing x.json", "x.json"),
        ("trl sft --learning_rate 1 $EXTRA", "$EXTRA"),
        ('trl dpo --learning_rate 1 "$@"', "$@"),
        ('accelerate launch scripts/run_sft.py c.yaml "$@"', "$@"),
        ("accelerate launch scripts/run_sft.py c.yaml d.yaml", "d.yaml"),
        ("axolotl train a.yml b.yml", "b.yml"),
        ("axolotl train a.yml $EXTRA", "$EXTRA"),
        ('llamafactory-cli train a.yaml "${A[@]}"', "${A[@]}"),
    ],
)
def test_words_that_a_tool_does_not_take_are_refused(text: str, path: str) -> None:
    assert [problem.path for problem in read(text).refusals] == [path]


@pytest.mark.parametrize(
    ("flags", "key", "wanted"),
    [
        ("--dataset_name a/b --dataset_config x", "data.train", [{"path": "a/b", "name": "x"}]),
        ("--per_device_train 4", "trainer.per_device_train_batch_size", 4),
    ],
)
def test_an_abbreviation_is_what_argparse_takes_it_for(flags: str, key: str, wanted: Any) -> None:
    made = read(f"{CLM} {flags}")
    assert (made.value(key), made.refusals) == (wanted, [])
    assert [problem.path for problem in read(f"{CLM} --dataset x").refusals] == ["--dataset"]  # of two


@pytest.mark.parametrize(
    ("flags", "key", "effect"),
    [
        ("--model_name_or_path a/b --config_name 3", "--config_name", Effect.TRAINING),
        ("--config_name 3", "model.config", Effect.NEEDED),
        ("--model_type gpt2 --tokenizer_name a/b", "model.config", Effect.NEEDED),
        ("--train_file x.txt", "validation_split_percentage", Effect.TRAINING),
        ("--keep_linebreaks False", "--keep_linebreaks", Effect.TRAINING),
        ("--max_train_samples 10", "max_train_samples", Effect.TRAINING),
        ("--learning_rate $LR", "--learning_rate", Effect.NEEDED),
        ("--output_dir $OUT", "--output_dir", Effect.NONE),
        ("--model_name_or_path $1", "model.name_or_path", Effect.NEEDED),
        ("--dataset_name imdb", "dataset_name", Effect.NEEDED),
        ("--train_file s3://x/y.json", "train_file", Effect.NEEDED),
        (f"--hub_token {TOKEN}", "hub_token", Effect.NONE),
        (f"--model_name_or_path a/b --config_overrides {TOKEN}", "--config_overrides", Effect.TRAINING),
        (f"--config_overrides {TOKEN}", "model.config", Effect.NEEDED),
        ('--run_name "${CFG%.*}"', "--run_name", Effect.NONE),
        ("--seed ${SEED:-1}", "--seed", Effect.NEEDED),
        ("--block_size $((2 * 512))", "--block_size", Effect.NEEDED),
        ("--deepspeed $(pwd)/ds.json", "--deepspeed", Effect.NEEDED),
    ],
)
def test_what_is_not_known_here_is_listed_and_never_guessed(flags: str, key: str, effect: Effect) -> None:
    made = read(f"{CLM} {flags}")
    assert (key, effect) in {(entry.key, entry.effect) for entry in made.dropped}
    assert TOKEN not in repr(made)


@every(
    ("text", "path"),
    [
        ("torchrun notrainer.py --learning_rate 1e-4", "notrainer.py"),
        ("deepspeed main.py --model_name_or_path a/b --deepspeed --deepspeed_config ds.json", "main.py"),
        ("python train.py --model_name a/b --learning_rate 1e-4", "train.py"),
        ("python -m pkg.train --learning_rate 1e-4", "pkg.train"),
        ("python -m fastchat.train.train --learning_rate 1e-4", "fastchat.train.train"),
        ("deepspeed --module openrlhf.cli.train_sft --learning_rate 1e-4", "openrlhf.cli.train_sft"),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --lr 1e-4", "pretrain_gpt.py"),
        ("python unsloth-cli.py --learning_rate 1e-4", "unsloth-cli.py"),
        ("swift sft --model_name a/b --learning_rate 1e-4", "swift sft"),
        ("NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo", "swift rlhf"),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config x", "tune run"),
        ("litgpt finetune_lora a/b", "litgpt finetune_lora"),
        ("oumi train -c x.yaml", "oumi train"),
        ("nemo llm finetune --factory x", "nemo llm"),
        ("automodel finetune llm -c x.yaml", "automodel finetune"),
        ("soup train --config soup.yaml", "soup train"),
        ("unsloth train --config x.yaml", "unsloth train"),
        ("oumi distributed torchrun -m oumi train -c x.yaml", "oumi distributed"),
        (
            "ray job submit --address=x -- python3 -m openrlhf.cli.train_ppo_ray --a 1",
            "openrlhf.cli.train_ppo_ray",
        ),
        (
            "python t/examples/tensorflow/language-modeling/run_clm.py --do_train",
            "t/examples/tensorflow/language-modeling/run_clm.py",
        ),
        ("cd /t/examples/flax/language-modeling && python run_clm.py --do_train", "run_clm.py"),
        ("python scripts/sft_x.py --config c.yaml", "scripts/sft_x.py"),
        ("accelerate launch examples/scripts/gkd.py --learning_rate 1", "examples/scripts/gkd.py"),
        ("python -m run_clm --do_train --learning_rate 1", "run_clm"),
        ("torchrun $ARGS run_clm.py --do_train", "$ARGS"),
        ("python $SCRIPT.py --do_train --learning_rate 1", "$SCRIPT.py"),
        # of that name, and another script: a flag that transformers' has not
        (f"{CLM} --my_own 1", "--my_own"),
        (f"{CLM} --lr 1e-3", "--lr"),
    ],
)
def test_a_program_that_is_not_known_is_refused_and_nothing_is_taken_of_it(text: str, path: str) -> None:
    made = read(text)
    assert [(problem.path, problem.code, problem.line) for problem in made.refusals] == [(path, SCRIPT, 1)]
    assert not {"precision", "trainer.learning_rate", "model.name_or_path"} & made.taken.keys()
    assert "docs/migrate/script.md" in (made.refusals[0].hint or "")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (f"{CLM} --bf16 ds.json", "ds.json"),
        (f"{CLM} --deepspeed --bf16", "--deepspeed"),
        (f"{CLM} --learning_rate", "--learning_rate"),
        (f"{CLM} $EXTRA", "$EXTRA"),
        (f'{CLM} "$@"', "$@"),
        (f"{CLM} --report_to wandb ${{@}}", "${@}"),
        # a shell ends the command there, and takes the rest for another
        (f"{CLM} \\\n  # a rate\n  --learning_rate 1e-4 \\\n  --bf16", "--learning_rate"),
        (f"{CLM} \\ \n  --bf16", "--bf16"),
        ("python run_clm.py --learning_rate 1e-4", "run_clm.py"),
    ],
)
def test_words_that_an_example_does_not_take_are_refused(text: str, path: str) -> None:
    made = read(text)
    assert [(problem.path, problem.code) for problem in made.refusals] == [(path, "import-refused")]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("run_classification.py --do_regression", "regression"),
        ("run_classification.py --do_regression True", "regression"),
        ("run_classification.py --do_regression=false", None),
        ("run_classification.py", None),
        ("run_glue.py --task_name stsb", "regression"),
        ("run_glue.py --task_name mrpc", None),
    ],
)
def test_scores_are_a_regression(flags: str, problem: str | None) -> None:
    made = read(f"python {flags} --do_train --model_name_or_path a/b --train_file t.csv")
    assert not made.refusals
    assert taken(made).get("data.problem_type") == problem
    assert "--do_regression" not in {entry.key for entry in made.dropped}


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY"])
def test_a_secret_of_the_environment_is_named_and_not_shown(name: str) -> None:
    secret = "0123456789abcdef0123456789"
    made = read(f"export {name}={secret}\n{name}={secret} {CLM} --seed 1")
    assert secret not in repr(made)
    assert {entry.key for entry in made.dropped if not entry.value} >= {name}
    assert not [key for key in made.taken if key.startswith("launch.env")]


@pytest.mark.parametrize(
    ("text", "line", "code"),
    [
        ("torchrun a.py\ntorchrun b.py", 2, "import-refused"),
        ('CMD="accelerate launch $1"\neval "$CMD"', 2, "import-refused"),
        ('CMD="torchrun run_clm.py --do_train"\neval "$CMD"', 2, "import-refused"),
        ("bash -c 'torchrun run_clm.py --do_train'", 1, "import-refused"),
        ("echo deepspeed is nice", None, "import-unknown"),
        ("python x.py", None, "import-unknown"),
        ("python x.py 'a", 1, "import-unreadable"),
        ('a\ntorchrun "$(x" y', 2, "import-unreadable"),
    ],
)
def test_none_or_two_trainings_are_an_error(text: str, line: int | None, code: str) -> None:
    with pytest.raises(RecipeError) as caught:
        launch_line.read(text, "run.sh")
    assert [(problem.line, problem.code) for problem in caught.value.problems] == [(line, code)]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("deepspeed --autotuning run run_clm.py --do_train", "autotuning"),
        ("accelerate launch --use_megatron_lm run_clm.py --do_train", "use_megatron_lm"),
        ("accelerate launch --fp8_format E4M3 run_clm.py --do_train", "fp8_format"),
        ("trl rloo --config x.yaml", "trl rloo"),
    ],
)
def test_launchers_that_start_what_nothing_here_does_are_refused(text: str, path: str) -> None:
    assert [problem.path for problem in read(text).refusals] == [path]


@pytest.mark.parametrize(
    "text",
    [
        "deepspeed llava/train/train_mem.py --model_name_or_path m --learning_rate 1",
        "accelerate launch train_dreambooth.py --learning_rate 1",
        "accelerate launch src/open_r1/grpo.py --config c.yaml",
        "python run_clm.py --do_train False",
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


@pytest.mark.parametrize(
    ("text", "key", "wanted"),
    [
        ("A=(\n  --learning_rate 2e-5  # a rate\n  --bf16\n)\n" + CLM + ' "${A[@]}"', "precision", "bf16"),
        ("A=(--bf16)\n" + CLM + ' "${A[@]}" --seed 3', "precision", "bf16"),
        ("A=()\n" + CLM + ' "${A[@]}" --seed 3', "seed", 3),
    ],
)
def test_arrays_of_a_script(text: str, key: str, wanted: Any) -> None:
    made = read(text)
    assert taken(made)[key] == wanted
    assert not made.refusals


@pytest.mark.parametrize(
    "text",
    [
        "A=(--bf16)\nif [ $X ]; then\n  A+=(--fp16)\nfi\n" + CLM + ' "${A[@]}"',
        "A=(--bf16)\n[ $X ] && A+=(--fp16)\n" + CLM + ' "${A[@]}"',
        "A=(--bf16)\nA+=(--seed 3)\n" + CLM + ' "${A[@]}"',
        CLM + ' "${A[@]}"',
    ],
)
def test_an_array_that_is_not_assigned_once_is_refused(text: str) -> None:
    assert [problem.path for problem in read(text).refusals] == ["${A[@]}"]


@pytest.mark.parametrize(
    "before",
    [
        "if [ $X ]; then\n  LR=1\nfi",
        "LR=1\nLR=2",
        "LR=1\nexport LR=2",
        "for LR in 1 2; do :; done",
        "LR=$(cat lr)",
        "LR=${LR:-1}",
        "[ -z $X ] && LR=1",
        "f() {\n  LR=1\n}",
        "LR=1\nread LR",
        "LR=1\nwhile IFS= read -r LR; do :; done < x",
        "(LR=1)",
        "case $X in\n  a) LR=1 ;;\nesac",
        "",
    ],
)
def test_a_variable_that_is_not_assigned_once_is_not_known(before: str) -> None:
    made = read(f"{before}\n{CLM} --learning_rate $LR --model_name_or_path a/b")
    place = f"run.sh:{before.count(chr(10)) + 2}"
    assert ("--learning_rate", Effect.NEEDED, place) in {
        (e.key, e.effect, str(e.place)) for e in made.dropped
    }
    assert ("trainer.learning_rate" in made.taken, made.value("model.name_or_path")) == (False, "a/b")
    assert not made.refusals


def test_a_variable_is_exported_only_before_the_line_and_where_it_is_certain() -> None:
    made = read(f"export A=1\nif x; then export B=1; fi\n{CLM}\nexport C=1")
    assert {key: value for key, value in taken(made).items() if "env" in key} == {"launch.env.A": "1"}
    assert "B" in {entry.key for entry in made.dropped}


def test_flags_need_no_values() -> None:
    flags, loose = read_flags([Word(text, 1) for text in ("x", "--a", "--b", "1", "2", "--c=3")])
    assert [(flag.name, flag.value) for flag in flags] == [("a", True), ("b", ["1", "2"]), ("c", "3")]
    assert [word.text for word in loose] == ["x"]


@pytest.mark.parametrize(
    ("kind", "given", "value", "loose"),
    [
        ("bare", "--x a.json", True, ["a.json"]),
        ("bare", "--x true", True, ["true"]),
        ("switch", "--x a.json", True, ["a.json"]),
        ("switch", "--x False a", "False", ["a"]),
        ("one", "--x a b", "a", ["b"]),
        ("one", "--x -1 b", "-1", ["b"]),
        ("many", "--x a b", ["a", "b"], []),
        (None, "--x a b", ["a", "b"], []),
    ],
)
def test_a_flag_takes_as_many_words_as_its_parser_does(
    kind: str | None, given: str, value: Any, loose: list[str]
) -> None:
    flags, rest = read_flags([Word(text, 1) for text in given.split()], lambda name: kind)
    assert ([flag.value for flag in flags], [word.text for word in rest]) == ([value], loose)


_FLAGS = [
    "learning_rate", "bf16", "model_name_or_path", "dataset_name", "report_to", "block_size", "hub_token",
    "no_cuda", "deepspeed", "fsdp", "validation_file", "train_split_name", "streaming", "config_overrides",
    "warmup_ratio", "do_train", "no_dataloader_pin_memory",
]  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(_FLAGS), st.sampled_from([True, "1", "x", "a/b", TOKEN, ["a", "b"]])))
def test_no_flag_vanishes(values: dict[str, Any]) -> None:
    made = Reading("launch line", "run.sh")
    take_flags(made, [Given(name, value, 1) for name, value in values.items()], EXAMPLES["run_clm.py"], 1)
    told = {key.lstrip("-").partition(":")[0] for key in made.seen}
    told |= {(entry.path or "").lstrip("-") for entry in made.refusals} | {f"no_{name}" for name in told}
    assert set(values) <= told
    assert TOKEN not in repr(made)


def test_a_model_that_starts_at_random_is_not_asked_for_weights(tmp_path: Path) -> None:
    line = tmp_path / "run.sh"
    line.write_text(f"{CLM} --config_name c.json --dataset_name org/rows --output_dir x\n")
    needed = [entry.key for entry in import_files([str(line)]).dropped if entry.effect is Effect.NEEDED]
    assert needed == ["model.config"]
    assert read(f"{CLM} --model_type gpt2 --model_name_or_path a/b").dropped == read(
        f"{CLM} --model_name_or_path a/b").dropped  # fmt: skip


@pytest.mark.parametrize(("flags", "length"), [("", "128"), ("--max_target_length 64", "64")])
def test_the_length_of_targets_is_listed_where_the_line_is_silent_too(flags: str, length: str) -> None:
    made = read(f"python run_translation.py --do_train --model_name_or_path a/b --train_file x.json {flags}")
    told = {entry.key.lstrip("-"): entry for entry in made.dropped}
    assert (told["max_target_length"].value, told["max_target_length"].effect) == (length, Effect.TRAINING)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("NNODES=2 NPROC_PER_NODE=8", {"hardware.num_nodes": 2, "hardware.devices_per_node": 8}),
        ("FORCE_TORCHRUN=1 CUDA_VISIBLE_DEVICES=0,1", {"hardware.devices_per_node": 2}),
        ("FORCE_TORCHRUN=1 MAX_RESTARTS=3 RDZV_ID=7 A=1", {"launch.max_restarts": 3, "launch.env.A": "1"}),
        ("USE_MCA=0", {}),
    ],
)
def test_variables_of_llamafactory(text: str, wanted: dict[str, Any]) -> None:
    for start in ("llamafactory-cli train", "python -m llamafactory.cli train"):
        made = read(f"{text} {start} x.yaml")
        assert (taken(made), made.refusals) == (wanted, [])


def test_a_command_of_llamafactory_that_does_not_train_is_refused() -> None:
    assert [problem.path for problem in read("python -m llamafactory.cli export x.yaml --bf16").refusals] == [
        "llamafactory.cli export"
    ]
    assert read("torchrun src/llamafactory/launcher.py x.yaml").calls[0].file == "x.yaml"


@pytest.mark.parametrize("name", ["USE_MCA", "USE_MEGATRON_BRIDGE", "USE_V1"])
def test_variables_that_make_another_trainer_of_llamafactory_are_refused(name: str) -> None:
    assert [problem.path for problem in read(f"{name}=1 llamafactory-cli train x.yaml").refusals] == [name]


@pytest.mark.parametrize(
    ("words", "wanted", "overrides"),
    [
        ("a.yml --launcher torchrun -- --nproc_per_node=2 --nnodes=1", 2, {}),
        ("--launcher torchrun a.yml -- --nproc_per_node=2", 2, {}),
        ("a.yml --launcher accelerate -- --num_processes 4", None, {}),
        ("a.yml --launcher python", None, {}),
        ("--debug a.yml", None, {"debug": True}),
        ("--learning_rate 1e-4 a.yml --num_epochs=2", None, {"learning_rate": "1e-4", "num_epochs": "2"}),
    ],
)
def test_words_of_axolotl(words: str, wanted: int | None, overrides: dict[str, Any]) -> None:
    made = read(f"axolotl train {words}")
    call = made.calls[0]
    assert (call.file, call.overrides, made.dropped) == ("a.yml", overrides, [])
    assert made.value("hardware.devices_per_node") == wanted


def test_what_a_line_without_a_recipe_lacks_is_at_its_line(tmp_path: Path) -> None:
    line = tmp_path / "run.sh"
    line.write_text(
        "\n\nllamafactory-cli train --do_train --dataset x --model_name_or_path a/b --deepspeed z.json\n"
    )
    needed = [
        entry.place.line for entry in import_files([str(line)]).dropped if entry.effect is Effect.NEEDED
    ]
    assert needed
    assert set(needed) == {3}


def test_a_data_set_without_its_owner_keeps_its_name_in_the_hint() -> None:
    made = read(f"{CLM} --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1")
    hint = next(entry.hint for entry in made.dropped if entry.key == "dataset_name")
    assert "{path: organisation/wikitext, name: wikitext-2-raw-v1}" in hint


@pytest.mark.parametrize(
    "text", ["srun -N 2 bash -c 'torchrun run_clm.py --do_train'", "srun $LAUNCHER x.py"]
)
def test_a_command_that_is_made_when_it_runs_is_said_to_be(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(f"torchrun_is_here=1\n# torchrun \n{text}")
    assert [(problem.code, problem.line) for problem in caught.value.problems] == [("import-refused", 3)]


def test_rows_with_a_source_length_are_of_seq2seq() -> None:
    made = read(
        "torchrun run_summarization.py --do_train --model_name_or_path a/b --max_source_length 512 "
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
    made = read(
        f"torchrun {script} --do_train --model_name_or_path a/b --train_file x.jsonl --learning_rate 1e-5"
    )
    assert made.value("task") == task
