"""Metrics of ranks: published numbers, and ties as the mean over all orders."""

import itertools
import math
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import revisited_protocol
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.rank_metrics import (
    Divisor,
    average_precision,
    average_precision_at_k,
    depends_on_ties,
    hits_within,
    inverse_penalty,
    ir_recall_at_k,
    ndcg,
    precision_at_k,
    precision_up_to_last,
    recall_at_k,
    reciprocal_rank,
    trapezoid_average_precision,
)
from tests.functional import brute_force

TIES = ("expected", "optimistic", "pessimistic")
DIVISORS = get_args(Divisor)


def evaluate(scores, relevance, ties="expected", **kwargs):
    """One query of label 1 whose candidates have exactly these scores."""
    gallery = torch.tensor(scores, dtype=torch.float64).unsqueeze(1)
    settings = {
        "similarity": "dot",
        "ties": ties,
        "label_groups": None,
        "metrics": ("mAP", "map@r", "r_precision", "recall@1", "recall@2", "recall@3"),
    } | kwargs
    return evaluate_retrieval(
        torch.ones(1, 1, dtype=torch.float64), torch.tensor([1]), gallery, torch.tensor(relevance), **settings
    )


class TestWellKnownNumbers:
    @pytest.mark.parametrize("ties", TIES)
    def test_relevance_1_0_1_0_1_1(self, ties):
        report = evaluate(
            [6, 5, 4, 3, 2, 1],
            [1, 0, 1, 0, 1, 1],
            ties,
            metrics=(*("mAP", "map@r", "r_precision"), *("recall@3", "ir_recall@3", "ir_recall@5")),
        )
        assert report.mAP == pytest.approx((1 + 2 / 3 + 3 / 5 + 4 / 6) / 4, abs=1e-15)  # 0.73333
        assert report["map@r"] == pytest.approx((1 + 2 / 3) / 4, abs=1e-15)  # 0.41667
        assert report["r_precision"] == 2 / 4
        assert report["recall@3"] == 1.0  # any hit
        assert report.at("ir_recall@{k}") == {3: 2 / 4, 5: 3 / 4}  # two, then three of the four relevant items
        assert report.queries_with_ties == 0

    @pytest.mark.parametrize(
        ("n", "relevant", "pessimistic", "expected"),
        [(4, 2, 0.41667, 0.68056), (6, 3, 0.38333, 0.64500), (5, 2, 0.32500, 0.59250)],
    )
    def test_one_tie_over_everything(self, n, relevant, pessimistic, expected):
        relevance = [1] * relevant + [0] * (n - relevant)
        assert evaluate([7.0] * n, relevance, "pessimistic").mAP == pytest.approx(pessimistic, abs=5e-6)
        assert evaluate([7.0] * n, relevance, "expected").mAP == pytest.approx(expected, abs=5e-6)
        assert evaluate([7.0] * n, relevance, "optimistic").mAP == 1.0
        last_first = list(reversed(relevance))  # the order of the data is no answer
        for ties in TIES:
            assert evaluate([7.0] * n, last_first, ties).mAP == evaluate([7.0] * n, relevance, ties).mAP


TABLES = ("negatives_above", "negatives_tied", "relevant_above", "relevant_tied", "position_in_tie")


def block_of(queries, columns=0):
    """Ranks of queries, each by its tied groups, best first, as (relevant, negatives); a column at least is not valid."""
    rows = []
    for groups in queries:
        row, above = [], (0, 0)
        for relevant, negatives in groups:
            row += [(above[1], negatives, above[0], relevant, relevant - number) for number in range(relevant)]
            above = (above[0] + relevant, above[1] + negatives)
        rows.append(row[::-1])  # ascending scores
    width = max(columns, *(len(row) + 1 for row in rows))
    padded = torch.tensor([[*row, *[(-9,) * 5] * (width - len(row))] for row in rows])
    relevant = torch.tensor([len(row) for row in rows])
    return RankBlock(
        queries=torch.arange(len(rows)),
        relevant=relevant,
        valid=torch.arange(width) < relevant[:, None],
        **dict(zip(TABLES, padded.unbind(2), strict=True)),
    )


def ranks_of(groups):
    return block_of([groups])


def all_metrics(ranks, k, ties):
    """Every metric of this file for each query, by name."""
    cut = torch.full_like(ranks.relevant, k)
    return {
        "average_precision": average_precision(ranks, ties),
        "cut": average_precision(ranks, ties, cut=cut),
        "map_at_r": average_precision(ranks, ties, cut=ranks.relevant),
        **{f"ap_{divisor}": average_precision_at_k(ranks, k, divisor, ties) for divisor in DIVISORS},
        "hits_within": hits_within(ranks, cut, ties),
        "precision_at_k": precision_at_k(ranks, k, ties),
        "recall_at_k": recall_at_k(ranks, k, ties),
        "ir_recall_at_k": ir_recall_at_k(ranks, k, ties),
        "reciprocal_rank": reciprocal_rank(ranks, ties),
        "ndcg": ndcg(ranks, k, ties),
        "inverse_penalty": inverse_penalty(ranks, ties),
        "trapezoid_average_precision": trapezoid_average_precision(ranks, ties),
        "reciprocal_rank_at_k": reciprocal_rank(ranks, ties, k),
        "precision_up_to_last": precision_up_to_last(ranks, k, ties),
    }


def orders(groups, ties):
    """All orders of the tied groups as relevance, or the best or the worst of them."""
    choices = []
    for relevant, negatives in groups:
        best = (1,) * relevant + (0,) * negatives
        every = {"optimistic": [best], "pessimistic": [best[::-1]], "expected": set(itertools.permutations(best))}
        choices.append(every[ties])
    for parts in itertools.product(*choices):
        yield [hit for part in parts for hit in part]


def precision_sum(order, cut):
    return sum((Fraction(sum(order[: i + 1]), i + 1) for i, hit in enumerate(order) if hit and i < cut), Fraction(0))


def inp(gains):
    return sum(gain > 0 for gain in gains) / (1 + max(rank for rank, gain in enumerate(gains) if gain))


def trapezoids(gains):
    """The authors' program: old and new recall and precision at each hit."""
    area, hits = 0.0, 0
    for rank, gain in enumerate(gains):
        if gain:
            before = hits / rank if rank else 1.0
            hits += 1
            area += (before + hits / (rank + 1)) / 2
    return area / hits


def up_to_last(gains, k):
    """The authors' program: kq = min(largest rank of a relevant item, k)."""
    within = min(k, 1 + max(rank for rank, gain in enumerate(gains) if gain))
    return sum(gain > 0 for gain in gains[:within]) / within


def mrr(gains, k):
    first = next(rank for rank, gain in enumerate(gains) if gain)
    return 1 / (first + 1) if first < k else 0.0


tied_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3).filter(
    lambda groups: sum(r for r, _ in groups) > 0 and all(r + n for r, n in groups)
)


@settings(max_examples=150, deadline=None)
@given(tied_groups, st.sampled_from(TIES), st.integers(1, 20))
def test_closed_forms_equal_the_mean_over_all_orders(groups, ties, k):
    ranks = ranks_of(groups)
    relevant, everything = sum(r for r, _ in groups), sum(r + n for r, n in groups)
    cut = torch.tensor([k])

    def check(found, of):
        values = [of(order) for order in orders(groups, ties)]
        assert found.item() == pytest.approx(float(sum(values) / len(values)), abs=1e-12)

    check(average_precision(ranks, ties), lambda order: precision_sum(order, everything) / relevant)
    check(average_precision(ranks, ties, cut=cut), lambda order: precision_sum(order, k) / relevant)
    check(hits_within(ranks, cut, ties), lambda order: Fraction(sum(order[:k])))
    check(recall_at_k(ranks, k, ties), lambda order: Fraction(any(order[:k])))
    check(ir_recall_at_k(ranks, k, ties), lambda order: brute_force.ir_recall_at(order, k))
    check(precision_at_k(ranks, k, ties), lambda order: brute_force.precision_at(order, k))
    check(reciprocal_rank(ranks, ties), brute_force.reciprocal_rank)
    check(ndcg(ranks, k, ties), lambda order: brute_force.ndcg_at(order, k))
    check(inverse_penalty(ranks, ties), inp)
    check(trapezoid_average_precision(ranks, ties), trapezoids)
    check(reciprocal_rank(ranks, ties, k), lambda order: mrr(order, k))
    check(precision_up_to_last(ranks, k, ties), lambda order: up_to_last(order, k))
    for divisor in DIVISORS:
        found = average_precision_at_k(ranks, k, divisor, ties)
        check(found, lambda order, divisor=divisor: brute_force.average_precision_at(order, k, divisor))
    assert depends_on_ties(ranks).item() == any(r and n for r, n in groups)


@pytest.mark.parametrize(
    ("above", "found_above", "relevant", "negatives"),
    [(0, 0, 5, 100_000), (1_000_000, 100_000, 2, 1), (1_000_000, 500_000, 30, 30), (99_999, 99_999, 1, 2)],
)
def test_large_ties_far_down_the_ranking(above, found_above, relevant, negatives):
    # one tied group after many candidates: the closed form against the sum that it stands for
    n = relevant + negatives
    total = sum(
        (found_above + 1 + (i - 1) * (relevant - 1) / (n - 1)) / (above + i) for i in range(1, n + 1)
    ) * Fraction(relevant, n)
    column = torch.ones(1, relevant, dtype=torch.int64)
    ranks = RankBlock(
        queries=torch.tensor([0]),
        relevant=torch.tensor([found_above + relevant]),
        valid=column.bool(),
        negatives_above=column * (above - found_above),
        negatives_tied=column * negatives,
        relevant_above=column * found_above,
        relevant_tied=column * relevant,
        position_in_tie=torch.arange(1, relevant + 1)[None],
    )
    found = average_precision(ranks).item() * (found_above + relevant)
    assert found == pytest.approx(float(total), rel=1e-8)  # a difference of two digammas


def test_a_query_without_a_match_is_nan_where_it_is_a_mean():
    block = torch.zeros(1, 2, dtype=torch.int64)
    ranks = RankBlock(torch.tensor([0]), torch.tensor([0]), block.bool(), block, block, block, block, block)
    for ties in TIES:
        for name, value in all_metrics(ranks, 3, ties).items():
            assert value.item() == 0.0 if name == "hits_within" else value.isnan().item(), name
    assert not depends_on_ties(ranks).item()


@settings(max_examples=40, deadline=None)
@given(st.lists(tied_groups, min_size=2, max_size=5), st.sampled_from(TIES), st.integers(1, 12), st.integers(0, 30))
def test_neither_other_queries_nor_padding_change_a_bit(queries, ties, k, columns):
    together = all_metrics(block_of(queries, columns), k, ties)
    part = all_metrics(
        RankBlock(**{name: values[[1]] for name, values in vars(block_of(queries)).items() if name != "places"}),
        k,
        ties,
    )
    alone = [all_metrics(ranks_of(groups), k, ties) for groups in queries]
    for name, values in together.items():
        assert values.tolist() == [metrics[name].item() for metrics in alone], name
        assert part[name].item() == values[1], name


@pytest.mark.parametrize("relevant", [1, 2, 7, 53, 1000])
@pytest.mark.parametrize("k", [1, 10, 100])
def test_a_perfect_order_has_exactly_one(relevant, k):
    for groups in ([(1, 0)] * relevant + [(0, 1)] * 100, [(relevant, 0), (0, 9)]):
        ranks = ranks_of(groups)
        for ties in TIES:
            assert ndcg(ranks, k, ties).item() == 1.0
            assert reciprocal_rank(ranks, ties).item() == 1.0
            assert average_precision_at_k(ranks, k, "min", ties).item() == 1.0
            assert average_precision_at_k(ranks, k, "found", ties).item() == 1.0


def test_the_three_divisors_of_one_ranking():
    ranks = ranks_of([(1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (1, 0)])  # 1 0 1 0 1 1
    found = {divisor: average_precision_at_k(ranks, 3, divisor).item() for divisor in DIVISORS}
    assert found == pytest.approx({"min": (1 + 2 / 3) / 3, "relevant": (1 + 2 / 3) / 4, "found": (1 + 2 / 3) / 2})
    nothing_found = ranks_of([(0, 3), (1, 0)])
    assert [average_precision_at_k(nothing_found, 3, divisor).item() for divisor in DIVISORS] == [0.0, 0.0, 0.0]


def test_more_found_can_mean_a_lower_ratio():
    ranks = ranks_of([(1, 0), (0, 8), (1, 1)])  # the last place inside the cut is a tie
    low, mean, high = (average_precision_at_k(ranks, 10, "found", t).item() for t in TIES[1:2] + TIES[:1] + TIES[2:])
    assert (low, mean, high) == pytest.approx((0.6, 0.8, 1.0))


def hypergeometric_ratio(m, k_above, relevant, size, drawn):
    """E[ratio] for perfect ranks above the group, with exact fractions and binomial coefficients."""
    total = Fraction(0)
    above = sum((Fraction(i, i) for i in range(1, m + 1)), Fraction(0))
    for h in range(max(0, drawn - size + relevant), min(drawn, relevant) + 1):
        chance = Fraction(math.comb(relevant, h) * math.comb(size - relevant, drawn - h), math.comb(size, drawn))
        others = Fraction(h - 1, drawn - 1) if drawn > 1 else Fraction(0)
        inside = sum(((m + 1 + (i - 1) * others) / (k_above + i) for i in range(1, drawn + 1)), Fraction(0))
        if m + h:
            total += chance * (above + Fraction(h, drawn) * inside) / (m + h)
    return float(total)


@pytest.mark.parametrize(
    ("m", "skipped", "relevant", "size", "k"),
    [(0, 0, 60, 2000, 100), (3, 0, 60, 2000, 100), (2, 9, 900, 1000, 200), (5, 5, 3, 400, 300), (1, 0, 399, 400, 50)],
)
def test_expected_ratio_in_a_large_tie(m, skipped, relevant, size, k):
    groups = [(1, 0)] * m + [(0, 1)] * skipped + [(relevant, size - relevant)]
    expected = hypergeometric_ratio(m, m + skipped, relevant, size, k - m - skipped)
    assert average_precision_at_k(ranks_of(groups), k, "found").item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize(
    ("above", "negatives", "relevant"),
    [(0, 100_000, 1), (0, 100_000, 7), (0, 5000, 3000), (1, 3000, 2), (5, 20_000, 50), (700, 2000, 1), (3, 2, 500)],
)
def test_expected_reciprocal_rank_in_a_large_tie(above, negatives, relevant):
    groups = [(0, above)] * (above > 0) + [(relevant, negatives)]
    probability, terms = relevant / (negatives + relevant), []
    for place in range(1, negatives + 2):
        terms.append(probability / (above + place))
        if place <= negatives:
            probability *= (negatives - place + 1) / (negatives + relevant - place)
    assert reciprocal_rank(ranks_of(groups)).item() == pytest.approx(math.fsum(terms), rel=1e-11)


@pytest.mark.parametrize("ties", TIES)
def test_the_last_and_the_first_of_a_large_tie(ties):
    """10,000 candidates of one score, against sums over the place of the last, and the first, relevant item."""
    n, r, k = 9_990, 10, 500
    ranks = ranks_of([(r, n)])
    first = [math.comb(n + r - x, r - 1) / math.comb(n + r, r) for x in range(1, n + 2)]
    wanted = {
        "expected": (
            sum(p * r / (n + r + 1 - x) for x, p in enumerate(first, 1)),
            sum(p / x for x, p in enumerate(first[:k], 1)),
        ),
        "optimistic": (1.0, 1.0),
        "pessimistic": (r / (n + r), 0.0),
    }[ties]
    assert float(inverse_penalty(ranks, ties)) == pytest.approx(wanted[0], abs=1e-12)
    assert float(reciprocal_rank(ranks, ties, k)) == pytest.approx(wanted[1], abs=1e-12)


def test_the_revisited_protocol_is_that_of_its_authors_program():
    """Loops: junk leaves the ranking, a query without a relevant image leaves the means."""
    rng = np.random.default_rng(0)
    queries, gallery = (torch.from_numpy(rng.normal(size=(n, 6))) for n in (12, 90))
    truth = []
    for query in range(12):
        some = rng.permutation(90)
        easy, hard, junk = np.split(some[: 9 + query], [4, 9])
        truth.append({"bbx": None, "easy": easy.tolist() if query else [], "hard": hard, "junk": junk.tolist()})
    reports = revisited_protocol(queries, gallery, truth, similarity="dot")
    setups = {
        "easy": (("easy",), ("hard", "junk")),
        "medium": (("easy", "hard"), ("junk",)),
        "hard": (("hard",), ("easy", "junk")),
    }
    assert reports.keys() == setups.keys()
    for name, (relevant, ignored) in setups.items():
        values = []
        for query, lists in enumerate(truth):
            good, bad = ([int(i) for part in parts for i in lists[part]] for parts in (relevant, ignored))
            order = [int(i) for i in (gallery @ queries[query]).argsort(descending=True) if int(i) not in bad]
            gains = [int(i in good) for i in order]
            if good:
                values.append([trapezoids(gains), *(up_to_last(gains, k) for k in (1, 5, 10))])
        assert reports[name].queries_without_match == 12 - len(values)
        assert [*reports[name].metrics().values()] == pytest.approx(np.mean(values, axis=0).tolist(), abs=1e-12)


def test_what_the_revisited_protocol_lacks_is_said():
    with pytest.raises(ValueError, match=r"ground_truth\[0\] has no 'junk'. Pass for each query its lists"):
        revisited_protocol(torch.ones(1, 2), torch.ones(2, 2), [{"easy": [0], "hard": [1]}])
    with pytest.raises(ValueError, match="1 pairs are both relevant and ignored"):
        revisited_protocol(torch.ones(1, 2), torch.ones(2, 2), [{"easy": [0], "hard": [1], "junk": [0]}])
