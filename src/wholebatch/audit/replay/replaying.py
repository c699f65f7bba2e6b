"""One captured window again, as one big batch and micro-batch by micro-batch, beside what was read.

For losses that no graph can be read from: fused kernels, autograd Functions of the user's own, losses
inside a compiled model. What can be replayed is a chain of module calls whose last output is the loss,
with reshaping and casting between the calls and nothing but numbers after the last.

The modules are copied, in float64 where they can run in it. With ``L(B)`` the loss of the samples B,
``B_j`` micro-batch j and ``c_j`` what the loop multiplied its loss by before backward:

    split = sum over j of c_j * grad L(B_j)        big = grad L(all samples)

An update is right when what was read is 1 times ``big``; a mean that nobody divides reads A times, and
means of unequal numbers of items read no multiple of it at all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from wholebatch.audit.replay.capture import WindowCapture
from wholebatch.audit.replay.chain import UnableError
from wholebatch.audit.replay.copies import untouched
from wholebatch.audit.replay.joining import num_samples
from wholebatch.audit.replay.nested import leaves
from wholebatch.audit.replay.rerun import (
    Big,
    Rerun,
    Split,
    big_again,
    minus,
    multiple_of,
    norm,
    rerun_of,
    split_again,
)
from wholebatch.audit.trace import Replayed
from wholebatch.closeness import equality_margin, largest_tensor_elements, narrower_of, reduction_terms
from wholebatch.replay import random_state_kept

_TINY = 1e-300


def replay(
    capture: WindowCapture, read: Mapping[str, Tensor], update: int, *, num_ranks: int = 1
) -> Replayed:
    """Run a captured window again and compare.

    ``factor = <x, big> / <big, big>`` and ``difference = |x - factor * big| / |x|``, where x is what was
    read, or ``split`` (see ``Replayed.compared``). With several ranks only this rank's share is replayed:
    x is then ``split``, and both are relative to the big batch of this rank alone.

    Args:
        capture: of one window on this rank, whole. Its watcher must not watch meanwhile.
        read: what the optimizer read by parameter name, loss scale taken out, before clipping.
        update: index of the update, for the result.
        num_ranks: whose gradients ``read`` holds.

    Returns:
        What was found, or why there was no replay; never an exception of the user's code.

    Exactness: parameters, buffers, gradients, modes and random state are afterwards what they were, bit
        for bit. Hooks that the user registered on modules do run.
    """
    try:
        with random_state_kept(), untouched(capture), _eager(), torch.enable_grad():
            return _replayed(capture, read, update, num_ranks)
    except UnableError as error:
        return Replayed(update=update, unable=str(error))
    except torch.OutOfMemoryError:
        return Replayed(update=update, unable="the window as one big batch does not fit into memory")


def _replayed(capture: WindowCapture, read: Mapping[str, Tensor], update: int, num_ranks: int) -> Replayed:
    if capture.unable is not None:
        raise UnableError(capture.unable)
    if not capture.micro_batches:
        raise UnableError("the window had no backward")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in read.values()):
        raise UnableError("what the optimizer read is not finite")
    first = _attempt(capture, read, num_ranks, torch.float64)
    if isinstance(first, Replayed) and _came_out(first):
        return replace(first, update=update)
    # A kernel may know narrower dtypes only, or draw other random numbers in float64.
    second = _attempt(capture, read, num_ranks, None)
    chosen = second if isinstance(first, UnableError) or _came_out(second) else first
    if isinstance(chosen, UnableError):
        raise chosen
    return replace(chosen, update=update)


def _came_out(found: Replayed | UnableError) -> bool:
    return isinstance(found, Replayed) and found.split_difference <= found.rounding


def _attempt(
    capture: WindowCapture, read: Mapping[str, Tensor], num_ranks: int, dtype: torch.dtype | None
) -> Replayed | UnableError:
    try:
        return _compared(rerun_of(capture, frozenset(read), dtype), read, num_ranks)
    except torch.OutOfMemoryError:
        raise
    except UnableError as error:
        return error
    except Exception as error:
        return UnableError(f"the modules did not run again ({type(error).__name__}: {error})")


def _compared(again: Rerun, read: Mapping[str, Tensor], num_ranks: int) -> Replayed:
    split = split_again(again)
    drew = any(call.drew is not False for one in again.parts for call in one.calls)
    quiet = split_again(again, quiet=True) if drew else split
    big = big_again(again, quiet, quiet=drew)
    wide = {name: tensor.detach().to(torch.float64) for name, tensor in read.items()}
    by_read = num_ranks == 1 and not drew
    factor, difference = multiple_of(wide if by_read else quiet.gradients, big.gradients)
    _, from_big = multiple_of(quiet.gradients, big.gradients)
    size = max(norm(wide), _TINY)
    used = again.dtype or _working(again.capture)
    return Replayed(
        factor=factor,
        difference=difference,
        rounding=_rounding(again, _narrowest(again), split.size / size),
        split_difference=norm(minus(wide, split.gradients)) / size if num_ranks == 1 else split.loss_error,
        dtype=str(used).removeprefix("torch."),
        compared="read" if by_read else "split",
        split_from_big=from_big,
        replay_rounding=_rounding(again, used, quiet.size / max(norm(quiet.gradients), _TINY)),
        additive=_is_additive(again, quiet, big),
        num_samples=sum(num_samples(one) for one in again.parts),
        joined=big.joined,
    )


def _is_additive(again: Rerun, split: Split, big: Big) -> bool:
    """Whether the loss is a sum over samples that divides by no number it was given."""
    arguments = [leaf for call in again.parts[0].calls for leaf in leaves(call.arguments)]
    given = any("num_items" in str(path[-1:]) and leaf is not None for path, leaf in arguments)
    if len(again.parts) < 2 or given:
        return False
    return norm(minus(split.plain, big.gradients)) <= again.near * max(norm(big.gradients), _TINY)


def _rounding(again: Rerun, dtype: torch.dtype, cancelled: float) -> float:
    calls = [call for one in again.parts for call in one.calls]
    group = nn.ModuleList({id(call.module): call.module for call in calls}.values())
    elements = sum(
        largest_tensor_elements([leaf for _, leaf in leaves(call.arguments) if isinstance(leaf, Tensor)])
        for call in calls
    )
    roundings = len(again.parts) + len(list(group.modules()))
    margin = equality_margin(reduction_terms(group, elements), dtype, num_roundings=roundings)
    return margin * max(1.0, cancelled)


def _working(capture: WindowCapture) -> torch.dtype:
    """The narrowest dtype of the parameters."""
    narrow = torch.float64
    for kept in capture.state.values():
        if kept.value.is_floating_point() and kept.requires_grad:
            narrow = narrower_of(kept.value.dtype, narrow)
    return narrow


def _narrowest(again: Rerun) -> torch.dtype:
    """What the loop's own computation was rounded to."""
    narrow = _working(again.capture)
    for cast in [call.autocast for one in again.parts for call in one.calls]:
        if cast.enabled:
            narrow = narrower_of(cast.dtype, narrow)
        if cast.device_type != "cpu" and _tensor_cores():
            narrow = narrower_of(torch.float16, narrow)  # TF32 keeps as many bits as float16
    return narrow


def _tensor_cores() -> bool:
    return torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled parts run uncompiled: a replay is not worth a compilation."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the stance would load it
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
