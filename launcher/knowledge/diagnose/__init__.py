"""From the logs of a failed run to the known failure behind them, its mend and the recipe lines to change."""
