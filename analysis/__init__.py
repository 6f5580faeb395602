"""Questions about token-indexed models, each a function that ends in a table and a picture."""
