"""The model of a plan: loaded, its tokenizer, head, adapter, attention and loss."""
