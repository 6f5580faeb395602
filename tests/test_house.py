"""The house: which file may import which, what each says of others, and a layer of one's own."""

import ast
import re

from conftest import ROOT, command, config_source

COMMANDS = ("train", "sample", "prepare", "edit", "convert")
# From the top down: a file imports what stands below it, or beside it.
FLOORS = [
    (*COMMANDS, "lab"),
    ("training",),
    ("corpora",),
    ("relatives",),
    ("model",),
    ("stem", "embformer", "offload"),
    ("tables", "text"),
    ("common",),
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ALONE = {"lab", "relatives"}  # nobody else imports them
NEEDS = {  # of these rooms nothing but
    "relatives": {"model", "stem", "tables", "common"},
    "stem": set(),
    "embformer": set(),
    "tables": {"common"},
    "text": {"common"},
    "corpora": {"model", "text", "common"},
}


def imports() -> dict[str, set[str]]:
    """The modules of the project that each of its modules imports."""
    paths = {path.stem: path for path in ROOT.glob("*.py") if path.stem in FLOOR}
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
            there = room_of(other)
            assert FLOOR[there] >= FLOOR[room], f"{name} imports {other}"
            if there != room:
                assert there not in ALONE, f"{name} imports {other}"
                assert there in NEEDS.get(room, FLOOR), f"{name} imports {other}"


def test_every_command_has_help():
    for name in (*COMMANDS, "lab/analyze", "lab/bench"):
        assert f"python {name}.py" in command(f"{name}.py -h").stdout
    assert "dropout probability (0.0)" in command("train.py -h").stdout


def test_links_of_the_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "relatives/README.md"]:
        links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
        for name, anchor in links:
            target = page.parent / name if name else page
            assert target.exists(), f"{page}: {name}"
            if anchor:
                heads = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
                assert anchor in anchors, f"{page}: {name}#{anchor}"


def test_a_file_of_ones_own_hides_no_help(tmp_path, add_relative):
    add_relative("mine", config_source('share: float = flag(0.5, "of rows, 50 % is half")'))
    (tmp_path / "latin.py").write_bytes(
        "# é\nclass Decoder(model.Decoder): pass\n".encode("latin1")
    )
    assert "of rows, 50 % is half" in command("train.py --ffn mine -h").stdout
