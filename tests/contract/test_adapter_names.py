"""Adapters are loaded by the names that they were saved under, where a checkpoint's weights are renamed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments  # noqa: E402

from launcher.planner.narrow import narrow_config  # noqa: E402
from launcher.train.model.adapters import _continue_adapter  # noqa: E402
from launcher.train.results.trained import on_base  # noqa: E402
from launcher.train.upstream.trainer_seams import SeamTrainer  # noqa: E402

IDS = torch.arange(5, 21)[None]


def base(kind: str = "laguna") -> Any:
    """Of a published Laguna `mlp.shared_expert` is read as `mlp.shared_experts`."""
    whole = AutoConfig.for_model(kind).to_dict() | {"model_type": kind}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**narrow_config(whole))).eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder of an adapter that changes the logits, those logits)."""
    folder = tmp_path_factory.mktemp("adapter")
    model = get_peft_model(base(), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    assert not torch.allclose(logits(model), logits(base()), atol=1e-3)
    return folder, logits(model)


def test_peft_alone_loses_weights(saved: tuple[Path, Any]) -> None:
    """If this fails, peft was fixed, and `adapters_by_own_names` can go."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        alone = PeftModel.from_pretrained(base(), str(saved[0]))
    assert any("Found missing adapter keys" in str(one.message) for one in heard)
    assert not torch.allclose(logits(alone), saved[1], atol=1e-3)


@pytest.mark.parametrize("load", [on_base, lambda model, folder: _continue_adapter(model, str(folder), ())])
def test_an_adapter_has_the_logits_that_it_had(saved: tuple[Path, Any], load: Any) -> None:
    assert torch.equal(logits(load(base(), saved[0])), saved[1])


def test_a_resumed_run_has_its_adapter(saved: tuple[Path, Any], tmp_path: Path) -> None:
    model = get_peft_model(base(), LoraConfig(r=4, target_modules="all-linear"))
    trainer = SeamTrainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    trainer._load_from_checkpoint(str(saved[0]))
    assert torch.equal(logits(trainer.model), saved[1])


@pytest.mark.parametrize(
    ("kind", "more", "renamed"),
    [
        ("laguna", {}, None),
        ("laguna", {"use_dora": True, "target_modules": ["gate_proj"]}, None),
        ("inkling2_text", {}, None),
        ("laguna", {}, ("mlp.shared_experts.", "mlp.shared_expert.")),
    ],
)
def test_only_an_adapter_under_other_names_than_the_models_own_is_renamed(
    kind: str, more: dict[str, Any], renamed: tuple[str, str] | None, tmp_path: Path
) -> None:
    """`renamed`: to the names of the published checkpoint."""
    model = get_peft_model(base(kind), LoraConfig(**{"target_modules": "all-linear", **more}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    if renamed:
        old = {name.replace(*renamed): tensor for name, tensor in weights.items()}
        assert old.keys() != weights.keys()
        save_file(old, tmp_path / "adapter_model.safetensors")
    loaded = on_base(base(kind), tmp_path)
    found = get_peft_model_state_dict(loaded)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert torch.equal(logits(loaded), logits(model))
