"""Items with several labels each: a candidate is relevant if it shares a label, the more labels the more.

That is how image hashing is evaluated on sets such as NUS-WIDE: mAP of what shares at least one label, and nDCG with the
number of shared labels as the grade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.functional._checks import as_tensor, check_embeddings
from fewshot_callbacks.functional._precision import full_precision
from fewshot_callbacks.functional.averages import exact_mean
from fewshot_callbacks.functional.codes import pack_codes
from fewshot_callbacks.functional.intervals import Interval, clustered_mean_interval, normal_quantile
from fewshot_callbacks.functional.ranking import (
    Divisor,
    Ties,
    average_precision,
    average_precision_at_k,
    check_divisor,
    check_ties,
)
from fewshot_callbacks.functional.ranks import Progress, RankBlock
from fewshot_callbacks.functional.similarity import ScoreTiles, Similarity, check_similarity

BYTES_PER_PAIR = 120
"""Keys, relevance, gains and their sorted copies."""


@dataclass(frozen=True)
class MultilabelReport:
    """What `evaluate_multilabel` found. Means are over the queries that share a label with some candidate."""

    mean: dict[str, float]
    """`mAP`, `map@10_found` and `ndcg@10` -> mean over the queries"""
    intervals: dict[str, Interval]
    """metric -> interval of its mean, robust to the dependence of queries with the same labels"""
    queries: int
    gallery: int
    labels: int
    """columns of the targets"""
    queries_without_match: int
    """queries that share no label with any candidate: left out of every mean"""
    similarity: Similarity
    ties: Ties
    per_query: dict[str, Float[Tensor, "queries"]] = field(compare=False, repr=False)
    """metric -> its value for each query; NaN for a query without a match"""


def evaluate_multilabel(
    embeddings: Any,
    targets: Any,
    gallery: Any = None,
    gallery_targets: Any = None,
    *,
    similarity: Similarity = "cosine",
    map_k: Sequence[int | tuple[int, Divisor]] = (),
    ndcg_k: Sequence[int] = (10,),
    ties: Ties = "expected",
    confidence: float = 0.95,
    memory_mb: float = 512,
    progress: Progress | None = None,
) -> MultilabelReport:
    """Exact mAP, AP@k and graded nDCG@k of items with several labels each.

    A candidate is relevant if it shares a label with the query; its grade is the number of shared labels. nDCG@k has the
    gain 2^grade - 1, the discount log2(rank + 1), and the best order of the query's own candidates as divisor (Järvelin and
    Kekäläinen, 2002, with the gain of Burges et al., 2005). Candidates with equal scores share the mean of their gains: the
    mean over their orders (McSherry and Najork, 2008).

    Args:
        embeddings: (queries, dim) vectors, or (queries, bits) codes of two values where `similarity="hamming"`.
        targets: (queries, labels) zeros and ones: which labels an item has.
        gallery: (gallery, dim) likewise; by default the queries themselves, each without itself.
        gallery_targets: (gallery, labels) likewise.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`.
        map_k: AP@k, each as k or (k, divisor): `min` divides by min(R, k), `relevant` by R, `found`, as papers on hashing
            do, by the relevant items among the first k. Named `map@10_min`.
        ndcg_k: the k of nDCG@k.
        ties: what equal scores count as: `expected` (the mean over their orders), `optimistic` or `pessimistic`.
        confidence: of the intervals.
        memory_mb: bound on the memory used beyond the embeddings, in MB.
        progress: called with the pairs that are done and the pairs that there are.

    Returns:
        Values in [0, 1], larger is better; NaN where no query has a match.

    Raises:
        ValueError: on input of which nothing can be computed; the text says what to pass.

    Examples:
        >>> import torch
        >>> targets = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1], [0, 0, 1]])
        >>> codes = torch.tensor([[1, 1, 1, 1], [1, 1, 1, -1], [1, 1, -1, -1], [-1, -1, -1, -1]])
        >>> report = evaluate_multilabel(codes, targets, similarity="hamming", ndcg_k=(2,), map_k=((2, "found"),))
        >>> round(report.mean["ndcg@2"], 3), report.mean["map@2_found"]
        (0.975, 1.0)
    """
    call = "evaluate_multilabel"
    check_similarity(similarity)
    check_ties(ties)
    normal_quantile(confidence)  # a wrong confidence is refused before the work, not after it
    cuts: list[tuple[int, Divisor]] = [
        (entry, "min") if isinstance(entry, int) else (entry[0], entry[1]) for entry in map_k
    ]
    for k, divisor in (*cuts, *((k, "min") for k in ndcg_k)):
        if not isinstance(k, int) or k < 1:
            raise ValueError(
                f"{call}: k={k!r} is no positive rank. Pass for instance map_k=((100, 'found'),), ndcg_k=(10,)."
            )
        check_divisor(divisor)
    if not memory_mb > 0:
        raise ValueError(f"{call}: memory_mb={memory_mb} must be positive; the default is 512.")
    if (gallery is None) != (gallery_targets is None):
        raise ValueError(
            f"{call}: gallery and gallery_targets belong together. Pass both, or neither for leave-one-out."
        )
    same_set = gallery is None
    queries = _vectors(embeddings, similarity, "embeddings", call)
    items = queries if same_set else _vectors(gallery, similarity, "gallery", call)
    if queries.shape[1] != items.shape[1]:
        raise ValueError(
            f"{call}: embeddings of {queries.shape[1]} components cannot be compared with a gallery of {items.shape[1]}. "
            "Both must come from the same model."
        )
    own = _targets(targets, len(queries), "targets", call)
    others = own if same_set else _targets(gallery_targets, len(items), "gallery_targets", call)
    if own.shape[1] != others.shape[1]:
        raise ValueError(
            f"{call}: targets have {own.shape[1]} labels, gallery_targets {others.shape[1]}. Column j must be the "
            "same label in both."
        )
    metrics: dict[str, Callable[[_Block], Tensor]] = {"mAP": partial(_ap, ties=ties)}
    metrics |= {f"map@{k}_{divisor}": partial(_ap, ties=ties, cut=(k, divisor)) for k, divisor in cuts}
    metrics |= {f"ndcg@{k}": partial(_graded_ndcg, k=k, ties=ties) for k in ndcg_k}
    values = {name: torch.full((len(queries),), torch.nan, dtype=torch.float64) for name in metrics}
    rows = int(max(1, min(1024, memory_mb * 10**6 // (BYTES_PER_PAIR * len(items)))))
    with full_precision():
        for block in _blocks(queries, items, own, others, similarity, rows, same_set=same_set):
            for name, metric in metrics.items():
                values[name][block.ranks.queries] = metric(block)
            if progress is not None:
                progress((int(block.ranks.queries[-1]) + 1) * len(items), len(queries) * len(items))
    matched = ~values["mAP"].isnan()
    clusters = own[matched].unique(dim=0, return_inverse=True)[1]
    return MultilabelReport(
        mean={name: exact_mean(value[matched]) for name, value in values.items()},
        intervals={
            name: clustered_mean_interval(value[matched], clusters, confidence) for name, value in values.items()
        },
        queries=len(queries),
        gallery=len(items),
        labels=own.shape[1],
        queries_without_match=int((~matched).sum()),
        similarity=similarity,
        ties=ties,
        per_query=values,
    )


@dataclass(frozen=True)
class _Block:
    """Some queries with all candidates; what is no candidate has key -inf and grade 0."""

    ranks: RankBlock
    keys: Float[Tensor, "queries gallery"]
    gains: Float[Tensor, "queries gallery"]
    """(2^grade - 1) / 2^(largest grade of the query)"""


def _vectors(value: Any, similarity: Similarity, name: str, call: str) -> Tensor:
    vectors = as_tensor(value, name, call).detach().cpu()
    if similarity != "hamming":
        check_embeddings(vectors, name, call)
        return vectors if vectors.dtype == torch.float64 else vectors.float()
    pack_codes(vectors, name, call)  # refuses what is no code
    return (vectors > 0).float() * 2 - 1


def _targets(value: Any, items: int, name: str, call: str) -> Float[Tensor, "items labels"]:
    targets = as_tensor(value, name, call).detach().cpu()
    if targets.ndim != 2 or len(targets) != items or not targets.shape[1]:
        raise ValueError(
            f"{call}: {name} have shape {tuple(targets.shape)}; one row of zeros and ones for each of the {items} items is "
            "wanted, a column for each label. For a single label each use evaluate_retrieval."
        )
    if not bool(((targets == 0) | (targets == 1)).all()):
        raise ValueError(f"{call}: {name} must hold zeros and ones only: whether an item has the label of a column.")
    return targets.float()


def _blocks(
    queries: Tensor, items: Tensor, own: Tensor, others: Tensor, similarity: Similarity, rows: int, *, same_set: bool
) -> Iterator[_Block]:
    tiles = None if similarity == "hamming" else ScoreTiles(queries, queries if same_set else items, similarity)
    columns = torch.arange(len(items))
    for index in torch.arange(len(queries)).split(rows):
        # products of codes of -1 and +1 are bits - 2 distance; whole numbers, which float32 holds
        keys = (queries[index] @ items.T).double() if tiles is None else tiles.keys(index, columns)
        grades = (own[index] @ others.T).double()  # (queries, gallery)
        if same_set:
            itself = (torch.arange(len(index)), index)
            keys[itself], grades[itself] = -torch.inf, 0.0
        # Scaled by 2^-largest grade of the query, which cancels in nDCG: 2^grade overflows beyond 1,023 shared labels.
        # exp2 of a whole number is exact, so that one rounding is left, the same as without the scale.
        most = grades.amax(dim=1, keepdim=True)
        gains = torch.exp2(grades - most) - torch.exp2(-most)
        yield _Block(_ranks(index, keys, grades > 0), keys, gains)


def _ranks(
    queries: Int[Tensor, "queries"], keys: Float[Tensor, "queries gallery"], relevant: Bool[Tensor, "queries gallery"]
) -> RankBlock:
    number = relevant.sum(dim=1)
    width = int(number.max())
    ordered = keys.masked_fill(~relevant, torch.inf).sort(dim=1).values
    thresholds = ordered[:, :width].contiguous()
    negatives = keys.masked_fill(relevant, -torch.inf).sort(dim=1).values
    column = torch.arange(width).expand_as(thresholds)
    reached = torch.searchsorted(negatives, thresholds)
    passed = torch.searchsorted(negatives, thresholds, right=True)
    below = torch.searchsorted(thresholds, thresholds)
    not_above = torch.searchsorted(thresholds, thresholds, right=True).minimum(number[:, None])
    return RankBlock(
        queries=queries,
        relevant=number,
        valid=column < number[:, None],
        negatives_above=keys.shape[1] - passed,
        negatives_tied=passed - reached,
        relevant_above=number[:, None] - not_above,
        relevant_tied=not_above - below,
        place_in_tie=column - below + 1,
    )


def _ap(block: _Block, *, ties: Ties, cut: tuple[int, Divisor] | None = None) -> Float[Tensor, "queries"]:
    return average_precision(block.ranks, ties) if cut is None else average_precision_at_k(block.ranks, *cut, ties)


def _graded_ndcg(block: _Block, *, k: int, ties: Ties) -> Float[Tensor, "queries"]:
    gains, keys = block.gains, block.keys
    ideal = gains.sort(dim=1, descending=True).values
    if ties != "expected":  # inside a tie the best come first, or last
        order = gains.argsort(dim=1, descending=ties == "optimistic", stable=True)
        gains, keys = gains.gather(1, order), keys.gather(1, order)
    order = keys.argsort(dim=1, descending=True, stable=True)
    gains, keys = gains.gather(1, order), keys.gather(1, order)
    if ties == "expected":
        first = torch.nn.functional.pad(keys[:, 1:] != keys[:, :-1], (1, 0), value=True)
        group = first.cumsum(dim=1) - 1
        total = torch.zeros_like(gains).scatter_add_(1, group, gains)
        size = torch.zeros_like(gains).scatter_add_(1, group, torch.ones_like(gains))
        gains = (total / size.clamp(min=1)).gather(1, group)
    discount = torch.log2(torch.arange(2, min(k, gains.shape[1]) + 2, dtype=torch.float64))
    best = (ideal[:, :k] / discount).sum(dim=1)
    return torch.where(best > 0, (gains[:, :k] / discount).sum(dim=1) / best, torch.nan)
