"""One training step of a plan's real model on fake tensors: what it allocates and frees."""
