"""What holds for every test: calm arithmetic, the same random numbers, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest

import leaks

pytest_plugins = ["pytester"]

# The same examples on every machine and every run; a time limit would fail on a busy machine.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a wrong line should be seen in seconds."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_collection_finish() -> None:
    """Leave what is there by now out of garbage collection: libraries and thousands of tests, which an
    audit would walk through each time that it begins."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Set things up as every test wants them, and fail a test that does not leave them so."""
    leaks.calm_torch()
    leaks.seed_everything()
    before = leaks.look()
    yield
    found = leaks.leaks_since(before)
    leaks.put_back(before)
    if found:
        pytest.fail("the test left something behind:\n" + "\n".join(found), pytrace=False)
