"""``wholebatch verify``: exit codes, JSON, words, and the examples, each with its outcome."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from wholebatch.cli import main
from wholebatch.report import verdict
from wholebatch.verify import verify_window

EXAMPLES = Path(__file__).parents[1] / "examples"
OUTCOMES = {
    "equal": None,
    "dropout": "dropout",
    "batch_norm": "batch_norm",
    "buffers": "buffers",
    "coupled_samples": "coupled_samples",
    "mean_for_sum": "mean_for_sum",
    "sum_for_mean": "sum_for_mean",
    "wrong_count": "wrong_count",
    "low_precision": "low_precision",
}
PROMISED = {"schema_version", "equal", "cause", "factor", "worst", "splits", "rounding", "ranks"}

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = main(["verify", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_every_example_has_an_outcome() -> None:
    assert {path.stem.removeprefix("verify_") for path in EXAMPLES.glob("verify_*.py")} == set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_examples_have_the_outcome_that_they_name(name: str, capsys: Capture) -> None:
    code, out, err = run(capsys, f"{EXAMPLES / f'verify_{name}.py'}:problem", "--json", "-")
    told = json.loads(out)
    assert code == (0 if name == "equal" else 1)
    assert (told["cause"], told["equal"]) == (OUTCOMES[name], name == "equal")
    assert set(told) >= PROMISED
    assert set(told["worst"]) == {"parameter", "quantity", "error", "bound"}
    assert ("equal: the split update" in err) == (name == "equal")
    assert (told["advice"] in err) == (name != "equal")
    assert err.lower().count("the split update is the big batch's") == (name == "equal")


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_examples_assert_what_they_claim(name: str, capsys: Capture) -> None:
    runpy.run_path(str(EXAMPLES / f"verify_{name}.py"), run_name="__main__")
    assert f"cause: {OUTCOMES[name]}" in capsys.readouterr().out


MODULE = """
import sys
import torch
import torch.nn.functional as F
from collections import namedtuple

torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
batch = (torch.randn(6, 5), torch.randint(0, 3, (6,)))

def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])

def problem():
    return model, loss_fn, batch

def broken():
    return model, mean, batch

def rich_tuple():
    return model, loss_fn, batch, {"splits": [[2, 4]], "clip_grad_norm": 0.1}

def means():
    return model, loss_fn, batch, {"splits": [[2, 4]], "weighting": "micro_batch_means"}

def as_dict():
    return {"model": model, "loss_fn": loss_fn, "batch": [(x, y) for x, y in zip(*batch)],
            "collate": lambda samples: tuple(map(torch.stack, zip(*samples))),
            "make_optimizer": lambda parameters: torch.optim.AdamW(parameters), "seed": 3}

ready = namedtuple("ready", "model loss_fn batch")(model, loss_fn, batch)
one_sample = lambda: (model, loss_fn, (batch[0][:1], batch[1][:1]))
three = lambda: (model, loss_fn, batch, 3)
nothing = lambda: None
unknown = lambda: {"model": model, "loss_fn": loss_fn, "batch": batch, "optimizer": 1}
missing = lambda: {"model": model}

def unseeded():
    model = torch.nn.Linear(5, 3)
    print("drawn", model.weight.sum().item())
    return model, loss_fn, batch

def fails():
    raise ValueError("no data on this machine")

def leaves():
    sys.exit(0)

def leaving_loss():
    return model, lambda model, batch: sys.exit(0), batch

def not_equal_on_two_ranks():
    return model, mean, batch
"""


DEEP = """
import torch

model = torch.nn.Linear(2, 2)

def loss_fn(model, batch):
    return model(batch["x"]).sum() + batch["labelz"], 1

def loss_key():
    return model, loss_fn, {"x": torch.ones(4, 2)}

def bad_optimizer():
    good = lambda model, x: (model(x).sum(), len(x))
    return model, good, torch.ones(4, 2), {"make_optimizer": lambda ps: torch.optim.SGD(ps, lr=-1.0)}

def stack(samples):
    return torch.stack(samples)

def bad_collate():
    return model, loss_fn, [1, 2, 3, 4], {"collate": stack}

def listed():
    return model, loss_fn, [{"x": torch.ones(2)}] * 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "their_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import not_there_at_all\n")
    (tmp_path / "leaving_module.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "helper_of_theirs.py").write_text("from their_module import problem\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.py").write_text(DEEP)
    (tmp_path / "garbled.py").write_text("import torch\nmodel = torch.nn.Linear(\n")
    (tmp_path / "sub" / "json.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    for name in ("their_module", "helper_of_theirs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("their_module:problem", 0),
        ("their_module.py:problem", 0),
        ("helper_of_theirs.py:problem", 0),
        ("their_module:rich_tuple", 0),
        ("their_module:as_dict", 0),
        ("their_module:ready", 0),
        ("their_module:broken", 1),
        ("their_module:means", 1),
    ],
)
def test_targets_and_exit_codes(target: str, code: int, capsys: Capture) -> None:
    assert run(capsys, target)[0] == code


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("their_module:nix", 2, "their_module has no 'nix'; it has loss_fn, mean, problem, broken"),
        ("not_a_module:problem", 2, "there is no module 'not_a_module' here"),
        ("no.such.package:problem", 2, "there is no module 'no.such.package' here"),
        ("nowhere.py:problem", 2, "there is no file nowhere.py"),
        ("their_module", 2, "'their_module' does not name a problem; write module:name or file.py:name"),
        ("their_module:one_sample", 3, "a batch of 1 sample can't be split"),
        ("their_module:three", 3, "the fourth part that their_module:three returned is of type int"),
        ("their_module:nothing", 3, "their_module:nothing returned a NoneType; it has to return"),
        ("their_module:unknown", 3, "returned missing [] and unknown ['optimizer']"),
        ("their_module:missing", 3, "returned missing ['loss_fn', 'batch'] and unknown []"),
        (
            "their_module:fails",
            3,
            "failed with ValueError: no data on this machine, at their_module.py:47, in fails",
        ),
        ("their_module:leaves", 3, "their_module:leaves() failed with sys.exit(0), at their_module.py"),
        ("their_module:leaving_loss", 3, "failed on the whole batch with sys.exit(0), at their_module.py"),
        ("leaving_module:problem", 3, "importing leaving_module failed with sys.exit(), at"),
        ("leaving_module.py:problem", 3, "importing leaving_module.py failed with sys.exit()"),
        ("leaving_module.below:problem", 3, "importing leaving_module.below failed with sys.exit()"),
        ("broken_module:problem", 3, "named 'not_there_at_all', at broken_module.py:1\n"),
        ("broken_module.py:problem", 3, "importing broken_module.py failed with ModuleNotFoundError"),
        (
            "garbled.py:problem",
            3,
            "failed with SyntaxError: '(' was never closed (garbled.py, line 2), at garbled.py:2",
        ),
        (
            "sub/deep.py:loss_key",
            3,
            "on the whole batch with KeyError: 'labelz', at sub/deep.py:7, in loss_fn",
        ),
        ("sub/deep.py:bad_optimizer", 3, "at sub/deep.py:14, in <lambda>"),
        ("sub/deep.py:bad_collate", 3, "collate failed on all 4 samples with TypeError"),
        ("sub/deep.py:bad_collate", 3, "at sub/deep.py:17, in stack"),
        ("sub/deep.py:listed", 3, "the batch is a list of samples; give collate"),
    ],
)
def test_mistakes_get_a_message_and_no_traceback(
    target: str, code: int, message: str, capsys: Capture
) -> None:
    found, out, err = run(capsys, target)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("folder")
def test_splits_given_on_the_command_line(capsys: Capture) -> None:
    code, out, _ = run(capsys, "their_module:rich_tuple", "--splits", "1+5,3+3,2+2+2", "--json", "-")
    sizes = [split["micro_batch_samples"] for split in json.loads(out)["splits"]]
    assert (code, sizes) == (0, [[1, 5], [3, 3], [2, 2, 2]])
    code, _, err = run(capsys, "their_module:problem", "--splits", "2x3")
    assert code == 2
    assert "--splits '2x3' is not a list of micro-batch sizes" in err
    code, _, err = run(capsys, "their_module:problem", "--splits", "2+2")
    assert code == 2
    assert "micro-batches of [2, 2] samples do not make the batch of 6" in err
    code, _, err = run(capsys, "their_module:problem", "--ranks", "0")
    assert code == 2
    assert "--ranks 0 is not a number of processes" in err


def test_a_file_named_like_a_module_takes_no_place(folder: Path, capsys: Capture) -> None:
    assert run(capsys, f"{folder / 'sub' / 'json.py'}:problem")[0] == 0
    assert sys.modules["json"] is json
    assert str(folder / "sub") not in sys.path


def test_a_problem_that_seeds_nothing_is_built_alike_every_time(folder: Path, capsys: Capture) -> None:
    """So that several ranks, each of which builds it, have the same model."""
    del folder
    run(capsys, "their_module:problem")  # importing the module draws numbers of its own
    drawn = [run(capsys, "their_module:unseeded", "--seed", seed)[1].split("\n")[0] for seed in "001"]
    assert drawn[0].startswith("drawn")
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_command_lines_seed_and_splits_win_over_the_problems(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    del folder
    given: list[dict[str, Any]] = []

    def noted(*_: Any, **options: Any) -> Any:
        given.append(options)
        return verify_window(*_, **options)

    monkeypatch.setattr(verdict, "verify_window", noted)
    run(capsys, "their_module:as_dict")
    run(capsys, "their_module:as_dict", "--seed", "5")
    run(capsys, "their_module:rich_tuple", "--splits", "3+3")
    assert [options.get("seed") for options in given] == [3, 5, None]
    assert given[2]["splits"] == [[3, 3]]
    code, out, err = run(capsys, "their_module:problem", "--seed", str(2**63))
    assert (code, out) == (2, "")
    assert "error: seed=9223372036854775808 is no whole number from -2**63 to 2**63 - 1" in err


def test_what_the_users_code_prints_is_not_among_the_json(folder: Path, capsys: Capture) -> None:
    (folder / "talks.py").write_text(
        MODULE.replace("def problem", "print('imported')\ndef problem").replace(
            "    return F.cross_entropy(model(batch[0]), batch[1], r",
            "    print('loss'); return F.cross_entropy(model(batch[0]), batch[1], r",
        )
    )
    code, out, err = run(capsys, "talks.py:unseeded", "--json", "-")
    assert (code, json.loads(out)["equal"]) == (0, True)
    assert all(word in err for word in ("imported", "drawn", "loss"))
    (folder / "talks_too.py").write_text((folder / "talks.py").read_text())
    _, out, err = run(capsys, "talks_too.py:unseeded")
    assert all(word in out for word in ("imported", "drawn", "loss"))
    assert "drawn" not in err


def test_json_to_a_file_leaves_the_words_on_stdout(folder: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "their_module:broken", "--json", "verdict.json")
    told = json.loads((folder / "verdict.json").read_text())
    assert (code, told["cause"], told["factor"]) == (1, "mean_for_sum", pytest.approx(6.0))
    assert "not equal: mean_for_sum, the gradient is 6 times the big batch's" in out
    assert "1+1+1+1+1+1" in out


def rendered(told: dict[str, Any]) -> str:
    console = Console(width=140, record=True, file=sys.stderr)
    verdict.render(told, "module:[name]", console)
    return console.export_text()


def test_the_words_hold_the_facts(folder: Path) -> None:
    del folder
    told = verdict.judge("their_module:problem", splits=[[1] * 6, [2, 4]], seed=0)
    text = rendered(told)
    for fact in ("module:[name]: equal", "6 samples, 6 items of loss; 1 rank; judged in float64", "2+4"):
        assert fact in text
    assert "rounding in float32 over 1+1+1+1+1+1: within what is allowed; " in text
    refused = {**told["splits"][0], "micro_batch_samples": [1] * 9, "worst": None, "refused": "[counts]"}
    noisy = told | {
        "equal": False,
        "cause": "dropout",
        "equal_when_replayed": False,
        "also": ["batch_norm"],
        "ruled_out": ["moving buffers"],
        "notes": ["size 1 fails"],
        "splits": [refused],
    }
    text = rendered(noisy)
    for fact in (
        "not equal: dropout",
        "does not equal the plain sum",
        "also seen: batch_norm",
        "ruled out: moving buffers",
        "note: size 1 fails",
        "9 x 1",
        "[counts]",
    ):
        assert fact in text


def test_the_message_of_ranks_that_end_without_a_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    del folder
    died = subprocess.CompletedProcess([], 7, stdout="first line\nSegmentation fault\n")
    monkeypatch.setattr(verdict.subprocess, "run", lambda *_, **__: died)
    code, _, err = run(capsys, "their_module:problem", "--ranks", "2")
    assert code == 3
    assert "the 2 ranks ended with exit code 7 and no verdict:" in err
    assert "Segmentation fault" in err


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_the_command_starts_its_own_ranks(folder: Path, capsys: Capture) -> None:
    del folder
    code, out, err = run(capsys, "their_module:not_equal_on_two_ranks", "--ranks", "2", "--json", "-")
    told = json.loads(out)
    assert (code, told["ranks"], told["cause"]) == (1, 2, "mean_for_sum"), err
    code, out, err = run(capsys, "their_module:one_sample", "--ranks", "2")
    assert (code, out) == (3, "")
    assert "a batch of 1 sample can't be split over 2 ranks" in err


@pytest.mark.slow
def test_the_users_own_torchrun(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "wholebatch", "verify", "their_module:problem", "--json", "v.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal: the split update is the big batch's update") == 1
    assert json.loads((folder / "v.json").read_text())["ranks"] == 2
