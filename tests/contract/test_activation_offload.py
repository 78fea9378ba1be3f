"""Layers whose inputs wait in host memory learn what they learn without, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_runs import LORA, STEPS, column, make_ground, planned, trained, weights
from forked import KILL, Forks

from launcher.errors import RecipeError

if not find_spec("torch"):  # not imported here: that takes long
    pytest.skip("the training stack is not installed", allow_module_level=True)

MOVED = {"offload_activations": "cpu"}
RECOMPUTED = {"optim": "adamw_torch", "learning_rate": 1e-2, "activation_checkpointing": True}
ADAPTER = {"adapter": {**LORA, "lora_dropout": 0.1}}
NF4 = {**ADAPTER, "model": {"name_or_path": "model", "tokenizer": "tokenizer", "quantization": "nf4"}}
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process, nf4": (0, {"engine": "ddp"}, NF4),
    "ddp, lora": (2, {"engine": "ddp"}, ADAPTER),
    "ddp, full": (2, {"engine": "ddp"}, {}),
    "zero 2": (2, {"engine": "deepspeed", "zero_stage": 2}, {}),
    "zero 3": (2, {"engine": "deepspeed", "zero_stage": 3}, ADAPTER),
    "fsdp": (2, {"engine": "fsdp"}, {}),
    "fsdp, offload": (2, {"engine": "fsdp", "offload_param": "cpu"}, NF4),
    "sp_size": (2, {"engine": "deepspeed", "zero_stage": 3, "sp_size": 2}, {}),
    "in backward": (0, {"engine": "ddp", "optim_in_backward": True}, {"trainer": {"max_grad_norm": 0}}),
    "bf16": (0, {"engine": "ddp"}, {**ADAPTER, "precision": "bf16"}),
}
"""Name -> ranks, sharding, sections of the recipe."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Path:
    return make_ground(tmp_path_factory.mktemp("ground"), num_hidden_layers=3)


def said(name: str, **sharding: Any) -> dict[str, Any]:
    _, engine, sections = RUNS[name]
    trainer = {**RECOMPUTED, **sections.get("trainer", {})}
    return {**sections, "sharding": {**engine, **sharding}, "trainer": trainer}


def assert_same(one: Path, two: Path) -> None:
    import torch

    expected, found = weights(one), weights(two)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for name in ("loss", "grad_norm"):
        assert column(two, name) == column(one, name)
    assert len(set(column(one, "loss"))) > 1


COUNTED = """
from launcher.train import activation_offload
moves = activation_offload.OffloadedInputs._move

def counted(self, tensor):
    with open("FILE", "a") as file:
        print(tensor.element_size() * tensor.numel(), file=file)
    return moves(self, tensor)

activation_offload.OffloadedInputs._move = counted
"""


def counting(name: str, ground: Path, folder: Path, forks: Forks) -> tuple[Path, Mapping[str, str]]:
    """(Run directory, environment) of the run that moves its inputs, and counts them."""
    out, env = planned(said(name, **MOVED), ground, folder, forks, world=RUNS[name][0])
    with (folder / "hooks.py").open("a") as hooks:
        hooks.write(COUNTED.replace("FILE", str(folder / "moved")))
    return out, env


def moved(out: Path) -> list[str]:
    return (out.parent / "moved").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_learns_the_same_with_inputs_in_host_memory(name, ground, tmp_path, forks: Forks):
    world = RUNS[name][0]
    stays = trained(said(name), ground, tmp_path / "stays", forks, world=world)
    out, env = counting(name, ground, tmp_path / "moves", forks)
    ended = forks.run(out, world, env)
    assert set(ended.codes) == {0}, ended.said
    assert_same(stays, out)
    micro_steps = 4 if name == "sp_size" else 1
    assert len(moved(out)) == 3 * STEPS * max(world, 1) * micro_steps


def test_a_killed_run_goes_on_to_the_last_bit(ground, tmp_path, forks: Forks):
    name = "one process, nf4"
    straight = trained(said(name), ground, tmp_path / "straight", forks, world=0)
    out, env = counting(name, ground, tmp_path / "killed", forks)
    ended = forks.run(out, 0, {**env, KILL: "3"})
    assert ended.codes == (-9,), ended.said
    ended = forks.run(out, 0, {**env, "EFFILAUNCH_RESUME": "auto"})
    assert ended.codes == (0,), ended.said
    assert_same(straight, out)
    assert len(moved(out)) >= 3 * STEPS


# --- without a run --------------------------------------------------------------------------------------


def llama(layers: int = 4) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes)).train()


def t5() -> Any:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 3}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).train()


def gradients(model: Any, *, reentrant: bool = False, passes: int = 1) -> dict[str, Any]:
    """Of the sum of `passes` losses, whose forward passes all run before the backward pass."""
    import torch

    model.enable_input_require_grads()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.manual_seed(1)  # of the dropout
    rows = torch.randint(3, 64, (passes, 2, 8))
    sum(model(input_ids=ids, labels=ids).loss for ids in rows).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("make", "layers"), [(llama, 4), (t5, 6)])
def test_gradients_are_the_same_and_each_layer_moves_its_input_alone(
    make, layers, reentrant, monkeypatch
) -> None:
    import torch

    from launcher.train.activation_offload import OffloadedInputs, offload_activations

    expected = gradients(make(), reentrant=reentrant, passes=2)
    moved: list[int] = []
    move = OffloadedInputs._move
    count: Callable[..., Any] = lambda self, x: (moved.append(x.nbytes), move(self, x))[1]  # noqa: E731
    monkeypatch.setattr(OffloadedInputs, "_move", count)
    model = make()
    offload_activations(model)
    found = gradients(model, reentrant=reentrant, passes=2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert moved == 2 * layers * [4 * 2 * 8 * 32]


@pytest.fixture
def streams(monkeypatch) -> Any:
    import torch
    from streams import Streams

    found, made = Streams(), torch.empty_like

    def kept(*args: Any, **given: Any) -> torch.Tensor:
        tensor = made(*args, **given)
        if "pin_memory" in given:
            found.host.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    monkeypatch.setattr(torch, "empty_like", kept)
    return found


@pytest.mark.parametrize("passes", [1, 2])
def test_copies_and_computation_wait_for_each_other(passes, streams) -> None:
    from launcher.train.activation_offload import offload_activations

    model = llama()
    offload_activations(model)
    with streams:
        for _ in range(2):
            gradients(model, passes=passes)
    assert len(streams.host) == 2 * 4 * passes
    assert streams.races == []


def test_memory_of_an_input_that_no_layer_asks_for_is_free_after_its_copy(streams) -> None:
    import torch

    from launcher.train.activation_offload import OffloadedInputs

    inputs = OffloadedInputs()
    low, high = (inputs._move(torch.ones(8)) for _ in range(2))
    with streams:
        inputs._give(high)  # and fetch the lower one
        assert low.fetched
        behind = inputs._stream.seen[inputs._stream] - streams.current.seen.get(inputs._stream, 0)
        del low
    assert behind > 0
    assert streams.current.seen[inputs._stream] == inputs._stream.seen[inputs._stream]


def test_layers_are_at_most_one_ahead(monkeypatch) -> None:
    """On the device there are the input of the layer that runs backwards, and that of the next one."""
    from launcher.train import activation_offload

    inputs: list[Any] = []
    init = activation_offload._Input.__init__

    def made(self: Any, *args: Any) -> None:
        init(self, *args)
        inputs.append(self)

    monkeypatch.setattr(activation_offload._Input, "__init__", made)
    model = llama()
    activation_offload.offload_activations(model)
    there: list[tuple[int, list[int]]] = []

    def look(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            there.append((number, [i for i, one in enumerate(inputs) if one.device is not None]))

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(look(number))
    gradients(model)
    forwards, backwards = there[:4], there[4:]
    assert forwards == [(0, [0]), (1, [1]), (2, [2]), (3, [3])]
    # Its own input has been handed over, and is not counted any more.
    assert backwards == [(3, [2]), (2, [1]), (1, [0]), (0, [])]


def test_what_cannot_be_moved_is_refused() -> None:
    import torch

    from launcher.train.activation_offload import OffloadedInputs

    def plain(function: Callable[..., Any], *args: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(function, *args, use_reentrant=False)

    around = OffloadedInputs().around(plain)
    with pytest.raises(RecipeError) as caught:
        around(lambda: torch.ones(1))
    assert (caught.value.problems[0].code, caught.value.problems[0].path) == (
        "offload-activations", "sharding.offload_activations",
    )  # fmt: skip

    def changes(hidden: torch.Tensor) -> torch.Tensor:
        made = hidden.detach() * hidden.sum()
        with torch.no_grad():
            hidden.add_(1)
        return made

    out = around(changes, torch.ones(3, requires_grad=True) * 1)
    with pytest.raises(RecipeError):
        out.sum().backward()
