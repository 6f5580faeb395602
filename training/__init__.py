"""A training run, and what is done with its model: decoding, edits, tables in place of layers."""
