"""The tree of errors, and the public names with their documentation.

Each rule is a function from a folder or a text to a list of complaints, so that a second test can
show that it does complain.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from house import ROOT, SOURCE, TREE, functions_of, none_of

ERRORS = importlib.import_module("wholebatch.errors")
ERROR_CLASSES = {name: value for name, value in vars(ERRORS).items() if inspect.isclass(value)}


def drawn_tree(drawing: str) -> dict[str, str | None]:
    """Return the parent of each class that a drawing shows, by how far it is indented."""
    found: dict[str, str | None] = {}
    open_classes: list[tuple[int, str]] = []
    for line in drawing.splitlines():
        match = re.match(r"([ │├└─]*)(\w+Error)\b", line)
        if match is None:
            continue
        column = len(match.group(1))
        while open_classes and open_classes[-1][0] >= column:
            open_classes.pop()
        found[match.group(2)] = open_classes[-1][1] if open_classes else None
        open_classes.append((column, match.group(2)))
    return found


def parent_of(cls: type) -> str | None:
    ours = [base.__name__ for base in cls.__bases__ if base.__name__ in ERROR_CLASSES]
    return ours[0] if ours else None


def test_the_tree_of_errors_is_drawn_as_it_is():
    assert drawn_tree(ERRORS.__doc__) == {name: parent_of(cls) for name, cls in ERROR_CLASSES.items()}


def test_a_wrong_drawing_is_seen():
    assert drawn_tree("AError\n├── BError (ValueError)  x\n│   └── CError\n└── DError") == {
        "AError": None,
        "BError": "AError",
        "CError": "BError",
        "DError": "AError",
    }


def test_every_error_has_an_exit_code_and_a_line():
    for cls in ERROR_CLASSES.values():
        assert cls.exit_code in (2, 3), cls
        assert inspect.getdoc(cls), cls


def raised_names(trees: Iterable[ast.AST]) -> set[str]:
    """Return the classes that are raised, or called to make an error that is handed on and raised later."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            made = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(made, ast.Call):
                made = made.func
            elif made is node:
                continue
            if made is not None:
                found.add(ast.unparse(made).split(".")[-1])
    return found


def errors_tested_by_message(trees: Iterable[ast.AST]) -> set[str]:
    """Return classes in ``pytest.raises(X, match=...)``, and those asserted of a rank with its words.

    What a rank raised comes back as (name, message): a test that asserts the name must also assert
    words of the message, a text with a space in it, in the same function.
    """
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            is_raises = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "raises"
            if is_raises and any(word.arg == "match" for word in node.keywords):
                found |= {
                    name.split(".")[-1] for name in re.findall(r"[\w.]+Error", ast.unparse(node.args[0]))
                }
            elif isinstance(node, ast.FunctionDef):
                texts = compared_texts(node)
                if any(" " in text for text in texts):
                    found |= texts & set(ERROR_CLASSES)
    return found


def compared_texts(function: ast.FunctionDef) -> set[str]:
    """Return the texts that the asserts of a function compare; what they say on failure is none."""
    return {
        constant.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
        for constant in ast.walk(node.test)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }


def test_every_error_is_raised_somewhere():
    groups = {parent_of(cls) for cls in ERROR_CLASSES.values()}
    low = [tree for path, tree in TREE.items() if path.name != "errors.py"]
    none_of(sorted(set(ERROR_CLASSES) - groups - raised_names(low)))


def test_every_error_is_tested_by_its_message():
    groups = {parent_of(cls) for cls in ERROR_CLASSES.values()}
    own = Path(__file__).name
    tests = [
        ast.parse(path.read_text())
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if path.name != own
    ]
    none_of(sorted(set(ERROR_CLASSES) - groups - errors_tested_by_message(tests)))


def test_an_error_that_is_only_caught_is_not_raised():
    text = """
try:
    raise SplitError("4 samples")
except PlanError:
    raise
except WindowUsageError as error:
    isinstance(error, RecordError)
    raise JudgeError from error
kept = errors.UpdateError("later")
raise errors.ObjectiveError("no items")
"""
    assert raised_names([ast.parse(text)]) & set(ERROR_CLASSES) == {
        "SplitError",
        "JudgeError",
        "UpdateError",
        "ObjectiveError",
    }


def test_an_untested_error_is_seen():
    text = """
EXPECTED = {"a": "RecordError", "b": "of the record"}
with pytest.raises(PlanError): ...
with pytest.raises((errors.SplitError, OSError), match='x'): ...
def test_a_name_alone():
    assert kind == "JudgeError", "what it says on failure is no message"
def test_a_name_and_its_words():
    assert kind == "UpdateError"
    assert "rank 1 failed" in message
"""
    assert errors_tested_by_message([ast.parse(text)]) == {"SplitError", "OSError", "UpdateError"}


# Public names and their documentation

PUBLIC = importlib.import_module("wholebatch")
# Of the public names, those that return or change tensors.
TOUCH_TENSORS = {
    "UpdateWindow",
    "counted_loss",
    "next_token_loss",
    "token_loss",
    "verify_window",
    "weighted_terms",
}


def documented_arguments(text: str) -> list[str]:
    """Return the names described under ``Args:`` of a docstring."""
    match = re.search(r"^( *)Args:\n((?:\1 +.*\n|\s*\n)+)", text + "\n", flags=re.MULTILINE)
    if match is None:
        return []
    block = textwrap.dedent(match.group(2))
    heads = re.findall(r"^(\*{0,2}\w+(?:, *\*{0,2}\w+)*):", block, flags=re.MULTILINE)
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


def missing_documentation(value: object, docstring: str, touches_tensors: bool) -> list[str]:
    """Return what the docstring of a public function or class leaves out."""
    parameters = [
        name for name in inspect.signature(value).parameters if name not in ("self", "args", "kwargs")
    ]
    described = documented_arguments(docstring)
    found = [f"parameter {name} is not described" for name in parameters if name not in described]
    found += [f"{name} is described, and no parameter" for name in described if name not in parameters]
    if touches_tensors and not re.search(r"^ *Exactness:", docstring, flags=re.MULTILINE):
        found.append('has no "Exactness:", though it returns or changes tensors')
    return found


def test_at_most_a_dozen_public_names_in_order():
    names = PUBLIC.__all__
    assert len(names) <= 12
    assert names == sorted(names)
    assert set(names) <= set(dir(PUBLIC))
    homes = PUBLIC._HOMES
    assert set(homes) == set(names)
    assert list(homes) == names


def test_what_type_checkers_see_is_what_is_there():
    door = TREE[SOURCE / "__init__.py"]
    seen = {
        alias.asname: node.module
        for node in ast.walk(door)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wholebatch.")
        for alias in node.names
    }
    assert seen == {name: f"wholebatch.{home}" for name, home in PUBLIC._HOMES.items()}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'step'; it has SampleOrder, UpdateWindow"):
        _ = PUBLIC.step


@pytest.mark.parametrize("name", PUBLIC.__all__)
def test_public_names_are_documented(name):
    value = getattr(PUBLIC, name)
    docstring = inspect.getdoc(value) or ""
    if inspect.isclass(value) and "__init__" in vars(value):
        docstring += "\n\n" + (inspect.getdoc(value.__init__) or "")
    assert docstring
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    none_of(missing_documentation(value, docstring, name in TOUCH_TENSORS))


def test_missing_documentation_is_seen():
    def f(samples, *, ranks=1, items=2):
        """Do it.

        Args:
            samples: how many.
            ranks, replicas: how many.
        """

    assert missing_documentation(f, inspect.getdoc(f), True) == [
        "parameter items is not described",
        "replicas is described, and no parameter",
        'has no "Exactness:", though it returns or changes tensors',
    ]


def test_no_docstring_describes_a_parameter_that_is_gone():
    found = []
    for path, tree in TREE.items():
        for node in functions_of(tree):
            every = node.args
            known = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
            names = {argument.arg for argument in known if argument is not None}
            described = documented_arguments(ast.get_docstring(node) or "")
            found += [
                f"{path.name}: {node.name} describes {name}" for name in described if name not in names
            ]
    none_of(found)


def tensor_functions_without_exactness(tree: ast.Module) -> list[str]:
    """Return public functions of a module that return tensors and do not say how exactly."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if node.returns is not None and re.search(r"\b(Tensor|LossSum)\b", ast.unparse(node.returns))
        if "Exactness:" not in (ast.get_docstring(node) or "")
    ]


def test_functions_that_return_tensors_say_how_exact_they_are():
    found = [
        f"{path.name}: {name}"
        for path, tree in TREE.items()
        if path.parent.name != "train"  # whose tensors are texts, not results
        for name in tensor_functions_without_exactness(tree)
    ]
    none_of(found)


def test_a_missing_exactness_is_seen():
    tree = ast.parse("def f() -> Tensor: ...\ndef g() -> dict[str, Tensor]:\n    'Exactness: exact.'")
    assert tensor_functions_without_exactness(tree) == ["f"]
