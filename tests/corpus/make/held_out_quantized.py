"""Held-out logs: adapters and quantisation on T5, OPT, GPT-2 and ViT.

Each function is a script of its own, see capture.py.
Run: python -m tests.corpus.make.held_out_quantized [name…]
"""

from __future__ import annotations

from tests.corpus.make.capture import main
from tests.corpus.make.held_out_shell import DOCKER, SRUN, held, shell


@held("target-modules-missing", "t5-cli", arguments=("--lora_target", "q_proj,v_proj"))
def target_modules_missing():
    import argparse

    from peft import LoraConfig, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    parser = argparse.ArgumentParser()
    parser.add_argument("--lora_target", type=lambda names: names.split(","))
    targets = parser.parse_args().lora_target
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )
    try:
        get_peft_model(t5, LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=targets))
    except ValueError as error:
        raise RuntimeError("building the student failed, see above") from error


@shell("target-modules-none", "own-network", f"python -u train.py 2>&1 | {DOCKER}")
def target_modules_none():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import PretrainedConfig, PreTrainedModel

    class Scorer(PreTrainedModel):
        config_class = type("ScorerConfig", (PretrainedConfig,), {"model_type": "scorer"})

        def __init__(self, config):
            super().__init__(config)
            self.body = torch.nn.Linear(8, 8)
            self.post_init()

    get_peft_model(Scorer(Scorer.config_class()), LoraConfig(r=4, lora_alpha=8))


@held(
    "lora-bad-values",
    "yaml-rank",
    files={"lora.yaml": "r: 0\nlora_alpha: 16\ntarget_modules: [query, value]\n"},
)
def lora_bad_values():
    from pathlib import Path

    import yaml
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    bert = BertModel(BertConfig(vocab_size=64, **sizes))
    inject_adapter_in_model(LoraConfig(**yaml.safe_load(Path("lora.yaml").read_text())), bert)


@held("resized-embeddings-lost", "gpt2")
def resized_embeddings_lost():
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "tie_word_embeddings": False}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, **shape))
    base.resize_token_embeddings(70)
    tuned = get_peft_model(base, LoraConfig(target_modules=["c_attn"], modules_to_save=["wte", "lm_head"]))
    tuned.save_pretrained("sft")
    print("adapter saved to sft/, starting evaluation")
    PeftModel.from_pretrained(GPT2LMHeadModel(GPT2Config(vocab_size=64, **shape)), "sft").merge_and_unload()


@held("tied-weights-adapter", "gpt2-warning-as-error", env={"PYTHONWARNINGS": "error::UserWarning"})
def tied_weights_adapter():
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32))
    get_peft_model(base, LoraConfig(target_modules=["c_attn"], modules_to_save=["lm_head"]))


@held("double-peft", "two-stages", env={"PYTHONWARNINGS": "always"})
def double_peft():
    from peft import IA3Config, LoraConfig, get_peft_model
    from transformers import OPTConfig, OPTForCausalLM

    opt = OPTForCausalLM(
        OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, ffn_dim=64, num_attention_heads=4)
    )
    stage1 = get_peft_model(opt, LoraConfig(target_modules=["q_proj"]))
    print("stage 1 ready; adding stage 2")
    get_peft_model(stage1, IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"])).train()


@held("purely-quantized", "t5-int8")
def purely_quantized():
    from transformers import (
        BitsAndBytesConfig,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    shape = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(shape).save_pretrained("t5")
    t5 = T5ForConditionalGeneration.from_pretrained(
        "t5", quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    Seq2SeqTrainer(
        t5, Seq2SeqTrainingArguments("summaries", use_cpu=True, report_to="none"), train_dataset=[{}]
    )


@held("load-in-kwargs-removed", "pipeline", env={"FORCE_COLOR": "1", "PYTHONFAULTHANDLER": "1"})
def load_in_removed():
    import tiny
    from transformers import pipeline

    folder = tiny.saved("base")
    answers = pipeline("text-generation", model=folder, model_kwargs={"load_in_4bit": True})
    print(answers("w1 w2 w3", max_new_tokens=3))


@shell(
    "bnb-both", "yaml", f"python -u train.py 2>&1 | {SRUN}",
    files={"quant.yaml": "load_in_8bit: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\n"},
)  # fmt: skip
def bnb_both():
    from pathlib import Path

    import yaml
    from transformers import BitsAndBytesConfig

    print(BitsAndBytesConfig(**yaml.safe_load(Path("quant.yaml").read_text())))


@held("bnb-bad-quant-type", "opt")
def bnb_bad_quant_type():
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, OPTConfig, OPTForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 64, "num_attention_heads": 4}
    OPTForCausalLM(OPTConfig(vocab_size=64, word_embed_proj_dim=32, **shape)).save_pretrained("opt")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="int4")
    AutoModelForCausalLM.from_pretrained("opt", quantization_config=config)


@held("kbit-half", "t5-generate")
def kbit_half():
    from transformers import BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

    shape = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(shape).save_pretrained("t5")
    t5 = T5ForConditionalGeneration.from_pretrained(
        "t5", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    try:
        t5 = t5.half()
    finally:
        print("cleaning up workers")


@held("kbit-cpu-offload", "disk-map")
def kbit_cpu_offload():
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, OPTConfig, OPTForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 64, "num_attention_heads": 4}
    OPTForCausalLM(OPTConfig(vocab_size=64, word_embed_proj_dim=32, **shape)).save_pretrained("opt")
    where = {"model.decoder.embed_tokens": 0, "model.decoder.embed_positions": 0, "lm_head": 0}
    where |= {"model.decoder.layers.0": "disk", "model.decoder.final_layer_norm": 0}
    config = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(
        "opt", quantization_config=config, device_map=where, offload_folder="off"
    )


if __name__ == "__main__":
    main()
