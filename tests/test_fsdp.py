"""The window under ``fully_shard``, HSDP and tensor parallel: the update of the big batch, and ways back.

``test_engines.py`` has the table of all engines; here is what is FSDP2's own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from big_batch import Batch, big_batch
from ranks import run_ranks
from wholebatch import UpdateWindow, token_loss
from wholebatch.errors import (
    OtherRankFailedError,
    PoisonedWindowError,
    StaleGradientsError,
    UnsupportedError,
    UpdateError,
    WindowUsageError,
)
from wholebatch.ranks.collectives import own_place
from wholebatch.ranks.fsdp import FSDPRanks
from wholebatch.ranks.norms import num_shards

pytestmark = pytest.mark.slow

OBJECTIVE = token_loss()


class Net(nn.Module):
    """Three layers, one of which keeps a running mean of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        logits: torch.Tensor = self.last(self.norm(hidden))
        return logits


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches(start: int, number: int) -> list[Batch]:
    """Micro-batches of 2 to 4 samples."""
    made = []
    for index in range(start, start + number):
        generator = torch.Generator().manual_seed(index)
        size = 2 + index % 3
        made.append(
            {
                "x": torch.randn(size, 6, generator=generator, dtype=torch.float64),
                "labels": torch.randint(0, 4, (size,), generator=generator),
            }
        )
    return made


def loss(model: nn.Module, batch: Batch) -> Any:
    return OBJECTIVE(model(batch["x"]), batch)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def distance(model: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(float((whole(mine) - theirs.detach()).abs().max()) for mine, theirs in pairs)


def sharded(ranks: int, *, replicas: int = 1) -> Net:
    model = net()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
    for layer in (model.first, model.norm, model.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def window_over(model: nn.Module, **options: Any) -> UpdateWindow:
    return UpdateWindow(model, adamw(model), OBJECTIVE, clip_grad_norm=0.5, **options)


# The update of the big batch ------------------------------------------------------------------------


def same_as_big_batch(rank: int, ranks: int, replicas: int, reduce: str, held: Sequence[int]) -> list[Any]:
    """Three updates; rank r holds ``held[r]`` micro-batches of each."""
    model, wanted = sharded(ranks, replicas=replicas), net()
    window, plain = window_over(model, reduce=reduce), adamw(wanted)
    found = []
    for update in range(3):
        starts = [100 * update + 10 * one for one in range(ranks)]
        global_batch = [
            b for start, number in zip(starts, held, strict=True) for b in batches(start, number)
        ]
        record = window.run(batches(starts[rank], held[rank]), loss)
        norm = big_batch(wanted, plain, global_batch)
        found.append((record.gradient_norm, norm, record.samples, sum(len(b["x"]) for b in global_batch)))
        assert record.micro_batches == sum(held)
        assert record.reductions == (1 if reduce == "per_update" else max(held))
    return [distance(model, wanted), found]


@pytest.mark.parametrize(
    ("ranks", "replicas", "held"),
    [(2, 1, (2, 2)), (2, 1, (3, 1)), (2, 1, (0, 2)), (4, 2, (2, 1, 0, 3))],
    ids=["equal", "uneven", "none", "hsdp"],
)
@pytest.mark.parametrize("reduce", ["per_update", "per_micro_batch"])
def test_the_update_is_that_of_the_big_batch(
    ranks: int, replicas: int, held: tuple[int, ...], reduce: str
) -> None:
    for error, found in run_ranks(same_as_big_batch, ranks, replicas, reduce, held):
        assert error < 1e-14
        for norm, wanted, samples, all_samples in found:
            assert norm == pytest.approx(wanted, rel=1e-14)
            assert samples == all_samples


def tensor_parallel(rank: int, ranks: int, sequence: bool) -> list[Any]:
    """Tensor parallel over two ranks, sharded over the rest; a norm that is or is not parallel too."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    model, wanted = net().eval(), net().eval()  # its buffer is of whole tensors
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    layers: dict[str, Any] = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    if sequence:
        layers = {"norm": SequenceParallel(sequence_dim=0)}
        model.norm.register_forward_pre_hook(
            lambda _, given: DTensor.from_local(given[0], mesh["tensor"], [Replicate()]).redistribute(
                placements=[Shard(0)]
            ),
        )
    parallelize_module(model, mesh["tensor"], layers)
    if sequence:
        model.norm.register_forward_hook(lambda _, __, output: output.full_tensor())
    if not sequence:
        model.norm = nn.Identity()
        wanted.norm = nn.Identity()
    replicas = ranks // 2
    if replicas > 1:
        fully_shard(model, mesh=mesh["data"])
    window, plain = window_over(model), adamw(wanted)
    for update in range(2):
        shares = [batches(100 * update + 10 * one, 1 + one) for one in range(replicas)]
        record = window.run(shares[rank // 2], loss)
        norm = big_batch(wanted, plain, [batch for share in shares for batch in share])
        assert record.gradient_norm == pytest.approx(norm, rel=1e-14)
        assert record.micro_batches == sum(map(len, shares))
    return [distance(model, wanted), record.samples, record.items]


def both_tensor_parallel(rank: int, ranks: int) -> list[Any]:
    """Matrices that are cut, and a norm whose gradients are still to be added up after a backward."""
    return [tensor_parallel(rank, ranks, sequence) for sequence in (False, True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_are_one_replica(ranks: int) -> None:
    samples = sum(len(b["x"]) for one in range(ranks // 2) for b in batches(100 + 10 * one, 1 + one))
    for found in run_ranks(both_tensor_parallel, ranks):
        for error, counted, items in found:
            assert error < 1e-14
            assert counted == items == samples


class PartOfBatch(nn.Module):
    """A norm of plain parameters over this rank's part of what comes in, gathered again."""

    def __init__(self, norm: nn.Module, mesh: Any) -> None:
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        whole: torch.Tensor = DTensor.from_local(
            self.norm(parts.to_local()), self.mesh, [Shard(0)], shape=parts.shape, stride=parts.stride()
        ).full_tensor()
        return whole


def plain_norm(rank: int, ranks: int) -> tuple[str, bool, float]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    model = net().eval()
    right, model.norm = model.norm, PartOfBatch(model.norm, mesh["tensor"])  # type: ignore[assignment]
    layers = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "last": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], layers)
    if ranks > 2:
        fully_shard(model, mesh=mesh["data"])
    window = window_over(model)
    before = [whole(parameter) for parameter in model.parameters()]
    given = batches(10 * (rank // 2), 2)
    with pytest.raises(UpdateError) as caught:
        window.run(given, loss)
    same = all(torch.equal(a, whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    model.norm.forward = right.forward  # on the whole it is right to be plain
    return str(caught.value), same, window.run(given, loss).gradient_norm


@pytest.mark.parametrize("ranks", [2, 4])
def test_plain_parameters_over_parts_of_a_sequence_are_refused_on_every_rank(ranks: int) -> None:
    for rank, (told, same, norm) in enumerate(run_ranks(plain_norm, ranks)):
        assert f"rank {rank}: ranks of one replica hold copies of parameters" in told
        assert "SequenceParallel" in told
        assert same
        assert norm > 0.0


class Adapter(nn.Module):
    """A frozen base in half precision, and what is learned beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.beside = nn.Linear(6, 4).bfloat16().requires_grad_(False), nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.base(x.bfloat16()).double() + self.beside(x)
        return logits


def over_a_frozen_base(rank: int, ranks: int) -> float:
    worst = 0.0
    for reduce in ("per_update", "per_micro_batch"):
        torch.manual_seed(0)
        wanted = Adapter()
        model: Any = copy.deepcopy(wanted)
        for part in (model.base, model.beside, model):
            fully_shard(part)
        window, plain = window_over(model, reduce=reduce), adamw(wanted)
        shares = [batches(10 * one, 6 - one) for one in range(ranks)]  # too many to add up in bfloat16
        record = window.run(shares[rank], loss)
        norm = big_batch(wanted, plain, [batch for share in shares for batch in share])
        assert record.gradient_norm == pytest.approx(norm, rel=1e-14)
        worst = max(worst, distance(model.beside, wanted.beside))
    return worst


def test_a_frozen_base_in_half_precision_adds_nothing_up() -> None:
    assert max(run_ranks(over_a_frozen_base, 2)) < 1e-14


def other_samples(rank: int, _ranks: int) -> list[str]:
    """What is said where the ranks of a replica hold: fewer, other values, other rows first; the same."""
    model = net().eval()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    model.norm = nn.Identity()
    window, same = window_over(model), batches(0, 3)
    others = [
        same[rank:],
        [*same[:2], {name: value + rank for name, value in same[2].items()}],
        [{name: value.flip(0) for name, value in one.items()} if rank else one for one in same],
    ]
    told = []
    for given in others:
        with pytest.raises(WindowUsageError) as caught:
            window.run(given, loss)
        told.append(str(caught.value))
    assert window.run(same, loss).outcome == "applied"
    return told


def test_ranks_of_one_replica_are_given_the_same_samples() -> None:
    for told in run_ranks(other_samples, 2):
        for message in told:
            assert message.startswith("other micro-batches were given to rank 1 than to another rank of")


def sequences(start: int, number: int) -> list[Batch]:
    """Micro-batches of 1 to 3 sequences of 5 positions, some of them without a label."""
    made = []
    for index in range(start, start + number):
        generator = torch.Generator().manual_seed(index)
        size = 1 + index % 3
        labels = torch.randint(-1, 4, (size, 5), generator=generator)
        labels[labels < 0] = -100
        made.append(
            {"x": torch.randn(size, 5, 6, generator=generator, dtype=torch.float64), "labels": labels}
        )
    return made


def context_parallel(rank: int, ranks: int, engine: str) -> list[Any]:
    """Each rank of a replica holds a part of every sequence; the parts are not equal."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    wanted = net().eval()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "context"))
    model: nn.Module = sharded(ranks) if engine == "fsdp" else nn.parallel.DistributedDataParallel(net())
    window, plain = window_over(model.eval(), context_parallel=mesh["context"]), adamw(wanted)
    shares = [sequences(10 * one, 1 + one) for one in range(ranks // 2)]
    mine = [{name: part.chunk(2, dim=1)[rank % 2] for name, part in b.items()} for b in shares[rank // 2]]
    record = window.run(mine, loss)
    everything = [{name: part.flatten(0, 1) for name, part in b.items()} for share in shares for b in share]
    norm = big_batch(wanted, plain, everything)
    assert record.gradient_norm == pytest.approx(norm, rel=1e-14)
    items = sum(int((batch["labels"] != -100).sum()) for batch in everything)
    samples = sum(len(batch["x"]) for share in shares for batch in share)
    return [distance(model, wanted), record.micro_batches, (record.items, record.samples), (items, samples)]


@pytest.mark.parametrize(("ranks", "engine"), [(2, "fsdp"), (4, "fsdp"), (4, "ddp")])
def test_parts_of_a_sequence_add_up_over_its_ranks(ranks: int, engine: str) -> None:
    for error, micro_batches, counted, wanted in run_ranks(context_parallel, ranks, engine):
        assert error < 1e-14
        assert counted == wanted
        assert micro_batches == sum(range(1, ranks // 2 + 1))


# What is left as it was -------------------------------------------------------------------------------


def switches(model: Any) -> list[Any]:
    groups = [
        g
        for m in model.modules()
        if isinstance(m, FSDPModule)
        for g in m._get_fsdp_state()._fsdp_param_groups
    ]
    return [
        (
            g.reduce_grads,
            g.all_reduce_grads,
            g.reshard_after_backward,
            g.gradient_divide_factor,
            g.is_sharded,
        )
        for g in groups
    ] + [model._get_fsdp_state()._state_ctx.is_last_backward]


def keeps_what_was_set(rank: int, ranks: int) -> list[Any]:
    """A user's own switches and factors, also one that is not alike in all modules."""
    found = []
    for stays_gathered in (False, True):
        model, wanted = sharded(ranks), net()
        model.last.set_gradient_divide_factor(5.0)  # this module alone: its setter does not recurse
        model.first.set_requires_gradient_sync(False)
        model.set_is_last_backward(stays_gathered)  # what was gathered ahead is not thrown away
        model.set_reshard_after_backward(not stays_gathered)  # what stays gathered does not see the step
        before = switches(model)
        window, plain = window_over(model), adamw(wanted)
        for update in range(2):
            shares = [batches(100 * update + 10 * one, 3) for one in range(ranks)]
            record = window.run(shares[rank], loss)
            norm = big_batch(wanted, plain, [batch for share in shares for batch in share])
            assert record.gradient_norm == pytest.approx(norm, rel=1e-14)
        after = switches(model)
        with pytest.raises(RuntimeError, match="not today"):
            failing(window, model, batches(40, 2), "between")
        found.append((distance(model, wanted), before == after == switches(model)))
    return found


def test_switches_and_factors_are_put_back_and_do_not_change_the_update() -> None:
    for found in run_ranks(keeps_what_was_set, 2):
        for error, kept in found:
            assert error < 1e-14
            assert kept


def buffers_of_weightless_turns(rank: int, ranks: int) -> bool:
    """A weightless forward leaves no mark in buffers, also where a rank has no other."""
    model, alone = sharded(ranks), net()
    window = window_over(model)
    for held in ((1, 3), (0, 2)):
        mine = batches(10 * rank, held[rank])
        window.run(mine, loss)
        for batch in mine:
            alone(batch["x"])
        alone.load_state_dict(
            {name: whole(one) for name, one in model.state_dict().items()} | {"mean": alone.mean}
        )
    return torch.equal(model.mean, alone.mean)


def test_a_weightless_turn_leaves_no_mark_in_buffers() -> None:
    assert run_ranks(buffers_of_weightless_turns, 2) == [True, True]


def weightless_infinity(rank: int, ranks: int) -> list[Any]:
    """The batch that runs again has a gradient that is infinite at zero: it must not turn into NaN."""
    model = sharded(ranks)
    window = UpdateWindow(model, adamw(model), OBJECTIVE)

    def rooted(model: nn.Module, batch: Batch) -> Any:
        logits = model(batch["x"])
        return OBJECTIVE(logits.double() + (logits - logits.detach()), batch)

    record = window.run(batches(10 * rank, 1 + 2 * rank), rooted)
    return [record.outcome, all(bool(whole(p).isfinite().all()) for p in model.parameters())]


def test_a_weightless_turn_is_finite() -> None:
    assert run_ranks(weightless_infinity, 2) == [["applied", True]] * 2


# Ways back ---------------------------------------------------------------------------------------------


def retried(rank: int, ranks: int) -> dict[str, list[float]]:
    """All ranks fail at one place; the update is run again, and is that of the big batch."""
    found = {}
    shares = [batches(10 * one, 3) for one in range(ranks)]
    for where in ("forward", "between", "backward", "after"):
        model, wanted = sharded(ranks), net()
        window, plain = window_over(model), adamw(wanted)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not today"):
                failing(window, model, shares[rank], where)
        record = window.run(shares[rank], loss)
        norm = big_batch(wanted, plain, [batch for share in shares for batch in share])
        assert window.counters.updates_attempted == 1
        found[where] = [distance(model, wanted), record.gradient_norm - norm]
    # where gradients wait in another dtype they wait at another place
    ends = []
    for fails in (False, True):
        model = in_half_precision()
        window = window_over(model)
        if fails:
            with pytest.raises(RuntimeError, match="not today"):
                failing(window, model, shares[rank], "between")
        window.run(shares[rank], loss)
        ends.append(model)
    found["half precision"] = [
        float((whole(a) - whole(b)).abs().max())
        for a, b in zip(*(one.parameters() for one in ends), strict=True)
    ]
    return found


def in_half_precision() -> Net:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(net().float(), mp_policy=policy)


def failing(window: UpdateWindow, model: Net, given: list[Batch], where: str) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("not today")

    with window.update(given) as update:
        for index, batch in enumerate(update):
            handle = None
            if index == 1 and where == "forward":
                handle = model.norm.register_forward_pre_hook(fail)
            try:
                output = model(batch["x"])
            finally:
                if handle is not None:
                    handle.remove()
            if index == 1 and where == "backward":
                output.register_hook(fail)
            if index == 1 and where == "between":
                fail()
            update.backward(OBJECTIVE(output, batch))
        if where == "after":
            fail()


def test_a_failure_on_all_ranks_can_be_tried_again() -> None:
    for found in run_ranks(retried, 2):
        for where, errors in found.items():
            assert max(map(abs, errors)) < 1e-14, where


def one_fails(rank: int, ranks: int) -> list[str]:
    """One rank fails where the other waits for it inside a gather: both end, and say why."""
    FSDPRanks.patience_s = 1.0
    model = sharded(ranks)
    window = window_over(model)
    told: list[str] = []
    try:
        with window.update(batches(10 * rank, 2)) as update:
            for index, batch in enumerate(update):
                if rank == 1 and index == 1:
                    raise ValueError("a bad sample")
                update.backward(loss(model, batch))
    except (ValueError, RuntimeError, PoisonedWindowError) as error:
        told = [type(error).__name__, *getattr(error, "__notes__", [])]
    if rank == 1:
        with pytest.raises(PoisonedWindowError) as caught:
            window.run(batches(0, 1), loss)
        told.append(str(caught.value))
    return told


def test_no_rank_waits_for_one_that_failed_inside_a_window() -> None:
    outcomes = run_ranks(one_fails, 2, expect="outcomes", timeout_s=60)
    kind, told = outcomes[1][:2]
    assert kind == "ok"
    assert told[0] == "ValueError"
    assert "did not answer within 1 seconds" in told[1]
    assert "Restart from the last committed update" in told[-1]


def switched_inside(rank: int, ranks: int) -> str:
    """A switch that the loop itself sets in the last turn, so that one layer is not reduced."""
    model = sharded(ranks)
    window = window_over(model)
    given = batches(10 * rank, 2)

    def switching(model: Any, batch: Batch) -> Any:
        if batch is given[-1]:
            model.first.set_requires_gradient_sync(False)
        return loss(model, batch)

    with pytest.raises(PoisonedWindowError) as caught:
        window.run(given, switching)
    return str(caught.value)


def test_a_layer_that_the_last_backward_does_not_reduce_poisons_the_window() -> None:
    for rank, message in enumerate(run_ranks(switched_inside, 2)):
        assert f"rank {rank}: the backward that was to reduce left the gradients of 2 param" in message
        assert "(first.weight)" in message


def before_the_first_forward(rank: int, ranks: int) -> str:
    model = sharded(ranks)
    window = window_over(model)
    given = batches(10 * rank, 2)
    if rank == 1:
        given[0]["labels"] = torch.ones(1)  # can't be counted
    with pytest.raises(Exception, match=r".") as caught:
        window.run(given, loss)

    def bad_last(model: nn.Module, batch: Batch) -> Any:
        found = loss(model, batch)
        if rank == 1 and batch is mine[-1]:
            raise ValueError("after the last forward")
        return found

    mine = batches(10 * rank, 2)
    with pytest.raises(
        ValueError if rank == 1 else OtherRankFailedError, match=r"last for|about to reduce"
    ):
        window.run(mine, bad_last)
    wanted = net()
    plain = adamw(wanted)
    window.run(batches(10 * rank, 2), loss)
    big_batch(wanted, plain, [*batches(0, 2), *batches(10, 2)])
    assert distance(model, wanted) < 1e-14
    return type(caught.value).__name__


def test_a_failure_before_the_first_forward_or_after_the_last_is_heard_by_all() -> None:
    first, second = run_ranks(before_the_first_forward, 2)
    assert first == "OtherRankFailedError"
    assert second != "OtherRankFailedError"


def left_outside(rank: int, ranks: int) -> list[Any]:
    """A held-back backward outside the window: zero_grad does not reach what it leaves."""
    model, wanted = sharded(ranks), net()
    window, plain = window_over(model), adamw(wanted)
    model.set_requires_gradient_sync(False)
    loss(model, batches(50, 1)[0]).loss_sum.backward()
    model.set_requires_gradient_sync(True)
    model.zero_grad()
    with pytest.raises(StaleGradientsError) as caught:
        window.run(batches(10 * rank, 2), loss)
    window.run(batches(10 * rank, 2), loss)
    big_batch(wanted, plain, [*batches(0, 2), *batches(10, 2)])
    # what an evaluation left gathered does not see what is written after it
    with torch.no_grad():
        model(batches(50, 1)[0]["x"])
        for parameter in (*model.parameters(), *wanted.parameters()):
            parameter.mul_(0.5)
    window.run(batches(10 * rank, 2), loss)
    big_batch(wanted, plain, [*batches(0, 2), *batches(10, 2)])
    return [str(caught.value), distance(model, wanted)]


def test_gradients_that_zero_grad_does_not_reach_are_refused() -> None:
    for message, error in run_ranks(left_outside, 2):
        assert "fully_shard held back gradients of 6 parameters" in message
        assert error < 1e-14


def not_finite(rank: int, ranks: int, reduce: str) -> list[Any]:
    model, wanted = sharded(ranks), net()
    window, plain = window_over(model, reduce=reduce), adamw(wanted)
    bad = batches(10 * rank, 2)
    if rank == 1:
        bad[0]["x"][0, 0] = float("nan")
    record = window.run(bad, loss)
    window.run(batches(10 * rank, 2), loss)
    big_batch(wanted, plain, [*batches(0, 2), *batches(10, 2)])
    return [record.outcome, record.reason, distance(model, wanted)]


@pytest.mark.parametrize("reduce", ["per_update", "per_micro_batch"])
def test_an_update_that_is_not_finite_is_skipped_everywhere(reduce: str) -> None:
    for outcome, reason, error in run_ranks(not_finite, 2, reduce):
        assert outcome == "skipped_nonfinite"
        assert "micro-batch 1 on rank 1" in reason
        assert error < 1e-14


def overflowing_shard(rank: int, ranks: int) -> list[Any]:
    """A gradient that is infinite on the shard of one rank only: all ranks back their loss scale off."""
    model = sharded(ranks)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    window = UpdateWindow(model, adamw(model), OBJECTIVE, scaler=scaler)
    last_unit = torch.ones(8, dtype=torch.float64)
    last_unit[-1] = float("inf")
    found = []
    for overflows in (False, True, False):

        def overflow(_: nn.Module, __: Any, output: torch.Tensor, now: bool = overflows) -> None:
            if now:
                output.register_hook(lambda gradient: gradient * last_unit)

        handle = model.first.register_forward_hook(overflow)
        record = window.run(batches(10 * rank, 2), loss)
        handle.remove()
        found.append((record.outcome, record.loss_scale))
    return found


def test_an_overflow_in_one_shard_moves_the_loss_scale_of_all() -> None:
    wanted = [("applied", 1024.0), ("skipped_nonfinite", 1024.0), ("applied", 512.0)]
    assert run_ranks(overflowing_shard, 2) == [wanted, wanted]


class CannotBeRead(dict):  # type: ignore[type-arg]
    """A batch that only one rank can make of its bytes."""

    def __reduce__(self) -> Any:
        return (raising, ())


def raising() -> None:
    raise ValueError("not here")


def cannot_be_lent(rank: int, ranks: int) -> list[Any]:
    """A rank without a micro-batch can't read the one that it is lent: all hear of it, and may go on."""
    model, wanted = sharded(ranks), net()
    window, plain = window_over(model), adamw(wanted)
    with pytest.raises(RuntimeError) as caught:
        window.run([CannotBeRead(batches(0, 1)[0])] if rank else [], loss)
    window.run(batches(10 * rank, 2), loss)
    big_batch(wanted, plain, [*batches(0, 2), *batches(10, 2)])
    return [str(caught.value), distance(model, wanted)]


def test_a_lent_batch_comes_to_the_borrowers_own_device() -> None:
    own = torch.device("xpu", 1)
    assert [own_place(place, own) for place in ("xpu:0", "xpu:1", "cpu")] == ["xpu:1", "xpu:1", "cpu"]


def test_a_batch_that_cannot_be_lent_leaves_nobody_waiting() -> None:
    for message, error in run_ranks(cannot_be_lent, 2, timeout_s=60):
        assert "can't be sent: ValueError: not here" in message
        assert error < 1e-14


# What is refused ------------------------------------------------------------------------------------------


def refusals(rank: int, ranks: int) -> list[str]:
    mesh = init_device_mesh("cpu", (ranks,))
    told: list[str] = []

    def refused(make: Callable[[], Any]) -> None:
        with pytest.raises(UnsupportedError) as caught:
            make()
        told.append(str(caught.value))

    part = net()
    fully_shard(part.first, mesh=mesh)
    refused(lambda: window_over(part))
    refused(lambda: window_over(sharded(ranks), reduce="after_agreement"))
    refused(lambda: window_over(sharded(ranks), reduction_divisor=1.0))
    for cut in (fully_shard, lambda model: parallelize_module(model, mesh, {"first": ColwiseParallel()})):
        replaced = net()
        before = adamw(replaced)
        cut(replaced)
        refused(lambda: UpdateWindow(replaced, before, OBJECTIVE))  # noqa: B023 - called at once
    hooked = sharded(ranks)
    hooked.first.set_all_reduce_hook(lambda _: None)
    refused(lambda: window_over(hooked))
    inside = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    refused(lambda: UpdateWindow(inside, adamw(inside), OBJECTIVE))
    own = DeviceMesh.from_group(alone(rank), "cpu")
    refused(lambda: window_over(fully_shard(net(), mesh=own)))
    theirs = sharded(ranks)
    theirs.first.set_custom_reduce_scatter(OwnReduceScatter())
    refused(lambda: window_over(theirs))
    mixed = net()
    fully_shard(mixed.first, mesh=own)
    refused(lambda: window_over(fully_shard(mixed, mesh=mesh)))
    grid = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data", "tensor"))
    refused(lambda: window_over(sharded(ranks), context_parallel=grid))
    refused(lambda: window_over(sharded(ranks), context_parallel="cp"))
    cut = parallelize_module(net(), grid["tensor"], {"first": ColwiseParallel()})
    refused(lambda: window_over(cut))
    refused(lambda: window_over(cut, reduce="after_agreement"))
    partial = DTensor.from_local(torch.ones(1), grid["data"], [Partial()])
    with pytest.raises(ValueError, match="is not added up yet"):
        num_shards(partial)
    means = window_over(sharded(ranks), context_parallel=mesh, weighting="micro_batch_means")
    with pytest.raises(WindowUsageError, match=r"1 micro-batches are cut into 2 parts over context"):
        means.run(batches(0, 1), loss)
    uncounted = window_over(sharded(ranks))
    with pytest.raises(
        WindowUsageError, match=r"and rank 1 hold another number of micro-batches than rank"
    ):
        uncounted.run(batches(0, 1 + rank), loss, counting_pass=True)
    with pytest.raises(WindowUsageError) as caught:
        window_over(sharded(ranks)).traffic(0)
    told.append(str(caught.value))
    return told


class OwnReduceScatter(DefaultReduceScatter):
    """A collective of the user's own, which may divide by anything."""


def alone(rank: int) -> Any:
    """A group of this rank."""
    return [dist.new_group([one]) for one in range(dist.get_world_size())][rank]


def test_what_cannot_be_run_exactly_is_refused() -> None:
    for told in run_ranks(refusals, 2):
        outside, mode, divisor, by_shards, by_matrices, hook, inside, beside, *others, none = told
        comm, sizes, grid, word, cut, tensor = others
        assert (
            "4 of the optimizer's 6 parameters are not sharded by fully_shard (the first is norm" in outside
        )
        assert "6 of the optimizer's 6 parameters are not the model's (the first has shape" in by_shards
        assert "2 of the optimizer's 6 parameters are not the model's" in by_matrices
        assert "build the optimizer after parallelize_module" in by_matrices
        assert "is a mode of DistributedDataParallel" in mode
        assert "reduction_divisor=1.0 tells what a communication hook" in divisor
        assert "set_all_reduce_hook" in hook
        assert "0 inside the model is a DistributedDataParallel" in inside
        assert "2 ranks are running and the model is sharded over 1 of them" in beside
        assert "fully_shard has a OwnReduceScatter in place of torch's own collectives" in comm
        assert "parts of the model are sharded over meshes of 1 and 2 ranks" in sizes
        assert "context_parallel is a mesh of 2 dimensions" in grid
        assert "context_parallel='cp' is no DeviceMesh" in word
        assert "2 ranks are running and first.weight lies over 1 of them" in cut
        assert "a model that is only tensor parallel has one replica" in tensor
        assert none == "traffic takes 1 micro-batch or more, not 0"


# Broken on purpose --------------------------------------------------------------------------------


def broken(rank: int, ranks: int, slip: str) -> float:
    """The distance from the big batch of a window that is broken on purpose."""
    model, wanted = sharded(ranks), net()
    window, plain = window_over(model), adamw(wanted)
    if slip == "a part of the norm":
        window._parts.ranks.norm_in_parts = False
    held = 1 + 2 * rank if slip.startswith("weight") else 2
    shares = [batches(10 * one, 1 + 2 * one if slip.startswith("weight") else 2) for one in range(ranks)]
    if slip == "nothing cleared":
        with mock.patch.object(FSDPRanks, "_reset"):
            with pytest.raises(RuntimeError):
                failing(window, model, shares[rank], "between")
            with mock.patch.object(FSDPRanks, "_refuse_left_gradients"):
                window.run(shares[rank], loss)
    elif slip.startswith("weight"):
        seed = torch.ones_like
        with mock.patch("wholebatch.update.torch.zeros_like", lambda given, **_: seed(given)):
            window.run(shares[rank], loss)
    else:
        window.run(shares[rank], loss)
    assert len(shares[rank]) == held
    big_batch(wanted, plain, [batch for share in shares for batch in share])
    return distance(model, wanted)


@pytest.mark.parametrize("slip", ["a part of the norm", "weight in weightless turns", "nothing cleared"])
def test_each_of_these_slips_shows(slip: str) -> None:
    outcomes = run_ranks(broken, 2, slip, expect="outcomes")
    assert all(outcome[0] == "error" or outcome[1] > 1e-6 for outcome in outcomes), outcomes
