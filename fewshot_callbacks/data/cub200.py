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
# Published numbers of classes, which reveal an incomplete copy.
CLASSES: Mapping[Split, int] = {"train": 100, "val": 50, "test": 50}

_TRANSFORM = PhotoTransform()
_SPLIT_OF_REMAINDER: tuple[Split, Split, Split, Split] = ("train", "val", "train", "test")


def cub_split(class_id: int) -> Split:
    """Find the split of a class: with i = class_id - 1, even i is train, i mod 4 = 1 is val, and i mod 4 = 3 is test.

    Args:
        class_id: Number of the class in `classes.txt`, from 1.

    Returns:
        "train", "val" or "test".

    Raises:
        ValueError: The number is not positive.

    References:
        Chen, Liu, Kira, Wang, Huang, "A Closer Look at Few-shot Classification", ICLR 2019.

    Examples:
        >>> [cub_split(class_id) for class_id in (1, 2, 3, 4)]
        ['train', 'val', 'train', 'test']
    """
    if class_id < 1:
        raise InputError(f"class_id is {class_id}; the classes of CUB-200-2011 are counted from 1.")
    return _SPLIT_OF_REMAINDER[(class_id - 1) % 4]


class CUB200(ImageSet):
    r"""CUB-200-2011 as it is published, with 100 training, 50 validation and 50 test classes (`cub_split`).

    `root` holds the folder that the archive unpacks to. Images and classes are read from its lists:

        CUB_200_2011/classes.txt               1 001.Black_footed_Albatross
        CUB_200_2011/images.txt                1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
        CUB_200_2011/image_class_labels.txt    1 1
        CUB_200_2011/images/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg

    All 11,788 images are used, whole: neither the bounding boxes nor `train_test_split.txt`, which cuts each class in
    two, are read. Labels are in the order of the class numbers.

    Args:
        root: The folder that holds `CUB_200_2011`.
        split: "train", "val" or "test".
        transform: What the model sees of an image.
        partial: Accept an incomplete set: missing images are left out, and so are classes without an image.
            The split of the others stays the same.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.

    Raises:
        FileNotFoundError: A file or a folder is missing.
        ValueError: The lists do not fit together, or have other numbers of classes; or a setting is out of range.

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
    """The lists of the set.

    Attributes:
        class_names: Class number -> the name of the class.
        paths: Image number -> the path of the image.
        classes: Image number -> the number of its class.
    """

    class_names: dict[int, str]
    paths: dict[int, str]
    classes: dict[int, int]


def _read_lists(folder: Path) -> _ImageLists:
    """Read the three lists, and refuse lists that do not fit together."""
    fix = f"Unpack {ARCHIVE} into {folder.parent}."
    required(folder / "images", fix)
    class_names = _numbered_lines(required(folder / "classes.txt", fix))
    paths = _numbered_lines(required(folder / "images.txt", fix))
    labels = _numbered_lines(required(folder / "image_class_labels.txt", fix))
    if paths.keys() != labels.keys():
        raise InputError(
            f"images.txt has {len(paths):,} images and image_class_labels.txt {len(labels):,}, not the same ones; "
            f"image {min(paths.keys() ^ labels.keys())} is in only one of them. {fix}"
        )
    classes: dict[int, int] = {}
    for image, label in labels.items():
        if not label.isdecimal():
            raise InputError(f"image_class_labels.txt gives image {image} the class {label!r}, no number. {fix}")
        classes[image] = int(label)
    unknown = sorted(set(classes.values()) - class_names.keys())
    if unknown:
        raise InputError(f"image_class_labels.txt has the class {unknown[0]}, which classes.txt does not name. {fix}")
    return _ImageLists(class_names, paths, classes)


def _numbered_lines(file: Path) -> dict[int, str]:
    """Read the lines `number text` of a file: number -> text."""
    texts: dict[int, str] = {}
    for line in read_lines(file):
        number, *text = re.split(r"[ \t]+", line.text, maxsplit=1)
        if not (number.isdecimal() and text):
            raise InputError(
                f"Line {line.number} of {file} is {line.text!r}, not a number and a name. Unpack {ARCHIVE} again."
            )
        if int(number) in texts:
            raise InputError(f"Line {line.number} of {file} has the number {number} again. Unpack {ARCHIVE} again.")
        texts[int(number)] = composed_form(text[0])
    return texts
