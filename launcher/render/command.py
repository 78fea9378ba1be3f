"""Command line and environment of the workers; `{master_port}`, `{run_dir}`, `{devices}` are bound late."""

from __future__ import annotations

from launcher.facts.secrets import GIVEN
from launcher.plan.plan import Plan
from launcher.recipe.env import has_reference

WORKER = "launcher.train.worker"
PREPARE = "launcher.train.prepare"


def render_prepare(plan: Plan) -> list[str]:
    """argv of the process that prepares the data, which ends before the launcher starts."""
    return [plan.python, "-m", PREPARE, "{run_dir}"]


def render_command(plan: Plan) -> list[str]:
    """argv of the launcher."""
    launcher = plan.value("launch.launcher")
    if launcher == "python":
        return [plan.python, "-m", WORKER, "{run_dir}"]
    if launcher == "accelerate":
        return [
            plan.python, "-m", "accelerate.commands.launch",
            # Without it accelerate reads a personal default from the home directory.
            "--config_file", "{run_dir}/accelerate.yaml",
            "--main_process_port", "{master_port}",
            "-m", WORKER, "{run_dir}",
        ]  # fmt: skip
    return [plan.python, "-m", "deepspeed.launcher.runner", *_deepspeed_devices(plan),
            "--master_port", "{master_port}", "--no_local_rank",
            "--module", WORKER, "{run_dir}"]  # fmt: skip


def _deepspeed_devices(plan: Plan) -> list[str]:
    """Where the processes run. On one machine the named hostfile is absent: DeepSpeed then stays on it, and
    does not read its default, /job/hostfile, which may list other machines."""
    hardware = plan.hardware
    hosts = ["--hostfile", "{run_dir}/hostfile"]
    if hardware.num_nodes > 1:
        return hosts
    if hardware.is_cpu:
        return [*hosts, "--num_gpus", str(hardware.devices_per_node)]
    # --num_gpus would delete CUDA_VISIBLE_DEVICES and train on somebody else's devices.
    return [*hosts, "--include", "localhost:{devices}"]


def render_env(plan: Plan) -> dict[str, str]:
    """Environment variables that the launcher gets on top of its own."""
    prefix = "launch.env."
    env = {
        key.removeprefix(prefix): str(setting.value)
        for key, setting in plan.settings.items()
        if key.startswith(prefix)
    }
    by_reference = [name for name, value in env.items() if has_reference(value)]
    if by_reference:
        env[GIVEN] = ",".join(by_reference)  # what the logs shall not show
    launcher = plan.value("launch.launcher")
    if not plan.hardware.is_cpu and launcher != "deepspeed":
        env["CUDA_VISIBLE_DEVICES"] = "{devices}"
    if launcher == "python" and plan.value("sharding.engine") == "deepspeed":
        # Without these DeepSpeed looks for MPI and stops: No module named 'mpi4py'.
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{master_port}"}  # fmt: skip
    return env


def render_accelerate_config(plan: Plan) -> dict[str, object] | None:
    """Processes and rendezvous only: precision and DeepSpeed reach the Trainer through TrainingArguments."""
    if plan.value("launch.launcher") != "accelerate":
        return None
    hardware = plan.hardware
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if hardware.num_devices > 1 else "NO",
        "num_machines": hardware.num_nodes,
        "num_processes": hardware.num_devices,
        "machine_rank": 0,
        "gpu_ids": "all",
        "mixed_precision": "no",
        "use_cpu": False,
        "debug": False,
        "rdzv_backend": "static",
        "same_network": True,
    }
