"""`class_subset`: a seeded random subset of the classes of a set, and of the items of each class."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._reading import check_seed, default_mode


@default_mode()
def class_subset(
    labels: Any,
    classes: int | None = None,
    items_per_class: int | None = None,
    seed: int = 0,
) -> Int[Tensor, "chosen"]:
    """Return the items of randomly drawn classes, or a random subset of them, without replacement.

    The drawn classes only depend on the set of labels and the seed. With a smaller number of classes, you get a subset of
    the classes that a larger number draws. The same is true for the items of each class, but they also depend on the order
    of the data.

    Args:
        labels: Label of each item, integers or strings, as a tensor, array or list.
        classes: Number of classes, at least 1. The default is all classes, also if there are fewer.
        items_per_class: Number of items per class, at least 1. The default is all items, also if a class has fewer.
        seed: Seed of the draw.

    Returns:
        Indices of the items, ascending; empty for no labels.

    Raises:
        ValueError: If labels are neither integers nor strings, a number is below 1, or the seed has more than 64 bits.

    Examples:
        >>> import torch
        >>> labels = torch.arange(6).repeat(4)
        >>> chosen = class_subset(labels, classes=2, items_per_class=3)
        >>> len(chosen), len(labels[chosen].unique())
        (6, 2)
    """
    for name, limit in (("classes", classes), ("items_per_class", items_per_class)):
        if limit is not None and limit < 1:
            raise InputError(f"class_subset: {name}={limit} must be at least 1. Pass None to take all.")
    codes = as_labels(labels, "labels", "class_subset").codes.cpu()
    generator = torch.Generator().manual_seed(check_seed("class_subset", "seed", seed))
    distinct, class_of_item = codes.unique(return_inverse=True)
    is_drawn_class = torch.zeros(len(distinct), dtype=torch.bool)
    is_drawn_class[torch.randperm(len(distinct), generator=generator)[:classes]] = True
    is_drawn = is_drawn_class[class_of_item]
    if items_per_class is not None:
        is_drawn &= _positions_in_class(class_of_item, generator) < items_per_class
    return is_drawn.nonzero().flatten()


def _positions_in_class(class_of_item: Int[Tensor, "items"], generator: torch.Generator) -> Int[Tensor, "items"]:
    """Return the position of each item, from 0, in a random order of the items of its class."""
    shuffled = torch.randperm(len(class_of_item), generator=generator)
    # The sort is stable, so that the items of each class stay shuffled.
    by_class = shuffled[class_of_item[shuffled].argsort(stable=True)]
    sizes = torch.bincount(class_of_item)
    first_position = sizes.cumsum(0) - sizes
    positions = torch.empty_like(by_class)
    positions[by_class] = torch.arange(len(by_class)) - first_position[class_of_item[by_class]]
    return positions
