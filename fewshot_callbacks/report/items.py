"""The items of a report: embeddings, labels and thumbnails, which are stored in the HTML file."""

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
from torch import Tensor

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

# The file extensions of torchvision's ImageFolder, and GIF.
IMAGE_ENDINGS = (*ENDINGS, ".gif")

# A function that returns the image of an item from its index: a Pillow image, a tensor, an array or a text. If it raises an
# error, the report notes the error.
Picture = Callable[[int], Any]
# Largest number of shown characters of a text.
MAX_TEXT = 160
# Thumbnails with sides of up to this many pixels are encoded without loss.
MAX_LOSSLESS = 48
# Bytes of the quotes, the colon and the comma around a name and its thumbnail.
JSON_BYTES = 8
# The index of a set in the report, and the index of an item in the set.
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ReportItems:
    """The items of one set.

    Attributes:
        embeddings: (items, dim).
        labels: (items,): integers, strings, or tuples of several integers; a tensor or an array becomes a list.
        name: Name of the set, such as "queries".
        picture: Function from the index of an item to its image or text; None if there is nothing to show.
        files: File name of each item, which is also shown.
        label_names: Label -> name, for integer labels.
        ids: (items,), the identity of each item, as in `evaluate_retrieval`.
        groups: (items,), the group of each item, as in `evaluate_retrieval`.
    """

    embeddings: Any
    labels: Any
    name: str = "items"
    picture: Picture | None = None
    files: Sequence[str] | None = None
    label_names: Mapping[Any, str] | None = None
    ids: Any | None = None
    groups: Any | None = None

    def __post_init__(self) -> None:
        # Labels are keys of dictionaries, and two elements of a tensor are never the same key.
        if isinstance(self.labels, Tensor | np.ndarray):
            object.__setattr__(self, "labels", self.labels.tolist())

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, label: int | str | tuple[int, ...]) -> str:
        """Return the name of a label."""
        return str(label if self.label_names is None else self.label_names.get(label, label))


def image_files(folder: Path) -> list[Path]:
    """Return the images of a folder, in the order of torchvision's ImageFolder; without class folders, sorted by name.

    Args:
        folder: A folder with one folder per class, or a folder of images.

    Raises:
        ValueError: The folder does not exist, contains no images, or contains two links to the same folder.
    """
    return find_images(folder).files


def find_images(folder: Path) -> ImageListing:
    """Return the images of a folder, as `image_files` does, with the number of skipped files."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Pass the folder that contains the images.")
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
            f"{folder} contains no image ({', '.join(IMAGE_ENDINGS)}){reason}. Pass the folder that contains the images."
        )
    return listing


def pictures_of_files(files: Sequence[Path], longest: int, background: str = "white") -> Picture:
    """Return a function that returns the image of an item: a Pillow image, upright and opaque.

    A JPEG file is decoded at a reduced size that is large enough for a thumbnail. The function raises a ValueError if
    an image cannot be read.

    Args:
        files: The image file of each item.
        longest: Longer side of a thumbnail, in pixels.
        background: Colour behind transparent pixels.
    """
    return partial(_open, files, longest, background)


def _open(files: Sequence[Path], longest: int, background: str, index: int) -> Image.Image:
    # At twice the size, a thumbnail is an average of pixels instead of a selection.
    return read_image(files[index], 2 * longest, background)


@dataclass
class Thumbnails:
    """Thumbnails and texts of items, up to a total size.

    Attributes:
        longest: Longer side of a thumbnail, in pixels.
        free_bytes: Free space in bytes.
        images: Name of an item -> its thumbnail as a data URI.
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
        """Add items in this order; each item is added once."""
        for key in dict.fromkeys(keys):
            name = name_of(key)
            has_picture = self.sets[key[0]].picture is not None
            if has_picture and name not in self.images and name not in self.texts:
                self._add(key, name)

    def _add(self, key: Key, name: str) -> None:
        """Add one item, or note why it was left out."""
        if self.free_bytes <= 0:
            self.omitted += 1
            return
        try:
            content, is_text = self._content(key)
        except Exception as error:  # an unreadable image must not affect other images
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
        # These characters isolate the direction of a right-to-left file name from the rest of the sentence.
        file = "" if items.files is None else f" (\u2068{items.files[index]}\u2069)"
        self.failures.append(f"{items.name} {index}{file}: {type(error).__name__}: {error}")


def name_of(key: Key) -> str:
    """Return the name of an item in the page.

    Examples:
        >>> name_of((0, 12)), name_of((1, 3))
        ('0-12', '1-3')
    """
    return f"{key[0]}-{key[1]}"


def data_uri(original: object, longest: int, background: str = "white") -> str:
    """Return an image as the data URI of a WebP thumbnail; a small image is encoded without loss.

    `longest` is in pixels; a smaller image keeps its size.
    """
    image = _rgb_image(original, longest, background)
    image.thumbnail((longest, longest))
    content = io.BytesIO()
    image.save(content, "WEBP", lossless=max(image.size) <= MAX_LOSSLESS, quality=72, method=2)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()


def _rgb_image(original: object, longest: int, background: str) -> Image.Image:
    """Return an 8-bit image in red, green and blue."""
    if isinstance(original, Image.Image) and has_known_range(original):
        return as_seen(original, background).convert("RGB")
    from fewshot_callbacks.plots import to_picture  # noqa: PLC0415 - image files do not need matplotlib

    picture = to_picture(original, longest=max(256, longest))
    values = np.rint(255 * picture).astype(np.uint8)
    if values.shape[-1] == 1:
        values = values[..., 0]
    return Image.fromarray(values).convert("RGB")
