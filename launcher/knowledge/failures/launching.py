"""Known failures of launching: ports, devices, launchers, and processes that wait or are killed."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure, Place

_DEVICES = Place("worker", "launcher.render.command:_deepspeed_devices")
_COMMAND = Place("worker", "launcher.render.command:render_command")
_MISSING = Place("refusal", "device-missing")

DISTRIBUTED = (
    Failure(
        id="port-in-use",
        title="the rendezvous port is taken",
        cause="Another process of this machine listens on the port where the ranks were to meet, often a run "
        "that was not ended. The deepspeed launcher never looks before it starts.",
        fix="end the other run, or start this one with `effilaunch run`, which takes a free port",
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
        fix="name the devices with --include localhost:IDS, as `effilaunch run` does",
        source="deepspeed/launcher/runner.py main",
        places=(_DEVICES, Place("diagnose")),
        signs=(r"Detected (?:CUDA_)?VISIBLE_DEVICES=\S+ but ignoring it because",),
    ),
    Failure(
        id="include-and-num-gpus",
        title="--include together with --num_gpus",
        cause="The deepspeed launcher takes either a list of devices or their number.",
        fix="start the run with `effilaunch run`, which passes --include alone",
        source="deepspeed/launcher/runner.py main",
        places=(_DEVICES, Place("diagnose")),
        patterns=(r"Cannot specify num_nodes/gpus with include/exclude",),
    ),
    Failure(
        id="include-bad-slot",
        title="a device that this machine does not have",
        cause="The launcher was told to use a GPU index beyond those it found; a number of GPUs that is too "
        "large gets as far as CUDA.",
        fix="ask for as many devices as there are (hardware.devices_per_node)",
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
        fix="run where nvidia-smi shows GPUs (`effilaunch doctor`), or plan with `--on cpu`",
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
        fix="believe the completion marker, not the exit code; `effilaunch run` does",
        source="deepspeed/launcher/runner.py main (result.returncode > 0)",
        places=(Place("worker", "launcher.execute.start:execute"), Place("diagnose")),
        patterns=(r"the run ended without finishing, although its launcher reported success",),
    ),
    Failure(
        id="local-rank-arg",
        title="a script that does not know --local_rank",
        cause="The deepspeed launcher adds --local_rank=N to the arguments of every process.",
        fix="pass --no_local_rank to the launcher (LOCAL_RANK is in the environment), as "
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
        fix="start the run with `effilaunch run`, which sets them for one process too",
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
        fix="use a launcher, or one visible device; `effilaunch run` does one of the two",
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
        fix="always pass --config_file, as `effilaunch run` does",
        source="accelerate/commands/launch.py _validate_launch_command",
        places=(_COMMAND, Place("doctor", "accelerate-config")),
    ),
    Failure(
        id="accelerate-flags",
        title="launch flags that exclude each other",
        cause="accelerate launch takes one kind of parallelism, and --multi_gpu needs two processes.",
        fix="start the run with `effilaunch run`, which writes accelerate's file from the plan",
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
        fix="name the machines in launch.hostfile: `effilaunch run` needs ssh alone and starts the launcher "
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
        fix="mend or remove the hostfile (`effilaunch doctor` shows it), or set up ssh without a password",
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
        fix="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other "
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
        fix="use an address that every node resolves (`getent hosts NAME` on each) and a port that is "
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
        fix="look for the rank that is missing from the message; if it was only slow, raise "
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
        fix="run with launch.env.NCCL_DEBUG: INFO and read the first `NCCL WARN` line; `effilaunch doctor "
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
        fix="start one rank a GPU (hardware.devices_per_node), as `effilaunch run` does",
        source="NVIDIA/nccl src/init.cc",
        places=(_MISSING, Place("diagnose")),
        patterns=(r"Duplicate GPU detected ?: ?rank",),
    ),
    Failure(
        id="shared-memory-full",
        title="/dev/shm is too small",
        cause="Data workers and NCCL hand tensors over in shared memory, of which a container has 64 MB "
        "unless told otherwise.",
        fix="give the container more (`docker run --shm-size 16g` or `--ipc=host`, an emptyDir of medium "
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
        fix="set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 under launch.env, or update the driver",
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
        fix="set OMP_NUM_THREADS to cores / processes, as the plan does where work is on the CPU",
        source="torch/distributed/run.py config_from_args",
        places=(Place("worker", "launcher.plan.arguments:decide_runtime"), Place("diagnose")),
        signs=(r"Setting OMP_NUM_THREADS environment variable for each process to be 1\b",),
    ),
    Failure(
        id="tokenizers-fork",
        title="tokenizer threads and forked loaders",
        cause="Dataloader workers are forked after the tokenizer used its threads; it switches them off "
        "with a warning, or deadlocks.",
        fix="set TOKENIZERS_PARALLELISM=false, as the plan does",
        source="huggingface/tokenizers TOKENIZERS_PARALLELISM",
        places=(Place("worker", "launcher.plan.arguments:decide_runtime"), Place("diagnose")),
        signs=(r"The current process just got forked, after parallelism has already been used",),
    ),
    Failure(
        id="notebook-cuda-init",
        title="CUDA was touched before the processes were forked",
        cause="A process that has used CUDA cannot fork workers that use it: in a notebook an earlier cell "
        "did, elsewhere a data loader or a map with several processes.",
        fix="start training from the command line: `effilaunch run RECIPE`",
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
        fix="give the job more host memory, use fewer ranks on a machine, or offload less "
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


_WARNING = Place("worker", "launcher.schedulers.slurm_script:warning_seconds")
_REQUEUE = Place("worker", "launcher.schedulers.slurm_requeue:decide")

SLURM = (
    Failure(
        id="slurm-time-limit",
        title="the job reached its time limit",
        cause="Slurm kills a job at its limit of time. What was trained since the last checkpoint is lost, "
        "unless the job asked for a signal before (--signal) and answered it with one.",
        fix="`effilaunch submit` asks for the signal, saves and goes on; in a script of your own write "
        "`#SBATCH --signal=USR1@180` and `--resume auto`; or ask for more time",
        source="slurm/src/slurmd/slurmstepd/req.c _handle_terminate; `man sbatch`, --time and --signal",
        places=(_WARNING, _REQUEUE, Place("refusal", "slurm-time"), Place("diagnose")),
        patterns=(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO TIME LIMIT",),
    ),
    Failure(
        id="slurm-preempted",
        title="the job had to make room for another one",
        cause="A job of a higher priority needed the nodes, and this one did not end in the grace time that "
        "the partition gives. Slurm requeues only jobs that it kills so, where they may be requeued.",
        fix="`effilaunch submit` saves at the signal and requeues the job; in a script of your own write "
        "`#SBATCH --requeue` and `--resume auto`",
        source="slurm/src/slurmctld/preempt.c; `man slurm.conf`, PreemptMode and GraceTime",
        places=(_REQUEUE, Place("diagnose")),
        patterns=(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO PREEMPTION",),
    ),
)


_ENGINE = Place("refusal", "parallel-engine")
_HEADS = Place("refusal", "parallel-heads")
_CONFLICT = Place("refusal", "parallel-conflict")
_TRAINER = Place("worker", "launcher.train.tasks.task:trainer_class")

PARALLEL = (
    Failure(
        id="sequence-parallel-gradients",
        title="gradients of sequence parallelism are too large",
        cause="transformers computes the loss of Ulysses on every rank from all ranks' losses. Backward each "
        "part comes back once from every rank, and DeepSpeed's stages 0 to 2 add the ranks up: gradients are "
        "sp_size times too large, which clipping and Adam hide. No error tells of it.",
        fix="`effilaunch run` computes each rank's part of the loss itself; elsewhere divide the loss by "
        "sp_size below ZeRO-3",
        source="transformers/integrations/deepspeed.py deepspeed_sp_compute_loss; "
        "deepspeed/runtime/zero/stage_1_and_2.py average_tensor",
        versions="transformers>=5",
        places=(_TRAINER,),
    ),
    Failure(
        id="sequence-parallel-positions",
        title="sequence parallelism without positions",
        cause="Ranks that share a sample's tokens gather their positions to mask what lies ahead; a batch "
        "without position_ids would be taken for packed documents.",
        fix="let the collator give position_ids, or start with `effilaunch run`, which does",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter, forward",
        places=(Place("worker", "launcher.train.sequence:part_of"), Place("diagnose")),
        patterns=(r"Ulysses SP requires `?position_ids`? in every",),
    ),
    Failure(
        id="sequence-not-divisible",
        title="a sample that the ranks cannot divide",
        cause="Each of the ranks that share a sample takes as many of its tokens.",
        fix="use a data.max_length that sp_size divides; shorter samples are padded to such a length",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter.refill",
        places=(Place("refusal", "parallel-length"), Place("diagnose")),
        patterns=(r"batch's seqlen=\d+ isn't divisible by sp-size=\d+",),
    ),
    Failure(
        id="heads-not-divisible",
        title="attention heads that the ranks cannot divide",
        cause="Ranks that share a layer, or swap tokens for heads, need the same number of heads each.",
        fix="use a sharding.tp_size or sharding.sp_size that divides the heads and the key-value heads",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF; "
        "transformers/distributed/tensor_parallel.py",
        places=(_HEADS, Place("diagnose")),
        patterns=(r"[Aa]ttention head count \d+ is not divisible by SP size \d+",),
    ),
    Failure(
        id="tensor-parallel-no-model",
        title="AutoTP saves no model",
        cause="accelerate puts AutoTP's parts together only where the config says "
        "stage3_gather_16bit_weights_on_model_save, whatever its stage; else the Trainer saves DeepSpeed's "
        "states in place of model.safetensors.",
        fix="write the key into zero_optimization, as `effilaunch run` does",
        source="accelerate/accelerator.py get_state_dict; transformers/trainer.py save_model",
        places=(Place("worker", "launcher.render.ds_config:render_ds_config"),),
    ),
    Failure(
        id="tensor-parallel-resume",
        title="checkpoints of a model that transformers has cut",
        cause="The states of an optimizer over cut weights are not saved, so the Trainer refuses to write "
        "checkpoints that a run could go on from.",
        fix="use sharding.engine: deepspeed, whose AutoTP can, or trainer.save_only_model: true",
        source="transformers/trainer.py __init__ (is_distributed_loading_by_transformers)",
        versions="transformers>=5",
        places=(_ENGINE, Place("diagnose")),
        patterns=(r"Resuming is not supported for models sharded at load time",),
    ),
    Failure(
        id="tensor-parallel-plan",
        title="a model without a tensor-parallel plan",
        cause="transformers cuts a model by the plan in its configuration class, and this one has none.",
        fix="drop sharding.tp_size: ZeRO-3 and engine fsdp share the weights of any model",
        source="transformers/distributed/mixin.py _resolve_parallel_plans",
        places=(Place("refusal", "parallel-model"), Place("diagnose")),
        patterns=(r"`tp_size=\d+` was requested, but `\w+` has no `tp_plan`",),
    ),
    Failure(
        id="tensor-parallel-adapter",
        title="an adapter over weights that are cut",
        cause="peft makes the adapter's matrices whole, beside layers that return a part: shapes differ in "
        "the first forward pass with transformers' own cut, and AutoTP does not find the layers.",
        fix="train the adapter under ZeRO-3 or engine fsdp, which share the frozen base among the ranks",
        source="peft/tuners/lora/layer.py Linear.forward; deepspeed/module_inject/auto_tp.py",
        places=(_CONFLICT,),
    ),
    Failure(
        id="tensor-parallel-copies",
        title="copies of a model that transformers has cut",
        cause="accelerate combines tensor and context parallelism with sharded copies alone, not with DDP.",
        fix="use sharding.engine: deepspeed for copies, or as many ranks for a copy as there are devices",
        source="accelerate/parallelism_config.py __post_init__",
        places=(_ENGINE, Place("diagnose")),
        patterns=(r"Tensor/Context parallelism \(tp/cp_size > 1\) cannot be used with pure data",),
    ),
    Failure(
        id="parallelism-combined",
        title="context and sequence parallelism at once",
        cause="Both give a rank a part of each sample's tokens.",
        fix="keep sharding.sp_size (deepspeed) or sharding.cp_size (fsdp)",
        source="accelerate/parallelism_config.py __post_init__",
        places=(Place("refusal", "parallel-combination"), Place("diagnose")),
        patterns=(r"Context Parallelism \(CP\) and Sequence Parallelism \(SP\) are mutually exclusive",),
    ),
    Failure(
        id="parallelism-processes",
        title="ranks that accelerate cannot share out",
        cause="The product of all parallel sizes is not the number of processes, or the processes run on "
        "CPUs, over which accelerate sets up neither tensor nor context parallelism.",
        fix="let the sizes divide the devices; on a CPU use sharding.engine: deepspeed",
        source="accelerate/parallelism_config.py _validate_accelerator",
        places=(
            Place("refusal", "parallel-devices"), Place("refusal", "engine-mismatch"), Place("diagnose"),
        ),
        patterns=(
            r"ParallelismConfig total_size \(\d+\) does not match num_processes",
            r"ParallelismConfig is only compatible DistributedType",
        ),
    ),
    Failure(
        id="context-parallel-attention",
        title="context parallelism with another attention",
        cause="torch's ring attention takes the place of SDPA's kernels on GPUs; no other attention and no "
        "CPU has one.",
        fix="use model.attn_implementation: sdpa on GPUs, or sharding.sp_size",
        source="transformers/trainer.py _prepare_context_parallel_inputs; "
        "torch/distributed/tensor/experimental/_context_parallel",
        places=(_ENGINE, _CONFLICT, Place("diagnose")),
        patterns=(
            r"Context parallelism is supported only with SDPA attention",
            r"Operator aten\._scaled_dot_product_flash_attention_for_cpu\.default does not have a sharding "
            r"strategy",
        ),
    ),
    Failure(
        id="tensor-parallel-data",
        title="ranks of one copy read different rows",
        cause="Ranks that share a layer compute the same rows, and AutoTP looks at the first batch.",
        fix="let the ranks of a copy read the same rows, as `effilaunch run` does",
        source="deepspeed/runtime/engine.py check_dataloader_inputs_same_across_ranks",
        places=(Place("worker", "launcher.train.sharing:copies"), _CONFLICT, Place("diagnose")),
        patterns=(r"Data inconsistency within the TP group",),
    ),
    Failure(
        id="pipeline-parallel",
        title="pipeline parallelism asked for",
        cause="DeepSpeed's pipeline needs a model of its own kind (PipelineModule), which no model of "
        "transformers is; its block in a config changes nothing else.",
        fix="use sharding.tp_size, sharding.zero_stage: 3 or engine fsdp",
        source="deepspeed/runtime/pipe/module.py; deepspeed/__init__.py initialize",
        places=(Place("refusal", "profile-parallel"), Place("refusal", "unsupported")),
    ),
    Failure(
        id="one-bit-optimizer",
        title="1-bit Adam, 0/1 Adam and 1-bit LAMB",
        cause="DeepSpeed has removed them; releases that had them refused them with ZeRO-2 and 3.",
        fix="use AdamW: ZeRO shares its states out",
        source="deepspeed/runtime/engine.py _configure_basic_optimizer",
        places=(Place("lint", "ds-optimizer-type"),),
    ),
)  # fmt: skip
