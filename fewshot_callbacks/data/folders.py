"""Folders of images, one per class, as episodes to train on and whole splits to evaluate on."""

from pathlib import Path
from typing import cast

import torch
from PIL import Image

from fewshot_callbacks.data._episodic import Split
from fewshot_callbacks.data._images import (
    PAIRS_OF_SPLITS,
    ForEach,
    ImageSet,
    ImageTransform,
    PhotoDataModule,
    named,
    pixels,
    shared_classes,
)
from fewshot_callbacks.data._settings import with_settings


class ImageFolderSet(ImageSet):
    """Images of a folder `root/class/image.jpg`, read on access; labels are 0 ... C-1 in the order of class names.

    Args:
        root: The folder.
        transform: From a PIL image to a float tensor; all results of one shape. By default the pixels in [0, 1].

    Attributes:
        labels: (items,), int64.
        class_names: For each label, the name of its folder.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: There is no class in it, or a class without an image.

    Examples:
        >>> import tempfile
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
        from torchvision.datasets import ImageFolder  # noqa: PLC0415 - only folders need torchvision
        from torchvision.datasets.folder import IMG_EXTENSIONS  # noqa: PLC0415

        _check_classes(Path(root), IMG_EXTENSIONS)
        self._folder = ImageFolder(str(root))
        labels = torch.tensor(self._folder.targets, dtype=torch.int64)
        super().__init__(labels, self._folder.classes)
        self.batch_transform = ForEach(transform)

    def _file(self, index: int) -> str:
        return str(self._folder.samples[index][0])

    def _read(self, index: int) -> Image.Image:
        image: Image.Image = self._folder[index][0]
        return image


def _check_classes(root: Path, extensions: tuple[str, ...]) -> None:
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root}. It should hold one folder of images per class.")
    classes = sorted(entry for entry in root.iterdir() if entry.is_dir())
    if not classes:
        raise ValueError(f"{root} holds no class: no folder is in it. Put the images of each class in a folder there.")
    empty = [
        folder.name
        for folder in classes
        if not any(file.name.lower().endswith(extensions) for file in folder.rglob("*") if file.is_file())
    ]
    if empty:
        raise ValueError(
            f"{named(empty, 'class')} of {len(classes)} in {root} without an image. Add images "
            f"({', '.join(extensions)}) or remove the folder{'s' if len(empty) > 1 else ''}."
        )


@with_settings
class ImageFolderDataModule(PhotoDataModule):
    """Your own images: `root/train/class/*.jpg`, `root/val/...` and `root/test/...`, with different classes in each.

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

    @property
    def folders(self) -> dict[Split, str | None]:
        """The folder of each split, inside `root`; None for no such split."""
        return {"train": self.train_folder, "val": self.val_folder, "test": self.test_folder}

    def images(self, split: Split) -> ImageFolderSet:
        """The images of a split, as its loader transforms them.

        Args:
            split: "train", "val" or "test".

        Returns:
            The data set.

        Raises:
            FileNotFoundError: `root` or one of its folders is missing.
            ValueError: A class without images, classes that two splits share, or "val" where `val_folder` is None.
        """
        return cast(ImageFolderSet, super().images(split))

    def _listed(self) -> dict[Split, ImageSet]:
        wanted = {split: name for split, name in self.folders.items() if name is not None}
        if not self._root.is_dir():
            *others, last = map(repr, dict.fromkeys(wanted.values()))
            raise FileNotFoundError(
                f"There is no folder {self._root}. It should hold the folders {', '.join(others)} and {last}."
            )
        for split, name in wanted.items():
            if not (self._root / name).is_dir():
                instead = " or val_folder=None for no validation" if split == "val" else ""
                raise FileNotFoundError(
                    f"{self._root} holds no folder {name!r} for {split}. Make it, or pass {split}_folder=...{instead}."
                )
        sets: dict[Split, ImageSet] = {split: ImageFolderSet(self._root / name) for split, name in wanted.items()}
        for one, other in PAIRS_OF_SPLITS:
            if one not in sets or other not in sets or (one, wanted[one]) == ("val", wanted[other]):
                continue  # val_folder="test" is an explicit choice
            if shared := shared_classes(sets[one].class_names, sets[other].class_names):
                raise ValueError(
                    f"{wanted[one]!r} and {wanted[other]!r} share {shared}; few-shot evaluation needs classes that were "
                    "never seen. Keep each class in one split."
                )
        return sets

    def _why_no_validation(self) -> str | None:
        return "val_folder is None. Name its folder." if self.folders["val"] is None else None
