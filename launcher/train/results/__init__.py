"""What is done with a finished run: read back, evaluated, generated from, merged, published."""
