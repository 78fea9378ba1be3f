"""Rows of a recipe turned into token ids and labels."""
