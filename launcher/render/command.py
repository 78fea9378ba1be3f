"""Command line and environment of the workers.

`{master_port}`, `{run_dir}` and `{devices}` (of the node on which the command is started) are bound late;
in a plan for several nodes `{master_addr}` and `{node_rank}`, too.
"""

from __future__ import annotations

from launcher.engines import engine_of
from launcher.files.secrets import GIVEN
from launcher.plan.plan import Plan
from launcher.recipe.env import has_reference

WORKER = "launcher.train.worker"
PREPARE = "launcher.train.prepare"
LOCAL_LAUNCH = "launcher.train.loopback"
"""accelerate's launcher where all ranks are on one node: its store listens on loopback alone."""
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
"""Environment variable of CUDA, whose default numbers the fastest device 0."""
AGENT = "launcher.train.agent"
"""torchrun on one of several nodes."""


def render_prepare(plan: Plan) -> list[str]:
    """argv of the process that prepares the data, which ends before the launcher starts."""
    return [plan.interpreter, "-m", PREPARE, "{run_dir}"]


def render_command(plan: Plan, worker: str = WORKER) -> list[str]:
    """argv of the launcher, as it is started on every node. worker: the module that it starts."""
    launcher, hardware = plan.launch.launcher, plan.hardware
    if launcher == "python":
        return [plan.interpreter, "-m", worker, "{run_dir}"]
    if hardware.num_nodes > 1:
        return render_agent(plan.interpreter, hardware.num_nodes, hardware.devices_per_node, worker)
    if launcher == "accelerate":
        return [
            plan.interpreter, "-m", LOCAL_LAUNCH,
            # Without it accelerate reads a personal default from the home directory.
            "--config_file", "{run_dir}/accelerate.yaml",
            "--main_process_port", "{master_port}",
            # Its folders for output that nobody redirects would stay in TMPDIR, one for each start.
            "--log_dir", "/dev/null",
            "-m", worker, "{run_dir}",
        ]  # fmt: skip
    # --num_gpus would delete CUDA_VISIBLE_DEVICES and train on somebody else's devices.
    count = str(hardware.devices_per_node)
    devices = ["--num_gpus", count] if hardware.is_cpu else ["--include", "localhost:{devices}"]
    # The named hostfile is absent: DeepSpeed then stays on this node, and does not read its default,
    # /job/hostfile, which may list other nodes.
    return [plan.interpreter, "-m", "deepspeed.launcher.runner",
            "--hostfile", "{run_dir}/hostfile", *devices,
            "--master_port", "{master_port}", "--no_local_rank",
            "--module", worker, "{run_dir}"]  # fmt: skip


def render_agent(interpreter: str, nodes: int, devices_per_node: int, worker: str = WORKER) -> list[str]:
    """argv of torchrun on one of several nodes, with the roll call before it."""
    return [
        interpreter, "-m", AGENT, "{run_dir}",
        "--nnodes", str(nodes), "--nproc-per-node", str(devices_per_node), "--node-rank", "{node_rank}",
        "--master-addr", "{master_addr}", "--master-port", "{master_port}", "--module", worker,
    ]  # fmt: skip


def render_env(plan: Plan) -> dict[str, str]:
    """Environment variables that the launcher gets on top of its own."""
    env = dict(plan.launch.env)
    by_reference = [name for name, value in env.items() if has_reference(value)]
    if by_reference:
        env[GIVEN] = ",".join(by_reference)  # what the logs shall not show
    launcher = plan.launch.launcher
    if not plan.hardware.is_cpu:
        env[DEVICE_ORDER] = "PCI_BUS_ID"  # as nvidia-smi, whose numbers {devices} are
        if launcher != "deepspeed":
            env["CUDA_VISIBLE_DEVICES"] = "{devices}"
    if launcher == "python":
        env |= engine_of(plan).alone_env
    return env


def render_accelerate_config(plan: Plan) -> dict[str, object] | None:
    """Processes and rendezvous only: precision and DeepSpeed reach the Trainer through TrainingArguments.

    None where torchrun starts the ranks itself, on several nodes.
    """
    hardware = plan.hardware
    if plan.launch.launcher != "accelerate" or hardware.num_nodes > 1:
        return None
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if hardware.num_devices > 1 else "NO",
        "num_machines": 1,
        "num_processes": hardware.num_devices,
        "machine_rank": 0,
        "gpu_ids": "all",
        "mixed_precision": "no",
        "use_cpu": False,
        "debug": False,
        "rdzv_backend": "static",
        "same_network": True,
    }
