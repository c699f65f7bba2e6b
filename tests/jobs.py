"""Tiny training jobs: built, run to their end, and compared."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from runs import tiny_tables
from wholebatch.checkpoint_folder import checkpoint_paths
from wholebatch.record import Evaluation, UpdateRecord
from wholebatch.run_folder import Run, read_run
from wholebatch.train.config import TrainConfig, config_from_dict
from wholebatch.train.display import PlainDisplay
from wholebatch.train.job import JobResult, run_job
from wholebatch.train.parts import Job, build_job, check_settings
from wholebatch.train.resuming import find_earlier, settings_of
from wholebatch.train.world import World


def tiny(folder: Path | str, **sections: dict[str, Any]) -> TrainConfig:
    """The settings of a tiny job whose run is written to ``folder``."""
    tables = tiny_tables(**sections)
    tables["run"]["folder"] = str(folder)
    return config_from_dict(tables)


def built(config: TrainConfig, world: World | None = None) -> Job:
    """The job, checked and built as the command does it."""
    world = world or World()
    return build_job(config, world, check_settings(config, world.ranks))


class Listener(PlainDisplay):
    """A plain display that keeps its words, and calls back after each update."""

    def __init__(self, config: TrainConfig, after: Callable[[UpdateRecord], None] | None = None) -> None:
        self.words = io.StringIO()
        self.evaluations: list[Evaluation] = []
        self.after = after
        super().__init__(
            Console(file=self.words, width=200),
            num_updates=config.run.num_updates,
            print_every_updates=config.run.print_every_updates,
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        super().evaluated(evaluation)

    def updated(self, record: UpdateRecord) -> None:
        super().updated(record)
        if self.after is not None:
            self.after(record)


def after_update(number: int, act: Callable[[], Any]) -> Callable[[UpdateRecord], None]:
    """What a ``Listener`` is given to do something after an update."""

    def after(record: UpdateRecord) -> None:
        if record.updates_attempted == number:
            act()

    return after


def run(config: TrainConfig, world: World | None = None) -> tuple[JobResult, Job, Listener]:
    """A new run of the job to its end."""
    job = built(config, world)
    display = Listener(config)
    return run_job(job, display, command=["wholebatch", "train"]), job, display


def resumed(
    named: Path | str, *changes: str, world: World | None = None
) -> tuple[JobResult, Job, Listener]:
    """The run of a folder, or of a checkpoint in it, gone on with to its end."""
    earlier = find_earlier(Path(named))
    config = settings_of(earlier, changes)
    job = built(config, world)
    display = Listener(config)
    command = ["wholebatch", "train", "--resume", str(named)]
    return run_job(job, display, command=command, earlier=earlier), job, display


def parameters(job: Job) -> dict[str, Tensor]:
    """Copies of the model's parameters."""
    return {name: p.detach().clone() for name, p in job.model.module.named_parameters()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest of two models' parameters."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def told(folder: Path | str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records and evaluations of a run, without what no two runs have alike: seconds and memory."""
    found: Run = read_run(folder)
    lines = [r.to_dict() for r in found.records], [e.to_dict() for e in found.evaluations]
    for line in (*lines[0], *lines[1]):
        for name in ("seconds", "peak_memory_bytes"):
            line.pop(name, None)
    return lines


def saved(folder: Path | str, update: int) -> dict[str, Any]:
    """What the checkpoint after an update holds: model, optimizers and all the rest."""
    place = Path(folder) / "checkpoints" / f"update-{update:08d}"
    return {path.name: torch.load(path, weights_only=True) for path in sorted(place.glob("*.pt"))}


def differing(one: Any, other: Any, where: str = "") -> list[str]:
    """The places at which two nests of plain data and tensors are not the same bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [place for key in one for place in differing(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [place for n, (a, b) in pairs for place in differing(a, b, f"{where}/{n}")]
    return [] if type(one) is type(other) and one == other else [where]


OWN = '''
"""Samples and a model of one's own, which fail when a file says so."""

import os
import signal
from pathlib import Path

import torch
from torch import nn

import wholebatch


def die_once(bomb):
    """Kills rank 1, if the file ``bomb`` is there."""
    if os.environ.get("RANK", "0") == "1" and bomb.exists():
        bomb.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Rows:
    """Kills its process once, when sample number ``deadly`` of a rank is read."""

    def __init__(self, number, torn, bomb="bomb", deadly=0):
        self.number, self.torn = number, Path(torn)
        self.bomb, self.deadly, self.reads = Path(bomb), deadly, 0

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.reads += 1
        if self.reads == self.deadly:
            die_once(self.bomb)
        if self.torn.is_file() and self.torn.read_text() == str(index):
            raise ValueError(f"row {index} is torn")
        numbers = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 20, (index % 5 + 2,), generator=numbers)
        return {"input_ids": tokens, "labels": tokens.clone()}


def data(number=64, torn="torn", bomb="bomb", deadly=0):
    return {
        "train": Rows(number, torn, bomb, deadly),
        "held_out": Rows(8, "none"),
        "objective": wholebatch.next_token_loss(),
        "vocabulary": 20,
    }


class Model(nn.Module):
    """Kills its process once, in forward number ``deadly`` of a rank, if the file ``bomb`` is there."""

    def __init__(self, bomb, deadly):
        super().__init__()
        # the first is used last, so that gradients do not come in the reverse order of their parameters
        self.head, self.inside = nn.Linear(8, 20), nn.Embedding(20, 8)
        self.bomb, self.deadly, self.forwards = Path(bomb), deadly, 0

    def forward(self, tokens):
        self.forwards += self.training
        if self.forwards == self.deadly:
            die_once(self.bomb)
        return self.head(self.inside(tokens))


def model(bomb="bomb", deadly=10):
    return Model(bomb, deadly)
'''


def write_own(folder: Path) -> str:
    """A file with ``data`` and ``model``; the sections that name them begin with what is returned."""
    (folder / "own.py").write_text(OWN)
    return str(folder / "own.py")


def check_same_ends(one: Path, other: Path) -> None:
    """Two runs have the same evaluations, and wrote the same model and average."""
    (_, evaluations), (_, other_evaluations) = told(one), told(other)
    for here, there in zip(evaluations, other_evaluations, strict=True):
        assert here["loss_per_item"] == pytest.approx(there["loss_per_item"], rel=1e-11)
        assert (here["items"], here["samples"]) == (there["items"], there["samples"])
    for name in ("model", "model-average"):
        state, other_state = (torch.load(at / name / "model.pt", weights_only=True) for at in (one, other))
        assert largest_difference(state, other_state) < 1e-11


def on_forward(job: Job, number: int, act: Callable[[], Any], *, training: bool = True) -> None:
    """Do something in forward ``number`` of training or of evaluation, counted from 1."""
    seen = 0

    def count(module: torch.nn.Module, _: Any) -> None:
        nonlocal seen
        seen += module.training == training
        if module.training == training and seen == number:
            act()

    job.model.module.register_forward_pre_hook(count)


def newest_checkpoint(folder: Path | str) -> dict[str, str]:
    """A digest of each file of the last checkpoint that holds tensors."""

    def digest(file: Path) -> str:
        content = file.read_bytes()
        if file.suffix == ".safetensors":  # the order inside its header is chance
            content = content[8 + int.from_bytes(content[:8], "little") :]
        return hashlib.sha256(content).hexdigest()

    path = checkpoint_paths(Path(folder) / "checkpoints")[-1]
    files = [file for file in sorted(path.rglob("*")) if file.suffix in (".pt", ".safetensors")]
    return {str(file.relative_to(path)): digest(file) for file in files}


def checkpoint_names(folder: Path | str) -> list[str]:
    """The checkpoints of a run, by name."""
    return sorted(path.name for path in (Path(folder) / "checkpoints").glob("update-*"))
