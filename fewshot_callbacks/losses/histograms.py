"""Histograms of the scores of each query that change smoothly with the embeddings, and their gradient.

Each score is shared between the two bins whose centres it lies between, in proportion to how near they are (triangular
weights), so that its weights add up to 1. Scores beyond the range count for the outermost bin, with a gradient of zero. As a
score touches two bins, histograms cost one visit of each score, and no tensor of queries x items x bins is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# What is divided into bins: the cosine of two embeddings, 1 minus their distance on the unit sphere, or minus the Hamming
# distance of two (relaxed) codes of -1 and 1.
Score = Literal["cosine", "euclidean", "hamming"]

# Scores that are processed at once: 4 MB, and 16 MB for the intermediate tensors.
CHUNK_SCORES = 2**20
# A 16th of a smaller matrix is worked on at once, but no less than this: at B = 1,024, d = 512 chunks of 2^20 took 13
# MB more, for 2.46 instead of 2.63 times the time of the bare product (`benchmarks/losses.py`, Xeon at 2.1 GHz).
SMALLEST_CHUNK = 2**16
# Scores up to this size are kept for the backward pass; larger ones are recomputed from the embeddings. It holds those of
# a batch of 4,096 items in float32, and one of 8,192 then takes no more memory (`benchmarks/losses.py`: 121 and 127 MB).
KEPT_BYTES = 2**27
# Added to a squared distance, so that its root has a derivative at 0; the value of the source's listing.
SMALLEST_SQUARE = 1e-3


@dataclass(frozen=True)
class Bins:
    """`count` bins with centres at equal steps from `high`, the first, down to `low`, the last."""

    score: Score
    count: int
    low: float
    high: float

    @property
    def per_score(self) -> float:
        """How many bins a score of 1 spans."""
        return (self.count - 1) / (self.high - self.low)

    def places(self, products: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"]:
        """Where each score lies, 0 at the centre of the first bin, 1 at that of the second ...; overwrites the products."""
        if self.score == "euclidean":
            # In place, since this is the largest tensor of the pass. Rounding may bring the product of equal embeddings
            # above 1, and without the bound the root would be NaN.
            products.mul_(-2).add_(2 + SMALLEST_SQUARE).clamp_(min=SMALLEST_SQUARE).sqrt_().neg_().add_(1)
        return products.sub_(self.high).mul_(-self.per_score)

    def differentiable_places(self, products: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"]:
        """The same, with derivatives by the products, which are kept."""
        if self.score == "euclidean":
            products = 1 - (2 + SMALLEST_SQUARE - 2 * products).clamp(min=SMALLEST_SQUARE).sqrt()
        return (self.high - products) * self.per_score

    def slope(self, places: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"] | float:
        """Derivative of a place by the product of two embeddings."""
        if self.score != "euclidean":
            return -self.per_score
        distance = 1 - self.high + places / self.per_score
        return -self.per_score / distance  # d(-sqrt(2 - 2x)) / dx = 1 / sqrt(2 - 2x)


class Relevance(NamedTuple):
    """Which candidates a query has, and which of them are relevant."""

    query_labels: Int[Tensor, "queries"]
    gallery_labels: Int[Tensor, "items"]
    # queries are also the gallery: no query is its own candidate
    own: bool

    def rows(self, start: int, stop: int) -> Bool[Tensor, "queries items"]:
        """The relevant candidates of some queries."""
        relevant = self.query_labels[start:stop, None] == self.gallery_labels
        if self.own:
            relevant.diagonal(start).fill_(False)
        return relevant


class SoftHistograms(NamedTuple):
    """Soft counts of each query's candidates in each bin, from the highest scores to the lowest.

    Examples:
        >>> import torch
        >>> counts = SoftHistograms(candidates=torch.tensor([[1.5, 2.5]]), relevant=torch.tensor([[1.0, 0.0]]))
        >>> counts.candidates.sum(dim=1)  # the number of candidates of each query
        tensor([4.])
    """

    candidates: Float[Tensor, "queries bins"]
    relevant: Float[Tensor, "queries bins"]


def soft_histograms(
    queries: Float[Tensor, "queries dim"], gallery: Float[Tensor, "items dim"], relevance: Relevance, bins: Bins
) -> SoftHistograms:
    """Compute histograms of each query's scores, with gradients.

    Args:
        queries: Embeddings whose products are the scores (of length 1 for cosines and distances), in float32 or float64.
        gallery: Embeddings; for one set the very tensor of the queries.
        relevance: Which candidates are relevant to each query.
        bins: The bins of the scores.

    Returns:
        Histograms over all candidates, and over the relevant ones.
    """
    return SoftHistograms(*_SoftHistograms.apply(queries, gallery, relevance, bins))


class _SoftHistograms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, gallery: Tensor, relevance: Relevance, bins: Bins) -> tuple[Tensor, Tensor]:
        ctx.relevance, ctx.bins = relevance, bins
        kept = len(queries) * len(gallery) * queries.element_size() <= KEPT_BYTES and any(ctx.needs_input_grad)
        # On `ctx` itself, as it is neither an input nor an output, which `save_for_backward` is for.
        ctx.places = queries.new_empty(len(queries), len(gallery)) if kept else None
        histograms = queries.new_zeros(2, len(queries), bins.count)
        for start, stop in _chunks(queries, gallery):
            out = None if ctx.places is None else ctx.places[start:stop]
            places = bins.places(torch.mm(queries[start:stop], gallery.T, out=out))
            interval = _intervals(places, start, relevance, bins)
            # Only places that nobody reads again may be overwritten.
            weight = places.frac() if kept else places.frac_()
            histograms[0, start:stop] = _histogram(interval, weight, bins)
            # few pairs are relevant, so that these are listed
            row, column = relevance.rows(start, stop).nonzero(as_tuple=True)
            histograms[1, start:stop] = _histogram_of_pairs(
                row, interval[row, column], weight[row, column], stop - start, bins
            )
        ctx.save_for_backward(queries, gallery)
        return histograms[0], histograms[1]

    @staticmethod
    def backward(ctx: Any, of_candidates: Tensor, of_relevant: Tensor) -> tuple[Tensor | None, ...]:
        queries, gallery = ctx.saved_tensors
        relevance, bins = ctx.relevance, ctx.bins
        steps, more = (_steps(gradient) for gradient in (of_candidates, of_relevant))
        # The other road is in place and by chunks, so that autograd could not follow it a second time.
        if torch.is_grad_enabled():  # create_graph=True
            return (*_gradients(queries, gallery, steps, more, relevance, bins), None, None)
        query_gradient = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        gallery_gradient = torch.zeros_like(gallery) if ctx.needs_input_grad[1] else None
        if relevance.own and query_gradient is not None:
            gallery_gradient = query_gradient  # of one tensor: the sum of both
        for start, stop in _chunks(queries, gallery):
            places = ctx.places[start:stop] if ctx.places is not None else bins.places(queries[start:stop] @ gallery.T)
            interval = _intervals(places, start, relevance, bins)
            gradient = steps[start:stop].gather(1, interval)
            row, column = relevance.rows(start, stop).nonzero(as_tuple=True)
            gradient[row, column] += more[start + row, interval[row, column]]
            gradient *= bins.slope(places)
            if query_gradient is not None:
                query_gradient[start:stop].addmm_(gradient, gallery)
            if gallery_gradient is not None:
                gallery_gradient.addmm_(gradient.T, queries[start:stop])
        return query_gradient, None if relevance.own else gallery_gradient, None, None


def _gradients(
    queries: Tensor, gallery: Tensor, steps: Tensor, more: Tensor, relevance: Relevance, bins: Bins
) -> tuple[Tensor, Tensor]:
    """The gradients by operations that have derivatives themselves: of all scores at once, which autograd keeps anyway."""
    places = bins.differentiable_places(queries @ gallery.T)
    interval = _intervals(places.detach(), 0, relevance, bins)
    of_pairs = steps.gather(1, interval) + more.gather(1, interval) * relevance.rows(0, len(queries))
    of_pairs = of_pairs * bins.slope(places)
    return of_pairs @ gallery, of_pairs.T @ queries


def _chunks(queries: Tensor, gallery: Tensor) -> list[tuple[int, int]]:
    # A chunk has whole rows, at least one of them even where a single row is longer than a chunk.
    scores = min(CHUNK_SCORES, max(SMALLEST_CHUNK, len(queries) * len(gallery) // 16))
    rows = max(1, scores // max(1, len(gallery)))
    return [(start, min(start + rows, len(queries))) for start in range(0, len(queries), rows)]


# Places are cut into intervals: 0 above the first centre, i between the centres i - 1 and i, `count` from the last
# centre on; `count + 1` is for pairs that do not count.


def _intervals(places: Tensor, start: int, relevance: Relevance, bins: Bins) -> Int[Tensor, "queries items"]:
    # Clamped before they become integers: a score far outside a narrow range has no place that int64 could hold.
    interval = places.floor().clamp_(-1, bins.count - 1).add_(1).long()
    if relevance.own:
        interval.diagonal(start).fill_(bins.count + 1)
    return interval


def _histogram(interval: Tensor, weight: Tensor, bins: Bins) -> Tensor:
    """Soft counts from the numbers of scores in each interval and the sums of their weights."""
    number = weight.new_zeros(len(interval), bins.count + 2)
    total = torch.zeros_like(number)
    number.scatter_add_(1, interval, torch.ones((), dtype=weight.dtype, device=weight.device).expand_as(weight))
    total.scatter_add_(1, interval, weight)
    return _shared(number, total, bins)


def _histogram_of_pairs(row: Tensor, interval: Tensor, weight: Tensor, rows: int, bins: Bins) -> Tensor:
    number = weight.new_zeros(rows, bins.count + 2)
    total = torch.zeros_like(number)
    number.index_put_((row, interval), torch.ones_like(weight), accumulate=True)
    total.index_put_((row, interval), weight, accumulate=True)
    return _shared(number, total, bins)


def _shared(number: Tensor, total: Tensor, bins: Bins) -> Tensor:
    """What the scores of each interval leave to the two bins beside it."""
    histogram = number[:, 1:-1].clone()  # to the bin before, and beyond the last centre
    histogram[:, :-1] -= total[:, 1 : bins.count]
    histogram[:, 1:] += total[:, 1 : bins.count]
    histogram[:, 0] += number[:, 0]
    return histogram


def _steps(gradient: Float[Tensor, "queries bins"]) -> Float[Tensor, "queries intervals"]:
    """Derivative by a place in each interval: the gradient of the bin after it minus that of the bin before it."""
    return torch.nn.functional.pad(gradient.diff(dim=1), (1, 2))


def check_bins(call: str, score: str, count: int, low: float, high: float) -> Bins:
    """Bins of these settings.

    Raises:
        ValueError: Where there is no such score, fewer than two bins, or no range.
    """
    if score not in get_args(Score):
        raise ValueError(f"{call}(similarity={score!r}) is unknown. Choose one of {', '.join(get_args(Score))}.")
    if not isinstance(count, int) or count < 2:
        raise ValueError(
            f"{call}(bins={count!r}) must be a whole number from 2 on: between two bins a score has a gradient."
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{call}(low={low}, high={high}) is not a range. Pass low < high, such as low=0, high=1.")
    return Bins(score, count, float(low), float(high))  # type: ignore[arg-type]
