"""Held-out logs: adapters and quantisation on T5, OPT, GPT-2 and ViT.

Each function is a script of its own, see capture.py.
Run: python -m tools.corpus.held_out_quantized [name…]
"""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held


@held("tied-weights-adapter", "gpt2-warning-as-error", env={"PYTHONWARNINGS": "error::UserWarning"})
def tied_weights_adapter():
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32))
    get_peft_model(base, LoraConfig(target_modules=["c_attn"], modules_to_save=["lm_head"]))


if __name__ == "__main__":
    main()
