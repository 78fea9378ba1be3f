"""What is known to go wrong with this stack: one entry for each failure, one file for each field."""
