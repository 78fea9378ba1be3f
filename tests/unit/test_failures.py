"""The registry of known failures is complete, and everything that it points at is there."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from every import every
from factories import plan
from lint_cases import BROKEN
from packaging.version import Version

from launcher.errors import RecipeError
from launcher.knowledge.doctor.examine import CHECKS, DATA_CHECK_ID, PLAN_CHECK_ID
from launcher.knowledge.failures.catalogue import FAILURES, Failure
from launcher.knowledge.failures.elsewhere import fix_elsewhere
from launcher.knowledge.lint.against_recipe import AgainstRecipe
from launcher.knowledge.lint.check import lint_text
from launcher.machine.requirements import _by_packaging, holds, requirements
from launcher.machine.software import PACKAGES
from launcher.planner.fixes import FIXES
from launcher.recipe.loading import load_recipe
from launcher.recipe.yaml_reader import parse_yaml

ROOT = Path(__file__).resolve().parents[2]
FULL_FINE_TUNE = """\
model: {name_or_path: huggyllama/llama-7b}
data: {train: [{path: data/train.jsonl}], max_length: 512}
"""
TRAINED = """\
model: {name_or_path: huggyllama/llama-7b}
adapter: {type: lora, r: 8}
data: {train: [{path: data/train.jsonl}], max_length: 512}
trainer: {max_steps: 10}
"""
# What an entry says in one line of what is on disk: lines that healthy runs print.
HARMLESS = (
    "Installed CUDA version 11.8 does not match the version torch was compiled with 11.7 but since the APIs "
    "are compatible, accepting this combination",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
    "UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly.",
    "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "Warning: fused_adam compatibility check failed (CUDA_HOME does not exist, unable to compile CUDA "
    "op(s)), treating the op as not compatible",
    "UserWarning: Model has `tie_word_embeddings=True` and a tied layer is part of the adapter, but "
    "`ensure_weight_tying` is not set to True.",
    "UserWarning: Could not find a config file in model - will assume that the vocabulary was not modified.",
    "FutureWarning: `gradient_checkpointing_enable` is deprecated and will be removed in v6.",
    "Input type into Linear4bit is torch.float16, but bnb_4bit_compute_dtype=torch.float32 (default). This "
    "will lead to slow inference.",
    "No prebuilt binary for CUDA 13.1, loading CUDA 13.0 instead. ",
    "trainable params: 4,194,304 || all params: 6,742,609,920 || trainable%: 0.0622",
    "Unable to find hostfile, will proceed with training with local resources only.",
    "Unused kwargs: ['_load_in_4bit', '_load_in_8bit', 'quant_method']. These kwargs are not used in <class "
    "'transformers.utils.quantization_config.BitsAndBytesConfig'>.",
    "MatMul8bitLt: inputs will be cast from torch.float32 to float16 during quantization",
)
# Errors of other causes that look alike.
OTHERS = (
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded\n\tWeightsUnpickler "
    "error: Unsupported global: GLOBAL mine.Box\n  File /home/user/train.py, line 7, in load_box",
    "TypeError: MyTrainer.compute_loss() got an unexpected keyword argument 'num_items_in_batch'",
    "RuntimeError: size mismatch for classifier.weight: copying a param with shape torch.Size([2, 768]) from "
    "checkpoint, the shape in current model is torch.Size([3, 768]).",
    "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 3 column 5",
    "TypeError: '>' not supported between instances of 'str' and 'int'",
    "pydantic_core.ValidationError: 1 validation error for Settings\nx\n  Extra inputs are not permitted",
    "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    "ValueError: Unexpected keyword arguments in the request",
)
# id -> messages as the installed libraries, or older ones, write them
MESSAGES = {
    "sequence-parallel-positions": [
        "Ulysses SP requires `position_ids` in every dataloader batch so that each token retains its correct",
        "Ulysses SP requires position_ids in every forward() call so that after all_gather causal masking",
    ],
    "sequence-not-divisible": ["batch's seqlen=31 isn't divisible by sp-size=2"],
    "heads-not-divisible": [
        "Attention head count 9 is not divisible by SP size 2",
        "KV attention head count 3 is not divisible by SP size 2 or vice versa",
    ],
    "tensor-parallel-resume": [
        "Resuming is not supported for models sharded at load time (`DistributedConfig`), so their optimizer"
    ],
    "tensor-parallel-plan": ["`tp_size=2` was requested, but `GPT2LMHeadModel` has no `tp_plan`. Pass"],
    "tensor-parallel-copies": [
        "Tensor/Context parallelism (tp/cp_size > 1) cannot be used with pure data parallelism"
    ],
    "parallelism-combined": [
        "Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive. Got cp_size=2"
    ],
    "parallelism-processes": [
        "ParallelismConfig total_size (2) does not match num_processes (1). Please adjust dp_replicate_size/",
        "ParallelismConfig is only compatible DistributedType.FSDP (version 2) or DistributedType.Multi",
    ],
    "context-parallel-attention": [
        "Context parallelism is supported only with SDPA attention, you are using eager.",
        "NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not "
        "have a sharding strategy registered.",
    ],
    "tensor-parallel-data": [
        "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure"
    ],
    "bf16-no-device": [
        "Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to train on CPU."
    ],
    "bf16-pre-ampere": [
        "Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0",
        "Your setup doesn't support bf16/gpu. You need Ampere+ GPU with cuda>=11.0",
    ],
    "recompute-differs": [
        "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than",
        "torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
        "recomputation.",
    ],
    "zero3-fetch-order": [
        "still have inflight params [{'id': 7, 'status': 'AVAILABLE'}]",
        "AssertionError: {'id': 7, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0, 'shape': (0,)}",
        "disagreement between rank0 and rank1: rank0: [1], rank1: [2]",
    ],
    "tensors-on-two-gpus": [
        "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cuda:0!"
    ],
    "fp16-unscale": ["Attempting to unscale FP16 gradients."],
    "fp16-on-bf16-params": [
        "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
    ],
    "half-float-matmul": [
        "expected scalar type Half but found Float",
        "expected scalar type Float but found Half",
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
        "mat1 and mat2 must have the same dtype, but got Half and Float",
        "expected m1 and m2 to have the same dtype, but got: c10::Half != float",
        "Input type (float) and bias type (c10::Half) should be the same",
    ],
    "fp16-and-bf16": [
        "At most one of fp16 and bf16 can be True, but not both",
        "bfloat16 and fp16 modes cannot be simultaneously enabled",
        "`--mixed_precision` arg cannot be set to `fp16` when `bf16` is set in the DeepSpeed config file.",
    ],
    "no-grad-fn": ["element 0 of tensors does not require grad and does not have a grad_fn"],
    "checkpointing-unsupported": [
        "BloomFoo does not support activation checkpointing.",
        "XLNetModel is not compatible with gradient checkpointing. Make sure all the architecture support it",
    ],
    "checkpointing-kwarg-typo": ["Unexpected keyword arguments: use_rentrant"],
    "target-modules-missing": [
        "Target modules {'q_proj', 'v_proj'} not found in the base model. Please check the target modules",
        "No modules were targeted for adaptation. This might be caused by a combination",
    ],
    "lora-bad-values": [
        "`r` should be a positive integer value but the value passed is 0",
        "LoraConfig.__init__() got an unexpected keyword argument 'lora_alhpa'",
        "Invalid task type: 'CAUSAL'. Must be one of the following task types: SEQ_CLS",
    ],
    "adapter-of-newer-peft": [
        "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'eva_config'\n"
        "  File /v/peft/config.py, line 152, in from_peft_type"
    ],
    "adapter-vocabulary": [
        "Error(s) in loading state_dict for PeftModelForCausalLM:\n\tsize mismatch for base_model.model."
        "model.embed_tokens.weight: copying a param with shape torch.Size([32001, 4096]) from checkpoint"
    ],
    "load-in-kwargs-removed": [
        "LlamaForCausalLM.__init__() got an unexpected keyword argument 'load_in_8bit'"
    ],
    "bnb-config-typo": [
        "Unused kwargs: ['load_in_8bit_cpu']. These kwargs are not used in <class "
        "'transformers.utils.quantization_config.BitsAndBytesConfig'>."
    ],
    "slurm-time-limit": [
        "slurmstepd-n1: error: *** JOB 34 ON n1 CANCELLED AT 2026-11-22T19:43:12 DUE TO TIME LIMIT ***"
    ],
    "slurm-preempted": [
        "slurmstepd-n2: error: *** JOB 35 ON n2 CANCELLED AT 2026-11-22T19:42:25 DUE TO PREEMPTION ***"
    ],
    "bnb-bad-quant-type": ["quant_type must be 'nf4' or 'fp4', got 'nf5'"],
    "bnb-cuda-binary": ["CUDA Setup failed despite GPU being available. Please run the following command"],
    "kbit-cpu-offload": [
        "Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the",
        "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload. ",
    ],
    "ds-typo-nested": [
        "1 validation error for DeepSpeedZeroConfig\nstagee\n  Extra inputs are not permitted "
        "[type=extra_forbidden, input_value=2, input_type=int]"
    ],
    "ds-float-bucket": [
        "1 validation error for DeepSpeedZeroConfig\nreduce_bucket_size\n  Input should be a valid integer, "
        "got a number with a fractional part [type=int_from_float, input_value=15099494.4, input_type=float]",
        "1 validation error for DeepSpeedZeroConfig\nreduce_bucket_size\n  Input should be a valid integer, "
        "unable to parse string as an integer [type=int_parsing, input_value='5e8', input_type=str]",
    ],
    "ds-removed-key": [
        "The DeepSpeed compression library has been removed. A leftover 'compression_training' block",
        "MiCS ZeRO-3 sharding has been removed; 'zero_optimization.mics_shard_size' is no longer supported.",
        "Mixture-of-Quantization (MoQ) / 'quantize_training' has been removed. See",
    ],
    "ds-bfloat16-alias": [
        "`bfloat16.enabled` not found in kwargs. Please specify `bfloat16.enabled` without `auto` (set to "
        "correct value) in the DeepSpeed config file or pass it in kwargs."
    ],
    "ds-auto-unresolved": [
        "`optimizer.params.eps` not found in kwargs. Please specify `optimizer.params.eps` without `auto`"
    ],
    "ds-hf-mismatch": [
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:\n- ds "
        "optimizer.params.lr=0.001 vs hf learning_rate=2e-05"
    ],
    "ds-warmup-zero": [
        "warmup_num_steps must be a positive integer, got 0",
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:\n- ds "
        "scheduler.params.warmup_num_steps=0 vs hf warmup_steps=1",
    ],
    "ds-total-steps": ["WarmupDecayLR.__init__() missing 1 required positional argument: 'total_num_steps'"],
    "sharded-weight-empty": [
        "RuntimeError: 'weight' must be 2-D",
        "weight should have at least three dimensions",
        "size mismatch, got input (12), mat (12x64), vec (0)",
        "size mismatch for a.weight: copying a param with shape torch.Size([9, 4]) from checkpoint, the "
        "shape in current model is torch.Size([0]).",
    ],
    "jit-no-nvcc": [
        "CUDA_HOME does not exist, unable to compile CUDA op(s)",
        "CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
    ],
    "jit-no-ninja": ["Unable to JIT load the cpu_adam op due to ninja not being installed."],
    "fp16-mps": ["fp16 mixed precision requires a GPU (not 'mps')."],
    "image-pull": [
        'Failed to pull image "registry/trainer:1": not found',
        "      Reason:       ImagePullBackOff",
    ],
    "ollama-load": [
        'msg="error loading llama server" error="llama runner process has terminated: exit status 2"',
        "Error: model requires more system memory (7.3 GiB) than is available (5.1 GiB)",
        "Error: unable to load model: /root/.ollama/models/blobs/sha256-1c75",
    ],
    "labels-all-masked": ["ZeroDivisionError: Unsloth: All labels in your dataset are -100. Training losses"],
    "zero-no-sync": [
        "no_sync context manager is incompatible with gradientpartitioning logic of ZeRo stage 3"
    ],
    "gguf-too-new": [
        "gguf_init_from_file_impl: tensor 'blk.0.ffn_down_exps.weight' has invalid ggml type 39 (NONE)",
        "llama runner process has terminated: error loading modelvocabulary: cannot find tokenizer merges "
        "in model file",
        "Error: llama runner process has terminated: error loading model: unknown model architecture: 'phi9'",
    ],
    "vllm-kv-cache": [
        "The model's max seq len (4096) is larger than the maximum number of tokens that can be stored "
        "in KV cache (3664)",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ],
    "jit-no-compiler": ["Error building extension 'cpu_adam': [1/3] c++ -MMD -MF cpu_adam.o.d"],
    "jit-cuda-mismatch": [
        ">- DeepSpeed Op Builder: Installed CUDA version 13.1 does not match the version torch was compiled "
        "with 13.0, unable to compile cuda/cpp extensions without a matching cuda version."
    ],
}


def named(name: str) -> Failure:
    return next(failure for failure in FAILURES if failure.id == name)


def matched(text: str) -> set[str]:
    return {f.id for f in FAILURES if any(re.search(pattern, text) for pattern in f.patterns)}


@cache
def modules() -> tuple[ast.Module, ...]:
    """The syntax trees of launcher, without the registry itself."""
    paths = sorted((ROOT / "launcher").rglob("*.py"))
    return tuple(ast.parse(path.read_text("utf-8")) for path in paths if "failures" not in path.parts)


@cache
def nodes() -> tuple[ast.AST, ...]:
    """All of them: to walk the trees takes longer than to parse them."""
    return tuple(node for tree in modules() for node in ast.walk(tree))


def calls(names: Container[str]) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a function of one of these names, with the name."""
    for node in nodes():
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", None))
            if called in names:
                yield called, node


def makers() -> set[tuple[str, int]]:
    """Problem and the functions that hand a parameter on as its code, with that one's position."""
    found = {("Problem", 0)}
    for function in nodes():
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        for node in ast.walk(function):
            made = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Problem"
            if made and node.args and getattr(node.args[0], "id", None) in names:
                found.add((function.name, names.index(node.args[0].id)))
    return found


@cache
def codes() -> frozenset[str]:
    """The codes of all Problems that launcher can raise, but those of fixes."""
    found: set[str] = set()
    positions: dict[str, list[int]] = {}
    for name, position in makers():
        positions.setdefault(name, []).append(position)
    for name, call in calls(positions):
        for position in positions[name]:
            given = [k.value for k in call.keywords if k.arg == "code"] + call.args[position : position + 1]
            for value in given:
                # `"a" if … else "b"` is two codes
                parts = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
                found |= {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}
    return frozenset(found | set(refusals()))


def refusals() -> Iterator[str]:
    """The codes of refusals that are yielded or returned as tuples (launcher/plan/draft.py Refusal)."""
    for path in (ROOT / "launcher").rglob("*.py"):
        text = path.read_text("utf-8")
        if "Refusal" not in text:
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Yield, ast.Return)) and isinstance(node.value, ast.Tuple):
                first = node.value.elts[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value
                elif isinstance(first, ast.Name) and first.id == "_CODE":
                    yield getattr(importlib.import_module(module_of(path)), first.id)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


FIGHTS = """{
  "train_micro_batch_size_per_gpu": 77,
  "optimizer": {"type": "AdamW", "params": {}},
  "scheduler": {"type": "WarmupLR", "params": {}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}
}"""


@pytest.fixture(scope="module")
def lint_codes(tmp_path_factory) -> frozenset[str]:
    """What lint really says of broken configs, and of one that fights a recipe."""
    folder = tmp_path_factory.mktemp("recipe")
    text = FULL_FINE_TUNE + "trainer: {max_steps: 10, optim: adafactor, max_grad_norm: 0.3}\n"
    fights = lint_text(FIGHTS, "ds.json", AgainstRecipe(plan(folder, text=text)))
    alone = [finding for text, *_ in BROKEN.values() for finding in lint_text(text, "ds.json")]
    return frozenset(finding.code for finding in [*fights, *alone])


@cache
def named_anywhere() -> frozenset[str]:
    """Every name that the code of launcher reads."""
    names = (
        getattr(node, "attr", getattr(node, "id", None))
        for node in nodes()
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return frozenset(name for name in names if name)


@cache
def functions(module: str) -> frozenset[str]:
    """The functions and methods of a module, found without importing it."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_an_id_is_given_once():
    ids = [failure.id for failure in FAILURES]
    assert len(ids) == len(set(ids))
    for path in (ROOT / "launcher/knowledge/failures").glob("*.yaml"):
        assert not parse_yaml(path.read_text("utf-8"), path.name).problems  # such as a duplicate key


@every("failure", FAILURES, ids=lambda f: f.id)
def test_an_entry_says_what_where_and_what_to_do(failure):
    assert all((failure.title, failure.cause, failure.fix, failure.source))
    assert not failure.title.endswith(".")
    assert failure.cause.endswith(".")
    handled = list(failure.handled())
    assert handled
    assert len(handled) == len(set(handled))
    assert all((kind == "diagnose") == (not reference) for kind, reference in handled)


def test_only_a_symptom_is_diagnosed_without_patterns():
    assert [f.id for f in FAILURES if "diagnose" in f.places] == ["nan-shown-as-zero"]


@every("failure", FAILURES, ids=lambda f: f.id)
def test_everything_that_an_entry_points_at_is_there(failure, lint_codes):
    known = {
        "fix": {fix.id for fix in FIXES},
        "lint": lint_codes,
        "doctor": {check.id for check in CHECKS} | {PLAN_CHECK_ID, DATA_CHECK_ID},
        "refusal": codes(),
        "diagnose": {""},
    }
    for kind, reference in failure.handled():
        if kind == "worker":
            module, _, name = reference.partition(":")
            assert name in functions(module), reference
            assert name in named_anywhere(), f"nothing calls {reference}"
        elif kind == "none":
            assert len(reference.split()) > 3, "a reason is a sentence"
        else:
            assert reference in known[kind], f"no {kind} {reference}"


def test_an_entry_that_points_at_nothing_would_be_seen(lint_codes):
    assert not {"no-such-code", "utf-8", "run"} & codes()
    assert {"eos-masked", "launcher-conflict", "does-not-fit", "unknown-key"} <= codes()
    assert "ds-no-such-code" not in lint_codes
    assert "attach_adaptor" not in functions("launcher.train.model.adapters")


@every("failure", [f for f in FAILURES if f.patterns], ids=lambda f: f.id)
def test_patterns_are_regular_expressions_that_a_plain_word_does_not_meet(failure):
    for pattern in failure.patterns:
        compiled = re.compile(pattern)
        assert not compiled.search("")
        assert not compiled.search("Traceback (most recent call last):")


@every("entry", [*FAILURES, *FIXES], ids=lambda entry: entry.id)
def test_versions_are_requirements_on_packages_whose_versions_are_known(entry):
    assert {requirement.name for requirement in requirements(entry.versions)} <= set(PACKAGES)


@every("failure", [f for f in FAILURES if f.changes], ids=lambda f: f.id)
def test_changes_are_settings_of_a_recipe(failure, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(TRAINED, encoding="utf-8")
    given = {dotted: value for dotted, value in failure.changes.items() if value is not None}
    load_recipe(path, [f"{dotted}={json.dumps(value)}" for dotted, value in given.items()])
    for dotted in failure.changes.keys() - given.keys():
        assert known_key(dotted, tmp_path), dotted


def known_key(dotted: str, folder: Path) -> bool:
    """Whether a recipe may have the key: it is refused for its value at most."""
    path = folder / "probe.yaml"
    path.write_text(TRAINED, encoding="utf-8")
    try:
        load_recipe(path, [f"{dotted}=[1]"])
    except RecipeError as error:
        return not {"unknown-key", "owned-key", "renamed-key"} & {p.code for p in error.problems}
    return True


def test_a_misspelt_key_is_not_known(tmp_path):
    assert known_key("trainer.tf32", tmp_path)
    assert not known_key("trainer.tf23", tmp_path)
    assert not known_key("adapter.rank_of", tmp_path)


@every("name", MESSAGES)
def test_a_message_is_matched_by_its_own_entry_alone(name):
    for message in MESSAGES[name]:
        assert matched(message) == {name}, message


@every("line", [*HARMLESS, *OTHERS], ids=lambda line: line[:40])
def test_what_only_looks_alike_is_matched_by_none(line):
    assert matched(line) == set()


@every(
    ("asked", "found"),
    product(
        ["p>=5", "p>=5.0", " p >= 5.9.1 ", "p>=2.5", "p>=4,<6", "p[x]>=5", "p==5", "q>=5"],
        ["5", "5.0.0", "4.57.1", "5.10", "2.5.0+cpu", "5.0.0rc1", "5!1", "1.0.post1", "main"],
    ),
)
def test_plain_requirements_are_answered_as_packaging_answers(asked, found):
    assert holds(asked, {"p": found}) == _by_packaging(asked, {"p": found})


def test_requirements_on_versions():
    assert holds("*", {})
    assert holds("transformers>=5,<6; torch>=2.5", {"transformers": "5.23.0", "torch": "2.13.0+cu130"})
    assert not holds("transformers>=5,<6; torch>=2.5", {"transformers": "5.23.0", "torch": "2.4.1"})
    assert not holds("transformers>=5,<6", {"transformers": "6.0.0"})
    assert not holds("transformers<5.23", {"transformers": "5.23.0"})
    assert holds("trl>=0.12", {}), "a package that is not here will be where the run is"
    assert holds("torch>=2.5", {"torch": "a build of mine"})
    assert holds("deepspeed>=0.19", {"deepspeed": str(Version("0.19.9.dev0"))})


SECTIONS = "trainer|model|data|sharding|adapter|launch|hardware|generation"
RECIPE_TERMS = re.compile(
    rf"\b(?:{SECTIONS})\.(?!safetensors)[a-z_]+\b(?!\()|`(?:{SECTIONS}):|"
    r"`(?:precision|task|on_oom)\b|\b(?:plan|recipe|RECIPE)\b|effilaunch (?:run|plan|prepare|submit)"
)
"""What exists only where a recipe does; `effilaunch doctor` and `lint` need none."""


@every("failure", [f for f in FAILURES if f.patterns or f.signs], ids=lambda f: f.id)
def test_the_fix_for_another_tools_log_needs_no_recipe(failure):
    text = fix_elsewhere(failure)
    assert not RECIPE_TERMS.search(f"{failure.cause} {text}"), text
    assert not failure.elsewhere or fix_elsewhere(replace(failure, elsewhere="")) != failure.elsewhere


def test_recipe_keys_become_arguments_elsewhere():
    assert named("nccl-error").fix.count("launch.env.NCCL_DEBUG: INFO") == 1
    assert "NCCL_DEBUG=INFO" in fix_elsewhere(named("nccl-error"))
    assert "torch_compile=False" in fix_elsewhere(named("triton-compile"))
    assert "model.resize_token_embeddings(len(tokenizer))" in fix_elsewhere(named("adapter-vocabulary"))
    assert any(RECIPE_TERMS.search(failure.fix) for failure in FAILURES), "the expression finds them"
