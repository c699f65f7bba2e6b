"""weighting="micro_batch_means": the mean of micro-batches' own means, on request and labelled."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from problems import Case, loss_with, watch_gradients
from ranks import run_ranks
from runs import a_header, a_record
from wholebatch.errors import WindowUsageError
from wholebatch.objective import counted_loss
from wholebatch.report.run_view import render_run
from wholebatch.run_folder import RunLog, read_run
from wholebatch.verify import verify_window
from wholebatch.window import UpdateWindow

RAGGED = [[[5, 2], [3], [0, 0]], [[1], [4, 4], [2, 5]]]


def mean_of_means(case: Case, model: nn.Module) -> Tensor:
    """As trainers have it: a mean in each micro-batch, 0 of none, averaged over all of them."""
    means = []
    for batch in (batch for of_rank in case.batches() for batch in of_rank):
        by_term = case.objective()(model(batch["input_ids"]), batch)
        for term, coefficient in case.objective().coefficients.items():
            loss, items = by_term[term] if case.two_terms else by_term
            if float(items):
                means.append(coefficient * loss / items)
    held = sum(map(len, case.batches()))
    return torch.stack(means).sum() / held


def distances(case: Case, seen: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple[float, float]:
    """From the mean of means, and from the big batch, relative to the latter's norm."""
    truths = []
    for loss_of in (mean_of_means, by_items):
        model = case.model()
        model.load_state_dict(weights)
        loss_of(case, model).backward()
        truths.append({name: p.grad for name, p in model.named_parameters()})
    norm = torch.stack([value.norm() for value in truths[1].values()]).norm()
    apart = [torch.stack([(seen[name] - one[name]).norm() for name in seen]).norm() for one in truths]
    return float(apart[0] / norm), float(apart[1] / norm)


def by_items(case: Case, model: nn.Module) -> Tensor:
    batch = case.whole()
    by_term = case.objective()(model(batch["input_ids"]), batch)
    parts = [
        coefficient * loss / items
        for term, coefficient in case.objective().coefficients.items()
        for loss, items in [by_term[term] if case.two_terms else by_term]
    ]
    return torch.stack(parts).sum()


def run(case: Case, rank: int, wrap: Any = lambda model: model, *, known: bool = True) -> dict[str, Any]:
    model = case.model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = watch_gradients(optimizer, dict(model.named_parameters()))
    objective = case.objective()
    window = UpdateWindow(
        wrapped,
        optimizer,
        objective if known else counted_loss(lambda output, batch: objective(output, batch)),
        weighting="micro_batch_means",
    )
    record = window.run(case.batches()[rank], loss_with(objective))
    means, whole = distances(case, seen, weights)
    return {"record": record, "means": means, "whole": whole}


@pytest.mark.parametrize("known", [True, False], ids=["counted ahead", "counted by the loss"])
def test_the_mean_of_means_is_reproduced_and_is_not_the_big_batch(known: bool) -> None:
    case = Case(counts=[RAGGED[0] + RAGGED[1]])
    found = run(case, 0, known=known)
    assert found["means"] < 1e-14
    assert found["whole"] > 1e-2
    record = found["record"]
    assert (record.weighting, record.items, record.micro_batches) == ("micro_batch_means", 18, 6)
    assert record.to_dict()["weighting"] == "micro_batch_means"


def test_each_term_has_means_of_its_own() -> None:
    found = run(Case(counts=[RAGGED[0] + RAGGED[1]], two_terms=True), 0)
    assert found["means"] < 1e-14
    assert found["whole"] > 1e-2


def test_micro_batches_with_as_many_items_give_the_big_batch() -> None:
    found = run(Case(counts=[[[2, 4], [3, 3], [5]]]), 0)
    assert max(found["means"], found["whole"]) < 1e-14


def test_a_masked_sum_over_nothing_adds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    batches = [(torch.randn(3, 5), torch.tensor(mask)) for mask in ([1.0, 0.0, 1.0], [0.0, 0.0, 0.0])]
    window = UpdateWindow(
        model, torch.optim.SGD(model.parameters(), lr=0.1), weighting="micro_batch_means", count_samples=len
    )
    record = window.run(
        batches, lambda model, batch: ((model(batch[0])[:, 0] * batch[1]).sum(), batch[1].sum())
    )
    assert record.outcome == "applied"
    assert record.items == 2


def on_ranks(rank: int, _n: int) -> list[dict[str, Any]]:
    counts = [RAGGED, [RAGGED[0], RAGGED[1][:1]], [RAGGED[0], []]]
    return [run(Case(counts=one), rank, DistributedDataParallel) for one in counts]


@pytest.mark.slow
def test_over_replicas_all_micro_batches_are_averaged() -> None:
    for of_rank in run_ranks(on_ranks, 2):
        for found in of_rank:
            assert found["means"] < 1e-14
            assert found["whole"] > 1e-2


def test_another_word_is_refused() -> None:
    model = Case(counts=[]).model()
    with pytest.raises(
        WindowUsageError, match=r"weighting='means' is none of 'items', 'micro_batch_means'"
    ):
        UpdateWindow(model, torch.optim.SGD(model.parameters()), weighting="means")  # type: ignore[arg-type]


def verdict_of(weights: list[int], **named: Any) -> Any:
    torch.manual_seed(0)
    ids = torch.arange(len(weights)).unsqueeze(1)
    batch = {"x": torch.randn(len(weights), 5), "n": torch.tensor(weights), "ids": ids}

    def loss_fn(model: Any, batch: Any) -> Any:
        return (model(batch["x"]).square().mean(1) * batch["n"]).sum(), int(batch["n"].sum())

    return verify_window(nn.Linear(5, 3), loss_fn, batch, splits=[[1, 2, 3]], **named)


def test_verify_says_that_the_means_were_asked_for() -> None:
    ragged = [1, 4, 2, 5, 1, 1]
    assert verdict_of(ragged).equal
    verdict = verdict_of(ragged, weighting="micro_batch_means")
    assert (verdict.equal, verdict.cause) == (False, "micro_batch_means")
    assert "not equal to the big batch, as was asked for" in verdict.advice
    verdict = verdict_of([6, 3, 3, 2, 2, 2], weighting="micro_batch_means")
    assert verdict.equal
    assert "where they differ, the update is not equal to the big batch" in verdict.notes[0]


def shown(folder: Path, **named: Any) -> str:
    with RunLog(folder, a_header()) as log:
        log.write(a_record(1, **named))
    console = Console(file=io.StringIO(), width=100)
    console.print(render_run(read_run(folder)))
    return " ".join(console.file.getvalue().split())


def test_show_labels_such_a_run(tmp_path: Path) -> None:
    assert "Not equal to the big batch" not in shown(tmp_path / "items")
    text = shown(tmp_path / "means", weighting="micro_batch_means")
    assert (
        'Not equal to the big batch: 1 update averaged the means of micro-batches (weighting="micro' in text
    )
