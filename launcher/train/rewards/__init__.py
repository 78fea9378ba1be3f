"""Reward functions: ours, the user's, how they are called and tried, and what they gave."""
