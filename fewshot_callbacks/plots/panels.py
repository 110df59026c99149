"""Queries and what was retrieved for them, side by side, and images of any kind as pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Num
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.images import as_seen, has_known_range, upright
from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.fitted_text import readable, shorten, width_of, wrap
from fewshot_callbacks.plots.style import in_house_style, new_figure

Picture = Float[np.ndarray, "height width channels"]
Scale = float | Sequence[float] | np.ndarray | Tensor

MAX_SIDE = 256  # pixels: more than a panel shows at 200 pixels per inch


def to_picture(image: Any, mean: Scale | None = None, std: Scale | None = None, longest: int = MAX_SIDE) -> Picture:
    """Convert the input image of a network to a picture that can be shown.

    One channel is shown in grey, two as the grey mean of both, three as red, green and blue, four as red, green, blue
    and alpha on white; of more than four, the first three are shown. Integers between 0 and 255 are divided by 255.
    Fractions between 0 and 1 are kept. Other values are stretched so that the smallest becomes black and the largest
    white, or are all mid-grey if they are equal. NaN and infinity are mid-grey. A Pillow image is turned upright by its
    Exif tag, and transparent parts are white.

    Args:
        image: A tensor (channels, height, width) or (height, width); an array (height, width) or (height, width,
            channels), or with the channels first if no other axis can be the channels; or a Pillow image.
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
    array = _channels_last(image)
    values = np.where(np.isfinite(array), array, np.nan)
    if mean is not None or std is not None:
        values = _without_normalisation(values, mean, std)
    elif array.dtype.kind in "iu" and array.min() >= 0 and array.max() <= 255:
        values = values / 255
    else:
        values = _stretched(values)
    values = np.nan_to_num(_reduced(values, longest), nan=0.5)
    channels = values.shape[-1]
    if channels == 2:
        values = values.mean(-1, keepdims=True)
    elif channels == 4:
        colours = values[..., :3]
        alpha = values[..., 3:]
        values = colours * alpha + 1 - alpha
    picture: Picture = values[..., :3].astype(np.float32).clip(0, 1)
    return picture


def as_array(values: Any) -> np.ndarray:
    """Return the values of a tensor of any kind, or of anything that NumPy takes, as an array."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    if values.is_floating_point():
        values = values.double()  # NumPy has no bfloat16
    array: np.ndarray = values.numpy()
    return array


def _channels_last(image: Any) -> Num[np.ndarray, "height width channels"]:
    """Return the values of an image; integers stay integers, all other numbers become float64."""
    if isinstance(image, Image.Image):
        image = _prepared(image)
    array = as_array(image)
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "biuf":
        raise InputError(
            "An image needs the axes height and width, and optionally channels, and must hold numbers; this one has the "
            f"shape {tuple(array.shape)} and the type {array.dtype}."
        )
    if array.ndim == 2:
        array = array[..., None]
    elif isinstance(image, Tensor) or (array.shape[-1] > 4 and array.shape[0] in (1, 3, 4)):
        array = np.moveaxis(array, 0, -1)
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


def _prepared(image: Image.Image) -> Image.Image:
    """Return an upright, opaque picture in red, green and blue. Numbers of more than 8 bits are unchanged."""
    if not has_known_range(image) or image.mode.startswith("I;16"):
        return upright(image)
    opaque = as_seen(image)
    # Otherwise numbers of a palette or of another colour space would be shown as red, green and blue.
    return opaque.convert("RGB") if opaque.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV") else opaque


def _without_normalisation(
    values: Float[np.ndarray, "height width channels"], mean: Scale | None, std: Scale | None
) -> Float[np.ndarray, "height width channels"]:
    """Return the values before the normalisation, so that 1 is white."""
    channels = values.shape[-1]
    shift = _per_channel("mean", 0.0 if mean is None else mean, channels)
    scale = _per_channel("std", 1.0 if std is None else std, channels)
    white = 255.0 if shift.max() > 1 else 1.0
    original: Float[np.ndarray, "height width channels"] = ((values * scale + shift) / white).clip(0, 1)
    return original


def _per_channel(name: str, setting: Scale, channels: int) -> Float[np.ndarray, "values"]:
    """Return a setting as one value for all channels or one for each; refuse another number of values."""
    values = np.asarray(setting, dtype=np.float64).reshape(-1)
    if len(values) not in (1, channels):
        raise InputError(f"{name} has {len(values)} values for an image of {channels} channels.")
    return values


def _stretched(values: Float[np.ndarray, "height width channels"]) -> Float[np.ndarray, "height width channels"]:
    """Return fractions between 0 and 1 as they are, and other values stretched to the range from 0 to 1."""
    finite = values[~np.isnan(values)]
    if not finite.size:
        return values
    low = finite.min()
    high = finite.max()
    if low >= 0 and high <= 1:
        return values
    if low == high:
        return np.full_like(values, 0.5)
    stretched: Float[np.ndarray, "height width channels"] = values / (high - low) - low / (high - low)
    return stretched


def _reduced(values: Float[np.ndarray, "height width channels"], longest: int) -> Float[np.ndarray, "..."]:
    """Return the means of the smallest squares of pixels that make the longer side short enough.

    Pixels at the right and lower edge that do not fill a square are cut off.
    """
    height, width, channels = values.shape
    step = -(-max(height, width) // longest)  # rounded up
    if step == 1 or min(height, width) < step:
        return values
    rows = height // step
    columns = width // step
    squares = values[: rows * step, : columns * step].reshape(rows, step, columns, step, channels)
    small: Float[np.ndarray, "..."] = squares.mean((1, 3))
    return small


MAX_COLUMNS = 6  # neighbours next to a query: pictures have 70 of 600 pixels
# All positions and sizes of the panels are in inches, from the upper left corner of the figure: x to the right, y
# downwards. So `left` is an x; `top`, `middle` and `below` are a y; and `corner` is the upper left corner of a box.
#
# Distances around the figure, between two cells, and between two queries.
EDGE = 0.1
GAP = 0.1
ROW_GAP = 0.16
LINE = 0.155  # from one line of small text to the next
MARGIN = 0.02  # below a picture or a line of text
TITLE_HEIGHT = 0.3
HEADING = LINE + 0.07  # the line above a query, and the rule below it
REMARK_SHARE = 0.6  # largest share of the width of a heading that its remark takes
KEY_HEIGHT = 0.28  # the line that explains the frames
KEY_LINE = 0.3  # a frame in this line, as a stroke
KEY_GAP = 0.06  # from a stroke to its words
KEY_SPACE = 0.25  # from the words to the next stroke
MAX_PICTURE = 1.3
TEXT_PADDING = 0.05  # between the frame of a text that is drawn and its lines
LINES_MARGIN = 0.08  # above and below all lines of such a text
# Distances from below a picture: of the middle of its label, and of the upper edge and the middle of the badge under that.
LABEL_MIDDLE = 0.6 * LINE
BADGE_TOP = 1.12 * LINE
BADGE_MIDDLE = 1.58 * LINE
BADGE_HEIGHT = 0.9 * LINE
BADGE_PADDING = 0.03  # on the left and on the right of the words in a badge
BADGE_GAP = 0.04  # from a badge to the score
SCREEN_RESOLUTION = 100  # pixels per inch
BADGE_TEXT = style.SMALL - 1  # points
ITEM_TEXT = style.SMALL - 0.5  # points
Dashes = Literal["-"] | tuple[float, Sequence[float]]


class Look(NamedTuple):
    """How a relevant or an irrelevant neighbour looks."""

    colour: str
    dashes: Dashes
    symbol: str
    meaning: str


RELEVANT_LOOK = Look(style.RELEVANT, "-", "✓", "relevant")
IRRELEVANT_LOOK = Look(style.IRRELEVANT, (0, (3, 1.5)), "✕", "not relevant")


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
        score: Its score; larger is closer.
        relevant: Whether it is relevant to the query.
        tied: Whether another candidate, shown or not, has the same score. Ties between shown neighbours are also found
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
        remark: A text on the query, at the right end of its heading, such as "AP 0.31, first hit at rank 4".
    """

    query: Item
    neighbours: Sequence[Neighbour]
    remark: str = ""


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
        ValueError: If there are no rows.

    Examples:
        >>> cat = Item("a cat on a mat", "cat")
        >>> figure = retrieval_panels([PanelRow(cat, [Neighbour(Item(None, "dog"), 0.8, relevant=False)], "AP 0.25")])
        >>> figure.get_size_inches().round(2).tolist()
        [6.0, 2.32]
    """
    if not rows:
        raise InputError("There is no query to show. Pass at least one row.")
    grid = _Grid.of(max(len(row.neighbours) for row in rows))
    first_row = EDGE + (TITLE_HEIGHT if title else 0.0)
    height = first_row + len(rows) * grid.row - ROW_GAP + KEY_HEIGHT
    figure = new_figure(height, arranged=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, style.WIDTH), ylim=(height, 0), aspect="equal")  # one unit is an inch, downwards
    axes.set_axis_off()
    if title:
        size = style.TEXT + 1
        _write(axes, EDGE, EDGE + MARGIN, shorten(title, style.WIDTH - 2 * EDGE, size), size, va="top")
    for number, row in enumerate(rows):
        _draw_row(axes, row, grid, first_row + number * grid.row)
    _explain_frames(axes, height - EDGE - KEY_GAP)
    return figure


@dataclass(frozen=True)
class _Grid:
    """Where the cells of a row are, in inches: the query on the left, its neighbours in lines on its right."""

    columns: int
    lines: int

    @classmethod
    def of(cls, neighbours: int) -> "_Grid":
        """Return a grid for this number of neighbours, in lines of equal length."""
        lines = max(1, -(-neighbours // MAX_COLUMNS))  # rounded up
        columns = max(1, -(-neighbours // lines))
        return cls(columns, lines)

    @property
    def size(self) -> float:
        """The height and width of a picture."""
        # There is a gap before each neighbour, and two more between the query and its neighbours.
        gaps = (self.columns + 2) * GAP
        return min((style.WIDTH - 2 * EDGE - gaps) / (self.columns + 1), MAX_PICTURE)

    @property
    def cell(self) -> float:
        """The height of a picture and of the two lines below it."""
        return self.size + 2 * LINE + GAP

    @property
    def row(self) -> float:
        """The height of a query with its neighbours, of the line above, and of the gap to the next query."""
        return HEADING + self.lines * self.cell + ROW_GAP

    def left(self, column: int) -> float:
        """The left edge of a neighbour's picture."""
        return EDGE + self.size + 3 * GAP + column * (self.size + GAP)


def _draw_row(axes: Axes, row: PanelRow, grid: _Grid, top: float) -> None:
    """Draw a query and its neighbours below a line that names the query."""
    _draw_heading(axes, row, top)
    top += HEADING
    _draw_picture(axes, row.query, EDGE, top, grid.size)
    _draw_frame(axes, EDGE, top, grid.size, style.BLACK, "-")
    _write(axes, EDGE, top + grid.size + MARGIN + LABEL_MIDDLE, "query", color=style.GREY)
    scores = [neighbour.score for neighbour in row.neighbours]
    for index, neighbour in enumerate(row.neighbours):
        line, column = divmod(index, grid.columns)
        is_tied = neighbour.tied or scores.count(neighbour.score) > 1
        words = f"{score_text(neighbour.score)} tie" if is_tied else score_text(neighbour.score)
        _draw_neighbour(axes, neighbour, index + 1, words, grid.left(column), top + line * grid.cell, grid.size)


def _draw_heading(axes: Axes, row: PanelRow, top: float) -> None:
    """Draw the name of the query, the remark at the right end of the line, and a rule below."""
    width = style.WIDTH - 2 * EDGE
    right = style.WIDTH - EDGE
    middle = top + LINE / 2
    remark = shorten(row.remark, REMARK_SHARE * width, style.SMALL)
    label_width = width - width_of(remark, style.SMALL) - 2 * GAP
    _write(axes, EDGE, middle, shorten(row.query.label, label_width, style.TEXT), style.TEXT)
    _write(axes, right, middle, remark, color=style.GREY, ha="right")
    rule = top + LINE + MARGIN
    axes.plot([EDGE, right], [rule, rule], color=style.LIGHT_GREY, linewidth=0.6)


def _draw_neighbour(
    axes: Axes, neighbour: Neighbour, rank: int, score: str, left: float, top: float, size: float
) -> None:
    """Draw the picture of a neighbour; below it its label, and a coloured badge with its rank next to its score."""
    look = RELEVANT_LOOK if neighbour.relevant else IRRELEVANT_LOOK
    _draw_picture(axes, neighbour.item, left, top, size)
    _draw_frame(axes, left, top, size, look.colour, look.dashes)
    below = top + size + MARGIN
    _write(axes, left, below + LABEL_MIDDLE, shorten(neighbour.item.label, size, style.SMALL))
    badge = f"{rank} {look.symbol}"
    badge_width = width_of(badge, BADGE_TEXT) + 2 * BADGE_PADDING
    corner = (left, below + BADGE_TOP)
    axes.add_patch(Rectangle(corner, badge_width, BADGE_HEIGHT, facecolor=look.colour, edgecolor="none"))
    middle = below + BADGE_MIDDLE
    _write(axes, left + BADGE_PADDING, middle, badge, BADGE_TEXT, color="white", va="center_baseline")
    score_left = left + badge_width + BADGE_GAP
    score = shorten(score, left + size - score_left, BADGE_TEXT)
    _write(axes, score_left, middle, score, BADGE_TEXT, color=style.GREY, va="center_baseline")


def _draw_picture(axes: Axes, item: Item, left: float, top: float, size: float) -> None:
    """Draw an item inside a square: its text, its image, or the words "no image"."""
    if isinstance(item.picture, str):
        line_height = 1.25 * ITEM_TEXT / 72
        lines = wrap(item.picture, size - 2 * TEXT_PADDING, int((size - LINES_MARGIN) / line_height), ITEM_TEXT)
        for number, line in enumerate(lines):
            _write(axes, left + TEXT_PADDING, top + TEXT_PADDING + number * line_height, line, ITEM_TEXT, va="top")
    elif item.picture is None:
        axes.add_patch(Rectangle((left, top), size, size, facecolor=style.LIGHT_GREY, edgecolor="none"))
        _write(axes, left + size / 2, top + size / 2, "no image", color=style.GREY, ha="center")
    else:
        _draw_image(axes, item.picture, left + size / 2, top + size / 2, size)


def _draw_image(axes: Axes, image: np.ndarray, x: float, y: float, size: float) -> None:
    """Draw an image around a point, as large as a square of this side allows."""
    height, width = image.shape[:2]
    longer = max(height, width)
    half_width = size * width / longer / 2
    half_height = size * height / longer / 2
    left, right, bottom, top = axes.axis()
    # Smoothing would blur an image with fewer pixels than its place on the screen.
    smoothing: Literal["nearest", "auto"] = "nearest" if longer < SCREEN_RESOLUTION * size else "auto"
    axes.imshow(
        np.broadcast_to(image, (height, width, 3)),
        extent=(x - half_width, x + half_width, y + half_height, y - half_height),
        interpolation=smoothing,
        aspect="equal",
        vmin=0,
        vmax=1,
    )
    axes.set(xlim=(left, right), ylim=(bottom, top))  # imshow has changed the limits to the image


def _draw_frame(axes: Axes, left: float, top: float, size: float, colour: str, dashes: Dashes) -> None:
    axes.add_patch(Rectangle((left, top), size, size, fill=False, edgecolor=colour, linewidth=1.8, linestyle=dashes))


def _explain_frames(axes: Axes, y: float) -> None:
    """Draw a line with both kinds of frames and what they mean."""
    left = EDGE
    for look in (RELEVANT_LOOK, IRRELEVANT_LOOK):
        axes.add_line(Line2D([left, left + KEY_LINE], [y, y], color=look.colour, linestyle=look.dashes, linewidth=1.8))
        words = f"{look.symbol} {look.meaning}"
        _write(axes, left + KEY_LINE + KEY_GAP, y, words)
        left += KEY_LINE + KEY_GAP + width_of(words, style.SMALL) + KEY_SPACE


def _write(axes: Axes, x: float, y: float, line: str, size: float = style.SMALL, **settings: Any) -> None:
    """Write a line of readable text, by default from the point to the right, with its middle at the height of the point."""
    axes.text(x, y, line, fontsize=size, **{"va": "center", **settings})


def score_text(score: float) -> str:
    """Write a score in few characters.

    Examples:
        >>> score_text(0.91234), score_text(-123.456), score_text(2.5e7)
        ('0.912', '-123.5', '2.5e+07')
    """
    if abs(score) < 10:
        return f"{score:.3f}"
    if abs(score) < 10_000:
        return f"{score:.1f}"
    return readable(f"{score:.3g}")
