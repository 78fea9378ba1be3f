"""What commands gather before they plan: facts, model specs, traces, the first rows of data."""
