"""Average precision as a loss, by histograms of the scores of each query that change smoothly with the embeddings.

Each score is shared between the two bins with the neighbouring centres, in proportion to how near they are (triangular
weights), so that its weights add up to 1. Scores beyond the range count for the outermost bin, with a gradient of zero. As a
score touches two bins, histograms cost one visit of each score, and no tensor of queries x items x bins is made.
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

# The similarities with a range that bins can divide: the cosine of two embeddings; 1 - sqrt(d² + 0.001) for their distance d
# on the unit sphere; and minus the Hamming distance of two (relaxed) codes of -1 and 1.
BoundedSimilarity = Literal["cosine", "euclidean", "hamming"]

# Scores that are processed at once: 4 MB, and 16 MB for the intermediate tensors.
CHUNK_SCORES = 2**20
# A smaller matrix of scores is processed in 16 chunks, of at least this number of scores each. So 1,024 items of dimension
# 512 took 2.63 times the time of the bare product. In a single chunk of 2^20 scores they took 2.46 times, and 13 MB more
# (`benchmarks/losses.py`, Xeon at 2.1 GHz).
SMALLEST_CHUNK = 2**16
# Scores of up to 128 MiB in total are cached for the backward pass; more are recomputed from the embeddings. A batch
# reaches this limit at 5,792 items in float32, at 4,096 in float64. In float32 (`benchmarks/losses.py`) 4,096 items
# took 127 MB in total, including 67 MB of cached scores. 8,192 items, with 268 MB of scores that are recomputed, took
# 121 MB.
CACHED_BYTES = 2**27
# Added to a squared distance, so that its root has a derivative at 0. The value is from the source's listing.
SMALLEST_SQUARE = 1e-3
# Smaller soft counts are rounding errors of zero.
TINY = 1e-6


@dataclass(frozen=True)
class Bins:
    """`count` bins with centres at equal steps from `high`, the first, down to `low`, the last.

    The place of a score is its position among them: 0 at the centre of the first bin, 1 at the centre of the second,
    and so on.
    """

    similarity: BoundedSimilarity
    count: int
    low: float
    high: float

    @property
    def per_score(self) -> float:
        """The number of bins that a score of 1 spans."""
        return (self.count - 1) / (self.high - self.low)

    def places(self, products: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"]:
        """Return the place of each pair from the products of embeddings, which are overwritten."""
        if self.similarity == "euclidean":
            # The operations are in place, since this is the largest tensor of the pass. Rounding may bring the product
            # of equal embeddings above 1, and without the bound the root would be NaN.
            products.mul_(-2).add_(2 + SMALLEST_SQUARE).clamp_(min=SMALLEST_SQUARE).sqrt_().neg_().add_(1)
        return products.sub_(self.high).mul_(-self.per_score)

    def differentiable_places(self, products: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"]:
        """Return the place of each pair, with derivatives by the products of embeddings, which are left as they are."""
        scores = products
        if self.similarity == "euclidean":
            scores = 1 - (2 + SMALLEST_SQUARE - 2 * products).clamp(min=SMALLEST_SQUARE).sqrt()
        return (self.high - scores) * self.per_score

    def slope(self, places: Float[Tensor, "queries items"]) -> Float[Tensor, "queries items"] | float:
        """Return the derivative of each place by the product of the two embeddings."""
        if self.similarity != "euclidean":
            return -self.per_score
        distance = 1 - self.high + places / self.per_score
        return -self.per_score / distance  # d(-sqrt(2.001 - 2x)) / dx = 1 / sqrt(2.001 - 2x)


class PairLabels(NamedTuple):
    """Which candidates a query has, and which of them are relevant.

    Attributes:
        query_labels: The class of each query.
        gallery_labels: The class of each gallery item.
        symmetric: Whether the queries are also the gallery; no query is then its own candidate.
    """

    query_labels: Int[Tensor, "queries"]
    gallery_labels: Int[Tensor, "items"]
    symmetric: bool

    def is_relevant(self, start: int, stop: int) -> Bool[Tensor, "queries items"]:
        """Return whether each gallery item is relevant to the queries from `start` up to `stop`."""
        relevant = self.query_labels[start:stop, None] == self.gallery_labels
        if self.symmetric:
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


class _HistogramFunction(torch.autograd.Function):
    """Histograms of each query's scores over all candidates and over the relevant ones, with gradients.

    Scores are the products of embeddings (of length 1 for cosines and distances), in float32 or float64; for one set the
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
        # The cache is an attribute of `ctx`: `save_for_backward` is only for inputs and outputs.
        ctx.places = queries.new_empty(len(queries), len(gallery)) if is_cached else None
        histograms = queries.new_zeros(2, len(queries), bins.count)  # of all candidates, and of the relevant ones
        for start, stop in _chunks(queries, gallery):
            cache = ctx.places[start:stop] if is_cached else None
            places = bins.places(torch.mm(queries[start:stop], gallery.T, out=cache))
            intervals = _intervals(places, start, pair_labels, bins)
            # Cached places are read again, and must not be overwritten.
            weights = places.frac() if is_cached else places.frac_()
            histograms[0, start:stop] = _histogram(intervals, weights, bins)
            # Few pairs are relevant, so they are listed.
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
        # The loop below works in place and by chunks, so autograd could not differentiate it again.
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
    """Return the gradients by operations that can be differentiated again, for all pairs at once.

    Chunks would save no memory, since autograd keeps the intermediate tensors of all pairs.
    """
    places = bins.differentiable_places(queries @ gallery.T)
    intervals = _intervals(places.detach(), 0, pair_labels, bins)
    pair_gradient = candidate_slopes.gather(1, intervals)
    pair_gradient = pair_gradient + relevant_slopes.gather(1, intervals) * pair_labels.is_relevant(0, len(queries))
    pair_gradient = pair_gradient * bins.slope(places)
    return pair_gradient @ gallery, pair_gradient.T @ queries


def _chunks(queries: Tensor, gallery: Tensor) -> list[tuple[int, int]]:
    """Return the first query and the end of each chunk. A chunk has at least one whole row of scores."""
    scores = min(CHUNK_SCORES, max(SMALLEST_CHUNK, len(queries) * len(gallery) // 16))
    chunk_queries = max(1, scores // max(1, len(gallery)))
    return [(start, min(start + chunk_queries, len(queries))) for start in range(0, len(queries), chunk_queries)]


def _intervals(places: Tensor, start: int, pair_labels: PairLabels, bins: Bins) -> Int[Tensor, "queries items"]:
    """Return the interval between two centres for each place.

    Interval 0 is above the first centre, i between the centres i - 1 and i, and `count` below the last centre. `count + 1`
    is for a query with itself, which counts nowhere.
    """
    # Places are clamped before they become integers: int64 could not represent the place of a score far outside a
    # narrow range.
    intervals = places.floor().clamp_(-1, bins.count - 1).add_(1).long()
    if pair_labels.symmetric:
        intervals.diagonal(start).fill_(bins.count + 1)
    return intervals


def _histogram(intervals: Tensor, weights: Tensor, bins: Bins) -> Tensor:
    """Return the soft counts of each row.

    Args:
        intervals: (queries, items) as `_intervals` returns them.
        weights: (queries, items) share of each score that belongs to the centre after it; the centre before it has the rest.
        bins: The bins.
    """
    counts = weights.new_zeros(len(intervals), bins.count + 2)
    weight_sums = torch.zeros_like(counts)
    ones = torch.ones((), dtype=weights.dtype, device=weights.device).expand_as(weights)
    counts.scatter_add_(1, intervals, ones)
    weight_sums.scatter_add_(1, intervals, weights)
    return _soft_counts(counts, weight_sums, bins)


def _histogram_of_pairs(row: Tensor, intervals: Tensor, weights: Tensor, queries: int, bins: Bins) -> Tensor:
    """Return the soft counts of each row from a list of pairs: the row, the interval and the weight of each."""
    counts = weights.new_zeros(queries, bins.count + 2)
    weight_sums = torch.zeros_like(counts)
    counts.index_put_((row, intervals), torch.ones_like(weights), accumulate=True)
    weight_sums.index_put_((row, intervals), weights, accumulate=True)
    return _soft_counts(counts, weight_sums, bins)


def _soft_counts(counts: Tensor, weight_sums: Tensor, bins: Bins) -> Tensor:
    """Return the soft counts of the bins, each score of an interval shared between the centres before and after it.

    Args:
        counts: (queries, bins + 2) number of scores in each interval.
        weight_sums: (queries, bins + 2) sum of their weights, which is the share of the centre after the interval.
        bins: The bins.
    """
    # All scores of an interval count for the centre before it, and then their weights move to the centre after it. Scores
    # below the last centre stay there.
    histogram = counts[:, 1:-1].clone()
    histogram[:, :-1] -= weight_sums[:, 1 : bins.count]
    histogram[:, 1:] += weight_sums[:, 1 : bins.count]
    # Scores above the first centre count for it.
    histogram[:, 0] += counts[:, 0]
    return histogram


def _slopes_of_intervals(gradient: Float[Tensor, "queries bins"]) -> Float[Tensor, "queries intervals"]:
    """Return the derivative by a place in each interval: the gradient of the bin after it minus the bin before."""
    return torch.nn.functional.pad(gradient.diff(dim=1), (1, 2))


def check_bins(call: str, similarity: str, count: int, low: float, high: float) -> None:
    """Refuse settings that make no bins.

    Args:
        call: The function or class that was called, for messages.
        similarity: The similarity whose range is divided into bins.
        count: Number of bins.
        low: Lower end of the range.
        high: Upper end of the range.

    Raises:
        ValueError: If bins do not divide this similarity, there are fewer than two bins, or the range is empty.
    """
    if similarity not in get_args(BoundedSimilarity):
        choices = ", ".join(get_args(BoundedSimilarity))
        raise InputError(f"{call}(similarity={similarity!r}) is unknown. Choose one of {choices}.")
    if not isinstance(count, int) or count < 2:
        raise InputError(
            f"{call}(bins={count!r}) must be a whole number from 2 on: between two bins a score has a gradient."
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"{call}(low={low}, high={high}) is not a range. Pass low < high, such as low=0, high=1.")


OnEmpty = Literal["raise", "zero"]


def soft_average_precision(histograms: SoftHistograms) -> Float[Tensor, "queries"]:
    """Compute the average precision of each query from soft counts, with bins from the highest scores to the lowest.

    AP = sum_b r_b P_b / R, where P_b is the share of relevant items among the candidates up to bin b, r_b the number of
    relevant items in bin b, and R the number of all relevant items. All items of a bin share one rank: the precision of a
    relevant item counts all items of its bin.

    Args:
        histograms: Soft counts of all candidates and of the relevant ones, each (queries, bins).

    Returns:
        (queries,) values in [0, 1]; NaN for a query without a relevant candidate.

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
    """Compute the expected average precision of each query if the candidates of a bin are tied and ordered at random.

    Let C candidates, R of them relevant, precede a bin of c candidates, r of them relevant. The precisions at the
    relevant items of the bin then add up to

        r / c * ((R + 1) S + (r - 1) / (c - 1) * (c - (C + 1) S)),    S = 1 / (C + 1) + ... + 1 / (C + c),

    in expectation (McSherry and Najork, 2008). S is a difference of two digamma functions, which is also defined for
    soft counts. For whole counts the mean over queries is `evaluate_retrieval`'s mAP of binary codes.

    Args:
        histograms: Soft counts of all candidates and of the relevant ones, each (queries, bins).

    Returns:
        (queries,) values in [0, 1]; NaN for a query without a relevant candidate.

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
    # Next to one relevant item, the share of relevant ones among the other candidates of the bin: (r - 1) / (c - 1), and 0
    # for a bin without a second candidate. A soft count r may be less than 1.
    has_others = size > 1 + TINY
    other_candidates = torch.where(has_others, size - 1, 1)
    other_relevant = (relevant - 1).clamp(min=0)
    share_of_others = torch.where(has_others, other_relevant / other_candidates, 0)
    precision_sum = (relevant_before + 1) * reciprocals
    precision_sum = precision_sum + share_of_others * (size - (candidates_before + 1) * reciprocals)
    gain = torch.where(is_filled, relevant / size * precision_sum, 0)
    return _mean_or_nan(gain.sum(dim=1), relevant.sum(dim=1))


def _mean_or_nan(precisions: Float[Tensor, "queries"], relevant: Float[Tensor, "queries"]) -> Float[Tensor, "queries"]:
    """Return the mean precision of each query over its relevant items; NaN if it has none."""
    # The divisor is replaced before the division: `where` around a 0 / 0 has the right value, but its gradient is NaN.
    has_relevant = relevant > TINY
    return torch.where(has_relevant, precisions / torch.where(has_relevant, relevant, 1), torch.nan)


class SoftAveragePrecisionLoss(nn.Module):
    """One minus the mean average precision of a batch, made differentiable by soft histograms of the scores.

    Each item is a query for which all other items of the batch are ranked; queries without a relevant item are left out of
    the mean. Scores are cached up to 128 MiB, and beyond that recomputed in chunks. The histograms take queries x bins
    numbers, so that no memory grows with scores x bins.

    Args:
        bins: Number of bins of the range, at least 2, by default 25. With few bins, pairs that are far apart in the
            ranking have a gradient, too; with many bins, the value approaches the exact average precision. It stays
            slightly below, since each relevant item is shared between two bins, and its part in the first bin is
            counted without the other. Not allowed for `"hamming"`, where codes of b bits have b + 1 distances.
        low: Lower end of the range of scores. Lower scores count for the last bin, without a gradient.
        high: Upper end of the range. Higher scores count for the first bin, without a gradient.
        similarity: `"cosine"`; `"euclidean"`: 1 - sqrt(d² + 0.001), where d is the distance of the embeddings scaled to
            length 1, so that the gradient is finite at d = 0, where the score is 0.968; `"hamming"`: minus the Hamming
            distance of codes of -1 and 1, or of relaxed ones in between, such as `BinaryCodes` returns.
        on_empty: What to do with a batch without any relevant pair: `"raise"` an error, or return `"zero"`, with a
            gradient of zero.

    Shape:
        `loss(queries, query_labels)` with (queries, dim) and (queries,) for one set, or with a gallery `loss(queries,
        query_labels, gallery, gallery_labels)`; a scalar in [0, 1], smaller is better, in float32 or float64.

    Raises:
        ValueError: A setting is out of range; embeddings are not finite (the message names the rows); the numbers of
            labels and embeddings differ; or no item of the batch has another item of its class.

    References:
        He, Lu, Sclaroff, "Local Descriptors Optimized for Average Precision", CVPR 2018; Revaud, Almazan, Rezende, de Souza,
        "Learning with Average Precision: Training Image Retrieval with a Listwise Loss", ICCV 2019.

    Examples:
        >>> import torch
        >>> loss = SoftAveragePrecisionLoss()
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], requires_grad=True)
        >>> value = loss(embeddings, torch.tensor([0, 0, 1, 1]))
        >>> value.backward()
        >>> round(value.item(), 4), embeddings.grad.shape
        (0.0, torch.Size([4, 2]))
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
                "SoftAveragePrecisionLoss(similarity='hamming') has one bin for each distance. Leave out bins, low and high."
            )
        if on_empty not in ("raise", "zero"):
            raise InputError(f"SoftAveragePrecisionLoss(on_empty={on_empty!r}) is unknown. Choose raise or zero.")
        # Networks trained with 5 bins had a lower mAP. The mAP was the same with 25 and with 100 bins
        # (docs/research/average_precision_loss.md).
        self.bins = 25 if bins is None else bins
        self.low = low
        self.high = high
        self.similarity = similarity
        self.on_empty = on_empty
        check_bins(type(self).__name__, similarity, self.bins, low, high)

    def extra_repr(self) -> str:
        """Return the settings, as `print` shows them."""
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
        """Compute the loss of a batch, or of queries and a gallery."""
        values = self.average_precisions(queries, query_labels, gallery, gallery_labels)
        has_relevant = ~values.isnan()
        if not has_relevant.any():
            if self.on_empty == "zero":
                return (0.0 * queries.float()).sum()  # zero, with a gradient of zero
            classes = len(as_labels(query_labels, "query_labels", type(self).__name__).codes.unique())
            raise InputError(
                f"SoftAveragePrecisionLoss: none of the {len(values)} items of the batch has another item of its "
                f"class ({classes} {'class' if classes == 1 else 'classes'}). Draw several items of each class, for "
                "instance with a ClassBalancedBatchSampler, or pass on_empty='zero'."
            )
        return 1 - values[has_relevant].mean()

    def average_precisions(
        self,
        queries: Float[Tensor, "queries dim"],
        query_labels: Any,
        gallery: Float[Tensor, "gallery dim"] | None = None,
        gallery_labels: Any = None,
    ) -> Float[Tensor, "queries"]:
        """Return the soft average precision of each query; NaN if it has no relevant candidate."""
        call = type(self).__name__
        if (gallery is None) != (gallery_labels is None):
            raise InputError(f"{call}: gallery and gallery_labels belong together. Pass both, or neither.")
        query_vectors, read_query_labels = self._read(queries, query_labels, "queries", "query_labels")
        gallery_vectors, read_gallery_labels = query_vectors, read_query_labels
        if gallery is not None:
            gallery_vectors, read_gallery_labels = self._read(gallery, gallery_labels, "gallery", "gallery_labels")
            if gallery_vectors.shape[1] != query_vectors.shape[1]:
                raise InputError(
                    f"{call}: queries of dimension {query_vectors.shape[1]}, but a gallery of dimension "
                    f"{gallery_vectors.shape[1]}. Both must come from the same model."
                )
        labels = {"query_labels": read_query_labels, "gallery_labels": read_gallery_labels}
        codes, _ = encode(call, labels)
        device = query_vectors.device
        pair_labels = PairLabels(codes[0].to(device), codes[1].to(device), symmetric=gallery is None)
        bins = self._bins(query_vectors.shape[1])
        # Autocast would round the products to half precision, and with them the places of scores among the bins.
        with torch.autocast(device.type, enabled=False):
            histograms = SoftHistograms(*_HistogramFunction.apply(query_vectors, gallery_vectors, pair_labels, bins))
        if self.similarity == "hamming":
            return tie_aware_average_precision(histograms)
        return soft_average_precision(histograms)

    def _bins(self, dim: int) -> Bins:
        """Return the bins for embeddings of this dimension: one for each distance of codes."""
        if self.similarity == "hamming":
            # The product of two codes of b bits is b - 2 * distance.
            return Bins("hamming", dim + 1, float(-dim), float(dim))
        return Bins(self.similarity, self.bins, self.low, self.high)

    def _read(self, embeddings: Tensor, labels: Any, name: str, labels_name: str) -> tuple[Tensor, Labels]:
        """Return embeddings as they are compared, and their labels; refuse invalid ones."""
        call = type(self).__name__
        check_matrix(embeddings, name, call)
        refuse_non_finite(non_finite_rows(embeddings.detach()), len(embeddings), name, call)
        read = labels_of_each(labels, len(embeddings), labels_name, name, call)
        vectors = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        if self.similarity != "hamming":
            # The length of a vector of huge or tiny numbers would overflow or vanish.
            vectors = nn.functional.normalize(vectors / _powers_of_two(vectors), dim=1)
        return vectors, read


def _powers_of_two(vectors: Float[Tensor, "items dim"]) -> Float[Tensor, "items 1"]:
    """Return the largest power of two not above each row's largest component; 1 for a row of zeros.

    After division by it, no square of a row overflows or vanishes, and a row in range keeps its bits.
    """
    largest = vectors.detach().abs().amax(dim=1, keepdim=True)
    # largest = mantissa * 2^exponent with a mantissa in [1/2, 1), so that the division below is exact and its result is a
    # power of two.
    mantissa, _ = torch.frexp(largest)
    return torch.where(largest == 0, 1, largest / (2 * mantissa))


class BinaryCodes(nn.Module):
    """Turns a layer's output into codes of -1 and 1: by a hyperbolic tangent in training, exactly in evaluation.

    Args:
        temperature: Divisor of the output before the hyperbolic tangent, above 0. The smaller it is, the closer codes
            are to -1 and 1, and the smaller is their gradient.

    Shape:
        (..., bits) of any floating dtype to the same shape and dtype, with values in [-1, 1]; an output of 0 becomes 1 in
        evaluation.

    Raises:
        ValueError: `temperature` is not above 0.

    References:
        Cao, Long, Wang, Yu, "HashNet: Deep Learning to Hash by Continuation", ICCV 2017.

    Examples:
        >>> import torch
        >>> codes = BinaryCodes().eval()
        >>> codes(torch.tensor([[0.3, -2.0, 0.0]]))
        tensor([[ 1., -1.,  1.]])
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise InputError(f"BinaryCodes(temperature={temperature}) must be above 0.")
        self.temperature = temperature

    def extra_repr(self) -> str:
        """Return the settings, as `print` shows them."""
        return f"temperature={self.temperature:g}"

    def forward(self, outputs: Float[Tensor, "*items bits"]) -> Float[Tensor, "*items bits"]:
        """Return relaxed codes in training, exact codes in evaluation."""
        if self.training:
            return torch.tanh(outputs / self.temperature)
        return torch.where(outputs >= 0, 1.0, -1.0).to(outputs.dtype)
