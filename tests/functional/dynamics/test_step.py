"""Measures of one training step against their definitions, their ranges, and what is undefined."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import training_dynamics
from fewshot_callbacks.functional.dynamics import Centering, check_centering
from tests.cases import examples
from tests.functional.dynamics.slow_dynamics import slow_dynamics
from tests.messages import missing_facts, refused

NAMES = ("alpha", "norm_ratio", "psi_con", "psi_div", "con_alpha", "div_alpha", "con_div")
LABELS = torch.tensor([5, -2, 5, -2, 9, 9, 5, -2, 9])  # three classes of three


small = st.integers(1, 3)


@given(st.integers(2, 4), small, small, st.sampled_from(["points", "coordinates"]), st.integers(0, 2**16))
@settings(max_examples=examples(40), deadline=None)
def test_equals_the_definitions(ways: int, shots: int, queries: int, centering: Centering, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(ways) * 3 - 4).repeat(shots + queries)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    before = 3 * (seed % 2) + torch.randn(len(labels), 5, generator=generator)
    after = 1.2 * before + 0.3 * torch.randn(len(labels), 5, generator=generator)
    step = training_dynamics(before, after, labels, shots=shots, centering=centering)
    for name, value in slow_dynamics(before, after, labels, shots, centering).items():
        assert getattr(step, name) == pytest.approx(value, rel=1e-9), name
    assert 0 <= step.norm_ratio <= 1
    assert step.undefined == ()


def test_several_episodes_are_measured_together_and_one_that_is_collapsed_leaves_no_ratio() -> None:
    before, after = torch.randn(2, 9, 4), torch.randn(2, 9, 4)
    both = training_dynamics(before.flatten(0, 1), after.flatten(0, 1), LABELS.repeat(2), shots=1, episodes=2)
    parts = [training_dynamics(before[e], after[e], LABELS, shots=1) for e in (0, 1)]
    assert both.psi_con == pytest.approx(math.sqrt(parts[0].psi_con * parts[1].psi_con))
    assert both.psi_div == pytest.approx(math.sqrt(parts[0].psi_div * parts[1].psi_div))
    before[1] = 3.0
    step = training_dynamics(before.flatten(0, 1), after.flatten(0, 1), LABELS.repeat(2), shots=1, episodes=2)
    assert math.isnan(step.con_div)
    assert math.isfinite(step.alpha)
    (reason,) = step.undefined
    assert not missing_facts(reason, ("embeddings", 1, "2 episodes", "before", "collapsed")), reason


def test_float32_that_moves_little_keeps_its_digits() -> None:
    before = 100 + torch.randn(9, 64)
    after = before + 1e-4 * torch.randn(9, 64)
    exact = training_dynamics(before.double(), after.double(), LABELS, shots=1)
    assert training_dynamics(before, after, LABELS, shots=1) == exact


def test_zero_distances_stay_finite() -> None:
    before = torch.randn(9, 4)
    after = torch.where(LABELS[:, None] == 5, before[0], before)  # the queries of class 5 fall on its support
    assert 0 < training_dynamics(before, after, LABELS, shots=1).psi_con < 1e-1
    assert math.isfinite(training_dynamics(after, before, LABELS, shots=1).psi_con)


@pytest.mark.parametrize(
    ("factor", "nan", "words"),
    [
        (1, set(NAMES), "moved no embedding"),
        (-1, {"con_alpha", "div_alpha"}, "alpha is -1"),
        (0, {"con_alpha", "div_alpha"}, "alpha is 0"),
        (math.nan, set(NAMES), "not finite"),
    ],
)
def test_what_is_undefined_is_nan_with_a_reason(factor: float, nan: set[str], words: str) -> None:
    before = torch.randn(9, 4)
    step = training_dynamics(before, factor * before, LABELS, shots=1)
    assert {name for name in NAMES if math.isnan(getattr(step, name))} == nan
    assert any(words in reason for reason in step.undefined)


@pytest.mark.parametrize("centering", ["points", "coordinates"])
@pytest.mark.parametrize("point", [[0.1, -0.7, 1 / 3, 12.3], [0.0, 0.0, 0.0, 0.0]])
def test_a_collapsed_space_has_no_scale_and_no_distances(point, centering) -> None:
    for after in (1e-8 * torch.randn(9, 4), torch.ones(9, 4) * 7):
        step = training_dynamics(torch.tensor([point] * 9), after, LABELS, shots=1, centering=centering)
        if "moved no embedding" not in step.undefined[0]:
            assert all("collapsed" in reason for reason in step.undefined)
        assert all(math.isnan(getattr(step, name)) for name in NAMES)


def test_distances_below_what_is_added_to_them_are_none() -> None:
    """Rounding noise around one point: alpha is what it is, but the ratios of distances are those of EPSILON."""
    noise, after = torch.randn(2, 9, 4, dtype=torch.float64)
    step = training_dynamics(0.5 + 1e-6 * noise, after, LABELS, shots=1)
    assert all(math.isnan(getattr(step, name)) for name in ("con_div", "con_alpha", "div_alpha"))
    assert any("all embeddings of 1 of 1 episode were one point" in reason for reason in step.undefined)
    assert math.isfinite(training_dynamics(1e3 * (0.5 + 1e-6 * noise) / 1e-6, after, LABELS, shots=1).con_div)


def test_one_class_has_nothing_to_go_away_from() -> None:
    before = torch.randn(3, 4)
    step = training_dynamics(before, 1.1 * before + 0.1, torch.zeros(3, dtype=torch.int64), shots=1)
    assert math.isnan(step.psi_div)
    assert math.isfinite(step.psi_con)
    assert "one class" in step.undefined[0]


def test_other_rows_too_many_shots_and_an_unknown_centering_are_refused() -> None:
    with refused(ValueError, "training_dynamics", "(9, 4)", "(9, 5)", "batch"):
        training_dynamics(torch.zeros(9, 4), torch.zeros(9, 5), LABELS, shots=1)
    with refused(ValueError, "3-shot", "query", "3 classes", "3 rows", "shots <= 2"):
        training_dynamics(torch.zeros(9, 4), torch.zeros(9, 4), LABELS, shots=3)
    with refused(ValueError, "x", "centering='median'", "'points'", "'coordinates'"):
        check_centering("median", "x")
