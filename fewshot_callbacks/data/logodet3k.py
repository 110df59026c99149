"""LogoDet-3K: the annotated boxes of 3,000 logos, with classes split by a seeded draw."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.data.dataset import SPLITS, Split, split_of
from fewshot_callbacks.data.image_set import (
    ImageItem,
    ImageSet,
    PhotoTransform,
    check_no_split_is_empty,
    check_shares,
    refuse_any,
    required,
)
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.images import PictureSize, image_size, list_entries, list_folders, refuse_second_links
from fewshot_callbacks.files.names import composed_form, describe_system_names, spelling_key
from fewshot_callbacks.system.words import counted
from fewshot_callbacks.trainer.lightning import rank_zero_info

FOLDER = "LogoDet-3K"
ARCHIVE = "LogoDet-3K.zip from the page of LogoDet-3K (https://github.com/Wangjing1551/LogoDet-3K-Dataset)"
CATEGORIES = (
    "Clothes",
    "Electronic",
    "Food",
    "Leisure",
    "Medical",
    "Necessities",
    "Others",
    "Sports",
    "Transportation",
)

_VARIANT = re.compile(r"-\d+$")


def logo_split(name: str, *, val_share: float, test_share: float, seed: int) -> Split:
    """Draw a class into a split by its brand (`split_of`).

    The brand is the name in lower case without a last "-1", "-2", ..., so that the variants of one brand are never in two
    splits. The draw does not depend on the other classes, so that no class changes its split with `min_boxes` or in a part
    of the set. The shares are met only on average.

    Args:
        name: Name of the class.
        val_share: Share of the classes to validate on, on average.
        test_share: Share of the classes to test on, on average.
        seed: Another seed is another draw.

    Returns:
        "train", "val" or "test".

    Examples:
        >>> {logo_split(f"lexus-{i}", val_share=0.2, test_share=0.2, seed=0) for i in range(9)}
        {'test'}
    """
    return split_of(_VARIANT.sub("", name.casefold()), seed, val_share, test_share)


@dataclass(frozen=True)
class LogoCounts:
    """Numbers of classes and boxes of LogoDet-3K that are used, and that are left out.

    Attributes:
        classes: Classes that are used, over all splits.
        boxes: Boxes that are used, over all splits.
        broken_boxes: Boxes left out: without a name, without four finite numbers, empty, or outside the image.
        small_classes: Classes left out: with fewer than `min_boxes` boxes that are not broken.
        boxes_of_small_classes: Number of boxes of these classes.
        missing_images: Annotations without their image; 0 without `partial`.
        unreadable_files: Annotations or images that cannot be read; 0 without `partial`.
    """

    classes: int
    boxes: int
    broken_boxes: int
    small_classes: int
    boxes_of_small_classes: int
    missing_images: int
    unreadable_files: int

    def in_words(self) -> str:
        """One sentence.

        Examples:
            >>> LogoCounts(3, 70, 2, 1, 5, 0, 0).in_words()
            'LogoDet-3K: 70 boxes of 3 classes; left out are 2 broken boxes and 1 small class with 5 boxes.'
        """
        words = (
            f"LogoDet-3K: {counted(self.boxes, 'box')} of {counted(self.classes, 'class')}; left out are "
            f"{counted(self.broken_boxes, 'broken box')} and {counted(self.small_classes, 'small class')} with "
            f"{counted(self.boxes_of_small_classes, 'box')}"
        )
        if self.missing_images or self.unreadable_files:
            words += f", {counted(self.missing_images, 'missing image')} and "
            words += counted(self.unreadable_files, "unreadable file")
        return words + "."


@dataclass(frozen=True)
class LogoTransform(PhotoTransform):
    """As `PhotoTransform`, but the whole box is squeezed to a square.

    Logos are of all shapes, and a part of a wide one may be another logo. So a box is squeezed for evaluation to
    `image_size`, for training to `resize`, before the random resized crop. Nothing is mirrored unless `flip` is set, since
    logos contain letters.

    Args:
        image_size: Height and width of the images that the model sees, in pixels.
        resize: Side of the square that a training image is squeezed to before its random crop; 8/7 of `image_size` by
            default.
        min_area: Smallest part of the image's area in the random resized crop, in (0, 1].
        flip: Probability of the horizontal flip.
        jitter: Strength of the jitter of brightness, contrast and saturation; 0 for none.
        mean: Mean of each channel, which is subtracted; by default that of ImageNet.
        std: Standard deviation of each channel, by which it is divided.
    """

    min_area: float = 0.6
    flip: float = 0.0

    def steps(self, augment: bool) -> list[Any]:
        """List the transforms that bring one box to `image_size`."""
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        side = self._resized() if augment else self.image_size
        squeeze = transforms.Resize((side, side) if isinstance(side, int) else side)
        if augment:
            return [squeeze, *super().steps(augment)]
        return [squeeze]


_TRANSFORM = LogoTransform()


class LogoDet3K(ImageSet):
    """LogoDet-3K as it is published; each annotated box is a separate image.

    **No split of its classes is published**: the paper is about detection. Here `logo_split` assigns classes to train,
    val and test, and results can only be compared at the same shares and seed.

    `root` holds the folder that the archive unpacks to, an annotation in the format of Pascal VOC beside each image:

        LogoDet-3K/Food/Oreo/1.jpg
        LogoDet-3K/Food/Oreo/1.xml

    A class is the name of an object in the annotations (not the folder's). A box is cut to the image's borders; broken boxes
    and classes with fewer than `min_boxes` boxes are left out and counted (`counts`, and a message). Every
    annotation and the size of every image is read once.

    Labels are in the order of the class names.

    Args:
        root: The folder that holds `LogoDet-3K`.
        split: "train", "val" or "test".
        transform: What the model sees of a box.
        min_boxes: A class with fewer boxes is left out. An episode needs shots + queries of each class.
        val_share: Share of the classes to validate on, on average (`logo_split`); 0 for no validation.
        test_share: Share of the classes to test on, on average.
        split_seed: Seed of the split.
        partial: Accept an incomplete set: categories may be missing, and annotations without an image
            and files that cannot be read are left out and counted.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.

    Attributes:
        counts: What is used, over all splits, and what is left out.
        boxes: (items, 4), left, top, right and bottom in pixels, inside the image.

    Raises:
        FileNotFoundError: A folder or an image is missing.
        ValueError: A file cannot be read, a split has no class, or a setting is out of range.

    References:
        Wang, Min, Hou, Ma, Zheng, Jiang, "LogoDet-3K: A Large-Scale Image Dataset for Logo Detection", ACM TOMM 18(1),
        2022.

    Examples:
        >>> import tempfile
        >>> from PIL import Image
        >>> box = "<bndbox><xmin>2</xmin><ymin>2</ymin><xmax>18</xmax><ymax>6</ymax></bndbox>"
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for brand in ("Dole", "Oreo", "Twix"):
        ...         folder = Path(root) / "LogoDet-3K" / "Food" / brand
        ...         folder.mkdir(parents=True)
        ...         Image.new("RGB", (20, 10)).save(folder / "1.jpg")
        ...         xml = f"<annotation><object><name>{brand}</name>{box}</object></annotation>"
        ...         _ = (folder / "1.xml").write_text(xml)
        ...     small = LogoTransform(image_size=8)
        ...     logos = LogoDet3K(root, transform=small, min_boxes=1, val_share=0.4, partial=True)
        ...     images, labels = logos.batch([0])
        >>> [logos.with_split(split).class_names for split in logos.splits]
        [('Oreo',), ('Twix',), ('Dole',)]
        >>> tuple(images.shape), logos.counts.boxes
        ((1, 3, 8, 8), 3)
    """

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        transform: LogoTransform = _TRANSFORM,
        min_boxes: int = 20,
        val_share: float = 0.2,
        test_share: float = 0.2,
        split_seed: int = 0,
        partial: bool = False,
        memory_mb: float = 512,
    ) -> None:
        if min_boxes < 1:
            raise InputError(f"min_boxes is {min_boxes}; a class has at least one box. Use min_boxes >= 1.")
        check_shares(val_share, test_share)
        folder = Path(root) / FOLDER
        fix = f"Unpack {ARCHIVE} into {root}, or pass partial=True to use what is there."
        annotations = _read_annotations(folder, fix, partial=partial)
        boxes_of_class = Counter(item.class_name for item in annotations.items)
        items = [item for item in annotations.items if boxes_of_class[item.class_name] >= min_boxes]
        split_of_class = {
            name: logo_split(name, val_share=val_share, test_share=test_share, seed=split_seed)
            for name, boxes in boxes_of_class.items()
            if boxes >= min_boxes
        }
        self.counts = LogoCounts(
            classes=len(split_of_class),
            boxes=len(items),
            broken_boxes=annotations.broken_boxes,
            small_classes=len(boxes_of_class) - len(split_of_class),
            boxes_of_small_classes=len(annotations.items) - len(items),
            missing_images=len(annotations.without_image),
            unreadable_files=len(annotations.unreadable),
        )
        rank_zero_info(self.counts.in_words())
        # With a share of 0 there is no validation split. It is not refused as empty, and the error for a request for it
        # names the share.
        splits = [name for name in SPLITS if name != "val" or val_share > 0]
        items_of = {name: [item for item in items if split_of_class[item.class_name] == name] for name in splits}
        check_no_split_is_empty(
            items_of,
            folder,
            f"It has {counted(len(split_of_class), 'class')} with at least {min_boxes} boxes. Use a smaller min_boxes, "
            "other shares or another split_seed.",
        )
        super().__init__(
            items_of, split, transform, memory_mb=memory_mb, no_validation="val_share is 0. Use a positive share."
        )

    @property
    def boxes(self) -> Int[Tensor, "items 4"]:
        """Left, top, right and bottom of each item in pixels, inside the image."""
        return torch.tensor([item.box for item in self.items])


@dataclass
class _Annotations:
    """The contents of the annotations of a set.

    Attributes:
        items: All boxes that are not broken.
        broken_boxes: Number of boxes without a name, without four finite numbers, empty, or outside the image.
        without_image: Annotations without an image.
        unreadable: Annotations and images that cannot be read.
        of_systems: Numbers of files that operating systems leave in folders, by name.
    """

    items: list[ImageItem] = field(default_factory=list)
    broken_boxes: int = 0
    without_image: list[Path] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    of_systems: Counter[str] = field(default_factory=Counter)


def _read_annotations(folder: Path, fix: str, *, partial: bool) -> _Annotations:
    """Read all annotations, and refuse an incomplete set unless it may be `partial`."""
    annotations = _Annotations()
    categories = list_folders(required(folder, fix), annotations.of_systems)
    if not partial:
        present = {category.name.casefold() for category in categories}
        absent = [category for category in CATEGORIES if category.casefold() not in present]
        refuse_any(absent, f"{len(absent)} of the {len(CATEGORIES)} categories are not in {folder}", fix)
    for category in categories:
        for brand in list_folders(category, annotations.of_systems):
            _read_brand(brand, annotations)
    refuse_second_links(sorted({Path(item.file) for item in annotations.items}))
    if annotations.of_systems:
        rank_zero_info(f"{folder}: {describe_system_names(annotations.of_systems)}.")
    if not partial:
        without_image = counted(len(annotations.without_image), "annotation")
        refuse_any(annotations.without_image, f"{folder} holds {without_image} without its image", fix)
        unreadable = counted(len(annotations.unreadable), "unreadable file")
        refuse_any(annotations.unreadable, f"{folder} holds {unreadable}", fix, ValueError)
    return annotations


def _read_brand(folder: Path, annotations: _Annotations) -> None:
    """Add the boxes of a folder, each annotation with its image."""
    # The folder is listed once, which is faster than a check for each image. Endings may be in upper case.
    names = {spelling_key(entry.name): entry.name for entry in list_entries(folder, annotations.of_systems)}
    for xml_name in sorted(name for name in names if name.endswith(".xml")):
        xml = folder / names[xml_name]
        jpg_name = names.get(xml_name.removesuffix(".xml") + ".jpg")
        if jpg_name is None:
            annotations.without_image.append(xml)
        else:
            _read_annotation(xml, folder / jpg_name, annotations)


def _read_annotation(xml: Path, jpg: Path, annotations: _Annotations) -> None:
    """Add the boxes of one image."""
    try:
        annotation = ElementTree.parse(xml).getroot()
    except (ElementTree.ParseError, ValueError):
        annotations.unreadable.append(xml)
        return
    try:
        size = image_size(jpg)
    except ValueError:
        annotations.unreadable.append(jpg)
        return
    is_of_stored_picture = size.stored != size.upright and _annotated_size(annotation) == size.stored
    for element in annotation.findall("object"):
        name = composed_form(" ".join((element.findtext("name") or "").split()))
        box = _box(element, size, is_of_stored_picture=is_of_stored_picture)
        if not name or box is None:
            annotations.broken_boxes += 1
        else:
            annotations.items.append(ImageItem(str(jpg), name, box))


def _annotated_size(annotation: ElementTree.Element) -> tuple[float, ...]:
    """Return the width and height of the annotated picture; empty if the annotation lacks them."""
    try:
        return tuple(float(annotation.findtext(f"size/{side}") or "nan") for side in ("width", "height"))
    except ValueError:
        return ()


def _box(
    element: ElementTree.Element, size: PictureSize, *, is_of_stored_picture: bool
) -> tuple[int, int, int, int] | None:
    """Return left, top, right and bottom of an object, upright and cut to the image; None for a broken box.

    Args:
        element: The object in the annotation.
        size: The size of its picture.
        is_of_stored_picture: Whether the picture was annotated as it is stored, before its Exif tag turns it.
    """
    sides = ("xmin", "ymin", "xmax", "ymax")
    try:
        left, top, right, bottom = (round(float(element.findtext(f"bndbox/{side}") or "nan")) for side in sides)
    except (ValueError, OverflowError):  # not a number, or infinite
        return None
    if is_of_stored_picture:
        left, top, right, bottom = size.turned((left, top, right, bottom))
    width, height = size.upright
    left = max(left, 0)
    top = max(top, 0)
    right = min(right, width)
    bottom = min(bottom, height)
    if left >= right or top >= bottom:
        return None
    return left, top, right, bottom
