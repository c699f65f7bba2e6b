"""Micro-batches in their order, with and without workers; and what ends badly ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from house import ROOT
from wholebatch.errors import JudgeError, UsageError
from wholebatch.loading.ahead import _end_of
from wholebatch.loading.reading import micro_batch
from wholebatch.losses import token_loss
from wholebatch.order import SampleOrder
from wholebatch.plan import BatchPlan, plan_batch
from wholebatch.train.data import load_data
from wholebatch.train.data.own import OwnCollation
from wholebatch.train.loading import windows
from wholebatch.train.material import JobData
from wholebatch.train.settings import DataConfig, ObjectiveConfig, TrainConfig

Windows = list[list[dict[str, Any]]]


class Drawing:
    """A data set that draws at random from all three generators of the host."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = [torch.rand(()).item(), random.random(), float(np.random.random())]
        return {"x": torch.tensor([index, *numbers], dtype=torch.float64), "labels": 0}


class Failing(Drawing):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            raise KeyError("sample seven")
        if index == 8:
            raise UsageError("eight is not to be read")
        return super().__getitem__(index)


class OwnError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Untravelling(Drawing):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OwnError(1, index)


class Dying(Drawing):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Slow(Drawing):
    """Tells who read, so that a test can end that process."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([os.getpid()], dtype=torch.float64), "labels": 0}


def own(samples: Any) -> JobData:
    collate = OwnCollation(
        collate=None, padding_id=0, first={"x": torch.zeros(1, dtype=torch.float64), "labels": 0}
    )
    return JobData(train=samples, held_out=[], objective=token_loss(), collate=collate)


def plan_of(replicas: int = 1, *, global_batch: int = 4, micro_batch: int = 2) -> BatchPlan:
    return plan_batch(global_batch_samples=global_batch, micro_batch_samples=micro_batch, ranks=replicas)


def order_of(data: JobData, global_batch: int = 4, *, shuffle: bool = True) -> SampleOrder:
    return SampleOrder(
        num_samples=len(data.train), global_batch_samples=global_batch, seed=3, shuffle=shuffle
    )


@contextlib.contextmanager
def reading(data: JobData, workers: int, **more: Any) -> Iterator[Any]:
    order, plan = more.pop("order", order_of(data)), more.pop("plan", plan_of())
    settings = {"replica": 0, "start_samples": 0, "seed": 5} | more
    with contextlib.closing(windows(data, order, plan, workers=workers, **settings)) as found:  # type: ignore[type-var]
        yield found


def read(data: JobData, workers: int, num_windows: int, **more: Any) -> Windows:
    with reading(data, workers, **more) as found:
        return [[dict(batch) for batch in window] for window in itertools.islice(found, num_windows)]


def assert_same(left: Windows, right: Windows) -> None:
    assert [len(window) for window in left] == [len(window) for window in right]
    for one, other in zip(itertools.chain(*left), itertools.chain(*right), strict=True):
        assert list(one) == list(other)
        for name in one:
            assert torch.equal(one[name], other[name]), name


@pytest.fixture
def masked(tmp_path: Path) -> JobData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i} " * (1 + i % 3)}) + "\n" for i in range(11)))
    return load_data(
        TrainConfig(
            data=DataConfig(source="jsonl", files=[str(path)], held_out_one_in=10**6),
            objective=ObjectiveConfig(kind="masked_token"),
        )
    )


# the same batches ------------------------------------------------------------------------------------


def test_windows_follow_the_order_over_epochs(masked: JobData) -> None:
    order = order_of(masked)
    found = read(masked, 0, 7)
    position = 0
    for window in found:
        ids = [number for batch in window for number in batch["sample_ids"].tolist()]
        assert ids == order.global_batch(position)
        expected = masked.collate([masked.train[i] for i in ids], ids, position // 11)
        assert (expected["labels"] != -100).sum() == sum((b["labels"] != -100).sum() for b in window)
        for batch in window:
            again = masked.collate(
                [masked.train[i] for i in batch["sample_ids"].tolist()],
                batch["sample_ids"].tolist(),
                position // 11,
            )
            assert torch.equal(batch["input_ids"], again["input_ids"])
        position = order.next_position(position)
    assert [len(batch["sample_ids"]) for batch in found[2]] == [2, 1], "the tail of an epoch of 11"


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["masked", "drawing"])
def test_workers_make_the_same_batches(masked: JobData, workers: int, kind: str) -> None:
    data = masked if kind == "masked" else own(Drawing())
    assert_same(read(data, 0, 7), read(data, workers, 7))


def test_a_resumed_run_reads_what_the_first_would_have(masked: JobData) -> None:
    for data in (masked, own(Drawing())):
        whole = read(data, 0, 6)
        # 4 + 4 + 3 of the first epoch, 4 of the next
        assert_same(whole[4:], read(data, 2, 2, start_samples=15))


def test_random_numbers_of_a_sample_do_not_depend_on_the_split() -> None:
    data = own(Drawing())
    one = read(data, 0, 3, order=order_of(data, 11), plan=plan_of(global_batch=11, micro_batch=11))
    epochs = [{int(row[0]): row for row in batch["x"]} for (batch,) in one]
    two = read(data, 0, 3)
    for row in torch.cat([batch["x"] for window in two for batch in window]):
        assert torch.equal(row, epochs[0][int(row[0])])
    assert not torch.equal(epochs[0][4], epochs[1][4]), "each epoch draws anew"
    assert len({tuple(row[1:].tolist()) for row in epochs[0].values()}) == 11
    other = read(data, 0, 1, seed=6)[0][0]["x"]
    assert not torch.equal(other, two[0][0]["x"])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_state_of_the_training_is_left_alone(masked: JobData, workers: int) -> None:
    for data in (masked, own(Drawing())):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
        read(data, workers, 4)
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
        assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_replica_without_samples_in_a_tail(masked: JobData, workers: int) -> None:
    found = read(
        masked,
        workers,
        4,
        order=order_of(masked, 5),
        plan=plan_of(5, global_batch=5, micro_batch=1),
        replica=4,
    )
    assert [[batch["sample_ids"].tolist() for batch in window] for window in found][2] == []
    assert [len(window) for window in found] == [1, 1, 0, 1]


def test_batches_that_are_kept_need_no_file_descriptors(masked: JobData) -> None:
    plan = plan_of(global_batch=11, micro_batch=1)
    descriptors = Path("/proc/self/fd")
    with reading(masked, 1, order=order_of(masked, 11), plan=plan) as found:
        kept = [next(found) for _ in range(20)]
        assert sum(len(window) for window in kept) == 220
        if descriptors.exists():
            assert len(list(descriptors.iterdir())) < 200


# errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_can_not_be_read_is_named(workers: int) -> None:
    data = own(Failing())
    with pytest.raises(
        JudgeError, match=r"reading sample 7 failed with KeyError: 'sample seven'"
    ) as caught:
        read(data, workers, 9, order=order_of(data, shuffle=False))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_part_of_a_data_set_the_place_in_the_whole_is_named_too(workers: int) -> None:
    data = own(Subset(Failing(), [0, 1, 7, 2]))  # type: ignore[arg-type]
    with pytest.raises(
        JudgeError, match=r"reading sample 2, which is 7 of the data set, failed with KeyError"
    ):
        read(data, workers, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_our_own_errors_come_as_they_are(workers: int) -> None:
    data = own(Subset(Failing(), [8]))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^eight is not to be read$"):
        read(data, workers, 1, order=order_of(data, 1), plan=plan_of(global_batch=1, micro_batch=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_can_not_travel_is_told_in_words(workers: int) -> None:
    with pytest.raises(JudgeError, match=r"reading sample \d+ failed with OwnError: 1 and \d+") as caught:
        read(own(Untravelling()), workers, 1)
    assert "1 and" in str(caught.value.__cause__)


def test_samples_that_can_not_be_collated_are_named() -> None:
    def collate(*_: Any) -> Any:
        raise ZeroDivisionError("odd")

    with pytest.raises(JudgeError, match=r"collating samples \[3, 4\] failed with ZeroDivisionError: odd"):
        micro_batch(Drawing(), collate, [3, 4], epoch=0, seed=0)


@pytest.mark.slow  # torch looks every 5 s
def test_a_worker_that_dies_ends_the_run_and_is_named() -> None:
    data = own(Dying())
    begin = time.monotonic()
    with pytest.raises(
        JudgeError, match=r"of 2 workers .*, number \d \(process \d+, killed by S"
    ) as caught:
        read(data, 2, 9, order=order_of(data, shuffle=False))
    told = re.sub(r"\d+ \(process \d+", "1 (process 4242", str(caught.value))
    assert told in " ".join((ROOT / "docs" / "data.md").read_text().split())
    assert time.monotonic() - begin < 30


def test_a_worker_killed_from_outside_is_seen_and_nothing_hangs() -> None:
    data = own(Slow())
    with reading(data, 2) as found:
        pids = {int(batch["x"][0]) for _ in range(4) for batch in next(found)}
        assert len(pids) == 2
        assert os.getpid() not in pids
        os.kill(min(pids), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(JudgeError, match=rf"process {min(pids)}, killed by SIGKILL"):
            list(itertools.islice(found, 50))
    assert time.monotonic() - begin < 30


def test_ctrl_c_does_not_end_workers() -> None:
    with reading(own(Slow()), 1) as found:
        pid = int(next(found)[0]["x"][0])
        os.kill(pid, signal.SIGINT)
        pids = {int(batch["x"][0]) for _ in range(8) for batch in next(found)}
    assert pids == {pid}


def test_other_errors_of_the_loader_are_not_bent(monkeypatch: pytest.MonkeyPatch) -> None:
    with reading(own(Slow()), 1) as found:
        next(found)

        def refuse(_: Any) -> Any:
            raise RuntimeError("something else")

        monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data", refuse)
        with pytest.raises(RuntimeError, match=r"^something else$"):
            next(found)


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_ends_in_words(code: int, words: str) -> None:
    assert _end_of(code) == words


# what is left behind ---------------------------------------------------------------------------------


def test_workers_end_when_the_windows_are_closed() -> None:
    # The police of leaks looks for processes and threads after this; here they are seen to exist.
    with reading(own(Slow()), 2) as found:
        pids = {int(batch["x"][0]) for _ in range(4) for batch in next(found)}
        assert all(Path(f"/proc/{pid}").exists() for pid in pids) or not Path("/proc").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_signal_handlers_are_left_as_they_were() -> None:
    found = signal.getsignal(signal.SIGCHLD)
    torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = False
    read(own(Drawing()), 1, 1)
    assert signal.getsignal(signal.SIGCHLD) == found


def test_windows_are_read_from_another_thread_too() -> None:
    got: list[Windows] = []
    thread = threading.Thread(target=lambda: got.append(read(own(Drawing()), 1, 2)))
    thread.start()
    thread.join(60)
    assert_same(got[0], read(own(Drawing()), 0, 2))


def test_batches_are_the_training_process_s_own() -> None:
    batch = read(own(Drawing()), 1, 1)[0][0]
    assert isinstance(batch["x"], Tensor)
    assert not batch["x"].is_shared()
