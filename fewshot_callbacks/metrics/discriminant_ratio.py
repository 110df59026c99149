"""J of a whole set as a torchmetrics metric."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.functional._checks import check_labels
from fewshot_callbacks.functional.discriminant_ratio import EPS, ClassMoments, unit_rows
from fewshot_callbacks.metrics._sync import gather_tensors

STATES = ("class_labels", "counts", "origins", "offsets", "spread")
"""One for each field of `ClassMoments`, in their order."""


class DiscriminantRatio(Metric):
    """The discriminant ratio J over all batches since the last reset, in one streaming pass.

    The state is one count, mean and scatter for each class, however many items there are. Batches and ranks are merged
    exactly (in float64), so that the value equals J of all items at once. A metric does not see which samples a
    `DistributedSampler` repeats to even out the ranks, and counts them again; `DiscriminantRatioMonitor` leaves them out.

    Args:
        eps: share of the total scatter that is added to the scatter within classes; J is at most 1 / eps.
        normalize: scale each embedding to length 1 first.
        skip_singletons: leave out classes with a single item.
        **kwargs: see `torchmetrics.Metric`.

    Examples:
        >>> import torch
        >>> metric = DiscriminantRatio()
        >>> metric.update(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([[0.0, 2.0], [4.0, 2.0]]), torch.tensor([0, 1]))
        >>> round(metric.compute().item(), 6)
        4.0
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    class_labels: list[Tensor]
    counts: list[Tensor]
    origins: list[Tensor]
    offsets: list[Tensor]
    spread: list[Tensor]

    def __init__(
        self, *, eps: float = EPS, normalize: bool = False, skip_singletons: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**{"dist_sync_fn": gather_tensors} | kwargs)
        self.eps, self.normalize, self.skip_singletons = eps, normalize, skip_singletons
        for name in STATES:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers.

        Raises:
            ValueError: if embeddings are not (items, dim) or labels are not one integer for each.
        """
        if embeddings.ndim != 2:
            raise ValueError(
                f"DiscriminantRatio needs embeddings of shape (items, dim); got shape {tuple(embeddings.shape)}. "
                "Flatten what belongs to one item: embeddings.flatten(1)."
            )
        labels = check_labels(labels.detach(), len(embeddings), "labels", "embeddings", "DiscriminantRatio")
        if len(embeddings) == 0:
            return
        items = embeddings.detach()
        if self.normalize:
            items = unit_rows(items.double())
        batch = ClassMoments.of(items, labels.to(items.device))
        self._set(self._moments().merge(batch) if self.counts else batch)

    def compute(self) -> Tensor:
        """J of everything seen; NaN before the first item and where J says nothing."""
        if len(self.counts) == 0:
            return torch.tensor(torch.nan, device=self.device)
        return self._moments().discriminant_ratio(eps=self.eps, skip_singletons=self.skip_singletons).float()

    def within_scatter(self) -> dict[int, float]:
        """For each class the mean squared distance of its items to their mean: which classes are spread out.

        Over the items of all processes, so that each of them has to call it. Empty before the first item.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if len(self.counts) == 0:
                return {}
            moments = self._moments()
        return dict(zip(moments.labels.tolist(), (moments.scatter / moments.counts).tolist(), strict=True))

    def _set(self, moments: ClassMoments) -> None:
        for name, tensor in zip(STATES, moments.tensors(), strict=True):
            setattr(self, name, [tensor])

    def _moments(self) -> ClassMoments:
        """The states of all ranks as one; a rank's classes are ascending, so that a step down begins the next rank."""
        states = (getattr(self, name) for name in STATES)
        labels, counts, *values = (state if isinstance(state, Tensor) else torch.cat(state) for state in states)
        starts = [0, *((labels[1:] <= labels[:-1]).nonzero().flatten() + 1).tolist(), len(labels)]
        parts = [
            ClassMoments(labels[a:b], counts[a:b], *(value[a:b].double() for value in values))
            for a, b in pairwise(starts)
        ]
        return reduce(ClassMoments.merge, parts)
