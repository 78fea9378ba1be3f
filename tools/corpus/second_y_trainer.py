"""Second held-out set: DeepSpeed configs that Trainer, accelerate or trl refuse or that stop them."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.second_y_shell import ACCELERATE, COMPOSE, DEEPSPEED, KUBE, ONE, TAIL, TORCHRUN, second

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ZERO2 = {**AUTO, "zero_optimization": {"stage": 2}}
ZERO3 = {**AUTO, "zero_optimization": {"stage": 3}}
AUTO_BUCKETS = {**AUTO, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
OFFLOAD = {**AUTO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@second("ds-typo-nested", "t5-seq2seq", TORCHRUN.format(ranks=2, port=29716), files={
    "ds.json": {**AUTO, "zero_optimization": {
        "stage": 2, "offload_optimiser": {"device": "cpu", "pin_memory": True}}}
})  # fmt: skip
def typo_in_zero():
    import nets
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments("out", deepspeed="ds.json", use_cpu=True, max_steps=2, report_to="none")
    Seq2SeqTrainer(nets.t5(), args, train_dataset=tiny.rows()).train()


@second("ds-removed-key", "curriculum-off", DEEPSPEED.format(ranks=1, port=29717), KUBE, files={
    "ds.json": {**ZERO2, "curriculum_learning": {"enabled": False}, "wall_clock_breakdown": False}
})  # fmt: skip
def removed_curriculum():
    import nets
    import tiny
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    (args, _) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(return_remaining_strings=True)
    args = TrainingArguments("out", deepspeed="ds.json", use_cpu=True, max_steps=2, report_to="none")
    Trainer(nets.opt(), args, train_dataset=tiny.rows()).train()


@second(
    "ds-bfloat16-alias", "trainer", env=ONE, files={"ds.json": {**ZERO2, "bfloat16": {"enabled": "auto"}}}
)
def bfloat16_trainer():
    import nets
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", deepspeed="ds.json", use_cpu=True, bf16=True, max_steps=2, report_to="none"
    )
    Trainer(nets.neox(), args, train_dataset=tiny.rows()).train()


@second("ds-hf-mismatch", "trl-sft", env=ONE, files={
    "ds.json": {**ZERO2, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
                "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "weight_decay": 0.1}}}
})  # fmt: skip
def mismatch_sft():
    import tiny
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        "out", deepspeed="ds.json", use_cpu=True, bf16=False, per_device_train_batch_size=8,
        learning_rate=1e-4, max_steps=2, report_to="none",
    )  # fmt: skip
    SFTTrainer(tiny.model(), args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer()).train()


@second("ds-auto-unresolved", "accelerate-loop", env=ONE, files={
    "ds.json": {**ZERO2, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
})  # fmt: skip
def auto_in_loop():
    import nets
    import tiny
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))
    model = nets.bloom()
    loader = DataLoader(tiny.rows(), batch_size=4, collate_fn=default_data_collator)
    accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-4), loader)


@second("ds-hidden-size", "clip", TORCHRUN.format(ranks=1, port=29721), "head -n 60", files={
    "ds.json": {**AUTO_BUCKETS, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
})  # fmt: skip
def hidden_size_clip():
    import nets
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))
    model = nets.clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accelerator.prepare(model, optimizer, DataLoader(list(range(8)), batch_size=2))


@second("ds-json-comments", "trailing-comma", ACCELERATE.format(ranks=1, port=29722), TAIL, files={
    "ds_zero2.json": '{\n  "gradient_accumulation_steps": 1,\n  "zero_optimization": {\n'
                      '    "stage": 2,\n  }\n}\n'
})  # fmt: skip
def trailing_comma():
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config="ds_zero2.json")
    accelerator = Accelerator(deepspeed_plugin=plugin)
    print(accelerator.state)


@second("ds-no-zero-block", "trainer", DEEPSPEED.format(ranks=1, port=29723), COMPOSE, files={
    "ds.json": {**AUTO, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
})  # fmt: skip
def no_zero_trainer():
    import nets
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", deepspeed="ds.json", use_cpu=True, max_steps=2, report_to="none")
    Trainer(nets.gpt2(), args, train_dataset=tiny.rows()).train()


@second("ds-warmup-zero", "whisper-trainer", env=ONE, through=TAIL, files={
    "ds.json": {**ZERO2, "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0}}}
})  # fmt: skip
def warmup_trainer():
    import nets
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments("out", deepspeed="ds.json", use_cpu=True, max_steps=4, report_to="none")
    Seq2SeqTrainer(nets.whisper(), args, train_dataset=tiny.rows()).train()


@second("ds-total-steps", "two-ranks", TORCHRUN.format(ranks=2, port=29724), KUBE, files={
    "ds.json": {**ZERO2, "scheduler": {
        "type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-4}}}
})  # fmt: skip
def total_steps_trainer():
    import json
    from pathlib import Path

    import nets
    import tiny
    from transformers import Trainer, TrainingArguments

    config = json.loads(Path("ds.json").read_text())
    config["scheduler"] = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}
    args = TrainingArguments("out", deepspeed=config, use_cpu=True, max_steps=8, warmup_steps=5)
    Trainer(nets.mixtral(), args, train_dataset=tiny.rows()).train()


@second(
    "ds-offload-optimizer-swap",
    "adafactor-t5",
    DEEPSPEED.format(ranks=1, port=29725),
    files={"ds.json": OFFLOAD},
)
def adafactor_offload():
    import nets
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments(
        "out",
        deepspeed="ds.json",
        use_cpu=True,
        optim="adafactor",
        max_steps=4,
        logging_steps=1,
        report_to="none",
    )
    Seq2SeqTrainer(nets.t5(), args, train_dataset=tiny.rows()).train()


@second("ds-comm-dtype", "subclass", TORCHRUN.format(ranks=1, port=29726), "head -n 70", files={
    "ds.json": {**ZERO2, "communication_data_type": "half"}
})  # fmt: skip
def comm_dtype_trainer():
    import nets
    import tiny
    from transformers import Trainer, TrainingArguments

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **more):
            return 2 * super().compute_loss(model, inputs, return_outputs, **more)

    args = TrainingArguments("out", deepspeed="ds.json", use_cpu=True, max_steps=4, report_to="none")
    Weighted(nets.neox(), args, train_dataset=tiny.rows()).train()


@second("ds-fsdp-both", "sft", env=ONE, through=COMPOSE, files={"ds.json": ZERO3})
def fsdp_and_deepspeed():
    import tiny
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        "out", deepspeed="ds.json", fsdp="full_shard auto_wrap", use_cpu=True, bf16=False, max_steps=2,
        report_to="none",
    )  # fmt: skip
    SFTTrainer(tiny.model(), args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer()).train()


if __name__ == "__main__":
    main()
