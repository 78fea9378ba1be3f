"""What is there: devices, model configurations, installed software."""
