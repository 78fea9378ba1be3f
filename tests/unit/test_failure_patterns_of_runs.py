"""Patterns of launching, data, saving, memory and the hub: each spelling is known, what is near is not."""

from __future__ import annotations

import re

from every import every

from launcher.knowledge.diagnose.device_memory import CONDITIONS
from launcher.knowledge.failures.catalogue import CHAPTERS
from launcher.recipe.field_tables import trainer_fields

READ = ("Launching", "Data", "Resuming and saving", "Memory", "Trackers, hub, caches", "Installed packages")
ENTRIES = [failure for chapter in READ for failure in CHAPTERS[chapter]]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 2 has a total capacity of "
    "14.61 GiB of which {} GiB is free. Including non-PyTorch memory, this process has {} GiB memory in "
    "use. Of the allocated memory {} GiB is allocated by PyTorch, and {} GiB is reserved by PyTorch "
    "but unallocated."
)
CALLS = "\n  File a/trainer.py, line 1, in {}\n  File b.py, line 2, in train"

SPELLINGS = {
    "port-in-use": [
        "The server socket has failed to listen on any local network address. port: 29500, code: -98, "
        "name: EADDRINUSE, message: address already in use",
        "Tried to launch distributed communication on port `29500`, but another process is utilizing it.",
        "OSError: [Errno 98] Address already in use",
    ],
    "rendezvous-unreachable": [
        "The client socket has timed out after 60s while trying to connect to (node01, 29500).",
        "The client socket has failed to connect to any network address of (node01, 29500).",
        "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception",
        "RuntimeError: connect() timed out. Original timeout was 60000 ms.",
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ],
    "illegal-access": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "CUDA error: an illegal memory access was encountered",
    ],
    "dataset-generation": [
        "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
    ],
    "torch-load-refused": [
        "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we"
    ],
    "optimizer-other-weights": [
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of "
        "optimizer's group",
        "ValueError: loaded state dict has a different number of parameter groups",
    ],
    "hub-token": [
        "HfHubHTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2",
        "HfHubHTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/a/b/resolve/main/x",
        "HTTPError: Invalid user token. If you didn't pass a user token, make sure you are properly logged",
        "HTTPError: 403 Client Error: Forbidden for url: https://huggingface.co/api/models/a/b/commit/main",
        '403 Forbidden: You don\'t have the rights to create a model under the namespace "a".',
        "Invalid credentials in Authorization header",
    ],
    "hub-rate-limit": [
        "HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/a/b",
        "OSError: There was a specific connection error when trying to load a/b:\n429 Client Error: Too Many "
        "Requests for url: https://huggingface.co/a/b/resolve/main/config.json",
        "Reqwest Error: HTTP status client error (429 Too Many Requests), domain: https://huggingface.co",
    ],
    "tokenizer-too-new": [
        "Exception: data did not match any variant of untagged enum ModelWrapper at line 12 column 3",
        "Exception: data did not match any variant of untagged enum PyPreTokenizerTypeWrapper at line 4",
        "ValueError: Tokenizer class NewTokenizer does not exist or is not currently imported.",
        "AttributeError: 'list' object has no attribute 'keys'\n  File /v/transformers/tokenization_utils"
        "_base.py, line 1190, in _set_model_specific_special_tokens",
    ],
    "package-missing": [
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error",
        "AssertionError: Flash Attention is not available, but is needed for dense attention",
        "ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=0.26.0`: Please run `pip",
        "ImportError: Using `bitsandbytes` 4-bit quantization requires the latest version of bitsandbytes",
        "ModuleNotFoundError: No module named 'flash_attn'",
    ],
    "version-clash": [
        "ImportError: cannot import name 'is_flash_attn_available' from 'transformers.utils' (/x/y.py)",
        "ModuleNotFoundError: No module named 'torch._six'",
        "ModuleNotFoundError: No module named 'transformers.models.gone'",
        "ImportError: transformers>=4.36.2 is required for a normal functioning of this module, but found",
        "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C",
        "ModuleNotFoundError: No module named 'triton.ops'",
        "ModuleNotFoundError: No module named 'triton.ops.matmul_perf_model'",
        "ImportError: Found an incompatible version of torchao. Found version 0.10.0, but only",
        "TypeError: Accelerator.unwrap_model() got an unexpected keyword argument 'keep_torch_compile'",
        "ImportError: cannot import name 'GuidedDecodingParams' from 'vllm.sampling_params' (/v/vllm/x.py)",
    ],
    "no-kernel-image": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: CUDA error: invalid device function",
        "RuntimeError: HIP error: invalid device function",
    ],
    "driver-too-old": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "CUDA driver version is insufficient for CUDA runtime version",
    ],
    "include-and-num-gpus": ["ValueError: Cannot specify num_nodes/gpus with include/exclude"],
    "include-bad-slot": ["No slot '7' specified on host 'localhost'", "CUDA error: invalid device ordinal"],
    "no-gpu": [
        "RuntimeError: Unable to proceed, no GPU resources available",
        "No CUDA GPUs are available",
        "fp16 mixed precision requires a GPU",
        "fp16 mixed precision requires a GPU (not 'cpu').",
    ],
    "local-rank-arg": ["train.py: error: unrecognized arguments: --local_rank=0"],
    "plain-python-deepspeed": ["ModuleNotFoundError: No module named 'mpi4py'"],
    "accelerate-flags": [
        "You can only use one of `--cpu`, `--multi_gpu`, `--tpu`, `--use_deepspeed`, `--use_fsdp` at a time.",
        "You need to use at least 2 processes to use `--multi_gpu`.",
    ],
    "pdsh-missing": ["RuntimeError: launcher 'pdsh' not installed."],
    "hostfile": [
        "ValueError: Hostfile contains a bad entry: a b c, unable to proceed with launching",
        "host=n1 was not reachable via ssh. If you are running with a single node please remove it",
    ],
    "socket-interface": [
        "RuntimeError: Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:39846$0",
        "RuntimeError: [enforce fail at /x/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ib9",
        "NCCL WARN Bootstrap : no socket interface found",
    ],
    "nccl-timeout": [
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=875, OpType=ALLREDUCE)",
        "Timed out waiting 1800000ms for recv operation to complete",
        "Timeout at NCCL work: 60, last enqueued NCCL work: 90, last completed NCCL work: 59.",
    ],
    "rtx40-p2p": ["Using RTX 4000 series doesn't support faster communication broadband via P2P or IB."],
    "notebook-cuda-init": [
        "CUDA has been initialized before the `notebook_launcher` could create a forked subprocess.",
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess.",
    ],
    "sigkill-oom": [
        "[launch.py:325:sigkill_handler] ['python', '-u', 'train.py'] exits with return code = -9",
        "failed (exitcode: -9) local_rank: 2 (pid: 12) of binary: /usr/bin/python3",
        "  exitcode  : -9 (pid: 12)",
        "  traceback : Signal 9 (SIGKILL) received by PID 12",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.",
        "slurmstepd: error: Detected 2 oom-kill events in StepId=1.batch.",
        "Killed",
        "run.sh: line 4:  812 Killed                  python train.py",
        "RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed.",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
        "Your session crashed after using all available RAM.",
    ],
    "pad-token-missing": [
        "Asking to pad but the tokenizer does not have a padding token. Please select a token",
        "ValueError: Cannot handle batch sizes > 1 if no padding token is defined.",
    ],
    "truncation-silent": [
        "IndexError: index out of range in self\n  File functional.py, line 2, in embedding\n"
        "  File modeling_gpt2.py, line 600, in forward\n    position_embeds = self.wpe(position_ids)"
    ],
    "ragged-labels": [
        "Perhaps your features (`labels` in this case) have excessive nesting (inputs type `list`)",
        "ValueError: expected sequence of length 5 at dim 1 (got 7)",
    ],
    "columns-removed": [
        "No columns in the dataset match the model's forward method signature: (input_ids, labels).",
        "The batch received was empty, your model won't be able to train on it.",
    ],
    "no-loss": [
        "ValueError: The model did not return a loss from the inputs, only the following keys: logits."
    ],
    "iterable-max-steps": ["The train_dataset does not implement __len__, max_steps has to be specified."],
    "zero-steps": [
        "There seems not to be a single sample in your epoch_iterator, stopping training at step 0!"
    ],
    "token-id-range": [
        "IndexError: index out of range in self",
        "Indexing.cu:1290: indexSelectSmallIndex: Assertion `srcIndex < srcSelectDimSize` failed.",
    ],
    "chat-template-missing": [
        "Cannot use chat template functions because tokenizer.chat_template is not set and no template"
    ],
    "eval-without-dataset": [
        "`args.eval_strategy` to steps but you didn't pass an `eval_dataset` to `Trainer`."
    ],
    "rng-weights-only": [
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded\n"
        "  File /v/transformers/trainer.py, line 3867, in _load_rng_state"
    ],
    "zero-world-size": [
        "The checkpoint being loaded used a DP world size of 2 but the current world size is 4. Automatic "
        "adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported."
    ],
    "zero-stage-change": [
        "AssertionError\n  File a.py, line 169, in check_ckpt_list\n  File b.py, line 1, in x"
    ],
    "save-only-model-resume": ["ValueError: Can't find a valid checkpoint at runs/a/checkpoint-5"],
    "save-only-model-best": [
        "DeepSpeed can't be used with `save_only_model` along with `load_best_model_at_end`."
    ],
    "no-checkpoint": ["ValueError: No valid checkpoint found in output directory (runs/a)"],
    "best-strategy": [
        "--load_best_model_at_end requires the save and eval strategy to match, except when",
        "--load_best_model_at_end requires the saving steps to be a round multiple of the evaluation steps",
    ],
    "peft-prompt-best": [
        "RuntimeError: When using prompt learning PEFT methods such as PREFIX_TUNING, setting "
        "load_best_model_at_end=True can lead to errors",
    ],
    "plain-python-multigpu": ["RuntimeError: Caught RuntimeError in replica 1 on device 1."],
    "best-metric": [
        "The `metric_for_best_model` training argument is set to 'eval_f1', which is not found in the "
        "evaluation metrics."
    ],
    "shared-tensors": ["Some tensors share memory, this will lead to duplicate memory on disk"],
    "checkpoint-disk": [
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 122] Disk quota exceeded: 'runs/a'",
        "OSError: [Errno 122] Disk quota exceeded: '/home/user/.cache/runs/checkpoint-500/optimizer.pt'",
    ],
    "cuda-oom": [
        OOM,
        "RuntimeError: CUDA error: out of memory",
        "OutOfMemoryError: the hook says so",
        "RuntimeError: MPS backend out of memory (MPS allocated: 11.14 GB, max allowed: 18.13 GB).",
    ],
    "oom-fragmentation": [FULL.format(3.91, 1.99, 12.62, 8.5, 3.96)],
    "gpu-in-use": [FULL.format(0.9, 0.46, 1.9, 0.95, 0.77)],
    "logits-oom": [OOM + CALLS.format("cross_entropy")],
    "eval-oom": [OOM + CALLS.format("evaluation_loop")],
    "whole-model-oom": [OOM + CALLS.format("_configure_distributed_model")],
    "auto-batch-eval-oom": [
        "RuntimeError: Evaluation hit an out-of-memory error. `auto_find_batch_size` only"
    ],
    "wandb-login": ["wandb.errors.UsageError: No API key configured. Use `wandb login` to log in."],
    "wandb-unreachable": [
        'wandb.errors.errors.CommError: Timed out while retrying: Post "http://127.0.0.1:9/graphql": dial tcp'
    ],
    "report-to-unknown": ["ValueError: foo is not supported, only azure_ml, comet_ml, mlflow are supported."],
    "hub-unreachable": [
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them",
        "Cannot find the requested files in the disk cache and outgoing traffic has been disabled.",
        "ConnectionError: Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)",
        "504 Server Error: Gateway Time-out for url: https://huggingface.co/api/datasets/a/b",
    ],
    "hub-gated": [
        "OSError: You are trying to access a gated repo.",
        "Dataset 'a/b' is a gated dataset on the Hub. Visit the dataset page",
    ],
    "hub-bad-path": [
        "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/a/b/c'."
    ],
    "shared-memory-full": [
        "unable to write to file </torch_12_34_5>: No space left on device (28)",
        "Error while creating shared memory segment /dev/shm/nccl-a (size 1): No space left on device (28)",
        "RuntimeError: DataLoader worker (pid 37) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        "RuntimeError: DataLoader worker (pid(s) 37, 38) is killed by signal: Bus error.",
    ],
    "nccl-system-error": [
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1333, unhandled "
        "system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    ],
    "nccl-error": [
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1333, unhandled "
        "cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6",
        "ncclInternalError: Internal check failed.",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ],
    "nccl-duplicate-gpu": ["Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"],
    "label-out-of-range": [
        "Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: Assertion `t >= 0 && t < n_classes` failed.",
        "IndexError: Target 2 is out of bounds.",
    ],
    "device-assert": ["RuntimeError: CUDA error: device-side assert triggered"],
    "remote-code": [
        "The repository a/b contains custom code which must be executed to correctly load the model.",
        "ValueError: Loading a/b requires you to execute the configuration file in that repo on your "
        "local machine.",
        "EOFError: EOF when reading a line\n  File /v/dynamic_module_utils.py, line 600, in "
        "resolve_trust_remote_code",
    ],
    "dataset-script": ["RuntimeError: Dataset scripts are no longer supported, but found rows.py"],
    "weights-file-broken": [
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "_pickle.UnpicklingError: Weights only load failed. Re-running `torch.load` with "
        "weights_only\nPlease file an issue: invalid load key, 'v'.",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    ],
    "training-args-gone": [
        "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'",
        "TypeError: __init__() got an unexpected keyword argument 'eval_strategy'",
        "TypeError: Seq2SeqTrainingArguments.__init__() got an unexpected keyword argument 'my_own'",
        "TypeError: SFTConfig.__init__() got an unexpected keyword argument 'evaluation_strategy'",
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--no_cuda', 'True']",
        "train.py: error: unrecognized arguments: --overwrite_output_dir",
        "AttributeError: 'TrainingArguments' object has no attribute 'evaluation_strategy'",
    ],
    "trainer-args-moved": [
        "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'",
        "TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'max_seq_length'",
        "TypeError: DPOTrainer.__init__() got an unexpected keyword argument 'beta'",
        "TypeError: DPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'",
        "TypeError: __init__() got an unexpected keyword argument 'dataset_text_field'",
    ],
    "model-type-unknown": [
        "ValueError: The checkpoint you are trying to load has model type `a` but Transformers does not "
        "recognize this architecture.",
        "ValueError: Unrecognized model in /a/b. Should have a `model_type` key in its config.json",
        "KeyError: 'qwen3'\n  File /venv/transformers/models/auto/configuration_auto.py, line 672, in "
        "__getitem__",
    ],
    "tokenizer-packages": [
        "ImportError: \n requires the protobuf library but it was not found in your environment.",
        "LlamaTokenizer requires the SentencePiece library but it was not found in your environment.",
        "You need to have sentencepiece or tiktoken installed to convert a slow tokenizer to a fast one.",
        "ValueError: `tiktoken` is required to read a `tiktoken` file.",
        "ModuleNotFoundError: No module named 'sentencepiece'",
        "ValueError: This tokenizer cannot be instantiated. Please make sure you have `sentencepiece` "
        "installed in order to use this tokenizer.",
        "ImportError: cannot import name 'builder' from 'google.protobuf.internal' (/v/__init__.py)",
    ],
    "tokenizer-file-broken": [
        "ValueError: Converting from Tiktoken failed, if a converter for SentencePiece is available, provide "
        "a model path with a SentencePiece tokenizer.model file.Currently available converters: ['A']",
        "ValueError: Converting from SentencePiece and Tiktoken failed, if a converter for SentencePiece is "
        "available, provide a model path",
        "ValueError: Error parsing line b'version https://git-lfs.github.com/spec/v1' in m/tokenizer.model\n"
        "  File /v/tiktoken/load.py, line 170, in load_tiktoken_bpe",
    ],
    "extension-abi": [
        "ImportError: /v/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c104cuda9SetDeviceEi",
        "ImportError: /v/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "RuntimeError: operator torchvision::nms does not exist",
    ],
    "glibc-too-old": ["ImportError: /lib64/libc.so.6: version `GLIBC_2.32' not found (required by /v/a.so)"],
    "triton-no-compiler": [
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        "torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found in "
        "torch._inductor.config.cpp.cxx",
        "/tmp/t/main.c:5:10: fatal error: Python.h: No such file or directory",
        "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/t/main.c', '-lcuda', "
        "'-I/v/triton/include']' returned non-zero exit status 1.",
    ],
    "triton-compile": [
        "triton.compiler.errors.CompilationError: at 114:24:",
        "CompilationError: at 114:24:\n  File ~/triton/compiler/code_generator.py, line 1159, in x",
        "RuntimeError: `ptxas` failed with error code 4294967295: ",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, Hardware "
        "limit: 101376",
        "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
        "RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
    ],
    "xformers-operator": [
        "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:",
    ],
    "cache-disk": [
        "UserWarning: Not enough free disk space to download the file.",
        "OSError: [Errno 122] Disk quota exceeded: '/home/user/.cache/huggingface/hub/models--a--b/blobs/c'",
        "OSError: [Errno 28] No space left on device: '/data/hf/hub/models--a--b/snapshots/c/config.json'",
        "OSError: [Errno 122] Disk quota exceeded: '/home/user/.triton/cache/1f/tmp.pid_7'",
        "OSError: [Errno 122] Disk quota exceeded: '/tmp/torchinductor_user/abc/cabc.py'",
        "OSError: [Errno 122] Disk quota exceeded: '/home/user/.cache/torch_extensions/py311_cu126/lock'",
        "OSError: [Errno 122] Disk quota exceeded\n  File /venv/triton/runtime/cache.py, line 140, in put",
        "RuntimeError: Data processing error: CAS service error : IO Error: Disk quota exceeded\n"
        "  File /venv/huggingface_hub/file_download.py, line 500, in xet_get",
    ],
    "nccl-peer-died": [
        "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5",
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
        "key-value store by key '0', but store->get('0') got error: Connection reset by peer",
    ],
    "gpu-ecc": [
        "CUDA error: uncorrectable ECC error encountered",
        "NVRM: Xid (PCI:0000:3b:00): 94, pid=2817, name=python, Contained: SM (0x1). RST: No",
    ],
    "fabric-manager": ["RuntimeError: CUDA driver error: system not yet initialized"],
    "gpu-operation-not-supported": ["RuntimeError: CUDA error: operation not supported"],
    "gpu-faulty": [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=2817, name=python, GPU has fallen off the bus.",
        "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error",
    ],
    "image-tokens-differ": [
        "ValueError: Image features and image tokens do not match: tokens: 0, features 1972",
        "ValueError: Image features and image tokens do not match, tokens: 2, features: 4",
        "Mismatch in `image` token count between text and `input_ids`. Got ids=[1] and text=[2].",
    ],
    "dataset-columns-differ": [
        "datasets.exceptions.DatasetGenerationCastError: An error occurred while generating the dataset",
        "TypeError: Couldn't cast array of type struct<name: string> to int64",
        "pyarrow.lib.ArrowInvalid: JSON parse error: Column(/label) changed from number to object in row 3",
    ],
    "segmentation-fault": [
        "failed (exitcode: -11) local_rank: 1 (pid: 5016)",
        "Segmentation fault (core dumped)",
    ],
    "terminal-closed": [
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 1"
    ],
    "paging-file": ["OSError: The paging file is too small for this operation to complete. (os error 1455)"],
    "kernel-died": [
        "nbclient.exceptions.DeadKernelError: Kernel died",
        "The Kernel crashed while executing code in the current cell or a previous cell.",
    ],
    "cublas-error": [
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m`"
    ],
    "grpo-batch": [
        "The global train batch size (1 x 4) must be evenly divisible by the number of "
        "generations per prompt (8)",
        "The global eval batch size (4 * 1) must be divisible by the number of generations used",
    ],
    "chat-roles-alternate": [
        "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/user/assistant/..."
    ],
    "config-module-pickle": ["TypeError: cannot pickle 'ConfigModuleInstance' object"],
    "hub-xet": [
        "RuntimeError: Data processing error: CAS service error : ReqwestMiddleware Error: Request failed"
    ],
    "libuv-missing": [
        "DistStoreError: use_libuv was requested but PyTorch was built without libuv support, run with"
    ],
    "model-class-mismatch": [
        "ValueError: Unrecognized configuration class <class 'ViTConfig'> for this kind of AutoModel: A"
    ],
    "numpy-2": ["AttributeError: _ARRAY_API not found"],
    "remote-code-old": [
        "AttributeError: 'DynamicCache' object has no attribute 'get_max_length'. Did you mean"
    ],
    "too-many-files": ["OSError: [Errno 24] Too many open files: 'rows.txt'"],
}

NOTHING_WRONG = [
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "Unable to find hostfile, will proceed with training with local resources only.",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used.",
    "Token indices sequence length is longer than the specified maximum sequence length (600 > 512)",
    "The following arguments do not match the ones in the `trainer_state.json` within the checkpoint",
    "Detected VISIBLE_DEVICES=0,1 but ignoring it because one or several of --include/--exclude",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "size mismatch for classifier.weight: copying a param with shape torch.Size([2, 8]) from checkpoint",
    "srun: error: node01: task 0: Killed",
    "slurmstepd: error: *** JOB 1 ON node01 CANCELLED AT 2026-01-01T00:00:00 ***",
    "[launch.py:319:sigkill_handler] Killing subprocess 102265",
    "exits with return code = -15",
    "exitcode  : 1 (pid: 12)",
    "/usr/lib/libfoo.so.1: no version information available (required by python)",
    "GLIBC 2.31, glibcxx 3.4.28",
    "Loading mine requires custom code; trust_remote_code=True is set",
    "NCCL INFO NCCL_DEBUG set by environment to INFO; ncclCommInitRank complete",
    "WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions. xFormers was built for: PyTorch 2.1.0+cu121",
    "The tokenizer class you load from this checkpoint is not the same type as the class this function is "
    "called",
    "You are using a model of type llama to instantiate a model of type mine. This is not supported for all",
    "skipping cudagraphs due to cpu device; triton kernels are autotuned (out of 8 configs)",
    "TypeError: MyTrainer.__init__() got an unexpected keyword argument 'gamma'",
    "TypeError: Config.__init__() got an unexpected keyword argument 'beta'",
    "IndexError: Dimension out of range (expected to be in range of [-1, 0], but got 1)",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "/usr/include/x.cuh:12: warning: assertion is always true",
    "UserWarning: Unable to fetch remote file due to the following error 403 - Cannot access gated repo",
    "pytorch allocator cache flushes since last step. this happens when there is high memory pressure",
    "IndexError: list index out of range",
    "500 Server Error: Internal Server Error for url: https://example.org/model",
    "429 Client Error: Too Many Requests for url: https://example.org/model",
    "HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/a/b/resolve/main/config.json",
    "ImportError: cannot import name 'helper' from 'utils' (/home/u/utils.py)",
    "ImportError: cannot import name 'LoraConfig' from partially initialized module 'peft' (most likely due",
    "ModuleNotFoundError: No module named 'my_trainer'",
    "[c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97)",
]


def matches(text):
    """Ids of the failures of which a pattern fits the text, with the length of the longest fit."""
    found = {}
    for failure in ENTRIES:
        for pattern in failure.patterns:
            hit = re.search(pattern, text)
            if hit and CONDITIONS.get(failure.id, bool)(text):
                found[failure.id] = max(found.get(failure.id, 0), hit.end() - hit.start())
    return found


@every(("name", "text"), [(name, text) for name, texts in SPELLINGS.items() for text in texts])
def test_a_spelling_is_known_and_fits_its_own_failure_best(name, text):
    found = matches(text)
    assert name in found
    assert max(found, key=found.__getitem__) == name


@every("text", NOTHING_WRONG)
def test_what_healthy_or_other_runs_print_is_no_failure(text):
    assert matches(text) == {}


def test_every_failure_with_patterns_has_a_spelling_here():
    """Our own messages are matched too, but come from our own tests."""
    own = {"exit-code-lost", "labels-all-masked"}
    assert {failure.id for failure in ENTRIES if failure.patterns} - own == set(SPELLINGS)


GONE = (
    "evaluation_strategy no_cuda use_mps_device per_gpu_train_batch_size per_gpu_eval_batch_size "
    "overwrite_output_dir logging_dir fp16_backend fp16_opt_level half_precision_backend "
    "push_to_hub_model_id push_to_hub_organization push_to_hub_token use_ipex sharded_ddp "
    "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap tpu_metrics_debug tpu_num_cores torchdynamo "
    "adafactor group_by_length include_inputs_for_metrics include_tokens_per_second jit_mode_eval "
    "dispatch_batches split_batches save_safetensors past_index ray_scope warmup_ratio mp_parameters "
    "xpu_backend evaluate_during_training"
)


@every("name", GONE.split())
def test_a_field_that_is_called_gone_is_gone(name):
    assert name not in trainer_fields()
    text = f"TypeError: __init__() got an unexpected keyword argument '{name}'"
    assert set(matches(text)) == {"training-args-gone"}
