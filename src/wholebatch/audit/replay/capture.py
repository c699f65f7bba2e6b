"""Remember one window of a training loop well enough to run it again: state, inputs, random state."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wholebatch.audit.replay.chain import Source, Spot, UnableError, Wired, coefficients, wired
from wholebatch.audit.replay.nested import Leaf, Path, changed, leaves
from wholebatch.replay import RandomState

# Wrappers whose parameters are the module's own, by class name: what they wrap is at this attribute.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "module",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared(Leaf):
    """A parameter that was itself given to a module: not an input, and not cut."""

    identity: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Autocast:
    """Autocast as it was around a call."""

    enabled: bool
    device_type: str
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One outermost module call.

    Attributes:
        module: unwrapped.
        arguments: ``(args, kwargs)``, each tensor a copy, a ``Wired`` or a ``Shared``.
        random: state before it; None where the call was only seen when it was over.
        drew: it drew random numbers; None where that can't be told.
        autocast: around it.
    """

    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    random: RandomState | None
    drew: bool | None
    autocast: Autocast


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedMicroBatch:
    """The calls that led to one backward.

    Attributes:
        calls: in order.
        factors: of ``root = sum of factor x output``, times the gradient that backward was given, loss
            scale taken out.
        loss: value of the root, loss scale taken out.
    """

    calls: tuple[Call, ...]
    factors: Mapping[Spot, float]
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A parameter or buffer as it was when the window began; the value waits on the host."""

    tensor: Tensor
    value: Tensor
    requires_grad: bool


@dataclass(slots=True)
class _Pending:
    """The calls since the backward before; holds their graphs until the next one."""

    calls: list[Call] = field(default_factory=list)
    outputs: dict[Source, Spot] = field(default_factory=dict)
    begun: tuple[nn.Module, Any, Any, RandomState] | None = None


class _Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.applied_function = function

    def forward(self, *args: Any) -> Any:
        return self.applied_function.apply(*args)  # type: ignore[no-untyped-call]


class WindowCapture:
    """One window on this rank, told by whoever watches the loop.

    Attributes:
        micro_batches: captured so far.
        state: parameters and buffers at the beginning, by identity.
        names: of parameters, by identity.
        modes: whether each module was training, by identity.
        unable: why this window can't be replayed; None so far.
    """

    def __init__(self) -> None:
        self.micro_batches: list[CapturedMicroBatch] = []
        self.state: dict[int, Kept] = {}
        self.names: dict[int, str] = {}
        self.modes: dict[int, bool] = {}
        self.unable: str | None = "no window was captured"
        self._pending = _Pending()
        self._stand_ins: dict[type[torch.autograd.Function], nn.Module] = {}

    def begin(
        self, models: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """Copy the state before the window's first forward.

        Args:
            models: that hold the watched parameters.
            parameters: the watched ones by the names that ``replay`` will be given; None takes
                ``named_parameters()`` of the models.
        """
        self.release()
        self.unable = None
        for model in models:
            self._keep_state(model)
        named = [model.named_parameters() for model in models] if parameters is None else []
        for name, parameter in [pair for pairs in named for pair in pairs] + list(
            (parameters or {}).items()
        ):
            self.names.setdefault(id(parameter), name)

    def forward_begins(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """An outermost module is about to be called, with gradients enabled.

        Without it random state is not known, and inputs that the forward changes are captured too late.

        Args:
            module: as the user called it, wrappers included.
            args, kwargs: as given; None where a hook is not told, and they are captured afterwards.
        """
        if self.unable is None and not _in_backward():
            with self._noting():
                named = None if kwargs is None else self._copied(dict(kwargs))
                self._pending.begun = (module, self._copied(args), named, RandomState.capture())

    def forward_called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """An outermost module was called, with gradients enabled.

        Args:
            module, args, kwargs: as for :meth:`forward_begins`.
            output: what it returned.
        """
        if self.unable is None and not _in_backward():
            with self._noting():
                self._note_call(module, args, kwargs, output)

    def stand_in(self, function: type[torch.autograd.Function]) -> nn.Module:
        """What to call an autograd function that the user applies outside any module.

        Such a call is captured as a module's, by :meth:`forward_begins` and :meth:`forward_called` with
        this stand-in.

        Args:
            function: whose ``apply`` is called.
        """
        if function not in self._stand_ins:
            # named as the function, for messages
            made = type(function.__name__, (_Applied,), {})
            self._stand_ins[function] = made(function)
        return self._stand_ins[function]

    def backward_called(self, root: Tensor, gradient: Tensor | None, loss_scale: float = 1.0) -> None:
        """Backward is about to run: closes one micro-batch.

        Args:
            root: what it is called on.
            gradient: what it is given.
            loss_scale: that the root was multiplied by through a GradScaler.
        """
        if self.unable is None:
            with self._noting():
                self._close(root, gradient, loss_scale)
        self._pending = _Pending()

    def release(self) -> None:
        """Let go of everything that was captured."""
        self.micro_batches, self.state, self.names, self.modes = [], {}, {}, {}
        self.unable, self._pending, self._stand_ins = "no window was captured", _Pending(), {}

    @contextlib.contextmanager
    def _noting(self) -> Any:
        """The loop must not fail because it can't be replayed."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            self.release()
            self.unable = str(error) if isinstance(error, UnableError) else f"capturing failed: {error!r}"

    def _note_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        begun, self._pending.begun = self._pending.begun, None
        if begun is not None and begun[0] is not module:
            begun = None
        own = unwrapped(module)
        _refuse_sharded(own)
        _refuse_batch_statistics(own)
        self._keep_state(own)
        for part in own.modules():
            self.modes.setdefault(id(part), part.training)
        given = begun[1] if begun else self._copied(args)
        named = begun[2] if begun and begun[2] is not None else self._copied(dict(kwargs))
        arguments, random = (given, named), begun[3] if begun else None
        drew = None if random is None else not same_random(random, RandomState.capture())
        call = Call(
            module=own, arguments=arguments, random=random, drew=drew, autocast=_autocast(arguments, own)
        )
        index = len(self._pending.calls)
        self._pending.calls.append(call)
        for path, tensor in leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self._pending.outputs.setdefault((tensor.grad_fn, tensor.output_nr), (index, path))

    def _copied(self, arguments: Any) -> Any:
        outputs = self._pending.outputs

        def change(_: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if isinstance(leaf, nn.Parameter) or id(leaf) in self.state:
                self._keep(leaf)
                return Shared(identity=id(leaf))
            return leaf.detach().clone() if leaf.grad_fn is None else wired(leaf, outputs)

        return changed(arguments, change)

    def _close(self, root: Tensor, gradient: Tensor | None, loss_scale: float) -> None:
        if root.numel() != 1:
            raise UnableError(
                f"backward was called on a tensor of shape {list(root.shape)}, not one number"
            )
        if not self._pending.calls:
            raise UnableError("a backward came without any module call since the one before")
        given = (1.0 if gradient is None else float(gradient)) / loss_scale
        factors = {
            spot: factor * given for spot, factor in coefficients(root, self._pending.outputs).items()
        }
        calls, moved = _needed(self._pending.calls, factors)
        self.micro_batches.append(
            CapturedMicroBatch(calls=calls, factors=moved, loss=float(root.detach()) / loss_scale)
        )

    def _keep_state(self, module: nn.Module) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            self._keep(tensor)

    def _keep(self, tensor: Tensor) -> None:
        # The tensor is kept along, so that no other one can take its identity.
        if id(tensor) not in self.state:
            value = tensor.detach().to("cpu", copy=True)
            self.state[id(tensor)] = Kept(tensor=tensor, value=value, requires_grad=tensor.requires_grad)


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside wrappers that do not change its parameters.

    Args:
        module: as it was called.
    """
    while type(module).__name__ in _WRAPPERS:
        module = getattr(module, _WRAPPERS[type(module).__name__])
    return module


def _needed(
    calls: Sequence[Call], factors: Mapping[Spot, float]
) -> tuple[tuple[Call, ...], dict[Spot, float]]:
    """The calls that the root depends on, numbered anew."""
    needed = {spot[0] for spot in factors}
    for index in range(len(calls) - 1, -1, -1):
        if index in needed:
            found = [leaf for _, leaf in leaves(calls[index].arguments) if isinstance(leaf, Wired)]
            needed |= {leaf.spot[0] for leaf in found}
    place = {index: new for new, index in enumerate(sorted(needed))}

    def renumbered(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Wired):
            return leaf
        return Wired(spot=(place[leaf.spot[0]], leaf.spot[1]), actions=leaf.actions)

    kept = [
        Call(
            module=calls[index].module,
            arguments=changed(calls[index].arguments, renumbered),
            random=calls[index].random,
            drew=calls[index].drew,
            autocast=calls[index].autocast,
        )
        for index in sorted(needed)
    ]
    return tuple(kept), {(place[call], path): factor for (call, path), factor in factors.items()}


def _refuse_sharded(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id"):
            raise UnableError(f"the parameter {name} is sharded over ranks")
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise UnableError("the parameters are sharded over ranks (FullyShardedDataParallel)")


def _refuse_batch_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
            raise UnableError(
                f"{type(part).__name__} {name or 'itself'} normalises by the statistics of each "
                f"micro-batch, and one big batch has others"
            )


def _in_backward() -> bool:
    """A checkpoint runs its forward again inside backward: that is no call of the user's."""
    return torch._C._current_graph_task_id() != -1


def _autocast(arguments: Any, module: nn.Module) -> Autocast:
    tensors = [*module.parameters(), *(leaf for _, leaf in leaves(arguments) if isinstance(leaf, Tensor))]
    device = tensors[0].device.type if tensors else "cpu"
    return Autocast(
        enabled=torch.is_autocast_enabled(device),
        device_type=device,
        dtype=torch.get_autocast_dtype(device),
    )


def same_random(one: RandomState, other: RandomState) -> bool:
    """Whether nothing was drawn between two states.

    Args:
        one, other: captured in the same process.
    """
    if (one.accelerator is None) != (other.accelerator is None):
        return False
    accelerators = (
        one.accelerator is None
        or other.accelerator is None
        or torch.equal(one.accelerator, other.accelerator)
    )
    numpy = all(np.array_equal(a, b) for a, b in zip(one.numpy, other.numpy, strict=True))
    return accelerators and numpy and torch.equal(one.host, other.host) and one.python == other.python
