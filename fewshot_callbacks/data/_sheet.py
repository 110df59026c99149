"""Draws a page of a data set: rows of images under the names of the columns."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

TEXT = 8.0  # points
LETTER = 0.067  # inches of an average letter in that size
ROOM = 0.3  # inches beside the cells and the names


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
    """Write a page as a PNG, or as an SVG where the name of the file says so.

    Args:
        path: The file to write.
        pixels: The whole page: height and width, and the colours where it has some; grey is ink, 0 is paper.
        columns: The name of each column, drawn upwards.
        rows: The place of each name at the left, in rows from the top, and the name.
        cells: How many rows and columns there are.
        width: Of the page, in inches.
        names: Inches that the longest of the names of rows takes.
        groups: Names over the columns, each over as many.
        rules: Places of lines across the page, in rows from the top.
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
