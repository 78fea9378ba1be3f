"""Checks of GPUs, their driver, and torch's support for them."""

from __future__ import annotations

from math import inf

from launcher.knowledge.doctor.check import Check, Verdict, fail, needed, numbers, ok, size, skip, warn
from launcher.knowledge.doctor.needs import has_env, on_gpu
from launcher.machine.gpus import Gpu, unusable
from launcher.machine.hardware import ADA, AMPERE
from launcher.machine.machine_facts import Machine
from launcher.plan.plan import Plan

_P2P_DRIVER = (550, 40, 7)
_NO_GPU = "no GPU here"


def _names(gpus: tuple[Gpu, ...]) -> str:
    """`8x NVIDIA A100-SXM4-80GB (80.0 GiB, sm_80)`, kind by kind."""
    kinds: dict[str, int] = {}
    for gpu in gpus:
        level = "" if gpu.capability is None else ", sm_{}{}".format(*gpu.capability)
        kind = f"{gpu.name} ({'unknown memory' if gpu.total is None else size(gpu.total)}{level})"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count}x {kind}" for kind, count in kinds.items())


def _below(machine: Machine, least: tuple[int, int]) -> list[str]:
    gpus = machine.gpu.usable
    return sorted({g.name for g in gpus if g.capability is not None and g.capability < least})


def devices(machine: Machine, plan: Plan | None) -> Verdict:
    """Whether the GPUs of the plan are here and visible."""
    gpu = machine.gpu
    found = _names(gpu.usable) or "no GPU"
    if gpu.visible is not None and len(gpu.usable) < len(gpu.gpus):
        found += f"; CUDA_VISIBLE_DEVICES={gpu.visible!r} shows {len(gpu.usable)} of {len(gpu.gpus)}"
    found += "".join(f"; {card.label} serves a display and is left out" for card in gpu.left_out)
    if problems := unusable(gpu.usable):
        return fail(found, "; ".join(problem.message for problem in problems), str(problems[0].hint))
    if plan is not None and on_gpu(plan):
        wanted = plan.hardware
        if len(gpu.usable) < wanted.devices_per_node:
            each = " on each node" if wanted.num_nodes > 1 else ""
            message = f"the plan is for {wanted.label}{each}, this machine has {len(gpu.usable)} visible GPUs"
            return fail(found, message, "set other hardware with --on; see also the check driver")
        weaker = [g.label for g in gpu.usable if not g.is_enough_for(wanted)]
        if len(gpu.usable) - len(weaker) < wanted.devices_per_node:
            message = f"less memory or compute capability than {wanted.device}: {', '.join(weaker)}"
            return fail(found, message, "plan for the local GPUs, without --on")
    if not gpu.gpus:
        return skip(found, "runs are planned for the CPU" if plan is None else "the plan is for the CPU")
    if not gpu.usable:
        return warn(found, "CUDA_VISIBLE_DEVICES hides every GPU", "unset it, or use existing indices")
    if len({(g.name, g.total) for g in gpu.usable}) > 1:
        return warn(found, "GPUs of different kinds; a plan assumes the smallest for all")
    return ok(found)


def _available(gpu: Gpu) -> float:
    return inf if gpu.available is None else gpu.available


def device_memory(machine: Machine, plan: Plan | None) -> Verdict:
    """Whether other processes use the devices."""
    gpus = machine.gpu.usable
    if not gpus:
        return skip(_NO_GPU)
    fullest, tightest = max(gpus, key=lambda g: g.used), min(gpus, key=_available)
    found = f"at most {size(fullest.used)} in use (GPU {fullest.index})"
    if plan is not None and on_gpu(plan) and _available(tightest) < plan.memory.needed:
        message = f"the run needs {size(plan.memory.needed)} on each GPU, GPU {tightest.index} has less free"
        return fail(found, message, "end the processes that nvidia-smi lists, or use other GPUs")
    if fullest.used > 0.05 * (fullest.total or inf):
        return warn(found, "another process uses a GPU", "nvidia-smi shows it")
    return ok(found)


def driver(machine: Machine, plan: Plan | None) -> Verdict:
    """Whether the driver responds and is new enough for torch's CUDA."""
    gpu = machine.gpu
    if gpu.smi == "absent" and gpu.sign is not None:
        return fail("no nvidia-smi", f"{gpu.sign}", "install the driver's programs, or add them to PATH")
    if gpu.smi == "absent" and not on_gpu(plan):
        return skip("no NVIDIA driver")
    if gpu.smi == "absent":
        message = "the plan needs GPUs, but there is no NVIDIA driver"
        return fail("no nvidia-smi", message, "install the driver")
    if gpu.smi == "failed":
        hint = "reboot after a driver update; see also `dmesg`"
        return fail("nvidia-smi fails", f"the driver does not respond: {gpu.said or 'no message'}", hint)
    found = f"driver {gpu.driver}, CUDA {gpu.cuda or 'unknown'}"
    built = machine.stack["torch"].get("cuda")
    if built and gpu.cuda and numbers(gpu.cuda)[0] < numbers(built)[0]:
        if machine.stack["torch"].get("available"):
            return ok(found, f"older than torch's CUDA {built}; works with a CUDA compatibility package")
        message = f"torch is built for CUDA {built}, which this driver does not support"
        return fail(found, message, "update the driver, or install torch for an older CUDA")
    if built and gpu.cuda and numbers(gpu.cuda) < numbers(built):
        return ok(found, f"torch's CUDA {built} works by minor-version compatibility, except PTX code")
    return ok(found)


def bf16(machine: Machine, plan: Plan | None) -> Verdict:
    """Hardware bf16, not torch's emulation of it."""
    if not machine.gpu.usable:
        return skip(_NO_GPU)
    old = _below(machine, AMPERE)
    asked = plan is not None and on_gpu(plan) and plan.precision.startswith("bf16")
    if old:
        message = "emulated there: many times slower, although torch.cuda.is_bf16_supported() is true"
        return needed(asked, f"not on {', '.join(old)}", message, "precision: fp16")
    return ok("in hardware")


def tf32(machine: Machine, plan: Plan | None) -> Verdict:
    """TensorFloat-32 for float32 products."""
    if not machine.gpu.usable:
        return skip(_NO_GPU)
    old = _below(machine, AMPERE)
    asked = plan is not None and bool(plan.trainer.tf32)
    if old and asked:
        return fail(f"not on {', '.join(old)}", "transformers refuses tf32 there", "remove trainer.tf32")
    return skip(f"not on {', '.join(old)}") if old else ok("in hardware")


def fp8(machine: Machine, plan: Plan | None) -> Verdict:
    """8-bit floating point, which no recipe uses."""
    if not machine.gpu.usable:
        return skip(_NO_GPU)
    old = _below(machine, ADA)
    return skip(f"not on {', '.join(old)}", "not used by any recipe") if old else ok("in hardware")


def torch(machine: Machine, plan: Plan | None) -> Verdict:
    """Whether torch can be imported, and sees the devices of the driver."""
    facts = machine.stack["torch"]
    if error := facts.get("error"):
        hint = "pip install 'effilaunch[train]'"
        return needed(plan is not None, "torch cannot be used", f"torch: {error}", hint)
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "built for the CPU"
    found = f"torch {facts['version']}, {build}"
    if facts.get("hip"):
        return warn(f"torch {facts['version']}, ROCm {facts['hip']}", "AMD GPUs are not tested")
    if not machine.gpu.usable:
        return ok(found)
    if not facts["cuda"]:
        hint = "install torch from the index of a CUDA build (pytorch.org/get-started)"
        return fail(found, "GPUs are present, but this build of torch cannot use them", hint)
    if not facts["available"]:
        return fail(found, f"torch sees no device: {facts.get('why', 'no message')}", "see the check driver")
    if len(facts["devices"]) < len(machine.gpu.usable):
        message = f"torch sees {len(facts['devices'])} of {len(machine.gpu.usable)} GPUs"
        return fail(found, message, "start the container with --gpus all, or check for a failed GPU")
    alien = [d["name"] for d in facts["devices"] if not _runs_on(facts["arch_list"], tuple(d["capability"]))]
    if alien:
        message = f"this build has no code for {', '.join(sorted(set(alien)))}"
        hint = f"it supports {' '.join(facts['arch_list'])}; install a build for this GPU"
        return fail(found, message, hint)
    return ok(found)


def _runs_on(built: list[str], capability: tuple[int, ...]) -> bool:
    """Binary code runs on the same major and a later minor capability; PTX (compute_) on any later one."""
    for name in built:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        code = (int(digits[:-1]), int(digits[-1]))
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return True
    return not built


def p2p(machine: Machine, plan: Plan | None) -> Verdict:
    """Whether GPUs can access each other's memory."""
    gpus = machine.gpu.usable
    if len(gpus) < 2:
        return skip("fewer than two GPUs")
    env = machine.host.environment
    if any("RTX 40" in g.name for g in gpus) and numbers(machine.gpu.driver or "0") < _P2P_DRIVER:
        if all(name in env or has_env(plan, name) for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")):
            return ok("RTX 40 GPUs, P2P and IB disabled")
        message = "RTX 40 GPUs with a driver before 550.40.07: NCCL hangs or accelerate refuses"
        hint = "export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1, or update the driver"
        run = plan is not None and on_gpu(plan) and plan.hardware.devices_per_node > 1
        return needed(run, "P2P not usable", message, hint)
    matrix = machine.stack["torch"].get("p2p") or []
    if not matrix:
        return skip("torch reports nothing")
    pairs = sum(not reach for row in matrix for reach in row) // 2
    if pairs:
        message = "these pairs communicate through host memory, which is slower"
        return warn(f"{pairs} pairs of GPUs without P2P", message, "`nvidia-smi topo -m` shows the topology")
    return ok(f"all {len(matrix)} GPUs have P2P access")


def nccl(machine: Machine, plan: Plan | None) -> Verdict:
    """The library of collectives, and variables that change it."""
    if not machine.gpu.usable:
        return skip(_NO_GPU)
    version = machine.stack["torch"].get("nccl")
    env = machine.host.environment
    changed = sorted(name for name in env if name.startswith("NCCL_") and name != "NCCL_DEBUG")
    many = plan is not None and plan.hardware.num_devices > 1
    if version is None:
        return needed(many, "no NCCL in torch", "ranks on GPUs need it", "install a CUDA build of torch")
    if changed:
        message = f"set in the environment: {', '.join(f'{name}={env[name]}' for name in changed)}"
        return warn(f"NCCL {version}", message, "unset them if they were set for another machine")
    return ok(f"NCCL {version}")


GPU_CHECKS = (
    Check("devices", "GPUs", devices),
    Check("device-memory", "free GPU memory", device_memory),
    Check("driver", "NVIDIA driver", driver),
    Check("torch", "torch", torch),
    Check("bf16", "bf16", bf16),
    Check("tf32", "TF32", tf32),
    Check("fp8", "fp8", fp8),
    Check("p2p", "GPU to GPU", p2p),
    Check("nccl", "NCCL", nccl),
)
