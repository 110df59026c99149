"""The picture of values over bytes."""

import math

import pytest
import torch

from fewshot_callbacks.functional import compression_costs
from fewshot_callbacks.plots import compression_curve
from tests.messages import refused
from tests.plots.legibility import assert_legible, drawn_texts

LONG = "a title that is far too long for its room, whatever room that may be " * 4


def report(dims=(), codes=("int8", "binary"), dim=32, **settings):
    labels = torch.arange(90) % 15
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(15, dim, generator=generator)
    return compression_costs(
        centres[labels] + 2 * torch.randn(90, dim, generator=generator), labels, dims=dims, codes=codes, **settings
    )


def texts_of(figure):
    return [text for text, _ in drawn_texts(figure)]


@pytest.mark.parametrize(
    "forms",
    [
        {"dims": (4, 8, 16)},
        {"dims": (32,), "codes": ()},
        {"codes": "binary"},
        {"dims": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 31, 32)},
    ],
)
def test_all_text_can_be_read_however_many_forms_there_are(forms):
    compressed = report(**forms)
    for metric in ("mAP", "recall@1"):
        assert_legible(compression_curve(compressed, metric, LONG))


def test_points_bars_and_labels_are_those_of_the_report():
    compressed = report(dims=(8,), codes="int8")
    figure = compression_curve(compressed, "recall@1")
    [axes] = figure.axes
    of_numbers, of_codes, of_bits = axes.containers
    int8 = compressed.variants["int8"].differences["recall@1"]
    shortened = compressed.variants["dims8"].differences["recall@1"]
    assert of_numbers.lines[0].get_xydata().tolist() == [[32, shortened.first], [128, compressed.whole["recall@1"]]]
    assert of_codes.lines[0].get_xdata().tolist() == [8, 32]
    assert len(of_bits.lines[0].get_xdata()) == 0
    (_, bar) = of_codes.lines[2][0].get_segments()
    ends = [compressed.whole["recall@1"] + end for end in int8.interval]
    assert bar[:, 1].tolist() == pytest.approx(ends, abs=1e-12)
    assert axes.get_xscale() == "log"
    written = texts_of(figure)
    assert [text for text in written if text in ("float", "int8", "binary")] == ["float", "int8"]
    assert {"8", "32", "recall@1", "bytes per item"} <= {*written}


def test_a_bar_ends_at_the_bounds_of_the_metric():
    compressed = report(dims=(1,), codes=())
    loss = compressed.variants["dims1"].differences["recall@1"]
    assert compressed.whole["recall@1"] + loss.interval.low < 0
    [axes] = compression_curve(compressed, "recall@1").axes
    (bar, _) = axes.containers[0].lines[2][0].get_segments()
    assert bar[0, 1] == 0
    assert bar[1, 1] == pytest.approx(compressed.whole["recall@1"] + loss.interval.high)


def test_a_metric_without_an_interval_has_points_without_bars():
    compressed = report(dims=(8,), codes=(), metrics="pair_f1")
    assert math.isnan(compressed.variants["dims8"].differences["pair_f1"].interval.low)
    assert_legible(compression_curve(compressed))


def test_a_metric_that_was_not_compared_is_refused():
    with refused(ValueError, "compression_curve", "metric='mrr'", "mAP", "recall@1", "metrics=('mrr', ...)"):
        compression_curve(report(codes="binary"), "mrr")
