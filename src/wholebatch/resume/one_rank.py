"""What is refused because its state is that of one rank, and the leading one's alone would be kept."""

from __future__ import annotations

from wholebatch.errors import UsageError
from wholebatch.resume.contents import TrainingParts


def refuse_state_of_one_rank(parts: TrainingParts, ranks: int) -> None:
    """Refuse an object whose state is that of its rank alone.

    Raises:
        UsageError: with what to do.
    """
    for name, one in parts.objects.items():
        if ranks > 1 and getattr(one, "state_is_of_one_rank", False):
            raise UsageError(
                f"more[{name!r}] is a {type(one).__name__} over a stream, whose state on this rank says "
                f"nothing of those on the other {ranks - 1}; gather the states of all ranks "
                f"(torch.distributed.all_gather_object), save their list, more={{{name!r}: states}}, and "
                f"give each rank found.more[{name!r}][rank] back with load_state_dict"
            )
