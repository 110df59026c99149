"""Glyphs: a real few-shot data set without a download, drawn from the fonts that come with matplotlib.

A class is a character, its images are that character in up to 16 typefaces. Splits are scripts, as Omniglot's are
alphabets (Lake et al., "Human-level concept learning through probabilistic program induction", Science 2015): the
classes of validation and test do not occur in training. `python examples/sheets.py` prints the sizes.
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

# The version of the drawing: raise it with every change that moves a pixel or a class.
VERSION = 1

# The text faces among matplotlib's fonts: each family, with the endings of its regular, bold, italic and bold italic face.
# matplotlib's display, size-variant and private-use fonts are not text.
FAMILIES = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
}
FACES = tuple(family + style for family, styles in FAMILIES.items() for style in styles)

# The scripts, in the order in which look-alikes are dropped: the first script keeps the drawing.
SCRIPTS = ("Latin", "symbols", "Greek", "Cyrillic", "Armenian", "Georgian")

SUPERSAMPLING = 4  # glyphs are centred to a quarter of a pixel
EM = 0.75  # share of the image's side: an average letter is a little over half as high as the image
INK = 30 / 32  # largest share of the image's side that is ink: larger glyphs are drawn smaller
LOOK_ALIKE = 0.01  # largest share of the ink in which look-alikes differ; see `_look_alikes`
NO_CHARACTER = "\uffff"  # fonts draw their missing-glyph box for it


@dataclass(frozen=True, eq=False)
class DrawnGlyphs:
    """All glyphs of all scripts, look-alikes removed.

    Attributes:
        images: Ink is 255, paper 0.
        classes: For each image, its position in `characters`.
        faces: For each image, its position in `FACES`.
        characters: The characters, in the order of `SCRIPTS`, then of their code points.
        scripts: The script of each character, one of `SCRIPTS`.
        look_alikes: For each of `SCRIPTS`, how many characters were left out because an earlier one looks the same.
    """

    images: UInt8[Tensor, "images 1 size size"]
    classes: Int[Tensor, "images"]
    faces: Int[Tensor, "images"]
    characters: tuple[str, ...]
    scripts: tuple[str, ...]
    look_alikes: tuple[int, ...]


def script_of(character: str) -> str:
    """Return the script that the character's Unicode name mentions, `symbols` where it mentions none of ours.

    Examples:
        >>> [script_of(character) for character in "aλжեგ+7"]
        ['Latin', 'Greek', 'Cyrillic', 'Armenian', 'Georgian', 'symbols', 'symbols']
    """
    words = unicodedata.name(character, "").split()
    return next((script for script in SCRIPTS if script.upper() in words), "symbols")


def draw_glyphs(size: int, min_faces: int) -> DrawnGlyphs:
    """Draw every character that at least `min_faces` faces have, light on dark, centred by its ink.

    All characters have one scale (em = 3/4 of the image), so that o and O differ. Only characters that would not fit
    are drawn smaller. Characters without ink (spaces, controls, combining marks on their own), missing-glyph boxes of a
    face, and look-alikes are left out. Drawing takes a few seconds. If standard error is a terminal, it shows a
    progress bar.
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

    # A face may turn out to have no drawing of a character.
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
    """Return the characters that a font has a glyph for; glyph 0 is its missing-glyph box."""
    return {chr(code) for code, glyph in FT2Font(str(file)).get_charmap().items() if glyph != 0}


def _has_ink(character: str) -> bool:
    """Return whether a character may have ink: separators (Z), control codes (C) and combining marks (M) have none."""
    return unicodedata.category(character)[0] not in "ZCM"


def _draw_face(file: Path, characters: list[str], size: int) -> Drawings:
    """Return drawings of characters of one font, without characters that have no ink or a missing-glyph box."""
    missing_glyph, *images = _draw([NO_CHARACTER, *characters], file, size)
    return {
        character: image
        for character, image in zip(characters, images, strict=True)
        if image.any() and not np.array_equal(image, missing_glyph)
    }


def _draw(characters: list[str], file: Path, size: int) -> UInt8[np.ndarray, "characters size size"]:
    """Draw characters of one font; an image is all zero if its character has no ink."""
    side = size * SUPERSAMPLING
    largest_ink = int(side * INK)
    em = round(EM * size * SUPERSAMPLING)
    # Pillow prefers the layout of Raqm, which some builds lack, and the drawing must not depend on the build.
    font = ImageFont.truetype(str(file), em, layout_engine=ImageFont.Layout.BASIC)
    # All characters are pasted into one strip, which is reduced at once.
    strip = Image.new("L", (side, side * len(characters)))
    for number, character in enumerate(characters):
        ink = _ink(character, font, side)
        font_size = em
        while max(ink.size) > largest_ink:  # one step, or two if hinting rounds up
            # The size falls by at least one, or hinting could keep it forever.
            font_size = min(font_size - 1, font_size * largest_ink // max(ink.size))
            ink = _ink(character, font.font_variant(size=font_size), side)
        left = (side - ink.width) // 2
        top = (side - ink.height) // 2
        strip.paste(ink, (left, side * number + top))
    return np.array(strip.reduce(SUPERSAMPLING)).reshape(len(characters), size, size)


def _ink(character: str, font: ImageFont.FreeTypeFont, side: int) -> Image.Image:
    """Draw a character, cut to its ink; the image is empty if it has none."""
    page = Image.new("L", (2 * side, 2 * side))  # ample: an em is 3/8 of it
    ImageDraw.Draw(page).text((side // 2, side * 5 // 4), character, fill=255, font=font, anchor="ls")
    return page.crop(page.getbbox() or (0, 0, 0, 0))


def _without_look_alikes(candidates: list[str], drawings: list[Drawings]) -> list[str]:
    """Return the candidates that do not look like an earlier returned candidate."""
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
    """Return the pairs of one face whose difference, squared and summed, is at most 1 % of the larger squared ink.

    They include pixel-identical pairs, and the same outline moved by a fraction of a pixel.
    """
    characters = list(drawing)
    if not characters:
        return []
    # Bytes are compared in float64: all sums are integers below 2^53, so rounding cannot decide.
    pixels = torch.from_numpy(np.stack(list(drawing.values()))).flatten(1).double()  # (glyphs, size * size)
    ink = pixels.square().sum(dim=1)
    differences = torch.addmm(ink[:, None] + ink, pixels, pixels.T, alpha=-2)  # (glyphs, glyphs)
    # The difference is multiplied, since dividing the ink would round.
    is_close = differences.mul_(round(1 / LOOK_ALIKE)) <= torch.maximum(ink[:, None], ink)
    return [(characters[i], characters[j]) for i, j in is_close.triu(diagonal=1).nonzero().tolist()]


Drawn = TypeVar("Drawn", bound=Any)

SCRIPTS_OF: dict[Split, tuple[str, ...]] = {
    "train": ("Latin", "symbols"),
    "val": ("Greek",),
    "test": ("Cyrillic", "Armenian", "Georgian"),
}


class Glyphs(FewShotDataset):
    """The glyphs of a split: float images (1, size, size) in [0, 1], ink 1 on paper 0.

    Items are ordered by class, and inside a class by face. All splits are drawn the first time, in a few seconds, and kept
    in the folder named by the environment variable FEWSHOT_CALLBACKS_CACHE, else in the user's cache folder. A damaged file
    is drawn again. If the folder cannot be written, a warning reports it and nothing is cached.

    Args:
        split: "train" (Latin and symbols), "val" (Greek) or "test" (Cyrillic, Armenian, Georgian).
        size: Height and width of the images, in pixels, at least 8.
        min_faces: A character that fewer faces contain is not a class; 1 to 16.

    Attributes:
        images: `uint8`, (items, 1, size, size); ink is 255, background 0.
        labels: 0 ... C-1 inside the split.
        faces: For each item, the position of its typeface in `face_names`.
        class_names: For each class, its character.
        scripts: For each class, its script.
        face_names: Names of all typefaces, including typefaces that do not occur in the split.

    Raises:
        ValueError: An unknown split, or a size or a number of faces out of range.

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
            raise InputError(f"size is {size}; glyphs cannot be distinguished below 8 pixels. Use size >= 8.")
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
        """Return the glyphs of another split, of the same drawing."""
        glyphs = copy.copy(self)
        glyphs._choose(split)
        return glyphs

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return many items as two tensors: images (items, 1, size, size) and labels (items,)."""
        items = torch.tensor(indices, dtype=torch.int64)
        return self.images[items].float() / 255, self.labels[items]

    def augment_batch(
        self, images: Float[Tensor, "images 1 size size"], generator: torch.Generator
    ) -> Float[Tensor, "images 1 size size"]:
        """Augment a training batch; see `augment_glyphs`."""
        return augment_glyphs(images, generator)


def cache_file(size: int = 32, min_faces: int = 10) -> Path:
    """Return where the drawing is kept; the name changes with everything that the drawing depends on.

    Args:
        size: See `Glyphs`.
        min_faces: See `Glyphs`.

    Returns:
        The path, whether the file exists or not.

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
    """Return all glyphs before they are split: from the cache if it is sound, else drawn and put there.

    Args:
        size: See `Glyphs`.
        min_faces: See `Glyphs`.

    Returns:
        The drawing, and how many look-alikes were left out of it.

    Examples:
        >>> drawn = load_drawing()
        >>> len(drawn.images) == len(drawn.classes)
        True
    """
    return load_or_draw(cache_file(size, min_faces), DrawnGlyphs, lambda: draw_glyphs(size, min_faces), "glyph")


def load_or_draw(file: Path, kind: type[Drawn], draw: Callable[[], Drawn], noun: str) -> Drawn:
    """Load a drawing from its file if that is sound, else draw it and write the file.

    Args:
        file: The file of the drawing.
        kind: Its class, a dataclass of tensors and plain values.
        draw: The function that draws it.
        noun: The name of one image of it, for messages.

    Returns:
        The drawing.
    """
    try:
        # `weights_only` keeps a file from running code, since others may be able to write to the folder.
        cached: Drawn = kind(**torch.load(file, weights_only=True))
        return cached
    except (FileNotFoundError, NotADirectoryError):
        pass  # it was never drawn, so no warning is needed
    except Exception as error:  # torch.load documents no error class for a damaged file
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
            f"The {noun}s cannot be kept in {file.parent} ({error}), so they are drawn each time, which takes a while. "
            "Name a folder that can be written in the environment variable FEWSHOT_CALLBACKS_CACHE.",
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
    """Transform each image of a batch by its own small random affine map, and add Gaussian noise.

    Args:
        images: In [0, 1], ink 1 on paper 0; new paper at the borders is 0. An empty batch comes back as it is.
        generator: Source of the random numbers, drawn on its device; by default the global generator of the images'
            device.
        degrees: Rotation, uniform in ±degrees.
        shear: Horizontal shear, uniform in ±shear (pixels aside per pixel up).
        scale: Scale, uniform in 1 ± scale.
        shift: Shift along each axis, uniform in ±shift of the image's side.
        noise: Standard deviation of the noise.

    Returns:
        Images of the same shape and type, clamped to [0, 1].

    Examples:
        >>> images = torch.zeros(2, 1, 32, 32)
        >>> images[:, :, 12:20, 12:20] = 1
        >>> moved = augment_glyphs(images, torch.Generator().manual_seed(0))
        >>> moved.shape == images.shape, bool((moved[0] == moved[1]).all())
        (True, False)
        >>> still = augment_glyphs(images, degrees=0, shear=0, scale=0, shift=0, noise=0)
        >>> torch.allclose(still, images, atol=1e-5)
        True
    """
    # `affine_grid` refuses an empty batch.
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
    # The map gives the source of each pixel of the result, in coordinates from -1 to 1: rotation, after shear, after
    # scale.
    x_row = torch.stack([cos, lean * cos - sin, 2 * uniform(shift)], dim=1)
    y_row = torch.stack([sin, lean * sin + cos, 2 * uniform(shift)], dim=1)
    theta = torch.stack([x_row, y_row], dim=1).to(images)  # (images, 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)  # (images, size, size, 2)
    moved = grid_sample(images, grid, padding_mode="zeros", align_corners=False)
    if noise:
        moved = moved + noise * torch.randn(images.shape, generator=generator, device=device).to(images)
    return moved.clamp(0, 1)
