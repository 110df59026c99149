"""`python -m fewshot_callbacks.data [glyphs | icons]`: how large the built-in data set is, and a page of it."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fewshot_callbacks._terminal import as_text, printable
from fewshot_callbacks.data._glyph_drawing import SCRIPTS
from fewshot_callbacks.data.glyphs import SPLITS, glyph_sheet, load_drawing, load_splits
from fewshot_callbacks.data.icons import load_splits as load_icon_splits
from fewshot_callbacks.data.icons.cache import installed_themes
from fewshot_callbacks.data.icons.cache import load_drawing as load_icons
from fewshot_callbacks.data.icons.drawing import RULES, DrawnIcons, svg_version
from fewshot_callbacks.data.icons.files import families
from fewshot_callbacks.data.icons.packages import described, packages_of
from fewshot_callbacks.data.icons.sheet import icon_sheet


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the sheet.

    Args:
        arguments: Arguments of the command line; by default those of the process.

    Returns:
        The exit status: 0, or 1 where too few icon themes are installed.

    Examples:
        >>> main(["--help"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    parser = argparse.ArgumentParser(
        prog="python -m fewshot_callbacks.data", description="Print the size of the glyph data set, or of the icons."
    )
    parser.add_argument("set", nargs="?", choices=("glyphs", "icons"), default="glyphs")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images, in pixels")
    parser.add_argument("--min-faces", type=int, default=10, help="smallest number of faces that contain a character")
    parser.add_argument(
        "--min-families", type=int, default=6, help="smallest number of theme families that contain a name"
    )
    parser.add_argument("--roots", nargs="+", metavar="FOLDER", help="folders of icon themes, instead of the system's")
    parser.add_argument(
        "--sheet", metavar="PATH", help="write a page of the set as a PNG; by default icons.png for icons"
    )
    options = parser.parse_args(arguments)
    try:
        if options.set == "icons":
            _icons(options)
        else:
            _glyphs(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {options.set}: {printable(error)}", file=sys.stderr)
        return 1
    return 0


def _glyphs(options: argparse.Namespace) -> None:
    look_alikes = dict(zip(SCRIPTS, load_drawing(options.size, options.min_faces).look_alikes, strict=True))
    table = Table("split", "script", *(("classes", "images", "images per class", "look-alikes left out")))
    for column in table.columns[2:]:
        column.justify = "right"
    classes = images = 0
    for split, glyphs in load_splits(options.size, options.min_faces).items():
        for script in SPLITS[split]:
            inside = [label for label, of in enumerate(glyphs.scripts) if of == script]
            counts = glyphs.labels.bincount()[inside]
            spread = f"{counts.min()} - {counts.max()}" if inside else ""
            table.add_row(split, script, f"{len(inside):,}", f"{counts.sum():,}", spread, f"{look_alikes[script]:,}")
        table.add_row(split, "all", f"{len(glyphs.characters):,}", f"{len(glyphs):,}", end_section=True, style="bold")
        classes, images = classes + len(glyphs.characters), images + len(glyphs)
    table.add_row("all", "", f"{classes:,}", f"{images:,}", "", f"{sum(look_alikes.values()):,}", style="bold")
    Console().print(table)
    if options.sheet is not None:
        glyph_sheet(options.sheet, size=options.size)
        Console().print(as_text(f"Wrote {options.sheet}"))


def _icons(options: argparse.Namespace) -> None:
    drawn = load_icons(options.size, options.min_families, roots=options.roots)
    console, svg = Console(), svg_version()
    console.print(_family_table(drawn, options.roots))
    console.print(_split_table(options))
    rules = Table("rule", "count")
    rules.columns[1].justify = "right"
    for rule, meaning in RULES.items():
        rules.add_row(meaning, f"{drawn.counts[rule]:,}")
    console.print(rules)
    console.print(
        f"{len(drawn.images):,} images of {len(drawn.names):,} classes, {options.size} x {options.size}, hash "
        f"{drawn.hash}; SVG drawn by {f'resvg_py {svg}' if svg else 'nothing'}",
        soft_wrap=True,
    )
    icon_sheet(options.sheet or "icons.png", drawn)
    console.print(as_text(f"Wrote {options.sheet or 'icons.png'}"))


def _family_table(drawn: DrawnIcons, roots: Sequence[str] | None) -> Table:
    table = Table("family", "themes", "images", "package and version", "licences")
    table.columns[2].justify = "right"
    installed = installed_themes(roots)
    brought = packages_of(installed)
    for number, (family, themes) in enumerate(families(installed).items()):
        first = drawn.circles[number]
        name = family if first == number else f"{family} (drew on {drawn.family_names[first]})"
        images = int((drawn.families == number).sum())
        table.add_row(
            as_text(name),
            str(len(themes)),
            f"{images:,}",
            *map(as_text, described([package for theme in themes for package in brought[theme.name]])),
        )
    return table


def _split_table(options: argparse.Namespace) -> Table:
    table = Table("split by", "split", "families", "classes", "images", "images per class")
    for column in table.columns[2:]:
        column.justify = "right"
    for by in ("classes", "themes", "both"):
        try:
            splits = load_icon_splits(options.size, options.min_families, by=by, roots=options.roots)
        except ValueError as error:  # a small set may leave a split without a class
            table.add_row(by, str(error), end_section=True)
            continue
        for split, icons in splits.items():
            counts = icons.labels.bincount()
            sizes = f"{len(icons.families.unique())}", f"{len(icons.names):,}", f"{len(icons):,}"
            table.add_row(by, split, *sizes, f"{counts.min()} - {counts.max()}", end_section=split == "test")
    return table


if __name__ == "__main__":
    sys.exit(main())
