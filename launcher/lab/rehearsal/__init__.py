"""The rehearsal (`doctor --rehearse`): the run's launcher and ranks measure instead of training."""
