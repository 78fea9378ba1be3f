"""Held-out failures of quantised models."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held


@held("bnb-both", "v3-env")
def both_widths():
    import os

    import tiny
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def load(path):
        quantization = BitsAndBytesConfig(
            load_in_8bit=os.environ.get("LOAD_8BIT", "1") == "1",
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization)

    path = tiny.saved()
    for attempt in (1, 2):
        try:
            model = load(path)
            break
        except ValueError as error:
            print(f"attempt {attempt} failed: {error}", flush=True)
    print(model.get_memory_footprint())


if __name__ == "__main__":
    main()
