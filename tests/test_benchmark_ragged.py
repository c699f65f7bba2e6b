"""The benchmark of ragged samples measures what it says, and a loop that loses samples can't look fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "ragged.py"
if str(SCRIPT.parent) not in sys.path:
    sys.path.insert(0, str(SCRIPT.parent))

import contestants as loops  # noqa: E402
import counting  # noqa: E402
import ragged  # noqa: E402
import ragged_contestants as entries  # noqa: E402
from race import Result, race  # noqa: E402
from work import count_items, sum_loss  # noqa: E402

SMALL = ["--global-batch", "16", "--width", "16", "--layers", "1", "--rounds", "2"]
OURS = ["Wholebatch, padded", "Wholebatch, packed"]


@pytest.fixture(scope="module")
def source():
    return entries.ragged(capped=True, global_batch_samples=16, width=16, layers=1)


def measured(source, *found):
    """Rows of the plain loop and of others, as the script makes them."""
    first = entries.plain(source)[0]
    everybody = [first, *found]
    results = race(
        source.work,
        [one.loop for one in everybody],
        rounds=1,
        given=source.global_batch,
        twin=entries.twin(source),
        warm_rounds=1,
        observer=ragged.peak_memory,
    )
    return [
        ragged.row_of(one, result, first, results[0])
        for one, result in zip(everybody, results, strict=True)
    ]


def test_the_script_from_end_to_end(tmp_path, capsys):
    file = tmp_path / "ragged.json"
    assert ragged.main([*SMALL, "--without-peers", "--clock", "cpu", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["settings"]["tokens_per_micro_batch"] == 2048
    rows = {row["name"]: row for row in written["rows"]}
    assert list(rows) == ["plain PyTorch", "the same again", "sorted within the global batch", *OURS]
    assert all(row["same_update"] and len(row["speeds"]) == 2 for row in rows.values())
    assert rows["plain PyTorch"]["speeds"] == [1.0, 1.0]
    assert rows["the same again"]["padding_share"] == rows["plain PyTorch"]["padding_share"] > 0.5
    assert rows["sorted within the global batch"]["padding_share"] < 0.5
    assert (
        rows["Wholebatch, padded"]["padding_share"]
        < rows["sorted within the global batch"]["padding_share"]
    )
    assert rows["Wholebatch, packed"]["padding_share"] == 0.0
    shown = capsys.readouterr().out
    assert all(name in shown for name in rows)
    assert "2048 tokens a micro-batch where a budget cuts" in shown
    assert max(map(len, shown.splitlines()[2:])) <= 100


def test_every_cut_takes_each_sample_once(source):
    ids = source.global_batch(source.work, 3)
    assert len(set(ids)) == 16
    for cut in (entries.in_turn, entries.sorted_by_length(source)):
        micro_batches = cut(ids)
        assert [len(chosen) for chosen in micro_batches] == [8, 8]
        assert sorted(chain(*micro_batches)) == sorted(ids)
    lengths = [source.lengths[chosen] for chosen in entries.sorted_by_length(source)(ids)]
    assert lengths[0].min() >= lengths[1].max()


def test_global_batches_go_on_over_the_end_of_an_epoch(source):
    updates = source.order.updates_per_epoch
    assert source.global_batch(source.work, updates) == source.order.global_batch(16 * updates)
    assert source.global_batch(source.work, updates) != source.global_batch(source.work, 0)


def test_capped_and_uncapped_lengths(source):
    assert source.lengths.max() == 512
    uncapped = entries.ragged(capped=False, global_batch_samples=16, width=16, layers=1)
    assert len(uncapped.lengths) == len(source.lengths)
    assert uncapped.lengths.max() > 4096
    assert np.minimum(uncapped.lengths, 512).tolist() == source.lengths.tolist()


def test_what_is_seen_is_what_was_computed(source):
    one = entries.plain(source)[0]
    ids = source.global_batch(source.work, 0)
    one.loop.run(ids, nullcontext())
    expected = sum(8 * source.lengths[chosen].max() for chosen in entries.in_turn(ids))
    assert one.seen.positions == [expected]
    assert one.seen.tokens == [source.lengths[ids].sum()]
    assert one.seen.samples == [16]


def test_a_loop_that_loses_samples_is_caught(source):
    with pytest.raises(AssertionError, match=r"loses samples saw .* tokens"):
        measured(
            source,
            entries.cut_first(loops.hand(source.work), source, lambda ids: [ids[:8]], "loses samples"),
        )


def test_a_loop_that_averages_means_is_told_from_a_right_one(source):
    hand = loops.hand(source.work, "mean of means")

    def update(batches):
        for batch in batches:
            loss = sum_loss(hand.model(batch["input_ids"]), batch["labels"])
            (loss / count_items(batch) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(hand.model.parameters(), 1.0)
        hand.optimizer.step()
        hand.optimizer.zero_grad()

    wrong = entries.cut_first(replace(hand, run=loops.inside(update)), source, entries.in_turn)
    right = entries.cut_first(loops.hand(source.work), source, entries.sorted_by_length(source))
    _, wrong_row, right_row = measured(source, wrong, right)
    assert not wrong_row.same_update
    assert right_row.same_update
    assert wrong_row.difference > 1000 * right_row.difference


def test_speed_is_in_items_where_the_samples_are_others(source):
    """Half of the items in half of the time is no faster."""
    first = entries.plain(source)[0]
    half = entries.RaggedContestant(loop=first.loop, seen=entries.Seen(first.loop.model, 0))
    half = replace(half, keeps_global_batch=False)
    for one, samples in ((first, 16), (half, 8)):
        one.seen.samples[:] = [samples] * 5
        one.seen.tokens[:] = [100 * samples] * 5
        one.seen.positions[:] = [200 * samples] * 5
    result = Result(
        name="half",
        ratios=(0.5, 0.25),
        typical_seconds=1.0,
        gradient_difference=0.0,
        gradient_rounding=0.0,
        parameter_difference=0.0,
        parameter_rounding=0.0,
        counts=(50, 30),
    )
    row = ragged.row_of(half, result, first, replace(result, counts=(100,)))
    assert row.speeds == (1.0, 2.0)
    assert row.padding_share == 0.5
    assert row.peak_memory == 0.5


def test_peak_memory_follows_the_largest_micro_batch(source):
    singly = entries.cut_first(loops.hand(source.work), source, lambda ids: [[index] for index in ids])
    row = measured(source, singly)[1]
    assert row.peak_memory < 0.3


def test_peak_memory_is_seen_on_the_thread_that_enters_it():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    peak = counting.PeakTensorBytes(model, optimizer)

    def work():
        with peak:
            torch.ones(1000)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert peak.counts == 4 * (16 + 4 + 1000)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--global-batch", "20"],
            "--global-batch 20: fixed micro-batches need a multiple of 8 samples x 1",
        ),
        (["--global-batch", "8", "--ranks", "2"], "8 samples x 2 ranks = 16"),
        (["--heads", "3"], "--heads 3 does not divide --width 128"),
        (["--rounds", "0"], "--rounds 0: give 1 or more"),
        (["--capped", "--uncapped"], "not allowed with"),
        (["--tokens-per-micro-batch", "100"], "--tokens-per-micro-batch 100: give at least 512"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        ragged.main(arguments)
    assert complaint in capsys.readouterr().err.replace("\n", " ")


def needs(*packages):
    """Skip where a peer is not installed; importing it here would change this process's environment."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_peers_take_part(ranks, tmp_path):
    needs("accelerate", "lightning", "transformers")
    file = tmp_path / "ragged.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--ranks", str(ranks), "--json", str(file)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    peers = ["Accelerate", "Lightning Fabric"]
    peers += [f"Trainer, {name}" for name in ("sequential", "batch_rebalance", "group_by_length")]
    assert list(rows)[3:] == [*peers, *OURS]
    others = [name for name, row in rows.items() if not row["keeps_global_batch"]]
    assert others == ["Trainer, group_by_length"]
    for name, row in rows.items():
        assert row["same_update"] == (name not in others), name
        assert row["rounding"] > 0.0
    assert (
        rows["Trainer, sequential"]["padding_share"] == rows["plain PyTorch"]["padding_share"] or ranks > 1
    )


def test_the_table_says_whose_samples_are_others():
    row = ragged.Row(
        name="one",
        speeds=(1.0, 2.0, 3.0),
        padding_share=0.25,
        peak_memory=0.5,
        keeps_global_batch=True,
        same_update=False,
        difference=1e-3,
        rounding=1e-6,
    )
    console_table = ragged.table_of([row, replace(row, keeps_global_batch=False)])
    cells = [list(column.cells) for column in console_table.columns]
    assert [column[0] for column in cells] == ["one", "2.00", "1.50-2.50", "25%", "0.50", "NO (1e-03)"]
    assert cells[-1][1] == "other samples"
