"""DDP in the workers: what accelerate sets up where nothing else is asked for."""

from __future__ import annotations

from launcher.train.engines.engine import TrainEngine


class TrainDdp(TrainEngine):
    def is_set_up(self, distributed_type: str) -> bool:
        return distributed_type not in ("DEEPSPEED", "FSDP")


TRAIN_ENGINE = TrainDdp()
