"""The figures of the studies, drawn from the data that the documentation's come from."""

import json

import pytest
from matplotlib.container import ErrorbarContainer

from tests.plots.legible import assert_legible
from tests.scripts import ROOT, loaded

with loaded("studies/study_figures.py") as studies:
    pass

DATA = {
    "class_count": "class_count_invariance",
    "dropout_gap": "class_count_invariance",
    "model_size_gap": "class_count_invariance",
    "average_precision_loss": "average_precision_loss",
    "distance_ratio_accuracy": "distance_ratio",
    "distance_ratio_norm_ratio": "distance_ratio",
}


def data_of(name):
    return json.loads((ROOT / "docs" / "figures" / "data" / f"{DATA[name]}.json").read_text())


DRAWN = [name for name in DATA if (ROOT / "docs/figures/data" / f"{DATA[name]}.json").exists()]


@pytest.fixture(scope="module", params=DRAWN)
def figure(request):
    return studies.FIGURES[request.param](data_of(request.param))


def test_all_are_here():
    assert set(DATA) == set(studies.FIGURES)


def test_nothing_is_clipped_or_covered(figure):
    assert_legible(figure)


def test_every_axis_says_what_it_shows(figure):
    """Panels that share an axis with their neighbour leave its words to that one."""
    for axes in figure.axes:
        below = axes.get_shared_x_axes().get_siblings(axes)
        beside = axes.get_shared_y_axes().get_siblings(axes)
        if axes.get_label() != "<colorbar>":
            assert any(one.get_xlabel() for one in below)
        row = [one for one in figure.axes if one.get_position().y0 == pytest.approx(axes.get_position().y0, abs=0.02)]
        assert any(one.get_ylabel() for one in {*beside, *row})


def test_no_bar_and_no_point_is_above_100_percent(figure):
    for axes in figure.axes:
        if "%" not in axes.get_ylabel() and "percentage" not in axes.get_ylabel():
            continue
        for container in axes.containers:
            assert isinstance(container, ErrorbarContainer)
            for bars in container.lines[2]:
                assert max(corner[1] for path in bars.get_paths() for corner in path.vertices) <= 100
        for line in axes.lines:
            if line.get_transform() == axes.transData:
                assert max(line.get_ydata(), default=0) <= 100


def test_png_and_svg_are_written(tmp_path):
    studies.write(data_of("average_precision_loss"), tmp_path, ["average_precision_loss"])
    assert (tmp_path / "average_precision_loss.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "average_precision_loss.svg").read_bytes()[:5] == b"<?xml"
    assert json.loads((tmp_path / "figures.json").read_text()) == data_of("average_precision_loss")
