"""What accelerate checks of placed models and of links, with devices that are told to it: prints JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def placed(where: dict[str, Any], device: str, **marks: Any) -> str:
    """The error of preparing a model whose parts lie `where`, in a process that trains on `device`."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model.hf_device_map = where
    for name, value in marks.items():
        setattr(model, name, value)
    accelerator = Accelerator(cpu=True)
    AcceleratorState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["num_processes"] = 2
    AcceleratorState._shared_state["device"] = torch.device(device)
    try:
        accelerator.prepare_model(model, device_placement=False)
    except ValueError as error:
        return str(error)
    except Exception as error:  # DDP itself: there is no such device, and no process group
        return f"accepted; then {type(error).__name__}"
    return "accepted"


def linked(**environ: str) -> str:
    """The error of starting on two RTX 4090 with a driver of 2023."""
    import accelerate.state
    import accelerate.utils.environment as environment

    environment.get_gpu_info = lambda: (["NVIDIA GeForce RTX 4090"] * 2, 2)
    environment.get_driver_version = lambda: "535.129.03"
    accelerate.state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cuda", 0))
    PartialState._reset_state()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "0", **environ}  # fmt: skip
    try:
        PartialState(cpu=True, backend="gloo")
    except NotImplementedError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    kbit = {"is_loaded_in_8bit": True}
    found = {
        "spread": placed({"0": 0, "1": 1}, "cuda:0"),
        "whole": placed({"": 0}, "cuda:0"),
        "int8 on the first device": placed({"": 0}, "cuda:1", **kbit),
        "int8 on its own device": placed({"": 1}, "cuda:1", **kbit),
        "links": linked(),
        "links, one variable": linked(NCCL_P2P_DISABLE="1"),
        "no links": linked(NCCL_P2P_DISABLE="1", NCCL_IB_DISABLE="1"),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
