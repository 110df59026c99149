"""`python -m fewshot_callbacks.data`: how large the built-in data set is, and a page of it."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fewshot_callbacks._terminal import as_text, printable
from fewshot_callbacks.data._glyph_drawing import SCRIPTS
from fewshot_callbacks.data.glyphs import SCRIPTS_OF, Glyphs, glyph_sheet, load_drawing


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the sheet.

    Args:
        arguments: Arguments of the command line; by default those of the process.

    Returns:
        The exit status: 0, or 1 where a setting cannot be used.

    Examples:
        >>> main(["--help"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    parser = argparse.ArgumentParser(
        prog="python -m fewshot_callbacks.data", description="Print the size of the glyph data set."
    )
    parser.add_argument("--size", type=int, default=32, help="height and width of the images, in pixels")
    parser.add_argument("--min-faces", type=int, default=10, help="smallest number of faces that contain a character")
    parser.add_argument("--sheet", metavar="PATH", help="write a page of the set as a PNG")
    options = parser.parse_args(arguments)
    try:
        _glyphs(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {printable(error)}", file=sys.stderr)
        return 1
    return 0


def _glyphs(options: argparse.Namespace) -> None:
    look_alikes = dict(zip(SCRIPTS, load_drawing(options.size, options.min_faces).look_alikes, strict=True))
    table = Table("split", "script", *(("classes", "images", "images per class", "look-alikes left out")))
    for column in table.columns[2:]:
        column.justify = "right"
    classes = images = 0
    drawn = Glyphs(size=options.size, min_faces=options.min_faces)
    for split, of_split in SCRIPTS_OF.items():
        glyphs = drawn.with_split(split)
        for script in of_split:
            inside = [label for label, of in enumerate(glyphs.scripts) if of == script]
            counts = glyphs.labels.bincount()[inside]
            spread = f"{counts.min()} - {counts.max()}" if inside else ""
            table.add_row(split, script, f"{len(inside):,}", f"{counts.sum():,}", spread, f"{look_alikes[script]:,}")
        table.add_row(split, "all", f"{len(glyphs.class_names):,}", f"{len(glyphs):,}", end_section=True, style="bold")
        classes, images = classes + len(glyphs.class_names), images + len(glyphs)
    table.add_row("all", "", f"{classes:,}", f"{images:,}", "", f"{sum(look_alikes.values()):,}", style="bold")
    Console().print(table)
    if options.sheet is not None:
        glyph_sheet(options.sheet, size=options.size)
        Console().print(as_text(f"Wrote {options.sheet}"))


if __name__ == "__main__":
    sys.exit(main())
