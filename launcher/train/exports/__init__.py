"""Exports of a result to the programs that use it."""
