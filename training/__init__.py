"""One training run."""

import importlib


def find(name: str) -> type:
    """A class of this folder, such as "preference.Preference": what only some stages need is named
    where stages are, and imported by those."""
    module, _, kind = name.partition(".")
    return getattr(importlib.import_module(f"training.{module}"), kind)
