"""What compiling each layer (model.compile_blocks) saves of what it keeps for the backward pass, on a CPU.

    python benchmarks/compiled_layers.py [MODEL …]   one layer: bytes that autograd keeps, eager and compiled
    python benchmarks/compiled_layers.py --steps     four layers: what a step allocates, eager and compiled

Bytes of a layer are per token and hidden unit. Without `--steps` the graph that AOTAutograd's partitioner
splits runs uncompiled, which keeps the same tensors as inductor's code (compared for Llama) and needs no C++
compiler.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import profiled
import torch
from torch.autograd.graph import saved_tensors_hooks

ROWS, TOKENS, HIDDEN = 2, 512, 512
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip
_GPT: dict[str, Any] = {"n_embd": HIDDEN, "n_head": 8, "n_positions": 1024, "vocab_size": 256}
_GPT |= dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 64},
    "gemma": {**_SIZES, "head_dim": 64},
    "gpt2": _GPT,
    "gemma3_text": {**_SIZES, "head_dim": 64},
}
PRECISIONS = ("fp32", "bf16", "bf16-true")


def build(name: str, precision: str, layers: int, *, lora: bool = False) -> Any:
    """The model as a plan trains it: mixed precision has float32 weights, beside an adapter 16-bit ones."""
    import peft
    import transformers

    torch._dynamo.reset()
    torch.manual_seed(0)
    depth = {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    config = transformers.AutoConfig.for_model(name, **MODELS[name], **depth)
    narrow = precision == "bf16-true" or (lora and precision == "bf16")
    dtype = torch.bfloat16 if narrow else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    return model.train()


def forward(model: Any, precision: str, rows: int, tokens: int) -> Any:
    """The loss; the embedding's output asks for a gradient, also where it is frozen."""
    ids = torch.randint(0, 256, (rows, tokens))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return model(inputs_embeds=embedded, labels=ids).loss


def kept(name: str, precision: str, *, lora: bool, compiled: bool) -> int:
    """Bytes that one layer keeps, without the model's own tensors."""
    from launcher.train.model.models import repeated_layers

    model = build(name, precision, 1, lora=lora)
    (layer,) = repeated_layers(model)
    if compiled:
        layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}
    inside = False

    def switch(on: bool) -> None:
        nonlocal inside
        inside = on

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if inside and place not in own:
            found.setdefault(place, tensor)
        return tensor

    forward(model, precision, ROWS, TOKENS).backward()  # compiles
    layer.register_forward_pre_hook(lambda *_: switch(True))
    layer.register_forward_hook(lambda *_: switch(False))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, precision, ROWS, TOKENS)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def step(name: str, precision: str, *, checkpointing: bool, compiled: bool) -> int:
    """Bytes that a forward and backward pass allocates at its peak, gradients included."""
    from launcher.train.model.models import repeated_layers

    model = build(name, precision, 4)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in repeated_layers(model) if compiled else ():
        layer.compile(dynamic=True)

    def run() -> None:
        forward(model, precision, 4, 256).backward()
        model.zero_grad(set_to_none=True)

    run()
    profiled.tensor_bytes = lambda: 0  # the compiler's own tensors have no storage to look at
    return profiled.peak_bytes(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[], help=", ".join(MODELS))
    parser.add_argument("--steps", action="store_true", help="measure steps in place of one layer")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    per_value = 1 if options.steps else ROWS * TOKENS * HIDDEN
    for name in options.models or (("llama", "qwen3") if options.steps else MODELS):
        for precision in ("fp32", "bf16-true") if options.steps else PRECISIONS:
            for on in (False, True):
                if options.steps:
                    what, pair = (
                        "checkpointing",
                        [step(name, precision, checkpointing=on, compiled=c) for c in (False, True)],
                    )
                else:
                    what, pair = "lora", [kept(name, precision, lora=on, compiled=c) for c in (False, True)]
                eager, compiled = (size / per_value for size in pair)
                print(f"{name:<12}{precision:<10}{what if on else '':<14}{eager:>14,.1f}{compiled:>14,.1f}"
                      f"{compiled / eager - 1:>8.0%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
