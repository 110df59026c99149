"""A set of items in a report: their embeddings and labels, and how they are shown."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from fewshot_callbacks._image_files import ENDINGS, FoundFiles, images_below, read_image

# Those of torchvision's ImageFolder, and GIF.
IMAGE_ENDINGS = (*ENDINGS, ".gif")

# Returns what is shown of an item: a Pillow image, a tensor, an array or a text. If it raises, the report says so.
Picture = Callable[[int], Any]


@dataclass(frozen=True, eq=False)
class Items:
    """Items of one set.

    Attributes:
        embeddings: (items, dim) rows.
        labels: (items,) integers or words, in the order of the embeddings.
        name: Name of the set, such as "queries".
        picture: Returns what is shown of an item, from its index; None if there is nothing to show.
        files: Name of each item's file, which is also shown.
        label_names: Label -> its name, for labels that are integers.
        ids: (items,) identity of each item, as `evaluate_retrieval` takes them.
        groups: (items,) group of each item, as `evaluate_retrieval` takes them.
    """

    embeddings: Any
    labels: Sequence[int | str]
    name: str = "items"
    picture: Picture | None = None
    files: Sequence[str] | None = None
    label_names: Mapping[Any, str] | None = None
    ids: Any | None = None
    groups: Any | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, label: int | str) -> str:
        """Name a label."""
        return str(label if self.label_names is None else self.label_names.get(label, label))


def image_files(folder: Path) -> list[Path]:
    """List the images of a folder in the order of torchvision's ImageFolder, or sorted by name where it has no folders.

    Args:
        folder: A folder with one folder for each class, or with the images themselves.

    Returns:
        The paths of the images, at least one.

    Raises:
        ValueError: If there is no such folder, no image in it, or a link to a folder that was read already.
    """
    return find_images(folder).files


def find_images(folder: Path) -> FoundFiles:
    """List the images of a folder as `image_files` does, and count the files that were skipped."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the folder that holds the images.")
    classes = [folder / name for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())]
    parts = images_below(classes, folder, IMAGE_ENDINGS) if classes else images_below([folder], endings=IMAGE_ENDINGS)
    found = FoundFiles(
        [file for part in parts for file in part.files], sum((part.skipped for part in parts), Counter())
    )
    if not found.files:
        skipped = found.what_was_skipped()
        raise ValueError(
            f"{folder} holds no image ({', '.join(IMAGE_ENDINGS)}){f'; {skipped}' if skipped else ''}. Pass the folder that "
            "holds them."
        )
    return found


def pictures_of_files(files: Sequence[Path], side: int) -> Picture:
    """Return a function that opens the image of an item; a JPEG is decoded only as large as a thumbnail needs.

    Args:
        files: The image file of each item.
        side: Pixels of the longer side of a thumbnail.

    Returns:
        A function of the index of an item that returns a Pillow image, and raises a ValueError where that cannot be read.
    """
    return partial(_open, files, side)


def _open(files: Sequence[Path], side: int, index: int) -> Image.Image:
    # Twice the size, so that a thumbnail is an average of pixels, not a selection.
    return read_image(files[index], 2 * side)
