"""Held-out logs: DeepSpeed's config, engine and compiled ops, by hand and through others.

Each function is a script of its own, see capture.py.
Run: python -m tests.corpus.make.held_out_deepspeed [name…]
"""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import CLOCK, DOCKER, SRUN, held, shell

MICRO = {"train_micro_batch_size_per_gpu": 2}
AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


@shell(
    "ds-typo-nested", "two-ranks", f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {SRUN}",
    files={"zero.json": {**MICRO, "zero_optimization": {"stage": 2, "overlap_com": True, "bucket": 100000}}},
)  # fmt: skip
def typo_nested():
    import deepspeed
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    deepspeed.initialize(model=net, model_parameters=net.parameters(), config="zero.json")


@held(
    "ds-removed-key", "deepspeed-launcher", launcher="deepspeed",
    files={"ds.json": {**MICRO, "optimizer": {"type": "AdamW"}, "eigenvalue": {"enabled": False},
                       "progressive_layer_drop": {"enabled": False}}},
)  # fmt: skip
def removed_key():
    import argparse

    import deepspeed
    from transformers import BertConfig, BertForMaskedLM

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.parse_args()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    bert = BertForMaskedLM(BertConfig(vocab_size=64, **sizes))
    deepspeed.initialize(model=bert, model_parameters=bert.parameters(), config="ds.json")


@held(
    "ds-batch-mismatch", "two-ranks", ranks=2, launcher="torchrun",
    files={"ds.json": {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
                       "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}}},
)  # fmt: skip
def batch_mismatch():
    import deepspeed
    from transformers import T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )
    deepspeed.initialize(model=t5, model_parameters=t5.parameters(), config="ds.json")


@shell(
    "ds-hf-mismatch", "sft", f"python -u train.py 2>&1 | {CLOCK}",
    files={"ds_z2.json": {**AUTO, "zero_optimization": {"stage": 2},
                          "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.1}}}},
)  # fmt: skip
def hf_mismatch():
    import tiny
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        "sft",
        deepspeed="ds_z2.json",
        use_cpu=True,
        bf16=False,
        learning_rate=2e-4,
        max_steps=2,
        report_to="none",
    )
    SFTTrainer(tiny.model(), args, train_dataset=tiny.texts(), processing_class=tiny.tokenizer()).train()


@held(
    "ds-auto-unresolved", "engine-wrapped", launcher="torchrun",
    files={"ds.json": {**AUTO, "train_batch_size": "auto", "zero_optimization": {"stage": 2}}},
)  # fmt: skip
def auto_unresolved():
    import json
    from pathlib import Path

    import deepspeed
    import torch

    net = torch.nn.Linear(8, 2)
    config = json.loads(Path("ds.json").read_text())
    try:
        deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    except Exception as error:
        raise SystemExit(f"worker 0 could not start: {type(error).__name__}: {error}") from error


@held(
    "ds-float-bucket",
    "zero-init-vit",
    files={
        "ds.json": {**MICRO, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0.9 * 37 * 37}}
    },
)
def float_bucket():
    from pathlib import Path

    import deepspeed
    from transformers import ViTConfig, ViTModel

    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, rank=0, world_size=1, init_method=f"file://{Path.cwd()}/meeting"
    )
    with deepspeed.zero.Init(config_dict_or_path="ds.json"):
        ViTModel(
            ViTConfig(image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        )


@held(
    "ds-json-comments", "comment", launcher="accelerate",
    launcher_arguments=("--use_deepspeed", "--deepspeed_config_file", "zero3.json", "--num_processes", "1"),
    files={"zero3.json": '{\n  // 8 x 40 GB\n  "zero_optimization": {"stage": 3}\n}\n'},
)  # fmt: skip
def json_comments():
    from accelerate import Accelerator

    print(Accelerator(cpu=True).distributed_type)


@held(
    "ds-duplicate-keys", "engine", launcher="torchrun",
    files={"conf.json": '{"train_batch_size": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},'
                        ' "gradient_clipping": 0.5}'},
)  # fmt: skip
def duplicate_keys():
    import deepspeed
    import torch

    net = torch.nn.Linear(4, 4)
    deepspeed.initialize(model=net, model_parameters=net.parameters(), config="conf.json")


@shell(
    "ds-no-zero-block", "loop", f"torchrun --standalone --nproc_per_node=2 train.py 2>&1 | {DOCKER}",
    files={"ds.json": {**MICRO, "gradient_clipping": 1.0}},
)  # fmt: skip
def no_zero_block():
    from accelerate import Accelerator, DeepSpeedPlugin

    Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))


@held(
    "ds-warmup-zero", "engine-cosine", launcher="deepspeed",
    files={"ds.json": {**MICRO, "optimizer": {"type": "Adam", "torch_adam": True, "params": {"lr": 1e-3}},
                       "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10,
                                                                          "warmup_num_steps": 0}}}},
)  # fmt: skip
def warmup_zero():
    import deepspeed
    import torch

    net = torch.nn.Linear(4, 4)
    deepspeed.initialize(model=net, model_parameters=net.parameters(), config="ds.json")


@held(
    "ds-total-steps", "engine", launcher="deepspeed",
    files={"ds.json": {**MICRO, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}}},
)  # fmt: skip
def total_steps():
    import deepspeed
    import torch

    net = torch.nn.Linear(4, 4)
    deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config="ds.json")


@held(
    "ds-offload-client-optim", "rmsprop", launcher="torchrun",
    files={"ds.json": {**MICRO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
)  # fmt: skip
def offload_client_optimizer():
    import deepspeed
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    deepspeed.initialize(model=net, optimizer=optimizer, config="ds.json")


@held(
    "ds-max-grad-norm-param", "engine", launcher="deepspeed",
    files={"ds.json": {**MICRO, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}},
)  # fmt: skip
def max_grad_norm_parameter():
    import deepspeed
    import torch

    net = torch.nn.Linear(4, 4)
    deepspeed.initialize(model=net, model_parameters=net.parameters(), config="ds.json")


@held(
    "ds-comm-dtype", "engine", launcher="torchrun",
    files={"ds.json": {**MICRO, "communication_data_type": "bfloat16", "zero_optimization": {"stage": 2}}},
)  # fmt: skip
def communication_dtype():
    import deepspeed
    import torch

    net = torch.nn.Linear(4, 4)
    deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config="ds.json")


@held(
    "ds-eval-only", "seq2seq",
    files={"ds.json": {**AUTO, "zero_optimization": {"stage": 1}}},
)  # fmt: skip
def eval_only():
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    rows = [{"input_ids": torch.arange(4, 12), "labels": torch.arange(4, 12)}] * 8
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    args = Seq2SeqTrainingArguments("predict", deepspeed="ds.json", use_cpu=True, report_to="none")
    print(Seq2SeqTrainer(model, args).predict(rows).metrics)


NO_NINJA = "B=$(mktemp -d); for t in c++ g++ gcc python3 uname which; do ln -s $(command -v $t) $B/$t; done; "


@shell("jit-no-ninja", "cpu-adagrad", NO_NINJA + 'P=$(command -v python); PATH=$B "$P" train.py 2>&1')
def no_ninja():
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    layer = torch.nn.Linear(64, 64)
    print(DeepSpeedCPUAdagrad(layer.parameters(), lr=1e-2))


@shell(
    "jit-no-compiler", "cpu-lion",
    f"CXX=/opt/gcc-13/bin/g++ TORCH_EXTENSIONS_DIR=$PWD/ext python -u train.py 2>&1 | {SRUN}",
)  # fmt: skip
def no_compiler():
    import torch
    from deepspeed.ops.lion import DeepSpeedCPULion

    layer = torch.nn.Linear(64, 64)
    print(DeepSpeedCPULion(layer.parameters(), lr=1e-4))


@shell(
    "jit-stale-lock", "interrupted",
    "mkdir -p ext/cpu_lion && touch ext/cpu_lion/lock && TORCH_EXTENSIONS_DIR=$PWD/ext python -u train.py",
)  # fmt: skip
def stale_lock():
    import os
    import signal
    import threading

    import torch
    from deepspeed.ops.lion import DeepSpeedCPULion

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(40, os.kill, (os.getpid(), signal.SIGINT)).start()  # the user's ^C
    layer = torch.nn.Linear(64, 64)
    print("building optimizer", flush=True)
    print(DeepSpeedCPULion(layer.parameters(), lr=1e-4))


@held("aio-missing", "handle")
def aio_missing():
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(block_size=1 << 20, queue_depth=32)
    print(handle)


@held(
    "nvme-path-missing", "trainer", launcher="torchrun",
    files={"ds.json": {**AUTO, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}},
)  # fmt: skip
def nvme_path_missing():
    import tiny
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments("out", deepspeed="ds.json", use_cpu=True, max_steps=1, report_to="none")
    model = AutoModelForCausalLM.from_pretrained(tiny.saved())
    Trainer(model, args, train_dataset=tiny.rows()).train()


if __name__ == "__main__":
    main()
