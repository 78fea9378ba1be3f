"""The first known fixes against the real libraries: the failure without the fix, none with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 19).reshape(1, -1)


def tiny_llama(**extra):
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, **extra,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def with_lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


def loss_of(model):
    model.train()
    return model(input_ids=IDS, labels=IDS).loss


def reentrant_lora(*, fixed: bool):
    """A frozen base with reentrant checkpointing and no help of the libraries, as remote code has it."""
    model = with_lora(tiny_llama())
    inner = model.get_base_model()
    inner.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    inner.disable_input_require_grads()
    if fixed:
        model.enable_input_require_grads()
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_enable_input_require_grads():
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss_of(reentrant_lora(fixed=False)).backward()
    model = reentrant_lora(fixed=True)
    loss_of(model).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None for g in grads)


def test_no_kbit_prepare_on_16_bit():
    half = tiny_llama().to(torch.bfloat16)
    before = half.get_memory_footprint()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        prepared = peft.prepare_model_for_kbit_training(half, use_gradient_checkpointing=False)
    assert {p.dtype for p in prepared.parameters()} == {torch.float32}
    assert prepared.get_memory_footprint() > 1.9 * before
    kept = with_lora(tiny_llama().to(torch.bfloat16))
    assert {p.dtype for p in kept.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.fixture
def saved(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("fixed", [False, True])
def test_kbit_prepare_with_non_reentrant_checkpointing(saved, fixed):
    """Without the kwarg peft passes none, and torch falls back to reentrant checkpointing."""
    int8 = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=int8, device_map={"": "cpu"}, dtype=torch.float32
    )
    extra = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if fixed else {}
    prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=True, **extra)
    uses = {
        m._gradient_checkpointing_func.keywords.get("use_reentrant")
        for m in prepared.modules()
        if hasattr(m, "_gradient_checkpointing_func")
    }
    assert uses == ({False} if fixed else {None})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss_of(with_lora(prepared)).backward()
    assert any("use_reentrant parameter" in str(w.message) for w in seen) is not fixed


def test_autocast_guard():
    """A kbit-prepared model mixes dtypes: fp32 norms feed 16-bit projections."""

    def mixed():
        model = tiny_llama().to(torch.float16)
        for name, module in model.named_modules():
            if "norm" in name:
                module.float()
        return with_lora(model)

    model = mixed()
    with pytest.raises(RuntimeError, match=r"same dtype|expected scalar type"):
        loss_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(model).backward()


def test_bf16_support_counts_emulation():
    """Why compute capability decides: the helper's default accepts devices that only emulate bf16."""
    import inspect

    signature = inspect.signature(torch.cuda.is_bf16_supported)
    assert signature.parameters["including_emulation"].default is True


def test_explicit_dtype(tmp_path):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path).dtype == torch.bfloat16, "the checkpoint decides when nobody does"
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_use_cache():
    model = tiny_llama()
    assert model(input_ids=IDS).past_key_values is not None
    model.config.use_cache = False
    assert model(input_ids=IDS).past_key_values is None


def word_tokenizer(**extra):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", **extra)


def test_pad_token():
    rows = [{"input_ids": [2, 3, 0]}, {"input_ids": [2, 0]}]
    with pytest.raises(ValueError, match="does not have a padding token"):
        word_tokenizer().pad(rows)
    # pad = eos, the usual way out, hides eos from the loss ...
    usual = transformers.DataCollatorForLanguageModeling(word_tokenizer(pad_token="<eos>"), mlm=False)
    assert 0 not in usual(rows)["labels"]
    # ... and labels that are made before padding keep it.
    ours = transformers.DataCollatorForSeq2Seq(word_tokenizer(pad_token="<unk>"))
    labelled = [{**row, "labels": list(row["input_ids"])} for row in rows]
    labels = ours(labelled)["labels"].tolist()
    assert labels == [[2, 3, 0], [2, 0, -100]]


def run_script(script: str) -> str:
    """A process of its own: ZeRO-3 and process groups change the state of the whole interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


DISTRIBUTED = """
    import os, torch
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model.hf_device_map = MAP
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[key]
    accelerator = Accelerator(cpu=True)
    AcceleratorState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["num_processes"] = 2
    try:
        accelerator.prepare_model(model, device_placement=False)
    except Exception as error:
        print(type(error).__name__, error)
    """


def test_device_map_against_distributed_launch():
    refused = run_script(DISTRIBUTED.replace("MAP", '{"0": 0, "1": 1}'))
    assert "in any distributed mode" in refused
    accepted = run_script(DISTRIBUTED.replace("MAP", '{"": 0}'))
    assert "in any distributed mode" not in accepted


ZERO3 = """
    import os, sys, torch, transformers
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    import deepspeed
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
              "zero_optimization": {"stage": 3}}
    def arguments():
        made = transformers.TrainingArguments("/tmp/unused", use_cpu=True, deepspeed=config)
        deepspeed.init_distributed(dist_backend="gloo")
        return made
    def load(**extra):
        return transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **extra)
    """


def zero3(folder, script: str) -> str:
    prelude = f"import sys; sys.argv = ['x', {str(folder)!r}]\n"
    return run_script(prelude + textwrap.dedent(ZERO3) + textwrap.dedent(script))


def test_zero3_arguments_before_the_model(saved):
    late = zero3(saved, "model = load(); args = arguments(); print(model.lm_head.weight.numel())")
    early = zero3(saved, "args = arguments(); model = load(); print(model.lm_head.weight.numel())")
    assert int(late.split()[-1]) == 128 * 32, "built before the arguments: the whole weight"
    assert int(early.split()[-1]) == 0, "partitioned while loading"


def test_zero3_with_device_map(saved):
    script = """
    args = arguments()
    try:
        load(device_map={"": "cpu"})
    except ValueError as error:
        print(error)
    model = load()
    print("loaded")
    """
    said = zero3(saved, script)
    assert "DeepSpeed Zero-3 is not compatible with passing a `device_map`" in said
    assert said.split()[-1] == "loaded"
