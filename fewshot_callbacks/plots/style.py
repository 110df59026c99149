"""One palette, one style and one band of seeds for every figure, and one function that writes figures."""

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

# Okabe and Ito, Color Universal Design, 2008: colours that the colour-blind can distinguish.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
# Further colours, for more classes than that palette supports.
WINE = "#882255"
OLIVE = "#999933"
INDIGO = "#332288"
BROWN = "#7F4A1E"
# Colours of secondary elements: notes, grid lines, classes that are not named.
GREY = "#595959"
LIGHT_GREY = "#D9D9D9"

RELEVANT = GREEN
IRRELEVANT = VERMILION
# The colours and markers of curves, from the first to the last.
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


class MethodStyle(NamedTuple):
    """How every figure draws a method: in grey and for the colour-blind its marker and its dashes tell it apart."""

    colour: str
    marker: str
    dashes: LineStyleType


# The softmax head, the distance-ratio head, average precision as a loss, and any method that is compared with them.
METHODS: Mapping[str, MethodStyle] = {
    "softmax": MethodStyle(ORANGE, "s", (0, (4, 1.2))),
    "dr": MethodStyle(BLUE, "o", "-"),
    "soft_ap": MethodStyle(PURPLE, "^", (0, (6, 1.2, 1.2, 1.2))),
    "other": MethodStyle(GREY, "D", (0, (1.2, 1.2))),
}

# The name of the band in a legend.
BAND = "95 % interval of the mean of {seeds} seeds"

Format = Literal["png", "svg"]

WIDTH = 6.0  # inches: 600 pixels at the resolution of a screen
# Distances of a title from the edges of its figure, in inches.
TITLE_LEFT = 0.12
TITLE_RIGHT = 0.08
# Sizes of text in points: 12.5 and 11 pixels in a picture that is 600 pixels wide.
TEXT = 9.0
SMALL = 8.0
RESOLUTION = 200  # pixels per inch of a PNG file, and of the images inside an SVG file


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in the style of the package, regardless of the user's matplotlib settings, which are restored afterwards."""
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
        "svg.fonttype": "path",  # text keeps its size, whatever fonts the reader has
        "svg.hashsalt": "fewshot-callbacks",  # the same figure gives the same file
    }
    with matplotlib.style.context(["default", settings]):
        yield


P = ParamSpec("P")


def in_house_style(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a function so that its figure has the style of the package, whoever draws it later."""

    @functools.wraps(draw)
    def drawn_in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with house_style():
            figure = draw(*args, **kwargs)
            # matplotlib arranges a figure when it is first drawn, with the settings of that moment, so it is drawn here.
            # A figure without a layout engine is arranged by hand; drawing it here would cost a fifth of its time.
            if figure.get_layout_engine() is not None:
                figure.draw_without_rendering()
        return figure

    return drawn_in_style


def new_figure(height: float, width: float = WIDTH, *, arranged: bool = True) -> Figure:
    """Make an empty off-screen figure, which is not registered with pyplot.

    Args:
        height: Height in inches.
        width: Width in inches; the default of 6 makes 600 pixels on a screen.
        arranged: Whether matplotlib arranges the axes so that all labels fit; if not, the caller places everything.

    Returns:
        A figure with a canvas for pixels.

    Examples:
        >>> new_figure(4).get_size_inches().tolist()
        [6.0, 4.0]
    """
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained" if arranged else None)
    # This canvas draws pixels without a window, whichever backend the user has chosen.
    FigureCanvasAgg(figure)
    return figure


def entitle(figure: Figure, title: str) -> None:
    """Write a line above all axes, shortened to the width of the figure; nothing if it is empty."""
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
    """Draw the mean over seeds, with its 95 % interval around it where there are two seeds or more.

    Args:
        axes: The axes to draw on.
        steps: The x coordinate of each point.
        runs: A curve for each seed.
        style: The style of the method.
        marked: Whether each point has a marker.
        logarithmic: Whether mean and interval are computed of the logarithms, for a logarithmic axis. The line is then a
            geometric mean.

    Returns:
        The line of the mean, for a legend.
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
    """Encode a figure as the content of a file; the same figure gives the same bytes.

    Args:
        figure: The figure.
        file_format: "png" or "svg".
        resolution: Pixels per inch, by default 200, that is 1,200 pixels for a figure of 6 inches.

    Returns:
        The content of the file.

    Raises:
        ValueError: If the format is neither.

    Examples:
        >>> encode(new_figure(1))[1:4]
        b'PNG'
    """
    if file_format not in get_args(Format):
        raise InputError(f"A figure is written as png or svg, not as {file_format!r}.")
    content = io.BytesIO()
    # The writer's name distinguishes pictures of the package from others. A version or a date would make two files of
    # one figure differ.
    metadata = {"Software": WRITER} if file_format == "png" else {"Date": None}
    with house_style():
        figure.savefig(content, format=file_format, dpi=resolution or RESOLUTION, metadata=metadata, facecolor="white")
    return content.getvalue()


def save(figure: Figure, path: str | Path, resolution: float | None = None) -> None:
    """Write a figure as a PNG or SVG file, depending on the ending of the file name.

    An existing file of this name is replaced, whoever has written it, but only when the new one is complete.

    Args:
        figure: The figure.
        path: A name that ends in .png or .svg.
        resolution: Pixels per inch, by default 200.

    Raises:
        ValueError: If the name has another ending.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(new_figure(1), Path(folder) / "empty.png")
        ...     print((Path(folder) / "empty.png").stat().st_size > 0)
        True
    """
    path = Path(path)
    ending = path.suffix.lower().removeprefix(".")
    if ending not in get_args(Format):
        raise InputError(f"{path.name} ends neither in .png nor in .svg. Choose one of these.")
    write_whole(path, encode(figure, cast(Format, ending), resolution))


def pixels(figure: Figure, resolution: float = 100) -> np.ndarray:
    """Draw a figure as an array of uint8 with the axes height, width, (red, green, blue).

    Examples:
        >>> pixels(new_figure(1)).shape
        (100, 600, 3)
    """
    return np.array(Image.open(io.BytesIO(encode(figure, "png", resolution))).convert("RGB"))
