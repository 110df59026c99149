"""`linear_probe` agrees with fits without each item or group, and with scikit-learn's RidgeClassifierCV and RidgeCV."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import RidgeClassifierCV, RidgeCV

from fewshot_callbacks import linear_probe
from fewshot_callbacks.functional import clustered_mean_interval
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._repeated import is_on_copies
from tests.functional.linear_probe.refitted import clusters, left_out_predictions, mean_eigenvalue, signs
from tests.messages import missing_facts, refused

ALPHAS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
# Items, dimensions, classes, offset of the embeddings: also fewer items than dimensions, as many, one more, and more classes
# than dimensions.
SIZES = [
    (300, 20, 5, 0.0),
    (300, 20, 5, 100.0),
    (300, 20, 2, 0.0),
    (60, 100, 5, 0.0),
    (100, 100, 3, 0.0),
    (101, 100, 3, 0.0),
    (20, 300, 10, 1.0),
    (600, 20, 50, 3.0),
]


def divided(items, dim, classes, offset, queries=200, dtype=torch.float64):
    """Queries, their labels, gallery, its labels; and strengths that are the `ALPHAS` of this gallery."""
    rows, labels = clusters(items + queries, dim, classes, offset)
    rows = rows.to(dtype)
    strengths = [alpha / mean_eigenvalue(rows[:items].double()) for alpha in ALPHAS]
    return rows[items:], labels[items:], rows[:items], labels[:items], strengths


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_classifier_is_that_of_scikit_learn(size, dtype):
    queries, query_labels, gallery, gallery_labels, strengths = divided(*size, dtype=dtype)
    theirs = RidgeClassifierCV(alphas=ALPHAS, store_cv_results=True)
    theirs.fit(gallery.double().numpy(), gallery_labels.numpy())
    errors = theirs.cv_results_.reshape(-1, len(ALPHAS)).mean(axis=0)
    found = linear_probe(queries, query_labels, gallery, gallery_labels, strengths=strengths)
    assert list(found.errors.values()) == pytest.approx(errors, rel=1e-8)
    assert found.alpha == pytest.approx(theirs.alpha_, rel=1e-9)
    assert found["probe"] == theirs.score(queries.double().numpy(), query_labels.numpy())
    assert 1 / size[2] < found["probe"] <= 1


@pytest.mark.parametrize(("items", "dim"), [(300, 30), (40, 90)])
def test_a_regression_is_that_of_scikit_learn(items, dim):
    rows, _ = clusters(items + 100, dim, 4, offset=5)
    generator = torch.Generator().manual_seed(1)
    coefficients = torch.randn(dim, 3, generator=generator, dtype=torch.float64)
    targets = rows @ coefficients + 9 * torch.randn(items + 100, 3, generator=generator, dtype=torch.float64) + 7
    gallery, queries = (rows[:items], targets[:items]), (rows[items:], targets[items:])
    theirs = RidgeCV(alphas=ALPHAS, store_cv_results=True).fit(*(each.numpy() for each in gallery))
    errors = theirs.cv_results_.reshape(-1, len(ALPHAS)).mean(axis=0)
    strengths = [alpha / mean_eigenvalue(gallery[0]) for alpha in ALPHAS]
    found = linear_probe(*queries, *gallery, strengths=strengths)
    assert list(found.errors.values()) == pytest.approx(errors, rel=1e-8)
    assert found.alpha == pytest.approx(theirs.alpha_, rel=1e-9)
    assert found["probe_r2"] == pytest.approx(theirs.score(*(each.numpy() for each in queries)), abs=1e-9)
    predictions = theirs.predict(queries[0].numpy())
    expected = [spearmanr(queries[1][:, n], predictions[:, n])[0] for n in range(3)]
    assert found.per_target["probe_spearman"] == pytest.approx(expected, abs=1e-9)
    assert found["probe_spearman"] == pytest.approx(np.mean(expected), abs=1e-9)
    single = linear_probe(queries[0], queries[1][:, 1], gallery[0], gallery[1][:, 1], strengths=found.strength)
    assert single["probe_r2"] == pytest.approx(found.per_target["probe_r2"][1], abs=1e-9)


# Groups: single items, small ones of unequal size, and ones with more items than dimensions.
GROUPS = {
    "items": torch.arange(60),
    "small": torch.arange(60) ** 2 % 23,
    "large": torch.arange(60) // 25,
    "of all sizes": (torch.arange(60) / 1.5).sqrt().long() ** 2,
}


@pytest.mark.parametrize("dim", [10, 25, 80])
@pytest.mark.parametrize("groups", GROUPS)
def test_what_is_left_out_is_predicted_as_by_a_fit_without_it(groups, dim):
    gallery, labels = clusters(60, dim, 4, noise=1.0 + 0.2 * dim**0.5)
    left_out = GROUPS[groups]
    strengths = (1e-3, 0.1, 10.0)
    found = linear_probe(gallery, labels, gallery, labels, gallery_groups=left_out, strengths=strengths)
    unit = mean_eigenvalue(gallery)
    targets = signs(labels, 4)
    predictions = {s: left_out_predictions(gallery, targets, left_out, s * unit) for s in strengths}
    errors = {s: np.square(predictions[s] - targets).mean() for s in strengths}
    assert found.errors == pytest.approx(errors, rel=1e-8)
    assert found.strength == min(errors, key=errors.get)
    hits = predictions[found.strength].argmax(axis=1) == labels.numpy()
    assert found["probe_leave_group_out"] == pytest.approx(hits.mean(), abs=1e-12)
    expected = clustered_mean_interval(torch.tensor(hits).double(), left_out)
    assert found.intervals["probe_leave_group_out"] == pytest.approx(expected, abs=1e-9)
    of_one = left_out_predictions(gallery, targets, np.arange(60), found.strength * unit)
    assert found["probe_leave_one_out"] == pytest.approx((of_one.argmax(axis=1) == labels.numpy()).mean(), abs=1e-12)


@pytest.mark.parametrize("dim", [10, 80])
@pytest.mark.parametrize("groups", GROUPS)
def test_targets_of_what_is_left_out_are_predicted_as_by_a_fit_without_it(groups, dim):
    gallery, _ = clusters(60, dim, 4, offset=2)
    generator = torch.Generator().manual_seed(1)
    targets = gallery[:, :2] + 3 * torch.randn(60, 2, generator=generator, dtype=torch.float64) + 40
    found = linear_probe(gallery, targets, gallery, targets, gallery_groups=GROUPS[groups], strengths=0.1)
    unit = mean_eigenvalue(gallery)
    for key, left_out in (("group", GROUPS[groups]), ("one", torch.arange(60))):
        predictions = left_out_predictions(gallery, targets, left_out, 0.1 * unit)
        squares = np.square(predictions - targets.numpy())
        r2 = 1 - squares.sum(axis=0) / np.square(targets.numpy() - targets.numpy().mean(axis=0)).sum(axis=0)
        assert found.per_target[f"probe_r2_leave_{key}_out"] == pytest.approx(r2, abs=1e-9)
        assert found[f"probe_r2_leave_{key}_out"] == pytest.approx(r2.mean(), abs=1e-9)
        if key == "group":
            assert found.errors[0.1] == pytest.approx(squares.mean(), rel=1e-9)


@pytest.mark.parametrize("strength", [1e-6, 1e-3])
@pytest.mark.parametrize(("items", "dim", "classes"), [(60, 100, 5), (101, 100, 3), (12, 40, 12), (20, 300, 20)])
def test_weak_penalties_of_few_items_lose_no_digits(items, dim, classes, strength):
    """Leave-one-out errors from the inverse of the kernel matrix, by another formula for as many items as dimensions."""
    gallery, labels = clusters(items, dim, classes, offset=1)
    found = linear_probe(gallery, labels, gallery, labels, strengths=strength)
    rows = gallery.numpy() - gallery.numpy().mean(axis=0)
    kernel = rows @ rows.T + strength * mean_eigenvalue(gallery) * np.eye(items)
    # With an intercept, the inverse without the constant vector: Cawley, "Leave-one-out cross-validation", 2006.
    inverse = np.linalg.inv(kernel)
    ones = inverse.sum(axis=1)
    inverse -= np.outer(ones, ones) / ones.sum()
    errors = inverse @ signs(labels, classes) / np.diag(inverse)[:, None]
    assert found.errors[strength] == pytest.approx(np.square(errors).mean(), rel=1e-8)


def test_groups_of_near_copies_are_not_hits():
    """Videos of ten frames each: a classifier that knows the other frames knows the video, and not the class."""
    generator = torch.Generator().manual_seed(1)
    centres = 0.6 * torch.randn(3, 20, generator=generator)
    video = torch.arange(600) // 10
    labels = video % 3
    videos = centres[labels[::10]] + torch.randn(60, 20, generator=generator)
    frames = videos[video] + 0.05 * torch.randn(600, 20, generator=generator)
    new_labels = torch.arange(600) % 3
    new = centres[new_labels] + torch.randn(600, 20, generator=generator)
    alone = linear_probe(new, new_labels, frames, labels)
    found = linear_probe(new, new_labels, frames, labels, gallery_groups=video)
    assert alone["probe_leave_one_out"] > 0.94
    assert abs(found["probe_leave_group_out"] - found["probe"]) < 0.06
    assert found["probe"] < 0.9
    assert found.strength > alone.strength
    assert found["probe"] > alone["probe"]


# ------------------------------------------------------------------------------------------------- what does not matter


def close(found, expected, tolerance=1e-9):
    assert found.values == pytest.approx(expected.values, rel=tolerance, abs=tolerance, nan_ok=True)
    assert found.strength == expected.strength
    assert found.errors == pytest.approx(expected.errors, rel=1e-7)
    for key, interval in expected.intervals.items():
        assert found.intervals[key] == pytest.approx(interval, abs=1e-7, nan_ok=True)
    assert found.notes == expected.notes


CASES = {
    "classes": lambda rows: torch.arange(len(rows)) % 7,
    "more classes than dimensions": lambda rows: torch.arange(len(rows)) % 30,
    "targets": lambda rows: rows[:, :2] * 3 + rows.flip(1)[:, :2].square(),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [False, True])
def test_scale_rotation_offset_and_order_do_not_matter(case, groups):
    rows, _ = clusters(260, 12, 7)
    labels = CASES[case](rows)
    options = {"gallery_groups": torch.arange(200) % 41, "query_groups": torch.arange(60) % 9} if groups else {}

    def probe(embeddings, queries=slice(200, None), gallery=slice(200), **options):
        return linear_probe(embeddings[queries], labels[queries], embeddings[gallery], labels[gallery], **options)

    expected = probe(rows, **options)
    scaled = probe(rows * 4, **options)
    assert scaled == probe(rows * 2, **options).__class__(
        **{**vars(expected), "alpha": expected.alpha * 16}
    )  # a power of two changes no bit
    for factor in (1e-3, 3e150, 1e-200):
        close(probe(rows * factor, **options), expected)
    rotation = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    close(probe(rows @ rotation + 5, **options), expected)
    close(probe(torch.cat([rows, torch.full((260, 3), 0.1)], dim=1), **options), expected)
    gallery, queries = torch.randperm(200), 200 + torch.randperm(60)
    moved = {}
    if groups:
        moved = {"gallery_groups": options["gallery_groups"][gallery]}
        moved["query_groups"] = options["query_groups"][queries - 200]
    shuffled = probe(rows, queries, gallery, **moved)
    close(shuffled, expected)
    for key, values in expected.per_query.items():
        assert torch.equal(shuffled.per_query[key], values[queries - 200])


def test_names_of_classes_do_not_matter():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0)
    expected = linear_probe(queries, query_labels, gallery, gallery_labels)
    others = [
        (query_labels * 1000 - 2**40, gallery_labels * 1000 - 2**40),
        (
            [f"c{9 - n}" for n in query_labels.tolist()],
            np.array([f"c{9 - n}" for n in gallery_labels.tolist()], object),
        ),
        (np.array([f"{n}" for n in query_labels.tolist()], object), [f"{n}" for n in gallery_labels.tolist()]),
        (query_labels.numpy().astype(np.uint8), gallery_labels[:, None].tolist()),
        (as_labels(query_labels, "a", "b"), as_labels(gallery_labels, "a", "b")),
    ]
    for first, second in others:
        found = linear_probe(queries.tolist(), first, gallery.numpy(), second)
        close(found, expected)
        assert found.classes == 6


@pytest.mark.parametrize("form", [torch.Tensor.tolist, torch.Tensor.numpy, lambda t: t.numpy().astype(object)])
def test_targets_of_any_library_are_targets(form):
    rows, _ = clusters(90, 5, 3)
    targets = rows[:, 0] + rows[:, 1].square()
    expected = linear_probe(rows[:30], targets[:30], rows[30:], targets[30:])
    assert linear_probe(rows[:30], form(targets[:30]), rows[30:], form(targets[30:, None])) == expected
    assert expected.classes is None
    assert expected.intervals == {}
    assert expected.per_query == {}


def test_items_that_come_twice_are_left_out_together_by_their_ids():
    gallery, labels = clusters(80, 10, 4)
    expected = linear_probe(gallery, labels, gallery.repeat(2, 1), labels.repeat(2), gallery_groups=[*range(80)] * 2)
    predictions = left_out_predictions(
        gallery.repeat(2, 1), signs(labels.repeat(2), 4), [*range(80)] * 2, expected.alpha
    )
    hits = predictions.argmax(axis=1) == labels.repeat(2).numpy()
    assert expected["probe_leave_group_out"] == pytest.approx(hits.mean())
    assert expected["probe_leave_group_out"] < expected["probe_leave_one_out"]


# --------------------------------------------------------------------------------------------- values that are undefined


def test_queries_of_other_classes_are_left_out_and_counted():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0, queries=30)
    expected = linear_probe(queries[2:], query_labels[2:], gallery, gallery_labels)
    found = linear_probe(queries, [77, 78, *query_labels[2:].tolist()], gallery, gallery_labels)
    assert (found.queries, found.queries_without_match, found.gallery) == (28, 2, 120)
    assert found.values == expected.values
    assert found.intervals == expected.intervals
    assert found.per_query["probe"][:2].isnan().all()
    assert not found.per_query["probe"][2:].isnan().any()
    [note] = found.notes
    assert not missing_facts(note, (2, "30 queries", "gallery", "label")), note


def test_a_class_that_does_not_remain_is_left_out_and_counted():
    gallery, labels = clusters(62, 10, 3, noise=0.1)
    labels[60:] = torch.tensor([7, 8])
    found = linear_probe(gallery[:20], labels[:20], gallery, labels)
    assert found["probe_leave_one_out"] == 1.0
    assert found.gallery_not_counted == 2
    [note] = [note for note in found.notes if "probe_leave_one_out" in note]
    assert not missing_facts(note, (2, "62 gallery items", "label")), note
    groups = torch.where(labels == 1, 99, torch.arange(62))
    found = linear_probe(gallery[:20], labels[:20], gallery, labels, gallery_groups=groups)
    assert found["probe_leave_group_out"] == 1.0
    assert found.gallery_not_counted == 22
    [note] = [note for note in found.notes if "probe_leave_group_out" in note]
    assert not missing_facts(note, (22, "62 gallery items", "group", "label")), note


def test_one_item_of_each_class():
    gallery, labels = clusters(6, 10, 6)
    found = linear_probe(gallery, labels, gallery + 0.1, labels)
    assert found["probe"] == 1.0
    assert math.isnan(found["probe_leave_one_out"])
    assert math.isnan(found.intervals["probe_leave_one_out"].low)
    assert found.gallery_not_counted == 6
    [note] = [note for note in found.notes if "probe_leave_one_out" in note]
    assert not missing_facts(note, ("NaN", "6 gallery items")), note


def test_an_embedding_that_has_collapsed_predicts_the_frequent_class():
    labels = torch.tensor([0, 1, 1, 1, 2])
    for row in (torch.full((1, 3), 0.1), torch.zeros(1, 3)):
        found = linear_probe(row.expand(4, 3), [0, 1, 1, 2], row.expand(5, 3), labels)
        assert found["probe"] == 0.5
        assert found.alpha == 0.0
        assert not missing_facts(found.notes[-1], ("5 gallery items", "embedding", "collapsed")), found.notes
        # Without one of class 1, two of four are of class 1. Without another item, three of four are.
        assert found["probe_leave_one_out"] == 1.0
    equal = linear_probe(torch.zeros(4, 3), [0, 1, 1, 2], torch.zeros(6, 3), [0, 1, 2, 0, 1, 2])
    assert equal["probe"] == pytest.approx(1 / 3)  # all classes tie
    targets = torch.arange(5.0)
    regression = linear_probe(torch.ones(4, 3), targets[:4], torch.ones(5, 3), targets)
    assert math.isnan(regression["probe_spearman"])
    assert regression["probe_r2"] == pytest.approx(1 - (4 * 0.5**2 + 5) / 5)


def test_equal_items_have_collapsed_whatever_the_rounding_of_their_mean():
    row = torch.rand(1, 50, dtype=torch.float64)
    found = linear_probe(row.expand(4, 50), [0, 1, 1, 0], row.expand(7, 50), [0, 1, 1, 1, 1, 0, 1])
    assert found.alpha == 0.0
    assert found["probe"] == 0.5


def test_constant_targets_are_undefined_and_counted():
    rows, _ = clusters(90, 5, 3)
    targets = torch.stack([rows[:, 0] + rows[:, 1].square(), torch.full((90,), 3.1, dtype=torch.float64)], dim=1)
    found = linear_probe(rows[:30], targets[:30], rows[30:], targets[30:])
    alone = linear_probe(rows[:30], targets[:30, 0], rows[30:], targets[30:, 0], strengths=found.strength)
    for key, values in found.per_target.items():
        assert math.isnan(values[1])
        assert found[key] == values[0] == pytest.approx(alone[key])
    [note] = [note for note in found.notes if "NaN" in note]
    keys = "probe_r2, probe_spearman, probe_r2_leave_one_out"
    assert not missing_facts(note, (keys, "NaN", 1, "2 targets")), note
    nothing = linear_probe(rows[:30], targets[:30, 1], rows[30:], targets[30:, 1])
    assert all(math.isnan(value) for value in nothing.values.values())
    assert not missing_facts(nothing.notes[0], ("NaN", "1 targets")), nothing.notes
    assert json.loads(json.dumps(nothing.to_dict()))["metrics"]["probe_r2"] is None


def test_groups_of_equal_rows_are_predicted_by_the_mean_of_the_others():
    probe = linear_probe(
        torch.randn(6, 2), [0, 1] * 3, torch.ones(4, 2), [0, 1, 0, 1],
        query_groups=[0, 1, 2, 3, 4, 5], gallery_groups=[0, 0, 1, 1],
    )  # fmt: skip
    # Each class has the same score. The first of equal scores counts.
    assert probe.values["probe_leave_group_out"] == 0.5


def test_queries_of_one_class_or_group_have_no_interval():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0)
    one = query_labels == 2
    found = linear_probe(queries[one], query_labels[one], gallery, gallery_labels)
    assert math.isnan(found.intervals["probe"].low)
    facts = ("probe", "NaN", f"{int(one.sum())} queries", "class")
    assert not all(missing_facts(note, facts) for note in found.notes), found.notes
    found = linear_probe(queries, query_labels, gallery, gallery_labels, query_groups=["a"] * len(queries))
    facts = ("probe", "NaN", "200 queries", "group")
    assert not all(missing_facts(note, facts) for note in found.notes), found.notes


def test_intervals_are_over_classes_or_groups_of_the_queries():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0)
    found = linear_probe(queries, query_labels, gallery, gallery_labels, confidence=0.9)
    hits = found.per_query["probe"]
    assert found["probe"] == hits.mean()
    assert found.intervals["probe"] == clustered_mean_interval(hits, query_labels, 0.9)
    groups = [f"patient {n % 31}" for n in range(200)]
    grouped = linear_probe(queries, query_labels, gallery, gallery_labels, query_groups=groups, confidence=0.9)
    assert grouped.values == found.values
    assert grouped.intervals["probe"] == pytest.approx(clustered_mean_interval(hits, groups, 0.9))
    assert grouped.intervals["probe_leave_one_out"] == found.intervals["probe_leave_one_out"]
    top5 = linear_probe(queries, query_labels, gallery, gallery_labels)
    assert top5["probe"] <= top5["probe_top5"] <= 1
    five = gallery_labels < 5
    assert "probe_top5" not in linear_probe(queries, query_labels, gallery[five], gallery_labels[five])


# ------------------------------------------------------------------------------------------------------------------ notes


def test_a_best_strength_at_an_end_is_noted_where_another_may_be_better():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0)
    best = linear_probe(queries, query_labels, gallery, gallery_labels, strengths=(1e-3, 1e-2, 0.1, 1, 10)).strength
    for strengths, end in (((best, best / 10, best / 100), "strongest"), ((best * 10, best, best * 100), "weakest")):
        found = linear_probe(queries, query_labels, gallery, gallery_labels, strengths=strengths)
        noted = not all(missing_facts(note, (f"{best:g}", end, "strengths")) for note in found.notes)
        errors = sorted(found.errors.values())
        assert noted == (errors[0] < 0.999 * errors[1])
        assert noted or end == "strongest"
    plateau = linear_probe(queries, query_labels, gallery, gallery_labels, strengths=(1e-9, 1e-8))
    assert plateau.notes == ()


def test_groups_that_are_on_both_sides_are_noted():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0)
    groups = {"query_groups": torch.arange(200) % 10 + 3, "gallery_groups": torch.arange(120) % 6}
    found = linear_probe(queries, query_labels, gallery, gallery_labels, **groups)
    facts = (3, "10 groups", "queries", "gallery")
    assert not all(missing_facts(note, facts) for note in found.notes), found.notes


def test_queries_that_are_in_the_gallery_are_noted():
    gallery, labels = clusters(120, 10, 6)
    found = linear_probe(gallery[:50], labels[:50], gallery, labels)
    [note] = filter(is_on_copies, found.notes)
    assert not missing_facts(note, ("50 queries", "100 %", "probe", "label")), note


def test_classes_that_are_floats_are_noted():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0)
    found = linear_probe(queries, query_labels.float(), gallery, gallery_labels.float())
    facts = ("gallery", "whole", "regression", "gallery_labels.long()")
    assert not all(missing_facts(note, facts) for note in found.notes), found.notes


def test_a_report_can_be_shown_stored_and_compared():
    queries, query_labels, gallery, gallery_labels, _ = divided(120, 10, 6, 0.0)
    found = linear_probe(queries, query_labels, gallery, gallery_labels, gallery_groups=torch.arange(120) % 20)
    assert found.metrics().keys() == {"probe", "probe_top5", "probe_leave_one_out", "probe_leave_group_out"}
    lines = str(found).splitlines()
    assert not missing_facts(lines[0], ("200 queries", "120 gallery items", "6 classes")), lines
    assert not missing_facts(lines[1], (f"strength {found.strength:g}", 9, "alpha")), lines
    assert lines[2].startswith("probe     ")
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["metrics"] == found.values
    assert stored["errors"][f"{found.strength:g}"] == found.errors[found.strength]
    assert stored["classes"] == 6
    assert found.messages == found.notes
    assert not missing_facts(found.meaning("probe"), ("Queries", "class", "linear classifier", "gallery"))
    assert found == linear_probe(queries, query_labels, gallery, gallery_labels, gallery_groups=torch.arange(120) % 20)
    with refused(LookupError, "'probe_r2'", "probe_top5", "metrics=('probe_r2', ...)"):
        found["probe_r2"]


def test_an_accuracy_that_naming_the_largest_class_reaches_is_noted():
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(400, 8, generator=generator), (torch.arange(400) % 20 == 0).long()
    noted = linear_probe(rows[:200], labels[:200], rows[200:], labels[200:])
    assert noted["probe"] <= 0.95
    assert not all(missing_facts(note, ("probe", "0.950")) for note in noted.notes), noted.notes
    separable = torch.eye(2)[labels] + 0.1 * rows[:, :2]
    found = linear_probe(separable[:200], labels[:200], separable[200:], labels[200:])
    assert found["probe"] == 1
    assert found.notes == ()


def test_left_out_items_of_balanced_classes_are_named_wrongly_by_features_that_know_nothing():
    """The page says so: without an item, its class is the smallest."""
    constant = 1e-9 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).double() + 1
    labels = torch.arange(200) % 4
    assert linear_probe(constant, labels, constant, labels, strengths=100)["probe_leave_one_out"] < 0.05
