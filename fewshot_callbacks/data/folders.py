"""Folders of images, one per class, as episodes to train on and whole splits to evaluate on."""

from pathlib import Path
from typing import cast

import torch
from PIL import Image

from fewshot_callbacks.data._episodic import Split
from fewshot_callbacks.data._images import IMAGENET_MEAN, IMAGENET_STD, ImageSet, PhotoDataModule, Transform, named


class ImageFolderSet(ImageSet):
    """Images of a folder `root/class/image.jpg`, read when asked for; labels are 0 ... C-1 in the order of class names.

    Args:
        root: The folder.
        transform: From a PIL image to a float tensor; all results of one shape.

    Attributes:
        labels: (items,), int64.
        class_names: For each label, the name of its folder.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: There is no class in it, or a class without an image.

    Example:
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

    def __init__(self, root: str | Path, transform: Transform) -> None:
        from torchvision.datasets import ImageFolder  # noqa: PLC0415 - only folders need torchvision
        from torchvision.datasets.folder import IMG_EXTENSIONS  # noqa: PLC0415

        _check_classes(Path(root), IMG_EXTENSIONS)
        self._folder = ImageFolder(str(root))
        super().__init__(torch.tensor(self._folder.targets, dtype=torch.int64), self._folder.classes, transform)

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


class ImageFolderDataModule(PhotoDataModule):
    """Your own images: `root/train/class/*.jpg`, `root/val/...` and `root/test/...`, with different classes in each.

    Batches are tuples (images, labels): float images (images, 3, image_size, image_size), normalised; int64 labels
    0 ... C-1 of the split. A training batch is one episode, class by class, each class's support first.

    Validation: the folder `val_folder` must exist. Where there is none, say so with `val_folder=None`: then there is no
    validation; Lightning skips it, and says that the length is zero. Test images are never used to validate unless you
    write `val_folder="test"`, and a checkpoint chosen on them is chosen on the test.

    Training images get a random resized crop, a horizontal flip and a colour jitter, drawn from PyTorch's random state
    in the process that loads them (`seed_everything(seed, workers=True)` makes a run repeatable). Evaluation images are
    resized so that the shorter side is `resize`, or to the pair `resize`, and the centre is cut out.

    Args:
        root: The folder that holds the splits.
        train_folder: The folder of the training classes, inside `root`.
        val_folder: The folder of the validation classes; None for no validation.
        test_folder: The folder of the test classes.
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
        ValueError: A setting is out of range. Folders are checked in `setup`: a missing one is a FileNotFoundError; a
            class without images, or one that two splits share, a ValueError.

    Example:
        >>> data = ImageFolderDataModule("birds", image_size=84, val_folder=None)
        >>> data.resize
        96
        >>> data.setup("fit")
        Traceback (most recent call last):
        FileNotFoundError: There is no folder birds. It should hold the folders 'train' and 'test'.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        train_folder: str = "train",
        val_folder: str | None = "val",
        test_folder: str = "test",
        image_size: int = 84,
        resize: int | tuple[int, int] | None = None,
        augment: bool = True,
        min_area: float = 0.35,
        flip: float = 0.5,
        jitter: float = 0.4,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        ways: int = 20,
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
        self.folders: dict[Split, str | None] = {"train": train_folder, "val": val_folder, "test": test_folder}

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
        if not self.root.is_dir():
            *others, last = map(repr, dict.fromkeys(wanted.values()))
            raise FileNotFoundError(
                f"There is no folder {self.root}. It should hold the folders {', '.join(others)} and {last}."
            )
        for split, name in wanted.items():
            if not (self.root / name).is_dir():
                instead = " or val_folder=None to go without validation" if split == "val" else ""
                raise FileNotFoundError(
                    f"{self.root} holds no folder {name!r} for {split}. Make it, or pass {split}_folder=...{instead}."
                )
        sets: dict[Split, ImageSet] = {
            split: ImageFolderSet(self.root / name, self._transform(augment=False)) for split, name in wanted.items()
        }
        pairs: tuple[tuple[Split, Split], ...] = (("train", "val"), ("train", "test"), ("val", "test"))
        for one, other in pairs:
            if one not in sets or other not in sets or (one, wanted[one]) == ("val", wanted[other]):
                continue  # val_folder="test" is a choice, made in so many words
            shared = sorted(set(sets[one].class_names) & set(sets[other].class_names))
            if shared:
                raise ValueError(
                    f"{wanted[one]!r} and {wanted[other]!r} share {named(shared, 'class')}; few-shot evaluation needs "
                    f"classes that were never seen. Keep each class in one split."
                )
        return sets

    def _why_no_validation(self) -> str | None:
        return "val_folder is None. Name its folder." if self.folders["val"] is None else None
