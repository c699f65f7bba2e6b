"""Every fenced block in README.md, docs/ and docs/defects/ is what it says: run, compared or parsed.

* ```python: executed, in order, in one namespace for each document.
* ```console: ``$ wholebatch ...`` and ``$ python examples/...`` are run in one temporary folder for
  each document, with ``examples/`` in it. Where the block shows output it must come out, standard
  error included: ``...`` alone on a line stands for any lines, inside a line for any text, and blank
  lines do not count. ``$ echo $?`` is the exit code of the command before it. A command without
  output shown must succeed. ``make``, ``torchrun``, ``pip`` and ``git`` are not run.
* ```toml and ```json: parsed.
* ```text and ```sh: not run. A block without a language is an error.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from house import ROOT, documents

EXECUTED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEFECTS = sorted((ROOT / "docs" / "defects").glob("*.md"))
NOT_RUN = ("make", "torchrun", "pip", "git")
TIME_LIMIT_S = 280


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block; ``line`` is where its text begins, from 1."""

    language: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One ``$`` line of a console block and the output shown below it."""

    line: int
    words: tuple[str, ...]
    shown: tuple[str, ...]


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a document; one in a list may be indented."""
    found = []
    for match in re.finditer(r"^( *)```([^\n`]*)\n(.*?)^\1```[ \t]*$", text, re.MULTILINE | re.DOTALL):
        indent = len(match.group(1))
        body = "".join(line[indent:] if line.strip() else "\n" for line in match.group(3).splitlines(True))
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(language=match.group(2).strip(), line=line, text=body))
    return found


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a console block; a backslash at its end continues a ``$`` line."""
    found: list[Command] = []
    continued = False
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if continued or line.startswith("$ "):
            words = shlex.split(line.removesuffix("\\").removeprefix("" if continued else "$ "))
            if continued:
                last = found.pop()
                words = [*last.words, *words]
            found.append(Command(line=number, words=tuple(words), shown=()))
            continued = line.endswith("\\")
        elif line.strip():
            if not found:
                raise AssertionError(f"line {number}: output before the first command")
            last = found.pop()
            found.append(Command(line=last.line, words=last.words, shown=(*last.shown, line.rstrip())))
    return found


def matches(shown: tuple[str, ...], output: str) -> bool:
    """Say whether the output is what a document shows, with ``...`` for what may be anything."""
    pattern = ""
    for line in shown:
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.split("...")) + r"\n"
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def environment() -> dict[str, str]:
    """No colours, a fixed width and no cores taken from others: the same output everywhere."""
    fixed = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | fixed


def command_line(words: tuple[str, ...]) -> list[str]:
    """Return how a shown command is run here: with this interpreter, not the first one on the path."""
    if words[0] == "wholebatch":
        return [sys.executable, "-m", "wholebatch", *words[1:]]
    if words[0] == "python" and len(words) > 1 and words[1].startswith("examples/"):
        return [sys.executable, *words[1:]]
    raise AssertionError(
        f"a console block may not run {' '.join(words)!r}; use ```text for what is not run"
    )


def run_console(block: Block, folder: Path) -> None:
    """Run the commands of a block and compare what they print."""
    exit_code = 0
    for command in commands_of(block):
        where = f"line {command.line}: {' '.join(command.words)}"
        if command.words[0] in NOT_RUN:
            continue
        if command.words == ("echo", "$?"):
            assert command.shown == (str(exit_code),), f"{where}: the exit code is {exit_code}"
            continue
        result = subprocess.run(
            command_line(command.words),
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        exit_code = result.returncode
        assert "Traceback (most recent call last)" not in result.stdout, f"{where}:\n{result.stdout}"
        if command.shown:
            complaint = "\n".join([f"{where} shows", *command.shown, "and prints", result.stdout])
            if not matches(command.shown, result.stdout):
                raise AssertionError(complaint)
        else:
            assert exit_code == 0, f"{where}: exit code {exit_code}\n{result.stdout}"


def run_document(path: Path, folder: Path) -> None:
    """Do with each block of a document what its language says."""
    namespace: dict[str, object] = {"__name__": path.stem}
    for block in blocks_of(path.read_text()):
        where = f"{path.name}, line {block.line}"
        if block.language == "python":
            # Empty lines before it, so that a traceback shows the line of the document.
            exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)
        elif block.language == "console":
            run_console(block, folder)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language not in ("text", "sh"):
            raise AssertionError(f"{where}: a block in {block.language or 'no language'!r} is not checked")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a document's reader stands: beside the examples."""
    place = tmp_path / "reader"
    place.mkdir()
    if (ROOT / "examples").exists():
        shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.name)
def test_every_block_does_what_it_says(path, folder):
    run_document(path, folder)


@pytest.mark.parametrize("path", DEFECTS, ids=lambda path: path.stem)
def test_every_defect_is_one_and_is_mended(path, folder):
    run_document(path, folder)


def defect_complaints(kind: str, severity: str, text: str, index: str) -> list[str]:
    """Return what the page of a kind lacks."""
    wanted = [f"# `{kind}`\n\n**{severity}**\n", "## Broken\n\n```python\n", "## Mended\n\n```python\n"]
    wanted += ["## How it shows\n", "## What the audit looks at\n"]
    found = [f"{kind}.md has no {part!r}" for part in wanted if part not in text]
    found += [f"{kind}.md: {part} asserts nothing" for part in _parts_without_assertion(text)]
    if f"[`{kind}`]({kind}.md) | {severity} |" not in index:
        found.append(f"README.md has no line of {kind}, {severity}")
    return found


def _parts_without_assertion(text: str) -> list[str]:
    """Return ``Mended`` where it asserts nothing; the broken part is often compared there."""
    mended = text.partition("## Mended\n")[2].partition("\n## ")[0]
    return (
        [] if re.search(r"^ *(assert|torch\.testing\.assert_close)\b", mended, re.MULTILINE) else ["Mended"]
    )


def test_every_kind_has_its_page_and_no_page_is_without():
    from wholebatch.audit.judge.kinds import KINDS

    folder = ROOT / "docs" / "defects"
    index = (folder / "README.md").read_text()
    assert {path.stem for path in DEFECTS} == {"README", *KINDS}
    complaints = [
        complaint
        for kind in KINDS.values()
        for complaint in defect_complaints(
            kind.name, kind.severity, (folder / f"{kind.name}.md").read_text(), index
        )
    ]
    assert complaints == []
    symptoms = (ROOT / "docs" / "symptoms.md").read_text()
    assert [kind for kind in KINDS if f"(defects/{kind}.md)" not in symptoms] == []


def test_a_page_that_lacks_something_is_seen():
    text = "# `a`\n\n**cost**\n\n## Broken\n\n```python\n```\n"
    text += "## Mended\n\n```python\nx = 1\n```\n## How it shows\n"
    assert defect_complaints("a", "wrong", text, "[`a`](a.md) | cost |") == [
        "a.md has no '# `a`\\n\\n**wrong**\\n'",
        "a.md has no '## What the audit looks at\\n'",
        "a.md: Mended asserts nothing",
        "README.md has no line of a, wrong",
    ]


def broken_links(path: Path) -> list[str]:
    """Return the relative links of a document that lead nowhere."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    return [target for target in local if target and not (path.parent / target).exists()]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


def unused_examples(examples: list[Path], readers: list[Path]) -> list[str]:
    """Return the examples that no document shows and no test names; ``verify_{cause}`` names many."""
    text = "\n".join(path.read_text() for path in readers)
    families = tuple(re.findall(r"\b(\w+_)(?=[{*])", text))
    return [path.name for path in examples if path.stem not in text and not path.stem.startswith(families)]


def test_every_example_is_run_somewhere():
    tests = set((ROOT / "tests").glob("test_*.py")) - {Path(__file__)}
    readers = [*EXECUTED, *sorted(tests)]
    found = unused_examples(sorted((ROOT / "examples").glob("*.py")), readers)
    assert found == []


# The tests of these tests


SAY = """
import sys
print("Hello")
print("in 3.2 seconds")
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "document.md"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2, 'x is still 1'\n```\n", "x is still 1"),
        ("```toml\na = \n```\n", "Invalid value"),
        ("```json\n{\n```\n", "Expecting property name"),
        ("```\nx\n```\n", "line 2: a block in 'no language' is not checked"),
        ("```ruby\nx\n```\n", "a block in 'ruby' is not checked"),
        ("```console\n$ rm -r runs\n```\n", "may not run 'rm -r runs'"),
        ("```console\nhello\n```\n", "output before the first command"),
        ("```console\n$ python examples/say.py\nGoodbye\n```\n", "shows\nGoodbye\nand prints\nHello"),
        ("```console\n$ python examples/say.py 3\n```\n", "exit code 3"),
        ("```console\n$ python examples/say.py 3\n...\n$ echo $?\n0\n```\n", "the exit code is 3"),
        ("```console\n$ python examples/say.py oops\n...\n```\n", "ValueError: invalid literal"),
    ],
)
def test_a_wrong_block_fails(folder, text, message):
    (folder / "examples").mkdir(exist_ok=True)
    (folder / "examples" / "say.py").write_text(SAY)
    with pytest.raises((AssertionError, ValueError), match=re.escape(message)):
        run_document(write(folder, text), folder)


def test_right_blocks_pass(folder):
    (folder / "examples").mkdir(exist_ok=True)
    (folder / "examples" / "say.py").write_text(SAY)
    text = """
```python
found = []
```

1. in a list:

   ```python
   def add(x):
       found.append(x)

   add(1)
   ```

```python
assert found == [1]
```

```console
$ python examples/say.py
Hello

in ... seconds
$ python examples/say.py \\
    4
Hello
...
$ echo $?
4
$ make train
```

```text
anything
```
"""
    run_document(write(folder, text), folder)


def test_the_line_of_the_document_is_in_the_traceback(folder):
    path = write(folder, "# Title\n\n```python\nx = 1\nraise RuntimeError('here')\n```\n")
    with pytest.raises(RuntimeError, match="here") as caught:
        run_document(path, folder)
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(path), 5)


@pytest.mark.parametrize(
    ("shown", "output", "expected"),
    [
        (("a", "b"), "a\n\nb  \n", True),
        (("a", "b"), "a\nx\nb\n", False),
        (("a", "...", "b"), "a\nx\ny\nb\n", True),
        (("a", "...", "b"), "a\nb\n", True),
        (("a", "..."), "a\n", True),
        (("took ... s",), "took 3.4 s\n", True),
        (("took ... s",), "took 3.4 m\n", False),
        (("1 + 1",), "1 + 1", True),
        (("a.c",), "abc", False),
    ],
)
def test_ellipses(shown, output, expected):
    assert matches(shown, output) is expected


def test_a_broken_link_is_seen(folder):
    path = write(folder, "[a](document.md#top) [b](gone.md) [c](https://example.org) `[d](x.md)` [e](#top)")
    assert broken_links(path) == ["gone.md"]


def test_an_example_that_nobody_runs_is_seen(folder):
    path = write(folder, "$ python examples/shown.py and verify_{cause}.py")
    examples = [Path("shown.py"), Path("hidden.py"), Path("verify_dropout.py")]
    assert unused_examples(examples, [path]) == ["hidden.py"]
