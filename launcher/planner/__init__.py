"""What is decided: pure functions of recipe and facts."""
