"""Groups of labels for Grouped Recall@K: drawn at random, or given by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.functional._labels import Labels, as_labels, joined_labels, word_code
from fewshot_callbacks.functional._tensors import check_seed, default_mode

Unmatched = Literal["exclude", "miss"]
"""What a query without a relevant candidate in its group is: left out of the mean, or a query whose search failed."""

Splits = list[list[Tensor]]
"""The labels of each group of each split."""


@default_mode()
def label_groups(
    labels: Any, group_size: int, seed: int = 0, repeats: int = 1
) -> Int[Tensor, "repeats groups group_size"]:
    """Split the set of labels at random into groups of exactly `group_size` labels.

    The split depends on the set of labels and the seed only: not on the order or the number of the items.

    Args:
        labels: Integers of any value, as a tensor, array or list; a repeated label counts once.
        group_size: Labels in each group, at least 2.
        seed: Seed of the random split.
        repeats: Number of independent splits.

    Returns:
        The labels of each group of each split, int64. The labels that remain, fewer than `group_size`, are in no group.

    Raises:
        ValueError: If there are fewer labels than a group needs, `group_size` is below 2, `repeats` is below 1, or
            labels are words, or the seed has more than 64 bits.

    Examples:
        >>> import torch
        >>> label_groups(torch.arange(7), group_size=3).shape
        torch.Size([1, 2, 3])
    """
    read = as_labels(labels, "labels", "label_groups")
    if read.words is not None:
        raise ValueError(
            "label_groups: labels are words, which a tensor cannot hold. Number them first: "
            "np.unique(labels, return_inverse=True)[1]."
        )
    distinct = read.codes.unique()
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: Recall@K inside a group needs at least 2 labels in it.")
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least one split is needed.")
    if len(distinct) < group_size:
        raise ValueError(
            f"{len(distinct)} labels are too few for a group of {group_size}. Use group_size <= {len(distinct)}."
        )
    generator = torch.Generator().manual_seed(check_seed("label_groups", "seed", seed))
    groups = len(distinct) // group_size
    splits = [torch.randperm(len(distinct), generator=generator)[: groups * group_size] for _ in range(repeats)]
    grouped: Tensor = distinct.cpu()[torch.stack(splits)]
    return grouped.view(repeats, groups, group_size)


def checked_groups(call: str, groups: Any) -> list[Labels]:
    """Read the groups that a caller gives.

    Args:
        call: The public function, for the message.
        groups: The labels of each group, integers or words.

    Raises:
        ValueError: If they are not groups of at least two labels each, or a label is in two groups.
    """
    like = "such as label_groups=[[0, 1, 2], [3, 4, 5]]."
    if not isinstance(groups, Sequence | Tensor) or isinstance(groups, str) or not len(groups):
        raise ValueError(f"{call}: label_groups must hold the labels of each group, {like}")
    checked = [as_labels(group, "label_groups", call) for group in groups]
    for number, group in enumerate(checked):
        if len(group) < 2:
            raise ValueError(
                f"{call}: group {number} of label_groups holds {len(group)} labels; Recall@K inside a group needs at "
                "least 2. Leave it out, or join it to another."
            )
    together = joined_labels(checked, call)
    present, counts = together.codes.unique(return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(
            f"{call}: label {_shown(together, int(present[counts > 1][0]))} comes more than once in label_groups. A "
            "label is in one group at most."
        )
    return checked


def given_split(
    call: str,
    groups: Sequence[Labels],
    labels: Int[Tensor, "items"],
    label_names: tuple[str, ...] | None = None,
) -> Splits:
    """Make a split of the groups that a caller gives, all of whose labels must be labels of queries.

    Args:
        call: The public function, for the message.
        groups: Labels of each group, from `checked_groups`.
        labels: Labels of the queries.
        label_names: The word of each label, if they were words.

    Raises:
        ValueError: If a group has a label that no query has, or one are words and the others integers.
    """
    given = joined_labels(groups, call)
    if (given.words is None) != (label_names is None):
        kinds = ("integers", "words") if given.words is None else ("words", "integers")
        raise ValueError(
            f"{call}: label_groups holds {kinds[0]}, but labels are {kinds[1]}. Pass both in the same form."
        )
    place = {word_code(word): number for number, word in enumerate(label_names or ())}
    known = labels.cpu() if label_names is None else torch.tensor(sorted(place))
    unknown = given.codes[~torch.isin(given.codes, known)]
    if len(unknown):
        raise ValueError(
            f"{call}: {len(unknown)} of the {len(given)} labels in label_groups are those of no query, the first is "
            f"{_shown(given, int(unknown[0]))}. Give groups of the labels that this set has."
        )
    if label_names is None:
        return [[group.codes for group in groups]]
    return [[torch.tensor([place[code] for code in group.codes.tolist()]) for group in groups]]


def _shown(labels: Labels, code: int) -> int | str:
    return code if labels.words is None else repr(labels.words[code])


def random_splits(labels: Int[Tensor, "items"], group_size: int, seed: int, repeats: int = 1) -> Splits:
    """List the groups of `label_groups`."""
    return [list(split) for split in label_groups(labels, group_size, seed, repeats)]
