"""Known failures of launching: ports, devices, launchers, and processes that wait or are killed."""

from __future__ import annotations

from launcher.failures.failure import Failure, Place

_DEVICES = Place("worker", "launcher.render.command:_deepspeed_devices")
_COMMAND = Place("worker", "launcher.render.command:render_command")
_MISSING = Place("refusal", "device-missing")

DISTRIBUTED = (
    Failure(
        id="port-in-use",
        title="the rendezvous port is taken",
        cause="Another process of this machine listens on the port where the ranks were to meet, often a run "
        "that was not ended. The deepspeed launcher never looks before it starts.",
        mend="end the other run, or start this one with `effilaunch run`, which takes a free port",
        source="accelerate/utils/launch.py prepare_multi_gpu_env; deepspeed/launcher/runner.py --master_port",
        places=(
            Place("worker", "launcher.facts.probe:free_port"),
            Place("doctor", "ports"),
            Place("diagnose"),
        ),
        patterns=(
            r"\bEADDRINUSE\b",
            r"The server socket has failed to listen on any local network address",
            r"Tried to launch distributed communication on port `?\d+`?, but another process",
            r"\[Errno 98\] Address already in use",
            r"\berrno: 98\b.{0,4} Address already in use",
            r"^RuntimeError: Address already in use",
        ),
    ),
    Failure(
        id="cvd-ignored",
        title="the deepspeed launcher dropped CUDA_VISIBLE_DEVICES",
        cause="Given --num_gpus, --num_nodes, --include or --exclude, the launcher deletes "
        "CUDA_VISIBLE_DEVICES and trains on devices that were not meant, perhaps somebody else's.",
        mend="name the devices with --include localhost:IDS, as `effilaunch run` does",
        source="deepspeed/launcher/runner.py main",
        places=(_DEVICES, Place("diagnose")),
        signs=(r"Detected (?:CUDA_)?VISIBLE_DEVICES=\S+ but ignoring it because",),
    ),
    Failure(
        id="include-and-num-gpus",
        title="--include together with --num_gpus",
        cause="The deepspeed launcher takes either a list of devices or their number.",
        mend="start the run with `effilaunch run`, which passes --include alone",
        source="deepspeed/launcher/runner.py main",
        places=(_DEVICES, Place("diagnose")),
        patterns=(r"Cannot specify num_nodes/gpus with include/exclude",),
    ),
    Failure(
        id="include-bad-slot",
        title="a device that this machine does not have",
        cause="The launcher was told to use a GPU index beyond those it found; a number of GPUs that is too "
        "large gets as far as CUDA.",
        mend="ask for as many devices as there are (hardware.devices_per_node)",
        source="deepspeed/launcher/runner.py parse_resource_filter",
        places=(_MISSING, Place("diagnose")),
        patterns=(
            r"No slot '\d+' specified on host",
            r"CUDA error: invalid device ordinal",
        ),
    ),
    Failure(
        id="no-gpu",
        title="no GPU for the launcher",
        cause="The deepspeed launcher found no GPU: no driver, an empty CUDA_VISIBLE_DEVICES, or a job "
        "without devices.",
        mend="run where nvidia-smi shows GPUs (`effilaunch doctor`), or plan with `--on cpu`",
        source="deepspeed/launcher/runner.py main",
        places=(_MISSING, Place("doctor", "devices"), Place("diagnose")),
        patterns=(
            r"Unable to proceed, no GPU resources available",
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver on your system",
            r"ProcessGroupNCCL is only supported with GPUs, no GPUs found",
            r"Torch not compiled with CUDA enabled",
            r"Attempting to deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False",
        ),
    ),
    Failure(
        id="exit-code-lost",
        title="a launcher that reports success for a killed run",
        cause="The deepspeed launcher hands on only positive exit codes, so a run that ended by a signal "
        "looks finished to the shell and to the scheduler.",
        mend="believe the completion marker, not the exit code; `effilaunch run` does",
        source="deepspeed/launcher/runner.py main (result.returncode > 0)",
        places=(Place("worker", "launcher.execute.start:execute"), Place("diagnose")),
        patterns=(r"the run ended without finishing, although its launcher reported success",),
    ),
    Failure(
        id="local-rank-arg",
        title="a script that does not know --local_rank",
        cause="The deepspeed launcher adds --local_rank=N to the arguments of every process.",
        mend="pass --no_local_rank to the launcher (LOCAL_RANK is in the environment), as "
        "`effilaunch run` does",
        source="deepspeed/launcher/launch.py",
        places=(_COMMAND, Place("worker", "launcher.train.worker:main"), Place("diagnose")),
        patterns=(
            r"unrecognized arguments: .{0,200}--local[_-]rank",
            r"not used by the HfArgumentParser: \[.{0,200}--local[_-]rank",
            r"(?:[Nn]o such option:?|Could not consume arg:|Unknown command line flag) '?"
            r"(?:--)?local[_-]rank",
        ),
    ),
    Failure(
        id="plain-python-deepspeed",
        title="DeepSpeed without a launcher",
        cause="Nobody set RANK, WORLD_SIZE and MASTER_ADDR, so DeepSpeed asks MPI, which is not installed.",
        mend="start the run with `effilaunch run`, which sets them for one process too",
        source="deepspeed/comm/comm.py mpi_discovery",
        places=(
            Place("worker", "launcher.render.command:render_env"),
            Place("worker", "launcher.train.worker:stand_in_for_launcher"),
            Place("diagnose"),
        ),
        patterns=(
            r"No module named '?mpi4py'?",
            r"(?s)environment variable \w+ expected, but not set.*\n  File \S*deepspeed/",
        ),
    ),
    Failure(
        id="plain-python-multigpu",
        title="silent nn.DataParallel",
        cause="One plain process that sees several GPUs makes the Trainer wrap the model in nn.DataParallel "
        "and multiply the batch by their number.",
        mend="use a launcher, or one visible device; `effilaunch run` does one of the two",
        source="transformers/training_args.py n_gpu",
        places=(
            Place("worker", "launcher.plan.decide:decide_launcher"),
            Place("worker", "launcher.render.command:render_env"),
            Place("diagnose"),
        ),
        # A failure may show it: only nn.DataParallel has replicas.
        patterns=(r"Caught \w+ in replica \d+ on device \d+",),
    ),
    Failure(
        id="accelerate-default-config",
        title="a personal accelerate configuration",
        cause="accelerate launch reads default_config.yaml of the user's cache without saying so, so the "
        "same command trains otherwise for somebody else.",
        mend="always pass --config_file, as `effilaunch run` does",
        source="accelerate/commands/launch.py _validate_launch_command",
        places=(_COMMAND, Place("doctor", "accelerate-config")),
    ),
    Failure(
        id="accelerate-flags",
        title="launch flags that exclude each other",
        cause="accelerate launch takes one kind of parallelism, and --multi_gpu needs two processes.",
        mend="start the run with `effilaunch run`, which writes accelerate's file from the plan",
        source="accelerate/commands/launch.py _validate_launch_command",
        places=(Place("worker", "launcher.render.command:render_accelerate_config"), Place("diagnose")),
        patterns=(
            r"You can only use one of `--cpu`, `--multi_gpu`",
            r"You need to use at least 2 processes to use `--multi_gpu`",
        ),
    ),
    Failure(
        id="pdsh-missing",
        title="no pdsh for several machines",
        cause="The deepspeed launcher starts other machines through pdsh unless told otherwise, and it is "
        "not installed.",
        mend="name the machines in launch.hostfile: `effilaunch run` needs ssh alone and starts the launcher "
        "on each with --no_ssh; or install pdsh",
        source="deepspeed/launcher/runner.py main (backend_exists)",
        places=(_COMMAND, Place("diagnose")),
        patterns=(r"launcher '\w+' not installed\.",),
    ),
    Failure(
        id="hostfile",
        title="a hostfile that cannot be used",
        cause="The deepspeed launcher reads /job/hostfile when it exists: a bad line in it, or a host that "
        "ssh cannot reach without a password, ends the start.",
        mend="mend or remove the hostfile (`effilaunch doctor` shows it), or set up ssh without a password",
        source="deepspeed/launcher/runner.py fetch_hostfile",
        places=(
            _DEVICES,
            Place("refusal", "bad-hostfile"),
            Place("doctor", "hostfile"),
            Place("diagnose"),
        ),
        patterns=(
            r"Hostfile contains (?:a bad entry|multiple entries for)",
            r"Hostfile is empty or not formatted correctly",
            r"was not reachable via ssh\. If you are running with a single node",
        ),
    ),
    Failure(
        id="socket-interface",
        title="ranks of several machines that cannot reach each other",
        cause="A process group asks the machine's own name for its address, which on many machines is "
        "127.0.1.1, and nobody else can reach that; or GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no "
        "interface of this machine.",
        mend="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other "
        "machines, as `effilaunch run` does, or unset a wrong one",
        source="torch/csrc/distributed/c10d/ProcessGroupGloo.cpp createDefaultDevice",
        places=(
            Place("worker", "launcher.execute.binding:bind_order"),
            Place("doctor", "interfaces"),
            Place("diagnose"),
        ),
        patterns=(
            r"Gloo connectFullMesh failed with .{0,200}Connection refused, remote=\[127\.0\.1\.1\]",
            r"Unable to find (?:address|interface) for: \S+",
            r"Bootstrap ?: no socket interface found",
        ),
    ),
    Failure(
        id="rendezvous-unreachable",
        title="a node cannot reach the rendezvous",
        cause="The address of node rank 0 (MASTER_ADDR, --rdzv_endpoint) has no entry in DNS, a firewall is "
        "between the nodes, or node rank 0 was not started, or not on that port.",
        mend="use an address that every node resolves (`getent hosts NAME` on each) and a port that is "
        "open between them, and start node rank 0 too; `effilaunch doctor --rehearse` tries the connections",
        source="torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py; pytorch/pytorch#67581, "
        "#107021, #80772",
        places=(Place("doctor", "interfaces"), Place("diagnose")),
        patterns=(
            r"The connection to the C10d store has failed",
            r"\b[Cc]lient socket has (?:timed out after|failed to connect to any network address of)\b",
            r"connect\(\) timed out\. Original timeout was \d+ ms",
            r"^(?:[\w.]+\.)?RendezvousTimeoutError\b",
        ),
    ),
    Failure(
        id="nccl-timeout",
        title="a collective operation that timed out",
        cause="One rank waited for the others until the limit: they did uneven work (data prepared by rank "
        "0 alone, a slow disk), had died, or could not be reached.",
        mend="look for the rank that is missing from the message; if it was only slow, raise "
        "trainer.ddp_timeout (seconds)",
        source="pytorch/pytorch#118369; transformers/training_args.py ddp_timeout; deepspeed/constants.py",
        places=(
            Place("worker", "launcher.train.worker:set_timeouts"),
            Place("worker", "launcher.execute.start:prepare_data"),
            Place("diagnose"),
        ),
        patterns=(
            r"Watchdog caught collective operation timeout",
            r"Some NCCL operations have failed or timed out",
            r"Timed out waiting \d+ms for (?:send|recv) operation to complete",
            r"ncclUniqueId.{0,120}(?:Socket Timeout|wait timeout)",
        ),
        changes={"trainer.ddp_timeout": 7200},
    ),
    Failure(
        id="nccl-error",
        title="NCCL failed on a machine",
        cause="A call of the system, the driver or the network failed below a collective operation: too "
        "little /dev/shm, a wrong network interface, a GPU that fell off the bus, other NCCL versions on "
        "the machines.",
        mend="run with launch.env.NCCL_DEBUG: INFO and read the first `NCCL WARN` line; `effilaunch doctor "
        "--rehearse` tries the connections",
        source="pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp",
        places=(Place("doctor", "interfaces"), Place("diagnose")),
        patterns=(
            r"\bnccl(?:System|Internal|UnhandledCuda)Error\b",
            r"NCCL error.{0,200}unhandled (?:system|cuda) error",
        ),
        changes={"launch.env.NCCL_DEBUG": "INFO"},
    ),
    Failure(
        id="nccl-duplicate-gpu",
        title="two ranks on one GPU",
        cause="More ranks were started than GPUs are visible, or no rank was told its own: LOCAL_RANK is "
        "not used, or CUDA_VISIBLE_DEVICES is the same single device for all.",
        mend="start one rank a GPU (hardware.devices_per_node), as `effilaunch run` does",
        source="NVIDIA/nccl src/init.cc",
        places=(_MISSING, Place("diagnose")),
        patterns=(r"Duplicate GPU detected ?: ?rank",),
    ),
    Failure(
        id="shared-memory-full",
        title="/dev/shm is too small",
        cause="Data workers and NCCL hand tensors over in shared memory, of which a container has 64 MB "
        "unless told otherwise.",
        mend="give the container more (`docker run --shm-size 16g` or `--ipc=host`, an emptyDir of medium "
        "Memory), or set trainer.dataloader_num_workers: 0",
        source="torch/multiprocessing; NVIDIA/nccl src/misc/shmutils.cc",
        places=(Place("diagnose"),),
        patterns=(
            r"unable to (?:write to file|(?:open|allocate) shared memory(?: object)?)[^\n]{0,20}</?torch_",
            r"Error while creating shared memory segment /dev/shm/nccl",
            r"workers are out of shared memory|caused by insufficient shared memory \(shm\)",
            r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) is killed by signal: Bus error",
        ),
        changes={"trainer.dataloader_num_workers": 0},
    ),
    Failure(
        id="rtx40-p2p",
        title="RTX 40 cards without peer-to-peer transfers",
        cause="Drivers before 550.40.07 claim P2P for several RTX 40 cards and do not have it; accelerate "
        "refuses to start under any launcher but its own.",
        mend="set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 under launch.env, or update the driver",
        source="accelerate/state.py; accelerate/utils/environment.py check_cuda_p2p_ib_support",
        versions="accelerate>=0.24",
        places=(Place("fix", "rtx40-p2p"), Place("doctor", "p2p"), Place("diagnose")),
        patterns=(r"Using RTX 4000 series doesn't support faster communication",),
        changes={"launch.env.NCCL_P2P_DISABLE": "1", "launch.env.NCCL_IB_DISABLE": "1"},
    ),
    Failure(
        id="omp-threads",
        title="one CPU thread for each process",
        cause="torchrun and the launchers built on it set OMP_NUM_THREADS=1, which starves an optimizer "
        "that runs on the CPU.",
        mend="set OMP_NUM_THREADS to cores / processes, as the plan does where work is on the CPU",
        source="torch/distributed/run.py config_from_args",
        places=(Place("worker", "launcher.plan.arguments:decide_runtime"), Place("diagnose")),
        signs=(r"Setting OMP_NUM_THREADS environment variable for each process to be 1\b",),
    ),
    Failure(
        id="tokenizers-fork",
        title="tokenizer threads and forked loaders",
        cause="Dataloader workers are forked after the tokenizer used its threads; it switches them off "
        "with a warning, or deadlocks.",
        mend="set TOKENIZERS_PARALLELISM=false, as the plan does",
        source="huggingface/tokenizers TOKENIZERS_PARALLELISM",
        places=(Place("worker", "launcher.plan.arguments:decide_runtime"), Place("diagnose")),
        signs=(r"The current process just got forked, after parallelism has already been used",),
    ),
    Failure(
        id="notebook-cuda-init",
        title="CUDA was touched before the processes were forked",
        cause="A process that has used CUDA cannot fork workers that use it: in a notebook an earlier cell "
        "did, elsewhere a data loader or a map with several processes.",
        mend="start training from the command line: `effilaunch run RECIPE`",
        source="accelerate/launchers.py notebook_launcher",
        places=(
            Place("none", "runs are started as new processes, never from a notebook's"),
            Place("diagnose"),
        ),
        patterns=(
            r"has been initialized before the `{1,2}notebook_launcher`{1,2} could create a forked subprocess",
            r"the `Accelerator` should only be initialized inside",
            r"Cannot re-initialize CUDA in forked subprocess",
        ),
    ),
    Failure(
        id="sigkill-oom",
        title="the host's memory ran out",
        cause="The kernel or the scheduler killed a process with SIGKILL, or an allocation on the host "
        "failed: every rank loads the model, and offloading keeps states and weights there too.",
        mend="give the job more host memory, use fewer ranks on a machine, or offload less "
        "(sharding.offload_optimizer: none, sharding.offload_param: none)",
        source="deepspeed/launcher/launch.py; torch/distributed/elastic/multiprocessing/errors",
        places=(
            Place("refusal", "does-not-fit"),
            Place("worker", "launcher.plan.planner:_host_warnings"),
            Place("doctor", "host-memory"),
            Place("diagnose"),
        ),
        patterns=(
            r"exits with return code = -9\b",
            r"\(exitcode: -9\)",
            r"\bexitcode\s*: -9\b",
            r"Signal 9 \(SIGKILL\) received by PID",
            r"\boom[_-]kill events?\b",
            r"\bOOM ?Killed\b",
            r"Task was killed due to the node running low on memory",
            r"which exceeds the memory usage threshold of [\d.]+",
            r"tasks? [\d,-]+: Out Of Memory\b",
            r"\bexit(?:ed with)?(?: exit)? code:? 137\b",
            r"terminated with signal SIGKILL|died with <Signals\.SIGKILL",
            r"Out of memory: Killed process \d+",
            r"^Killed$",
            r"line \d+: +\d+ Killed +\S",
            r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) is killed by signal: Killed",
            r"the run ended by signal 9\b",
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
            r"Unable to allocate [\d.]+ [KMGTP]iB for an array",
            r"^(?:\w+\.)*(?:Arrow)?MemoryError(?:$|: (?:malloc|realloc) of size)",
            r"\[Errno 12\] Cannot allocate memory",
            r"\bstd::bad_alloc\b",
        ),
    ),
)
