"""Known fixes against the real libraries, in this process: the failure without the fix, none with it."""

from __future__ import annotations

import importlib.util
import math
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


def trained(model, folder, **given):
    """A Trainer of eight equal rows after its one step."""
    defaults = {"use_cpu": True, "max_steps": 1, "per_device_train_batch_size": 1, "logging_steps": 1,
                "report_to": "none", "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **{**defaults, **given})
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.train()
    return trainer


def load(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **more)


def load_int8(folder, **more):
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    return load(folder, quantization_config=config, device_map={"": "cpu"}, **more)


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_activations_of_a_bf16_checkpoint_overflow_fp16(tmp_path, family):
    """A model whose activations exceed 65504, as those of Gemma and T5 do: nan in fp16, sound in bf16."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes))
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.fill_(1e4)
        layer.mlp.up_proj.weight.data.fill_(10.0)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert not torch.isfinite(loss_of(load(tmp_path, dtype=torch.float16)))
    assert torch.isfinite(loss_of(load(tmp_path, dtype=torch.bfloat16)))
    assert torch.isfinite(loss_of(load(tmp_path, dtype=torch.float32)))


def test_fp16_unscale():
    def step(dtype):
        model = tiny_llama().to(dtype)
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(model.parameters())
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)

    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        step(torch.float16)
    step(torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_updates_of_16_bit_weights_are_lost(tmp_path, dtype):
    model = tiny_llama().to(getattr(torch, dtype))
    norm = model.model.norm.weight
    before = norm.detach().clone()
    trained(model, tmp_path, max_steps=4, learning_rate=1e-3)
    moved = int((norm != before).sum())
    assert moved == (0 if dtype == "bfloat16" else norm.numel())


def test_tf32(tmp_path):
    with pytest.raises(ValueError, match="tf32 requires Ampere"):
        transformers.TrainingArguments(str(tmp_path), use_cpu=True, tf32=True)
    transformers.TrainingArguments(str(tmp_path), use_cpu=True)


@pytest.mark.skipif(bool(importlib.util.find_spec("flash_attn")), reason="flash_attn is installed")
def test_flash_attention_on_a_cpu(saved):
    with pytest.raises(ImportError, match=r"FlashAttention2|flash_attn"):
        load(saved, attn_implementation="flash_attention_2")
    assert load(saved, attn_implementation="sdpa").config._attn_implementation == "sdpa"


def test_what_flash_attention_is_given():
    """transformers makes fp32 queries 16-bit by autocast or by the weights; else the kernel gets fp32."""
    from transformers.integrations.flash_attention import get_target_dtype

    attention = tiny_llama().model.layers[0].self_attn
    query = torch.ones(1)
    assert get_target_dtype(query, attention) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert get_target_dtype(query, attention) == torch.bfloat16
    assert get_target_dtype(query, attention.to(torch.bfloat16)) == torch.bfloat16


def test_purely_quantized(saved, tmp_path):
    with pytest.raises(ValueError, match="fine-tuning on purely quantized models"):
        trained(load_int8(saved), tmp_path)
    trained(with_lora(load_int8(saved)), tmp_path)


@pytest.mark.parametrize("quantised", [True, False])
def test_beginnings_of_an_adapter_over_a_quantised_base(saved, quantised):
    def begun(init):
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init)
        return peft.get_peft_model(load_int8(saved) if quantised else load(saved), config)

    for init in ("gaussian", "olora", True, False):
        begun(init)
    for init in ("pissa", "pissa_niter_2", "mica", "orthogonal"):
        if not quantised:
            begun(init)
            continue
        with pytest.raises(
            (TypeError, RuntimeError), match=r"Please initialize|Only Tensors of floating point"
        ):
            begun(init)


@pytest.mark.filterwarnings("ignore:.*(`init_lora_weights` is|eva initialization)")
def test_beginnings_of_an_adapter_that_read_data(saved):
    """CorDA stops without them; EVA begins as if nothing had been asked for."""

    def begun(init):
        return peft.get_peft_model(load(saved), peft.LoraConfig(r=4, init_lora_weights=init)).state_dict()

    with pytest.raises(ValueError, match="run `preprocess_corda` first"):
        begun("corda")
    assert not any(value.any() for name, value in begun("eva").items() if "lora_B" in name)


def sparse(model_type):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=100, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_experts_stay_as_they_are_in_int8(tmp_path):
    """And the preparation for training turns them into float32."""
    sparse("mixtral").save_pretrained(tmp_path)
    asked = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=asked, dtype=torch.bfloat16
    )
    experts = model.model.layers[0].mlp.experts
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.int8
    assert experts.down_proj.dtype == torch.bfloat16
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert experts.down_proj.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(("model_type", "reached"), [("granitemoe", False), ("mixtral", True)])
def test_all_linear_leaves_the_experts_of_some_families(model_type, reached):
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    adapted = peft.get_peft_model(sparse(model_type), config)
    assert any(isinstance(m, peft.tuners.lora.layer.ParamWrapper) for m in adapted.modules()) is reached


def test_a_quantised_model_that_was_compiled_before(saved, tmp_path):
    """What transformers refuses; `torch_compile` compiles after that check, of which nothing is said."""
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, torch_compile=True, torch_compile_backend="eager", report_to="none"
    )
    model = with_lora(load_int8(saved))
    with pytest.raises(ValueError, match=r"cannot fine-tune quantized model with `torch.compile\(\)`"):
        transformers.Trainer(torch.compile(model, backend="eager"), args)
    assert not hasattr(transformers.Trainer(model, args).model, "_orig_mod")


def test_kbit_prepare(saved):
    """Without it norms and head stay 16-bit."""
    bare = load_int8(saved, dtype=torch.bfloat16)
    assert bare.model.norm.weight.dtype == bare.lm_head.weight.dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        ready = peft.prepare_model_for_kbit_training(bare, use_gradient_checkpointing=False)
    assert ready.model.norm.weight.dtype == ready.lm_head.weight.dtype == torch.float32
    assert all(not parameter.requires_grad for parameter in ready.parameters())


@pytest.mark.parametrize(("family", "kernel"), [("t5", "flash_attention_2"), ("gemma2", "sdpa")])
def test_kernels_that_models_do_not_have(family, kernel):
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=1, num_layers=1, hidden_size=16)
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        with pytest.raises((ValueError, ImportError), match="does not support"):
            auto.from_config(config, attn_implementation=kernel)
        auto.from_config(config, attn_implementation="eager")


def test_auto_find_batch_size_changes_the_global_batch(tmp_path):
    sizes = []

    def short_of_memory(_, args, kwargs):
        sizes.append(len(kwargs["input_ids"]))
        if sizes[-1] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = tiny_llama()
    model.register_forward_pre_hook(short_of_memory, with_kwargs=True)
    trainer = trained(model, tmp_path, per_device_train_batch_size=3, auto_find_batch_size=True)
    assert (sizes[0], sizes[-1]) == (3, 2)
    assert trainer.args.gradient_accumulation_steps == 1, "a smaller global batch, of which nothing is said"


@pytest.mark.parametrize("filtered", [True, False])
def test_nan_shown_as_zero(tmp_path, filtered):
    model = tiny_llama()
    model.lm_head.weight.data.fill_(float("nan"))
    # The filter is upstream's default.
    trainer = trained(model, tmp_path, **({} if filtered else {"logging_nan_inf_filter": False}))
    loss = float(trainer.state.log_history[0]["loss"])
    assert loss == 0 if filtered else math.isnan(loss)


@pytest.mark.parametrize("said", [{}, {"disable_dropout": False}])
def test_trl_turns_dropout_off(tmp_path, said):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "chosen": " b", "rejected": " a"}] * 2
    args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **said)
    trainer = trl.DPOTrainer(
        tiny_llama(), args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=word_tokenizer(pad_token="<unk>"),
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1),
    )  # fmt: skip
    left = {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert left == ({0.1} if said else {0})


def test_flash_attention_reads_borders_from_one_row_only():
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    packed = torch.tensor([[0, 1, 2, 0, 1]])
    assert _is_packed_sequence(packed, batch_size=1)
    assert not _is_packed_sequence(packed.repeat(2, 1), batch_size=2)


def test_the_mask_of_a_flattened_row_grows_with_its_square():
    from transformers.masking_utils import create_causal_mask

    def mask(tokens):
        positions = torch.arange(8).repeat(tokens // 8)[None]
        rows = torch.zeros(1, tokens, 32)
        return create_causal_mask(
            config=tiny_llama().config, inputs_embeds=rows, attention_mask=None, past_key_values=None,
            position_ids=positions,
        )  # fmt: skip

    assert [mask(tokens).numel() for tokens in (64, 128)] == [64**2, 128**2]
