"""Rows of files, one at a time: paragraphs of text, or objects of a JSONL file.

A file is read as it is needed and never held whole. Every row knows its file and line, so that a bad
one can be named.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

from wholebatch.errors import UsageError

Form = Literal["text", "completion", "label"]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the data.

    Args:
        file: as the settings name it.
        line: where the row begins, from 1.
        form: "text", "completion" (of a prompt) or "label" (of a text).
        text: the text, or the prompt.
        completion: what follows the prompt; empty in other forms.
        label: a whole number or a name; None in other forms.
    """

    file: str
    line: int
    form: Form
    text: str
    completion: str = ""
    label: int | str | None = None

    @property
    def place(self) -> str:
        """``file:line``, as messages begin."""
        return f"{self.file}:{self.line}"


def expand(patterns: Sequence[str], key: str) -> list[str]:
    """The files that the patterns name: those of a pattern in order of name, each file once.

    Args:
        patterns: paths, in which * and ** are expanded.
        key: of the settings, for messages.

    Raises:
        UsageError: no pattern, one that matches no file, or a folder.
    """
    if not patterns:
        raise UsageError(f'{key} is empty; name one or more files, such as {key} = ["texts/*.jsonl"]')
    found: dict[Path, str] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise UsageError(f"{key} has {pattern!r}, which is a folder; name its files: {pattern}/*")
        # A name that is there is taken as it is, brackets and all.
        matches = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
        files = [name for name in matches if Path(name).is_file()]
        if not files:
            raise UsageError(
                f"{key} has {pattern!r}, and no file matches it; a relative path begins in the folder "
                f"where the command runs"
            )
        for name in files:
            found.setdefault(Path(name).resolve(), name)
    return list(found.values())


def text_rows(files: Sequence[str]) -> Iterator[Row]:
    """The paragraphs of text files; lines without anything but blanks part them.

    Line ends of any system become ``\\n``, those at the ends of a paragraph are left out, and nothing
    else is changed.

    Raises:
        UsageError: a file that can't be read, or is not UTF-8.
    """
    for file in files:
        held: list[str] = []
        begin = 0
        for line, words in _lines(file):
            if words.strip():
                begin = begin if held else line
                held.append(words.removesuffix("\n").removesuffix("\r"))
            elif held:
                yield Row(file=file, line=begin, form="text", text="\n".join(held))
                held = []
        if held:
            yield Row(file=file, line=begin, form="text", text="\n".join(held))


def paragraphs() -> Iterator[str]:
    """The paragraphs of Python's own topic pages, in a fixed order; blank lines part them."""
    for name in sorted(topics):
        for text in re.split(r"\n\s*\n", topics[name]):
            if text.strip():
                yield text.strip("\n")


def is_held_out(text: str, held_out_one_in: int) -> bool:
    """Whether this text belongs to the held-out split: its hash is 0 modulo ``held_out_one_in``."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % held_out_one_in == 0


def pydoc_rows() -> Iterator[Row]:
    """The paragraphs of Python's own topic pages; the line is the paragraph's number."""
    for number, text in enumerate(paragraphs(), start=1):
        yield Row(file="pydoc paragraph", line=number, form="text", text=text)


def jsonl_rows(files: Sequence[str], *, labelled: bool) -> Iterator[Row]:
    """The rows of JSONL files; blank lines are passed over.

    Args:
        files: their paths.
        labelled: a row must have ``text`` and ``label``; else ``text``, or ``prompt`` and ``completion``.

    Raises:
        UsageError: a file that can't be read, or a row that is not as it should be; names file and line.
    """
    for file in files:
        for line, words in _lines(file):
            if words.strip():
                yield _row(words, file, line, labelled)


def _lines(file: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line; only a line feed ends one, so that JSON may hold other separators."""
    before = 0
    try:
        with open(file, "rb") as stream:
            for number, data in enumerate(stream, start=1):
                yield number, _decode(data, file, number, before)
                before += len(data)
    except OSError as error:
        raise UsageError(f"the data file {file} can't be read: {error.strerror}") from error


def _decode(data: bytes, file: str, number: int, before: int) -> str:
    skipped = len(_BYTE_ORDER_MARK) if number == 1 and data.startswith(_BYTE_ORDER_MARK) else 0
    try:
        return data[skipped:].decode()
    except UnicodeDecodeError as error:
        place = before + skipped + error.start
        raise UsageError(
            f"{file}:{number}: byte {place} of the file, 0x{data[skipped + error.start]:02x}, is not "
            f"UTF-8; save the file as UTF-8"
        ) from None


def _row(words: str, file: str, line: int, labelled: bool) -> Row:
    place = f"{file}:{line}"
    try:
        found = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON ({error}); a row is one object on one line") from None
    if not isinstance(found, dict):
        raise UsageError(f'{place}: a {_kind(found)}; a row is an object such as {{"text": "..."}}')
    form = _form(found, place, labelled)
    if form == "completion":
        prompt, completion = _text(found, "prompt", place), _text(found, "completion", place)
        return Row(file=file, line=line, form=form, text=prompt, completion=completion)
    label = _label(found, place) if form == "label" else None
    return Row(file=file, line=line, form=form, text=_text(found, "text", place), label=label)


def _form(found: dict[str, Any], place: str, labelled: bool) -> Form:
    """What a row is, by the keys that it has; others beside them do not matter."""
    text, prompt, completion = (key in found for key in ("text", "prompt", "completion"))
    has = f"it has {', '.join(map(repr, found)) or 'no keys'}"
    if labelled:
        if text and "label" in found:
            return "label"
        raise UsageError(f'{place}: objective.kind = "label" needs "text" and "label" in a row; {has}')
    if text and not (prompt or completion):
        return "text"
    if prompt and completion and not text:
        return "completion"
    raise UsageError(f'{place}: a row has either "text", or "prompt" and "completion"; {has}')


def _text(found: dict[str, Any], key: str, place: str) -> str:
    value = found[key]
    if not isinstance(value, str):
        raise UsageError(f'{place}: "{key}" is a {_kind(value)}; it has to be a text')
    if not value.strip():
        raise UsageError(f'{place}: "{key}" is empty; leave the row out')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        letter = f"\\u{ord(value[error.start]):04x}"
        raise UsageError(
            f'{place}: "{key}" has {letter} at {error.start}, half of a pair, which no text can hold'
        ) from None
    return value


def _label(found: dict[str, Any], place: str) -> int | str:
    value = found["label"]
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        shown = "an empty text" if value == "" else f"a {_kind(value)}"
        raise UsageError(f'{place}: "label" is {shown}; it has to be a whole number or a name')
    return value


_KINDS: dict[type, str] = {
    dict: "object",
    list: "list",
    str: "text",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KINDS[type(value)]


def of_one_form(rows: Iterator[Row], fits: Callable[[Row], str | None]) -> Iterator[Row]:
    """The rows, all of the form of the first.

    Args:
        rows: of one data set.
        fits: what is wrong with a row's form in words, or None.

    Raises:
        UsageError: a row of another form, or of one that the objective can't take.
    """
    first: Row | None = None
    for row in rows:
        if first is None:
            first = row
            wrong = fits(row)
            if wrong:
                raise UsageError(f"{row.place}: {wrong}")
        if row.form != first.form:
            raise UsageError(
                f"{row.place}: a row with {_KEYS[row.form]}, while the first at {first.place} has "
                f"{_KEYS[first.form]}; make two data sets of them"
            )
        yield row


_KEYS: dict[Form, str] = {
    "text": '"text"',
    "completion": '"prompt" and "completion"',
    "label": '"text" and "label"',
}
