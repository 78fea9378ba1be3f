"""Models whose files name their weights otherwise than their modules go on, and end, with what was saved.

transformers saves a ViT and a Mixtral under the names of their first releases, experts one by one.
"""

from __future__ import annotations

import pytest
from cases import cases

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from launcher.errors import RunFailed
from launcher.train.trainers import PlannedTrainer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def vit(dropout: float = 0.1):
    return ViTForImageClassification(
        ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=dropout)
    )


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            **SIZES, vocab_size=64, num_key_value_heads=2, num_local_experts=3, attention_dropout=0.1,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


def lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        vit(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    )


def batch_norm():
    """Running means are no parameters."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    )


MODELS = {"vit": vit, "mixtral": mixtral, "lora": lora, "batch-norm": batch_norm}


def rows(name: str) -> list[dict]:
    set_seed(1)
    if name == "mixtral":
        return [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 64, (16, 6))]
    return [{"pixel_values": torch.randn(3, 8, 8), "labels": number % 3} for number in range(16)]


def train(folder, name, *, seed=0, resume=None, steps=6, model=None, callbacks=None, **more):
    """A trainer that has trained; seed: of the weights it begins from."""
    set_seed(0 if name == "lora" else seed)  # the base of an adapter is not in its checkpoints
    made = MODELS[name]() if model is None else model
    args = TrainingArguments(
        str(folder / "checkpoints"), use_cpu=True, max_steps=steps, save_steps=2, learning_rate=1e-2,
        per_device_train_batch_size=4, logging_steps=1, report_to="none", disable_tqdm=True, **more,
    )  # fmt: skip
    trainer = PlannedTrainer(
        model=made, args=args, train_dataset=rows(name), eval_dataset=[], callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def same(one, other) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", cases(MODELS, "mixtral", "lora"))
def test_it_goes_on_exactly(name, tmp_path):
    """Upstream goes on with the first weights, and logs a warning."""
    whole = train(tmp_path / "whole", name)
    checkpoint = tmp_path / "whole" / "checkpoints" / "checkpoint-4"
    resumed = train(tmp_path / "resumed", name, seed=5, resume=checkpoint)
    assert same(whole.model, resumed.model)
    losses = [[row["loss"] for row in made.state.log_history if "loss" in row] for made in (whole, resumed)]
    assert losses[0] == losses[1]


class Keeps(TrainerCallback):
    """The weights as they were at step 2."""

    def on_save(self, args, state, control, **given):
        if state.global_step == 2:
            self.weights = {name: value.clone() for name, value in given["model"].state_dict().items()}


@pytest.mark.parametrize("name", cases(MODELS, "mixtral", "lora"))
def test_it_ends_with_the_best_weights(name, tmp_path, monkeypatch):
    """Upstream ends with the last ones, but for a few that have the same name in the file."""

    def evaluate(self, *_, **__):
        numbers = {"eval_loss": float(self.state.global_step)}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, numbers)
        return numbers

    monkeypatch.setattr(PlannedTrainer, "evaluate", evaluate)
    kept = Keeps()
    trainer = train(
        tmp_path, name, callbacks=[kept], load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=False, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    assert trainer.state.best_global_step == 2
    ended = trainer.model.state_dict()
    assert ended.keys() == kept.weights.keys()
    assert all(torch.equal(ended[key], value) for key, value in kept.weights.items())


def test_a_model_that_was_loaded_goes_on_exactly(tmp_path):
    """Such a model remembers what was renamed when it was loaded."""
    set_seed(3)
    vit().save_pretrained(tmp_path / "first")
    made = [ViTForImageClassification.from_pretrained(tmp_path / "first") for _ in range(2)]
    whole = train(tmp_path, "vit", model=made[0])
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    assert same(whole.model, train(tmp_path, "vit", model=made[1], resume=checkpoint).model)


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path):
    train(tmp_path, "mixtral", steps=2)
    file = tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights, "the twin of a tied weight is not saved"
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(RunFailed, match=r"lacks 1 of the model's weights, first model\.norm\.weight"):
        train(tmp_path, "mixtral", resume=file.parent)


@pytest.mark.parametrize("name", cases(MODELS, "mixtral", "lora"))
def test_the_best_weights_of_other_ranks_are_read_by_name_too(name, tmp_path):
    """As at the end of a run under DeepSpeed; the buffers as well."""
    pytest.importorskip("deepspeed")
    from launcher.train.checkpoint.resuming import load_weights

    whole = train(tmp_path, name, steps=2)
    set_seed(0 if name == "lora" else 7)
    other = MODELS[name]()
    assert not same(whole.model, other)
    load_weights(other, tmp_path / "checkpoints" / "checkpoint-2")
    assert same(whole.model, other)
