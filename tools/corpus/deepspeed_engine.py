"""Failures of DeepSpeed's engine and of the extensions that it compiles."""

from __future__ import annotations

from tools.corpus.capture import caused, main
from tools.corpus.ds_scripts import AUTO, engine, trainer

STAGE2 = {**AUTO, "zero_optimization": {"stage": 2, "overlap_comm": False}}
NVME = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
OFFLOAD_ADAM = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def _caused(failure, script, config, **how):
    more = {"launcher": "torchrun", "by": f"tools/corpus/deepspeed_engine.py:{failure}", **how}
    caused(failure, files={"ds.json": config}, **more)(script)


_caused("ds-fsdp-both", trainer, STAGE2, arguments=["fsdp=full_shard"])
_caused("nvme-path-missing", engine, NVME)
_caused(
    "jit-no-compiler", engine, OFFLOAD_ADAM, env={"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": "extensions"}
)


if __name__ == "__main__":
    main()
