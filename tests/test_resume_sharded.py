"""Models that the ranks hold in parts: each rank writes its own, and any number of ranks reads them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ranks import run_ranks
from test_resume import assert_same
from test_resume_disk import forge
from wholebatch.errors import CheckpointError, UsageError
from wholebatch.record import Counters
from wholebatch.resume import Checkpoints, TrainingParts
from wholebatch.resume.sharded import facts_of_parts, need_safetensors

pytestmark = pytest.mark.slow


def built(
    n: int, *, sharded: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TrainingParts:
    """A model of odd sizes, so that the parts are uneven and one of them is empty."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
    if sharded:
        mesh = init_device_mesh("cpu", (n,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return TrainingParts(model=model, optimizers=[optimizer], counters=Counters())


def train(parts: TrainingParts, num_updates: int) -> None:
    """The same rows on every rank, so that the mean over ranks is that of one."""
    (optimizer,) = parts.optimizers
    for _ in range(num_updates):
        rows = torch.sin(torch.arange(20.0) * (1 + parts.counters.updates_attempted)).view(4, 5)
        rows = rows.to(next(parts.model.parameters()).dtype)
        (parts.model(rows) ** 2).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        parts.counters.advance(outcome="applied", micro_batches=1, samples=4, items=4)


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


def state(parts: TrainingParts) -> dict[str, Any]:
    """Everything as whole tensors."""
    (optimizer,) = parts.optimizers
    return {
        "model": whole(dict(parts.model.state_dict())),
        "optimizer": whole(optimizer.state_dict()),
        "counters": parts.counters.state_dict(),
        "host": torch.get_rng_state(),
    }


def save(rank: int, n: int, where: str, sharded: bool, dtype: torch.dtype) -> tuple[Any, Any]:  # noqa: ARG001
    parts = built(n, sharded=sharded, dtype=dtype)
    train(parts, 2)
    Checkpoints(where).save_parts(parts, score=1.0)
    before = state(parts)
    train(parts, 2)
    return before, state(parts)


def load(rank: int, n: int, where: str, sharded: bool, dtype: torch.dtype) -> tuple[Any, Any, Any]:  # noqa: ARG001
    parts = built(n, sharded=sharded, seed=9, dtype=dtype)
    found = Checkpoints(where).load_parts(parts)
    (optimizer,) = parts.optimizers
    kinds = {type(one) for one in optimizer.state[parts.model[0].weight].values() if one.dim()}
    assert kinds == ({DTensor} if sharded else {torch.Tensor})
    before = state(parts)
    train(parts, 2)
    return before, state(parts), (found.updates_attempted, found.same_layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_go_on_bit_for_bit_with_their_own_parts(tmp_path, dtype):
    saved = run_ranks(save, 2, str(tmp_path), True, dtype)
    loaded = run_ranks(load, 2, str(tmp_path), True, dtype)
    for (before, end), (found, found_end, facts) in zip(saved, loaded, strict=True):
        assert_same(found, before)
        assert_same(found_end, end)
        assert facts == (2, True)
    path = tmp_path / "update-00000002"
    assert sorted(file.name for file in (path / "parts").iterdir()) == [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sum(name.startswith("parts/") for name in listed) == 2
    assert not list(path.rglob(".metadata"))


@pytest.mark.parametrize(("ranks", "sharded"), [(1, True), (3, True), (4, True), (1, False)])
def test_other_ranks_read_the_parts_that_they_need(tmp_path, ranks, sharded):
    (before, _), _ = run_ranks(save, 2, str(tmp_path), True, torch.float32)
    for found, _, facts in run_ranks(load, ranks, str(tmp_path), sharded, torch.float32):
        assert_same(found["model"], before["model"])
        assert_same(found["optimizer"], before["optimizer"])
        assert facts == (2, False)


def test_a_whole_model_is_cut_for_ranks_that_hold_parts(tmp_path):
    ((before, _),) = run_ranks(save, 1, str(tmp_path), False, torch.float32)
    assert not list(tmp_path.rglob("*.safetensors"))
    for found, _, _ in run_ranks(load, 2, str(tmp_path), True, torch.float32):
        assert_same(found["model"], before["model"])
        assert_same(found["optimizer"], before["optimizer"])


def load_after(rank: int, n: int, where: str) -> str:  # noqa: ARG001
    parts = built(n, seed=9)
    before = state(parts)
    with pytest.raises(CheckpointError) as raised:
        Checkpoints(where).load_parts(parts)
    assert_same(state(parts), before)
    return str(raised.value)


def test_damage_to_a_part_is_seen_by_all(tmp_path):
    run_ranks(save, 2, str(tmp_path), True, torch.float32)
    (path,) = tmp_path.rglob("shard-00002-*")
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[:-1] + bytes([whole_file[-1] ^ 1]))
    for words in run_ranks(load_after, 2, str(tmp_path)):
        assert "its file parts/shard-00002-model-00001-of-00001.safetensors was changed" in words
        assert "there is no other in the folder that is whole" in words


class _Executed:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle was executed')",)


def test_a_planted_metadata_pickle_is_not_read(tmp_path):
    """The file that torch's own reader would execute."""
    import pickle

    saved = run_ranks(save, 2, str(tmp_path), True, torch.float32)
    path = tmp_path / "update-00000002"
    (path / "parts" / ".metadata").write_bytes(pickle.dumps(_Executed()))
    for words in run_ranks(load_after, 2, str(tmp_path)):
        assert "its file parts/.metadata is not in the manifest" in words
    from wholebatch import checkpoint_folder as folder

    forge(
        path,
        lambda body: body["files"].update({"parts/.metadata": folder.file_facts(path / "parts/.metadata")}),
    )
    for (before, _), (found, _, _) in zip(
        saved, run_ranks(load, 2, str(tmp_path), True, torch.float32), strict=True
    ):
        assert_same(found["model"], before["model"])


def save_with_average(rank: int, n: int, where: str) -> tuple[Any, Any]:  # noqa: ARG001
    """An average kept beside the model, in parts too (``AveragedModel`` can't copy such a model)."""

    def with_average(seed: int) -> tuple[TrainingParts, nn.Module]:
        average = built(n, seed=seed + 1).model
        parts = built(n, seed=seed)
        given = {"model": parts.model, "optimizers": parts.optimizers, "counters": parts.counters}
        return TrainingParts(**given, more={"ema": average}), average

    parts, average = with_average(4)
    Checkpoints(where).save_parts(parts)
    other, empty = with_average(40)
    Checkpoints(where).load_parts(other)
    return whole(dict(average.state_dict())), whole(dict(empty.state_dict()))


def test_an_average_of_parts_comes_back(tmp_path):
    for before, after in run_ranks(save_with_average, 2, str(tmp_path)):
        assert_same(after, before)


def fail_to_write_a_part(rank: int, n: int, where: str) -> str:
    import resource

    parts = built(n)
    train(parts, 1)
    checkpoints = Checkpoints(where)
    checkpoints.save_parts(parts)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    train(parts, 1)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.save_parts(parts)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(raised.value)


def test_a_rank_that_can_not_write_its_part_ends_all(tmp_path):
    for words in run_ranks(fail_to_write_a_part, 2, str(tmp_path)):
        assert "the parts of a checkpoint could not be written to" in words
        assert "File too large" in words
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]


def test_a_part_that_the_leading_rank_does_not_see_is_an_error(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"rank 1 wrote its part of a checkpoint to .*; give a folder that"
    ):
        facts_of_parts(tmp_path / "x", [[], ["shard-00002"]])


def test_without_safetensors_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match=r"hold in parts needs the package safetensors, .*\[hf\]"):
        need_safetensors()
