"""The loader on several ranks: they end together, whatever ends first; nothing hangs or counts twice."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loading_data import Bad, Ragged, Stream, is_alive, length_of, lengths_of
from ranks import run_ranks
from wholebatch.budget import plan_token_budget
from wholebatch.loading import WindowLoader, pad_collate
from wholebatch.losses import next_token_loss
from wholebatch.window import UpdateWindow

VOCABULARY = 32


class Small:
    """Another data set's samples, with token ids of a small vocabulary."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return small(self.samples[index])


class SmallStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return map(small, super().__iter__())


class Telling(Small):
    """Writes down which process reads, and reads slowly."""

    def __init__(self, samples: Any, folder: str) -> None:
        super().__init__(samples)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (self.folder / str(os.getpid())).touch()
        time.sleep(0.01)
        return super().__getitem__(index)


def small(sample: dict[str, Any]) -> dict[str, Any]:
    tokens = [token % VOCABULARY for token in sample["input_ids"]]
    return {"input_ids": tokens, "labels": tokens, "index": sample["index"]}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)).double()


def plan_of(ranks: int) -> Any:
    return plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8, ranks=ranks)


def let_it_have_workers(start: str = "fork") -> None:
    """A rank of run_ranks is a daemon, which may have no children, and starts them by "forkserver"."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method(start, force=True)


def train(ranks: int, loader: WindowLoader) -> dict[str, Any]:
    """Train on all windows of a loader; what was trained on, the records and the parameters."""
    module = model_of()
    model = DistributedDataParallel(module) if ranks > 1 else module
    objective = next_token_loss()
    window = UpdateWindow(
        model, torch.optim.SGD(module.parameters(), lr=0.5), objective, plan=plan_of(ranks)
    )
    trained, records = [], []
    with contextlib.closing(window.batches(loader)) as windows:  # type: ignore[type-var]
        for batches in windows:
            with window.update(batches) as update:
                for batch in update:
                    update.backward(objective(model(batch["input_ids"]), batch))
            trained.append([int(number) for batch in batches for number in batch["index"]])
            records.append((update.record.samples, update.record.items, update.record.samples_left_out))
    return {
        "trained": trained,
        "records": records,
        "samples": window.counters.samples,
        "parameters": {name: value.detach().clone() for name, value in module.named_parameters()},
    }


def assert_is_the_big_batch(found: list[dict[str, Any]]) -> None:
    """The plain way over the same global batches, each of them whole: one mean, one step."""
    module = model_of()
    samples = Small(Ragged(200))
    for update, record in enumerate(found[0]["records"]):
        ids = [number for one in found for number in one["trained"][update]]
        batch = pad_collate()([samples[number] for number in ids])
        labels = batch["labels"][:, 1:]
        logits = module(batch["input_ids"])[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = int((labels != -100).sum())
        assert record[:2] == (len(ids), items)
        gradients = torch.autograd.grad(loss / items, list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    for one in found:
        for name, parameter in module.named_parameters():
            assert (one["parameters"][name] - parameter).abs().max() < 1e-14


# streams that end at different times -----------------------------------------------------------------


def over_streams(rank: int, ranks: int, sizes: list[int], workers: int) -> dict[str, Any]:
    let_it_have_workers()
    stream = SmallStream(100 * rank + sizes[rank], first=100 * rank)
    return train(
        ranks,
        WindowLoader(
            stream,
            plan=plan_of(ranks),
            collate=pad_collate(),
            lengths=length_of,
            replica=rank,
            workers=workers,
        ),
    )


@pytest.mark.parametrize(
    ("sizes", "workers"), [([21, 5], 0), ([5, 21], 1), ([3, 0], 0), ([0, 9], 2), ([8, 8], 0)]
)
def test_ranks_whose_streams_end_at_different_times_finish_together(sizes: list[int], workers: int) -> None:
    found = run_ranks(over_streams, 2, sizes, workers)
    assert [sorted(itertools.chain(*one["trained"])) for one in found] == [
        list(range(100 * rank, 100 * rank + size)) for rank, size in enumerate(sizes)
    ]
    assert {len(one["trained"]) for one in found} == {-(-max(sizes) // 4)}
    assert {one["samples"] for one in found} == {sum(sizes)}
    assert_is_the_big_batch(found)


def test_empty_streams_make_no_update() -> None:
    for ranks in (1, 2):
        for one in run_ranks(over_streams, ranks, [0] * ranks, 0):
            assert (one["trained"], one["records"], one["samples"]) == ([], [], 0)


# samples that can't be read --------------------------------------------------------------------------


def over_bad_samples(rank: int, ranks: int, bad: list[int], how: str, workers: int) -> dict[str, Any]:
    let_it_have_workers()
    return train(
        ranks,
        WindowLoader(
            Small(Bad(21, bad)),
            plan=plan_of(ranks),
            collate=pad_collate(),
            lengths=lengths_of(21),
            replica=rank,
            workers=workers,
            shuffle=False,
            on_bad_sample=how,  # type: ignore[arg-type]
        ),
    )


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (2, 1)])
def test_the_denominator_is_that_of_what_was_read(ranks: int, workers: int) -> None:
    bad = [1, 6, 17, 18]
    found = run_ranks(over_bad_samples, ranks, bad, "skip", workers)
    trained = sorted(number for one in found for update in one["trained"] for number in update)
    assert trained == [number for number in range(21) if number not in bad]
    assert [record[2] for record in found[0]["records"]] == [2, 0, 2]
    assert_is_the_big_batch(found)


def test_an_update_whose_samples_are_all_unreadable_changes_nothing() -> None:
    found = run_ranks(over_bad_samples, 2, list(range(8, 16)), "skip", 0)
    assert found[0]["records"][1] == (0, 0, 8)
    assert found[0]["samples"] == 13
    assert [len(update) for one in found for update in one["trained"]][1] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_on_one_rank_ends_all_of_them(workers: int) -> None:
    ended = run_ranks(over_bad_samples, 2, [9], "raise", workers, expect="outcomes")
    kinds = sorted(one[1] for one in ended)
    assert kinds == ["JudgeError", "OtherRankFailedError"], ended
    messages = " ".join(one[2] for one in ended)
    assert "reading sample 9 failed with OSError: a broken record, number 9" in messages


# what is killed --------------------------------------------------------------------------------------


def over_killed(rank: int, ranks: int, folder: str, what: str, start: str) -> dict[str, Any]:
    """On rank 1 a worker, or the rank itself, is killed after the first window, with more read ahead."""
    let_it_have_workers(start)
    mine = Path(folder) / str(rank)
    mine.mkdir()
    loader = WindowLoader(
        Telling(Ragged(200), str(mine)),
        plan=plan_of(ranks),
        collate=pad_collate(),
        lengths=lengths_of(200),
        replica=rank,
        workers=2,
        num_epochs=None,
    )

    class Killing:
        yields_windows = True
        stand, replica = loader.stand, loader.replica

        def __iter__(self) -> Iterator[Any]:
            for number, window in enumerate(loader):
                if number == 1 and rank == 1:
                    pid = os.getpid() if what == "rank" else min(int(path.name) for path in mine.iterdir())
                    os.kill(pid, signal.SIGKILL)
                yield window

    return train(ranks, Killing())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_worker_killed_on_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    begin = time.monotonic()
    ended = run_ranks(over_killed, 2, str(tmp_path), "worker", "fork", expect="outcomes", timeout_s=60)
    assert [one[0] for one in ended] == ["error", "error"], ended
    assert ended[1][1] == "JudgeError"
    assert "killed by SIGKILL) ended" in ended[1][2]
    assert ended[0][1] == "OtherRankFailedError"
    assert time.monotonic() - begin < 50
    assert_all_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_rank_killed_while_it_reads_ahead_leaves_nobody_waiting(tmp_path: Path, start: str) -> None:
    begin = time.monotonic()
    ended = run_ranks(over_killed, 2, str(tmp_path), "rank", start, expect="outcomes", timeout_s=60)
    assert ended[1] == ("died", -signal.SIGKILL)
    assert ended[0][:2] == ("error", "PoisonedWindowError"), ended
    assert time.monotonic() - begin < 50
    assert_all_gone(tmp_path)


def assert_all_gone(folder: Path) -> None:
    """The workers of a rank that is gone end by themselves."""
    pids = [int(path.name) for path in folder.glob("*/*")]
    assert len(pids) == 4
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))
