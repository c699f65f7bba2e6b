"""Peers are collected where they are asked for by name: ``pytest -m peers``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = "peers" in config.getoption("markexpr", "")
    return True if collection_path.name.startswith("test_") and not wanted else None
