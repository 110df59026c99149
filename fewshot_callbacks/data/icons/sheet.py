"""Draws a page of icons: rows are classes, columns the families of themes."""

import os

import numpy as np
import torch

from fewshot_callbacks.data.icons.augmentation import on_white
from fewshot_callbacks.data.icons.drawing import DrawnIcons


def icon_sheet(path: str | os.PathLike[str], drawn: DrawnIcons, *, rows: int = 14, dpi: int = 100) -> None:
    """Write a page of icons as a PNG; an empty cell is a family without its own picture.

    The classes are spread evenly over the alphabet, among the quarter that most families hold.

    Args:
        path: The file to write.
        drawn: The icons.
        rows: Classes on the page, at most.
        dpi: Resolution of the page.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only a sheet needs a figure
    from matplotlib.figure import Figure  # noqa: PLC0415

    size, columns = drawn.images.shape[-1], len(drawn.family_names)
    counts = drawn.classes.bincount(minlength=len(drawn.names))
    held_most = counts.argsort(descending=True, stable=True)[: max(rows, len(drawn.names) // 4)].sort().values
    chosen = held_most[np.linspace(0, len(held_most) - 1, min(rows, len(held_most))).round()].tolist()
    page = torch.ones(len(chosen), columns, 3, size, size)
    for row, name in enumerate(chosen):
        items = drawn.classes == name
        page[row, drawn.families[items]] = on_white(drawn.images[items].float() / 255)
    pixels = page.permute(0, 3, 1, 4, 2).reshape(len(chosen) * size, columns * size, 3)

    figure = Figure(figsize=(3.0 + 0.32 * columns, 1.2 + 0.34 * len(chosen)), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(pixels.numpy(), interpolation="nearest", aspect="equal")
    axes.set_xticks(
        [size * (i + 0.5) - 0.5 for i in range(columns)], drawn.family_names, rotation=60, ha="left", fontsize=7
    )
    axes.xaxis.tick_top()
    axes.set_yticks(
        [size * (i + 0.5) - 0.5 for i in range(len(chosen))], [drawn.names[name] for name in chosen], fontsize=7
    )
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    figure.savefig(path, format="png")
