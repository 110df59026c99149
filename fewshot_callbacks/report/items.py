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

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.images import (
    ENDINGS,
    ImageListing,
    as_seen,
    has_known_range,
    list_folders,
    list_images,
    read_image,
)

# The endings that torchvision's ImageFolder reads, and GIF.
IMAGE_ENDINGS = (*ENDINGS, ".gif")

# A function of the index of an item that returns its picture: a Pillow image, a tensor, an array or a text. If it
# raises an error, the report notes it.
Picture = Callable[[int], Any]
# Largest number of characters of a text that are shown.
MAX_TEXT = 160
# Largest side of a picture that is encoded without loss, in pixels.
MAX_LOSSLESS = 48
# Bytes of the quotes, the colon and the comma around a name and its picture.
JSON_BYTES = 8
# The number of a set in the report, and the index of an item in it.
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ReportItems:
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
        ValueError: If the folder does not exist, has no image, or has a link to a folder that was read already.
    """
    return find_images(folder).files


def find_images(folder: Path) -> ImageListing:
    """List the images of a folder as `image_files` does, and count the files that were skipped."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Pass the folder that holds the images.")
    of_systems = Counter[str]()
    class_folders = list_folders(folder, of_systems)
    if class_folders:
        listing = list_images(class_folders, folder, IMAGE_ENDINGS)
        listing.of_systems.update(of_systems)
    else:
        listing = list_images([folder], None, IMAGE_ENDINGS)
    if not listing.files:
        skipped = listing.describe_skipped()
        reason = f"; {skipped}" if skipped else ""
        raise InputError(
            f"{folder} holds no image ({', '.join(IMAGE_ENDINGS)}){reason}. Pass the folder that holds them."
        )
    return listing


def pictures_of_files(files: Sequence[Path], longest: int, background: str = "white") -> Picture:
    """Return a function that opens the image of an item; a JPEG is decoded only as large as a thumbnail needs.

    Args:
        files: The image file of each item.
        longest: Pixels of the longer side of a thumbnail.
        background: The colour behind what is transparent.

    Returns:
        A function of the index of an item that returns a Pillow image, upright and opaque, and raises a ValueError where
        that cannot be read.
    """
    return partial(_open, files, longest, background)


def _open(files: Sequence[Path], longest: int, background: str, index: int) -> Image.Image:
    # The image is read at twice the size, so that a thumbnail is an average of pixels, not a selection.
    return read_image(files[index], 2 * longest, background)


@dataclass
class Thumbnails:
    """Pictures and texts of items, within a number of bytes.

    Attributes:
        sets: The sets of items.
        longest: Pixels of the longer side.
        free_bytes: Bytes that are left for further pictures and texts.
        background: The colour behind what is transparent.
        images: Name of an item -> its picture as a data URI.
        texts: Name of an item -> its text.
        failures: A sentence on each item that could not be shown.
        omitted: Number of items that did not fit.
    """

    sets: Sequence[ReportItems]
    longest: int
    free_bytes: int
    background: str = "white"
    images: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    omitted: int = 0

    def add(self, keys: Iterable[Key]) -> None:
        """Add items, the most important ones first; each item is added once."""
        for key in dict.fromkeys(keys):
            name = name_of(key)
            has_picture = self.sets[key[0]].picture is not None
            if has_picture and name not in self.images and name not in self.texts:
                self._add(key, name)

    def _add(self, key: Key, name: str) -> None:
        """Add one item, or note why it is left out."""
        if self.free_bytes <= 0:
            self.omitted += 1
            return
        try:
            content, is_text = self._content(key)
        except Exception as error:  # one unreadable image must not affect the others
            self._note_failure(key, error)
            return
        self.free_bytes -= len(content) + len(name) + JSON_BYTES
        if self.free_bytes <= 0:
            self.omitted += 1
            return
        if is_text:
            self.texts[name] = content
        else:
            self.images[name] = content

    def _content(self, key: Key) -> tuple[str, bool]:
        """Return the text or the data URI of an item, and whether it is a text."""
        set_number, index = key
        picture = self.sets[set_number].picture
        content = None if picture is None else picture(index)
        if isinstance(content, str):
            return content[:MAX_TEXT], True
        return data_uri(content, self.longest, self.background), False

    def _note_failure(self, key: Key, error: Exception) -> None:
        set_number, index = key
        items = self.sets[set_number]
        # A file name may be written from right to left: these characters isolate its direction from the rest of the
        # sentence.
        file = "" if items.files is None else f" (\u2068{items.files[index]}\u2069)"
        self.failures.append(f"{items.name} {index}{file}: {type(error).__name__}: {error}")


def name_of(key: Key) -> str:
    """Name an item in the file.

    Examples:
        >>> name_of((0, 12)), name_of((1, 3))
        ('0-12', '1-3')
    """
    return f"{key[0]}-{key[1]}"


def data_uri(original: object, longest: int, background: str = "white") -> str:
    """Encode an image as WebP, without loss where it is small.

    Args:
        original: A Pillow image, a tensor or an array.
        longest: Pixels of the longer side of the picture; smaller images keep their size.
        background: The colour behind what is transparent in a Pillow image.

    Returns:
        The picture as a data URI.
    """
    image = _rgb_image(original, longest, background)
    image.thumbnail((longest, longest))
    content = io.BytesIO()
    image.save(content, "WEBP", lossless=max(image.size) <= MAX_LOSSLESS, quality=72, method=2)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()


def _rgb_image(original: object, longest: int, background: str) -> Image.Image:
    """Return an image of 8 bits in red, green and blue."""
    if isinstance(original, Image.Image) and has_known_range(original):
        return as_seen(original, background).convert("RGB")
    from fewshot_callbacks.plots import to_picture  # noqa: PLC0415 - matplotlib, which files of images do not need

    picture = to_picture(original, longest=max(256, longest))
    values = np.rint(255 * picture).astype(np.uint8)
    if values.shape[-1] == 1:
        values = values[..., 0]
    return Image.fromarray(values).convert("RGB")
