"""What the data modules of images share: sets of files, the transforms of photographs, what an incomplete set says."""

import copy
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fewshot_callbacks._image_files import read_image
from fewshot_callbacks.data._decoded_images import DecodedImages
from fewshot_callbacks.data._episodic import Batch, EpisodicDataModule, LabelledSplit, Split
from fewshot_callbacks.data._photo_transform import PhotoTransform
from fewshot_callbacks.data._settings import with_settings
from fewshot_callbacks.data.class_balanced import check_class_balance
from fewshot_callbacks.functional.episodes import check_classes_suffice

ImageTransform = Callable[..., Float[Tensor, "channels height width"]]
BatchTransform = Callable[[Sequence[Image.Image]], Float[Tensor, "images channels height width"]]

AnyImageSet = TypeVar("AnyImageSet", bound="ImageSet")  # the tests' type checker does not know Self here

PAIRS_OF_SPLITS: tuple[tuple[Split, Split], ...] = (("train", "val"), ("train", "test"), ("val", "test"))

_NAMED_AT_MOST = 5  # in an error message


@dataclass(frozen=True)
class ForEach:
    """The transform of a batch that transforms each image by itself.

    Attributes:
        transform: From a PIL image to a float tensor; all results of one shape.
    """

    transform: ImageTransform

    def __call__(self, images: Sequence[Image.Image]) -> Float[Tensor, "images channels height width"]:
        """Return the transformed images, stacked."""
        return torch.stack([self.transform(image) for image in images])


def pixels(image: Image.Image) -> Float[Tensor, "channels height width"]:
    """Return the pixels of an image, in [0, 1]."""
    from torchvision.transforms.functional import to_tensor  # noqa: PLC0415 - only images need torchvision

    values: Tensor = to_tensor(image)
    return values


class ImageSet(Dataset[tuple[Tensor, int]]):
    """Images that are read on access; subclasses say how (`_read`).

    Args:
        labels: (items,), int64, 0 ... C-1.
        class_names: For each label, its name.

    Attributes:
        batch_transform: From a list of PIL images to a float tensor (images, channels, height, width); by default the
            pixels as they are, in [0, 1], which asks for images of one size.
    """

    def __init__(self, labels: Int[Tensor, "items"], class_names: Sequence[str]) -> None:
        self.labels = labels
        self.class_names: tuple[str, ...] = tuple(class_names)
        self.batch_transform: BatchTransform = ForEach(pixels)
        self._decoded = DecodedImages(0, len(labels))

    @abstractmethod
    def _read(self, index: int) -> Image.Image:
        """An image, not transformed."""

    def _image(self, index: int) -> Image.Image:
        """An image, not transformed.

        Raises:
            ValueError: The file is missing, broken or no image; names it.
        """
        try:
            return self._read(index)
        except ValueError as error:
            file = self._file(index)
            raise ValueError(f"{file} cannot be read as an image: {error}. Replace the file or remove it.") from error

    @abstractmethod
    def _file(self, index: int) -> str:
        """The file of an image, for an error message."""

    def transformed(self: AnyImageSet, batch_transform: BatchTransform) -> AnyImageSet:
        """The same images, transformed in another way; those that are kept decoded are shared."""
        other = copy.copy(self)
        other.batch_transform = batch_transform
        return other

    def with_cache(self: AnyImageSet, megabytes: float) -> AnyImageSet:
        """The same images, kept decoded in memory as far as they fit."""
        other = copy.copy(self)
        other._decoded = DecodedImages(megabytes, len(self))
        return other

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "channels height width"], int]:
        images, labels = self.__getitems__([index])
        return images[0], int(labels)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Many items at once: images (items, channels, height, width) and labels (items,)."""
        images = [self._decoded.get(index, self._image) for index in indices]
        return self.batch_transform(images), self.labels[indices]


def labels_of(names: Sequence[str]) -> tuple[Int[Tensor, "items"], list[str]]:
    """Labels 0 ... C-1 in the order of the names, and the names of the classes."""
    class_names = sorted(set(names))
    label_of = {name: label for label, name in enumerate(class_names)}
    return torch.tensor([label_of[name] for name in names], dtype=torch.int64), class_names


class ImageFileSet(ImageSet):
    """The images of a list of files.

    Args:
        files: One for each item.
        names: The class of each item; labels are 0 ... C-1 in the order of these names.
        mode: What an image is converted to: "RGB" or "L".

    Attributes:
        files: The same, as strings.
        labels: (items,), int64.
        class_names: For each label, its name.
    """

    def __init__(self, files: Sequence[str | Path], names: Sequence[str], mode: str) -> None:
        super().__init__(*labels_of(names))
        self.files = tuple(map(str, files))
        self._mode = mode

    def _file(self, index: int) -> str:
        return self.files[index]

    def _read(self, index: int) -> Image.Image:
        return read_image(self.files[index]).convert(self._mode)


@with_settings
class ImageDataModule(EpisodicDataModule):
    """Base: subclasses list the splits (`_listed`) and transform the images (`_transform`).

    Args:
        root: The folder that holds the data set.
        image_size: Height and width of the images that the model sees, in pixels.
        cache_mb: Memory for the decoded images of a split, in MB, so that each file is decoded once instead of in each
            epoch. Images beyond it are decoded at each access. The workers of a loader share it; 0 keeps none.
    """

    root: str | Path = field(kw_only=False)
    image_size: int = 84
    cache_mb: float = 512

    def __post_init__(self) -> None:
        """Check the settings; `root` becomes a Path."""
        self.root = str(self.root)  # what a checkpoint holds: with a Path it would not load
        super().__post_init__()
        self.root = Path(self.root)
        if self.image_size < 1:
            raise ValueError(f"image_size is {self.image_size}. Use image_size >= 1.")
        if not 0 <= self.cache_mb < math.inf:
            raise ValueError(f"cache_mb is {self.cache_mb}. Use 0 to keep no decoded images, 512 for half a gigabyte.")
        self._sets: Mapping[Split, ImageSet] | None = None

    @property
    def _root(self) -> Path:
        return Path(self.root)

    @abstractmethod
    def _listed(self) -> Mapping[Split, ImageSet]:
        """All splits, checked."""

    @abstractmethod
    def _transform(self, *, augment: bool) -> BatchTransform:
        """From PIL images to what the model sees; `augment` for training images."""

    @property
    def num_classes(self) -> int:
        """Classes to train on; lists the images if that is not done yet."""
        return len(self.images("train").class_names)

    def setup(self, stage: str) -> None:
        """List and check the images. They are the same for each stage."""
        self.images("train")

    def images(self, split: Split) -> ImageSet:
        """The images of a split, as its loader transforms them.

        Args:
            split: "train", "val" or "test".

        Returns:
            The data set, with `labels` and `class_names`.

        Raises:
            FileNotFoundError: A file or a folder is missing.
            ValueError: What is there is not what the splits need.
        """
        why_not = self._why_no_validation() if split == "val" else None
        if why_not is not None:
            raise ValueError(f"There is no validation split: {why_not}")
        images = self._plain(split)
        return images.transformed(self._transform(augment=True)) if split == "train" else images

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]] | list[DataLoader[tuple[Tensor, int]]]:
        """As in the other data modules; where there is no validation an empty list, which Lightning skips."""
        return super().val_dataloader() if self._why_no_validation() is None else []

    def check_evaluation(self) -> None:
        """Check before training that the classes of validation and test suffice for the requested episodes.

        Raises:
            ValueError: A class is too small; names it, the split, and both numbers.
        """
        self.check_splits("val", "test")

    def check_training(self) -> None:
        """Check that the training classes suffice for the requested episodes or batches.

        Raises:
            ValueError: A class is too small; names it and both numbers.
        """
        self.check_splits("train")

    def check_splits(self, *splits: Split) -> None:
        """Check that the classes of each of these splits suffice for what is requested of it.

        Args:
            splits: "train", "val" or "test"; a validation split that is left out by choice is passed over.

        Raises:
            ValueError: Names each split with a class that is too small, the class, and the options that would fit.
        """
        listed = [split for split in splits if split != "val" or self._why_no_validation() is None]
        problems = [problem for split in listed if (problem := self._problem(split)) is not None]
        if problems:
            raise ValueError(" ".join(problems))

    def _problem(self, split: Split) -> str | None:
        """Say why the classes of a split do not suffice for its episodes or batches; None if they do."""
        images = self.images(split)
        prefix = "--data." if split == "train" else "--data.test_"
        batches = split == "train" and self.classes_per_batch is not None
        names = ("classes_per_batch", "items_per_class") if batches else ("ways", "shots", "queries")
        sizes: dict[str, int] = {name: getattr(self, f"{prefix.removeprefix('--data.')}{name}") for name in names}
        check = check_class_balance if batches else check_classes_suffice
        try:
            check(images.labels, **sizes, class_names=images.class_names, prefix=prefix)
        except ValueError as error:
            options = ", ".join(f"{prefix}{name} {size}" for name, size in sizes.items())
            what = "batches" if batches else "episodes"
            return f"The {split} classes do not suffice for the requested {what} ({options}): {error}"
        return None

    def _why_no_validation(self) -> str | None:
        """Where there is no validation split by choice: which, and how to get one."""
        return None

    def _plain(self, split: Split) -> ImageSet:
        if self._sets is None:
            plain = self._transform(augment=False)
            listed = self._listed().items()
            self._sets = {name: images.with_cache(self.cache_mb).transformed(plain) for name, images in listed}
        return self._sets[split]

    def _split(self, name: Split) -> LabelledSplit:
        return _labelled(self.images(name))

    def _plain_training_split(self) -> LabelledSplit:
        return _labelled(self._plain("train"))


def _labelled(images: ImageSet) -> LabelledSplit:
    return LabelledSplit(images, images.labels, images.class_names)


@with_settings
class PhotoDataModule(ImageDataModule):
    """Base for photographs.

    Training images get a random resized crop, a flip and a jitter; evaluation images are resized, and their centre is
    cut out.

    Args:
        resize: Shorter side of an evaluation image before its centre is cut out, or a pair (height, width) for an image
            of exactly that size, of any original shape; a shorter side of 8/7 of `image_size` by default.
        augment: Whether training images are augmented; if not, they are treated as evaluation images.
        min_area: Smallest part of the image's area in the random resized crop, in (0, 1].
        flip: Probability of the horizontal flip.
        jitter: Strength of the jitter of brightness, contrast and saturation; 0 for none.
        mean: Mean of each channel, which is subtracted.
        std: Standard deviation of each channel, by which it is divided.
    """

    in_channels: ClassVar[int] = 3

    shots: int = 5
    queries: int = 15
    test_shots: int = 5
    resize: int | tuple[int, int] | None = None
    augment: bool = True
    min_area: float = 0.35
    flip: float = 0.5
    jitter: float = 0.4
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # of ImageNet
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        """Check the settings; `resize` becomes a size."""
        super().__post_init__()
        resize = round(self.image_size * 8 / 7) if self.resize is None else self.resize
        if (resize if isinstance(resize, int) else min(resize)) < self.image_size:
            raise ValueError(
                f"resize is {resize}, smaller than image_size {self.image_size}, so the centre would be padded with "
                f"black. Use resize >= {self.image_size}."
            )
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area is {self.min_area}; it is a part of the image's area. Use 0 < min_area <= 1.")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip}; it is a probability. Use 0 <= flip <= 1.")
        if self.jitter < 0:
            raise ValueError(f"jitter is {self.jitter}. Use 0 for no colour jitter.")
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; images are divided by it. Use positive numbers.")
        self.resize = resize

    def _transform(self, *, augment: bool) -> BatchTransform:
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        if not (augment and self.augment):
            return PhotoTransform(transforms.Compose(self._fitted()), self.mean, self.std)
        crop = transforms.RandomResizedCrop(self.image_size, scale=(self.min_area, 1.0))
        to_size = transforms.Compose([*self._before_the_crop(), crop])
        return PhotoTransform(to_size, self.mean, self.std, self.flip, self.jitter)

    def _before_the_crop(self) -> list[Callable[[Any], Any]]:
        """What happens to a training image before its random resized crop."""
        return []

    def _fitted(self) -> list[Callable[[Any], Any]]:
        """How an evaluation image becomes a square of `image_size`."""
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        return [transforms.Resize(self.resize), transforms.CenterCrop(self.image_size)]


def named(names: Sequence[str], noun: str) -> str:
    """`1 class ('a')`, `7 classes ('a', 'b', 'c', 'd', 'e', ...)`."""
    some = ", ".join(map(repr, names[:_NAMED_AT_MOST])) + (", ..." if len(names) > _NAMED_AT_MOST else "")
    return f"{len(names)} {noun}{'es' if len(names) > 1 else ''} ({some})"


def counted(number: int, noun: str) -> str:
    """`1 box`, `2,000 boxes`, `3 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun[-1] in 'sx' else 's'}"


def required(path: Path, fix: str) -> Path:
    """The path of a file or folder that must be there.

    Raises:
        FileNotFoundError: It is not; the message ends in `fix`.
    """
    if path.exists():
        return path
    nearest = next(parent for parent in path.parents if parent.exists() or parent == parent.parent)
    raise FileNotFoundError(f"{nearest} holds no {path.relative_to(nearest).as_posix()!r}. {fix}")


def missing_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of the names, paths inside the folder, that are not there. Each folder is listed once."""
    listings: dict[str, set[str]] = {}
    missing = []
    for name in names:
        inside, _, file = name.rpartition("/")
        if inside not in listings:
            place = folder / inside
            listings[inside] = set(os.listdir(place)) if place.is_dir() else set()
        if file not in listings[inside]:
            missing.append(name)
    return missing


def check_no_file_is_missing(
    missing: Collection[str], names: Sequence[str], folder: Path, lists: str, fix: str
) -> None:
    """Refuse a folder that lacks some of the images that lists name.

    Raises:
        FileNotFoundError: One is missing; the message ends in `fix`.
    """
    if missing:
        first = next(name for name in names if name in missing)
        raise FileNotFoundError(
            f"{len(missing):,} of the {len(names):,} images of {lists} are not in {folder}; the first is {first!r}. {fix}"
        )


def shared_classes(one: Iterable[str], other: Iterable[str]) -> str | None:
    """Name the classes that two splits share, such as `1 class ('owl')`; None if there is none."""
    shared = sorted(set(one) & set(other))
    return named(shared, "class") if shared else None


def check_class_counts(found: Mapping[Split, int], published: Mapping[Split, int], where: Path, fix: str) -> None:
    """Refuse splits that have not the published numbers of classes.

    Raises:
        ValueError: They have not; the message ends in `fix`.
    """
    if dict(found) != dict(published):
        counts = "; ".join(f"{split} has {found[split]} of {number}" for split, number in published.items())
        raise ValueError(f"The classes in {where} are not the published ones: {counts}. {fix}")


def check_no_split_is_empty(found: Mapping[Split, int], where: Path, fix: str) -> None:
    """Refuse a split without a class, which a part of a set may have.

    Raises:
        ValueError: There is one; the message ends in `fix`.
    """
    empty = [split for split, classes in found.items() if classes == 0]
    if empty:
        raise ValueError(f"What is in {where} leaves {' and '.join(empty)} without a class. {fix}")
