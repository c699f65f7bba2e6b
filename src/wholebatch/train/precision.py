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
    """Refuse settings that contradict each other; needs no data and no model.

    Raises:
        UsageError: autocast over float64 parameters, which it would leave as they are, or a loss scale
            that is not a positive number.
    """
    if settings.autocast != "off" and settings.parameters == "float64":
        raise UsageError(
            f'precision.parameters = "float64" and precision.autocast = "{settings.autocast}": autocast '
            f"leaves float64 alone, so nothing would be computed in {settings.autocast}; set one of them "
            f'to "float32" or "off"'
        )
    if not 0.0 < settings.initial_loss_scale < float("inf"):
        raise UsageError(
            f"precision.initial_loss_scale = {settings.initial_loss_scale} is no loss scale; give a "
            f"positive number, a power of 2 for an exact one"
        )


def parameter_dtype(settings: PrecisionConfig) -> torch.dtype:
    """The dtype of parameters, gradients and optimizer state."""
    dtype: torch.dtype = getattr(torch, settings.parameters)
    return dtype


def autocast(settings: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """What to put around one forward: ``torch.autocast`` in the chosen dtype, or nothing.

    Enter a new one for every forward, so that what it caches (the parameters' casts) is dropped before
    they change.

    Args:
        settings: the section ``[precision]``.
        device: where the forward runs.

    Raises:
        UsageError: as ``check_precision``, or a device that has no autocast.

    Exactness: not equal to a forward without it: matrix products are rounded to the dtype. Split and
    whole still differ by rounding only, because each sample is rounded the same way in both. Sum the
    loss in float32, as every objective of this package does.
    """
    check_precision(settings)
    if settings.autocast == "off":
        return nullcontext()
    if not is_autocast_available(device.type):
        raise UsageError(
            f'precision.autocast = "{settings.autocast}": torch has no autocast for {device.type}; set it '
            f'to "off"'
        )
    return torch.autocast(device.type, dtype=getattr(torch, settings.autocast))


def make_scaler(settings: PrecisionConfig, device: torch.device) -> GradScaler | None:
    """The loss scaler to give to the window: one for float16, ``None`` otherwise.

    float16 ends at 6e-8 below; the loss is multiplied by a scale before the backward and the gradients are
    divided by it before the norm. The scale halves when a gradient overflows, in an update that is
    skipped, and doubles after 2000 applied updates in a row.

    Args:
        settings: the section ``[precision]``.
        device: where the parameters are.

    Raises:
        UsageError: as ``check_precision``.

    Exactness: a scale that is a power of 2 changes no digit of what does not overflow or underflow.
    """
    check_precision(settings)
    if settings.autocast != "float16":
        return None
    return GradScaler(device.type, init_scale=settings.initial_loss_scale)
