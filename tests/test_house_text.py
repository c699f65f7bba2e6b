"""Sizes, names and words, and what does not belong into the repository.

Each rule is a function from a folder or a text to a list of complaints, so that a second test can
show that it does complain.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from house import FLOORS, ROOT, SOURCE, TREE, documents, functions_of, module_of, none_of

LONG_FILE, LONG_FUNCTION, MEDIAN_FUNCTION = 400, 100, 15


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def code_lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring, which is meant to be as long as it has to be."""
    has_docstring = ast.get_docstring(node) is not None
    first = node.body[0]
    return lines_of(node) - ((first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0)


def size_complaints(text: str, name: str) -> list[str]:
    tree = ast.parse(text)
    found = [
        f"{name}: {node.name} has {lines_of(node)} lines, the most is {LONG_FUNCTION}"
        for node in functions_of(tree)
        if lines_of(node) > LONG_FUNCTION
    ]
    num_lines = len(text.splitlines())
    excused = f"Longer than {LONG_FILE} lines because" in (ast.get_docstring(tree) or "")
    if num_lines > LONG_FILE and not excused:
        found.append(
            f"{name} has {num_lines} lines: split it, or say why: Longer than {LONG_FILE} lines because ..."
        )
    return found


def test_files_and_functions_fit_in_a_head():
    none_of([line for path in TREE for line in size_complaints(path.read_text(), path.name)])


def test_the_median_function_is_short():
    sizes = [code_lines_of(node) for tree in TREE.values() for node in functions_of(tree)]
    assert statistics.median(sizes) <= MEDIAN_FUNCTION


def test_long_ones_are_seen():
    long_function = "def f():\n" + "    x = 1\n" * 100
    assert size_complaints(long_function, "x.py") == ["x.py: f has 101 lines, the most is 100"]
    (complaint,) = size_complaints("x = 1\n" * 401, "x.py")
    assert "x.py has 401 lines" in complaint
    assert (
        size_complaints('"""A file.\n\nLonger than 400 lines because.\n"""\n' + "x = 1\n" * 401, "x.py")
        == []
    )


# Words

BARE_NAMES = {
    "step",
    "steps",
    "num_steps",
    "batch_size",
    "count",
    "iteration",
    "iterations",
    "chunk",
    "chunks",
}
WORDS_NEVER_SAID = re.compile(
    r"mini-?steps?\b|micro-?steps?\b|accumulation cycles?|accumulation steps?|training steps?"
    r"|(?<!micro-)\bbatch sizes?\b|\biterations?\b|\bdevice counts?\b|\bGPU counts?\b",
    re.IGNORECASE,
)


def _annotation(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation) if argument.annotation else ""


def name_complaints(tree: ast.AST, name: str) -> list[str]:
    """Return public parameters and fields whose names say neither unit nor scope."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found += [
                f"{name}: parameter {argument.arg} of {node.name}"
                for argument in arguments
                # A function given as an argument may be a verb: ``count=my_counter``.
                if argument.arg in BARE_NAMES and "Callable" not in _annotation(argument)
            ]
        elif isinstance(node, ast.ClassDef):
            fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
            names = [field.id for field in fields if isinstance(field, ast.Name)]
            found += [f"{name}: field {field} of {node.name}" for field in names if field in BARE_NAMES]
    return found


def word_complaints(text: str, name: str) -> list[str]:
    """Return words that design fixed another word for; quoted code is not prose."""
    prose = re.sub(r"```.*?```|``[^`]*``|`[^`]*`", " ", text, flags=re.DOTALL)
    return [f"{name}: {match.group(0)!r}" for match in WORDS_NEVER_SAID.finditer(prose)]


def strings_of(tree: ast.AST) -> str:
    """All text of a source file that a person may read: docstrings, messages, help."""
    return "\n".join(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_public_names_carry_unit_and_scope():
    none_of([line for path, tree in TREE.items() for line in name_complaints(tree, path.name)])


def test_one_word_for_one_thing():
    found = [line for path, tree in TREE.items() for line in word_complaints(strings_of(tree), path.name)]
    for path in documents():
        if path.name != "vocabulary.md":  # which lists the words that are not used
            found += word_complaints(path.read_text(), path.name)
    none_of(found)


def test_wrong_names_and_words_are_seen():
    text = "class A:\n    batch_size: int\n\ndef f(step, *, count=1): ...\n"
    text += "def h(count: Callable): ...\ndef _g(step): ...\n"
    assert name_complaints(ast.parse(text), "x.py") == [
        "x.py: field batch_size of A",
        "x.py: parameter step of f",
        "x.py: parameter count of f",
    ]
    assert word_complaints("The batch size of 4 mini-steps.", "x") == ["x: 'batch size'", "x: 'mini-steps'"]
    assert word_complaints("The micro-batch size; `batch size`; ``iteration``", "x") == []


# Plain data, and one word for every accelerator

# What an update adds to as it goes; everything else on floors 0 and 1 is a fact, once made.
MUTABLE = {"Counters"}


def data_complaints(tree: ast.AST, name: str, must_be_frozen: bool) -> list[str]:
    """Return dataclasses without slots; where ``must_be_frozen``, those that can change."""
    wanted = {"slots", "frozen", "kw_only"} if must_be_frozen else {"slots"}
    found = []
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else []:
            if ast.unparse(decorator).split("(")[0].split(".")[-1] != "dataclass":
                continue
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            given = {word.arg for word in keywords if ast.unparse(word.value) == "True"}
            missing = wanted - given - ({"frozen"} if node.name in MUTABLE else set())
            found += [f"{name}: dataclass {node.name} is not {word}" for word in sorted(missing)]
    return found


def test_plain_data_is_frozen_and_named():
    found = []
    for path, tree in TREE.items():
        found += data_complaints(tree, path.name, FLOORS.get(module_of(path, SOURCE), 99) <= 1)
    none_of(found)


def test_loose_data_is_seen():
    tree = ast.parse(
        "@dataclass\nclass A: ...\n@dataclasses.dataclass(frozen=True, slots=True)\nclass B: ..."
    )
    assert data_complaints(tree, "x.py", False) == ["x.py: dataclass A is not slots"]
    assert "x.py: dataclass B is not kw_only" in data_complaints(tree, "x.py", True)


VENDORS = re.compile(r"\b(cuda|rocm|hip|xpu|npu|hpu|mlu|musa|mps|nccl|hccl|xccl)\b", re.IGNORECASE)
# Where a thing exists on one vendor's devices only, and why.
NAMED = {
    "audit/watch/unit_weights.py": 'device.type == "mps"',  # it has no float64
}


def vendor_complaints(text: str, name: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if VENDORS.search(line)]
    return [f"{name}: {line}" for line in lines if NAMED.get(name, "\0") not in line]


def test_no_vendor_is_named_where_any_accelerator_will_do():
    named = [(path.read_text(), path.relative_to(SOURCE).as_posix()) for path in TREE]
    none_of([line for text, name in named for line in vendor_complaints(text, name)])


def test_a_vendor_is_seen():
    lines = ['x.to("cuda")', "torch.cuda.synchronize()", 'backend="nccl"', "x.npu()", "torch.accelerator"]
    assert vendor_complaints("\n".join(lines), "x.py") == [f"x.py: {line}" for line in lines[:4]]


# What does not belong into the repository

MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|Users|mnt|work|private|scratch)/[\w.-]+")


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_a_machine_is_written_down():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in MACHINE_PATH.findall(text)]
    none_of(found)


def test_a_path_of_a_machine_is_seen():
    text = (
        "see /" + "home/somebody/x and (/" + "root/run.log), not src/work/x or https://example.org/home/x"
    )
    assert len(MACHINE_PATH.findall(text)) == 2
