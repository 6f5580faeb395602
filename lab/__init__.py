"""Questions about token-indexed models, each a function that prints tables."""
