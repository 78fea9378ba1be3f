"""Models: their layers, sizes, configurations and adapters, and what runs of them measured."""
