"""Panels of queries and their retrieved neighbours, and the conversion of network inputs to displayable images."""

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
    """Return a network's input image as a displayable image: (height, width, 1 or 3), float32 in [0, 1].

    - One channel is grey, and three channels are red, green and blue. Two channels are averaged to grey. Four channels are
      red, green, blue and alpha, on white. If there are more channels, the first three are used.
    - Integers between 0 and 255 are divided by 255, and floats between 0 and 1 are kept. Any other image is scaled so that
      its smallest value is black and its largest value is white; if all its values are equal, they are mid-grey.
    - NaN and infinity are mid-grey.
    - A Pillow image is turned upright by its Exif tag, and its transparent pixels are white.

    Args:
        image: A tensor (channels, height, width) or (height, width); an array (height, width), (height, width, channels) or
            (channels, height, width), where the shape decides which axis is the channels; or a Pillow image.
        mean: Mean of the normalisation to undo: one value, or one per channel. A mean greater than 1 means that the
            original values were in [0, 255] instead of [0, 1]. The result is clipped to this range.
        std: Standard deviation of the normalisation to undo: one value, or one per channel.
        longest: Longest side in pixels. A larger image is reduced by averaging squares of pixels.

    Raises:
        ValueError: The input is not an image, or `mean` or `std` has neither one value nor one per channel.

    Examples:
        >>> import torch
        >>> to_picture(torch.full((1, 2, 2), 51, dtype=torch.uint8))[0, 0]  # 51 / 255
        array([0.2], dtype=float32)
        >>> to_picture(torch.tensor([[[-1.0, 0.0, 3.0]]])).flatten()  # scaled to [0, 1]
        array([0.  , 0.25, 1.  ], dtype=float32)
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
    """Return a tensor on any device and of any dtype, or anything that NumPy accepts, as an array."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    if values.is_floating_point():
        values = values.double()  # NumPy has no bfloat16
    array: np.ndarray = values.numpy()
    return array


def _channels_last(image: Any) -> Num[np.ndarray, "height width channels"]:
    """Return an image's values; all but integers become float64."""
    if isinstance(image, Image.Image):
        image = _prepared(image)
    array = as_array(image)
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "biuf":
        raise InputError(
            f"to_picture: the input has the shape {tuple(array.shape)} and the type {array.dtype}, so it is not an image. "
            "Pass numbers with the axes height and width, and optionally channels."
        )
    if array.ndim == 2:
        array = array[..., None]
    elif isinstance(image, Tensor) or (array.shape[-1] > 4 and array.shape[0] in (1, 3, 4)):
        array = np.moveaxis(array, 0, -1)
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


def _prepared(image: Image.Image) -> Image.Image:
    """Return an upright, opaque RGB image; values with more than 8 bits are unchanged."""
    if not has_known_range(image) or image.mode.startswith("I;16"):
        return upright(image)
    opaque = as_seen(image)
    # Otherwise palette indices or values of another colour space would be shown as red, green and blue.
    return opaque.convert("RGB") if opaque.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV") else opaque


def _without_normalisation(
    values: Float[np.ndarray, "height width channels"], mean: Scale | None, std: Scale | None
) -> Float[np.ndarray, "height width channels"]:
    """Return the values before the normalisation, scaled so that 1 is white."""
    channels = values.shape[-1]
    shift = _per_channel("mean", 0.0 if mean is None else mean, channels)
    scale = _per_channel("std", 1.0 if std is None else std, channels)
    white = 255.0 if shift.max() > 1 else 1.0
    original: Float[np.ndarray, "height width channels"] = ((values * scale + shift) / white).clip(0, 1)
    return original


def _per_channel(name: str, setting: Scale, channels: int) -> Float[np.ndarray, "values"]:
    """Return a setting as one value, or as one value per channel."""
    values = np.asarray(setting, dtype=np.float64).reshape(-1)
    if len(values) not in (1, channels):
        raise InputError(
            f"to_picture: {name} has {len(values)} values, but the image has {channels} channels. Pass one value, or one "
            "per channel."
        )
    return values


def _stretched(values: Float[np.ndarray, "height width channels"]) -> Float[np.ndarray, "height width channels"]:
    """Return values between 0 and 1 unchanged, and other values scaled to the range from 0 to 1."""
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
    """Return the image reduced by an integer factor, so that no side is longer than `longest`.

    Each value is the mean of a square of pixels. Incomplete squares at the right and lower edge are dropped.
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


MAX_COLUMNS = 6  # neighbours in a line: each image is 70 of 600 pixels wide
# All positions and sizes of the panels are in inches, from the upper left corner of the figure: x points right, y points
# down. `left` is an x; `top`, `middle` and `below` are a y; and `corner` is the upper left corner of a box.
#
# Margin of the figure, gap between two cells, and gap between two queries.
EDGE = 0.1
GAP = 0.1
ROW_GAP = 0.16
LINE = 0.155  # line height of small text
MARGIN = 0.02  # below an image or a line of text
TITLE_HEIGHT = 0.3
HEADING = LINE + 0.07  # the line above a query, and the rule below it
REMARK_SHARE = 0.6  # largest width of a remark, as a fraction of its heading
KEY_HEIGHT = 0.28  # height of the legend
KEY_LINE = 0.3  # length of a stroke in the legend
KEY_GAP = 0.06  # from a stroke to its text
KEY_SPACE = 0.25  # from a text to the next stroke
MAX_PICTURE = 1.3
TEXT_PADDING = 0.05  # between the frame and the lines of an item that is a text
LINES_MARGIN = 0.08  # above and below these lines
# Distances from the bottom of an image to the middle of its label, and to the top and the middle of its badge.
LABEL_MIDDLE = 0.6 * LINE
BADGE_TOP = 1.12 * LINE
BADGE_MIDDLE = 1.58 * LINE
BADGE_HEIGHT = 0.9 * LINE
BADGE_PADDING = 0.03  # to the left and right of the text in a badge
BADGE_GAP = 0.04  # from a badge to the score
SCREEN_RESOLUTION = 100  # pixels per inch
BADGE_TEXT = style.SMALL - 1  # points
ITEM_TEXT = style.SMALL - 0.5  # points
Dashes = Literal["-"] | tuple[float, Sequence[float]]


class Look(NamedTuple):
    """The style of relevant or of irrelevant neighbours."""

    colour: str
    dashes: Dashes
    symbol: str
    meaning: str


RELEVANT_LOOK = Look(style.RELEVANT, "-", "✓", "relevant")
IRRELEVANT_LOOK = Look(style.IRRELEVANT, (0, (3, 1.5)), "✕", "not relevant")


@dataclass(frozen=True, eq=False)
class Item:
    """A query or a gallery item in a panel: what to show, and the name of its class.

    Attributes:
        picture: A result of `to_picture`, (height, width, 1 or 3) in [0, 1]; a text, which is drawn as text; or None if
            there is nothing to show.
        label: The name of its class.

    Examples:
        >>> Item("a cat on a mat", "cat")
        Item(picture='a cat on a mat', label='cat')
    """

    picture: np.ndarray | str | None
    label: str


@dataclass(frozen=True, eq=False)
class Neighbour:
    """An item that a query has retrieved, with its score, for `retrieval_panels`.

    Attributes:
        item: The picture or text, and its class.
        score: Similarity to the query, as `nearest` returns it; a larger score is closer.
        relevant: Whether the item is relevant to the query.
        tied: Whether any candidate has the same score, shown or not. Ties between shown neighbours are marked without it.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import nearest
        >>> embeddings, labels = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), ["cat", "dog", "cat"]
        >>> found = nearest(embeddings, labels, query_indices=[0], k=1)
        >>> score, relevant = found.scores.item(), found.relevant.item()
        >>> Neighbour(Item("a dog on a mat", "dog"), round(score, 4), relevant)
        Neighbour(item=Item(picture='a dog on a mat', label='dog'), score=0.6, relevant=False, tied=False)
    """

    item: Item
    score: float
    relevant: bool
    tied: bool = False


@dataclass(frozen=True, eq=False)
class PanelRow:
    """One row of `retrieval_panels`: a query with its neighbours.

    Attributes:
        query: The query, with its picture or text.
        neighbours: The neighbours to show, the closest first.
        remark: A text at the right end of the heading, such as "AP 0.31, first hit at rank 4".
    """

    query: Item
    neighbours: Sequence[Neighbour]
    remark: str = ""


@in_house_style
def retrieval_panels(rows: Sequence[PanelRow], title: str = "") -> Figure:
    """Return a figure of queries with their neighbours to the right, the closest first; it is 6 inches wide.

    A relevant neighbour has a solid frame and a check mark. An irrelevant neighbour has a dashed frame in another colour and
    a cross. The rank and the score are next to the mark, with "tie" if another candidate has the same score. More than six
    neighbours take several lines.

    Args:
        rows: The queries with their neighbours, from top to bottom.
        title: Title of the figure.

    Raises:
        ValueError: There are no rows.

    Examples:
        >>> cat = Item("a cat on a mat", "cat")
        >>> figure = retrieval_panels([PanelRow(cat, [Neighbour(Item(None, "dog"), 0.8, relevant=False)], "AP 0.25")])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['cat', 'AP 0.25', 'a cat on a mat', 'query', 'no image', 'dog', '1 ✕', '0.800', '✓ relevant', '✕ not relevant']
    """
    if not rows:
        raise InputError("retrieval_panels: there is no query to show. Pass at least one row.")
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
    """The layout of a row, in inches: the query on the left, its neighbours in lines on the right."""

    columns: int
    lines: int

    @classmethod
    def of(cls, neighbours: int) -> "_Grid":
        """Return a grid for this number of neighbours, in lines of nearly equal length."""
        lines = max(1, -(-neighbours // MAX_COLUMNS))  # rounded up
        columns = max(1, -(-neighbours // lines))
        return cls(columns, lines)

    @property
    def size(self) -> float:
        """The height and width of an image."""
        # A gap before each neighbour, and two more gaps between the query and its neighbours.
        gaps = (self.columns + 2) * GAP
        return min((style.WIDTH - 2 * EDGE - gaps) / (self.columns + 1), MAX_PICTURE)

    @property
    def cell(self) -> float:
        """The height of an image with the two lines below it."""
        return self.size + 2 * LINE + GAP

    @property
    def row(self) -> float:
        """The height of a heading, a query with its neighbours, and the gap to the next query."""
        return HEADING + self.lines * self.cell + ROW_GAP

    def left(self, column: int) -> float:
        """Return the left edge of a neighbour's image."""
        return EDGE + self.size + 3 * GAP + column * (self.size + GAP)


def _draw_row(axes: Axes, row: PanelRow, grid: _Grid, top: float) -> None:
    """Draw a heading, and a query with its neighbours below."""
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
    """Draw the query's label on the left, the remark on the right, and a rule below."""
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
    """Draw a neighbour with its label, rank and score."""
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
    """Draw an item in a square: its text, its image, or the words "no image"."""
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
    """Draw an image centred at a point, with its longer side equal to `size`."""
    height, width = image.shape[:2]
    longer = max(height, width)
    half_width = size * width / longer / 2
    half_height = size * height / longer / 2
    left, right, bottom, top = axes.axis()
    # Smoothing would blur an image that has fewer pixels than its place on the screen.
    smoothing: Literal["nearest", "auto"] = "nearest" if longer < SCREEN_RESOLUTION * size else "auto"
    axes.imshow(
        np.broadcast_to(image, (height, width, 3)),
        extent=(x - half_width, x + half_width, y + half_height, y - half_height),
        interpolation=smoothing,
        aspect="equal",
        vmin=0,
        vmax=1,
    )
    axes.set(xlim=(left, right), ylim=(bottom, top))  # imshow sets the limits to the image


def _draw_frame(axes: Axes, left: float, top: float, size: float, colour: str, dashes: Dashes) -> None:
    axes.add_patch(Rectangle((left, top), size, size, fill=False, edgecolor=colour, linewidth=1.8, linestyle=dashes))


def _explain_frames(axes: Axes, y: float) -> None:
    """Draw the legend of both kinds of frames."""
    left = EDGE
    for look in (RELEVANT_LOOK, IRRELEVANT_LOOK):
        axes.add_line(Line2D([left, left + KEY_LINE], [y, y], color=look.colour, linestyle=look.dashes, linewidth=1.8))
        words = f"{look.symbol} {look.meaning}"
        _write(axes, left + KEY_LINE + KEY_GAP, y, words)
        left += KEY_LINE + KEY_GAP + width_of(words, style.SMALL) + KEY_SPACE


def _write(axes: Axes, x: float, y: float, line: str, size: float = style.SMALL, **settings: Any) -> None:
    """Write a readable line; by default it starts at x and its vertical middle is y."""
    axes.text(x, y, line, fontsize=size, **{"va": "center", **settings})


def score_text(score: float) -> str:
    """Return a score in few characters.

    Examples:
        >>> score_text(0.91234), score_text(-123.456), score_text(2.5e7)
        ('0.912', '-123.5', '2.5e+07')
    """
    if abs(score) < 10:
        return f"{score:.3f}"
    if abs(score) < 10_000:
        return f"{score:.1f}"
    return readable(f"{score:.3g}")
