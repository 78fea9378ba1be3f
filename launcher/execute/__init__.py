"""What happens: processes, signals, the run directory."""
