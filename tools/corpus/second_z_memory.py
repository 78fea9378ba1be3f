"""Second held-out logs of memory that runs out in evaluation; on CPU the address space is limited."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import shell


@shell("eval-oom", "z2-all-logits", "ulimit -v 9000000; python train.py 2>&1")
def all_logits_kept():
    import numpy
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50000, n_embd=8, n_layer=1, n_head=1, n_positions=512))
    data = [{"input_ids": [4] * 512, "labels": [4] * 512} for i in range(400)]
    args = TrainingArguments(
        "gpt2",
        use_cpu=True,
        per_device_eval_batch_size=4,
        report_to="none",
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        per_device_train_batch_size=1,
    )

    def accuracy(out):
        return {"accuracy": float((numpy.argmax(out.predictions, -1) == out.label_ids).mean())}

    Trainer(model, args, train_dataset=data[:4], eval_dataset=data, compute_metrics=accuracy).train()


@shell(
    "auto-batch-eval-oom",
    "z2-seq2seq",
    "ulimit -v 9000000; python train.py > out.log 2>&1; tail -n 25 out.log",
)
def seq2seq_eval_too_long():
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )
    short = [{"input_ids": [4] * 16, "labels": [4] * 4} for i in range(32)]
    long = [{"input_ids": [4] * 16000, "labels": [4] * 4} for i in range(32)]
    args = Seq2SeqTrainingArguments(
        "t5",
        use_cpu=True,
        auto_find_batch_size=True,
        eval_strategy="epoch",
        num_train_epochs=1,
        report_to="none",
        per_device_eval_batch_size=16,
    )
    Seq2SeqTrainer(model, args, train_dataset=short, eval_dataset=long).train()


if __name__ == "__main__":
    main()
