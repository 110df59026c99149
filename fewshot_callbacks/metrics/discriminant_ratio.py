"""J of a whole set as a torchmetrics metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.functional.discriminant_ratio import EPS
from fewshot_callbacks.metrics._class_moments import ClassMomentsMetric


class DiscriminantRatio(ClassMomentsMetric):
    """The discriminant ratio J over all batches since the last reset, in one streaming pass.

    The state is one count, mean and scatter for each class, regardless of the number of items. Batches and ranks are
    merged in float64, so that the value equals J of all items at once. A metric does not see which samples a
    `DistributedSampler` repeats to even out the ranks, and counts them again; `DiscriminantRatioMonitor` leaves them
    out.

    Args:
        eps: Share of the total scatter that is added to the scatter within classes; J is at most 1 / eps.
        normalize: Scale each embedding to length 1 first.
        skip_singletons: Leave out classes with a single item.
        **kwargs: See `torchmetrics.Metric`.

    Examples:
        >>> import torch
        >>> metric = DiscriminantRatio()
        >>> metric.update(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([[0.0, 2.0], [4.0, 2.0]]), torch.tensor([0, 1]))
        >>> round(metric.compute().item(), 6)
        4.0
    """

    def __init__(
        self, *, eps: float = EPS, normalize: bool = False, skip_singletons: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(normalize=normalize, **kwargs)
        self.eps, self.skip_singletons = eps, skip_singletons

    def compute(self) -> Tensor:
        """Compute J of all items, at least 0, larger is better; NaN before the first item and where J is undefined."""
        if len(self.counts) == 0:
            return torch.tensor(torch.nan, device=self.device)
        return self._moments().discriminant_ratio(eps=self.eps, skip_singletons=self.skip_singletons).float()
