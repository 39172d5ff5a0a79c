"""Lines for a terminal: coloured where one reads them, plain text everywhere else."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, TextIO

from rte.view.text import WIDTH

if TYPE_CHECKING:
    from rich.console import Console

Part = str | tuple[str, str]
"""A text, or a text and rich's name of its style."""


class Ink:
    """Writes lines to a stream. Nothing is said by colour alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console: Console | None = None
        if stream.isatty():
            # 0.1 s and 10 MiB that only a person at a terminal pays for.
            from rich.console import Console  # noqa: PLC0415

            self._console = Console(file=stream, highlight=False, markup=False, emoji=False)

    def line(self, *parts: Part) -> None:
        """Writes one line, seen at once; what is longer than the terminal is left to it."""
        if self._console is None:
            self._stream.write("".join(map(plain, parts)) + "\n")
        else:
            from rich.text import Text  # noqa: PLC0415 - loaded by then

            self._console.print(Text.assemble(*parts), soft_wrap=True)
        self._stream.flush()

    def labelled(self, label: str, words: str, style: str = "", *, room: int = 12) -> None:
        """A label and what it says, which goes on below itself."""
        rows = textwrap.wrap(
            words, WIDTH - room - 2, break_long_words=False, break_on_hyphens=False
        ) or [""]
        for number, row in enumerate(rows):
            head = label if not number else ""
            self.line("  ", (head.ljust(room), "dim"), (row, style))

    def title(self, words: str) -> None:
        self.line()
        self.line((words, "bold"))
        self.line(("─" * len(words), "dim"))


def plain(part: Part) -> str:
    return part if isinstance(part, str) else part[0]
