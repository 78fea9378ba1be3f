"""Ranks on GPUs that are not there (`absent_cuda.py`, `absent_groups.py`), one process after another.

A process imports the training stack once, with the stubs in place, and forks each rank. A rank is the real
one, `launcher.train.worker` on a planned run directory with a launcher's variables; what it did is written as
JSON. Rank 0 runs first, and leaves what the others get from it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import patience

from launcher.files.rank_status import PREPARED

HERE = Path(__file__).resolve().parent
PER_NODE = 8
SMI = HERE / "h100.csv"
"""A recorded nvidia-smi of a node: index, uuid, name, MiB, MiB in use, compute capability, driver."""
IMPORTED = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.nn.attention.varlen",
    "datasets", "accelerate", "peft",
    "transformers.trainer", "transformers.models.llama.modeling_llama", "transformers.integrations.deepspeed",
    "transformers.integrations.bitsandbytes", "deepspeed", "launcher.train.worker",
    "launcher.train.training", "launcher.train.trainers", "launcher.train.outcome", "launcher.train.tracking",
    "launcher.train.data.build", "launcher.train.data.gate", "launcher.train.model.models",
    "launcher.train.model.adapters", "launcher.train.tasks.causal_lm", "launcher.train.engines.ddp",
    "launcher.train.engines.deepspeed", "launcher.train.engines.fsdp", "launcher.train.data.prepare",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """What one rank did."""

    rank: int
    code: int
    events: list[dict[str, Any]]
    said: str
    """The last lines of its log."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


class AbsentRanks:
    """The process that forks ranks. A context manager."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        root = HERE.parents[1]
        paths = os.pathsep.join(map(str, (root, root / "tests", HERE)))
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"},
        )  # fmt: skip

    def __enter__(self) -> AbsentRanks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(patience(60))
        self._server.stdout.close()

    def run(self, run_dir: Path, world: int, ranks: tuple[int, ...], env: Mapping[str, str]) -> list[Ran]:
        """Each of the ranks in its turn, on the run directory as it is now; rank 0 must be the first.

        Those after a rank that fails are left out.
        """
        ready = run_dir.with_name("ready")
        shutil.copytree(run_dir, ready)
        found: list[Ran] = []
        for rank in ranks:
            if found:
                after = run_dir.with_name(f"after-rank-{found[-1].rank}")
                shutil.move(run_dir, after)
                shutil.copytree(ready, run_dir)
                shutil.copy(run_dir.with_name("after-rank-0") / "data.json", run_dir)
                (run_dir / "logs" / PREPARED).touch()
            found.append(self._one(run_dir, world, rank, env))
            if found[-1].code:
                break
        return found

    def call(self, run_dir: Path, *words: str) -> Ran:
        """A command on a run directory, on the same machine."""
        return self._one(run_dir, 1, 0, {}, words)

    def _one(
        self, run_dir: Path, world: int, rank: int, env: Mapping[str, str], words: Sequence[str] = ()
    ) -> Ran:
        written = run_dir.with_name(f"rank-{rank}.json")
        order = {"run_dir": str(run_dir), "env": {**env, **variables(rank, world)}, "written": str(written)}
        code = self._order({**order, "words": words})
        logs = [run_dir / "logs" / f"rank-{rank}.log", run_dir / "logs" / f"forked-{rank}.log"]
        said = "\n".join(
            line
            for log in logs
            if log.is_file()
            for line in log.read_text(errors="replace").splitlines()[-120:]
        )
        return Ran(rank, code, json.loads(written.read_text()), said)

    def _order(self, order: Mapping[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def variables(rank: int, world: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    local = min(world, PER_NODE)
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    found = {name: str(number) for name, number in numbers.items()}
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def serve() -> None:
    """Import everything, then fork a rank for each line of stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import_stack()
    for line in sys.stdin:
        answers.write(f"{forked(json.loads(line))}\n")
        answers.flush()


def import_stack() -> None:
    """What a rank imports, of which much asks for GPUs while it is imported."""
    importlib.import_module("bitsandbytes")  # with its CPU kernels: those of CUDA need a real driver
    from absent_cuda import Gpus, Record, answer_for_cuda

    answer_for_cuda(Gpus(Record(), SMI, list(range(PER_NODE))))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def forked(order: Mapping[str, Any]) -> int:
    """The exit code of a rank."""
    child = os.fork()
    if child == 0:
        be_rank(order)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def be_rank(order: Mapping[str, Any]) -> None:
    """Do what a launcher's child does, write what was done, and end."""
    from absent_cuda import GPUS, answer_for_tensors
    from absent_groups import Groups, answer_for_groups

    code, gpus = 70, GPUS[0]
    run_dir, written = Path(order["run_dir"]), Path(order["written"])
    try:
        os.environ.update(order["env"])
        rank, shared = int(os.environ["RANK"]), written.with_name("from-rank-0.pt")
        with (run_dir / "logs" / f"forked-{rank}.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        gpus.record.events.clear()
        gpus.collective = groups = Groups(gpus, rank, shared)
        answer_for_groups(groups, gpus)
        answer_for_tensors(gpus)
        from launcher.cli import main
        from launcher.train import status, worker

        gpus.record.where = lambda: (status.status().phase, status.status().step)
        with gpus:
            code = main(order["words"]) if order["words"] else worker.main([str(run_dir)])
        groups.leave()
    except BaseException:
        traceback.print_exc()
    finally:
        written.write_text(json.dumps(gpus.record.events))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
