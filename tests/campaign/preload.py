"""What the fork server of a whole campaign does once: a second that every process would pay else."""

from __future__ import annotations

import contextlib

with contextlib.suppress(Exception):  # whoever needs it imports it again, and the error shows there
    import torch

    import campaign.child  # noqa: F401

    # The first optimizer of a process imports much of torch's compiler.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
