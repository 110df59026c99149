import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.ranking import (
    average_precision,
    check_ties,
    depends_on_ties,
    hits_within,
    recall_at_k,
)
from fewshot_callbacks.functional.ranks import RankBlock
from fewshot_callbacks.functional.retrieval import evaluate_retrieval

TIES = ("expected", "optimistic", "pessimistic")


def evaluate(scores, relevance, ties="expected", **kwargs):
    """One query of label 1 whose candidates have exactly these scores."""
    gallery = torch.tensor(scores, dtype=torch.float64).unsqueeze(1)
    settings = {"similarity": "dot", "ties": ties, "group_size": None, "recall_k": (1, 2, 3), "precisions": ()} | kwargs
    return evaluate_retrieval(
        torch.ones(1, 1, dtype=torch.float64), torch.tensor([1]), gallery, torch.tensor(relevance), **settings
    )


class TestWellKnownNumbers:
    @pytest.mark.parametrize("ties", TIES)
    def test_relevance_1_0_1_0_1_1(self, ties):
        report = evaluate([6, 5, 4, 3, 2, 1], [1, 0, 1, 0, 1, 1], ties)
        assert report.mAP == pytest.approx((1 + 2 / 3 + 3 / 5 + 4 / 6) / 4, abs=1e-15)  # 0.73333
        assert report.map_at_r == pytest.approx((1 + 2 / 3) / 4, abs=1e-15)  # 0.41667
        assert report.r_precision == 2 / 4
        assert report.recall_at[3] == 1.0  # any hit; the share of the relevant that is found would be 0.5
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

    def test_one_tie_other_metrics(self):
        report = evaluate([7.0] * 6, [1, 1, 1, 0, 0, 0])
        assert report.recall_at[1] == pytest.approx(3 / 6)
        assert report.recall_at[2] == pytest.approx(1 - 3 / 6 * 2 / 5)
        assert report.recall_at[3] == pytest.approx(1 - 3 / 6 * 2 / 5 * 1 / 4)
        assert report.r_precision == pytest.approx(3 / 6)
        assert report.queries_with_ties == 1
        assert evaluate([7.0] * 6, [1, 1, 1, 0, 0, 0], "optimistic").r_precision == 1.0
        assert evaluate([7.0] * 6, [1, 1, 1, 0, 0, 0], "pessimistic").r_precision == 0.0

    @pytest.mark.parametrize("shift", [-10.0, 0.0, 1e6])
    def test_adding_a_constant_to_all_scores_changes_nothing(self, shift):
        scores = [score + shift for score in (0.5, 0.25, 0.0, -0.25, -0.5)]
        report = evaluate(scores, [0, 1, 0, 1, 1])
        assert report.mAP == pytest.approx((1 / 2 + 2 / 4 + 3 / 5) / 3, abs=1e-15)
        assert report.recall_at == {1: 0.0, 2: 1.0, 3: 1.0}

    def test_pooled_recall_at_precision_with_ties_merged(self):
        # four queries as in the documentation of torchmetrics: recall 0.25 at 0.6 for precision 0.8, 0.75 for 0.75.
        # One row of candidates pools them; their scores are the same decisions
        scores, relevance = [0.4, 0.01, 0.5, 0.6, 0.2, 0.3, 0.5], [1, 0, 0, 1, 1, 0, 1]
        report = evaluate(scores, relevance, precisions=(0.8, 0.75))
        assert report.recall_at_precision == {0.8: 0.25, 0.75: 0.75}
        assert report.at_precision[0.8].threshold == 0.6
        assert report.at_precision[0.75].threshold == 0.4


def ranks_of(groups):
    """The ranks of one query from its tied groups, best first, each as (relevant, negatives): by counting."""
    columns = []
    for place, (relevant, negatives) in enumerate(groups):
        above = groups[:place]
        counts = (sum(n for _, n in above), negatives, sum(r for r, _ in above), relevant)
        columns += [(*counts, number + 1) for number in range(relevant)]
    columns.reverse()  # ascending keys; the order inside a tie is anyone's
    padded = [torch.tensor([[*values, -9]]) for values in zip(*columns, strict=True)]  # one column is not valid
    negatives_above, negatives_tied, relevant_above, relevant_tied, place_in_tie = padded
    valid = torch.tensor([[*[True] * len(columns), False]])
    return RankBlock(
        queries=torch.tensor([0]),
        relevant=torch.tensor([len(columns)]),
        valid=valid,
        negatives_above=negatives_above,
        negatives_tied=negatives_tied,
        relevant_above=relevant_above,
        relevant_tied=relevant_tied,
        place_in_tie=place_in_tie,
    )


def orders(groups, ties):
    """All orders of the tied groups as relevance, or the best or the worst of them."""
    choices = []
    for relevant, negatives in groups:
        best = (1,) * relevant + (0,) * negatives
        every = {"optimistic": [best], "pessimistic": [best[::-1]], "expected": set(itertools.permutations(best))}
        choices.append(every[ties])
    for parts in itertools.product(*choices):
        yield [hit for part in parts for hit in part]


def mean_over_orders(groups, ties, of):
    values = [of(order) for order in orders(groups, ties)]
    return float(sum(values) / len(values))


def precision_sum(order, cut):
    return sum((Fraction(sum(order[: i + 1]), i + 1) for i, hit in enumerate(order) if hit and i < cut), Fraction(0))


tied_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3).filter(
    lambda groups: sum(r for r, _ in groups) > 0 and all(r + n for r, n in groups)
)


@settings(max_examples=60, deadline=None)
@given(tied_groups, st.sampled_from(TIES), st.integers(1, 20))
def test_closed_forms_equal_the_mean_over_all_orders(groups, ties, k):
    ranks = ranks_of(groups)
    relevant, everything = sum(r for r, _ in groups), sum(r + n for r, n in groups)
    cut = torch.tensor([k])

    def check(found, of):
        assert found.item() == pytest.approx(mean_over_orders(groups, ties, of), abs=1e-12)

    check(average_precision(ranks, ties), lambda order: precision_sum(order, everything) / relevant)
    check(average_precision(ranks, ties, cut=cut), lambda order: precision_sum(order, k) / relevant)
    check(hits_within(ranks, cut, ties), lambda order: Fraction(sum(order[:k])))
    check(recall_at_k(ranks, k, ties), lambda order: Fraction(any(order[:k])))
    assert depends_on_ties(ranks).item() == any(r and n for r, n in groups)


@settings(max_examples=40, deadline=None)
@given(tied_groups, st.integers(1, 20))
def test_expected_lies_between_the_worst_and_the_best(groups, k):
    ranks, cut = ranks_of(groups), torch.tensor([k])
    for metric in (
        lambda ties: average_precision(ranks, ties),
        lambda ties: average_precision(ranks, ties, cut=cut),
        lambda ties: hits_within(ranks, cut, ties),
        lambda ties: recall_at_k(ranks, k, ties),
    ):
        worst, expected, best = (metric(ties).item() for ties in ("pessimistic", "expected", "optimistic"))
        assert worst - 1e-12 <= expected <= best + 1e-12
        if not depends_on_ties(ranks).item():
            assert worst == pytest.approx(expected, abs=1e-12)
            assert best == pytest.approx(expected, abs=1e-12)


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
        place_in_tie=torch.arange(1, relevant + 1)[None],
    )
    found = average_precision(ranks).item() * (found_above + relevant)
    assert found == pytest.approx(float(total), rel=1e-8)  # a difference of two digammas


def test_a_query_without_a_match_is_nan_where_it_is_a_mean():
    block = torch.zeros(1, 2, dtype=torch.int64)
    ranks = RankBlock(torch.tensor([0]), torch.tensor([0]), block.bool(), block, block, block, block, block)
    empty = RankBlock(*(value[:, :0] if value.ndim == 2 else value for value in vars(ranks).values()))
    for nothing in (ranks, empty):
        for ties in TIES:
            assert math.isnan(average_precision(nothing, ties).item())
            assert math.isnan(recall_at_k(nothing, 1, ties).item())
            assert hits_within(nothing, torch.tensor([3]), ties).item() == 0.0
        assert not depends_on_ties(nothing).item()


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"ties='first' is unknown. Choose one of expected, optimistic, pessimistic"):
        check_ties("first")
