"""``python -m wholebatch``, the form that torchrun starts."""

from __future__ import annotations

import sys

from wholebatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
