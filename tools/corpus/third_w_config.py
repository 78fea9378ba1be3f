"""Third held-out set: DeepSpeed configs that the Trainer or accelerate refuse."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import CLOCK, shell
from tools.corpus.third_w_base import AUTO, rank


@shell(
    "ds-hidden-size",
    "w3-encoder-decoder",
    f"python train.py 2>&1 | {CLOCK}",
    rank(29804),
    {
        "ds_z3.json": {
            **AUTO,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
        }
    },
)
def hidden_size():
    import tiny
    from transformers import (
        BertConfig,
        EncoderDecoderConfig,
        EncoderDecoderModel,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    args = Seq2SeqTrainingArguments(
        "bert2bert",
        deepspeed="ds_z3.json",
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to="none",
    )
    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**small), BertConfig(**small))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = EncoderDecoderModel(config=config)
    Seq2SeqTrainer(model, args, train_dataset=tiny.rows()).train()


if __name__ == "__main__":
    main()
