"""The icons in splits: by their names, by the artists of their themes, or by both."""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from fewshot_callbacks.data import FewShotDataset
from fewshot_callbacks.data.dataset import SPLITS, Batch, Split, seeded_draw, split_of
from icons.augmentation import Background, IconAugmentation, on_white
from icons.cache import load_drawing
from icons.drawing import DrawnIcons

SplitBy = Literal["classes", "themes", "both"]


class IconThemes(FewShotDataset):
    """The icons of a split: float images (3, size, size) in [0, 1], on white.

    Items are ordered by class, and inside a class by family. All icons are drawn the first time, in half a minute, and kept
    in the folder named by the environment variable FEWSHOT_CALLBACKS_CACHE, else in the user's cache folder. A damaged file
    is drawn again, and so are themes that have changed.

    The SHA-256 of `split_seed` and the name decides the split of a class, so that machines with other themes use the same
    split. Families are assigned in the order of the same hash until a split has its share of them; families that drew on
    each other stay together.

    Args:
        split: "train", "val" or "test".
        by: "classes" (names never seen), "themes" (the same names, artists never seen) or "both". By classes and by both,
            no two splits share a class; by themes and by both, no two share a family.
        size: Height and width of the images, in pixels, at least 8 and even.
        min_families: A name with fewer pictures, one of each family of themes, is not a class; 2 or more.
        min_images: Where families are split, a class with fewer images inside a split is left out of it; 2 or more.
        split_seed: Another seed gives another split.
        val_share: Fraction of the classes, and of the families, in the validation split.
        test_share: Fraction in the test split.
        symbolic: Whether symbolic and single-colour icons count.
        background: Background of augmented training images: "white", or "random" for a random colour per image.
        roots: Folders with themes, instead of the folders of the specification (`XDG_DATA_HOME`, `XDG_DATA_DIRS`).

    Attributes:
        images: (items, 4, size, size), red, green, blue and alpha.
        labels: 0 ... C-1 inside the split.
        families: For each item, the position of its family in `family_names`.
        class_names: For each class, the name of the icon.
        contexts: For each class, its context in most themes ("Actions", "Applications", ...).
        family_names: All families of themes, including those that do not occur in the split.

    Raises:
        ValueError: A setting is out of range, too few themes are installed (the message names packages with themes), or the
            split has no class.

    Examples:
        >>> IconThemes("test", size=4)
        Traceback (most recent call last):
        ValueError: size is 4; icons cannot be distinguished below 8 pixels. Use an even size >= 8.
    """

    images: UInt8[Tensor, "items 4 size size"]
    families: Int[Tensor, "items"]
    contexts: tuple[str, ...]
    family_names: tuple[str, ...]

    def __init__(
        self,
        split: Split = "train",
        *,
        by: SplitBy = "classes",
        size: int = 32,
        min_families: int = 6,
        min_images: int = 3,
        split_seed: int = 0,
        val_share: float = 0.2,
        test_share: float = 0.25,
        symbolic: bool = False,
        background: Background = "white",
        roots: Sequence[str | os.PathLike[str]] | None = None,
    ) -> None:
        check_settings(size, min_families, by, val_share, test_share, min_images)
        self._augmentation = IconAugmentation(background=background)
        self._augment = False
        drawn = load_drawing(size, min_families, symbolic=symbolic, roots=roots)
        self._drawn, self.family_names, self._by = drawn, drawn.family_names, by
        class_split = [split_of(name, split_seed, val_share, test_share) for name in drawn.names]
        family_split = _family_splits(drawn, split_seed, val_share, test_share)
        self._inside: dict[Split, Bool[Tensor, "images"]] = {}
        for name in SPLITS:
            inside = torch.ones(len(drawn.images), dtype=torch.bool)
            if by != "themes":
                inside &= torch.tensor([of == name for of in class_split])[drawn.classes]
            if by != "classes":
                inside &= torch.tensor([of == name for of in family_split])[drawn.families]
                counts = drawn.classes[inside].bincount(minlength=len(drawn.names))
                inside &= (counts >= min_images)[drawn.classes]
            if not inside.any():
                raise ValueError(
                    f"The {name} split by {by} has no class: {len(drawn.names)} classes of {len(drawn.family_names)} "
                    f"families are too few for it. Use another split_seed, larger shares, min_images < "
                    f"{min_images}, or more themes."
                )
            self._inside[name] = inside
        self._choose(split)

    def _choose(self, split: Split) -> None:
        if split not in self._inside:
            raise ValueError(f"There is no split {split!r}. Use one of {', '.join(map(repr, self._inside))}.")
        drawn, inside = self._drawn, self._inside[split]
        members, self.labels = drawn.classes[inside].unique(return_inverse=True)
        self.images, self.families = drawn.images[inside], drawn.families[inside]
        self.class_names = tuple(drawn.names[c] for c in members.tolist())
        self.contexts = tuple(drawn.contexts[c] for c in members.tolist())

    def with_split(self, split: Split) -> "IconThemes":
        """The icons of another split, of the same drawing."""
        other = copy.copy(self)
        other._choose(split)
        return other

    def augmented(self, seed: int = 0) -> "IconThemes":
        """The same icons with augmentation for training; see `IconAugmentation`."""
        other = copy.copy(self)
        other._augmentation, other._augment = replace(self._augmentation, seed=seed), True
        return other

    def batch(self, indices: Sequence[int]) -> Batch:
        """Many items as two tensors: images (items, 3, size, size) and labels (items,)."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        images = self.images[chosen].float() / 255
        return (self._augmentation(images, chosen) if self._augment else on_white(images)), self.labels[chosen]


def check_settings(
    size: int, min_families: int, by: SplitBy, val_share: float, test_share: float, min_images: int
) -> None:
    """Refuse settings out of range; see `IconThemes`."""
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
