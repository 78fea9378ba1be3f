"""effilaunch: plans and launches Hugging Face `Trainer` fine-tunes from one YAML recipe."""

__version__ = "0.2.0"
