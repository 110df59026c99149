"""The base class of data sets: one split with its labels, which can make the other splits."""

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
    """Base of data sets: one split, a map-style `Dataset` of (image, label) with `labels` and `class_names`.

    A subclass sets `labels` and `class_names`, and defines `batch` and `with_split`. `ImageSet` does so for images that are
    read one by one, and is the base of most readers. `FewShotDataModule` makes loaders of a data set, and so does any
    `DataLoader`.

    Two methods augment training images: `augmented` returns a data set whose images are augmented one batch at a time where
    they are loaded, on the CPU; `augment_batch` changes a batch on the training device. A data set
    defines one of them, or none; the argument `augment=` of `FewShotDataModule` turns both off.

    Attributes:
        in_channels: Channels of an image; 3 unless a subclass sets it.
        splits: The splits of the data set; all three unless a subclass sets it.
        labels: (items,), int64, 0 ... C-1 inside the split; without a default.
        class_names: The name of each label; without a default.
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
        """Return several items, which are made together; a DataLoader calls this method."""
        images, labels = self.batch(indices)
        return list(zip(images.unbind(), labels.tolist(), strict=True))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return many items as two tensors: images (items, channels, height, width) and labels (items,).

        Raises:
            NotImplementedError: If a subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no batch(indices). Define it in the class: it returns the images and the labels of "
            "some items."
        )

    def with_split(self: AnyDataset, split: Split) -> AnyDataset:
        """Return the same data set with the images of another split.

        Args:
            split: One of `splits`.

        Raises:
            ValueError: If there is no such split; the message says why.
            NotImplementedError: If a subclass does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no with_split(split). Define it in the class: it returns the data set with the "
            "images of another split."
        )

    def augmented(self: AnyDataset, seed: int) -> AnyDataset:
        """Return the same images as a network is trained on them; by default as they are.

        Args:
            seed: Seed of an augmentation that does not draw from PyTorch's random state.
        """
        return self

    def augment_batch(
        self, images: Float[Tensor, "images channels height width"], generator: torch.Generator
    ) -> Float[Tensor, "images channels height width"]:
        """Augment a training batch as a whole, on the device of the training; by default not at all."""
        return images


def seeded_draw(name: str, seed: int) -> float:
    """Draw a number in [0, 1): the first 8 bytes of SHA-256 of "seed name", read as a fraction."""
    # Python's `hash` would differ between processes.
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") / 2**64


def split_of(name: str, seed: int, val_share: float, test_share: float) -> Split:
    """Draw a class into a split: a function of only its name and the seed, on every machine.

    Args:
        name: Name of the class.
        seed: Another seed is another draw.
        val_share: Share of the classes to validate on, on average.
        test_share: Share of the classes to test on, on average.

    Returns:
        "test" where `seeded_draw` is below `test_share`, "val" for the next `val_share`, "train" for the rest.

    Examples:
        >>> [split_of(name, 0, 0.2, 0.25) for name in ("edit-cut", "firefox", "weather-snow")]
        ['test', 'train', 'val']
    """
    # The test classes come first, so that a change of only `val_share` leaves them the same.
    draw = seeded_draw(name, seed)
    if draw < test_share:
        return "test"
    return "val" if draw < test_share + val_share else "train"
