"""Checks of what DeepSpeed compiles, and of the native library of bitsandbytes."""

from __future__ import annotations

from typing import Protocol

from launcher.engines.deepspeed import DEEPSPEED
from launcher.engines.deepspeed_ops import OPERATORS
from launcher.knowledge.doctor.check import Check, Verdict, fail, needed, numbers, ok, skip, warn
from launcher.knowledge.doctor.needs import built_ops, cuda_ops, on_gpu
from launcher.machine.machine_facts import BuildFacts, Machine, Stack
from launcher.plan.plan import Plan

_ACCEPTED = {
    10: ("10.0", "10.1", "10.2"),
    11: tuple(f"11.{minor}" for minor in range(9)),
    12: ("12.0", "12.1", "12.2", "12.3", "12.4", "12.5", "12.6", "12.8", "12.9"),
}
"""Releases that DeepSpeed mixes within a major (op_builder/builder.py cuda_minor_mismatch_ok, 0.19.8)."""
_OLDEST_GCC = 9
"""torch's headers are C++17, and from 2.9 on partly C++20."""


class Builder(Protocol):
    """The part of a machine that these checks ask; the check before an offload to NVMe reads no more."""

    @property
    def build(self) -> BuildFacts: ...

    @property
    def stack(self) -> Stack: ...


def _for(ops: list[str]) -> str:
    return f"the run compiles {', '.join(ops)} at start-up"


def _to_build(machine: Builder, plan: Plan | None) -> list[str]:
    """The operators that the run compiles here, without precompiled ones."""
    installed = machine.stack["deepspeed"].get("installed") or []
    return [op for op in built_ops(plan) if op not in installed]


def nvcc(machine: Builder, plan: Plan | None) -> Verdict:
    """The toolkit against torch's CUDA, as ds_report compares them."""
    build, built = machine.build, machine.stack["torch"].get("cuda")
    to_build = _to_build(machine, plan)
    ops = [op for op in cuda_ops(plan) if op in to_build]
    if not built:
        return skip(f"nvcc {build.nvcc}" if build.nvcc else "no nvcc", "torch is not built for CUDA")
    if build.nvcc is None:
        found = f"no nvcc under {build.cuda_home}" if build.cuda_home else "no CUDA toolkit"
        if not ops:
            return ok(found, "not needed by the run; cpu_adam compiles without it")
        instead = [OPERATORS[op].instead for op in ops]
        return fail(found, _for(ops), f"install the CUDA toolkit and set CUDA_HOME, or {'; '.join(instead)}")
    found = f"nvcc {build.nvcc}, torch built with CUDA {built}"
    release = ".".join(built.split(".")[:2])
    if build.nvcc == release:
        return ok(found, "versions match")
    if numbers(build.nvcc)[0] != numbers(release)[0]:
        message = "different major version: CUDA operators do not compile or do not run"
        hint = f"install the CUDA {release} toolkit and set CUDA_HOME to it"
        return needed(bool(ops), found, message, hint)
    same = _ACCEPTED.get(numbers(release)[0], ())
    if build.nvcc in same and release in same:
        return ok(found, "different minor versions, which DeepSpeed accepts")
    message = "DeepSpeed refuses this combination for prebuilt operators (DS_BUILD_*)"
    hint = "DS_SKIP_CUDA_CHECK=1 skips the check; compilation at start-up does not check"
    return warn(found, message, hint)


def compiler(machine: Builder, plan: Plan | None) -> Verdict:
    """A C++ compiler for the operators."""
    ops, command, version = _to_build(machine, plan), machine.build.compiler_command, machine.build.compiler
    hint = "apt install g++ (or: conda install gxx)"
    if version is None:
        message = _for(ops) if ops else "optimizer offload and DeepSpeed on CPUs compile operators"
        return needed(bool(ops), f"no {command}", message, hint)
    if numbers(version)[0] < _OLDEST_GCC:
        message = f"torch's headers need GCC {_OLDEST_GCC} or later"
        return needed(bool(ops), f"{command} {version}", message, hint)
    return ok(f"{command} {version}")


def ninja(machine: Builder, plan: Plan | None) -> Verdict:
    """torch builds extensions with ninja alone."""
    ops = _to_build(machine, plan)
    if machine.build.ninja is None:
        message = _for(ops) if ops else "DeepSpeed needs it to compile operators at start-up"
        return needed(bool(ops), "no ninja", message, "pip install ninja")
    return ok(f"ninja {machine.build.ninja}")


def python_headers(machine: Builder, plan: Plan | None) -> Verdict:
    """Python.h, which every extension and Triton's launchers include."""
    if machine.build.python_headers:
        return ok("Python.h found")
    ops = _to_build(machine, plan)
    message = _for(ops) if ops else "operators and Triton's kernels cannot be compiled"
    hint = "apt install python3-dev (of this interpreter's version)"
    return needed(bool(ops), "no Python.h", message, hint)


def deepspeed_ops(machine: Builder, plan: Plan | None) -> Verdict:
    """Precompiled operators, and whether the others can be built."""
    facts, ops = machine.stack["deepspeed"], built_ops(plan)
    asked = plan is not None and plan.job.engine is DEEPSPEED
    if error := facts.get("error"):
        hint = "pip install 'effilaunch[train]'"
        return needed(asked, "DeepSpeed cannot be used", f"deepspeed: {error}", hint)
    installed, compatible = facts["installed"], facts["compatible"]
    operators = f"installed: {', '.join(installed)}" if installed else "compiled when needed"
    found = f"DeepSpeed {facts['version']}, {operators}"
    then = str(facts["built_with"].get("version", "0.0")) if installed else "0.0"
    now = str(machine.stack["torch"].get("version", ""))
    if then != "0.0" and now and numbers(then)[:2] != numbers(now)[:2]:
        message = f"the installed operators were compiled for torch {then}"
        hint = "reinstall DeepSpeed (pip install --force-reinstall --no-cache-dir --no-deps deepspeed)"
        return needed(asked, found, message, hint)
    missing = [op for op in ops if op not in installed and not compatible.get(op, True)]
    if missing:
        message = f"the run needs {', '.join(missing)}, which DeepSpeed cannot compile here"
        return fail(found, message, "see the checks compiler, ninja, nvcc and libaio")
    return ok(found)


def libaio(machine: Builder, plan: Plan | None) -> Verdict:
    """The library that the async_io operator of NVMe offload links."""
    compatible = machine.stack["deepspeed"].get("compatible") or {}
    if machine.build.libaio or compatible.get("async_io"):
        return ok("libaio found")
    if not any(OPERATORS[op].libaio for op in _to_build(machine, plan)):
        return skip("no libaio", "only NVMe offload needs it")
    hint = "install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL), or offload to cpu; for a "
    hint += "non-standard path set CFLAGS=-I… and LDFLAGS=-L…"
    return fail("no libaio", "NVMe offload needs it to compile DeepSpeed's async_io", hint)


def build_locks(machine: Machine, plan: Plan | None) -> Verdict:
    """Locks that killed builds left behind."""
    locks = machine.build.stale_locks
    if not locks:
        return ok("none")
    message = "left by a killed build; later builds wait for them forever without a message"
    return warn(f"{len(locks)} stale: {', '.join(locks)}", message, "remove them (`effilaunch run` does)")


def bitsandbytes(machine: Machine, plan: Plan | None) -> Verdict:
    """The native library of int8, nf4 and 8-bit optimizers."""
    facts = machine.stack["bitsandbytes"]
    optim = plan.trainer.optim if plan is not None else ""
    by_optimizer = "bnb" in optim or optim.startswith("paged_") or "8bit" in optim
    asked = plan is not None and (plan.job.quantization != "none" or by_optimizer)
    if error := facts.get("error"):
        hint = "pip install 'effilaunch[train]'"
        return needed(asked, "bitsandbytes cannot be used", f"bitsandbytes: {error}", hint)
    found = f"bitsandbytes {facts['version']}, backend {facts['backend']}"
    hint = "`python -m bitsandbytes` shows the library it looks for; install a version built for torch's CUDA"
    if not facts["loaded"]:
        return needed(asked, found, f"its native library is not loaded: {facts['said']}", hint)
    if machine.gpu.usable and not facts["compiled_with_cuda"]:
        gpu = asked and on_gpu(plan)
        return needed(gpu, found, "GPUs are present, but its library has no CUDA support", hint)
    return ok(found)


BUILD_CHECKS = (
    Check("nvcc", "CUDA toolkit", nvcc),
    Check("compiler", "C++ compiler", compiler),
    Check("ninja", "ninja", ninja),
    Check("python-headers", "Python's headers", python_headers),
    Check("deepspeed-ops", "DeepSpeed's operators", deepspeed_ops),
    Check("libaio", "libaio", libaio),
    Check("build-locks", "stale build locks", build_locks),
    Check("bitsandbytes", "bitsandbytes", bitsandbytes),
)
