"""Many small gradients added up in bfloat16. Equal in float64, but cause ``low_precision``.

A bfloat16 parameter has a bfloat16 gradient, and 512 micro-batches are added into it one by one: soon
each is smaller than the last digit of the sum. The whole batch is added up in float32 inside one matrix
product. The window adds up in float32 by itself, unless it is told not to, as here.

    wholebatch verify examples/verify_low_precision.py:problem
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.verify import verify_window


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    # Float32 from here on, or float64 where verify runs the model in that; never summed in bfloat16.
    output = model(batch["features"])
    wide = output.float() if output.dtype == torch.bfloat16 else output
    return (wide.squeeze(1) - batch["targets"]).square().sum(), len(batch["targets"])


def problem() -> dict[str, Any]:
    torch.manual_seed(0)
    batch = {"features": torch.randn(512, 16, dtype=torch.bfloat16), "targets": torch.randn(512)}
    model = nn.Linear(16, 1, dtype=torch.bfloat16)
    return {
        "model": model,
        "loss_fn": loss_fn,
        "batch": batch,
        "splits": [[1] * 512, [256, 256]],
        "accumulate_in": torch.bfloat16,
    }


if __name__ == "__main__":
    verdict = verify_window(**problem())
    print(f"equal: {verdict.equal}, cause: {verdict.cause}")
    print(verdict.advice)
    assert all(split.equal for split in verdict.splits)
    assert verdict.cause == "low_precision"
