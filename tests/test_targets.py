"""What a user names as ``module:name`` or ``file.py:name``: found once, and its setting named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from wholebatch.errors import JudgeError, UsageError
from wholebatch.targets import find_target


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_two_targets_of_one_file_share_its_module(tmp_path: Path) -> None:
    place = write(
        tmp_path / "mine.py", "class Sample: ...\ndef data(): return Sample()\ndef model(): return Sample\n"
    )
    data, model = (find_target(f"{place}:{name}", what="a function") for name in ("data", "model"))
    assert isinstance(data(), model())


def test_two_files_of_one_stem_are_two_modules(tmp_path: Path) -> None:
    places = [write(tmp_path / name / "mine.py", f"NAME = {name!r}\n") for name in ("a", "b")]
    for place in places:  # of one size already
        os.utime(place, ns=(1, 1))
    assert [find_target(f"{place}:NAME", what="a name") for place in places] == ["a", "b"]


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    place = write(tmp_path / "mine.py", "NAME = 1\n")
    assert find_target(f"{place}:NAME", what="a name") == 1
    write(tmp_path / "mine.py", "NAME = 2\n")
    os.utime(place, ns=(1, 1))
    assert find_target(f"{place}:NAME", what="a name") == 2


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    place = write(tmp_path / "broken.py", "1 / 0\n")
    before = set(sys.modules)
    with pytest.raises(JudgeError, match=r"^importing .*broken\.py failed with ZeroDivisionError"):
        find_target(f"{place}:NAME", what="a name")
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py:data", "there is no file nowhere.py"),
        ("no_such_module:data", "there is no module 'no_such_module' here"),
        ("math:data", "math has no 'data'; it has acos"),
        (":data", "':data' does not name a data set; write module:name or file.py:name"),
    ],
)
def test_a_setting_that_names_nothing_is_named(target: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        find_target(target, what="a data set")
    with pytest.raises(UsageError, match=f"^data.source: {message}"):
        find_target(target, what="a data set", key="data.source")


def test_a_setting_whose_file_fails_is_named(tmp_path: Path) -> None:
    place = write(tmp_path / "broken.py", "1 / 0\n")
    with pytest.raises(
        JudgeError, match=r"^model.source: importing .* failed with ZeroDivisionError"
    ) as told:
        find_target(f"{place}:model", what="a model", key="model.source")
    assert isinstance(told.value.__cause__, ZeroDivisionError)
