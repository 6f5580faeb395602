"""Texts that are made here, and what a model that has read them is asked."""
