"""mini-ImageNet: 100 classes of ImageNet with 600 images each, in the split of Ravi and Larochelle (2017)."""

import csv
from collections.abc import Mapping
from pathlib import Path

from fewshot_callbacks.data._episodic import Split
from fewshot_callbacks.data._images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageFileSet,
    PhotoDataModule,
    check_class_counts,
    check_no_split_is_empty,
    missing_files,
    named,
    required,
)

LISTS = (
    "train.csv, val.csv and test.csv of Ravi and Larochelle (data/miniImagenet in "
    "https://github.com/twitter-research/meta-learning-lstm)"
)
IMAGES = "the images of ILSVRC-2012 (https://www.image-net.org) that the lists name, under the names of the lists"
CLASSES: Mapping[Split, int] = {"train": 64, "val": 16, "test": 20}


class MiniImageNetDataModule(PhotoDataModule):
    r"""mini-ImageNet in the lists of Ravi and Larochelle: 64 training, 16 validation and 20 test classes.

    `root` holds the three lists, as they are published, and the images in one folder:

        train.csv, val.csv, test.csv           filename,label
                                               n0153282900000005.jpg,n01532829
        images/n0153282900000005.jpg

    The lists name 600 images of each class: 38,400, 9,600 and 12,000. The images have no archive of their authors; they are
    ImageNet's, under the names that the lists give them, of any size.

    Batches are tuples (images, labels): float images (images, 3, image_size, image_size), normalised; int64 labels
    0 ... C-1 of the split, in the order of the WordNet ids. A training batch is one episode, class by class, each
    class's support first. Training images are augmented and evaluation images cut out as in `ImageFolderDataModule`.

    Args:
        root: The folder that holds the lists and `images`.
        partial: Use what is there of an incomplete set: missing images are left out, and so are classes without one.
        image_size: Height and width of the images that the model sees, in pixels.
        resize: Shorter side of an evaluation image before its centre is cut out, or a pair (height, width) for an image
            of just that size, whatever its shape was; a shorter side of 8/7 of `image_size` without one.
        augment: Whether training images are augmented; if not, they are treated as evaluation images.
        min_area: Of the random resized crop: the smallest part of the image's area, in (0, 1].
        flip: Probability of the horizontal flip.
        jitter: Strength of the jitter of brightness, contrast and saturation; 0 for none.
        mean: Of each channel, subtracted.
        std: Of each channel, divided by.
        ways: Classes in a training episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes: Training episodes in an epoch, over all processes.
        episodes_per_batch: Training episodes in a batch; ProtoNet takes the same number.
        classes_per_batch: Train on batches of so many classes (`ClassBalancedBatchSampler`) instead of episodes, of
            which `episodes` then counts those of an epoch.
        items_per_class: Images of each class in such a batch.
        batch_size: Images in an evaluation batch.
        seed: Of the training episodes.
        num_workers: Worker processes of each loader.
        episodic_evaluation: Validate and test on fixed episodes instead of on each image once. A model that evaluates
            with batch statistics needs it.
        test_ways: Classes in an evaluation episode.
        test_shots: Support images of each class in an evaluation episode.
        test_queries: Query images of each class in an evaluation episode.
        test_episodes: Length of the fixed lists.
        test_seed: Of the fixed lists.
        val_episodes: Length of the list of the validation, where it is not `test_episodes`.

    Raises:
        ValueError: A setting is out of range. The files are checked in `setup`: what is missing is a
            FileNotFoundError; a list that cannot be read, a class in two splits, or other numbers of classes, a
            ValueError.

    References:
        Vinyals, Blundell, Lillicrap, Kavukcuoglu, Wierstra, "Matching Networks for One Shot Learning", NeurIPS 2016.
        Ravi, Larochelle, "Optimization as a Model for Few-Shot Learning", ICLR 2017: the lists.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     (Path(root) / "images").mkdir()
        ...     for split, label in (("train", "n01532829"), ("val", "n01855672"), ("test", "n01930112")):
        ...         Image.new("RGB", (20, 10)).save(Path(root) / "images" / f"{label}00000001.jpg")
        ...         _ = (Path(root) / f"{split}.csv").write_text(f"filename,label\n{label}00000001.jpg,{label}\n")
        ...     data = MiniImageNetDataModule(root, image_size=8, partial=True)
        ...     images, labels = data.images("val").__getitems__([0])
        >>> data.images("val").class_names, tuple(images.shape), labels.tolist()
        (('n01855672',), (1, 3, 8, 8), [0])
    """

    def __init__(
        self,
        root: str | Path,
        *,
        partial: bool = False,
        image_size: int = 84,
        resize: int | tuple[int, int] | None = None,
        augment: bool = True,
        min_area: float = 0.35,
        flip: float = 0.5,
        jitter: float = 0.4,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        ways: int = 5,
        shots: int = 5,
        queries: int = 15,
        episodes: int = 100,
        episodes_per_batch: int = 1,
        classes_per_batch: int | None = None,
        items_per_class: int = 4,
        batch_size: int = 128,
        seed: int = 0,
        num_workers: int = 0,
        episodic_evaluation: bool = False,
        test_ways: int = 5,
        test_shots: int = 5,
        test_queries: int = 15,
        test_episodes: int = 600,
        test_seed: int = 0,
        val_episodes: int | None = None,
    ) -> None:
        super().__init__(
            image_size=image_size,
            resize=resize,
            augment=augment,
            min_area=min_area,
            flip=flip,
            jitter=jitter,
            mean=mean,
            std=std,
            ways=ways,
            shots=shots,
            queries=queries,
            episodes=episodes,
            episodes_per_batch=episodes_per_batch,
            classes_per_batch=classes_per_batch,
            items_per_class=items_per_class,
            batch_size=batch_size,
            seed=seed,
            num_workers=num_workers,
            episodic_evaluation=episodic_evaluation,
            test_ways=test_ways,
            test_shots=test_shots,
            test_queries=test_queries,
            test_episodes=test_episodes,
            test_seed=test_seed,
            val_episodes=val_episodes,
        )
        root = str(root)  # what a checkpoint holds: with a Path it would not load
        self.save_hyperparameters()
        self.root = Path(root)
        self.partial = partial

    def _listed(self) -> dict[Split, ImageFileSet]:
        folder = self.root / "images"
        or_partial = "Complete them, or pass partial=True to use what is there."
        lists = {split: _rows(required(self.root / f"{split}.csv", f"Put {LISTS} there.")) for split in CLASSES}
        required(folder, f"Put {IMAGES} there.")
        listed = [file for rows in lists.values() for file, _ in rows]
        missing = set(missing_files(folder, listed))
        if missing and not self.partial:
            first = next(file for file in listed if file in missing)
            raise FileNotFoundError(
                f"{len(missing):,} of the {len(listed):,} images of the lists are not in {folder}; the first is "
                f"{first!r}. It should hold {IMAGES}. {or_partial}"
            )
        kept = {split: [row for row in rows if row[0] not in missing] for split, rows in lists.items()}
        names = {split: [label for _, label in rows] for split, rows in kept.items()}
        pairs: tuple[tuple[Split, Split], ...] = (("train", "val"), ("train", "test"), ("val", "test"))
        for one, other in pairs:
            shared = sorted(set(names[one]) & set(names[other]))
            if shared:
                raise ValueError(f"{one}.csv and {other}.csv share {named(shared, 'class')}. Use {LISTS}, unchanged.")
        counts = {split: len(set(labels)) for split, labels in names.items()}
        if not self.partial:
            check_class_counts(counts, CLASSES, self.root, f"The lists are {LISTS}. {or_partial}")
        check_no_split_is_empty(counts, self.root, f"It should hold {IMAGES}.")
        plain = self._transform(augment=False)
        return {
            split: ImageFileSet([folder / file for file, _ in rows], names[split], plain, "RGB")
            for split, rows in kept.items()
        }


def _rows(file: Path) -> list[tuple[str, str]]:
    """File name and label of each image of a list."""
    with file.open(newline="", encoding="utf-8") as text:
        header, *rows = list(csv.reader(text)) or [[]]
    if header != ["filename", "label"]:
        raise ValueError(f"{file} begins with {header}, not with filename,label. Put {LISTS} there.")
    for position, row in enumerate(rows, start=2):
        if len(row) != 2 or not all(row):
            raise ValueError(f"Line {position} of {file} is {row}, not a file name and a label. Put {LISTS} there.")
    return [(name, label) for name, label in rows]
