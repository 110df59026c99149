"""The maps of probability: the formulas of the figure's caption, and its extremes against a search over the sphere."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripts import loaded

with loaded("studies/distance_ratio_maps.py") as maps:
    pass

COSINE = [name for name in maps.SPHERE if "Face" in name]
DR = [name for name in maps.SPHERE if name.startswith("DR")]
RED, GREEN, BLUE = torch.eye(3, dtype=torch.float64)[[2, 1, 0]]
LOGITS = {  # of an angle to the red vector, as figure 7 says: scale 2; margin 2 with k = 0, 0.25 and 0.25
    "NormFace (softmax of chords)": lambda angle: 2 * math.cos(angle),
    "SphereFace, margin 2, k = 0": lambda angle: 2 * ((-1) ** 0 * math.cos(2 * angle) - 2 * 0),
    "CosFace, margin 0.25": lambda angle: 2 * (math.cos(angle) - 0.25),
    "ArcFace, margin 0.25": lambda angle: 2 * math.cos(angle + 0.25),
}
coordinates = st.tuples(*[st.floats(-1, 1) for _ in range(3)]).filter(lambda point: math.hypot(*point) > 0.1)


@pytest.mark.parametrize("name", COSINE)
@given(point=coordinates)
@settings(deadline=None, max_examples=50)
def test_a_cosine_classifier_is_the_formula_of_the_caption(name: str, point: tuple[float, float, float]) -> None:
    blue, green, red = (x / math.hypot(*point) for x in point)
    weights = [math.exp(logit) for logit in (LOGITS[name](math.acos(red)), 2 * green, 2 * blue)]
    actual = maps.SPHERE[name](torch.tensor([[blue, green, red]], dtype=torch.float64))
    assert actual.item() == pytest.approx(weights[0] / sum(weights), rel=1e-7)  # acos is steep at 1


@pytest.mark.parametrize("name", maps.SPHERE)
def test_nowhere_is_it_higher_or_lower_than_at_the_extremes(name: str) -> None:
    probability = maps.SPHERE[name]
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.nn.functional.normalize(torch.randn(20_000, 3, generator=generator, dtype=torch.float64), dim=1)
    values = probability(anywhere)
    for sign in (1, -1):
        found = maps.extremes(probability, sign)
        heights = probability(found)
        assert (heights.max() - heights.min()) < 1e-8
        assert (sign * (values - heights[0])).max() < 1e-12
        close = anywhere[sign * (values - heights[0]) > -1e-5]  # each of these belongs to an extreme that is listed
        assert ((close[:, None] - found).norm(dim=-1).min(dim=1).values < 0.15).all()


def distance(points: torch.Tensor, *others: torch.Tensor) -> float:
    return torch.cdist(points, torch.stack(others)).min().item()


@pytest.mark.parametrize("name", COSINE)
def test_cosine_classifiers_are_extreme_elsewhere_than_at_the_vectors(name: str) -> None:
    """Appendix E: the maximum is not at red's vector, the minimum neither at green's nor at blue's."""
    assert distance(maps.extremes(maps.SPHERE[name], 1), RED) > 0.1
    assert distance(maps.extremes(maps.SPHERE[name], -1), GREEN, BLUE) > 0.1


def test_distance_ratios_are_extreme_at_the_vectors_and_the_softmax_of_angles_is_not() -> None:
    for name in DR:
        torch.testing.assert_close(maps.extremes(maps.SPHERE[name], 1), RED[None], atol=1e-6, rtol=0.0)
        lowest = maps.extremes(maps.SPHERE[name], -1)
        torch.testing.assert_close(lowest.sort(dim=0).values[:, :2], torch.eye(2).double().sort(dim=0).values)
    angles = maps.SPHERE["softmax of angles"]
    assert distance(maps.extremes(angles, 1), RED) > 0.1
    torch.testing.assert_close(maps.extremes(angles, -1), -RED[None], atol=1e-6, rtol=0.0)
