"""Ranking metrics of each query, from the counts of the pass alone.

Equal keys have no order, so a metric is the mean over all orders of each tied group, in closed form
(`ties="expected"`; McSherry and Najork, "Computing Information Retrieval Performance Measures Efficiently in the
Presence of Tied Scores", ECIR 2008), or its value where the relevant items come first in each group (`"optimistic"`)
or last (`"pessimistic"`).

Every sum runs over the relevant items of one query from the least to the most similar, sequentially, so that
neither the other queries of a block nor its padding change a bit of it.

A relevant item that is not in the gallery has no rank: it counts towards R, and nowhere else (`with_absent`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.functional._reading import number_distinct
from fewshot_callbacks.settings import Ties

Divisor = Literal["min", "relevant", "found"]
"""What AP@k divides by: `min` is min(R, k), `relevant` is R, `found` is the number of relevant items in the top k."""

TERMS_AT_ONCE = 1024

# Below this grade 2^grade - 1 is grade * log(2), to the last digit of float64.
TINY_GRADE = 1e-17


def check_ties(ties: str) -> None:
    """Refuse an unknown rule for ties, and name the known ones."""
    if ties not in get_args(Ties):
        raise ValueError(f"ties={ties!r} is unknown. Choose one of {', '.join(get_args(Ties))}.")


def with_absent(ranks: RankBlock, absent: Int[Tensor, "queries"]) -> RankBlock:
    """Return the ranks with relevant items that are not in the gallery, as trec_eval counts them: they have no rank.

    Args:
        ranks: The ranks of some queries.
        absent: Number of such items of each query. `relevant` of the result counts them, `valid` does not.
    """
    return replace(ranks, relevant=ranks.relevant + absent)


# --------------------------------------------------------------------------------------------------- average precision


def average_precision(
    ranks: RankBlock, ties: Ties = "expected", cut: Int[Tensor, "queries"] | None = None
) -> Float[Tensor, "queries"]:
    """Sum of the precisions at the ranks of the relevant items, divided by the number of relevant items R.

    Args:
        ranks: The ranks of some queries.
        ties: The rule for equal keys.
        cut: Only ranks up to this one count; with `cut = R` this is MAP@R (Musgrave, Belongie and Lim,
            "A Metric Learning Reality Check", ECCV 2020). By default all ranks count: average precision.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    return _precision_sum(ranks, ties, cut) / _or_nan(ranks.relevant)


def map_at_r(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """MAP@R of one query: the precisions at its relevant ranks up to R, its number of relevant items, summed, over R."""
    return average_precision(ranks, ties, cut=ranks.relevant)


def average_precision_at_k(
    ranks: RankBlock, k: int, divisor: Divisor = "min", ties: Ties = "expected"
) -> Float[Tensor, "queries"]:
    """AP@k: the sum of the precisions at the ranks of the relevant items among the first k, divided as `divisor` says.

    Args:
        ranks: The ranks of some queries.
        k: How far to look, at least 1.
        divisor: `"min"` divides by min(R, k), the largest value that the sum can have; `"relevant"` by R;
            `"found"` by the number of relevant items among the first k, as papers on hashing do.
        ties: The rule for equal keys. With `"found"` the expected value is that of the ratio, and the optimistic order
            need not have the larger value: one more relevant item at rank k lowers a mean of high precisions.

    Returns:
        One value in [0, 1] for each query; 0 where none was found; NaN for a query without a relevant candidate.
    """
    cut = torch.full_like(ranks.relevant, k)
    if divisor != "found":
        count = ranks.relevant.clamp(max=k) if divisor == "min" else ranks.relevant
        return _precision_sum(ranks, ties, cut) / _or_nan(count)
    found = (_within(ranks, cut, ties) & ranks.valid).sum(dim=1)
    value = _precision_sum(ranks, ties, cut) / found.clamp(min=1)
    if ties == "expected":
        _expect_ratio(value, ranks, cut)
    return value.masked_fill(ranks.relevant == 0, torch.nan)


def _precision_sum(ranks: RankBlock, ties: Ties, cut: Int[Tensor, "queries"] | None) -> Float[Tensor, "queries"]:
    found = _found(ranks).double()
    rank = found + ranks.negatives_above
    if ties == "pessimistic":
        rank += ranks.negatives_tied
    outside = ~ranks.valid if cut is None else ~ranks.valid | (rank > cut[:, None])
    precision = found.div_(rank).masked_fill_(outside, 0.0)
    if ties == "expected" and bool((tied := _tied(ranks)).any()):
        group = _tied_groups(ranks, tied)
        above, relevant_above = group.above.double(), group.relevant_above.double()  # k, m
        size, relevant = group.size.double(), group.relevant.double()  # n, r
        reached = size if cut is None else (cut[group.query] - above).clamp(min=0).minimum(size)
        # sum over the places i = 1 ... reached of (m + 1 + (i - 1) (r - 1) / (n - 1)) / (k + i), for r items of which
        # each is at each place with probability 1 / n
        harmonic = _harmonic_between(above, reached)
        others = (relevant - 1) / (size - 1)
        total = (relevant_above + 1) * harmonic + others * (reached - (above + 1) * harmonic)
        precision.masked_fill_(tied, 0.0)
        precision[group.query, group.column] = total * (relevant / size)
    return _sum_columns(precision)


def _expect_ratio(value: Float[Tensor, "queries"], ranks: RankBlock, cut: Int[Tensor, "queries"]) -> None:
    """Put the expected ratio of precisions and found items where the number found depends on the order of a tie.

    Only the tied group that the cut divides makes the number found random. Of its n candidates, r of them relevant, d lie
    inside the cut; h of these are relevant, with the hypergeometric distribution, and given h each set of h of the d
    places is as likely as any other. So, with k candidates above the group, m of them relevant, and A the expected sum of
    the precisions of these m,

        E[ratio] = sum over h of P(h) / (m + h) * (A + h / d * sum_{i=1..d} (m + 1 + (i-1) (h-1)/(d-1)) / (k + i)).
    """
    group = _tied_groups(ranks, _tied(ranks))
    inside = cut[group.query] - group.above
    group = group.where((inside > 0) & (inside < group.size))
    if not len(group.query):
        return
    before = cut.clone()
    before[group.query] = group.above
    sum_above = _precision_sum(ranks, "expected", before)[group.query]  # A
    (above, m, drawn, size, relevant), back = _distinct(
        group.above, group.relevant_above, cut[group.query] - group.above, group.size, group.relevant
    )
    mean = _hypergeometric_means(m, drawn, size, relevant)
    d, k = drawn.double(), above.double()
    harmonic = _harmonic_between(k, d)
    rest = (d - (k + 1) * harmonic) / (d - 1).clamp(min=1)
    group_part = ((m + 1) * harmonic * mean.share + rest * mean.pairs) / d
    value[group.query] = sum_above * mean.inverse[back] + group_part[back]


class _RatioMeans(NamedTuple):
    """Means over the number h of relevant items that are drawn; a term with m + h = 0 counts as 0."""

    # mean of 1 / (m + h)
    inverse: Tensor
    # mean of h / (m + h)
    share: Tensor
    # mean of h (h - 1) / (m + h)
    pairs: Tensor


def _hypergeometric_means(m: Tensor, drawn: Tensor, size: Tensor, relevant: Tensor) -> _RatioMeans:
    """Sums over h from its most probable value outwards, up to where its probability falls below 1e-30 of that."""
    negatives = size - relevant
    low, high = (drawn - negatives).clamp(min=0), drawn.minimum(relevant)
    mode = ((drawn + 1) * (relevant + 1)).div(size + 2, rounding_mode="floor").maximum(low).minimum(high)
    sums = [torch.zeros_like(m, dtype=torch.float64) for _ in range(4)]

    def add(h: Tensor, weight: Tensor) -> None:
        inverse = weight / (m + h).clamp(min=1)
        sums[0].add_(weight)
        sums[1].add_(inverse.masked_fill(m + h == 0, 0.0))
        sums[2].add_(inverse * h)
        sums[3].add_(inverse * (h * (h - 1)))

    add(mode, torch.ones_like(sums[0]))
    for step in (1, -1):
        h, weight = mode, torch.ones_like(sums[0])
        while True:
            lower = h if step == 1 else h - 1  # P(lower + 1) / P(lower) = more / fewer
            more = ((relevant - lower) * (drawn - lower)).double()
            fewer = ((lower + 1) * (negatives - drawn + lower + 1)).double()
            ended = (h >= high) if step == 1 else (h <= low)
            weight = weight * torch.where(ended, 0.0, more / fewer if step == 1 else fewer / more)
            weight = weight.masked_fill(ended | (weight < 1e-30), 0.0)
            if not bool(weight.any()):
                break
            h = (h + step).clamp(min=0)
            add(h, weight)
    return _RatioMeans(sums[1] / sums[0], sums[2] / sums[0], sums[3] / sums[0])


# ------------------------------------------------------------------------------------------------------ the first k ranks


def hits_within(ranks: RankBlock, k: Int[Tensor, "queries"], ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Count the (expected) relevant items among the first k; divided by k this is precision@k.

    Args:
        ranks: The ranks of some queries.
        k: How far to look, for each query; with `k = R`, `hits / R` is R-precision.
        ties: The rule for equal keys.

    Returns:
        One value in [0, R] for each query; 0 for a query without a relevant candidate.
    """
    inside = _within(ranks, k, ties) & ranks.valid
    if ties != "expected" or not bool((tied := _tied(ranks)).any()):
        return inside.sum(dim=1).double()
    group = _tied_groups(ranks, tied)
    reached = (k[group.query] - group.above).clamp(min=0).minimum(group.size).double()
    hits = (inside & ~tied).double()
    hits[group.query, group.column] = group.relevant.double() * reached / group.size.double()
    return _sum_columns(hits)


def r_precision(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """R-precision: the (expected) share of relevant items among the first R, where R is their number."""
    return hits_within(ranks, ranks.relevant, ties) / ranks.relevant


def precision_at_k(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Precision@k: the (expected) number of relevant items among the first k, divided by k.

    Args:
        ranks: The ranks of some queries.
        k: How far to look, at least 1. The divisor is k also where a query has fewer than k candidates: the places that
            stay empty count as misses.
        ties: The rule for equal keys.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    hits = hits_within(ranks, torch.full_like(ranks.relevant, k), ties)
    return (hits / k).masked_fill(ranks.relevant == 0, torch.nan)


def ir_recall_at_k(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Recall@k of information retrieval: the (expected) share of a query's relevant items that are among the first k.

    Args:
        ranks: The ranks of some queries.
        k: How far to look, at least 1. With R > k relevant items the largest possible value is k / R.
        ties: The rule for equal keys.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    return hits_within(ranks, torch.full_like(ranks.relevant, k), ties) / _or_nan(ranks.relevant)


def recall_at_k(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Recall@K of metric learning (CMC@K): whether a relevant item is among the first k; its probability under ties.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    above, negatives, relevant = _best_group(ranks)
    last = above + negatives if ties == "pessimistic" else above
    has_candidate = ranks.valid.any(dim=1)
    found = ((last < k) & has_candidate).double()
    open_rows = (found > 0) & (negatives > 0) & has_candidate
    if ties == "expected" and bool(open_rows.any()):
        cases, back = _distinct((k - above)[open_rows], negatives[open_rows], relevant[open_rows])
        found[open_rows] = (1 - _chance_of_none(*cases))[back]
    return found.masked_fill(ranks.relevant == 0, torch.nan)


def without_nearest(ranks: RankBlock, number: Int[Tensor, "queries"]) -> RankBlock:
    """Return the ranks without so many relevant items of each query that no candidate scores higher than, such as copies.

    They count as left out of the candidates: what is tied with them stays.
    """
    first_group = ranks.relevant_above == 0
    fewer = number[:, None]
    relevant = ranks.relevant - number
    column = torch.arange(ranks.valid.shape[1], device=ranks.valid.device)
    return replace(
        ranks,
        relevant=relevant,
        valid=column < relevant[:, None],
        relevant_above=torch.where(first_group, ranks.relevant_above, ranks.relevant_above - fewer),
        relevant_tied=torch.where(first_group, ranks.relevant_tied - fewer, ranks.relevant_tied),
    )


def _chance_of_none(drawn: Tensor, n: Tensor, r: Tensor) -> Float[Tensor, "cases"]:
    """Probability that none of r relevant items is among those drawn of them and n negatives."""
    # C(n + r - drawn, r) / C(n + r, r), a product of min(drawn, r) factors
    fewer, more = drawn.minimum(r), drawn.maximum(r)
    missed = torch.ones_like(fewer, dtype=torch.float64)
    for step in range(int(fewer.max())):
        chance = (n + r - more - step).clamp(min=0).double() / (n + r - step).clamp(min=1)
        missed = torch.where(step < fewer, missed * chance, missed)
    return missed


def reciprocal_rank(ranks: RankBlock, ties: Ties = "expected", k: int | None = None) -> Float[Tensor, "queries"]:
    """1 / rank of the first relevant item; its mean over the queries is the mean reciprocal rank (MRR).

    Args:
        ranks: The ranks of some queries.
        k: How far to look, at least 1: a first relevant item beyond counts 0 (MRR@k). None looks at all ranks.
        ties: The rule for equal keys. In a tied group of n candidates, r of them relevant, the first of these r is at place
            x with probability C(n - x, r - 1) / C(n, r), the negative hypergeometric distribution.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    above, negatives, relevant = _best_group(ranks)
    first = above + negatives if ties == "pessimistic" else above
    value = (1 / (first + 1).double()).masked_fill_(~ranks.valid.any(dim=1), 0.0)
    if k is not None:
        value.masked_fill_(first >= k, 0.0)
    open_rows = (negatives > 0) & (ranks.relevant > 0) & (value > 0)
    if ties == "expected" and bool(open_rows.any()):
        (a, n, r), back = _distinct(above[open_rows], negatives[open_rows], relevant[open_rows])
        if k is None:
            value[open_rows] = _expected_reciprocal(a, n, r)[back]
        else:
            value[open_rows] = _sum_of_reciprocals(a.double(), n.double(), r.double(), within=k)[back]
    return value.masked_fill(ranks.relevant == 0, torch.nan)


def _expected_reciprocal(above: Tensor, negatives: Tensor, relevant: Tensor) -> Float[Tensor, "cases"]:
    """E[1 / (above + X)], where X is the place of the first relevant item in its group."""
    a, n, r = above.double(), negatives.double(), relevant.double()
    # above = 0: r / (n + 1) * (1 / r + ... + 1 / (r + n)); r = 1: each place is as likely as any other
    first_group = above == 0
    harmonic = _harmonic_between(torch.where(first_group, r - 1, a), n + 1)
    value = torch.where(first_group, r, 1.0) / (n + 1) * harmonic
    rows = ((above > 0) & (relevant > 1)).nonzero().flatten()
    rows = rows[
        (negatives / relevant.double())[rows].argsort(stable=True)
    ]  # those that need as many terms side by side
    for part in rows.split(TERMS_AT_ONCE):
        value[part] = _sum_of_reciprocals(a[part], n[part], r[part])
    return value


def _sum_of_reciprocals(
    a: Tensor, n: Tensor, r: Tensor, *, last: bool = False, within: int | None = None
) -> Float[Tensor, "cases"]:
    """Sum over the places, as far as their probability matters; P(x + 1) / P(x) = (n - x + 1) / (n + r - x).

    Args:
        a: Candidates above the group.
        n: Its negatives.
        r: Its relevant items.
        last: The last relevant item counts, whose place from below has the same probabilities, not the first.
        within: Ranks beyond this one count 0.
    """
    total = torch.zeros_like(a)
    chance = r / (n + r)  # P(1)
    going = torch.arange(len(a), device=a.device)
    offset = torch.arange(TERMS_AT_ONCE, dtype=torch.float64, device=a.device)
    start = 1
    while len(going):
        place = start + offset
        ratio = (n[going, None] - place + 1).clamp_(min=0).div_((n + r)[going, None] - place)
        ratio[(n + r)[going, None] <= place] = 0.0
        probability = torch.cat([chance[going, None], ratio], dim=1).cumprod(dim=1)  # the last is of the next start
        rank = a[going, None] + ((n + r)[going, None] + 1 - place if last else place)
        terms = probability[:, :-1] / rank.clamp(min=1)
        if within is not None:
            terms.masked_fill_(rank > within, 0.0)
        total[going] = torch.cat([total[going, None], terms], dim=1).cumsum(dim=1)[:, -1]
        chance[going] = probability[:, -1]
        start += TERMS_AT_ONCE
        going = going[chance[going] * n[going] > 1e-20]
    return total


def ndcg(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """nDCG@k with binary relevance: the sum of 1 / log2(rank + 1) over the relevant items among the first k, divided by
    the same sum of the ideal order, which has min(R, k) relevant items first.

    Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS 2002; the gain 2^rel - 1 and
    this discount are those of Burges et al., "Learning to rank using gradient descent", ICML 2005.

    Args:
        ranks: The ranks of some queries.
        k: How far to look, at least 1.
        ties: The rule for equal keys.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """  # noqa: D205 - the definition is one sentence
    rank = _found(ranks) + ranks.negatives_above
    if ties != "optimistic":
        rank += ranks.negatives_tied  # expected: where the group has no negatives, this adds nothing
    rank.masked_fill_(~ranks.valid, 0)
    length = min(k, max(int(rank.max()), int(ranks.relevant.max())))
    places = torch.arange(1, length + 1, dtype=torch.float64, device=rank.device)
    discount = torch.cat([places.new_zeros(1), 1 / torch.log2(places + 1), places.new_zeros(1)])
    prefix = discount.cumsum(dim=0)  # prefix[i]: the sum of the first i
    gain = discount[rank.clamp_(max=length + 1)]
    if ties == "expected" and bool((tied := _tied(ranks)).any()):
        group = _tied_groups(ranks, tied)
        start, end = group.above.clamp(max=length), (group.above + group.size).clamp(max=length)
        gain.masked_fill_(tied, 0.0)
        gain[group.query, group.column] = group.relevant.double() * (
            (prefix[end] - prefix[start]) / group.size.double()
        )
    ideal = prefix[ranks.relevant.clamp(max=length)]
    # from the first rank on, as the ideal is summed: a perfect order has exactly 1
    return _sum_columns(gain.flip(1)) / ideal.masked_fill(ranks.relevant == 0, torch.nan)


def inverse_penalty(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """INP: the number of relevant items R over the rank of the last of them; its mean over the queries is mINP.

    Ye, Shen, Lin, Xiang, Shao and Hoi, "Deep Learning for Person Re-Identification: A Survey and Outlook", TPAMI 2022.

    Args:
        ranks: The ranks of some queries.
        ties: The rule for equal keys.

    Returns:
        One value in [0, 1] for each query: 0 where a relevant item is not in the gallery; NaN for a query without a
        relevant candidate.
    """
    above, negatives = ranks.negatives_above[:, 0], ranks.negatives_tied[:, 0]
    has_absent = _candidates(ranks) < ranks.relevant
    rank = ranks.relevant + above + (0 if ties == "optimistic" else negatives)
    value = 1 / rank.clamp(min=1).double()
    open_rows = (negatives > 0) & (ranks.relevant > 0)
    if ties == "expected" and bool(open_rows.any()):
        before = above + ranks.relevant_above[:, 0]
        (a, n, r), back = _distinct(before[open_rows], negatives[open_rows], ranks.relevant_tied[:, 0][open_rows])
        value[open_rows] = _sum_of_reciprocals(a.double(), n.double(), r.double(), last=True)[back]
    return value.masked_fill(has_absent, 0.0) * _or_nan(ranks.relevant)


def precision_up_to_last(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Precision among the first k, or up to the last relevant item if that comes sooner.

    So the program of the revisited Oxford and Paris benchmarks computes precision@k (Radenović, Iscen, Tolias, Avrithis
    and Chum, "Revisiting Oxford and Paris: large-scale image retrieval benchmarking", CVPR 2018).

    Args:
        ranks: The ranks of some queries.
        k: How far to look, at least 1.
        ties: The rule for equal keys.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    value = precision_at_k(ranks, k, ties)
    negatives, r = ranks.negatives_tied[:, 0], ranks.relevant_tied[:, 0]
    before = ranks.negatives_above[:, 0] + ranks.relevant_above[:, 0]
    tied = torch.zeros_like(negatives) if ties == "optimistic" else negatives
    # the rank of the last relevant item ends only where all of them are in the gallery
    ends = (ranks.relevant > 0) & (_candidates(ranks) == ranks.relevant)
    is_open = (negatives > 0) & ends if ties == "expected" else torch.zeros_like(ends)
    soon = (before + r + tied <= k) & ends & ~is_open
    value = torch.where(soon, ranks.relevant.double() / (before + r + tied).clamp(min=1), value)
    open_rows = is_open & (before + r <= k)
    if bool(open_rows.any()):
        # the mean of hits / k, and of what R / rank of the last has more where that rank is at most k
        (a, n, r), back = _distinct(before[open_rows], negatives[open_rows], r[open_rows])
        inside = _sum_of_reciprocals(a.double(), n.double(), r.double(), last=True, within=k)
        more = inside - _chance_of_none((a + n + r - k).clamp(min=0), n, r) / k
        value[open_rows] += ranks.relevant[open_rows] * more[back]
    return value


def trapezoid_average_precision(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """AP as the area under the curve of precision and recall by trapezoids, as the Oxford and Paris benchmarks measure it.

    The sum over the relevant items of the mean of the precisions at their rank and just before it (1 before the first rank),
    divided by R (Philbin, Chum, Isard, Sivic and Zisserman, "Object retrieval with large vocabularies and fast spatial
    matching", CVPR 2007). It differs from average precision.

    Args:
        ranks: The ranks of some queries.
        ties: The rule for equal keys.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    found = _found(ranks).double()
    before = found + ranks.negatives_above - 1
    if ties == "pessimistic":
        before += ranks.negatives_tied
    precision = torch.where(before > 0, (found - 1) / before, 1.0).masked_fill_(~ranks.valid, 0.0)
    if ties == "expected" and bool((tied := _tied(ranks)).any()):
        group = _tied_groups(ranks, tied)
        k, m, n, r = (values.double() for values in (group.above, group.relevant_above, group.size, group.relevant))
        # sum over i = 0 ... n - 1 of (m + i (r - 1) / (n - 1)) / (k + i), where the first term is 1 if k = 0
        others = (r - 1) / (n - 1)
        total = others * n + (m - others * k) * (1 / k.clamp(min=1) + _harmonic_between(k, (n - 1).clamp(min=1)))
        total = torch.where(k > 0, total, 1 + others * (n - 1))
        precision.masked_fill_(tied, 0.0)
        precision[group.query, group.column] = total * (r / n)
    return (_sum_columns(precision) + _precision_sum(ranks, ties, None)) / 2 / _or_nan(ranks.relevant)


Gain = Literal["exponential", "linear"]
"""Gain of nDCG for a grade: 2^grade - 1 (Burges et al., 2005), or the grade itself (Järvelin and Kekäläinen, 2002)."""


def gains_of(grades: Float[Tensor, "queries columns"], gain: Gain) -> Float[Tensor, "queries columns"]:
    """Compute the gain of each relevant item, times a factor of the query, which cancels in nDCG.

    The factor keeps the gains of a query within the range of float64, and the largest of them near 1. For `linear` it is a
    power of two, which changes no digit. For `exponential` it is 2^-largest grade of the query: 2^grade overflows beyond a
    grade of 1,023. exp2 of a whole number is exact, so that one rounding is left, the same as without the factor. Below
    a largest grade of 1 it is 1 / (2^largest - 1): the difference of two powers near 1 would lose the digits of the grades.
    """
    if not grades.shape[1]:
        return grades
    most = grades.amax(dim=1, keepdim=True)
    if gain == "linear":
        exponent = -torch.frexp(most).exponent.double()
        half = (exponent / 2).floor()  # 2^exponent itself may overflow
        return grades * torch.exp2(half) * torch.exp2(exponent - half)
    large = torch.exp2(grades - most) - torch.exp2(-most)
    logarithm = math.log(2)
    small = torch.expm1(grades * logarithm) / torch.expm1(most * logarithm)
    tiny = grades / most  # what expm1 is to rounding, without its loss of digits among the smallest numbers
    gains = torch.where(most < 1, torch.where(most < TINY_GRADE, tiny, small), large)
    return gains.masked_fill(grades == 0, 0.0)


def graded_ndcg(
    ranks: RankBlock,
    gains: Float[Tensor, "queries columns"],
    k: int,
    ties: Ties = "expected",
    absent: Float[Tensor, "queries absent"] | None = None,
) -> Float[Tensor, "queries"]:
    """nDCG@k with a gain for each relevant item: the discounted sum of the first k, over that of the best order.

    The discount is 1 / log2(rank + 1). Candidates with equal scores share the mean of their gains, which is the expected
    value over their orders (McSherry and Najork, 2008); optimistic and pessimistic orders put the largest gain of a tie
    first or last.

    Args:
        ranks: The ranks of some queries.
        gains: Of the relevant items of `ranks`, in the same columns; what is not valid is 0.
        k: How far to look, at least 1.
        ties: The rule for equal keys.
        absent: Gains of the relevant items that are not in the gallery, padded with 0: the best order has them, too.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate, or if all gains are 0.
    """
    queries, _ = gains.shape
    rows = torch.arange(queries, device=gains.device)[:, None].expand_as(gains)
    group = (ranks.position_in_tie == 1).cumsum(dim=1) - 1
    above = ranks.negatives_above + ranks.relevant_above
    dense = gains.new_zeros(queries, k)  # the gain at each rank
    if ties == "expected":
        total = torch.zeros_like(gains).scatter_add_(1, group, gains)
        mean = total.gather(1, group) / (ranks.relevant_tied + ranks.negatives_tied)
        first = ranks.valid & (ranks.position_in_tie == 1) & (above < k)
        start, size = above[first], (ranks.relevant_tied + ranks.negatives_tied)[first]
        size = size.minimum(k - start)
        before = size.cumsum(0) - size
        place = torch.arange(int(size.sum()), device=gains.device) - before.repeat_interleave(size)
        dense[rows[first].repeat_interleave(size), start.repeat_interleave(size) + place] = mean[
            first
        ].repeat_interleave(size)
    else:  # inside a tie the largest gain comes first, or last
        order = gains.argsort(dim=1, descending=ties == "optimistic", stable=True)
        order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
        rank = above + ranks.position_in_tie - 1 + (ranks.negatives_tied if ties == "pessimistic" else 0)
        inside = ranks.valid & (rank < k)
        dense[rows[inside], rank[inside]] = gains.gather(1, order)[inside]
    every = gains if absent is None else torch.cat([gains, absent], dim=1)
    best = torch.zeros_like(dense)
    best[:, : min(k, every.shape[1])] = every.sort(dim=1, descending=True).values[:, :k]
    discount = torch.log2(torch.arange(2, k + 2, dtype=torch.float64, device=gains.device))
    ideal = (best / discount).sum(dim=1)
    return torch.where(ideal > 0, (dense / discount).sum(dim=1) / ideal, torch.nan)


def depends_on_ties(ranks: RankBlock) -> Bool[Tensor, "queries"]:
    """Find the queries with a relevant item that ties with a negative, so that the rule for ties matters."""
    return _tied(ranks).any(dim=1)


# ----------------------------------------------------------------------------------------------------------------- parts


def _found(ranks: RankBlock) -> Int[Tensor, "queries columns"]:
    """Count the relevant items down to this one: they stand in ascending order of their scores."""
    columns = torch.arange(ranks.valid.shape[1], device=ranks.relevant.device)
    return _candidates(ranks)[:, None] - columns


def _candidates(ranks: RankBlock) -> Int[Tensor, "queries"]:
    """Count the relevant items of each query that are in the gallery."""
    return ranks.valid.sum(dim=1)


def _within(ranks: RankBlock, k: Int[Tensor, "queries"], ties: Ties) -> Bool[Tensor, "queries columns"]:
    """Find the items among the first k, with the relevant items of a tied group first (pessimistic: last)."""
    rank = _found(ranks).add_(ranks.negatives_above)
    if ties == "pessimistic":
        rank += ranks.negatives_tied
    return rank <= k[:, None]


def _tied(ranks: RankBlock) -> Bool[Tensor, "queries columns"]:
    """Items that tie with a negative."""
    return (ranks.negatives_tied > 0) & ranks.valid


class _TiedGroups(NamedTuple):
    """Groups of equal keys with relevant items and negatives, once each."""

    # row of the block
    query: Int[Tensor, "groups"]
    # column of one relevant item of the group
    column: Int[Tensor, "groups"]
    # candidates with a larger key
    above: Int[Tensor, "groups"]
    relevant_above: Int[Tensor, "groups"]
    # candidates in the group
    size: Int[Tensor, "groups"]
    # relevant candidates in the group
    relevant: Int[Tensor, "groups"]

    def where(self, keep: Bool[Tensor, "groups"]) -> _TiedGroups:
        return _TiedGroups(*(values[keep] for values in self))


def _tied_groups(ranks: RankBlock, tied: Bool[Tensor, "queries columns"]) -> _TiedGroups:
    query, column = at = (tied & (ranks.position_in_tie == 1)).nonzero(as_tuple=True)
    relevant_above, relevant = ranks.relevant_above[at], ranks.relevant_tied[at]
    above, size = relevant_above + ranks.negatives_above[at], relevant + ranks.negatives_tied[at]
    return _TiedGroups(query, column, above, relevant_above, size, relevant)


def _best_group(ranks: RankBlock) -> tuple[Int[Tensor, "queries"], Int[Tensor, "queries"], Int[Tensor, "queries"]]:
    """Count around the most similar relevant item: candidates above it (all negative), negatives tied, relevant tied."""
    best = (_candidates(ranks) - 1).clamp(min=0)[:, None]  # it stands last
    counts = (ranks.negatives_above, ranks.negatives_tied, ranks.relevant_tied)
    above, negatives, relevant = (values.gather(1, best).squeeze(1) for values in counts)
    return above, negatives, relevant


def _distinct(*counts: Int[Tensor, "cases"]) -> tuple[list[Tensor], Int[Tensor, "cases"]]:
    """Find the distinct tuples of counts, and the number of each case's tuple."""
    number = torch.zeros_like(counts[0])
    for values in counts:  # numbers stay below the number of cases, so that the product does not overflow
        values = values - values.min()  # noqa: PLW2901
        number, first = number_distinct(number * (values.max() + 1) + values)
    return [values[first] for values in counts], number


def _harmonic_between(k: Float[Tensor, "groups"], n: Float[Tensor, "groups"]) -> Float[Tensor, "groups"]:
    """1 / (k + 1) + ... + 1 / (k + n), without the loss of digits of a difference of two large sums."""
    near = torch.digamma(k.clamp(max=40) + n + 1) - torch.digamma(k.clamp(max=40) + 1)
    # the expansion of H_m around ln(m + 1/2); what it leaves out is below 1e-14 from k = 40 on
    start, end = 1 / (k + 0.5), 1 / (k + n + 0.5)
    far = torch.log1p(n * start)
    for power, factor in ((2, 1 / 24), (4, -7 / 960), (6, 31 / 8064)):
        far = far + factor * (end**power - start**power)
    return torch.where(n == 1, 1 / (k + 1), torch.where(k < 40, near, far))


def _sum_columns(values: Float[Tensor, "queries columns"]) -> Float[Tensor, "queries"]:
    """Sums from the first column to the last, so that columns of zeros do not change their bits."""
    return values.cumsum(dim=1)[:, -1] if values.shape[1] else values.new_zeros(len(values))


def _or_nan(count: Tensor) -> Float[Tensor, "queries"]:
    return count.double().masked_fill(count == 0, torch.nan)
