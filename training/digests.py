"""Which files of code a model is made of, by their digests: what was trained with one formula is
another model with the next."""

import ast
import hashlib
import sys
from pathlib import Path

import model

CORE = ("model.py", "stem.py", "embformer.py")  # of all models


def digests(ffn: str, attention: str) -> dict[str, str]:
    """The digest of each file by its name, see `path_of`: of CORE, and of the files of relatives/
    that kinds of --ffn and --attention are made of, their own, if they have one, and what it
    imports from there."""
    root = Path(model.__file__).parent
    found = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in CORE}
    files = set(model.RELATIVES.glob("*.py"))  # a checkpoint may name others, as ../mine
    waiting = [ffn, *(kind.partition(":")[0] for kind in attention.split(","))]
    while waiting:
        name = waiting.pop()
        path = model.RELATIVES / f"{name}.py"
        if name in found or path not in files:
            continue
        code = path.read_bytes()
        found[name] = hashlib.sha256(code).hexdigest()
        for node in ast.walk(ast.parse(code, str(path))):
            # Whatever an import names: what is no file of relatives/ is passed over above.
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                names.append(getattr(node, "module", None) or "")
                waiting += [name.removeprefix("relatives.") for name in names]
    return found


imported: dict[str, tuple] = {}  # what Python made of a file when it was first asked, its digest


def digests_of_imported(config: model.ModelConfig) -> dict[str, str]:
    """The `digests` of a model's code as this process runs it: Python reads a file once. What is
    changed later, during a run or between two in a notebook, is not what is trained."""
    found = digests(config.ffn, config.attention)
    for name in found:
        module = sys.modules.get(f"relatives.{name}")
        made = getattr(module, "__spec__", None)  # another one, once it is reloaded
        if name not in imported or imported[name][0] is not made:
            imported[name] = made, found[name]
        found[name] = imported[name][1]
    return found


def changed(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """The files that had other digests then, or are gone."""
    return [path_of(name) for name in sorted(then) if then[name] != now.get(name)]


def path_of(name: str) -> str:
    return name if name in CORE else f"relatives/{name}.py"
