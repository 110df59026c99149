"""mini-ImageNet: 100 ImageNet classes with 600 images each, in the split of Ravi and Larochelle (2017)."""

from collections.abc import Mapping
from pathlib import Path

from fewshot_callbacks.data.dataset import Split
from fewshot_callbacks.data.image_set import ImageItem, ImageSet, PhotoTransform, in_splits, refuse_shared, required
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.files.text import read_lines

LISTS = (
    "train.csv, val.csv and test.csv of Ravi and Larochelle (data/miniImagenet in "
    "https://github.com/twitter-research/meta-learning-lstm)"
)
IMAGES = "the images of ILSVRC-2012 (https://www.image-net.org) that the lists name, under the file names in the lists"
# The published numbers of classes: a copy with other numbers is incomplete.
CLASSES: Mapping[Split, int] = {"train": 64, "val": 16, "test": 20}

_TRANSFORM = PhotoTransform()


class MiniImageNet(ImageSet):
    r"""The mini-ImageNet data set in the split of Ravi and Larochelle: 64 training, 16 validation and 20 test classes.

    `root` contains the three published lists, and one folder with the images:

        train.csv, val.csv, test.csv           filename,label
                                               n0153282900000005.jpg,n01532829
        images/n0153282900000005.jpg

    The lists name 600 images per class: 38,400 for training, 9,600 for validation and 12,000 for test. The authors publish
    no archive of the images. Take the images from ImageNet, in any size, and rename them to the file names in the lists.

    Labels follow the order of the WordNet ids.

    Args:
        root: The folder that contains the lists and `images`.
        split: "train", "val" or "test".
        transform: How images are resized, augmented and normalised.
        partial: Accept an incomplete set. Missing images and classes without images are left out.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.

    Raises:
        FileNotFoundError: A list, the folder or an image is missing.
        ValueError: A list cannot be read, a class is in two splits, the numbers of classes differ from the published
            numbers, or a setting is out of range.

    References:
        Vinyals, Blundell, Lillicrap, Kavukcuoglu, Wierstra, "Matching Networks for One Shot Learning", NeurIPS 2016.
        Ravi, Larochelle, "Optimization as a Model for Few-Shot Learning", ICLR 2017: the lists.

    Examples:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     (Path(root) / "images").mkdir()
        ...     for split, label in (("train", "n01532829"), ("val", "n01855672"), ("test", "n01930112")):
        ...         Image.new("RGB", (20, 10)).save(Path(root) / "images" / f"{label}00000001.jpg")
        ...         _ = (Path(root) / f"{split}.csv").write_text(f"filename,label\n{label}00000001.jpg,{label}\n")
        ...     photographs = MiniImageNet(root, "val", transform=PhotoTransform(image_size=8), partial=True)
        ...     images, labels = photographs.batch([0])
        >>> photographs.class_names, tuple(images.shape), labels.tolist()
        (('n01855672',), (1, 3, 8, 8), [0])
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
        folder = Path(root) / "images"
        rows_of = {name: _rows(required(folder.parent / f"{name}.csv", f"Put {LISTS} there.")) for name in CLASSES}
        required(folder, f"Put {IMAGES} there.")
        classes = [(f"{name}.csv", {label for _, label in rows}) for name, rows in rows_of.items()]
        refuse_shared(classes, f". Use {LISTS}, unchanged.")
        listed = [(name, ImageItem(folder / file, label)) for name, rows in rows_of.items() for file, label in rows]
        fix = f"Put {LISTS} into {root}, and {IMAGES} into {folder}"
        items = in_splits(listed, folder, "the lists", fix, CLASSES, partial=partial)
        super().__init__(items, split, transform, memory_mb=memory_mb)


def _rows(file: Path) -> list[tuple[str, str]]:
    """Return the file name and the label of each image in a list."""
    lines = list(read_lines(file))
    header = lines[0].cells(",") if lines else []
    if header != ["filename", "label"]:
        raise InputError(f"The first line of {file} is {header}, not filename,label. Put {LISTS} there.")
    rows = []
    for line in lines[1:]:
        cells = line.cells(",")
        if len(cells) != 2 or not all(cells):
            raise InputError(
                f"Line {line.number} of {file} is {cells}, not a file name and a label. Put {LISTS} there."
            )
        name, label = cells
        rows.append((composed_form(name), composed_form(label)))
    return rows
