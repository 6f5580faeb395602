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
            # Whatever an import names: what is no file of relatives/ is passed over above.
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                names.append(getattr(node, "module", None) or "")
                waiting += [name.removeprefix("relatives.") for name in names]
    return found
