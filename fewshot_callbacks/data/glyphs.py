"""Glyphs: a real few-shot data set without a download, drawn from the fonts that come with matplotlib.

A class is a character. Its images show the character in up to 16 typefaces. Each split has its own scripts, as each split
of Omniglot has its own alphabets (Lake et al., "Human-level concept learning through probabilistic program induction",
Science 2015), so validation and test classes do not occur in training. `python examples/sheets.py` prints the sizes.
"""

import contextlib
import copy
import hashlib
import os
import secrets
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import matplotlib as mpl
import numpy as np
import PIL
import platformdirs
import torch
from jaxtyping import Float, Int, UInt8
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample
from tqdm import tqdm

from fewshot_callbacks.data.dataset import Batch, FewShotDataset, Split
from fewshot_callbacks.errors import InputError

# The images of one face, by character.
Drawings = dict[str, UInt8[np.ndarray, "size size"]]

# The version of the drawing. Increase it with every change of a pixel or a class.
VERSION = 1

# The text faces among matplotlib's fonts: each family, with the suffixes of its regular, bold, italic and bold italic face.
# matplotlib's display, size-variant and private-use fonts are not text faces.
FAMILIES = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
}
FACES = tuple(family + style for family, styles in FAMILIES.items() for style in styles)

# If characters of two scripts look alike, the first of these scripts keeps its character.
SCRIPTS = ("Latin", "symbols", "Greek", "Cyrillic", "Armenian", "Georgian")

SUPERSAMPLING = 4  # glyphs are centred to a quarter of a pixel
EM = 0.75  # fraction of the image height: an average letter is a little over half as high as the image
INK = 30 / 32  # largest height and width of a glyph, as a fraction of the image; larger glyphs are drawn smaller
LOOK_ALIKE = 0.01  # largest fraction of the ink in which look-alikes differ; see `_look_alikes`
NO_CHARACTER = "\uffff"  # fonts draw their missing-glyph box for this code point


@dataclass(frozen=True, eq=False)
class DrawnGlyphs:
    """All glyphs of all scripts, without look-alikes.

    Attributes:
        images: Ink is 255, paper is 0.
        classes: For each image, its position in `characters`.
        faces: For each image, its position in `FACES`.
        characters: The characters, in the order of `SCRIPTS`, then by code point.
        scripts: The script of each character, one of `SCRIPTS`.
        look_alikes: For each of `SCRIPTS`, the number of characters left out because an earlier character looks the same.
    """

    images: UInt8[Tensor, "images 1 size size"]
    classes: Int[Tensor, "images"]
    faces: Int[Tensor, "images"]
    characters: tuple[str, ...]
    scripts: tuple[str, ...]
    look_alikes: tuple[int, ...]


def script_of(character: str) -> str:
    """Return the script in the character's Unicode name, or `symbols`.

    Examples:
        >>> [script_of(character) for character in "aλжեგ+7"]
        ['Latin', 'Greek', 'Cyrillic', 'Armenian', 'Georgian', 'symbols', 'symbols']
    """
    words = unicodedata.name(character, "").split()
    return next((script for script in SCRIPTS if script.upper() in words), "symbols")


def draw_glyphs(size: int, min_faces: int) -> DrawnGlyphs:
    """Return drawings of every character that at least `min_faces` faces contain, light on dark, centred by the ink.

    All characters have the same scale (em = 3/4 of the image), so that o and O differ; only characters that do not fit
    are smaller. Characters without ink (spaces, control characters, lone combining marks), missing-glyph boxes and
    look-alikes are left out. Drawing takes a few seconds.
    """
    fonts = Path(mpl.get_data_path()) / "fonts" / "ttf"
    files = [fonts / f"{face}.ttf" for face in FACES]
    characters_of_faces = [_characters_of(file) for file in files]
    faces_of = Counter(character for characters in characters_of_faces for character in characters)
    candidates = [character for character, faces in faces_of.items() if faces >= min_faces and _has_ink(character)]
    candidates.sort(key=lambda character: (SCRIPTS.index(script_of(character)), character))

    drawings: list[Drawings] = []  # by face
    progress = tqdm(
        list(zip(files, characters_of_faces, strict=True)), "Drawing the glyphs, once", leave=False, disable=None
    )
    for file, characters in progress:
        drawings.append(_draw_face(file, [character for character in candidates if character in characters], size))

    # Without empty drawings and missing-glyph boxes, fewer faces may contain a character.
    faces_of = Counter(character for drawing in drawings for character in drawing)
    candidates = [character for character in candidates if faces_of[character] >= min_faces]
    classes = _without_look_alikes(candidates, drawings)
    removed_of_script = Counter(map(script_of, candidates)) - Counter(map(script_of, classes))
    items = [
        (label, face)
        for label, character in enumerate(classes)
        for face in range(len(FACES))
        if character in drawings[face]
    ]
    images = np.stack([drawings[face][classes[label]] for label, face in items])
    return DrawnGlyphs(
        images=torch.from_numpy(images).unsqueeze(1),
        classes=torch.tensor([label for label, _ in items]),
        faces=torch.tensor([face for _, face in items]),
        characters=tuple(classes),
        scripts=tuple(map(script_of, classes)),
        look_alikes=tuple(removed_of_script[script] for script in SCRIPTS),
    )


def _characters_of(file: Path) -> set[str]:
    """Return the characters that a font contains; glyph 0 is the font's missing-glyph box."""
    return {chr(code) for code, glyph in FT2Font(str(file)).get_charmap().items() if glyph != 0}


def _has_ink(character: str) -> bool:
    """Return whether a character may have ink: it is not a separator (Z), control code (C) or combining mark (M)."""
    return unicodedata.category(character)[0] not in "ZCM"


def _draw_face(file: Path, characters: list[str], size: int) -> Drawings:
    """Return the drawings of characters in one font, without empty drawings and missing-glyph boxes."""
    missing_glyph, *images = _draw([NO_CHARACTER, *characters], file, size)
    return {
        character: image
        for character, image in zip(characters, images, strict=True)
        if image.any() and not np.array_equal(image, missing_glyph)
    }


def _draw(characters: list[str], file: Path, size: int) -> UInt8[np.ndarray, "characters size size"]:
    """Return images of characters in one font; all zeros without ink."""
    side = size * SUPERSAMPLING
    largest_ink = int(side * INK)
    em = round(EM * size * SUPERSAMPLING)
    # Pillow prefers Raqm's layout, but some builds lack Raqm, and the drawing must not depend on the build.
    font = ImageFont.truetype(str(file), em, layout_engine=ImageFont.Layout.BASIC)
    # All characters are pasted into one strip, so that a single call reduces them.
    strip = Image.new("L", (side, side * len(characters)))
    for number, character in enumerate(characters):
        ink = _ink(character, font, side)
        font_size = em
        while max(ink.size) > largest_ink:  # one step, or two if hinting rounds up
            # Hinting could keep the ink size the same forever, so the font size decreases by at least one.
            font_size = min(font_size - 1, font_size * largest_ink // max(ink.size))
            ink = _ink(character, font.font_variant(size=font_size), side)
        left = (side - ink.width) // 2
        top = (side - ink.height) // 2
        strip.paste(ink, (left, side * number + top))
    return np.array(strip.reduce(SUPERSAMPLING)).reshape(len(characters), size, size)


def _ink(character: str, font: ImageFont.FreeTypeFont, side: int) -> Image.Image:
    """Return an image of a character, cropped to its ink; empty without ink."""
    page = Image.new("L", (2 * side, 2 * side))  # large enough: an em is 3/8 of the page
    ImageDraw.Draw(page).text((side // 2, side * 5 // 4), character, fill=255, font=font, anchor="ls")
    return page.crop(page.getbbox() or (0, 0, 0, 0))


def _without_look_alikes(candidates: list[str], drawings: list[Drawings]) -> list[str]:
    """Return the candidates in order, without candidates that look like an earlier one that was kept."""
    look_alikes: dict[str, set[str]] = defaultdict(set)
    for drawing in drawings:
        for first, second in _look_alikes(drawing):
            look_alikes[first].add(second)
            look_alikes[second].add(first)
    classes: dict[str, None] = {}  # a set that remembers its order
    for character in candidates:
        if look_alikes[character].isdisjoint(classes):
            classes[character] = None
    return list(classes)


def _look_alikes(drawing: Drawings) -> list[tuple[str, str]]:
    """Return pairs of characters that look alike in one face.

    The sum of the squared pixel differences is at most 1 % of the larger sum of squared ink. This includes the same
    outline moved by a fraction of a pixel.
    """
    characters = list(drawing)
    if not characters:
        return []
    # The sums are exact in float64: all are integers below 2^53.
    pixels = torch.from_numpy(np.stack(list(drawing.values()))).flatten(1).double()  # (glyphs, size * size)
    ink = pixels.square().sum(dim=1)
    differences = torch.addmm(ink[:, None] + ink, pixels, pixels.T, alpha=-2)  # (glyphs, glyphs)
    # Multiplying the difference is exact; dividing the ink would round.
    is_close = differences.mul_(round(1 / LOOK_ALIKE)) <= torch.maximum(ink[:, None], ink)
    return [(characters[i], characters[j]) for i, j in is_close.triu(diagonal=1).nonzero().tolist()]


Drawn = TypeVar("Drawn", bound=Any)

SCRIPTS_OF: dict[Split, tuple[str, ...]] = {
    "train": ("Latin", "symbols"),
    "val": ("Greek",),
    "test": ("Cyrillic", "Armenian", "Georgian"),
}


class Glyphs(FewShotDataset):
    """Characters in up to 16 typefaces: float images (1, size, size) in [0, 1]; ink is 1, paper is 0.

    This data set needs no download. Items are ordered by class, and within a class by face. The first use draws all
    splits in a few seconds and caches them in the folder that the environment variable FEWSHOT_CALLBACKS_CACHE names, by
    default in the user's cache folder. A damaged cache file is drawn again. If the folder is not writable, you get a
    warning and nothing is cached.

    Args:
        split: "train" (Latin and symbols), "val" (Greek) or "test" (Cyrillic, Armenian, Georgian).
        size: Height and width of the images, in pixels, at least 8.
        min_faces: Smallest number of faces that must contain a character, 1 to 16; other characters are left out.

    Attributes:
        images: uint8, (items, 1, size, size); ink is 255, paper is 0.
        labels: int64, (items,), from 0 to C - 1 in the split.
        faces: (items,), the position of each item's typeface in `face_names`.
        class_names: The character of each class.
        scripts: The script of each class.
        face_names: Names of all typefaces, including typefaces that do not occur in the split.

    Raises:
        ValueError: The split is unknown, or `size` or `min_faces` is out of range.

    Examples:
        >>> glyphs = Glyphs("test")
        >>> image, label = glyphs[0]
        >>> tuple(image.shape), glyphs.scripts[label], sorted(set(glyphs.scripts))
        ((1, 32, 32), 'Cyrillic', ['Armenian', 'Cyrillic', 'Georgian'])
        >>> Glyphs("test", min_faces=17)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: min_faces is 17; there are 16 faces. Use 1 <= min_faces <= 16.
    """

    in_channels: ClassVar[int] = 1

    images: UInt8[Tensor, "items 1 size size"]
    faces: Int[Tensor, "items"]
    scripts: tuple[str, ...]
    face_names: tuple[str, ...] = FACES

    def __init__(self, split: Split = "train", *, size: int = 32, min_faces: int = 10) -> None:
        if size < 8:
            raise InputError(f"size is {size}, but glyphs below 8 pixels look alike. Use size >= 8.")
        if not 1 <= min_faces <= len(FACES):
            raise InputError(
                f"min_faces is {min_faces}; there are {len(FACES)} faces. Use 1 <= min_faces <= {len(FACES)}."
            )
        self._drawn = load_drawing(size, min_faces)
        self._choose(split)

    def _choose(self, split: Split) -> None:
        if split not in SCRIPTS_OF:
            raise InputError(f"There is no split {split!r}. Use one of {', '.join(map(repr, SCRIPTS_OF))}.")
        drawn = self._drawn
        in_split = torch.tensor([script in SCRIPTS_OF[split] for script in drawn.scripts])  # (all classes,)
        items = in_split[drawn.classes]  # (all images,)
        label_of_class = in_split.cumsum(0) - 1  # (all classes,)
        classes = in_split.nonzero().flatten().tolist()
        self.split: Split = split
        self.images = drawn.images[items]
        self.faces = drawn.faces[items]
        self.labels = label_of_class[drawn.classes[items]]
        self.class_names = tuple(drawn.characters[number] for number in classes)
        self.scripts = tuple(drawn.scripts[number] for number in classes)

    def with_split(self, split: Split) -> "Glyphs":
        """Return the glyphs of another split; nothing is drawn or loaded again."""
        glyphs = copy.copy(self)
        glyphs._choose(split)
        return glyphs

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the items as two tensors: images (items, 1, size, size) and labels (items,)."""
        items = torch.tensor(indices, dtype=torch.int64)
        return self.images[items].float() / 255, self.labels[items]

    def augment_batch(
        self, images: Float[Tensor, "images 1 size size"], generator: torch.Generator
    ) -> Float[Tensor, "images 1 size size"]:
        """Return an augmented training batch; see `augment_glyphs`."""
        return augment_glyphs(images, generator)


def cache_file(size: int = 32, min_faces: int = 10) -> Path:
    """Return the path of the cached drawing, whether or not the file exists.

    The file name depends on everything that changes the drawing, such as the version of matplotlib. `size` is in
    pixels. At least `min_faces` faces contain each character.

    Examples:
        >>> cache_file(size=32, min_faces=10).name
        'glyphs-32px-10faces-....pt'
    """
    # Another version of matplotlib may have other fonts, and another version of Pillow may draw them differently.
    versions = f"{VERSION} {mpl.__version__} {PIL.__version__} {size} {min_faces}"
    fingerprint = hashlib.sha256(versions.encode()).hexdigest()[:12]
    folder = os.environ.get("FEWSHOT_CALLBACKS_CACHE") or platformdirs.user_cache_dir("fewshot_callbacks")
    return Path(folder) / f"glyphs-{size}px-{min_faces}faces-{fingerprint}.pt"


def load_drawing(size: int = 32, min_faces: int = 10) -> DrawnGlyphs:
    """Return the glyphs of all splits, from the cache if possible; otherwise draw and cache them.

    `size` is in pixels. At least `min_faces` faces contain each character.

    Examples:
        >>> load_drawing().characters[:3]
        ('A', 'B', 'C')
    """
    return load_or_draw(cache_file(size, min_faces), DrawnGlyphs, lambda: draw_glyphs(size, min_faces), "glyph")


def load_or_draw(file: Path, kind: type[Drawn], draw: Callable[[], Drawn], noun: str) -> Drawn:
    """Return a drawing from its cache file; if it is missing or damaged, draw and cache it.

    `kind` is a dataclass of tensors and plain values.
    """
    try:
        # Other users may be able to write to the folder; `weights_only` prevents a file from running code.
        cached: Drawn = kind(**torch.load(file, weights_only=True))
        return cached
    except (FileNotFoundError, NotADirectoryError):
        pass  # it was never drawn: no warning
    except Exception as error:  # torch.load does not document which error a damaged file raises
        warnings.warn(f"The {noun} cache {file} cannot be read ({error!r:.200}). Drawing it again.", stacklevel=3)
    drawn = draw()
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(8)}")  # other processes never read half a file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(drawn), unfinished)
        unfinished.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        warnings.warn(
            f"The {noun}s cannot be cached in {file.parent} ({error}), so every run draws them again. Set the environment "
            "variable FEWSHOT_CALLBACKS_CACHE to a writable folder.",
            stacklevel=3,
        )
    return drawn


def augment_glyphs(
    images: Float[Tensor, "images channels size size"],
    generator: torch.Generator | None = None,
    *,
    degrees: float = 10.0,
    shear: float = 0.15,
    scale: float = 0.1,
    shift: float = 2 / 32,
    noise: float = 0.05,
) -> Float[Tensor, "images channels size size"]:
    """Return the images after a small random affine map per image and Gaussian noise, clamped to [0, 1].

    Args:
        images: In [0, 1]; ink is 1, paper is 0. Pixels from outside an image are 0. The batch may be empty.
        generator: Source of the random numbers, which are drawn on its device. By default the global generator of the
            images' device.
        degrees: Rotation, uniform in ±degrees.
        shear: Horizontal shear, uniform in ±shear (horizontal pixels per vertical pixel).
        scale: Scale, uniform in 1 ± scale.
        shift: Shift along each axis, uniform in ±shift, as a fraction of the image's side.
        noise: Standard deviation of the noise.

    Examples:
        >>> images = torch.zeros(2, 1, 32, 32)
        >>> images[:, :, 12:20, 12:20] = 1
        >>> moved = augment_glyphs(images, torch.Generator().manual_seed(0))
        >>> moved.shape
        torch.Size([2, 1, 32, 32])
        >>> upright = augment_glyphs(images, degrees=0, shear=0, scale=0, shift=0, noise=0)
        >>> round(upright[0].sum().item(), 2)  # 8 * 8 pixels of ink
        64.0
    """
    # `affine_grid` does not accept an empty batch.
    if len(images) == 0:
        return images
    device = generator.device if generator is not None else images.device

    def uniform(limit: float) -> Float[Tensor, "images"]:
        return limit * (2 * torch.rand(len(images), generator=generator, device=device) - 1)

    angle = torch.deg2rad(uniform(degrees))
    lean = uniform(shear)
    size = 1 + uniform(scale)
    cos = angle.cos() / size
    sin = angle.sin() / size
    # The map returns the source of each output pixel, in coordinates from -1 to 1. It scales, then shears, then rotates.
    x_row = torch.stack([cos, lean * cos - sin, 2 * uniform(shift)], dim=1)
    y_row = torch.stack([sin, lean * sin + cos, 2 * uniform(shift)], dim=1)
    theta = torch.stack([x_row, y_row], dim=1).to(images)  # (images, 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)  # (images, size, size, 2)
    moved = grid_sample(images, grid, padding_mode="zeros", align_corners=False)
    if noise:
        moved = moved + noise * torch.randn(images.shape, generator=generator, device=device).to(images)
    return moved.clamp(0, 1)
