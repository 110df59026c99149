"""Batches of P classes with K items each, for losses that rank the items of a batch, and the sampler that draws them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

from fewshot_callbacks.data.dataset import FewShotDataset
from fewshot_callbacks.data.episodes import SeededBatchSampler, mixed_seed, own_rank
from fewshot_callbacks.functional.episodes import ClassNames, class_name


class ClassBalancedBatchSampler(SeededBatchSampler):
    """Batches of P = `classes_per_batch` classes with K = `items_per_class` items each, class by class.

    Classes of a batch are drawn without replacement, all equally likely, then K items of each without replacement. The
    batches of an epoch are a function of (seed, epoch) alone: drawn in the main process, they depend neither on the number
    of workers nor on global random state.

    With several processes (torch.distributed initialised) P and K are those of the batch of all processes together, of
    which rank r takes the classes r, r + world_size, ...: the batches are those of one process.
    `EmbeddingModule` computes its loss on the joined batch.

    Args:
        labels: (items,), the class of each item of the data set, integers or words: a tensor, array or list, such as the
            `targets` of torchvision's data sets.
        classes_per_batch: P, 1 or more.
        items_per_class: K, 2 or more: an item alone in its class has no relevant item.
        batches: Number of batches in an epoch, at least 1; by default as many as the items of the set fill.
        seed: Seed of the batches.
        class_names: Names for the error messages, by label; labels that are words are their own names.
        epoch: The first epoch; only a sampler that starts in the middle of a run needs it.
        sampler: Ignored, as in `EpisodicBatchSampler`: Lightning would put a DistributedSampler here.

    Raises:
        ValueError: A number is too small; there are fewer than P classes, or a class has fewer than K items; or, when it is
            iterated, P is smaller than the number of processes.

    Examples:
        >>> labels = ["owl", "wren", "owl", "wren", "heron", "heron", "heron", "owl"]
        >>> sampler = ClassBalancedBatchSampler(labels, classes_per_batch=2, items_per_class=2)
        >>> [len(batch) for batch in sampler]
        [4, 4]
        >>> first = next(iter(ClassBalancedBatchSampler(labels, classes_per_batch=3, items_per_class=2)))
        >>> sorted(labels[index] for index in first)
        ['heron', 'heron', 'owl', 'owl', 'wren', 'wren']
    """

    def __init__(
        self,
        labels: Any,
        *,
        classes_per_batch: int,
        items_per_class: int,
        batches: int | None = None,
        seed: int = 0,
        class_names: ClassNames | None = None,
        epoch: int = 0,
        sampler: Sampler[int] | Iterable[int] | None = None,
    ) -> None:
        check_batch_sizes(classes_per_batch=classes_per_batch, items_per_class=items_per_class)
        # an episode with one support image and K - 1 queries is P classes of K items
        super().__init__(labels, class_names, seed, epoch, ways=classes_per_batch, shots=1, queries=items_per_class - 1)
        check_class_balance(self.labels, classes_per_batch, items_per_class, self.class_names)
        filled = max(1, len(self.labels) // (classes_per_batch * items_per_class))
        self.sizes["episodes"] = filled if batches is None else batches
        check_batch_sizes(batches=self.sizes["episodes"])

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, for a DataLoader with workers makes one iterator in vain, which must not count.
        rank, world_size = own_rank()
        if self.sizes["ways"] < world_size:
            raise ValueError(
                f"ClassBalancedBatchSampler: batches of {self.sizes['ways']} classes leave some of the "
                f"{world_size} processes without a class. Use classes_per_batch >= {world_size}."
            )
        drawn = self.draw(mixed_seed(self.seed, self.epoch)).indices  # (batches, classes, items)
        self.epoch += 1
        for batch in drawn:
            # whole classes, so that the items of a process have relevant ones among themselves, too
            yield batch[rank::world_size].flatten().tolist()

    def __len__(self) -> int:
        return self.sizes["episodes"]


@dataclass(frozen=True)
class ClassBalanced:
    """Train on batches of some classes with as many images of each (`ClassBalancedBatchSampler`).

    Args:
        classes_per_batch: Classes in a batch.
        items_per_class: Images of each class in a batch.
        batches: Batches in an epoch.

    Raises:
        ValueError: A number is not whole, or too small.

    Examples:
        >>> ClassBalanced(64, 1)
        Traceback (most recent call last):
        ValueError: items_per_class=1: an item alone in its class has no relevant item. Use items_per_class >= 2.
    """

    classes_per_batch: int
    items_per_class: int = 4
    batches: int = 100

    def __post_init__(self) -> None:
        check_batch_sizes(**asdict(self))

    def sampler(self, data: FewShotDataset, seed: int, epoch: int) -> BatchSampler:
        """Make the batches of a training: a function of the seed and the epoch."""
        names = data.class_names
        return ClassBalancedBatchSampler(data.labels, **asdict(self), seed=seed, class_names=names, epoch=epoch)


# Of each size of a batch: the smallest, and why.
_SMALLEST = {
    "classes_per_batch": (1, "a batch needs at least one class"),
    "items_per_class": (2, "an item alone in its class has no relevant item"),
    "batches": (1, "an epoch needs at least one"),
}


def check_batch_sizes(**sizes: Any) -> None:
    """Refuse sizes that are too small, or no whole numbers.

    Args:
        **sizes: `classes_per_batch`, `items_per_class` or `batches`.

    Raises:
        ValueError: Names the first such size.

    Examples:
        >>> check_batch_sizes(items_per_class=1)
        Traceback (most recent call last):
        ValueError: items_per_class=1: an item alone in its class has no relevant item. Use items_per_class >= 2.
    """
    for name, size in sizes.items():
        smallest, why = _SMALLEST[name]
        if not hasattr(size, "__index__") or isinstance(size, bool):
            raise ValueError(f"{name}={size!r} must be a whole number, such as {smallest}.")
        if size < smallest:
            raise ValueError(f"{name}={size}: {why}. Use {name} >= {smallest}.")


def check_class_balance(
    labels: Int[Tensor, "items"],
    classes_per_batch: int,
    items_per_class: int,
    class_names: ClassNames | None = None,
    prefix: str = "",
) -> None:
    """Refuse labels of which batches of these sizes cannot be drawn.

    Args:
        labels: The class of each item.
        classes_per_batch: P.
        items_per_class: K.
        class_names: Names for the error messages, by label.
        prefix: What stands before the names of the two sizes in the advice of a message, such as `--data.`.

    Raises:
        ValueError: There are too few classes, or a class has too few items.

    Examples:
        >>> check_class_balance(torch.tensor([0, 0, 0, 1, 1]), 2, 3, ("heron", "owl"))
        Traceback (most recent call last):
        ValueError: items_per_class=3, but class 'owl' has 2 items. Use items_per_class <= 2 or drop the class.
    """
    classes, counts = torch.unique(labels, return_counts=True)
    if len(classes) < classes_per_batch:
        fix = (
            f"Use {prefix}classes_per_batch <= {len(classes)} or add classes"
            if len(classes)
            else "Pass the labels of the data set"
        )
        raise ValueError(f"classes_per_batch={classes_per_batch}, but the labels hold {len(classes)} classes. {fix}.")
    too_small = int((counts < items_per_class).sum())
    if too_small:
        smallest = int(counts.argmin())
        size = int(counts[smallest])
        several = f", the smallest of {too_small} classes that are too small" if too_small > 1 else ""
        fewer = f"Use {prefix}items_per_class <= {size} or drop" if size > 1 else "Drop"
        raise ValueError(
            f"items_per_class={items_per_class}, but class {class_name(int(classes[smallest]), class_names)} has {size} "
            f"item{'s' if size > 1 else ''}{several}. {fewer} {'these classes' if too_small > 1 else 'the class'}."
        )
