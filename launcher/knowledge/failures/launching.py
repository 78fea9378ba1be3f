"""Known failures of launching: ports, devices, launchers, and processes that wait or are killed."""

from __future__ import annotations

from launcher.knowledge.failures.failure import Failure

_DEVICES = "worker launcher.render.command:_deepspeed_devices"
_COMMAND = "worker launcher.render.command:render_command"
_MISSING = "refusal device-missing"

DISTRIBUTED = (
    Failure(
        id="port-in-use",
        title="the rendezvous port is in use",
        cause="Another process on this machine listens on the rendezvous port, often a leftover run. The "
        "deepspeed launcher does not check the port.",
        fix="end the other run, or use `effilaunch run`, which picks a free port",
        source="accelerate/utils/launch.py prepare_multi_gpu_env; deepspeed/launcher/runner.py --master_port",
        places=("worker launcher.facts.probe:free_port", "doctor ports"),
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
        title="the deepspeed launcher ignored CUDA_VISIBLE_DEVICES",
        cause="With --num_gpus, --num_nodes, --include or --exclude, the launcher deletes "
        "CUDA_VISIBLE_DEVICES and may train on devices of other users.",
        fix="select devices with --include localhost:IDS, as `effilaunch run` does",
        source="deepspeed/launcher/runner.py main",
        places=(_DEVICES,),
        signs=(r"Detected (?:CUDA_)?VISIBLE_DEVICES=\S+ but ignoring it because",),
    ),
    Failure(
        id="include-and-num-gpus",
        title="--include together with --num_gpus",
        cause="The deepspeed launcher accepts a device list or a device count, not both.",
        fix="use `effilaunch run`, which passes only --include",
        source="deepspeed/launcher/runner.py main",
        places=(_DEVICES,),
        patterns=(r"Cannot specify num_nodes/gpus with include/exclude",),
    ),
    Failure(
        id="include-bad-slot",
        title="GPU index that this machine does not have",
        cause="The launcher was given a GPU index above those it found; a --num_gpus that is too large fails "
        "only in CUDA.",
        fix="request as many devices as exist (hardware.devices_per_node)",
        source="deepspeed/launcher/runner.py parse_resource_filter",
        places=(_MISSING,),
        patterns=(
            r"No slot '\d+' specified on host",
            r"CUDA error: invalid device ordinal",
        ),
    ),
    Failure(
        id="no-gpu",
        title="no GPU found",
        cause="No driver, an empty CUDA_VISIBLE_DEVICES, or a job without devices.",
        fix="run where nvidia-smi shows GPUs (`effilaunch doctor`), or plan with `--on cpu`",
        source="deepspeed/launcher/runner.py main",
        places=(_MISSING, "doctor devices"),
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
        title="the launcher reports success for a killed run",
        cause="The deepspeed launcher passes on only positive exit codes, so a run that was killed by a "
        "signal looks successful to the shell and the scheduler.",
        fix="check the completion marker instead of the exit code, as `effilaunch run` does",
        source="deepspeed/launcher/runner.py main (result.returncode > 0)",
        places=("worker launcher.execute.start:execute",),
        patterns=(r"the run ended without finishing, although its launcher reported success",),
    ),
    Failure(
        id="local-rank-arg",
        title="the script does not accept --local_rank",
        cause="The deepspeed launcher adds --local_rank=N to the arguments of every process.",
        fix="pass --no_local_rank to the launcher (LOCAL_RANK is set in the environment), as `effilaunch "
        "run` does",
        source="deepspeed/launcher/launch.py",
        places=(_COMMAND, "worker launcher.train.worker:main"),
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
        cause="RANK, WORLD_SIZE and MASTER_ADDR are not set, so DeepSpeed tries MPI, which is not installed.",
        fix="use `effilaunch run`, which sets them even for one process",
        source="deepspeed/comm/comm.py mpi_discovery",
        places=(
            "worker launcher.render.command:render_env",
            "worker launcher.train.engines.deepspeed:stand_in_for_launcher",
        ),
        patterns=(
            r"No module named '?mpi4py'?",
            r"(?s)environment variable \w+ expected, but not set.*\n  File \S*deepspeed/",
        ),
    ),
    Failure(
        id="plain-python-multigpu",
        title="implicit nn.DataParallel",
        cause="In a single plain process with several visible GPUs, the Trainer wraps the model in "
        "nn.DataParallel and multiplies the batch size by the number of GPUs.",
        fix="use a launcher, or make one device visible; `effilaunch run` does this",
        source="transformers/training_args.py n_gpu",
        places=(
            "worker launcher.planner.decide:decide_launcher",
            "worker launcher.render.command:render_env",
        ),
        # A failure may show it: only nn.DataParallel has replicas.
        patterns=(r"Caught \w+ in replica \d+ on device \d+",),
    ),
    Failure(
        id="accelerate-default-config",
        title="personal accelerate configuration",
        cause="accelerate launch silently reads default_config.yaml from the user's cache, so the same "
        "command behaves differently for other users.",
        fix="always pass --config_file, as `effilaunch run` does",
        source="accelerate/commands/launch.py _validate_launch_command",
        places=(_COMMAND, "doctor accelerate-config"),
    ),
    Failure(
        id="accelerate-flags",
        title="mutually exclusive launch flags",
        cause="accelerate launch accepts one kind of parallelism, and --multi_gpu needs at least two "
        "processes.",
        fix="use `effilaunch run`, which writes accelerate's config file from the plan",
        source="accelerate/commands/launch.py _validate_launch_command",
        places=("worker launcher.render.command:render_accelerate_config",),
        patterns=(
            r"You can only use one of `--cpu`, `--multi_gpu`",
            r"You need to use at least 2 processes to use `--multi_gpu`",
        ),
    ),
    Failure(
        id="pdsh-missing",
        title="pdsh is not installed",
        cause="The deepspeed launcher starts other nodes through pdsh by default.",
        fix="list the hosts in launch.hostfile (`effilaunch run` needs only ssh and starts the launcher on "
        "each host with --no_ssh), or install pdsh",
        source="deepspeed/launcher/runner.py main (backend_exists)",
        places=(_COMMAND,),
        patterns=(r"launcher '\w+' not installed\.",),
    ),
    Failure(
        id="hostfile",
        title="unusable hostfile",
        cause="The deepspeed launcher reads /job/hostfile if it exists. An invalid line, or a host without "
        "passwordless ssh, stops the start.",
        fix="correct or remove the hostfile (`effilaunch doctor` shows it), or set up passwordless ssh",
        source="deepspeed/launcher/runner.py fetch_hostfile",
        places=(_DEVICES, "refusal bad-hostfile", "doctor hostfile"),
        patterns=(
            r"Hostfile contains (?:a bad entry|multiple entries for)",
            r"Hostfile is empty or not formatted correctly",
            r"was not reachable via ssh\. If you are running with a single node",
        ),
    ),
    Failure(
        id="socket-interface",
        title="ranks on different nodes cannot connect",
        cause="A process group resolves the host's own name to its address, often 127.0.1.1, which other "
        "nodes cannot reach; or GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this "
        "machine.",
        fix="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that reaches the other nodes, as "
        "`effilaunch run` does, or unset wrong values",
        source="torch/csrc/distributed/c10d/ProcessGroupGloo.cpp createDefaultDevice",
        places=("worker launcher.execute.binding:bind_order", "doctor interfaces"),
        patterns=(
            r"Gloo connectFullMesh failed with .{0,200}Connection refused, remote=\[127\.0\.1\.1\]",
            r"Unable to find (?:address|interface) for: \S+",
            r"Bootstrap ?: no socket interface found",
        ),
    ),
    Failure(
        id="rendezvous-unreachable",
        title="a node cannot reach the rendezvous",
        cause="The address of node rank 0 (MASTER_ADDR, --rdzv_endpoint) does not resolve, a firewall blocks "
        "the port, or node rank 0 is not running or uses another port.",
        fix="use an address that every node resolves (`getent hosts NAME`) and an open port, and start node "
        "rank 0; `effilaunch doctor --rehearse` tests the connections",
        source="torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py; pytorch/pytorch#67581, "
        "#107021, #80772",
        places=("doctor interfaces",),
        patterns=(
            r"The connection to the C10d store has failed",
            r"\b[Cc]lient socket has (?:timed out after|failed to connect to any network address of)\b",
            r"connect\(\) timed out\. Original timeout was \d+ ms",
            r"^(?:[\w.]+\.)?RendezvousTimeoutError\b",
        ),
    ),
    Failure(
        id="nccl-timeout",
        title="a collective operation timed out",
        cause="A rank waited until the timeout for ranks that did uneven work (data preparation on rank 0, a "
        "slow disk), had died, or could not be reached.",
        fix="look for the rank that the message does not list; if it was only slow, raise "
        "trainer.ddp_timeout (seconds)",
        source="pytorch/pytorch#118369; transformers/training_args.py ddp_timeout; deepspeed/constants.py",
        places=("worker launcher.train.worker:set_timeouts", "worker launcher.execute.start:prepare_data"),
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
        title="NCCL error",
        cause="A system, driver or network call failed during a collective operation: too little /dev/shm, a "
        "wrong network interface, a failed GPU, or different NCCL versions on the nodes.",
        fix="run with launch.env.NCCL_DEBUG: INFO and read the first `NCCL WARN` line; `effilaunch doctor "
        "--rehearse` tests the connections",
        source="pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp",
        places=("doctor interfaces",),
        patterns=(
            r"\bnccl(?:System|Internal|UnhandledCuda)Error\b",
            r"NCCL error.{0,200}unhandled (?:system|cuda) error",
        ),
        changes={"launch.env.NCCL_DEBUG": "INFO"},
    ),
    Failure(
        id="nccl-duplicate-gpu",
        title="two ranks on one GPU",
        cause="There are more ranks than visible GPUs, or ranks do not use their own device: LOCAL_RANK is "
        "ignored, or CUDA_VISIBLE_DEVICES is the same single device for all.",
        fix="start one rank per GPU (hardware.devices_per_node), as `effilaunch run` does",
        source="NVIDIA/nccl src/init.cc",
        places=(_MISSING,),
        patterns=(r"Duplicate GPU detected ?: ?rank",),
    ),
    Failure(
        id="shared-memory-full",
        title="/dev/shm is too small",
        cause="DataLoader workers and NCCL exchange tensors through shared memory. Containers have 64 MB by "
        "default.",
        fix="give the container more (`docker run --shm-size 16g` or `--ipc=host`; Kubernetes: emptyDir with "
        "medium Memory), or set trainer.dataloader_num_workers: 0",
        source="torch/multiprocessing; NVIDIA/nccl src/misc/shmutils.cc",
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
        title="RTX 40 GPUs without peer-to-peer transfers",
        cause="Drivers before 550.40.07 report P2P support for several RTX 40 GPUs that lack it; accelerate "
        "refuses to start unless its own launcher is used.",
        fix="set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 under launch.env, or update the driver",
        source="accelerate/state.py; accelerate/utils/environment.py check_cuda_p2p_ib_support",
        versions="accelerate>=0.24",
        places=("fix rtx40-p2p", "doctor p2p"),
        patterns=(r"Using RTX 4000 series doesn't support faster communication",),
        changes={"launch.env.NCCL_P2P_DISABLE": "1", "launch.env.NCCL_IB_DISABLE": "1"},
    ),
    Failure(
        id="omp-threads",
        title="one CPU thread per process",
        cause="torchrun and launchers based on it set OMP_NUM_THREADS=1, which slows down an optimizer on "
        "the CPU.",
        fix="set OMP_NUM_THREADS to cores / processes, as the plan does for CPU work",
        source="torch/distributed/run.py config_from_args",
        places=("worker launcher.planner.arguments:decide_runtime",),
        signs=(r"Setting OMP_NUM_THREADS environment variable for each process to be 1\b",),
    ),
    Failure(
        id="tokenizers-fork",
        title="tokenizer threads and forked DataLoader workers",
        cause="DataLoader workers are forked after the tokenizer has used threads. The tokenizer disables "
        "parallelism with a warning, or deadlocks.",
        fix="set TOKENIZERS_PARALLELISM=false, as the plan does",
        source="huggingface/tokenizers TOKENIZERS_PARALLELISM",
        places=("worker launcher.planner.arguments:decide_runtime",),
        signs=(r"The current process just got forked, after parallelism has already been used",),
    ),
    Failure(
        id="notebook-cuda-init",
        title="CUDA was initialised before forking",
        cause="A process that has used CUDA cannot fork workers that use it: an earlier notebook cell, a "
        "DataLoader, or a map with several processes.",
        fix="start training from the command line: `effilaunch run RECIPE`",
        source="accelerate/launchers.py notebook_launcher",
        places=("none runs are started as new processes, never from a notebook's",),
        patterns=(
            r"has been initialized before the `{1,2}notebook_launcher`{1,2} could create a forked subprocess",
            r"the `Accelerator` should only be initialized inside",
            r"Cannot re-initialize CUDA in forked subprocess",
        ),
    ),
    Failure(
        id="sigkill-oom",
        title="the host ran out of memory",
        cause="The kernel or the scheduler killed a process with SIGKILL, or a host allocation failed. Every "
        "rank loads the model, and offload keeps optimizer states and weights in host memory.",
        fix="give the job more host memory, use fewer ranks per node, or offload less "
        "(sharding.offload_optimizer: none, sharding.offload_param: none)",
        source="deepspeed/launcher/launch.py; torch/distributed/elastic/multiprocessing/errors",
        places=(
            "refusal does-not-fit",
            "worker launcher.planner.planner:_host_warnings",
            "doctor host-memory",
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


_WARNING = "worker launcher.schedulers.slurm_script:warning_seconds"
_REQUEUE = "worker launcher.schedulers.slurm_requeue:decide"

SLURM = (
    Failure(
        id="slurm-time-limit",
        title="the job reached its time limit",
        cause="Slurm ended the job at its time limit. Progress since the last checkpoint is lost unless the "
        "job requested a signal (--signal) and saved on it.",
        fix="`effilaunch submit` requests the signal, saves and resumes; in your own script use `#SBATCH "
        "--signal=USR1@180` and `--resume auto`, or request more time",
        source="slurm/src/slurmd/slurmstepd/req.c _handle_terminate; `man sbatch`, --time and --signal",
        places=(_WARNING, _REQUEUE, "refusal slurm-time"),
        patterns=(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO TIME LIMIT",),
    ),
    Failure(
        id="slurm-preempted",
        title="the job was preempted",
        cause="A job with higher priority needed the nodes, and this one did not end within the partition's "
        "grace time. Slurm requeues only preempted jobs that allow it.",
        fix="`effilaunch submit` saves on the signal and requeues; in your own script use `#SBATCH "
        "--requeue` and `--resume auto`",
        source="slurm/src/slurmctld/preempt.c; `man slurm.conf`, PreemptMode and GraceTime",
        places=(_REQUEUE,),
        patterns=(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO PREEMPTION",),
    ),
)


_ENGINE = "refusal parallel-engine"
_HEADS = "refusal parallel-heads"
_CONFLICT = "refusal parallel-conflict"
_TRAINER = "worker launcher.train.tasks.task:trainer_class"

PARALLEL = (
    Failure(
        id="sequence-parallel-gradients",
        title="gradients of sequence parallelism are too large",
        cause="transformers computes the Ulysses loss on every rank from the losses of all ranks, and "
        "DeepSpeed stages 0 to 2 sum the gradients over ranks: they are sp_size times too large. Clipping "
        "and Adam hide it; there is no error.",
        fix="use `effilaunch run`, which computes each rank's part of the loss; otherwise divide the loss by "
        "sp_size below ZeRO-3",
        source="transformers/integrations/deepspeed.py deepspeed_sp_compute_loss; "
        "deepspeed/runtime/zero/stage_1_and_2.py average_tensor",
        versions="transformers>=5",
        places=(_TRAINER,),
    ),
    Failure(
        id="sequence-parallel-positions",
        title="sequence parallelism without position_ids",
        cause="Ranks that share a sequence gather position_ids for causal masking. A batch without them "
        "would be treated as packed documents.",
        fix="return position_ids from the collator, or use `effilaunch run`, which does",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter, forward",
        places=("worker launcher.train.engines.sequence:part_of",),
        patterns=(r"Ulysses SP requires `?position_ids`? in every",),
    ),
    Failure(
        id="sequence-not-divisible",
        title="sequence length not divisible by sp_size",
        cause="Each rank of a sequence-parallel group takes an equal part of the tokens.",
        fix="set data.max_length to a multiple of sp_size; shorter samples are padded to it",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter.refill",
        places=("refusal parallel-length",),
        patterns=(r"batch's seqlen=\d+ isn't divisible by sp-size=\d+",),
    ),
    Failure(
        id="heads-not-divisible",
        title="attention heads not divisible by the ranks",
        cause="Tensor and sequence parallelism assign the same number of heads to each rank.",
        fix="choose a sharding.tp_size or sharding.sp_size that divides the attention heads and the "
        "key-value heads",
        source="deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF; "
        "transformers/distributed/tensor_parallel.py",
        places=(_HEADS,),
        patterns=(r"[Aa]ttention head count \d+ is not divisible by SP size \d+",),
    ),
    Failure(
        id="tensor-parallel-no-model",
        title="AutoTP saves no model",
        cause="accelerate gathers AutoTP's shards only if stage3_gather_16bit_weights_on_model_save is set, "
        "at any stage. Otherwise the Trainer saves DeepSpeed states instead of model.safetensors.",
        fix="set the key in zero_optimization, as `effilaunch run` does",
        source="accelerate/accelerator.py get_state_dict; transformers/trainer.py save_model",
        places=("worker launcher.engines.deepspeed_config:render_ds_config",),
    ),
    Failure(
        id="tensor-parallel-resume",
        title="checkpoints of a tensor-parallel transformers model",
        cause="Optimizer states of weights that transformers sharded are not saved, so the Trainer refuses "
        "to write checkpoints that cannot be resumed.",
        fix="use sharding.engine: deepspeed (AutoTP supports it), or trainer.save_only_model: true",
        source="transformers/trainer.py __init__ (is_distributed_loading_by_transformers)",
        versions="transformers>=5",
        places=(_ENGINE,),
        patterns=(r"Resuming is not supported for models sharded at load time",),
    ),
    Failure(
        id="tensor-parallel-plan",
        title="model without a tensor-parallel plan",
        cause="transformers shards layers by the tp_plan of the configuration class, which is missing here.",
        fix="remove sharding.tp_size: ZeRO-3 and engine fsdp shard any model",
        source="transformers/distributed/mixin.py _resolve_parallel_plans",
        places=("refusal parallel-model",),
        patterns=(r"`tp_size=\d+` was requested, but `\w+` has no `tp_plan`",),
    ),
    Failure(
        id="tensor-parallel-adapter",
        title="adapter on tensor-parallel weights",
        cause="peft creates unsharded adapter matrices beside sharded layers: with transformers' tp_plan the "
        "shapes differ in the first forward pass, and AutoTP does not find the layers.",
        fix="train the adapter under ZeRO-3 or engine fsdp, which shard the frozen base",
        source="peft/tuners/lora/layer.py Linear.forward; deepspeed/module_inject/auto_tp.py",
        places=(_CONFLICT,),
    ),
    Failure(
        id="tensor-parallel-copies",
        title="replicas of a tensor-parallel transformers model",
        cause="accelerate combines tensor and context parallelism with FSDP, not with DDP.",
        fix="use sharding.engine: deepspeed for replicas, or set tp_size to the number of devices",
        source="accelerate/parallelism_config.py __post_init__",
        places=(_ENGINE,),
        patterns=(r"Tensor/Context parallelism \(tp/cp_size > 1\) cannot be used with pure data",),
    ),
    Failure(
        id="parallelism-combined",
        title="context and sequence parallelism together",
        cause="Both split the tokens of each sample over ranks.",
        fix="keep one: sharding.sp_size (deepspeed) or sharding.cp_size (fsdp)",
        source="accelerate/parallelism_config.py __post_init__",
        places=("refusal parallel-combination",),
        patterns=(r"Context Parallelism \(CP\) and Sequence Parallelism \(SP\) are mutually exclusive",),
    ),
    Failure(
        id="parallelism-processes",
        title="parallel sizes do not match the processes",
        cause="The product of all parallel sizes is not the number of processes, or the processes run on "
        "CPUs, where accelerate supports neither tensor nor context parallelism.",
        fix="choose sizes that divide the number of devices; on CPUs use sharding.engine: deepspeed",
        source="accelerate/parallelism_config.py _validate_accelerator",
        places=("refusal parallel-devices", "refusal engine-mismatch"),
        patterns=(
            r"ParallelismConfig total_size \(\d+\) does not match num_processes",
            r"ParallelismConfig is only compatible DistributedType",
        ),
    ),
    Failure(
        id="context-parallel-attention",
        title="context parallelism without SDPA on GPUs",
        cause="torch's ring attention replaces the SDPA kernels on GPUs; other attention implementations and "
        "CPUs are not supported.",
        fix="set model.attn_implementation: sdpa on GPUs, or use sharding.sp_size",
        source="transformers/trainer.py _prepare_context_parallel_inputs; "
        "torch/distributed/tensor/experimental/_context_parallel",
        places=(_ENGINE, _CONFLICT),
        patterns=(
            r"Context parallelism is supported only with SDPA attention",
            r"Operator aten\._scaled_dot_product_flash_attention_for_cpu\.default does not have a sharding "
            r"strategy",
        ),
    ),
    Failure(
        id="tensor-parallel-data",
        title="ranks of one replica read different rows",
        cause="Tensor-parallel ranks must process the same rows; AutoTP checks the first batch.",
        fix="give all ranks of a replica the same rows, as `effilaunch run` does",
        source="deepspeed/runtime/engine.py check_dataloader_inputs_same_across_ranks",
        places=("worker launcher.train.job:copies", _CONFLICT),
        patterns=(r"Data inconsistency within the TP group",),
    ),
    Failure(
        id="pipeline-parallel",
        title="pipeline parallelism",
        cause="DeepSpeed's pipeline parallelism needs a PipelineModule, which no transformers model is; "
        "otherwise its config section has no effect.",
        fix="use sharding.tp_size, sharding.zero_stage: 3 or engine fsdp",
        source="deepspeed/runtime/pipe/module.py; deepspeed/__init__.py initialize",
        places=("refusal profile-parallel", "refusal unsupported"),
    ),
    Failure(
        id="one-bit-optimizer",
        title="1-bit Adam, 0/1 Adam and 1-bit LAMB",
        cause="DeepSpeed removed them; earlier releases refused them with ZeRO-2 and ZeRO-3.",
        fix="use AdamW, whose states ZeRO shards",
        source="deepspeed/runtime/engine.py _configure_basic_optimizer",
        places=("lint ds-optimizer-type",),
    ),
)  # fmt: skip
