"""Find the known failure in the logs of a run, its fix, and the recipe lines to change."""
