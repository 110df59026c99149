"""The maps of probability: its extremes against a search over the sphere."""

import pytest
import torch

from tests.scripts import imported_script

with imported_script("studies/distance_ratio_maps.py") as maps:
    pass

COSINE = [name for name in maps.SPHERE if "Face" in name]
DR = [name for name in maps.SPHERE if name.startswith("DR")]
RED, GREEN, BLUE = torch.eye(3, dtype=torch.float64)[[2, 1, 0]]


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
