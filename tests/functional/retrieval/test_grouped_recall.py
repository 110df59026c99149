"""Grouped Recall against loops over groups: drawn and given ones, its intervals, and what is refused."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval.compare import compare_reports
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.grouped_recall import grouped_recall, label_groups
from fewshot_callbacks.functional.statistics import mean_interval
from tests.cases import sampled_product
from tests.functional.brute_force import BruteForce, TooManyOrdersError


def by_loops(queries, labels, split, k, gallery=None, gallery_labels=None, unmatched="exclude", **kwargs):
    """Recall@K of each group of labels, or None where a group has no query with a match; or with misses."""
    values = []
    for group in split:
        mine = np.isin(labels, group)
        case = {"queries": queries[mine], "query_labels": labels[mine]} | kwargs
        if gallery is not None:
            theirs = np.isin(gallery_labels, group)
            case |= {"gallery": gallery[theirs], "gallery_labels": gallery_labels[theirs]}
        reference = BruteForce(**case)
        recall = reference.recall_at(k) if reference.matched else None
        if unmatched == "miss":  # a mean over all queries of the group, as in equation 5 of the paper
            recall = (recall or 0.0) * len(reference.matched) / mine.sum()
        values.append(recall)
    return values


def any_match(labels, split, gallery_labels=None):
    """Whether any query of the groups of a split has the label of a candidate."""
    candidates, least = (labels, 2) if gallery_labels is None else (gallery_labels, 1)
    return any((candidates == label).sum() >= least for label in labels[np.isin(labels, split)])


@st.composite
def grouped_cases(draw):
    """Small sets with ties, singletons, distractors and labels of any value, in both forms."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dim, classes, items = draw(st.integers(1, 4)), draw(st.integers(2, 9)), draw(st.integers(2, 18))
    grid = draw(st.booleans())
    names = rng.choice(np.array([0, 1, 2, -5, 7, 2**24, 2**24 + 1, 2**61, -(2**62)]), classes + 2, replace=True)

    def vectors(n):
        return (rng.integers(-1, 2, (n, dim)) if grid else rng.normal(size=(n, dim))).astype(np.float32)

    case = {"queries": vectors(items), "labels": names[rng.integers(0, classes, items)]}
    if draw(st.booleans()):
        count = draw(st.integers(1, 18))
        case |= {"gallery": vectors(count), "gallery_labels": names[rng.integers(0, classes + 2, count)]}
    case["similarity"] = draw(st.sampled_from(["cosine", "dot", "euclidean"]))
    case["unmatched"] = draw(st.sampled_from(["exclude", "miss"]))
    case["ties"] = draw(st.sampled_from(["expected", "optimistic", "pessimistic"]))
    return case, draw(st.integers(2, 4)), draw(st.integers(0, 5)), draw(st.integers(1, 3))


@settings(max_examples=56, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(grouped_cases())
def test_equals_loops_over_groups(drawn):
    case, group_size, seed, repeats = drawn
    distinct, ks = len(set(case["labels"].tolist())), (1, 2)[: group_size - 1]
    arguments = {key: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for key, value in case.items()}
    queries = arguments.pop("queries")

    def run():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Grouped recall over 1 group")
            return grouped_recall(queries, k=ks, label_groups=group_size, seed=seed, repeats=repeats, **arguments)

    if distinct < group_size:
        with pytest.raises(ValueError, match=f"{distinct} labels are too few for a group of {group_size}"):
            run()
        return
    splits = label_groups(torch.as_tensor(case["labels"]), group_size, seed, repeats)
    try:
        expected = {k: [by_loops(split=split.tolist(), k=k, **case) for split in splits] for k in ks}
    except TooManyOrdersError:
        reject()
    nothing = any(None in values for values in expected[1])
    if case["unmatched"] == "miss":
        known = {"gallery_labels": case["gallery_labels"]} if "gallery" in case else {}
        nothing = not all(any_match(case["labels"], split, **known) for split in splits)
    if nothing:
        with pytest.raises(ValueError, match=r"none of the \d+ queries of group \d+ .* has a match"):
            run()
        return
    result = run()
    groups = distinct // group_size
    assert (result.group_size, result.groups, result.repeats) == (group_size, groups, repeats)
    assert result.dropped_labels == distinct - groups * group_size
    for k in ks:
        values = np.array(expected[k])  # (repeats, groups)
        assert result.at[k] == pytest.approx(values.mean(), abs=1e-12)
        if groups < 2:
            assert all(math.isnan(end) for end in result.intervals[k])
        else:
            ends = np.mean([mean_interval(torch.from_numpy(split), parts=group_size) for split in values], axis=0)
            assert result.intervals[k] == pytest.approx(tuple(ends), abs=1e-9)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(grouped_cases(), st.data())
def test_given_groups_equal_loops_over_them(drawn, data):
    """Groups of any sizes, some labels in none, against the definition; and the same as settings of an evaluation."""
    case, *_ = drawn
    distinct = data.draw(st.permutations(sorted(set(case["labels"].tolist()))))
    groups = []
    while len(distinct) - sum(map(len, groups)) >= 2 and len(groups) < 3:
        first = sum(map(len, groups))
        groups.append(distinct[first : first + data.draw(st.integers(2, len(distinct) - first))])
    if not groups:
        reject()
    try:
        loops = by_loops(split=groups, k=1, **case)
    except TooManyOrdersError:
        reject()
    arrays = [case[key] for key in ("queries", "labels", "gallery", "gallery_labels") if key in case]
    sets, unmatched = [torch.as_tensor(part) for part in arrays], case["unmatched"]
    options = {"similarity": case["similarity"], "ties": case["ties"]}

    def grouped():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a single group
            return grouped_recall(*sets, label_groups=groups, unmatched=unmatched, **options)

    if None in loops or (unmatched == "miss" and not any_match(arrays[1], list(itertools.chain(*groups)), *arrays[3:])):
        with pytest.raises(ValueError, match="has a match"):
            grouped()
        return
    result = grouped()
    assert result.per_group[1].tolist() == [pytest.approx(loops, abs=1e-12)]
    assert result.at[1] == pytest.approx(sum(loops) / len(loops), abs=1e-12)
    sizes = {len(group) for group in groups}
    assert (result.group_size, result.groups, result.are_given) == (
        min(sizes) if len(sizes) == 1 else None,
        len(loops),
        True,
    )
    assert result.dropped_labels == len(distinct) - sum(map(len, groups))
    assert result.labels == (tuple(map(tuple, groups)),)
    if len(groups) > 1:
        assert result.intervals[1] == mean_interval(result.per_group[1][0])
        report = evaluate_retrieval(
            *sets, label_groups=groups, metrics=f"grouped_recall@1{'_miss' * (unmatched == 'miss')}", **options
        )
        assert report.grouped == result
        assert report.to_dict()["grouped"]["unmatched"] == unmatched


class TestGivenGroups:
    def items(self):
        labels = torch.arange(60) % 6
        return torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), labels

    def test_differences_are_of_groups_that_can_be_compared(self):
        given, other = (
            grouped_recall(*self.items(), label_groups=groups)
            for groups in ([[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3, 4]])
        )
        assert given.minus(given)[1].value == 0
        drawn, misses = (grouped_recall(*self.items(), label_groups=3, unmatched=u) for u in ("exclude", "miss"))
        for one, two in ((given, other), (other, other), (given, drawn)):
            with pytest.raises(ValueError, match="cannot be compared, nor groups that were given"):
                one.minus(two)
        with pytest.raises(ValueError, match=r"unmatched='miss' cannot be compared with unmatched='exclude'"):
            misses.minus(drawn)

    def test_an_evaluation_says_why_there_is_none(self, as_users_run_it):
        report = evaluate_retrieval(*self.items(), label_groups=[[0, 1], [2, 77]])
        assert report.grouped is None
        assert any("left out. evaluate_retrieval: 1 of the 4 labels in label_groups" in note for note in report.notes)
        for groups, message in (
            ([[0, 1, 2]], "label_groups holds one group"),
            ([[0, 1], [1, 2]], "label 1 comes more than once in label_groups"),
        ):
            with pytest.raises(ValueError, match=message):
                evaluate_retrieval(*self.items(), label_groups=groups)
        with pytest.raises(ValueError, match="must lie below 2, the labels of the smallest group"):
            evaluate_retrieval(
                *self.items(), label_groups=[[0, 1], [2, 3]], metrics=(*DEFAULT_METRICS, "grouped_recall@2")
            )

    def test_other_groups_are_not_compared_group_by_group(self):
        embeddings, labels = self.items()
        splits = [[0, 1, 2], [3, 4, 5]], [[0, 1, 3], [2, 4, 5]]
        first, second = (evaluate_retrieval(embeddings, labels, label_groups=groups) for groups in splits)
        assert math.isnan(compare_reports(first, second)["grouped_recall@1"].interval.low)
        assert compare_reports(first, first)["grouped_recall@1"].interval.low <= 0


def made(classes=40, per_class=6, dim=16, noise=1.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + noise * torch.randn(len(labels), dim, generator=generator), labels


class TestSplit:
    @settings(max_examples=35, deadline=None)
    @given(st.sets(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=30), st.randoms(use_true_random=False))
    def test_depends_on_the_set_of_labels_alone(self, names, random):
        once = sorted(names)
        often = once + [random.choice(once) for _ in range(20)]
        random.shuffle(often)
        expected = label_groups(torch.tensor(once), 2, seed=3)
        assert torch.equal(label_groups(torch.tensor(often), 2, seed=3), expected)

    def test_depends_on_the_seed_and_on_nothing_global(self):
        labels = torch.arange(100)
        torch.manual_seed(1)
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

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"group_size": 12}, r"11 labels are too few for a group of 12. Use group_size <= 11"),
            ({"group_size": 1}, r"group_size=1: .* needs at least 2 labels"),
            ({"repeats": 0}, r"repeats=0: at least one split is needed"),
        ],
    )
    def test_refusals(self, change, message):
        with pytest.raises(ValueError, match=message):
            label_groups(**({"labels": torch.arange(11), "group_size": 5} | change))


class TestValue:
    def test_one_group_of_all_labels_is_plain_recall(self):
        embeddings, labels = made()
        plain = evaluate_retrieval(embeddings, labels, metrics=("recall@1", "recall@5")).at("recall@{k}")
        with pytest.warns(UserWarning, match="Grouped recall over 1 group of 40 labels has no interval") as caught:
            result = grouped_recall(embeddings, labels, k=(1, 5), label_groups=40)
        assert len(caught) == 1
        assert result.at == pytest.approx(plain, abs=1e-12)
        assert (result.groups, result.dropped_labels) == (1, 0)
        assert all(math.isnan(end) for interval in result.intervals.values() for end in interval)

    def test_plain_recall_falls_with_more_classes_and_grouped_recall_does_not(self):
        # one embedding; its 160 classes whole, and as 2, 4 and 8 subsets of as many classes
        embeddings, labels = made(160, 6, 16, noise=1.3)
        plain, grouped = [], []
        for parts in (1, 2, 4, 8):
            subsets = [labels % parts == part for part in range(parts)]
            plain.append(np.mean([evaluate_retrieval(embeddings[s], labels[s])["recall@1"] for s in subsets]))
            grouped.append(np.mean([grouped_recall(embeddings[s], labels[s]).at[1] for s in subsets]))
        assert all(more > fewer + 0.04 for fewer, more in itertools.pairwise(plain))
        assert plain[3] > plain[0] + 0.2
        half = grouped_recall(embeddings, labels).intervals[1].half_width
        assert max(grouped) - min(grouped) < half < 0.06

    def test_confidence_widens_the_interval(self):
        embeddings, labels = made()
        widths = [
            grouped_recall(embeddings, labels, confidence=confidence).intervals[1].half_width
            for confidence in (0.5, 0.95, 0.999)
        ]
        assert widths[0] < widths[1] / 2 < widths[2] / 4

    def test_order_names_and_memory_change_nothing(self):
        embeddings, labels = made()
        expected = grouped_recall(embeddings, labels)
        order = torch.randperm(len(labels))
        for other in (
            grouped_recall(embeddings[order], labels[order]),
            grouped_recall(embeddings, labels * 3 - 2**40),  # the order of the labels stays
            grouped_recall(embeddings, labels, memory_mb=0.01),
            grouped_recall(embeddings.numpy(), labels.numpy()),
            grouped_recall(embeddings, labels.to(torch.uint8)),
        ):
            assert other.at == pytest.approx(expected.at, abs=1e-12)
            assert other.intervals[1] == pytest.approx(expected.intervals[1], abs=1e-12)


@pytest.mark.usefixtures("as_users_run_it")
class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"label_groups": 9}, r"8 labels are too few for a group of 9. Use group_size <= 8"),
            ({"unmatched": "zero"}, r"grouped_recall: there is no unmatched='zero'. Pass 'exclude' .* 'miss' to"),
            ({"k": 0}, r"grouped_recall: there is no metric 'grouped_recall@0'; did you mean 'grouped_recall@1'"),
            ({"k": ()}, r"grouped_recall: metrics are empty"),
            ({"k": (1, 4)}, r"grouped_recall: the ranks of Grouped Recall, \(1, 4\), must lie below label_groups=4"),
            ({"label_groups": 1}, r"grouped_recall: label_groups=1 must be a whole number of at least 2 labels"),
            ({"label_groups": None}, r"grouped_recall: label_groups=None requests nothing"),
            ({"label_groups": []}, r"groups must hold the labels of each group, such as label_groups=\[\[0, 1, 2\]"),
            (
                {"label_groups": "ab"},
                r"label_groups='ab' must be a whole number of at least 2 labels, or the labels of",
            ),
            ({"label_groups": [[0, 1], [2]]}, r"group 1 of label_groups holds 1 labels; Recall@K inside a group needs"),
            ({"label_groups": [[0, 1], [1, 2]]}, r"label 1 comes more than once in label_groups"),
            ({"label_groups": [[0, 1], [2, 77]]}, r"1 of the 4 labels in .* are those of no query, the first is 77"),
            ({"label_groups": [[0.5, 1.5], [2, 3]]}, r"needs integer label_groups"),
            ({"label_groups": [[0, 1], [2, 3]], "repeats": 2}, r"repeats=2 is for random groups"),
            (
                {"label_groups": [[0, 1], [2, 3]], "k": 2},
                r", \(2,\), must lie below 2, the labels of the smallest group",
            ),
            ({"seed": None}, r"grouped_recall: seed=None must be a whole number"),
            ({"metrics": ("mAP", "recall@1")}, r"grouped_recall: there is no setting 'metrics'"),
            ({"label_group": 3}, r"there is no setting 'label_group'. Did you mean 'label_groups'\?"),
            ({"group_size": 3}, r"grouped_recall: group_size is no setting. Write label_groups=10"),
            ({"memory_mb": 0}, r"grouped_recall: memory_mb=0 must be positive"),
            ({"labels": torch.arange(7)}, r"grouped_recall: 40 embeddings, but 7 labels"),
        ],
    )
    def test_says_what_is_wrong(self, change, message):
        embeddings, labels = made(8, 5, 4)
        with pytest.raises(ValueError, match=message):
            grouped_recall(**({"embeddings": embeddings, "labels": labels, "label_groups": 4} | change))

    def test_a_group_without_any_gallery_item(self):
        queries, labels = torch.randn(20, 3), torch.arange(20)
        gallery, gallery_labels = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
        with pytest.raises(
            ValueError, match=r"has a match. Use a larger label_groups than 5 \(or larger groups\), or drop the labels"
        ):
            grouped_recall(queries, labels, gallery, gallery_labels, label_groups=5)
        report = evaluate_retrieval(queries, labels, gallery, gallery_labels, label_groups=5)
        assert report.grouped is None
        assert any("has a match" in note for note in report.notes)


def test_ids_and_groups_exclude_in_the_groups_too():
    labels = torch.arange(60) % 20
    embeddings = torch.randn(60, 8)
    ids = torch.arange(60)
    alone = grouped_recall(embeddings, labels, label_groups=5)
    copies = grouped_recall(
        embeddings, labels, embeddings.clone(), labels, label_groups=5, query_ids=ids, gallery_ids=ids
    )
    assert copies.at == alone.at
    report = evaluate_retrieval(
        embeddings, labels, embeddings.clone(), labels, label_groups=5, query_ids=ids, gallery_ids=ids
    )
    assert report.at("grouped_recall@{k}") == alone.at
    pairs = grouped_recall(embeddings, labels, label_groups=5, query_groups=ids % 40)  # one of two matches is excluded
    assert pairs.at != alone.at


@pytest.mark.parametrize(
    ("form", "similarity"),
    sampled_product(
        ["one", "groups", "two", "distractors", "ids", "repeated", "sampled"], ["cosine", "dot", "euclidean"], count=9
    ),
)
def test_an_evaluation_finds_the_same(form, similarity):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(230) % 23  # three labels are left over
    scale = 10 ** (2 * torch.rand(230, 1, generator=generator))
    embeddings = (torch.randn(23, 6, generator=generator)[labels] + torch.randn(230, 6, generator=generator)) * scale
    case, extra = {"embeddings": embeddings, "labels": labels}, {}
    if form == "repeated":
        case = {"embeddings": embeddings[labels * 3 % 50], "labels": labels}
    elif form == "groups":
        case["query_groups"] = torch.arange(230) // 5
    elif form == "sampled":
        extra["max_queries"] = 50
    elif form != "one":
        case = {"embeddings": embeddings[::2], "labels": labels[::2]}
        case |= {"gallery": embeddings[1::2], "gallery_labels": labels[1::2]}
    if form == "ids":
        case |= {"query_ids": torch.arange(115) % 60, "gallery_ids": torch.arange(115) % 70}
    elif form == "distractors":
        case["gallery_labels"] = torch.where(torch.arange(115) % 6 == 0, 99, labels[1::2])
    grouped = grouped_recall(**case, similarity=similarity, label_groups=5, k=(1, 3), seed=4)
    for plain in (False, True):
        with engine_options(plain=plain):
            options = {"similarity": similarity, "label_groups": 5, "seed": 4}
            report = evaluate_retrieval(**case, **options, **extra, metrics=(*DEFAULT_METRICS, "grouped_recall@3"))
        assert report.grouped == grouped
        assert grouped.dropped_labels == 3
