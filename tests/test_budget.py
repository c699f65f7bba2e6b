"""The plan of a token budget: what it takes, what it refuses, and what it tells."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from wholebatch.budget import plan_token_budget
from wholebatch.errors import PlanError
from wholebatch.packing import CostModel
from wholebatch.report.budget_ledger import budget_text


def test_a_plan_packs_the_same_samples_whatever_the_budget_and_the_ranks() -> None:
    lengths = [5, 9, 2, 7, 7, 1, 3, 8]
    for budget in (9, 16, 64):
        for ranks in (1, 2, 4):
            plan = plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=budget, ranks=ranks)
            packed = plan.pack(lengths).replicas
            assert len(packed) == ranks
            assert sorted(i for replica in packed for part in replica for i in part) == list(range(8))
            for part in (part for replica in packed for part in replica):
                assert len(part) * max(lengths[i] for i in part) <= budget


def test_a_replica_packs_its_own_samples_where_the_others_do_not_know_them() -> None:
    plan = plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=10, ranks=4)
    assert len(plan.pack([4, 5], replicas=1).replicas) == 1


def test_the_cost_and_the_rows_reach_the_packer() -> None:
    plan = plan_token_budget(
        global_batch_samples=4,
        tokens_per_micro_batch=10,
        rows="packed",
        cost=CostModel(per_micro_batch=7.0),
        too_long="alone",
        tokens_alone=30,
    )
    packing = plan.pack([9, 1, 25, 4])
    assert packing.alone == (2,)
    assert sorted(map(sorted, packing.replicas[0])) == [[0, 1], [2], [3]]
    padded = plan_token_budget(global_batch_samples=2, tokens_per_micro_batch=10)
    assert len(padded.pack([9, 1]).replicas[0]) == 2  # 2 x 9 positions do not fit


def test_a_pipeline_has_equal_micro_batches() -> None:
    staged = plan_token_budget(
        global_batch_samples=8, tokens_per_micro_batch=10, ranks=4, pipeline_parallel=2
    )
    assert staged.replicas == 2
    assert staged.equal_micro_batches
    parts = staged.pack([9, 9, 9, 1, 1, 1, 1, 1]).replicas
    assert len(parts[0]) == len(parts[1])
    assert not plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=10).equal_micro_batches


def test_what_is_not_the_same_for_all_is_none() -> None:
    plan = plan_token_budget(global_batch_items=1000, tokens_per_micro_batch=64, ranks=2)
    told = plan.to_dict()
    assert told["global_batch_items"] == 1000
    for name in ("micro_batch_samples", "micro_batches_per_window", "global_batch_samples"):
        assert told[name] is None
        assert getattr(plan, name) is None
    assert told["tokens_per_micro_batch"] == 64
    assert told["replicas"] == 2


def test_a_sample_that_is_refused_is_named_by_its_id() -> None:
    plan = plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=10)
    ids = [70, 12, 33]
    with pytest.raises(
        PlanError, match=r"^sample 12 has 15 tokens: over tokens_per_micro_batch=10, .* to 15"
    ):
        plan.pack([3, 15, 4], ids=ids)
    with pytest.raises(
        PlanError, match=r"^sample 33 has 0 tokens, and a sample needs at least 1; leave it"
    ):
        plan.pack([3, 1, 0], ids=np.array(ids))
    with pytest.raises(
        PlanError, match=r"^sample 1 has 15 tokens: over tokens_per_micro_batch=10, .*=15; or"
    ):
        plan.pack([3, 15, 4])
    with pytest.raises(PlanError, match=r"^there are 2 lengths and 3 ids; give one id for each length$"):
        plan.pack([3, 4], ids=ids)
    assert plan.pack([3, 4, 2], ids=ids) == plan.pack([3, 4, 2])
    alone = plan_token_budget(
        global_batch_samples=8, tokens_per_micro_batch=10, too_long="alone", tokens_alone=12
    )
    with pytest.raises(
        PlanError, match=r"^sample 12 has 15 tokens: over tokens_alone=12, the bound .*batch=10"
    ):
        alone.pack([3, 15, 4], ids=ids)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "neither is given; give one of global_batch_samples and global_batch_items"),
        (
            {"global_batch_samples": 8, "global_batch_items": 90},
            "here are 8 samples and 90 items; give one of",
        ),
        ({"global_batch_items": 90, "tail": "drop"}, "tail='drop' with global_batch_items=90"),
        (
            {"global_batch_samples": 3, "ranks": 4},
            "global_batch_samples 3 over replicas 4 leaves 1 of them without a sample in every update; use "
            "at most 3 replicas",
        ),
        (
            {"global_batch_samples": 8, "too_long": "alone"},
            "over tokens_per_micro_batch=64; say how far with tokens_alone",
        ),
        (
            {"global_batch_samples": 8, "too_long": "alone", "tokens_alone": 64},
            "tokens_alone=64 is not over tokens_per_micro_batch=64, so no sample would be alone; raise it",
        ),
        (
            {"global_batch_samples": 8, "tokens_alone": 100},
            "tokens_alone=100 is for samples that get a micro-batch of their own, and too_long='refuse'",
        ),
        ({"global_batch_samples": 8, "rows": "ragged"}, "rows='ragged' is not known"),
        ({"global_batch_samples": 8, "tail": "pad"}, "tail='pad' is not known"),
        ({"global_batch_samples": 8, "too_long": "drop"}, "too_long='drop' is not known"),
        ({"global_batch_samples": 8, "cost": {"per_position": 1}}, "cost is a dict; give a CostModel"),
        ({"global_batch_samples": 8.0}, "global_batch_samples=8.0 is a float"),
        ({"global_batch_samples": 8, "tokens_per_micro_batch": 0}, "tokens_per_micro_batch=0 is too small"),
    ],
)
def test_a_contradiction_is_refused_with_the_numbers(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        plan_token_budget(**({"tokens_per_micro_batch": 64} | given))


def test_the_ledger_says_what_is_fixed_and_what_the_samples_decide() -> None:
    plan = plan_token_budget(
        global_batch_samples=256,
        tokens_per_micro_batch=8192,
        ranks=2,
        too_long="alone",
        tokens_alone=16384,
    )
    text = budget_text(plan)
    assert "A  in every micro-batch, so that no rank holds" in budget_text(plan, reduces_each=True)
    for words in (
        "256  samples, over all replicas",
        "8,192  positions at most: longest sample x samples",
        "16,384  tokens at most for a sample that is alone",
        "as many micro-batches as the lengths of its samples make",
        "1  at the last micro-batch",
    ):
        assert words in text
    in_items = budget_text(
        plan_token_budget(global_batch_items=50_000, tokens_per_micro_batch=8192, rows="packed")
    )
    assert "50,000  items at most, in whole samples" in in_items
    assert "tokens of one row at most, sample after sample" in in_items
    assert "0  one replica has nobody to reduce with" in in_items
