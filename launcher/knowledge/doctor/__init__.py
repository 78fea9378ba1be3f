"""Whether a machine can run a recipe."""
