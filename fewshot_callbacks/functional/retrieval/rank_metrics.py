"""Ranking metrics of each query, computed from the ranks of its relevant items (`RankBlock`).

To add a metric, write a function that takes a `RankBlock`, the parameters of the metric's key and a rule for ties, and
returns one value for each query. `registry.py` gives it a key. Rows of a block are queries. Columns are relevant items in
ascending order of their scores, so the best item is in the last column.

Equal scores have no order. A metric is therefore the mean over all orders of each tied group, in closed form
(`ties="expected"`; McSherry and Najork, "Computing Information Retrieval Performance Measures Efficiently in the Presence of
Tied Scores", ECIR 2008), or its value with the relevant items first in each group (`"optimistic"`) or last
(`"pessimistic"`).

How ties enter: an optimistic rank adds only `negatives_above`, and a pessimistic rank adds `negatives_tied`, too. For the
expected value, `groups_to_average` returns the tied groups, and their terms are replaced by their means.

A sum over the relevant items of a query adds one item after the other, so neither the other queries of a block nor its
padding affect its bits (`_sum_columns`). It begins with the least similar item, except in `ndcg`, which begins with the most
similar item.

In formulas, k is the rank at which a ranking is cut, and R the number of relevant items of a query. A tied group has s
candidates: n negatives and r relevant items. There are a candidates above it, and m of them are relevant.

A relevant item that is not in the gallery has no rank. It only counts towards R (`with_absent`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval._expectations import (
    chance_of_none,
    distinct,
    expected_reciprocal,
    harmonic_between,
    hypergeometric_means,
    sum_of_reciprocals,
)
from fewshot_callbacks.functional.retrieval._tied_groups import (
    TiedGroups,
    best_group,
    found_at,
    groups_to_average,
    is_within,
    last_group,
    relevant_in_gallery,
    replace_tied,
    tied_groups,
)
from fewshot_callbacks.settings import Divisor, Ties


def check_ties(ties: str) -> None:
    """Raise an error for an unknown rule for ties."""
    if ties not in get_args(Ties):
        raise InputError(f"ties={ties!r} is unknown. Choose one of {', '.join(get_args(Ties))}.")


def with_absent(ranks: RankBlock, absent: Int[Tensor, "queries"]) -> RankBlock:
    """Return the ranks with additional relevant items that are not in the gallery. They have no rank, as in trec_eval.

    `relevant` of the result includes them; `valid` does not.
    """
    return replace(ranks, relevant=ranks.relevant + absent)


def relevant_ranks(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries columns"]:
    """Return the rank of each relevant item. Rank 1 is the best. A mean of ranks is exact with every rule for ties.

    Args:
        ranks: The ranks of some queries.
        ties: The rule for equal scores. With `"expected"` a rank is its mean over all orders of the tied group: the j-th
            best of r relevant items in a group of s candidates has the mean place j (s + 1) / (r + 1). A nonlinear function
            of mean ranks is not the mean of the function.

    Returns:
        float64, at least 1, in descending order of the columns; NaN in columns that are not valid.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import Metric, evaluate_retrieval
        >>> def mean_rank(ranks, ties="expected"):
        ...     return relevant_ranks(ranks, ties).nanmean(dim=1)
        >>> metric = Metric("mean_rank", "ranks", mean_rank, "Mean rank of relevant items.", range=None, better="lower")
        >>> query, items = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> evaluate_retrieval(query, [1], items, [1, 0, 1], metrics=metric)["mean_rank"]  # ranks 1, and 2 or 3
        1.75
    """
    found = found_at(ranks).double()
    rank = found + ranks.negatives_above
    if ties == "pessimistic":
        rank += ranks.negatives_tied
    elif ties == "expected":
        place = (found - ranks.relevant_above) * (ranks.relevant_tied + ranks.negatives_tied + 1)
        rank = ranks.negatives_above + ranks.relevant_above + place / (ranks.relevant_tied + 1)
    return rank.masked_fill(~ranks.valid, torch.nan)


def only_queries(ranks: RankBlock, queries: Int[Tensor, "chosen"] | Bool[Tensor, "queries"]) -> RankBlock:
    """Return the ranks of some queries of a block, selected by row indices or a mask."""
    parts: dict[str, Any] = {}
    for field in fields(ranks):
        values = getattr(ranks, field.name)
        parts[field.name] = None if values is None else values[queries]
    return RankBlock(**parts)


def with_one_column(ranks: RankBlock) -> RankBlock:
    """Return ranks that have no columns with one invalid column, so that metrics need no special case."""
    zeros = torch.zeros(len(ranks.relevant), 1, dtype=torch.int64, device=ranks.relevant.device)
    return replace(
        ranks,
        valid=zeros.bool(),
        negatives_above=zeros,
        negatives_tied=zeros,
        relevant_above=zeros,
        relevant_tied=zeros,
        position_in_tie=zeros,
        places=zeros,
    )


# --------------------------------------------------------------------------------------------------- average precision


def average_precision(
    ranks: RankBlock, ties: Ties = "expected", cut: Int[Tensor, "queries"] | None = None
) -> Float[Tensor, "queries"]:
    """Return average precision: the sum of the precisions at the ranks of the relevant items, divided by their number R.

    Only ranks up to `cut` count. With `cut = R` this is MAP@R (Musgrave, Belongie and Lim, "A Metric Learning Reality
    Check", ECCV 2020). By default all ranks count. The values are in [0, 1]; NaN for a query without a relevant
    candidate.
    """
    return _precision_sum(ranks, ties, cut) / _nan_for_zero(ranks.relevant)


def map_at_r(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return MAP@R: the sum of the precisions at the relevant ranks up to R, divided by R."""
    return average_precision(ranks, ties, cut=ranks.relevant)


def average_precision_at_k(
    ranks: RankBlock, k: int, divisor: Divisor = "min", ties: Ties = "expected"
) -> Float[Tensor, "queries"]:
    """Return AP@k: the sum of the precisions at the ranks of the relevant items among the first k, over a divisor.

    `k` is at least 1. The divisor `"min"` is min(R, k), the largest possible sum; `"relevant"` is R; `"found"` is the
    number of relevant items among the first k, as in papers on hashing. With `"found"`, the result is the expected
    value of the ratio. The optimistic order need not have the larger value, because one more relevant item at rank k
    lowers a mean of high precisions. The values are in [0, 1]; 0 if no relevant item is among the first k; NaN for a
    query without a relevant candidate.
    """
    cut = torch.full_like(ranks.relevant, k)
    precisions = _precision_sum(ranks, ties, cut)
    if divisor == "min":
        return precisions / _nan_for_zero(ranks.relevant.clamp(max=k))
    if divisor == "relevant":
        return precisions / _nan_for_zero(ranks.relevant)
    found = (is_within(ranks, cut, ties) & ranks.valid).sum(dim=1)
    value = precisions / found.clamp(min=1)
    if ties == "expected":
        _expect_ratio(value, ranks, cut)
    return value.masked_fill(ranks.relevant == 0, torch.nan)


def _precision_sum(ranks: RankBlock, ties: Ties, cut: Int[Tensor, "queries"] | None) -> Float[Tensor, "queries"]:
    """Return the sum of the precisions at the relevant ranks, up to the rank `cut`; None for all."""
    found = found_at(ranks).double()
    rank = found + ranks.negatives_above
    if ties == "pessimistic":
        rank += ranks.negatives_tied
    outside = ~ranks.valid
    if cut is not None:
        outside |= rank > cut[:, None]
    precision = found.div_(rank).masked_fill_(outside, 0.0)
    group = groups_to_average(ranks, ties, cut)
    if group is not None:
        replace_tied(precision, ranks, group, _mean_precision_of_groups(group, cut))
    return _sum_columns(precision)


def _mean_precision_of_groups(group: TiedGroups, cut: Int[Tensor, "queries"] | None) -> Float[Tensor, "groups"]:
    """Return the mean, over all orders of each tied group, of the sum of the precisions at its relevant items.

    Each place has a relevant item with probability r / s. If place i has one, each of the i - 1 places before it has one of
    the other r - 1 relevant items with probability (r - 1) / (s - 1). So the expected precision at rank a + i is
    (m + 1 + (i - 1) (r - 1) / (s - 1)) / (a + i). The result is r / s times the sum of this expression over the places
    i = 1 ... d before the cut. With H = 1 / (a + 1) + ... + 1 / (a + d), the sum is

        (m + 1) H + (r - 1) / (s - 1) (d - (a + 1) H).

    Each group has a negative, so s > 1, and begins no later than the cut. A cut of None counts all ranks.
    """
    a = group.above.double()
    m = group.relevant_above.double()
    s = group.size.double()
    r = group.relevant.double()
    d = s if cut is None else (cut[group.query] - a).minimum(s)
    harmonic = harmonic_between(a, d)
    total = (m + 1) * harmonic + (r - 1) / (s - 1) * (d - (a + 1) * harmonic)
    return total * (r / s)


def _expect_ratio(value: Float[Tensor, "queries"], ranks: RankBlock, cut: Int[Tensor, "queries"]) -> None:
    """Write the expected AP@k over found items into `value`, for queries with a tied group that the cut divides.

    Only this group makes the number of found items random. It has s candidates, r of them relevant, and d of its places are
    inside the cut. The number h of relevant items in these places has the hypergeometric distribution, and given h, all sets
    of h of the d places are equally likely. There are a candidates above the group, m of them relevant, and A is the
    expected sum of the precisions of these m items. Then

        E[ratio] = sum over h of P(h) / (m + h) * (A + h / d * sum_{i=1..d} (m + 1 + (i-1) (h-1)/(d-1)) / (a + i)).
    """
    group = tied_groups(ranks, cut)
    group = group.only(cut[group.query] < group.above + group.size)
    if not len(group.query):
        return
    cut_above = cut.clone()
    cut_above[group.query] = group.above
    sum_above = _precision_sum(ranks, "expected", cut_above)[group.query]  # A
    (above, m, drawn, size, relevant), case = distinct(
        group.above, group.relevant_above, cut[group.query] - group.above, group.size, group.relevant
    )
    mean = hypergeometric_means(m, drawn, size, relevant)
    d = drawn.double()
    a = above.double()
    harmonic = harmonic_between(a, d)
    rest = (d - (a + 1) * harmonic) / (d - 1).clamp(min=1)
    group_part = ((m + 1) * harmonic * mean.share + rest * mean.pairs) / d
    value[group.query] = sum_above * mean.inverse[case] + group_part[case]


def auroc(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return the area under the ROC curve: the share of (relevant item, negative) pairs in the right order.

    It is the statistic of Mann and Whitney (1947), and the probability that a random relevant item scores higher than a
    random negative (Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC)
    curve", Radiology 1982).

    A pair with equal scores counts as one half (expected), one or zero. The values are in [0, 1]; 0.5 for random
    scores; NaN without a relevant candidate or without a negative.
    """
    assert ranks.negatives is not None
    tied_in_wrong_order = {"expected": 0.5, "optimistic": 0.0, "pessimistic": 1.0}[ties]
    # A Python float times integers would be of torch's default dtype.
    wrong = ranks.negatives_above + tied_in_wrong_order * ranks.negatives_tied.double()
    right = (ranks.negatives[:, None] - wrong).masked_fill(~ranks.valid, 0.0)
    return _sum_columns(right) / _nan_for_zero(ranks.relevant * ranks.negatives)


# ------------------------------------------------------------------------------------------------------ the first k ranks


def hits_within(ranks: RankBlock, k: Int[Tensor, "queries"], ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return the (expected) number of relevant items among the first k. Divided by k, it is precision@k.

    Args:
        ranks: The ranks of some queries.
        k: Number of ranks that count, for each query. With `k = R`, `hits / R` is R-precision.
        ties: The rule for equal scores.

    Returns:
        One value in [0, R] for each query; 0 for a query without a relevant candidate.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import Metric, evaluate_retrieval
        >>> def hits(ranks, k, ties="expected"):
        ...     return hits_within(ranks, torch.full_like(ranks.relevant, k), ties)
        >>> metric = Metric("hits@{k}", "ranks", hits, "Relevant items among the first {k}.", range=None)
        >>> items, labels = torch.eye(4).repeat(3, 1), [0, 1, 2, 3] * 3
        >>> evaluate_retrieval(items, labels, metrics=metric.at(k=5))["hits@5"]
        2.0
    """
    inside = is_within(ranks, k, ties) & ranks.valid
    group = groups_to_average(ranks, ties, cut=k)
    if group is None:
        return inside.sum(dim=1).double()
    reached = (k[group.query] - group.above).minimum(group.size).double()
    hits = inside.double()
    replace_tied(hits, ranks, group, group.relevant.double() * reached / group.size.double())
    return _sum_columns(hits)


def r_precision(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return R-precision: the (expected) share of relevant items among the first R, where R is their number."""
    return hits_within(ranks, ranks.relevant, ties) / ranks.relevant


def precision_at_k(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return precision@k: the (expected) number of relevant items among the first k, divided by k.

    `k` is at least 1. If a query has fewer than k candidates, the divisor is still k, so empty ranks count as misses.
    The values are in [0, 1]; NaN for a query without a relevant candidate.
    """
    hits = hits_within(ranks, torch.full_like(ranks.relevant, k), ties)
    return (hits / k).masked_fill(ranks.relevant == 0, torch.nan)


def ir_recall_at_k(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return recall@k as in information retrieval: the (expected) share of a query's relevant items among the first k.

    `k` is at least 1. With R > k relevant items, the largest possible value is k / R. The values are in [0, 1]; NaN for
    a query without a relevant candidate.
    """
    return hits_within(ranks, torch.full_like(ranks.relevant, k), ties) / _nan_for_zero(ranks.relevant)


def recall_at_k(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return Recall@K as in metric learning (CMC@K): whether, or how probably, a relevant item is among the first k.

    `k` is at least 1. The ranks of the best relevant item suffice. The values are in [0, 1]; NaN for a query without a
    relevant candidate.
    """
    best = best_group(ranks)
    candidates_above = best.above + best.negatives if ties == "pessimistic" else best.above
    has_candidate = ranks.valid.any(dim=1)
    value = ((candidates_above < k) & has_candidate).double()
    order_matters = (value > 0) & (best.negatives > 0)
    if ties == "expected" and bool(order_matters.any()):
        drawn = (k - best.above)[order_matters]
        cases, case = distinct(drawn, best.negatives[order_matters], best.relevant[order_matters])
        value[order_matters] = (1 - chance_of_none(*cases))[case]
    return value.masked_fill(ranks.relevant == 0, torch.nan)


def without_nearest(ranks: RankBlock, number: Int[Tensor, "queries"]) -> RankBlock:
    """Return the ranks without some of the best relevant items of each query, such as its copies.

    No candidate scores higher than these items; candidates that tie with them stay.
    """
    in_best_group = ranks.relevant_above == 0
    fewer = number[:, None]
    column = torch.arange(ranks.valid.shape[1], device=ranks.valid.device)
    return replace(
        ranks,
        relevant=ranks.relevant - number,
        valid=column < (relevant_in_gallery(ranks) - number)[:, None],
        relevant_above=torch.where(in_best_group, ranks.relevant_above, ranks.relevant_above - fewer),
        relevant_tied=torch.where(in_best_group, ranks.relevant_tied - fewer, ranks.relevant_tied),
    )


def reciprocal_rank(ranks: RankBlock, ties: Ties = "expected", k: int | None = None) -> Float[Tensor, "queries"]:
    """Return 1 / rank of the first relevant item; its mean over the queries is the mean reciprocal rank (MRR).

    `k` is at least 1. A first relevant item beyond k counts as 0 (MRR@k). None counts all ranks. In a tied group of s
    candidates with r relevant items, the first relevant item is at place x with probability C(s - x, r - 1) / C(s, r),
    the negative hypergeometric distribution. The values are in [0, 1]; NaN for a query without a relevant candidate.
    """
    best = best_group(ranks)
    candidates_above = best.above + best.negatives if ties == "pessimistic" else best.above
    value = (1 / (candidates_above + 1).double()).masked_fill_(~ranks.valid.any(dim=1), 0.0)
    if k is not None:
        value.masked_fill_(candidates_above >= k, 0.0)
    order_matters = (value > 0) & (best.negatives > 0)
    if ties == "expected" and bool(order_matters.any()):
        cases, case = distinct(best.above[order_matters], best.negatives[order_matters], best.relevant[order_matters])
        a, n, r = (counts.double() for counts in cases)
        if k is None:
            value[order_matters] = expected_reciprocal(a, n, r)[case]
        else:
            value[order_matters] = sum_of_reciprocals(a, n, r, within=k)[case]
    return value.masked_fill(ranks.relevant == 0, torch.nan)


def ndcg(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return nDCG@k with binary relevance: the discounted gain of the first k ranks, divided by the best possible one.

    The gain is the sum of 1 / log2(rank + 1) over the relevant items among the first k. The best possible order has
    min(R, k) relevant items first.

    Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS 2002. The gain 2^rel - 1 and this
    discount are from Burges et al., "Learning to rank using gradient descent", ICML 2005.

    `k` is at least 1. The values are in [0, 1]; NaN for a query without a relevant candidate.
    """
    rank = found_at(ranks) + ranks.negatives_above
    if ties != "optimistic":
        # For the expected value, discounts reach to the end of each tied group, and its gains are averaged below.
        rank += ranks.negatives_tied
    rank.masked_fill_(~ranks.valid, 0)
    length = min(k, max(int(rank.max()), int(ranks.relevant.max())))
    places = torch.arange(1, length + 1, dtype=torch.float64, device=rank.device)
    discount = torch.cat([places.new_zeros(1), 1 / torch.log2(places + 1), places.new_zeros(1)])
    discount_sum = discount.cumsum(dim=0)  # at i: the sum of the first i
    gain = discount[rank.clamp_(max=length + 1)]
    group = groups_to_average(ranks, ties)
    if group is not None:
        start = group.above.clamp(max=length)
        end = (group.above + group.size).clamp(max=length)
        mean_discount = (discount_sum[end] - discount_sum[start]) / group.size.double()
        replace_tied(gain, ranks, group, group.relevant.double() * mean_discount)
    ideal = discount_sum[ranks.relevant.clamp(max=length)]
    # The sum starts at the first rank, as in the ideal sum, so a perfect order gives exactly 1.
    return _sum_columns(gain.flip(1)) / ideal.masked_fill(ranks.relevant == 0, torch.nan)


def inverse_penalty(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return INP: the number of relevant items R over the rank of the last one. Its mean over the queries is mINP.

    Ye, Shen, Lin, Xiang, Shao and Hoi, "Deep Learning for Person Re-Identification: A Survey and Outlook", TPAMI 2022.

    The values are in [0, 1]; 0 if a relevant item is not in the gallery; NaN for a query without a relevant candidate.
    """
    group = last_group(ranks)
    has_absent = relevant_in_gallery(ranks) < ranks.relevant
    rank = ranks.relevant + ranks.negatives_above[:, 0]
    if ties == "pessimistic":
        rank = rank + group.negatives
    value = 1 / rank.clamp(min=1).double()
    order_matters = (group.negatives > 0) & (ranks.relevant > 0)
    if ties == "expected" and bool(order_matters.any()):
        cases, case = distinct(
            group.above[order_matters], group.negatives[order_matters], group.relevant[order_matters]
        )
        a, n, r = (counts.double() for counts in cases)
        value[order_matters] = sum_of_reciprocals(a, n, r, last=True)[case]
    return value.masked_fill(has_absent, 0.0) * _nan_for_zero(ranks.relevant)


def precision_up_to_last(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return the precision among the first k, or up to the last relevant item if it is ranked higher.

    This is precision@k in the program of the revisited Oxford and Paris benchmarks (Radenović, Iscen, Tolias, Avrithis and
    Chum, "Revisiting Oxford and Paris: large-scale image retrieval benchmarking", CVPR 2018).

    `k` is at least 1. The values are in [0, 1]; NaN for a query without a relevant candidate.
    """
    value = precision_at_k(ranks, k, ties)
    group = last_group(ranks)
    last = group.above + group.relevant
    if ties != "optimistic":
        last = last + group.negatives
    # The last relevant item has a rank only if all relevant items are in the gallery.
    has_last = (ranks.relevant > 0) & (relevant_in_gallery(ranks) == ranks.relevant)
    order_matters = torch.zeros_like(has_last)
    if ties == "expected":
        order_matters = (group.negatives > 0) & has_last
    is_sooner = (last <= k) & has_last & ~order_matters
    value = torch.where(is_sooner, ranks.relevant.double() / last.clamp(min=1), value)
    may_be_sooner = order_matters & (group.above + group.relevant <= k)
    if bool(may_be_sooner.any()):
        # The mean of hits / k, plus the mean excess of R / rank where the rank of the last item is at most k.
        cases, case = distinct(
            group.above[may_be_sooner], group.negatives[may_be_sooner], group.relevant[may_be_sooner]
        )
        a, n, r = cases
        within = sum_of_reciprocals(a.double(), n.double(), r.double(), last=True, within=k)
        excess = within - chance_of_none((a + n + r - k).clamp(min=0), n, r) / k
        value[may_be_sooner] += ranks.relevant[may_be_sooner] * excess[case]
    return value


def trapezoid_average_precision(ranks: RankBlock, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Return AP as the trapezoidal area under the precision-recall curve, as in the Oxford and Paris benchmarks.

    For each relevant item, take the mean of the precisions at its rank and just before it (1 before the first rank). The
    result is the sum of these means, divided by R (Philbin, Chum, Isard, Sivic and Zisserman, "Object retrieval with large
    vocabularies and fast spatial matching", CVPR 2007). It differs from average precision.

    The values are in [0, 1]; NaN for a query without a relevant candidate.
    """
    found = found_at(ranks).double()
    candidates_above = found + ranks.negatives_above - 1
    if ties == "pessimistic":
        candidates_above += ranks.negatives_tied
    precision = torch.where(candidates_above > 0, (found - 1) / candidates_above, 1.0).masked_fill_(~ranks.valid, 0.0)
    group = groups_to_average(ranks, ties)
    if group is not None:
        a = group.above.double()
        m = group.relevant_above.double()
        s = group.size.double()
        r = group.relevant.double()
        # The sum over i = 0 ... s - 1 of (m + i (r - 1) / (s - 1)) / (a + i), where the first term is 1 if a = 0.
        others = (r - 1) / (s - 1)
        total = others * s + (m - others * a) * (1 / a.clamp(min=1) + harmonic_between(a, (s - 1).clamp(min=1)))
        total = torch.where(a > 0, total, 1 + others * (s - 1))
        replace_tied(precision, ranks, group, total * (r / s))
    return (_sum_columns(precision) + _precision_sum(ranks, ties, None)) / 2 / _nan_for_zero(ranks.relevant)


def _sum_columns(values: Float[Tensor, "queries columns"]) -> Float[Tensor, "queries"]:
    """Return the sum over the columns, in order, so that columns of zeros do not change its bits."""
    return values.cumsum(dim=1)[:, -1] if values.shape[1] else values.new_zeros(len(values))


def _nan_for_zero(count: Int[Tensor, "queries"]) -> Float[Tensor, "queries"]:
    """Return a count as a divisor, with NaN for 0."""
    return count.double().masked_fill(count == 0, torch.nan)
