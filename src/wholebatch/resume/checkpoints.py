"""Save a run between two updates, and resume it from there.

What is saved is written aside, synced and renamed, so that a checkpoint is there as a whole or not at
all; what is loaded is checked as a whole before the first tensor of the run is written. In both, what
fails on one rank ends on all of them.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wholebatch import checkpoint_folder as disk
from wholebatch.checkpoint_folder import CheckpointFacts, DamageError
from wholebatch.errors import (
    CheckpointError,
    PoisonedWindowError,
    UsageError,
    WindowUsageError,
)
from wholebatch.ranks.together import Together
from wholebatch.replay import RandomState
from wholebatch.resume.contents import (
    Contents,
    TrainingParts,
    filled,
    put_back,
    take,
    targets_apart,
)
from wholebatch.resume.io import explained, read_file
from wholebatch.resume.randomness import packed, restore
from wholebatch.resume.refusals import (
    GLOBAL_BATCH,
    refuse_state_of_one_rank,
    refuse_to_load,
    refuse_to_save,
)
from wholebatch.resume.sharded import facts_of_parts, need_safetensors, read_apart, write_apart
from wholebatch.resume.stages import (
    joined,
    of_this_rank,
    stages_of_all,
    told_of_stages,
    write_stages,
)
from wholebatch.window import UpdateWindow

# The names of the files that each rank wrote, by rank.
Written = list[list[str]]
FILES = ("model.pt", "optimizers.pt", "rest.pt")
_SPLIT = ("micro_batch_samples", "micro_batches_per_window", "tokens_per_micro_batch", "rows", "replicas")
_LAYOUT = (*GLOBAL_BATCH, *_SPLIT, "ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a run resumes from.

    Args:
        facts: of the checkpoint that was loaded.
        same_layout: whether m, A, D and the ranks are those that it was saved with. If so the run resumes
            bit for bit; if not, with the same global batches.
        random_state_restored: whether this rank has its own random state back; else it has a fresh one.
        more: the plain data that was saved in ``more``.
    """

    facts: CheckpointFacts
    same_layout: bool
    random_state_restored: bool
    more: Mapping[str, Any]

    @property
    def updates_attempted(self) -> int:
        """Updates of the run so far, skipped ones included."""
        return self.facts.updates_attempted

    @property
    def samples(self) -> int:
        """Samples of all updates so far, over all replicas."""
        return self.facts.samples


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Every rank makes one and calls ``save`` and ``load`` at the same place of its loop, between updates.
    The leading rank writes; where ranks hold different parts of the model, each writes its own.

    Args:
        folder: where they lie; made by the first save.
        keep_last: number of checkpoints that are kept, the newest ones.
        keep_best: whether the one with the lowest score is kept beside them.
        process_group: the ranks of the job; by default those of the model's DDP, or all.

    Raises:
        UsageError: a number of checkpoints to keep that is not 1 or more.

    Exactness: bit for bit. On the same ranks, m, A and D the run resumes as if it had not ended.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise UsageError(f"keep_last={keep_last!r} is no number of checkpoints; keep 1 or more")
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._process_group = process_group

    def list(self) -> list[CheckpointFacts]:
        """The facts of each checkpoint, from the first update to the last; reads no tensor.

        Those whose manifest can't be read are left out; ``load`` names them.
        """
        return disk.facts_in(self.folder)

    def save(
        self, window: UpdateWindow, *, more: Mapping[str, Any] | None = None, score: float | None = None
    ) -> Path:
        """Write a checkpoint; all ranks call it, between updates.

        Args:
            window: whose model, optimizers, schedules, scaler, counters and position are saved.
            more: objects with ``state_dict`` and ``load_state_dict`` (an averaged model), or plain data.
            score: lower is better, such as a held-out loss; that of the leading rank counts.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: it could not be written; those before it are as they were. On every rank.
            WindowUsageError: an update is under way.
            StaleGradientsError: gradients lie around, which a checkpoint does not hold.
            PoisonedWindowError: the window is beyond repair, on this rank or another.
            UnsupportedError: something in ``more`` that can't be read back without executing it.
        """
        _meet_between_updates(window, "save")
        return self.save_parts(_parts_of(window, more), score=score)

    def load(
        self,
        window: UpdateWindow,
        *,
        more: Mapping[str, Any] | None = None,
        which: int | str | Path | None = None,
    ) -> Found:
        """Put a run back to where a checkpoint was made; all ranks call it, between updates.

        Args:
            window: built as it was saved, except for m, A and D.
            more: the objects whose state was saved, by the same names.
            which: an update's number, the name of a checkpoint or a path; by default the newest.

        Returns:
            Where the run is now.

        Raises:
            CheckpointError: it is damaged; names the newest intact one. Nothing was changed.
            UsageError: it does not fit this run, or there is none. Nothing was changed.
            WindowUsageError: an update is under way.
            StaleGradientsError: gradients lie around, which would be added to the next update.
            PoisonedWindowError: the window is beyond repair; build a new one.
        """
        _meet_between_updates(window, "load")
        return self.load_parts(_parts_of(window, more), which=which)

    # Without a window ---------------------------------------------------------------------------------

    def save_parts(self, parts: TrainingParts, *, score: float | None = None) -> Path:
        """:meth:`save` for a loop without a window.

        Raises:
            UsageError: a score that is not finite, or safetensors is needed and missing.
        """
        together = _together(parts, self._process_group)
        refuse_state_of_one_rank(parts, together.ranks)
        together.all_or_none(lambda: refuse_to_save(parts, score))
        contents = together.all_or_none(lambda: take(parts))
        contents.files["rest.pt"]["random"] = together.gather(packed(RandomState.capture()))
        if in_parts := any(together.gather(bool(contents.apart))):
            together.all_or_none(need_safetensors)
        stages = stages_of_all(parts, together)
        manifest = _manifest(parts, together, score)
        on_disk = functools.partial(explained, self.folder, parts.counters.updates_attempted)

        unfinished = together.on_leader(lambda: on_disk(lambda: disk.begin_folder(self.folder)))
        try:
            written: Written = []
            if in_parts:
                written = together.gather(
                    together.all_or_none(
                        lambda: on_disk(lambda: write_apart(unfinished, contents.apart, together))
                    )
                )
            if stages is not None:
                written = together.gather(
                    together.all_or_none(
                        lambda: on_disk(lambda: write_stages(unfinished, contents, stages, together.rank))
                    )
                )
                contents.files["rest.pt"] |= told_of_stages(stages[0], written)
            path = together.on_leader(
                lambda: on_disk(lambda: _finish(unfinished, contents, written, manifest))
            )
        except BaseException:
            # Every rank: where the folder is not shared, each may have made its own.
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        together.on_leader(
            lambda: disk.rotate(self.folder, path, keep_last=self._keep_last, keep_best=self._keep_best)
        )
        return path

    def load_parts(self, parts: TrainingParts, *, which: int | str | Path | None = None) -> Found:
        """:meth:`load` for a loop without a window.

        The ranks may be more or fewer than those that saved, and hold the model in other parts.
        """
        together = _together(parts, self._process_group)
        path = together.on_leader(lambda: self._choose(which))
        facts, saved = together.all_or_none(lambda: self._read(path))
        if any(other != facts.files for other in together.gather(facts.files)):
            raise CheckpointError(f"the ranks see different files at {path}; give a folder that all share")
        if (stages := stages_of_all(parts, together)) is not None:
            saved = of_this_rank(saved, parts, stages)
        together.all_or_none(lambda: refuse_to_load(parts, facts, saved))
        targets = together.all_or_none(lambda: targets_apart(parts, saved))
        if targets:
            together.all_or_none(need_safetensors)
            together.all_or_none(lambda: read_apart(path, targets, together))
            filled(saved, targets)
        together.all_or_none(lambda: _put_back(parts, saved, path))
        restored = restore(
            saved["rest.pt"]["random"], rank=together.rank, updates_attempted=facts.updates_attempted
        )
        return Found(
            facts=facts,
            same_layout={**dict.fromkeys(_LAYOUT), **facts.layout} == _layout_of(parts, together),
            random_state_restored=restored,
            more=saved["rest.pt"]["plain"],
        )

    def _choose(self, which: int | str | Path | None) -> Path:
        paths = disk.checkpoint_paths(self.folder)
        there = ", ".join(path.name for path in paths) or "none"
        if which is None:
            if not paths:
                raise UsageError(f"there is no checkpoint in {self.folder}; the run has not saved one yet")
            return paths[-1]
        if isinstance(which, bool) or not isinstance(which, int | str | os.PathLike):
            raise UsageError(
                f"which={which!r} names no checkpoint; give the number of an update, a name or a path"
            )
        if isinstance(which, int):
            wanted = [path for path in paths if disk.update_of(path) == which]
        else:
            wanted = [path for path in (Path(which), self.folder / which) if path.is_dir()]
        if not wanted:
            raise UsageError(f"{str(which)!r} is no checkpoint; in {self.folder} there are: {there}")
        return wanted[-1]

    def _read(self, path: Path) -> tuple[CheckpointFacts, dict[str, Any]]:
        """Check a whole checkpoint and read what is not in parts; offers another where it is damaged."""
        try:
            facts = disk.read_facts(path)
            disk.check_files(facts)
            files = {name: read_file(path / name) for name in FILES}
            # Of the other stages only what is this rank's is read from the disk, once it is asked for.
            return facts, joined(files, lambda name: read_file(path / name, mmap=True))
        except DamageError as damage:
            offer = "there is no other in the folder that is whole"
            other = disk.newest_intact(self.folder, but=path)
            if other is not None:
                offer = f"the newest whole one is that of update {other.updates_attempted}, {other.path}"
            error = CheckpointError(f"{path} can't be loaded: {damage}. Nothing was changed; {offer}")
            error.newest_intact = None if other is None else str(other.path)
            raise error from None


def _parts_of(window: UpdateWindow, more: Mapping[str, Any] | None) -> TrainingParts:
    plan, finish = window.plan, window.finish
    model, optimizers = window._parts.ranks.as_of_one_rank(window.model, finish.optimizers)
    layout: dict[str, int | str | None] = {}
    if plan is not None:
        layout = {name: getattr(plan, name, None) for name in _LAYOUT if name != "ranks"}
    return TrainingParts(
        model=model,
        optimizers=optimizers,
        schedules=finish.schedules,
        scaler=finish.scaler,
        counters=window.counters,
        position=window,
        terms=window._parts.terms,
        more=dict(more or {}),
        layout=layout,
    )


def _meet_between_updates(window: UpdateWindow, what: str) -> None:
    """Refuse inside an update, and hear of a rank that failed or is poisoned."""
    parts = window._parts
    if parts.poisoned:
        raise PoisonedWindowError(parts.poisoned)
    if parts.open_update is not None:
        raise WindowUsageError(f"an update is under way; {what} between updates, after its with block")
    try:
        # The exchange by which ranks tell of their failures: whoever failed answers this one.
        parts.agreement.exchange(doing="saving or loading a checkpoint").wait()
    except PoisonedWindowError as error:
        parts.poisoned = str(error)
        raise


def _together(parts: TrainingParts, process_group: dist.ProcessGroup | None) -> Together:
    return Together.of(
        parts.model,
        process_group,
        during="over a checkpoint",
        failure=CheckpointError,
        lost=CheckpointError,
    )


def _layout_of(parts: TrainingParts, together: Together) -> dict[str, int | str | None]:
    return {**dict.fromkeys(_LAYOUT), **parts.layout, "ranks": together.ranks}


def _manifest(parts: TrainingParts, together: Together, score: float | None) -> dict[str, Any]:
    """What is known of a checkpoint before its files are."""
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "counters": parts.counters.state_dict(),
        "layout": _layout_of(parts, together),
        "score": None if score is None else float(score),
        "versions": {"torch": str(torch.__version__), "wholebatch": version("wholebatch")},
    }


def _finish(unfinished: Path, contents: Contents, written: Written, manifest: dict[str, Any]) -> Path:
    """Write what the leading rank writes, and give the folder its name."""
    facts = facts_of_parts(unfinished, written)
    for name in FILES:
        facts[name] = disk.write_file(
            unfinished / name, functools.partial(torch.save, contents.files[name])
        )
    updates_attempted = manifest["counters"]["updates_attempted"]
    return disk.finish_folder(unfinished, {**manifest, "files": facts}, updates_attempted=updates_attempted)


def _put_back(parts: TrainingParts, saved: Mapping[str, Any], path: Path) -> None:
    try:
        put_back(parts, saved)
    except Exception as error:
        raise CheckpointError(
            f"loading {path} failed half way ({type(error).__name__}: {error}); this run is neither where "
            f"it was nor where the checkpoint is, so build it anew and load again"
        ) from error
