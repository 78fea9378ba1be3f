"""Checkpoints: written complete or not at all, verified, and what a resumed run takes from them."""
