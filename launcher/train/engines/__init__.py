"""What the engines need in the processes: shared copies, gathered weights, converted checkpoints."""
