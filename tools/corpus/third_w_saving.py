"""Third held-out set: checkpoints that cannot be written, found or taken up again."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import CLOCK, shell


@shell("no-checkpoint", "w3-t5-wrapped", "python train.py 2>&1")
def no_checkpoint():
    import sys
    import traceback

    import tiny
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    args = Seq2SeqTrainingArguments("runs/t5-summaries", use_cpu=True, max_steps=4, report_to="none")
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )
    try:
        Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train(resume_from_checkpoint=True)
    except Exception as error:
        print("\x1b[31m[FATAL]\x1b[0m", "".join(traceback.format_exception_only(error)), file=sys.stderr)
        traceback.print_tb(error.__traceback__, limit=-2)
        sys.exit(1)


@shell("shared-tensors", "w3-save-file", f"python train.py 2>&1 | {CLOCK}")
def shared_tensors():
    import torch
    from accelerate import Accelerator
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    accelerator = Accelerator(cpu=True)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(3):
        ids = torch.randint(0, 64, (2, 16))
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.3f}")
    save_file(accelerator.unwrap_model(model).state_dict(), "model.safetensors")


if __name__ == "__main__":
    main()
