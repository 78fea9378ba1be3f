"""Facts of the training stack on this machine: `python -m launcher.train.machine`.

Prints a section per line, as a JSON object. The section of a missing or broken library has an `error`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

OPS = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "async_io", "deepspeed_shm_comm")
"""DeepSpeed's operators that a run may build, by their names."""


def main() -> int:
    """Print the sections; output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    for name, ask in SECTIONS.items():
        try:
            facts = ask()
        except ImportError as error:
            facts = {"error": f"cannot be imported: {_first_line(error)}"}
        except Exception as error:  # of a broken installation
            facts = {"error": f"{type(error).__name__}: {_first_line(error)}"}
        answers.write(json.dumps({name: facts}) + "\n")
        answers.flush()
    answers.close()
    # Libraries may crash while they are unloaded; the answer is complete.
    sys.stderr.flush()
    os._exit(0)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def torch_facts() -> dict[str, Any]:
    """The build, and the devices that it sees."""
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "available": torch.cuda.is_available(),
        "arch_list": [],
        "nccl": None,
        "devices": [],
        "p2p": [],
    }
    if torch.version.cuda:
        from launcher.train.upstream.torch_seams import cuda_architectures

        facts["arch_list"] = cuda_architectures()
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if facts["available"]:
        count = torch.cuda.device_count()
        facts["devices"] = [_device(torch, index) for index in range(count)]
        facts["p2p"] = [
            [a == b or bool(torch.cuda.can_device_access_peer(a, b)) for b in range(count)]
            for a in range(count)
        ]
    elif torch.version.cuda:
        facts["why"] = why_no_device(torch)
    return facts


def _device(torch: Any, index: int) -> dict[str, Any]:
    """Without selecting the device: that would open a context on it, of some 500 MB."""
    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "capability": [found.major, found.minor],
        "total": found.total_memory,
        "bf16": bool(torch.version.hip) or found.major >= 8,  # in hardware, as is_bf16_supported counts
    }


def why_no_device(torch: Any) -> str:
    """Torch's own reason why it sees no GPU, one line."""
    if torch.version.cuda is None:
        built = f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"
        return f"torch {torch.__version__} is built for {built}"
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError of the driver, AssertionError of the build
        return _first_line(error)
    return "CUDA starts and shows no device"


def bitsandbytes_facts() -> dict[str, Any]:
    """Which native library was loaded, if any."""
    import bitsandbytes
    from bitsandbytes import cextension

    library = cextension.lib
    mock = isinstance(library, getattr(cextension, "ErrorHandlerMockBNBNativeLibrary", ()))
    return {
        "version": bitsandbytes.__version__,
        "backend": getattr(cextension, "BNB_BACKEND", None),
        "loaded": not mock,
        "compiled_with_cuda": bool(getattr(library, "compiled_with_cuda", False)),
        "said": str(getattr(library, "error_msg", ""))[:300] if mock else "",
    }


def deepspeed_facts() -> dict[str, Any]:
    """Which operators are installed, which could be built, and against which torch they were."""
    import deepspeed
    from deepspeed.git_version_info import installed_ops, torch_info
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    return {
        "version": deepspeed.__version__,
        "installed": sorted(name for name, there in installed_ops.items() if there),
        "built_with": {name: str(version) for name, version in torch_info.items()},
        "compatible": {name: _compatible(ALL_OPS[name]) for name in OPS if name in ALL_OPS},
    }


def _compatible(builder: Any) -> bool:
    try:
        return bool(builder.is_compatible(False))
    except Exception:  # e.g. a CUDA operator where there is no CUDA toolkit
        return False


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "bitsandbytes": bitsandbytes_facts,
    "deepspeed": deepspeed_facts,
}


if __name__ == "__main__":
    raise SystemExit(main())
