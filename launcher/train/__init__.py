"""Inside the processes: the only place that imports torch."""
