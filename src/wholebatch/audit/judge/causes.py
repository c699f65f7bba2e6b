"""Which finding explains which. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wholebatch.audit.judge.evidence import Finding

GRAVITY = {"wrong": 0, "cost": 1, "note": 2}

_CLEARS = ("clear_ignored", "clear_inside_window")
_STEPS = ("step_inside_window", "never_cleared")
_REDUCTIONS = ("not_reduced", "reduced_wrong_micro_batch")
# not clip_inside_window: weights are worked out without clips
_CHANGES = ("scale_changed_inside_window", "clip_before_unscale")

# for each kind those that explain it, the likeliest cause first
CAUSES: Mapping[str, tuple[str, ...]] = {
    "never_cleared": ("step_inside_window", "clear_ignored"),
    "optimizer_without_gradients": ("clear_ignored", "not_reduced"),
    "step_inside_window": ("uncounted_items",),
    "clear_inside_window": ("clear_ignored", "optimizer_without_gradients"),
    "stale_gradients": ("never_cleared", "clear_ignored"),
    "uncounted_items": (
        *_CLEARS,
        "tail_dropped",
        *_REDUCTIONS,
        "optimizer_without_gradients",
        "scale_changed_inside_window",
    ),
    "unequal_item_weights": (
        "nonfinite_gradients",
        *_CLEARS,
        *_STEPS,
        *_REDUCTIONS,
        "tail_dropped",
        "tail_carried_over",
        *_CHANGES,
        "clip_before_reduction",
        "uncounted_items",
    ),
    "total_weight": (
        "nonfinite_gradients",
        *_CLEARS,
        *_STEPS,
        "stale_gradients",
        *_REDUCTIONS,
        "tail_dropped",
        "tail_carried_over",
        "tail_weight",
        *_CHANGES,
        "clip_before_reduction",
        "uncounted_items",
        "optimizer_without_gradients",
    ),
    "tail_weight": (*_CLEARS, *_STEPS, "tail_dropped", "unequal_micro_batch_counts"),
    "tail_carried_over": (*_CLEARS, *_STEPS),
    "tail_dropped": _CLEARS,
    "unequal_micro_batch_counts": (*_CLEARS, *_STEPS, *_REDUCTIONS),
    "parameters_changed_inside_window": ("nonfinite_gradients",),
    "schedule_inside_window": ("tail_carried_over",),
    "schedule_too_fast": ("schedule_inside_window",),
    "average_inside_window": ("tail_carried_over",),
    "clip_before_reduction": ("clip_inside_window",),
    "clip_before_unscale": ("clip_inside_window",),
    "reduced_every_micro_batch": ("forward_outside_scope",),
}


def with_causes(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Set what each finding follows from.

    A finding explains another of the same optimizer where it is at least as grave and shows in at least
    half of the updates that show the other. Consequences name the first cause of the chain.

    Args:
        findings: in any order.

    Returns:
        tuple[Finding, ...]: the same in the same order, ``caused_by`` set.
    """
    nearest = [_nearest(effect, findings) for effect in findings]
    return tuple(
        replace(effect, caused_by=_root(cause, findings, nearest))
        for effect, cause in zip(findings, nearest, strict=True)
    )


def _nearest(effect: Finding, findings: Sequence[Finding]) -> Finding | None:
    for kind in CAUSES.get(effect.kind, ()):
        for cause in findings:
            if cause.kind == kind and _explains(cause, effect):
                return cause
    is_short = effect.kind == "total_weight" and effect.factor is not None and effect.factor < 1
    if is_short or (effect.kind == "unequal_item_weights" and effect.across == "replicas"):
        counts = [c for c in findings if c.kind == "unequal_micro_batch_counts" and _explains(c, effect)]
        return counts[0] if counts else None
    return None


def _explains(cause: Finding, effect: Finding) -> bool:
    if cause.optimizer != effect.optimizer or GRAVITY[cause.severity] > GRAVITY[effect.severity]:
        return False
    shared = set(cause.updates) & set(effect.updates)
    return not effect.updates or not cause.updates or 2 * len(shared) >= len(effect.updates)


def _root(
    cause: Finding | None, findings: Sequence[Finding], nearest: Sequence[Finding | None]
) -> str | None:
    for _ in findings:
        if cause is None:
            return None
        before = next(n for f, n in zip(findings, nearest, strict=True) if f is cause)
        if before is None:
            break
        cause = before
    return None if cause is None else cause.kind
