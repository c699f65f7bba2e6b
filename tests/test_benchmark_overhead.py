"""The benchmark measures what it says: it sees a wrong loop, counts what is done, and pairs its times."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ranks import run_ranks

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "overhead.py"
if str(SCRIPT.parent) not in sys.path:
    sys.path.insert(0, str(SCRIPT.parent))

import contestants as loops  # noqa: E402
import counting  # noqa: E402
import overhead  # noqa: E402
import race as races  # noqa: E402
from work import WORKS, batches_of, count_items, new_model, new_optimizer, num_replicas, sum_loss  # noqa: E402

TINY = WORKS["tiny"]


def loop_of(name, loss_of, *, before=lambda: None):
    """A loop like the hand-written one, whose ``loss_of(model, batch, batches)`` may be wrong."""
    model = new_model(TINY)
    optimizer = new_optimizer(model)

    def update(batches):
        before()
        for batch in batches:
            loss_of(model, batch, batches).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return loops.Contestant(name=name, model=model, optimizer=optimizer, run=loops.inside(update))


def loss_sum(model, batch):
    return sum_loss(model(batch["input_ids"]), batch["labels"])


def exact(model, batch, batches):
    return loss_sum(model, batch) / sum(map(count_items, batches))


def mean_of_means(model, batch, batches):
    return loss_sum(model, batch) / count_items(batch) / len(batches)


def divided_twice(model, batch, batches):
    return exact(model, batch, batches) / len(batches)


def counted_unshifted(model, batch, batches):
    return loss_sum(model, batch) / sum((one["labels"] != -100).sum() for one in batches)


def unshifted(model, batch, batches):
    logits = model(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / sum(
        map(count_items, batches)
    )


def test_a_wrong_loop_is_told_from_a_right_one():
    wrong = [
        loop_of("mean of means", mean_of_means),
        loop_of("divided twice", divided_twice),
        loop_of("labels counted unshifted", counted_unshifted),
        loop_of("labels not shifted", unshifted),
    ]
    right = [
        loops.hand(TINY),
        loop_of("right", exact),
        loops.wholebatch_run(TINY),
        loops.wholebatch_loop(TINY),
    ]
    results = races.race(TINY, [*right, *wrong], rounds=3)
    assert [one.name for one in results if one.same_update] == [one.name for one in right]
    for one in results[:4]:
        assert one.gradient_difference < 1e-6
    for one in results[4:]:
        assert one.gradient_difference > 1000 * races.ROUNDING_MARGIN * one.gradient_rounding
        assert one.parameter_difference > 10 * races.ROUNDING_MARGIN * one.parameter_rounding


def test_a_loop_that_goes_wrong_after_its_first_update_is_seen_at_the_end():
    done = []

    def later_wrong(model, batch, batches):
        done.append(1)
        update = (len(done) - 1) // TINY.micro_batches_per_window
        return (mean_of_means if 0 < update < 6 else exact)(model, batch, batches)

    result = races.race(TINY, [loops.hand(TINY), loop_of("later", later_wrong)], rounds=2)[1]
    assert len(done) == 7 * TINY.micro_batches_per_window  # the first, 2 to warm up, counted, 2 timed, last
    assert result.parameter_difference > 10 * races.ROUNDING_MARGIN * result.parameter_rounding
    assert not result.same_update


def test_the_gradient_compared_is_the_one_that_is_stepped_on():
    """A fused optimizer that is told to divide as it reads, by the window or by anybody, is understood."""
    model = new_model(TINY)
    optimizer = new_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 6.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(0.0)
    gradients = races._Gradients(optimizer)
    gradients.listen()
    optimizer.step()
    optimizer.step()  # not listened to
    assert gradients.together().unique().tolist() == [2.0]
    assert len(gradients.together()) == sum(p.numel() for p in model.parameters())


def test_a_loop_that_does_not_clip_is_seen():
    """Some gradients of the small model are long enough to be clipped."""
    small = WORKS["small"]
    model = new_model(small)
    optimizer = new_optimizer(model)

    def update(batches):
        for batch in batches:
            exact(model, batch, batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    unclipped = loops.Contestant(name="a", model=model, optimizer=optimizer, run=loops.inside(update))
    result = races.race(small, [loops.hand(small), unclipped], rounds=1)[1]
    assert result.gradient_difference > 0.1
    assert not result.same_update


def test_micro_batches_have_unequal_items_and_are_the_same_every_time():
    items = [int(count_items(batch)) for batch in batches_of(TINY, 5)]
    assert len(set(items)) > 3
    assert items == [int(count_items(batch)) for batch in batches_of(TINY, 5)]
    assert items != [int(count_items(batch)) for batch in batches_of(TINY, 6)]


def test_a_slow_loop_has_a_larger_ratio():
    slow = loop_of("slow", exact, before=lambda: time.sleep(0.05))
    hand, late = races.race(TINY, [loops.hand(TINY), slow], rounds=4)
    assert hand.ratios == (1.0,) * 4
    assert late.quartiles[0] > 1.5


def test_processor_time_does_not_see_sleep():
    slow = loop_of("slow", exact, before=lambda: time.sleep(0.2))
    result = races.race(TINY, [loops.hand(TINY), slow], rounds=2, clock="cpu")[1]
    assert result.typical_seconds < 0.2


def test_the_first_of_several_updates_in_a_row_is_not_timed():
    done = itertools.count()

    def first_of_a_turn():
        before_the_turns = 4  # one whose gradients are taken down, 2 to warm up, one that is counted
        if (next(done) - before_the_turns) % 3 == 0:
            time.sleep(0.1)

    slow_at_first = loop_of("slow at first", exact, before=first_of_a_turn)
    hand, result = races.race(TINY, [loops.hand(TINY), slow_at_first], rounds=3, in_a_row=3)
    assert next(done) == 4 + 3 * 3 + 1
    assert result.quartiles[2] < 1 + 0.1 / hand.typical_seconds / 2 / 2
    assert result.parameter_difference < 1e-6


def result_of(*ratios, gradient_difference=4e-7, parameter_difference=3e-7):
    return races.Result(
        name="a",
        ratios=ratios,
        typical_seconds=1.0,
        gradient_difference=gradient_difference,
        gradient_rounding=1e-7,
        parameter_difference=parameter_difference,
        parameter_rounding=1e-7,
        counts=(),
    )


def test_quartiles_are_those_of_the_ratios():
    assert result_of(5.0, 1.0, 2.0, 4.0, 3.0).quartiles == (2.0, 3.0, 4.0)
    assert result_of(1.5).quartiles == (1.5, 1.5, 1.5)


def test_both_differences_must_be_those_of_rounding():
    assert result_of(1.0).same_update
    assert not result_of(1.0, gradient_difference=4.1e-7).same_update
    assert not result_of(1.0, parameter_difference=4.1e-7).same_update
    assert overhead._verdict(result_of(1.0, parameter_difference=2e-3)) == "NO (2e-03)"


# What is counted ------------------------------------------------------------------------------------


def counts_of(work_on, model=None):
    """What an ``UpdateCounter`` counts while ``work_on(model, optimizer)`` runs."""
    model = new_model(TINY) if model is None else model
    optimizer = new_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with counting.UpdateCounter(model, optimizer) as counter:
        work_on(model, optimizer)
    return counter.counts


def written_together(loss):
    """A tensor that an operation writes without returning it."""
    target = torch.zeros(())
    torch._foreach_add_([target], [loss])
    return target


READS = {
    # what is read of a loss and a number of labels: reads of computed values, other reads
    "item": (lambda loss, _: loss.item(), 1, 0),
    "twice": (lambda loss, _: float(loss) + bool(loss > 0), 2, 0),
    "in a row": (lambda loss, _: [loss.item(), loss.view(1).detach().item(), loss.tolist()], 1, 0),
    "with work between": (lambda loss, _: [loss.item(), loss.sigmoid().item()], 2, 0),
    "in turn": (lambda loss, labels: [loss.item(), labels.item(), loss.item(), labels.item()], 1, 1),
    "list": (lambda loss, _: torch.stack([loss, loss]).tolist(), 1, 0),
    "copied": (lambda loss, _: loss.cpu().numpy().tolist(), 1, 1),
    "divided": (lambda loss, labels: (loss / labels).item(), 1, 0),
    "labels": (lambda _, labels: labels.item(), 0, 1),
    "written": (lambda loss, _: torch.zeros(3).add_(loss).nonzero(), 1, 0),
    "written together": (lambda loss, _: written_together(loss).tolist(), 1, 0),
    "nothing": (lambda loss, labels: loss + labels, 0, 0),
}


@pytest.mark.parametrize("name", READS)
def test_reads_of_computed_values_are_counted(name):
    read, device_reads, count_reads = READS[name]
    batch = batches_of(TINY, 0)[0]
    counts = counts_of(lambda model, _: read(loss_sum(model, batch).detach(), count_items(batch)))
    assert (counts.device_reads, counts.count_reads) == (device_reads, count_reads)


def test_a_new_tensor_in_the_memory_of_a_computed_one_is_not_computed():
    batch = batches_of(TINY, 0)[0]

    def work_on(model, _):
        for _ in range(20):
            loss = loss_sum(model, batch).detach()
            del loss
            torch.tensor([1.0]).tolist()

    assert counts_of(work_on).device_reads == 0


def test_passes_over_the_gradient_are_counted():
    def both(model, optimizer):
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def one_by_one(model, _):
        clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    assert counts_of(both).gradient_passes == 3.0  # norm, scaling, step
    assert counts_of(one_by_one).gradient_passes == 2.0
    assert counts_of(lambda _, optimizer: optimizer.step()).gradient_passes == 1.0
    assert counts_of(lambda model, _: [p.grad.view(-1) for p in model.parameters()]).gradient_passes == 0.0


def test_adding_up_gradients_in_a_backward_is_no_pass_of_the_finish():
    batch = batches_of(TINY, 0)[0]
    assert counts_of(lambda model, _: loss_sum(model, batch).backward()).gradient_passes == 0.0


def one_update(contestant):
    contestant.run(batches_of(TINY, 0), nullcontext())  # Adam makes its state
    counter = counting.UpdateCounter(contestant.model, contestant.optimizer)
    contestant.run(batches_of(TINY, 1), counter)
    return counter.counts


def test_the_window_reads_the_gradient_twice_and_the_device_once():
    assert one_update(loops.hand(TINY)).gradient_passes == 3.0
    for contestant in (loops.wholebatch_run(TINY), loops.wholebatch_loop(TINY)):
        counts = one_update(contestant)
        assert counts.gradient_passes == 2.0
        assert counts.device_reads == 1


def reduces_every_time():
    bare = new_model(TINY)
    model, optimizer = DistributedDataParallel(bare), new_optimizer(bare)

    def update(batches):
        for batch in batches:
            (loss_sum(model, batch) * num_replicas() / loops.num_items(batches)).backward()
        clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return loops.Contestant(name="eager", model=bare, optimizer=optimizer, run=loops.inside(update))


def race_on_ranks(*_):
    found = races.race(TINY, [loops.hand(TINY), loops.wholebatch_run(TINY), reduces_every_time()], rounds=2)
    return [one.to_dict() for one in found], [one.counts for one in found]


@pytest.mark.slow
def test_reductions_are_counted_on_every_rank():
    for results, counts in run_ranks(race_on_ranks, 2, timeout_s=100.0):
        assert [one["same_update"] for one in results] == [True, True, True]
        for hand, window, eager in zip(*counts, strict=True):
            assert (hand.gradient_reductions, hand.bytes_over_minimum) == (1.0, 1.0)
            assert (hand.other_collectives, hand.other_bytes) == (1, 8)
            assert (window.gradient_reductions, window.bytes_over_minimum) == (1.0, 1.0)
            assert window.other_collectives == 2
            assert window.other_bytes < 1000
            assert (eager.gradient_reductions, eager.bytes_over_minimum) == (8.0, 8.0)
            assert (eager.other_collectives, eager.other_bytes) == (8, 64)


# Memory ---------------------------------------------------------------------------------------------


def test_peak_memory_is_exact():
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters())

    def update():
        first, second = torch.zeros(1000), torch.zeros(500)
        del first
        third = torch.zeros(900)
        del second, third

    assert counting.peak_tensor_bytes(model, optimizer, update) == 400 + 4000 + 2000


@pytest.mark.slow
def test_memory_that_grows_with_the_window_is_seen():
    model = new_model(TINY)
    optimizer = new_optimizer(model)

    def update(batches):
        torch.stack([exact(model, batch, batches) for batch in batches]).sum().backward()
        optimizer.zero_grad()

    grows = loops.Contestant(name="grows", model=model, optimizer=optimizer, run=loops.inside(update))
    assert races.memory_growth(TINY, grows).ratio > 2.0
    for contestant in (loops.hand(TINY), loops.wholebatch_run(TINY)):
        assert 1.0 <= races.memory_growth(TINY, contestant).ratio <= 1.01


# The script -----------------------------------------------------------------------------------------


def test_the_script_from_end_to_end(tmp_path, capsys):
    file = tmp_path / "measured.json"
    arguments = [
        "--model",
        "tiny",
        "--rounds",
        "2",
        "--without-peers",
        "--without-memory",
        "--json",
        str(file),
    ]
    assert overhead.main(arguments) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "tiny: width 16, 1 layers, 12 tokens, m=2, A=8, D=1; 2 rounds, wall time, about" in shown
    for words in ("Wholebatch, run", "time", "quartiles", "same update"):
        assert words in shown
    measured = json.loads(file.read_text())
    assert measured["versions"]["torch"] == torch.__version__
    (run,) = measured["measured"]
    assert [result["same_update"] for result in run["results"]] == [True] * 4
    assert len(run["results"][2]["ratios"]) == run["rounds"] == 2


def test_a_table_says_which_loop_computes_another_update():
    contestants = [loops.hand(TINY), loop_of("wrong", mean_of_means)]
    results = races.race(TINY, contestants, rounds=1)
    verdicts = [overhead._verdict(result) for result in results]
    assert verdicts[0] == "yes (0e+00)"
    assert verdicts[1].startswith("NO (")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "0"], "--ranks 0: give 1 or more processes"),
        (["--rounds", "0"], "--rounds 0: give 1 or more"),
        (["--model", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        overhead.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def needs(*packages):
    """Skip where a peer is not installed; importing it here would change this process's environment."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_peers_take_part_and_compute_the_same_update(ranks, tmp_path):
    """Also shows that Accelerate and the Trainer do not change each other's settings, which they share."""
    needs("accelerate", "lightning", "transformers")
    file = tmp_path / "measured.json"
    arguments = ["--model", "tiny", "--rounds", "3", "--ranks", str(ranks), "--json", str(file)]
    done = run_script(str(SCRIPT), *arguments)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(file.read_text())["measured"]
    assert run["ranks"] == ranks
    named = {result["name"]: result for result in run["results"]}
    assert list(named)[4:] == [
        "Accelerate, accumulate",
        "Accelerate, no_sync",
        "Lightning Fabric",
        "Transformers Trainer",
    ]
    for name, result in named.items():
        assert result["same_update"], name
        assert len(result["counts"]) == ranks
        for counts in result["counts"]:
            assert counts["gradient_reductions"] == (0.0 if ranks == 1 else 1.0), name
    assert named["Transformers Trainer"]["counts"][0]["device_reads"] >= 2 * TINY.micro_batches_per_window
    assert [1.0 <= growth["ratio"] <= 1.01 for growth in run["memory"]] == (
        [True] * 2 if ranks == 1 else []
    )
    assert ("A=64 / A=4" in done.stdout) == (ranks == 1)
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert done.stderr == ""


@pytest.mark.slow
def test_an_error_on_the_trainers_thread_ends_the_turn(tmp_path):
    needs("accelerate", "transformers")
    file = Path(tmp_path) / "turn.py"
    file.write_text(
        "import torch\n"
        "from contextlib import nullcontext\n"
        "from contestants import trainer\n"
        "from work import WORKS, batches_of\n"
        "one = trainer(WORKS['tiny'])\n"
        "one.run(batches_of(WORKS['tiny'], 0), nullcontext())\n"
        "ids = torch.zeros(2, 99).long()  # longer than the model's positions\n"
        "broken = [{'input_ids': ids, 'labels': ids}] * 8\n"
        "try:\n"
        "    one.run(broken[:3], nullcontext())\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "try:\n"
        "    one.run(broken, nullcontext())\n"
        "except ValueError as error:\n"
        "    print('raised here')\n"
    )
    code = f"import sys, runpy; sys.path.insert(0, {str(SCRIPT.parent)!r}); runpy.run_path({str(file)!r})"
    done = run_script("-c", code)
    refusal = "the Trainer was set to 8 micro-batches an update and cannot run one of 3"
    assert done.stdout.splitlines() == [refusal, "raised here"], done.stderr
