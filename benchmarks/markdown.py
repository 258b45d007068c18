"""Paragraphs and tables in Markdown, for the reports of measurements."""

import textwrap
from collections.abc import Iterable, Sequence


def text(paragraph: str) -> str:
    """Return a paragraph in lines of 120 characters at most."""
    return textwrap.fill(" ".join(paragraph.split()), 120)


def table(names: Sequence[str], rows: Iterable[Sequence[object]], alignment: str = "") -> str:
    """Return a table.

    Args:
        names: Heads of the columns.
        rows: The cells of each row.
        alignment: `l` or `r` for each column; by default all but the first are aligned to the right.
    """
    letters = alignment or "l" + "r" * (len(names) - 1)
    rule = "|".join("---" if letter == "l" else "---:" for letter in letters)
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (names, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])
