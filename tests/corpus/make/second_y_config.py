"""Second held-out set: configs that DeepSpeed itself refuses, in scripts that call it by hand."""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.second_y_shell import COMPOSE, DEEPSPEED, KUBE, MPIRUN, ONE, TAIL, TORCHRUN, second

ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}


@second("ds-typo-nested", "bert-enable", env=ONE, files={"nets.json": {"lr": 1e-4}})
def typo_in_fp16():
    import deepspeed
    import nets

    class TrainingSetupError(RuntimeError):
        """Raised when the trainer can not be built."""

    def build():
        model = nets.bert()
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enable": True},
            "zero_optimization": {"stage": 2},
        }
        try:
            return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        except Exception as error:
            raise TrainingSetupError("could not build the engine for bert-tiny") from error

    build()


@second("ds-removed-key", "gpt2-amp", DEEPSPEED.format(ranks=2, port=29712), TAIL, files={
    "ds.json": {"train_batch_size": 8, "amp": {"enabled": True, "opt_level": "O1"}, "optimizer": ADAM}
})  # fmt: skip
def removed_amp():
    import argparse

    import deepspeed
    import nets

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.parse_args()
    deepspeed.init_distributed("gloo")
    model = nets.gpt2()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")


@second("ds-batch-mismatch", "vit-two-ranks", TORCHRUN.format(ranks=2, port=29713), KUBE, files={
    "ds.json": {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
})  # fmt: skip
def batch_sizes():
    import logging

    import deepspeed
    import nets

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s [%(name)s] %(message)s")
    logging.getLogger("train").info("building ViT for 10 classes")
    model = nets.vit()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")


@second("ds-batch-mismatch", "json-lines", env=ONE)
def batch_sizes_json():
    import json
    import logging

    class Lines(logging.Formatter):
        def format(self, record):
            entry = {"ts": self.formatTime(record), "level": record.levelname, "msg": record.getMessage()}
            if record.exc_info:
                entry["exc"] = self.formatException(record.exc_info)
            return json.dumps(entry)

    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logging.basicConfig(level="INFO", handlers=[handler])
    log = logging.getLogger("pretrain")
    try:
        import deepspeed
        import nets

        model = nets.opt()
        log.info("parameters: %d", sum(p.numel() for p in model.parameters()))
        settings = {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
        }
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    except Exception:
        log.exception("training failed")
        raise SystemExit(1) from None


@second("ds-auto-unresolved", "neox-by-hand", env=ONE, files={
    "zero2.json": {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                   "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2}}
})  # fmt: skip
def auto_by_hand():
    import json
    from pathlib import Path

    import deepspeed
    import nets
    import torch

    model = nets.neox()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = json.loads(Path("zero2.json").read_text())
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)


@second("ds-float-bucket", "mixtral", env=ONE, through=COMPOSE)
def float_bucket():
    import deepspeed
    import nets

    model = nets.mixtral()
    hidden = 37
    zero = {
        "stage": 3,
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": 0.9 * hidden * hidden,
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


@second("ds-float-bucket", "string", "python train.py > out.txt 2> err.txt; cat out.txt err.txt", env=ONE)
def string_bucket():
    import deepspeed
    import nets

    print("loading bloom ...")
    model = nets.bloom()
    zero = {"stage": 2, "allgather_bucket_size": "2e8", "reduce_bucket_size": "2e8", "overlap_comm": True}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


@second("ds-duplicate-keys", "whisper", env=ONE, files={
    "ds_config.json": """{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "overlap_comm": false
  }
}
"""
})  # fmt: skip
def duplicate_in_zero():
    import deepspeed
    import nets

    model = nets.whisper()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")


@second("ds-duplicate-keys", "mpirun", "python train.py --deepspeed_config ds.json", MPIRUN, env=ONE, files={
    "ds.json": '{"train_batch_size": 8, "steps_per_print": 10, "fp16": {"enabled": false},\n'
               ' "train_batch_size": 16}\n'
})  # fmt: skip
def duplicate_on_top():
    import argparse

    import deepspeed
    import nets

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    model = nets.gpt2()
    deepspeed.initialize(args=parser.parse_args(), model=model, model_parameters=model.parameters())


@second("ds-warmup-zero", "opt-by-hand", env=ONE, through=TAIL)
def warmup_zero():
    import deepspeed
    import nets
    import torch

    model = nets.opt()
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 0}}
    settings = {"train_micro_batch_size_per_gpu": 1, "scheduler": scheduler}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


@second("ds-total-steps", "t5-rich", env=ONE)
def total_steps():
    from rich.traceback import install

    install(width=110, extra_lines=1)
    import deepspeed
    import nets
    import torch

    model = nets.t5()
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 10}}
    settings = {"train_micro_batch_size_per_gpu": 1, "scheduler": scheduler}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


@second("ds-offload-client-optim", "sgd", DEEPSPEED.format(ranks=1, port=29714) + " --epochs 3", files={
    "ds.json": {"train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
})  # fmt: skip
def client_sgd():
    import argparse

    import deepspeed
    import nets
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.parse_args()
    model = nets.vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    deepspeed.initialize(model=model, optimizer=optimizer, config="ds.json")


@second("ds-offload-client-optim", "lambda", env=ONE, through=COMPOSE)
def client_callable():
    import traceback

    import deepspeed
    import nets
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    model = nets.gpt2()
    try:
        deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings,
            optimizer=lambda params: torch.optim.NAdam(params, lr=1e-4),
        )  # fmt: skip
    except Exception:
        traceback.print_exc()
        print("engine is None, nothing to train")
        raise SystemExit(3) from None


@second("ds-max-grad-norm-param", "bert", TORCHRUN.format(ranks=1, port=29715), "tail -n 60", files={
    "ds.json": {"train_micro_batch_size_per_gpu": 8, "optimizer": {
        "type": "Adam",
        "params": {"lr": 3e-5, "weight_decay": 0.01, "bias_correction": False, "max_grad_norm": 1.0}}}
})  # fmt: skip
def grad_norm_in_optimizer():
    import deepspeed
    import nets

    model = nets.bert()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")


@second("ds-comm-dtype", "bloom", env=ONE, through=KUBE)
def comm_dtype():
    import deepspeed
    import nets

    model = nets.bloom()
    settings = {"train_micro_batch_size_per_gpu": 1, "communication_data_type": "bfloat16"}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


if __name__ == "__main__":
    main()
