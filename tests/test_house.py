"""The house: which file may import which, read from the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

COMMANDS = ("train", "sample", "prepare", "edit", "bench", "analyze")
# From the top down: a file imports what stands below it, or beside it, but never in a circle.
FLOORS = [
    (*COMMANDS, "analysis"),
    ("training",),
    ("model",),
    ("attention", "stem", "embformer", "baselines", "offload", "config"),
    ("tables", "text"),
    ("common",),
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def imports() -> dict[str, set[str]]:
    """The modules of the project that each of its modules imports."""
    paths = {path: path.stem for path in ROOT.glob("*.py")}
    paths |= {p: f"{p.parent.name}.{p.stem}" for room in FLOOR for p in ROOT.glob(f"{room}/*.py")}
    found = {}
    for path, name in paths.items():
        found[name] = set()
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found[name] |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return {name: others & set(found) for name, others in found.items()}


def test_every_file_has_its_floor_and_imports_lead_down():
    for name, others in imports().items():
        floor = FLOOR[name.split(".")[0]]
        for other in others:
            assert FLOOR[other.split(".")[0]] >= floor, f"{name} imports {other}, which is above it"


def test_tables_know_nothing_of_text_and_neither_knows_models():
    for name, others in imports().items():
        room = name.split(".")[0]
        if room in ("tables", "text"):
            assert {other.split(".")[0] for other in others} <= {room, "common"}, name


def test_no_imports_lead_in_a_circle():
    left = imports()
    while left:
        free = [name for name, others in left.items() if not others & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]


def test_every_file_reads_in_one_sitting():
    """No Python file outside tests/ has more than 400 lines."""
    paths = [path for room in (".", *FLOOR) for path in ROOT.glob(f"{room}/*.py")]
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert len(lengths) > 20 and {n: size for n, size in lengths.items() if size > 400} == {}


def test_the_root_is_the_system():
    assert len(list(ROOT.glob("*.py"))) <= 14


def test_every_command_starts_by_itself(tmp_path):
    """In a process of its own, where nothing is imported yet, in any folder."""
    running = {
        name: subprocess.Popen(
            [sys.executable, ROOT / f"{name}.py", "-h"], cwd=tmp_path, stdout=subprocess.PIPE
        )
        for name in COMMANDS
    }
    for name, process in running.items():
        assert f"{name}.py" in process.communicate()[0].decode() and process.returncode == 0
