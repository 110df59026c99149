"""`ExactAccuracyCalculator`: the accuracy calculator of pytorch-metric-learning, with exact ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning.distances import BatchedDistance, CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.common_functions import LOGGER, numpy_to_torch
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor

from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.evaluate import NothingToRetrieveError

_CALL = "ExactAccuracyCalculator"
# Metric of theirs -> metric of this package without k, and with k.
_KEYS = {
    "precision_at_1": ("recall@1", "recall@1"),
    "r_precision": ("r_precision", "r_precision"),
    "mean_average_precision_at_r": ("map@r", "map@r"),
    "mean_average_precision": ("mAP", "map@{k}_relevant"),
    "mean_reciprocal_rank": ("mrr", "mrr@{k}"),
}
# Similarity of each index of faiss that compares all pairs.
_INDICES = {"IndexFlatL2": "euclidean", "IndexFlatIP": "dot"}


class ExactAccuracyCalculator(AccuracyCalculator):
    """Takes the place of `AccuracyCalculator`: the same arguments and keys; exact values, in bounded memory.

    Items with equal distances count as the mean over their orders. Labels are compared as they are, not as float32.
    `r_precision` and `mean_average_precision_at_r` do not depend on `k`. NMI, AMI and metrics of a subclass are left to
    `AccuracyCalculator`.

    Args:
        *args: Arguments of `AccuracyCalculator`, in its order. `knn_func` says the distance: None, or `FaissKNN` with an
            `IndexFlatL2`, is Euclidean; one with an `IndexFlatIP` is the inner product; `CustomKNN` has its own. Faiss is
            not needed.
        memory_mb: Bound on the memory used beyond the embeddings, in MB, see `RetrievalSettings`.
        **options: Arguments of `AccuracyCalculator`, by name.

    Raises:
        ValueError: If the distance of `knn_func` cannot be computed exactly, `label_comparison_fn` is passed, or as
            `AccuracyCalculator` does.

    Examples:
        >>> import torch
        >>> calculator = ExactAccuracyCalculator(include=("precision_at_1", "mean_average_precision_at_r"))
        >>> calculator.get_accuracy(torch.tensor([[0.0], [1.0], [5.0], [6.0]]), torch.tensor([0, 0, 1, 1]))
        {'mean_average_precision_at_r': 1.0, 'precision_at_1': 1.0}
    """

    def __init__(self, *args: Any, memory_mb: float | None = None, **options: Any) -> None:
        arguments = inspect.signature(AccuracyCalculator).bind(*args, **options).arguments
        if arguments.get("label_comparison_fn") is not None:
            raise ValueError(
                f"{_CALL}: label_comparison_fn compares two labels, and here items are relevant if their labels are equal. "
                "Use AccuracyCalculator, or evaluate_retrieval(..., relevance=Relevance.from_lists(...))."
            )
        if arguments.get("knn_func") is None:
            # The default of theirs needs faiss.
            arguments["knn_func"] = CustomKNN(LpDistance(normalize_embeddings=False))
        super().__init__(**arguments)
        self.similarity = _similarity_of(self.knn_func)
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
        """Return the value of each metric; or, with `return_per_class`, its values by ascending label.

        Args:
            query: (queries, dim) embeddings, tensor or array.
            query_labels: (queries,) labels: integers or other numbers.
            reference: (references, dim) embeddings to retrieve from; None are the queries, each without itself.
            reference_labels: Labels of the references.
            ref_includes_query: Whether the first references are the queries, so that each is found without itself.
            include: Metrics to compute; by default those of the constructor.
            exclude: Metrics to leave out.

        Returns:
            Metric -> value. Queries without a relevant reference are left out; if there are no others, the value is NaN.

        Raises:
            ValueError: If arguments are in the order of version 1, their lengths differ, or the references do not begin with
                the queries although `ref_includes_query` is true.
        """
        if reference is None:
            reference = query
            reference_labels = query_labels
            ref_includes_query = True
        query, query_labels, reference, reference_labels = (
            numpy_to_torch(array).to(self.device) for array in (query, query_labels, reference, reference_labels)
        )
        items = _Items(query, query_labels, reference, reference_labels, ref_includes_query)
        items.check()
        self.curr_function_dict = self.get_function_dict(include, exclude)
        metrics = self.get_curr_metrics()
        values = self._exact_values(items, [name for name in metrics if name in _KEYS])
        others = [name for name in metrics if name not in _KEYS]
        if others:
            values |= super().get_accuracy(*items, include=others)
            self.curr_function_dict = self.get_function_dict(include, exclude)
        return {name: values[name] for name in metrics}

    def _exact_values(self, items: _Items, metrics: Sequence[str]) -> dict[str, Any]:
        """Return the values of the metrics that this package computes."""
        if not metrics:
            return {}
        k = self.k
        query_codes, reference_codes = items.codes()
        if k == "max_bin_count":
            relevant = reference_codes[torch.isin(reference_codes, query_codes)]
            k = max(1, int(relevant.bincount(minlength=1).max()) - int(items.ref_includes_query))
        keys = {name: _KEYS[name][0] if k is None else _KEYS[name][1].format(k=k) for name in metrics}
        ids: dict[str, Any] = {}
        if items.ref_includes_query:
            ids = {"query_ids": range(len(items.query)), "gallery_ids": range(len(items.reference))}
        prefix = "macro_" if self.avg_of_avgs else ""
        try:
            report = evaluate_retrieval(
                _as_floats(items.query),
                query_codes,
                _as_floats(items.reference),
                reference_codes,
                **ids,
                similarity=self.similarity,
                metrics=[prefix + key for key in keys.values()],
                memory_mb=self.memory_mb,
                device=str(self.device) if self.device.type == "cuda" else "cpu",
            )
        except NothingToRetrieveError:
            LOGGER.warning("None of the query labels are in the reference set.")
            return dict.fromkeys(metrics, [math.nan] * len(query_codes.unique()) if self.return_per_class else math.nan)
        if self.return_per_class:
            per_class = report.per_class()
            return {name: list(per_class[key].values()) for name, key in keys.items()}
        return {name: report[prefix + key] for name, key in keys.items()}


class _Items(NamedTuple):
    """The arguments of `get_accuracy`."""

    query: Tensor
    query_labels: Tensor
    reference: Tensor
    reference_labels: Tensor
    ref_includes_query: bool

    def check(self) -> None:
        """Refuse the order of version 1, and references that do not begin with the queries although they should."""
        call = f"{_CALL}.get_accuracy"
        shapes = {name: tuple(getattr(self, name).shape) for name in ("query_labels", "reference", "reference_labels")}
        is_one_label = all(math.prod(shapes[name][1:]) == 1 for name in ("query_labels", "reference_labels"))
        if len(shapes["reference"]) == 1 or not is_one_label:
            listed = ", ".join(f"{name} has shape {shape}" for name, shape in shapes.items())
            raise ValueError(
                f"{call}: {listed}. Pass query, query_labels, reference, reference_labels in this order, which is not that "
                "of version 1, and one label for each item."
            )
        first = slice(len(self.query))
        if self.ref_includes_query and not (
            torch.equal(self.query, self.reference[first])
            and torch.equal(self.query_labels, self.reference_labels[first])
        ):
            raise ValueError(
                f"{call}: ref_includes_query=True, and reference and reference_labels do not begin with query and "
                "query_labels. Put the queries first, or pass ref_includes_query=False."
            )

    def codes(self) -> tuple[Tensor, Tensor]:
        """Return a number for the label of each query and of each reference, in the order of labels."""
        labels = [self.query_labels.flatten(), self.reference_labels.flatten()]
        codes = torch.cat(labels).unique(return_inverse=True)[1]
        return codes[: len(labels[0])], codes[len(labels[0]) :]


def _as_floats(embeddings: Tensor) -> Tensor:
    return embeddings if embeddings.is_floating_point() else embeddings.double()


def _similarity_of(knn_func: Any) -> Any:
    """Return the name of the distance of a search in this package.

    Raises:
        ValueError: If it cannot be computed exactly.
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
    raise ValueError(
        f"{_CALL}: the distance of knn_func={knn_func!r} is not known. Pass CustomKNN with CosineSimilarity, "
        "DotProductSimilarity or LpDistance(p=2), or use AccuracyCalculator."
    )
