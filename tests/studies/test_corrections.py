"""The corrections of the studies, against their definitions, and what the pages say of them."""

import numpy as np
import pytest
from scipy import stats

from tests.scripts import imported_script

with imported_script("studies/corrections.py") as corrections:
    pass


def test_holm_multiplies_by_the_number_of_those_not_yet_rejected() -> None:
    assert corrections.holm([0.04, 0.001, 0.02]) == pytest.approx([0.04, 0.003, 0.04])
    assert corrections.holm([0.5, 0.6]) == [1.0, 1.0]
    assert corrections.holm([0.03, 0.02, 0.02]) == pytest.approx([0.06, 0.06, 0.06])


def test_a_weighted_rank_correlation_is_that_of_repeated_rows() -> None:
    generator = np.random.default_rng(1)
    values, outcomes = generator.integers(0, 6, size=(2, 12)).astype(float)
    weights = generator.integers(0, 4, size=(5, 12)).astype(float)
    for found, multiplicities in zip(corrections.correlations(values, outcomes, weights), weights, strict=True):
        rows = np.repeat(np.arange(12), multiplicities.astype(int))
        assert found == pytest.approx(stats.spearmanr(values[rows], outcomes[rows]).statistic)


def test_of_the_losses_only_arcface_holds() -> None:
    lines = list(corrections.losses())
    corrected = {line.split(":")[0]: float(line.split("corrected ")[1]) for line in lines}
    assert len(corrected) == 25
    assert [name for name, value in corrected.items() if value < 0.05] == ["glyphs, ArcFace", "icons, ArcFace"]


def test_of_the_numbers_of_health_cdnv_holds_in_every_column() -> None:
    lines = [line for line in corrections.health() if ", cdnv:" in line]
    assert [line.count(" *") for line in lines] == [4, 4]
