"""CUB-200-2011: photographs of 200 species of birds, in the split of Chen et al. (2019)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fewshot_callbacks.data.dataset import Split
from fewshot_callbacks.data.image_set import ImageItem, ImageSet, PhotoTransform, in_splits, required
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.files.text import read_lines

FOLDER = "CUB_200_2011"
ARCHIVE = (
    "CUB_200_2011.tgz from the Caltech-UCSD Birds-200-2011 page of the Caltech Vision Lab "
    "(https://www.vision.caltech.edu/datasets/cub_200_2011/)"
)
# The published numbers of classes: a copy with other numbers is incomplete.
CLASSES: Mapping[Split, int] = {"train": 100, "val": 50, "test": 50}

_TRANSFORM = PhotoTransform()
_SPLIT_OF_REMAINDER: tuple[Split, Split, Split, Split] = ("train", "val", "train", "test")


def cub_split(class_id: int) -> Split:
    """Return the split of a class: "train", "val" or "test".

    Let i = class_id - 1. Even i is "train", i mod 4 = 1 is "val", and i mod 4 = 3 is "test". Class ids begin at 1.

    References:
        Chen, Liu, Kira, Wang, Huang, "A Closer Look at Few-shot Classification", ICLR 2019.

    Examples:
        >>> [cub_split(class_id) for class_id in (1, 2, 3, 4)]
        ['train', 'val', 'train', 'test']
    """
    if class_id < 1:
        raise InputError(f"class_id is {class_id}, but CUB-200-2011 numbers its classes from 1. Use class_id >= 1.")
    return _SPLIT_OF_REMAINDER[(class_id - 1) % 4]


class CUB200(ImageSet):
    r"""The CUB-200-2011 data set of birds: 100 training, 50 validation and 50 test classes (`cub_split`).

    `root` is the folder into which you unpacked the archive. Images and classes are read from the archive's lists:

        CUB_200_2011/classes.txt               1 001.Black_footed_Albatross
        CUB_200_2011/images.txt                1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
        CUB_200_2011/image_class_labels.txt    1 1
        CUB_200_2011/images/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg

    All 11,788 images are used, without cropping: the bounding boxes are not read. `train_test_split.txt` is not read
    either, because it divides the images within each class. Labels follow the class numbers.

    Args:
        root: The folder that contains `CUB_200_2011`.
        split: "train", "val" or "test".
        transform: How images are resized, augmented and normalised.
        partial: Accept an incomplete set. Missing images and classes without images are left out. The remaining classes
            keep their split.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.

    Raises:
        FileNotFoundError: A file or a folder is missing.
        ValueError: The lists contradict each other, the numbers of classes differ from the published numbers, or a
            setting is out of range.

    References:
        Wah, Branson, Welinder, Perona, Belongie, "The Caltech-UCSD Birds-200-2011 Dataset", CNS-TR-2011-001, 2011.
        Chen, Liu, Kira, Wang, Huang, "A Closer Look at Few-shot Classification", ICLR 2019.

    Examples:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     folder = Path(root) / "CUB_200_2011"
        ...     birds = ["001.Albatross", "002.Auklet", "003.Grebe", "004.Gull"]
        ...     for bird in birds:
        ...         (folder / "images" / bird).mkdir(parents=True)
        ...         Image.new("RGB", (20, 10)).save(folder / "images" / bird / "a.jpg")
        ...     numbered = list(enumerate(birds, start=1))
        ...     _ = (folder / "classes.txt").write_text("\n".join(f"{i} {bird}" for i, bird in numbered))
        ...     _ = (folder / "images.txt").write_text("\n".join(f"{i} {bird}/a.jpg" for i, bird in numbered))
        ...     _ = (folder / "image_class_labels.txt").write_text("\n".join(f"{i} {i}" for i, _ in numbered))
        ...     birds = CUB200(root, transform=PhotoTransform(image_size=8), partial=True)
        ...     images, labels = birds.batch([0, 1])
        >>> birds.class_names, birds.with_split("val").class_names
        (('001.Albatross', '003.Grebe'), ('002.Auklet',))
        >>> tuple(images.shape), labels.tolist()
        ((2, 3, 8, 8), [0, 1])
    """

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        transform: PhotoTransform = _TRANSFORM,
        partial: bool = False,
        memory_mb: float = 512,
    ) -> None:
        folder = Path(root) / FOLDER / "images"
        lists = _read_lists(folder.parent)
        listed = []
        for image, path in lists.paths.items():
            class_id = lists.classes[image]
            listed.append((cub_split(class_id), ImageItem(folder / path, lists.class_names[class_id])))
        fix = f"Unpack {ARCHIVE} into {root}"
        items = in_splits(listed, folder, "images.txt", fix, CLASSES, partial=partial)
        super().__init__(items, split, transform, memory_mb=memory_mb)


class _ImageLists(NamedTuple):
    """The contents of the three lists."""

    class_names: dict[int, str]
    paths: dict[int, str]
    classes: dict[int, int]


def _read_lists(folder: Path) -> _ImageLists:
    """Return the contents of the three lists; raise an error if the lists contradict each other."""
    fix = f"Unpack {ARCHIVE} into {folder.parent}."
    required(folder / "images", fix)
    class_names = _numbered_lines(required(folder / "classes.txt", fix))
    paths = _numbered_lines(required(folder / "images.txt", fix))
    labels = _numbered_lines(required(folder / "image_class_labels.txt", fix))
    if paths.keys() != labels.keys():
        raise InputError(
            f"images.txt has {len(paths):,} images and image_class_labels.txt has {len(labels):,}, but image "
            f"{min(paths.keys() ^ labels.keys())} is in only one of the lists. {fix}"
        )
    classes: dict[int, int] = {}
    for image, label in labels.items():
        if not label.isdecimal():
            raise InputError(f"The class of image {image} in image_class_labels.txt is {label!r}, not a number. {fix}")
        classes[image] = int(label)
    unknown = sorted(set(classes.values()) - class_names.keys())
    if unknown:
        raise InputError(f"image_class_labels.txt has the class {unknown[0]}, which is not in classes.txt. {fix}")
    return _ImageLists(class_names, paths, classes)


def _numbered_lines(file: Path) -> dict[int, str]:
    """Return the lines `number text` of a file, as number -> text."""
    texts: dict[int, str] = {}
    for line in read_lines(file):
        number, *text = re.split(r"[ \t]+", line.text, maxsplit=1)
        if not (number.isdecimal() and text):
            raise InputError(
                f"Line {line.number} of {file} is {line.text!r}, not a number and a name. Unpack {ARCHIVE} again."
            )
        if int(number) in texts:
            raise InputError(
                f"Line {line.number} of {file} repeats the number {number} of an earlier line. Unpack {ARCHIVE} again."
            )
        texts[int(number)] = composed_form(text[0])
    return texts
