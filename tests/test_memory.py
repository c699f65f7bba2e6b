"""The measured peak: it rises with what is allocated, in bytes, and never falls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from wholebatch import memory
from wholebatch.memory import peak_memory_bytes


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


def test_none_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resource", None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert peak_memory_bytes() is None
