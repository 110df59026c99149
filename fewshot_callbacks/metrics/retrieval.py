"""`evaluate_retrieval` as a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.functional._checks import check_labels
from fewshot_callbacks.functional.report import RetrievalReport
from fewshot_callbacks.functional.retrieval import evaluate_retrieval
from fewshot_callbacks.metrics._sync import gather_tensors
from fewshot_callbacks.metrics.embedding_store import first_of_each, id_numbers


class RetrievalEvaluation(Metric):
    """Collects embeddings over batches and evaluates them, leave-one-out, when asked.

    For people who hold their metrics in the module. Embeddings are kept on the CPU in the dtype of the model.

    Args:
        settings: keyword arguments of `evaluate_retrieval`, such as `{"recall_k": (1, 10)}`.
        **kwargs: see `torchmetrics.Metric`.

    Examples:
        >>> import torch
        >>> metric = RetrievalEvaluation({"group_size": None})
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> metric.update(torch.nn.functional.one_hot(labels).float(), labels)
        >>> metric.compute()["mAP"]
        tensor(1., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    embeddings: list[Tensor]
    labels: list[Tensor]
    ids: list[Tensor]

    def __init__(self, settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**{"compute_on_cpu": True, "dist_sync_fn": gather_tensors} | kwargs)
        self.settings = dict(settings or {})
        self.report: RetrievalReport | None = None
        """the whole report of the last `compute`"""
        for name in ("embeddings", "labels", "ids"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Tensor, labels: Tensor, ids: Tensor | Sequence[object] | None = None) -> None:
        """Add a batch.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers.
            ids: (items,) integers or words that name each item. Of items of one name the first counts: a
                `DistributedSampler` repeats some to even out the processes, which a metric cannot see.

        Raises:
            ValueError: if shapes or types do not fit, or only some batches have ids.
        """
        if embeddings.ndim != 2:
            raise ValueError(
                f"RetrievalEvaluation needs embeddings of shape (items, dim); got shape {tuple(embeddings.shape)}. "
                "Flatten what belongs to one item: embeddings.flatten(1)."
            )
        labels = check_labels(labels.detach(), len(embeddings), "labels", "embeddings", "RetrievalEvaluation")
        if self.labels and bool(self.ids) != (ids is not None):
            raise ValueError(
                "RetrievalEvaluation.update: some batches have ids, others none. Pass them with each batch."
            )
        if ids is not None:
            self.ids.append(id_numbers(ids, len(embeddings), "RetrievalEvaluation"))
        self.labels.append(labels.clone())
        self.embeddings.append(embeddings.detach().clone())

    def compute(self) -> dict[str, Tensor]:
        """The metrics by name, as `RetrievalReport.metrics` names them; the report itself is kept in `report`.

        Raises:
            ValueError: as `evaluate_retrieval` does, for instance when nothing was collected.
        """
        embeddings, labels, ids = (
            state if isinstance(state, Tensor) else torch.cat(state) if state else torch.empty(0, 0)
            for state in (self.embeddings, self.labels, self.ids)
        )
        if len(embeddings) == 0:
            raise ValueError("RetrievalEvaluation.compute: no batch was added. Call update(embeddings, labels) first.")
        if len(ids) == len(labels):
            first = first_of_each(ids)
            embeddings, labels = embeddings[first], labels[first]
        self.report = evaluate_retrieval(embeddings, labels, **self.settings)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.report.metrics().items()}
