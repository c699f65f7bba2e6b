"""Draw a terminal screen as an SVG, for the README.

    tmux capture-pane -p -e | python lab/picture.py "wholebatch train" docs/images/train.svg

Reads text with ANSI colours from standard input; takes the command and the target file.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def draw(command: str, screen: str, target: str) -> None:
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi(screen.rstrip() + "\n"))
    drawn = console.export_svg(title=command)
    # no fonts from the network: the picture looks the same offline
    Path(target).write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


if __name__ == "__main__":
    draw(sys.argv[1], sys.stdin.read(), sys.argv[2])
