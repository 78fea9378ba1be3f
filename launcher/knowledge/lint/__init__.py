"""What is wrong with a DeepSpeed config, and with which line of it."""
