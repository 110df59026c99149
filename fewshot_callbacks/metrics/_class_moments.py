"""What metrics of the classes' moments share: state, update, reduction over ranks."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.functional._labels import Labels, merged_books
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, unit_rows
from fewshot_callbacks.metrics._sync import gather_tensors
from fewshot_callbacks.metrics._words import (
    as_state,
    read_batch,
    refuse_another_dim,
    refuse_another_form,
    refuse_other_codes,
    words_held,
)

# One for each field of `ClassMoments`, in their order. Beside them stands `words`, see `_words`.
STATES = ("class_labels", "counts", "origins", "offsets", "spread")


class ClassMomentsMetric(Metric):
    """Holds the moments of each class of all batches since the last reset. A `MetricCollection` updates them once for all.

    Args:
        normalize: Scale each embedding to length 1 first.
        **kwargs: See `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    class_labels: list[Tensor]
    counts: list[Tensor]
    origins: list[Tensor]
    offsets: list[Tensor]
    spread: list[Tensor]
    words: list[Tensor]

    def __init__(self, *, normalize: bool, **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": gather_tensors} | kwargs)
        self.normalize = normalize
        for name in (*STATES, "words"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Any, labels: Any) -> None:
        """Add a batch.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers or words.

        Raises:
            ValueError: If embeddings are not (items, dim), with the same dim as earlier batches, or labels are not one
                integer or word for each item, in the same form as earlier labels.
        """
        call = type(self).__name__
        embeddings, read = read_batch(embeddings, labels, call)
        if len(embeddings) == 0:
            return
        book = words_held(self.words)
        if self.counts:
            refuse_another_form(f"{call}.update", Labels(read.codes, book).form, read)
            refuse_another_dim(f"{call}.update", self.origins[0].shape[1], embeddings)
        items = embeddings
        if self.normalize:
            items = unit_rows(items.double())
        batch = ClassMoments.of(items, read.codes.to(items.device))
        self._set(self._moments().merge(batch) if self.counts else batch)
        if read.words is not None:
            self.words = [as_state(merged_books([book, read.words], call) or {})]

    def within_scatter(self) -> dict[int | str, float]:
        """Compute the mean squared distance of the items of each class to their mean.

        The keys are the labels as they were given, and the items are those of all processes, so every process must call
        it. Empty before the first item.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            if len(self.counts) == 0:
                return {}
            moments, book = self._moments(), words_held(self.words)
        keys: list[Any] = moments.labels.tolist()
        if book is not None:
            refuse_other_codes(f"{type(self).__name__}.within_scatter", moments.labels, book)
            keys = [book[code] for code in keys]
        return dict(zip(keys, (moments.scatter / moments.counts).tolist(), strict=True))

    def _set(self, moments: ClassMoments) -> None:
        for name, tensor in zip(STATES, moments.tensors(), strict=True):
            setattr(self, name, [tensor])

    def _moments(self) -> ClassMoments:
        """Merge the states of all ranks; a rank's classes are ascending, so that a step down begins the next rank."""
        states = (getattr(self, name) for name in STATES)
        labels, counts, *values = (state if isinstance(state, Tensor) else torch.cat(state) for state in states)
        starts = [0, *((labels[1:] <= labels[:-1]).nonzero().flatten() + 1).tolist(), len(labels)]
        parts = [
            ClassMoments(labels[a:b], counts[a:b], *(value[a:b].double() for value in values))
            for a, b in pairwise(starts)
        ]
        return reduce(ClassMoments.merge, parts)
