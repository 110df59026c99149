"""Grouped Recall against loops over groups: drawn and given ones, its intervals, and what is refused."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval.compare import compare_reports
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.grouped_recall import GroupWithoutMatchError, grouped_recall, label_groups
from fewshot_callbacks.functional.statistics import mean_interval
from tests import cases
from tests.cases import examples
from tests.functional.brute_force import BruteForce, recall_at
from tests.functional.retrieval.cases import retrieval_cases
from tests.messages import missing_facts, refused, warned


def clusters(classes=40, per_class=6, noise=1.5):
    return cases.clustered_items(classes * per_class, classes, 16, noise)


def recalls_by_loops(case, groups, k, unmatched):
    """Recall@K of each group of labels, NaN where no query has a match; or with misses, NaN where none of any group has."""
    values, shares = [], []
    for group in groups:
        inside = dict(case)
        for side, labels in (("quer", "query_labels"), ("gallery", "gallery_labels")):
            if labels in case:
                mine = np.isin(case[labels], group)
                inside |= {name: rows[mine] for name, rows in case.items() if name.startswith(side)}
        reference = BruteForce(**inside)
        values.append(reference.mean(lambda order: recall_at(order, k)) if reference.matched else math.nan)
        shares.append(len(reference.matched) / len(reference.scores))
    if unmatched == "miss" and any(shares):  # a mean over all queries of the group, as in equation 5 of the paper
        values = [share and value * share for value, share in zip(values, shares, strict=True)]
    return values


@pytest.mark.filterwarnings("ignore:grouped_recall. .*(ids? |bit for bit)")
@settings(
    max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(retrieval_cases(("cosine", "dot", "euclidean")), st.sampled_from(["exclude", "miss"]), st.data())
def test_equals_loops_over_groups(case, unmatched, data):
    """Groups of any sizes, some labels in none, against the definition; and the same as settings of an evaluation."""
    distinct, groups = data.draw(st.permutations(sorted(set(case["query_labels"].tolist())))), []
    while len(distinct) - sum(map(len, groups)) >= 2 and len(groups) < 3:
        first = sum(map(len, groups))
        groups.append(distinct[first : first + data.draw(st.integers(2, len(distinct) - first))])
    if not groups:
        reject()
    k = data.draw(st.integers(1, min(map(len, groups)) - 1))
    loops = recalls_by_loops(case, groups, k, unmatched)
    options = {name: torch.as_tensor(part) if isinstance(part, np.ndarray) else part for name, part in case.items()}
    sets, options = (options.pop("queries"), options.pop("query_labels")), options | {"label_groups": groups}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*\b1 group\b", category=UserWarning)
        if np.isnan(loops).any():
            with refused(GroupWithoutMatchError, "queries", "labels", "match", "label_groups"):
                grouped_recall(*sets, k=k, unmatched=unmatched, **options)
            return
        result = grouped_recall(*sets, k=k, unmatched=unmatched, **options)
    assert result.per_group[k].tolist() == [pytest.approx(loops, abs=1e-12)]
    assert result.at[k] == pytest.approx(sum(loops) / len(loops), abs=1e-12)
    sizes = {len(group) for group in groups}
    size = min(sizes) if len(sizes) == 1 else None
    assert (result.group_size, result.groups, result.are_given) == (size, len(loops), True)
    assert result.dropped_labels == len(distinct) - sum(map(len, groups))
    assert result.labels == (tuple(map(tuple, groups)),)
    if len(groups) > 1:
        assert result.intervals[k] == mean_interval(result.per_group[k][0])
        report = evaluate_retrieval(*sets, **options, metrics=f"grouped_recall@{k}{'_miss' * (unmatched == 'miss')}")
        assert report.grouped == result
        assert report.to_dict()["grouped"]["unmatched"] == unmatched


@pytest.mark.parametrize(("size", "noise"), [(2, 1.5), (3, 0.0), (7, 1.5)])  # also without a single miss
def test_drawn_groups_are_those_of_label_groups(size, noise):
    embeddings, labels = clusters(20, 3, noise)
    splits = label_groups(labels, size, seed=4, repeats=3).tolist()
    given = [grouped_recall(embeddings, labels, k=(1, size - 1), label_groups=split) for split in splits]
    drawn = grouped_recall(embeddings, labels, k=(1, size - 1), label_groups=size, seed=4, repeats=3)
    assert (drawn.group_size, drawn.groups, drawn.repeats, drawn.are_given) == (size, 20 // size, 3, False)
    assert (drawn.dropped_labels, drawn.labels) == (20 % size, tuple(split.labels[0] for split in given))
    for k, value in drawn.at.items():
        values = torch.cat([split.per_group[k] for split in given])
        assert drawn.per_group[k].tolist() == values.tolist()
        assert value == pytest.approx(values.mean().item(), abs=1e-12)
        ends = np.mean([mean_interval(split, parts=size) for split in values], axis=0)
        assert drawn.intervals[k] == pytest.approx(tuple(ends), abs=1e-9)


class TestGivenGroups:
    ITEMS = (torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 6)

    def test_differences_are_of_groups_that_can_be_compared(self):
        groups = [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3, 4]]
        given, other = (grouped_recall(*self.ITEMS, label_groups=some) for some in groups)
        drawn, misses = (grouped_recall(*self.ITEMS, label_groups=3, unmatched=u) for u in ("exclude", "miss"))
        assert given.minus(given)[1].value == 0
        for one, two in ((given, other), (other, other), (given, drawn)):
            with refused(ValueError, "GroupedRecall.minus", "groups", "size", "random"):
                one.minus(two)
        with refused(ValueError, "GroupedRecall.minus", "unmatched='miss'", "unmatched='exclude'"):
            misses.minus(drawn)
        for other, facts in (({"label_groups": 2}, (2,)), ({"label_groups": 3, "confidence": 0.9}, (0.9,))):
            with refused(ValueError, "GroupedRecall.minus", "3 labels", "confidence 0.95", *facts):
                drawn.minus(grouped_recall(*self.ITEMS, **other))

    def test_an_evaluation_says_why_there_is_none(self):
        report = evaluate_retrieval(*self.ITEMS, label_groups=[[0, 1], [2, 77]])
        assert report.grouped is None
        facts = ("evaluate_retrieval", 1, "4 labels", "label_groups", 77)
        assert not all(missing_facts(note, facts) for note in report.notes), report.notes

    def test_other_groups_are_not_compared_group_by_group(self):
        splits = [[0, 1, 2], [3, 4, 5]], [[0, 1, 3], [2, 4, 5]]
        first, second = (evaluate_retrieval(*self.ITEMS, label_groups=groups) for groups in splits)
        assert math.isnan(compare_reports(first, second)["grouped_recall@1"].interval.low)
        assert compare_reports(first, first)["grouped_recall@1"].interval.low <= 0


class TestSplit:
    def test_depends_on_the_set_of_labels_alone(self):
        once = torch.tensor([-(2**63), -5, 0, 7, 2**62, 2**63 - 1, 8, 9, 10])
        expected = label_groups(once, 2, seed=3)
        for _ in range(5):
            often = torch.cat([once, once[torch.randint(0, 9, (20,))]])[torch.randperm(29)]
            assert torch.equal(label_groups(often, 2, seed=3), expected)

    def test_depends_on_the_seed_and_on_nothing_global(self):
        labels = torch.arange(100)
        first = label_groups(labels, 10, seed=5)
        torch.manual_seed(2)
        state = torch.get_rng_state()
        assert torch.equal(label_groups(labels, 10, seed=5), first)
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(label_groups(labels, 10, seed=6), first)
        three = label_groups(labels, 10, seed=5, repeats=3)
        assert torch.equal(three[:1], first)
        assert len({str(split) for split in three.tolist()}) == 3

    def test_every_label_has_the_same_chance(self):
        drawn = label_groups(torch.arange(11), 10, seed=0, repeats=1100)  # leaves one label out each time
        left_out = 1100 - torch.bincount(drawn.flatten(), minlength=11)
        assert bool((left_out > 60).all())  # 100 on average, standard deviation 9.5
        assert bool((left_out < 140).all())

    def test_one_label_in_a_group_and_no_split_are_refused(self):
        with refused(ValueError, "group_size=1", "2 labels"):
            label_groups(torch.arange(11), 1)
        with refused(ValueError, "repeats=0", "one"):
            label_groups(torch.arange(11), 5, repeats=0)


class TestValue:
    def test_one_group_of_all_labels_is_plain_recall_and_has_no_interval(self):
        plain = evaluate_retrieval(*clusters(), metrics=("recall@1", "recall@5")).at("recall@{k}")
        with warned(UserWarning, "1 group", "40 labels", "interval") as caught:
            result = grouped_recall(*clusters(), k=(1, 5), label_groups=40)
        assert len(caught) == 1
        assert result.at == pytest.approx(plain, abs=1e-12)
        assert all(math.isnan(end) for interval in result.intervals.values() for end in interval)

    def test_plain_recall_falls_with_more_classes_and_grouped_recall_does_not(self):
        # one embedding; its 160 classes whole, and as 2, 4 and 8 subsets of as many classes
        embeddings, labels = clusters(160, noise=1.3)
        plain, grouped = [], []
        for parts in (1, 2, 4, 8):
            subsets = [labels % parts == part for part in range(parts)]
            reports = [evaluate_retrieval(embeddings[s], labels[s]) for s in subsets]
            plain.append(np.mean([report["recall@1"] for report in reports]))
            grouped.append(np.mean([report["grouped_recall@1"] for report in reports]))
        assert all(more > fewer + 0.04 for fewer, more in itertools.pairwise(plain))
        half = grouped_recall(embeddings, labels).intervals[1].half_width
        assert max(grouped) - min(grouped) < half < 0.06

    def test_confidence_widens_the_interval(self):
        widths = [grouped_recall(*clusters(), confidence=level).intervals[1].half_width for level in (0.5, 0.95, 0.999)]
        assert widths[0] < widths[1] / 2 < widths[2] / 4


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"label_groups": 9}, ("8 labels", 9, "group_size <= 8")),
        ({"unmatched": "zero"}, ("grouped_recall", "unmatched='zero'", "'exclude'", "'miss'")),
        ({"k": (1, 4)}, ("grouped_recall", "ranks", "(1, 4)", "label_groups=4")),
        ({"label_groups": None}, ("grouped_recall", "label_groups=None", 10)),
        ({"label_groups": []}, ("grouped_recall", "label_groups", "label_groups=[[0, 1, 2], [3, 4, 5]]")),
        ({"label_groups": torch.arange(4)}, ("grouped_recall", "tensor(0)", "[[0, 1, 2], [3, 4, 5]]")),
        ({"label_groups": ["ab", "cd"]}, ("grouped_recall", "'ab'", "[[0, 1, 2], [3, 4, 5]]")),
        ({"label_groups": [[0, 1], [2]]}, ("grouped_recall", "group 1", "label_groups", "1 label", 2)),
        ({"label_groups": [[0, 1], [1, 2]]}, ("grouped_recall", "label 1", "once", "label_groups")),
        ({"label_groups": [[0, 1], [2, 77]]}, ("grouped_recall", 1, "4 labels", "label_groups", 77)),
        ({"label_groups": [[0.5, 1.5], [2, 3]]}, ("grouped_recall", "integer", "label_groups", "torch.float32")),
        ({"label_groups": [[0, 1], [2, 3]], "repeats": 2}, ("grouped_recall", "repeats=2", "random", "repeats")),
        ({"label_groups": [[0, 1], [2, 3]], "k": 2}, ("grouped_recall", "ranks", "(2,)", "labels", "smallest")),
        ({"label_group": 3}, ("grouped_recall", "'label_group'", "'label_groups'")),
        ({"query_labels": torch.arange(7)}, ("grouped_recall", "40 queries", "7 query_labels")),
    ],
)
def test_wrong_groups_ranks_and_labels_are_refused(change, facts, as_users_run_it):
    embeddings, labels = clusters(8, 5)
    with refused(ValueError, *facts):
        grouped_recall(**({"queries": embeddings, "query_labels": labels, "label_groups": 4} | change))


def test_no_message_names_a_private_class(as_users_run_it):
    with refused(ValueError, "grouped_recall needs", "label_groups", "torch.float32") as caught:
        grouped_recall(*clusters(8, 5), label_groups=[[0.5, 1.5], [2, 3]])
    assert "Settings" not in str(caught.value)


def test_a_group_without_any_gallery_item_is_refused_and_noted():
    sets = torch.randn(20, 3), torch.arange(20), torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    facts = ("5 queries", "labels", "match", "label_groups", 5)
    with refused(GroupWithoutMatchError, *facts):
        grouped_recall(*sets, label_groups=5)
    report = evaluate_retrieval(*sets, label_groups=5)
    assert report.grouped is None
    assert not all(missing_facts(note, facts) for note in report.notes), report.notes


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_an_evaluation_and_one_of_a_sample_find_the_same_in_any_budget(similarity):
    embeddings, labels = clusters(23, 10)  # three labels are left over
    data = embeddings * 10 ** (2 * torch.rand(230, 1)), labels
    options = {"similarity": similarity, "label_groups": 5, "seed": 4}
    grouped = grouped_recall(*data, **options, k=(1, 3))
    assert grouped.dropped_labels == 3
    assert grouped_recall(*data, **options, k=(1, 3), memory_mb=0.01) == grouped  # a few groups at a time
    for as_on_device, drawn in ((False, None), (False, 50), (True, None)):
        with engine_options(as_on_device=as_on_device):
            asked = ("mAP", "grouped_recall@1", "grouped_recall@3")
            assert evaluate_retrieval(*data, **options, metrics=asked, max_queries=drawn).grouped == grouped
