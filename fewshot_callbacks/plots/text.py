"""Text that fits: what no font can draw is replaced, and what is too long is shortened or wrapped."""

import functools

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.textpath import text_to_path

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
    known = [ord(char) in _drawable() for char in shown]
    if not any(held for char, held in zip(shown, known, strict=True) if char != " "):
        return " ".join(f"U+{ord(char):04X}" for char in shown if char != " ")
    drawn = "".join(char if held else UNKNOWN for char, held in zip(shown, known, strict=True))
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

    # Bisection, since each measurement lays out all the letters.
    low, high = 0, min(len(letters) - 1, LONGEST_LINE)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if width_of(cut(middle), size) <= width else (low, middle - 1)
    return cut(low)


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
    while rest and len(result) < lines:
        low, high = 1, min(len(rest), LONGEST_LINE)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if width_of(rest[:middle].rstrip(), size) <= width else (low, middle - 1)
        space = rest.rfind(" ", 0, low + 1)
        if low < len(rest) and space > 0:
            low = space
        result.append(rest[:low].rstrip())
        rest = rest[low:].lstrip()
    if rest and result:
        last = result[-1]
        while last and width_of(last + ELLIPSIS, size) > width:
            last = last[:-1]
        result[-1] = last.rstrip() + ELLIPSIS
    return [line.replace("$", r"\$") for line in result]
