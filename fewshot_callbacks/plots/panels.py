"""Queries and what was retrieved for them, side by side, and images of any kind as pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from fewshot_callbacks.files.images import as_seen, has_known_range, upright
from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.style import in_house_style, new_figure, readable, shorten, width_of, wrap

Picture = Float[np.ndarray, "height width channels"]
Scale = float | Sequence[float] | np.ndarray | Tensor

LONGEST = 256  # pixels: more than a panel shows at 200 pixels per inch


def to_picture(image: Any, mean: Scale | None = None, std: Scale | None = None, longest: int = LONGEST) -> Picture:
    """Convert the input image of a network to a picture that can be shown.

    One channel is shown in grey, two as the grey mean of both, three as red, green and blue, four as red, green, blue
    and alpha on white; of more than four, the first three are shown. Integers between 0 and 255 are divided by 255.
    Fractions between 0 and 1 are kept. Other values are stretched so that the smallest becomes black and the largest
    white, or are all mid-grey if they are equal. NaN and infinity are mid-grey. A Pillow image is turned upright, as its
    Exif tag says, and lies on white where it is transparent.

    Args:
        image: A tensor (channels, height, width) or (height, width); an array (height, width) or (height, width,
            channels), or with the channels first if no other axis can hold the channels; or a Pillow image.
        mean: Mean of the normalisation that is undone, one value or one per channel. The result is clipped to [0, 1],
            or to [0, 255] if a mean is greater than 1.
        std: Standard deviation of that normalisation, in the same form.
        longest: A picture with a longer side is reduced, by averaging squares of pixels.

    Returns:
        (height, width, 1 or 3) float32 values in [0, 1].

    Raises:
        ValueError: If it is not an image, or `mean` or `std` has neither one value nor one per channel.

    Examples:
        >>> import torch
        >>> to_picture(torch.full((1, 2, 2), 51, dtype=torch.uint8))[0, 0], to_picture(torch.rand(7, 8, 9)).shape
        (array([0.2], dtype=float32), (8, 9, 3))
    """
    values, whole = _channels_last(image)
    if mean is not None or std is not None:
        values, top = _denormalised(values, mean, std)
        values = (values / top).clip(0, 1)
    elif whole and values.min() >= 0 and values.max() <= 255:
        values = values / 255
    else:
        values = _stretched(values)
    values = np.nan_to_num(_smaller(values, longest), nan=0.5)
    channels = values.shape[-1]
    if channels == 2:
        values = values.mean(-1, keepdims=True)
    elif channels == 4:
        values = values[..., :3] * values[..., 3:] + 1 - values[..., 3:]
    picture: Picture = values[..., :3].astype(np.float32).clip(0, 1)
    return picture


def _channels_last(image: Any) -> tuple[Float[np.ndarray, "height width channels"], bool]:
    """Values as float64, with NaN for what is not finite, and whether they are integers."""
    if isinstance(image, Image.Image):
        image = _of_pillow(image)
    array = as_array(image)
    first = isinstance(image, Tensor) or (array.ndim == 3 and array.shape[-1] > 4 and array.shape[0] in (1, 3, 4))
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "biuf":
        raise ValueError(
            "An image needs the axes height and width, and optionally channels, and must hold numbers; this one has the "
            f"shape {tuple(array.shape)} and the type {array.dtype}."
        )
    if array.ndim == 2:
        array = array[..., None]
    elif first:
        array = np.moveaxis(array, 0, -1)
    values = array.astype(np.float64)
    return np.where(np.isfinite(values), values, np.nan), array.dtype.kind in "iu"


def _of_pillow(image: Image.Image) -> Image.Image:
    """Return a picture that is upright, opaque and of red, green and blue; numbers of more than 8 bits stay as they are."""
    if not has_known_range(image) or image.mode.startswith("I;16"):
        return upright(image)
    seen = as_seen(image)
    # Numbers of a palette or of another colour space would be shown as if they were red, green and blue.
    return seen.convert("RGB") if seen.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV") else seen


def as_array(values: Any) -> np.ndarray:
    """Values of a tensor of any kind, or of anything that NumPy takes."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    # By float64, since NumPy has no bfloat16.
    array: np.ndarray = (values.double() if values.is_floating_point() else values).numpy()
    return array


def _denormalised(
    values: Float[np.ndarray, "height width channels"], mean: Scale | None, std: Scale | None
) -> tuple[Float[np.ndarray, "height width channels"], float]:
    """Values before the normalisation, and the value of white."""
    shift, scale = (
        np.asarray(default if given is None else given, dtype=np.float64).reshape(-1)
        for given, default in ((mean, 0.0), (std, 1.0))
    )
    for name, given in (("mean", shift), ("std", scale)):
        if len(given) not in (1, values.shape[-1]):
            raise ValueError(f"{name} has {len(given)} values for an image of {values.shape[-1]} channels.")
    return values * scale + shift, 255.0 if shift.max() > 1 else 1.0


def _stretched(values: Float[np.ndarray, "height width channels"]) -> Float[np.ndarray, "height width channels"]:
    """Fractions as they are, other values stretched to 0 ... 1."""
    known = values[~np.isnan(values)]
    if not known.size:
        return values
    low, high = known.min(), known.max()
    if low >= 0 and high <= 1:
        return values
    if low == high:
        return np.full_like(values, 0.5)
    stretched: Float[np.ndarray, "height width channels"] = values / (high - low) - low / (high - low)
    return stretched


def _smaller(values: Float[np.ndarray, "height width channels"], longest: int) -> Float[np.ndarray, "..."]:
    """Means over squares of pixels, the least that make the sides short enough; what is left over is cut off."""
    height, width, channels = values.shape
    step = -(-max(height, width) // longest)
    if step == 1 or min(height, width) < step:
        return values
    cut = values[: height // step * step, : width // step * step]
    small: Float[np.ndarray, "..."] = cut.reshape(height // step, step, width // step, step, channels).mean((1, 3))
    return small


MOST_IN_A_LINE = 6  # neighbours beside a query: a picture of 70 pixels, where the figure has 600
EDGE, GAP, APART = 0.1, 0.1, 0.16  # inches: around the figure, between cells, between rows
LINE = 0.155  # inches from one line of small text to the next
Dashes = Literal["-"] | tuple[float, Sequence[float]]
MARKS: dict[bool, tuple[str, Dashes, str]] = {
    True: (style.RELEVANT, "-", "✓"),
    False: (style.IRRELEVANT, (0, (3, 1.5)), "✕"),
}


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
        room = style.WIDTH - 2 * EDGE - 2 * GAP - self.columns * GAP  # twice the gap between the query and the others
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
    axes.set(xlim=(0, style.WIDTH), ylim=(height, 0), aspect="equal")  # one unit is an inch, downwards
    axes.set_axis_off()
    if title:
        _write(axes, EDGE, EDGE + 0.02, title, style.WIDTH - 2 * EDGE, style.TEXT + 1, va="top")
    for number, row in enumerate(rows):
        _draw_row(axes, row, grid, EDGE + head + number * grid.row)
    _explain_marks(axes, height - EDGE - 0.06)
    return figure


def _write(
    axes: Axes, left: float, level: float, text: str, room: float = math.inf, size: float = style.SMALL, **how: Any
) -> None:
    """Write a line of text, cut to its room in inches, by default with its middle at the level."""
    axes.text(
        left, level, text if room == math.inf else shorten(text, room, size), fontsize=size, **{"va": "center"} | how
    )


def _draw_row(axes: Axes, row: PanelRow, grid: _Grid, top: float) -> None:
    room = style.WIDTH - 2 * EDGE
    caption = shorten(row.caption, 0.6 * room, style.SMALL)
    beside = room - width_of(caption, style.SMALL) - 2 * GAP
    _write(axes, EDGE, top + LINE / 2, row.query.label, beside, style.TEXT)
    _write(axes, style.WIDTH - EDGE, top + LINE / 2, caption, color=style.GREY, ha="right")
    axes.plot([EDGE, style.WIDTH - EDGE], [top + LINE + 0.02] * 2, color=style.LIGHT_GREY, linewidth=0.6)
    top += LINE + 0.07
    _draw_item(axes, row.query, EDGE, top, grid.side, style.BLACK, "-")
    _write(axes, EDGE, top + grid.side + 0.6 * LINE + 0.02, "query", color=style.GREY)
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
    _write(axes, left, below + 0.6 * LINE, neighbour.item.label, side)
    badge, small = f"{rank} {mark}", style.SMALL - 1
    width = width_of(badge, small) + 0.06
    axes.add_patch(Rectangle((left, below + 1.12 * LINE), width, 0.9 * LINE, facecolor=colour, edgecolor="none"))
    middle, level = below + 1.58 * LINE, "center_baseline"
    _write(axes, left + 0.03, middle, badge, size=small, color="white", va=level)
    shown = f"{score_text(neighbour.score)} tie" if tied else score_text(neighbour.score)
    _write(axes, left + width + 0.04, middle, shown, side - width - 0.04, small, color=style.GREY, va=level)


def _draw_item(axes: Axes, item: Item, left: float, top: float, side: float, colour: str, dashes: Dashes) -> None:
    middle, level = left + side / 2, top + side / 2
    if isinstance(item.picture, str):
        size = style.SMALL - 0.5
        height = 1.25 * size / 72
        for number, text in enumerate(wrap(item.picture, side - 0.1, int((side - 0.08) / height), size)):
            _write(axes, left + 0.05, top + 0.05 + number * height, text, size=size, va="top")
    elif item.picture is None:
        axes.add_patch(Rectangle((left, top), side, side, facecolor=style.LIGHT_GREY, edgecolor="none"))
        _write(axes, middle, level, "no image", color=style.GREY, ha="center")
    else:
        height, width = item.picture.shape[:2]
        across, down = (side * length / max(height, width) / 2 for length in (width, height))
        limits = axes.axis()
        # An image with fewer pixels than the screen has there would be blurred if it were smoothed.
        smoothing: Literal["nearest", "auto"] = "nearest" if max(height, width) < 100 * side else "auto"
        extent = (middle - across, middle + across, level + down, level - down)
        picture = np.broadcast_to(item.picture, (height, width, 3))
        axes.imshow(picture, extent=extent, interpolation=smoothing, aspect="equal", vmin=0, vmax=1)
        axes.set(xlim=limits[:2], ylim=limits[2:])  # imshow sets them to the picture
    axes.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor=colour, linewidth=1.8, linestyle=dashes))


def _explain_marks(axes: Axes, level: float) -> None:
    left = EDGE
    for relevant, words in ((True, "{} relevant"), (False, "{} not relevant")):
        colour, dashes, mark = MARKS[relevant]
        axes.add_line(Line2D([left, left + 0.3], [level, level], color=colour, linestyle=dashes, linewidth=1.8))
        _write(axes, left + 0.36, level, words.format(mark))
        left += 0.36 + width_of(words.format(mark), style.SMALL) + 0.25


def score_text(score: float) -> str:
    """Write a score in few characters.

    Examples:
        >>> score_text(0.91234), score_text(-123.456), score_text(2.5e7)
        ('0.912', '-123.5', '2.5e+07')
    """
    if abs(score) < 10:
        return f"{score:.3f}"
    return f"{score:.1f}" if abs(score) < 10_000 else readable(f"{score:.3g}")
