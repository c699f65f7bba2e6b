"""Packings: the budget holds, each sample is there once, and the numbers of micro-batches are as asked."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from wholebatch.errors import PlanError
from wholebatch.packing import Called, CostModel, Packing, pack, padded
from wholebatch.packing.balance import Loads, deal
from wholebatch.packing.cost import in_whole_numbers
from wholebatch.packing.padded import fewest_cuts, most_samples, move_cuts, spread_cuts
from wholebatch.packing.wanted import Wanted, candidate, round_up


def positions_of(lengths: list[int], rows: str) -> int:
    """Positions of one micro-batch, by the words of the docstring."""
    if not lengths:
        return 0
    return max(lengths) * len(lengths) if rows == "padded" else sum(lengths)


def cost_of(lengths: list[int], rows: str, model: CostModel) -> float:
    positions = positions_of(lengths, rows)
    assert model.per_micro_batch is not None
    if rows == "padded":
        product = positions * max(lengths, default=0)
    else:
        product = sum(length * length for length in lengths)
    return model.per_micro_batch + model.per_position * positions + model.per_position_and_length * product


def complaints(packing: Packing, lengths: list[int], asked: dict[str, Any], model: CostModel) -> list[str]:
    """Return everything that is wrong with a packing, each from the indices alone."""
    found, rows, budget = [], packing.rows, packing.budget
    micro_batches = [list(each) for replica in packing.replicas for each in replica]
    if sorted(itertools.chain(*micro_batches)) != list(range(len(lengths))):
        found.append("a sample is missing or there twice")
    if len(packing.replicas) != asked["replicas"]:
        found.append("not so many replicas")
    cut = [min(length, budget) if asked["too_long"] == "truncate" else length for length in lengths]
    sizes = [positions_of([cut[index] for index in each], rows) for each in micro_batches]
    for each, size in zip(micro_batches, sizes, strict=True):
        allowed = asked["budget_alone"] if len(each) == 1 and each[0] in packing.alone else budget
        if size > allowed:
            found.append(f"{size} positions in {each}, over {allowed}")
    numbers = [len(replica) for replica in packing.replicas]
    multiple = asked["micro_batches_multiple"]
    if any(number % multiple for number in numbers):
        found.append(f"{numbers} micro-batches are no multiples of {multiple}")
    if asked["equal_micro_batches"] and len(set(numbers)) > 1:
        found.append(f"{numbers} micro-batches are not equal")
    if asked["equal_micro_batches"] and len(lengths) >= sum(numbers) and not all(micro_batches):
        found.append("an empty micro-batch without need")
    if multiple == 1 and not asked["equal_micro_batches"] and not all(micro_batches):
        found.append("an empty micro-batch that nobody asked for")
    if packing.micro_batches < packing.lower_bound:
        found.append(f"{packing.micro_batches} micro-batches, below the bound {packing.lower_bound}")
    if (packing.positions, packing.tokens) != (sum(sizes), sum(cut)):
        found.append("positions or tokens are not what they are")
    if packing.largest_micro_batch_positions != max(sizes, default=0):
        found.append("the largest micro-batch is not what it is")
    model = model.under(budget)
    costs = [
        sum(cost_of([cut[index] for index in each], rows, model) for each in replica)
        for replica in packing.replicas
    ]
    if not np.allclose(costs, packing.costs, rtol=1e-12):
        found.append(f"costs {packing.costs}, and they are {costs}")
    for replica in packing.replicas:
        largest_first = [positions_of([cut[index] for index in each], rows) for each in replica]
        if largest_first != sorted(largest_first, reverse=True):
            found.append(f"{largest_first} positions are not largest first")
    return found


def random_case(rng: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """Small and odd cases of every kind; lengths of few values, so that ties abound."""
    num_samples = int(rng.integers(0, 40))
    longest = int(rng.choice([1, 3, 12, 100]))
    lengths = rng.integers(1, longest + 1, num_samples)
    if rng.random() < 0.3 and num_samples:
        lengths[rng.integers(num_samples)] *= 20
    over = int(lengths.max(initial=1))
    too_long = str(rng.choice(["refuse", "alone", "truncate"]))
    budget = (
        int(over * rng.choice([1, 1.5, 3, 8])) if too_long == "refuse" else int(rng.integers(1, over + 5))
    )
    model = CostModel(
        per_micro_batch=[None, 0.0, 0.5, 30.0][rng.integers(4)],
        per_position=float(rng.choice([1, 0.3])),
        per_position_and_length=float(rng.choice([0, 0.01])),
    )
    return lengths.tolist(), {
        "budget": budget,
        "replicas": int(rng.choice([1, 2, 3, 8])),
        "rows": str(rng.choice(["padded", "packed"])),
        "equal_micro_batches": bool(rng.random() < 0.5),
        "micro_batches_multiple": int(rng.choice([1, 1, 2, 3])),
        "too_long": too_long,
        "budget_alone": max(budget + 1, over) if too_long == "alone" else None,
        "cost": model,
    }


@pytest.mark.slow
def test_ten_thousand_random_cases():
    rng = np.random.default_rng(5)
    for _ in range(10_000):
        lengths, asked = random_case(rng)
        packing = pack(lengths, **asked)
        assert not complaints(packing, lengths, asked, asked["cost"]), (lengths, asked, packing)
        if rng.random() < 0.05:
            assert pack(np.array(lengths, dtype=np.int32), **asked) == packing


# Fitted on one core: width 128, 4 layers; see benchmarks/packing.py.
SMALL_GPT = CostModel(per_micro_batch=64, per_position_and_length=1e-3)
# So dear that there are as few micro-batches as can be.
DEAR = CostModel(per_micro_batch=1000)
WHOLE = {
    "replicas": 2,
    "budget_alone": None,
    "micro_batches_multiple": 1,
    "equal_micro_batches": False,
    "too_long": "refuse",
}


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"replicas": (((0, 1),), ((2,),))}, "a sample is missing or there twice"),
        ({"replicas": (((0, 1),), ((2, 3), (3,)))}, "a sample is missing or there twice"),
        ({"replicas": (((0, 1), (2, 3)),)}, "not so many replicas"),
        ({"replicas": (((0, 1, 2),), ((3,),))}, "12 positions in .*, over 8"),
        ({"replicas": (((2,), (0,)), ((1, 3),))}, "not largest first"),
        ({"replicas": (((0, 1), ()), ((3, 2),))}, "an empty micro-batch that nobody asked for"),
        ({"positions": 13}, "positions or tokens"),
        ({"largest_micro_batch_positions": 9}, "the largest micro-batch"),
        ({"costs": (1008.0, 1005.0)}, "costs"),
        ({"lower_bound": 3}, "below the bound 3"),
    ],
)
def test_what_is_wrong_with_a_packing_is_seen(broken, complaint):
    lengths = [4, 3, 2, 2]
    packing = pack(lengths, 8, 2, cost=DEAR)
    assert packing.replicas == (((0, 1),), ((2, 3),))
    assert not complaints(packing, lengths, WHOLE, DEAR)
    found = complaints(replace(packing, **broken), lengths, WHOLE, DEAR)
    assert any(re.search(complaint, line) for line in found), found


def test_wrong_numbers_of_micro_batches_are_seen():
    packing = pack([4, 3, 2, 2], 4, 2)
    uneven = replace(packing, replicas=(((0,), (1,)), ((2,), (3,), ())))
    found = complaints(uneven, [4, 3, 2, 2], WHOLE | {"equal_micro_batches": True}, CostModel())
    assert any("are not equal" in line for line in found)
    found = complaints(uneven, [4, 3, 2, 2], WHOLE | {"micro_batches_multiple": 2}, CostModel())
    assert any("no multiples of 2" in line for line in found)
    equal = replace(packing, replicas=(((0, 1), ()), ((2,), (3,))))
    found = complaints(equal, [4, 3, 2, 2], WHOLE | {"equal_micro_batches": True}, CostModel())
    assert "an empty micro-batch without need" in found


# Against every way to cut


def partitions(items: list[int]) -> list[list[list[int]]]:
    """Every way to put items into groups."""
    if not items:
        return [[]]
    found = []
    for rest in partitions(items[1:]):
        found.append([[items[0]], *rest])
        found += [[*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]] for at in range(len(rest))]
    return found


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_nothing_costs_less_on_one_replica(rows):
    """Padded: the cheapest of all ways, sorted by length or not. Packed: of all that were looked at."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        lengths = rng.integers(1, 13, 7).tolist()
        budget = int(rng.integers(12, 40))
        model = CostModel(per_micro_batch=float(rng.integers(1, 9)), per_position_and_length=0.05)
        fitting = [
            groups
            for groups in partitions(list(range(7)))
            if all(positions_of([lengths[i] for i in group], rows) <= budget for group in groups)
        ]
        costs = [
            sum(cost_of([lengths[i] for i in group], rows, model) for group in groups) for groups in fitting
        ]
        packing = pack(lengths, budget, rows=rows, cost=model)
        assert packing.costs[0] == pytest.approx(min(costs), rel=1e-12), (lengths, budget, packing)
        fewest = min(map(len, fitting))
        if rows == "padded":
            assert packing.lower_bound == fewest
        else:
            assert fewest - 1 <= packing.lower_bound <= fewest


def test_two_replicas_against_every_way_to_cut():
    """The search is no proof: it comes within 10% of the best on samples this few, and mostly finds it."""
    rng = np.random.default_rng(4)
    ratios = []
    for _ in range(30):
        lengths = rng.integers(1, 13, 7).tolist()
        model = CostModel(per_micro_batch=2)
        best = np.inf
        for groups in partitions(list(range(7))):
            sizes = [positions_of([lengths[i] for i in group], "padded") for group in groups]
            if max(sizes) > 24:
                continue
            total = sum(sizes) + 2 * len(sizes)
            for mask in range(2 ** (len(sizes) - 1)):
                half = sum(size + 2 for at, size in enumerate(sizes) if mask >> at & 1)
                best = min(best, max(half, total - half))
        ratios.append(max(pack(lengths, 24, 2, cost=model).costs) / best)
    assert min(ratios) >= 1
    assert max(ratios) <= 1.10
    assert np.mean(np.isclose(ratios, 1)) >= 0.5


def test_the_bound_on_packed_rows_knows_samples_over_half_a_row():
    assert pack([6, 6, 6, 1], 10, rows="packed").lower_bound == 3  # by tokens 2
    assert pack([6, 6, 3, 3, 4], 10, rows="packed").lower_bound == 3
    assert pack([7, 7, 4, 4], 10, rows="packed").lower_bound == 3
    assert pack([7, 7, 7, 4, 4], 10, rows="packed").lower_bound == 4  # no 4 fits beside a 7
    assert pack([7, 7, 4, 4], 10, rows="packed").micro_batches == 3


# What is made small


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("replicas", [8, 64])
@pytest.mark.parametrize(
    "model", [CostModel(), CostModel(per_micro_batch=64, per_position_and_length=1e-3)]
)
@pytest.mark.parametrize("equal", [False, True])
def test_replicas_are_even_on_lognormal_lengths(rows, replicas, model, equal):
    """Median 665, sigma 1, cap 4096, at least four micro-batches a replica: within 2%."""
    rng = np.random.default_rng(replicas)
    lengths = np.clip(np.exp(rng.normal(np.log(665), 1.0, 40 * replicas)), 1, 4096).astype(int)
    packing = pack(lengths, 8192, replicas, rows=rows, cost=model, equal_micro_batches=equal)
    assert min(map(len, packing.replicas)) >= 4
    assert packing.imbalance <= 1.02


def test_micro_batches_are_as_many_as_their_cost_is_worth():
    lengths = [int(length) for length in np.random.default_rng(0).integers(10, 500, 200)]
    cheap, usual, dear = (
        pack(lengths, 4000, cost=CostModel(per_micro_batch=cost)) for cost in (1, None, 1e6)
    )
    assert dear.micro_batches == dear.lower_bound < usual.micro_batches < cheap.micro_batches
    assert cheap.padding_share < usual.padding_share < dear.padding_share
    assert pack(lengths, 4000) == usual == pack(lengths, 4000, cost=CostModel(per_micro_batch=125))


def test_free_micro_batches_have_one_sample_each():
    """A cost of 0 is taken at its word."""
    packing = pack([10, 9, 8, 7], 40, cost=CostModel(per_micro_batch=0))
    assert packing.replicas == (((0,), (1,), (2,), (3,)),)
    assert packing.padding_share == 0


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40, 1e-6])
def test_the_unit_of_the_cost_does_not_matter(scale):
    lengths = np.random.default_rng(8).integers(1, 300, 100)
    model = CostModel(per_micro_batch=3, per_position=1, per_position_and_length=0.01)
    scaled = CostModel(per_micro_batch=3 * scale, per_position=scale, per_position_and_length=0.01 * scale)
    assert pack(lengths, 1000, 4, cost=scaled).replicas == pack(lengths, 1000, 4, cost=model).replicas


def test_attention_makes_long_samples_dear():
    lengths = [100] * 4 + [10] * 40
    plain = pack(lengths, 1000, 2, rows="packed")
    steep = pack(lengths, 1000, 2, rows="packed", cost=CostModel(per_position=0, per_position_and_length=1))
    long_ones = [sum(index < 4 for each in share for index in each) for share in steep.replicas]
    assert long_ones == [2, 2]
    assert plain.imbalance == steep.imbalance == 1


def test_more_samples_than_are_searched_exactly():
    """Beyond 4,096 samples the number of micro-batches is found by trying some."""
    lengths = 1 + np.arange(5000) * 7919 % 997
    packing = pack(lengths, 4000, 3, cost=CostModel(per_micro_batch=1000))
    asked = WHOLE | {"replicas": 3}
    assert not complaints(packing, lengths.tolist(), asked, CostModel(per_micro_batch=1000))
    assert packing.micro_batches <= packing.lower_bound + 3
    assert packing.imbalance < 1.001
    free = pack(lengths, 4000, 3, cost=CostModel(per_micro_batch=1))
    assert free.micro_batches > packing.micro_batches


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("replicas", [1, 64])
def test_a_hundred_thousand_samples_take_under_a_second(rows, replicas):
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(665), 1.0, 100_000)), 1, 4096).astype(int)
    times = []
    for _ in range(3):
        before = time.process_time()
        packing = pack(lengths, 8192, replicas, rows=rows)
        times.append(time.process_time() - before)
    assert min(times) < 1
    assert not complaints(packing, lengths.tolist(), WHOLE | {"replicas": replicas}, CostModel())


# The same everywhere


def test_the_same_packing_on_every_machine():
    """The digests were taken on one machine; another one has to come to the same."""
    lengths = [1 + index * 7919 % 997 for index in range(400)]
    model = CostModel(per_micro_batch=50, per_position=1, per_position_and_length=0.003)
    digests = []
    for rows, replicas, equal in (("padded", 1, False), ("padded", 8, True), ("packed", 8, False)):
        packing = pack(lengths, 4096, replicas, rows=rows, equal_micro_batches=equal, cost=model)
        digests.append(hashlib.sha256(repr(packing.replicas).encode()).hexdigest()[:12])
    assert digests == ["430226fbe3f7", "0636c900ef2b", "9116ba957a61"]


def test_ties_go_to_the_lower_index():
    assert pack([5, 5, 5, 5, 5], 10).replicas == (((1, 2), (3, 4), (0,)),)
    assert pack([5] * 4, 5, 2).replicas == (((0,), (2,)), ((1,), (3,)))
    assert pack([5] * 4, 10, 2, rows="packed").replicas == (((0, 2),), ((1, 3),))


def test_lengths_of_any_kind_of_whole_number():
    lengths = [3, 9, 4, 4, 1]
    expected = pack(lengths, 9, 2)
    for kind in (np.int16, np.uint8, np.uint64):
        assert pack(np.array(lengths, dtype=kind), 9, 2) == expected
    assert pack(tuple(lengths), np.int64(9), 2) == expected


# Extremes


def random_extreme(rng: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """A case with costs, lengths or a budget as far apart as they may be."""
    lengths, asked = random_case(rng)
    if lengths and rng.random() < 0.5:
        lengths[int(rng.integers(len(lengths)))] = int(rng.choice([2**20, 2**31, 2**53]))
        asked["budget"] = max(lengths)
        asked["too_long"], asked["budget_alone"] = "refuse", None
    elif asked["too_long"] == "refuse" and rng.random() < 0.5:
        asked["budget"] = 2**53
    tiny, large = float(rng.choice([1e-100, 1e-30, 1e-18, 1e-17])), float(rng.choice([1, 1e18, 1e100]))
    asked["cost"] = CostModel(
        per_micro_batch=[None, 0, 1.0, tiny, large, 1e120][rng.integers(6)],
        per_position=float(rng.choice([tiny, 1, large])),
        per_position_and_length=float(rng.choice([0, tiny, 1, large])),
    )
    return lengths, asked


def test_costs_and_lengths_far_apart_are_packed():
    rng = np.random.default_rng(11)
    for _ in range(400):
        lengths, asked = random_extreme(rng)
        packing = pack(lengths, **asked)
        assert not complaints(packing, lengths, asked, asked["cost"]), (lengths, asked, packing)


@pytest.mark.parametrize(
    ("lengths", "budget", "replicas", "model"),
    [
        ([2**53] + [1] * 200, 2**53, 3, CostModel()),
        ([2**31, 5, 3], 2**31, 2, CostModel(per_position_and_length=1)),
        ([5, 3, 900], 1000, 2, CostModel(per_position=1e-18, per_micro_batch=1.0)),
        ([5, 3, 900, 2, 800, 20, 33] * 5, 1000, 2, CostModel(per_position=1e-17, per_micro_batch=1.0)),
        ([5, 3, 900, 2, 800, 20, 33] * 5, 1000, 2, CostModel(per_position=1e-30, per_micro_batch=1.0)),
    ],
)
def test_costs_that_are_next_to_nothing_beside_the_rest(lengths, budget, replicas, model):
    """Each counts as one unit; with 0 there was nothing to choose by, and cuts that never ended."""
    asked = WHOLE | {"replicas": replicas}
    packing = pack(lengths, budget, replicas, cost=model)
    assert not complaints(packing, lengths, asked, model)
    assert packing.micro_batches <= packing.lower_bound + 1
    samples = in_whole_numbers(np.sort(lengths)[::-1].astype(np.int64), budget, model, replicas)
    assert samples.costs.min() >= 1
    assert samples.costs.max() * len(lengths) < 2**60


def test_costs_fall_with_the_length_and_never_to_nothing():
    """Of one long and many short samples, the short ones' costs are told apart where they can be."""
    lengths = np.array([2**40, 1000, 999, 2, 1], dtype=np.int64)
    costs = in_whole_numbers(lengths, 2**40, CostModel(per_micro_batch=0), 1).costs
    assert costs.tolist() == [length << 16 for length in lengths.tolist()]
    steep = CostModel(per_micro_batch=0, per_position_and_length=1)
    assert in_whole_numbers(lengths, 2**40, steep, 1).costs.tolist()[1:] == [1, 1, 1, 1]


def test_tokens_are_summed_up_to_the_bound():
    for rows in ("padded", "packed"):
        packing = pack([2**53] * 128, 2**53, 2, rows=rows)
        assert (packing.tokens, packing.micro_batches) == (2**60, 128)
    words = (
        "the 129 samples have 1161928703861587968 tokens together, more than the 2.*60 = 115292150460684"
    )
    with pytest.raises(PlanError, match=words):
        pack([2**53] * 129, 2**53, 2)
    # What is cut off does not count.
    assert pack([2**53] * 129, 2, too_long="truncate").tokens == 258


# Numbers of micro-batches


def test_fewer_samples_than_micro_batches():
    equal = pack([3, 2], 10, 3, equal_micro_batches=True, micro_batches_multiple=2)
    assert equal.replicas == (((0,), ()), ((1,), ()), ((), ()))
    assert equal.lower_bound == equal.micro_batches == 6
    free = pack([3, 2], 10, 3)
    assert free.replicas == (((0,),), ((1,),), ())
    assert free.costs == (3 + 10 / 32, 2 + 10 / 32, 0)
    assert free.imbalance == pytest.approx(3 * 3.3125 / 5.625)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_many_empty_micro_batches_take_no_time(rows):
    before = time.process_time()
    one = pack([3] * 100, 30, rows=rows, micro_batches_multiple=10**6)
    assert (len(one.replicas[0]), sum(map(bool, one.replicas[0]))) == (10**6, 100)
    many = pack([3, 2], 30, 10**5, rows=rows, equal_micro_batches=True, micro_batches_multiple=3)
    assert many.replicas == (((0,), (), ()), ((1,), (), ()), *[((), (), ())] * 99_998)
    base = 30 / 32
    assert many.costs == (3 + 3 * base, 2 + 3 * base, *[3 * base] * 99_998)
    assert pack([3, 2], 30, 10**5, rows=rows).costs[2:] == (0,) * 99_998
    assert time.process_time() - before < 3


def test_more_micro_batches_than_a_list_should_have_are_refused():
    message = (
        r"^replicas=1099511627776 x micro_batches_multiple=2 are 2199023255552 micro-batches, more than "
        r"the 10000000 that a packing may list; use fewer replicas, or a smaller multiple$"
    )
    with pytest.raises(PlanError, match=message):
        pack([3], 10, 2**40, micro_batches_multiple=2)
    with pytest.raises(PlanError, match="replicas=1 x micro_batches_multiple=10000001 are"):
        pack([3], 10, micro_batches_multiple=10**7 + 1)


def test_the_widest_are_cut_first_and_then_the_first_of_them():
    assert round_up([range(5), range(5, 10), range(10, 12)], 5) == [
        range(3),
        range(3, 5),
        range(5, 8),
        range(8, 10),
        range(10, 12),
    ]
    assert round_up([[0, 4, 5], [1, 2, 3]], 9) == [[0], [4], [5], [1], [2], [3]]
    assert round_up([[0, 4], [1]], 1) == [[0, 4], [1]]
    assert round_up([], 3) == []


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_thousands_of_replicas_take_seconds(rows):
    """An exchange or move that looked at all replicas made 4,096 of them take five seconds."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(665), 1.0, 81_920))
    before = time.process_time()
    packing = pack(np.clip(lengths, 1, 4096).astype(int), 8192, 8192, rows=rows)
    assert time.process_time() - before < 10
    assert packing.imbalance < 1.06


def test_no_samples():
    for equal in (False, True):
        packing = pack([], 10, 2, equal_micro_batches=equal)
        assert packing.replicas == ((), ())
        assert (packing.imbalance, packing.padding_share, packing.lower_bound) == (1, 0, 0)


def test_one_very_long_sample_leaves_the_rest_to_the_others():
    packing = pack([100, *[5] * 60], 100, 4)
    (slow,) = [share for share in packing.replicas if (0,) in share]
    assert slow == ((0,),)
    assert max(packing.costs) == 100 + 100 / 32


# Samples that are too long


def test_too_long_is_refused_with_the_choices():
    message = (
        r"^sample 1 has 12 tokens, and 1 other is too long as well: over budget=10, the positions of a "
        r"micro-batch at most. Raise it, to 15 for all of them; cut samples to it with "
        r"too_long='truncate'; let a micro-batch of one sample be larger with too_long='alone' and "
        r"budget_alone=15; or leave them out$"
    )
    with pytest.raises(PlanError, match=message):
        pack([3, 12, 15], 10)
    with pytest.raises(PlanError, match="and 2 others are too long as well"):
        pack([11, 12, 15], 10)
    with pytest.raises(PlanError, match=r"^sample 0 has 11 tokens: over budget=10, the"):
        pack([11], 10, rows="packed")


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_too_long_is_alone_or_cut(rows):
    alone = pack([3, 12, 4], 10, rows=rows, too_long="alone", budget_alone=12, cost=DEAR)
    assert alone.replicas == (((1,), (2, 0)),)
    assert (alone.alone, alone.truncated, alone.budget_alone) == ((1,), (), 12)
    assert alone.largest_micro_batch_positions == 12
    cut = pack([3, 12, 4], 10, rows=rows, too_long="truncate", cost=DEAR)
    assert cut.replicas == (((1,), (2, 0)),)
    assert (cut.alone, cut.truncated, cut.tokens) == ((), (1,), 17)
    assert cut.largest_micro_batch_positions == 10


def test_alone_has_a_bound_too():
    message = (
        "^sample 1 has 12 tokens: over budget_alone=11, the bound for a sample that is alone. Raise it, to "
        "12 for all of them; cut samples to budget=10 with too_long='truncate'; or leave them out$"
    )
    with pytest.raises(PlanError, match=message):
        pack([3, 12], 10, too_long="alone", budget_alone=11)
    with pytest.raises(PlanError, match="over budget=10; say how far with budget_alone"):
        pack([3, 12], 10, too_long="alone")
    with pytest.raises(PlanError, match="budget_alone=10 is not over budget=10, so no sample"):
        pack([3], 10, too_long="alone", budget_alone=10)
    with pytest.raises(PlanError, match=r"budget_alone=12 is for samples .* and too_long='truncate'; set"):
        pack([3], 10, too_long="truncate", budget_alone=12)


def test_samples_are_called_what_the_caller_calls_them():
    called = Called(budget="tokens", budget_alone="tokens_alone", samples=["a", "b", "c"])
    for lengths, words in (
        (
            [3, 12, 4],
            "^sample b has 12 tokens: over tokens=10, .* too_long='alone' and tokens_alone=12; or",
        ),
        ([3, 0, 4], "^sample b has 0 tokens, and a sample needs at least 1"),
        ([3, 4, 2**53 + 1], "^sample c has 9007199254740993 tokens, more than"),
        ([3, 4], "^there are 2 lengths and 3 ids; give one id for each length"),
    ):
        with pytest.raises(PlanError, match=words):
            pack(lengths, 10, called=called)
    with pytest.raises(
        PlanError, match=r"^sample b has 12 tokens: over tokens_alone=11, .* to tokens=10 with"
    ):
        pack([3, 12, 4], 10, too_long="alone", budget_alone=11, called=called)
    with pytest.raises(PlanError, match=r"^tokens=0 is too small"):
        pack([3, 12, 4], 0, called=called)


# Usage


@pytest.mark.parametrize(
    ("lengths", "wrong", "message"),
    [
        ([1, 0], {}, r"^sample 1 has 0 tokens, and a sample needs at least 1; leave it out$"),
        ([1, -2], {}, "sample 1 has -2 tokens"),
        ([1.0, 2.0], {}, r"lengths have the shape \(2,\) and the kind float64; give the number of tokens"),
        ([[1, 2]], {}, r"lengths have the shape \(1, 2\)"),
        ([1, 2**53 + 1], {}, "sample 1 has 9007199254740993 tokens, more than 2"),
        ([[1, 2], [3]], {}, "lengths are rows of different sizes; give the number of tokens of each"),
        ([2**53] * 2000, {"budget": 2**53}, "the 2000 samples have 18014398509481984000 tokens together"),
        (
            [1],
            {"cost": "dear"},
            r"cost is a str; give a CostModel, such as CostModel\(per_micro_batch=64\)",
        ),
        ([1], {"cost": {"per_position": 1}}, "cost is a dict; give a CostModel"),
        ([1], {"budget": 0}, "budget=0 is too small"),
        ([1], {"replicas": 0}, "replicas=0 is too small"),
        ([1], {"micro_batches_multiple": 0}, "micro_batches_multiple=0 is too small"),
        ([1], {"rows": "ragged"}, "rows='ragged'"),
        ([1], {"too_long": "drop"}, "too_long='drop'"),
    ],
)
def test_wrong_arguments_are_refused(lengths, wrong, message):
    with pytest.raises(PlanError, match=message):
        pack(lengths, **{"budget": 10, **wrong})


TOO_SMALL, TOO_LARGE = 5e-324, 1e305


@pytest.mark.parametrize("name", ["per_micro_batch", "per_position", "per_position_and_length"])
@pytest.mark.parametrize(
    "value",
    [
        -1.0,
        float("nan"),
        float("inf"),
        True,
        np.True_,
        "1",
        1j,
        [1],
        TOO_SMALL,
        TOO_LARGE,
        np.float32("inf"),
    ],
)
def test_coefficients_are_real_numbers_in_a_range(name, value):
    power = 120 if name == "per_micro_batch" else 100
    words = f"{name}={value!r} of the cost model; give 0, or a real number from 1e-{power} to 1e{power}"
    with pytest.raises(PlanError, match=re.escape(words)):
        CostModel(**{name: value})


@pytest.mark.parametrize(
    "value", [10**400, -(10**5000), Fraction(10**400)], ids=["int", "long", "fraction"]
)
def test_a_coefficient_beyond_any_float_is_refused(value):
    with pytest.raises(PlanError, match="per_position=a number beyond any float of the cost model; give 0"):
        CostModel(per_position=value)


@pytest.mark.parametrize("value", [2, np.float32(2), np.int64(2), np.float64(2), Fraction(2)])
def test_coefficients_are_of_any_kind_of_real_number(value):
    model = CostModel(per_micro_batch=value, per_position=value, per_position_and_length=value)
    assert model == CostModel(per_micro_batch=2.0, per_position=2.0, per_position_and_length=2.0)
    assert [type(model.per_micro_batch), type(model.per_position)] == [float, float]
    assert math.copysign(1, CostModel(per_micro_batch=-0.0).per_micro_batch or 0.0) == 1


def test_a_cost_that_is_not_known_is_not_taken_for_none():
    """A packing takes 1/32 of the budget, and the model itself would say 0."""
    with pytest.raises(
        PlanError, match=r"per_micro_batch=None .*; give it, or take the model that under\(b"
    ):
        CostModel().cost(1, 64, 0)
    packing = pack([64], 64)
    assert packing.costs == (CostModel().under(64).cost(1, 64, 0),) == (66.0,)
    # The largest that a position may cost, and the largest budget, still make a model.
    for per_position in (1e-100, 1e100):
        assert len(pack([3, 2], 2**53, cost=CostModel(per_position=per_position)).costs) == 1


def test_positions_cost_something():
    with pytest.raises(PlanError, match="then no packing is better than another"):
        CostModel(per_micro_batch=1, per_position=0)


# Parts


@pytest.mark.parametrize(
    ("cuts", "budget", "moved"),
    [
        ([0, 3, 4], 16, [0, 2, 4]),  # the last samples of the first go to the second
        ([0, 1, 4], 16, [0, 2, 4]),  # the first samples of the second go to the first
        ([0, 3, 4], 4, [0, 3, 4]),  # which has no room for them
    ],
)
def test_the_slowest_gives_samples_away(cuts, budget, moved):
    samples = in_whole_numbers(np.full(4, 4), budget, CostModel().under(budget), 8)
    assert move_cuts(samples, cuts, [[0], [1]]) == moved


def test_moving_cuts_makes_an_update_faster(monkeypatch):
    """With few micro-batches a replica; among many, dealing alone evens them out."""
    found = []
    for deals in (1, padded._DEALS):
        monkeypatch.setattr(padded, "_DEALS", deals)
        costs = []
        for draw in range(8):
            lengths = np.exp(np.random.default_rng(draw).normal(np.log(665), 1.0, 18)).astype(int) + 1
            model = CostModel(per_micro_batch=500)
            packing = pack(np.minimum(lengths, 4096), 8192, 2, cost=model)
            costs.append(max(packing.costs))
        found.append(costs)
    assert all(with_moves <= without for without, with_moves in zip(*found, strict=True))
    assert min(np.array(found[1]) / found[0]) < 0.99


def test_cuts_at_even_shares_keep_to_the_budget():
    """Where a long sample is followed by short ones, a share of the cost would be too many of them."""
    rng = np.random.default_rng(2)
    moved = 0
    for _ in range(300):
        lengths = np.sort(rng.choice([1, 2, 9, 60], rng.integers(5, 40)))[::-1].astype(np.int64)
        samples = in_whole_numbers(lengths, 60, CostModel(), 100)
        following = (np.arange(len(lengths)) + most_samples(samples)).tolist()
        fewest = len(fewest_cuts(samples)) - 1
        for micro_batches in range(fewest, min(fewest + 4, len(lengths)) + 1):
            cuts = spread_cuts(samples, following, micro_batches)
            assert len(cuts) == micro_batches + 1
            assert all(start < end <= following[start] for start, end in itertools.pairwise(cuts))
            moved += any(end == following[start] for start, end in itertools.pairwise(cuts))
    assert moved


def test_empty_micro_batches_count_in_what_is_made_small():
    found = candidate(
        [[range(3)], [range(3, 4)]],
        Wanted(replicas=2, multiple=4, equal=True),
        lambda group: 10 + len(group),
    )
    assert found.shares == [[range(1), range(1, 2), range(2, 3)], [range(3, 4)]]
    assert found.numbers == [4, 4]
    assert found.rank == (43, 43 + 41, 8)


def test_loads_are_kept_in_order():
    loads = Loads([5, 7, 7, 5, 1])
    assert (loads.slowest(), loads.fastest(3)) == (1, [4, 0, 3])
    loads.add(1, -6)
    loads.add(0, 2)
    assert loads.of == [7, 1, 7, 5, 1]
    assert (loads.slowest(), loads.fastest(3)) == (0, [1, 4, 3])


def test_deal_is_even_and_keeps_to_the_most():
    assert deal([5, 4, 3, 2], 2) == [[3, 0], [2, 1]]
    # Longest first alone leaves 7 and 5; the exchange of 3 for 2 makes both 6.
    assert sorted(sum([3, 3, 2, 2, 2][i] for i in share) for share in deal([3, 3, 2, 2, 2], 2)) == [6, 6]
    shares = deal([10, 1, 1, 1], 2, most=2)
    assert sorted(map(len, shares)) == [2, 2]
    assert deal([1, 2], 1) == [[0, 1]]


def test_no_micro_batch_is_empty_where_fewer_would_do():
    """A collation can make nothing of no samples; cheaper cuts with an empty one are passed over."""
    lengths = [27, 9, 27, 20, 26, 6, 22, 28, 2, 11, 19, 4, 15]
    cost = CostModel(per_micro_batch=0, per_position=1, per_position_and_length=1)
    equal = pack(lengths, 30, 3, equal_micro_batches=True, cost=cost)
    assert all(all(each) for each in equal.replicas)
    assert len({len(each) for each in equal.replicas}) == 1
