"""The figures of the studies, drawn from the data that the documentation's come from."""

import json

import pytest

from tests.plots.legibility import assert_legible
from tests.scripts import ROOT, imported_script

with imported_script("studies/study_figures.py") as studies:
    pass

DATA = {
    **dict.fromkeys(("class_count", "dropout_gap", "model_size_gap"), "class_count_invariance"),
    **dict.fromkeys(("distance_ratio_accuracy", "distance_ratio_norm_ratio"), "distance_ratio"),
    "average_precision_loss": "average_precision_loss",
    "better_or_noise": "better_or_noise",
}


@pytest.mark.parametrize("name", studies.FIGURES)
def test_figures_are_legible_and_stay_below_100_percent(name):
    data = json.loads((ROOT / "docs" / "figures" / "data" / f"{DATA[name]}.json").read_text())
    figure = studies.FIGURES[name](data)
    assert_legible(figure)
    for axes in figure.axes:
        # panels that share an axis with their neighbour leave its words to that one
        assert axes.get_label() == "<colorbar>" or any(
            one.get_xlabel() for one in axes.get_shared_x_axes().get_siblings(axes)
        )
        if "%" not in axes.get_ylabel() and "percentage" not in axes.get_ylabel():
            continue
        paths = [path for container in axes.containers for bars in container.lines[2] for path in bars.get_paths()]
        heights = [corner[1] for path in paths for corner in path.vertices]
        heights += [y for line in axes.lines if line.get_transform() == axes.transData for y in line.get_ydata()]
        assert max(heights, default=0) <= 100
