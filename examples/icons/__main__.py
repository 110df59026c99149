"""`python -m icons`, with `examples` in PYTHONPATH: print the icon themes of this machine, and draw a page of icons."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from icons.cache import installed_themes, load_drawing
from icons.drawing import RULES, DrawnIcons, svg_version
from icons.files import families
from icons.packages import described, packages_of
from icons.sheet import icon_sheet
from icons.splits import IconThemes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the sheet; the exit status is 1 if too few icon themes are installed."""
    parser = argparse.ArgumentParser(prog="python -m icons", description="Print the size of the set of icons.")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images, in pixels")
    parser.add_argument(
        "--min-families", type=int, default=6, help="smallest number of theme families that contain a name"
    )
    parser.add_argument("--roots", nargs="+", metavar="FOLDER", help="folders of icon themes, instead of the system's")
    parser.add_argument("--sheet", metavar="PATH", default="icons.png", help="where to write a page of the set, a PNG")
    options = parser.parse_args(arguments)
    try:
        _icons(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {plain(error)}", file=sys.stderr)
        return 1
    return 0


def plain(words: object) -> Text:
    """Return text from others, such as the name of a theme, without markup and without terminal control characters."""
    return Text("".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(words)))


def _icons(options: argparse.Namespace) -> None:
    drawn = load_drawing(options.size, options.min_families, roots=options.roots)
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
    icon_sheet(options.sheet, drawn)
    console.print(plain(f"Wrote {options.sheet}"))


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
            plain(name),
            str(len(themes)),
            f"{images:,}",
            *map(plain, described([package for theme in themes for package in brought[theme.name]])),
        )
    return table


def _split_table(options: argparse.Namespace) -> Table:
    table = Table("split by", "split", "families", "classes", "images", "images per class")
    for column in table.columns[2:]:
        column.justify = "right"
    for by in ("classes", "themes", "both"):
        try:
            icons = IconThemes(by=by, size=options.size, min_families=options.min_families, roots=options.roots)
        except ValueError as error:  # a small set may leave a split without a class
            table.add_row(by, str(error), end_section=True)
            continue
        for split in icons.splits:
            part = icons.with_split(split)
            counts = part.labels.bincount()
            sizes = f"{len(part.families.unique())}", f"{len(part.class_names):,}", f"{len(part):,}"
            table.add_row(by, split, *sizes, f"{counts.min()} - {counts.max()}", end_section=split == "test")
    return table


if __name__ == "__main__":
    sys.exit(main())
