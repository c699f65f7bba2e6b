"""The command line: plan in full, the frame around all commands, and that a plan needs no torch."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from house import ROOT
from wholebatch.cli import main
from wholebatch.errors import JudgeError, RecordError, WholebatchError
from wholebatch.report.output import text_stream, write_json

EXAMPLES = ROOT / "examples"
LINE = "plan --global-batch-samples 512 --micro-batch-samples 4 --ranks 16 --tensor-parallel 2"
EXAMPLE = LINE.split()
PIPELINE = [*EXAMPLE, "--pipeline-parallel", "2"]


def run(line: str) -> int:
    """Run the command line as a shell would split it."""
    return main(shlex.split(line))


def test_the_ledger_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PIPELINE) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    lines = [line.split() for line in text.splitlines()]
    for row in (
        "ranks 16 processes",
        "micro-batch, m 4 samples",
        "window, A 32 micro-batches",
        "replicas, D 4 ranks / (tensor x pipeline x context = 2 x 2 x 1)",
        "global batch 512 samples = m x A x D = 4 x 32 x 4",
        "micro-batches 128 over all replicas",
        "gradient reductions 1 at the last micro-batch; 32 if every micro-batch were reduced",
        "accumulation float32 of bfloat16 and float16 gradients, as A > 4: 4 bytes each, not 2",
        "pipeline bubble 3.1% of the ideal time idle, 1f1b: (p - 1) / A = 1 / 32",
        "ranks_are_not_replicas: 4 ranks share one replica",
    ):
        assert any(line[: len(row.split())] == row.split() for line in lines), (row, text)


def test_json_to_stdout_sends_the_text_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PIPELINE, "--json", "-"]) == 0
    out, errors = capsys.readouterr()
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert document["replicas"] == 4
    assert document["micro_batches_per_window"] == 32
    assert document["global_batch_items"] is None
    assert document["reductions_per_update"] == 1
    assert document["epochs"] is None
    assert document["against"] is None
    assert [each["kind"] for each in document["findings"]] == ["ranks_are_not_replicas"]
    assert errors.startswith("One update\n")


def test_json_to_a_file_leaves_the_text_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    words = "--dataset-samples 10001 --epochs 3 --warmup-samples 1000 --log-updates 10 --against 4x64x4"
    assert main([*PIPELINE, *words.split(), "--json", str(target)]) == 0
    out, errors = capsys.readouterr()
    assert "3 epochs of the data" in out
    assert errors == ""
    document = json.loads(target.read_text(encoding="utf-8"))
    assert document["epochs"]["updates_per_epoch"] == 20
    assert document["epochs"]["tail_samples"] == 10001 - 19 * 512
    assert document["epochs"]["total_updates"] == 60
    assert document["intervals"]["warmup"] == {
        "given": 1000,
        "unit": "samples",
        "updates": 2,
        "samples": 1024,
        "rounded_up": True,
    }
    assert document["against"]["same_update"] is False
    assert document["against"]["epochs"]["total_updates"] == 30
    assert document["against"]["intervals"]["log"]["other_updates_of_same_samples"] == 5
    assert document["against"]["plan"]["ranks"] == 16


def test_another_split_of_the_same_global_batch_is_the_same_update(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan --micro-batch-samples 2 --micro-batches-per-window 8 --replicas 2 --items-per-sample 10"
    assert main([*words.split(), "--against", "4x4x2", "--json", "-"]) == 0
    out, errors = capsys.readouterr()
    document = json.loads(out)
    assert document["against"]["same_update"] is True
    assert document["global_batch_items"] == 320
    assert "2 x 8 x 2 and 4 x 4 x 2 are the same update" in errors
    assert "320  at 10 items in every sample" in errors


@pytest.mark.parametrize("data", ["", "--dataset-samples 1000"])
def test_a_huge_warm_up_is_compared_all_the_same(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only what the user gave has a bound; what it comes to under another plan has none."""
    words = f"plan --micro-batch-samples 4 --warmup-updates {2**52} --against 4x4x2 --json - {data}"
    assert main(words.split()) == 0
    document = json.loads(capsys.readouterr().out)
    moved = document["against"]["intervals"]["warmup"]
    if data:  # an epoch is 250 updates of 4, or 31 of 32 and one of 8
        assert moved["samples"] == 2**52 // 250 * 1000 + 2**52 % 250 * 4
        whole, rest = divmod(moved["samples"], 1000)
        assert moved["other_updates_of_same_samples"] == whole * 32 + -(-rest // 32)
    else:
        assert moved["samples"] == 4 * 2**52
        assert moved["other_updates_of_same_samples"] == 2**52 // 8


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option moves the JSON away from its default."""
    words = (
        "--global-batch-items 4800 --items-per-sample 100 --micro-batch-samples 2 --ranks 48 --replicas 2 "
        "--tensor-parallel 2 --pipeline-parallel 4 --context-parallel 3 --expert-parallel 6 --tail drop "
        "--pipeline-schedule interleaved_1f1b --pipeline-virtual-stages 2 --dataset-samples 100 --epochs 2 "
        "--warmup-updates 1 --log-samples 50 --evaluation-updates 2 --save-samples 96"
    )
    assert main(["plan", *words.split(), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = {
        "ranks": 48,
        "replicas": 2,
        "tensor_parallel": 2,
        "pipeline_parallel": 4,
        "context_parallel": 3,
        "expert_parallel": 6,
        "pipeline_schedule": "interleaved_1f1b",
        "pipeline_virtual_stages": 2,
        "pipeline_bubble_fraction": 3 / 24,
        "micro_batches_per_window": 12,
        "global_batch_samples": 48,
        "items_per_sample": 100,
        "tail": "drop",
    }
    assert expected.items() <= document.items()
    assert {name: each["updates"] for name, each in document["intervals"].items()} == {
        "warmup": 1,
        "log": 2,
        "evaluation": 2,
        "save": 2,
    }
    assert document["epochs"]["total_samples_dropped"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--global-batch-samples 64 --micro-batch-samples 4 --ranks 3",
            "64 = 5 x 12 + 4. Nearest that fit",
        ),
        ("--micro-batch-samples -4", "micro_batch_samples=-4 is too small"),
        ("--micro-batch-samples 4.5", "Invalid value for '--micro-batch-samples'"),
        ("--micro-batch-samples true", "Invalid value for '--micro-batch-samples'"),
        ("--micro-batch-samples 4 --epochs 2", "--epochs 2 needs --dataset-samples"),
        ("--micro-batch-samples 4 --against 4x2", "--against '4x2' is not micro-batch samples x"),
        ("--micro-batch-samples 4 --against ٤x٤x٢", "--against '٤x٤x٢' is not micro-batch samples x"),
        (f"--micro-batch-samples 4 --against {'9' * 5000}x1x1", "is not micro-batch samples x"),
        (f"--micro-batch-samples 4 --against 1x{'9' * 90}x1", "is too large; the bound is 2**53"),
        ("--micro-batch-samples 4 --against 4x0x2", "micro_batches_per_window=0 is too small"),
        (
            "--micro-batch-samples 4 --log-updates 3 --log-samples 5",
            "--log-updates 3 and --log-samples 5 set",
        ),
        ("--micro-batch-samples 4 --tail pad", "tail='pad' is not known"),
        ("--batch-size 4", "No such option: --batch-size"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split(), "--json", "-"]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("error: ")
    assert message in errors
    assert "Traceback" not in errors


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "no_such_folder" / "plan.json")
    assert main([*EXAMPLE, "--json", target]) == 2
    assert f"error: can't write the JSON to {target!r}: No such file" in capsys.readouterr().err
    with pytest.raises(RecordError, match="no_such_folder"):
        write_json({}, target)


@pytest.mark.parametrize("command", ["plan", "train", "verify", "show"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"  wholebatch {command}" in text
    assert "--json" in text


# Examples that this test does not run: a training run, a run that would have to exist, several ranks.
NOT_RUN = re.compile(r"(torchrun|wholebatch (train|show))\b.*|wholebatch verify .*--ranks.*")


def help_examples(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The example lines of a command's help."""
    assert main([command, "--help"]) == 0
    below = capsys.readouterr().out.partition("Examples:\n")[2]
    lines = itertools.takewhile(lambda line: line.startswith("    "), below.splitlines())
    return [line.strip() for line in lines]


@pytest.mark.parametrize(("command", "at_least"), [("plan", 4), ("verify", 2), ("train", 0), ("show", 0)])
def test_every_example_of_the_help_runs(
    command: str,
    at_least: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    shutil.copy(EXAMPLES / "verify_equal.py", tmp_path / "my_module.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # so that no line is wrapped
    lines = help_examples(command, capsys)
    assert len(lines) >= 3
    to_run = [line for line in lines if not NOT_RUN.fullmatch(line)]
    assert len(to_run) >= at_least
    for line in to_run:
        program, *words = shlex.split(line)
        assert program == "wholebatch"
        assert main(words) == 0, f"{line}\n{capsys.readouterr()}"


def test_the_help_says_everything_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["--help"])
    text = capsys.readouterr().out
    assert "..." not in text.partition("Commands:")[2], "a description is cut off"
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    codes = "0 done, 1 a negative verdict, 2 usage, 3 could not judge or go on, 129 ended by SIGHUP, 130 "
    codes += "interrupted, 141 nobody reads the output any more, 143 ended by SIGTERM."
    assert f"Exit codes: {codes}" in words
    assert f"Exit codes: {codes}" in readme
    assert "torchrun itself turns all but 0 into 1" in words


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("plan --batch 4", "wholebatch plan"),
        ("train --sett x=1", "wholebatch train"),
        ("verify", "wholebatch verify"),
        ("show", "wholebatch show"),
        ("frobnicate", "wholebatch"),
    ],
)
def test_a_usage_error_ends_with_the_help_of_the_command_at_hand(
    line: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Try: {command} --help"


def test_no_command_shows_the_help_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "plan" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out[0].isdigit()
    assert main(["frobnicate"]) == 2
    assert "No such command 'frobnicate'" in capsys.readouterr().err


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Put a module with these functions in another's place, also where its parent holds it."""
    module = types.ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_other_commands_hand_over_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def called(*words: Any, **options: Any) -> int:
        calls.append((words, options))
        return 1

    replace_module(monkeypatch, "wholebatch.train.command", train=called)
    replace_module(monkeypatch, "wholebatch.report.verdict", verify_command=called)
    replace_module(monkeypatch, "wholebatch.report.show", show=called)
    assert run("train a.toml --set run.folder=runs/a --set run.num_updates=3 --json -") == 1
    assert run("train --resume runs/a") == 1
    assert main(["train"]) == 1
    assert run("verify m:f --splits 2+3,5 --ranks 2 --seed 7 --json v.json") == 1
    assert run("show runs/a") == 1
    given = {"changes": (), "resume": None, "print_config": False, "json_target": None}
    assert calls == [
        (
            (Path("a.toml"),),
            given | {"changes": ["run.folder=runs/a", "run.num_updates=3"], "json_target": "-"},
        ),
        ((None,), given | {"resume": "runs/a"}),
        ((None,), given),
        (("m:f",), {"splits": "2+3,5", "ranks": 2, "seed": 7, "json_target": "v.json"}),
        (([Path("runs/a")],), {"by": None, "follow_it": False, "json_target": None}),
    ]


@pytest.mark.parametrize(
    ("problem", "exit_code", "text"),
    [
        (JudgeError("the loss is not finite"), 3, "error: the loss is not finite"),
        (WholebatchError("it broke"), 3, "error: it broke"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(
    problem: BaseException,
    exit_code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise problem

    replace_module(monkeypatch, "wholebatch.report.show", show=fail)
    assert main(["show", "runs/a"]) == exit_code
    errors = capsys.readouterr().err
    assert text in errors
    assert "Traceback" not in errors


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise ZeroDivisionError("ours")

    replace_module(monkeypatch, "wholebatch.report.show", show=fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["show", "runs/a"])


def test_json_never_says_nan(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": float("-inf")}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": None}
    write_json({"a": 1}, None)
    assert capsys.readouterr().out == ""
    text_stream("-").write("text")
    assert capsys.readouterr() == ("", "text")
    text_stream("file.json").write("text")
    assert capsys.readouterr() == ("text", "")


@pytest.mark.skipif(os.name != "posix", reason="needs pipes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["plan --micro-batch-samples 4", "plan --micro-batch-samples 4 --json -"])
def test_a_closed_pipe_is_told_and_has_a_code_of_its_own(words: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "wholebatch", *words.split()],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr.endswith("stopped: the output was closed before the end\n")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# Without torch

SCRIPT = """
import sys
import wholebatch
{extra}
from wholebatch.cli import main
code = main({words!r})
loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "torch")
sys.exit(f"torch was imported: {{loaded}}" if loaded else code)
"""


def run_without_torch(folder: Path, extra: str) -> subprocess.CompletedProcess[str]:
    """Plan in a fresh process where ``import torch`` finds an empty stand-in, so that it costs nothing."""
    (folder / "torch.py").write_text("", encoding="utf-8")
    script = SCRIPT.format(
        extra=extra, words=[*PIPELINE, "--dataset-samples", "1000", "--against", "1x2x3"]
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_plan_imports_no_torch(tmp_path: Path) -> None:
    done = run_without_torch(tmp_path, extra="")
    assert done.returncode == 0, done.stderr
    assert "One update" in done.stdout


def test_the_test_without_torch_can_fail(tmp_path: Path) -> None:
    done = run_without_torch(tmp_path, extra="import torch")
    assert done.returncode == 1
    assert "torch was imported: ['torch']" in done.stderr


def test_python_minus_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wholebatch", "plan", "--micro-batch-samples", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: micro_batch_samples=0 is too small; it must be at least 1\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_ledger_fits_into_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = _shown_in(_Terminal(), columns=200, monkeypatch=monkeypatch)
    assert wide == _shown_in(io.StringIO(), columns=80, monkeypatch=monkeypatch), "a file gets whole lines"
    narrow = _shown_in(_Terminal(), columns=80, monkeypatch=monkeypatch)
    assert max(len(line) for line in wide.splitlines()) > 120
    assert max(len(line) for line in narrow.splitlines()) <= 80
    assert narrow.split() == wide.split()
    lines = narrow.splitlines()
    items = next(place for place, line in enumerate(lines) if line.startswith("  items"))
    column = lines[items].index("not known ahead")
    assert lines[items + 1].startswith(" " * column + "all have the same number")


def _shown_in(stream: io.StringIO, *, columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(PIPELINE) == 0
    return stream.getvalue()
