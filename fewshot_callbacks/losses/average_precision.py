"""Average precision as a loss, from soft histograms of each query's scores.

A score is divided between the two bins with the nearest centres (triangular weights, which add up to 1), so the histograms
are differentiable. Scores outside the range count for the outermost bin, with a gradient of zero. Because a score belongs to
only two bins, no tensor of queries x items x bins is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, as_labels, encode, labels_of_each
from fewshot_callbacks.functional._reading import check_matrix, non_finite_rows, refuse_non_finite

# The similarities with a bounded range: the cosine of two embeddings; 1 - sqrt(d² + 0.001), where d is their distance on the
# unit sphere; and minus the Hamming distance of two (relaxed) codes of -1 and 1.
BoundedSimilarity = Literal["cosine", "euclidean", "hamming"]

# Scores that are processed at once: 4 MB, and 16 MB for the intermediate tensors.
CHUNK_SCORES = 2**20
# A smaller score matrix is processed in 16 chunks of at least this many scores. 1,024 items of dimension 512 then took 2.63
# times as long as the bare matrix product; as a single chunk of 2^20 scores they took 2.46 times as long, and 13 MB more
# memory (`benchmarks/losses.py`, Xeon at 2.1 GHz).
SMALLEST_CHUNK = 2**16
# Up to 128 MiB of scores are cached for the backward pass; otherwise the scores are recomputed from the embeddings. A batch
# reaches this limit at 5,792 items in float32, and at 4,096 items in float64. In float32 (`benchmarks/losses.py`), 4,096
# items took 127 MB, including 67 MB of cached scores; 8,192 items, with 268 MB of recomputed scores, took 121 MB.
CACHED_BYTES = 2**27
# Added to a squared distance, so that its root has a derivative at 0. The value is from the reference implementation.
SMALLEST_SQUARE = 1e-3
# Smaller soft counts count as zero: they are rounding errors.
TINY = 1e-6


@dataclass(frozen=True)
class Bins:
    """`count` bins with equally spaced centres, from `high` (the first bin) down to `low` (the last bin).

    The place of a score is its position in units of bins: 0 at the centre of the first bin, 1 at the centre of the second
    bin, and so on.
    """

    similarity: BoundedSimilarity
    count: int
    low: float
    high: float

    @property
    def per_score(self) -> float:
        """The number of bins per unit of score."""
        return (self.count - 1) / (self.high - self.low)

    def places(self, products: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"]:
        """Return the place of each pair from the products of embeddings; the products are overwritten."""
        if self.similarity == "euclidean":
            # In place, because this is the largest tensor of the pass. Rounding may increase the product of equal embeddings
            # above 1; without the bound the root would be NaN.
            products.mul_(-2).add_(2 + SMALLEST_SQUARE).clamp_(min=SMALLEST_SQUARE).sqrt_().neg_().add_(1)
        return products.sub_(self.high).mul_(-self.per_score)

    def differentiable_places(self, products: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"]:
        """Return the place of each pair, differentiable by the products of embeddings; the products are not changed."""
        scores = products
        if self.similarity == "euclidean":
            scores = 1 - (2 + SMALLEST_SQUARE - 2 * products).clamp(min=SMALLEST_SQUARE).sqrt()
        return (self.high - scores) * self.per_score

    def slope(self, places: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"] | float:
        """Return the derivative of each place with respect to the product of the two embeddings."""
        if self.similarity != "euclidean":
            return -self.per_score
        distance = 1 - self.high + places / self.per_score
        return -self.per_score / distance  # d(-sqrt(2.001 - 2x)) / dx = 1 / sqrt(2.001 - 2x)


class PairLabels(NamedTuple):
    """The labels that define which candidates of a query are relevant.

    Attributes:
        query_labels: The class of each query.
        gallery_labels: The class of each gallery item.
        symmetric: Whether the queries are also the gallery; a query is then not its own candidate.
    """

    query_labels: Int[Tensor, "queries"]
    gallery_labels: Int[Tensor, "items"]
    symmetric: bool

    def is_relevant(self, start: int, stop: int) -> Bool[Tensor, "queries items"]:
        """Return whether each gallery item is relevant to each query from `start` up to `stop`."""
        relevant = self.query_labels[start:stop, None] == self.gallery_labels
        if self.symmetric:
            relevant.diagonal(start).fill_(False)
        return relevant


class SoftHistograms(NamedTuple):
    """Soft counts of each query's candidates, and of its relevant candidates, per bin, from high to low scores.

    Examples:
        >>> import torch
        >>> counts = SoftHistograms(candidates=torch.tensor([[1.5, 2.5]]), relevant=torch.tensor([[1.0, 0.0]]))
        >>> counts.candidates.sum(dim=1)  # the number of candidates of each query
        tensor([4.])
    """

    candidates: Float[Tensor, "queries bins"]
    relevant: Float[Tensor, "queries bins"]


class _HistogramFunction(torch.autograd.Function):
    """Soft histograms of each query's scores, over all candidates and over the relevant candidates, with gradients.

    Scores are products of embeddings (of length 1 for cosines and distances), in float32 or float64. For one set, the
    gallery is the same tensor object as the queries.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, gallery: Tensor, pair_labels: PairLabels, bins: Bins
    ) -> tuple[Tensor, Tensor]:
        ctx.pair_labels = pair_labels
        ctx.bins = bins
        score_bytes = len(queries) * len(gallery) * queries.element_size()
        is_cached = score_bytes <= CACHED_BYTES and any(ctx.needs_input_grad)
        # An attribute of `ctx`, because `save_for_backward` is only for inputs and outputs.
        ctx.places = queries.new_empty(len(queries), len(gallery)) if is_cached else None
        histograms = queries.new_zeros(2, len(queries), bins.count)  # all candidates, relevant candidates
        for start, stop in _chunks(queries, gallery):
            cache = ctx.places[start:stop] if is_cached else None
            places = bins.places(torch.mm(queries[start:stop], gallery.T, out=cache))
            intervals = _intervals(places, start, pair_labels, bins)
            # The backward pass reads cached places, so they must not be overwritten.
            weights = places.frac() if is_cached else places.frac_()
            histograms[0, start:stop] = _histogram(intervals, weights, bins)
            # A list is faster, because few pairs are relevant.
            row, column = pair_labels.is_relevant(start, stop).nonzero(as_tuple=True)
            histograms[1, start:stop] = _histogram_of_pairs(
                row, intervals[row, column], weights[row, column], stop - start, bins
            )
        ctx.save_for_backward(queries, gallery)
        return histograms[0], histograms[1]

    @staticmethod
    def backward(ctx: Any, candidate_gradient: Tensor, relevant_gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, gallery = ctx.saved_tensors
        pair_labels = ctx.pair_labels
        bins = ctx.bins
        candidate_slopes = _slopes_of_intervals(candidate_gradient)
        relevant_slopes = _slopes_of_intervals(relevant_gradient)
        # Autograd cannot differentiate the loop below, which works in place and in chunks.
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _gradients(queries, gallery, candidate_slopes, relevant_slopes, pair_labels, bins)
            return (*gradients, None, None)
        query_gradient = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        gallery_gradient = torch.zeros_like(gallery) if ctx.needs_input_grad[1] else None
        if pair_labels.symmetric and query_gradient is not None:
            gallery_gradient = query_gradient  # both gradients add up in one tensor
        for start, stop in _chunks(queries, gallery):
            chunk = queries[start:stop]
            places = bins.places(chunk @ gallery.T) if ctx.places is None else ctx.places[start:stop]
            intervals = _intervals(places, start, pair_labels, bins)
            pair_gradient = candidate_slopes[start:stop].gather(1, intervals)
            row, column = pair_labels.is_relevant(start, stop).nonzero(as_tuple=True)
            pair_gradient[row, column] += relevant_slopes[start + row, intervals[row, column]]
            pair_gradient *= bins.slope(places)
            if query_gradient is not None:
                query_gradient[start:stop].addmm_(pair_gradient, gallery)
            if gallery_gradient is not None:
                gallery_gradient.addmm_(pair_gradient.T, chunk)
        return query_gradient, None if pair_labels.symmetric else gallery_gradient, None, None


def _gradients(
    queries: Tensor,
    gallery: Tensor,
    candidate_slopes: Tensor,
    relevant_slopes: Tensor,
    pair_labels: PairLabels,
    bins: Bins,
) -> tuple[Tensor, Tensor]:
    """Return the gradients, computed by differentiable operations for all pairs at once.

    Chunks would save no memory, because autograd keeps the intermediate tensors of all pairs.
    """
    places = bins.differentiable_places(queries @ gallery.T)
    intervals = _intervals(places.detach(), 0, pair_labels, bins)
    pair_gradient = candidate_slopes.gather(1, intervals)
    pair_gradient = pair_gradient + relevant_slopes.gather(1, intervals) * pair_labels.is_relevant(0, len(queries))
    pair_gradient = pair_gradient * bins.slope(places)
    return pair_gradient @ gallery, pair_gradient.T @ queries


def _chunks(queries: Tensor, gallery: Tensor) -> list[tuple[int, int]]:
    """Return the first query and the end of each chunk; a chunk has at least one row of scores."""
    scores = min(CHUNK_SCORES, max(SMALLEST_CHUNK, len(queries) * len(gallery) // 16))
    chunk_queries = max(1, scores // max(1, len(gallery)))
    return [(start, min(start + chunk_queries, len(queries))) for start in range(0, len(queries), chunk_queries)]


def _intervals(places: Tensor, start: int, pair_labels: PairLabels, bins: Bins) -> Int[Tensor, "queries items"]:
    """Return the interval of each place.

    Interval 0 is above the first centre, interval i is between the centres i - 1 and i, and interval `count` is below the
    last centre. Interval `count + 1` contains the pairs of a query with itself, which are not counted.
    """
    # Clamp before the conversion: int64 cannot represent the place of a score far outside a narrow range.
    intervals = places.floor().clamp_(-1, bins.count - 1).add_(1).long()
    if pair_labels.symmetric:
        intervals.diagonal(start).fill_(bins.count + 1)
    return intervals


def _histogram(intervals: Tensor, weights: Tensor, bins: Bins) -> Tensor:
    """Return the soft counts of each row.

    Args:
        intervals: (queries, items), the result of `_intervals`.
        weights: (queries, items), the fraction of each score that counts for the centre after it; the rest counts for the
            centre before it.
        bins: The bins.
    """
    counts = weights.new_zeros(len(intervals), bins.count + 2)
    weight_sums = torch.zeros_like(counts)
    ones = torch.ones((), dtype=weights.dtype, device=weights.device).expand_as(weights)
    counts.scatter_add_(1, intervals, ones)
    weight_sums.scatter_add_(1, intervals, weights)
    return _soft_counts(counts, weight_sums, bins)


def _histogram_of_pairs(row: Tensor, intervals: Tensor, weights: Tensor, queries: int, bins: Bins) -> Tensor:
    """Return the soft counts of each row from the rows, intervals and weights of a list of pairs."""
    counts = weights.new_zeros(queries, bins.count + 2)
    weight_sums = torch.zeros_like(counts)
    counts.index_put_((row, intervals), torch.ones_like(weights), accumulate=True)
    weight_sums.index_put_((row, intervals), weights, accumulate=True)
    return _soft_counts(counts, weight_sums, bins)


def _soft_counts(counts: Tensor, weight_sums: Tensor, bins: Bins) -> Tensor:
    """Return the soft counts of the bins; the scores of an interval are divided between the centres before and after it.

    Args:
        counts: (queries, bins + 2), the number of scores in each interval.
        weight_sums: (queries, bins + 2), the sum of their weights, which counts for the centre after the interval.
        bins: The bins.
    """
    # All scores of an interval first count for the centre before it; then their weights move to the centre after it. Scores
    # below the last centre count for the last centre.
    histogram = counts[:, 1:-1].clone()
    histogram[:, :-1] -= weight_sums[:, 1 : bins.count]
    histogram[:, 1:] += weight_sums[:, 1 : bins.count]
    # Scores above the first centre count for the first centre.
    histogram[:, 0] += counts[:, 0]
    return histogram


def _slopes_of_intervals(gradient: Float[Tensor, "queries bins"]) -> Float[Tensor, "queries intervals"]:
    """Return the derivative by a place in each interval: the gradient of the next bin minus the previous bin."""
    return torch.nn.functional.pad(gradient.diff(dim=1), (1, 2))


def check_bins(call: str, similarity: str, count: int, low: float, high: float) -> None:
    """Raise an error if the settings of the bins are invalid.

    Args:
        call: The function or class that was called, for messages.
        similarity: The similarity.
        count: Number of bins.
        low: Lower end of the range of scores.
        high: Upper end of the range of scores.

    Raises:
        ValueError: The similarity is unknown, there are fewer than two bins, or the range is empty.
    """
    if similarity not in get_args(BoundedSimilarity):
        choices = ", ".join(get_args(BoundedSimilarity))
        raise InputError(f"{call}(similarity={similarity!r}) is unknown. Choose one of {choices}.")
    if not isinstance(count, int) or count < 2:
        raise InputError(
            f"{call}(bins={count!r}): bins must be an integer of at least 2, because scores have a gradient only between "
            "two bins. Use bins=25."
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"{call}(low={low}, high={high}) is not a range. Use low < high, such as low=0, high=1.")


OnEmpty = Literal["raise", "zero"]


def soft_average_precision(histograms: SoftHistograms) -> Float[Tensor, "queries"]:
    """Return the average precision of each query from soft counts, (queries,) in [0, 1].

    AP = sum_b r_b P_b / R, where r_b is the number of relevant items in bin b, P_b is the fraction of relevant items among
    the candidates up to bin b, and R is the number of all relevant items. All items in a bin share one rank: the precision
    at a relevant item counts all items in its bin. The value is NaN for a query without a relevant candidate.

    Args:
        histograms: Soft counts of all candidates and of the relevant candidates, each (queries, bins), from high to low
            scores.

    References:
        He, Lu, Sclaroff, "Local Descriptors Optimized for Average Precision", CVPR 2018.

    Examples:
        >>> import torch
        >>> counts = SoftHistograms(candidates=torch.tensor([[2.0, 2.0]]), relevant=torch.tensor([[1.0, 1.0]]))
        >>> soft_average_precision(counts)
        tensor([0.5000])
    """
    relevant = histograms.relevant
    candidates_so_far = histograms.candidates.cumsum(dim=1)
    relevant_so_far = relevant.cumsum(dim=1)
    precision = relevant_so_far / torch.where(candidates_so_far > 0, candidates_so_far, 1)
    return _mean_or_nan((precision * relevant).sum(dim=1), relevant.sum(dim=1))


def tie_aware_average_precision(histograms: SoftHistograms) -> Float[Tensor, "queries"]:
    """Return the expected average precision of each query if ties are ordered at random, (queries,) in [0, 1].

    All candidates in a bin are tied. Let a bin have c candidates, including r relevant ones, and let C candidates, including
    R relevant ones, be in earlier bins. The expected sum of the precisions at the relevant items of the bin is

        r / c * ((R + 1) S + (r - 1) / (c - 1) * (c - (C + 1) S)),    S = 1 / (C + 1) + ... + 1 / (C + c)

    (McSherry and Najork, 2008). S is a difference of two digamma functions, which is also defined for soft counts. For
    integer counts, the mean over queries equals the mAP of binary codes from `evaluate_retrieval`. The value is NaN for a
    query without a relevant candidate.

    Args:
        histograms: Soft counts of all candidates and of the relevant candidates, each (queries, bins), from high to low
            scores.

    References:
        He, Cakir, Bargal, Sclaroff, "Hashing as Tie-Aware Learning to Rank", CVPR 2018.

    Examples:
        >>> import torch
        >>> counts = SoftHistograms(candidates=torch.tensor([[2.0, 2.0]]), relevant=torch.tensor([[1.0, 1.0]]))
        >>> round(tie_aware_average_precision(counts).item(), 4)  # 2 / 3
        0.6667
    """
    relevant = histograms.relevant
    candidates = histograms.candidates
    candidates_before = candidates.cumsum(dim=1) - candidates  # C
    relevant_before = relevant.cumsum(dim=1) - relevant  # R
    is_filled = candidates > TINY
    size = torch.where(is_filled, candidates, 1)  # c
    reciprocals = torch.digamma(candidates_before + size + 1) - torch.digamma(candidates_before + 1)  # S
    # (r - 1) / (c - 1) is the fraction of relevant items among the other candidates in the bin of a relevant item. It
    # is 0 if there are no other candidates. A soft count r may be less than 1.
    has_others = size > 1 + TINY
    other_candidates = torch.where(has_others, size - 1, 1)
    other_relevant = (relevant - 1).clamp(min=0)
    share_of_others = torch.where(has_others, other_relevant / other_candidates, 0)
    precision_sum = (relevant_before + 1) * reciprocals
    precision_sum = precision_sum + share_of_others * (size - (candidates_before + 1) * reciprocals)
    gain = torch.where(is_filled, relevant / size * precision_sum, 0)
    return _mean_or_nan(gain.sum(dim=1), relevant.sum(dim=1))


def _mean_or_nan(precisions: Float[Tensor, "queries"], relevant: Float[Tensor, "queries"]) -> Float[Tensor, "queries"]:
    """Return the mean precision of each query over its relevant items; NaN for a query without relevant items."""
    # The divisor is replaced before the division: `where` around 0 / 0 has the right value, but its gradient is NaN.
    has_relevant = relevant > TINY
    return torch.where(has_relevant, precisions / torch.where(has_relevant, relevant, 1), torch.nan)


class SoftAveragePrecisionLoss(nn.Module):
    """Differentiable loss: one minus the mean average precision (mAP) of a batch, from soft histograms of the scores.

    Each item is a query, and all other items of the batch are ranked for it:

        loss = 1 - mean over queries of AP,    AP = sum_b r_b P_b / R

    Here r_b is the soft number of relevant items in bin b, P_b is the fraction of relevant items among the candidates up to
    bin b, and R is the number of relevant items of the query. `"hamming"` uses `tie_aware_average_precision` instead.
    Queries without a relevant item are left out of the mean.

    Up to 128 MiB of scores are cached; beyond that, scores are recomputed in chunks. The histograms need queries x bins
    numbers, so memory does not grow with scores x bins.

    Args:
        bins: Number of bins, at least 2, by default 25. With few bins, pairs that are far apart in the ranking also have a
            gradient. With many bins, the value approaches the exact average precision. It is slightly lower, because each
            relevant item is divided between two bins, and its part in the first bin does not count its other part. Codes of
            b bits have b + 1 distances, so you cannot pass `bins` for `"hamming"`.
        low: Lower end of the range of scores. Lower scores count for the last bin, without a gradient.
        high: Upper end of the range of scores. Higher scores count for the first bin, without a gradient.
        similarity: The score of two embeddings.

            - `"cosine"`: the cosine similarity.
            - `"euclidean"`: 1 - sqrt(d² + 0.001), where d is the distance of the embeddings scaled to length 1. The gradient
              is finite at d = 0, where the score is 0.968.
            - `"hamming"`: minus the Hamming distance of codes of -1 and 1, or of relaxed codes between -1 and 1. Use
              `BinaryCodes` as the last layer.
        on_empty: What to do if no item of a batch has a relevant item: `"raise"` an error, or return `"zero"` with a
            gradient of zero.

    Shape:
        - `embeddings`: (items, dim), floating-point and finite.
        - `labels`: (items,), integers or strings.
        - Queries with a gallery: `loss(queries, query_labels, gallery, gallery_labels)`, with the same two shapes twice.

        The loss is a scalar in [0, 1], in float32 or float64; smaller is better.

    Raises:
        ValueError: A setting is out of range, embeddings are not finite (the message names the rows), the numbers of labels
            and embeddings differ, or no item of the batch has another item of its class.

    References:
        He, Lu, Sclaroff, "Local Descriptors Optimized for Average Precision", CVPR 2018; Revaud, Almazan, Rezende, de Souza,
        "Learning with Average Precision: Training Image Retrieval with a Listwise Loss", ICCV 2019.

    Examples:
        >>> import torch
        >>> loss = SoftAveragePrecisionLoss()
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]], requires_grad=True)
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> value = loss(embeddings, labels)
        >>> value.backward()
        >>> round(value.item(), 4)
        0.6595
        >>> round(SoftAveragePrecisionLoss(bins=1001)(embeddings, labels).item(), 4)  # close to 1 - mAP
        0.5833
    """

    def __init__(
        self,
        bins: int | None = None,
        *,
        low: float = 0.0,
        high: float = 1.0,
        similarity: BoundedSimilarity = "cosine",
        on_empty: OnEmpty = "raise",
    ) -> None:
        super().__init__()
        if similarity == "hamming" and (bins is not None or (low, high) != (0.0, 1.0)):
            raise InputError(
                "SoftAveragePrecisionLoss(similarity='hamming') uses one bin per distance. Leave out bins, low and high."
            )
        if on_empty not in ("raise", "zero"):
            raise InputError(f"SoftAveragePrecisionLoss(on_empty={on_empty!r}) is unknown. Choose raise or zero.")
        # Networks trained with 5 bins had a lower mAP; 25 and 100 bins gave the same mAP
        # (docs/research/average_precision_loss.md).
        self.bins = 25 if bins is None else bins
        self.low = low
        self.high = high
        self.similarity = similarity
        self.on_empty = on_empty
        check_bins(type(self).__name__, similarity, self.bins, low, high)

    def extra_repr(self) -> str:
        """Return the settings, for `print(model)`."""
        if self.similarity == "hamming":
            return "similarity='hamming'"
        return f"bins={self.bins}, low={self.low:g}, high={self.high:g}, similarity={self.similarity!r}"

    def forward(
        self,
        queries: Float[Tensor, "queries dim"],
        query_labels: Any,
        gallery: Float[Tensor, "gallery dim"] | None = None,
        gallery_labels: Any = None,
    ) -> Float[Tensor, ""]:
        """Return the loss of a batch, or of queries with a gallery."""
        values = self.average_precisions(queries, query_labels, gallery, gallery_labels)
        has_relevant = ~values.isnan()
        if not has_relevant.any():
            if self.on_empty == "zero":
                return (0.0 * queries.float()).sum()  # zero, with a gradient of zero
            classes = len(as_labels(query_labels, "query_labels", type(self).__name__).codes.unique())
            raise InputError(
                f"SoftAveragePrecisionLoss: none of the {len(values)} items in the batch has another item of its class "
                f"({classes} {'class' if classes == 1 else 'classes'}). Draw several items per class, for instance with a "
                "ClassBalancedBatchSampler, or pass on_empty='zero'."
            )
        return 1 - values[has_relevant].mean()

    def average_precisions(
        self,
        queries: Float[Tensor, "queries dim"],
        query_labels: Any,
        gallery: Float[Tensor, "gallery dim"] | None = None,
        gallery_labels: Any = None,
    ) -> Float[Tensor, "queries"]:
        """Return the soft average precision of each query, (queries,); NaN for a query without a relevant candidate."""
        call = type(self).__name__
        if (gallery is None) != (gallery_labels is None):
            raise InputError(f"{call}: only one of gallery and gallery_labels was passed. Pass both, or neither.")
        query_vectors, read_query_labels = self._read(queries, query_labels, "queries", "query_labels")
        gallery_vectors, read_gallery_labels = query_vectors, read_query_labels
        if gallery is not None:
            gallery_vectors, read_gallery_labels = self._read(gallery, gallery_labels, "gallery", "gallery_labels")
            if gallery_vectors.shape[1] != query_vectors.shape[1]:
                raise InputError(
                    f"{call}: the queries have dimension {query_vectors.shape[1]}, but the gallery has dimension "
                    f"{gallery_vectors.shape[1]}. Embed both with the same model."
                )
        labels = {"query_labels": read_query_labels, "gallery_labels": read_gallery_labels}
        codes, _ = encode(call, labels)
        device = query_vectors.device
        pair_labels = PairLabels(codes[0].to(device), codes[1].to(device), symmetric=gallery is None)
        bins = self._bins(query_vectors.shape[1])
        # Autocast would round the products, and so the places of the scores, to half precision.
        with torch.autocast(device.type, enabled=False):
            histograms = SoftHistograms(*_HistogramFunction.apply(query_vectors, gallery_vectors, pair_labels, bins))
        if self.similarity == "hamming":
            return tie_aware_average_precision(histograms)
        return soft_average_precision(histograms)

    def _bins(self, dim: int) -> Bins:
        """Return the bins for embeddings of this dimension; Hamming distances have one bin each."""
        if self.similarity == "hamming":
            # The product of two codes of b bits is b - 2 * distance.
            return Bins("hamming", dim + 1, float(-dim), float(dim))
        return Bins(self.similarity, self.bins, self.low, self.high)

    def _read(self, embeddings: Tensor, labels: Any, name: str, labels_name: str) -> tuple[Tensor, Labels]:
        """Return the embeddings, in at least float32 and normalised if necessary, and their labels."""
        call = type(self).__name__
        check_matrix(embeddings, name, call)
        refuse_non_finite(non_finite_rows(embeddings.detach()), len(embeddings), name, call)
        read = labels_of_each(labels, len(embeddings), labels_name, name, call)
        vectors = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        if self.similarity != "hamming":
            # Otherwise the length of a vector with huge or tiny components would be infinite or zero.
            vectors = nn.functional.normalize(vectors / _powers_of_two(vectors), dim=1)
        return vectors, read


def _powers_of_two(vectors: Float[Tensor, "items dim"]) -> Float[Tensor, "items 1"]:
    """Return the largest power of two that is at most each row's largest absolute component; 1 for a row of zeros.

    Dividing a row by this power is exact. Afterwards, the sum of squares neither overflows nor vanishes.
    """
    largest = vectors.detach().abs().amax(dim=1, keepdim=True)
    # largest = mantissa * 2^exponent, with mantissa in [1/2, 1), so the division below is exact and gives a power of two.
    mantissa, _ = torch.frexp(largest)
    return torch.where(largest == 0, 1, largest / (2 * mantissa))


class BinaryCodes(nn.Module):
    """Layer that turns its inputs into binary codes: tanh in training, exactly -1 or 1 in evaluation.

    Args:
        temperature: Divisor of the inputs before the tanh, above 0. With a smaller temperature, the codes are closer to
            -1 and 1, and their gradients are smaller.

    Shape:
        (..., bits) of any floating dtype to the same shape and dtype, with values in [-1, 1]. In evaluation, 0 becomes 1.

    Raises:
        ValueError: `temperature` is not above 0.

    References:
        Cao, Long, Wang, Yu, "HashNet: Deep Learning to Hash by Continuation", ICCV 2017.

    Examples:
        >>> import torch
        >>> codes, inputs = BinaryCodes(), torch.tensor([[0.3, -2.0, 0.0]])
        >>> codes(inputs)  # tanh
        tensor([[ 0.2913, -0.9640,  0.0000]])
        >>> codes.eval()(inputs)
        tensor([[ 1., -1.,  1.]])
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise InputError(f"BinaryCodes(temperature={temperature}): the temperature must be above 0. Use 1.0.")
        self.temperature = temperature

    def extra_repr(self) -> str:
        """Return the settings, for `print(model)`."""
        return f"temperature={self.temperature:g}"

    def forward(self, outputs: Float[Tensor, "*items bits"]) -> Float[Tensor, "*items bits"]:
        """Return relaxed codes in training, and codes of -1 and 1 in evaluation."""
        if self.training:
            return torch.tanh(outputs / self.temperature)
        return torch.where(outputs >= 0, 1.0, -1.0).to(outputs.dtype)
