"""Run the micro-batches of a captured window again on copies: one by one, and as one big batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from wholebatch.audit.replay.capture import CapturedMicroBatch, Shared, WindowCapture, same_random
from wholebatch.audit.replay.chain import Spot, UnableError
from wholebatch.audit.replay.copies import Copies, copies
from wholebatch.audit.replay.joining import Arguments, Joined, joined, num_samples
from wholebatch.audit.replay.nested import changed, fetched, leaves
from wholebatch.replay import RandomState

Gradients = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The micro-batches again, one by one.

    Attributes:
        gradients: ``sum of c_j * grad L_j``.
        plain: ``sum of grad L_j``.
        size: ``sum of |c_j * grad L_j|``, to measure rounding by.
        losses: ``L_j``, outputs weighted as in the big batch.
        outputs: of each micro-batch's calls, without graph.
        loss_error: largest relative distance of a loss from the one that the loop had.
    """

    gradients: Gradients
    plain: Gradients
    size: float
    losses: tuple[float, ...]
    outputs: tuple[list[Any], ...]
    loss_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Big:
    """The window as one batch; ``joined`` as in ``Replayed``."""

    gradients: Gradients
    joined: Literal["inputs", "last call"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rerun:
    """What is run again.

    Attributes:
        capture: of the window.
        parts: its micro-batches that reach the parameters of interest.
        names: of these.
        way: how the outputs stand to each other in the loss; the largest has 1.
        scales: what each micro-batch multiplied that loss by.
        dtype: to run in; None leaves each tensor's own.
    """

    capture: WindowCapture
    parts: Sequence[CapturedMicroBatch]
    names: frozenset[str]
    way: Mapping[Spot, float]
    scales: Sequence[float]
    dtype: torch.dtype | None

    def fresh(self, *, quiet: bool = False) -> Copies:
        """New copies of the modules as they were when the window began; quiet: without dropout."""
        made = copies(self.capture, self.dtype, self.names)
        return made.without_dropout() if quiet else made

    @property
    def near(self) -> float:
        """Relative difference that losses and outputs may have, and count as the same."""
        return 1e-7 if self.dtype == torch.float64 else 2e-2


def rerun_of(capture: WindowCapture, names: frozenset[str], dtype: torch.dtype | None) -> Rerun:
    """Find what there is to run again.

    Args:
        capture: of the window, whole.
        names: of the parameters that the optimizer read.
        dtype: as in ``Rerun``.

    Raises:
        UnableError: the micro-batches were not made alike.
    """
    wanted = {identity for identity, name in capture.names.items() if name in names}
    parts = [one for one in capture.micro_batches if wanted & _reached(one)]
    if not parts:
        raise UnableError("no module call of the window holds what the optimizer stepped")
    scales = [max(one.factors.values(), key=abs, default=0.0) for one in parts]
    if 0.0 in scales:
        raise UnableError("the loss of a micro-batch was multiplied by zero")
    ways = [
        {spot: factor / scale for spot, factor in one.factors.items()}
        for one, scale in zip(parts, scales, strict=True)
    ]
    _refuse_unlike(parts, ways)
    return Rerun(capture=capture, parts=parts, names=names, way=ways[0], scales=scales, dtype=dtype)


def _reached(one: CapturedMicroBatch) -> set[int]:
    shared = [leaf for call in one.calls for _, leaf in leaves(call.arguments) if isinstance(leaf, Shared)]
    own = {id(parameter) for call in one.calls for parameter in call.module.parameters()}
    return own | {leaf.identity for leaf in shared}


def _refuse_unlike(parts: Sequence[CapturedMicroBatch], ways: Sequence[Mapping[Spot, float]]) -> None:
    modules = [[id(call.module) for call in one.calls] for one in parts]
    if any(one != modules[0] for one in modules):
        raise UnableError("the backwards of this window come from different chains of modules")
    first = ways[0]
    for way in ways:
        alike = way.keys() == first.keys()
        if not alike or any(not math.isclose(way[spot], first[spot], rel_tol=1e-5) for spot in way):
            raise UnableError("the losses of one micro-batch were weighted otherwise in another")


def _loss(outputs: Sequence[Any], way: Mapping[Spot, float]) -> Tensor:
    shares = [share * fetched(outputs[call], path).sum() for (call, path), share in way.items()]
    return torch.stack(shares).sum()


def _run(made: Copies, one: CapturedMicroBatch, each: Sequence[Arguments], **how: bool) -> list[Any]:
    outputs: list[Any] = []
    for call, arguments in zip(one.calls, each, strict=True):
        outputs.append(made.call(call, arguments, outputs, **how))
    return outputs


def split_again(again: Rerun, *, quiet: bool = False) -> Split:
    """Run the micro-batches one by one, each with the random numbers that it had.

    Args:
        again: what to run.
        quiet: without dropout.

    Returns:
        Gradients and losses.

    Raises:
        UnableError: a quiet run still draws random numbers.
    """
    made = again.fresh(quiet=quiet)
    runs = [_split_part(again, made, place, quiet=quiet) for place in range(len(again.parts))]
    total, plain = Gradients(), Gradients()
    for run, scale in zip(runs, again.scales, strict=True):
        add(plain, run.gradients, 1.0)
        add(total, run.gradients, scale)
    values = [run.loss * scale for run, scale in zip(runs, again.scales, strict=True)]
    return Split(
        gradients=total,
        plain=plain,
        size=sum(abs(scale) * norm(run.gradients) for run, scale in zip(runs, again.scales, strict=True)),
        losses=tuple(run.loss for run in runs),
        outputs=tuple(run.outputs for run in runs),
        loss_error=max(
            abs(value - one.loss) / max(abs(one.loss), 1e-12)
            for value, one in zip(values, again.parts, strict=True)
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    gradients: Gradients
    loss: float
    outputs: list[Any]


def _split_part(again: Rerun, made: Copies, place: int, *, quiet: bool) -> _Part:
    one = again.parts[place]
    before = RandomState.capture()
    outputs = _run(made, one, [call.arguments for call in one.calls], joined=False, random=not quiet)
    if quiet and not same_random(before, RandomState.capture()):
        raise UnableError(
            "the modules draw random numbers besides dropout, which one big batch can't repeat"
        )
    loss = _loss(outputs, again.way)
    loss.backward()  # type: ignore[no-untyped-call]
    kept = changed(outputs, lambda _, leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    return _Part(gradients=made.take_gradients(), loss=float(loss.detach()), outputs=kept)


def big_again(again: Rerun, split: Split, *, quiet: bool = False) -> Big:
    """Run all samples at once: by their inputs, or where these can't be put together from the last call.

    Args:
        again: what to run.
        split: the same micro-batches one by one, quiet where this is.
        quiet: without dropout.

    Raises:
        UnableError: there is no big batch.
    """
    try:
        return _big_by_inputs(again, split, quiet)
    except (torch.OutOfMemoryError, _CoupledError):
        raise
    except Exception as error:
        if len(again.parts[0].calls) > 1:
            return _big_by_last_call(again, again.fresh(quiet=quiet))
        if isinstance(error, UnableError):
            raise
        raise UnableError(f"the big batch did not run ({type(error).__name__}: {error})") from error


class _CoupledError(UnableError):
    """The samples of a micro-batch change each other's outputs."""


def _big_by_inputs(again: Rerun, split: Split, quiet: bool) -> Big:
    parts = again.parts
    sizes = [num_samples(one) for one in parts]
    columns = [
        joined(call.module, [one.calls[place].arguments for one in parts], sizes)
        for place, call in enumerate(parts[0].calls)
    ]
    if any(column.padded for column in columns):
        _check_padding(again, again.fresh(quiet=quiet), split, columns)
    made = again.fresh(quiet=quiet)
    outputs = _run(made, parts[0], [column.whole for column in columns], joined=True, random=False)
    _check_independence(again, outputs, split)
    _loss(outputs, again.way).backward()  # type: ignore[no-untyped-call]
    return Big(gradients=made.take_gradients(), joined="inputs")


def _check_padding(again: Rerun, made: Copies, split: Split, columns: Sequence[Joined]) -> None:
    """A micro-batch must have the same loss padded as bare."""
    for place, one in enumerate(again.parts):
        each = [
            column.padded[place] if column.padded else call.arguments
            for call, column in zip(one.calls, columns, strict=True)
        ]
        with torch.no_grad():
            loss = float(_loss(_run(made, one, each, joined=False, random=False), again.way))
        if not math.isclose(loss, split.losses[place], rel_tol=again.near, abs_tol=1e-12):
            raise UnableError(
                f"the micro-batches have unequal lengths, and padding changes the loss "
                f"(from {split.losses[place]:.6g} to {loss:.6g})"
            )


def _check_independence(again: Rerun, outputs: Sequence[Any], split: Split) -> None:
    """Each sample's outputs must be the same in the big batch as they were in its micro-batch."""
    for place, output in enumerate(outputs):
        for path, leaf in leaves(output):
            if (place, path) in again.way or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            each = [fetched(one[place], path) for one in split.outputs]
            if not leaf.dim() or any(one.shape[1:] != leaf.shape[1:] for one in each):
                continue
            whole = torch.cat(each)
            if whole.shape == leaf.shape and _far(whole, leaf.detach(), again.near):
                name = type(again.parts[0].calls[place].module).__name__
                raise _CoupledError(
                    f"the samples of a micro-batch change each other's outputs in {name}, or its first "
                    f"dimension is not the samples, so there is no big batch to compare with"
                )


def _far(one: Tensor, other: Tensor, near: float) -> bool:
    return (
        float((one - other).abs().max()) > near * max(float(one.abs().max()), 1e-12)
        if one.numel()
        else False
    )


def _big_by_last_call(again: Rerun, made: Copies) -> Big:
    parts = again.parts
    last = len(parts[0].calls) - 1
    if any(call != last for call, _ in again.way):
        raise UnableError("the loss comes from several modules, whose inputs can't be put together")
    each = []
    for one in parts:
        before = replace(one, calls=one.calls[:last])
        outputs = _run(made, before, [call.arguments for call in before.calls], joined=False, random=False)
        each.append(made.resolved(one.calls[last].arguments, outputs))
    call = parts[0].calls[last]
    column = joined(call.module, each, [num_samples(one) for one in parts])
    if column.padded:
        raise UnableError("the outputs of the micro-batches have unequal lengths and can't be put together")
    output = made.call(call, column.whole, [], joined=True, random=False)
    moved = {(0, path): share for (_, path), share in again.way.items()}
    _loss([output], moved).backward()  # type: ignore[no-untyped-call]
    return Big(gradients=made.take_gradients(), joined="last call")


def multiple_of(one: Mapping[str, Tensor], big: Mapping[str, Tensor]) -> tuple[float, float]:
    """``one`` as a multiple of ``big`` by least squares, and what is left, relative to ``one``."""
    square = sum(float((tensor * tensor).sum()) for tensor in big.values())
    if square == 0.0:
        raise UnableError("the loss of the big batch has no gradient")
    inner = sum(
        float((one[name].to(tensor.device) * tensor).sum()) for name, tensor in big.items() if name in one
    )
    factor = inner / square
    rest = minus(one, {name: factor * tensor for name, tensor in big.items()})
    return factor, norm(rest) / max(norm(one), 1e-300)


def minus(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Gradients:
    result = {name: -tensor for name, tensor in other.items()}
    add(result, one, 1.0)
    return result


def add(total: Gradients, more: Mapping[str, Tensor], factor: float) -> None:
    for name, tensor in more.items():
        term = factor * tensor
        total[name] = total[name] + term.to(total[name].device) if name in total else term


def norm(gradients: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float((tensor * tensor).sum()) for tensor in gradients.values()))
