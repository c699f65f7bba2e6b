"""A small GPT, written plainly: pre-norm blocks, learned positions, causal attention.

Nothing in it couples one sample to another, so its update does not depend on how the batch is cut.
Samples are padded on the right: causal attention looks to the left only, so no real position ever
sees padding, and padded positions have no label. Or they are packed into one row without padding, and
attention and positions begin anew at each sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wholebatch.errors import UsageError
from wholebatch.rows import RowLayout, attend_in_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTShape:
    """The sizes of the model.

    Args:
        vocabulary: token ids.
        max_tokens: longest sample, in tokens.
        layers: transformer blocks.
        width: features of a position.
        heads: attention heads; divides the width.
        dropout: probability that a feature is dropped in training.
        num_labels: classes of a whole sample; 0 for a model of the next token.
    """

    vocabulary: int
    max_tokens: int
    layers: int
    width: int
    heads: int
    dropout: float = 0.0
    num_labels: int = 0


class Attention(nn.Module):
    """Causal self-attention, within each sample."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.to_query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.to_output = nn.Linear(shape.width, shape.width)
        self.attend, self.attend_in_rows = _attend, attend_in_rows

    def forward(self, x: Tensor, layout: RowLayout | None = None) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.to_query_key_value(x).view(samples, tokens, 3, self.heads, width // self.heads)
        dropout = self.dropout if self.training else 0.0
        if layout is not None:
            query, key, value = parts[0].unbind(1)  # each (tokens, heads, width of a head)
            in_row = self.attend_in_rows(query, key, value, layout, dropout=dropout)
            packed: Tensor = self.to_output(in_row.reshape(1, tokens, width))
            return packed
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (samples, heads, tokens, width of a head)
        mixed = self.attend(query, key, value, dropout=dropout)
        out: Tensor = self.to_output(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, *, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)


class Block(nn.Module):
    """Attention over positions, then a small network on each position; both add to what came in."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.network_norm = nn.LayerNorm(shape.width)
        self.network = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, layout: RowLayout | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), layout))
        out: Tensor = x + self.drop(self.network(self.network_norm(x)))
        return out


class GPT(nn.Module):
    """Token ids to logits: of the next token at each position, or of the label of each sample.

    Args:
        shape: its sizes.
        activation_checkpointing: keep only what enters each block, and run the block again, with the
            same random numbers, in the backward.
    """

    def __init__(self, shape: GPTShape, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.part_of_sequence = 0  # of ranks that share each
        self.activation_checkpointing = activation_checkpointing
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.max_tokens, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.width)
        # The only part that differs between the two uses, so that both learn all their parameters.
        self.to_logits = nn.Linear(shape.width, shape.num_labels or shape.vocabulary, bias=False)
        self.apply(_initialise)
        # Each block adds twice to the same sum; smaller last layers keep its size at the start.
        for name, parameter in self.named_parameters():
            if name.endswith(("to_output.weight", "network.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        layout: RowLayout | None = None,
    ) -> Tensor:
        """Logits, each a function of its own sample alone.

        Args:
            input_ids: token ids, padded on the right, of shape (samples, tokens); or a packed row, of
                shape (1, tokens).
            attention_mask: 1 for a real token and 0 for padding; shape (samples, tokens). Looked at
                for labels only: a causal position does not see the padding on its right.
            layout: where the samples of a packed row lie; ``None`` for padded samples.

        Returns:
            Shape (samples, tokens, vocabulary), or (1, tokens, vocabulary) of a row; with labels (samples,
            num_labels), from the last real position, the only one that has seen the whole sample.

        Raises:
            UsageError: more tokens than the model has positions for, the layout of another row, or labels
                without a mask or of a row.

        Exactness: exact in real arithmetic over any split and any padding on the right, and over packed
            rows.
        """
        if layout is not None:
            self._check_row(input_ids, layout)
        self.check_length(input_ids.shape[1] if layout is None else layout.longest)
        x = self.embedded(input_ids, layout)
        for block in self.blocks:
            x = self.through(block, x, layout)
        if self.shape.num_labels:
            x = at_last_token(x, attention_mask)
        logits: Tensor = self.to_logits(self.final_norm(x))
        return logits

    def check_length(self, longest: int) -> None:
        """Refuse samples with more tokens than there are positions for.

        Raises:
            UsageError: with both numbers.
        """
        if longest > self.shape.max_tokens:
            raise UsageError(
                f"a sample of {longest} tokens does not fit a GPT of {self.shape.max_tokens} positions; "
                f"set data.max_tokens_per_sample to the longest sample, or cut it"
            )

    def embedded(self, input_ids: Tensor, layout: RowLayout | None = None) -> Tensor:
        """The features of token ids before the first block; shape (samples, tokens, width)."""
        if layout is None:
            tokens = input_ids.shape[1]
            positions = torch.arange(tokens, device=input_ids.device) + self.part_of_sequence * tokens
            # Beyond the last there is padding alone, to make parts of one length.
            positions = positions.clamp(max=self.shape.max_tokens - 1)
        else:
            positions = layout.positions
        x: Tensor = self.token_embedding(input_ids)
        embedded: Tensor = self.drop(x + self.position_embedding(positions))
        return embedded

    def through(self, block: nn.Module, x: Tensor, layout: RowLayout | None = None) -> Tensor:
        """The features after one of its blocks."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(block, x, layout, use_reentrant=False, preserve_rng_state=True)
        else:
            out = block(x, layout)
        return out

    def _check_row(self, input_ids: Tensor, layout: RowLayout) -> None:
        if self.shape.num_labels:
            raise UsageError(
                f"the built-in GPT of {self.shape.num_labels} labels reads one for each padded sample, and "
                f"was given a packed row of {layout.tokens} tokens; pad the samples"
            )
        if tuple(input_ids.shape) != (1, layout.tokens):
            raise UsageError(
                f"samples of {layout.tokens} tokens together make a row of shape (1, {layout.tokens}), and "
                f"input_ids is {tuple(input_ids.shape)}; give the layout of the same micro-batch"
            )


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters; shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def at_last_token(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """What stands at each sample's last real position.

    Args:
        x: features or logits, shape (samples, tokens, width).
        attention_mask: 1 for a real token and 0 for padding; shape (samples, tokens).

    Returns:
        Shape (samples, width).

    Raises:
        UsageError: no mask.

    Exactness: no arithmetic.
    """
    if attention_mask is None:
        raise UsageError(
            "the built-in GPT reads the label of a sample at its last token, and the batch has no "
            '"attention_mask" to tell it from padding; let collate add one, 1 for tokens and 0 for padding'
        )
    last = (attention_mask.long().sum(dim=1) - 1).clamp(min=0)
    return x.take_along_dim(last[:, None, None], dim=1).squeeze(1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
