"""Text that fits its place: functions that measure text, replace characters without a glyph, and shorten or wrap lines.

The functions measure each line as it will be drawn. Other tools do not suffice: `textwrap` counts letters, so lines of wide
letters and of CJK text leave their box. matplotlib's `wrap=True` breaks lines only at spaces and at the edge of the figure,
and does not limit the number of lines. A constrained layout moves axes, but does not shorten text.

matplotlib does not fit any text automatically. A function that draws a text of its caller, such as a name, a title or a part
of a label, must pass it through `shorten` or `wrap` with the free width. The package's own texts are drawn unchanged.

Limits:

- A text of more than `MAX_TEXT` characters loses its middle before it is measured.
- A line has at most `MAX_LINE` letters, even if more fit.
- Measured widths are too large by the factor `ROUNDING`.
- Only the width is fitted, not the height.
- A shortened text keeps at least "…", and each line of a wrapped text keeps at least one letter, even if that is too wide.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.textpath import text_to_path

# Fonts of common operating systems, for characters that DejaVu Sans (matplotlib's font) lacks.
FALLBACK_FONTS = (
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
MISSING_GLYPH = "□"
MAX_TEXT = 4000  # characters; no figure has room for more
MAX_LINE = 400  # letters per line; the time to measure a line is proportional to its letters
# A line may be drawn wider than measured, because each letter is rounded to whole pixels on a screen.
ROUNDING = 1.03


def readable(text: object) -> str:
    r"""Return a value as one line of drawable characters, in which a dollar sign does not start a formula.

    White space becomes one space, and invisible characters are dropped. A character without a glyph becomes □; if all
    are, the line consists of code points, so that labels still differ. A text of more than `MAX_TEXT` characters loses
    its middle.

    Examples:
        >>> readable("two\nlines"), readable("price $5"), readable("cat \U00013000"), readable("\U00013000")
        ('two lines', 'price \\$5', 'cat □', 'U+13000')
    """
    line = " ".join(str(text).split())
    if len(line) > MAX_TEXT:
        line = line[: MAX_TEXT // 2] + ELLIPSIS + line[-MAX_TEXT // 2 :]
    line = "".join(char for char in line if char.isprintable())
    letters = line.replace(" ", "")
    drawable = _drawable_code_points()
    if drawable.isdisjoint(map(ord, letters)):
        return " ".join(f"U+{ord(char):04X}" for char in letters)
    line = "".join(char if char == " " or ord(char) in drawable else MISSING_GLYPH for char in line)
    return _escaped(line)


def shorten(text: object, width: float, size: float) -> str:
    """Return a text that fits the width, with an ellipsis in place of its middle if necessary.

    The end is kept because similar names often differ at the end. `width` is in inches, `size` in points.

    Examples:
        >>> shorten("Black_footed_Albatross_0046", 1.0, 8)
        'Black_fo…_0046'
    """
    return shorten_readable(readable(text), width, size)


def shorten_readable(line: str, width: float, size: float) -> str:
    r"""Return a readable line that fits the width, with an ellipsis in place of its middle if necessary.

    Use this function for a line that joins several results of `readable`.

    `width` is in inches, `size` in points.

    Examples:
        >>> shorten_readable(f"{readable('price $5')}: 0.25", 2.0, 8)
        'price \\$5: 0.25'
    """
    if len(line) <= MAX_LINE and width_of(line, size) <= width:
        return line
    letters = _unescaped(line)

    def without_middle(count: int) -> str:
        # The beginning is read first, so it gets 60 % of the letters, rounded up.
        head = (3 * count + 4) // 5
        tail = count - head
        beginning = letters[:head].rstrip()
        end = letters[len(letters) - tail :].lstrip()
        return _escaped(beginning + ELLIPSIS + end)

    limit = min(len(letters) - 1, MAX_LINE)
    return without_middle(_largest_fit(without_middle, limit, width, size))


def wrap(text: object, width: float, lines: int, size: float) -> list[str]:
    """Return a text as at most `lines` lines; the last line ends with an ellipsis if the text is too long.

    Lines are broken at spaces, and inside words that are longer than a line. `width` is in inches, `size` in points.

    Examples:
        >>> wrap("where is the nearest station, please?", 0.8, 2, 8)
        ['where is the', 'nearest…']
    """
    remaining = _unescaped(readable(text))
    wrapped: list[str] = []
    while remaining and len(wrapped) < lines:
        line = _first_line(remaining, width, size)
        wrapped.append(line.rstrip())
        remaining = remaining[len(line) :].lstrip()
    if remaining and wrapped:
        wrapped[-1] = _with_ellipsis(wrapped[-1], width, size)
    return [_escaped(line) for line in wrapped]


def width_of(line: str, size: float) -> float:
    """Return the width of a readable line in inches, multiplied by `ROUNDING`.

    `size` is in points.
    """
    if not line:
        return 0.0
    properties = FontProperties(family=list(font_families()), size=size)
    points, _, _ = text_to_path.get_text_width_height_descent(_unescaped(line), properties, ismath=False)
    return ROUNDING * float(points) / 72


@functools.cache
def font_families() -> tuple[str, ...]:
    """Return the fonts of all figures: DejaVu Sans, then the installed fonts for other scripts."""
    installed = {font.name for font in fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed))


def _first_line(text: str, width: float, size: float) -> str:
    """Return the longest beginning of a text that fits a line, cut at a space if possible."""
    count = _largest_fit(lambda letters: text[:letters].rstrip(), min(len(text), MAX_LINE), width, size)
    # At least one letter, even if it is too wide; otherwise `wrap` would never end.
    count = max(1, count)
    space = text.rfind(" ", 0, count + 1)
    if count < len(text) and space > 0:
        return text[:space]
    return text[:count]


def _with_ellipsis(line: str, width: float, size: float) -> str:
    """Return a line with an ellipsis at its end, cut to fit the width."""
    while line and width_of(line + ELLIPSIS, size) > width:
        line = line[:-1]
    return line.rstrip() + ELLIPSIS


def _largest_fit(cut: Callable[[int], str], limit: int, width: float, size: float) -> int:
    """Return the largest number of letters, from 0 to `limit`, for which the text `cut(number)` fits the width."""
    # Each measurement lays out the whole text; bisection needs few of them.
    return bisect_left(range(1, limit + 1), True, key=lambda count: width_of(cut(count), size) > width)


@functools.cache
def _drawable_code_points() -> frozenset[int]:
    """Return the code points that any of the fonts has."""
    # No fallback: matplotlib's replacement for a missing font has characters that would not be drawn.
    paths = [findfont(FontProperties(family=[name]), fallback_to_default=False) for name in font_families()]
    return frozenset(point for path in paths for point in get_font(path).get_charmap())


def _escaped(text: str) -> str:
    """Return a text in which a dollar sign does not start a matplotlib formula."""
    return text.replace("$", r"\$")


def _unescaped(line: str) -> str:
    """Return a readable line with one character per drawn letter."""
    return line.replace(r"\$", "$")
