"""Metrics as a user brings them: functions of ranks and of pooled counts, and objects at the top of a module."""

import torch

from fewshot_callbacks import Metric, hits_within, relevant_ranks
from fewshot_callbacks.functional import PooledDecisions, RankBlock


def f1_at_k(ranks: RankBlock, k: int, ties="expected"):
    """The harmonic mean of precision@k and ir_recall@k."""
    return 2 * hits_within(ranks, torch.full_like(ranks.relevant, k), ties) / (k + ranks.relevant)


def mean_rank(ranks: RankBlock, ties="expected"):
    """The mean rank of the relevant items."""
    return relevant_ranks(ranks, ties).nanmean(dim=1)


def rank_biased_precision(ranks: RankBlock, p: float, ties="expected"):
    """(1 - p) times the sum of p^(rank - 1), at the mean ranks of ties."""
    worth = (1 - p) * p ** (relevant_ranks(ranks, ties) - 1)
    return worth.nansum(dim=1)


def lift(pooled: PooledDecisions):
    """The best precision over that of a random pair."""
    counts = pooled.pair_counts
    return pooled.best_f1.precision / (counts.relevant / (counts.relevant + counts.irrelevant))


def margin(pooled: PooledDecisions):
    """The distance between two thresholds; the points at them are those of other keys."""
    return pooled.at_precision[0.05].threshold - pooled.best_f1.threshold


F1 = Metric("f1@{k}", "ranks", f1_at_k, "Harmonic mean of precision@{k} and ir_recall@{k}.")
F1_AT_2 = F1.at(k=2)
MEAN_RANK = Metric("mean_rank", "ranks", mean_rank, "Mean rank of the relevant items.", range=None, better="lower")
RBP = Metric("rbp@{p}", "ranks", rank_biased_precision, "Sum of {p}^(rank - 1) over the relevant items.")
LIFT = Metric("lift", "pairs", lift, "Precision at the best F1 over that of a random pair.", range=None)
MARGIN = Metric("margin", "pairs", margin, "Threshold of precision 0.05 minus that of the best F1.", range=None)
NO_METRIC = 5
