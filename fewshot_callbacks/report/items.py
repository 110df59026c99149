"""A set of items in a report: embeddings, labels, and small pictures, as a browser takes them from inside the file."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fewshot_callbacks.files.images import (
    ENDINGS,
    FoundImages,
    as_seen,
    has_known_range,
    list_folders,
    list_images,
    read_image,
)

# Those of torchvision's ImageFolder, and GIF.
IMAGE_ENDINGS = (*ENDINGS, ".gif")

# Returns what is shown of an item: a Pillow image, a tensor, an array or a text. If it raises, the report says so.
Picture = Callable[[int], Any]
# Characters of an item that is a text.
LONGEST_TEXT = 160
# Number of a set, and the index of an item in it.
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Items:
    """Items of one set.

    Attributes:
        embeddings: (items, dim) rows.
        labels: (items,) integers, words or tuples of several, in the order of the embeddings.
        name: Name of the set, such as "queries".
        picture: Returns what is shown of an item, from its index; None if there is nothing to show.
        files: Name of each item's file, which is also shown.
        label_names: Label -> its name, for labels that are integers.
        ids: (items,) identity of each item, as `evaluate_retrieval` takes them.
        groups: (items,) group of each item, as `evaluate_retrieval` takes them.
    """

    embeddings: Any
    labels: Sequence[int | str | tuple[int, ...]]
    name: str = "items"
    picture: Picture | None = None
    files: Sequence[str] | None = None
    label_names: Mapping[Any, str] | None = None
    ids: Any | None = None
    groups: Any | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, label: int | str | tuple[int, ...]) -> str:
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


def find_images(folder: Path) -> FoundImages:
    """List the images of a folder as `image_files` does, and count the files that were skipped."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the folder that holds the images.")
    of_systems = Counter[str]()
    classes = list_folders(folder, of_systems)
    found = list_images(classes or [folder], folder if classes else None, IMAGE_ENDINGS)
    if classes:  # else they are counted with the images
        found.of_systems.update(of_systems)
    if not found.files:
        skipped = found.describe_skipped()
        raise ValueError(
            f"{folder} holds no image ({', '.join(IMAGE_ENDINGS)}){f'; {skipped}' if skipped else ''}. Pass the folder that "
            "holds them."
        )
    return found


def pictures_of_files(files: Sequence[Path], side: int, background: str = "white") -> Picture:
    """Return a function that opens the image of an item; a JPEG is decoded only as large as a thumbnail needs.

    Args:
        files: The image file of each item.
        side: Pixels of the longer side of a thumbnail.
        background: The colour behind what is transparent.

    Returns:
        A function of the index of an item that returns a Pillow image, upright and opaque, and raises a ValueError where
        that cannot be read.
    """
    return partial(_open, files, side, background)


def _open(files: Sequence[Path], side: int, background: str, index: int) -> Image.Image:
    # Twice the size, so that a thumbnail is an average of pixels, not a selection.
    return read_image(files[index], 2 * side, background)


@dataclass
class Thumbnails:
    """What is shown of items, within a number of bytes.

    Attributes:
        sets: The sets of items.
        side: Pixels of the longer side.
        room: Bytes that all may take together.
        background: The colour behind what is transparent.
    """

    sets: Sequence[Items]
    side: int
    room: int
    background: str = "white"
    # name of an item -> its picture as a data URI
    images: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    # a sentence for each item that could not be shown
    failures: list[str] = field(default_factory=list)
    # items for which there was no room
    left_out: int = 0

    def add(self, keys: Iterable[Key]) -> None:
        """Add items, the most important ones first."""
        for number, index in dict.fromkeys(keys):
            items, name = self.sets[number], name_of((number, index))
            if items.picture is None or name in self.images or name in self.texts:
                continue
            if self.room <= 0:
                self.left_out += 1
                continue
            try:
                shown = items.picture(index)
                content = self._content(shown)
            except Exception as error:  # one image must not take the others with it
                # between the characters that give a name a direction of its own
                file = f" (\u2068{items.files[index]}\u2069)" if items.files is not None else ""
                self.failures.append(f"{items.name} {index}{file}: {type(error).__name__}: {error}")
                continue
            # With the quotes, the colon and the comma around them.
            self.room -= len(content) + len(name) + 8
            if self.room <= 0:
                self.left_out += 1
                continue
            (self.texts if isinstance(shown, str) else self.images)[name] = content

    def _content(self, shown: object) -> str:
        if isinstance(shown, str):
            return shown[:LONGEST_TEXT]
        return data_uri(shown, self.side, self.background)


def name_of(key: Key) -> str:
    """Name an item in the file.

    Examples:
        >>> name_of((0, 12)), name_of((1, 3))
        ('0-12', '1-3')
    """
    return f"{key[0]}-{key[1]}"


def data_uri(shown: object, side: int, background: str = "white") -> str:
    """Encode an image as WebP, without loss where it is small.

    Args:
        shown: An image of Pillow, a tensor or an array.
        side: Pixels of the longer side, if it is larger.
        background: The colour behind what is transparent in an image of Pillow.
    """
    if isinstance(shown, Image.Image) and has_known_range(shown):
        image = as_seen(shown, background).convert("RGB")
    else:
        from fewshot_callbacks.plots import to_picture  # noqa: PLC0415 - matplotlib, which files of images do not need

        picture = to_picture(shown, longest=max(256, side))
        values = np.rint(255 * picture).astype(np.uint8)
        image = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values).convert("RGB")
    image.thumbnail((side, side))
    content = io.BytesIO()
    image.save(content, "WEBP", lossless=max(image.size) <= 48, quality=72, method=2)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
