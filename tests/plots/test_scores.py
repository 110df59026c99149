"""Figures of one evaluation."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.plots.scores import (
    ClassScore,
    Confusion,
    Mark,
    confused_classes,
    error_tradeoff_curve,
    precision_recall_curve,
    recall_at_k_curve,
    score_histograms,
    weakest_classes,
)
from tests.messages import missing_facts, refused
from tests.plots.legibility import assert_legible, drawn_texts

LONG = "a name that is far too long for its room, whatever room that may be " * 4
NAMES = ["cat", LONG, "日本語", "Ελληνικά", "$x$", "tab\tand\nline"]


def pair_counts(bins: int = 64, shift: float = 1.0, relevant: int = 400, irrelevant: int = 20_000) -> PairCounts:
    generator = np.random.default_rng(0)
    relevant_scores = generator.normal(shift, 1, relevant)
    irrelevant_scores = generator.normal(-shift, 1, irrelevant)
    edges = np.linspace(-8, 8, bins + 1)
    thresholds = np.linspace(-8, 8, 500)
    return PairCounts(
        thresholds,
        (relevant_scores[:, None] >= thresholds).sum(0),
        (irrelevant_scores[:, None] >= thresholds).sum(0),
        relevant,
        irrelevant,
        edges,
        np.histogram(relevant_scores, edges)[0],
        np.histogram(irrelevant_scores, edges)[0],
    )


COUNTS = pair_counts()
MARKS = [
    Mark("best F1", 1.2, 0.4, 0.6),
    Mark(LONG, -1.0, 0.9, 0.1),
    Mark("日本", 99.0, 0.0, 1.0),
    Mark("precision 0.99", math.inf),
    Mark("$\\alpha$", math.nan),
    Mark("sixth", 0.0, 0.2, 0.2),
]


def figures_with(marks):
    yield score_histograms(COUNTS, marks, LONG)
    yield score_histograms(COUNTS, marks, log=False)
    yield precision_recall_curve(COUNTS.recall, COUNTS.precision, marks, LONG, area=0.51, chance=0.02)
    yield error_tradeoff_curve(COUNTS.false_match_rate, COUNTS.false_non_match_rate, marks, LONG)


def test_all_text_of_the_score_plots_can_be_read_and_a_mark_has_the_same_look_in_each():
    colours = set()
    for figure in figures_with(MARKS):
        assert_legible(figure)
        colours |= {line.get_color() for line in figure.axes[0].lines if line.get_label().startswith("best F1:")}
    assert len(colours) == 1


@pytest.mark.parametrize(("count", "value"), [(1, None), (15, 0.0)])
def test_all_text_of_the_bars_can_be_read(count, value):
    names = [NAMES[n % len(NAMES)] + str(n) for n in range(count + 1)]
    classes = [ClassScore(name, n / (count + 1) if value is None else value, n) for n, name in enumerate(names[:-1])]
    assert_legible(weakest_classes(classes, LONG, overall=0.7))
    assert_legible(weakest_classes(classes, metric=LONG))
    pairs = [Confusion(one, other, int(1e6 * (value or n))) for n, (one, other) in enumerate(itertools.pairwise(names))]
    assert_legible(confused_classes(pairs, LONG))


@pytest.mark.parametrize(
    ("ks", "least"), [((1,), 0.0), ((*range(1, 11), 20, 50, 100, 1000, 10_000), 0.98), ((5, 7), 0)]
)
def test_all_text_of_recall_at_k_can_be_read(ks, least):
    series = {name: {k: min(1.0, least + 0.001 * k) for k in ks} for name in NAMES}
    assert_legible(recall_at_k_curve(series, LONG))


def test_a_single_value_is_a_large_point_and_a_figure_of_these_says_how_to_get_a_curve():
    points = recall_at_k_curve({"recall@k": {1: 0.6}, "grouped recall@k": {1: 0.9}})
    assert missing_facts(points.axes[0].get_xlabel(), ("metrics=('recall@1', 'recall@5', 'recall@10')",)) == []
    curve_and_point = recall_at_k_curve({"recall@k": {1: 0.6, 5: 0.8}, "grouped recall@k": {1: 0.9}})
    assert "metrics" not in curve_and_point.axes[0].get_xlabel()
    curve, point = curve_and_point.axes[0].get_lines()
    assert point.get_markersize() >= 1.5 * curve.get_markersize()
    assert {line.get_markersize() for line in points.axes[0].get_lines()} == {point.get_markersize()}


def test_the_rates_at_a_threshold_are_those_of_its_counts():
    assert COUNTS.recall[0] == COUNTS.false_match_rate[0] == 1
    assert COUNTS.false_non_match_rate[0] == 0
    assert COUNTS.precision[0] == pytest.approx(400 / 20_400)
    assert math.isnan(COUNTS.precision[-1])
    threshold = float(COUNTS.thresholds[200])
    assert COUNTS.at(threshold + 1e-6) == (COUNTS.recall[200], COUNTS.precision[200], COUNTS.false_match_rate[200])
    assert all(math.isnan(value) for value in COUNTS.at(math.inf))


@pytest.mark.parametrize("bins", [7, 100, 101])
def test_the_area_of_each_histogram_is_one(bins):
    figure = score_histograms(pair_counts(bins), log=False)
    outlines = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert len(outlines) == 2
    for outline in outlines:
        density, edges, _ = outline.get_data()
        assert (density * np.diff(edges)).sum() == pytest.approx(1)
        assert len(density) <= 100


def test_few_bins_and_pairs_of_one_kind_are_drawn_and_bins_without_an_end_left_out():
    assert_legible(score_histograms(pair_counts(relevant=0)))
    empty = np.zeros(0)
    one_bin = PairCounts(empty, empty, empty, 1, 1, np.array([0.0, 1.0]), np.array([1]), np.array([1]))
    assert_legible(score_histograms(one_bin, MARKS))
    assert all(math.isnan(value) for value in one_bin.at(0.5))
    edges = np.array([-np.inf, 0.0, 1.0, np.inf])
    ones = np.array([1, 1, 1])
    assert score_histograms(PairCounts(empty, empty, empty, 3, 3, edges, ones, ones)).axes[0].get_xlim() == (0, 1)


def test_the_legend_says_which_marks_are_outside_the_axes():
    texts = [text for text, _ in drawn_texts(score_histograms(COUNTS, MARKS))]
    assert {"precision 0.99: no threshold, outside the figure", "best F1: threshold 1.200"} <= set(texts)


def test_a_name_that_no_font_holds_is_told_by_its_code_points_in_the_legend_and_a_dollar_sign_is_drawn():
    series = {"\U00013000": {1: 0.5}, "$x$": {1: 0.5}}
    labels = [line.get_label() for line in recall_at_k_curve(series).axes[0].get_lines()]
    assert labels == ["U+13000: 0.500 at 1", r"\$x\$: 0.500 at 1"]


def test_points_of_the_error_tradeoff_are_normal_deviates():
    thresholds = np.linspace(-3, 3, 50)
    figure = error_tradeoff_curve(ndtr(-1 - thresholds), ndtr(thresholds - 1), [Mark("a", 0.5, 0.1, 0.2)])
    curve, *_, mark = figure.axes[0].lines
    np.testing.assert_allclose(mark.get_xydata(), [[ndtri(0.1), ndtri(0.2)]])
    # of two normal distributions of one variance, whose means are 2 apart, the curve is a line
    np.testing.assert_allclose(curve.get_xydata().sum(1), -2, atol=1e-9)


def test_error_rates_of_zero_and_one_are_left_out():
    figure = error_tradeoff_curve(np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0]))
    assert any(missing_facts(text, ("threshold", "errors")) == [] for text, _ in drawn_texts(figure))
    assert_legible(figure)
    assert_legible(error_tradeoff_curve(np.array([0.2]), np.array([0.2])))
    assert_legible(error_tradeoff_curve(np.array([1e-12, 1 - 1e-12]), np.array([1 - 1e-12, 1e-12])))


@pytest.mark.parametrize(
    ("draw", "axes"),
    [
        (precision_recall_curve, ("recall", "precision")),
        (error_tradeoff_curve, ("false_match_rate", "false_non_match_rate")),
    ],
)
def test_thresholds_may_come_in_any_order(draw, axes):
    x, y = (getattr(COUNTS, name) for name in axes)
    order = np.random.default_rng(0).permutation(len(x))
    curve, mixed = (draw(*given).axes[0].lines[0].get_xydata() for given in ((x, y), (x[order], y[order])))
    np.testing.assert_array_equal(curve, mixed)


def test_the_weakest_classes_and_the_most_frequent_confusions_come_first():
    classes = [("b", 0.5, 2), ("a", 0.1, 1), ("none", math.nan, 0), ("c", 0.9, 1000)]
    figure = weakest_classes([ClassScore(*score) for score in classes], most=2)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]
    texts = [text for text, _ in drawn_texts(figure)]
    assert {"0.10, 1 query", "0.50, 2 queries", "mean AP, lowest 2 of 3 classes"} <= set(texts)
    figure = confused_classes([Confusion("a", "b", 3), Confusion("b", "a", 7), Confusion("c", "a", 1)], most=2)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["b → a", "a → b"]


@pytest.mark.parametrize(
    ("draw", "facts"),
    [
        (lambda: score_histograms(pair_counts(relevant=0, irrelevant=0)), ("pair", "bin")),
        (lambda: precision_recall_curve(np.array([0.5]), np.array([math.nan])), ("threshold", "precision", "recall")),
        (lambda: error_tradeoff_curve(np.zeros(0), np.zeros(0)), ("threshold", "error")),
        (lambda: recall_at_k_curve({"a": {1: math.nan}}), ("recall@k",)),
        (lambda: weakest_classes([ClassScore("a", math.nan, 0)]), ("class", "value")),
        (lambda: confused_classes([]), ("pair", "classes")),
    ],
)
def test_a_figure_without_anything_to_draw_is_refused(draw, facts):
    with refused(ValueError, *facts):
        draw()


@pytest.mark.parametrize("edges", [(0.0, 1.0, 2.0), (1.0, 0.0), (0.0, math.nan)])
def test_edges_that_do_not_fit_the_bins_are_refused(edges):
    empty = np.zeros(0)
    with refused(ValueError, "1 bin", 2, "ascending edges", len(edges)):
        score_histograms(PairCounts(empty, empty, empty, 1, 1, np.array(edges), np.array([1]), np.array([1])))
