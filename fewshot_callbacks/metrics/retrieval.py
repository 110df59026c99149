"""`evaluate_retrieval` as a torchmetrics metric."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast, get_type_hints

import torch
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks._extras import needs
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional.retrieval import (
    RetrievalOptions,
    RetrievalReport,
    RetrievalSettings,
    asked_metric,
    evaluate_retrieval,
    shows_settings,
)
from fewshot_callbacks.metrics._sync import gather_tensors
from fewshot_callbacks.metrics._words import (
    as_state,
    read_batch,
    refuse_another_dim,
    refuse_another_form,
    refuse_other_codes,
    words_held,
)
from fewshot_callbacks.metrics.embedding_store import first_of_each, id_numbers, note_on_ids, sketches


class MetricOptions(TypedDict, total=False):
    """The keywords of `torchmetrics.Metric`."""

    compute_on_cpu: bool
    dist_sync_on_step: bool
    process_group: Any
    dist_sync_fn: Any
    distributed_available_fn: Any
    sync_on_compute: bool
    compute_with_cache: bool


class EvaluationOptions(RetrievalOptions, MetricOptions, total=False):
    """The keywords of `RetrievalEvaluation`."""


@shows_settings()
class RetrievalEvaluation(Metric):
    """Collects embeddings over batches, and evaluates them leave-one-out in `compute`.

    It is meant for modules that hold their own metrics; with a Trainer, `RetrievalMonitor` needs less code. Its result is a
    dictionary, so log it with `self.log_dict(metric.compute())` and then call `metric.reset()`; `self.log` takes only
    metrics of a single value. Embeddings are kept on the CPU in the dtype of the model. For queries and a gallery, groups or
    multi-label targets collect the embeddings yourself and call `evaluate_retrieval` or `evaluate_multilabel`. The keywords
    of `torchmetrics.Metric`, such as `sync_on_compute`, are accepted, too.

    Args:
        **settings: See `RetrievalSettings`.

    Raises:
        ValueError: If a setting is unknown or out of range.

    Examples:
        >>> import torch
        >>> metric = RetrievalEvaluation(metrics=("mAP", "recall@1"))
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> metric.update(torch.nn.functional.one_hot(labels).float(), labels)
        >>> metric.compute()["mAP"]
        tensor(1., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    embeddings: list[Tensor]
    labels: list[Tensor]
    ids: list[Tensor]
    words: list[Tensor]

    def __init__(self, **settings: Unpack[EvaluationOptions]) -> None:
        options: dict[str, Any] = {"compute_on_cpu": True, "dist_sync_fn": gather_tensors}
        options |= {name: value for name, value in settings.items() if name in get_type_hints(MetricOptions)}
        super().__init__(**options)
        own = {name: value for name, value in settings.items() if name not in options}
        RetrievalSettings.checked(RetrievalEvaluation, own)
        self.settings = cast(RetrievalOptions, own)
        self.report: RetrievalReport | None = None
        """the report of the last `compute`; None before the first"""
        for name in ("embeddings", "labels", "ids", "words"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Any, labels: Any, ids: Any | None = None) -> None:
        """Add a batch.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers or words.
            ids: (items,) integers or words that identify each item. Only the first item of each id is counted, with a
                warning in `compute` if others of this id differ from it in embedding or label. Needed
                under a `DistributedSampler`, which repeats items to give all processes the same number; a metric cannot
                see which.

        Raises:
            ValueError: If shapes or types do not fit each other or earlier batches, or only some batches have ids.
        """
        call = "RetrievalEvaluation"
        embeddings, read = read_batch(embeddings, labels, call)
        if self.labels:
            refuse_another_form(f"{call}.update", bool(self.words), read)
            refuse_another_dim(f"{call}.update", self.embeddings[0].shape[1], embeddings)
        if self.labels and bool(self.ids) != (ids is not None):
            raise ValueError(
                "RetrievalEvaluation.update: some batches have ids, others none. Pass them with each batch."
            )
        if ids is not None:
            self.ids.append(id_numbers(ids, len(embeddings), call))
        if read.words is not None:
            self.words.append(as_state(read.words))
        self.labels.append(read.codes.to("cpu", copy=True))
        self.embeddings.append(embeddings.clone())

    def compute(self) -> dict[str, Tensor]:
        """Compute the metrics under the names of `RetrievalReport.metrics`; the report itself is kept in `report`.

        Raises:
            ValueError: As `evaluate_retrieval` does, for instance when nothing was collected.
        """
        embeddings, labels, ids = (
            state if isinstance(state, Tensor) else torch.cat(state) if state else torch.empty(0, 0)
            for state in (self.embeddings, self.labels, self.ids)
        )
        if len(embeddings) == 0:
            raise ValueError("RetrievalEvaluation.compute: no batch was added. Call update(embeddings, labels) first.")
        if len(ids) == len(labels):
            note = note_on_ids(ids.cpu(), labels.cpu(), sketches(embeddings.cpu()))
            if note is not None:
                warnings.warn(f"RetrievalEvaluation: {note}", stacklevel=2)
            first = first_of_each(ids)
            embeddings, labels = embeddings[first], labels[first]
        book = words_held(self.words)
        if book is not None:
            refuse_other_codes("RetrievalEvaluation.compute", labels, book)
        self.report = evaluate_retrieval(embeddings, Labels(labels, book), **self.settings)
        return {
            name: torch.tensor(value, dtype=torch.float64, device="cpu")
            for name, value in self.report.metrics().items()
        }

    def plot(
        self, val: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None, ax: Any | None = None
    ) -> tuple[Any, Any]:
        """Draw the values that have a range, which are all but the threshold.

        Args:
            val: A result of `compute` or `forward`, drawn as bars, or a list of such results, drawn as lines; by default
                what `compute` gives.
            ax: Axes of matplotlib to draw into; by default those of a new figure.

        Returns:
            The figure and the axes.
        """
        val = self.compute() if val is None else val
        if not isinstance(val, Mapping):
            return self._plot([_without_threshold(one) for one in val], ax)
        with needs("report", "RetrievalEvaluation.plot"):
            from matplotlib import pyplot  # noqa: PLC0415 - only who draws needs it

        shown = _without_threshold(val)
        figure, axes = pyplot.subplots(layout="constrained") if ax is None else (ax.get_figure(), ax)
        bars = axes.barh(list(shown), [float(value) for value in shown.values()])
        axes.bar_label(bars, fmt="%.3f", padding=3)
        axes.invert_yaxis()  # the first metric on top
        axes.set_xlim(0, 1.12)  # room for the number beside a bar of length 1
        axes.set_title(type(self).__name__)
        return figure, axes


def _without_threshold(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if asked_metric(name).metric.range is not None}
