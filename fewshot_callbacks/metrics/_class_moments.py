"""What metrics of the classes' moments share: state, update, reduction over ranks."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.functional._checks import check_labels
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, unit_rows
from fewshot_callbacks.metrics._sync import gather_tensors

STATES = ("class_labels", "counts", "origins", "offsets", "spread")
"""One for each field of `ClassMoments`, in their order."""


class ClassMomentsMetric(Metric):
    """Holds the moments of each class of all batches since the last reset. A `MetricCollection` updates them once for all.

    Args:
        normalize: scale each embedding to length 1 first.
        **kwargs: see `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    class_labels: list[Tensor]
    counts: list[Tensor]
    origins: list[Tensor]
    offsets: list[Tensor]
    spread: list[Tensor]

    def __init__(self, *, normalize: bool, **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": gather_tensors} | kwargs)
        self.normalize = normalize
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
                f"{type(self).__name__} needs embeddings of shape (items, dim); got shape {tuple(embeddings.shape)}. "
                "Flatten what belongs to one item: embeddings.flatten(1)."
            )
        labels = check_labels(labels.detach(), len(embeddings), "labels", "embeddings", type(self).__name__)
        if len(embeddings) == 0:
            return
        items = embeddings.detach()
        if self.normalize:
            items = unit_rows(items.double())
        batch = ClassMoments.of(items, labels.to(items.device))
        self._set(self._moments().merge(batch) if self.counts else batch)

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
