"""Added tokens: their embedding rows are trained, saved, and give the same logits when read back."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RecipeError
from launcher.train.job import Job, read_job
from launcher.train.model.adapters import attach_adapter
from launcher.train.model.models import load_model
from launcher.train.model.processing import find_embeddings, load_processing

sys.path.insert(0, str(Path(__file__).parent))
from plans import TINY_LLAMA, generate, write_run, zero_config

pytestmark = pytest.mark.usefixtures("warm")

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# As many rows as the tiny tokenizer has entries for `vocab_size: 280`, so that new tokens need new rows.
ROWS = 280
NEW = ["<|begin_cell|>", "<|end_cell|>"]
TEXTS = ["<|begin_cell|> one red bird <|end_cell|>", "<|begin_cell|> two lamps <|end_cell|>"]
LORA = {"type": "lora", "r": 4, "target_modules": "all-linear"}
LLAMA = {**TINY_LLAMA, "vocab_size": ROWS}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "untied": {**LLAMA, "tie_word_embeddings": False},
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "scaled": {"model_type": "gemma3_text", "vocab_size": ROWS, **SMALL, "num_key_value_heads": 1,
               "head_dim": 16},
    "biased-head": {"model_type": "phi", "vocab_size": ROWS, **SMALL},
    "t5": {"model_type": "t5", "vocab_size": ROWS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2,
           "num_heads": 2},
}  # fmt: skip


def task_of(name: str) -> str:
    return "seq2seq-lm" if name == "t5" else "causal-lm"


def saved_base(folder: Path, name: str) -> str:
    """A model without the new tokens, saved with its tokenizer."""
    plan = {"task": task_of(name), "model.config": CONFIGS[name]}
    job = read_job(write_run(folder / "base", plan))
    tokenizer = load_processing(job)
    assert len(tokenizer) == ROWS
    model = load_model(job, tokenizer)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "saved")
    return str(folder / "saved")


def job_for(folder: Path, base: str, name: str = "untied", **changes: Any) -> Job:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    plan = {
        "task": task_of(name),
        "tiny": False,
        "model.config": None,
        "model.name_or_path": base,
        "model.add_tokens": NEW,
        **dotted,
    }
    return read_job(write_run(folder, plan))


def built(job: Job) -> tuple[Any, Any]:
    torch.manual_seed(0)
    tokenizer = load_processing(job)
    return tokenizer, attach_adapter(job, load_model(job, tokenizer), tokenizer)


def batch_of(tokenizer: Any) -> dict[str, Any]:
    rows = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    return {"input_ids": rows["input_ids"], "labels": rows["input_ids"]}


def train_steps(model: Any, batch: dict[str, Any], steps: int = 8) -> None:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def logits_of(model: Any, batch: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model.eval()(**batch).logits


def matrices(model: Any) -> list[Any]:
    """The embedding matrices as the forward pass sees them: input, and output where there is one."""
    model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    return [part.weight.detach().clone() for part in parts if part is not None]


@pytest.mark.parametrize("name", CONFIGS)
def test_lora_trains_the_new_rows_alone_and_saves_them(tmp_path, name, capsys):
    base = saved_base(tmp_path, name)
    tokenizer, model = built(job_for(tmp_path / "run", base, name, adapter=LORA))
    ids = tokenizer.convert_tokens_to_ids(NEW)
    assert ids == [ROWS, ROWS + 1]
    batch = batch_of(tokenizer)
    start = logits_of(model, batch)
    with model.disable_adapter():
        assert torch.allclose(start, logits_of(model, batch), atol=1e-6), (
            "an untrained adapter changes nothing"
        )
    before = [part.clone() for part in matrices_of_base(model)]
    train_steps(model, batch)
    trained = logits_of(model, batch)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")

    torch.manual_seed(1)  # fresh rows of the resized base are other random ones
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert again.convert_tokens_to_ids(NEW) == ids
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    fresh = kind.from_pretrained(base)
    fresh.resize_token_embeddings(len(again))
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert torch.allclose(logits_of(loaded, batch), trained, atol=1e-5)

    for position, (old, new) in enumerate(zip(before, matrices(loaded), strict=True)):
        changed = (old != new).any(dim=1)
        assert changed[ids].all()
        if name == "biased-head" and position == 1:
            continue  # peft would drop the bias of single rows, so the whole head is trained
        assert changed.sum() == len(ids), "no other row moved"
    said = capsys.readouterr().out
    assert f"added tokens: '{NEW[0]}' = {ROWS}, '{NEW[1]}' = {ROWS + 1}" in said
    assert f"the embedding grew from {ROWS} to {ROWS + 2} rows" in said
    assert "added tokens: trained and saved with the adapter are 2 rows of " in said


def matrices_of_base(model: Any) -> list[Any]:
    """The base's own matrices below peft's wrappers."""
    found = []
    base = model.get_base_model()
    for part in (base.get_input_embeddings(), base.get_output_embeddings()):
        inner = getattr(part, "original_module", part)
        found.append(inner.weight.detach())
    return found


def test_the_adapter_holds_the_new_rows_and_not_the_matrix(tmp_path):
    from safetensors.torch import load_file

    _, model = built(job_for(tmp_path / "run", saved_base(tmp_path, "untied"), adapter=LORA))
    model.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    rows = {name: tuple(value.shape) for name, value in tensors.items() if "lora_" not in name}
    assert sorted(rows.values()) == [(2, 64), (2, 64)], rows


def test_a_full_fine_tune_saves_the_larger_model(tmp_path):
    base = saved_base(tmp_path, "tied")
    job = job_for(tmp_path / "run", base)
    tokenizer, model = built(job)
    batch = batch_of(tokenizer)
    before = matrices(model)[0]
    train_steps(model, batch)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "run" / "model")
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == ROWS + 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(logits_of(loaded, batch), logits_of(model, batch))
    assert (matrices(loaded)[0] != before).any(dim=1)[[ROWS, ROWS + 1]].all()
    assert isinstance(generate(tmp_path / "run", TEXTS[0], max_new_tokens=2), str)


@pytest.mark.parametrize(("name", "adapter"), [("tied", None), ("untied", LORA)])
def test_a_vocabulary_grows_to_a_multiple(tmp_path, capsys, name, adapter):
    """Its spare rows have no token; what was trained with them is read, saved and used with them."""
    base = saved_base(tmp_path, name)
    more = {} if adapter is None else {"adapter": adapter}
    job = job_for(tmp_path / "run", base, model__vocab_multiple=64, **more)
    tokenizer, model = built(job)
    assert f"the embedding grew from {ROWS} to 320 rows, for the added tokens, a multiple of 64" in (
        capsys.readouterr().out
    )
    assert model.config.vocab_size == 320
    batch = batch_of(tokenizer)
    train_steps(model, batch)
    trained = logits_of(model, batch)
    assert trained.shape[-1] == 320
    kind = "adapter" if adapter else "model"
    for part in (model, tokenizer):
        part.save_pretrained(job.run_dir / kind)
    if adapter:
        again = load_model(job, load_processing(job))
        again = peft.PeftModel.from_pretrained(again, job.run_dir / kind)
        assert torch.allclose(logits_of(again, batch), trained, atol=1e-5)
    assert isinstance(generate(tmp_path / "run", TEXTS[0], max_new_tokens=2), str)


def test_a_vocabulary_of_the_multiple_stays_as_it_is(tmp_path, capsys):
    job = job_for(
        tmp_path / "run", saved_base(tmp_path, "tied"), model__vocab_multiple=8, model__add_tokens=[]
    )
    assert len(matrices(load_model(job, load_processing(job)))[0]) == ROWS
    assert "grew" not in capsys.readouterr().out
    plain = job_for(
        tmp_path / "plain", str(tmp_path / "saved"), model__vocab_multiple=None, model__add_tokens=[]
    )
    assert len(matrices(load_model(plain, load_processing(plain)))[0]) == ROWS


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_generate_reads_an_adapter_with_added_tokens(tmp_path, name):
    job = job_for(tmp_path / "run", saved_base(tmp_path, name), adapter=LORA)
    tokenizer, model = built(job)
    text = "<|begin_cell|>bird<|end_cell|>" + tokenizer.eos_token
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    train_steps(model, {"input_ids": ids, "labels": ids}, steps=40)
    for part in (model, tokenizer):
        part.save_pretrained(job.run_dir / "adapter")
    end = tokenizer.eos_token_id
    answer = model.eval().generate(
        input_ids=ids[:, :1], max_new_tokens=10, do_sample=False, eos_token_id=end, pad_token_id=end
    )
    expected = tokenizer.decode(answer[0, 1:], skip_special_tokens=True)
    assert "<|end_cell|>" in expected
    assert generate(job.run_dir, "<|begin_cell|>", max_new_tokens=10) == expected


def test_spare_rows_are_used_first(tmp_path, capsys):
    """A model with more rows than its tokenizer has tokens keeps its size."""
    plan = {"tiny": True, "model.config": {**LLAMA, "vocab_size": 640}, "model.add_tokens": NEW}
    job = read_job(write_run(tmp_path / "run", {**plan, "adapter": LORA}))
    tokenizer, model = built(job)
    assert model.get_base_model().config.vocab_size == 640
    indices = model.peft_config["default"].trainable_token_indices
    assert list(indices.values()) == [tokenizer.convert_tokens_to_ids(NEW)] * 2
    assert "the added tokens take spare rows of the embedding, which has 640" in capsys.readouterr().out


def test_tokens_that_exist_are_reported_and_trained(tmp_path, capsys):
    base = saved_base(tmp_path, "untied")
    job = job_for(tmp_path / "run", base, adapter=LORA, model__add_tokens=["<|bos|>", NEW[0]])
    tokenizer, model = built(job)
    assert len(tokenizer) == ROWS + 1
    said = capsys.readouterr().out
    assert "of model.add_tokens the tokenizer has already: '<|bos|>'" in said
    indices = model.peft_config["default"].trainable_token_indices
    assert indices["lm_head"] == [tokenizer.convert_tokens_to_ids("<|bos|>"), ROWS]


def test_other_tokens_without_a_row_are_refused(tmp_path):
    base = saved_base(tmp_path, "untied")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["foreign"])
    tokenizer.save_pretrained(tmp_path / "other")
    for added in ([], NEW):
        changes = {"model__tokenizer": str(tmp_path / "other"), "model__add_tokens": added}
        job = job_for(tmp_path / f"run-{len(added)}", base, **changes)
        with pytest.raises(RecipeError, match=f"go up to {ROWS}, the model's embedding has {ROWS} rows"):
            load_model(job, load_processing(job))


@pytest.mark.parametrize("again", ["the base's tokenizer", "the adapter's tokenizer"])
def test_an_adapter_with_added_tokens_is_continued(tmp_path, again):
    base = saved_base(tmp_path, "untied")
    tokenizer, model = built(job_for(tmp_path / "first", base, adapter=LORA))
    batch = batch_of(tokenizer)
    train_steps(model, batch)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "adapter")
    going_on: dict[str, Any] = {"adapter__type": "lora", "adapter__path": str(tmp_path / "adapter")}
    if again == "the adapter's tokenizer":
        going_on["model__tokenizer"] = str(tmp_path / "adapter")
    _, continued = built(job_for(tmp_path / "second", base, **going_on))
    assert torch.allclose(logits_of(continued, batch), logits_of(model, batch), atol=1e-5)
    trained = [name for name, parameter in continued.named_parameters() if parameter.requires_grad]
    assert sum("trainable_tokens_delta" in name for name in trained) == 2
    train_steps(continued, batch, steps=2)
    continued.save_pretrained(tmp_path / "third")
    for tokens, message in (
        ([], "does not fit the model"),
        ([*NEW, "third"], "trained without these tokens"),
    ):
        plan = {**going_on, "model__add_tokens": tokens}
        plan.pop("model__tokenizer", None)
        with pytest.raises(RecipeError, match=message):
            built(job_for(tmp_path / f"refused-{len(tokens)}", base, **plan))


def test_plain_adapters_are_continued_as_before(tmp_path):
    base = saved_base(tmp_path, "untied")
    _, model = built(job_for(tmp_path / "first", base, adapter=LORA, model__add_tokens=[]))
    model.save_pretrained(tmp_path / "adapter")
    changes = {"adapter__type": "lora", "adapter__path": str(tmp_path / "adapter")}
    with pytest.raises(RecipeError, match="trained without these tokens"):
        built(job_for(tmp_path / "second", base, **changes))


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_embeddings_that_are_trained_whole_stay_so(tmp_path, name):
    base = saved_base(tmp_path, name)
    adapter = {**LORA, "modules_to_save": ["embed_tokens"]}
    tokenizer, model = built(job_for(tmp_path / "run", base, name, adapter=adapter))
    indices = model.peft_config["default"].trainable_token_indices
    assert indices == ({"lm_head": [ROWS, ROWS + 1]} if name == "untied" else None)
    batch = batch_of(tokenizer)
    train_steps(model, batch)
    model.save_pretrained(tmp_path / "adapter")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(base)
    fresh.resize_token_embeddings(len(tokenizer))
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert torch.allclose(logits_of(loaded, batch), logits_of(model, batch), atol=1e-5)


def test_lora_on_an_embedding_with_added_tokens_is_refused(tmp_path):
    adapter = {**LORA, "target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(RecipeError, match="lm_head cannot have both LoRA and trained rows"):
        built(job_for(tmp_path / "run", saved_base(tmp_path, "untied"), adapter=adapter))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_a_16_bit_base_are_trained_in_fp32(tmp_path, dtype):
    """As peft has all that it adds: a bf16 row of size 0.02 does not move by a step of 1e-5."""
    base = saved_base(tmp_path, "untied")
    _, model = built(job_for(tmp_path / "run", base, adapter=LORA, model__dtype=dtype))
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_quantised_base_takes_added_tokens(tmp_path, quantization):
    base = saved_base(tmp_path, "untied")
    kbit = {
        "model__device_map": "local",
        "model__prepare_for_kbit": True,
        "model__quantization": quantization,
    }
    job = job_for(tmp_path / "run", base, adapter=LORA, **kbit)
    tokenizer, model = built(job)
    batch = batch_of(tokenizer)
    train_steps(model, batch)
    for part in (model, tokenizer):
        part.save_pretrained(job.run_dir / "adapter")
    torch.manual_seed(1)
    loaded = load_model(job, transformers.AutoTokenizer.from_pretrained(job.run_dir / "adapter"))
    loaded = peft.PeftModel.from_pretrained(loaded, job.run_dir / "adapter")
    assert torch.allclose(logits_of(loaded, batch), logits_of(model, batch), atol=1e-2)


ZERO3 = """
    import os, sys, socket, torch, transformers
    from pathlib import Path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port}
    from launcher.train.model.adapters import attach_adapter
    from launcher.train.job import read_job
    from launcher.train.model.models import load_model
    from launcher.train.model.processing import load_processing

    job = read_job(Path(sys.argv[1]))
    fields = job.fields(job.trainer)
    args = transformers.TrainingArguments(sys.argv[2], deepspeed=str(job.ds_config), **fields)
    import deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    tokenizer = load_processing(job)
    model = attach_adapter(job, load_model(job, tokenizer), tokenizer)
    ids = tokenizer(sys.argv[3], return_tensors="pt")["input_ids"][0]
    trainer = transformers.Trainer(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 16)
    trainer.train()
    trainer.save_model(sys.argv[2])
    with torch.no_grad():
        logits = trainer.model(input_ids=ids.repeat(4, 1)).logits
    torch.save({"ids": ids, "logits": logits}, Path(sys.argv[2]) / "seen.pt")
    from launcher.train.worker import leave
    leave(0)
    """


@pytest.mark.slow(share=2)
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_under_zero3_whole_embeddings_are_trained(tmp_path, name):
    base = saved_base(tmp_path, name)
    changes = {"sharding__engine": "deepspeed", "sharding__zero_stage": 3, "adapter": LORA}
    job = job_for(tmp_path / "run", base, **changes)
    (job.run_dir / "ds_config.json").write_text(json.dumps(zero_config(3)))
    out = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(ZERO3), str(job.run_dir), str(out), TEXTS[0]]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(ZeRO-3 cannot train single rows)" in done.stdout
    fresh = transformers.AutoModelForCausalLM.from_pretrained(base)
    fresh.resize_token_embeddings(ROWS + 2)
    loaded = peft.PeftModel.from_pretrained(fresh, out)
    seen = torch.load(out / "seen.pt")
    assert torch.allclose(
        logits_of(loaded, {"input_ids": seen["ids"][None]})[0], seen["logits"][0], atol=1e-5
    )


def test_which_matrices_a_model_has(tmp_path):
    made = {
        name: transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**CONFIGS[name])
        )
        for name in ("untied", "tied", "biased-head")
    }
    assert find_embeddings(made["untied"]).names == ("model.embed_tokens", "lm_head")
    assert find_embeddings(made["tied"]).names == ("model.embed_tokens",)
    assert find_embeddings(made["biased-head"]).biased
    bert = {"model_type": "bert", "vocab_size": ROWS, **SMALL}
    classifier = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model(**bert)
    )
    assert find_embeddings(classifier).names == ("bert.embeddings.word_embeddings",)
