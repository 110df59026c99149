"""Folders of images, one per class, as episodes to train on and whole splits to evaluate on."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from fewshot_callbacks._image_files import ENDINGS, FoundFiles, images_below
from fewshot_callbacks.data._episodic import Split, seeded_draw
from fewshot_callbacks.data._images import (
    PAIRS_OF_SPLITS,
    ForEach,
    ImageFileSet,
    ImageTransform,
    PhotoDataModule,
    counted,
    named,
    pixels,
    shared_classes,
)
from fewshot_callbacks.data._settings import with_settings


class ImageFolderSet(ImageFileSet):
    """Images of a folder `root/class/image.jpg`, read on access; labels are 0 ... C-1 in the order of class names.

    Args:
        root: The folder.
        transform: From a PIL image to a float tensor; all results of one shape. By default the pixels in [0, 1].

    Attributes:
        files: The image of each item.
        labels: (items,), int64.
        class_names: For each label, the name of its folder.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: There is no class in it, or a class without an image, or a link leads to a folder that is read already.

    Examples:
        >>> import tempfile, torch
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("heron", "owl"):
        ...         (Path(root) / name).mkdir()
        ...         Image.new("RGB", (4, 4)).save(Path(root) / name / "1.png")
        ...     folder = ImageFolderSet(root, lambda image: torch.zeros(3, image.height, image.width))
        ...     images, labels = folder.__getitems__([1, 0])
        >>> folder.class_names, tuple(images.shape), labels.tolist()
        (('heron', 'owl'), (2, 3, 4, 4), [1, 0])
    """

    def __init__(self, root: str | Path, transform: ImageTransform = pixels) -> None:
        super().__init__(*_listed_classes(Path(root)), "RGB")
        self.batch_transform = ForEach(transform)


def _listed_classes(root: Path) -> tuple[list[Path], list[str]]:
    """List the images of a folder and the class of each; says what else is there."""
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root}. It should hold one folder of images per class.")
    classes = _folders_in(root)
    if not classes:
        raise ValueError(f"{root} holds no class: no folder is in it. Put the images of each class in a folder there.")
    found = images_below([root / name for name in classes], root)
    skipped = sum((part.skipped for part in found), Counter[str]())
    empty = [name for name, part in zip(classes, found, strict=True) if not part.files]
    if empty:
        raise ValueError(
            f"{named(empty, 'class')} of {len(classes)} in {root} without an image. Add images "
            f"({', '.join(ENDINGS)}) or remove the folder{'s' if len(empty) > 1 else ''}."
        )
    if skipped:
        rank_zero_info(f"{root}: {FoundFiles([], skipped).what_was_skipped()}. Images end in {', '.join(ENDINGS)}.")
    files = [file for part in found for file in part.files]
    return files, [name for name, part in zip(classes, found, strict=True) for _ in part.files]


def _folders_in(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


@with_settings
class ImageFolderDataModule(PhotoDataModule):
    """Your own images: `root/train/class/*.jpg`, `root/val/...` and `root/test/...`, with different classes in each.

    Or `root/class/*.jpg` alone: with `val_share` and `test_share` the classes are split by a seeded draw.

    Batches are tuples (images, labels): float images (images, 3, image_size, image_size), normalised; int64 labels
    0 ... C-1 of the split. A training batch is one episode, class by class, each class's support first.

    Validation: the folder `val_folder` must exist. If there is none, pass `val_folder=None`: Lightning then skips
    validation, with a message that its length is zero. Test images are never used for validation unless you pass
    `val_folder="test"`; a checkpoint chosen on them is chosen on the test set.

    Training images get a random resized crop, a horizontal flip and a colour jitter, drawn from PyTorch's random state
    in the process that loads them (`seed_everything(seed, workers=True)` makes a run repeatable). Evaluation images are
    resized so that the shorter side is `resize`, or to the pair `resize`, and the centre is cut out.

    Args:
        root: The folder that holds the splits.
        train_folder: The folder of the training classes, inside `root`.
        val_folder: The folder of the validation classes; None for no validation.
        test_folder: The folder of the test classes.
        val_share: Where `root` holds the classes themselves: the share of them to validate on; 0 for no validation.
        test_share: The share of the classes to test on; 0 where the three folders hold the splits.
        split_seed: Seed of that split. The classes are sorted by the SHA-256 of the seed and their names: the first are
            for the test, the next for the validation.

    Raises:
        ValueError: A setting is out of range. Folders are checked in `setup`: a missing one raises a FileNotFoundError;
            a class without images, or one that two splits share, raises a ValueError.

    Examples:
        >>> data = ImageFolderDataModule("birds", image_size=84, val_folder=None)
        >>> data.resize
        96
        >>> data.setup("fit")
        Traceback (most recent call last):
        FileNotFoundError: There is no folder birds. It should hold the folders 'train' and 'test'.
    """

    train_folder: str = "train"
    val_folder: str | None = "val"
    test_folder: str = "test"
    val_share: float = 0.0
    test_share: float = 0.0
    split_seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if (self.val_share or self.test_share) and not (
            self.val_share >= 0 and self.test_share > 0 and self.val_share + self.test_share < 1
        ):
            raise ValueError(
                f"val_share is {self.val_share} and test_share {self.test_share}; the rest is trained on. Use val_share "
                ">= 0 and test_share > 0 with a sum below 1."
            )

    @property
    def folders(self) -> dict[Split, str | None]:
        """The folder of each split, inside `root`; None for no such split."""
        return {"train": self.train_folder, "val": self.val_folder, "test": self.test_folder}

    def _listed(self) -> Mapping[Split, ImageFileSet]:
        return self._drawn_splits() if self.test_share else self._split_folders()

    def _split_folders(self) -> dict[Split, ImageFolderSet]:
        wanted = {split: name for split, name in self.folders.items() if name is not None}
        if not self._root.is_dir():
            *others, last = map(repr, dict.fromkeys(wanted.values()))
            raise FileNotFoundError(
                f"There is no folder {self._root}. It should hold the folders {', '.join(others)} and {last}."
            )
        for split, name in wanted.items():
            if not (self._root / name).is_dir():
                instead = " or val_folder=None for no validation" if split == "val" else ""
                classes = set(_folders_in(self._root)) - set(wanted.values())
                shares = (
                    f" To split the {counted(len(classes), 'folder')} in it as classes, pass val_share=0.2 and "
                    "test_share=0.2 (--data.val_share 0.2 --data.test_share 0.2)."
                )
                raise FileNotFoundError(
                    f"{self._root} holds no folder {name!r} for {split}. Make it, or pass {split}_folder=...{instead}."
                    f"{shares if len(classes) >= len(wanted) else ''}"
                )
        sets: dict[Split, ImageFolderSet] = {split: ImageFolderSet(self._root / name) for split, name in wanted.items()}
        for one, other in PAIRS_OF_SPLITS:
            if one not in sets or other not in sets or (one, wanted[one]) == ("val", wanted[other]):
                continue  # val_folder="test" is an explicit choice
            if shared := shared_classes(sets[one].class_names, sets[other].class_names):
                raise ValueError(
                    f"{wanted[one]!r} and {wanted[other]!r} share {shared}; few-shot evaluation needs classes that were "
                    "never seen. Keep each class in one split."
                )
        return sets

    def _drawn_splits(self) -> dict[Split, ImageFileSet]:
        """Split the classes by their shares; a split that was asked for has at least one."""
        files, names = _listed_classes(self._root)
        classes = sorted(set(names), key=lambda name: seeded_draw(name, self.split_seed))
        if {self.train_folder, self.test_folder} <= set(classes):
            raise ValueError(
                f"{self._root} holds the folders {self.train_folder!r} and {self.test_folder!r}: it is split already. "
                "Leave out val_share and test_share."
            )
        test = max(1, round(self.test_share * len(classes)))
        val = max(1, round(self.val_share * len(classes))) if self.val_share else 0
        if test + val >= len(classes):
            raise ValueError(
                f"{self._root} holds {counted(len(classes), 'class')}; val_share {self.val_share:g} and test_share "
                f"{self.test_share:g} leave none to train on. Use smaller shares, or add classes."
            )
        members: dict[Split, list[str]] = {"train": classes[test + val :], "test": classes[:test]}
        if val:
            members["val"] = classes[test : test + val]
        split_of = {name: split for split, inside in members.items() for name in inside}
        rank_zero_info(
            f"{self._root}: {counted(len(classes), 'class')}, of which {len(members['train']):,} to train, {val:,} to "
            f"validate and {test:,} to test on (split_seed {self.split_seed})."
        )
        items = list(zip(files, names, strict=True))
        return {
            split: ImageFileSet(
                [file for file, name in items if split_of[name] == split],
                [name for name in names if split_of[name] == split],
                "RGB",
            )
            for split in members
        }

    def _why_no_validation(self) -> str | None:
        if self.test_share:
            return None if self.val_share else "val_share is 0. Use a positive share."
        return "val_folder is None. Name its folder." if self.val_folder is None else None
