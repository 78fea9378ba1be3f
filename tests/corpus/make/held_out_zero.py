"""Held-out logs: ZeRO-3, offload and what does not go together with them.

Each function is a script of its own, see capture.py. Run: python -m tests.corpus.make.held_out_zero [name…]
"""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, SRUN, held, shell

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ZERO3 = {**AUTO, "zero_optimization": {"stage": 3}}


@held("zero3-device-map", "t5", files={"z3.json": ZERO3}, env={"FORCE_COLOR": "1"})
def zero3_device_map():
    from transformers import (
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    shape = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(shape).save_pretrained("t5")
    args = Seq2SeqTrainingArguments("out", deepspeed="z3.json", use_cpu=True, report_to="none")
    T5ForConditionalGeneration.from_pretrained("t5", device_map={"": "cpu"})
    print(args)


@shell(
    "zero3-auto-batch", "bert", f"deepspeed --no_local_rank --num_accelerators=1 train.py 2>&1 | {SRUN}",
    files={"z3.json": ZERO3},
)  # fmt: skip
def zero3_auto_batch():
    import tiny
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    args = TrainingArguments(
        "out", deepspeed="z3.json", use_cpu=True, auto_find_batch_size=True, max_steps=2, report_to="none"
    )
    Trainer(BertForMaskedLM(BertConfig(vocab_size=64, **sizes)), args, train_dataset=tiny.rows()).train()


@shell(
    "zero3-no-gather", "gpt2", f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {CLOCK}",
    files={"z3.json": ZERO3},
)  # fmt: skip
def zero3_no_gather():
    from pathlib import Path

    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    args = TrainingArguments(
        "out", deepspeed="z3.json", use_cpu=True, per_device_train_batch_size=2, max_steps=3, logging_steps=1,
        learning_rate=1e-3, save_strategy="no", report_to="none",
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32))
    trainer = Trainer(gpt2, args, train_dataset=tiny.rows())
    trainer.train()
    trainer.save_model("final")
    GPT2LMHeadModel.from_pretrained("final")
    print(sorted(path.name for path in Path("final").iterdir()))


@held(
    "ds-bfloat16-alias", "auto",
    files={"old.json": {**AUTO, "bfloat16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}},
    ranks=1, launcher="torchrun",
)  # fmt: skip
def bfloat16_alias():
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="old.json"))
    net = torch.nn.Linear(8, 2)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 8), batch_size=2)
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)


@held(
    "ds-hidden-size", "own-config", launcher="torchrun",
    files={"ds.json": {**AUTO, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}},
)  # fmt: skip
def hidden_size():
    import tiny
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Mixer(PreTrainedModel):
        config_class = type("MixerConfig", (PretrainedConfig,), {"model_type": "mixer"})

        def __init__(self, config):
            super().__init__(config)
            self.table = torch.nn.Embedding(64, 16)
            self.head = torch.nn.Linear(16, 64)
            self.post_init()

        def forward(self, input_ids, attention_mask=None, labels=None):
            scores = self.head(self.table(input_ids))
            return {"loss": torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}

    args = TrainingArguments("mixer", deepspeed="ds.json", use_cpu=True, max_steps=2, report_to="none")
    Trainer(Mixer(Mixer.config_class()), args, train_dataset=tiny.rows()).train()


@held(
    "ds-offload-optimizer-swap", "t5-adafactor", launcher="torchrun",
    files={"ds.json": {**AUTO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
)  # fmt: skip
def offload_adafactor():
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    rows = [{"input_ids": torch.arange(4, 12), "labels": torch.arange(4, 12)}] * 8
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
    )
    args = Seq2SeqTrainingArguments(
        "out", deepspeed="ds.json", use_cpu=True, optim="adafactor", max_steps=2, report_to="none"
    )
    Seq2SeqTrainer(t5, args, train_dataset=rows).train()


@held(
    "ds-fsdp-both",
    "parser",
    files={"ds.json": ZERO3},
    ranks=2,
    launcher="torchrun",
    arguments=("--output_dir", "o", "--deepspeed", "ds.json", "--fsdp", "full_shard", "--use_cpu"),
)
def fsdp_and_deepspeed():
    import tiny
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@held("kbit-compile", "opt", env={"TORCH_LOGS": "recompiles"})
def kbit_compile():
    import tiny
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    base = AutoModelForCausalLM.from_pretrained(
        tiny.saved(), quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    model = torch.compile(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")))
    args = TrainingArguments("out", use_cpu=True, max_steps=2, report_to="none")
    Trainer(model, args, train_dataset=tiny.rows()).train()


TASK = "RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29763 python -u train.py 2>&1"
TASKS = f"({TASK.format(0)} | sed -u 's/^/0: /') & ({TASK.format(1)} | sed -u 's/^/1: /'); wait"
"""Two tasks of one job, as `srun -l` shows them."""
TWICE = "for attempt in 1 2; do echo attempt $attempt; python -u train.py 2>&1; done"


@shell(
    "ds-hf-mismatch", "subclass-srun", TASKS,
    files={"ds.json": {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
                       "gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}},
)  # fmt: skip
def mismatch_in_subclass():
    import tiny
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 0.5 * model(**inputs).loss

    args = TrainingArguments(
        "out", deepspeed="ds.json", use_cpu=True, per_device_train_batch_size=2, max_steps=2, report_to="none"
    )
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32))
    Weighted(gpt2, args, train_dataset=tiny.rows()).train()


@shell("purely-quantized", "retried", TWICE)
def purely_quantized_twice():
    import tiny
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(tiny.saved(), quantization_config=config)
    args = TrainingArguments("out", use_cpu=True, max_steps=2, report_to="none")
    Trainer(model, args, train_dataset=tiny.rows()).train()


@shell(
    "jit-no-nvcc",
    "fused-lamb",
    "TORCH_CUDA_ARCH_LIST=8.0 DS_ACCELERATOR=cuda CUDA_HOME= python train.py 2>&1",
)
def no_nvcc():
    import torch
    from deepspeed.ops.lamb import FusedLamb

    FusedLamb(torch.nn.Linear(4, 4).parameters(), lr=1e-3)


if __name__ == "__main__":
    main()
