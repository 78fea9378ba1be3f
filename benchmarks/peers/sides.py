"""The sides of the comparison: how each is told the same work, and the command that starts it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.work import Work

HERE = Path(__file__).parent
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
RATE = 1e-4

Told = Callable[[Work, Path, Path], list[str]]
"""(work, folder of this run, Python of the side) -> the command, after its files are written."""


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    about: str
    tell: Told
    package: str | None = None
    """Requirements of the virtual environment that it runs in, the first by name; None: this one."""
    python: str = ""
    """Version that the environment needs; empty: this one's."""
    gpu_only: bool = False


def _recipe(work: Work) -> dict[str, Any]:
    """Nothing but the job: everything else is this project's to decide."""
    return {
        "model": {"name_or_path": str(work.model)},
        "adapter": {"type": "lora", **LORA},
        "data": {"train": [{"path": str(work.rows), "format": "text"}], "max_length": work.max_length,
                 "loss_on": "all"},
        "global_batch_size": work.samples,
        "trainer": {"max_steps": work.steps, "learning_rate": RATE, "lr_scheduler_type": "constant",
                    "logging_steps": 1, "save_strategy": "no", "train_sampling_strategy": "sequential"},
        "python": str(HERE / "clock.py"),
    }  # fmt: skip


def run_recipe(recipe: dict[str, Any], folder: Path, python: Path) -> list[str]:
    if threads := os.environ.get("OMP_NUM_THREADS"):  # which a plan sets by itself, and a script takes
        recipe = recipe | {"launch": {"env": {"OMP_NUM_THREADS": threads}}}
    file = folder / "recipe.json"  # JSON is YAML, too
    file.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return [str(python.with_name("effilaunch")), "run", str(file), "--output-dir", str(folder / "run")]


def ours(work: Work, folder: Path, python: Path) -> list[str]:
    return run_recipe(_recipe(work), folder, python)


def ours_equal(work: Work, folder: Path, python: Path) -> list[str]:
    """The settings of plain.py, each of them said."""
    recipe = _recipe(work)
    recipe["precision"] = work.precision
    recipe["model"] |= {"attn_implementation": "sdpa", "loss": "full", "compile_blocks": False}
    recipe["adapter"] |= {"cast_input_dtype_enabled": True}
    recipe["data"] |= {"padding_free": False, "pad_to_multiple_of": 1}
    off = dict.fromkeys(("activation_checkpointing", "use_liger_kernel", "tf32"), False)
    recipe["trainer"] |= off | {"per_device_train_batch_size": work.micro_batch, "dataloader_num_workers": 0}
    return run_recipe(recipe, folder, python)


def plain(work: Work, folder: Path, python: Path) -> list[str]:
    return [
        str(python), str(HERE / "timed.py"), str(HERE / "plain.py"),
        str(work.model), str(work.rows), str(folder / "run"),
        "--max-length", str(work.max_length), "--batch", str(work.micro_batch),
        "--accumulation", str(work.accumulation), "--steps", str(work.steps), "--precision", work.precision,
    ]  # fmt: skip


def _trl(*options: str, max_length: bool = True) -> Told:
    def tell(work: Work, folder: Path, python: Path) -> list[str]:
        length = str(work.max_length) if max_length else "None"
        return [
            str(python), str(HERE / "timed.py"), "trl.scripts.sft",
            "--model_name_or_path", str(work.model), "--dataset_name", _dataset(work, folder),
            "--output_dir", str(folder / "run"), "--max_length", length,
            "--per_device_train_batch_size", str(work.micro_batch),
            "--gradient_accumulation_steps", str(work.accumulation), "--max_steps", str(work.steps),
            "--learning_rate", str(RATE), "--lr_scheduler_type", "constant", "--logging_steps", "1",
            "--save_strategy", "no", "--report_to", "none", "--train_sampling_strategy", "sequential",
            "--use_peft", "true", "--lora_r", "16", "--lora_alpha", "32", "--lora_dropout", "0",
            "--lora_target_modules", "all-linear",
            "--use_cpu", "false" if work.gpu else "true",
            "--dtype", "bfloat16" if work.precision == "bf16" else "float32", *options,
        ]  # fmt: skip

    return tell


def _dataset(work: Work, folder: Path) -> str:
    """A folder that holds the rows alone, which is how `trl sft` takes a local file."""
    data = folder / "data"
    data.mkdir()
    (data / "train.jsonl").symlink_to(work.rows)
    return str(data)


def llamafactory(work: Work, folder: Path, python: Path) -> list[str]:
    """Its stage for plain texts, which would pack them into full rows if it were not told otherwise."""
    info = {"rows": {"file_name": work.rows.name, "columns": {"prompt": "text"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / work.rows.name).symlink_to(work.rows)
    config = {
        "model_name_or_path": str(work.model), "stage": "pt", "do_train": True, "finetuning_type": "lora",
        "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target": "all",
        "dataset": "rows", "dataset_dir": str(folder), "cutoff_len": work.max_length, "packing": False,
        "disable_shuffling": True, "output_dir": str(folder / "run"), "report_to": "none",
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation, "max_steps": work.steps,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
        "bf16": work.precision == "bf16",
    }  # fmt: skip
    file = folder / "llamafactory.yaml"
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return [str(python), str(HERE / "timed.py"), "llamafactory.cli", "train", str(file)]


def axolotl(work: Work, folder: Path, python: Path) -> list[str]:
    config = {
        "base_model": str(work.model), "adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0,
        "lora_target_linear": True,
        "datasets": [{"path": str(work.rows), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"), "shuffle_merged_datasets": False,
        "curriculum_sampling": True, "val_set_size": 0, "sequence_len": work.max_length,
        "micro_batch_size": work.micro_batch, "gradient_accumulation_steps": work.accumulation,
        "max_steps": work.steps, "optimizer": "adamw_torch_fused", "learning_rate": RATE,
        "lr_scheduler": "constant", "warmup_steps": 0, "logging_steps": 1, "save_strategy": "no",
        "bf16": work.precision == "bf16", "output_dir": str(folder / "run"),
    }  # fmt: skip
    file = folder / "axolotl.yaml"
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return [str(python), str(HERE / "timed.py"), "axolotl.cli.train", str(file)]


# With the newest torch it does not start: the last torchaudio was built for another CUDA.
_LLAMAFACTORY = "llamafactory==0.9.5 torch==2.11.0 torchvision==0.26.0 torchaudio==2.11.0"
_ALONE = ("--gradient_checkpointing", "false")

SIDES: tuple[Side, ...] = (
    Side("plain", "(b) Trainer by hand", plain),
    Side("ours-equal", "(a) with (b)'s settings", ours_equal),
    Side("ours", "(a) as it decides itself", ours),
    Side("trl", "(c) as it comes: checkpointing, bf16 autocast", _trl()),
    Side("trl-best", "(c) without checkpointing", _trl(*_ALONE)),
    Side("trl-free", "(c) without checkpointing, padding-free",
         _trl(*_ALONE, "--padding_free", "true", max_length=False)),
    Side("trl-flash", "(c) without checkpointing, padding-free, FlashAttention 2",
         _trl(*_ALONE, "--padding_free", "true", "--attn_implementation", "flash_attention_2",
              max_length=False), gpu_only=True),
    Side("trl-liger", "(c) without checkpointing, Liger's kernels",
         _trl(*_ALONE, "--use_liger_kernel", "true"), gpu_only=True),
    Side("llamafactory", "(d)", llamafactory, _LLAMAFACTORY),
    Side("axolotl", "(e)", axolotl, "axolotl==0.21.0", python="3.12"),
)  # fmt: skip
DEFAULT_CPU = ("plain", "ours-equal", "ours", "trl", "trl-best", "llamafactory", "axolotl")
DEFAULT_GPU = tuple(side.name for side in SIDES)
BEST_OF_TRL = ("trl-best", "trl-free", "trl-flash", "trl-liger")
