"""Random state, buffers and gradients are kept and put back bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from wholebatch.gradients import read_scalars, read_stacked, scale_gradients, total_norm
from wholebatch.replay import BufferKeeper, RandomState, random_state_kept, seed_all, seed_host


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.randn(5).sum())]


def test_the_same_random_state_draws_the_same_numbers() -> None:
    state = RandomState.capture()
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


def numpy_state() -> tuple[list[int], tuple[Any, ...]]:
    _, key, *rest = RandomState.capture().numpy
    return key.tolist(), tuple(rest)


def numpy_state_by_numpy() -> tuple[list[int], tuple[Any, ...]]:
    _, key, *rest = np.random.get_state()
    return key.tolist(), tuple(rest)


@pytest.mark.parametrize("seed", range(20))
def test_the_state_of_numpy_is_read_as_numpy_has_it_whatever_moves_it(seed: int) -> None:
    """In random orders: draws that keep a normal number for the next, that take it, and whole states."""
    with random_state_kept():
        chosen = random.Random(seed)
        other = np.random.RandomState(seed).get_state()
        moves: list[Callable[[], Any]] = [
            lambda: np.random.randn(1),
            lambda: np.random.randn(1),
            lambda: np.random.rand(chosen.randrange(700)),
            lambda: np.random.seed(seed),
            lambda: np.random.set_state(other),
            lambda: None,
        ]
        for _ in range(60):
            chosen.choice(moves)()
            assert numpy_state() == numpy_state_by_numpy()


def test_the_state_of_numpy_is_read_out_anew_only_where_it_has_moved() -> None:
    np.random.rand()
    RandomState.capture()
    with mock.patch.object(np.random, "get_state", wraps=np.random.get_state) as read_out:
        state = RandomState.capture()
        assert read_out.call_count == 0
        np.random.rand()
        RandomState.capture()
        assert read_out.call_count == 1
        state.restore()
        assert numpy_state() == (state.numpy[1].tolist(), state.numpy[2:])


def test_a_normal_number_that_numpy_keeps_for_the_next_call_is_put_back() -> None:
    with random_state_kept():
        np.random.seed(1)
        np.random.randn(1)  # draws two and keeps one
        state = RandomState.capture()
        first = np.random.randn(3).tolist()
        second = RandomState.capture()
        state.restore()
        assert np.random.randn(3).tolist() == first
        second.restore()
        assert first != np.random.randn(3).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_state_of_python_is_read_as_python_has_it_whatever_moves_it(seed: int) -> None:
    with random_state_kept():
        chosen = random.Random(seed)
        other = random.Random(seed)
        other.gauss(0, 1)  # keeps a second number for the next call
        moves: list[Callable[[], Any]] = [
            lambda: random.gauss(0, 1),
            lambda: random.gauss(0, 1),
            lambda: [random.random() for _ in range(chosen.randrange(700))],
            lambda: random.seed(seed),
            lambda: random.setstate(other.getstate()),
            lambda: None,
        ]
        for _ in range(60):
            chosen.choice(moves)()
            assert RandomState.capture().python == random.getstate()


def test_the_state_of_python_is_read_out_anew_only_where_it_has_moved() -> None:
    with random_state_kept():
        random.gauss(0, 1)  # draws two and keeps one
        state = RandomState.capture().python
        assert RandomState.capture().python is state
        random.gauss(0, 1)  # takes that one, without a draw
        assert RandomState.capture().python == random.getstate() != state
        random.random()
        assert RandomState.capture().python == random.getstate()


def test_where_the_memory_of_python_s_generator_is_otherwise_its_state_is_read_every_time() -> None:
    with random_state_kept():
        RandomState.capture()
        with mock.patch("wholebatch.replay.ctypes.string_at", return_value=bytes(2500)):
            states = [RandomState.capture().python, RandomState.capture().python]
            assert states[0] is not states[1]
            random.random()
            assert RandomState.capture().python == random.getstate() != states[0]
        with mock.patch.object(random, "getstate", wraps=random.getstate) as read_out:
            RandomState.capture()
            RandomState.capture()
            assert read_out.call_count == 2, "a function of somebody else's is asked"


def test_another_generator_of_numpy_is_read_out_every_time() -> None:
    found = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's own, about a state that is no tuple
            state = RandomState.capture()
            first = np.random.randn(3).tolist()
            state.restore()
        assert np.random.randn(3).tolist() == first
    finally:
        np.random.set_bit_generator(found)


def test_batch_norm_buffers_move_and_are_put_back() -> None:
    """BatchNorm's running statistics do not count as written in torch's own version counter."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.register_buffer("steady", torch.ones(2))
    keeper = BufferKeeper(model)
    keeper.keep()
    assert keeper.moved() == []
    model(torch.randn(4, 3))
    assert keeper.moved() == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    kept = model[0].running_mean
    model[0].running_mean = torch.full((3,), 9.0)
    keeper.put_back()
    assert keeper.moved() == []
    assert model[0].running_mean is kept
    assert torch.equal(kept, torch.zeros(3))
    assert int(model[0].num_batches_tracked) == 0


def test_the_norm_is_over_all_gradients_and_wide_enough() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((4,), 1.0, dtype=torch.float64)]
    assert float(total_norm(gradients)) == pytest.approx(4.0, rel=1e-7)
    half = [torch.full((70000,), 0.01, dtype=torch.bfloat16)]
    exact = float(half[0].double().norm())
    assert float(total_norm(half)) == pytest.approx(exact, rel=1e-5)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 4.0]), (3,), check_invariants=True
    )
    assert float(total_norm([sparse])) == 5.0


def test_gradients_are_scaled_in_place_and_scalars_read_together() -> None:
    gradients = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    scale_gradients(gradients, 0.5)
    assert [float(g.sum()) for g in gradients] == [1.5, 1.0]
    assert read_scalars([1, torch.tensor(2.5), torch.tensor([3]), 0.5]) == [1.0, 2.5, 3.0, 0.5]
    assert read_scalars([1, 2.0]) == [1.0, 2.0]
    assert read_scalars([]) == []
    mixed = [
        torch.tensor(2.5),
        torch.tensor([3]),
        torch.tensor(2**40),
        torch.tensor(0.1, dtype=torch.float64),
    ]
    assert read_stacked(mixed) == [2.5, 3.0, 2.0**40, 0.1], "as on a device: one copy, in order"


@pytest.mark.parametrize("seed_them", [seed_host, seed_all])
def test_one_seed_starts_every_generator_of_the_host(seed_them: Callable[[int], None]) -> None:
    with random_state_kept():
        seed_them(5)
        first = draw()
        assert draw() != first
        seed_them(5)
        assert draw() == first
        seed_them(-(2**63))
        assert all(one != other for one, other in zip(draw(), first, strict=True))


@pytest.mark.parametrize("host_alone", [False, True])
def test_random_state_is_put_back_also_after_an_exception(host_alone: bool) -> None:
    state = RandomState.capture(host_alone=host_alone)
    first = draw()
    state.restore()

    def failing() -> None:
        with random_state_kept(host_alone=host_alone):
            draw()
            raise KeyError("a")

    with pytest.raises(KeyError, match="a"):
        failing()
    assert draw() == first
