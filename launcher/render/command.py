"""Command line and environment of the workers.

`{master_port}`, `{run_dir}` and `{devices}` (of the node on which the command is started) are bound late;
in a plan for several nodes `{master_addr}` and `{node_rank}`, too.
"""

from __future__ import annotations

from launcher.engines import engine_of
from launcher.facts.redaction import GIVEN
from launcher.plan.plan import Plan
from launcher.recipe.env import has_reference

WORKER = "launcher.train.worker"
PREPARE = "launcher.train.prepare"
LOCAL_LAUNCH = "launcher.train.loopback"
"""accelerate's launcher where all ranks are on one node: its store listens on loopback alone."""
HOSTFILE = "hostfile"
"""In the run directory: what DeepSpeed's launcher reads, see `render_hostfile`."""


def render_prepare(plan: Plan) -> list[str]:
    """argv of the process that prepares the data, which ends before the launcher starts."""
    return [plan.interpreter, "-m", PREPARE, "{run_dir}"]


def render_worker(plan: Plan, worker: str = WORKER) -> list[str]:
    """argv of one worker, for who starts every rank itself."""
    return [plan.interpreter, "-m", worker, "{run_dir}"]


def render_command(plan: Plan, worker: str = WORKER) -> list[str]:
    """argv of the launcher, as it is started on every node. worker: the module that it starts."""
    launcher = plan.launch.launcher
    if launcher == "python":
        return render_worker(plan, worker)
    several = plan.hardware.num_nodes > 1
    if launcher == "accelerate":
        machine = ["--machine_rank", "{node_rank}", "--main_process_ip", "{master_addr}"] if several else []
        return [
            plan.interpreter, "-m", "accelerate.commands.launch" if several else LOCAL_LAUNCH,
            # Without it accelerate reads a personal default from the home directory.
            "--config_file", "{run_dir}/accelerate.yaml", *machine,
            "--main_process_port", "{master_port}",
            # Its folders for output that nobody redirects would stay in TMPDIR, one for each start.
            "--log_dir", "/dev/null",
            "-m", worker, "{run_dir}",
        ]  # fmt: skip
    # Every node starts its own ranks: no shell command and no environment travels through pdsh.
    machine = ["--no_ssh", "--node_rank", "{node_rank}", "--master_addr", "{master_addr}"] if several else []
    return [plan.interpreter, "-m", "deepspeed.launcher.runner",
            "--hostfile", "{run_dir}/" + HOSTFILE, *machine, *_deepspeed_devices(plan),
            "--master_port", "{master_port}", "--no_local_rank",
            "--module", worker, "{run_dir}"]  # fmt: skip


def _deepspeed_devices(plan: Plan) -> list[str]:
    """Where the processes run. On one node the named hostfile is absent: DeepSpeed then stays on it, and
    does not read its default, /job/hostfile, which may list other nodes."""
    hardware = plan.hardware
    if hardware.is_cpu:
        return [] if hardware.num_nodes > 1 else ["--num_gpus", str(hardware.devices_per_node)]
    # --num_gpus would delete CUDA_VISIBLE_DEVICES and train on somebody else's devices.
    if hardware.num_nodes == 1:
        return ["--include", "localhost:{devices}"]
    # Of the other nodes a launcher takes the number of devices alone, so that each may name its own ids.
    return ["--include", "@".join(f"{name}:{{devices}}" for name in node_names(hardware.num_nodes))]


def node_names(num_nodes: int) -> list[str]:
    """The names of the nodes in DeepSpeed's hostfile: with --no_ssh it never connects to them."""
    return [f"node-{number}" for number in range(num_nodes)]


def render_hostfile(plan: Plan, slots: int | None = None) -> str | None:
    """DeepSpeed's hostfile; None where its launcher starts on one node alone, or is not used.

    slots: at least the highest device id of any node and one; None: the number of devices that are used.
    """
    hardware = plan.hardware
    if hardware.num_nodes == 1 or plan.launch.launcher != "deepspeed":
        return None
    count = max(slots or 0, hardware.devices_per_node)
    lines = [f"{name} slots={count}" for name in node_names(hardware.num_nodes)]
    return "\n".join(["# The machines in the order of their node ranks.", *lines, ""])


def render_env(plan: Plan) -> dict[str, str]:
    """Environment variables that the launcher gets on top of its own."""
    env = dict(plan.launch.env)
    by_reference = [name for name, value in env.items() if has_reference(value)]
    if by_reference:
        env[GIVEN] = ",".join(by_reference)  # what the logs shall not show
    launcher = plan.launch.launcher
    if not plan.hardware.is_cpu and launcher != "deepspeed":
        env["CUDA_VISIBLE_DEVICES"] = "{devices}"
    if launcher == "python":
        env |= engine_of(plan).alone_env
    return env


def render_accelerate_config(plan: Plan) -> dict[str, object] | None:
    """Processes and rendezvous only: precision and DeepSpeed reach the Trainer through TrainingArguments."""
    if plan.launch.launcher != "accelerate":
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
