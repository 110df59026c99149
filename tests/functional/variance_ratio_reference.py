"""The variance ratio and its interval by their definitions: float64, one item and one class after the other."""

import math

import numpy as np
from scipy.stats import t as student


def ratio_by_definition(embeddings, labels):
    """(MSB - MSW) / (n0 MSW); NaN where it is undefined."""
    items = [np.asarray(item, dtype=np.float64) for item in embeddings.detach().double()]
    classes = [
        [item for item, own in zip(items, labels.tolist(), strict=True) if own == c] for c in set(labels.tolist())
    ]
    n, k = len(items), len(classes)
    if k < 2 or n == k:
        return math.nan
    centre = sum(items) / n
    means = [sum(members) / len(members) for members in classes]
    msb = sum(len(own) * float(((m - centre) ** 2).sum()) for own, m in zip(classes, means, strict=True)) / (k - 1)
    msw = sum(float(((x - m) ** 2).sum()) for own, m in zip(classes, means, strict=True) for x in own) / (n - k)
    return (msb - msw) / (effective_class_size(labels) * msw) if msw else math.nan


def effective_class_size(labels):
    """Return n0, the effective number of items of a class."""
    counts = np.unique(labels.numpy(), return_counts=True)[1].tolist()
    return (sum(counts) - sum(c * c for c in counts) / sum(counts)) / (len(counts) - 1)


def interval_by_definition(embeddings, labels, confidence=0.95):
    """The jackknife over classes on the logarithm: each class is left out, and all is computed again."""
    names = sorted(set(labels.tolist()))
    if len(names) < 3:
        return math.nan, math.nan
    n0 = effective_class_size(labels)
    without = [ratio_by_definition(embeddings[labels != name], labels[labels != name]) for name in names]
    if not all(1 + n0 * ratio > 0 for ratio in without):
        return math.nan, math.nan
    logs = [math.log(1 + n0 * ratio) for ratio in without]
    mean = sum(logs) / len(logs)
    moves = [log - mean for log in logs]
    error = math.sqrt((len(names) - 1) / len(names) * sum(move**2 for move in moves))
    shares = [int((labels == name).sum()) / len(labels) for name in names]
    freedom = 2 * sum(move**2 for move in moves) ** 2 / sum(move**4 for move in moves)
    freedom = max(1.0, min(1 / sum(share**2 for share in shares) - 1, freedom))
    centre = math.log(1 + n0 * ratio_by_definition(embeddings, labels))
    reach = float(student.ppf((1 + confidence) / 2, freedom)) * error
    return (math.exp(centre - reach) - 1) / n0, (math.exp(centre + reach) - 1) / n0


def logged_by_definition(embeddings, labels):
    """Return the values that a monitor must log of a set, by their keys without the prefix."""
    low, high = interval_by_definition(embeddings, labels)
    return {
        "variance_ratio": ratio_by_definition(embeddings, labels),
        "variance_ratio_low": low,
        "variance_ratio_high": high,
    }
