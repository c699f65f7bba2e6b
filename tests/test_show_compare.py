"""``wholebatch show A B``: where two runs differ, before any curve; then one named axis for both."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runs import a_header, a_record, a_resumption, an_evaluation
from wholebatch.errors import RecordError, UsageError
from wholebatch.record import Evaluation, UpdateRecord
from wholebatch.report.compare import AXES, compare_runs
from wholebatch.report.compare_view import render_comparison
from wholebatch.report.curves import points_of, two_curves
from wholebatch.report.show import show
from wholebatch.run_folder import Run, RunLog, read_run

DATA = {"name": "topics", "train_samples": 3147}


def a_run(
    folder: Path,
    records: Sequence[UpdateRecord] | None = None,
    evaluations: Sequence[Evaluation] = (),
    **header: Any,
) -> Run:
    """A run of four updates of 16 samples, unless told otherwise."""
    if records is None:
        records = [a_record(update, loss_per_item=5.0 - update) for update in range(1, 5)]
    with RunLog(folder, a_header(**({"dataset": DATA} | header))) as log:
        for record in records:
            log.write(record)
        for evaluation in evaluations:
            log.write_evaluation(evaluation)
    return read_run(folder)


def a_larger_batch(folder: Path, **changes: Any) -> Run:
    """The same samples in two updates of 32."""
    records = [
        a_record(update, samples=32, items=1800, loss_per_item=4.0 - update, seconds=0.8)
        for update in (1, 2)
    ]
    return a_run(folder, records, **({"global_batch_samples": 32, "micro_batches_per_window": 4} | changes))


def text_of(first: Run, second: Run, width: int = 80, **options: Any) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_comparison(compare_runs(first, second, **options)))
    return console.export_text()


def row(text: str, name: str) -> list[str]:
    found = [line for line in text.splitlines() if line.startswith(name)]
    assert found, f"no line begins with {name!r} in\n{text}"
    return found[0].removeprefix(name).split()


def test_what_differs_comes_before_the_curves(tmp_path: Path) -> None:
    text = text_of(a_run(tmp_path / "a"), a_larger_batch(tmp_path / "b"))
    assert "Updates are not comparable one to one" in text
    assert "Losses are not comparable" not in text
    assert row(text, "global batch, samples") == ["16", "32"]
    assert row(text, "A, micro-batches of a window") == ["2", "4"]
    order = ["global batch, samples", "A, micro-batches", "loss per item   A o", "totals"]
    assert sorted(order, key=text.index) == order
    assert "axis: samples seen (an update is not the same number of samples in both)" in text


def test_equal_runs_have_nothing_to_tell_apart(tmp_path: Path) -> None:
    comparison = compare_runs(a_run(tmp_path / "a"), a_run(tmp_path / "b"))
    assert comparison.differences == []
    assert comparison.one_to_one
    assert comparison.losses_comparable
    text = text_of(comparison.first, comparison.second)
    assert "Nothing in their headers and resumptions differs." in text
    assert "not comparable" not in text


@pytest.mark.parametrize(
    ("changes", "kind", "name"),
    [
        ({"normalisation": "mean of means"}, "losses", "divided by"),
        ({"dataset": {**DATA, "name": "other"}}, "losses", "data: name"),
        ({"model": {"vocab_size": 512}}, "losses", "model: vocab size"),
        ({"settings": {"data": {"tokenizer": "folder"}}}, "losses", "data.tokenizer"),
        ({"global_batch_samples": 32}, "updates", "global batch, samples"),
        ({"tail": "drop"}, "updates", "tail"),
        ({"seeds": {"data": 8}}, "training", "seed: data"),
        ({"model": {"parameters": 5}}, "training", "model: parameters"),
        ({"settings": {"optimizer": {"learning_rate": 0.1}}}, "training", "optimizer.learning_rate"),
        ({"settings": {"optimizer": {"name": "SGD"}}}, "training", "optimizer.name"),
        ({"precision": "bfloat16"}, "split", "precision"),
        ({"micro_batch_samples": 8}, "split", "m, samples of a micro-batch"),
        ({"replicas": 1}, "split", "D, replicas"),
        ({"layout": {"ranks": 4, "tensor_parallel": 1}}, "split", "layout: ranks"),
        ({"versions": {"torch": "1"}}, "split", "version: torch"),
    ],
)
def test_each_difference_is_told_by_what_it_changes(
    tmp_path: Path, changes: dict[str, Any], kind: str, name: str
) -> None:
    comparison = compare_runs(a_run(tmp_path / "a"), a_run(tmp_path / "b", **changes))
    assert (kind, name) in [(d.kind, d.name) for d in comparison.differences]
    assert comparison.losses_comparable is (kind != "losses")
    assert comparison.one_to_one is (kind not in ("losses", "updates"))
    kinds = list(dict.fromkeys(d.kind for d in comparison.differences))
    assert kinds == [kind]


@pytest.mark.parametrize(
    ("changes", "kind", "name", "told"),
    [
        (
            {"weighting": "micro_batch_means"},
            "updates",
            "weighting",
            ("items", "micro_batch_means, not equal to the big batch"),
        ),
        ({"accumulated_in": "bfloat16"}, "split", "added up in", ("float32", "bfloat16")),
    ],
)
def test_what_the_records_alone_tell_is_a_difference(
    tmp_path: Path, changes: dict[str, Any], kind: str, name: str, told: tuple[str, str]
) -> None:
    first, second = ([a_record(1, **{"accumulated_in": "float32", **one})] for one in ({}, changes))
    comparison = compare_runs(a_run(tmp_path / "a", first), a_run(tmp_path / "b", second))
    assert [(d.kind, d.name, (d.first, d.second)) for d in comparison.differences] == [(kind, name, told)]
    assert compare_runs(a_run(tmp_path / "c", first), a_run(tmp_path / "d")).differences == []


def test_a_setting_that_the_plan_tells_is_not_told_again(tmp_path: Path) -> None:
    settings = [
        {"run": {"folder": name}, "batch": {"global_batch_samples": n}} for name, n in (("a", 1), ("b", 2))
    ]
    first, second = (a_run(tmp_path / s["run"]["folder"], settings=s) for s in settings)  # type: ignore[arg-type]
    assert compare_runs(first, second).differences == []


def test_a_setting_that_is_a_fact_of_the_model_or_data_is_told_once(tmp_path: Path) -> None:
    def made(name: str, layers: int, cut: str, heads: int) -> Run:
        settings = {"model": {"layers": layers, "heads": heads}, "data": {"too_long": cut}}
        dataset = {**DATA, "too_long": cut}
        return a_run(tmp_path / name, model={"layers": layers}, dataset=dataset, settings=settings)

    comparison = compare_runs(made("a", 2, "cut", 2), made("b", 3, "truncate", 4))
    assert [d.name for d in comparison.differences] == ["data: too long", "model: layers", "model.heads"]


def test_other_data_makes_losses_incomparable(tmp_path: Path) -> None:
    text = text_of(a_run(tmp_path / "a"), a_run(tmp_path / "b", dataset={"name": "other"}))
    assert "Losses are not comparable" in text


def test_the_same_data_under_another_name_is_no_other_data(tmp_path: Path) -> None:
    counts = {"train_samples": 3147, "train_items": 9000, "held_out_items": 500}
    first = a_run(tmp_path / "a", dataset={"name": "here", **counts})
    second = a_run(tmp_path / "b", dataset={"name": "there", **counts})
    comparison = compare_runs(first, second)
    assert [(d.kind, d.name) for d in comparison.differences] == [("training", "data: name")]
    assert comparison.losses_comparable
    third = a_run(tmp_path / "c", dataset={"name": "there", **counts, "held_out_items": 501})
    assert not compare_runs(first, third).losses_comparable


def with_digests(*digests: str | None) -> list[UpdateRecord]:
    return [a_record(update, sample_digest=digest) for update, digest in enumerate(digests, start=1)]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (with_digests("a", "b", "c"), "the same samples in each of the first 3 updates"),
        (with_digests("a"), "the same samples in the first update"),
        (with_digests("a", "b", "x"), "the same samples up to update 2, others from update 3 on"),
        (with_digests("x", "b", "c"), "other samples from the first update on"),
        (with_digests("a", None, "c"), "not known: the records do not say which samples"),
        ([], "not known: a run has no updates"),
    ],
)
def test_from_where_on_the_samples_are_others(
    tmp_path: Path, second: list[UpdateRecord], words: str
) -> None:
    first = a_run(tmp_path / "a", with_digests("a", "b", "c"))
    text = text_of(first, a_run(tmp_path / "b", second))
    assert f"Global batches: {words}" in " ".join(text.split())


def test_samples_of_other_sizes_of_global_batch_are_not_compared(tmp_path: Path) -> None:
    comparison = compare_runs(a_run(tmp_path / "a"), a_larger_batch(tmp_path / "b"))
    assert comparison.same_samples == "of other sizes, so which samples they hold is not compared"


def test_other_items_of_the_same_samples_are_another_objective(tmp_path: Path) -> None:
    records = with_digests("a", "b")
    changed = [records[0], a_record(2, sample_digest="b", items=700)]
    comparison = compare_runs(a_run(tmp_path / "a", records), a_run(tmp_path / "b", changed))
    assert [(d.name, d.first, d.second) for d in comparison.differences] == [
        ("items of update 2", 900, 700)
    ]
    assert not comparison.losses_comparable


@pytest.mark.parametrize(
    ("by", "ends"),
    [("samples", (64, 64)), ("items", (3600, 3600)), ("updates", (4, 2)), ("seconds", (2.0, 1.6))],
)
def test_every_axis_is_named_and_ends_where_the_runs_do(
    tmp_path: Path, by: str, ends: tuple[float, float]
) -> None:
    first, second = a_run(tmp_path / "a"), a_larger_batch(tmp_path / "b")
    comparison = compare_runs(first, second, by=by)
    assert comparison.axis == by
    assert comparison.ends == pytest.approx(ends)
    assert f"axis: {by} " in text_of(first, second, by=by)
    assert set(AXES) == {"samples", "items", "updates", "seconds"}


def test_samples_of_other_sizes_are_compared_by_items(tmp_path: Path) -> None:
    long = [a_record(update, items=1800) for update in (1, 2)]
    comparison = compare_runs(a_run(tmp_path / "a"), a_run(tmp_path / "b", long))
    assert comparison.axis == "items"
    assert comparison.why == "a sample has 56.2 items in A and 112.5 in B"
    near = [a_record(update, items=950) for update in (1, 2)]
    assert compare_runs(a_run(tmp_path / "c"), a_run(tmp_path / "d", near)).axis == "samples"


def test_both_curves_are_on_one_axis_and_one_scale() -> None:
    """The second run sees twice the samples an update: its two points are where A's 2nd and 4th are."""
    lines = two_curves(
        [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], [(2, 4.0), (4, 1.0)], end=4, columns=5, height=4
    )
    assert lines == [
        "4.000 │ ox",
        "      │  o",
        "      │   o",
        "1.000 │    *",
        "      └─────",
    ]
    assert two_curves([], [], end=0, columns=5, height=4) == []
    assert two_curves([(0, 2.0)], [], end=0, columns=3, height=2)[1] == "2.000 │o"


def test_a_column_is_weighted_by_items() -> None:
    """Items 2 and 6 with losses 1 and 3 make 2.5."""
    records = [a_record(1, items=2, loss_per_item=1.0), a_record(2, items=6, loss_per_item=3.0)]
    records += [a_record(3, loss_per_item=None), a_record(4, loss_per_item=9.0)]
    assert points_of(records[:2], [1, 2], end=4, columns=1) == [(2, 2.5)]
    assert points_of(records, [1, 2, 3, 4], end=4, columns=4) == [(1, 1.0), (2, 3.0), (4, 9.0)]


def test_evaluations_beside_each_other(tmp_path: Path) -> None:
    def at(samples: int, loss: float | None, **changes: Any) -> Evaluation:
        return an_evaluation(samples_consumed=samples, loss_per_item=loss, **changes)

    first = a_run(tmp_path / "a", None, [at(0, 5.5), at(16, 4.0), at(32, 3.0), at(64, 2.0)])
    second = a_larger_batch(tmp_path / "b", evaluations=[at(0, 5.25), at(32, 3.5), at(64, None)])
    text = text_of(first, second)
    assert "evaluations beside each other, by samples seen" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("held_out")]
    assert rows == [
        ["held_out", "0", "0", "5.5000", "5.2500", "-0.2500"],
        ["held_out", "32", "32", "3.0000", "3.5000", "+0.5000"],
        ["held_out", "64", "64", "2.0000", "-", "-"],
    ]
    near = a_run(tmp_path / "near", None, [at(0, 5.5), at(16, 4.0 - 1e-7), at(32, 3.00006)])
    gaps = [line.split()[-1] for line in text_of(first, near).splitlines() if line.startswith("held_out")]
    assert gaps == ["+0.0000", "-1.0e-07", "+0.0001"]
    by_updates = compare_runs(first, second, by="updates").evaluations
    assert [(p.first_at, p.second_at) for p in by_updates] == [(0, 0), (1, 1), (2, 2)]


def test_an_evaluation_is_beside_one_other_the_nearest(tmp_path: Path) -> None:
    records = [a_record(update, samples=1) for update in range(1, 201)]
    near = [an_evaluation(samples_consumed=samples) for samples in (99, 101)]
    first = a_run(tmp_path / "a", records, near)
    second = a_run(tmp_path / "b", records, [an_evaluation(samples_consumed=n) for n in (98, 97, 150)])
    pairs = compare_runs(first, second).evaluations
    assert [(pair.first_at, pair.second_at) for pair in pairs] == [(99, 98), (101, 97)]
    third = a_run(tmp_path / "c", records, near[:1])
    pairs = compare_runs(first, third).evaluations
    assert [(pair.first_at, pair.second_at) for pair in pairs] == [(99, 99)]


def test_evaluations_of_other_splits_or_places_are_not_paired(tmp_path: Path) -> None:
    first = a_run(tmp_path / "a", None, [an_evaluation(samples_consumed=16)])
    second = a_run(tmp_path / "b", None, [an_evaluation(samples_consumed=16, split="other")])
    assert "No evaluation of A is beside one of B in samples seen." in text_of(first, second)
    third = a_run(tmp_path / "c", None, [an_evaluation(samples_consumed=64)])
    assert compare_runs(first, third).evaluations == []
    assert "beside" not in text_of(first, a_run(tmp_path / "d")), "one has no evaluations at all"


def test_totals_and_their_quotients(tmp_path: Path) -> None:
    text = text_of(a_run(tmp_path / "a"), a_larger_batch(tmp_path / "b"))
    assert row(text, "updates applied") == ["4", "2", "0.500"]
    assert row(text, "items ") == ["3,600", "3,600", "1.000"]
    assert row(text, "seconds in updates") == ["2.0", "1.6", "0.800"]
    assert row(text, "items/s") == ["1,800", "2,250", "1.250"]
    assert row(text, "lowest loss per item") == ["1.0000", "2.0000"]


@pytest.mark.parametrize("records", [[], [a_record(1)], [a_record(1, loss_per_item=None)]])
def test_short_and_empty_runs(tmp_path: Path, records: list[UpdateRecord]) -> None:
    short = a_run(tmp_path / "a", records)
    for other in (short, a_run(tmp_path / "b")):
        for by in (None, *AXES):
            text = text_of(short, other, by=by)
            assert "totals" in text
    if not records or records[0].loss_per_item is None:
        assert "No update of either run has a loss to draw." in text_of(short, short)


def test_a_resumed_run_is_said_to_be_one(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    RunLog.resume(tmp_path / "a", a_resumption(3)).close()
    text = text_of(read_run(tmp_path / "a"), a_run(tmp_path / "b"))
    assert "3 updates, done; resumed 1 time" in text
    (tmp_path / "b" / "end.json").unlink()
    text = text_of(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert "4 updates, did not end, or is still going" in text


def test_another_optimizer_is_told_with_both_names(tmp_path: Path) -> None:
    first, second = (
        a_run(tmp_path / name, settings={"optimizer": {"name": name, "options": {}}})
        for name in ("AdamW", "SGD")
    )
    assert row(text_of(first, second), "optimizer.name") == ["AdamW", "SGD"]


def test_what_a_resumption_changed_is_told_with_its_update(tmp_path: Path) -> None:
    settings = {"optimizer": {"learning_rate": 0.1, "options": {"betas": [0.9]}}, "run": {"num_updates": 4}}
    for name in ("a", "b"):
        a_run(tmp_path / name, settings=settings)
    changes = {
        "optimizer.learning_rate": [0.1, 0.01],
        "optimizer.options": [{"betas": [0.9]}, {"eps": 1.0}],
    }
    RunLog.resume(tmp_path / "a", a_resumption(3, changed_settings=changes)).close()
    found = compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b")).differences
    told = {d.name: (d.kind, d.first, d.second) for d in found}
    assert told == {
        "optimizer.learning_rate": ("training", "0.1, 0.01 after update 3", 0.1),
        "optimizer.options.betas": ("training", "[0.9], None after update 3", [0.9]),
        "optimizer.options.eps": ("training", "None, 1.0 after update 3", None),
        "precision": (
            "split",
            f"{a_header().precision}, {a_resumption().precision} after update 3",
            a_header().precision,
        ),
        "m, samples of a micro-batch": ("split", "4, 8 after update 3", 4),
        "A, micro-batches of a window": ("split", "2, 1 after update 3", 2),
        "layout: tensor parallel": ("split", "1, None after update 3", 1),
    }
    RunLog.resume(tmp_path / "b", a_resumption(3, changed_settings=changes)).close()
    both = [read_run(tmp_path / name) for name in ("a", "b")]
    assert compare_runs(*both).differences == []


def test_a_resumption_whose_updates_were_given_up_is_not_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        a_run(tmp_path / name, settings={"optimizer": {"learning_rate": 0.1}})
    same = {"micro_batch_samples": 4, "micro_batches_per_window": 2, "precision": a_header().precision}
    same["layout"] = a_header().layout
    for update, before, after in ((3, 0.1, 0.5), (2, 0.5, 0.1)):
        changes = {"optimizer.learning_rate": [before, after]}
        RunLog.resume(tmp_path / "a", a_resumption(update, changed_settings=changes, **same)).close()
    assert compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b")).differences == []


def test_many_differences_are_cut_on_the_screen_and_whole_in_the_json(tmp_path: Path) -> None:
    settings = {"x": {f"setting_{n}": n for n in range(30)}}
    comparison = compare_runs(a_run(tmp_path / "a"), a_run(tmp_path / "b", settings=settings))
    assert len(comparison.to_dict()["differences"]) == 30
    assert "and 18 more; --json has all" in text_of(comparison.first, comparison.second)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    settings = {"data": {"files": "a/very/long/path/" * 6}}
    huge = [a_record(n, samples=10**9, items=10**12, loss_per_item=1e12 / n) for n in range(1, 200)]
    second = a_run(
        tmp_path / "b", huge, [an_evaluation()] * 3, settings=settings, global_batch_samples=10**9
    )
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_comparison(compare_runs(a_run(Path(tmp_path / "a")), second)))
    for line in console.export_text().splitlines():
        assert len(line.rstrip()) <= width
        assert "…" not in line


def test_show_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "a")
    a_larger_batch(tmp_path / "b")
    assert show([tmp_path / "a", tmp_path / "b"], json_target="-") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert "axis: samples seen" in captured.err
    assert data["schema_version"] == 1
    assert data["axis"]["name"] == "samples"
    assert data["one_to_one"] is False
    assert data["losses_comparable"] is True
    assert {"kind": "updates", "name": "global batch, samples", "first": 16, "second": 32} in data[
        "differences"
    ]
    assert data["curves"][1] == [[32, 3.0], [64, 2.0]]
    assert [run["counters"]["samples"] for run in data["runs"]] == [64, 64]


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        (3, {}, "show takes one run, or two to compare; 3 were given"),
        (2, {"by": "steps"}, "--by 'steps' is no axis; it can be samples, items, updates, seconds"),
        (1, {"by": "items"}, "--by items is the axis of a comparison: give a second run"),
        (2, {"follow_it": True}, "--follow watches one run; two were given"),
    ],
)
def test_options_that_do_not_go_together(runs: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        show([Path("runs/a")] * runs, **options)


def test_one_of_two_that_is_no_run(tmp_path: Path) -> None:
    a_run(tmp_path / "a")
    with pytest.raises(RecordError, match=r"no run in .*none"):
        show([tmp_path / "a", tmp_path / "none"])
