"""Image files for the data modules and the report: which files of a folder are images, and how an image is read."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import describe_system_names, is_system_name
from fewshot_callbacks.system.terminal import printable

# The endings of torchvision's ImageFolder.
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# The formats that Pillow may read, whatever the ending of a file. Some of Pillow's other readers are old, and one starts
# a program.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
# Largest number of endings in a message, which should stay on one line.
_NAMED_AT_MOST = 5
_TWICE = "its images would count twice. Remove the link."
_BITS_PER_SAMPLE = 258  # a TIFF tag
_ORIENTATION = 0x0112  # an Exif tag
# Orientation -> the turn that makes the stored image upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Entries of `Image.info` with the orientation.
_TELL_THE_ORIENTATION = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")


def read_image(file: str | Path, longest: int | None = None, background: str = "white") -> Image.Image:
    """Return the image in a file as a viewer shows it (see `as_seen`), in a mode that `convert` can convert.

    A JPEG may be decoded at a smaller size, in whole steps, if its sides stay above `longest` pixels. `background` is
    the colour behind transparent pixels.
    """
    with _opened(file) as image:
        if longest is not None:
            image.draft("RGB", (longest, longest))
        # Pillow decodes lazily. A broken image has to fail here, where the error becomes a ValueError.
        image.load()
        return as_seen(image, background)


def as_seen(image: Image.Image, background: str = "white") -> Image.Image:
    """Return an image as a viewer shows it: upright, opaque, with 8 bits per channel.

    `convert("RGB")` alone would make a black square of a black logo with an alpha channel, and clip 16-bit greys at
    255. The given image is not changed.
    """
    image.load()  # some formats store their tags after the pixels
    return _turned(_opaque(to_8_bits(image), background), orientation_of(image))


def upright(image: Image.Image) -> Image.Image:
    """Return the image, turned upright by its Exif tag."""
    image.load()
    return _turned(image, orientation_of(image))


def orientation_of(image: Image.Image) -> int:
    """Return the Exif orientation of an image, 1 to 8; 1 (upright) without a valid tag."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow documents no error class for broken tags, and the pixels are intact
        return 1
    return int(orientation) if orientation in _TURNS else 1


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    if orientation not in _TURNS:
        return image
    turned = image.transpose(_TURNS[orientation])
    for key in _TELL_THE_ORIENTATION:  # a viewer would turn it again by the tag
        turned.info.pop(key, None)
    return turned


def _opaque(image: Image.Image, background: str) -> Image.Image:
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    base = Image.new("RGBA", layer.size, parse_colour(background))
    opaque = Image.alpha_composite(base, layer).convert("RGB")
    # The entry `transparency` names a colour that would be transparent again.
    opaque.info = {key: value for key, value in image.info.items() if key != "transparency"}
    return opaque


def parse_colour(background: str) -> tuple[int, ...]:
    """Return the red, green and blue of a colour."""
    try:
        return ImageColor.getrgb(background)[:3]
    except (ValueError, AttributeError):
        raise InputError(
            f"background is {background!r}, which is not a colour. Pass a name such as 'white', or '#rrggbb'."
        ) from None


@dataclass(frozen=True)
class PictureSize:
    """The size of an image file.

    Attributes:
        orientation: The orientation in its Exif tag (see `orientation_of`).
    """

    stored: tuple[int, int]
    orientation: int

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height of the image that `read_image` returns."""
        width, height = self.stored
        return (height, width) if self.orientation > 4 else (width, height)

    def turned(self, box: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Return a box (left, top, right, bottom) of the stored image as a box of the upright image."""
        width, height = self.stored
        left, top, right, bottom = box
        if self.orientation in (2, 3):
            left, right = width - right, width - left
        if self.orientation in (3, 4):
            top, bottom = height - bottom, height - top
        if self.orientation in (6, 7):
            top, bottom = height - bottom, height - top
        if self.orientation in (7, 8):
            left, right = width - right, width - left
        return (top, left, bottom, right) if self.orientation > 4 else (left, top, right, bottom)


def image_size(file: str | Path) -> PictureSize:
    """Return the size of an image, read from the header of its file."""
    with _opened(file) as image:
        if image.format == "TIFF":  # the only format that Pillow turns while loading
            image.load()
        return PictureSize(image.size, orientation_of(image))


@contextmanager
def _opened(file: str | Path) -> Iterator[Image.Image]:
    """Yield an image. Any error while it is opened, or inside the block, becomes a ValueError."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # opening a named pipe would block forever
            raise InputError("it is not a regular file")
        with Image.open(file, formats=FORMATS) as image:
            yield image
    except Exception as error:  # Pillow documents no error class for a broken file
        raise InputError(str(error) or type(error).__name__) from error


def to_8_bits(image: Image.Image) -> Image.Image:
    """Return an image with its 16-bit greys scaled to 8 bits, or an 8-bit image unchanged.

    Pillow stores 16-bit greys as `I;16`, or as `I` if an older version has read a PNG or a PGM.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        tags = getattr(image, "tag_v2", {})
        largest = 2 ** int(tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1  # a TIFF may have 12 bits
        # Values are clipped below: a value above the maximum of the tag would overflow a byte.
        values = np.asarray(image).astype(np.float64)  # (height, width)
        scaled = Image.fromarray(np.rint(values * (255 / largest)).clip(0, 255).astype(np.uint8))
        if "transparency" in image.info:  # one of the 65,536 greys
            scaled.putalpha(Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)))
        return scaled
    if not has_known_range(image):
        kind = "32-bit integers" if image.mode == "I" else "fractions"
        raise InputError(
            f"its values are {kind}, and the values of black and white are unknown; save it with 8 or 16 bits"
        )
    return image


def has_known_range(image: Image.Image) -> bool:
    """Return whether the values of black and white are known for an image."""
    return image.mode not in ("I", "F")


@dataclass
class ImageListing:
    """The images below some folders.

    Attributes:
        of_folders: The images of each folder.
        skipped: Number of other files, by their ending.
        of_systems: Number of system files and folders, by their name (`is_system_name`). Such folders are not listed.
    """

    of_folders: list[list[Path]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    of_systems: Counter[str] = field(default_factory=Counter)

    @property
    def files(self) -> list[Path]:
        """The images of all folders."""
        return [file for files in self.of_folders for file in files]

    def describe_skipped(self) -> str:
        """Return a sentence that counts the skipped files; "" if there are none.

        Examples:
            >>> ImageListing(skipped=Counter({".avif": 1, ".gif": 2})).describe_skipped()
            '3 files skipped: .gif 2, .avif 1'
        """
        sentences = []
        total = self.skipped.total()
        if total:
            counts = [f"{ending} {count:,}" for ending, count in self.skipped.most_common(_NAMED_AT_MOST)]
            if len(self.skipped) > _NAMED_AT_MOST:
                counts.append("...")
            sentences.append(f"{total:,} file{'' if total == 1 else 's'} skipped: {', '.join(counts)}")
        if self.of_systems:
            sentences.append(describe_system_names(self.of_systems))
        return printable("; ".join(sentences))


def list_entries(folder: Path, of_systems: Counter[str] | None = None) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in the order of their names, without system files and folders.

    The names of system files and folders are added to the counter `of_systems`.
    """
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if of_systems is not None:
        of_systems.update(entry.name for entry in entries if is_system_name(entry.name))
    return [entry for entry in entries if not is_system_name(entry.name)]


def list_folders(folder: Path, of_systems: Counter[str] | None = None) -> list[Path]:
    """Return the folders in a folder in the order of their names (see `list_entries`)."""
    return [folder / entry.name for entry in list_entries(folder, of_systems) if entry.is_dir()]


def list_images(folders: Sequence[Path], root: Path | None = None, endings: Sequence[str] = ENDINGS) -> ImageListing:
    """Return the images below folders, in the order of torchvision's ImageFolder.

    Links are followed. A folder or an image that is reached twice is an error, also by a link to a folder that contains
    the link. System files and folders are skipped. `endings` are in lower case.

    Raises:
        ValueError: If a folder or an image is reached twice; the message names both paths.
        OSError: If a folder cannot be read.
    """
    listing = ImageListing()
    # real path of each folder that was listed -> the path by which it was reached
    path_of_real: dict[str, Path] = {}
    if root is not None:
        path_of_real[os.path.realpath(root)] = root
    for folder in folders:
        listing.of_folders.append(list(_images_of(folder, path_of_real, tuple(endings), listing)))
    refuse_second_links(listing.files)
    return listing


def refuse_second_links(files: Sequence[Path]) -> None:
    """Raise an error if a link leads to an image that is also read under another name."""
    links = [file for file in files if file.is_symlink()]
    if not links:
        return
    # Each folder is listed once, so two paths can only name one image if one of the paths is a link.
    link_paths = set(links)
    regular_files = [file for file in files if file not in link_paths]
    path_of_real = {os.path.join(os.path.realpath(file.parent), file.name): file for file in regular_files}
    for link in links:
        real = os.path.realpath(link)
        if real in path_of_real:
            raise InputError(f"{link} leads to {real}, which is already read as {path_of_real[real]}: {_TWICE}")
        path_of_real[real] = link


def _images_of(
    top: Path, path_of_real: dict[str, Path], endings: tuple[str, ...], listing: ImageListing
) -> Iterator[Path]:
    """Yield the images below a folder.

    `path_of_real` maps the real path of each listed folder to the path by which it was reached. Folders are added to
    it.
    """
    waiting = [top]
    listings: list[tuple[str, list[os.DirEntry[str]]]] = []
    while waiting:
        folder = waiting.pop()
        # All paths to one folder have the same real path, whatever links they contain.
        real = os.path.realpath(folder)
        if real in path_of_real:
            raise InputError(f"{folder} leads to {real}, which is already read as {path_of_real[real]}: {_TWICE}")
        path_of_real[real] = folder
        entries = list_entries(folder, listing.of_systems)
        listings.append((str(folder), entries))
        waiting += [folder / entry.name for entry in entries if entry.is_dir()]
    # torchvision sorts folders by their whole path, whatever their depth, and then the names in each folder.
    for name, entries in sorted(listings, key=lambda listing: listing[0]):
        for entry in entries:
            if entry.is_dir():
                continue
            if not entry.name.lower().endswith(endings):
                listing.skipped[os.path.splitext(entry.name)[1].lower() or "without an ending"] += 1
            elif entry.is_file() or entry.is_symlink():  # a broken link counts as an image: reading it raises the error
                yield Path(name, entry.name)
            else:
                listing.skipped["not a regular file"] += 1
