"""Data sets whose images are read one by one, what a model sees of them, and checks that a set is complete.

A reader of a further data set is a subclass of `ImageSet` that lists the images of each split: see
`docs/project/add_a_data_set.md`. Where an image is not a file, but a part of an archive or a table, the subclass also
defines `ImageSet.read_item`.
"""

import copy
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from fewshot_callbacks.data.dataset import Batch, FewShotDataset, Split
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.images import parse_colour, read_image
from fewshot_callbacks.files.names import paths_on_disk
from fewshot_callbacks.system.words import counted
from fewshot_callbacks.trainer.lightning import rank_zero_info


@dataclass(frozen=True)
class PhotoTransform:
    """From a list of RGB images to one normalised batch.

    Evaluation images are resized, and their centre is cut out. Augmented ones get a random resized crop, a flip and a
    jitter, drawn from PyTorch's random state in the process that loads them (`seed_everything(seed, workers=True)` makes a
    run repeatable). Flips and colours are changed in the whole batch at once, since many small tensors take longer than
    one large one.

    Args:
        image_size: Height and width of the images that the model sees, in pixels.
        resize: Shorter side of an evaluation image before its centre is cut out, or a pair (height, width) for an image
            of exactly that size, of any original shape; a shorter side of 8/7 of `image_size` by default.
        min_area: Smallest part of the image's area in the random resized crop, in (0, 1].
        flip: Probability of the horizontal flip. It suits photographs. Logos, words and signs are others when they are
            mirrored: pass 0 for these, as `ImageFolder` and `LogoDet3K` do by default.
        jitter: Strength of the jitter of brightness, contrast and saturation; 0 for none.
        mean: Mean of each channel, which is subtracted; by default that of ImageNet.
        std: Standard deviation of each channel, by which it is divided.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> pictures = [Image.new("RGB", (20, 10)), Image.new("RGB", (30, 40))]
        >>> PhotoTransform(image_size=8, mean=(0, 0, 0), std=(1, 1, 1))(pictures).shape
        torch.Size([2, 3, 8, 8])
        >>> PhotoTransform(flip=2.0)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: flip is 2.0; it is a probability. Use 0 <= flip <= 1.
    """

    image_size: int = 84
    resize: int | tuple[int, int] | None = None
    min_area: float = 0.35
    flip: float = 0.5
    jitter: float = 0.4
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        check_image_size(self.image_size)
        resize = self._resized()
        shorter_side = resize if isinstance(resize, int) else min(resize)
        if shorter_side < self.image_size:
            raise InputError(
                f"resize is {resize}, smaller than image_size {self.image_size}, so the centre would be padded with "
                f"black. Use resize >= {self.image_size}."
            )
        if not 0 < self.min_area <= 1:
            raise InputError(f"min_area is {self.min_area}; it is a part of the image's area. Use 0 < min_area <= 1.")
        if not 0 <= self.flip <= 1:
            raise InputError(f"flip is {self.flip}; it is a probability. Use 0 <= flip <= 1.")
        if self.jitter < 0:
            raise InputError(f"jitter is {self.jitter}. Use 0 for no colour jitter.")
        if min(self.std) <= 0:
            raise InputError(f"std is {self.std}; images are divided by it. Use positive numbers.")

    def __call__(
        self, pictures: Sequence[Image.Image], augment: bool = False
    ) -> Float[Tensor, "images 3 height width"]:
        """Return pictures as one batch.

        Args:
            pictures: PIL images, at least one.
            augment: Whether they are training images.
        """
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        to_size = transforms.Compose(self.steps(augment))
        pixels = [np.asarray(to_size(picture)) for picture in pictures]  # (height, width, 3), bytes
        if augment and self.flip:
            is_flipped = (torch.rand(len(pixels)) < self.flip).tolist()
            pixels = [image[:, ::-1] if flip else image for image, flip in zip(pixels, is_flipped, strict=True)]
        # Bytes take a quarter of the memory to stack, and a single pass converts and reorders them.
        stacked = torch.from_numpy(np.stack(pixels)).movedim(3, 1)
        batch = stacked.to(torch.float32, memory_format=torch.contiguous_format)
        batch.div_(255)
        if augment and self.jitter:
            jitter_colours(batch, self.jitter)
        mean = torch.tensor(self.mean).reshape(3, 1, 1)
        std = torch.tensor(self.std).reshape(3, 1, 1)
        return batch.sub_(mean).div_(std)

    def _resized(self) -> int | tuple[int, int]:
        # 8/7 is 256 to 224, as images of ImageNet are usually resized and cropped.
        return round(self.image_size * 8 / 7) if self.resize is None else self.resize

    def steps(self, augment: bool) -> list[Any]:
        """List the transforms that bring one image to `image_size`."""
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        if augment:
            return [transforms.RandomResizedCrop(self.image_size, scale=(self.min_area, 1.0))]
        return [transforms.Resize(self._resized()), transforms.CenterCrop(self.image_size)]


def check_image_size(image_size: int) -> None:
    """Refuse images without a pixel."""
    if image_size < 1:
        raise InputError(f"image_size is {image_size}. Use image_size >= 1.")


def jitter_colours(images: Float[Tensor, "images 3 height width"], strength: float) -> None:
    """Change the brightness, the contrast and the saturation of each image at random, in this order and in place.

    Each is scaled by its own factor, uniform in 1 ± strength and at least 0: brightness towards black, contrast
    towards the mean grey of the image, saturation towards the grey of each pixel. Values are cut to [0, 1] after each,
    as Pillow's `ImageEnhance` does.

    Args:
        images: The images, with values in [0, 1].
        strength: The largest change of a factor; 0 changes nothing.
    """
    low = max(0.0, 1 - strength)  # a negative factor would invert the image
    high = 1 + strength
    brightness, contrast, saturation = low + (high - low) * torch.rand(3, len(images), 1, 1, 1)
    images.mul_(brightness).clamp_(max=1)
    # All steps work in place: a batch of 120 images of 84 x 84 takes 10 MB, and each copy as many
    mean_grey = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images.sub_(mean_grey).mul_(contrast).add_(mean_grey).clamp_(0, 1)
    grey = _grey(images)
    images.sub_(grey).mul_(saturation).add_(grey).clamp_(0, 1)


def _grey(images: Float[Tensor, "images 3 height width"]) -> Float[Tensor, "images 1 height width"]:
    """Return the luma of ITU-R BT.601, which is Pillow's grey."""
    red, green, blue = images.split(1, dim=1)
    grey: Tensor = 0.299 * red
    return grey.add_(green, alpha=0.587).add_(blue, alpha=0.114)


Transform = Callable[[Sequence[Image.Image], bool], Float[Tensor, "images channels height width"]]
AnyImageSet = TypeVar("AnyImageSet", bound="ImageSet")  # the tests' type checker does not know Self here

# Largest number of classes that an error message names.
_MAX_NAMED = 5


class ImageItem(NamedTuple):
    """An image of a data set.

    Attributes:
        file: Its file.
        class_name: The name of its class.
        box: The part of it that is served: left, top, right and bottom, in pixels of the upright image; None for
            the whole image.
    """

    file: str | Path
    class_name: str
    box: tuple[int, int, int, int] | None = None


class DecodedImages:
    """A cache of images by their number. Once it is full, further images are read at each access.

    Args:
        memory_mb: Memory for their pixels, in MB. The workers of a loader share it equally.
        items: Number of all images, for the message that they do not fit.
    """

    def __init__(self, memory_mb: float, items: int) -> None:
        self.memory_mb = memory_mb
        self.items = items
        self._images: dict[int, Image.Image] = {}
        self._bytes = 0
        # If the user turned the cache off, no message reports that it is full.
        self._is_full = memory_mb == 0

    def get(self, index: int, read: Callable[[int], Image.Image]) -> Image.Image:
        """Return an image from the cache, or read it and put it there."""
        if index in self._images:
            return self._images[index]
        image = read(index)
        if self._is_full:
            return image
        worker = get_worker_info()
        size = image.width * image.height * (1 if image.mode == "L" else 4)  # Pillow's RGB takes 4 bytes a pixel
        if self._bytes + size <= self.memory_mb * 1e6 / (worker.num_workers if worker else 1):
            self._images[index] = image
            self._bytes += size
            return image
        self._is_full = True
        # Each worker of a loader would report it, and again at every start.
        if worker is None:
            rank_zero_info(
                f"{len(self._images):,} of {self.items:,} images fill memory_mb = {self.memory_mb:g} once they are "
                f"decoded; the others are decoded at each access. Use a larger memory_mb, or num_workers to decode them in "
                f"other processes."
            )
        return image

    def __getstate__(self) -> dict[str, Any]:
        """Leave the images out: a spawned worker reads its part itself."""
        return self.__dict__ | {"_images": {}, "_bytes": 0}


class ImageSet(FewShotDataset):
    """Images that are read on access, and kept decoded as far as they fit.

    An image is turned upright by its Exif tag, and transparent parts show `background`.

    Labels are 0 ... C-1 in the order of the class names.

    Args:
        items: The images of each split.
        split: The split that is served.
        transform: A function from a list of PIL images, and whether they are to be augmented, to a float batch.
        memory_mb: Memory for the decoded images of a split, in MB, so that each file is decoded once instead of in each
            epoch. Images beyond it are decoded at each access. The workers of a loader share it; 0 keeps none, infinity
            all.
        mode: Pillow's mode that an image is converted to: colour or grey.
        background: The colour behind what is transparent, by name or as "#rrggbb".
        no_validation: Why there is no validation split if the user chose so, and how to get one.

    Attributes:
        transform: The argument of this name.
        background: The argument of this name.
        items: The images of the split that is served.
        files: The file of each item.
        labels: (items,), int64.
        class_names: The name of each label.

    Raises:
        ValueError: There is no such split, or a setting is out of range. An image that cannot be read is named when it is
            served.
    """

    def __init__(
        self,
        items: Mapping[Split, Sequence[ImageItem]],
        split: Split,
        transform: Transform,
        *,
        memory_mb: float = 512,
        mode: Literal["RGB", "L"] = "RGB",
        background: str = "white",
        no_validation: str = "",
    ) -> None:
        if not memory_mb >= 0:
            raise InputError(f"memory_mb is {memory_mb}. Use 0 to keep no decoded images, 512 for half a gigabyte.")
        parse_colour(background)  # fails here, not in a worker at the first transparent image
        self.transform = transform
        self.background = background
        self.splits = tuple(items)
        self._mode = mode
        self._no_validation = no_validation
        self._items_of_splits = items
        self._caches = {name: DecodedImages(memory_mb, len(split_items)) for name, split_items in items.items()}
        self._augment = False
        self._choose(split)

    def _choose(self, split: Split) -> None:
        """Serve a split."""
        if split not in self.splits:
            if split == "val" and self._no_validation:
                raise InputError(f"There is no validation split: {self._no_validation}")
            raise InputError(f"There is no split {split!r}. Use one of {', '.join(map(repr, self.splits))}.")
        self.split: Split = split
        self.items = self._items_of_splits[split]
        # Names are sorted, so that labels depend neither on the order of the file system nor on the machine.
        names = sorted({item.class_name for item in self.items})
        label_of = {name: label for label, name in enumerate(names)}
        self.labels = torch.tensor([label_of[item.class_name] for item in self.items], dtype=torch.int64)
        self.class_names = tuple(names)

    @property
    def files(self) -> tuple[str, ...]:
        """The file of each item."""
        return tuple(str(item.file) for item in self.items)

    def with_split(self: AnyImageSet, split: Split) -> AnyImageSet:
        """Return the images of another split; nothing is listed again, and decoded images are shared."""
        images = copy.copy(self)  # shallow: both share the lists and the decoded images
        images._choose(split)
        return images

    def augmented(self: AnyImageSet, seed: int = 0) -> AnyImageSet:
        """Return the same images, augmented from PyTorch's random state; decoded images are shared."""
        images = copy.copy(self)
        images._augment = True
        return images

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return many items as two tensors: images (items, channels, height, width) and labels (items,)."""
        cache = self._caches[self.split]
        pictures = [cache.get(index, self.read_item) for index in indices]
        return self.transform(pictures, self._augment), self.labels[list(indices)]

    def read_item(self, index: int) -> Image.Image:
        """Read the image of an item from its file, and cut out its box; it is not transformed.

        A subclass whose images are not files overrides this method. It is called in the main process and in the workers
        of a loader, which have a copy of the data set, forked or pickled. Processes must not share an open archive or a
        connection: open it here, once for each `os.getpid()`, and exclude it from the pickled state.

        Args:
            index: The place of the item in `items`.

        Returns:
            The image in the mode of the data set, upright and without transparency. It may be kept in memory and served
            again, so nobody changes it.

        Raises:
            ValueError: If it cannot be read; the message names the item and says what to do. Any other error, such as a
                FileNotFoundError, reaches the user as it is.
        """
        item = self.items[index]
        try:
            image = read_image(item.file, background=self.background)
            if item.box is not None:
                image = image.crop(item.box)
            return image.convert(self._mode)
        except ValueError as error:
            raise InputError(
                f"{item.file} cannot be read as an image: {error}. Replace the file or remove it."
            ) from error


def count_and_names(names: Sequence[str], noun: str) -> str:
    """Write the number of things and the first names: `1 class ('a')`, `7 classes ('a', 'b', 'c', 'd', 'e', ...)`."""
    first_names = ", ".join(map(repr, names[:_MAX_NAMED]))
    further = ", ..." if len(names) > _MAX_NAMED else ""
    return f"{counted(len(names), noun)} ({first_names}{further})"


def required(path: Path, fix: str) -> Path:
    """Return the path of a file or folder that must exist.

    Raises:
        FileNotFoundError: If it does not; the message ends in `fix`.
    """
    if path.exists():
        return path
    # The deepest existing folder shows how much of a path is correct.
    nearest = next(parent for parent in path.parents if parent.exists() or parent == parent.parent)
    raise FileNotFoundError(f"{nearest} holds no {path.relative_to(nearest).as_posix()!r}. {fix}")


def refuse_any(faulty: Sequence[object], fault: str, fix: str, error: type[Exception] = FileNotFoundError) -> None:
    """Refuse a set with faults; the message names the first of them and the fix.

    Args:
        faulty: The files or names that are missing or cannot be used.
        fault: The fault, for the message.
        fix: What to do about it.
        error: The class of the error.

    Raises:
        Exception: If there is a fault; of the class `error`.
    """
    if faulty:
        raise error(f"{fault}; the first is {str(faulty[0])!r}. {fix}")


def in_splits(
    listed: Sequence[tuple[Split, ImageItem]],
    folder: Path,
    lists: str,
    fix: str,
    published: Mapping[Split, int],
    *,
    partial: bool,
) -> dict[Split, list[ImageItem]]:
    """Deal listed images to their splits, and refuse a set that is not complete.

    Args:
        listed: The split of each image, and the image.
        folder: The folder of the images.
        lists: The name of the lists, for messages.
        fix: What to do about what is missing: the beginning of a sentence.
        published: Number of classes of each split.
        partial: Leave out images that are missing, and accept fewer classes, but no split without a class.

    Returns:
        The images of each split, in the order of the lists.

    Raises:
        FileNotFoundError: If an image is missing.
        ValueError: If an image is listed twice, the numbers of classes differ from the published ones, or a split is empty.
    """
    complete_or_partial = f"{fix}, or pass partial=True to use what is there."
    repeated = [file for file, times in Counter(item.file for _, item in listed).items() if times > 1]
    fault = f"{len(repeated):,} of the images of {lists} are listed twice, and would count twice"
    refuse_any(_names_in(folder, repeated), fault, f"{fix}.", ValueError)
    file_on_disk = paths_on_disk([Path(item.file) for _, item in listed], folder)
    items: dict[Split, list[ImageItem]] = {name: [] for name in published}
    missing = []
    for split, item in listed:
        file = Path(item.file)
        if file in file_on_disk:
            items[split].append(item._replace(file=file_on_disk[file]))
        else:
            missing.append(file)
    if not partial:
        fault = f"{len(missing):,} of the {len(listed):,} images of {lists} are not in {folder}"
        refuse_any(_names_in(folder, missing), fault, complete_or_partial)
        _check_published(items, published, folder.parent, complete_or_partial)
    check_no_split_is_empty(items, folder.parent, f"{fix}.")
    return items


def _names_in(folder: Path, files: Sequence[str | Path]) -> list[str]:
    """Return the names of files from a folder on, as lists write them."""
    return [Path(os.path.relpath(file, folder)).as_posix() for file in files]


def _check_published(
    items: Mapping[Split, Sequence[ImageItem]], published: Mapping[Split, int], folder: Path, fix: str
) -> None:
    """Refuse splits with other numbers of classes than published."""
    classes = {split: len({item.class_name for item in split_items}) for split, split_items in items.items()}
    if classes != dict(published):
        counts = "; ".join(f"{split} has {classes[split]} of {number}" for split, number in published.items())
        raise InputError(f"The classes in {folder} are not the published ones: {counts}. {fix}")


def refuse_shared(classes: Iterable[tuple[str, Iterable[str]]], fix: str) -> None:
    """Refuse a class that is in two folders or lists of splits.

    Args:
        classes: The name of each folder or list, and its classes.
        fix: The end of the message.

    Raises:
        ValueError: If two share a class; the message ends in `fix`.
    """
    for (first, first_classes), (second, second_classes) in itertools.combinations(classes, 2):
        shared = sorted(set(first_classes) & set(second_classes))
        if shared:
            raise InputError(f"{first} and {second} share {count_and_names(shared, 'class')}{fix}")


def check_no_split_is_empty(items: Mapping[Split, Sequence[ImageItem]], folder: Path, fix: str) -> None:
    """Refuse a split without an image, which a part of a set may have.

    Raises:
        ValueError: If there is one; the message ends in `fix`.
    """
    empty = [split for split, split_items in items.items() if not split_items]
    if empty:
        raise InputError(f"What is in {folder} leaves {' and '.join(empty)} without a class. {fix}")


def check_shares(val_share: float, test_share: float) -> None:
    """Refuse shares of classes that leave nothing to train or to test on.

    Raises:
        ValueError: If they do.
    """
    if not (val_share >= 0 and test_share > 0 and val_share + test_share < 1):
        raise InputError(
            f"val_share is {val_share} and test_share {test_share}; the rest is trained on. Use val_share >= 0 and "
            "test_share > 0 with a sum below 1."
        )
