"""The metrics that the settings of an evaluation ask for, by the names they are logged with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.functional.retrieval.rank_metrics import (
    Divisor,
    average_precision,
    average_precision_at_k,
    hits_within,
    ir_recall_at_k,
    ndcg,
    precision_at_k,
    recall_at_k,
    reciprocal_rank,
)
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings

QueryMetric = Callable[[RankBlock], Float[Tensor, "queries"]]


def query_metrics(settings: RetrievalSettings) -> dict[str, QueryMetric]:
    """The metrics that each query has, whose means are reported."""
    ties = settings.ties
    metrics: dict[str, QueryMetric] = {
        "mAP": lambda ranks: average_precision(ranks, ties),
        "map@r": lambda ranks: average_precision(ranks, ties, cut=ranks.relevant),
        "r_precision": lambda ranks: hits_within(ranks, ranks.relevant, ties) / ranks.relevant,
        "mrr": lambda ranks: reciprocal_rank(ranks, ties),
    }
    for entry in settings.map_k:
        k = entry if isinstance(entry, int) else entry[0]
        divisor: Divisor = "min" if isinstance(entry, int) else entry[1]
        metrics[f"map@{k}_{divisor}"] = partial(average_precision_at_k, k=k, divisor=divisor, ties=ties)
    at_k = {
        "recall": (settings.recall_k, recall_at_k),
        "ir_recall": (settings.ir_recall_k, ir_recall_at_k),
        "precision": (settings.precision_k, precision_at_k),
        "ndcg": (settings.ndcg_k, ndcg),
    }
    return metrics | {f"{name}@{k}": partial(metric, k=k, ties=ties) for name, (ks, metric) in at_k.items() for k in ks}


def metric_names(settings: RetrievalSettings) -> tuple[str, ...]:
    """The keys of `RetrievalReport.metrics`, also where nothing could be computed."""
    of_queries = (*query_metrics(settings), *(("prototype_accuracy",) if settings.prototype_accuracy else ()))
    has_groups = settings.group_size is not None or settings.label_groups is not None
    return (
        *of_queries,
        *(f"macro_{name}" for name in of_queries if settings.macro),
        *(f"grouped_recall@{k}" for k in settings.grouped_k if has_groups),
        *("precision", "recall", "f1", "threshold"),
        *(("auc_pr",) if settings.auc_pr else ()),
        *(f"recall@precision{precision:g}" for precision in settings.precisions),
        *(f"fnmr@fmr{rate:g}" for rate in settings.false_match_rates),
        *(("eer",) if settings.equal_error_rate else ()),
    )
