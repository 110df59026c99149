"""What an evaluation is asked for: checked in one place, and named in one place."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.scores.products import Similarity, check_similarity
from fewshot_callbacks.functional.retrieval.label_groups import Unmatched, check_unmatched, checked_groups
from fewshot_callbacks.functional.retrieval.rank_metrics import (
    Divisor,
    Ties,
    average_precision,
    average_precision_at_k,
    check_ties,
    hits_within,
    ir_recall_at_k,
    ndcg,
    precision_at_k,
    recall_at_k,
    reciprocal_rank,
)

DEFAULT_MEMORY_MB: float = 512

PerQuery = Callable[[RankBlock], Float[Tensor, "queries"]]


@dataclass(frozen=True)
class RetrievalSettings:
    """The settings of `evaluate_retrieval`; see there. One value stands for a tuple of it, a NumPy number for Python's."""

    similarity: Similarity = "cosine"
    recall_k: Sequence[int] = (1, 5, 10)
    ir_recall_k: Sequence[int] = ()
    map_k: Sequence[int | tuple[int, Divisor]] = ()
    precision_k: Sequence[int] = ()
    ndcg_k: Sequence[int] = ()
    macro: bool = False
    precisions: Sequence[float] = (0.95,)
    threshold: float | None = None
    threshold_bounds: tuple[float, float] | None = None
    false_match_rates: Sequence[float] = ()
    equal_error_rate: bool = False
    auc_pr: bool = False
    prototype_accuracy: bool = False
    grouped_k: Sequence[int] = (1,)
    group_size: int | None = 10
    group_seed: int = 0
    label_groups: Sequence[Sequence[int | str]] | None = None
    grouped_unmatched: Unmatched = "exclude"
    ties: Ties = "expected"
    max_queries: int | None = None
    query_seed: int = 0
    memory_mb: float = DEFAULT_MEMORY_MB
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Bring what was given into one form; what has none is refused by `check`."""
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name.endswith("_k"):
                value = ranks_of(value)
            elif name in ("precisions", "false_match_rates"):
                value = tuple(map(_number, _several(value)))
            elif name in ("group_size", "group_seed", "max_queries", "query_seed"):
                value = _whole(value)
            elif name == "threshold":
                value = _number(value)
            elif name == "memory_mb":
                value = memory_or_default(value)
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, **given: Any) -> RetrievalSettings:
        """Settings in the forms that a user may give them in."""
        return cls(**given)

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of `evaluate_retrieval`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self, call: str) -> None:
        """Refuse what no data could make sense of.

        Args:
            call: who was given the settings, for the message.

        Raises:
            ValueError: with the setting, its value and what to pass instead.
        """
        check_similarity(self.similarity)
        check_ties(self.ties)
        for name in ("recall_k", "ir_recall_k", "precision_k", "ndcg_k", "grouped_k"):
            ks = getattr(self, name)
            if any(not _is_rank(k) for k in ks):
                raise ValueError(f"{call}: {name}={ks} must hold positive whole numbers, such as (1, 5, 10).")
        for entry in self.map_k:
            k, divisor = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, "min")
            if not _is_rank(k) or divisor not in get_args(Divisor):
                raise ValueError(
                    f"{call}: map_k={self.map_k} must hold ranks, alone or with the divisor of AP@k, such as "
                    f"(10, (100, 'found')). The divisors are {', '.join(map(repr, get_args(Divisor)))}."
                )
        if any(not (_is_number(precision) and 0 < precision <= 1) for precision in self.precisions):
            raise ValueError(f"{call}: precisions={self.precisions} must lie in (0, 1], such as (0.95,).")
        if any(not (_is_number(rate) and 0 < rate < 1) for rate in self.false_match_rates):
            raise ValueError(
                f"{call}: false_match_rates={self.false_match_rates} must lie between 0 and 1, such as (0.001,)."
            )
        if self.threshold is not None and not (_is_number(self.threshold) and math.isfinite(self.threshold)):
            raise ValueError(
                f"{call}: threshold={self.threshold!r} must be a finite score; None takes that of the best F1."
            )
        _check_range(call, self.threshold_bounds)
        self._check_groups(call)
        self._check_draws(call)
        check_memory(call, self.memory_mb)
        compute_device(call, self.device)
        if self.similarity == "hamming" and (self.prototype_accuracy or self.device not in ("cpu", "auto")):
            raise ValueError(
                f"{call}: binary codes have no mean to be a prototype, and are compared on the CPU. With "
                "similarity='hamming' leave prototype_accuracy and device out."
            )

    def _check_groups(self, call: str) -> None:
        check_unmatched(self.grouped_unmatched, call, "grouped_unmatched")
        if self.group_size is not None and not (_is_rank(self.group_size) and self.group_size > 1):
            raise ValueError(
                f"{call}: group_size={self.group_size!r} must be a whole number of at least 2 labels; None leaves "
                "Grouped Recall out."
            )
        smallest, fact = self.group_size, f"group_size={self.group_size}"
        if self.label_groups is not None:
            groups = checked_groups(call, "label_groups", self.label_groups)
            if len(groups) < 2:
                raise ValueError(f"{call}: label_groups holds one group; its interval needs two. Give another group.")
            smallest = min(map(len, groups))
            fact = f"{smallest}, the labels of the smallest group"
        if smallest is not None and max(self.grouped_k, default=1) >= smallest:
            raise ValueError(
                f"{call}: grouped_k={self.grouped_k} must hold ranks below {fact}. Use larger groups or smaller ranks."
            )

    def _check_draws(self, call: str) -> None:
        if self.max_queries is not None and not _is_rank(self.max_queries):
            wanted = "positive" if isinstance(self.max_queries, int) else "a positive whole number"
            raise ValueError(f"{call}: max_queries={self.max_queries!r} must be {wanted}; None evaluates all queries.")
        for name in ("group_seed", "query_seed"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{call}: {name}={getattr(self, name)!r} must be a whole number, such as 0.")

    # --------------------------------------------------------------------------------------------------------- per query

    @property
    def map_at(self) -> tuple[tuple[int, Divisor], ...]:
        """Each k of AP@k with its divisor."""
        return tuple((entry, "min") if isinstance(entry, int) else (entry[0], entry[1]) for entry in self.map_k)

    def per_query(self) -> dict[str, PerQuery]:
        """The metrics that each query has, by name; their means are reported."""
        ties = self.ties
        metrics: dict[str, PerQuery] = {
            "mAP": lambda ranks: average_precision(ranks, ties),
            "map@r": lambda ranks: average_precision(ranks, ties, cut=ranks.relevant),
            "r_precision": lambda ranks: hits_within(ranks, ranks.relevant, ties) / ranks.relevant,
            "mrr": lambda ranks: reciprocal_rank(ranks, ties),
        }
        for k, divisor in self.map_at:
            metrics[f"map@{k}_{divisor}"] = lambda ranks, k=k, divisor=divisor: average_precision_at_k(  # type: ignore[misc]
                ranks, k, divisor, ties
            )
        for k in self.recall_k:
            metrics[f"recall@{k}"] = lambda ranks, k=k: recall_at_k(ranks, k, ties)  # type: ignore[misc]
        for k in self.ir_recall_k:
            metrics[f"ir_recall@{k}"] = lambda ranks, k=k: ir_recall_at_k(ranks, k, ties)  # type: ignore[misc]
        for k in self.precision_k:
            metrics[f"precision@{k}"] = lambda ranks, k=k: precision_at_k(ranks, k, ties)  # type: ignore[misc]
        for k in self.ndcg_k:
            metrics[f"ndcg@{k}"] = lambda ranks, k=k: ndcg(ranks, k, ties)  # type: ignore[misc]
        return metrics

    @property
    def has_groups(self) -> bool:
        """Whether Grouped Recall is wanted."""
        return bool(self.grouped_k) and (self.group_size is not None or self.label_groups is not None)

    def metric_names(self) -> tuple[str, ...]:
        """The keys of `RetrievalReport.metrics`, also where nothing could be computed."""
        per_query = tuple(self.per_query())
        if self.prototype_accuracy:
            per_query = (*per_query, "prototype_accuracy")
        grouped = [f"grouped_recall@{k}" for k in self.grouped_k] if self.has_groups else []
        return (
            *per_query,
            *(f"macro_{name}" for name in per_query if self.macro),
            *grouped,
            *("precision", "recall", "f1", "threshold"),
            *(("auc_pr",) if self.auc_pr else ()),
            *(f"recall@precision{precision:g}" for precision in self.precisions),
            *(f"fnmr@fmr{rate:g}" for rate in self.false_match_rates),
            *(("eer",) if self.equal_error_rate else ()),
        )


def compute_device(call: str, device: str | torch.device) -> torch.device:
    """The device on which scores are made; `"auto"` is the first CUDA device, or the CPU where there is none.

    Raises:
        ValueError: for a device that is not there, or that lacks float64.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{call}: device={device!r} is no device ({error}). Pass 'cpu', 'cuda' or 'auto'.") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{call}: device={device!r} has no float64, which exact counts need. Pass 'cpu', 'cuda' or 'auto'."
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{call}: device={device!r}, but torch sees {torch.cuda.device_count()} CUDA devices. Pass 'cpu' or 'auto'."
        )
    return found


def ranks_of(value: Any) -> tuple[Any, ...]:
    """One rank or several as a tuple, NumPy's numbers as Python's; what is no number stays what it is."""
    return tuple(map(_whole, _several(value)))


def memory_or_default(memory_mb: Any) -> Any:
    """The bound in MB; the default for None."""
    return DEFAULT_MEMORY_MB if memory_mb is None else _number(memory_mb)


def check_memory(call: str, memory_mb: object) -> None:
    """Refuse a bound on the memory that is no positive number.

    Raises:
        ValueError: with the default.
    """
    if not (_is_number(memory_mb) and memory_mb > 0):
        raise ValueError(
            f"{call}: memory_mb={memory_mb!r} must be positive, in MB; the default, also of None, is {DEFAULT_MEMORY_MB:g}."
        )


def _several(value: Any) -> tuple[Any, ...]:
    """What holds values as a tuple of them, another one as the only one."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return (value,)
    return tuple(value)


def _whole(value: Any) -> Any:
    """A whole number of any library as an int, in (k, divisor) too."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return (_whole(value[0]), value[1])
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _number(value: Any) -> Any:
    """A number of any library as a float."""
    if type(value) in (int, float, bool) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        return value
    return float(value)


def _is_rank(k: object) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_range(call: str, bounds: object) -> None:
    if bounds is None:
        return
    is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(isinstance(b, int | float) for b in bounds)
    if not (is_pair and bounds[0] <= bounds[1]):  # type: ignore[index]  # NaN is refused, too
        raise ValueError(
            f"{call}: threshold_bounds={_shown(bounds)} must hold the smallest threshold and the largest, in this order, "
            "such as (0.0, 1.0); None sets no bounds."
        )


def _shown(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
