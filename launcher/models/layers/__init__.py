"""What layers are made of, and what their operations keep for the backward pass."""
