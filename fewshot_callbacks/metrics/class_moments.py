"""The discriminant ratio J and the variance ratio of a whole set as torchmetrics metrics."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.distributed.torch_distributed import gather_tensors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional.discriminant_ratio import EPS, ClassMoments, moments_of_set, unit_rows
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval
from fewshot_callbacks.functional.variance_ratio import variance_ratio_of_set
from fewshot_callbacks.metrics._label_states import (
    add_label_states,
    append_labels,
    batches_in,
    first_of_each_id,
    form_of_labels,
    labels_in_states,
    refuse_other_columns,
    set_labels,
)
from fewshot_callbacks.metrics._rows import join_rows
from fewshot_callbacks.metrics.item_batch import ItemBatch

# states for the fields of `ClassMoments` except the labels, in their order
VALUES = ("counts", "origins", "offsets", "spread")


class ClassMomentsMetric(Metric):
    """Collects the moments of each class over all batches since the last reset; with ids the items, on the CPU.

    Metrics in a `MetricCollection` share these states, so each batch is added once.

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
    # items with ids, because moments do not record which items they contain
    embeddings: list[Tensor]
    labels: list[Tensor]
    labels_json: list[Tensor]
    ids: list[Tensor]
    ids_json: list[Tensor]

    def __init__(self, *, normalize: bool, **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": gather_tensors} | kwargs)
        self.normalize = normalize
        for name in ("class_labels", "labels", "ids"):
            add_label_states(self, name)
        for name in ("classes", *VALUES, "embeddings"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Any, labels: Any, ids: Any | None = None) -> None:
        """Add a batch.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers or strings.
            ids: (items,) integers or strings that identify each item. Only the first item of each id counts; `compute`
                warns if others differ from it in embedding or label. You need ids with a `DistributedSampler`: it
                repeats items to give all processes the same number, and a metric cannot detect them. With ids, the
                embeddings are kept on the CPU.

        Raises:
            ValueError: If the embeddings are not (items, dim) with the dim of earlier batches, the labels are not one
                integer or string per item in the form of earlier labels, or only some batches have ids.
        """
        method = f"{type(self).__name__}.update"
        kept = self.embeddings or self.origins
        name_of_labels = "labels" if self.embeddings else "class_labels"
        if kept:
            refuse_other_columns(method, {"ids": len(self.embeddings) > 0}, {"ids": ids})
        batch = ItemBatch.read(method, embeddings, labels, ids, floats=True)
        forms = {"labels": form_of_labels(self, name_of_labels), "ids": form_of_labels(self, "ids")}
        batch.refuse_unlike(method, kept[0].shape[1] if kept else None, forms)
        if not len(batch):
            return
        if ids is None:
            self._add_moments(batch.embeddings, batch.labels)
            return
        self.embeddings.append(batch.embeddings.detach().to("cpu", copy=True))
        append_labels(self, "labels", batch.labels)
        append_labels(self, "ids", batch.columns["ids"])

    def _add_moments(self, embeddings: Tensor, labels: Labels) -> None:
        """Merge the moments of a batch into the state."""
        if self.normalize:
            embeddings = unit_rows(embeddings.double())
        moments = ClassMoments.of(embeddings, labels)
        if self.counts:
            moments = self._moments(type(self).__name__).merge(moments)
        set_labels(self, "class_labels", moments.labels)
        self.classes = [torch.tensor([len(moments.labels)], device="cpu")]
        for name, tensor in zip(VALUES, moments.values(), strict=True):
            setattr(self, name, [tensor])

    def within_scatter(self) -> dict[int | str, float]:
        """Return label -> mean squared distance of the class's items to their mean, over all processes. *Collective*.

        The labels are as you passed them. Empty before the first item.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if not self._has_items:
                return {}
            moments = self._moments(f"{type(self).__name__}.within_scatter")
        return dict(zip(moments.labels.tolist(), (moments.scatter / moments.counts).tolist(), strict=True))

    @property
    def _has_items(self) -> bool:
        """Whether there was an item; after torchmetrics has joined the states, in any process."""
        return len(self.counts) > 0 or len(self.embeddings) > 0

    def _moments(self, call: str) -> ClassMoments:
        """Return the moments of this process; of all processes after torchmetrics has joined the states."""
        if len(self.embeddings):
            return self._moments_of_items(call)
        labels = labels_in_states(self, "class_labels", call, "labels")
        # The states of the processes are concatenated: number of classes of each.
        class_counts = torch.cat(batches_in(self.classes)).tolist()
        columns = [torch.cat(batches_in(getattr(self, name))) for name in VALUES]
        moments = []
        stop = 0
        for class_count in class_counts:
            start, stop = stop, stop + class_count
            counts, *values = (column[start:stop] for column in columns)
            moments.append(ClassMoments(labels[start:stop], counts, *(value.double() for value in values)))
        return reduce(ClassMoments.merge, moments)

    def _moments_of_items(self, call: str) -> ClassMoments:
        """Return the moments of the first item of each id."""
        if len(self.counts):
            raise InputError(f"{call}: some processes gave ids, but others did not. Pass ids in every process.")
        batches = batches_in(self.embeddings)
        labels, ids = (labels_in_states(self, name, call) for name in ("labels", "ids"))
        every_item = torch.ones(len(ids), dtype=torch.bool, device="cpu")
        is_first = first_of_each_id(every_item, batches, labels, ids, type(self).__name__)
        moments = moments_of_set(join_rows(batches, is_first), labels[is_first], normalize=self.normalize)
        assert moments is not None
        return moments


class DiscriminantRatio(ClassMomentsMetric):
    """The discriminant ratio J over all batches since the last reset, computed in one streaming pass.

    J = Tr(S_B) / Tr(S_W) is the scatter between classes over the scatter within classes, at least 0. Higher means
    better separated classes: 0 if all classes have the same mean, 1 if class means are as far apart as items of one
    class are.

    The state is a count, a mean and a scatter per class, regardless of the number of items. Batches and ranks are
    merged in float64, so the value equals J of all items at once. With `update(embeddings, labels, ids)` each item
    counts once, and the state is the items. With several processes you need ids, because a metric cannot detect the
    items that a `DistributedSampler` repeats.

    Args:
        eps: Fraction of the total scatter that is added to the scatter within classes. J is at most 1 / eps.
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
        """Return J of all items, at least 0; higher is better. NaN before the first item, and if J is undefined."""
        if not self._has_items:
            return torch.tensor(torch.nan, dtype=torch.float32, device=self.device)
        moments = self._moments("DiscriminantRatio.compute")
        return moments.discriminant_ratio(eps=self.eps, skip_singletons=self.skip_singletons).float()


class VarianceRatio(ClassMomentsMetric):
    """The variance between classes over the variance within classes, over all batches since the last reset.

    Higher means better separated classes. For pure noise the expected value is 0, and the ratio can be slightly
    negative.

    The state is the same as in `DiscriminantRatio`: in a `MetricCollection` both share it, and each batch is added
    once. Batches and ranks are merged in float64. With ids each item counts once.

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
        """Return the ratio of all items; higher is better. NaN before the first item, and if it is undefined."""
        if not self._has_items:
            return torch.tensor(torch.nan, dtype=torch.float32, device=self.device)
        moments = self._moments("VarianceRatio.compute")
        return torch.tensor(variance_ratio_of_set(moments).value, dtype=torch.float32, device=self.device)

    def interval(self, confidence: float = 0.95) -> Interval:
        """Return the interval of the ratio over all processes, with classes as the independent units. *Collective*.

        NaN for fewer than three classes.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if not self._has_items:
                return UNKNOWN
            moments = self._moments("VarianceRatio.interval")
        return variance_ratio_of_set(moments, confidence=confidence).interval
