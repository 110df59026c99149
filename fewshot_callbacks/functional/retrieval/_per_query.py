"""Metrics of each query, computed from blocks of ranks, and the range that equal scores leave to them."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.relevance import PairRelevance
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.retrieval._tied_groups import depends_on_ties
from fewshot_callbacks.functional.retrieval.graded_ndcg import Gain, gains_of, graded_ndcg
from fewshot_callbacks.functional.retrieval.rank_metrics import (
    only_queries,
    recall_at_k,
    with_absent,
    with_one_column,
    without_nearest,
)
from fewshot_callbacks.functional.retrieval.registry import is_users, requested_metric
from fewshot_callbacks.functional.retrieval.relevance import Absent
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings, request_of
from fewshot_callbacks.functional.retrieval.users_metrics import call_on_ranks
from fewshot_callbacks.settings import RequestedMetric, Ties

# The public function, for messages.
CALL = "evaluate_retrieval"
# Metrics that depend on grades, with their gain.
GAINS: dict[str, Gain] = {"ndcg@{k}": "exponential", "ndcg@{k}_linear": "linear"}
# Ranks that each thread sums at once: 8 MB.
RANKS_AT_ONCE = 2**20
# Every report has these metrics for each query, because plots and HTML reports sort the queries by them.
ALWAYS = (requested_metric("mAP"), requested_metric("mrr"))


class PerQuery:
    """The metrics of each query, filled block by block.

    `relevance` and `grades` are of the queries of this process; grades of None are all 1. `absent` are relevant items
    that are not in the gallery. `copies` is None if no note reports their effect.
    """

    def __init__(
        self,
        relevance: PairRelevance,
        grades: Shaped[np.ndarray, "pairs"] | None,
        absent: Absent | None,
        items: int,
        settings: RetrievalSettings,
        copies: Int[Tensor, "queries"] | None = None,
    ) -> None:
        self.lists = relevance.relevant
        self.grades = grades
        self.absent = absent
        self.items = items
        self.ties = settings.ties
        self.copies = copies
        # metrics of ranks, by the key of their mean over queries
        keys = [*ALWAYS, *request_of(settings).reported]
        self.metrics = {requested.of_queries: requested for requested in keys if requested.metric.input == "ranks"}
        queries = len(self.lists.start)
        self.values: dict[str, Float[Tensor, "queries"]] = {
            name: torch.full((queries,), torch.nan, dtype=torch.float64) for name in self.metrics
        }
        self.relevant: Int[Tensor, "queries"] = torch.zeros(queries, dtype=torch.int64)
        self.has_candidate = torch.zeros(queries, dtype=torch.bool)
        self.tied = torch.zeros(queries, dtype=torch.bool)
        # metrics whose extremes are reached with relevant items last or first among equal scores
        self.ordered_by_ties = [
            name for name, requested in self.metrics.items() if requested.parameters.get("divisor") != "found"
        ]
        # for each block with ties: the queries that have ties, and their values (metrics, two rules, queries)
        self.blocks_with_ties: list[tuple[Int[Tensor, "tied"], Float[Tensor, "metrics two tied"]]] = []
        # metric -> (two rules, queries with ties), of all processes; empty if no query has ties
        self.values_of_tied: dict[str, Float[Tensor, "two tied"]] = {}
        # recall@1 of each query with its copies, and without them
        self.recalls_of_copies: Float[Tensor, "two queries"] | None = None
        if copies is not None:
            self.recalls_of_copies = torch.full((2, queries), torch.nan, dtype=torch.float64)

    @property
    def graded(self) -> bool:
        """Whether a metric depends on grades."""
        return self.grades is not None and any(requested.metric.pattern in GAINS for requested in self.metrics.values())

    def add(self, ranks: RankBlock) -> None:
        """Compute the metrics of a block of queries. Several threads call this at once, each with its own queries."""
        index = ranks.queries.cpu()
        self.has_candidate[index] = ranks.relevant.cpu() > 0
        if self.absent is not None:
            missing = torch.from_numpy(self.absent.sizes[index.numpy()])
            ranks = with_absent(ranks, missing.to(ranks.relevant.device))
        self.relevant[index] = ranks.relevant.cpu()
        if ranks.valid.shape[1] == 0:  # no query has a relevant candidate
            ranks = with_one_column(ranks)
        for name, requested in self.metrics.items():
            self.values[name][index] = self._values(ranks, requested, self.ties).cpu()
        tied = depends_on_ties(ranks)
        self.tied[index] = tied.cpu()
        if bool(tied.any()):
            self.blocks_with_ties.append((index[tied.cpu()], self._extremes(only_queries(ranks, tied))))
        if self.copies is not None and self.recalls_of_copies is not None:
            copies = self.copies[index].to(ranks.relevant.device)
            self.recalls_of_copies[0, index] = recall_at_k(ranks, 1, self.ties).cpu()
            self.recalls_of_copies[1, index] = recall_at_k(without_nearest(ranks, copies), 1, self.ties).cpu()

    def _values(self, ranks: RankBlock, requested: RequestedMetric, ties: Ties) -> Float[Tensor, "queries"]:
        """Return a metric of each query of a block, with this rule for ties."""
        if is_users(requested.metric):
            return call_on_ranks(CALL, requested, ranks, ties)
        # If the lists are empty, nothing has a grade.
        if self.grades is not None and len(self.grades) and requested.metric.pattern in GAINS:
            return self._graded_ndcg(ranks, requested, ties)
        assert requested.metric.value is not None
        values: Float[Tensor, "queries"] = requested.metric.value(ranks, ties=ties, **requested.parameters)
        return values

    def _extremes(self, ranks: RankBlock) -> Float[Tensor, "metrics two queries"]:
        """Return the metrics with relevant items last, and with relevant items first, among equal scores."""
        rules: tuple[Ties, ...] = ("pessimistic", "optimistic")
        return torch.stack(
            [
                torch.stack([self._values(ranks, self.metrics[name], rule).cpu().double() for rule in rules])
                for name in self.ordered_by_ties
            ]
        )

    def effect_of_copies(self) -> str:
        """Return the first words of the note on copies. Call `gather` before."""
        if self.recalls_of_copies is None:
            return "A copy is a perfect neighbour"
        recall, without_copies = (exact_mean(values[~values.isnan()]) for values in self.recalls_of_copies)
        if math.isnan(without_copies):
            return f"A copy is a perfect neighbour: recall@1 is {recall:.3f}, and no query has any other match"
        return f"A copy is a perfect neighbour: recall@1 is {recall:.3f}, and {without_copies:.3f} without their copies"

    def _graded_ndcg(self, ranks: RankBlock, requested: RequestedMetric, ties: Ties) -> Float[Tensor, "queries"]:
        """Return nDCG with grades, a few queries at a time because its sums have a term for each rank up to k."""
        assert self.grades is not None
        assert ranks.places is not None
        entries = torch.from_numpy(self.lists.start)[ranks.queries, None] + ranks.places
        entries.clamp_(max=max(0, len(self.grades) - 1))
        grades = torch.from_numpy(self.grades[entries.numpy()].astype(np.float64)).masked_fill_(~ranks.valid, 0.0)
        columns = grades.shape[1]
        items = self.items
        if self.absent is not None:
            grades_of_absent = torch.from_numpy(self.absent.padded(ranks.queries.numpy()))
            grades = torch.cat([grades, grades_of_absent], dim=1)
            items += grades_of_absent.shape[1]
        gains, gains_of_absent = gains_of(grades, GAINS[requested.metric.pattern]).tensor_split([columns], dim=1)
        k = min(requested.parameters["k"], items)
        values = []
        for batch in torch.arange(len(gains)).split(max(1, RANKS_AT_ONCE // k)):
            ranks_of_batch = only_queries(ranks, batch)
            values.append(graded_ndcg(ranks_of_batch, gains[batch], k, ties, gains_of_absent[batch]))
        return torch.cat(values)

    def gather(self, processes: Processes, places: Int[Tensor, "own"], length: int) -> None:
        """Gather the values of all queries in order. `places` are the indices of this process's queries. *Collective*."""
        counts = [self.relevant.double(), self.has_candidate.double(), self.tied.double()]
        columns = processes.placed(torch.stack([*self.values.values(), *counts]), places, length)
        *values, relevant, has_candidate, tied = columns
        self.values = dict(zip(self.values, values, strict=True))
        self.relevant = relevant.long()
        self.has_candidate = has_candidate.bool()
        self.tied = tied.bool()
        self._gather_tied(processes, places)
        if self.recalls_of_copies is not None:
            self.recalls_of_copies = processes.placed(self.recalls_of_copies, places, length)

    def _gather_tied(self, processes: Processes, places: Int[Tensor, "own"]) -> None:
        """Gather the values of queries with ties under both rules, in the order of all queries. *Collective*."""
        if not bool(self.tied.any()):
            return
        blocks = [
            block
            for part in processes.gather([(places[index], values) for index, values in self.blocks_with_ties])
            for block in part
        ]
        self.blocks_with_ties = []
        order = torch.cat([index for index, _ in blocks]).argsort()
        values = torch.cat([values for _, values in blocks], dim=2)[:, :, order]
        self.values_of_tied = dict(zip(self.ordered_by_ties, values, strict=True))
