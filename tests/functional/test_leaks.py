"""Copies of test queries in training, and metrics without them: by all pairs, and by leaving out classes in NumPy."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import t

from fewshot_callbacks import InputError, Relevance, Shards, evaluate_retrieval, leakage, near_duplicates
from fewshot_callbacks.functional import Interval
from tests.messages import missing_facts, refused

METRICS = ("mAP", "recall@1", "macro_mAP", "macro_recall@1", "pair_f1")


def classes_of(labels, noise, seed):
    """Rows of the same classes, with noise of their own."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((labels.max() + 1, 12))
    return centres[labels] + noise * np.random.default_rng(seed).standard_normal((len(labels), 12))


def example(labels, copied, metrics=METRICS, **settings):
    """A test set with easy queries that training items are copies of, the training set, and the report."""
    labels = np.asarray(labels)
    test = classes_of(labels, 1.0, seed=1)
    test[copied] = classes_of(labels, 0.3, seed=2)[copied]
    train = classes_of(labels, 1.0, seed=3)
    train[: len(copied)] = 5 * test[copied]
    return test, train, evaluate_retrieval(test, labels, metrics=metrics, **settings)


def cosines(test, train):
    """Every cosine, the slow way."""
    return np.array([[a @ b / math.sqrt((a @ a) * (b @ b)) for b in train] for a in test])


def mean_of(values, labels, key):
    """The mean over queries, or over classes; NaN is left out."""
    if not key.startswith("macro_"):
        return np.nanmean(values)
    return np.mean([np.nanmean(values[labels == label]) for label in np.unique(labels[~np.isnan(values)])])


def leave_one_out(values, has_copy, labels, key):
    """The interval of the difference by leaving out one class at a time, as the t interval over classes is defined."""

    def difference(rows):
        others = rows & ~has_copy
        return mean_of(values[others], labels[others], key) - mean_of(values[rows], labels[rows], key)

    everything = np.ones(len(values), bool)
    value = difference(everything)
    classes, sizes = np.unique(labels, return_counts=True)
    moves = np.array([value - difference(labels != label) for label in classes])
    sizes = np.ones(len(classes)) if key.startswith("macro_") else sizes
    effective = sizes.sum() ** 2 / (sizes**2).sum()
    freedom = max(1.0, min(effective - 1, 2 * (moves**2).sum() ** 2 / (moves**4).sum()))
    reach = t.ppf(0.975, freedom) * math.sqrt((len(classes) - 1) / len(classes) * (moves**2).sum())
    return value, (value - reach, value + reach)


EQUAL_SHARES = (np.arange(240) % 24, np.arange(48))  # two copies in each class
UNEQUAL_SHARES = (np.repeat(np.arange(30), 3 + np.arange(30) % 6), np.arange(0, 160, 5)[:29])


@pytest.mark.parametrize("key", METRICS[:4])
@pytest.mark.parametrize(("case", "tolerance"), [(EQUAL_SHARES, 1e-9), (UNEQUAL_SHARES, 0.1)])
def test_values_and_intervals_are_those_of_the_definition(key, case, tolerance):
    labels, copied = case
    test, train, report = example(labels, copied)
    leaks = leakage(report, test, train)
    has_copy = cosines(test, train).max(axis=1) >= 0.98
    assert leaks.has_copy.tolist() == has_copy.tolist()
    assert set(copied) <= set(np.flatnonzero(has_copy))
    values = report.per_query[key.removeprefix("macro_")].numpy()
    value, ends = leave_one_out(values, has_copy, labels, key)
    found = leaks.differences[key]
    assert found.second == pytest.approx(report[key], rel=1e-12)
    assert found.first == pytest.approx(mean_of(values[~has_copy], labels[~has_copy], key), rel=1e-12)
    assert found.value == pytest.approx(value, rel=1e-9)
    # The difference is linearised: it is exact where each class has the same share of copies.
    assert found.interval == pytest.approx(ends, abs=tolerance * (ends[1] - ends[0]))
    assert found.is_beyond_chance or key == "macro_recall@1"


def test_metrics_without_a_value_for_each_query_are_left_out():
    test, train, report = example(*EQUAL_SHARES)
    assert list(leakage(report, test, train).differences) == list(METRICS[:4])
    of_pairs = evaluate_retrieval(test, EQUAL_SHARES[0], metrics="pair_f1")
    assert list(leakage(of_pairs, test, train).differences) == ["mAP"]


@pytest.mark.parametrize(
    ("similarity", "min_score"),
    [("cosine", 0.9), ("cosine", 1.0), ("dot", 16), ("euclidean", -math.sqrt(3)), ("euclidean", 0), ("hamming", -2)],
)
def test_copies_are_the_queries_of_near_duplicates(similarity, min_score):
    """Scores of whole numbers reach the threshold exactly."""
    generator = np.random.default_rng(4)
    test, train = generator.integers(-2, 3, (50, 10)) + 0.0, generator.integers(-2, 3, (40, 10)) + 0.0
    test[:9] = train[:9]
    test[3:6, 0] *= -1
    test[6:9, :3] += 1
    if similarity == "hamming":
        test, train = np.sign(test + 0.5), np.sign(train + 0.5)
    report = evaluate_retrieval(test, np.arange(len(test)) % 5, similarity=similarity, label_groups=None)
    pairs = near_duplicates(test, train, similarity=similarity, min_score=min_score)
    leaks = leakage(report, test, train, similarity=similarity, min_score=min_score)
    assert 0 < leaks.copies < len(test)
    assert set(leaks.query_indices[leaks.has_copy].tolist()) == set(pairs.first.tolist())
    if similarity == "hamming":  # as the report compares
        assert leakage(report, test, train, min_score=min_score).to_dict() == leaks.to_dict()


def test_more_copies_than_near_duplicates_lists_hide_no_query():
    test, _, report = example(*EQUAL_SHARES)
    train = np.concatenate([np.repeat(test[:1], 300, axis=0), test[1:2]])
    assert len(near_duplicates(test, train, most=200).first.unique()) == 1
    assert leakage(report, test, train).query_indices[leakage(report, test, train).has_copy].tolist() == [0, 1]


def test_the_most_similar_training_item_shows_labels_that_conflict():
    labels, copied = EQUAL_SHARES
    test, train, report = example(labels, copied)
    train_labels = labels.copy()
    train_labels[:3] += 1
    leaks = leakage(report, test, train)
    similarities = cosines(test, train)
    assert leaks.train_indices.tolist() == similarities.argmax(axis=1).tolist()
    assert leaks.scores.tolist() == pytest.approx(similarities.max(axis=1).tolist(), rel=1e-9)
    copies = leaks.by_score
    conflicts = train_labels[leaks.train_indices[copies]] != labels[leaks.query_indices[copies]]
    assert set(np.flatnonzero(copies)[conflicts]) == set(copied[:3])


# -------------------------------------------------------------------------------------------------------------- ids


def test_a_shared_id_is_a_copy_whatever_the_embedding():
    labels, copied = EQUAL_SHARES
    test, train, report = example(labels, copied)
    query_ids = [f"photo {item}" for item in range(240)]
    train_ids = [f"photo {item}" for item in range(200, 440)]
    leaks = leakage(report, test, train, query_ids=query_ids, train_ids=train_ids)
    shares_id = np.arange(240) >= 200
    by_score = cosines(test, train).max(axis=1) >= 0.98
    assert leaks.shares_id.tolist() == shares_id.tolist()
    assert leaks.by_score.tolist() == by_score.tolist()
    assert leaks.has_copy.tolist() == (shares_id | by_score).tolist()
    others = report.per_query["mAP"][~torch.from_numpy(shares_id | by_score)]
    assert leaks.differences["mAP"].first == pytest.approx(float(others.mean()), rel=1e-9)
    assert leaks.to_dict()["copies_by_id"] == 40
    assert missing_facts(leaks.in_words(), ("40 by id",)) == []


def test_ids_find_copies_where_no_score_does():
    labels = EQUAL_SHARES[0]
    test, _, report = example(labels, EQUAL_SHARES[1])
    leaks = leakage(report, test, -test, query_ids=range(240), train_ids=range(230, 470))
    assert (int(leaks.by_score.sum()), leaks.copies) == (0, 10)


def test_a_copy_with_the_id_of_its_query_is_found_by_its_score_too():
    test, _, report = example(*EQUAL_SHARES)
    leaks = leakage(report, test, test[:20], query_ids=range(240), train_ids=range(20))
    assert int((leaks.by_score & leaks.shares_id).sum()) == leaks.copies == 20


def test_ids_of_one_set_find_nothing():
    test, train, report = example(*EQUAL_SHARES)
    assert leakage(report, test, train, query_ids=range(240)).shares_id is None


@pytest.mark.parametrize("with_ids", [False, True])
def test_repeated_queries_count_once_as_in_the_report(with_ids):
    labels, copied = EQUAL_SHARES
    test, train, once = example(labels, copied)
    index = np.concatenate([np.arange(240), np.arange(50)])[np.random.default_rng(5).permutation(290)]
    report = evaluate_retrieval(test[index], labels[index], query_ids=index, metrics=METRICS)
    ids = {"query_ids": index, "train_ids": range(1000, 1240)} if with_ids else {}
    leaks = leakage(report, test[index], train, **ids)
    known = leakage(once, test, train)
    assert leaks.copies == known.copies
    assert leaks.differences == pytest.approx(known.differences) or leaks.to_dict()["metrics"] == {
        key: pytest.approx(value) for key, value in known.to_dict()["metrics"].items()
    }
    queries = index[leaks.query_indices[leaks.has_copy]]
    assert sorted(queries) == known.query_indices[known.has_copy].tolist()


# ---------------------------------------------------------------------------------------------------------- edges


def test_without_a_copy_nothing_changes():
    test, _, report = example(*EQUAL_SHARES)
    leaks = leakage(report, test, -test)
    assert leaks.copies == 0
    for key, difference in leaks.differences.items():
        assert (difference.first, difference.value, difference.interval) == (report[key], 0.0, Interval(0.0, 0.0))
    assert missing_facts(str(leaks), ("None", "240", "0.98")) == []


def test_where_every_query_has_a_copy_no_metric_is_left():
    test, _, report = example(*EQUAL_SHARES)
    leaks = leakage(report, test, test)
    assert leaks.copies == 240
    for key, difference in leaks.differences.items():
        assert difference.second == report[key]
        assert math.isnan(difference.first)
        assert math.isnan(difference.interval.low)
    assert leaks.to_dict()["metrics"]["mAP"]["without_copies"] is None
    assert missing_facts(str(leaks), ("100.0 %", "240 of 240", "mAP")) == []


def test_an_interval_needs_copies_and_other_queries_in_two_classes():
    labels = EQUAL_SHARES[0]
    test, _, report = example(labels, np.arange(48))
    for train in (test[labels == 3], test[labels != 3]):
        difference = leakage(report, test, train).differences["mAP"]
        assert not math.isnan(difference.value)
        assert math.isnan(difference.interval.low)
    in_two = leakage(report, test, test[[3, 4]]).differences["mAP"]
    assert not math.isnan(in_two.interval.low)
    assert missing_facts(str(leakage(report, test, test[labels == 3])), ("single class",)) == []


def test_queries_without_a_match_are_no_part_of_a_mean():
    labels = EQUAL_SHARES[0].copy()
    labels[:6] = np.arange(100, 106)
    test, train, report = example(EQUAL_SHARES[0], np.arange(48))
    report = evaluate_retrieval(test, labels, metrics="mAP")
    leaks = leakage(report, test, train)
    values = report.per_query["mAP"].numpy()
    has_copy = leaks.has_copy.numpy()
    assert np.isnan(values).sum() == 6
    has_value = ~np.isnan(values)
    value, ends = leave_one_out(values[has_value], has_copy[has_value], labels[has_value], "mAP")
    assert leaks.differences["mAP"].value == pytest.approx(value)
    assert leaks.differences["mAP"].interval == pytest.approx(ends, abs=0.1 * (ends[1] - ends[0]))


def test_drawn_queries_are_the_only_ones_that_count():
    labels, copied = EQUAL_SHARES
    test, train, report = example(labels, copied, metrics="mAP", max_queries=90)
    leaks = leakage(report, test, train)
    drawn = report.drawn.numpy()
    assert leaks.query_indices.tolist() == drawn.tolist()
    assert leaks.has_copy.tolist() == (cosines(test[drawn], train).max(axis=1) >= 0.98).tolist()
    expected = report.per_query["mAP"][~leaks.has_copy].mean()
    assert leaks.differences["mAP"].first == pytest.approx(float(expected))


def test_several_labels_and_judgements_have_clusters_of_their_own():
    labels, copied = EQUAL_SHARES
    test, train, _ = example(labels, copied)
    several = np.eye(24, dtype=int)[labels]
    several[::2, 0] = 1
    reports = [
        evaluate_retrieval(test, several, metrics="mAP"),
        evaluate_retrieval(test, relevance=Relevance.from_label_sets(several), metrics="mAP"),
    ]
    for report in reports:
        difference = leakage(report, test, train).differences["mAP"]
        values = report.per_query["mAP"]
        has_copy = torch.from_numpy(cosines(test, train).max(axis=1) >= 0.98)
        assert difference.first == pytest.approx(float(values[~has_copy].mean()))
        assert difference.interval.low < difference.value < difference.interval.high


def test_a_gallery_stays_as_it_is():
    labels, copied = EQUAL_SHARES
    test, train, _ = example(labels, copied)
    report = evaluate_retrieval(test, labels, train, labels, metrics="recall@1")
    difference = leakage(report, test, train).differences["recall@1"]
    has_copy = cosines(test, train).max(axis=1) >= 0.98
    assert difference.first == pytest.approx(float(report.per_query["recall@1"][~has_copy].mean()))


def test_a_saved_report_and_files_are_taken(tmp_path):
    test, train, report = example(*EQUAL_SHARES)
    report.save(tmp_path / "report.npz")
    for name, rows in (("test", test), ("train", train)):
        ids = np.arange(240) + (name == "train") * 220
        np.savez(tmp_path / f"{name}.npz", embeddings=rows, ids=ids, labels=ids % 24)
    # Labels of only one of the sets do not matter.
    files = [Shards(tmp_path / "test.npz", ids="ids", labels="labels"), Shards(tmp_path / "train.npz", ids="ids")]
    leaks = leakage(tmp_path / "report.npz", *files, memory_mb=0.01)
    known = leakage(report, test, train, query_ids=range(240), train_ids=range(220, 460))
    assert leaks.to_dict() == known.to_dict()
    assert leaks.to_dict()["copies_by_id"] == 20


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"queries": torch.eye(5, 4) + 1}, ("leakage", "4 queries", "5 queries", "query_ids")),
        ({"queries": torch.eye(3, 4)}, ("leakage", "4 queries", "3 queries")),
        ({"query_ids": [0, 0, 1, 2]}, ("leakage", "4 queries", "query_ids")),
        ({"train": None}, ("leakage", "train")),
        ({"train": torch.eye(3)}, ("leakage", "queries", 4, "train", 3)),
        ({"train": torch.full((2, 4), math.nan)}, ("leakage", 2, "train", "NaN", "index 0")),
        ({"train_ids": [1, 2]}, ("leakage", "4 train items", "2 train_ids")),
        ({"min_score": 1.5}, ("leakage", "cosine", "min_score=1.5")),
        ({"similarity": "euclidean"}, ("leakage", "euclidean", "min_score=0.98", -0.1)),
        ({"memory_mb": 0}, ("leakage", "memory_mb")),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, facts):
    report = evaluate_retrieval(torch.eye(4), [0, 0, 1, 1])
    with refused(InputError, *facts):
        leakage(report, **{"queries": torch.eye(4), "train": torch.eye(4), **arguments})


def test_drawn_queries_beyond_the_end_are_refused():
    test, train, report = example(*EQUAL_SHARES, metrics="mAP", max_queries=90)
    with refused(InputError, "leakage", "90 queries", "100 queries"):
        leakage(report, test[:100], train)
