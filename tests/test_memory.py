"""The measured peak: it rises with what is allocated, in bytes, and never falls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from wholebatch import memory
from wholebatch.memory import ASK_EVERY_S, PeakMemory, peak_memory_bytes


@pytest.mark.skipif(torch.accelerator.is_available(), reason="counts the accelerator's memory there")
def test_the_peak_rises_with_what_is_allocated_and_stays() -> None:
    before = peak_memory_bytes()
    assert before is not None
    # Well above all that was ever held, so that the figure of before is not enough.
    tensor = torch.ones(before + 64 * 2**20, dtype=torch.uint8)
    during = peak_memory_bytes()
    assert during is not None
    assert during >= tensor.numel()
    del tensor
    assert peak_memory_bytes() == during


def fake_resource(kibibytes: int) -> SimpleNamespace:
    usage = SimpleNamespace(ru_maxrss=kibibytes)
    return SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: usage)


@pytest.mark.parametrize(("platform", "expected"), [("linux", 3 * 1024), ("darwin", 3)])
def test_the_unit_is_the_system_s_own(
    monkeypatch: pytest.MonkeyPatch, platform: str, expected: int
) -> None:
    monkeypatch.setattr(memory, "resource", fake_resource(3))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert peak_memory_bytes() == expected


def test_an_accelerator_s_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 12345)
    assert peak_memory_bytes() == 12345


def test_none_where_the_accelerator_s_allocator_keeps_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> int:
        raise RuntimeError("Allocator for foreign is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", ask)
    assert peak_memory_bytes() is None


def test_none_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resource", None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert peak_memory_bytes() is None


def test_the_system_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, peaks = [100.0], iter([1, 2])
    monkeypatch.setattr(memory, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "peak_memory_bytes", lambda: next(peaks))
    peak = PeakMemory()
    assert [peak.read(), peak.read()] == [1, 1]
    now[0] += ASK_EVERY_S
    assert [peak.read(), peak.read()] == [2, 2]
