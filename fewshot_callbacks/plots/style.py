"""One palette, one style and one band of seeds for every figure, text that fits, and one function that writes figures."""

import functools
import io
from bisect import bisect_left
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
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from matplotlib.typing import LineStyleType
from PIL import Image

from fewshot_callbacks.files.outputs import WRITER
from fewshot_callbacks.functional.statistics import student_interval

# Fonts of the common systems for what DejaVu Sans, which comes with matplotlib, does not hold.
FALLBACKS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Source Han Sans",
    "WenQuanYi Zen Hei",
    "Hiragino Sans",
    "PingFang SC",
    "Yu Gothic",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Nirmala UI",
    "Leelawadee UI",
    "Arial Unicode MS",
)

ELLIPSIS = "…"
UNKNOWN = "□"
LONGEST = 4000  # characters of a text, more than a picture has room for
LONGEST_LINE = 400  # letters; measuring takes time in proportion to them


@functools.cache
def families() -> tuple[str, ...]:
    """The fonts of all figures: DejaVu Sans, then those that this machine has for other scripts."""
    present = {font.name for font in fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in FALLBACKS if name in present))


@functools.cache
def _drawable() -> frozenset[int]:
    """Code points that one of the fonts holds."""
    # Without a fallback: another font in its place would promise characters that it does not draw.
    paths = [findfont(FontProperties(family=[name]), fallback_to_default=False) for name in families()]
    return frozenset(point for path in paths for point in get_font(path).get_charmap())


def readable(text: object) -> str:
    r"""Write a value in one line of characters that the fonts hold.

    White space of any kind and length becomes one space; characters that cannot be seen are dropped. A character that no
    font holds becomes □; if all are of that kind, their code points tell one label from another. What is longer than
    4,000 characters loses its middle.

    Args:
        text: A label, a name or any other value, converted by `str`.

    Returns:
        The text, in which a dollar sign starts no formula.

    Examples:
        >>> readable("two\nlines"), readable("price $5"), readable("cat \U00013000"), readable("\U00013000")
        ('two lines', 'price \\$5', 'cat □', 'U+13000')
    """
    shown = " ".join(str(text).split())
    if len(shown) > LONGEST:
        shown = shown[: LONGEST // 2] + ELLIPSIS + shown[-LONGEST // 2 :]
    shown = "".join(char for char in shown if char.isprintable())
    letters = shown.replace(" ", "")
    if _drawable().isdisjoint(map(ord, letters)):
        return " ".join(f"U+{ord(char):04X}" for char in letters)
    drawn = "".join(char if char == " " or ord(char) in _drawable() else UNKNOWN for char in shown)
    return drawn.replace("$", r"\$")


def width_of(text: str, size: float) -> float:
    """Measure a line of readable text in inches, 3 % too long: a screen's pixels round the letters.

    Args:
        text: What `readable` returned.
        size: Of the font, in points.
    """
    if not text:
        return 0.0
    properties = FontProperties(family=list(families()), size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text.replace(r"\$", "$"), properties, ismath=False)
    return 1.03 * float(width) / 72


def _longest(most: int, width: float, size: float, cut: Callable[[int], str]) -> int:
    """How many letters of `most` fit; by bisection, since each measurement lays out all of them."""
    return bisect_left(range(1, most + 1), True, key=lambda kept: width_of(cut(kept), size) > width)


def shorten(text: object, width: float, size: float) -> str:
    """Cut the middle out of a text that is too long: names of one kind often differ at their ends.

    Args:
        text: Any text; it is made readable.
        width: How long it may be, in inches.
        size: Of the font, in points.

    Returns:
        The text, or its beginning and its end with an ellipsis between them.

    Examples:
        >>> shorten("Black_footed_Albatross_0046", 1.0, 8)
        'Black_fo…_0046'
    """
    whole = readable(text)
    if len(whole) <= LONGEST_LINE and width_of(whole, size) <= width:
        return whole
    letters = whole.replace(r"\$", "$")

    def cut(kept: int) -> str:
        # Three fifths of what is kept are the beginning, which is read first.
        head, tail = (3 * kept + 4) // 5, kept - (3 * kept + 4) // 5
        return (letters[:head].rstrip() + ELLIPSIS + letters[len(letters) - tail :].lstrip()).replace("$", r"\$")

    return cut(_longest(min(len(letters) - 1, LONGEST_LINE), width, size, cut))


def wrap(text: object, width: float, lines: int, size: float) -> list[str]:
    """Break a text into lines at its spaces, and inside words that are longer than a line; cut what is left over.

    Args:
        text: Any text; it is made readable.
        width: Of a line, in inches.
        lines: How many there may be.
        size: Of the font, in points.

    Returns:
        At most `lines` lines; the last one ends with an ellipsis if text was cut.

    Examples:
        >>> wrap("where is the nearest station, please?", 0.8, 2, 8)
        ['where is the', 'nearest…']
    """
    rest = readable(text).replace(r"\$", "$")
    result: list[str] = []

    def beginning(kept: int) -> str:
        return rest[:kept].rstrip()

    while rest and len(result) < lines:
        kept = max(1, _longest(min(len(rest), LONGEST_LINE), width, size, beginning))
        space = rest.rfind(" ", 0, kept + 1)
        if kept < len(rest) and space > 0:
            kept = space
        result.append(beginning(kept))
        rest = rest[kept:].lstrip()
    if rest and result:
        last = result[-1]
        while last and width_of(last + ELLIPSIS, size) > width:
            last = last[:-1]
        result[-1] = last.rstrip() + ELLIPSIS
    return [line.replace("$", r"\$") for line in result]


# Okabe and Ito, Color Universal Design, 2008: colours that the colour-blind tell apart
BLACK, ORANGE, SKY_BLUE, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
# Further ones, for more classes than that palette has colours.
WINE, OLIVE, INDIGO, BROWN = "#882255", "#999933", "#332288", "#7F4A1E"
GREY, LIGHT_GREY = "#595959", "#D9D9D9"

RELEVANT, IRRELEVANT = GREEN, VERMILION
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


class MethodStyle(NamedTuple):
    """How every figure draws a method: in grey and for the colour-blind its marker and its dashes tell it apart."""

    colour: str
    marker: str
    dashes: LineStyleType


# The softmax head, the distance-ratio head, average precision as a loss, and whatever stands beside them.
METHODS: Mapping[str, MethodStyle] = {
    "softmax": MethodStyle(ORANGE, "s", (0, (4, 1.2))),
    "dr": MethodStyle(BLUE, "o", "-"),
    "soft_ap": MethodStyle(PURPLE, "^", (0, (6, 1.2, 1.2, 1.2))),
    "other": MethodStyle(GREY, "D", (0, (1.2, 1.2))),
}

# What a legend calls the band.
BAND = "95 % interval of the mean of {seeds} seeds"

Format = Literal["png", "svg"]

WIDTH = 6.0  # inches: 600 pixels at the resolution of a screen
TEXT, SMALL = 9.0, 8.0  # points: 12.5 and 11 pixels in a picture that is 600 pixels wide
RESOLUTION = 200  # an SVG's pictures have it too; its lines have none


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in the style of the package, regardless of the user's matplotlib settings, which are restored afterwards."""
    settings = {
        "font.family": list(families()),
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
    """Draw a figure in the style of the package, with all that matplotlib would otherwise settle at the first use."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with house_style():
            figure = draw(*args, **kwargs)
            if figure.get_layout_engine() is not None:  # a fifth of the time of a figure that is placed by hand
                figure.draw_without_rendering()
        return figure

    return drawn


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
    # Pixels without a window, whichever backend the user has chosen.
    FigureCanvasAgg(figure)
    return figure


def entitle(figure: Figure, title: str) -> None:
    """Write a line above all axes, if there is one."""
    if title:
        figure.suptitle(shorten(title, WIDTH - 0.2, TEXT + 1), x=0.02, ha="left", fontsize=TEXT + 1)


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
        axes: Where to draw.
        steps: The place of each point.
        runs: A curve for each seed.
        style: Of the method.
        marked: Whether each point has a marker.
        logarithmic: Whether mean and interval are those of the logarithms, for a logarithmic axis: a geometric mean.

    Returns:
        The line of the mean, for a legend.
    """
    values = np.log(runs) if logarithmic else runs
    curves = (values.mean(axis=0), *(student_interval(values) if len(runs) > 1 else ()))
    mean, *ends = (np.exp(curve) if logarithmic else curve for curve in curves)
    if ends:
        axes.fill_between(steps, *ends, color=style.colour, alpha=0.2, linewidth=0)
    marker = style.marker if marked else ""
    (line,) = axes.plot(
        steps, mean, color=style.colour, linestyle=style.dashes, marker=marker, markersize=4, markeredgecolor="white",
        markeredgewidth=0.6,
    )  # fmt: skip
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
        raise ValueError(f"A figure is written as png or svg, not as {file_format!r}.")
    content = io.BytesIO()
    # The name tells own pictures from others. A version or a date would make two files of one figure differ.
    metadata = {"Software": WRITER} if file_format == "png" else {"Date": None}
    with house_style():
        figure.savefig(content, format=file_format, dpi=resolution or RESOLUTION, metadata=metadata, facecolor="white")
    return content.getvalue()


def save(figure: Figure, path: str | Path, resolution: float | None = None) -> None:
    """Write a figure as a PNG or SVG file, depending on the ending of the file name.

    A file of this name is replaced, whoever has written it.

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
        raise ValueError(f"{path.name} ends neither in .png nor in .svg. Choose one of these.")
    path.write_bytes(encode(figure, cast(Format, ending), resolution))


def pixels(figure: Figure, resolution: float = 100) -> np.ndarray:
    """Draw a figure as an array of uint8 with the axes height, width, (red, green, blue).

    Examples:
        >>> pixels(new_figure(1)).shape
        (100, 600, 3)
    """
    return np.array(Image.open(io.BytesIO(encode(figure, "png", resolution))).convert("RGB"))
