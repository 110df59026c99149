"""LogoDet-3K: annotated boxes of 3,000 logos; a seeded draw splits the classes."""

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
    """Return the split of a class, drawn by its brand (`split_of`): "train", "val" or "test".

    The brand is the lower-case name without a final "-1", "-2", ..., so all variants of a brand are in one split. The
    draw does not depend on the other classes. The fractions of validation and test classes match the shares only on
    average.

    Examples:
        >>> {logo_split(f"lexus-{i}", val_share=0.2, test_share=0.2, seed=0) for i in range(9)}
        {'test'}
    """
    return split_of(_VARIANT.sub("", name.casefold()), seed, val_share, test_share)


@dataclass(frozen=True)
class LogoCounts:
    """Numbers of classes and boxes of LogoDet-3K that are used or left out.

    Attributes:
        classes: Number of classes in all splits.
        boxes: Number of boxes in all splits.
        broken_boxes: Boxes left out because they have no name, lack four finite numbers, are empty, or are outside the
            image.
        small_classes: Classes left out because they have fewer than `min_boxes` valid boxes.
        boxes_of_small_classes: Number of valid boxes in these classes.
        missing_images: Annotations left out because their image is missing; 0 without `partial`.
        unreadable_files: Annotations and images left out because they cannot be read; 0 without `partial`.
    """

    classes: int
    boxes: int
    broken_boxes: int
    small_classes: int
    boxes_of_small_classes: int
    missing_images: int
    unreadable_files: int

    def in_words(self) -> str:
        """Return the counts as a message.

        Examples:
            >>> LogoCounts(3, 70, 2, 1, 5, 0, 0).in_words()
            'LogoDet-3K: 70 boxes in 3 classes. Left out: 2 broken boxes, 1 small class with 5 boxes.'
        """
        words = (
            f"LogoDet-3K: {counted(self.boxes, 'box')} in {counted(self.classes, 'class')}. Left out: "
            f"{counted(self.broken_boxes, 'broken box')}, {counted(self.small_classes, 'small class')} with "
            f"{counted(self.boxes_of_small_classes, 'box')}"
        )
        if self.missing_images or self.unreadable_files:
            words += f", {counted(self.missing_images, 'missing image')}, "
            words += counted(self.unreadable_files, "unreadable file")
        return words + "."


@dataclass(frozen=True)
class LogoTransform(PhotoTransform):
    """`PhotoTransform` that resizes the whole box to a square and ignores its aspect ratio.

    Logos have all aspect ratios, and a crop of a wide logo may show another logo. Evaluation boxes are therefore resized to
    `image_size` without a crop. Training boxes are resized to `resize` before the random resized crop. Nothing is mirrored
    by default, because logos contain letters.

    Args:
        image_size: Height and width of the images in the batch, in pixels.
        resize: Side of the square to which a training box is resized before the random crop; by default 8/7 of
            `image_size`.
        min_area: Smallest area of the random resized crop, as a fraction of the image, in (0, 1].
        flip: Probability of the horizontal flip.
        jitter: Strength of the brightness, contrast and saturation jitter; 0 for no jitter.
        mean: Mean per channel, which is subtracted; by default the mean of ImageNet.
        std: Standard deviation per channel, by which the channels are divided; by default as for ImageNet.
    """

    min_area: float = 0.6
    flip: float = 0.0

    def steps(self, augment: bool) -> list[Any]:
        """Return the transforms that resize or crop one box to `image_size`."""
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        side = self._resized() if augment else self.image_size
        squeeze = transforms.Resize((side, side) if isinstance(side, int) else side)
        if augment:
            return [squeeze, *super().steps(augment)]
        return [squeeze]


_TRANSFORM = LogoTransform()


class LogoDet3K(ImageSet):
    """The LogoDet-3K data set of logos; each annotated box is a separate image.

    **No split of the classes is published**, because the paper is about detection. `logo_split` draws the train, val and
    test classes. You can compare results only if they use the same shares and seed.

    `root` is the folder into which you unpacked the archive. Each image has an annotation in Pascal VOC format:

        LogoDet-3K/Food/Oreo/1.jpg
        LogoDet-3K/Food/Oreo/1.xml

    The class of a box is the object's name in the annotation, not the folder's name. Boxes are clipped to the image.
    Broken boxes, and classes with fewer than `min_boxes` boxes, are left out; `counts` and a message report how many.
    Every annotation and the size of every image is read once. Labels follow the order of the class names.

    Args:
        root: The folder that contains `LogoDet-3K`.
        split: "train", "val" or "test".
        transform: How boxes are resized, augmented and normalised.
        min_boxes: Classes with fewer boxes are left out. An episode needs shots + queries boxes per class.
        val_share: Expected fraction of validation classes (`logo_split`); 0 for no validation.
        test_share: Expected fraction of test classes.
        split_seed: Seed of the draw.
        partial: Accept an incomplete set. Categories may be missing. Annotations without an image, and files that cannot be
            read, are left out and counted.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.

    Attributes:
        counts: Numbers of classes and boxes that are used or left out, over all splits.
        boxes: (items, 4), int64: left, top, right and bottom of each item in pixels, inside the image.

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
            raise InputError(f"min_boxes is {min_boxes}, but every class has at least one box. Use min_boxes >= 1.")
        check_shares(val_share, test_share)
        folder = Path(root) / FOLDER
        fix = f"Unpack {ARCHIVE} into {root}, or pass partial=True to use only the files that exist."
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
        # With a share of 0 there is no validation split, so it must not fail the check for empty splits.
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
        """(items, 4), int64: left, top, right and bottom of each item in pixels, inside the image."""
        return torch.tensor([item.box for item in self.items])


@dataclass
class _Annotations:
    """The contents of all annotations.

    Attributes:
        broken_boxes: Number of boxes that have no name, lack four finite numbers, are empty, or are outside the image.
        without_image: Annotations without an image.
    """

    items: list[ImageItem] = field(default_factory=list)
    broken_boxes: int = 0
    without_image: list[Path] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    of_systems: Counter[str] = field(default_factory=Counter)


def _read_annotations(folder: Path, fix: str, *, partial: bool) -> _Annotations:
    """Return the contents of all annotations; unless `partial`, raise an error if the set is incomplete."""
    annotations = _Annotations()
    categories = list_folders(required(folder, fix), annotations.of_systems)
    if not partial:
        present = {category.name.casefold() for category in categories}
        absent = [category for category in CATEGORIES if category.casefold() not in present]
        refuse_any(absent, f"{len(absent)} of the {len(CATEGORIES)} categories are missing from {folder}", fix)
    for category in categories:
        for brand in list_folders(category, annotations.of_systems):
            _read_brand(brand, annotations)
    refuse_second_links(sorted({Path(item.file) for item in annotations.items}))
    if annotations.of_systems:
        rank_zero_info(f"{folder}: {describe_system_names(annotations.of_systems)}.")
    if not partial:
        without_image = counted(len(annotations.without_image), "annotation")
        refuse_any(annotations.without_image, f"{folder} contains {without_image} without an image", fix)
        unreadable = counted(len(annotations.unreadable), "unreadable file")
        refuse_any(annotations.unreadable, f"{folder} contains {unreadable}", fix, ValueError)
    return annotations


def _read_brand(folder: Path, annotations: _Annotations) -> None:
    """Add the boxes of all annotations in a folder."""
    # Listing the folder once is faster than checking each image. File extensions may be in upper case.
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
    """Return the width and height of the annotated image; empty if the annotation lacks them."""
    try:
        return tuple(float(annotation.findtext(f"size/{side}") or "nan") for side in ("width", "height"))
    except ValueError:
        return ()


def _box(
    element: ElementTree.Element, size: PictureSize, *, is_of_stored_picture: bool
) -> tuple[int, int, int, int] | None:
    """Return left, top, right and bottom of an object in the upright image, clipped to it; None for a broken box.

    `is_of_stored_picture` means that the box refers to the stored image, before its Exif tag rotates it.
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
