"""A loader of whole windows in the window: on one rank and two, with samples that can't be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import wholebatch as wb
from ranks import run_ranks
from wholebatch.budget import BudgetPlan, plan_token_budget
from wholebatch.errors import UsageError, WholebatchError, WindowUsageError
from wholebatch.loading import WindowLoader, pad_collate
from wholebatch.record import UpdateRecord
from wholebatch.resume import Checkpoints


class Rows(Dataset[dict[str, Tensor]]):
    """Twelve samples of 3 to 5 tokens; some can't be read."""

    def __init__(self, unreadable: range) -> None:
        self.unreadable = unreadable

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index in self.unreadable:
            raise OSError(f"sample {index} is gone")
        tokens = torch.arange(index, index + 3 + index % 3) % 9
        return {"input_ids": tokens, "labels": tokens}


LENGTHS = [3 + index % 3 for index in range(12)]


def a_window(plan: Any, *, wrapped: bool = False) -> wb.UpdateWindow:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = DistributedDataParallel(model) if wrapped else model
    return wb.UpdateWindow(wrapper, optimizer, wb.next_token_loss(), plan=plan)


def run_one(window: wb.UpdateWindow, batches: list[dict[str, Tensor]]) -> UpdateRecord:
    objective = wb.next_token_loss()
    return window.run(batches, lambda model, batch: objective(model(batch["input_ids"]), batch))


def budget(ranks: int = 1, tokens: int = 12) -> BudgetPlan:
    return plan_token_budget(global_batch_samples=4, tokens_per_micro_batch=tokens, ranks=ranks)


def trained(
    rank: int, ranks: int, unreadable: range, tokens: int = 12
) -> tuple[list[UpdateRecord], Tensor, int]:
    """Records, parameters and where the next update would begin, after one epoch."""
    plan = budget(ranks, tokens)
    window = a_window(plan, wrapped=ranks > 1)
    loader = WindowLoader(
        Rows(unreadable),
        plan=plan,
        collate=pad_collate(),
        lengths=LENGTHS,
        replica=rank,
        shuffle=False,
        on_bad_sample="skip",
    )
    records = [run_one(window, batches) for batches in window.batches(loader)]
    parameters = torch.cat([p.detach().flatten() for p in window.model.parameters()])
    return records, parameters, window.counters.position


@pytest.mark.parametrize("unreadable", [range(0), range(5, 6), range(4, 8)], ids=["none", "one", "all"])
def test_ranks_and_budgets_train_the_same(unreadable: range) -> None:
    records, alone, position = trained(0, 1, unreadable)
    other, wide, _ = trained(0, 1, unreadable, tokens=40)
    assert position == 12
    assert [r.samples for r in records] == [4, 4 - len(unreadable), 4]
    assert [r.samples_left_out for r in records] == [0, len(unreadable), 0]
    assert records[1].items == sum(LENGTHS[i] - 1 for i in range(4, 8) if i not in unreadable)
    assert records[1].outcome == ("skipped_empty" if len(unreadable) == 4 else "applied")
    assert not any(r.partial for r in records)
    if len(unreadable) == 4:
        assert records[1].reason == "none of its 4 samples could be read"
    assert sum(r.micro_batches for r in records) > sum(r.micro_batches for r in other)
    assert torch.allclose(alone, wide, rtol=0, atol=1e-14)
    for records_of_two, parameters, there in run_ranks(trained, 2, unreadable):
        assert torch.allclose(alone, parameters, rtol=0, atol=1e-14)
        assert there == 12
        for a, b in zip(records, records_of_two, strict=True):
            assert (a.samples, a.items, a.samples_left_out) == (b.samples, b.items, b.samples_left_out)


def test_a_budget_needs_a_loader_of_whole_windows() -> None:
    window = a_window(budget())
    with pytest.raises(WindowUsageError, match="draw from a WindowLoader"):
        next(window.batches([torch.zeros(2)]))


def test_a_window_larger_than_its_plan_is_refused() -> None:
    window = a_window(budget())
    tokens = torch.zeros(5, 3, dtype=torch.int64)
    with pytest.raises(WindowUsageError, match="holds 5 samples over 1 replicas, more than the plan's"):
        run_one(window, [{"input_ids": tokens, "labels": tokens}])


def test_items_bound_no_samples() -> None:
    plan = plan_token_budget(global_batch_items=100, tokens_per_micro_batch=12)
    window = a_window(plan)
    tokens = torch.ones(5, 3, dtype=torch.int64)
    record = run_one(window, [{"input_ids": tokens, "labels": tokens}] * 7)
    assert (record.samples, record.partial) == (35, False)


# What the ranks' loaders must have in common


def drawn_alike(rank: int, ranks: int, slip: dict[str, Any], lengths: Any) -> int:
    """Samples that a rank trained on, where rank 1 gives its loader something else."""
    plan = budget(ranks, 40)
    window = a_window(plan, wrapped=True)
    given = {"plan": plan, "replica": rank, "seed": 3, "num_epochs": 1} | (slip if rank else {})
    loader = WindowLoader(Rows(range(0)), collate=pad_collate(), lengths=lengths, **given)
    return sum(run_one(window, batches).samples for batches in window.batches(loader))


def length_of(sample: dict[str, Tensor]) -> int:
    return len(sample["input_ids"])


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        ({"replica": 0}, "do not each have a share of their own; this rank's has replica=0"),
        ({"seed": 1}, "the loaders of the ranks stand at different places or have different settings"),
        ({"shuffle": False}, "stand at different places or have different settings"),
        ({"num_epochs": 2}, "stand at different places or have different settings"),
    ],
    ids=["replica", "seed", "shuffle", "epochs"],
)
def test_loaders_that_differ_are_refused_on_every_rank(slip: dict[str, Any], words: str) -> None:
    for outcome in run_ranks(drawn_alike, 2, slip, length_of, expect="outcomes"):
        assert outcome[:2] == ("error", "WindowUsageError")
        assert words in outcome[2]
    assert run_ranks(drawn_alike, 2, {}, length_of) == [12, 12]


def unreadable_on_one(rank: int, ranks: int) -> str:
    """Two tensor-parallel ranks with the same share, of which one leaves a sample out."""
    module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    columns = {"1": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(module, init_device_mesh("cpu", (ranks,)), columns)
    window = wb.UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), wb.next_token_loss())
    loader = WindowLoader(
        Rows(range(5, 5 + rank)),
        plan=budget(),
        collate=pad_collate(),
        lengths=LENGTHS,
        shuffle=False,
        on_bad_sample="skip",
    )
    draws = window.batches(loader)
    assert run_one(window, next(draws)).samples == 4
    with pytest.raises(WindowUsageError) as caught:
        run_one(window, next(draws))
    return str(caught.value)


def test_a_sample_that_one_rank_of_a_replica_cannot_read_is_refused_on_all() -> None:
    for message in run_ranks(unreadable_on_one, 2):
        assert message.startswith(
            "other micro-batches were given to rank 1 than to another rank of the same"
        )
        assert message.endswith("leave out on all what one of them can't read")


def one_at_its_end(rank: int, ranks: int) -> str:
    plan = budget(ranks, 40)
    window = a_window(plan, wrapped=True)
    loader = WindowLoader(Rows(range(0)), plan=plan, collate=pad_collate(), lengths=LENGTHS, replica=rank)
    if rank:
        assert len(list(loader)) == 3
    try:
        next(window.batches(loader))
    except WholebatchError as error:
        return f"{type(error).__name__}: {error}"
    return "drew"


def test_a_loader_that_cannot_begin_is_told_to_the_others_at_once() -> None:
    first, second = run_ranks(one_at_its_end, 2)
    assert second.startswith("WindowUsageError: the loader begins at position 12, and the window has")
    assert first.startswith("OtherRankFailedError"), first


def uneven(rank: int, ranks: int, sizes: list[int]) -> list[tuple[int, str | None]]:
    plan = budget(ranks)
    window = a_window(plan, wrapped=True)
    rows = [Rows(range(0))[index] for index in range(sizes[rank])]
    given = {"collate": pad_collate(), "lengths": length_of, "replica": rank}
    loader = WindowLoader(lambda: iter(rows), plan=plan, **given)
    found = []
    for batches in window.batches(loader):
        with window.update(batches, sample_ids=batches.sample_ids) as update:
            for batch in update:
                update.backward(wb.next_token_loss()(window.model(batch["input_ids"]), batch))
        found.append((update.record.samples, update.record.sample_digest))
    return found


def test_ranks_whose_streams_end_at_different_times_go_on_with_ids() -> None:
    first, second = run_ranks(uneven, 2, [5, 1])
    assert first == second
    assert [samples for samples, _ in first] == [3, 2, 1]
    assert None not in [digest for _, digest in first]


def test_a_loader_of_another_plan_is_refused_with_both() -> None:
    window = a_window(budget())
    loader = WindowLoader(Rows(range(0)), plan=budget(tokens=40), collate=pad_collate(), lengths=LENGTHS)
    with pytest.raises(
        WindowUsageError, match="tokens_per_micro_batch is 40 in the loader and 12 in the window; give both"
    ):
        next(window.batches(loader))


def without_ids(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collate that is given no ids, and leaves none in its batches."""
    return pad_collate()(samples)


def test_ids_of_a_loader_reach_the_record_without_being_handed_on() -> None:
    window = a_window(budget())
    loader = WindowLoader(Rows(range(0)), plan=budget(), collate=without_ids, lengths=LENGTHS)
    assert all(run_one(window, batches).sample_digest for batches in window.batches(loader))


def test_a_loader_that_stands_elsewhere_than_the_window_is_refused() -> None:
    window = a_window(budget())
    given = {"collate": pad_collate(), "lengths": LENGTHS}
    loader = WindowLoader(Rows(range(0)), plan=budget(), position=4, **given)
    with pytest.raises(
        WindowUsageError,
        match="begins at position 4, and the window has consumed 0 samples; load the state",
    ):
        next(window.batches(loader))
    first = WindowLoader(Rows(range(0)), plan=budget(), **given)
    assert len([run_one(window, batches) for batches in window.batches(first)]) == 3
    place = window.counters.position
    again = WindowLoader(Rows(range(0)), plan=budget(), num_epochs=2, position=place, **given)
    assert len(list(window.batches(again))) == 3


class Counting:
    """A stream that tells its state."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.read < 12:
            self.read += 1
            yield Rows(range(0))[self.read - 1]

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def saved_stream(rank: int, ranks: int, folder: str) -> tuple[str, list[int], list[int]]:
    plan = budget(ranks)
    window = a_window(plan, wrapped=True)
    given = {"plan": plan, "collate": pad_collate(), "lengths": length_of, "replica": rank}
    loader, checkpoints = WindowLoader(Counting(), **given), Checkpoints(folder)
    draws = iter(window.batches(loader))
    run_one(window, next(draws))
    try:
        checkpoints.save(window, more={"loader": loader})
    except UsageError as error:
        refused = str(error)
    states: list[Any] = [None] * ranks
    dist.all_gather_object(states, loader.state_dict())
    checkpoints.save(window, more={"loader": states})
    rest = [index for batches in draws for index in batches.sample_ids]
    resumed, again = a_window(plan, wrapped=True), WindowLoader(Counting(), **given)
    found = checkpoints.load(resumed)
    again.load_state_dict(found.more["loader"][rank])
    return refused, rest, [index for batches in resumed.batches(again) for index in batches.sample_ids]


def test_a_stream_on_two_ranks_is_saved_with_the_states_of_both(tmp_path: Path) -> None:
    for refused, rest, resumed in run_ranks(saved_stream, 2, str(tmp_path)):
        assert "says nothing of those on the other 1; gather the states of all ranks" in refused
        assert rest == resumed
        assert len(rest) == 10
