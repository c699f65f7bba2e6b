"""A few numbers that stand for a gradient: a fixed linear map, the same on every rank and for every part.

With the gradient as a matrix G of its first dimension by all others, ``sketch = R^T (G u)``, R and u fixed
normal random numbers: sums and multiples of gradients are sums and multiples of their sketches, and a part
of G gives its share of the whole's. A gradient of few rows has few directions left in ``G u``; where it is
small, every number of its sketch has a column of u to itself. One pass over the gradient, no copy of it in
its own dtype where that is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wholebatch.audit.trace import SKETCH_WIDTH

# Vectors longer than this are laid out as rows, so that R stays small.
_LONGEST_VECTOR = 65_536
_ROW = 1_024
# With so few rows, and no more elements, each number of a sketch has its own column.
_FEW_ROWS, _SMALL = 64, 65_536
_SEED_ROWS, _SEED_COLUMNS = 90_001, 90_002


class Sketcher:
    """The fixed random numbers of the map, made as they are needed and kept by device and dtype."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def whole(self, gradient: Tensor) -> Tensor:
        """Sketch a whole gradient.

        Args:
            gradient: of any shape, dense or sparse.

        Returns:
            SKETCH_WIDTH numbers on its device, float32 (float64 for float64).
        """
        gradient = _dense(gradient)
        rows, columns = layout(tuple(gradient.shape))
        if rows * columns != gradient.numel():
            return self.range_of(gradient, tuple(gradient.shape), 0)
        return self._fold(gradient.reshape(rows, columns), 0, self._columns(rows, columns, gradient))

    @torch.no_grad()
    def box(self, part: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
        """Sketch a box of a whole gradient: its share of the whole's sketch.

        Args:
            part: the box's own values.
            shape: of the whole.
            offsets: where the box begins, by dimension.
        """
        part = _dense(part)
        rows, columns = layout(tuple(shape))
        if len(shape) < 2 or rows != shape[0]:
            return self.range_of(part, shape, offsets[0] if offsets else 0)
        if part.numel() == 0:
            return part.new_zeros(SKETCH_WIDTH)
        u = self._columns(rows, columns, part).view(*shape[1:], -1)
        for dimension, (begin, length) in enumerate(zip(offsets[1:], part.shape[1:], strict=True)):
            u = u.narrow(dimension, begin, length)
        return self._fold(part.reshape(part.shape[0], -1), offsets[0], u.reshape(-1, u.shape[-1]))

    @torch.no_grad()
    def range_of(self, part: Tensor, shape: Sequence[int], start: int) -> Tensor:
        """Sketch a range of the flattened whole.

        Args:
            part: values of the range.
            shape: of the whole.
            start: its first element in the flattened whole.
        """
        part = _dense(part).reshape(-1)
        if part.numel() == 0:
            return part.new_zeros(SKETCH_WIDTH)
        rows, columns = layout(tuple(shape))
        before = start % columns
        after = -(before + part.numel()) % columns
        if before or after:
            part = torch.nn.functional.pad(part, (before, after))
        return self._fold(part.view(-1, columns), start // columns, self._columns(rows, columns, part))

    def _fold(self, matrix: Tensor, first_row: int, u: Tensor) -> Tensor:
        if torch.is_autocast_enabled(matrix.device.type):
            with torch.autocast(matrix.device.type, enabled=False):
                return self._fold(matrix, first_row, u)
        by_row = matrix @ u
        rows = self._rows(first_row + matrix.shape[0], matrix)[first_row : first_row + matrix.shape[0]]
        return by_row[:, 0] @ rows if u.shape[1] == 1 else (by_row * rows).sum(0)

    def _rows(self, length: int, like: Tensor) -> Tensor:
        return self._numbers("rows", length, SKETCH_WIDTH, _SEED_ROWS, like)

    def _columns(self, num_rows: int, length: int, like: Tensor) -> Tensor:
        if length == 1:
            return like.new_ones(1, 1)
        width = SKETCH_WIDTH if num_rows <= _FEW_ROWS and num_rows * length <= _SMALL else 1
        return self._numbers("columns", length, width, _SEED_COLUMNS, like)[:length]

    def _numbers(self, name: str, length: int, width: int, seed: int, like: Tensor) -> Tensor:
        key = (f"{name} {width}", like.device, like.dtype)
        kept = self._kept.get(key)
        if kept is None or kept.shape[0] < length:
            # a prefix of the same sequence whatever the length; a generator of its own, so that the
            # loop's random numbers stay what they are
            generator = torch.Generator("cpu").manual_seed(seed)
            size = (_rounded(max(length, 4_096)), width)
            longer = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
            kept = self._kept[key] = longer.to(device=like.device, dtype=like.dtype)
        return kept


def _rounded(length: int) -> int:
    """Up to the next multiple of 16: torch draws normal numbers in blocks of so many."""
    return -(-length // 16) * 16


def layout(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that stands for a gradient of this shape.

    Args:
        shape: of the whole gradient.

    Returns:
        ``(rows, columns)``; of a long vector their product may be more than its elements.
    """
    numel = 1
    for length in shape:
        numel *= length
    if len(shape) >= 2 and shape[0] > 0:
        return shape[0], max(1, numel // shape[0])
    if numel > _LONGEST_VECTOR:
        return -(-numel // _ROW), _ROW
    return numel, 1


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.float()
