"""Tensors that the ranks hold in parts, written and read through ``torch.distributed.checkpoint``.

Its own ``.metadata`` is a pickle that is executed when it is read (``FileSystemReader.read_metadata`` in
torch 2.13). The safetensors storage has none: names, shapes and places are JSON in each file's head.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from wholebatch.checkpoint_folder import file_facts
from wholebatch.errors import CheckpointError
from wholebatch.extras import needed
from wholebatch.ranks.lost import is_lost_contact
from wholebatch.ranks.together import Together

FOLDER = "parts"


def need_safetensors() -> None:
    """Refuse to begin what would fail half way.

    Raises:
        UsageError: safetensors is not installed.
    """
    needed("safetensors", extra="hf", why="a checkpoint of a model that the ranks hold in parts")


def write_apart(unfinished: Path, tensors: Mapping[str, Tensor], together: Together) -> list[str]:
    """Every rank writes its own parts into ``unfinished/parts``; returns the names of this rank's files.

    Raises:
        CheckpointError: some rank could not write; every rank raises.
    """
    writer = HuggingFaceStorageWriter(str(unfinished / FOLDER), save_distributed=True)
    try:
        with _alone_is_fine():
            save(dict(tensors), storage_writer=writer, process_group=together.group)
    except RuntimeError as error:
        raise (together.cut_off(error, together.during) if is_lost_contact(error) else error) from None
    except CheckpointException as error:
        causes = ", ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError(
            f"the parts of a checkpoint could not be written to {unfinished.parent} ({causes}); the "
            f"checkpoints before it are as they were"
        ) from None
    return [path.name for path in (unfinished / FOLDER).glob(f"shard-{together.rank + 1:05}-*")]


def facts_of_parts(unfinished: Path, written: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Bytes and digest of the files that the ranks wrote, as the leading rank sees them.

    Raises:
        CheckpointError: it does not see them, so that nobody could read the checkpoint as a whole.
    """
    facts = {}
    for rank, names in enumerate(written):
        for name in names:
            path = unfinished / FOLDER / name
            if not path.exists():
                raise CheckpointError(
                    f"rank {rank} wrote its part of a checkpoint to {unfinished.parent}, where the leading "
                    f"rank does not see it; give a folder that all ranks share"
                )
            facts[f"{FOLDER}/{name}"] = file_facts(path)
    return facts


def read_apart(checkpoint: Path, targets: dict[str, Tensor], together: Together) -> None:
    """Read into ``targets`` what each rank needs of them, whoever wrote it.

    Exactness: bit for bit.
    """
    reader = HuggingFaceStorageReader(str(checkpoint / FOLDER))
    with _alone_is_fine():
        load({**targets}, storage_reader=reader, process_group=together.group)


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """One rank may read what several wrote; torch warns of it each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
