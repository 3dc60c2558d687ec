"""A file imports only from the layers below its own."""

import ast
from pathlib import Path

import headgate

PACKAGE = Path(next(iter(headgate.__path__)))

# lowest first; each sees all before it
CORE = ["errors", "graph", "gates", "inference", "gated", "gating", "exits", "storage", "training"]
BELOW = {layer: set(CORE[:height]) for height, layer in enumerate(CORE)}
BELOW |= {"models": {"errors", "graph"}, "data": {"errors"}, "analysis": {"errors"}}  # siblings, blind to each other
BELOW["training"] |= {"models", "data", "analysis"}
BELOW["memory"] = set()
BELOW["trained"] = set(BELOW) - {"training"}
BELOW["__init__"] = set(BELOW)
BELOW["demo"] = set(BELOW)
BELOW["cli"] = set(BELOW)
BELOW["__main__"] = {"cli"}  # the only one to see it


def imported_layers(tree: ast.AST, folder: tuple[str, ...]) -> set[str]:
    """The layers of headgate that a file in `folder` imports, at its top or inside functions."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ("headgate", *folder)[: len(folder) + 2 - node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            modules |= {f"{base}.{alias.name}" for alias in node.names} if base == "headgate" else {base}
    paths = [module.split(".") for module in modules if module.split(".")[0] == "headgate"]
    return {path[1] if len(path) > 1 and path[1] in BELOW else "__init__" for path in paths}


def violations(package: Path) -> list[str]:
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).with_suffix("").parts
        tree = ast.parse(file.read_text(encoding="utf-8"))
        forbidden = imported_layers(tree, path[:-1]) - BELOW.get(path[0], set()) - {path[0]}
        found += [f"{file.relative_to(package)} imports headgate.{layer}" for layer in sorted(forbidden)]
    return found


def test_every_file_imports_only_downwards() -> None:
    assert violations(PACKAGE) == []


def test_every_file_belongs_to_a_layer() -> None:
    assert {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in PACKAGE.rglob("*.py")} <= set(BELOW)


def test_a_violation_is_named_by_file_and_import(tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "macs.py").write_text(
        "import headgate.errors\nfrom headgate.gates.cost import x\nimport torch"
    )
    (tmp_path / "graph" / "trace.py").write_text("def f():\n    from .. import cli\n    from . import macs")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits.py").write_text("from ..models import names\nfrom headgate import errors, gate")
    assert violations(tmp_path) == [
        "data/digits.py imports headgate.__init__",
        "data/digits.py imports headgate.models",
        "graph/macs.py imports headgate.gates",
        "graph/trace.py imports headgate.cli",
    ]
