"""Broken loops as users write them, and right twins: for every kind of finding at least two.

Each file is one kind; its functions ``broken...`` have the defect and ``right...`` don't. They take
nothing, or the rank and the number of ranks, and train a few updates on tiny data. ``EXPECTED`` says what
an audit should find in each. ``test_broken_loops*.py`` confirm each defect without the audit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Samples = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What is wrong with a loop, and how that is confirmed.

    Attributes:
        kind: of the finding.
        factor, across: of the finding, where its kind has one.
        ranks: that the loop runs on.
        expect_micro_batches: that the user has to tell the audit, where the loop itself doesn't show it.
        severity: of the finding.
        twin: the right function; by default that of the same name, or ``right``.
        objective: a mean over what; None where no big batch is compared.
        num_samples: of the data of one rank; they are taken from the start again when they are used up.
        samples: that each update of the right twin has on each rank; negative ones are in no update.
        broken_samples: the same of the broken loop, on all ranks or for each.
        read: how what the optimizer reads differs from the big batch's gradient: by a ``"factor"`` in some
            updates (``times``; any other than 1 where that is None), in ``"direction"``, not at all
            (``"exact"``: the fault is elsewhere), or None where that can't be asked.
        clip: of the norm, or of values, that both loops mean to apply.
        tolerance: relative, of the right twin.
        library: that the loop needs.
    """

    kind: str
    factor: float | None = None
    across: Literal["items", "micro_batches", "replicas"] | None = None
    ranks: int = 1
    expect_micro_batches: int | None = None
    severity: Literal["wrong", "cost", "note"] = "wrong"
    twin: str = ""
    objective: Literal["images", "texts", "clip", "info_nce"] | None = "images"
    num_samples: int = 48
    samples: Samples = (16, 16, 16)
    broken_samples: Samples | tuple[Samples, ...] | None = None
    read: Literal["factor", "direction", "exact"] | None = "direction"
    times: float | None = None
    clip: tuple[Literal["norm", "value"], float] | None = None
    tolerance: float = 1e-5
    library: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A broken loop, its right twin, and what is expected."""

    name: str
    broken: Callable[..., Any]
    right: Callable[..., Any]
    expected: Expected


_TEXTS = Expected(kind="", objective="texts", num_samples=24, samples=(8, 8, 8))
_SINGLE = (4,) * 12
_TAIL = Expected(kind="", num_samples=40, samples=(16, 16, 8) * 2)


def _table() -> Iterator[tuple[str, Expected]]:
    """Rows: kind, or kind/variant."""
    kind = "unequal_item_weights"
    texts = replace(_TEXTS, kind=kind, across="micro_batches")
    yield kind, texts
    yield f"{kind}/by_hand", texts
    yield f"{kind}/by_samples", texts
    small_last = {"num_samples": 46, "samples": (16, 16, 14)}
    yield f"{kind}/small_last", Expected(kind=kind, across="micro_batches", **small_last)
    yield f"{kind}/chunks", replace(texts, across="items")
    yield f"{kind}/replicas", replace(texts, across="replicas", ranks=2, samples=(2,) * 12)
    yield f"{kind}/window_per_replica", replace(texts, across="replicas", ranks=2)
    yield f"{kind}/accelerate", replace(texts, library="accelerate")

    kind = "total_weight"
    images = Expected(kind=kind, read="factor")
    texts = replace(_TEXTS, kind=kind, read="factor")
    yield kind, replace(images, factor=4.0)
    yield f"{kind}/twice", replace(images, factor=0.25)
    accelerate = replace(images, library="accelerate", twin="right_accelerate")
    yield f"{kind}/accelerate_twice", replace(accelerate, factor=0.25)
    yield f"{kind}/accelerate_plain", replace(accelerate, factor=4.0)
    yield f"{kind}/sum", replace(texts, factor=48.0, twin="right_padded")
    yield f"{kind}/padded", replace(texts, factor=48 / 54)
    yield f"{kind}/ddp_sum", replace(texts, factor=0.5, ranks=2)
    yield f"{kind}/summed_by_hand", replace(images, factor=2.0, ranks=2)
    yield f"{kind}/sum_hook", replace(images, factor=2.0, ranks=2)
    yield f"{kind}/fsdp_sum", replace(texts, factor=0.5, ranks=2)

    yield from _several("uncounted_items", "", "continue", "running_loss")
    yield from _several("stale_gradients", "", "saliency")
    yield "stale_gradients/gan", Expected(kind="stale_gradients", objective=None, read=None)

    kind = "step_inside_window"
    steps = Expected(kind=kind, read=None)
    yield kind, steps
    yield f"{kind}/indented", replace(steps, expect_micro_batches=4)
    yield f"{kind}/accelerate", replace(steps, library="accelerate")

    yield from _several("clear_inside_window", "", "by_hand", "off_by_two")
    yield from _several("never_cleared", "", "not_called")
    yield "never_cleared/before_training", Expected(kind="never_cleared", samples=_SINGLE)
    kind = "clear_ignored"
    yield from _several(kind, "", "other_optimizer")
    yield f"{kind}/accelerate", Expected(kind=kind, library="accelerate")
    yield f"{kind}/fsdp_held_back", Expected(kind=kind, ranks=2, samples=(-16, 16, 16))
    yield from _clips_and_scales()
    yield from _moves()
    yield from _reductions()
    yield from _data_and_tails()
    yield from _numbers()


def _several(kind: str, *variants: str, **fields: Any) -> Iterator[tuple[str, Expected]]:
    for variant in variants:
        yield f"{kind}/{variant}".rstrip("/"), Expected(kind=kind, **fields)


def _clips_and_scales() -> Iterator[tuple[str, Expected]]:
    kind = "clip_inside_window"
    yield kind, Expected(kind=kind, clip=("norm", 0.1))
    yield f"{kind}/by_value", Expected(kind=kind, clip=("value", 0.01))
    yield f"{kind}/accelerate", Expected(kind=kind, clip=("norm", 0.1), library="accelerate")
    kind = "clip_before_reduction"
    ranks = Expected(kind=kind, ranks=2, clip=("norm", 0.1))
    yield kind, replace(ranks, samples=_SINGLE)
    yield f"{kind}/held_back", ranks
    kind = "clip_before_unscale"
    scaled = Expected(kind=kind, read="factor", clip=("norm", 1.0), tolerance=2e-2)
    yield kind, scaled
    yield f"{kind}/wrong_order", replace(scaled, samples=_SINGLE, tolerance=1e-5)
    yield from _several("scale_changed_inside_window", "", "unscaled_for_a_look")
    yield from _several("clip_to_negative_norm", "", "truthy", read="factor")


def _moves() -> Iterator[tuple[str, Expected]]:
    kind = "schedule_inside_window"
    yield from _several(kind, "", "by_hand", read="exact")
    yield f"{kind}/accelerate", Expected(kind=kind, read="exact", library="accelerate")
    yield from _several("schedule_on_skipped_update", "", "before_update", objective=None, read=None)
    kind = "schedule_too_fast"
    yield from _several(kind, "", "per_micro_batch_after", read="exact")
    per_rank = Expected(kind=kind, read="exact", ranks=2, num_samples=12, samples=(4, 4, 4))
    yield f"{kind}/per_rank", per_rank
    yield "average_inside_window", Expected(kind="average_inside_window", read="exact")
    teacher = Expected(kind="average_inside_window", objective=None, read=None)
    yield "average_inside_window/teacher", teacher
    kind = "parameters_changed_inside_window"
    yield kind, Expected(kind=kind)
    yield f"{kind}/critic", Expected(kind=kind, objective=None, read=None)
    kind = "batch_norm_per_micro_batch"
    yield from _several(kind, "", "frozen_weights", objective=None, read=None, severity="note")


def _reductions() -> Iterator[tuple[str, Expected]]:
    cost = {"ranks": 2, "read": "exact", "severity": "cost"}
    yield from _several("reduced_every_micro_batch", "", "condition", **cost)
    yield from _several("forward_outside_scope", "", "flag", **cost)
    yield from _several("reduced_wrong_micro_batch", "", "off_by_one", ranks=2)
    yield from _several("not_reduced", "", "not_wrapped", ranks=2)
    past = Expected(kind="not_reduced", ranks=2, samples=_SINGLE)
    yield "not_reduced/past_the_wrapper", past
    yield from _several("optimizer_without_gradients", "", "other_model", read=None)
    never = Expected(kind="optimizer_without_gradients", ranks=2, read=None)
    yield "optimizer_without_gradients/fsdp_never_reduced", never


def _data_and_tails() -> Iterator[tuple[str, Expected]]:
    kind = "duplicate_samples"
    yield kind, Expected(kind=kind, ranks=2, samples=_SINGLE)
    yield f"{kind}/new_iterator", Expected(kind=kind)
    yield f"{kind}/outer_loop", Expected(kind=kind, twin="right_new_iterator", read=None)
    kind = "unequal_micro_batch_counts"
    yield kind, Expected(kind=kind, ranks=2, broken_samples=((16,) * 3, (12,) * 3))
    waits = Expected(kind=kind, ranks=2, read=None, samples=(4,) * 10)
    yield f"{kind}/one_waits", waits
    weight = replace(_TAIL, kind="tail_weight", factor=0.5, read="factor")
    yield "tail_weight", weight
    yield "tail_weight/after_the_loop", weight
    yield "tail_weight/accelerate", replace(weight, library="accelerate")
    dropped = replace(_TAIL, kind="tail_dropped", read="exact")
    yield "tail_dropped", replace(dropped, broken_samples=(16, 16, -8) * 2)
    one_pass = replace(dropped, samples=(16, 16), broken_samples=(16, 16))
    yield "tail_dropped/one_pass", one_pass
    carried = replace(_TAIL, kind="tail_carried_over", read="factor", times=1.5)
    carried = replace(carried, broken_samples=(16, 16, 24, 16))
    yield "tail_carried_over", replace(carried, samples=(16,) * 5)
    yield "tail_carried_over/train_function", carried


def _numbers() -> Iterator[tuple[str, Expected]]:
    yield from _several("memory_grows", "", "losses_kept", "running_loss", read="exact", severity="cost")
    kind = "low_precision_accumulation"
    yield kind, Expected(kind=kind, objective=None, read=None, severity="note")
    # beyond an error of 1e-2 it costs
    yield f"{kind}/embedding", Expected(kind=kind, objective=None, read=None, severity="cost")
    kind = "coupled_samples"
    yield kind, Expected(kind=kind, objective="clip")
    yield f"{kind}/info_nce", Expected(kind=kind, objective="info_nce")
    kind = "same_randomness"
    yield kind, Expected(kind=kind, ranks=2, objective=None, read=None)
    yield f"{kind}/reseeded", Expected(kind=kind, objective=None, read=None)
    kind = "logged_loss_differs"
    yield from _several(kind, "", "sum", read="exact", severity="note")
    by_tokens = replace(_TEXTS, kind=kind, read="exact", severity="note")
    yield f"{kind}/mean_of_means", by_tokens
    yield from _several("nonfinite_gradients", "", "square_root", objective=None, read=None)


EXPECTED: dict[str, Expected] = dict(_table())


def loop(name: str) -> Loop:
    """The loop of one row of the table."""
    kind, _, variant = name.partition("/")
    module = importlib.import_module(f"broken_loops.{kind}")
    expected = EXPECTED[name]
    broken = getattr(module, f"broken_{variant}".rstrip("_"))
    right = getattr(module, expected.twin or f"right_{variant}".rstrip("_"), module.right)
    return Loop(name=name, broken=broken, right=right, expected=expected)


def all_loops() -> Iterator[Loop]:
    """All broken loops, each with its right twin."""
    return (loop(name) for name in EXPECTED)
