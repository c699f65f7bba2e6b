"""What DeepSpeed compiles at its first start on a machine, for about a minute and without a word."""

from __future__ import annotations

from pathlib import Path

from wholebatch.extras import needed


def missing_builds() -> dict[str, Path]:
    """What DeepSpeed is going to compile when it starts on this machine; nothing, once it has.

    These are the operations of every start: on a CPU its collectives in shared memory. An ``optimizer``
    section of its configuration, or offload, may want others.

    Returns:
        For each its folder, where a file ``lock`` tells the other ranks to wait. One that was cut short
        leaves the file behind, and then every start waits for ever.

    Raises:
        UsageError: DeepSpeed is not installed.
    """
    deepspeed = needed("deepspeed", extra="deepspeed", why="asking what DeepSpeed compiles")
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-not-found]
    from deepspeed.git_version_info import installed_ops  # type: ignore[import-not-found]

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return {}
    folder = _folder_of(builder.name)
    built = (folder / f"{builder.name}.so").exists() and not (folder / "lock").exists()
    return {} if built or installed_ops.get(builder.name, False) else {builder.name: folder}


def _folder_of(name: str) -> Path:
    """Where torch puts what it compiles."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))
