"""What the tests of runs and of the training job share: a record, and the settings of a tiny job.

It imports no torch; ``jobs.py`` runs these settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wholebatch.record import Evaluation, Resumption, RunHeader, UpdateRecord
from wholebatch.train.config import config_from_dict, config_text

TINY: dict[str, dict[str, Any]] = {
    "run": {"num_updates": 4, "evaluate_every_updates": 2, "print_every_updates": 2},
    "batch": {"global_batch_samples": 8, "micro_batch_samples": 2},
    "data": {"max_tokens_per_sample": 32, "held_out_one_in": 800},  # 8 samples held out
    "model": {"layers": 1, "width": 16, "heads": 2},
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_updates": 2},
    "precision": {"parameters": "float64"},
    "checkpoints": {"every_updates": 2},
    "proof": {"check_first_batch": False},
}


def a_record(update: int = 3, **changes: Any) -> UpdateRecord:
    """The record of one update; a quarter of its positions is padding."""
    values: dict[str, Any] = {
        "outcome": "applied",
        "updates_attempted": update,
        "updates_applied": update,
        "micro_batches": 4,
        "samples": 16,
        "items": 900,
        "positions": 1200,
        "loss_per_item": 2.5,
        "gradient_norm": 1.25,
        "learning_rates": [0.003, 0.003],
        "reductions": 1,
        "peak_memory_bytes": [1000 * 2**20, 512 * 2**20],
        "seconds": 0.5,
    }
    return UpdateRecord(**(values | changes))


def tiny_tables(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a tiny job as tables, with changes by section."""
    names = TINY | sections
    return {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names}


def write_tiny(folder: Path, **sections: dict[str, Any]) -> Path:
    """The same as a TOML file."""
    file = folder / "tiny.toml"
    file.write_text(config_text(config_from_dict(tiny_tables(**sections))), encoding="utf-8")
    return file


def a_header(**changes: Any) -> RunHeader:
    """What is the same for every update of ``a_record``'s run."""
    values: dict[str, Any] = {
        "global_batch_samples": 16,
        "micro_batch_samples": 4,
        "micro_batches_per_window": 2,
        "replicas": 2,
        "layout": {"ranks": 2, "tensor_parallel": 1},
        "tail": "partial",
        "precision": "parameters float32, forward float32",
        "seeds": {"data": 7},
    }
    return RunHeader(**(values | changes))


def an_evaluation(**changes: Any) -> Evaluation:
    """An evaluation after three updates of that run."""
    values: dict[str, Any] = {
        "split": "held_out",
        "updates_applied": 3,
        "samples_consumed": 48,
        "samples": 10,
        "items": 700,
        "loss_per_item": 2.75,
        "seconds": 0.5,
    }
    return Evaluation(**(values | changes))


def a_resumption(updates_attempted: int = 3, **changes: Any) -> Resumption:
    """That run, resumed after an update, on another split of the same global batch."""
    values: dict[str, Any] = {
        "updates_attempted": updates_attempted,
        "samples": 16 * updates_attempted,
        "micro_batch_samples": 8,
        "micro_batches_per_window": 1,
        "replicas": 2,
        "layout": {"ranks": 2},
        "precision": "parameters float32, forward bfloat16",
        "command": ["wholebatch", "train", "--resume", "runs/a"],
        "changed_settings": {"run.num_updates": [5, 8]},
    }
    return Resumption(**(values | changes))
