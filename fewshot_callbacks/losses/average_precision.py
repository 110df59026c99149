"""Average precision as a loss."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fewshot_callbacks.functional._inputs import check_matrix, non_finite_rows, refuse_non_finite
from fewshot_callbacks.functional._labels import Labels, as_labels, labels_of_each, numbered
from fewshot_callbacks.losses.histograms import Bins, Relevance, Score, SoftHistograms, check_bins, soft_histograms

OnEmpty = Literal["raise", "zero"]


def soft_average_precision(histograms: SoftHistograms) -> Float[Tensor, "queries"]:
    """Average precision of each query from soft counts, bins from the highest scores to the lowest.

    AP = sum_b r_b P_b / R, where P_b is the share of relevant ones among the candidates up to bin b, r_b counts the
    relevant ones in it and R all of them. All items of a bin share one rank: the precision of a relevant item counts
    all items of its bin.

    Args:
        histograms: soft counts of candidates and of relevant ones.

    Returns:
        In [0, 1]; NaN for a query without a relevant candidate.

    References:
        He, Lu, Sclaroff, "Local Descriptors Optimized for Average Precision", CVPR 2018.
    """
    relevant = histograms.relevant
    reached = histograms.candidates.cumsum(dim=1)
    precision = relevant.cumsum(dim=1) / torch.where(reached > 0, reached, 1)
    return _or_nan((precision * relevant).sum(dim=1), relevant.sum(dim=1))


def tie_aware_average_precision(histograms: SoftHistograms) -> Float[Tensor, "queries"]:
    """Expected average precision of each query where the candidates of a bin are tied and ordered at random.

    With C and R candidates and relevant ones before a bin of c and r, the precisions at its relevant ones add up to

        r / c * ((R + 1) S + (r - 1) / (c - 1) * (c - (C + 1) S)),    S = 1 / (C + 1) + ... + 1 / (C + c),

    in expectation (McSherry and Najork, 2008). S is a difference of two digamma functions, which soft counts have, too. With
    whole counts this is `evaluate_retrieval`'s mAP of binary codes.

    Args:
        histograms: soft counts of candidates and of relevant ones.

    Returns:
        NaN for a query without a relevant candidate.

    References:
        He, Cakir, Bargal, Sclaroff, "Hashing as Tie-Aware Learning to Rank", CVPR 2018.
    """
    relevant, count = histograms.relevant, histograms.candidates
    before = count.cumsum(dim=1) - count
    relevant_before = relevant.cumsum(dim=1) - relevant
    filled = count > TINY
    size = torch.where(filled, count, 1)
    reciprocals = torch.digamma(before + size + 1) - torch.digamma(before + 1)
    # of less than one candidate no second one is relevant
    pairs = torch.where(size > 1 + TINY, (relevant - 1).clamp(min=0) / torch.where(size > 1 + TINY, size - 1, 1), 0)
    within = (relevant_before + 1) * reciprocals + pairs * (size - (before + 1) * reciprocals)
    gained = torch.where(filled, relevant / size * within, 0)
    return _or_nan(gained.sum(dim=1), relevant.sum(dim=1))


TINY = 1e-6
"""Smaller counts are what rounding leaves of zero."""


def _or_nan(total: Tensor, relevant: Tensor) -> Tensor:
    present = relevant > TINY
    return torch.where(present, total / torch.where(present, relevant, 1), torch.nan)


class SoftAveragePrecisionLoss(nn.Module):
    """One minus the mean average precision of a batch, made smooth by soft histograms of the scores.

    Each item is a query that all others of the batch are ranked for; queries without a relevant item are left out. The
    gradient is that of the soft histograms alone: memory grows with the number of scores, not with scores times bins.

    Args:
        bins: Into how many bins the range is divided, 2 or more, 25 by default. Few bins give a gradient to pairs that lie
            far apart in the ranking; with many the value comes near the exact average precision. It stays a little below,
            since the two parts of a relevant item fall into two bins, and the first counts without the second. Not to be
            given for `"hamming"`: codes of b bits have b + 1 distances.
        low: Lower end of the range of scores. Scores below count for the last bin, without a gradient.
        high: Upper end of the range.
        similarity: `"cosine"`; `"euclidean"`: 1 minus the distance of the embeddings, scaled to length 1; `"hamming"`: minus
            the Hamming distance of codes of -1 and 1, or of relaxed ones in between, such as `BinaryCodes` gives.
        on_empty: What a batch without any relevant pair means: `"raise"` an error, or a loss of `"zero"` with a gradient of
            zero.

    Shape:
        `loss(embeddings, labels)` with (items, dim) and (items,), or `loss(queries, query_labels, gallery, gallery_labels)`;
        a scalar in [0, 1], at least in float32.

    Raises:
        ValueError: For settings out of range; for embeddings that are not finite, with their rows; for labels of another
            length; for a batch in which no item has another one of its class.

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
        similarity: Score = "cosine",
        on_empty: OnEmpty = "raise",
    ) -> None:
        super().__init__()
        if similarity == "hamming" and (bins is not None or (low, high) != (0.0, 1.0)):
            raise ValueError(
                "SoftAveragePrecisionLoss(similarity='hamming') has one bin for each distance. Leave out bins, low and high."
            )
        if on_empty not in ("raise", "zero"):
            raise ValueError(f"SoftAveragePrecisionLoss(on_empty={on_empty!r}) is unknown. Choose raise or zero.")
        self.bins = 25 if bins is None else bins
        self.low, self.high, self.similarity, self.on_empty = low, high, similarity, on_empty
        check_bins(type(self).__name__, similarity, self.bins, low, high)

    def extra_repr(self) -> str:
        """The settings, as `print` shows them."""
        if self.similarity == "hamming":
            return "similarity='hamming'"
        return f"bins={self.bins}, low={self.low:g}, high={self.high:g}, similarity={self.similarity!r}"

    def forward(
        self,
        embeddings: Float[Tensor, "items dim"],
        labels: Any,
        gallery: Float[Tensor, "others dim"] | None = None,
        gallery_labels: Any = None,
    ) -> Float[Tensor, ""]:
        """The loss of a batch, or of queries and a gallery."""
        values = self.average_precisions(embeddings, labels, gallery, gallery_labels)
        present = ~values.isnan()
        if not present.any():
            if self.on_empty == "zero":
                return (0.0 * embeddings.float()).sum()  # with a gradient of zero
            classes = len(as_labels(labels, "labels", type(self).__name__).codes.unique())
            raise ValueError(
                f"SoftAveragePrecisionLoss: none of the {len(values)} items of the batch has another one of its class "
                f"({classes} classes). Draw several of each, for instance with a ClassBalancedBatchSampler, or pass "
                "on_empty='zero'."
            )
        return 1 - values[present].mean()

    def average_precisions(
        self,
        embeddings: Float[Tensor, "items dim"],
        labels: Any,
        gallery: Float[Tensor, "others dim"] | None = None,
        gallery_labels: Any = None,
    ) -> Float[Tensor, "items"]:
        """The soft average precision of each query; NaN where no candidate is relevant."""
        call = type(self).__name__
        if (gallery is None) != (gallery_labels is None):
            raise ValueError(f"{call}: gallery and gallery_labels come together. Pass both, or neither.")
        queries, query_labels = self._checked(embeddings, labels, "embeddings", "labels")
        items, item_labels = queries, query_labels
        if gallery is not None:
            items, item_labels = self._checked(gallery, gallery_labels, "gallery", "gallery_labels")
            if items.shape[1] != queries.shape[1]:
                raise ValueError(
                    f"{call}: embeddings of dimension {queries.shape[1]}, but a gallery of dimension {items.shape[1]}. "
                    "Both must come from the same model."
                )
        (queries_of, items_of), _ = numbered(call, {"labels": query_labels, "gallery_labels": item_labels})
        relevance = Relevance(queries_of.to(queries.device), items_of.to(queries.device), own=gallery is None)
        with torch.autocast(queries.device.type, enabled=False):
            histograms = soft_histograms(queries, items, relevance, self._bins(queries.shape[1]))
        return (tie_aware_average_precision if self.similarity == "hamming" else soft_average_precision)(histograms)

    def _bins(self, dim: int) -> Bins:
        if self.similarity == "hamming":  # q.g = b - 2 distance
            return Bins("hamming", dim + 1, float(-dim), float(dim))
        return Bins(self.similarity, self.bins, self.low, self.high)

    def _checked(self, embeddings: Tensor, labels: Any, name: str, labels_name: str) -> tuple[Tensor, Labels]:
        call = type(self).__name__
        check_matrix(embeddings, name, call)
        refuse_non_finite(non_finite_rows(embeddings.detach()), len(embeddings), name, call)
        read = labels_of_each(labels, len(embeddings), labels_name, name, call)
        vectors = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        if self.similarity != "hamming":
            vectors = nn.functional.normalize(vectors, dim=1)
        return vectors, read


class BinaryCodes(nn.Module):
    """Codes of -1 and 1 from a layer's output: relaxed by a hyperbolic tangent in training, exact in evaluation.

    Args:
        temperature: What outputs are divided by before the tangent, above 0. The smaller, the nearer codes are to -1 and
            1, and the smaller their gradient.

    Shape:
        (..., bits) of any floating dtype to the same; 0 counts as 1.

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
            raise ValueError(f"BinaryCodes(temperature={temperature}) must be above 0.")
        self.temperature = temperature

    def extra_repr(self) -> str:
        """The settings, as `print` shows them."""
        return f"temperature={self.temperature:g}"

    def forward(self, outputs: Float[Tensor, "*items bits"]) -> Float[Tensor, "*items bits"]:
        """Relaxed codes in training, codes in evaluation."""
        if self.training:
            return torch.tanh(outputs / self.temperature)
        return torch.where(outputs >= 0, 1.0, -1.0).to(outputs.dtype)
