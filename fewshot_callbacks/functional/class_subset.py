"""Some classes of a set, and some items of each, drawn with a seed."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._reading import check_seed, default_mode


@default_mode()
def class_subset(
    labels: Any,
    classes: int | None = None,
    items_per_class: int | None = None,
    seed: int = 0,
) -> Int[Tensor, "chosen"]:
    """Draw classes at random, and items of each, without replacement.

    Which classes are drawn depends only on the set of labels and the seed. A smaller number of classes draws a subset
    of those that a larger number draws. The same holds for the items of each class, whose draw also depends on the
    order of the data.

    Args:
        labels: Label of each item, any integers or strings: a tensor, array or list.
        classes: Number of classes, at least 1; by default, or if there are fewer, all.
        items_per_class: Number of items of each class, at least 1; by default, or if a class has fewer, all.
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
    for name, number in (("classes", classes), ("items_per_class", items_per_class)):
        if number is not None and number < 1:
            raise ValueError(f"class_subset: {name}={number} must be at least 1; None takes all.")
    numbers = as_labels(labels, "labels", "class_subset").encoded()[0].cpu()
    generator = torch.Generator().manual_seed(check_seed("class_subset", "seed", seed))
    distinct, number = numbers.unique(return_inverse=True)
    chosen = torch.zeros(len(distinct), dtype=torch.bool)
    chosen[torch.randperm(len(distinct), generator=generator)[:classes]] = True
    kept = chosen[number]
    if items_per_class is not None:
        # a random order inside each class: sort by chance, then, keeping that order, by class
        by_chance = torch.randperm(len(numbers), generator=generator)
        order = by_chance[number[by_chance].argsort(stable=True)]
        sizes = torch.bincount(number, minlength=len(distinct))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[number[order]]
        kept &= place < items_per_class
    return kept.nonzero().flatten()
