"""Held-out logs: DeepSpeed's config, engine and compiled ops, by hand and through others.

Each function is a script of its own, see capture.py.
Run: python -m tools.corpus.held_out_deepspeed [name…]
"""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


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


if __name__ == "__main__":
    main()
