"""One evaluation: the ranks of all queries, and counts of all pairs, from one pass over the pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.engine.distinct import DistinctRows, has_few
from fewshot_callbacks.engine.layout import Layout
from fewshot_callbacks.engine.options import Precision, Progress, current_options
from fewshot_callbacks.engine.pooled import Collector, Negatives, Part, Positives, Sample, Wanted, collector
from fewshot_callbacks.engine.precision import fastest
from fewshot_callbacks.engine.ranks import RankBlock, RankCounter, Ranks, relevant_scores
from fewshot_callbacks.engine.relevance import Ints, Relevance
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.engine.vectors import Floats, Vectors
from fewshot_callbacks.journal import current_journal

# Queries whose negatives all are looked at beforehand, at least and at most; between them one in so many. At 31,730 items
# 32 queries misjudged what to collect so far that a second pass was needed; 126 cost half a percent of the pass.
FEWEST_ROWS, MOST_ROWS, ONE_IN = 32, 128, 250
# Pairs from which a sample pays.
SAMPLED_FROM = 2**18
# Relevant scores that are compared with the sample, at most.
THRESHOLDS = 2**14
# Share of the budget that scores of distinct rows may take.
DISTINCT_SHARE = 0.25

# Returns what questions will need, given some relevant pairs, how many negatives reach each, and how many there are.
Foresee = Callable[[Positives, Floats, float], Sequence[Wanted]]


@dataclass
class Evaluation:
    """Ranks, and counts of all pairs; every call is collective.

    Args:
        vectors: Queries and gallery.
        relevance: Of their pairs.
        memory: Budget in bytes beyond the vectors, of the device if there is one.
        device: Where products are made; None for the CPU.
        progress: Called with the number of pairs done and the number of all pairs.
        foresee: What will be asked of all pairs; None if nothing will be.
        placed: Blocks of ranks say which entries of their lists the items are.
    """

    vectors: Vectors
    relevance: Relevance
    memory: float
    device: torch.device | None = None
    progress: Progress | None = None
    foresee: Foresee | None = None
    placed: bool = False
    layout: Layout = field(init=False)
    positives: Positives = field(init=False)
    negatives: Negatives = field(init=False)
    precision: Precision = "float32"
    # of each query the highest score of its relevant items, -inf of none, and how many have it, after `run`
    best: tuple[Floats, Ints] = field(init=False)
    # of the negatives
    sample: Sample = field(init=False)

    def __post_init__(self) -> None:
        relevance = self.relevance
        self.device = torch.device("cpu") if current_options().plain and self.device is None else self.device
        sizes = relevance.relevant.sizes
        # entries of the lists of all processes
        self._total = int(self.vectors.processes.summed(np.array([sizes.sum()], np.int64))[0])
        self.layout = self.vectors.layout(self.memory, int(sizes.sum()), on_device=self.device is not None)
        self._batches = self._batched(self.layout, sizes)
        self._mutual = relevance.mutual and len(self._batches) == 1
        self.sample = Sample(np.empty(0), 0.0)
        self._stored: list[Any] | None = None
        self._ascending: Any = None

    def _batched(self, layout: Layout, sizes: Ints) -> list[slice]:
        """Return as many batches of queries, which need so many counters each, in every process; the last may be empty."""
        batches = layout.batches(sizes)
        missing = max(self.vectors.processes.gather(len(batches))) - len(batches)
        return batches + [slice(len(sizes), len(sizes))] * missing

    def parts(self) -> Iterator[Part]:
        """Yield the scores of all relevant pairs of this process, some at a time, ascending; each stands for some pairs."""
        once = self.relevance.mutual and self.vectors.processes.count == 1
        if self.layout.stored:
            if self._ascending is None:
                self._thresholds(self._batches[0])
            yield self._ascending, 1 + once
            return
        for batch in self._batches:
            made = relevant_scores(self._estimates, batch, once=once, ordered=False)[3]
            made.sort()
            yield made, 1 + once

    def _thresholds(self, batch: slice) -> tuple[Ints, Floats, NDArray[np.int32]]:
        """Return where the thresholds of each query of a batch begin, these, ascending for each query, and their places."""
        if not self.layout.stored:
            return relevant_scores(self._estimates, batch, placed=self.placed)[:3]
        if self._stored is None:
            every = slice(0, self._estimates.shape[0])
            *self._stored, self._ascending = relevant_scores(self._estimates, every, placed=self.placed)
            self._ascending.sort()
        start, scores, places = self._stored
        own = start[batch.start : batch.stop + 1]
        return own - own[0], scores[own[0] : own[-1]], places[own[0] : own[-1]]

    def run(self) -> Iterator[RankBlock]:
        """Yield the ranks of all queries of this process; afterwards all pairs are counted."""
        vectors, relevance, processes = self.vectors, self.relevance, self.vectors.processes
        few = has_few(vectors, relevance, DISTINCT_SHARE * self.memory)
        layout = self.layout._replace(kept=False) if few else self.layout
        self._estimates = Estimates(vectors, relevance, "float32", layout, self._mutual, self.device, self.progress)
        knots = self._knots()
        seen: Collector | None = None
        if few:
            counted = DistinctRows(self._estimates, self.parts)
        else:
            seen = self._choose(knots)
        best, seen_negatives = [], 0
        for batch in self._batches:
            start, scores, places = self._thresholds(batch)
            if few:
                ranks = counted.ranks(batch, start, scores)
            else:
                ranking = RankCounter(self._estimates, start, scores, batch.start)
                observers = (ranking,) if seen is None else (ranking, seen.go_on())
                seen_negatives += self._estimates.show(*observers, queries=batch, told=True)
                ranks = ranking.ranks()
                del ranking
            best.append(ranks.best())
            yield from ranks._replace(places=places).blocks(batch.start, self.layout.ranked)
            del ranks, scores, places  # before the scores of the next batch are made
        highest, tied = zip(*best, strict=True)
        self.best = np.concatenate(highest), np.concatenate(tied)
        if self.progress is not None:
            self.progress(*[len(vectors.pairs.queries) * self._estimates.items] * 2)
        self._stored = None
        if self.foresee is not None:
            self.positives = Positives.at(knots, self.parts(), processes)
            self.negatives = counted if seen is None else Negatives(self._estimates, seen, seen_negatives)

    def best_matches(self) -> tuple[Floats, Ints]:
        """Return what `best` holds after `run`, without a pass over all pairs."""
        if not hasattr(self, "best"):
            layout = self.layout._replace(kept=False)
            self._estimates = Estimates(self.vectors, self.relevance, "float32", layout, self._mutual, self.device)
            found = [Ranks(*self._thresholds(batch)[:2], *np.zeros((2, 0), np.int64)).best() for batch in self._batches]
            scores, tied = zip(*found, strict=True)
            self.best = np.concatenate(scores), np.concatenate(tied)
        return self.best

    def release(self) -> None:
        """Free what only `run` and the counts need."""
        for held in ("_estimates", "positives", "negatives"):
            vars(self).pop(held, None)
        self._stored = self._ascending = None

    def relevant_reaching(self, scores: Floats) -> Ints:
        """Return how many relevant pairs reach each of some ascending scores, after `run`."""
        held = self.positives
        if not held.between.any():
            return np.append(held.reach, 0)[np.searchsorted(held.scores, scores)]
        none = np.zeros(len(scores), np.int64)
        counts = sum((each * (len(part) - np.searchsorted(part, scores)) for part, each in self.parts()), none)
        return self.vectors.processes.summed(counts) if self.vectors.processes.count > 1 else counts

    def relevant(self) -> Iterator[tuple[slice, Ints, Floats]]:
        """Yield, of some queries at a time, where the scores of the relevant items of each begin, and these; collective."""
        for batch in self._batches:
            yield batch, *self._thresholds(batch)[:2]

    def reaching(self, scores: Floats) -> Iterator[tuple[slice, Ints]]:
        """Yield, of some queries at a time, how many negatives of each reach some ascending scores; collective."""
        sizes = np.full(len(self.relevance.own), len(scores))
        layout = self.vectors.layout(self.memory, int(sizes.sum()), on_device=self.device is not None)
        batches = self._batched(layout, sizes)
        # each in float32, since in bytes most pairs near so many scores would stay open
        mutual = self.relevance.mutual and len(batches) == 1
        estimates = Estimates(self.vectors, self.relevance, "float32", layout, mutual, self.device)
        for batch in batches:
            start = len(scores) * np.arange(batch.stop - batch.start + 1)
            counter = RankCounter(estimates, start, np.tile(scores, len(start) - 1), batch.start)
            estimates.show(counter, queries=batch)
            ranks = counter.ranks()
            yield batch, (ranks.above + ranks.tied).reshape(-1, len(scores))

    def _knots(self) -> Floats:
        """Return the distinct scores of all relevant pairs of all processes, or as many as there is room for."""
        if self.foresee is None:
            return np.empty(0)
        room, processes = self.layout.knots, self.vectors.processes
        chosen = [part[:: max(1, math.ceil(self._total / room / each))].copy() for part, each in self.parts()]
        return np.unique(processes.joined(np.concatenate(chosen)))

    def _choose(self, knots: Floats) -> Collector | None:
        """Choose the precision and what is collected, by a sample of the queries of the first batch."""
        estimates, processes = self._estimates, self.vectors.processes
        named, batch = current_options().precision, self._batches[0]
        rows: list[int] = []
        if estimates.pairs >= SAMPLED_FROM or self.foresee is not None:
            number = max(FEWEST_ROWS // processes.count, min(MOST_ROWS // processes.count, batch.stop // ONE_IN))
            number = min(batch.stop, number, max(2, self.layout.collected // max(1, estimates.shape[1])))
            rows = np.unique(np.linspace(0, batch.stop - 1, number).astype(int)).tolist() if batch.stop else []
        sampled = estimates.sample(rows)
        if named is None and estimates.pairs >= SAMPLED_FROM:
            start, scores, _ = self._thresholds(batch)
            journal, choose = current_journal(), partial(fastest, estimates, start, scores, rows, sampled)
            named = choose() if journal is None else cast(Precision, journal.remembered(choose))
        named = self.vectors.possible(named, kept=estimates.layout.coded, on=self.device)
        self.precision: Precision = "float32" if self.device else named  # of what else is ranked, on the processor
        self._estimates = estimates.in_precision(named)
        if self.foresee is None:
            return None
        every = np.sort(processes.joined(np.concatenate([np.empty(0, np.float32), *sampled])))
        pairs = estimates.pairs * (2 if self._mutual else 1)
        self.sample = Sample(every.astype(np.float64), pairs / len(every) if len(every) else 0.0)
        some = Positives.at(knots[:: max(1, len(knots) // THRESHOLDS)], [(knots, 1)])
        by = self._total / max(1, some.total)
        reach, above = ((counts * by).astype(np.int64) for counts in (some.reach, some.above))
        some = Positives(some.scores, reach, above, self._total)
        wanted = self.foresee(some, self.sample.reaching(some.scores), float(pairs)) if len(some.scores) else ()
        return collector(self._estimates, self.sample, wanted, some.scores)


def rank_of_best(
    vectors: Vectors, relevance: Relevance, best: tuple[Floats, Ints], memory: float, precision: Precision = "float32"
) -> RankBlock:
    """Return the rank of the best match of each query among some items, given its score; collective.

    Args:
        vectors: Queries and items.
        relevance: Of their pairs.
        best: Of each query the highest score of its relevant items, -inf of none, and how many have it.
        memory: Budget in bytes.
        precision: Of the products.
    """
    scores, tied = best
    some = np.isfinite(scores)
    layout = vectors.layout(memory, len(scores))
    estimates = Estimates(vectors, relevance, vectors.possible(precision, kept=layout.coded), layout, relevance.mutual)
    counter = RankCounter(estimates, np.append(0, np.cumsum(some)), scores[some])
    estimates.show(counter)
    ranks, tables = counter.ranks(), np.zeros((2, len(scores)), np.int64)
    tables[:, some] = ranks.above, ranks.tied
    above, equal = (torch.from_numpy(table)[:, None] for table in tables)
    found, one = torch.from_numpy(some), torch.ones_like(above)
    columns = found[:, None], above, equal, 0 * one, torch.from_numpy(tied)[:, None], one
    return RankBlock(torch.arange(len(scores)), found.long(), *columns)
