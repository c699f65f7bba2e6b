"""Models whose parameters are DTensors over tensor-parallel ranks, without data parallelism (D = 1).

Every rank is given the same micro-batches. Forwards and backwards communicate by themselves, so ranks can
only run them together. What is left to do: some operations leave a gradient that is still to be added up
over the ranks (a norm's weight under sequence parallelism), which an optimizer would only see to in its
step; here it is done once, before the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from wholebatch.errors import UnsupportedError
from wholebatch.gradients import is_sharded
from wholebatch.ranks.base import Reduce
from wholebatch.ranks.roles import roles_of_mesh
from wholebatch.ranks.several import PATIENCE_S, SpreadRanks, refuse_replaced


class TensorParallelRanks(SpreadRanks):
    """The tensor-parallel ranks of one replica.

    Args:
        model: with DTensors among its parameters.
        reduce: ``"per_update"``: there is one replica, and nothing to reduce over others.
        group: all ranks of the job.

    Raises:
        UnsupportedError: DTensors that do not lie over all ranks of the job.
    """

    equal_turns = True
    reduces_at_the_end = True
    patience_s = PATIENCE_S

    def __init__(self, model: nn.Module, *, reduce: Reduce, group: dist.ProcessGroup) -> None:
        if reduce != "per_update":
            raise UnsupportedError(
                f"reduce={reduce!r}: a model that is only tensor parallel has one replica, and nothing to "
                f"reduce; leave it out"
            )
        ranks = dist.get_world_size(group)
        for name, parameter in model.named_parameters():
            if is_sharded(parameter) and parameter.device_mesh.size() != ranks:
                raise UnsupportedError(
                    f"{ranks} ranks are running and {name} lies over {parameter.device_mesh.size()} of "
                    f"them, so that nobody reduces over the others; call fully_shard over the other "
                    f"dimension of the mesh, or give the window the process group of one replica"
                )
        super().__init__(group, next(model.parameters()).device)
        self._model = model
        self.roles = roles_of_mesh(self._messages, 0, 1)
        self.holders = self.roles.num_ranks

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        refuse_replaced(parameters, self._model, by="parallelize_module")

    def begin(self) -> None:
        pass

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient: Any = parameter.grad
            if not is_sharded(parameter) or gradient is None:
                continue
            if tuple(gradient.placements) != tuple(parameter.placements):
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    def end(self, *, committed: bool) -> None:
        pass
