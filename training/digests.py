"""Which files of relatives/ a model is made of."""

import ast
import hashlib

import model


def digests(ffn: str, attention: str) -> dict[str, str]:
    """The digest of each file of relatives/ that kinds of --ffn and --attention are made of: their
    own, if they have one, and what it imports from there."""
    found: dict[str, str] = {}
    waiting = [ffn, *(kind.partition(":")[0] for kind in attention.split(","))]
    while waiting:
        name = waiting.pop()
        path = model.RELATIVES / f"{name}.py"
        if name in found or not path.exists():
            continue
        code = path.read_bytes()
        found[name] = hashlib.sha256(code).hexdigest()
        for node in ast.walk(ast.parse(code, str(path))):
            if isinstance(node, ast.Import):
                waiting += [alias.name.removeprefix("relatives.") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module in (None, "relatives"):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                waiting.append(node.module.removeprefix("relatives."))
    return found
