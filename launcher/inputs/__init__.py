"""Collect what the planner and the commands read: recipe, hardware, model, first rows, finished runs."""
