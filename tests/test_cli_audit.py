"""``wholebatch audit``: which words are the script's, exit codes, where words and JSON go, the list."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit_judgements import COST, NOTE, UNEQUAL, judgement
from wholebatch.audit.judge.kinds import KINDS
from wholebatch.cli import main
from wholebatch.report.audited import script_prints_beside

Capture = pytest.CaptureFixture[str]

DEFAULTS = {
    "module": False,
    "updates": 4,
    "skip_updates": 0,
    "expect_micro_batches": None,
    "expect_global_batch_samples": None,
    "replay": True,
    "folder": None,
    "stall_s": 60.0,
    "stop": False,
}


class Auditor:
    """Stands in for the part that runs the script."""

    def __init__(self) -> None:
        self.called: list[tuple[str, list[str], dict[str, Any]]] = []
        self.says: Any = judgement()
        self.prints = ""
        self.failure: BaseException | None = None
        self.exit_code = 0

    def audit_script(self, script: str, arguments: list[str], **options: Any) -> Any:
        tell = options.pop("tell")
        self.called.append((script, list(arguments), options))
        print(self.prints, end="")
        if self.says is not None:
            tell(self.says)
        return types.SimpleNamespace(judgement=self.says, failure=self.failure, exit_code=self.exit_code)


@pytest.fixture
def auditor(monkeypatch, tmp_path):
    made = Auditor()
    module = types.ModuleType("wholebatch.audit.script")
    module.audit_script = made.audit_script
    monkeypatch.setitem(sys.modules, "wholebatch.audit.script", module)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('trained')\n")
    return made


@pytest.mark.parametrize(
    ("words", "script", "arguments", "options"),
    [
        ("train.py", "train.py", [], {}),
        ("train.py --lr 0.1 --updates 7", "train.py", ["--lr", "0.1", "--updates", "7"], {}),
        ("--updates 2 train.py --lr 0.1 -- x", "train.py", ["--lr", "0.1", "--", "x"], {"updates": 2}),
        ("train.py --help --json -", "train.py", ["--help", "--json", "-"], {}),
        ("-m pkg.train -m x", "pkg.train", ["-m", "x"], {"module": True}),
        (
            "--skip-updates 3 --expect-micro-batches 8 --expect-global-batch 64 --no-replay "
            "--shared-folder seen train.py",
            "train.py",
            [],
            {
                "skip_updates": 3,
                "expect_micro_batches": 8,
                "expect_global_batch_samples": 64,
                "replay": False,
                "folder": Path("seen"),
            },
        ),
    ],
)
def test_words_after_the_script_are_its_own(auditor, words, script, arguments, options):
    assert main(["audit", *words.split()]) == 0
    assert auditor.called == [(script, arguments, DEFAULTS | options)]


EMPTY = replace(judgement(), evidence=replace(judgement().evidence, windows=()))
FAILED = judgement(ended="failed", failure="RuntimeError: no data")


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (judgement(), 0),
        (judgement(verdict="findings", findings=[COST, NOTE]), 0),
        (judgement(num_updates=2, verdict="findings", findings=[UNEQUAL, NOTE]), 1),
        (judgement(verdict="not_judged", findings=[NOTE]), 3),
        # the script failed: after an update there is a verdict on what was seen, before it there is none
        (FAILED, 0),
        (replace(FAILED, evidence=replace(FAILED.evidence, windows=())), 3),
        (EMPTY, 0),
    ],
)
def test_the_exit_code_is_the_verdict(auditor, told, code):
    auditor.says = told
    assert main(["audit", "train.py"]) == code


def test_a_failed_script_is_reported_with_what_was_seen(auditor, capsys: Capture):
    auditor.says = FAILED
    auditor.failure = failed_with("raise RuntimeError('no data')")
    main(["audit", "train.py"])
    told = capsys.readouterr()
    assert "the script failed: RuntimeError: no data" in told.out
    assert "update 1 of SGD" in told.out
    assert told.err.startswith("Traceback (most recent call last):\n")
    assert told.err.endswith("RuntimeError: no data\n")


def failed_with(code: str) -> BaseException:
    """What a script of this code ends with."""
    try:
        exec(compile(code, "train.py", "exec"))
    except BaseException as failure:
        return failure
    raise AssertionError(f"{code} ended well")


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [("raise SystemExit(4)", 0, ""), ("raise KeyboardInterrupt", 130, "interrupted\n")],
)
def test_a_script_that_ends_itself_has_no_traceback(auditor, capsys: Capture, code, exit_code, words):
    auditor.failure = failed_with(code)
    assert main(["audit", "train.py"]) == exit_code
    told = capsys.readouterr()
    assert told.err == words
    assert told.out.startswith("Nothing wrong in 1 update")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "say which script to audit"),
        ("gone.py", "there is no script 'gone.py' to audit"),
        ("pkg.train", "for a module write -m before its name"),
        ("--update 2 train.py", "No such option: --update"),
        ("--updates 0 train.py", "Invalid value for '--updates'"),
        ("--expect-micro-batches many train.py", "Invalid value for '--expect-micro-batches'"),
    ],
)
def test_mistakes_in_the_words_are_usage_errors(auditor, capsys: Capture, words, message):
    assert main(["audit", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert auditor.called == []


def test_the_report_comes_after_what_the_script_prints(auditor, capsys: Capture):
    auditor.prints = "epoch 1\n"
    main(["audit", "train.py"])
    told = capsys.readouterr()
    assert told.out.startswith("epoch 1\nNothing wrong in 1 update")
    assert told.err == ""


def test_with_json_to_stdout_everything_else_goes_to_stderr(auditor, capsys: Capture):
    auditor.prints = "epoch 1\n"
    auditor.says = judgement(num_updates=2, verdict="findings", findings=[UNEQUAL])
    assert main(["audit", "--json", "-", "train.py", "--lr", "0.1"]) == 1
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert (document["verdict"], document["command"]) == ("findings", ["train.py", "--lr", "0.1"])
    assert told.err.startswith("epoch 1\nIn update 2, an item of")


def test_what_subprocesses_print_does_not_mix_with_the_json():
    script = (
        "import subprocess, sys\n"
        "from wholebatch.report.audited import script_prints_beside\n"
        "with script_prints_beside('-'):\n"
        "    print('python')\n"
        "    subprocess.run([sys.executable, '-c', 'print(\"child\")'])\n"
        "print('json')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "json\n"
    assert sorted(done.stderr.split()) == ["child", "python"]


def test_stdout_is_put_back_when_the_script_fails():
    before = sys.stdout
    scope = script_prints_beside("-")
    scope.__enter__()
    assert sys.stdout is not before
    failure = RuntimeError("in the script")
    assert not scope.__exit__(RuntimeError, failure, None)
    assert sys.stdout is before


@pytest.mark.usefixtures("auditor")
def test_json_to_a_file(capsys: Capture):
    assert main(["audit", "--json", "found.json", "-m", "pkg.train", "x"]) == 0
    document = json.loads(Path("found.json").read_text())
    assert (document["schema_version"], document["command"]) == (1, ["-m", "pkg.train", "x"])
    assert capsys.readouterr().out.startswith("Nothing wrong")


def test_other_ranks_say_nothing(auditor, capsys: Capture):
    auditor.says = None
    assert main(["audit", "--json", "found.json", "train.py"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not Path("found.json").exists()


@pytest.mark.slow
def test_the_example_is_found_out(tmp_path):
    example = Path(__file__).parents[1] / "examples" / "audit_mean_of_means.py"
    command = [sys.executable, "-m", "wholebatch", "audit", "--updates", "2", "--json", "-", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 1
    (wrong,) = [finding for finding in document["findings"] if finding["severity"] == "wrong"]
    assert (wrong["kind"], wrong["across"]) == ("unequal_item_weights", "micro_batches")
    assert Path(wrong["file"]).name == example.name
    assert example.read_text().splitlines()[wrong["line"] - 1].strip() == "(loss / ACCUMULATE).backward()"
    first = document["updates"][0]
    assert (first["micro_batches"], first["items"]) == (4, 164)
    assert abs(first["max_weight"] - 164 / 6 / 4) < 1e-3
    assert done.stderr.startswith("In update ")


def test_the_list_has_every_kind_and_needs_no_script(capsys: Capture, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["audit", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    titles = [line.split() for line in lines if not line.startswith(" ")]
    assert titles == [[name, kind.severity] for name, kind in KINDS.items()]
    summaries = " ".join(line.strip() for line in lines if line.startswith("  "))
    assert summaries == " ".join(kind.summary for kind in KINDS.values())
    assert main(["audit", "--list", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)["kinds"]
    assert [entry["kind"] for entry in listed] == list(KINDS)
    assert all(entry["summary"] and entry["page"].startswith("docs/defects/") for entry in listed)


def test_the_list_needs_no_torch():
    script = (
        "import sys\nfrom wholebatch.cli import main\nmain(['audit', '--list'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("failure", "code"),
    [(None, 0), (RuntimeError("no data"), 3), (SystemExit(7), 7)],
)
def test_where_nothing_is_wrong_the_exit_code_is_the_scripts(auditor, failure, code):
    auditor.failure, auditor.exit_code = (
        failure,
        7 if isinstance(failure, SystemExit) else int(bool(failure)),
    )
    assert main(["audit", "train.py"]) == code


def test_a_json_that_can_not_be_written_is_refused_before_the_script_runs(auditor, capsys: Capture):
    assert main(["audit", "--json", "absent/found.json", "train.py"]) == 2
    assert "lies in absent, which is no folder" in capsys.readouterr().err
    assert auditor.called == []
