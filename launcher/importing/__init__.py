"""Other tools' files as a recipe: one reader for each, what could not be taken with its reason."""
