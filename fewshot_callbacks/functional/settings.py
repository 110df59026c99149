"""What an evaluation is asked for: checked in one place, and named in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.functional.ranking import (
    Divisor,
    Ties,
    average_precision,
    average_precision_at_k,
    check_ties,
    hits_within,
    ndcg,
    precision_at_k,
    recall_at_k,
    reciprocal_rank,
)
from fewshot_callbacks.functional.ranks import RankBlock
from fewshot_callbacks.functional.similarity import Similarity, check_similarity

PerQuery = Callable[[RankBlock], Float[Tensor, "queries"]]


@dataclass(frozen=True)
class RetrievalSettings:
    """The settings of `evaluate_retrieval`; see there."""

    similarity: Similarity = "cosine"
    recall_k: Sequence[int] = (1, 5, 10)
    map_k: Sequence[int | tuple[int, Divisor]] = ()
    precision_k: Sequence[int] = ()
    ndcg_k: Sequence[int] = ()
    macro: bool = False
    precisions: Sequence[float] = (0.95,)
    threshold: float | None = None
    false_match_rates: Sequence[float] = ()
    equal_error_rate: bool = False
    auc_pr: bool = False
    prototype_accuracy: bool = False
    grouped_k: Sequence[int] = (1,)
    group_size: int | None = 10
    group_seed: int = 0
    ties: Ties = "expected"
    max_queries: int | None = None
    query_seed: int = 0
    memory_mb: float = 512
    device: str = "cpu"

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
        for name in ("recall_k", "precision_k", "ndcg_k", "grouped_k"):
            ks = getattr(self, name)
            if isinstance(ks, int) or any(not _is_rank(k) for k in ks):
                raise ValueError(f"{call}: {name}={_shown(ks)} must hold positive whole numbers, such as (1, 5, 10).")
        for entry in self.map_k:
            k, divisor = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, "min")
            if not _is_rank(k) or divisor not in get_args(Divisor):
                raise ValueError(
                    f"{call}: map_k={_shown(self.map_k)} must hold ranks, alone or with the divisor of AP@k, such as "
                    f"(10, (100, 'found')). The divisors are {', '.join(map(repr, get_args(Divisor)))}."
                )
        if any(not 0 < precision <= 1 for precision in self.precisions):
            raise ValueError(f"{call}: precisions={tuple(self.precisions)} must lie in (0, 1], such as (0.95,).")
        if any(not 0 < rate < 1 for rate in self.false_match_rates):
            raise ValueError(
                f"{call}: false_match_rates={tuple(self.false_match_rates)} must lie between 0 and 1, such as (0.001,)."
            )
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(
                f"{call}: threshold={self.threshold} must be a finite score; None takes that of the best F1."
            )
        if self.group_size is not None and self.group_size < 2:
            raise ValueError(
                f"{call}: group_size={self.group_size} must be at least 2 labels; None leaves Grouped Recall out."
            )
        if self.group_size is not None and max(self.grouped_k, default=1) >= self.group_size:
            raise ValueError(
                f"{call}: grouped_k={_shown(self.grouped_k)} must hold ranks below group_size={self.group_size}. Use larger "
                "groups or smaller ranks."
            )
        if self.max_queries is not None and self.max_queries < 1:
            raise ValueError(f"{call}: max_queries={self.max_queries} must be positive; None evaluates all queries.")
        if not self.memory_mb > 0:
            raise ValueError(f"{call}: memory_mb={self.memory_mb} must be positive; the default is 512.")
        compute_device(call, self.device)
        if self.similarity == "hamming" and (self.prototype_accuracy or self.device not in ("cpu", "auto")):
            raise ValueError(
                f"{call}: binary codes have no mean to be a prototype, and are compared on the CPU. With "
                "similarity='hamming' leave prototype_accuracy and device out."
            )

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
        for k in self.precision_k:
            metrics[f"precision@{k}"] = lambda ranks, k=k: precision_at_k(ranks, k, ties)  # type: ignore[misc]
        for k in self.ndcg_k:
            metrics[f"ndcg@{k}"] = lambda ranks, k=k: ndcg(ranks, k, ties)  # type: ignore[misc]
        return metrics

    def metric_names(self) -> tuple[str, ...]:
        """The keys of `RetrievalReport.metrics`, also where nothing could be computed."""
        per_query = tuple(self.per_query())
        if self.prototype_accuracy:
            per_query = (*per_query, "prototype_accuracy")
        grouped = [f"grouped_recall@{k}" for k in self.grouped_k] if self.group_size is not None else []
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


def _is_rank(k: object) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


def _shown(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
