"""Lines that are no errors: what is noticed in a run that went on, and what explains an error elsewhere."""

from __future__ import annotations

import io
import json

import pytest

from launcher.knowledge.diagnose.examine import Examination
from launcher.knowledge.failures.catalogue import FAILURES
from launcher.report.diagnosis_text import diagnosis_text

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
    assert text.startswith("no failure found\n")
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
