"""The house: which file may import which, read from the imports themselves."""

import ast

from conftest import ROOT, command

COMMANDS = ("train", "sample", "prepare", "edit", "convert", "bench", "analyze")
LAYERS = ("attention", "local_attention", "ngram", "stem", "embformer", "baselines", "config")
# From the top down: a file imports what stands below it, or beside it, but never in a circle.
FLOORS = [
    (*COMMANDS, "analysis", "tour"),
    ("training",),
    ("model",),
    (*LAYERS, "offload"),
    ("tables", "text"),
    ("common",),
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def imports() -> dict[str, set[str]]:
    """The modules of the project that each of its modules imports."""
    paths = {path.stem: path for path in ROOT.glob("*.py")}
    for room in FLOOR:
        paths.update({f"{room}.{path.stem}": path for path in ROOT.glob(f"{room}/*.py")})
    found = {}
    for name, path in paths.items():
        others = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                others.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                others.add(node.module)
                others.update(f"{node.module}.{alias.name}" for alias in node.names)
        found[name] = others & set(paths)
    return found


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_imports_lead_down_and_rooms_keep_to_themselves():
    for name, others in imports().items():
        room = room_of(name)
        for other in others:
            assert FLOOR[room_of(other)] >= FLOOR[room], f"{name} imports {other}"
            if room_of(other) == "analysis" and room != "analysis":
                assert name in ("analyze", "bench")
            if room in ("tables", "text"):
                assert room_of(other) in (room, "common"), f"{name} imports {other}"


def test_no_imports_lead_in_a_circle():
    left = imports()
    while left:
        free = [name for name, others in left.items() if not others & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]


def test_every_command_has_help():
    for name in COMMANDS:
        assert f"{name}.py" in command(f"{name}.py -h").stdout


def test_training_imports_only_what_it_needs():
    found = imports()
    needed = set()
    new = {"train"}
    while new:
        needed |= new
        new = set().union(*(found[name] for name in new)) - needed
    assert {"model", "text.tokenizer"} <= needed
    assert not needed & {"text.download", "text.documents", "convert", "prepare"}
    assert "analysis" not in {room_of(name) for name in needed}
