"""Every known failure, of all fields."""

from __future__ import annotations

from launcher.failures.adapters import ADAPTERS
from launcher.failures.data import DATA
from launcher.failures.deepspeed_build import DEEPSPEED_BUILD
from launcher.failures.deepspeed_config import DEEPSPEED_CONFIG
from launcher.failures.deepspeed_engine import DEEPSPEED_ENGINE
from launcher.failures.distributed import DISTRIBUTED
from launcher.failures.failure import Failure
from launcher.failures.hub import HUB
from launcher.failures.installation import INSTALLATION
from launcher.failures.memory import MEMORY
from launcher.failures.parallel import PARALLEL
from launcher.failures.precision import PRECISION
from launcher.failures.quantization import QUANTIZATION
from launcher.failures.saving import SAVING
from launcher.failures.slurm import SLURM

FAILURES: tuple[Failure, ...] = (
    *PRECISION,
    *ADAPTERS,
    *QUANTIZATION,
    *DEEPSPEED_CONFIG,
    *DEEPSPEED_ENGINE,
    *DEEPSPEED_BUILD,
    *DISTRIBUTED,
    *SLURM,
    *PARALLEL,
    *DATA,
    *SAVING,
    *MEMORY,
    *HUB,
    *INSTALLATION,
)
"""Every known failure, once."""
