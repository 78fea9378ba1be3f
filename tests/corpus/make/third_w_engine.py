"""Third held-out set: DeepSpeed's own engine, built by hand around other models."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, SRUN, shell
from tests.corpus.make.third_w_base import AUTO, rank


@shell("ds-removed-key", "w3-bert-clock", f"python train.py 2>&1 | {CLOCK}", rank(29820))
def removed_key():
    import deepspeed
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    settings = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    }
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


@shell(
    "ds-batch-mismatch",
    "w3-torchrun-vit",
    "OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 --master_port 29821 --local-ranks-filter 0 train.py 2>&1",
)
def batch_mismatch():
    import argparse

    import deepspeed
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32
        )
    )
    settings = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    optimizer = torch.optim.AdamW(model.parameters())
    deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=settings)


@shell("ds-auto-unresolved", "w3-opt-json", "python train.py 2>&1", rank(29822))
def auto_unresolved():
    import json
    import logging
    import sys
    import time
    import traceback

    class Json(logging.Formatter):
        def format(self, record):
            line = {
                "ts": round(time.time(), 3),
                "level": record.levelname,
                "logger": record.name,
                "msg": record.getMessage(),
            }
            if record.exc_info:
                line["exc"] = "".join(traceback.format_exception(*record.exc_info))
            return json.dumps(line)

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Json())
    logging.basicConfig(level="WARNING", handlers=[handler], force=True)

    import deepspeed
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        )
    )
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
    }
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    except Exception:
        logging.getLogger("train").exception("could not start the engine")
        sys.exit(3)


@shell(
    "ds-duplicate-keys",
    "w3-srun",
    f"python train.py --deepspeed_config conf/ds.json 2>&1 | {SRUN}",
    rank(29823),
    {"ds.json": '{\n "train_batch_size": 4,\n "fp16": {"enabled": false},\n "fp16": {"enabled": true}\n}\n'},
)
def duplicate_keys():
    import argparse
    import pathlib
    import shutil

    import deepspeed
    import torch

    pathlib.Path("conf").mkdir()
    shutil.move("ds.json", "conf/ds.json")
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
    net = torch.nn.Linear(4, 4)
    deepspeed.initialize(args=args, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


@shell("ds-warmup-zero", "w3-bloom", "python train.py 2>&1 | tail -n 30", rank(29824))
def warmup_zero():
    import deepspeed
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 100, "warmup_num_steps": 0},
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


@shell(
    "ds-total-steps", "w3-neox", f"deepspeed --master_port 29825 --num_accelerators 1 train.py 2>&1 | {CLOCK}"
)
def total_steps():
    import argparse

    import deepspeed
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 5},
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=settings)


@shell(
    "ds-offload-optimizer-swap",
    "w3-adafactor-t5",
    "python train.py 2>&1",
    rank(29826),
    {"offload.json": {**AUTO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
)
def optimizer_swap():
    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    args = Seq2SeqTrainingArguments(
        "t5",
        deepspeed="offload.json",
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=4,
        optim="adafactor",
        report_to="none",
    )
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train()


@shell("ds-offload-client-optim", "w3-sgd", f"python train.py 2>&1 | {SRUN}", rank(29827))
def client_optim():
    import deepspeed
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


@shell("ds-max-grad-norm-param", "w3-tail", "python train.py 2>&1 | tail -n 20", rank(29828))
def max_grad_norm():
    import deepspeed
    from transformers import BertConfig, BertForTokenClassification

    model = BertForTokenClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    settings = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.01, "max_grad_norm": 1.0}},
    }
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


@shell(
    "ds-comm-dtype", "w3-one-rank", f"torchrun --nproc_per_node 1 --master_port 29829 train.py 2>&1 | {CLOCK}"
)
def comm_dtype():
    import deepspeed
    import torch

    net = torch.nn.TransformerEncoderLayer(16, 2, 32)
    settings = {
        "train_batch_size": 2,
        "communication_data_type": "float16",
        "zero_optimization": {"stage": 1},
    }
    deepspeed.initialize(model=net, optimizer=torch.optim.Adam(net.parameters()), config=settings)


@shell("nvme-path-missing", "w3-zero3", "python train.py 2>&1", rank(29830))
def nvme_path():
    import deepspeed
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64))
    print(model)


@shell(
    "jit-no-compiler",
    "w3-no-such-cxx",
    "python train.py 2>&1",
    {**rank(29831), "CXX": "/opt/gcc-13/bin/g++", "TORCH_EXTENSIONS_DIR": "ext"},
)
def no_compiler():
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    net = torch.nn.Linear(8, 8)
    optimizer = DeepSpeedCPUAdam(net.parameters(), lr=1e-3)
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()


@shell(
    "jit-no-ninja",
    "w3-bare-path",
    """at=$(which python); PATH=/usr/sbin:/sbin $at train.py 2>&1 | """
    """while read -r l; do echo "[worker-0] $l"; done""",
    {**rank(29832), "TORCH_EXTENSIONS_DIR": "ext"},
)
def no_ninja():
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    net = torch.nn.Linear(8, 8)
    DeepSpeedCPUAdam(net.parameters(), lr=1e-3)


@shell(
    "jit-stale-lock",
    "w3-interrupted",
    "mkdir -p ext/cpu_adam; touch ext/cpu_adam/lock; timeout -s INT 45 python train.py 2>&1",
    {**rank(29833), "TORCH_EXTENSIONS_DIR": "ext"},
    {"offload.json": {**AUTO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
)
def stale_lock():
    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out",
        deepspeed="offload.json",
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=8,
        report_to="none",
    )
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


if __name__ == "__main__":
    main()
