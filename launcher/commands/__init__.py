"""The commands: each gathers facts, calls the layers below and returns what is to be shown."""
