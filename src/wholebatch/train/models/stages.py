"""The built-in GPT cut by its layers: stages of a pipeline, whose parameters keep their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise

from torch import Tensor, nn

from wholebatch.train.models.gpt import GPT

# What the first and the last stage have beside their blocks.
_AT_FIRST, _AT_LAST = ("token_embedding", "position_embedding"), ("final_norm", "to_logits")


def blocks_of_stages(layers: int, stages: int) -> list[range]:
    """Which blocks each stage has: as many as the others, or one more in the first stages.

    Args:
        layers: blocks of the model; as many as stages or more.
        stages: of the pipeline.
    """
    share, rest = divmod(layers, stages)
    edges = accumulate((share + (number < rest) for number in range(stages)), initial=0)
    return [range(begin, end) for begin, end in pairwise(edges)]


class GPTStage(nn.Module):
    """Some blocks of a GPT that follow each other; the first stage embeds, and the last has the head.

    Args:
        gpt: the whole model; its modules themselves are taken, under their names.
        number: of this stage, from 0.
        stages: of the pipeline.
        autocast: what to put around a forward.

    Exactness: one stage after the other computes what the whole computes, in the same order.
    """

    def __init__(
        self,
        gpt: GPT,
        number: int,
        stages: int,
        *,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__()
        self._embedded, self._through, self._autocast = gpt.embedded, gpt.through, autocast
        self.is_first = number == 0
        self._head = _AT_LAST if number == stages - 1 else ()
        for name in (*(_AT_FIRST if self.is_first else ()), *self._head):
            self.add_module(name, getattr(gpt, name))
        own = blocks_of_stages(len(gpt.blocks), stages)[number]
        self.blocks = nn.ModuleDict({str(index): gpt.blocks[index] for index in own})

    def forward(self, x: Tensor) -> Tensor:
        """Features to features; the first stage takes token ids, and the last gives logits.

        Args:
            x: token ids of shape (samples, tokens), or features of shape (samples, tokens, width).

        Returns:
            Features of the same shape, or logits of shape (samples, tokens, vocabulary or labels).
        """
        with self._autocast():
            x = self._embedded(x) if self.is_first else x
            for block in self.blocks.values():
                x = self._through(block, x)
            for name in self._head:
                x = self.get_submodule(name)(x)
            return x


def keep_stages(gpt: GPT, stages: Sequence[GPTStage]) -> None:
    """Let go, in place, of all that is in none of the stages; what is left has its names.

    Its own forward is gone with it: the stages run instead.
    """
    held = {id(module) for stage in stages for module in stage.modules()}
    for name in (*_AT_FIRST, *_AT_LAST):
        if id(getattr(gpt, name)) not in held:
            delattr(gpt, name)
    kept = {name: block for name, block in gpt.blocks.named_children() if id(block) in held}
    gpt.blocks = nn.ModuleDict(kept)  # type: ignore[assignment]  # a list would number them anew
