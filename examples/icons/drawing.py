"""Draws the icons of a machine's themes, and decides which names are classes and which pictures count."""

import hashlib
import io
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from icons.copies import circles, near_copies
from icons.files import IconFile, Theme, families, icon_files

Picture = UInt8[np.ndarray, "4 size size"]
Item = tuple[str, str]  # name of the icon, family

VERSION = 1  # of the drawing: raise it with every change that moves a pixel, a class or a family

ONE_COLOUR = 8  # of 255: tolerance of a premultiplied channel for one colour, because files are rounded


@dataclass(frozen=True, eq=False)
class DrawnIcons:
    """All icons that count, before they are split.

    Attributes:
        images: Red, green, blue and alpha; not premultiplied, and 0 where alpha is 0.
        classes: For each image, its position in `names`.
        families: For each image, the position of its family in `family_names`.
        names: Names of the classes, in alphabetical order.
        contexts: For each class, the context that most of its images have ("Actions", "Applications", ...).
        family_names: Names of the families, in alphabetical order, including families without an image.
        circles: For each family, the first family of those that drew on each other; see `copies.circles`.
        counts: What each rule left out, by its name in `RULES`.
    """

    images: UInt8[Tensor, "images 4 size size"]
    classes: Int[Tensor, "images"]
    families: Int[Tensor, "images"]
    names: tuple[str, ...]
    contexts: tuple[str, ...]
    family_names: tuple[str, ...]
    circles: tuple[int, ...]
    counts: dict[str, int]

    @property
    def hash(self) -> str:
        """Twelve hexadecimal characters of the SHA-256 of images, names and families: equal where the data are."""
        digest = hashlib.sha256()
        for part in (self.images, self.classes, self.families):
            digest.update(part.contiguous().numpy().tobytes())
        for words in (self.names, self.family_names):
            digest.update("\n".join(words).encode())
        return digest.hexdigest()[:12]


RULES = {
    "names": "names of icons, over all families",
    "rare": "names that too few families hold",
    "candidates": "pictures of the other names",
    "broken": "pictures left out: the file cannot be read",
    "empty": "pictures left out: nothing to be seen",
    "one_colour": "pictures left out: one colour",
    "aliases": "names left out: in most families one picture with a name that more families hold",
    "alias_pictures": "pictures left out: drawn for another name, too (a link, or the same pixels)",
    "repeated": "pictures left out: the same pixels as another family's in the same class",
    "small": "names left out: too few pictures remain",
    "copies": "pictures kept although they are near-copies of another family's in their class",
    "crossing": "pictures kept although they are near-copies of one in another class",
}
"""What `DrawnIcons.counts` counts, in the order of the rules."""


def svg_version() -> str | None:
    """The version of the library that draws SVG; None if it is not installed."""
    try:
        return version("resvg_py")
    except PackageNotFoundError:
        return None


def draw_icons(themes: Sequence[Theme], size: int, min_families: int, *, symbolic: bool) -> DrawnIcons:
    """Draw one picture for each name and family, and keep the pictures that the rules allow.

    A thousand pictures take a few seconds; if standard error is a terminal, it shows a progress bar.

    Args:
        themes: The themes.
        size: Height and width of the pictures, in pixels.
        min_families: A name with fewer pictures is not a class.
        symbolic: Whether symbolic and single-colour icons count.

    Returns:
        The icons, and what each rule left out.
    """
    groups = families(themes)
    vectors = svg_version() is not None
    files = {family: icon_files(group, size, vectors=vectors, symbolic=symbolic) for family, group in groups.items()}
    if not vectors:
        _warn_of_vectors(groups, files, size, symbolic=symbolic)
    held = Counter(name for icons in files.values() for name in icons)
    wanted = {
        (name, family): icon
        for family, icons in files.items()
        for name, icon in icons.items()
        if held[name] >= min_families
    }
    counts = dict.fromkeys(RULES, 0) | {"names": len(held), "candidates": len(wanted)}
    counts["rare"] = sum(families_of < min_families for families_of in held.values())
    pictures: dict[Item, Picture] = {}
    for item, drawn in zip(wanted, _draw_all([icon.path for icon in wanted.values()], size), strict=True):
        if drawn is None:
            counts["broken"] += 1
        elif not drawn[3].any():
            counts["empty"] += 1
        elif not symbolic and is_of_one_colour(drawn):
            counts["one_colour"] += 1
        else:
            pictures[item] = drawn
    kept = choose({item: wanted[item].target for item in pictures}, pictures, min_families, counts)
    return _packed(kept, pictures, wanted, tuple(groups), size, counts)


def _warn_of_vectors(
    groups: Mapping[str, Sequence[Theme]], files: Mapping[str, Mapping[str, IconFile]], size: int, *, symbolic: bool
) -> None:
    every = (icon_files(group, size, vectors=True, symbolic=symbolic) for group in groups.values())
    lost = sum(map(len, every)) - sum(map(len, files.values()))
    if lost:
        warnings.warn(
            f"{lost:,} icons are there as SVG alone and are left out: the library that draws them is not installed. "
            "Install it with: pip install resvg_py",
            stacklevel=2,
        )


def _draw_all(paths: Sequence[Path], size: int) -> Iterable[Picture | None]:
    """Draw files, in their order. Threads help: both libraries let go of Python's lock while they draw."""
    with ThreadPoolExecutor() as pool:
        yield from track(
            pool.map(lambda path: draw_file(path, size), paths, chunksize=64),
            "Drawing the icons, once",
            total=len(paths),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )


def draw_file(path: Path, size: int) -> Picture | None:
    """A file as a picture: scaled so that its longer side fills the square, in the middle; None if it cannot be read."""
    try:
        if path.suffix == ".svg":
            resvg: Any = import_module("resvg_py")
            # Twice as large, because resampling makes finer edges; without the fonts of the machine, which differ.
            png = resvg.svg_to_bytes(svg_path=str(path), width=2 * size, height=2 * size, skip_system_fonts=True)
            content = io.BytesIO(bytes(png))
        else:
            content = io.BytesIO(path.read_bytes())
        with Image.open(content, formats=("PNG",)) as image:
            image.load()
            whole = image.convert("RGBA")
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # a panic of resvg is not an Exception, and Pillow documents no error class
        return None
    scale = size / max(whole.size)
    width, height = (max(1, round(side * scale)) for side in whole.size)
    fitted = whole.resize((width, height), Image.Resampling.LANCZOS) if whole.size != (width, height) else whole
    page = np.zeros((size, size, 4), dtype=np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    page[top : top + height, left : left + width] = np.asarray(fitted)
    page[page[..., 3] == 0] = 0  # colours that cannot be seen make no difference
    return np.ascontiguousarray(page.transpose(2, 0, 1))


def is_of_one_colour(picture: Picture) -> bool:
    """Whether all visible pixels have one colour, regardless of their transparency.

    Examples:
        >>> square = np.zeros((4, 8, 8), dtype=np.uint8)
        >>> square[:, 2:6, 2:6] = np.array([200, 0, 0, 255])[:, None, None]
        >>> is_of_one_colour(square)
        True
        >>> square[1, 2:6, 4] = 255
        >>> is_of_one_colour(square)
        False
    """
    colours, alpha = picture[:3].astype(np.float64), picture[3].astype(np.float64) / 255
    colour = (colours * alpha).sum((1, 2)) / alpha.sum()
    return bool((np.abs(colours - colour[:, None, None]) * alpha).max() <= ONE_COLOUR)


def choose(
    targets: Mapping[Item, str], pictures: Mapping[Item, Picture], min_families: int, counts: dict[str, int]
) -> list[Item]:
    """Return the pictures that count: no picture has two names, and no picture appears twice under one name.

    In one family two names are one picture if both are links to one icon, one is a link to the other, or their pixels are
    equal. A name is an alias, and not a class, if this is true in at least half of the families that have both this name and
    an earlier name. Names in more families are earlier, then names earlier in the alphabet. In the other cases the picture
    goes to the first of the names.

    Args:
        targets: For each name and family, the name of the icon that its file is a link to, or its own.
        pictures: Pixels of the pictures.
        min_families: A name with fewer pictures is not a class.
        counts: Filled with what the rules left out.

    Returns:
        Name and family of each picture, in alphabetical order.
    """
    pixels = {item: hashlib.sha256(picture.tobytes()).digest() for item, picture in pictures.items()}
    held = Counter(name for name, _ in pictures)
    names = sorted(held, key=lambda name: (-held[name], name))
    group = _one_picture(targets, pixels)
    kept_names = _without_aliases(names, group)
    counts["aliases"] = len(names) - len(kept_names)

    families_of: dict[str, list[str]] = defaultdict(list)
    for name, family in pictures:
        families_of[name].append(family)
    taken: dict[Any, str] = {}  # pixels, or group of names of a family -> the name that has it
    chosen: list[Item] = []
    for name in kept_names:
        of_name = []
        for family in sorted(families_of[name]):
            keys = (pixels[name, family], (family, group[name, family]))
            owner = next((taken[key] for key in keys if key in taken), None)
            if owner is None:
                of_name.append((name, family))
            else:
                counts["repeated" if owner == name else "alias_pictures"] += 1
            for key in keys:
                taken.setdefault(key, name)
        if len(of_name) >= min_families:
            chosen += of_name
        else:
            counts["small"] += 1
    return sorted(chosen)


def _one_picture(targets: Mapping[Item, str], pixels: Mapping[Item, bytes]) -> dict[Item, str]:
    """For each name and family, one of the names that are the same picture there: equal for all of them."""
    root: dict[Item, Item] = {}

    def find(item: Item) -> Item:
        while root.get(item, item) != item:
            item = root[item]
        return item

    first: dict[tuple[str, bytes], Item] = {}
    for (name, family), target in targets.items():
        root[find((name, family))] = find((target, family))
        same = first.setdefault((family, pixels[name, family]), (name, family))
        root[find((name, family))] = find(same)
    return {item: find(item)[0] for item in targets}


def _without_aliases(names: Sequence[str], group: Mapping[Item, str]) -> list[str]:
    families_of: dict[str, set[str]] = defaultdict(set)
    members: dict[Item, list[str]] = defaultdict(list)
    for (name, family), root in group.items():
        families_of[name].add(family)
        members[root, family].append(name)
    place = {name: position for position, name in enumerate(names)}
    alike: Counter[tuple[str, str]] = Counter()
    for together in members.values():
        alike.update(combinations(sorted(together, key=place.__getitem__), 2))
    earlier: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for (one, other), families_alike in alike.items():
        earlier[other].append((one, families_alike))
    kept: dict[str, None] = {}  # a set that remembers its order
    for name in names:
        if not any(
            one in kept and 2 * number >= len(families_of[one] & families_of[name]) for one, number in earlier[name]
        ):
            kept[name] = None
    return list(kept)


def _packed(
    kept: Sequence[Item],
    pictures: Mapping[Item, Picture],
    files: Mapping[Item, IconFile],
    family_names: tuple[str, ...],
    size: int,
    counts: dict[str, int],
) -> DrawnIcons:
    names = tuple(sorted({name for name, _ in kept}))
    label = {name: position for position, name in enumerate(names)}
    number = {family: position for position, family in enumerate(family_names)}
    contexts: dict[str, Counter[str]] = defaultdict(Counter)
    for item in kept:
        contexts[item[0]][files[item].context] += 1
    images = np.stack([pictures[item] for item in kept]) if kept else np.zeros((0, 4, size, size), dtype=np.uint8)
    packed = torch.from_numpy(images)
    classes = torch.tensor([label[name] for name, _ in kept], dtype=torch.int64)
    of_family = torch.tensor([number[family] for _, family in kept], dtype=torch.int64)
    pairs = near_copies(packed)
    inside = classes[pairs[:, 0]] == classes[pairs[:, 1]]
    counts |= {"copies": pairs[inside].unique().numel(), "crossing": pairs[~inside].unique().numel()}
    return DrawnIcons(
        images=packed,
        classes=classes,
        families=of_family,
        names=names,
        contexts=tuple(max(sorted(contexts[name].items()), key=lambda pair: pair[1])[0] for name in names),
        family_names=family_names,
        circles=circles(classes, of_family, pairs, len(family_names)),
        counts=counts,
    )
