"""What the fork server of ``ranks.py`` does once, so that no worker has to.

A module that is missing, or broken while somebody is editing it, must not take the server down:
the worker that needs it will import it again and report the error where it belongs.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in (
    *("torch.distributed", "torch.distributed.checkpoint", "torch.distributed.pipelining"),
    *("torch.nn.parallel", "numpy", "hypothesis", "pytest", "ranks"),
    *("wholebatch.window", "wholebatch.oracle", "wholebatch.resume", "wholebatch.train.job"),
    "wholebatch.audit.loop",
):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

with contextlib.suppress(ImportError):
    import torch

    # Not only a flag: it imports 800 modules of the compiler, a second that each worker would pay.
    torch.use_deterministic_algorithms(True)
