"""Failures of precision."""

from __future__ import annotations

from tools.corpus.capture import caused, main


@caused("bf16-no-device")
def bf16_no_device():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", bf16=True, per_device_train_batch_size=4, max_steps=8)
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@caused("bf16-no-device", "torchrun", launcher="torchrun", ranks=2)
def bf16_no_device_torchrun():
    from dataclasses import dataclass

    import tiny
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    @dataclass
    class ScriptArguments:
        name: str = "tiny"

    def main():
        parser = HfArgumentParser((ScriptArguments, TrainingArguments))
        _, args = parser.parse_dict({"output_dir": "out", "bf16": True, "max_steps": 8})
        Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()

    if __name__ == "__main__":
        main()


if __name__ == "__main__":
    main()
