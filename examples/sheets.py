"""Print the size of the built-in data set, and draw a page of it; other data sets draw pages with the same function.

python examples/sheets.py --sheet glyphs.png    # or glyphs.svg
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fewshot_callbacks.data import Glyphs
from fewshot_callbacks.data.dataset import Split
from fewshot_callbacks.data.glyphs import SCRIPTS_OF, load_drawing

# A selection of `Glyphs.face_names`: each family in each style.
FACE_FAMILIES = ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono", "STIX General")
FACE_STYLES = ("regular", "bold", "italic", "bold italic")
TEXT = 8.0  # points
LETTER = 0.067  # inches of an average letter in that size
ROOM = 0.3  # inches around the cells and the names


def draw_sheet(
    path: str | os.PathLike[str],
    pixels: np.ndarray,
    columns: Sequence[str],
    rows: Mapping[float, str],
    *,
    cells: tuple[int, int],
    width: float = 6.0,
    names: float,
    groups: Sequence[str] = (),
    rules: Sequence[float] = (),
    dpi: int = 200,
) -> None:
    """Write a page as a PNG, or as an SVG if the file name ends in .svg.

    Args:
        path: The file to write.
        pixels: The whole page, (height, width) or (height, width, colours); in grey, 0 is paper and ink is positive.
        columns: The name of each column, drawn upwards.
        rows: The position of each name on the left, in rows from the top, and the name.
        cells: Number of rows and columns.
        width: Width of the page, in inches.
        names: Width of the longest row name, in inches.
        groups: Names above the columns; each spans the same number of columns.
        rules: Positions of lines across the page, in rows from the top.
        dpi: Resolution of the page.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only a sheet needs a figure
    from matplotlib.figure import Figure  # noqa: PLC0415

    down, across = cells
    size = pixels.shape[1] / across
    cell = (width - names - ROOM) / across  # inches
    header = LETTER * max(map(len, columns)) + (0.3 if groups else 0.0)
    figure = Figure(figsize=(width, down * cell + header + ROOM), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(pixels, cmap="gray_r", interpolation="nearest", aspect="equal")
    axes.set_xticks([size * (i + 0.5) - 0.5 for i in range(across)], columns, rotation=90, fontsize=TEXT)
    axes.xaxis.tick_top()
    axes.set_yticks([size * place - 0.5 for place in rows], list(rows.values()), fontsize=TEXT)
    axes.tick_params(length=0)
    for number, group in enumerate(groups):
        middle, up = (number + 0.5) / len(groups), LETTER * max(map(len, columns)) + 0.08
        axes.annotate(
            group,
            (middle, 1),
            (0, 72 * up),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            fontsize=TEXT,
        )
    for place in rules:
        axes.axhline(size * place - 0.5, color="0.6", linewidth=0.6)
    axes.set_frame_on(False)
    kind = "svg" if Path(path).suffix.lower() == ".svg" else "png"
    figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})


def glyph_sheet(
    path: str | os.PathLike[str],
    split: Split | None = None,
    *,
    rows_per_script: int = 3,
    size: int = 32,
    dpi: int = 200,
) -> None:
    """Write a page of glyphs as PNG or SVG: rows are classes of each script, columns are typefaces.

    The classes are spread evenly over the classes of the script that most typefaces contain. A cell is empty if the typeface
    does not contain the character.

    Args:
        path: The file to write: an SVG if its name ends in .svg, otherwise a PNG.
        split: Split of the scripts; by default all.
        rows_per_script: Number of classes per script.
        size: Height and width of the glyphs, in pixels.
        dpi: Resolution of the page.
    """
    drawn = Glyphs(size=size)
    rows: list[tuple[Split, str, torch.Tensor]] = []  # (faces, size, size)
    for name in SCRIPTS_OF if split is None else (split,):
        glyphs = drawn.with_split(name)
        counts = glyphs.labels.bincount()
        for script in SCRIPTS_OF[name]:
            members = torch.tensor([c for c, of in enumerate(glyphs.scripts) if of == script])
            widest = members[counts[members] == counts[members].max()]
            for position in np.linspace(0, len(widest) - 1, rows_per_script + 2)[1:-1].round():
                items = glyphs.labels == widest[int(position)]
                row = torch.zeros(len(glyphs.face_names), size, size, dtype=torch.uint8)
                row[glyphs.faces[items]] = glyphs.images[items, 0]
                rows.append((name, script, row))

    page = torch.stack([row.permute(1, 0, 2).flatten(1) for _, _, row in rows]).flatten(
        0, 1
    )  # (rows * size, faces * size)
    scripts = [f"{script}\n({name})" for name, script, _ in rows[::rows_per_script]]
    draw_sheet(
        path,
        page.numpy(),
        FACE_STYLES * len(FACE_FAMILIES),
        {rows_per_script * (i + 0.5): script for i, script in enumerate(scripts)},
        cells=(len(rows), len(drawn.face_names)),
        names=0.65,
        groups=FACE_FAMILIES,
        rules=range(0, len(rows) + 1, rows_per_script),
        dpi=dpi,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write the sheet; the exit status is 1 if a setting cannot be used."""
    parser = argparse.ArgumentParser(description="Print the size of the glyph data set, and draw a page of it.")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images, in pixels")
    parser.add_argument("--min-faces", type=int, default=10, help="smallest number of faces that contain a character")
    parser.add_argument("--sheet", metavar="PATH", help="write a page of the set as a PNG")
    options = parser.parse_args(arguments)
    try:
        _glyphs(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _glyphs(options: argparse.Namespace) -> None:
    scripts = [script for of_split in SCRIPTS_OF.values() for script in of_split]
    look_alikes = dict(zip(scripts, load_drawing(options.size, options.min_faces).look_alikes, strict=True))
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
        Console().print(Text(f"Wrote {options.sheet}"))


if __name__ == "__main__":
    sys.exit(main())
