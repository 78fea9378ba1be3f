"""What the user asks for: the recipe, its schema and its loading."""
