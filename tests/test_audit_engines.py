"""Where sharded engines deliver gradients and what their optimizers read, on ranks, against sums."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from wholebatch.audit import audit_loop
from wholebatch.audit.report import report_text
from wholebatch.audit.watch.engines import (
    Engine,
    Piece,
    accumulation_node,
    data_parallel_place,
    engine_of,
    pieces_of_dtensor,
    watched_parameters,
)

A = 3  # micro-batches of a window


def make_model() -> nn.Sequential:
    """Uneven over 2 ranks, and one bias of a single element, which one rank has nothing of."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def make_batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2 + j, 3, generator=generator) for j in range(A)]


@contextlib.contextmanager
def watching(engine: Engine, sums: dict[int, Tensor], fired: list[int]) -> Iterator[None]:
    """Add up what the next backward delivers to each watched parameter."""

    def hook(parameter: Tensor) -> Callable[[tuple[Tensor, ...]], None]:
        def add(gradients: tuple[Tensor, ...]) -> None:
            fired.append(id(parameter))
            own = engine.own(parameter, gradients[0].detach()).to(torch.float64)
            sums[id(parameter)] = sums.get(id(parameter), 0) + own

        return add

    handles = [accumulation_node(leaf).register_prehook(hook(one)) for one, leaf in engine.receivers()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_of(pieces: list[list[Piece]]) -> Tensor:
    """Put the pieces with copy 0 of all ranks together; each element comes once."""
    mine = [piece for of_rank in pieces for piece in of_rank if piece.copy == 0]
    whole = torch.zeros(mine[0].shape, dtype=torch.float64)
    seen = torch.zeros(mine[0].shape)
    for piece in mine:
        if piece.offsets is not None:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            whole[box] += piece.tensor
            seen[box] += 1
        else:
            span = slice(piece.start, piece.start + piece.tensor.numel())
            whole.view(-1)[span] += piece.tensor
            seen.view(-1)[span] += 1
    assert torch.equal(seen, torch.ones_like(seen)), "not every element, or some twice"
    return whole


def gathered(value: Any, n: int) -> list[Any]:
    out: list[Any] = [None] * n
    dist.all_gather_object(out, value)
    return out


def compare(engine: Engine, watched: list[Tensor], sums: dict[int, Tensor], n: int) -> float:
    """Largest distance of what is read from the mean over ranks of what was delivered, all parameters."""
    worst = 0.0
    for one in watched:
        pieces = engine.pieces(one)
        if pieces is None:
            pieces = [Piece(tensor=one.grad, shape=tuple(one.shape), start=0, copy=dist.get_rank())]
        read = whole_of(gathered(list(pieces), n))
        delivered = sum(gathered(sums[id(one)].reshape(-1), n)) / n
        worst = max(worst, float((read.reshape(-1) - delivered[: read.numel()]).norm() / delivered.norm()))
    return worst


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    hold: Callable[[bool], Any],
    watched: bool,
) -> dict[str, Any]:
    """One window, watched or not; then one more update, unwatched."""
    sums: dict[int, Tensor] = {}
    fired: list[int] = []
    held: list[bool | None] = []
    distance, engine = 0.0, engine_of(model)
    assert engine is not None
    for window in range(2):
        for j, batch in enumerate(make_batches(rank)):
            with hold(j < A - 1):
                loss = model(batch).float().square().mean()
                held.append(engine.holds_reduction())
                with watching(engine, sums, fired) if watched and not window else contextlib.nullcontext():
                    loss.backward()
        if watched and not window:
            distance = compare(engine, watched_parameters(optimizer), sums, dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
    return {"distance": distance, "fired": len(fired), "held": held, "unseen": engine.unseen()}


def values_of(model: nn.Module) -> list[Tensor]:
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [one.detach().clone() for one in local]


def both(
    make: Callable[[], nn.Module], rank: int, hold: Callable[[nn.Module, bool], Any]
) -> tuple[dict[str, Any], bool]:
    """Train twice, watched and not, and say whether the parameters are the same bit for bit."""
    seen, results = {}, []
    for watched in (True, False):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found = train(model, optimizer, rank, lambda held, model=model: hold(model, held), watched)
        seen = found if watched else seen
        results.append(values_of(model))
    return seen, all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# FSDP2


@contextlib.contextmanager
def no_sync(model: Any, held: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(not held)
    yield


def sharded(rank: int, n: int, case: str) -> tuple[dict[str, Any], bool, tuple[int, int]]:
    is_hybrid = case.startswith("hybrid")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if is_hybrid else None
    mesh = mesh or init_device_mesh("cpu", (n,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make() -> nn.Module:
        model = make_model()
        options = {"mesh": mesh, "reshard_after_forward": case != "kept"}
        if case == "mixed":
            options["mp_policy"] = policy
        for layer in (model[0], model[2]):
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    @contextlib.contextmanager
    def hold(model: Any, held: bool) -> Iterator[None]:
        if case == "hybrid, reduced within":
            model.set_requires_all_reduce(not held)
        elif case in ("kept", "held", "hybrid"):
            model.set_requires_gradient_sync(not held)
        yield

    model = make()
    place = data_parallel_place([model], [torch.optim.SGD(model.parameters())])
    return *both(make, rank, hold), place


@pytest.mark.parametrize("case", ["reduced each time", "held", "kept", "mixed"])
def test_fsdp2_delivers_whole_gradients_and_reads_boxes(case: str) -> None:
    for rank, (seen, is_same, place) in enumerate(run_ranks(sharded, 2, case)):
        assert seen["distance"] < (4e-3 if case == "mixed" else 1e-6)
        assert seen["fired"] == 6 * A
        assert is_same, "watching changed the result"
        assert place == (rank, 2)
        is_held = case in ("held", "kept")
        assert seen["held"] == [is_held, is_held, False] * 2
        assert seen["unseen"] == ()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hybrid", "hybrid, reduced within"])
def test_hybrid_shards_come_in_copies(case: str) -> None:
    for rank, (seen, is_same, place) in enumerate(run_ranks(sharded, 4, case)):
        assert seen["distance"] < 1e-6
        assert is_same
        assert place == (rank, 4)
        assert seen["held"] == [True, True, False] * 2


def tensor_parallel(_rank: int, n: int, is_sharded: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    if is_sharded:
        fully_shard(model, mesh=mesh["dp"])
    engine = engine_of(model)
    model(torch.ones(2, 4)).sum().backward()
    weight = model[0].weight
    found = {"place": data_parallel_place([model], [torch.optim.SGD(model.parameters())])}
    pieces = pieces_of_dtensor(weight.grad)
    whole = whole_of(gathered(list(pieces), n)) if is_sharded else None
    if engine is not None:
        found |= {"receivers": len(list(engine.receivers())), "unseen": engine.unseen()}
        found["equal"] = torch.equal(whole, weight.grad.full_tensor().double())
    return found


@pytest.mark.slow
def test_tensor_parallel_layers_inside_fsdp2_are_said_to_be_unseen() -> None:
    for rank, found in enumerate(run_ranks(tensor_parallel, 4, True)):
        assert found["place"] == (rank // 2, 2)
        assert found["receivers"] == 2  # the layer that is not parallel
        assert "2 parameters are parts of a tensor-parallel layer" in found["unseen"][0]
        assert found["equal"]


@pytest.mark.slow
def test_ranks_that_are_only_tensor_parallel_share_a_replica() -> None:
    places = [found["place"] for found in run_ranks(tensor_parallel, 4, False)]
    assert places == [(0, 2), (0, 2), (1, 2), (1, 2)]


def strided_place(_rank: int, _n: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)]))
    return data_parallel_place([], [torch.optim.SGD([weight])])


@pytest.mark.slow
def test_tensor_parallel_ranks_that_do_not_lie_side_by_side() -> None:
    assert run_ranks(strided_place, 4) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def ddp_place(_rank: int, _n: int) -> tuple[Any, ...]:
    model = DistributedDataParallel(make_model())
    alone = dist.new_subgroups(1)[0]
    return (
        engine_of(model),
        data_parallel_place([model], []),
        data_parallel_place([DistributedDataParallel(make_model(), process_group=alone)], []),
        data_parallel_place([make_model()], []),
    )


def test_a_ddp_model_has_no_engine_and_its_own_group() -> None:
    assert run_ranks(ddp_place, 2) == [(None, (r, 2), (0, 1), (r, 2)) for r in range(2)]


def staged(rank: int, n: int) -> tuple[Any, ...]:
    """A right loop of a pipeline, whose last stage alone has losses."""
    part = nn.Linear(3, 3)
    stage = PipelineStage(part, rank, n, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, A, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters())

    def loop() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            given = [torch.ones(6, 3)] if rank == 0 else []
            schedule.step(*given, **({"target": torch.ones(6, 3)} if rank == n - 1 else {}))
            optimizer.step()

    judgement = audit_loop(loop)
    return judgement.verdict, judgement.findings, judgement.unjudged, report_text(judgement)


def test_what_runs_in_stages_is_not_judged() -> None:
    why = "the model runs in stages of a pipeline, and no rank sees a whole micro-batch"
    for rank, (verdict, findings, unjudged, text) in enumerate(run_ranks(staged, 2)):
        assert (verdict, findings, unjudged) == ("not_judged", (), (f"rank {rank}: {why}",))
        assert " ".join(text.split()).startswith(f"Not judged: {why}")


def test_one_process_is_one_replica() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    assert data_parallel_place([model], [optimizer]) == (0, 1)
    assert engine_of(model) is None
    assert [id(p) for p in watched_parameters(optimizer)] == [id(p) for p in model.parameters()]


# FSDP1


def flat(rank: int, n: int, case: str, original: bool) -> tuple[dict[str, Any], bool, tuple[int, int]]:
    warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy", FutureWarning)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    groups = None
    if case == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("copies", "shards"))
        groups = (mesh.get_group("shards"), mesh.get_group("copies"))

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            process_group=groups,
            device_id=torch.device("cpu"),
            use_orig_params=original,
            sharding_strategy=ShardingStrategy[case if case.isupper() else "FULL_SHARD"],
            mixed_precision=low if case == "mixed" else None,
        )

    def make() -> nn.Module:
        model = make_model()
        model[0] = wrap(model[0])
        return wrap(model)

    def hold(model: Any, held: bool) -> Any:
        return model.no_sync() if held and case == "held" else contextlib.nullcontext()

    place = data_parallel_place([make()], [])
    return *both(make, rank, hold), place


@pytest.mark.slow
@pytest.mark.parametrize("original", [True, False])
def test_hybrid_flat_shards_come_in_copies(original: bool) -> None:
    for rank, (seen, is_same, place) in enumerate(run_ranks(flat, 4, "HYBRID_SHARD", original)):
        assert seen["distance"] < 1e-6
        assert is_same
        assert place == (rank, 4)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("case", ["reduced each time", "held", "NO_SHARD", "SHARD_GRAD_OP", "mixed"])
def test_fsdp1_delivers_flat_gradients_and_reads_ranges(case: str, original: bool) -> None:
    for rank, (seen, is_same, place) in enumerate(run_ranks(flat, 2, case, original)):
        assert seen["distance"] < (4e-3 if case == "mixed" else 1e-6)
        assert seen["fired"] == (6 if original else 2) * A
        assert is_same, "watching changed the result"
        assert place == (rank, 2)
        assert seen["held"] == [case == "held", case == "held", False] * 2
