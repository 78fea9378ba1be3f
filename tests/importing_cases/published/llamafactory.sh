FORCE_TORCHRUN=1 llamafactory-cli train ../llamafactory_lora.yaml \
    learning_rate=1e-5 \
    logging_steps=1
