"""Is attention that does not grow with the length worse, and does Embformer need keys that tell what
came before? Kinds of attention on prose, on facts, on a needle in prose (analysis/context.py), and on
pairs of a key and a value, all told once and then asked for in any order.
"""

import random
from functools import partial
from pathlib import Path

import torch

from analysis.context import KEYS, SHORT, VALUES, needles_found, prepare_corpora
from analysis.experiment import Experiment, spread
from analysis.runs import curve, row, with_edits
from common import locked
from training.checkpoints import load_model
from training.records import markdown, plt, read_run

LONG = dict(data_dir="moby-dick", block_size=1024, batch_size=2, learning_rate=0.012)
KINDS = {
    name: dict(ffn="embformer", attention=name)
    for name in ("full", "window", "count", "window,window,full", "window,window,count")
}
KINDS["full, previous heads"] = dict(KINDS["full"], previous_heads=2)
