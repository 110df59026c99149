"""Text that fits: lines of characters that the fonts have, measured, shortened or wrapped to a width.

The functions measure each line as it will be drawn. `textwrap` counts letters instead, so that lines of wide letters and of
CJK text leave their box. matplotlib's `wrap=True` breaks lines at spaces only, at the edge of the figure, and has no largest
number of lines. A constrained layout moves axes, and shortens no text.

No text is fitted by itself, the label of an axis no more than others. A function that draws words of its caller, such as a
name, a title or a part of a label, passes them through `shorten` or `wrap` with the width that is free. Text of the package
itself is drawn as it is.

Limits:

- A text of more than `MAX_TEXT` characters loses its middle before it is measured.
- A line has at most `MAX_LINE` letters, even if more fit.
- A line is measured by the factor `ROUNDING` too long.
- Only the width is fitted, not the height of a line or of several.
- At least "…" remains of a shortened text, and at least one letter in each line of a wrapped one, even if that is too wide.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.textpath import text_to_path

# Fonts of the common systems for characters that DejaVu Sans, which comes with matplotlib, lacks.
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
MAX_TEXT = 4000  # characters; a picture has no room for more
MAX_LINE = 400  # letters of one line; the time to measure a line is proportional to their number
# A line may be drawn longer than it is measured, since a screen rounds each letter to whole pixels.
ROUNDING = 1.03


def readable(text: object) -> str:
    r"""Return a value as one line of characters that the fonts have.

    White space of any kind and length becomes one space, and characters that cannot be seen are dropped. A character that no
    font has becomes □. If no font has any character of the text, code points distinguish the labels. A text
    of more than `MAX_TEXT` characters loses its middle.

    Args:
        text: A label, a name or any other value, converted by `str`.

    Returns:
        The text, in which a dollar sign starts no formula.

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
    """Cut the middle out of a text that is too long: names of one kind often differ at their ends.

    Args:
        text: Any text; it is made readable.
        width: The largest length, in inches.
        size: The size of the font, in points.

    Returns:
        The text, or its beginning and its end with an ellipsis between them.

    Examples:
        >>> shorten("Black_footed_Albatross_0046", 1.0, 8)
        'Black_fo…_0046'
    """
    return shorten_readable(readable(text), width, size)


def shorten_readable(line: str, width: float, size: float) -> str:
    r"""Cut the middle out of a readable text that is too long.

    It is for a line of several texts, after `readable` has made each of them readable.

    Args:
        line: What `readable` returned, or several of these in one line.
        width: The largest length, in inches.
        size: The size of the font, in points.

    Returns:
        The line, or its beginning and its end with an ellipsis between them.

    Examples:
        >>> shorten_readable(f"{readable('price $5')}: 0.25", 2.0, 8)
        'price \\$5: 0.25'
    """
    if len(line) <= MAX_LINE and width_of(line, size) <= width:
        return line
    letters = _unescaped(line)

    def without_middle(count: int) -> str:
        # Readers see the beginning first, so it gets three fifths of the letters, rounded up.
        head = (3 * count + 4) // 5
        tail = count - head
        beginning = letters[:head].rstrip()
        end = letters[len(letters) - tail :].lstrip()
        return _escaped(beginning + ELLIPSIS + end)

    limit = min(len(letters) - 1, MAX_LINE)
    return without_middle(_largest_fit(without_middle, limit, width, size))


def wrap(text: object, width: float, lines: int, size: float) -> list[str]:
    """Break a text into lines at its spaces, and inside words that are longer than a line; cut the text after the last line.

    Args:
        text: Any text; it is made readable.
        width: The width of a line, in inches.
        lines: The largest number of lines.
        size: The size of the font, in points.

    Returns:
        At most `lines` lines; the last one ends with an ellipsis if text was cut.

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
    """Measure a line of readable text in inches, by the factor `ROUNDING` too long.

    Args:
        line: A text that `readable` returned.
        size: The size of the font, in points.
    """
    if not line:
        return 0.0
    properties = FontProperties(family=list(font_families()), size=size)
    points, _, _ = text_to_path.get_text_width_height_descent(_unescaped(line), properties, ismath=False)
    return ROUNDING * float(points) / 72


@functools.cache
def font_families() -> tuple[str, ...]:
    """The fonts of all figures: DejaVu Sans, then the fonts of this machine for other scripts."""
    installed = {font.name for font in fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed))


def _first_line(text: str, width: float, size: float) -> str:
    """Return the beginning of a text that fills a line, up to a space if there is one."""
    count = _largest_fit(lambda letters: text[:letters].rstrip(), min(len(text), MAX_LINE), width, size)
    # A line has at least one letter, even a letter that is too wide, or the loop would never end.
    count = max(1, count)
    space = text.rfind(" ", 0, count + 1)
    if count < len(text) and space > 0:
        return text[:space]
    return text[:count]


def _with_ellipsis(line: str, width: float, size: float) -> str:
    """Return a line that ends with an ellipsis and fits."""
    while line and width_of(line + ELLIPSIS, size) > width:
        line = line[:-1]
    return line.rstrip() + ELLIPSIS


def _largest_fit(cut: Callable[[int], str], limit: int, width: float, size: float) -> int:
    """Return the largest number of letters, from 0 to `limit`, for which the text `cut(number)` fits the width."""
    # Bisection needs few measurements, and each of them lays out the whole text.
    return bisect_left(range(1, limit + 1), True, key=lambda count: width_of(cut(count), size) > width)


@functools.cache
def _drawable_code_points() -> frozenset[int]:
    """Code points that one of the fonts has."""
    # No fallback is allowed: another font in place of a missing font would promise characters that are not drawn.
    paths = [findfont(FontProperties(family=[name]), fallback_to_default=False) for name in font_families()]
    return frozenset(point for path in paths for point in get_font(path).get_charmap())


def _escaped(text: str) -> str:
    """Return a text in which a dollar sign does not start a matplotlib formula."""
    return text.replace("$", r"\$")


def _unescaped(line: str) -> str:
    """Return a readable text with one character for each letter that is drawn."""
    return line.replace(r"\$", "$")
