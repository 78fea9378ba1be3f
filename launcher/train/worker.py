"""One process of a run: `python -m launcher.train.worker RUN_DIR`.

Reads RUN_DIR/plan.json and nothing else. Heavy imports wait until the logs are open, so that even a failing
import leaves its traceback in the run directory.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from launcher.errors import EffilaunchError, Problem, RunFailed
from launcher.files.rank_status import fatal_log
from launcher.train import faults, stopping
from launcher.train.job import Job, copies, rank, read_job, take_rank
from launcher.train.outcome import rank_log, redirect_output, write_error
from launcher.train.prepare import STAGE, check_shared, prepare_in_ranks
from launcher.train.progress import bars_in_status
from launcher.train.status import start_status, status


def main(argv: Sequence[str] | None = None) -> int:
    """Train one run directory's plan; the exit status of errors.py, 1 for an unforeseen error."""
    return as_rank("worker", train_planned, argv)


def as_rank(module: str, work: Callable[[Path], None], argv: Sequence[str] | None) -> int:
    """Do `work` on the run directory of the arguments, as a supervised rank; the exit status.

    module: the module that the launcher starts.
    """
    arguments = [word for word in (argv or sys.argv[1:]) if not word.startswith("--local_rank")]
    if len(arguments) != 1:
        print(f"usage: python -m launcher.train.{module} RUN_DIR", file=sys.stderr)
        return 2
    run_dir = Path(arguments[0]).absolute()
    take_rank()
    redirect_output(run_dir, rank())
    start_status(run_dir, rank())
    stopping.watch(os.environ)
    stacks = rank_log(run_dir, rank()).open("a")
    # For a run that hangs: which rank waits for which collective.
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    with write_fatal_signals(fatal_log(run_dir, rank())):
        code = _code_of(work, run_dir)
    status().end(code)
    return code


@contextlib.contextmanager
def write_fatal_signals(log: Path) -> Iterator[None]:
    """From now on SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT write the calls of all threads to this file.

    It is removed where it stays empty. The rank's own log is written by Python, which a crash may interrupt.
    """
    stream = log.open("a")
    faulthandler.enable(file=stream, all_threads=True)
    try:
        yield
    finally:
        if not os.fstat(stream.fileno()).st_size:
            log.unlink(missing_ok=True)


def _code_of(work: Callable[[Path], None], run_dir: Path) -> int:
    """Do it, and write the error if it fails; the exit status."""
    try:
        with bars_in_status():
            work(run_dir)
    except EffilaunchError as error:
        try:
            write_error(run_dir, _who(), error)
        finally:  # the supervisor, which reads this output, finds the file
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        write_error(run_dir, _who(), error)
        return 1
    return 0


def _who() -> int | str:
    """What ends with an error: this rank, or the stage that it does for all."""
    return STAGE if status().phase == STAGE else rank()


def train_planned(run_dir: Path) -> None:
    """Run RUN_DIR/plan.json."""
    faults.arm(os.environ, run_dir)
    train(read_job(run_dir))


def train(job: Job) -> None:
    """The run, from the data to the result."""
    from transformers import set_seed

    from launcher.train.checkpoint.pickles import save_members_by_value
    from launcher.train.data.build import build_data
    from launcher.train.data.gate import check_first_batch, check_steps
    from launcher.train.engines import train_engine
    from launcher.train.memory_meter import Meter, held_tensors
    from launcher.train.metrics import check_metrics
    from launcher.train.model.adapters import attach_adapter
    from launcher.train.outcome import save_outcome
    from launcher.train.own_device import arguments_on_planned_device
    from launcher.train.tasks import train_task
    from launcher.train.tracking import attach_trackers, end_trackers
    from launcher.train.training import fit, make_trainer

    started = time.monotonic()
    prepare_in_ranks(job)
    check_shared(job)
    status().enter("load")
    set_timeouts(job)
    args = arguments_on_planned_device(job)  # before the model: ZeRO-3 shards from here on
    if enumeration := train_engine(job).pickled_enum:
        save_members_by_value(enumeration)
    check_metrics(job)
    task = train_task(job.task.name)
    processing = task.processing(job)
    data = build_data(job, processing)
    micro_batch = args.per_device_train_batch_size
    check_steps(data, micro_batch, copies(job), drop_last=args.dataloader_drop_last)
    check_first_batch(job, processing, data, micro_batch)
    set_seed(args.seed)  # the same on every rank, for random weights and adapters
    meter = Meter(on_cuda=args.device.type == "cuda")
    with meter.phase("load"):
        model = task.model(job, processing, data.labels)
        set_seed(args.seed)
        model = attach_adapter(job, model, processing)
        trainer = make_trainer(job, args, model, processing, data)  # moves the model to its device
        trainer.saver.started = started
        attach_trackers(job, trainer)
        meter.watch(held_tensors(trainer))
    measured = fit_or_record(trainer, lambda: fit(job, trainer, meter))
    if trainer.stopping.stopped:
        end_trackers(trainer)
        return
    stopping.stop.at_once = False  # the result must be saved
    status().enter("finish")
    check_trained(job, trainer)
    save_outcome(job, trainer, processing, data, measured, meter, started)


def check_trained(job: Job, trainer: Any) -> None:
    """RunFailed if not one step was trained, or no step had a gradient; rehearsals are not there to learn."""
    if trainer.state.global_step == 0:
        hint = "fewer samples than one batch with dataloader_drop_last? lower the batch size"
        raise RunFailed(Problem("no-steps", "not one step was trained", path="trainer", hint=hint))
    if not trainer.has_signal and not job.tiny:
        raise RunFailed(trainer.without_signal)


def fit_or_record(trainer: Any, fit: Callable[[], Any]) -> Any:
    """Train; if the checkpoint of a stop fails, stopped.json gets the error too."""
    try:
        return fit()
    except Exception as error:
        trainer.stopping.record(trainer.state.global_step, error)
        raise


def set_timeouts(job: Job) -> None:
    """Set the timeout of every process group to `trainer.ddp_timeout`, or to the Trainer's default.

    transformers passes it to the first group only, and only on GPUs. The group that ZeRO makes for its
    collectives would have torch's default, with NCCL 10 minutes: rank 0 may need longer to save or to read.
    DEEPSPEED_TIMEOUT has no effect on that group either (deepspeed/utils/groups.py _clone_world_group).
    """
    from transformers import TrainingArguments

    from launcher.train.upstream.torch_seams import set_group_timeout

    seconds = job.trainer.ddp_timeout
    set_group_timeout(timedelta(seconds=TrainingArguments.ddp_timeout if seconds is None else seconds))


def leave(code: int) -> NoReturn:
    """End the process with `code` as sys.exit does, but without tearing down the interpreter.

    A thread of the gloo process group that drops the last tensor of a finished collective needs the
    interpreter; while that is torn down, the thread is ended inside a destructor and aborts the process
    ("terminate called without an active exception"), so that a run that is saved and COMPLETED would be
    reported as failed. Seen with torch 2.13 and gloo in 1 of 36 exits on a busy machine. Destroying the group
    does not help: its threads live while anything refers to it, as after a DeepSpeed run.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads such as a callback's upload
        if (tracking := sys.modules.get("launcher.train.tracking")) is not None:
            tracking.finish_wandb(code)
        atexit._run_exitfuncs()  # multiprocessing ends its workers here
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # an error of the output does not change the exit status
        os._exit(code)


if __name__ == "__main__":
    leave(main())
