"""Which backwards belong to one loop over micro-batches.

Backwards that the loop runs from different lines are different losses (a GAN's two), except that the last
micro-batch is often run from a line of its own: outside the scope that holds the reduction back, or in the
closure of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wholebatch.audit.trace import Backward, Place

Site = tuple[Place, ...]


def _keys(backwards: Sequence[Backward]) -> set[tuple[str, ...]]:
    return {tuple(sorted(term.key for term in backward.terms)) for backward in backwards}


def _held(backwards: Sequence[Backward]) -> set[bool | None]:
    return {backward.holds_reduction for backward in backwards}


def is_rest_of_loop(many: Sequence[Backward], rest: Sequence[Backward]) -> bool:
    """Whether ``rest`` are just the last micro-batches of a loop that ran ``many`` from another line."""
    return (
        bool(many and rest)
        and bool(_keys(many) & _keys(rest))
        and (len(many) > len(rest) == 1 or (_held(many) == {True} and True not in _held(rest)))
    )


def loops_of(windows: Sequence[Sequence[Backward]]) -> Mapping[Site, Site]:
    """Name the loop of each site.

    Args:
        windows: the backwards of one update, of each rank in the order in which they ran.

    Returns:
        Mapping[Site, Site]: for each site the one that stands for its loop.
    """
    names: dict[Site, Site] = {}
    for backwards in windows:
        for backward in backwards:
            names.setdefault(backward.site, backward.site)
    for backwards in windows:
        _join_last(backwards, names)
    return names


def _join_last(backwards: Sequence[Backward], names: dict[Site, Site]) -> None:
    """Join the line of the last backward to the loop before it, if it is that loop's last micro-batch."""
    if not backwards:
        return
    last = backwards[-1]
    rest = [backward for backward in backwards if backward.site == last.site]
    for site in {backward.site: None for backward in backwards if backward.site != last.site}:
        many = [backward for backward in backwards if backward.site == site]
        in_step = last.in_step and not any(backward.in_step for backward in many)
        same = bool(_keys(many) & _keys(rest))
        if len(rest) == 1 and same and (in_step or is_rest_of_loop(many, rest)):
            names[last.site] = names[site]
            return
