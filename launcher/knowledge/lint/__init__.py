"""Lint DeepSpeed configs: findings with line and column, and edits that fix them."""
