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
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import matplotlib as mpl
import PIL
import platformdirs
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fewshot_callbacks.data._glyph_drawing import FACES, VERSION, DrawnGlyphs, draw_glyphs
from fewshot_callbacks.data.dataset import Batch, FewShotDataset, Split

Drawn = TypeVar("Drawn", bound=Any)

# The scripts of each split.
SCRIPTS_OF: dict[Split, tuple[str, ...]] = {
    "train": ("Latin", "symbols"),
    "val": ("Greek",),
    "test": ("Cyrillic", "Armenian", "Georgian"),
}


class Glyphs(FewShotDataset):
    """The glyphs of a split: float images (1, size, size) in [0, 1], ink 1 on paper 0.

    Items are ordered by class, and inside a class by face. All splits are drawn the first time, in a few seconds, and kept
    in the folder named by the environment variable FEWSHOT_CALLBACKS_CACHE, else in the user's cache folder. A damaged file
    is drawn again. If the folder cannot be written, a warning says so and nothing is cached.

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
        face_names: Names of all typefaces, including those that do not occur in the split.

    Raises:
        ValueError: An unknown split, or a size or a number of faces out of range.

    Examples:
        >>> glyphs = Glyphs("test")
        >>> image, label = glyphs[0]
        >>> tuple(image.shape), glyphs.scripts[label], sorted(set(glyphs.scripts))
        ((1, 32, 32), 'Cyrillic', ['Armenian', 'Cyrillic', 'Georgian'])
        >>> Glyphs("test", min_faces=17)
        Traceback (most recent call last):
        ValueError: min_faces is 17; there are 16 faces. Use 1 <= min_faces <= 16.
    """

    in_channels: ClassVar[int] = 1

    images: UInt8[Tensor, "items 1 size size"]
    faces: Int[Tensor, "items"]
    scripts: tuple[str, ...]
    face_names: tuple[str, ...] = FACES

    def __init__(self, split: Split = "train", *, size: int = 32, min_faces: int = 10) -> None:
        if split not in SCRIPTS_OF:
            raise ValueError(f"There is no split {split!r}. Use one of {', '.join(map(repr, SCRIPTS_OF))}.")
        if size < 8:
            raise ValueError(f"size is {size}; glyphs cannot be distinguished below 8 pixels. Use size >= 8.")
        if not 1 <= min_faces <= len(FACES):
            raise ValueError(
                f"min_faces is {min_faces}; there are {len(FACES)} faces. Use 1 <= min_faces <= {len(FACES)}."
            )
        self._drawn = load_drawing(size, min_faces)
        self._choose(split)

    def _choose(self, split: Split) -> None:
        drawn = self._drawn
        inside = torch.tensor([script in SCRIPTS_OF[split] for script in drawn.scripts])  # (classes,)
        items = inside[drawn.classes]  # (images,)
        self.split: Split = split
        self.images, self.faces = drawn.images[items], drawn.faces[items]
        self.labels = (inside.cumsum(0) - 1)[drawn.classes[items]]  # the number of a class inside its split
        members = inside.nonzero().flatten().tolist()
        self.class_names = tuple(drawn.characters[c] for c in members)
        self.scripts = tuple(drawn.scripts[c] for c in members)

    def with_split(self, split: Split) -> "Glyphs":
        """The glyphs of another split, of the same drawing."""
        other = copy.copy(self)
        other._choose(split)
        return other

    def batch(self, indices: Sequence[int]) -> Batch:
        """Many items as two tensors: images (items, 1, size, size) and labels (items,)."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.images[chosen].float() / 255, self.labels[chosen]

    def augment_batch(
        self, images: Float[Tensor, "images 1 size size"], generator: torch.Generator
    ) -> Float[Tensor, "images 1 size size"]:
        """Augment a training batch; see `augment_glyphs`."""
        return augment_glyphs(images, generator)


def cache_file(size: int = 32, min_faces: int = 10) -> Path:
    """Where the drawing is kept; the name changes with everything that the drawing depends on.

    Args:
        size: See `Glyphs`.
        min_faces: See `Glyphs`.

    Returns:
        The path, whether the file exists or not.

    Examples:
        >>> cache_file(size=32, min_faces=10).name
        'glyphs-32px-10faces-....pt'
    """
    # Of another version of matplotlib the fonts may differ, and of Pillow the rasteriser.
    made_with = f"{VERSION} {mpl.__version__} {PIL.__version__} {size} {min_faces}"
    fingerprint = hashlib.sha256(made_with.encode()).hexdigest()[:12]
    folder = os.environ.get("FEWSHOT_CALLBACKS_CACHE") or platformdirs.user_cache_dir("fewshot_callbacks")
    return Path(folder) / f"glyphs-{size}px-{min_faces}faces-{fingerprint}.pt"


def load_drawing(size: int = 32, min_faces: int = 10) -> DrawnGlyphs:
    """All glyphs before they are split: from the cache if it is sound, else drawn and put there.

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


def load_or_draw(file: Path, kind: type[Drawn], draw: Callable[[], Drawn], what: str) -> Drawn:
    """Load what was drawn before, if its file is sound, else draw it and put it there.

    Args:
        file: Where it is kept.
        kind: A dataclass of tensors and plain values.
        draw: Draws it anew.
        what: An image of it, for messages.

    Returns:
        The drawing.
    """
    try:
        # Weights only: a file in a folder that others may write to must not run code.
        kept: Drawn = kind(**torch.load(file, weights_only=True))
        return kept
    # It was never drawn: nothing to warn of.
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # torch.load promises no class of error for a damaged file
        warnings.warn(f"The {what} cache {file} cannot be read ({error!r:.200}). Drawing it again.", stacklevel=3)
    drawn = draw()
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(8)}")  # no other process reads half a file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(drawn), unfinished)
        unfinished.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        warnings.warn(
            f"The {what}s cannot be kept in {file.parent} ({error}), so they are drawn each time, which takes a while. "
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
    source = generator.device if generator is not None else images.device

    def uniform(limit: float) -> Float[Tensor, "images"]:
        return limit * (2 * torch.rand(len(images), generator=generator, device=source) - 1)

    angle, lean, size = torch.deg2rad(uniform(degrees)), uniform(shear), 1 + uniform(scale)
    cos, sin = angle.cos() / size, angle.sin() / size
    # Where each pixel of the result is looked up, in coordinates from -1 to 1: rotation, after shear, after scale.
    across = torch.stack([cos, lean * cos - sin, 2 * uniform(shift)], dim=1)
    down = torch.stack([sin, lean * sin + cos, 2 * uniform(shift)], dim=1)
    theta = torch.stack([across, down], dim=1).to(images)  # (images, 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)  # (images, size, size, 2)
    moved = grid_sample(images, grid, padding_mode="zeros", align_corners=False)
    if noise:
        moved = moved + noise * torch.randn(images.shape, generator=generator, device=source).to(images)
    return moved.clamp(0, 1)
