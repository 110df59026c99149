"""`table`: results as tables of plain text, for `print` and the prompt."""

from __future__ import annotations

from collections.abc import Sequence

# Number of rows of a result that are shown. The last line counts the others.
SHOWN_ROWS = 10


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], total: int | None = None) -> list[str]:
    """Return the lines of a table.

    `total` is the number of all rows; by default, the number of shown rows.

    Examples:
        >>> print(chr(10).join(table(("item", "score"), [("3", "0.9000"), ("12", "0.8000")], total=5)))
        item   score
           3  0.9000
          12  0.8000
        ... and 3 more
    """
    cells = [columns, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    if total is not None and total > len(rows):
        lines.append(f"... and {total - len(rows):,} more")
    return lines
