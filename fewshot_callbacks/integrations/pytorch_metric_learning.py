"""`ExactAccuracyCalculator`: the accuracy calculator of pytorch-metric-learning, with exact ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning.distances import BatchedDistance, CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import EQUALITY, AccuracyCalculator
from pytorch_metric_learning.utils.common_functions import LOGGER, numpy_to_torch
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import Relevance, evaluate_retrieval
from fewshot_callbacks.functional._notes import NotesOnce
from fewshot_callbacks.functional.means import class_means, macro_mean
from fewshot_callbacks.functional.retrieval.evaluate import NothingToRetrieveError
from fewshot_callbacks.functional.retrieval.evaluation_notes import WITHOUT_MATCH

_CALL = "ExactAccuracyCalculator"
# Metric of pytorch-metric-learning -> metric of this package without k, and with k.
_KEYS = {
    "precision_at_1": ("recall@1", "recall@1"),
    "r_precision": ("r_precision", "r_precision"),
    "mean_average_precision_at_r": ("map@r", "map@r"),
    "mean_average_precision": ("mAP", "map@{k}_relevant"),
    "mean_reciprocal_rank": ("mrr", "mrr@{k}"),
}
# Metrics that ExactAccuracyCalculator computes without k.
_WITHOUT_K = ("r_precision", "mean_average_precision_at_r")
# Exact faiss index -> similarity.
_INDICES = {"IndexFlatL2": "euclidean", "IndexFlatIP": "dot"}


class ExactAccuracyCalculator(AccuracyCalculator):
    """Drop-in replacement for `AccuracyCalculator`: the same arguments and metric names, with exact values.

    - Tied distances count as the mean over their orders.
    - Labels are compared exactly, not as float32.
    - `r_precision` and `mean_average_precision_at_r` do not depend on `k`. You get a warning if `k` is small.
    - Notes of the report, such as a note on repeated items, become warnings; each kind is shown once.
    - `AccuracyCalculator` computes NMI, AMI and the metrics of a subclass.

    Args:
        *args: Arguments of `AccuracyCalculator`, in its order. `knn_func` determines the distance: None, and `FaissKNN` with
            an `IndexFlatL2`, is Euclidean. `FaissKNN` with an `IndexFlatIP` is the inner product. `CustomKNN` has its own
            distance. Faiss is not needed. `label_comparison_fn` is called once per distinct query label.
        memory_mb: Memory bound beyond the embeddings, in MB.
        **options: Arguments of `AccuracyCalculator`, by name.

    Raises:
        ValueError: The distance of `knn_func` cannot be computed exactly, or `AccuracyCalculator` raises an error.

    Examples:
        >>> import torch
        >>> calculator = ExactAccuracyCalculator(include=("precision_at_1", "mean_reciprocal_rank"))
        >>> calculator.get_accuracy(torch.tensor([[0.0], [1.0], [1.5], [6.0]]), torch.tensor([0, 0, 1, 1]))
        {'mean_reciprocal_rank': 0.7083333333333334, 'precision_at_1': 0.5}
    """

    def __init__(self, *args: Any, memory_mb: float | None = None, **options: Any) -> None:
        arguments = inspect.signature(AccuracyCalculator).bind(*args, **options).arguments
        if arguments.get("knn_func") is None:
            # The default of pytorch-metric-learning needs faiss.
            arguments["knn_func"] = CustomKNN(LpDistance(normalize_embeddings=False))
        super().__init__(**arguments)
        self.similarity = _similarity_of(self.knn_func)
        self._notes = NotesOnce(_CALL)
        self.memory_mb = memory_mb

    def get_accuracy(
        self,
        query: Any,
        query_labels: Any,
        reference: Any = None,
        reference_labels: Any = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return metric -> value; with `return_per_class`, metric -> values by ascending label.

        Queries without a relevant reference are left out. The value is NaN if no query has a relevant reference.

        Args:
            query: (queries, dim) embeddings, a tensor or an array.
            query_labels: (queries,) labels: integers or other numbers. With `label_comparison_fn`, a label may be a row.
            reference: (references, dim) embeddings to retrieve from; by default the queries, each without itself.
            reference_labels: Labels of the references.
            ref_includes_query: Whether the first references are the queries. Each query is then searched without itself.
            include: Metrics to compute; by default the metrics of the constructor.
            exclude: Metrics to leave out.

        Raises:
            ValueError: The arguments are in the order of version 1, their lengths differ, or `ref_includes_query` is
                true and the references do not begin with the queries.
        """
        if reference is None:
            reference = query
            reference_labels = query_labels
            ref_includes_query = True
        query, query_labels, reference, reference_labels = (
            numpy_to_torch(array).to(self.device) for array in (query, query_labels, reference, reference_labels)
        )
        items = _AccuracyInputs(query, query_labels, reference, reference_labels, ref_includes_query)
        items.check(has_rows_as_labels=self.label_comparison_fn is not EQUALITY)
        functions = self.get_function_dict(include, exclude)
        values = self._exact_values(items, [name for name in functions if name in _KEYS])
        others = [name for name in functions if name not in _KEYS]
        if others:
            values |= super().get_accuracy(*items, include=others)
        self.curr_function_dict = functions
        return {name: values[name] for name in functions}

    def _exact_values(self, items: _AccuracyInputs, names: Sequence[str]) -> dict[str, Any]:
        """Return the values of metrics that this package computes."""
        if not names:
            return {}
        if self.label_comparison_fn is EQUALITY:
            arguments, most_relevant = items.relevance_of_equal_labels()
        else:
            arguments, most_relevant = items.relevance_of(self.label_comparison_fn)
        if items.ref_includes_query:
            arguments |= {"query_ids": range(len(items.query)), "gallery_ids": range(len(items.reference))}
        keys = self._keys(names, most_relevant)
        classes = items.query_labels.unique(dim=0, return_inverse=True)[1].cpu()
        try:
            report = evaluate_retrieval(
                _as_floats(items.query),
                gallery=_as_floats(items.reference),
                **arguments,
                similarity=self.similarity,
                metrics=list(keys.values()),
                memory_mb=self.memory_mb,
                device=str(self.device) if self.device.type == "cuda" else "cpu",
            )
        except NothingToRetrieveError:
            LOGGER.warning("None of the query labels are in the reference set.")
            return dict.fromkeys(names, [math.nan] * len(classes.unique()) if self.return_per_class else math.nan)
        # No note on queries without a match: AccuracyCalculator also leaves them out, silently.
        notes = [note for note in report.messages if WITHOUT_MATCH not in note]
        self._notes.tell(notes, LOGGER)
        if self.return_per_class:
            return {name: class_means(report.per_query[key], classes)[1].tolist() for name, key in keys.items()}
        if self.avg_of_avgs:
            return {name: macro_mean(report.per_query[key], classes) for name, key in keys.items()}
        return {name: report[key] for name, key in keys.items()}

    def _keys(self, names: Sequence[str], most_relevant: int) -> dict[str, str]:
        """Return metric of pytorch-metric-learning -> metric of this package, and warn if `k` has no effect on a metric.

        `most_relevant` is the largest number of relevant references of a query.
        """
        if self.k is None:
            return {name: _KEYS[name][0] for name in names}
        k = max(1, most_relevant) if self.k == "max_bin_count" else self.k
        without_k = [name for name in names if name in _WITHOUT_K]
        if k < most_relevant and without_k:
            LOGGER.warning(
                f"{_CALL}: k={k} is less than the {most_relevant} relevant references of a query. {_CALL} computes "
                f"{' and '.join(without_k)} without k. AccuracyCalculator only uses the first {k} references, so its values "
                "differ."
            )
        return {name: _KEYS[name][1].format(k=k) for name in names}


class _AccuracyInputs(NamedTuple):
    """The arguments of `get_accuracy`."""

    query: Tensor
    query_labels: Tensor
    reference: Tensor
    reference_labels: Tensor
    ref_includes_query: bool

    def check(self, *, has_rows_as_labels: bool) -> None:
        """Raise an error if the arguments are in the order of version 1, or references must begin with the queries."""
        call = f"{_CALL}.get_accuracy"
        shapes = {name: tuple(getattr(self, name).shape) for name in ("query_labels", "reference", "reference_labels")}
        is_one_label = all(math.prod(shapes[name][1:]) == 1 for name in ("query_labels", "reference_labels"))
        if len(shapes["reference"]) == 1 or not (is_one_label or has_rows_as_labels):
            listed = ", ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
            raise InputError(
                f"{call}: {listed}. Pass query, query_labels, reference, reference_labels in this order (version 1 had "
                "another order), and one label per item."
            )
        first = slice(len(self.query))
        if self.ref_includes_query and not (
            torch.equal(self.query, self.reference[first])
            and torch.equal(self.query_labels, self.reference_labels[first])
        ):
            raise InputError(
                f"{call}: ref_includes_query=True, but reference and reference_labels do not begin with query and "
                "query_labels. Put the queries first, or pass ref_includes_query=False."
            )

    def relevance_of_equal_labels(self) -> tuple[dict[str, Any], int]:
        """Return arguments of `evaluate_retrieval`, and the largest number of relevant references of a query."""
        labels = [self.query_labels.flatten(), self.reference_labels.flatten()]
        codes = torch.cat(labels).unique(return_inverse=True)[1]
        query_codes = codes[: len(labels[0])]
        reference_codes = codes[len(labels[0]) :]
        sizes = reference_codes.bincount(minlength=len(codes))
        most_relevant = max(sizes[query_codes].tolist(), default=0) - int(self.ref_includes_query)
        return {"query_labels": query_codes, "gallery_labels": reference_codes}, most_relevant

    def relevance_of(self, comparison: Callable[[Tensor, Tensor], Tensor]) -> tuple[dict[str, Any], int]:
        """Return the same as `relevance_of_equal_labels`, for a function that compares labels."""
        labels, number_of_label = self.query_labels.unique(dim=0, return_inverse=True)
        references = len(self.reference_labels)
        of_label = [
            comparison(label[None], self.reference_labels).reshape(references).nonzero()[:, 0].tolist()
            for label in labels
        ]
        of_query = [of_label[number] for number in number_of_label.tolist()]
        if self.ref_includes_query:
            of_query = [[item for item in found if item != query] for query, found in enumerate(of_query)]
        relevance = Relevance.from_lists(of_query, gallery=references)
        return {"relevance": relevance}, max(map(len, of_query), default=0)


def _as_floats(embeddings: Tensor) -> Tensor:
    return embeddings if embeddings.is_floating_point() else embeddings.double()


def _similarity_of(knn_func: Any) -> Any:
    """Return this package's name for the distance of a `knn_func`.

    Raises:
        ValueError: The distance cannot be computed exactly.
    """
    distance: Any = getattr(knn_func, "distance", None)  # of CustomKNN
    if isinstance(distance, BatchedDistance):
        distance = distance.distance
    is_product = type(distance) in (CosineSimilarity, DotProductSimilarity) and distance.power == 1
    is_distance = type(distance) is LpDistance and distance.power > 0
    if (is_product or is_distance) and distance.p == 2:
        if distance.normalize_embeddings:
            return "cosine"
        return "dot" if is_product else "euclidean"
    index = getattr(getattr(knn_func, "index_init_fn", None), "__name__", None)  # of FaissKNN
    if index in _INDICES:
        return _INDICES[index]
    raise InputError(
        f"{_CALL}: the distance of knn_func={knn_func!r} is unknown. Pass CustomKNN with CosineSimilarity, "
        "DotProductSimilarity or LpDistance(p=2), or use AccuracyCalculator."
    )
