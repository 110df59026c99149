"""Draws a page of icons: rows are classes, columns the families of themes."""

import os

import numpy as np
import torch
from sheets import draw_sheet

from icons.augmentation import on_white
from icons.drawing import DrawnIcons


def icon_sheet(path: str | os.PathLike[str], drawn: DrawnIcons, *, rows: int = 14, dpi: int = 200) -> None:
    """Write a page of icons as PNG or SVG; an empty cell is a family without its own picture.

    The classes are spread evenly over the alphabet, among the quarter of classes that most families have.

    Args:
        path: The file to write: an SVG if its name ends in .svg, otherwise a PNG.
        drawn: The icons.
        rows: Maximum number of classes on the page.
        dpi: Resolution of the page.
    """
    size, columns = drawn.images.shape[-1], len(drawn.family_names)
    counts = drawn.classes.bincount(minlength=len(drawn.names))
    held_most = counts.argsort(descending=True, stable=True)[: max(rows, len(drawn.names) // 4)].sort().values
    chosen = held_most[np.linspace(0, len(held_most) - 1, min(rows, len(held_most))).round()].tolist()
    page = torch.ones(len(chosen), columns, 3, size, size)
    for row, name in enumerate(chosen):
        items = drawn.classes == name
        page[row, drawn.families[items]] = on_white(drawn.images[items].float() / 255)
    pixels = page.permute(0, 3, 1, 4, 2).reshape(len(chosen) * size, columns * size, 3)

    names = [drawn.names[name] for name in chosen]
    draw_sheet(
        path,
        pixels.numpy(),
        drawn.family_names,
        {row + 0.5: name for row, name in enumerate(names)},
        cells=(len(chosen), columns),
        width=7.0,
        names=0.067 * max(map(len, names)),
        dpi=dpi,
    )
