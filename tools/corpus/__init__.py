"""Scripts that fail, or do not, with the real libraries; their output is the corpus of `diagnose`."""
