"""In which precision the forward computes, and the loss scale that float16 needs.

The window stays as it is: autocast belongs around the forward alone, and a scaler is given to the
window, which calls it at the right places.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp import GradScaler, is_autocast_available

from wholebatch.errors import UsageError
from wholebatch.train.settings import PrecisionConfig


def check_precision(settings: PrecisionConfig) -> None:
    """Refuse autocast over float64 parameters, which it would leave as they are, and what nothing reads.

    Raises:
        UsageError: with both settings.
    """
    default = PrecisionConfig().initial_loss_scale
    if settings.autocast != "float16" and settings.initial_loss_scale != default:
        raise UsageError(
            f"precision.initial_loss_scale is {settings.initial_loss_scale}, and precision.autocast = "
            f'"{settings.autocast}" scales no loss; set it to "float16", or leave the scale out'
        )
    if settings.autocast != "off" and settings.parameters == "float64":
        raise UsageError(
            f'precision.parameters = "float64" and precision.autocast = "{settings.autocast}": autocast '
            f"leaves float64 alone, so nothing would be computed in {settings.autocast}; set one of them "
            f'to "float32" or "off"'
        )


def autocast(settings: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """What to put around one forward: ``torch.autocast`` in the chosen dtype, or nothing.

    A new one for every forward, so that the casts that it caches are dropped before parameters change.

    Raises:
        UsageError: a device that has no autocast.

    Exactness: not equal to a forward without it, which rounds nothing to the dtype. Split and whole differ
    by rounding alone: each sample is rounded the same way in both.
    """
    if settings.autocast == "off":
        return nullcontext()
    if not is_autocast_available(device.type):
        raise UsageError(
            f'precision.autocast = "{settings.autocast}": torch has no autocast for {device.type}; set it '
            f'to "off"'
        )
    return torch.autocast(device.type, dtype=getattr(torch, settings.autocast))


def make_scaler(settings: PrecisionConfig, device: torch.device) -> GradScaler | None:
    """The loss scaler to give to the window: one for float16, which ends at 6e-8 below, else ``None``.

    Exactness: a scale that is a power of 2 changes no digit of what does not overflow or underflow.
    """
    if settings.autocast != "float16":
        return None
    return GradScaler(device.type, init_scale=settings.initial_loss_scale)
