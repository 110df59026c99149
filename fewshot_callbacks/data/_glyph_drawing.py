"""Draws the glyphs: which characters, in which faces, at which place, and which of them look alike."""

import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Int, UInt8
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import avg_pool2d
from tqdm import tqdm

Drawings = dict[str, UInt8[np.ndarray, "size size"]]  # of one face, by character

VERSION = 1  # of the drawing: raise it with every change that moves a pixel or a class

# The text faces among matplotlib's fonts: each family, and how it calls its regular, bold, italic and bold italic face.
# Its display, size-variant and private-use fonts are not text.
FAMILIES = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
}
FACES = tuple(family + style for family, styles in FAMILIES.items() for style in styles)

# In the order in which look-alikes are settled: the first script keeps the drawing.
SCRIPTS = ("Latin", "symbols", "Greek", "Cyrillic", "Armenian", "Georgian")

SUPERSAMPLING = 4  # glyphs are centred to a quarter of a pixel
EM = 0.75  # of the image: an average letter is a little over half as high as the image
INK = 30 / 32  # of the image: what is larger is drawn smaller
LOOK_ALIKE = 0.01  # of the ink; see `_look_alikes`
MISSING = "\uffff"  # never a character: fonts answer with their missing-glyph box


@dataclass(frozen=True, eq=False)
class DrawnGlyphs:
    """All glyphs of all scripts, look-alikes removed.

    Attributes:
        images: Ink is 255, paper 0.
        classes: For each image, its position in `characters`.
        faces: For each image, its position in `FACES`.
        characters: In the order of `SCRIPTS`, then of their code points.
        scripts: For each character, one of `SCRIPTS`.
        look_alikes: For each of `SCRIPTS`, how many characters were left out because an earlier one looks the same.
    """

    images: UInt8[Tensor, "images 1 size size"]
    classes: Int[Tensor, "images"]
    faces: Int[Tensor, "images"]
    characters: tuple[str, ...]
    scripts: tuple[str, ...]
    look_alikes: tuple[int, ...]


def script_of(character: str) -> str:
    """The script that the character's Unicode name mentions, `symbols` where it mentions none of ours.

    Examples:
        >>> [script_of(character) for character in "aλжեგ+7"]
        ['Latin', 'Greek', 'Cyrillic', 'Armenian', 'Georgian', 'symbols', 'symbols']
    """
    words = unicodedata.name(character, "").split()
    return next((script for script in SCRIPTS if script.upper() in words), "symbols")


def draw_glyphs(size: int, min_faces: int) -> DrawnGlyphs:
    """Draw every character that at least `min_faces` faces hold, light on dark, centred by its ink.

    All characters have one scale (em = 3/4 of the image), so that o and O differ; only what would not fit is drawn
    smaller. Left out are characters without ink (spaces, controls, combining marks alone), a face that answers with its
    missing-glyph box, and look-alikes. Takes a few seconds; a bar on standard error says how far it is, where that is a
    terminal.
    """
    fonts = Path(mpl.get_data_path()) / "fonts" / "ttf"
    # of each face: the characters with a glyph other than its missing-glyph box, which is number 0
    maps = [FT2Font(str(fonts / f"{face}.ttf")).get_charmap() for face in FACES]
    held = [{chr(code) for code, glyph in of_face.items() if glyph != 0} for of_face in maps]
    count = Counter(character for characters in held for character in characters)
    # separators (Z), control and private-use codes (C) and combining marks (M) have no ink
    candidates = [c for c, faces in count.items() if faces >= min_faces and unicodedata.category(c)[0] not in "ZCM"]
    candidates.sort(key=lambda character: (SCRIPTS.index(script_of(character)), character))

    drawings: list[Drawings] = []  # for each face
    shown = tqdm(list(zip(FACES, held, strict=True)), "Drawing the glyphs, once", leave=False, disable=None)
    for face, characters in shown:
        here = [character for character in candidates if character in characters]
        box, *drawn = _draw([MISSING, *here], fonts / f"{face}.ttf", size)
        pairs = zip(here, drawn, strict=True)
        drawings.append({c: image for c, image in pairs if image.any() and not np.array_equal(image, box)})

    count = Counter(character for drawn in drawings for character in drawn)
    candidates = [character for character in candidates if count[character] >= min_faces]
    kept = _without_look_alikes(candidates, drawings)
    items = [(label, face) for label, c in enumerate(kept) for face in range(len(FACES)) if c in drawings[face]]
    left_out = Counter(map(script_of, candidates)) - Counter(map(script_of, kept))
    images = np.stack([drawings[face][kept[label]] for label, face in items])
    return DrawnGlyphs(
        images=torch.from_numpy(images).unsqueeze(1),
        classes=torch.tensor([label for label, _ in items]),
        faces=torch.tensor([face for _, face in items]),
        characters=tuple(kept),
        scripts=tuple(map(script_of, kept)),
        look_alikes=tuple(left_out[script] for script in SCRIPTS),
    )


def _draw(characters: list[str], path: Path, size: int) -> UInt8[np.ndarray, "characters size size"]:
    """Draw characters of one font; all zero where one has no ink. All are pasted into one strip, which is reduced."""
    side, limit, em = size * SUPERSAMPLING, int(size * SUPERSAMPLING * INK), round(EM * size * SUPERSAMPLING)
    # Pillow's own layout: it would prefer Raqm, which not every build has, and the drawing must not depend on the
    # build.
    font = ImageFont.truetype(str(path), em, layout_engine=ImageFont.Layout.BASIC)
    strip = Image.new("L", (side, side * len(characters)))
    for i, character in enumerate(characters):
        ink = _ink(character, font, side)
        smaller = em
        while max(ink.size) > limit:  # once, or twice where hinting rounds up
            # At least one less, or hinting could keep the size where it is for ever.
            smaller = min(smaller - 1, smaller * limit // max(ink.size))
            ink = _ink(character, font.font_variant(size=smaller), side)
        strip.paste(ink, ((side - ink.width) // 2, side * i + (side - ink.height) // 2))
    return np.array(strip.reduce(SUPERSAMPLING)).reshape(len(characters), size, size)


def _ink(character: str, font: ImageFont.FreeTypeFont, side: int) -> Image.Image:
    """The drawing, cut to its ink; empty where there is none."""
    page = Image.new("L", (2 * side, 2 * side))  # ample: an em is 3/8 of it
    ImageDraw.Draw(page).text((side // 2, side * 5 // 4), character, fill=255, font=font, anchor="ls")
    return page.crop(page.getbbox() or (0, 0, 0, 0))


def _without_look_alikes(candidates: list[str], drawings: list[Drawings]) -> list[str]:
    """The candidates that look like no earlier one that was kept."""
    alike: dict[str, set[str]] = defaultdict(set)
    for drawn in drawings:
        for one, other in _look_alikes(drawn):
            alike[one].add(other)
            alike[other].add(one)
    kept: dict[str, None] = {}  # a set that remembers its order
    for character in candidates:
        if alike[character].isdisjoint(kept):
            kept[character] = None
    return list(kept)


def _look_alikes(drawn: Drawings) -> list[tuple[str, str]]:
    """Pairs of one face whose difference, squared and summed, is at most 1 % of the larger one's squared ink.

    Pixel-identical pairs are among them; so is the same outline a fraction of a pixel aside. Sums over 2 x 2 blocks,
    halved, are never further apart than the images (Cauchy-Schwarz), so a float32 product of these small vectors finds
    the pairs that may be; integers decide, so that no rounding does.
    """
    characters = list(drawn)
    if not characters:
        return []
    images = torch.from_numpy(np.stack(list(drawn.values()))).unsqueeze(1)  # (glyphs, 1, size, size)
    pixels = images.flatten(1).long()  # (glyphs, size * size)
    ink = pixels.square().sum(dim=1)
    # Twice the mean of four pixels is half of their sum.
    blocks = 2 * avg_pool2d(images.float(), 2).flatten(1)
    energy = blocks.square().sum(dim=1)
    apart = torch.addmm(energy[:, None] + energy[None, :], blocks, blocks.T, alpha=-2)  # (glyphs, glyphs)
    larger = torch.maximum(ink.float()[:, None], ink.float()[None, :])  # (glyphs, glyphs)
    maybe = apart <= larger.mul_(2 * LOOK_ALIKE)  # twice: room for the rounding of the product
    one, other = maybe.triu(diagonal=1).nonzero().unbind(1)
    exact = (pixels[one] - pixels[other]).square().sum(dim=1)
    # The difference is multiplied instead of the ink being divided, so that all are integers.
    close = exact * round(1 / LOOK_ALIKE) <= torch.maximum(ink[one], ink[other])
    return [(characters[i], characters[j]) for i, j in zip(one[close].tolist(), other[close].tolist(), strict=True)]
