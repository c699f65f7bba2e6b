"""Losses in which samples are each other's negatives: a window has fewer of these than the big batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broken_loops.shared import FEATURES, image_loader

ACCUMULATE = 4
TEMPERATURE = 0.2


class TwoTowers(nn.Module):
    """A query and a document tower."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(FEATURES, 8)
        self.document = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        documents = self.document(x.flip(-1))
        return F.normalize(self.query(x), dim=-1), F.normalize(documents, dim=-1)


def two_towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers()


def clip_loss(queries: Tensor, documents: Tensor) -> Tensor:
    """Both ways, as in CLIP."""
    scores = queries @ documents.T / TEMPERATURE
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def broken() -> nn.Module:
    """Four small batches, each with its own few negatives."""
    model = two_towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, _) in enumerate(image_loader()):
        queries, documents = model(x)
        (clip_loss(queries, documents) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """Embeddings first, without a graph; their gradients are kept, and brought back part by part."""
    model = two_towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader())
    for _ in range(3):
        parts = [next(loader)[0] for _ in range(ACCUMULATE)]
        with torch.no_grad():
            embeddings = [model(x) for x in parts]
        queries = torch.cat([q for q, _ in embeddings]).requires_grad_()
        documents = torch.cat([d for _, d in embeddings]).requires_grad_()
        clip_loss(queries, documents).backward()
        cached = zip(queries.grad.split(4), documents.grad.split(4), strict=True)
        for x, (query_grad, document_grad) in zip(parts, cached, strict=True):
            q, d = model(x)
            surrogate = (q * query_grad).sum() + (d * document_grad).sum()
            surrogate.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _info_nce(anchors: Tensor, positives: Tensor) -> Tensor:
    logits = torch.matmul(anchors, positives.transpose(0, 1)).div(TEMPERATURE)
    log_probs = F.log_softmax(logits, dim=1)
    return -log_probs.diagonal().mean()


def broken_info_nce() -> nn.Module:
    """InfoNCE by hand, one way."""
    model = two_towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, (x, _) in enumerate(image_loader()):
        loss = _info_nce(*model(x))
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_info_nce() -> nn.Module:
    """The whole batch at once."""
    model = two_towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, _ in image_loader(samples=16):
        loss = _info_nce(*model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
