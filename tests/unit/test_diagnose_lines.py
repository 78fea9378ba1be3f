"""Lines that are no errors: what is noticed in a run that went on, and what explains an error elsewhere."""

from __future__ import annotations

import io
import json

import pytest

from launcher.knowledge.diagnose.examine import Examination
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.machine.hardware import parse_hardware
from launcher.planner.adapting import is_out_of_memory
from launcher.report.diagnosis_sections import diagnosis_text

SIGNS = {
    "max-steps-wins": "max_steps is given, it will override any value given in num_train_epochs",
    "resume-args-drift": "Warning: The following arguments do not match the ones in the `trainer_state.json` "
    "within the checkpoint directory: ",
    "wandb-disabled-gone": "Using the `WANDB_DISABLED` environment variable is deprecated",
    "cache-var-gone": "hub.py:111: Using `TRANSFORMERS_CACHE` is deprecated and will be removed",
    "report-to-default": "The default value for the training argument `--report_to` will change in v5",
    "cvd-ignored": "Detected VISIBLE_DEVICES=3 but ignoring it because one or several",
    "omp-threads": "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
    "tokenizers-fork": "huggingface/tokenizers: The current process just got forked, after parallelism has "
    "already been used. Disabling parallelism to avoid deadlocks...",
    "truncation-silent": "Token indices sequence length is longer than the specified maximum sequence length",
    "bnb-defaults-slow": "bnb_4bit_compute_dtype=torch.float32 (default). This will lead to slow inference",
    "checkpointing-renamed": "`gradient_checkpointing` is deprecated and will be removed in v6.",
    "fsdp-4bit-storage": "Found 14 non-floating frozen Params4bit. Excluding from FSDP2 sharding",
    "tied-weights-adapter": "Model has a tied layer, but `ensure_weight_tying` is not set to True.",
    "use-cache-checkpointing": "`use_cache=True` is incompatible with gradient checkpointing. Setting",
    "kbit-reentrant": "UserWarning: the use_reentrant parameter should be passed explicitly.",
    "zero3-no-gather": "stage3_gather_16bit_weights_on_model_save=false. Saving the full checkpoint instead",
    "resized-embeddings-lost": "will assume that the vocabulary was not modified.",
    "labels-all-masked": "This instance will be ignored in loss calculation. Note, if this happens often,",
}
"""As the libraries of the catalogue's versions, or of those before, say it."""
NO_WEIGHTS = "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory final."


def see(text):
    examination = Examination(FAILURES)
    examination.read(io.BytesIO(text.encode()), "log", None)
    return examination.verdict()


def ids(findings):
    return [finding.failure.id for finding in findings]


def test_each_sign_has_a_line_here():
    assert set(SIGNS) == {failure.id for failure in FAILURES if failure.signs}


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_is_noticed_and_is_no_failure(name):
    diagnosis = see(f"starting\n[transformers] {SIGNS[name]}\n{{'loss': 2.5}}\n")
    assert ids(diagnosis.noticed) == [name]
    assert (diagnosis.findings, diagnosis.unknown) == ([], [])
    assert diagnosis.noticed[0].error.line == 2


def test_beside_a_failure_nothing_is_noticed():
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    diagnosis = see(f"{SIGNS['omp-threads']}\n{error}\n")
    assert (ids(diagnosis.findings), diagnosis.noticed) == (["cuda-oom"], [])
    assert (
        see(
            f'{SIGNS["omp-threads"]}\nTraceback (most recent call last):\n  File "a.py", line 1, in b\n'
        ).noticed
        == []
    )


def test_what_is_noticed_is_said_once_and_after_the_verdict():
    diagnosis = see(
        SIGNS["omp-threads"] + "\n" + SIGNS["max-steps-wins"] + "\n" + SIGNS["omp-threads"] + "\n"
    )
    text = diagnosis_text(diagnosis)
    assert text.startswith("no known error")
    assert [line.split(":")[0] for line in text.splitlines() if line.startswith("noticed")] == [
        "noticed omp-threads",
        "noticed max-steps-wins",
    ]
    assert "in log:1" in text
    noticed = json.loads(json.dumps(diagnosis.to_json()))["noticed"]
    assert [entry["id"] for entry in noticed] == ["omp-threads", "max-steps-wins"]


def test_a_sign_explains_an_error_that_may_have_many_causes():
    assert ids(see(NO_WEIGHTS + "\n").findings) == []
    assert ids(see(f"{SIGNS['zero3-no-gather']}\n{NO_WEIGHTS}\n").findings) == ["zero3-no-gather"]


ENDED = "[ERROR] [launch.py:259:sigkill_handler] ['python'] exits with return code = 1\n"
SAID = (
    "evaluation did not work: ZeRO inference only makes sense with ZeRO Stage 3 - please adjust your config\n"
)


def test_once_a_launcher_saw_a_failure_the_lines_before_it_count_in_any_form():
    assert ids(see(SAID + ENDED).findings) == ["ds-eval-only"]
    assert ids(see(SAID).findings) == []
    assert ids(see(SAID + "other\n" * 100 + ENDED).findings) == [], "too far from the end"
    other = 'Traceback (most recent call last):\n  File "a.py", line 1, in b\n    c()\nKeyError: 1\n'
    assert ids(see(SAID + other + ENDED).findings) == [], "another error says why"


def test_a_cut_traceback_does_not_hide_the_line_before_it():
    text = (
        "Could not load bitsandbytes native library: libbitsandbytes_cpu.so: cannot open shared object file\n"
        'Traceback (most recent call last):\n  File "cextension.py", line 85, in <module>\n    load()\n'
    )
    assert ids(see(text).findings) == ["bnb-cuda-binary"]


def test_a_program_that_says_why_it_stopped():
    assert ids(see("training stopped at step 0: CUDA out of memory. Tried to allocate 2 GiB\n").findings) == [
        "cuda-oom"
    ]
    assert ids(see("to be safe: CUDA out of memory. Tried to allocate 2 GiB\n").findings) == []


def test_where_a_process_stood():
    dump = (
        "Timeout (0:00:40)!\n"
        "Thread 0x00007fea1742fb80 (most recent call first):\n"
        '  File "/venv/torch/utils/file_baton.py", line 50 in wait\n'
        '  File "/home/user/train.py", line 11 in <module>\n'
    )
    (finding,) = see(dump).findings
    assert finding.failure.id == "jit-stale-lock"
    assert [frame.function for frame in finding.error.frames] == ["<module>", "wait"]
    (unknown,) = see(dump.replace("file_baton", "other")).unknown
    assert [frame.file for frame in unknown.error.frames][-1].endswith("other.py")


def test_rows_of_a_loss_behind_other_keys():
    rows = "".join(
        f'{{"ts": 1.5, "level": "info", "step": {n}, "loss": 0.0, "grad_norm": NaN}}\n' for n in range(5)
    )
    assert ids(see(rows).findings) == ["nan-shown-as-zero"]


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        ("ModuleNotFoundError: No module named 'tiktoken'", "tokenizer-packages"),
        ("AttributeError: 'NoneType' object has no attribute 'encode'", "tokenizer-file-broken"),
    ],
)
def test_a_tokenizer_that_cannot_be_converted_is_named_by_what_its_chain_tells(cause, name):
    chain = f"""Traceback (most recent call last):
  File "/v/transformers/convert_slow_tokenizer.py", line 1593, in extract_vocab_merges_from_model
    bpe_ranks = load_tiktoken_bpe(tiktoken_url)
{cause}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/v/transformers/convert_slow_tokenizer.py", line 1739, in convert_slow_tokenizer
    raise ValueError(
ValueError: Converting from Tiktoken failed, if a converter for SentencePiece is available, provide a path
"""
    assert ids(see(chain).findings) == [name]


NCCL = (
    "[rank{0}]:[E1103 10:00:00.123 ProcessGroupNCCL.cpp:{1}] [PG ID 0 PG GUID 0(default_pg) Rank {0}] {2}\n"
)
BEFORE_EACH = (
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA",
    "To avoid data inconsistency, we are taking the entire process down.",
)
ENDED_WITH = {
    "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5": "nccl-peer-died",
    "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)": "nccl-system-error",
    "NCCL error: internal error - please report this issue to the NCCL developers, NCCL 2.2": "nccl-error",
    "CUDA error: an illegal memory access was encountered": "illegal-access",
    "CUDA error: uncorrectable ECC error encountered": "gpu-ecc",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4": "nccl-timeout",
}


def nccl(rank, message):
    ended = "Process group watchdog thread terminated with exception: "
    return "".join(NCCL.format(rank, 607, line) for line in (*BEFORE_EACH, ended + message))


TRACEBACK = (
    'Traceback (most recent call last):\n  File "/r/train.py", line 9, in <module>\n    train()\n'
    '  File "/v/transformers/trainer.py", line 900, in {}\n    loss = step(batch)\n{}\n'
)
OF_NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:27, "
    "{} (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nnccl{}: {}\nLast error:\n{}"
)
CUDA = ("unhandled cuda error", "UnhandledCudaError", "Call to CUDA function failed.")
SYSTEM = ("unhandled system error", "SystemError", "System call (e.g. socket, malloc) or external library")
REMOTE = ("remote process exited or there was a network error", "RemoteError", "A call failed possibly due")
USAGE = ("invalid usage", "InvalidUsage", "This usually reflects invalid usage of NCCL library.")
LAST_ERRORS = {
    (*CUDA, "Cuda failure 2 'out of memory'"): "cuda-oom",
    (*CUDA, "Cuda failure 'out of memory'"): "cuda-oom",
    (*CUDA, "Failed to CUDA calloc 6291456 bytes"): "cuda-oom",
    (*CUDA, "Failed to CUDA calloc async 608 bytes"): "cuda-oom",
    (*CUDA, "Failed to CUDA host alloc 4096 bytes"): "nccl-error",  # memory of the host
    (*CUDA, "Cuda failure 1 'invalid argument'"): "nccl-error",
    (*CUDA, "Cuda failure 801 'operation not supported'"): "gpu-operation-not-supported",
    (*CUDA, "Cuda failure 214 'uncorrectable ECC error encountered'"): "gpu-ecc",
    (*CUDA, "Cuda failure 700 'an illegal memory access was encountered'"): "illegal-access",
    (*CUDA, "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA"): "fabric-manager",
    (*SYSTEM, "socketStartConnect: Connect to 10.0.0.3<4501> failed : No route to host"): "nccl-system-error",
    (*SYSTEM, ""): "nccl-system-error",
    (*SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-a (size 96)"): "shared-memory-full",
    (*SYSTEM, "Bootstrap : no socket interface found"): "socket-interface",
    (*REMOTE, "socketProgress: Connection closed by remote peer host<1>"): "nccl-peer-died",
    (*USAGE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000"): "nccl-duplicate-gpu",
}  # fmt: skip


def test_the_reason_that_nccl_tells_is_not_hidden_by_its_own_error():
    for (*words, last), name in LAST_ERRORS.items():
        message = OF_NCCL.format(*words, last)
        assert ids(see(message).findings) == [name], message
        assert ids(see(TRACEBACK.format("train", message)).findings) == [name], message


FULL_DEVICES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    OF_NCCL.format(*CUDA, "Failed to CUDA calloc async 608 bytes"),
)
WITHIN = {
    "train": "cuda-oom",
    "evaluation_loop": "eval-oom",
    "_configure_distributed_model": "whole-model-oom",
    "ForCausalLMLoss": "logits-oom",
}


@pytest.mark.parametrize("within", WITHIN)
def test_whoever_says_that_a_device_is_full_the_calls_tell_when(within):
    for message in FULL_DEVICES:
        assert ids(see(TRACEBACK.format(within, message)).findings) == [WITHIN[within]], message
    assert is_out_of_memory(WITHIN[within], parse_hardware("1xA100-80GB"))


BITSANDBYTES = "Error {} at line 380 in file /src/csrc/pythonInterface.cpp\n"
"""It ends the process with exit code 1, without an exception."""


def test_bitsandbytes_ends_a_process_by_itself():
    trains = "{'loss': '1.2', 'epoch': '0.1'}\n"
    table = (
        "E1129 22:00:00.000 7 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1)\n"
    )
    for text in (BITSANDBYTES, trains + BITSANDBYTES, BITSANDBYTES + table):
        assert ids(see(text.replace("{}", "out of memory")).findings) == ["cuda-oom"]
    (unknown,) = see(BITSANDBYTES.format("invalid argument")).unknown
    assert unknown.error.message.startswith("Error invalid argument at line")


NOT_READY = "Unexpected error from cudaGetDeviceCount(). Did you run {} Error 802: system not yet initialized"


def test_a_fabric_that_is_not_ready_is_told_from_a_missing_gpu():
    no_gpu = TRACEBACK.format("train", "RuntimeError: No CUDA GPUs are available")
    warned = f"/v/torch/cuda/__init__.py:181: UserWarning: CUDA initialization: {NOT_READY} (Triggered at\n"
    assert ids(see(no_gpu).findings) == ["no-gpu"]
    for text in (
        warned + no_gpu,
        TRACEBACK.format("train", f"RuntimeError: {NOT_READY}"),
        TRACEBACK.format("train", "torch.AcceleratorError: CUDA error: system not yet initialized"),
    ):
        assert ids(see(text).findings) == ["fabric-manager"]
    not_supported = TRACEBACK.format("train", "torch.AcceleratorError: CUDA error: operation not supported")
    assert ids(see(not_supported).findings) == ["gpu-operation-not-supported"]


FATAL = (
    "Fatal Python error: {}\n\nThread 0x00007f01 (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n\n'
    "Current thread 0x00007f00 (most recent call first):\n"
    '  File "/v/torch/autograd/graph.py", line 825 in _engine_run_backward\n'
    '  File "/r/x.py", line 3 in <module>\n'
)


def test_what_faulthandler_writes_of_a_crash_is_known_and_an_abort_hides_no_cause():
    for name in ("Segmentation fault", "Bus error", "Illegal instruction", "Floating point exception"):
        assert ids(see(FATAL.format(name)).findings) == ["segmentation-fault"]
    aborted = FATAL.format("Aborted")
    watchdog = nccl(0, "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4")
    for text in (watchdog + aborted, aborted + watchdog):
        assert ids(see(text).findings) == ["nccl-timeout"]
    (unknown,) = see(aborted).unknown
    assert unknown.error.message == "Fatal Python error: Aborted"


def test_an_adapter_of_a_newer_peft_is_told_from_a_misspelt_field():
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n{}'
    text += "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'eva_config'\n"
    call = '  File "/v/peft/config.py", line 152, in from_peft_type\n    return config_cls(**kwargs)\n'
    (finding,) = see(text.format(call)).findings
    assert finding.failure.id == "adapter-of-newer-peft"
    assert "`pip install -U peft`" in finding.fix
    assert ids(see(text.format("")).findings) == ["lora-bad-values"]


def test_errors_of_nccl_are_told_apart_and_the_missing_rank_is_named():
    for message, name in ENDED_WITH.items():
        (finding,) = see("[rank2]: training\n" + "".join(nccl(rank, message) for rank in (0, 1, 3))).findings
        assert (finding.failure.id, finding.ranks) == (name, (0, 1, 3)), message
        assert finding.missing == ((2,) if name in ("nccl-peer-died", "nccl-timeout") else ()), message
    raised = TRACEBACK.format("train", OF_NCCL.format(*REMOTE, "socketProgress: Connection closed"))
    of_ranks = [f"[rank{rank}]: {line}\n" for rank in (0, 1, 3) for line in raised.splitlines()]
    (finding,) = (seen := see("[rank2]: training\n" + "".join(of_ranks))).findings
    assert (finding.failure.id, finding.ranks, finding.missing) == ("nccl-peer-died", (0, 1, 3), (2,))
    assert "rank 2" in diagnosis_text(seen)
    (finding,) = see("".join(nccl(rank, next(iter(ENDED_WITH))) for rank in (0, 3))).findings
    assert finding.missing == (1, 2), "ranks that no log names"
    (finding,) = see(nccl(3, next(iter(ENDED_WITH)))).findings
    assert finding.missing == (), "the log of one rank"
    old = "  what():  " + next(iter(ENDED_WITH)) + "\n"
    assert ids(see(old).findings) == ["nccl-peer-died"]
    (unknown,) = see("".join(NCCL.format(0, 607, line) for line in BEFORE_EACH)).unknown
    assert "taking the entire process down" in unknown.error.message


NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which {} GiB is free. Including non-PyTorch memory, this process has {} GiB memory in use. "
    "Of the allocated memory {} GiB is allocated by PyTorch, and {} GiB is reserved by PyTorch but "
    "unallocated."
)
OLD = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB (GPU 0; 39.59 GiB total "
    "capacity; {} GiB already allocated; {} GiB free; {} GiB reserved in total by PyTorch)"
)


def test_the_numbers_of_a_full_device_decide_why_it_is_full():
    for message, name in {
        NEW.format(2.0, 0.5, 78.0, 70.0, 7.0): "oom-fragmentation",
        NEW.format(8.0, 0.5, 78.0, 70.0, 7.0): "cuda-oom",  # less than was requested
        NEW.format(0.01, 0.005, 78.0, 76.5, 0.4): "cuda-oom",  # what every process has
        NEW.format(2.0, 0.5, 30.0, 28.0, 0.5): "gpu-in-use",
        NEW.format(60.0, 0.5, 30.0, 28.0, 0.5): "cuda-oom",  # also more than all others hold
        OLD.format(0.69, 0.95, 0.46, 1.72): "gpu-in-use",
        OLD.format(2.0, 30.0, 0.46, 37.5): "oom-fragmentation",
        OLD.format(2.0, 37.0, 0.46, 37.5): "cuda-oom",
    }.items():
        assert ids(see(f"{message}\n").findings) == [name], message


POD = "Containers:\n  trainer:\n    State:      Terminated\n      Reason:       {}\n      Exit Code:    {}\n"
COMPLETED = "Status:           Succeeded\n" + POD.format("Completed", 0)
EVICTED = (
    "Status:           Failed\nReason:           Evicted\n"
    "Message:          The node was low on resource: {}. Threshold quantity: 10120387530, available: 8Gi.\n"
) + POD.format("ContainerStatusUnknown", 137)
EXITS = "[2026-01-01 10:00:00] [INFO] [launch.py:347:main] Process 812 exits successfully.\n"
EXITED = "[2026-01-01 10:00:00] [ERROR] [launch.py:325:sigkill_handler] ['t.py'] exits with return code = 1\n"
REFUSED = "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
ENDINGS = {
    POD.format("OOMKilled", 137): "sigkill-oom",
    POD.format("Error", 1): "unknown",
    COMPLETED: None,
    POD.format("Completed", 0) + POD.format("Error", 1).replace("trainer", "worker"): "unknown",
    "Init " + POD.format("Completed", 0) + POD.format("Error", 1): "unknown",
    COMPLETED + POD.format("Error", 1): "unknown",
    POD.format("Error", 1) + COMPLETED: "unknown",
    EVICTED.format("ephemeral-storage"): "checkpoint-disk",
    EVICTED.format("memory"): "sigkill-oom",
    EXITS + EXITED: "unknown",
    "{'train_runtime': 12.5, 'train_loss': 1.5}\n" + EXITED: "unknown",
    EXITED + EXITS: "unknown",
    "  Warning  FailedScheduling  9s  scheduler  0/3 nodes are available: 3 Insufficient x.\n": "pod-pending",
    '  Warning  Failed  2m  kubelet  Failed to pull image "a/b:1": not found\n': "image-pull",
    "  Normal   Pulled  2m  kubelet  Successfully pulled image\n": None,
    REFUSED: "slurm-refused",
    "sbatch: error: Unable to open file job.sh\n": "unknown",
    "srun: error: Unable to create step for job 12: Job/step already completing or completed\n": "unknown",
    "llama_model_load: error loading model: tensor 'output.weight' data is not within bounds\n": "unknown",
    "main: error: unable to load model\n": "unknown",
    "gguf_init_from_file_impl: tensor 'blk.0.ffn_down_exps.weight' has invalid ggml type 39 (NONE)\n"
    "gguf_init_from_file_impl: failed to read tensor info\n": "gguf-too-new",
    "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\n": None,
    '/src/ggml-cuda.cu:70: GGML_ASSERT(!"CUDA error") failed\n': "unknown",
    "Error: llama runner process has terminated: exit status 2\n": "ollama-load",
    "Error: pull model manifest: file does not exist\n": "unknown",
    "The kernel appears to have died. It will restart automatically.\n": "kernel-died",
    "[ 812.301224] NVRM: Xid (PCI:0000:3b:00): 79, pid=281, GPU has fallen off the bus.\n": "gpu-faulty",
    "[ 812.301224] NVRM: Xid (PCI:0000:3b:00): 13, pid=281, Graphics Exception\n": "unknown",
}


def test_what_ends_without_a_traceback():
    for text, name in ENDINGS.items():
        diagnosis = see(f"starting\n{text}")
        assert (ids(diagnosis.findings) or ["unknown" if diagnosis.unknown else None]) == [name], text


def test_no_failure_is_said_only_with_a_sign_of_success():
    for success in (
        "{'train_runtime': 12.5, 'train_loss': 1.5}",
        COMPLETED,
        EXITS,
        "===== test session starts =====\n===== 4 passed in 1.72s =====",
        "Ran 3 tests in 0.1s\n\nOK",
    ):
        diagnosis = see(f"{success}\n")
        assert (diagnosis.succeeded, diagnosis.last_lines) == (True, ()), success
        assert diagnosis_text(diagnosis).startswith("no failure found")
    running = POD.format("Completed", 0).replace("Containers", "Init Containers") + "    State:   Running\n"
    assert not see(running).succeeded
    stopped = see("\x1b[31mloading\x1b[0m\n[rank0]: step 3\n\n" + "row\n" * 30 + "step 4\n")
    assert (stopped.succeeded, len(stopped.last_lines), stopped.last_lines[-1]) == (False, 10, "step 4")
    text = diagnosis_text(stopped)
    assert text.startswith("no known error")
    assert text.splitlines()[-1].strip() == "step 4"
    assert see("[rank0]: step 3\n").last_lines == ["step 3"]
    assert see("").last_lines == []
    failed = see(f"{REFUSED}")
    assert (failed.succeeded, failed.last_lines) == (False, ())


CALLS = """Traceback (most recent call last):
  File "/home/user/train.py", line 3, in <module>
    import {0}
  File "/v/lib/python3.11/site-packages/{0}/__init__.py", line 4, in <module>
    {2}
  File "/v/lib/python3.11/site-packages/{1}/__init__.py", line 9, in __getattr__
    raise
{3}
"""
CLASHES = {
    (
        "peft",
        "transformers",
        "ImportError: cannot import name 'EncoderDecoderCache' from 'transformers' (/v/x.py)",
    ): (
        "pip install -U transformers`",
        "transformers 4.40.1 is installed",
    ),
    ("peft", "transformers", "ImportError: cannot import name 'HybridCache' from 'transformers' (/v/x.py)"): (
        "pip install -U peft`",
        "peft 0.17.0 is installed",
    ),
    ("deepspeed", "torch", "ModuleNotFoundError: No module named 'torch._six'"): (
        "pip install -U deepspeed`",
    ),
    ("bitsandbytes", "triton", "ModuleNotFoundError: No module named 'triton.ops'"): ("bitsandbytes>=",),
    (
        "transformers",
        "transformers",
        "ImportError: accelerate>=0.26.0 is required for a normal functioning of this module, but found "
        "accelerate==0.21.0.",
    ): ('pip install "accelerate>=0.26.0"', "0.21.0"),
    (
        "peft",
        "peft",
        "ImportError: Found an incompatible version of torchao. Found version 0.10.0, but only "
        "versions above 0.16.0 are supported",
    ): ('pip install -U "torchao>0.16.0"', "0.10.0"),
}
VERSIONS = "- `transformers` version: 4.40.1\n- Platform: Linux\npeft==0.17.0\n"


def test_the_package_to_change_is_named_with_the_versions_of_the_log():
    for (importer, package, error), expected in CLASHES.items():
        (finding,) = see(VERSIONS + CALLS.format(importer, package, "pass", error)).findings
        assert finding.failure.id == "version-clash"
        for part in expected:
            assert part in finding.fix, (error, finding.fix)
    script = CALLS.format(
        "own", "transformers", "pass", "ImportError: cannot import name 'X' from 'transformers'"
    )
    (finding,) = see(script.replace("site-packages/own", "src/own")).findings
    assert "transformers" in finding.fix
