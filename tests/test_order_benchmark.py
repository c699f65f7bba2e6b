"""The benchmark of the order runs, and both contestants give a replica its share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from house import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "order.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_both_orders_give_a_replica_its_share(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    result = run(
        *("--samples", "20000", "--samples", "40000", "--most-listed", "20000"),
        *("--replicas", "4", "--window-samples", "100", "--json", str(path)),
    )
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(path.read_text())
    assert [(each["name"], each["samples"]) for each in found] == [
        ("SampleOrder", 20_000),
        ("DistributedSampler", 20_000),
        ("SampleOrder", 40_000),
    ]
    for each in found:
        assert each["ids"] == each["samples"] // 4
        assert each["windows"] == each["samples"] // 400
        assert 0 < each["first_window_s"] <= each["all_windows_s"]
        assert f"{each['samples']:,}" in result.stdout


def test_a_number_that_makes_no_sense_is_refused() -> None:
    result = run("--replicas", "0")
    assert result.returncode == 2
    assert "--replicas 0: give 1 or more" in result.stderr
