"""Where is a classifier most, and where is it least confident? Figures 1, 7 and 8 of the distance-ratio paper.

Run it as it is:    python examples/distance_ratio_maps.py      (seconds; it writes to runs/distance_ratio)

It draws the probability of the red class over the plane (maps_plane.png) and over the unit sphere (maps_sphere.png), and
prints where on the sphere it is highest and lowest.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from scipy.optimize import minimize
from torch import Tensor

from fewshot_callbacks import DistanceRatioHead, SoftmaxHead

POINT_COLOURS = ("red", "lime", "blue")
VECTORS = torch.eye(3, dtype=torch.float64)[
    [2, 1, 0]
]  # red (0, 0, 1), green (0, 1, 0), blue (1, 0, 0), as in appendix E
SCALE, MARGIN = 2.0, 0.25  # of figure 7; its SphereFace has the margin 2 and k = 0
LEVELS = np.linspace(0, 1, 41)  # steps of 0.025: few colours, so the pictures are small without a palette of their own
SIDE = torch.linspace(-2, 2, 401)
LATITUDE = torch.linspace(-math.pi / 2, math.pi / 2, 241).double()
LONGITUDE = torch.linspace(-math.pi, math.pi, 481).double()  # 0 lies between green and blue
TIE = 1e-9  # two extremes of the same height differ by rounding alone

Probability = Callable[[Tensor], Tensor]  # points (points, 3) of the unit sphere -> probability of red (points,)


def cosine_classifier(red_logit: Callable[[Tensor], Tensor]) -> Probability:
    """A softmax of scaled cosines; `red_logit` puts the margin into that of the red class, from its angle."""

    def probability(points: Tensor) -> Tensor:
        cosines = (points @ VECTORS.T).clamp(-1, 1)  # (points, classes)
        red = red_logit(cosines[:, :1].acos())  # (points, 1)
        return (SCALE * torch.cat([red, cosines[:, 1:]], dim=1)).softmax(-1)[:, 0]

    return probability


def head_classifier(head: Callable[[Tensor, Tensor], Tensor]) -> Probability:
    """A head of ours with the vectors of the classes in place of the prototypes."""
    return lambda points: head(points, VECTORS).detach().softmax(-1)[:, 0]


SPHERE: dict[str, Probability] = {
    "NormFace (softmax of chords)": cosine_classifier(torch.cos),  # -|q - v|^2 = 2 cos - 2
    "SphereFace, margin 2, k = 0": cosine_classifier(lambda angle: (2 * angle).cos()),  # (-1)^k cos(2 angle) - 2 k
    "CosFace, margin 0.25": cosine_classifier(lambda angle: angle.cos() - MARGIN),
    "ArcFace, margin 0.25": cosine_classifier(lambda angle: (angle + MARGIN).cos()),
    "softmax of angles": head_classifier(SoftmaxHead("angular")),
    "DR of chords, ρ = 2": head_classifier(DistanceRatioHead(math.log(2), "unit_euclidean")),
    "DR of angles, ρ = 2": head_classifier(DistanceRatioHead(math.log(2), "angular")),
}


def on_sphere(latitude: Tensor, longitude: Tensor) -> Tensor:
    """Points (..., 3) from angles in radians; longitude 0 lies between green and blue."""
    turned = longitude + math.pi / 4
    return torch.stack([latitude.cos() * turned.cos(), latitude.cos() * turned.sin(), latitude.sin()], dim=-1)


def extremes(probability: Probability, sign: int) -> Tensor:
    """The points (points, 3) of the sphere with the highest (`sign` 1) or the lowest (-1) probability.

    From the best points of the grid, a search without derivatives: DR has a peak, not a smooth maximum.
    """

    def depth(angles: np.ndarray) -> float:
        return -sign * float(probability(on_sphere(*torch.as_tensor(angles))[None]))

    up, around = (angles.flatten() for angles in torch.meshgrid(LATITUDE, LONGITUDE, indexing="ij"))
    values = sign * probability(on_sphere(up, around))
    order = values.argsort(descending=True)
    near_best = order[values[order] > values.max() - 1e-4]  # a step of the grid costs a smooth extreme less than that
    starts = torch.stack([up, around], dim=1)[near_best[_apart(on_sphere(up, around)[near_best])]]  # (starts, 2)
    searches = [minimize(depth, s, method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-14}) for s in starts]
    lowest = min(search.fun for search in searches)
    angles = torch.tensor(np.array([search.x for search in searches if search.fun <= lowest + TIE]))
    found = on_sphere(angles[:, 0], angles[:, 1])
    return found[_apart(found)]


def _apart(points: Tensor, radius: float = 0.2) -> list[int]:
    """Of points in an order of preference, the indices of those that no better one has within the radius."""
    kept: list[int] = []
    for i, point in enumerate(points):
        if not kept or (points[kept] - point).norm(dim=1).min() > radius:
            kept.append(i)
    return kept


def draw_plane(path: Path) -> None:
    """The probability of the red class over the plane, for two and for three prototypes."""
    prototypes = torch.tensor([[0.0, 0.5], [-0.6, -0.5], [0.6, -0.5]])
    grid = torch.cartesian_prod(SIDE, SIDE)  # (points, 2)
    models = {
        "softmax": SoftmaxHead(),
        "DR, ρ = 1": DistanceRatioHead(0.0),
        "DR, ρ = 2": DistanceRatioHead(math.log(2)),
    }
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.6), layout="constrained")
    for row, classes in zip(axes, (2, 3), strict=True):
        for place, (name, head) in zip(row, models.items(), strict=True):
            red = head(grid.double(), prototypes[:classes].double()).detach().softmax(-1)[:, 0]
            shown = _draw_field(place, SIDE, SIDE, red.reshape(len(SIDE), len(SIDE)).T, [0.1, 0.25, 0.5, 0.75, 0.9])
            for point, colour in zip(prototypes[:classes], POINT_COLOURS, strict=False):
                place.plot(*point, "o", color=colour, markeredgecolor="white", markersize=7)
            place.plot(*grid[red.argmax()], "x", color="cyan", markersize=9, markeredgewidth=2, clip_on=False)
            place.set_aspect("equal")
            place.set_title(f"{name}, {classes} prototypes", fontsize=10)
    figure.colorbar(shown, ax=axes, shrink=0.7, label="probability of the red class", ticks=LEVELS[::10])
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_sphere(path: Path) -> dict[str, dict[str, list[list[float]]]]:
    """The same over the unit sphere, seen from outside as a map of the world; the points where it is highest and lowest."""
    up, around = torch.meshgrid(LATITUDE, LONGITUDE, indexing="ij")
    figure = plt.figure(figsize=(13, 4.6), layout="constrained")
    all_extremes = {}
    for number, (name, probability) in enumerate(SPHERE.items(), start=1):
        place = figure.add_subplot(2, 4, number, projection="mollweide")
        _draw_field(place, around, up, probability(on_sphere(up, around).reshape(-1, 3)).reshape(up.shape))
        for (x, y), colour in zip(((0, math.pi / 2), (math.pi / 4, 0), (-math.pi / 4, 0)), POINT_COLOURS, strict=True):
            place.plot(x, y, "o", color=colour, markeredgecolor="white", markersize=8, clip_on=False)
        points = {"max": extremes(probability, 1), "min": extremes(probability, -1)}
        for kind, mark in (("max", "x"), ("min", "v")):
            for point in points[kind]:
                y = math.asin(point[2].clamp(-1, 1))
                x = math.remainder(math.atan2(point[1], point[0]) - math.pi / 4, 2 * math.pi)
                x = 0.0 if abs(y) > math.pi / 2 - 1e-4 else x  # a pole has any longitude
                place.plot(x, y, mark, color="cyan", markersize=8, markeredgewidth=2, fillstyle="none", clip_on=False)
        place.set_title(name, fontsize=10)
        all_extremes[name] = {kind: [_rounded(point) for point in found] for kind, found in points.items()}
    note = figure.add_subplot(2, 4, 8)
    note.axis("off")
    note.text(
        0, 0.5, "probability of the red class\n(black 0, light 1)\n\n● vectors of the classes\n× highest, ▽ lowest",
        fontsize=11, va="center",
    )  # fmt: skip
    figure.savefig(path, dpi=85)
    plt.close(figure)
    return all_extremes


def _draw_field(place: Axes, x: Tensor, y: Tensor, red: Tensor, lines: tuple[float, ...] = (0.25, 0.5, 0.75)) -> object:
    shown = place.contourf(x, y, red, levels=LEVELS, cmap="magma", antialiased=False)
    place.contour(x, y, red, levels=lines, colors="white", linewidths=0.5)
    place.set_xticks([])
    place.set_yticks([])
    return shown


def _rounded(point: Tensor) -> list[float]:
    return [round(x, 3) + 0.0 for x in point.tolist()]  # + 0.0: no -0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs") / "distance_ratio")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    draw_plane(output / "maps_plane.png")
    for name, kinds in draw_sphere(output / "maps_sphere.png").items():
        print(f"{name}: highest at {kinds['max']}, lowest at {kinds['min']}")
    print(f"maps_plane.png and maps_sphere.png are in {output}.")
