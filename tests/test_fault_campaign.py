"""The fault campaign: a sample of its cases, and that its judge does see what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from campaign import trial
from campaign.cases import Case, Fault, Setup
from campaign.kinds import all_cases, deepspeed_cases, sample_of, shared_cases
from campaign.table import BEGIN, END, SHARED_BEGIN, SHARED_END, table, write_into
from campaign.trial import Bench, Verdict, Witness, damage, exit_code
from house import ROOT
from wholebatch import checkpoint_folder as disk

SAMPLE = [*sample_of(all_cases(), 14), *sample_of(shared_cases(), 6)]
# Which file is synced is told by Linux.
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("campaign"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=[case.name for case in SAMPLE])
def test_a_broken_run_goes_on_as_if_it_had_not_been(bench: Bench, number: int) -> None:
    verdict = bench.judge(SAMPLE[number], number)
    assert verdict.good, verdict


def test_there_are_more_than_300_cases_and_no_two_are_the_same() -> None:
    cases = all_cases() + shared_cases()
    assert len(cases) > 300
    assert len({(case.name, str(case.faults), str(case.later)) for case in cases}) == len(cases)
    assert cases == all_cases() + shared_cases(), "the same list every time"
    assert len({case.kind for case in cases}) >= 15
    assert len({case.setup.layout for case in cases}) >= 12


def test_the_sample_is_of_many_kinds_and_layouts() -> None:
    kinds = Counter(case.kind for case in SAMPLE)
    assert len(kinds) >= 12
    assert {case.setup.ranks for case in SAMPLE} == {1, 2, 4}
    assert {"fsdp", "pipeline", "hsdp"} <= {case.setup.shared for case in SAMPLE}


def runs_between(begin: str, end: str) -> dict[str, int]:
    """The runs of each row of a table in the document."""
    text = (ROOT / "docs" / "faults.md").read_text().split(begin)[1].split(end)[0]
    rows = [line.split(" | ") for line in text.splitlines() if "|" in line]
    return {row[0].strip("| *"): int(row[3]) for row in rows[2:]}


def test_the_document_has_the_tables_of_all_cases() -> None:
    for told, of_cases in (
        (runs_between(BEGIN, END), [case.kind for case in all_cases()]),
        (
            runs_between(SHARED_BEGIN, SHARED_END),
            [case.setup.strategy for case in [*shared_cases(), *deepspeed_cases()]],
        ),
    ):
        assert told.pop("all") == len(of_cases)
        assert told == Counter(of_cases)


# The judge can fail ------------------------------------------------------------------------------------


A_CASE = Case(
    kind="SIGINT",
    place="after the record",
    setup=Setup(every=2),
    faults=[Fault(what="SIGINT", place="after record", update=3)],
    ends=frozenset({"130"}),
    promise="committed",
)


@pytest.mark.slow
def test_a_fault_that_does_not_happen_is_seen(bench: Bench) -> None:
    never = dataclasses.replace(
        A_CASE, faults=[Fault(what="SIGINT", place="after record", update=3, nth=2)]
    )
    verdict = bench.judge(never, 1000)
    assert any("did not happen" in words for words in verdict.wrong)
    assert any("rank 0 ended with 0" in words for words in verdict.wrong)


@pytest.mark.slow
def test_more_promised_than_kept_is_counted_as_lost(bench: Bench) -> None:
    killed = Fault(what="SIGKILL", place="after record", update=4)
    case = dataclasses.replace(A_CASE, setup=Setup(every=3), faults=[killed], ends=frozenset({"killed"}))
    assert bench.judge(case, 1001).lost == 1
    assert bench.judge(dataclasses.replace(case, promise="checkpoint"), 1002).good


@pytest.mark.slow
def test_a_run_that_was_done_and_is_changed_by_going_on_is_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Fault(what="SIGTERM", place="before export", update=6)
    case = dataclasses.replace(A_CASE, faults=[late], ends=frozenset({"0"}))
    assert bench.judge(case, 1003).good
    real = trial.stage

    def changing(case: Case, tables: Any, resume: Path | None, faults: Any, telling: Path) -> list[str]:
        if telling.name == "last" and resume is not None:
            (resume / "model" / "shape.json").write_text("{}")
        return real(case, tables, resume, faults, telling)

    monkeypatch.setattr(trial, "stage", changing)
    assert bench.judge(case, 1004).wrong == ["a run that was done was changed by going on with it"]


class Meddling(Bench):
    """Changes the run that went on before it is compared."""

    def _compare(self, case: Case, run: Path, verdict: Verdict, seen: object = None) -> None:
        del seen
        self.meddle(run)
        super()._compare(case, run, verdict)

    def meddle(self, run: Path) -> None:
        raise NotImplementedError


class OneWeight(Meddling):
    """By the smallest amount that there is."""

    def meddle(self, run: Path) -> None:
        path = disk.checkpoint_paths(run / "checkpoints")[-1] / "model.pt"
        state = torch.load(path, weights_only=True)
        weight = next(iter(state.values()))
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0, dtype=weight.dtype))
        torch.save(state, path)


class SamplesTwice(Meddling):
    """The fourth update learned from the samples of the third."""

    def meddle(self, run: Path) -> None:
        lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
        lines[3]["sample_digest"] = lines[2]["sample_digest"]
        (run / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class RecordMissing(Meddling):
    """The last update has no record."""

    def meddle(self, run: Path) -> None:
        text = (run / "records.jsonl").read_text().splitlines(keepends=True)
        (run / "records.jsonl").write_text("".join(text[:-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "twice", "words"),
    [
        (OneWeight, 0, "model.pt differs at /"),
        (SamplesTwice, 1, "update 4 is"),
        (RecordMissing, 0, "the records have the updates [1, 2, 3, 4, 5]"),
    ],
)
def test_the_comparison_sees(tmp_path: Path, kind: type[Meddling], twice: int, words: str) -> None:
    verdict = kind(tmp_path).judge(A_CASE, 1)
    assert verdict.twice == twice
    assert any(words in each for each in verdict.wrong), verdict.wrong


def test_an_unreadable_checkpoint_is_counted(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tmp_path
    monkeypatch.setattr("campaign.trial.disk.checkpoint_paths", lambda _: [Path("no-such-folder")])
    verdict = Verdict(case=A_CASE)
    monkeypatch.setattr("campaign.trial.read_run", lambda _: None)
    told = Witness(committed=3, saved=2, faults=[], digests={})
    assert bench._look(A_CASE, Path("run"), told, verdict) == 3
    assert verdict.unreadable == 1
    assert bench._look(dataclasses.replace(A_CASE, promise="checkpoint"), Path("run"), told, verdict) == 2


def test_every_way_to_end_has_its_exit_code() -> None:
    codes = {each: exit_code(each) for each in ("0", "143", "killed", "KeyboardInterrupt", "CampaignError")}
    assert codes == {"0": 0, "143": 143, "killed": 137, "KeyboardInterrupt": 130, "CampaignError": 1}
    assert [exit_code(each) for each in ("RecordError", "PoisonedWindowError", "ContactLostError")] == [
        2,
        3,
        3,
    ]


def test_the_table_sums_up_by_kind_and_goes_between_its_markers(tmp_path: Path) -> None:
    good = Verdict(case=A_CASE, ended=["130"])
    bad = Verdict(case=dataclasses.replace(A_CASE, kind="SIGKILL"), lost=2, hangs=1, ended=["killed"])
    text = table([good, good, bad])
    assert "| SIGINT | 1 | 1 | 2 | 0 | 0 | 0 | 0 | 130 (2) |" in text
    assert "| SIGKILL | 1 | 1 | 1 | 2 | 0 | 1 | 0 | 137 (1) |" in text
    assert text.splitlines()[-1] == "| **all** | 1 | 1 | 3 | 2 | 0 | 1 | 0 | 130 (2), 137 (1) |"
    document = tmp_path / "faults.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(document, text)
    assert document.read_text() == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"


@pytest.mark.parametrize("what", ["cut short", "one byte changed", "file missing", "file too many"])
def test_each_damage_damages(tmp_path: Path, what: str) -> None:
    unfinished = disk.begin_folder(tmp_path)
    files = {
        name: disk.write_file(unfinished / name, lambda file: file.write(bytes(500)))
        for name in ("model.pt", "optimizers.pt", "rest.pt")
    }
    body = {"files": files, "counters": {}, "layout": {}, "score": None, "versions": {}, "created_at": ""}
    path = disk.finish_folder(unfinished, body, updates_attempted=4)
    disk.check_files(disk.read_facts(path))
    damage(path, what)
    with pytest.raises(disk.DamageError):
        disk.check_files(disk.read_facts(path))
