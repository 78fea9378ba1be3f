"""Experiments that plan and start runs: the memory ladder, the fault drill and the rehearsal."""
