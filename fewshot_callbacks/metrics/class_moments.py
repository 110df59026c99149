"""The discriminant ratio J and the variance ratio of a whole set as torchmetrics metrics."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.functional.discriminant_ratio import EPS, ClassMoments, unit_rows
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval
from fewshot_callbacks.functional.variance_ratio import variance_ratio_of_set
from fewshot_callbacks.metrics._label_states import add_label_states, form_of_labels, labels_in_states, set_labels
from fewshot_callbacks.metrics.embedding_store import gather_tensors, read_batch

# States that hold the fields of `ClassMoments` besides the labels, in their order.
VALUES = ("counts", "origins", "offsets", "spread")


class ClassMomentsMetric(Metric):
    """Holds the moments of each class over all batches since the last reset.

    Metrics of a `MetricCollection` share these states, so that each batch is added once.

    Args:
        normalize: Scale each embedding to length 1 first.
        **kwargs: See `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    class_labels: list[Tensor]
    class_labels_json: list[Tensor]
    # number of classes of each process
    classes: list[Tensor]
    counts: list[Tensor]
    origins: list[Tensor]
    offsets: list[Tensor]
    spread: list[Tensor]

    def __init__(self, *, normalize: bool, **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": gather_tensors} | kwargs)
        self.normalize = normalize
        add_label_states(self, "class_labels")
        for name in ("classes", *VALUES):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Any, labels: Any) -> None:
        """Add a batch.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers or strings.

        Raises:
            ValueError: If embeddings are not (items, dim), with the same dim as earlier batches, or labels are not one
                integer or string for each item, in the same form as earlier labels.
        """
        call = type(self).__name__
        dim = self.origins[0].shape[1] if self.counts else None
        form = form_of_labels(self, "class_labels")
        embeddings, item_labels = read_batch(embeddings, labels, f"{call}.update", form, dim)
        if len(embeddings) == 0:
            return
        if self.normalize:
            embeddings = unit_rows(embeddings.double())
        moments = ClassMoments.of(embeddings, item_labels)
        if self.counts:
            moments = self._moments(call).merge(moments)
        set_labels(self, "class_labels", moments.labels)
        self.classes = [torch.tensor([len(moments.labels)], device="cpu")]
        for name, tensor in zip(VALUES, moments.values(), strict=True):
            setattr(self, name, [tensor])

    def within_scatter(self) -> dict[int | str, float]:
        """Compute the mean squared distance of the items of each class to their mean. *Collective*.

        The keys are the labels as they were passed. Items of all processes count. Empty before the first item.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if len(self.counts) == 0:
                return {}
            moments = self._moments(f"{type(self).__name__}.within_scatter")
        return dict(zip(moments.labels.tolist(), (moments.scatter / moments.counts).tolist(), strict=True))

    def _moments(self, call: str) -> ClassMoments:
        """Return the moments of this process, or merged over all processes once torchmetrics has joined the states.

        Raises:
            ValueError: If some processes have strings for labels, and others integers.
        """
        labels = labels_in_states(self, "class_labels", call, "labels")
        # The states of the processes stand one behind the other: these are the numbers of their classes.
        class_counts = _joined_state(self.classes).tolist()
        columns = [_joined_state(getattr(self, name)) for name in VALUES]
        moments = []
        stop = 0
        for class_count in class_counts:
            start, stop = stop, stop + class_count
            counts, *values = (column[start:stop] for column in columns)
            moments.append(ClassMoments(labels[start:stop], counts, *(value.double() for value in values)))
        return reduce(ClassMoments.merge, moments)


def _joined_state(state: list[Tensor] | Tensor) -> Tensor:
    """Return a state as one tensor, which it is already if torchmetrics has joined the processes."""
    return state if isinstance(state, Tensor) else torch.cat(state)


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
        self.eps = eps
        self.skip_singletons = skip_singletons

    def compute(self) -> Tensor:
        """Compute J of all items, at least 0, larger is better; NaN before the first item and where J is undefined."""
        if len(self.counts) == 0:
            return torch.tensor(torch.nan, dtype=torch.float32, device=self.device)
        moments = self._moments("DiscriminantRatio.compute")
        return moments.discriminant_ratio(eps=self.eps, skip_singletons=self.skip_singletons).float()


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
        if len(self.counts) == 0:
            return torch.tensor(torch.nan, dtype=torch.float32, device=self.device)
        moments = self._moments("VarianceRatio.compute")
        return torch.tensor(variance_ratio_of_set(moments).value, dtype=torch.float32, device=self.device)

    def interval(self, confidence: float = 0.95) -> Interval:
        """Compute the interval of the ratio, with classes as the independent units. *Collective*.

        Items of all processes count. NaN for fewer than three classes.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if len(self.counts) == 0:
                return UNKNOWN
            moments = self._moments("VarianceRatio.interval")
        return variance_ratio_of_set(moments, confidence=confidence).interval
