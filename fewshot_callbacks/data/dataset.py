"""The base class of data sets, and the seeded draw of classes into splits."""

import hashlib
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "val", "test")
Batch = tuple[Float[Tensor, "images channels height width"], Int[Tensor, "images"]]

AnyDataset = TypeVar("AnyDataset", bound="FewShotDataset")  # the tests' type checker does not know Self here


class FewShotDataset(Dataset[tuple[Tensor, int]]):
    """Base class of data sets: one split, as a map-style `Dataset` of (image, label) pairs.

    A subclass sets `labels` and `class_names`, and defines `batch` and `with_split`. `ImageSet` does this for images that
    are read one by one; most readers are subclasses of `ImageSet`. Pass a data set to `FewShotDataModule`, or to any
    `DataLoader`.

    Two methods augment training images. `augmented` returns a data set that augments images on the CPU as it loads them.
    `augment_batch` augments a batch on the training device. A data set defines at most one of these methods.
    `FewShotDataModule(augment=False)` turns both off.

    Attributes:
        in_channels: Channels of an image; 3 unless a subclass sets another number.
        splits: The splits of the data set; all three unless a subclass sets others.
        labels: (items,), int64, from 0 to C - 1 in the split. A subclass must set it.
        class_names: The name of each label. A subclass must set it.
    """

    in_channels: ClassVar[int] = 3
    splits: tuple[Split, ...] = SPLITS
    labels: Int[Tensor, "items"]
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "channels height width"], int]:
        images, labels = self.batch([index])
        return images[0], int(labels[0])

    def __getitems__(self, indices: list[int]) -> list[tuple[Float[Tensor, "channels height width"], int]]:
        """Return several items from one call of `batch`. A DataLoader calls this method."""
        images, labels = self.batch(indices)
        return list(zip(images.unbind(), labels.tolist(), strict=True))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the items as two tensors: images (items, channels, height, width) and labels (items,).

        Raises:
            NotImplementedError: The subclass does not define this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define batch(indices). Define it in the class: it returns the images and the "
            "labels of the items at these indices."
        )

    def with_split(self: AnyDataset, split: Split) -> AnyDataset:
        """Return the same data set with the images of another split.

        Args:
            split: One of `splits`.

        Raises:
            ValueError: There is no such split; the message gives the reason.
            NotImplementedError: The subclass does not define this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define with_split(split). Define it in the class: it returns the data set "
            "with the images of another split."
        )

    def augmented(self: AnyDataset, seed: int) -> AnyDataset:
        """Return the data set with augmented images, for training; by default the data set itself.

        Args:
            seed: Seed of an augmentation that does not use PyTorch's random state.
        """
        return self

    def augment_batch(
        self, images: Float[Tensor, "images channels height width"], generator: torch.Generator
    ) -> Float[Tensor, "images channels height width"]:
        """Return an augmented training batch, on the training device; by default the batch itself."""
        return images


def seeded_draw(name: str, seed: int) -> float:
    """Return a number in [0, 1): the first 8 bytes of the SHA-256 of "seed name", read as a fraction."""
    # Python's `hash` differs between processes.
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") / 2**64


def split_of(name: str, seed: int, val_share: float, test_share: float) -> Split:
    """Return the split of a class, drawn only from its name and the seed.

    The split is "test" if `seeded_draw` is below `test_share`, "val" if it is below `test_share + val_share`, and "train"
    otherwise. Every machine draws the same splits.

    Examples:
        >>> [split_of(name, 0, 0.2, 0.25) for name in ("edit-cut", "firefox", "weather-snow")]
        ['test', 'train', 'val']
    """
    # Test comes first, so that the test classes do not depend on `val_share`.
    draw = seeded_draw(name, seed)
    if draw < test_share:
        return "test"
    return "val" if draw < test_share + val_share else "train"
