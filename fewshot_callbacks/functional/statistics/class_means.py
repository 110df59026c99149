"""Means, rounded once: of values, of each class, and over classes, where each class counts the same."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def exact_mean(values: Float[Tensor, "n"]) -> float:
    """Average values, rounded once, so that their order does not matter. NaN for no values.

    Examples:
        >>> import torch
        >>> exact_mean(torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64))
        0.5
    """
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan


def class_means(
    values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"]
) -> tuple[Int[Tensor, "classes"], Float[Tensor, "classes"], Int[Tensor, "classes"]]:
    """Compute the mean over the queries of each class, rounded once, so that their order does not matter.

    Args:
        values: One value for each query; NaN where the query has none, because nothing is relevant to it.
        labels: The class of each query, any integers.

    Returns:
        Labels in ascending order, the mean of each (float64), and how many queries it is of. Queries without a value
        are left out, and so is a class that none of its queries is left of; all are empty where no query is left.

    Examples:
        >>> import torch
        >>> values = torch.tensor([1.0, 0.0, 0.5, torch.nan, torch.nan])
        >>> class_means(values, torch.tensor([7, 7, 3, 3, 9]))
        (tensor([3, 7]), tensor([0.5000, 0.5000], dtype=torch.float64), tensor([1, 2]))
    """
    keep = ~values.isnan()
    labels, order = labels[keep].sort()
    present, counts = labels.unique_consecutive(return_counts=True)
    ordered: list[float] = values[keep][order].double().tolist()
    means, start = [], 0
    for count in counts.tolist():
        means.append(math.fsum(ordered[start : start + count]) / count)
        start += count
    return present, torch.tensor(means, dtype=torch.float64, device=values.device), counts


def macro_mean(values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"]) -> float:
    """Average the means of the classes over their queries; NaN where no query has a value.

    The order of the queries and the names of the classes do not change its bits.

    Args:
        values: One value for each query; NaN where it has none.
        labels: The class of each query, any integers.

    Examples:
        >>> import torch
        >>> macro_mean(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([5, 5, 5, 8]))
        0.5
    """
    return exact_mean(class_means(values, labels)[1])
