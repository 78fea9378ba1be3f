"""Second held-out set: runs under DeepSpeed that save or evaluate in a way that it does not support."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.second_y_shell import COMPOSE, DEEPSPEED, KUBE, ONE, TORCHRUN, second

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ZERO2 = {**AUTO, "zero_optimization": {"stage": 2}}
ZERO3 = {**AUTO, "zero_optimization": {"stage": 3}}


@second("ds-accelerate-fields", "mixed-precision", "accelerate launch --config_file zero2.yaml train.py",
        KUBE, files={
    "ds.json": {**ZERO2, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}},
    "zero2.yaml": """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds.json
  gradient_clipping: 1.0
  zero_stage: 2
mixed_precision: bf16
main_process_port: 29728
num_processes: 2
use_cpu: true
"""})  # fmt: skip
def accelerate_flags_too():
    import logging

    from accelerate import Accelerator

    logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(levelname)s - %(name)s - %(message)s")
    accelerator = Accelerator()
    logging.info(accelerator.state)


@second("zero3-no-gather", "accelerate", env=ONE, files={
    "ds.json": {**ZERO3, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
})  # fmt: skip
def no_gather_accelerate():
    import nets
    import tiny
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))
    model = nets.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(tiny.rows(), batch_size=4, collate_fn=default_data_collator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained("final", state_dict=state)


@second(
    "zero3-auto-batch", "bloom", TORCHRUN.format(ranks=1, port=29730), "head -n 50", files={"ds.json": ZERO3}
)
def auto_batch():
    import nets
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", deepspeed="ds.json", use_cpu=True, auto_find_batch_size=True, max_steps=2, report_to="none"
    )
    Trainer(nets.bloom(), args, train_dataset=tiny.rows()).train()


@second("ds-eval-only", "bert-predict", env=ONE, files={"ds.json": ZERO2})
def predict_only():
    import nets
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", deepspeed="ds.json", use_cpu=True, report_to="none")
    rows = tiny.rows().map(lambda row: {"labels": 1})
    print("test accuracy:", Trainer(nets.bert(), args).predict(rows).metrics)


@second("ds-eval-only", "deepspeed", DEEPSPEED.format(ranks=1, port=29731), COMPOSE, files={"ds.json": ZERO2})
def evaluate_only():
    import nets
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments("out", deepspeed="ds.json", use_cpu=True, report_to="none")
    try:
        Seq2SeqTrainer(nets.t5(), args, eval_dataset=tiny.rows()).evaluate()
    except ValueError as error:
        raise SystemExit(f"evaluation of checkpoint failed: {error}") from error


if __name__ == "__main__":
    main()
