"""The items of a batch that make one episode."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def episode_in(labels: Int[Tensor, "items"], shots: int) -> tuple[Int[Tensor, "chosen"], int, int]:
    """Choose the items of a batch that make one episode: as many of each class that has more than `shots`.

    Args:
        labels: Labels of the batch, on the CPU.
        shots: Support items of each class.

    Returns:
        Indices of the items, ascending; the items of each class; the number of classes. All items of a batch with equally
        many of each class, even if they are too few, which `training_dynamics` refuses.

    Raises:
        ValueError: If fewer than two classes have more than `shots` items.

    Examples:
        >>> episode_in(torch.tensor([5, 7, 7, 5, 7, 9]), shots=1)
        (tensor([0, 1, 2, 3]), 2, 2)
    """
    _, classes, counts = labels.unique(return_inverse=True, return_counts=True)
    if bool((counts == counts[0]).all()):
        return torch.arange(len(labels), device=labels.device), int(counts[0]), len(counts)
    enough = counts > shots
    kept = int(enough.sum())
    if kept < 2:
        raise ValueError(
            f"{kept} of the {len(counts)} classes of a batch have more than shots={shots} items, and two are needed. Train "
            "with an EpisodicBatchSampler, or on larger batches of fewer classes."
        )
    size = int(counts[enough].min())
    order = classes.argsort(stable=True)  # by class, in the order of the batch
    of_class = classes[order]
    place = torch.arange(len(order), device=labels.device) - (counts.cumsum(0) - counts)[of_class]  # in the class
    return order[enough[of_class] & (place < size)].sort().values, size, kept
