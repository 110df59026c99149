"""Glyphs: a real few-shot data set without a download, drawn from the fonts that come with matplotlib.

A class is a character, its images are that character in up to 16 typefaces. Splits are scripts, as Omniglot's are
alphabets (Lake et al., "Human-level concept learning through probabilistic program induction", Science 2015): the
classes of validation and test do not occur in training. `python -m fewshot_callbacks.data` prints the sizes.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import matplotlib as mpl
import numpy as np
import PIL
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from fewshot_callbacks.data._augmentation import move_at_random
from fewshot_callbacks.data._cache import cache_folder, load_or_draw
from fewshot_callbacks.data._episodic import Batch, EpisodicDataModule, LabelledSplit, Split
from fewshot_callbacks.data._glyph_drawing import (
    FACE_FAMILIES,
    FACE_STYLES,
    FACES,
    SCRIPTS,
    VERSION,
    DrawnGlyphs,
    draw_glyphs,
)
from fewshot_callbacks.data._settings import with_settings
from fewshot_callbacks.data._sheet import draw_sheet

SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("Latin", "symbols"),
    "val": ("Greek",),
    "test": ("Cyrillic", "Armenian", "Georgian"),
}
"""The scripts of each split."""


@dataclass(frozen=True, eq=False)
class GlyphSet(Dataset[tuple[Tensor, int]]):
    """One split of the glyphs.

    Items are ordered by class, and inside a class by face. Item i is a float image of shape (1, size, size) in [0, 1],
    ink 1 on paper 0, and its label; `__getitems__` gives many at once, images and labels as two tensors, so that a
    DataLoader with the identity as `collate_fn` is fast.

    Attributes:
        images: `uint8`; ink is 255, background 0.
        labels: 0 ... C-1 inside the split.
        faces: For each item, the position of its typeface in `face_names`.
        characters: For each class, its character.
        scripts: For each class, its script.
        face_names: Names of all typefaces, including those that do not occur in the split.

    Examples:
        >>> glyphs = GlyphSet.load("test")
        >>> image, label = glyphs[0]
        >>> tuple(image.shape), glyphs.scripts[label], sorted(set(glyphs.scripts))
        ((1, 32, 32), 'Cyrillic', ['Armenian', 'Cyrillic', 'Georgian'])
    """

    images: UInt8[Tensor, "items 1 size size"]
    labels: Int[Tensor, "items"]
    faces: Int[Tensor, "items"]
    characters: tuple[str, ...]
    scripts: tuple[str, ...]
    face_names: tuple[str, ...] = FACES

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "1 size size"], int]:
        return self.images[index].float() / 255, int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> Batch:
        """Many items at once: images (items, 1, size, size) and labels (items,)."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.images[chosen].float() / 255, self.labels[chosen]

    @classmethod
    def load(cls, split: Split, size: int = 32, min_faces: int = 10) -> "GlyphSet":
        """Load a split from the cache; the first time, draw all splits and fill the cache (a few seconds).

        The cache is the folder named by the environment variable FEWSHOT_CALLBACKS_CACHE, else the user's cache folder.
        A damaged file is drawn again. If the folder cannot be written, a warning says so and nothing is cached.

        Args:
            split: "train" (Latin and symbols), "val" (Greek) or "test" (Cyrillic, Armenian, Georgian).
            size: Height and width of the images, in pixels, at least 8.
            min_faces: A character that fewer faces contain is not a class; 1 to 16.

        Returns:
            The split.

        Raises:
            ValueError: An unknown split, or a size or a number of faces out of range.

        Examples:
            >>> GlyphSet.load("val").scripts[0]
            'Greek'
            >>> GlyphSet.load("test", min_faces=17)
            Traceback (most recent call last):
            ValueError: min_faces is 17; there are 16 faces. Use 1 <= min_faces <= 16.
        """
        if split not in SPLITS:
            raise ValueError(f"There is no split {split!r}. Use one of {', '.join(map(repr, SPLITS))}.")
        return load_splits(size, min_faces)[split]


def load_splits(size: int = 32, min_faces: int = 10) -> dict[Split, GlyphSet]:
    """All splits in one go; see `GlyphSet.load`.

    Args:
        size: See `GlyphSet.load`.
        min_faces: See `GlyphSet.load`.

    Returns:
        The splits by name. No two classes of them share an image.

    Raises:
        ValueError: A size or a number of faces out of range.

    Examples:
        >>> list(load_splits())
        ['train', 'val', 'test']
    """
    _check_drawing(size, min_faces)
    drawn = load_drawing(size, min_faces)
    script = torch.tensor([SCRIPTS.index(name) for name in drawn.scripts])  # (classes,)
    splits: dict[Split, GlyphSet] = {}
    for split, scripts in SPLITS.items():
        inside = torch.isin(script, torch.tensor([SCRIPTS.index(name) for name in scripts]))  # (classes,)
        items = inside[drawn.classes]  # (images,)
        label = inside.cumsum(0) - 1  # (classes,): the number of a class inside its split
        members = inside.nonzero().flatten().tolist()
        splits[split] = GlyphSet(
            images=drawn.images[items],
            labels=label[drawn.classes[items]],
            faces=drawn.faces[items],
            characters=tuple(drawn.characters[c] for c in members),
            scripts=tuple(drawn.scripts[c] for c in members),
        )
    return splits


def _check_drawing(size: int, min_faces: int) -> None:
    if size < 8:
        raise ValueError(f"size is {size}; glyphs cannot be distinguished below 8 pixels. Use size >= 8.")
    if not 1 <= min_faces <= len(FACES):
        raise ValueError(f"min_faces is {min_faces}; there are {len(FACES)} faces. Use 1 <= min_faces <= {len(FACES)}.")


def cache_file(size: int = 32, min_faces: int = 10) -> Path:
    """Where the drawing is kept; the name changes with everything that the drawing depends on.

    Args:
        size: See `GlyphSet.load`.
        min_faces: See `GlyphSet.load`.

    Returns:
        The path, whether the file exists or not.

    Examples:
        >>> cache_file(size=32, min_faces=10).name
        'glyphs-32px-10faces-....pt'
    """
    made_with = f"{VERSION} {mpl.__version__} {PIL.__version__} {size} {min_faces}"
    fingerprint = hashlib.sha256(made_with.encode()).hexdigest()[:12]
    return cache_folder() / f"glyphs-{size}px-{min_faces}faces-{fingerprint}.pt"


def load_drawing(size: int = 32, min_faces: int = 10) -> DrawnGlyphs:
    """All glyphs before they are split: from the cache if it is sound, else drawn and put there.

    Args:
        size: See `GlyphSet.load`.
        min_faces: See `GlyphSet.load`.

    Returns:
        The drawing, and how many look-alikes were left out of it.

    Examples:
        >>> drawn = load_drawing()
        >>> len(drawn.images) == len(drawn.classes)
        True
    """
    return load_or_draw(cache_file(size, min_faces), DrawnGlyphs, "glyph", lambda: draw_glyphs(size, min_faces))


def augment_glyphs(
    images: Float[Tensor, "images 1 size size"],
    generator: torch.Generator | None = None,
    *,
    degrees: float = 10.0,
    shear: float = 0.15,
    scale: float = 0.1,
    shift: float = 2 / 32,
    noise: float = 0.05,
) -> Float[Tensor, "images 1 size size"]:
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
    if len(images) == 0:
        return images
    moved = move_at_random(images, generator, degrees=degrees, shear=shear, scale=scale, shift=shift)
    source = generator.device if generator is not None else images.device
    speckle = torch.randn(images.shape, generator=generator, device=source).to(images)
    return (moved + noise * speckle).clamp(0, 1)


@with_settings
class GlyphDataModule(EpisodicDataModule):
    """The glyphs: episodes for training; whole splits, or fixed episodes, for evaluation.

    Batches are tuples (images, labels): float images (images, 1, size, size) in [0, 1], int64 labels 0 ... C-1 of the
    split. A training batch is one episode, class by class, each class's support first.

    Training batches are augmented as a whole after they have reached the device. The random numbers depend on `seed`,
    the rank and the number of batches augmented so far, which checkpoints keep: not on workers or on global random
    state.

    Args:
        queries: Query images of each class; shots + queries may be up to `min_faces`.
        seed: Seed of the training episodes and the augmentation.
        num_workers: Worker processes of each loader; the images are in memory, so 0 is usually fastest.
        augment: Whether training batches are augmented; see `augment_glyphs`.
        size: Height and width of the images, in pixels.
        min_faces: A character that fewer faces contain is not a class.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> data = GlyphDataModule(ways=5, shots=1, queries=4, episodes=2)
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> tuple(images.shape), labels.unique().numel()
        ((25, 1, 32, 32), 5)
    """

    in_channels: ClassVar[int] = 1

    batch_size: int = 512
    test_queries: int = 9
    augment: bool = True
    size: int = 32
    min_faces: int = 10

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        _check_drawing(self.size, self.min_faces)
        self._splits: dict[Split, GlyphSet] | None = None
        self._augmented_batches = 0

    @property
    def image_size(self) -> int:
        """The same as `size`."""
        return self.size

    @property
    def num_classes(self) -> int:
        """Classes to train on; loads the glyphs if they are not yet.

        Examples:
            >>> GlyphDataModule().num_classes > 1000
            True
        """
        return len(self.glyphs("train").characters)

    def glyphs(self, split: Split) -> GlyphSet:
        """A split, loaded if it is not yet.

        Args:
            split: "train", "val" or "test".

        Returns:
            The whole split, not augmented.

        Examples:
            >>> GlyphDataModule().glyphs("val").scripts[0]
            'Greek'
        """
        if self._splits is None:
            self._splits = load_splits(self.size, self.min_faces)
        return self._splits[split]

    def prepare_data(self) -> None:
        """Fill the cache, on one process."""
        self.glyphs("train")

    def setup(self, stage: str) -> None:
        """Load the splits; a fit that is not resumed starts its augmentation anew."""
        self.glyphs("train")
        if stage == "fit":
            self._augmented_batches = 0

    def _split(self, name: Split) -> LabelledSplit:
        glyphs = self.glyphs(name)
        return LabelledSplit(glyphs, glyphs.labels, glyphs.characters)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment a training batch; leave every other batch as it is."""
        if not (self.augment and self.trainer is not None and self.trainer.training):
            return batch
        images, labels = batch
        place = f"{self.seed} {self.trainer.global_rank} {self._augmented_batches}"
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:4], "little")
        self._augmented_batches += 1
        return augment_glyphs(images, torch.Generator().manual_seed(seed)), labels

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that have been augmented, so that a resumed run continues from there."""
        return {"augmented_batches": self._augmented_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where a checkpoint was written."""
        self._augmented_batches = state_dict["augmented_batches"]


def glyph_sheet(
    path: str | os.PathLike[str],
    split: Split | None = None,
    *,
    rows_per_script: int = 3,
    size: int = 32,
    dpi: int = 200,
) -> None:
    """Write a page of glyphs as PNG or SVG: rows are classes of each script, columns are typefaces.

    The classes are spread evenly over those of the script that most faces hold. An empty cell is a face that does not
    hold the character.

    Args:
        path: The file to write, as an SVG if its name ends in .svg, else as a PNG.
        split: Split whose scripts are shown; by default all.
        rows_per_script: Classes of each script.
        size: Height and width of the glyphs, in pixels.
        dpi: Resolution of the page.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     glyph_sheet(Path(folder) / "glyphs.png", "val", rows_per_script=2)
        ...     print((Path(folder) / "glyphs.png").stat().st_size > 0)
        True
    """
    splits = load_splits(size)
    rows: list[tuple[Split, str, UInt8[Tensor, "faces size size"]]] = []
    for name in SPLITS if split is None else (split,):
        glyphs = splits[name]
        counts = glyphs.labels.bincount()
        for script in SPLITS[name]:
            members = torch.tensor([c for c, of in enumerate(glyphs.scripts) if of == script])
            widest = members[counts[members] == counts[members].max()]
            for position in np.linspace(0, len(widest) - 1, rows_per_script + 2)[1:-1].round():
                items = glyphs.labels == widest[int(position)]
                row = torch.zeros(len(FACES), size, size, dtype=torch.uint8)
                row[glyphs.faces[items]] = glyphs.images[items, 0]
                rows.append((name, script, row))

    page = torch.stack([row.permute(1, 0, 2).flatten(1) for _, _, row in rows]).flatten(
        0, 1
    )  # (rows * size, faces * size)
    scripts = [f"{script}\n({name})" for name, script, _ in rows[::rows_per_script]]
    draw_sheet(
        path,
        page.numpy(),
        FACE_STYLES * len(FACE_FAMILIES),
        {rows_per_script * (i + 0.5): script for i, script in enumerate(scripts)},
        cells=(len(rows), len(FACES)),
        names=0.65,
        groups=FACE_FAMILIES,
        rules=range(0, len(rows) + 1, rows_per_script),
        dpi=dpi,
    )
