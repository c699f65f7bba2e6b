"""Small problems to verify, right ones and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Any], Any]


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def data(samples: int = 8) -> Batch:
    torch.manual_seed(2)
    return {"x": torch.randn(samples, 5), "y": torch.randint(0, 3, (samples,))}


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    each = losses(model, batch)
    return each.sum(), len(each)


def averaged(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    each = losses(model, batch)
    return each.mean(), len(each)


def averaged_over_one(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).mean(), 1


def summed_over_one(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum(), 1


def count_of_the_whole_batch(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum(), 8


def count_of_classes(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum(), batch["y"].unique().numel()


def contrastive(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    z = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="sum"), len(z)


def contrastive_mean(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    loss_sum, items = contrastive(model, batch)
    return loss_sum / items, items


def against_the_batch_mean(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    out = model(batch["x"])
    return (out - out.mean(0)).square().sum(), len(out)


def penalised(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    loss_sum, items = summed(model, batch)
    return loss_sum + 0.1 * sum(p.square().sum() for p in model.parameters()), items


def norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def tokens(samples: int = 6) -> Batch:
    torch.manual_seed(4)
    ids = torch.randint(0, 11, (samples, 9))
    labels = ids.clone()
    for row, cut in enumerate([2, 9, 5, 1, 7, 3][:samples]):
        labels[row, cut:] = -100  # row 3 keeps one label, which is never a target: no items
    return {"input_ids": ids, "labels": labels}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = (
            nn.Embedding(11, 6),
            nn.GRU(6, 7, batch_first=True),
            nn.Linear(7, 11),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(ids))[0])


def two_terms(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Any]]:
    logits = model(batch["input_ids"])
    counted = batch["labels"] != -100
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return {"ce": (loss, counted.sum()), "size": (logits.square().sum(), len(logits))}


def collate(samples: list[Tensor]) -> Batch:
    longest = max(map(len, samples))
    ids = torch.stack([F.pad(sample, (0, longest - len(sample)), value=0) for sample in samples])
    return {"ids": ids, "counts": torch.stack([torch.arange(longest) < len(sample) for sample in samples])}


def ragged() -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randint(1, 11, (length,)) for length in (3, 9, 2, 5, 7)]


def ragged_losses(model: nn.Module, batch: Batch) -> Tensor:
    each = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
    return each[batch["counts"]].sum()


class Inside(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = mlp(), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).to(self.dtype).to(x.dtype)
