"""For any data set, plan and fault: every sample of a global batch in one micro-batch, or left out."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loading_data import Bad, indices, length_of, lengths_of, windows
from wholebatch.budget import plan_token_budget
from wholebatch.loading import WindowLoader, pad_collate
from wholebatch.order import SampleOrder
from wholebatch.plan import plan_batch


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    replicas, m, per_window = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    samples = replicas * m * per_window
    num_samples = draw(st.integers(1, 40))
    tail = draw(st.sampled_from(["partial", "drop"] if num_samples >= samples else ["partial"]))
    if draw(st.booleans()):
        plan: Any = plan_batch(
            global_batch_samples=samples, micro_batch_samples=m, ranks=replicas, tail=tail
        )
    else:
        plan = plan_token_budget(
            global_batch_samples=samples,
            tokens_per_micro_batch=draw(st.integers(9, 40)),
            ranks=replicas,
            tail=tail,
            rows=draw(st.sampled_from(["padded", "packed"])),
        )
    return {
        "plan": plan,
        "num_samples": num_samples,
        "bad": draw(st.sets(st.integers(0, num_samples - 1), max_size=min(5, num_samples - 1))),
        "found": draw(st.booleans()),
        "after": draw(st.integers(0, 6)),
    }


@settings(max_examples=50)
@given(case=cases())
def test_every_sample_is_in_one_micro_batch_or_left_out(case: dict[str, Any]) -> None:
    plan, num_samples, bad = case["plan"], case["num_samples"], case["bad"]

    # There is no padding in packed rows, so that padded input_ids would be more than the bound.
    packed = plan.micro_batch_samples is None and plan.rows == "packed"

    def loader(replica: int) -> WindowLoader:
        return WindowLoader(
            Bad(num_samples, bad),
            plan=plan,
            collate=of_labels if packed else pad_collate(),
            lengths=length_of if case["found"] else lengths_of(num_samples),
            replica=replica,
            seed=7,
            num_epochs=2,
            on_bad_sample="skip",
        )

    found = [windows(loader(replica)) for replica in range(plan.replicas)]
    order = SampleOrder(
        num_samples=num_samples, global_batch_samples=plan.global_batch_samples, seed=7, tail=plan.tail
    )
    position, updates = 0, list(zip(*found, strict=True))
    for update in updates:
        ids = sorted(order.global_batch(position))
        read = [number for window in update for number in window[1]]
        left_out = [number for window in update for number in window[2]]
        assert sorted(read + left_out) == ids
        assert set(left_out) == set(ids) & bad
        assert [number for one in indices(list(update)) for number in one] == read
        for batch in (batch for window in update for batch in window[0]):
            assert fits(batch, plan)
        position = order.next_position(position)
    assert order.epoch(position) == 2
    first = loader(0)
    windows(first, case["after"])
    if case["after"] >= len(updates):
        return
    resumed = loader(0)
    resumed.load_state_dict(first.state_dict())
    assert windows(resumed) == found[0][case["after"] :]


def of_labels(samples: list[Any]) -> Any:
    return pad_collate()([{"labels": sample["labels"], "index": sample["index"]} for sample in samples])


def fits(batch: Any, plan: Any) -> bool:
    """Whether a micro-batch keeps to the plan's bound."""
    tokens = [sum(label != -100 for label in row) for row in batch["labels"]]
    if plan.micro_batch_samples is not None:
        return 1 <= len(tokens) <= plan.micro_batch_samples
    held = sum(tokens) if plan.rows == "packed" else max(tokens) * len(tokens)
    return 1 <= held <= plan.tokens_per_micro_batch
