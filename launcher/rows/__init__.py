"""Rows of data files: reading them, recognising their format, and their values in one shape. No torch."""
