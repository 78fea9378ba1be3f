"""The rehearsal: verdicts over what several nodes measured."""
