"""The big batch done the plain way, in float64: what an optimizer should have read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broken_loops.coupled_samples import clip_loss, two_towers
from broken_loops.shared import classifier, collate, images, language_model, texts


def _loss(objective: str, indices: Sequence[int], num_samples: int, model: nn.Module) -> Tensor:
    """A mean over all items of these samples, at once."""
    if objective == "texts":
        dataset = texts(num_samples)
        batch = collate([dataset[i] for i in indices])
        return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    x, y = images(num_samples)[list(indices)]
    if objective == "images":
        return F.cross_entropy(model(x.double()), y)
    queries, documents = model(x.double())
    if objective == "clip":
        return clip_loss(queries, documents)
    scores = queries @ documents.T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores)))


def _model(objective: str) -> nn.Module:
    kinds = {"texts": language_model, "images": classifier}
    return kinds.get(objective, two_towers)().double()


def big_batch_gradient(
    objective: str, parameters: Sequence[Tensor], indices: Sequence[int], num_samples: int
) -> list[Tensor]:
    """The gradient at these parameters of the mean over these samples."""
    return big_batch(objective, parameters, indices, num_samples)[1]


def big_batch(
    objective: str, parameters: Sequence[Tensor], indices: Sequence[int], num_samples: int
) -> tuple[float, list[Tensor]]:
    """The mean over these samples at these parameters, and its gradient."""
    model = _model(objective)
    with torch.no_grad():
        for own, given in zip(model.parameters(), parameters, strict=True):
            own.copy_(given)
    loss = _loss(objective, indices, num_samples, model)
    return float(loss.detach()), list(torch.autograd.grad(loss, list(model.parameters())))


def samples_of_updates(
    by_rank: Sequence[Sequence[int]], num_samples: int, *, shared: bool = False
) -> Iterator[list[int]]:
    """The global batch of each update as indices into the data of all ranks.

    Ranks take turns in the data, as with a DistributedSampler; where ``shared``, all read all of it.
    """
    ranks = len(by_rank)
    position = [0] * ranks
    for sizes in zip(*by_rank, strict=True):
        found = []
        for rank, size in enumerate(sizes):
            taken = [i % num_samples for i in range(position[rank], position[rank] + abs(size))]
            position[rank] += abs(size)
            found += taken if shared else [rank + ranks * i for i in taken]
        if sizes[0] > 0:
            yield found


def clipped(gradients: Sequence[Tensor], clip: tuple[str, float] | None) -> list[Tensor]:
    """The gradients after the clip that was meant."""
    if clip is None:
        return list(gradients)
    how, limit = clip
    if how == "value":
        return [gradient.clamp(-limit, limit) for gradient in gradients]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    return [gradient * min(1.0, limit / (float(norm) + 1e-6)) for gradient in gradients]


def compare(read: Sequence[Tensor | None], truth: Sequence[Tensor]) -> tuple[float, float]:
    """How many times the truth was read, and how far what was read is from that multiple, relatively."""
    pairs = list(zip(read, truth, strict=True))
    flat = torch.cat([(torch.zeros_like(t) if r is None else r.double()).flatten() for r, t in pairs])
    true = torch.cat([t.flatten() for _, t in pairs])
    times = float(flat @ true / (true @ true))
    return times, float((flat - times * true).norm() / flat.norm())
