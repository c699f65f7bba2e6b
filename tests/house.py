"""What the tests of the house share: where the files are, and their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "wholebatch"
TREE = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def none_of(complaints: Sequence[str]) -> None:
    """Fail with every complaint, one a line."""
    assert not complaints, "\n".join(["", *complaints])


def module_of(path: Path, root: Path) -> str:
    """Return the dotted name below the package: ``ranks.ddp``, ``window``, ``ranks`` for its __init__."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def functions_of(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def documents() -> list[Path]:
    heads = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "lab/LOG.md"]
    return [
        path
        for path in [*(ROOT / head for head in heads), *sorted((ROOT / "docs").glob("*.md"))]
        if path.exists()
    ]
