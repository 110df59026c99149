"""Losses for embeddings: differentiable approximations of average precision."""

from fewshot_callbacks.losses.average_precision import (
    BinaryCodes,
    SoftAveragePrecisionLoss,
    SoftHistograms,
    soft_average_precision,
    tie_aware_average_precision,
)

__all__ = [
    "BinaryCodes",
    "SoftAveragePrecisionLoss",
    "SoftHistograms",
    "soft_average_precision",
    "tie_aware_average_precision",
]
