"""Losses for embeddings: smooth approximations of average precision."""

from fewshot_callbacks.losses.average_precision import (
    BinaryCodes,
    SoftAveragePrecisionLoss,
    soft_average_precision,
    tie_aware_average_precision,
)
from fewshot_callbacks.losses.histograms import SoftHistograms

__all__ = [
    "BinaryCodes",
    "SoftAveragePrecisionLoss",
    "SoftHistograms",
    "soft_average_precision",
    "tie_aware_average_precision",
]
