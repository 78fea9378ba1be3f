"""The run of `startup.py` as a good engineer writes it by hand: datasets.map, peft, Trainer, one file.

    python benchmarks/startup_plain.py MODEL ROWS OUTPUT [GGUF_FILE]

The file that EFFILAUNCH_BENCH_STAMP names gets the seconds since 1970 at the end of the first optimizer step,
in a run of EFFILAUNCH_BENCH_RANKS processes.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

MAX_LENGTH, BATCH = 256, 4


def main(model_folder: str, rows: str, output: str, gguf_file: str | None = None) -> None:
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Stamp(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 1 and state.is_world_process_zero:
                Path(os.environ["EFFILAUNCH_BENCH_STAMP"]).write_text(repr(time.time()))

    args = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=BATCH,
        max_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=42,
        use_cpu=True,
    )
    wanted = int(os.environ["EFFILAUNCH_BENCH_RANKS"])
    if args.world_size != wanted:
        raise SystemExit(f"{args.world_size} process(es) were started, not {wanted}")
    set_seed(args.seed)
    files = {} if gguf_file is None else {"gguf_file": gguf_file}
    tokenizer = AutoTokenizer.from_pretrained(model_folder, **files)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        ids = tokenizer(row["prompt"] + row["canonical_solution"])["input_ids"]
        ids = [*ids[: MAX_LENGTH - 1], tokenizer.eos_token_id]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}

    with args.main_process_first():
        data = load_dataset("json", data_files=rows, split="train")
        data = data.map(encode, remove_columns=data.column_names)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32", **files)
    if gguf_file is not None:
        model.is_quantized = False  # it no longer is, and the Trainer would refuse it
    adapter = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = Trainer(
        model=get_peft_model(model, adapter),
        args=args,
        train_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[Stamp()],
    )
    trainer.train()
    trainer.save_model(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
