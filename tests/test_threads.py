"""Threads, locks and random streams: what they may change, and what not."""

import io
import os
import subprocess
import sys
import threading

import pytest
import torch
from conftest import ROOT, assert_same_run, small_run
from tqdm import tqdm

from common import run_command


@pytest.mark.parametrize(
    ("command", "given", "spin"),
    [
        ("train", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("train", {"OMP_WAIT_POLICY": "passive"}, "None"),
        *((command, {}, "1000") for command in ("train", "sample", "edit", "convert", "lab.bench")),
    ],
)
def test_spinning_is_limited_before_torch_is_loaded(command, given, spin):
    """A module that stands in for torch notes what it finds when it is loaded."""
    code = f"""
import importlib.abc, os, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
import {command}
"""
    clean = {n: v for n, v in os.environ.items() if n not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**clean, **given},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip().splitlines()[-1:] == [spin], done.stderr


def test_threads_change_no_digit(data, tmp_path):
    sizes = dict(n_embd=64, batch_size=16, max_iters=1)
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            runs.append(small_run(data, tmp_path / str(threads), **sizes))
        finally:
            torch.set_num_threads(1)
    assert_same_run(*runs)


def test_a_bar_takes_no_lock_that_processes_share():
    """It starts a process where those do not fork, which warns if ours ends without cleaning up."""
    run_command(lambda: None)
    with tqdm(range(1), file=io.StringIO()) as bar:
        assert type(bar.get_lock()) is type(threading.RLock())
