"""The base class of data sets that read images one by one, their transforms, and checks that a set is complete.

A reader of another data set is a subclass of `ImageSet` that lists the images of each split: see
`docs/project/add_a_data_set.md`. If an image is not a file, but a part of an archive or a table, the subclass also defines
`ImageSet.read_item`.
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
    """Transform that turns a list of RGB images into one normalised batch.

    Evaluation images are resized and centre-cropped. Augmented images get a random resized crop, a random horizontal flip
    and a colour jitter. The random numbers come from PyTorch's random state in the process that loads the images:
    `seed_everything(seed, workers=True)` makes a run repeatable.

    Args:
        image_size: Height and width of the images in the batch, in pixels.
        resize: Shorter side of an evaluation image before the centre crop; a pair (height, width) resizes to exactly this
            size and ignores the aspect ratio. By default 8/7 of `image_size`.
        min_area: Smallest area of the random resized crop, as a fraction of the image, in (0, 1].
        flip: Probability of the horizontal flip. A mirrored logo, word or sign is a different class: pass 0 for these, as
            `ImageFolder` and `LogoDet3K` do by default.
        jitter: Strength of the brightness, contrast and saturation jitter; 0 for no jitter.
        mean: Mean per channel, which is subtracted; by default the mean of ImageNet.
        std: Standard deviation per channel, by which the channels are divided; by default as for ImageNet.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> images = [Image.new("RGB", (20, 10), "white"), Image.new("RGB", (30, 40), "black")]
        >>> batch = PhotoTransform(image_size=8)(images)  # (2, 3, 8, 8)
        >>> batch[:, 0, 0, 0]  # red: (1 - 0.485) / 0.229 and (0 - 0.485) / 0.229
        tensor([ 2.2489, -2.1179])
        >>> PhotoTransform(flip=2.0)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: flip is 2.0, but it is a probability. Use 0 <= flip <= 1.
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
                f"resize is {resize}, smaller than image_size {self.image_size}, so images would be padded with black. Use "
                f"resize >= {self.image_size}."
            )
        if not 0 < self.min_area <= 1:
            raise InputError(
                f"min_area is {self.min_area}, but it is a fraction of the image's area. Use 0 < min_area <= 1."
            )
        if not 0 <= self.flip <= 1:
            raise InputError(f"flip is {self.flip}, but it is a probability. Use 0 <= flip <= 1.")
        if self.jitter < 0:
            raise InputError(f"jitter is {self.jitter}. Use jitter >= 0, and 0 for no colour jitter.")
        if min(self.std) <= 0:
            raise InputError(f"std is {self.std}, but images are divided by it. Use positive numbers.")

    def __call__(
        self, pictures: Sequence[Image.Image], augment: bool = False
    ) -> Float[Tensor, "images 3 height width"]:
        """Return images as one batch.

        Args:
            pictures: PIL images in RGB, at least one.
            augment: Whether to augment the images, for training.
        """
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        to_size = transforms.Compose(self.steps(augment))
        pixels = [np.asarray(to_size(picture)) for picture in pictures]  # (height, width, 3), bytes
        if augment and self.flip:
            is_flipped = (torch.rand(len(pixels)) < self.flip).tolist()
            pixels = [image[:, ::-1] if flip else image for image, flip in zip(pixels, is_flipped, strict=True)]
        # Stacked bytes take a quarter of the memory of floats, and a single pass converts and reorders them. Flips and
        # colours change the whole batch at once, because many small tensors take longer than a large one.
        stacked = torch.from_numpy(np.stack(pixels)).movedim(3, 1)
        batch = stacked.to(torch.float32, memory_format=torch.contiguous_format)
        batch.div_(255)
        if augment and self.jitter:
            jitter_colours(batch, self.jitter)
        mean = torch.tensor(self.mean).reshape(3, 1, 1)
        std = torch.tensor(self.std).reshape(3, 1, 1)
        return batch.sub_(mean).div_(std)

    def _resized(self) -> int | tuple[int, int]:
        # 8/7 is 256/224: ImageNet images are usually resized to 256 and cropped to 224 pixels.
        return round(self.image_size * 8 / 7) if self.resize is None else self.resize

    def steps(self, augment: bool) -> list[Any]:
        """Return the transforms that resize or crop one image to `image_size`."""
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        if augment:
            return [transforms.RandomResizedCrop(self.image_size, scale=(self.min_area, 1.0))]
        return [transforms.Resize(self._resized()), transforms.CenterCrop(self.image_size)]


def check_image_size(image_size: int) -> None:
    """Raise an error if images would have no pixels."""
    if image_size < 1:
        raise InputError(f"image_size is {image_size}. Use image_size >= 1.")


def jitter_colours(images: Float[Tensor, "images 3 height width"], strength: float) -> None:
    """Change brightness, contrast and saturation of each image at random, in this order and in place.

    Each change blends the image with black (brightness), with the image's mean grey (contrast) or with each pixel's
    grey (saturation). The factor is uniform in 1 ± strength, at least 0, and drawn per image and change. Values are
    clamped to [0, 1] after each change, as Pillow's `ImageEnhance` does. A strength of 0 changes nothing.
    """
    low = max(0.0, 1 - strength)  # a negative factor would invert the image
    high = 1 + strength
    brightness, contrast, saturation = low + (high - low) * torch.rand(3, len(images), 1, 1, 1)
    images.mul_(brightness).clamp_(max=1)
    # In place, because a batch of 120 images of 84 x 84 pixels takes 10 MB, and each copy another 10 MB.
    mean_grey = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images.sub_(mean_grey).mul_(contrast).add_(mean_grey).clamp_(0, 1)
    grey = _grey(images)
    images.sub_(grey).mul_(saturation).add_(grey).clamp_(0, 1)


def _grey(images: Float[Tensor, "images 3 height width"]) -> Float[Tensor, "images 1 height width"]:
    """Return the luma of ITU-R BT.601, as Pillow defines grey."""
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
        file: The image file.
        class_name: The name of its class.
        box: Crop of the upright image: left, top, right and bottom in pixels; None for the whole image.
    """

    file: str | Path
    class_name: str
    box: tuple[int, int, int, int] | None = None


class DecodedImages:
    """Cache of decoded images, by index. Once the cache is full, other images are read at each access.

    Args:
        memory_mb: Memory for the pixels, in MB. Each of a loader's n workers gets 1/n of it.
        items: Number of all images, for the message that the cache is full.
    """

    def __init__(self, memory_mb: float, items: int) -> None:
        self.memory_mb = memory_mb
        self.items = items
        self._images: dict[int, Image.Image] = {}
        self._bytes = 0
        # If the user turned the cache off, no message is printed.
        self._is_full = memory_mb == 0

    def get(self, index: int, read: Callable[[int], Image.Image]) -> Image.Image:
        """Return an image from the cache; if it is not cached, read and cache it."""
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
        # Every worker of a loader would print the message, at each start.
        if worker is None:
            rank_zero_info(
                f"The decoded images fill memory_mb = {self.memory_mb:g}: {len(self._images):,} of {self.items:,} images "
                f"are cached, and the other images are decoded at each access. Use a larger memory_mb, or num_workers to "
                f"decode images in other processes."
            )
        return image

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the images; a spawned worker reads its images itself."""
        return self.__dict__ | {"_images": {}, "_bytes": 0}


class ImageSet(FewShotDataset):
    """Base class of data sets that read an image at its first access and cache the decoded image.

    Images are turned upright by their Exif tag. Transparent pixels are filled with `background`. Labels run from 0 to C - 1
    in the order of the class names.

    Args:
        items: The images of each split.
        split: The selected split.
        transform: Function that takes a list of PIL images, and whether to augment them, and returns a float batch (images,
            channels, height, width).
        memory_mb: Memory for the decoded images of a split, in MB. Images that do not fit are decoded at each access. The
            workers of a loader share this memory. 0 caches no image, and `float("inf")` caches all images.
        mode: Pillow mode of the images: "RGB" for colour or "L" for grey.
        background: Colour behind transparent pixels, by name or as "#rrggbb".
        no_validation: If the user chose to have no validation split: the reason and the fix, for the message.

    Attributes:
        transform: The argument `transform`.
        background: The argument `background`.
        items: The images of the selected split.
        files: The file of each item.
        labels: (items,), int64.
        class_names: The name of each label, in alphabetical order.

    Raises:
        ValueError: There is no such split, or a setting is out of range. `batch` raises an error that names an image that
            cannot be read.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from fewshot_callbacks.data import PhotoTransform
        >>> with TemporaryDirectory() as folder:
        ...     files = [Path(folder, f"{colour}.png") for colour in ("red", "blue")]
        ...     for file in files:
        ...         Image.new("RGB", (9, 9), file.stem).save(file)
        ...     items = {"train": [ImageItem(file, file.stem) for file in files]}
        ...     dataset = ImageSet(items, "train", PhotoTransform(image_size=8, mean=(0, 0, 0), std=(1, 1, 1)))
        ...     images, labels = dataset.batch([0, 1])
        >>> dataset.class_names, labels
        (('blue', 'red'), tensor([1, 0]))
        >>> images.mean(dim=(2, 3))  # the red, green and blue of both images
        tensor([[1., 0., 0.],
                [0., 0., 1.]])
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
            raise InputError(f"memory_mb is {memory_mb}. Use 512 for half a gigabyte, or 0 to cache no decoded images.")
        parse_colour(background)  # a wrong colour fails here, not in a worker at the first transparent image
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
        """Select a split."""
        if split not in self.splits:
            if split == "val" and self._no_validation:
                raise InputError(f"There is no validation split: {self._no_validation}")
            raise InputError(f"There is no split {split!r}. Use one of {', '.join(map(repr, self.splits))}.")
        self.split: Split = split
        self.items = self._items_of_splits[split]
        # Names are sorted, so that labels do not depend on the order of the file system.
        names = sorted({item.class_name for item in self.items})
        label_of = {name: label for label, name in enumerate(names)}
        self.labels = torch.tensor([label_of[item.class_name] for item in self.items], dtype=torch.int64)
        self.class_names = tuple(names)

    @property
    def files(self) -> tuple[str, ...]:
        """The file of each item."""
        return tuple(str(item.file) for item in self.items)

    def with_split(self: AnyImageSet, split: Split) -> AnyImageSet:
        """Return the images of another split. Folders are not listed again, and both objects share the cache."""
        images = copy.copy(self)  # shallow: both objects share the lists and the cache
        images._choose(split)
        return images

    def augmented(self: AnyImageSet, seed: int = 0) -> AnyImageSet:
        """Return the same images, augmented with PyTorch's random state. Both objects share the cache."""
        images = copy.copy(self)
        images._augment = True
        return images

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the items as two tensors: images (items, channels, height, width) and labels (items,)."""
        cache = self._caches[self.split]
        pictures = [cache.get(index, self.read_item) for index in indices]
        return self.transform(pictures, self._augment), self.labels[list(indices)]

    def read_item(self, index: int) -> Image.Image:
        """Return the image of an item, cropped to its box but not transformed.

        A subclass overrides this method if its images are not files. The main process and the workers of a loader call it;
        each worker has a forked or pickled copy of the data set. Processes must not share an open archive or a connection:
        open it here, once per `os.getpid()`, and exclude it from the pickled state.

        Args:
            index: The position of the item in `items`.

        Returns:
            The image in the mode of the data set, upright and without transparency. The image may be cached, so do not
            change it in place.

        Raises:
            ValueError: The image cannot be read; the message names the item and the fix. Other errors, such as
                FileNotFoundError, reach the user unchanged.
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
    """Return a count with the first names: `1 class ('a')`, or `7 classes ('a', 'b', 'c', 'd', 'e', ...)`."""
    first_names = ", ".join(map(repr, names[:_MAX_NAMED]))
    further = ", ..." if len(names) > _MAX_NAMED else ""
    return f"{counted(len(names), noun)} ({first_names}{further})"


def required(path: Path, fix: str) -> Path:
    """Return the path of a file or folder that must exist."""
    if path.exists():
        return path
    # The deepest existing folder shows which part of the path is correct.
    nearest = next(parent for parent in path.parents if parent.exists() or parent == parent.parent)
    raise FileNotFoundError(f"{nearest} does not contain {path.relative_to(nearest).as_posix()!r}. {fix}")


def refuse_any(faulty: Sequence[object], fault: str, fix: str, error: type[Exception] = FileNotFoundError) -> None:
    """Raise an error if there are faulty files or names; the message states the fault, the first of them and the fix."""
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
    """Return the images of each split, in the order of the lists; raise an error if the set is not complete.

    `published` is the published number of classes per split. With `partial`, missing images are left out and fewer
    classes are accepted, but every split needs a class.
    """
    complete_or_partial = f"{fix}, or pass partial=True to use only the files that exist."
    repeated = [file for file, times in Counter(item.file for _, item in listed).items() if times > 1]
    fault = f"{len(repeated):,} of the images in {lists} are listed twice and would count twice"
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
        fault = f"{len(missing):,} of the {len(listed):,} images in {lists} are missing from {folder}"
        refuse_any(_names_in(folder, missing), fault, complete_or_partial)
        _check_published(items, published, folder.parent, complete_or_partial)
    check_no_split_is_empty(items, folder.parent, f"{fix}.")
    return items


def _names_in(folder: Path, files: Sequence[str | Path]) -> list[str]:
    """Return the paths of files relative to a folder, as the lists write them."""
    return [Path(os.path.relpath(file, folder)).as_posix() for file in files]


def _check_published(
    items: Mapping[Split, Sequence[ImageItem]], published: Mapping[Split, int], folder: Path, fix: str
) -> None:
    """Raise an error if the numbers of classes differ from the published numbers."""
    classes = {split: len({item.class_name for item in split_items}) for split, split_items in items.items()}
    if classes != dict(published):
        counts = ", ".join(f"{split} has {classes[split]} of {number}" for split, number in published.items())
        raise InputError(f"{folder} does not contain the published number of classes: {counts}. {fix}")


def refuse_shared(classes: Iterable[tuple[str, Iterable[str]]], fix: str) -> None:
    """Raise an error if two splits share a class."""
    for (first, first_classes), (second, second_classes) in itertools.combinations(classes, 2):
        shared = sorted(set(first_classes) & set(second_classes))
        if shared:
            raise InputError(f"{first} and {second} share {count_and_names(shared, 'class')}{fix}")


def check_no_split_is_empty(items: Mapping[Split, Sequence[ImageItem]], folder: Path, fix: str) -> None:
    """Raise an error if a split has no images; an incomplete set may have such a split."""
    empty = [split for split, split_items in items.items() if not split_items]
    if empty:
        raise InputError(f"{folder} contains no class for {' and '.join(empty)}. {fix}")


def check_shares(val_share: float, test_share: float) -> None:
    """Raise an error if the shares leave no classes for training or for the test."""
    if not (val_share >= 0 and test_share > 0 and val_share + test_share < 1):
        raise InputError(
            f"val_share is {val_share} and test_share is {test_share}; the other classes are for training. Use "
            "val_share >= 0 and test_share > 0 with a sum below 1."
        )
