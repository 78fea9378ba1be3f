"""Held-out logs: precision and training adapters, as other models, entry points and launchers show it.

Each function is a script of its own, see capture.py.
Run: python -m tools.corpus.held_out_model [name…]
"""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import held, shell


@held("adapter-not-trainable", "ddp", ranks=2, launcher="torchrun")
def adapter_not_trainable_ddp():
    import os

    import tiny
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.distributed.init_process_group("gloo")
    stage1 = f"stage1-{os.environ['RANK']}"
    get_peft_model(tiny.model(), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(stage1)
    model = PeftModel.from_pretrained(tiny.model(), stage1)
    model.print_trainable_parameters()
    torch.nn.parallel.DistributedDataParallel(model)


@held("adapter-not-trainable", "empty-optimizer")
def adapter_not_trainable_optimizer():
    import tiny
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, PeftModel, get_peft_model

    get_peft_model(tiny.model(), LoraConfig(task_type="CAUSAL_LM")).save_pretrained("round1")
    accelerator = Accelerator(cpu=True)
    model = PeftModel.from_pretrained(tiny.model(), "round1")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    model, optimizer = accelerator.prepare(model, optimizer)


@held("kbit-reentrant", "opt-int8", ranks=2, launcher="torchrun", env={"TORCH_DISTRIBUTED_DEBUG": "INFO"})
def kbit_reentrant():
    import os

    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, OPTConfig, OPTForCausalLM

    folder = f"opt-{os.environ['RANK']}"
    OPTForCausalLM(
        OPTConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
            word_embed_proj_dim=32, max_position_embeddings=64,
        )
    ).save_pretrained(folder)  # fmt: skip
    torch.distributed.init_process_group("gloo")
    base = OPTForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    model = get_peft_model(
        prepare_model_for_kbit_training(base), LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    model.train()
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ids = torch.randint(4, 64, (2, 12))
    ddp(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()


@shell("checkpointing-renamed", "as-error", "python -W error::FutureWarning train.py 2>&1")
def checkpointing_renamed():
    from trl import SFTConfig

    print(SFTConfig("out", gradient_checkpointing=True, use_cpu=True, bf16=False, report_to="none"))


if __name__ == "__main__":
    main()
