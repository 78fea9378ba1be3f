"""Third held-out set: DeepSpeed configs that the Trainer or accelerate refuse."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, DOCKER, SRUN, shell
from tests.corpus.make.third_w_base import AUTO, rank


@shell("ds-typo-nested", "w3-rethrown", "python train.py 2>&1", rank(29801))
def typo_nested():
    import logging

    from accelerate import Accelerator, DeepSpeedPlugin
    from rich.logging import RichHandler

    logging.basicConfig(format="%(message)s", handlers=[RichHandler()])
    log = logging.getLogger("pretrain")
    log.setLevel("INFO")

    class SetupFailed(RuntimeError):
        pass

    def build():
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2, "contiguous_gradient": True, "reduce_bucket_size": 100000},
        }
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
        model = GPT2LMHeadModel(
            GPT2Config(
                n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=2
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return accelerator.prepare(model, optimizer)

    log.info("building the model and the engine")
    try:
        build()
    except Exception as error:
        log.error("setup failed, nothing was trained")
        raise SetupFailed("cannot set up the run") from error


@shell(
    "ds-bfloat16-alias",
    "w3-tail",
    "python train.py > out.txt 2> err.txt; cat out.txt; tail -n 30 err.txt",
    rank(29802),
)
def bfloat16_alias():
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from transformers import BertConfig, BertForSequenceClassification

    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "bfloat16": {"enabled": "auto"},
            "zero_optimization": {"stage": 1},
        }
    )
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    print("accelerator state:", accelerator.state.distributed_type, flush=True)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


@shell(
    "ds-hf-mismatch",
    "w3-sft-json",
    f"python train.py 2>&1 | {DOCKER}",
    rank(29803),
    {"zero2.json": {**AUTO, "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}}},
)
def hf_mismatch():
    import tiny
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        "sft-out",
        deepspeed="zero2.json",
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=4,
        gradient_accumulation_steps=4,
        max_length=32,
        report_to="none",
    )
    folder = tiny.saved("base")
    SFTTrainer(folder, args=args, train_dataset=tiny.texts()).train()


@shell(
    "ds-hidden-size",
    "w3-encoder-decoder",
    f"python train.py 2>&1 | {CLOCK}",
    rank(29804),
    {
        "ds_z3.json": {
            **AUTO,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
        }
    },
)
def hidden_size():
    import tiny
    from transformers import (
        BertConfig,
        EncoderDecoderConfig,
        EncoderDecoderModel,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    args = Seq2SeqTrainingArguments(
        "bert2bert",
        deepspeed="ds_z3.json",
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to="none",
    )
    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**small), BertConfig(**small))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = EncoderDecoderModel(config=config)
    Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train()


@shell("ds-float-bucket", "w3-t5-computed", "python train.py 2>&1", rank(29805))
def float_bucket():
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=33, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": config.d_model**2,
            "stage3_prefetch_bucket_size": 0.9 * config.d_model**2,
            "stage3_param_persistence_threshold": 10 * config.d_model,
        },
    }
    args = Seq2SeqTrainingArguments(
        "t5", deepspeed=settings, use_cpu=True, per_device_train_batch_size=4, max_steps=4, report_to="none"
    )
    model = T5ForConditionalGeneration(config)
    Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train()


@shell(
    "ds-json-comments",
    "w3-plain-args",
    "python -W default::DeprecationWarning train.py 2>&1 | tail -n 30",
    rank(29806),
    {
        "stage2.json": '{\n  // taken from the cluster\'s wiki\n  "zero_optimization": {"stage": 2},\n'
        '  "train_micro_batch_size_per_gpu": "auto"  // from the Trainer\n}\n'
    },
)
def json_comments():
    from dataclasses import dataclass

    from transformers import HfArgumentParser, TrainingArguments

    @dataclass
    class ModelArguments:
        model_name_or_path: str = "tiny"

    model, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses(
        ["--output_dir", "out", "--deepspeed", "stage2.json", "--use_cpu", "True", "--max_steps", "10"]
    )
    print(model, args)


@shell(
    "ds-no-zero-block",
    "w3-accelerate-file",
    f"python train.py 2>&1 | {SRUN}",
    rank(29807),
    {
        "ds_config.json": {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "fp16": {"enabled": False},
        }
    },
)
def no_zero_block():
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers import ViTConfig, ViTForImageClassification

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds_config.json"))
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        )
    )
    pixels = torch.utils.data.TensorDataset(torch.randn(8, 3, 32, 32))
    loader = torch.utils.data.DataLoader(pixels, batch_size=2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


@shell(
    "ds-accelerate-fields",
    "w3-yaml",
    "accelerate launch --config_file cluster.yaml train.py 2>&1",
    files={
        "cluster.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nuse_cpu: true\n"
        "num_processes: 1\nnum_machines: 1\nmachine_rank: 0\nmain_process_port: 29808\n"
        "mixed_precision: bf16\ndeepspeed_config:\n  deepspeed_config_file: z2.json\n"
        "  zero_stage: 2\n  gradient_clipping: 1.0\n  zero3_init_flag: false\n",
        "z2.json": {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}},
    },
)
def accelerate_fields():
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    print("prepared", accelerator.process_index)


@shell(
    "ds-fsdp-both",
    "w3-parser",
    f"python train.py --config run.json 2>&1 | {CLOCK}",
    rank(29809),
    {
        "run.json": {
            "output_dir": "out",
            "use_cpu": True,
            "fsdp": "full_shard auto_wrap",
            "deepspeed": "z3.json",
            "max_steps": 4,
            "report_to": "none",
        },
        "z3.json": {**AUTO, "zero_optimization": {"stage": 3}},
    },
)
def fsdp_both():
    import sys

    import tiny
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    class LossTrainer(Trainer):
        def compute_loss(self, model, inputs, **more):
            return super().compute_loss(model, inputs, **more)

    (args,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[2])
    LossTrainer(tiny.model(), args, train_dataset=tiny.rows()).train()


@shell(
    "zero3-auto-batch",
    "w3-dpo",
    "python train.py > train.log 2>&1; tail -n 25 train.log",
    rank(29810),
    {"z3.json": {**AUTO, "zero_optimization": {"stage": 3}}},
)
def zero3_auto_batch():
    import tiny
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    folder = tiny.saved("policy")
    rows = {"prompt": ["w1 w2"] * 8, "chosen": [" w3 w4"] * 8, "rejected": [" w5 w6"] * 8}
    args = DPOConfig(
        "dpo", deepspeed="z3.json", use_cpu=True, auto_find_batch_size=True, max_steps=2, report_to="none"
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = DPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()


@shell(
    "ds-eval-only",
    "w3-whisper",
    "python train.py 2>&1",
    rank(29812),
    {"z2.json": {**AUTO, "zero_optimization": {"stage": 2}}},
)
def eval_only():
    import torch
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        d_model=16,
        max_source_positions=8,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    rows = [{"input_features": torch.randn(8, 16), "labels": torch.tensor([4, 5, 6, 2])} for _ in range(8)]
    args = Seq2SeqTrainingArguments(
        "whisper", deepspeed="z2.json", use_cpu=True, per_device_eval_batch_size=4, report_to="none"
    )
    trainer = Seq2SeqTrainer(WhisperForConditionalGeneration(config), args, eval_dataset=rows)
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
