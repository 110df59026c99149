"""`evaluate_retrieval` as a torchmetrics metric."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast, get_type_hints

import torch
from jaxtyping import Bool
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.distributed.torch_distributed import gather_tensors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional._reading import named
from fewshot_callbacks.functional._repeated import is_on_copies
from fewshot_callbacks.functional.retrieval import (
    METRICS,
    Relevance,
    RetrievalReport,
    evaluate_retrieval,
    requested_metric,
)
from fewshot_callbacks.functional.retrieval.evaluate import NothingToRetrieveError
from fewshot_callbacks.functional.retrieval.judgements import check_choices, read_judgements
from fewshot_callbacks.functional.retrieval.settings import from_keywords, request_of, without_classes
from fewshot_callbacks.metrics._label_states import (
    add_label_states,
    append_labels,
    batches_in,
    first_of_each_id,
    form_of_labels,
    has_labels,
    labels_in_states,
    refuse_other_columns,
)
from fewshot_callbacks.metrics._rows import join_rows
from fewshot_callbacks.metrics.item_batch import ItemBatch
from fewshot_callbacks.settings import RetrievalOptions, takes
from fewshot_callbacks.system.words import counted

# columns with a label per item; each has the two states of `add_label_states`
LABEL_COLUMNS = ("labels", "ids", "groups")


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


@takes(RetrievalOptions)
class RetrievalEvaluation(Metric):
    """Collects embeddings over batches and evaluates them in `compute`: leave-one-out, or queries and a gallery.

    Use it in modules with their own metrics, with Fabric and in plain loops. With a Trainer, `RetrievalMonitor` needs
    less code. Call `metric.reset()` at the start of a loop, so that nothing of an interrupted loop is left. `compute`
    returns a
    dictionary: log it with `self.log_dict(metric.compute())`, because `self.log` accepts only metrics with a single
    value. Embeddings are kept on the CPU in the dtype of the model. You can also pass the keywords of
    `torchmetrics.Metric`, such as `sync_on_compute`.

    Args:
        judgements: Relevance judgements instead of labels, as in `Relevance.from_judgements`. Pass the ids of the items
            to `update`.
        at_least: Lowest grade of a judgement that counts as relevant.
        unknown: What to do with judgements of ids that no item has: `error` or `ignore`. If only some of the judged
            items were embedded, `compute` raises an error unless you pass `ignore`.
        **settings: See `RetrievalSettings`.

    Raises:
        ValueError: If a setting is unknown or out of range, or `at_least` or `unknown` is given without judgements.

    Examples:
        >>> import torch
        >>> metric = RetrievalEvaluation(metrics=("mAP", "recall@1"), similarity="euclidean")
        >>> metric.update(torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([0, 0, 0]))
        >>> metric.update(torch.tensor([[6.0], [9.0], [11.0]]), torch.tensor([1, 1, 1]))
        >>> {key: round(value.item(), 4) for key, value in metric.compute().items()}
        {'mAP': 0.8333, 'recall@1': 0.6667}
    """

    is_differentiable = False
    full_state_update = False
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    embeddings: list[Tensor]
    labels: list[Tensor]
    labels_json: list[Tensor]
    ids: list[Tensor]
    ids_json: list[Tensor]
    groups: list[Tensor]
    groups_json: list[Tensor]
    is_gallery: list[Tensor]

    def __init__(
        self,
        *,
        judgements: Any | None = None,
        at_least: Any = 1,
        unknown: str = "error",
        **settings: Unpack[EvaluationOptions],
    ) -> None:
        options: dict[str, Any] = {"compute_on_cpu": True, "dist_sync_fn": gather_tensors}
        options |= {name: value for name, value in settings.items() if name in get_type_hints(MetricOptions)}
        super().__init__(**options)
        evaluation_settings = {name: value for name, value in settings.items() if name not in options}
        self.settings = from_keywords(RetrievalEvaluation, evaluation_settings)
        self.judged = None
        self.at_least = at_least
        self.unknown = unknown
        if judgements is not None:
            check_choices("RetrievalEvaluation", at_least, unknown)
            self.judged = read_judgements("RetrievalEvaluation", judgements)
        elif at_least != 1 or unknown != "error":
            raise InputError(
                "RetrievalEvaluation: at_least and unknown need judgements. Pass judgements=..., or leave them out."
            )
        self.report: RetrievalReport | None = None
        """The report of the last `compute` or `forward`; None before the first and after `reset`."""
        for name in LABEL_COLUMNS:
            add_label_states(self, name)
        for name in ("embeddings", "is_gallery"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override] # torchmetrics has it as an attribute
        """Whether higher values are better; None if this differs between metrics. The threshold does not count."""
        directions = {requested.metric.better for requested in request_of(self.settings).reported} - {None}
        return directions == {"higher"} if len(directions) == 1 else None

    def update(
        self,
        embeddings: Any,
        labels: Any | None = None,
        ids: Any | None = None,
        *,
        is_gallery: Any | None = None,
        groups: Any | None = None,
    ) -> None:
        """Add a batch.

        Args:
            embeddings: (items, dim), any floating dtype.
            labels: (items,) integers or strings, or (items, labels) zeros and ones; None with judgements.
            ids: (items,) integers or strings that identify each item. Only the first query and the first gallery item
                of each id count; `compute` warns if others differ from it in embedding or label. You need ids with a
                `DistributedSampler`: it repeats items to give all processes the same number, and a metric cannot detect
                them. Without judgements, a query does not find a gallery item with its own id.
            is_gallery: Whether the items are in the gallery: (items,) booleans, or one boolean for the batch. By
                default each item is a query against all others.
            groups: (items,) integers or strings. A query ignores items of its own group.

        Raises:
            ValueError: If shapes or types do not fit each other or earlier batches, or only some batches have ids,
                groups or `is_gallery`.
        """
        method = "RetrievalEvaluation.update"
        self._check_relevance(labels, ids)
        if labels is None:
            # Judgements decide which items are relevant, so all items get the same class.
            labels = [0] * (len(embeddings) if hasattr(embeddings, "__len__") else 0)
        if self.embeddings:
            earlier = {"is_gallery": len(self.is_gallery) > 0}
            earlier |= {name: has_labels(self, name) for name in ("ids", "groups")}
            refuse_other_columns(method, earlier, {"ids": ids, "is_gallery": is_gallery, "groups": groups})
        are_vectors = self.settings.similarity != "hamming"
        batch = ItemBatch.read(method, embeddings, labels, ids, groups, sets=True, floats=are_vectors)
        forms = {name: form_of_labels(self, name) for name in LABEL_COLUMNS}
        batch.refuse_unlike(method, self.embeddings[0].shape[1] if self.embeddings else None, forms)
        flags = None if is_gallery is None else _read_flags(is_gallery, len(batch), method)
        # The states change only here, so that a refused batch leaves them unchanged.
        append_labels(self, "labels", batch.labels)
        for name, column in batch.columns.items():
            append_labels(self, str(name), column)
        if flags is not None:
            self.is_gallery.append(flags)
        self.embeddings.append(batch.embeddings.clone())

    def _check_relevance(self, labels: Any | None, ids: Any | None) -> None:
        """Refuse a batch with both labels and judgements, or with neither, and judgements without ids."""
        method = "RetrievalEvaluation.update"
        if (labels is None) != (self.judged is not None):
            fact = (
                "there are neither labels nor judgements" if labels is None else "there are both labels and judgements"
            )
            raise InputError(f"{method}: {fact}. Pass labels here, or RetrievalEvaluation(judgements=...) and ids.")
        if self.judged is not None and ids is None:
            raise InputError(f"{method}: judgements name items by their ids. Pass the ids of the items.")

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the metrics of only this batch, and add it as `update` does.

        The values are NaN, with a warning, if no item of the batch has a match in it.

        Raises:
            ValueError: As in `update` and `compute`. The metric is then unchanged.
        """
        if self._is_synced:  # torchmetrics raises an error
            return cast(dict[str, Tensor], super().forward(*args, **kwargs))
        states = {name: copy.copy(state) for name, state in self.metric_state.items()}
        report = self.report
        update_count = self.update_count
        compute_on_cpu = self.compute_on_cpu
        try:
            return cast(dict[str, Tensor], super().forward(*args, **kwargs))
        except BaseException as error:
            # torchmetrics restores these only after a successful batch.
            for name, state in states.items():
                setattr(self, name, state)
            self.report = report
            self._update_count = update_count
            self.compute_on_cpu = compute_on_cpu
            self._to_sync = self.sync_on_compute
            self._should_unsync = True
            self._computed = None
            self._enable_grad = False
            if not isinstance(error, NothingToRetrieveError):
                raise
            warnings.warn(f"RetrievalEvaluation: the values of a batch are NaN. {error}", stacklevel=2)
        self.update(*args, **kwargs)
        settings = self.settings
        if self.judged is not None or form_of_labels(self, "labels") not in ("strings", "integers"):
            settings = without_classes("RetrievalEvaluation", settings)
        keys = [requested.key for requested in request_of(settings).named]
        return {key: torch.tensor(math.nan, dtype=torch.float64, device="cpu") for key in keys}

    def reset(self) -> None:
        """Drop all batches, and the report of the last `compute`."""
        super().reset()
        self.report = None

    def compute(self) -> dict[str, Tensor]:
        """Return key -> value of each metric, as `RetrievalReport.metrics` does. The report itself is in `report`.

        A warning reports if many queries find an item of their class that equals them bit for bit. Such items may be
        repeated; `ids` leave them out.

        Raises:
            ValueError: As in `evaluate_retrieval`, for instance if nothing was collected.
        """
        call = "RetrievalEvaluation.compute"
        batches = batches_in(self.embeddings)
        flags = batches_in(self.is_gallery)
        is_gallery = torch.cat(flags).cpu().bool() if flags else torch.empty(0, dtype=torch.bool, device="cpu")
        labels, ids, groups = (labels_in_states(self, name, call) for name in LABEL_COLUMNS)
        items = sum(map(len, batches))
        if items == 0:
            raise InputError("RetrievalEvaluation.compute: no batch was added. Call update(embeddings, labels) first.")
        for name, count in {"ids": len(ids), "is_gallery": len(is_gallery), "groups": len(groups)}.items():
            if count not in (0, items):
                raise InputError(
                    f"{call}: only some processes gave {name}: {count} of {items} items have them. Pass them in every "
                    "process."
                )
        # one side, or queries and gallery
        sides = [torch.ones(items, dtype=torch.bool, device="cpu")]
        if len(is_gallery):
            sides = [~is_gallery, is_gallery]
        if len(ids) == items:
            sides = [first_of_each_id(side, batches, labels, ids, "RetrievalEvaluation") for side in sides]

        arguments: dict[str, Any] = {}
        for is_in_side, name, prefix in zip(sides, ("queries", "gallery"), ("query", "gallery"), strict=False):
            arguments[name] = join_rows(list(batches), is_in_side)
            if self.judged is None:
                arguments[f"{prefix}_labels"] = labels[is_in_side]
            if len(groups) == items:
                arguments[f"{prefix}_groups"] = groups[is_in_side]
            if len(ids) == items and len(sides) == 2 and self.judged is None:
                arguments[f"{prefix}_ids"] = ids[is_in_side]
        if self.judged is not None:
            arguments["relevance"] = self._relevance([ids[is_in_side] for is_in_side in sides])
        with named(type(self).__name__, "evaluate_retrieval"):
            self.report = evaluate_retrieval(**arguments, **self.settings.arguments())
        for note in filter(is_on_copies, self.report.notes):
            warnings.warn(f"RetrievalEvaluation: {note}", stacklevel=2)
        return {
            name: torch.tensor(value, dtype=torch.float64, device="cpu")
            for name, value in self.report.metrics().items()
        }

    def _relevance(self, ids_of_sides: Sequence[Labels]) -> Relevance:
        """Return the relevance of the items with these ids, by the judgements.

        The integer 7 matches the id "7" in the judgements.
        """
        assert self.judged is not None
        judged_ids = {id_ for side in self.judged[:2] for id_ in side}
        spelling = {str(id_): id_ for id_ in judged_ids} | {id_: id_ for id_ in judged_ids}
        names = [[spelling.get(id_, id_) for id_ in ids.tolist()] for ids in ids_of_sides]
        return Relevance.from_judgements(self.judged, *names, at_least=self.at_least, unknown=self.unknown)

    def plot(
        self, val: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None, ax: Any | None = None
    ) -> tuple[Any, Any]:
        """Draw the values of all metrics with a range, as torchmetrics does. The threshold has none.

        Args:
            val: A result of `compute` or `forward`, drawn as points, or a list of results, drawn as lines. By default
                the result of `compute`.
            ax: Matplotlib axes to draw into. By default the axes of a new figure.

        Returns:
            The figure (None if axes were given) and the axes.
        """
        val = self.compute() if val is None else val
        if isinstance(val, Mapping):
            return self._plot(self._with_range(val), ax)
        return self._plot([self._with_range(result) for result in val], ax)

    def _with_range(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of the metrics that have a range."""
        known = (*METRICS, *(requested.metric for requested in request_of(self.settings).reported))
        return {name: value for name, value in values.items() if requested_metric(name, known).metric.range is not None}


def _read_flags(is_gallery: Any, items: int, call: str) -> Bool[Tensor, "items"]:
    """Return whether each item belongs to the gallery."""
    flags = torch.as_tensor(is_gallery, device="cpu")
    if flags.dtype != torch.bool or flags.shape not in ((), (items,)):
        raise InputError(
            f"{call}: is_gallery of shape {tuple(flags.shape)} and type {flags.dtype} must be one boolean, or one for each "
            f"of the {counted(items, 'embedding')}."
        )
    return flags.expand(items).clone()
