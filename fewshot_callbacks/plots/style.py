"""The palette and the style of all figures, the band over seeds, and functions that encode and write figures."""

import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, ParamSpec, cast, get_args

import matplotlib.style
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType
from PIL import Image

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.outputs import WRITER, write_whole
from fewshot_callbacks.functional.statistics import student_interval
from fewshot_callbacks.plots.fitted_text import font_families, shorten

# Okabe and Ito, Color Universal Design, 2008: colours that colour-blind people can distinguish.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
# Additional colours, for more classes than the palette has colours.
WINE = "#882255"
OLIVE = "#999933"
INDIGO = "#332288"
BROWN = "#7F4A1E"
# Colours of secondary elements: notes, grid lines, classes that are not named.
GREY = "#595959"
LIGHT_GREY = "#D9D9D9"

RELEVANT = GREEN
IRRELEVANT = VERMILION
# Colours and markers of curves, in order.
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


class MethodStyle(NamedTuple):
    """The style of a method in every figure; the marker and the dashes distinguish methods without colours."""

    colour: str
    marker: str
    dashes: LineStyleType


# The softmax head, the distance-ratio head, the average precision loss, and any other method.
METHODS: Mapping[str, MethodStyle] = {
    "softmax": MethodStyle(ORANGE, "s", (0, (4, 1.2))),
    "dr": MethodStyle(BLUE, "o", "-"),
    "soft_ap": MethodStyle(PURPLE, "^", (0, (6, 1.2, 1.2, 1.2))),
    "other": MethodStyle(GREY, "D", (0, (1.2, 1.2))),
}

# The legend of the band.
BAND = "95 % interval of the mean of {seeds} seeds"

Format = Literal["png", "svg"]

WIDTH = 6.0  # inches: 600 pixels at the screen resolution
# Distances of a title from the edges of the figure, in inches.
TITLE_LEFT = 0.12
TITLE_RIGHT = 0.08
# Font sizes in points: 12.5 and 11 pixels in an image that is 600 pixels wide.
TEXT = 9.0
SMALL = 8.0
RESOLUTION = 200  # pixels per inch of a PNG file, and of the images in an SVG file


@contextmanager
def house_style() -> Iterator[None]:
    """Return a context in which figures have the style of the package."""
    settings = {
        "font.family": list(font_families()),
        "font.size": TEXT,
        "axes.titlesize": TEXT + 1,
        "axes.titlelocation": "left",
        "axes.labelsize": TEXT,
        "axes.linewidth": 0.6,
        "axes.edgecolor": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": LIGHT_GREY,
        "grid.linewidth": 0.5,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": BLACK,
        "ytick.labelcolor": BLACK,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "legend.fontsize": SMALL,
        "legend.frameon": False,
        "legend.borderaxespad": 0.6,
        "figure.constrained_layout.h_pad": 0.07,  # inches
        "figure.constrained_layout.w_pad": 0.07,
        "lines.linewidth": 1.6,
        "svg.fonttype": "path",  # text looks the same with any installed fonts
        "svg.hashsalt": "fewshot-callbacks",  # the same figure gives the same file
    }
    with matplotlib.style.context(["default", settings]):
        yield


P = ParamSpec("P")


def in_house_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Return the function with the package's style, also for later drawing of its figure."""

    @functools.wraps(draw)
    def drawn_in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with house_style():
            figure = draw(*args, **kwargs)
            # matplotlib arranges a figure when it is first drawn, with the settings at that moment, so draw it here. A
            # figure without a layout engine needs no arrangement, and drawing it would add a fifth to its time.
            if figure.get_layout_engine() is not None:
                figure.draw_without_rendering()
        return figure

    return drawn_in_style


def new_figure(height: float, width: float = WIDTH, *, arranged: bool = True) -> Figure:
    """Return an empty off-screen figure that is not registered with pyplot.

    Args:
        height: Height in inches.
        width: Width in inches; the default of 6 is 600 pixels on a screen.
        arranged: Whether matplotlib arranges the axes so that all labels fit; otherwise the caller places everything.

    Examples:
        >>> new_figure(4).get_size_inches().tolist()
        [6.0, 4.0]
    """
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained" if arranged else None)
    # This canvas needs no window, whichever backend the user has chosen.
    FigureCanvasAgg(figure)
    return figure


def entitle(figure: Figure, title: str) -> None:
    """Write a title above all axes, shortened to fit; an empty title takes no space."""
    if title:
        width = float(figure.get_figwidth())
        shortened = shorten(title, width - TITLE_LEFT - TITLE_RIGHT, TEXT + 1)
        figure.suptitle(shortened, x=TITLE_LEFT / width, ha="left", fontsize=TEXT + 1)


def draw_band(
    axes: Axes,
    steps: Sequence[float],
    runs: Float[np.ndarray, "seeds points"],
    style: MethodStyle,
    *,
    marked: bool,
    logarithmic: bool = False,
) -> Line2D:
    """Draw the mean over seeds, with its 95 % interval if there are two or more; return the line.

    With `logarithmic`, logarithms are averaged, so the line is the geometric mean.
    """
    values = np.log(runs) if logarithmic else runs
    to_axis = np.exp if logarithmic else np.asarray
    if len(runs) > 1:
        low, high = student_interval(values)
        axes.fill_between(steps, to_axis(low), to_axis(high), color=style.colour, alpha=0.2, linewidth=0)
    [line] = axes.plot(
        steps,
        to_axis(values.mean(axis=0)),
        color=style.colour,
        linestyle=style.dashes,
        marker=style.marker if marked else "",
        markersize=4,
        markeredgecolor="white",
        markeredgewidth=0.6,
    )
    return line


def encode(figure: Figure, file_format: Format = "png", resolution: float | None = None) -> bytes:
    """Return a figure as the bytes of a PNG or SVG file; the same figure gives the same bytes.

    Args:
        figure: The figure.
        file_format: "png" or "svg".
        resolution: Pixels per inch; the default of 200 makes a 6-inch figure 1,200 pixels wide.

    Raises:
        ValueError: The format is neither "png" nor "svg".

    Examples:
        >>> encode(new_figure(1))[1:4]
        b'PNG'
    """
    if file_format not in get_args(Format):
        raise InputError(f'encode: file_format={file_format!r} is not supported. Use "png" or "svg".')
    content = io.BytesIO()
    # The writer's name identifies images of this package. With a version or a date, the same figure would give different
    # files.
    metadata = {"Software": WRITER} if file_format == "png" else {"Date": None}
    with house_style():
        figure.savefig(content, format=file_format, dpi=resolution or RESOLUTION, metadata=metadata, facecolor="white")
    return content.getvalue()


def save(figure: Figure, path: str | Path, resolution: float | None = None) -> None:
    """Write a figure as a PNG or SVG file.

    An existing file is replaced once the new file is complete, even if another program wrote the existing file.

    Args:
        figure: The figure.
        path: A file name that ends in .png or .svg.
        resolution: Pixels per inch, by default 200.

    Raises:
        ValueError: The name has another ending.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(new_figure(1), Path(folder) / "empty.png")
        ...     with Image.open(Path(folder) / "empty.png") as image:
        ...         print(image.size)
        (1200, 200)
    """
    path = Path(path)
    ending = path.suffix.lower().removeprefix(".")
    if ending not in get_args(Format):
        raise InputError(f"save: {path.name} ends in neither .png nor .svg. Use one of these endings.")
    write_whole(path, encode(figure, cast(Format, ending), resolution))


def pixels(figure: Figure, resolution: float = 100) -> np.ndarray:
    """Return a figure as a uint8 array (height, width, 3) of red, green and blue.

    Examples:
        >>> pixels(new_figure(1)).shape
        (100, 600, 3)
    """
    return np.array(Image.open(io.BytesIO(encode(figure, "png", resolution))).convert("RGB"))
