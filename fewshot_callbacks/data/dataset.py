"""What a data set of this package is: one split of it, with labels, that knows the other splits."""

import hashlib
from abc import abstractmethod
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
    """Base: one split of a data set, a map-style `Dataset` of (image, label) with `labels` and `class_names`.

    A subclass sets the attributes, and defines `batch` and `with_split`. `FewShotDataModule` makes loaders of it, and so
    does any `DataLoader`.

    Attributes:
        in_channels: Channels of an image.
        splits: The splits that there are.
        labels: (items,), int64, 0 ... C-1 inside the split.
        class_names: For each label, its name.
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
        """Items, made together; a DataLoader calls it."""
        images, labels = self.batch(indices)
        return list(zip(images.unbind(), labels.tolist(), strict=True))

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """Many items as two tensors: images (items, channels, height, width) and labels (items,)."""

    @abstractmethod
    def with_split(self: AnyDataset, split: Split) -> AnyDataset:
        """The same data set with the images of another split.

        Args:
            split: One of `splits`.

        Raises:
            ValueError: There is no such split; says why.
        """

    def augmented(self: AnyDataset, seed: int) -> AnyDataset:
        """The same images as a network is trained on them; by default as they are.

        Args:
            seed: Of what is random, unless that is drawn from PyTorch's random state.
        """
        return self

    def augment_batch(
        self, images: Float[Tensor, "images channels height width"], generator: torch.Generator
    ) -> Float[Tensor, "images channels height width"]:
        """Augment a training batch as a whole, where it is trained on; by default not at all."""
        return images


def seeded_draw(name: str, seed: int) -> float:
    """Draw a number in [0, 1): the first 8 bytes of SHA-256 of "seed name", read as a fraction."""
    # not Python's `hash`, which is another one in each process
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") / 2**64


def split_of(name: str, seed: int, val_share: float, test_share: float) -> Split:
    """Draw a class into a split: a function of its name and the seed alone, on every machine.

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
    # The test classes come first, so that a change of `val_share` alone leaves them the same.
    draw = seeded_draw(name, seed)
    if draw < test_share:
        return "test"
    return "val" if draw < test_share + val_share else "train"
