"""Scripts that train with the DeepSpeed config ds.json beside them."""

from __future__ import annotations

AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def trainer():
    import sys

    import tiny
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        "out", deepspeed="ds.json", use_cpu=True, per_device_train_batch_size=4, max_steps=8,
        learning_rate=1e-3, report_to="none",
        **dict(pair.split("=") for pair in sys.argv[1:] if "--" not in pair),
    )  # fmt: skip
    Trainer(tiny.model(), args, train_dataset=tiny.rows()).train()


def engine():
    import deepspeed
    import tiny
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    model = tiny.model()
    model_engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config="ds.json"
    )
    loader = DataLoader(tiny.rows(), batch_size=4, collate_fn=default_data_collator)
    for batch in loader:
        loss = model_engine(**batch).loss
        model_engine.backward(loss)
        model_engine.step()
    print("last loss", loss.item(), scheduler)
