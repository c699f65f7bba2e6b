"""One case: break a run, look at what is left, go on with it, compare it with the run that never broke."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from campaign.cases import NUM_UPDATES, Case, Fault
from campaign.child import run_one
from ranks import RanksTimeoutError, run_ranks
from wholebatch import checkpoint_folder as disk
from wholebatch import errors
from wholebatch.ranks.together import ContactLostError
from wholebatch.record import HEADER_FILE, LOCK_FILE
from wholebatch.run_folder import Run, read_run

TIMEOUT_S = 90.0
CHECKPOINT_FILES = ("model.pt", "optimizers.pt", "rest.pt")


@dataclass(kw_only=True, slots=True)
class Verdict:
    """What became of a case.

    Attributes:
        lost: updates that the run did not go on from although they were promised.
        twice: updates whose samples were counted twice in the end.
        hangs: times that a process had to be killed at the time limit.
        unreadable: checkpoints under a checkpoint's name that can't be loaded, and nobody damaged.
        ended: how the broken run ended, by rank.
        wrong: all else that is not as it should be, in words.
    """

    case: Case
    lost: int = 0
    twice: int = 0
    hangs: int = 0
    unreadable: int = 0
    ended: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.twice or self.hangs or self.unreadable or self.wrong)

    def expect(self, holds: bool, words: str) -> None:
        """Note what is not as it should be."""
        if not holds:
            self.wrong.append(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """What the processes of one stage told while they ran.

    Attributes:
        committed: the last update that was committed; None where none was.
        saved: the last checkpoint that got its name.
        faults: places at which something was done to a process.
    """

    committed: int | None
    saved: int | None
    faults: list[str]
    digests: dict[int, str | None]


class Bench:
    """Runs cases in one folder, and keeps the whole runs that they are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[str, Path] = {}
        write_rows(folder)

    def judge(self, case: Case, number: int) -> Verdict:
        """Run one case to its end."""
        verdict = Verdict(case=case)
        trial = self.folder / f"trial-{number}"
        trial.mkdir()
        try:
            self._judge(case, trial, verdict)
        except RanksTimeoutError as error:
            verdict.hangs += 1
            verdict.wrong.append(str(error))
        except Exception as error:
            verdict.wrong.append(f"{type(error).__name__}: {error}")
        shutil.rmtree(trial, ignore_errors=True)
        return verdict

    def _judge(self, case: Case, trial: Path, verdict: Verdict) -> None:
        run = trial / "run"
        tables = case.settings(str(run), str(self.folder))
        ends = stage(case, tables, None, case.faults, trial / "first")
        seen = witness(trial, "first")
        verdict.ended = _check_ends(verdict, case.faults, ends, case.ends, case.others, seen)
        committed = seen.committed or 0
        verdict.expect(case.committed in (None, committed), f"{committed} updates were committed")
        if not (run / HEADER_FILE).is_file():
            # Ended before it was a run: nothing was trained, and it is begun anew, in the same folder.
            verdict.expect(seen.committed is None, "updates were committed in a run without a header")
            anew = stage(case, tables, None, (), trial / "anew")
            verdict.expect(anew == ["0"] * case.setup.ranks, f"beginning anew ended with {anew}")
            self._compare(case, run, verdict)
            return
        promised = self._look(case, run, seen, verdict)
        if case.later:
            ends = stage(case, None, run, case.later, trial / "later")
            told = witness(trial, "later")
            _check_ends(verdict, case.later, ends, case.later_ends, case.others, told)
            promised = max(promised, self._look(case, run, told, verdict, at_least=promised))
        where = run
        if case.damage is not None:
            where = self._damage(case, run, verdict)
            promised = disk.read_facts(where).updates_attempted
        found = read_run(run)
        before = _content(run) if found.end is not None and found.end.reason == "done" else None
        ends = stage(case, None, where, (), trial / "last")
        if ends != ["0"] * case.setup.ranks:
            verdict.wrong.append(f"going on ended with {ends}")
            verdict.lost += promised  # what can't be gone on with is lost as a whole
            return
        if before is not None:
            verdict.expect(_content(run) == before, "a run that was done was changed by going on with it")
            went_on_from = len(found.records)
        else:
            went_on_from = read_run(run).resumptions[-1].updates_attempted
        verdict.lost += max(0, promised - went_on_from)
        self._compare(case, run, verdict, witness(trial, "last"))

    def _look(self, case: Case, run: Path, seen: Witness, verdict: Verdict, at_least: int = 0) -> int:
        """Read what a broken run left; returns the update that it must be gone on with from."""
        read_run(run)
        for path in disk.checkpoint_paths(run / "checkpoints"):
            verdict.unreadable += not _loads(path)
        committed = at_least if seen.committed is None else seen.committed
        if case.promise == "committed":
            return committed
        due = max(0, committed - 1) // case.setup.every * case.setup.every
        return max(at_least, due, seen.saved or 0)

    def _damage(self, case: Case, run: Path, verdict: Verdict) -> Path:
        """Damage the newest checkpoint, and see that it is refused and the one before offered."""
        *_, before, newest = disk.checkpoint_paths(run / "checkpoints")
        assert case.damage is not None
        damage(newest, case.damage)
        (end, *_) = run_ranks(
            run_one, case.setup.ranks, None, str(run), [], str(run.parent / "refused"),
            timeout_s=TIMEOUT_S, expect="outcomes",
        )  # fmt: skip
        offered = f"the newest whole one is that of update {disk.read_facts(before).updates_attempted}"
        verdict.expect(
            end[0] == "error" and end[1] == "CheckpointError" and offered in end[2],
            f"a damaged checkpoint was answered with {end}",
        )
        return before

    # Against the run that never broke -----------------------------------------------------------------

    def _compare(self, case: Case, run: Path, verdict: Verdict, seen: Witness | None = None) -> None:
        whole = self._whole_run(case)
        mine, other = read_run(run), read_run(whole)
        numbers = [record.updates_attempted for record in mine.records]
        verdict.expect(
            numbers == list(range(1, NUM_UPDATES + 1)), f"the records have the updates {numbers}"
        )
        extra = Counter(r.sample_digest for r in mine.records) - Counter(
            r.sample_digest for r in other.records
        )
        verdict.twice += extra.total()
        for a, b in zip(mine.records, other.records, strict=False):
            same = _told(a) == _told(b)
            verdict.expect(same, f"update {a.updates_attempted} is {_told(a)} and was {_told(b)}")
        for number, digest in (seen.digests if seen else {}).items():
            recorded = mine.records[number - 1].sample_digest
            verdict.expect(
                recorded == digest, f"update {number} was recorded with other samples than it had"
            )
        _compare_evaluations(mine, other, verdict, may_lack=case.leaves_evaluation_out)
        end = mine.end
        verdict.expect(end is not None and end.reason == "done", f"the end of the run is {end}")
        left = [
            p.name for p in run.rglob("*") if "unfinished" in p.name or p.name.endswith((".part", ".old"))
        ]
        verdict.expect(not left, f"the run that went on left {left}")
        newest, reference = (disk.checkpoint_paths(each / "checkpoints")[-1] for each in (run, whole))
        for name in CHECKPOINT_FILES:
            odd = _difference(_load(newest / name), _load(reference / name))
            verdict.expect(odd is None, f"{newest.name}/{name} differs at {odd}")
        for path in sorted((reference / "parts").glob("*")):
            part = newest / "parts" / path.name
            if path.suffix == ".pt":
                odd = _difference(_load(part), _load(path))
            else:
                odd = _difference(load_file(part), load_file(path))
            verdict.expect(odd is None, f"{newest.name}/parts/{path.name} differs at {odd}")
        for path in whole.glob("model*/model.pt"):
            odd = _difference(_load(run / path.relative_to(whole)), _load(path))
            verdict.expect(odd is None, f"the exported {path.relative_to(whole)} differs at {odd}")

    def _whole_run(self, case: Case) -> Path:
        """The run of the same settings that nothing happens to but the NaN that is part of the case."""
        nan = [dataclasses.replace(fault, place="loss") for fault in case.faults if fault.what == "nan"]
        key = f"{case.setup}{nan}"
        if key not in self._whole:
            folder = self.folder / f"whole-{len(self._whole)}"
            tables = case.settings(str(folder), str(self.folder))
            ends = stage(case, tables, None, nan, self.folder / f"w{len(self._whole)}")
            assert ends == ["0"] * case.setup.ranks, ends
            self._whole[key] = folder
        return self._whole[key]


def stage(
    case: Case, tables: dict[str, Any] | None, resume: Path | None, faults: Sequence[Fault], telling: Path
) -> list[str]:
    """Run the job once, begun or gone on with; returns how each rank ended."""
    outcomes = run_ranks(
        run_one,
        case.setup.ranks,
        tables,
        None if resume is None else str(resume),
        list(faults),
        str(telling),
        timeout_s=TIMEOUT_S,
        expect="outcomes",
    )
    return [_ending(outcome) for outcome in outcomes]


def _ending(outcome: Any) -> str:
    kind, what, *_ = outcome
    if kind == "died":
        return "killed" if what == -9 else f"died with {what}"
    return str(what)


def exit_code(ending: str) -> int:
    """What the process of a rank would end with, as the command line does."""
    if ending.isdecimal():
        return int(ending)
    if ending == "killed":
        return 137
    if ending == "KeyboardInterrupt":
        return 130
    if ending == ContactLostError.__name__:
        return ContactLostError.exit_code
    return int(getattr(getattr(errors, ending, None), "exit_code", 1))


def _check_ends(
    verdict: Verdict,
    faults: Sequence[Fault],
    ends: list[str],
    allowed: frozenset[str],
    others: frozenset[str],
    seen: Witness,
) -> list[str]:
    for fault in faults:
        verdict.expect(
            fault.place in seen.faults or _may_be_missed(fault, faults, seen), f"{fault} did not happen"
        )
    for rank, end in enumerate(ends):
        hit = any(fault.rank == rank for fault in faults)
        verdict.expect(end in (allowed if hit else others), f"rank {rank} ended with {end}")
    return ends


def _may_be_missed(fault: Fault, faults: Sequence[Fault], seen: Witness) -> bool:
    """The second of two at different moments may come too late: the ranks left together by then."""
    return fault.rank > 0 and bool(seen.faults) and len({f.place for f in faults}) > 1


def witness(trial: Path, name: str) -> Witness:
    """Read what the ranks of a stage told."""
    told = [
        json.loads(line)
        for path in sorted(trial.glob(f"{name}-*"))
        for line in path.read_text().splitlines()
    ]
    digests = {each["committed"]: each["digest"] for each in told if "committed" in each}
    saved = [each["saved"] for each in told if "saved" in each]
    return Witness(
        committed=max(digests, default=None),
        saved=max(saved, default=None),
        faults=[each["fault"] for each in told if "fault" in each],
        digests=digests,
    )


def _content(run: Path) -> dict[str, bytes]:
    """All files of a run, but for the lock, which names the last process that had it."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _loads(path: Path) -> bool:
    try:
        disk.check_files(disk.read_facts(path))
        for name in CHECKPOINT_FILES:
            _load(path / name)
    except Exception:
        return False
    return True


def _told(record: Any) -> dict[str, Any]:
    """Of a record, what must be the same in every run of the same settings: bit for bit."""
    names = ("outcome", "updates_attempted", "updates_applied", "micro_batches", "samples", "items")
    names += ("positions", "sample_digest", "loss_per_item", "gradient_norm", "learning_rates", "partial")
    return {name: getattr(record, name) for name in names}


def _compare_evaluations(mine: Run, whole: Run, verdict: Verdict, *, may_lack: bool) -> None:
    """Each that the whole run made was made once, with the same loss; an end may have added its own.

    One that SIGTERM leaves no time for is left out, as docs/train.md says; so is one of a job that gives
    up.
    """
    found = [(e.split, e.updates_applied, e.samples_consumed) for e in mine.evaluations]
    again = [each for each, times in Counter(found).items() if times > 1]
    verdict.expect(not again, f"evaluated more than once: {again}")
    losses = dict(zip(found, (e.loss_per_item for e in mine.evaluations), strict=True))
    for e in whole.evaluations:
        key = (e.split, e.updates_applied, e.samples_consumed)
        if may_lack and key not in losses:
            continue
        verdict.expect(losses.get(key) == e.loss_per_item, f"evaluation {key}: {losses.get(key)} and {e}")


def _difference(one: Any, other: Any, where: str = "") -> str | None:
    """Where two trees of tensors and plain data differ in a bit; None where they don't."""
    if type(one) is not type(other):
        return where or "the top"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return where or "the top"
        return next((d for k in one if (d := _difference(one[k], other[k], f"{where}/{k}"))), None)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return where
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for k, (a, b) in pairs if (d := _difference(a, b, f"{where}/{k}"))), None)
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return None if same else where
    return None if one == other else where


def damage(checkpoint: Path, what: str) -> None:
    """Damage a checkpoint as a disk, a copy or a person may."""
    file = checkpoint / "optimizers.pt"
    if what == "cut short":
        (checkpoint / "model.pt").write_bytes((checkpoint / "model.pt").read_bytes()[:-100])
    elif what == "one byte changed":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif what == "file missing":
        (checkpoint / "rest.pt").unlink()
    elif what == "manifest damaged":
        text = (checkpoint / disk.MANIFEST).read_text()
        (checkpoint / disk.MANIFEST).write_text(
            text.replace('"updates_attempted": ', '"updates_attempted": 1')
        )
    elif what == "file too many":
        (checkpoint / "model.pt.bak").write_bytes(b"x")
    else:
        assert what == "empty folder", what
        for path in checkpoint.iterdir():
            path.unlink()


def write_rows(folder: Path) -> None:
    """Short texts to train on and to hold out."""
    draw = random.Random(3)
    for name, number in (("200", 200), ("20", 20), ("held_out", 6)):
        rows = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(4, 18))) for _ in range(number)]
        text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
