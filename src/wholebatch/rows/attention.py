"""Causal attention in a packed row, each sample by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wholebatch.errors import SplitError
from wholebatch.rows.samples import checked_lengths

# Samples share one call of attention where the longest has at most this many times the tokens of the
# shortest: fewer calls for at most an eighth more positions, in attention alone.
_NEAR = 1.125


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowLayout:
    """Where the samples of a packed row lie, ready for attention.

    Samples of nearly the same length attend in one call, padded to the longest of them: on the
    right, where a causal position does not look.

    Attributes:
        tokens: in the row.
        longest: tokens of the longest sample.
        positions: 0 at the first token of each sample; int64 of shape (tokens,).
        taken: for each position of all groups the token of the row that lies there; int64.
        given: for each token of the row where it lies in the groups; int64 of shape (tokens,).
        groups: samples of each group, and tokens of its longest.
    """

    tokens: int
    longest: int
    positions: Tensor
    taken: Tensor
    given: Tensor
    groups: tuple[tuple[int, int], ...]


def row_layout(sample_lengths: Tensor | Sequence[int], device: torch.device | str = "cpu") -> RowLayout:
    """Lay out a packed row for :func:`attend_in_rows`; once a micro-batch, for all layers.

    Args:
        sample_lengths: tokens of each sample, in the order of the row. A tensor must lie on the host:
            reading it on a device would wait for that.
        device: where the row lies.

    Returns:
        The layout, its tensors on ``device``.

    Raises:
        SplitError: the lengths are no whole numbers of tokens on the host.

    Exactness: no arithmetic.
    """
    given = checked_lengths(sample_lengths)
    lengths = torch.tensor(given, dtype=torch.int64)
    begins = lengths.cumsum(0) - lengths
    # Samples without tokens have nothing to attend with.
    order = [int(place) for place in lengths.argsort(stable=True) if given[place]]
    groups = _groups([given[place] for place in order])
    widths = torch.zeros_like(lengths)
    widths[order] = torch.tensor([longest for samples, longest in groups for _ in range(samples)]).long()
    ends = widths[order].cumsum(0)
    padded_begins = torch.zeros_like(lengths)
    padded_begins[order] = ends - widths[order]

    sample_of_token = torch.arange(len(given)).repeat_interleave(lengths)
    positions = torch.arange(len(sample_of_token)) - begins[sample_of_token]
    sample_of_padded = torch.tensor(order, dtype=torch.int64).repeat_interleave(widths[order])
    place = torch.arange(len(sample_of_padded)) - padded_begins[sample_of_padded]
    # On the right of a sample lies its last token again: any would do that is a number.
    taken = begins[sample_of_padded] + torch.minimum(place, lengths[sample_of_padded] - 1)
    return RowLayout(
        tokens=len(positions),
        longest=max(given, default=0),
        positions=positions.to(device, non_blocking=True),
        taken=taken.to(device, non_blocking=True),
        given=(padded_begins[sample_of_token] + positions).to(device, non_blocking=True),
        groups=tuple(groups),
    )


def attend_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: RowLayout,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention in a packed row, each sample by itself.

    ``out[t] = sum over tokens u <= t of t's own sample of softmax_u(scale * query[t] . key[u]) value[u]``:
    a sum over one sample, never over the row, so it costs the squares of the samples' lengths.

    Args:
        query: shape (tokens, heads, features of a head).
        key: shape (tokens, heads, features), or fewer heads, which then serve several of the query each.
        value: shape (tokens, heads of the key, features).
        layout: of the row, on its device.
        dropout: probability that a weight is dropped.
        scale: by default ``features ** -0.5``.

    Returns:
        Shape (tokens, heads, features of the value).

    Raises:
        SplitError: the layout is that of another row, or the three do not fit each other.

    Exactness: exact in real arithmetic: the attention of each sample alone, whatever else is in the row.
    """
    _check_attention(query, key, value, layout)
    if not 0 <= dropout < 1:
        raise SplitError(f"dropout is {dropout}; give a probability from 0 to below 1")
    sizes = [samples * longest for samples, longest in layout.groups]
    shared_heads = key.shape[1] != query.shape[1]

    def grouped(each: Tensor) -> list[Tensor]:
        parts = torch.split(each.index_select(0, layout.taken), sizes)
        # (samples, heads, tokens of the longest, features)
        pairs = zip(parts, layout.groups, strict=True)
        return [part.view(*group, *part.shape[1:]).transpose(1, 2) for part, group in pairs]

    attended = [
        F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=shared_heads,
        )
        .transpose(1, 2)
        .flatten(0, 1)
        for q, k, v in zip(grouped(query), grouped(key), grouped(value), strict=True)
    ]
    if not attended:  # keeps the graph, so that every parameter has a gradient on every rank
        return query[..., :1] * value.new_zeros(value.shape[-1])
    return torch.cat(attended).index_select(0, layout.given)


def _check_attention(query: Tensor, key: Tensor, value: Tensor, layout: RowLayout) -> None:
    shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
    if not query.ndim == key.ndim == value.ndim == 3:
        raise SplitError(
            f"query, key and value have the shapes {shapes}; a row's are (tokens, heads, features), "
            f"without the 1 of the row"
        )
    if not len(query) == len(key) == len(value) == layout.tokens:
        raise SplitError(
            f"a layout of {layout.tokens} tokens does not fit a query, key and value of {len(query)}, "
            f"{len(key)} and {len(value)}; lay out the sample_lengths of the same micro-batch"
        )
    heads, shared = query.shape[1], key.shape[1]
    heads_fit = value.shape[1] == shared and not (heads % shared if shared else heads)
    if not heads_fit or query.shape[2] != key.shape[2]:
        raise SplitError(
            f"query, key and value have the shapes {shapes}; key and value need as many heads as each "
            f"other, of which the query has a multiple, and query and key as many features"
        )
    # Under autocast they become of one dtype.
    if not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(query.device.type):
        raise SplitError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; give one")


def _groups(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of ascending lengths, as (samples, tokens of the longest)."""
    groups: list[tuple[int, int]] = []
    shortest = 0
    for length in lengths:
        if groups and length <= _NEAR * shortest:
            groups[-1] = (groups[-1][0] + 1, length)
        else:
            groups.append((1, length))
            shortest = length
    return groups
