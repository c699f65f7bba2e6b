"""What the tests of the house share: where the files are, their floors and syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "wholebatch"
# The floor of each file or folder of the package; CONTRIBUTING.md says what each is.
# A new file is entered here, on the floor of what it is for. The parts of the window are on floor 4
# even where they import little: the oracle must not share them.
FLOORS = {
    "errors": 0,
    "extras": 0,
    "files": 0,
    "targets": 0,
    "whereabouts": 0,
    "whole_numbers": 0,
    # arithmetic and paper, no torch
    "plan": 1,
    "layout": 1,
    "epochs": 1,
    "order": 1,
    "packing": 1,
    "budget": 1,
    "record": 1,
    "checkpoint_folder": 1,
    "run_folder": 1,
    # tensors, one process
    "objective": 2,
    "losses": 2,
    "split": 2,
    "content": 2,
    "gradients": 2,
    "accumulation": 2,
    "replay": 2,
    "closeness": 2,
    "memory": 2,
    "rows": 2,
    "loading": 2,
    # ranks
    "ranks": 3,
    # the update
    "window": 4,
    "drawing": 4,
    "finish": 4,
    "optimizers": 4,
    "update": 4,
    "engine_finish": 4,
    "result": 4,
    "shares": 4,
    "tally": 4,
    "snapshot": 4,
    "resume": 4,
    # judges
    "oracle": 5,
    "verify": 5,
    "audit": 5,
    # faces
    "train": 6,
    "report": 6,
    "cli": 6,
    "__main__": 6,
}
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
        for path in [*(ROOT / head for head in heads), *sorted((ROOT / "docs").rglob("*.md"))]
        if path.exists()
    ]
