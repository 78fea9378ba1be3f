"""TODO: one line on this package."""
