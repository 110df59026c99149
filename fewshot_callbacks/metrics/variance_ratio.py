"""The variance ratio of a whole set as a torchmetrics metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.functional.statistics import UNKNOWN, Interval
from fewshot_callbacks.functional.variance_ratio import variance_ratio_of_set
from fewshot_callbacks.metrics._class_moments import ClassMomentsMetric


class VarianceRatio(ClassMomentsMetric):
    """Variance between classes over variance within them, over all batches since the last reset, in one streaming pass.

    The state is that of `DiscriminantRatio`: in a `MetricCollection` both share it, and each batch is added once.
    Batches and ranks are merged in float64. A metric does not see which samples a `DistributedSampler` repeats to even
    out the ranks, and counts them again; `DiscriminantRatioMonitor` leaves them out.

    Args:
        normalize: Scale each embedding to length 1 first.
        **kwargs: See `torchmetrics.Metric`.

    Examples:
        >>> import torch
        >>> metric = VarianceRatio()
        >>> metric.update(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([[0.0, 2.0], [4.0, 2.0]]), torch.tensor([0, 1]))
        >>> round(metric.compute().item(), 6)
        3.5
    """

    def __init__(self, *, normalize: bool = False, **kwargs: Any) -> None:
        super().__init__(normalize=normalize, **kwargs)

    def compute(self) -> Tensor:
        """Compute the ratio over all items, larger is better; NaN before the first one and where it is undefined."""
        value = variance_ratio_of_set(self._moments()).value if len(self.counts) else torch.nan
        return torch.tensor(value, device=self.device)

    def interval(self, confidence: float = 0.95) -> Interval:
        """Interval of the ratio, with classes as the independent units; NaN for fewer than three of them.

        The items are those of all processes, so every process must call it.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if len(self.counts) == 0:
                return UNKNOWN
            moments = self._moments()
        return variance_ratio_of_set(moments, confidence=confidence).interval
