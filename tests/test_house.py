"""The floors of the house: imports point down only, and floor 1 needs no torch.

Each rule is a function from a folder or a text to a list of complaints, so that a second test can
show that it does complain.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from house import FLOORS, SOURCE, TREE, module_of, none_of

# Narrower than the floor: the highest floor that a file may import from.
CEILINGS = {"oracle": 2}
# What may not be reached, over any number of imports.
NEVER_REACHES = {"audit": {"window", "update", "finish", "result", "tally", "snapshot"}}
# The door shows names of every floor, lazily; nobody inside the house goes through it.
DOOR = "__init__"


def imports_of(tree: ast.AST, module: str, known: Iterable[str], is_package: bool) -> Iterator[str]:
    """Yield the modules of the package that a file imports, wherever in the file it does so."""
    known = set(known)

    def inside(dotted: str) -> str:
        """The longest known module that ``dotted`` names; the door where it names no module."""
        parts = dotted.split(".")
        while parts and ".".join(parts) not in known:
            parts.pop()
        return ".".join(parts) or DOOR

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                own = ["wholebatch", *module.split(".")]
                kept = own[: len(own) - node.level + is_package]
                base = ".".join([*kept, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            names = [node.args[0].value] if node.args and isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        for name in names:
            if name == "wholebatch" or name.startswith("wholebatch."):
                yield inside(name.removeprefix("wholebatch").removeprefix("."))


def part_of(path: Path) -> str:
    """Return the file or folder of the package, the one that has a floor, in which a file lies."""
    return module_of(path, SOURCE).split(".")[0]


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return which modules each module of a package imports."""
    files = {module_of(path, root): path for path in sorted(root.rglob("*.py"))}
    return {
        module: set(imports_of(ast.parse(path.read_text()), module, files, path.name == "__init__.py"))
        - {module}
        for module, path in files.items()
    }


def reached_from(module: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    open_ends = [module]
    while open_ends:
        for target in graph.get(open_ends.pop(), set()) - seen:
            seen.add(target)
            open_ends.append(target)
    return seen


def floor_complaints(root: Path) -> list[str]:
    """Return every import that points up, through the door or in a circle, and every unknown file."""
    graph = import_graph(root)
    found = []
    for module, targets in graph.items():
        part = module.split(".")[0]
        if module == DOOR:
            continue
        if part not in FLOORS:
            found.append(f"{module} has no floor yet: add it to FLOORS in tests/house.py")
            continue
        for target in sorted(targets):
            other = target.split(".")[0]
            if target == DOOR:
                found.append(f"{module} imports from the door of the package; name the module instead")
            elif FLOORS.get(other, 99) > CEILINGS.get(part, FLOORS[part]):
                limit = CEILINGS.get(part, FLOORS[part])
                found.append(
                    f"{module} (imports up to floor {limit}) imports {target} (floor {FLOORS.get(other)})"
                )
        reached = reached_from(module, {name: to - {DOOR} for name, to in graph.items()})
        if module in reached:
            found.append(f"{module} is part of a circle of imports")
        forbidden = NEVER_REACHES.get(part, set()) & {name.split(".")[0] for name in reached}
        found += [f"{module} reaches {never}, and must not" for never in sorted(forbidden)]
    return found


def test_imports_point_down_only():
    none_of(floor_complaints(SOURCE))


def test_every_floor_is_that_of_a_file():
    assert set(FLOORS) == {part_of(path) for path in TREE} - {DOOR}


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"plan.py": "import wholebatch.objective"},
            "plan (imports up to floor 1) imports objective (floor 2)",
        ),
        ({"plan.py": "def f():\n    from wholebatch.objective import x"}, "imports objective (floor 2)"),
        (
            {"plan.py": "if TYPE_CHECKING:\n    from wholebatch import objective"},
            "imports objective (floor 2)",
        ),
        ({"plan.py": "from . import objective"}, "imports objective (floor 2)"),
        ({"ranks/__init__.py": "", "ranks/ddp.py": "from ..window import x"}, "imports window (floor 4)"),
        ({"ranks/__init__.py": "from ..window import x"}, "ranks (imports up to floor 3) imports window"),
        (
            {"ranks/__init__.py": "", "errors.py": "from wholebatch.ranks import ddp"},
            "imports ranks (floor 3)",
        ),
        ({"plan.py": 'importlib.import_module("wholebatch.objective")'}, "imports objective (floor 2)"),
        ({"plan.py": "from wholebatch import SampleOrder"}, "plan imports from the door"),
        ({"verify.py": "import wholebatch"}, "verify imports from the door"),
        ({"oracle.py": "from wholebatch.window import x"}, "oracle (imports up to floor 2) imports window"),
        ({"novel.py": ""}, "novel has no floor yet: add it to FLOORS"),
        (
            {"plan.py": "import wholebatch.order", "order.py": "def f():\n    import wholebatch.plan"},
            "plan is part of a circle",
        ),
        (
            {
                "audit/__init__.py": "",
                "audit/watch.py": "from wholebatch.verify import x",
                "verify.py": "import wholebatch.window",
            },
            "audit.watch reaches window, and must not",
        ),
    ],
)
def test_each_wrong_import_is_seen(tmp_path, files, complaint):
    everything = {"__init__.py": "", "errors.py": "", "objective.py": "", "window.py": ""} | files
    for name, text in everything.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert any(complaint in line for line in floor_complaints(tmp_path)), floor_complaints(tmp_path)


def test_right_imports_are_not_complained_about(tmp_path):
    for name, text in {
        "__init__.py": "if TYPE_CHECKING:\n    from wholebatch.window import UpdateWindow as UpdateWindow",
        "errors.py": "import torch",
        "plan.py": "from wholebatch import errors\nfrom .errors import x",
        "window.py": "from wholebatch.finish import f\nfrom wholebatch.plan import BatchPlan",
        "finish.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    assert floor_complaints(tmp_path) == []


def without_torch(modules: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a fresh interpreter; exit code 1 and their names where one brought torch in."""
    script = f"""
        import importlib, sys
        for name in {sorted(modules)!r}:
            importlib.import_module(name)
            if "torch" in sys.modules:
                sys.exit(f"{{name}} imports torch")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_floor_1_and_the_door_import_without_torch():
    low = [module_of(path, SOURCE) for path in TREE if FLOORS.get(part_of(path), 99) <= 1]
    assert {"errors", "plan", "order.samples", "record"} <= set(low)
    result = without_torch(["wholebatch", *(f"wholebatch.{module}" for module in low)])
    assert result.returncode == 0, result.stderr


def test_that_test_can_fail():
    result = without_torch(["wholebatch.split"])
    assert result.returncode == 1
    assert "wholebatch.split imports torch" in result.stderr


def test_floor_1_names_torch_nowhere():
    """Not in a function either: a plan must work where torch is not installed."""
    for path, tree in TREE.items():
        if FLOORS.get(part_of(path), 99) <= 1:
            names = [
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.Import)
                for alias in node.names
            ]
            names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            assert not [name for name in names if name.split(".")[0] == "torch"], path.name
