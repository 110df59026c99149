"""Queries and what was retrieved for them, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fewshot_callbacks.plots.style import (
    BLACK,
    GREY,
    IRRELEVANT,
    LIGHT_GREY,
    RELEVANT,
    SMALL,
    TEXT,
    WIDTH,
    in_house_style,
    new_figure,
)
from fewshot_callbacks.plots.text import readable, shorten, width_of, wrap

MOST_IN_A_LINE = 6  # neighbours beside a query: a picture of 70 pixels, where the figure has 600
EDGE, GAP, APART = 0.1, 0.1, 0.16  # inches: around the figure, between cells, between rows
LINE = 0.155  # inches from one line of small text to the next
Dashes = Literal["-"] | tuple[float, Sequence[float]]
MARKS: dict[bool, tuple[str, Dashes, str]] = {True: (RELEVANT, "-", "✓"), False: (IRRELEVANT, (0, (3, 1.5)), "✕")}


@dataclass(frozen=True, eq=False)
class Item:
    """A query or a gallery item, as it is shown.

    Attributes:
        picture: What `to_picture` returned, (height, width, 1 or 3) between 0 and 1; a text, which is drawn as text; or
            None if there is nothing to show.
        label: The name of its class.
    """

    picture: np.ndarray | str | None
    label: str


@dataclass(frozen=True, eq=False)
class Neighbour:
    """An item that was retrieved.

    Attributes:
        item: The item.
        score: Larger is closer.
        relevant: Whether it is relevant to the query.
        tied: Whether another candidate, shown or not, has the same score; ties between shown neighbours are also found
            without it.
    """

    item: Item
    score: float
    relevant: bool
    tied: bool = False


@dataclass(frozen=True, eq=False)
class PanelRow:
    """A query with its shown neighbours, the closest first.

    Attributes:
        query: The query.
        neighbours: The first neighbours.
        caption: A text on the query, such as "AP 0.31, first hit at rank 4".
    """

    query: Item
    neighbours: Sequence[Neighbour]
    caption: str = ""


@dataclass(frozen=True)
class _Grid:
    """Where the cells of a row are, in inches."""

    columns: int
    lines: int

    @property
    def side(self) -> float:
        """The height and width of a picture."""
        room = WIDTH - 2 * EDGE - 2 * GAP - self.columns * GAP  # twice the gap between the query and the others
        return min(room / (self.columns + 1), 1.3)

    @property
    def cell(self) -> float:
        """The height of a picture and of the two lines below it."""
        return self.side + 2 * LINE + GAP

    @property
    def row(self) -> float:
        """The height of a query with its neighbours and the line above."""
        return LINE + 0.07 + self.lines * self.cell + APART

    def left(self, column: int) -> float:
        """The left edge of a neighbour's picture."""
        return EDGE + self.side + 3 * GAP + column * (self.side + GAP)


@in_house_style
def retrieval_panels(rows: Sequence[PanelRow], title: str = "") -> Figure:
    """Show queries, each with its first neighbours to the right of it, the closest first.

    A relevant neighbour has a solid frame and a check mark, an irrelevant one a dashed frame in another colour and a
    cross. Next to the mark are its rank and its score, and "tie" if another candidate has the same score. More than six
    neighbours take several lines.

    Args:
        rows: The queries, from top to bottom.
        title: A line above all rows.

    Returns:
        A figure of 6 inches in width, as high as its rows.

    Raises:
        ValueError: If there is no row.

    Examples:
        >>> cat = Item("a cat on a mat", "cat")
        >>> figure = retrieval_panels([PanelRow(cat, [Neighbour(Item(None, "dog"), 0.8, relevant=False)], "AP 0.25")])
        >>> figure.get_size_inches().round(2).tolist()
        [6.0, 2.32]
    """
    if not rows:
        raise ValueError("There is no query to show. Pass at least one row.")
    most = max(len(row.neighbours) for row in rows)
    lines = max(1, -(-most // MOST_IN_A_LINE))
    grid = _Grid(columns=max(1, -(-most // lines)), lines=lines)
    head = 0.3 if title else 0.0
    height = EDGE + head + len(rows) * grid.row - APART + 0.28
    figure = new_figure(height, arranged=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0), aspect="equal")  # one unit is an inch, downwards
    axes.set_axis_off()
    if title:
        axes.text(EDGE, EDGE + 0.02, shorten(title, WIDTH - 2 * EDGE, TEXT + 1), fontsize=TEXT + 1, va="top")
    for number, row in enumerate(rows):
        _draw_row(axes, row, grid, EDGE + head + number * grid.row)
    _explain_marks(axes, height - EDGE - 0.06)
    return figure


def _draw_row(axes: Axes, row: PanelRow, grid: _Grid, top: float) -> None:
    room = WIDTH - 2 * EDGE
    caption = shorten(row.caption, 0.6 * room, SMALL)
    name = shorten(row.query.label, room - width_of(caption, SMALL) - 2 * GAP, TEXT)
    axes.text(EDGE, top + LINE / 2, name, fontsize=TEXT, va="center")
    axes.text(WIDTH - EDGE, top + LINE / 2, caption, fontsize=SMALL, color=GREY, ha="right", va="center")
    axes.plot([EDGE, WIDTH - EDGE], [top + LINE + 0.02] * 2, color=LIGHT_GREY, linewidth=0.6)
    top += LINE + 0.07
    _draw_item(axes, row.query, EDGE, top, grid.side, BLACK, "-")
    axes.text(EDGE, top + grid.side + 0.6 * LINE + 0.02, "query", fontsize=SMALL, color=GREY, va="center")
    scores = [neighbour.score for neighbour in row.neighbours]
    for place, neighbour in enumerate(row.neighbours):
        line, column = divmod(place, grid.columns)
        tied = neighbour.tied or scores.count(neighbour.score) > 1
        _draw_neighbour(axes, neighbour, place + 1, tied, (grid.left(column), top + line * grid.cell), grid.side)


def _draw_neighbour(
    axes: Axes, neighbour: Neighbour, rank: int, tied: bool, corner: tuple[float, float], side: float
) -> None:
    left, top = corner
    colour, dashes, mark = MARKS[neighbour.relevant]
    _draw_item(axes, neighbour.item, left, top, side, colour, dashes)
    below = top + side + 0.02
    axes.text(left, below + 0.6 * LINE, shorten(neighbour.item.label, side, SMALL), fontsize=SMALL, va="center")
    badge = f"{rank} {mark}"
    width = width_of(badge, SMALL - 1) + 0.06
    axes.add_patch(Rectangle((left, below + 1.12 * LINE), width, 0.9 * LINE, facecolor=colour, edgecolor="none"))
    middle = below + 1.58 * LINE
    axes.text(left + 0.03, middle, badge, fontsize=SMALL - 1, color="white", va="center_baseline")
    room = side - width - 0.04
    shown = f"{score_text(neighbour.score)} tie" if tied else score_text(neighbour.score)
    axes.text(
        left + width + 0.04,
        middle,
        shorten(shown, room, SMALL - 1),
        fontsize=SMALL - 1,
        color=GREY,
        va="center_baseline",
    )


def _draw_item(
    axes: Axes,
    item: Item,
    left: float,
    top: float,
    side: float,
    colour: str,
    dashes: Dashes,
) -> None:
    right, bottom = left + side, top + side
    if isinstance(item.picture, str):
        height = 1.25 * (SMALL - 0.5) / 72
        lines = wrap(item.picture, side - 0.1, int((side - 0.08) / height), SMALL - 0.5)
        for number, text in enumerate(lines):
            axes.text(left + 0.05, top + 0.05 + number * height, text, fontsize=SMALL - 0.5, va="top")
    elif item.picture is None:
        axes.add_patch(Rectangle((left, top), side, side, facecolor=LIGHT_GREY, edgecolor="none"))
        axes.text(left + side / 2, top + side / 2, "no image", fontsize=SMALL, color=GREY, ha="center", va="center")
    else:
        height, width = item.picture.shape[:2]
        across, down = (side * length / max(height, width) / 2 for length in (width, height))
        middle, level = (left + right) / 2, (top + bottom) / 2
        picture = np.broadcast_to(item.picture, (height, width, 3))
        limits = axes.axis()
        # An image with fewer pixels than the screen has there would be blurred if it were smoothed.
        smoothing: Literal["nearest", "auto"] = "nearest" if max(height, width) < 100 * side else "auto"
        axes.imshow(
            picture,
            extent=(middle - across, middle + across, level + down, level - down),
            interpolation=smoothing,
            aspect="equal",
            vmin=0,
            vmax=1,
        )
        axes.set(xlim=limits[:2], ylim=limits[2:])  # imshow sets them to the picture
    axes.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor=colour, linewidth=1.8, linestyle=dashes))


def _explain_marks(axes: Axes, level: float) -> None:
    left = EDGE
    for relevant, words in ((True, "{} relevant"), (False, "{} not relevant")):
        colour, dashes, mark = MARKS[relevant]
        axes.add_line(Line2D([left, left + 0.3], [level, level], color=colour, linestyle=dashes, linewidth=1.8))
        axes.text(left + 0.36, level, words.format(mark), fontsize=SMALL, va="center")
        left += 0.36 + width_of(words.format(mark), SMALL) + 0.25


def score_text(score: float) -> str:
    """Write a score in few characters.

    Examples:
        >>> score_text(0.91234), score_text(-123.456), score_text(2.5e7)
        ('0.912', '-123.5', '2.5e+07')
    """
    if abs(score) < 10:
        return f"{score:.3f}"
    return f"{score:.1f}" if abs(score) < 10_000 else readable(f"{score:.3g}")
