"""The icons in splits: by their names, by the artists of their themes, or by both."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from fewshot_callbacks.data._episodic import Batch, Split, seeded_draw, split_of
from icons.augmentation import IconAugmentation, on_white
from icons.cache import load_drawing
from icons.drawing import DrawnIcons

SplitBy = Literal["classes", "themes", "both"]


@dataclass(frozen=True, eq=False)
class IconThemes(Dataset[tuple[Tensor, int]]):
    """One split of the icons.

    Items are ordered by class, and inside a class by family. Item i is a float image of shape (3, size, size) in [0, 1],
    on white, and its label; `__getitems__` gives many at once, images and labels as two tensors, so that a DataLoader
    with the identity as `collate_fn` is fast.

    Attributes:
        images: Red, green, blue and alpha.
        labels: 0 ... C-1 inside the split.
        families: For each item, the position of its family in `family_names`.
        names: For each class, the name of the icon.
        contexts: For each class, what most themes say that it stands for ("Actions", "Applications", ...).
        family_names: All families of themes, including those that do not occur in the split.
        augmentation: Augmentation of the images that are returned; None for none.

    Examples:
        >>> images = torch.zeros(2, 4, 8, 8, dtype=torch.uint8)  # nothing but transparent pixels
        >>> icons = IconThemes(images, torch.tensor([0, 0]), torch.tensor([0, 1]), ("cut",), ("Actions",), ("A", "B"))
        >>> image, label = icons[1]
        >>> tuple(image.shape), float(image.min()), icons.names[label]
        ((3, 8, 8), 1.0, 'cut')
    """

    images: UInt8[Tensor, "items 4 size size"]
    labels: Int[Tensor, "items"]
    families: Int[Tensor, "items"]
    names: tuple[str, ...]
    contexts: tuple[str, ...]
    family_names: tuple[str, ...]
    augmentation: IconAugmentation | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "3 size size"], int]:
        images, labels = self.__getitems__([index])
        return images[0], int(labels[0])

    def __getitems__(self, indices: list[int]) -> Batch:
        """Many items at once: images (items, 3, size, size) and labels (items,)."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        images = self.images[chosen].float() / 255
        return (on_white(images) if self.augmentation is None else self.augmentation(images, chosen)), self.labels[
            chosen
        ]

    @classmethod
    def load(
        cls,
        split: Split,
        size: int = 32,
        min_families: int = 6,
        *,
        by: SplitBy = "classes",
        roots: Sequence[str | os.PathLike[str]] | None = None,
    ) -> "IconThemes":
        """Load a split from the cache; the first time, draw all icons and fill the cache (half a minute).

        The cache is the folder named by the environment variable FEWSHOT_CALLBACKS_CACHE, else the user's cache folder.
        A damaged file is drawn again, and so are themes that have changed.

        Args:
            split: "train", "val" or "test".
            size: Height and width of the images, in pixels, at least 8 and even.
            min_families: A name with fewer pictures, one of each family of themes, is not a class; 2 or more.
            by: "classes" (names never seen), "themes" (the same names, artists never seen) or "both".
            roots: Folders that hold themes, instead of those of the specification.

        Returns:
            The split.

        Raises:
            ValueError: A setting is out of range, or too few themes are installed; the message names packages with themes.

        Examples:
            >>> IconThemes.load("test", size=4)
            Traceback (most recent call last):
            ValueError: size is 4; icons cannot be distinguished below 8 pixels. Use an even size >= 8.
        """
        splits = load_splits(size, min_families, by=by, roots=roots)
        if split not in splits:
            raise ValueError(f"There is no split {split!r}. Use one of {', '.join(map(repr, splits))}.")
        return splits[split]


def load_splits(
    size: int = 32,
    min_families: int = 6,
    *,
    by: SplitBy = "classes",
    split_seed: int = 0,
    val_share: float = 0.2,
    test_share: float = 0.25,
    min_images: int = 3,
    symbolic: bool = False,
    roots: Sequence[str | os.PathLike[str]] | None = None,
) -> dict[Split, IconThemes]:
    """All splits in one go.

    A class is drawn into its split by the SHA-256 of `split_seed` and its name, so that machines with other themes put it
    into the same one. Families are dealt in the order of the same hash until a split has its share of them; families
    that drew on each other stay together.

    Args:
        size: See `IconThemes.load`.
        min_families: See `IconThemes.load`.
        by: See `IconThemes.load`.
        split_seed: Another seed gives another split.
        val_share: Share of the classes, and of the families, that are validated on.
        test_share: Share that is tested on.
        min_images: Where families are split, a class with fewer images inside a split is left out of it; 2 or more.
        symbolic: Whether symbolic icons and those of one colour count.
        roots: Folders that hold themes, instead of those of the specification (`XDG_DATA_HOME`, `XDG_DATA_DIRS`).

    Returns:
        The splits by name. By classes and by both, no two share a class; by themes and by both, no two share a family.

    Raises:
        ValueError: A setting is out of range, too few themes are installed, or a split has no class.
    """
    check_settings(size, min_families, by, val_share, test_share, min_images)
    drawn = load_drawing(size, min_families, symbolic=symbolic, roots=roots)
    class_split = [split_of(name, split_seed, val_share, test_share) for name in drawn.names]
    family_split = _family_splits(drawn, split_seed, val_share, test_share)
    splits: dict[Split, IconThemes] = {}
    names: tuple[Split, ...] = ("train", "val", "test")
    for split in names:
        inside = torch.ones(len(drawn.images), dtype=torch.bool)  # (images,)
        if by != "themes":
            inside &= torch.tensor([of == split for of in class_split])[drawn.classes]
        if by != "classes":
            inside &= torch.tensor([of == split for of in family_split])[drawn.families]
            counts = drawn.classes[inside].bincount(minlength=len(drawn.names))
            inside &= (counts >= min_images)[drawn.classes]
        splits[split] = _part(drawn, inside)
        if not len(splits[split]):
            raise ValueError(
                f"The {split} split by {by} has no class: {len(drawn.names)} classes of {len(drawn.family_names)} families "
                f"are too few for it. Use another split_seed, larger shares, min_images < {min_images}, or more themes."
            )
    return splits


def check_settings(
    size: int, min_families: int, by: SplitBy, val_share: float, test_share: float, min_images: int
) -> None:
    """Refuse settings out of range; see `load_splits`."""
    if size < 8 or size % 2:
        raise ValueError(f"size is {size}; icons cannot be distinguished below 8 pixels. Use an even size >= 8.")
    if min_families < 2:
        raise ValueError(
            f"min_families is {min_families}; an episode needs two images of a class. Use min_families >= 2."
        )
    if min_images < 2:
        raise ValueError(f"min_images is {min_images}; an episode needs two images of a class. Use min_images >= 2.")
    if by not in ("classes", "themes", "both"):
        raise ValueError(f"Icons cannot be split by {by!r}. Use 'classes', 'themes' or 'both'.")
    if not (val_share > 0 and test_share > 0 and val_share + test_share < 1):
        raise ValueError(
            f"val_share is {val_share} and test_share {test_share}; nothing is left for a split. Use positive shares whose "
            "sum is below 1."
        )


def _family_splits(drawn: DrawnIcons, seed: int, val_share: float, test_share: float) -> list[Split]:
    """The split of each family: circles are dealt in the order of their draws, first to test, then to val."""
    count = len(drawn.family_names)
    members = {first: [f for f in range(count) if drawn.circles[f] == first] for first in sorted(set(drawn.circles))}
    dealt: list[Split] = ["train"] * count
    wanted: dict[Split, int] = {"test": max(1, round(test_share * count)), "val": max(1, round(val_share * count))}
    for first in sorted(members, key=lambda first: seeded_draw(drawn.family_names[first], seed)):
        # A circle goes to the first split that has room for all of it.
        fitting = next((split for split, room in wanted.items() if room >= len(members[first])), None)
        if fitting is not None:
            wanted[fitting] -= len(members[first])
            for family in members[first]:
                dealt[family] = fitting
    return dealt


def _part(drawn: DrawnIcons, inside: Bool[Tensor, "images"]) -> IconThemes:
    members, labels = drawn.classes[inside].unique(return_inverse=True)
    return IconThemes(
        images=drawn.images[inside],
        labels=labels,
        families=drawn.families[inside],
        names=tuple(drawn.names[c] for c in members.tolist()),
        contexts=tuple(drawn.contexts[c] for c in members.tolist()),
        family_names=drawn.family_names,
    )
