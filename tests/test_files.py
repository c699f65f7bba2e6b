"""Files are put on the disk as a whole or not at all; packages of extras are missed in one way."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from wholebatch.errors import UsageError
from wholebatch.extras import needed
from wholebatch.files import write_whole


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_what_can_not_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_whole(tmp_path / "a.json", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "a.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"old"
    write_whole(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    def fsync(file: int) -> None:
        seen.append((os.path.basename(os.readlink(f"/proc/self/fd/{file}")), (tmp_path / "a").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "a", b"x")
    assert seen == [("a.unfinished", False), (tmp_path.name, True)]


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    message = r"^a picture needs the package rich, which is not .*: pip install 'wholebatch\[pictures\]'"
    with pytest.raises(UsageError, match=message):
        needed("rich", extra="pictures", why="a picture")


def test_a_package_that_misses_another_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        needed("half_there", extra="x", why="this")
