"""Metrics of ranks: published numbers, and ties as the mean over all orders."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fewshot_callbacks import revisited_protocol
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.functional import evaluate_retrieval, requested_metric
from fewshot_callbacks.functional.retrieval._tied_groups import depends_on_ties
from fewshot_callbacks.functional.retrieval.rank_metrics import (
    average_precision,
    average_precision_at_k,
    inverse_penalty,
    reciprocal_rank,
    with_absent,
    without_nearest,
)
from tests.cases import examples
from tests.functional import brute_force
from tests.messages import refused

TIES = ("expected", "optimistic", "pessimistic")


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
        negatives=torch.tensor([sum(negatives for _, negatives in groups) for groups in queries]),
        **dict(zip(TABLES, padded.unbind(2), strict=True)),
    )


def all_metrics(ranks, k, ties):
    """Every metric of ranks for each query, by key."""
    asked = map(requested_metric, brute_force.rank_metrics(k))
    return {one.key: one.metric.value(ranks, ties=ties, **one.parameters) for one in asked}


tied_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3).filter(
    lambda groups: sum(r for r, _ in groups) > 0 and all(r + n for r, n in groups)
)


@settings(max_examples=examples(100), deadline=None)
@given(tied_groups, st.sampled_from(TIES), st.integers(1, 20))
def test_closed_forms_equal_the_mean_over_all_orders(groups, ties, k):
    ranks = block_of([groups])
    try:
        every = list(brute_force.orders([[1] * r + [0] * n for r, n in groups], ties, cap=1000))
    except brute_force.TooManyOrdersError:
        reject()
    wanted = {key: sum(map(of, every)) / len(every) for key, of in brute_force.rank_metrics(k).items()}
    found = {key: value.item() for key, value in all_metrics(ranks, k, ties).items()}
    assert found == pytest.approx(wanted, abs=1e-12, nan_ok=True)
    assert depends_on_ties(ranks).item() == any(r and n for r, n in groups)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(tied_groups, min_size=2, max_size=5), st.sampled_from(TIES), st.integers(1, 12), st.integers(0, 30))
def test_neither_other_queries_nor_padding_change_a_bit(queries, ties, k, columns):
    together = all_metrics(block_of(queries, columns), k, ties)
    second = {name: values[[1]] for name, values in vars(block_of(queries)).items() if name != "places"}
    part = all_metrics(RankBlock(**second), k, ties)
    alone = [all_metrics(block_of([groups]), k, ties) for groups in queries]
    for name, values in together.items():
        np.testing.assert_array_equal(values, [metrics[name].item() for metrics in alone], name)
        np.testing.assert_array_equal(part[name].item(), values[1], name)


@pytest.mark.parametrize("ties", TIES)
def test_metrics_are_the_same_where_pytorch_may_use_deterministic_algorithms_alone(ties):
    ranks = block_of([[(1, 2), (2, 1)], [(3, 3)]])
    wanted = all_metrics(ranks, 5, ties)
    torch.use_deterministic_algorithms(True)
    try:
        found = all_metrics(ranks, 5, ties)
    finally:
        torch.use_deterministic_algorithms(False)
    for key, values in wanted.items():
        np.testing.assert_array_equal(found[key], values, key)


def test_a_query_without_a_match_is_nan():
    block = torch.zeros(1, 2, dtype=torch.int64)
    none = torch.tensor([0])
    ranks = RankBlock(none, none, block.bool(), block, block, block, block, block, negatives=torch.tensor([2]))
    for ties in TIES:
        assert [name for name, value in all_metrics(ranks, 3, ties).items() if not value.isnan().item()] == []
    assert not depends_on_ties(ranks).item()


def test_average_precision_is_one_if_and_only_if_all_relevant_items_come_first():
    """Of all orders of three relevant items and three others."""
    orders = torch.tensor(list(itertools.permutations(range(6)))).double()  # the score of each item
    labels = torch.tensor([1, 1, 1, 0, 0, 0])
    queries_labels = torch.ones(len(orders), dtype=torch.int64)
    report = evaluate_retrieval(orders, queries_labels, torch.eye(6).double(), labels, similarity="dot", metrics="mAP")
    come_first = orders[:, :3].amin(dim=1) > orders[:, 3:].amax(dim=1)
    assert int(come_first.sum()) == 36
    assert torch.equal(report.per_query["mAP"] == 1.0, come_first)


@pytest.mark.parametrize("relevant", [1, 7, 1000])
def test_a_perfect_order_has_exactly_one(relevant):
    for groups in ([(1, 0)] * relevant + [(0, 1)] * 100, [(relevant, 0), (0, 9)]):
        for ties in TIES:
            for k in (1, 10, 100):
                found = all_metrics(block_of([groups]), k, ties)
                assert {found[name].item() for name in (f"ndcg@{k}", "mrr", f"map@{k}_min", f"map@{k}_found")} == {1.0}


@pytest.mark.parametrize("above", [0, 1, 63])  # 1 / (above + 1) is exact
def test_the_first_place_of_a_tie_is_one_term_without_rounding(above):
    for relevant, negatives in [(1, 1), (2, 1), (3, 7), (40, 9)]:
        ranks = block_of([[(0, above), (relevant, negatives)]])
        value = average_precision_at_k(ranks, above + 1, divisor="relevant")
        assert value.item() == 1 / (above + 1) * (relevant / (relevant + negatives)) / relevant


def test_the_three_divisors_of_one_ranking():
    found = all_metrics(block_of([[(1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (1, 0)]]), 3, "expected")  # 1 0 1 0 1 1
    two = 1 + 2 / 3  # the precisions at the first two relevant ranks
    wanted = {
        "mAP": (two + 3 / 5 + 4 / 6) / 4,
        "map@r": two / 4,
        "r_precision": 0.5,
        "recall@3": 1.0,
        "ir_recall@3": 0.5,
    }
    wanted |= {"map@3_min": two / 3, "map@3_relevant": two / 4, "map@3_found": two / 2}
    assert {name: found[name].item() for name in wanted} == pytest.approx(wanted, abs=1e-15)


def test_without_its_copies_a_query_keeps_the_relevant_items_that_are_not_in_the_gallery():
    ranks = with_absent(block_of([[(2, 1), (0, 3), (1, 0)]]), torch.tensor([2]))
    rest = without_nearest(ranks, torch.tensor([2]))
    expected = with_absent(block_of([[(0, 4), (1, 0)]]), torch.tensor([2]))
    assert reciprocal_rank(rest).item() == reciprocal_rank(expected).item() == 1 / 5
    assert average_precision(rest).item() == average_precision(expected).item() == pytest.approx(1 / 5 / 3)


def test_a_query_that_finds_nothing_counts_as_zero():
    """Where the first K hold nothing relevant, and the gallery does: no sum of these metrics is divided by nothing."""
    found = all_metrics(block_of([[(0, 3), (2, 0)]]), 3, "expected")
    wanted = dict.fromkeys(("ndcg@3", "map@3_found", "map@3_min", "map@3_relevant", "recall@3"), 0.0)
    assert {name: found[name].item() for name in wanted} == wanted


def test_more_found_can_mean_a_lower_ratio():
    ranks = block_of([[(1, 0), (0, 8), (1, 1)]])  # the last place inside the cut is a tie
    found = [average_precision_at_k(ranks, 10, "found", ties).item() for ties in TIES]
    assert found == pytest.approx([0.8, 0.6, 1.0])


def test_published_numbers_of_one_tie_over_everything():
    for n, relevant, expected, last in ((4, 2, 0.68056, 0.41667), (6, 3, 0.64500, 0.38333), (5, 2, 0.59250, 0.32500)):
        found = [average_precision(block_of([[(relevant, n - relevant)]]), ties).item() for ties in TIES]
        assert found == pytest.approx([expected, 1.0, last], abs=5e-6)


# ------------------------------------------------------------------------------ large ties, against the sums they stand for


@pytest.mark.parametrize(
    ("above", "found_above", "relevant", "negatives"),
    [(0, 0, 5, 100_000), (1_000_000, 100_000, 2, 1), (1_000_000, 500_000, 30, 30), (99_999, 99_999, 1, 2)],
)
def test_average_precision_of_a_large_tie_far_down_the_ranking(above, found_above, relevant, negatives):
    n = relevant + negatives
    place = np.arange(1.0, n + 1)
    total = math.fsum((found_above + 1 + (place - 1) * (relevant - 1) / (n - 1)) / (above + place)) * relevant / n
    column = torch.ones(1, relevant, dtype=torch.int64)
    counts = (above - found_above, negatives, found_above, relevant)
    tables = [*(column * count for count in counts), torch.arange(1, relevant + 1)[None]]
    ranks = RankBlock(torch.tensor([0]), torch.tensor([found_above + relevant]), column.bool(), *tables)
    found = average_precision(ranks).item() * (found_above + relevant)
    assert found == pytest.approx(total, rel=1e-8)  # a difference of two digammas


def hypergeometric_ratio(m, k_above, relevant, size, drawn):
    """E[ratio] for perfect ranks above the group, with exact fractions and binomial coefficients."""
    total = Fraction(0)
    for h in range(max(0, drawn - size + relevant, int(m == 0)), min(drawn, relevant) + 1):
        chance = Fraction(math.comb(relevant, h) * math.comb(size - relevant, drawn - h), math.comb(size, drawn))
        others = Fraction(h - 1, max(drawn - 1, 1))
        inside = sum((m + 1 + (i - 1) * others) / (k_above + i) for i in range(1, drawn + 1))
        total += chance * (m + Fraction(h, drawn) * inside) / (m + h)
    return float(total)


@pytest.mark.parametrize(
    ("m", "skipped", "relevant", "size", "k"),
    [(0, 0, 60, 2000, 100), (2, 9, 900, 1000, 200), (5, 5, 3, 400, 300), (1, 0, 399, 400, 50)],
)
def test_expected_ratio_in_a_large_tie(m, skipped, relevant, size, k):
    groups = [(1, 0)] * m + [(0, 1)] * skipped + [(relevant, size - relevant)]
    expected = hypergeometric_ratio(m, m + skipped, relevant, size, k - m - skipped)
    assert average_precision_at_k(block_of([groups]), k, "found").item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize(
    ("above", "negatives", "relevant"),
    [(0, 100_000, 7), (0, 5000, 3000), (1, 3000, 2), (5, 20_000, 50), (40, 600, 1), (3, 2, 500)],
)
def test_expected_reciprocal_rank_in_a_large_tie(above, negatives, relevant):
    groups = [(0, above)] * (above > 0) + [(relevant, negatives)]
    probability, terms = relevant / (negatives + relevant), []
    for place in range(1, negatives + 2):
        terms.append(probability / (above + place))
        if place <= negatives:
            probability *= (negatives - place + 1) / (negatives + relevant - place)
    assert reciprocal_rank(block_of([groups])).item() == pytest.approx(math.fsum(terms), rel=1e-11)


def test_the_last_and_the_first_of_a_large_tie():
    """10,000 candidates of one score, against sums over the place of the last, and the first, relevant item."""
    n, r, k = 9_990, 10, 500
    ranks = block_of([[(r, n)]])
    first = [math.comb(n + r - x, r - 1) / math.comb(n + r, r) for x in range(1, n + 2)]
    last = sum(p * r / (n + r + 1 - x) for x, p in enumerate(first, 1))
    assert inverse_penalty(ranks).item() == pytest.approx(last, abs=1e-12)
    within = sum(p / x for x, p in enumerate(first[:k], 1))
    assert reciprocal_rank(ranks, k=k).item() == pytest.approx(within, abs=1e-12)


# -------------------------------------------------------------------------------------------------- the revisited protocol


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
    of_setup = {
        "easy": ("easy", ["hard", "junk"]),
        "medium": ("easy hard", ["junk"]),
        "hard": ("hard", ["easy", "junk"]),
    }
    assert reports.keys() == of_setup.keys()
    for name, (relevant, ignored) in of_setup.items():
        values = []
        for query, lists in enumerate(truth):
            good, bad = ({int(i) for part in parts for i in lists[part]} for parts in (relevant.split(), ignored))
            order = [int(i) for i in (gallery @ queries[query]).argsort(descending=True) if int(i) not in bad]
            gains = [int(i in good) for i in order]
            if good:
                last = (brute_force.precision_up_to_last(gains, k) for k in (1, 5, 10))
                values.append([brute_force.trapezoids(gains), *last])
        assert reports[name].queries_without_match == 12 - len(values)
        assert [*reports[name].values.values()] == pytest.approx(np.mean(values, axis=0).tolist(), abs=1e-12)
    del truth[0]["junk"]
    with refused(ValueError, "ground_truth[0]", "'easy'", "'hard'", "'junk'"):
        revisited_protocol(queries, gallery, truth)
