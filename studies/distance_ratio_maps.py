"""Where is a classifier most confident, and where is it least confident? Figures 1, 7 and 8 of the distance-ratio paper.

Run it as it is:    python studies/distance_ratio_maps.py      (seconds; it writes to runs/distance_ratio)

It draws the probability of the red class over the plane (distance_ratio_maps_plane.png) and over the unit sphere
(distance_ratio_maps_sphere.png), and prints where on the sphere it is highest and lowest.
"""

import argparse
import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from scipy.optimize import minimize
from torch import Tensor

from fewshot_callbacks import DistanceRatioHead, SoftmaxHead
from fewshot_callbacks.plots.style import BLACK, BLUE, GREEN, VERMILION, encode, in_house_style, new_figure

CLASSES = {"red": (VERMILION, "o"), "green": (GREEN, "s"), "blue": (BLUE, "^")}
MARKS = {"max": "x", "min": "o"}  # a ring
EXTREME = BLACK
RESOLUTION = 200  # of the fields, which are smooth: small files
SIZES = {"x": 6, "o": 15}
FIELD, BAR = "cividis", "probability of the red class"
VECTORS = torch.eye(3, dtype=torch.float64)[
    [2, 1, 0]
]  # red (0, 0, 1), green (0, 1, 0), blue (1, 0, 0), as in appendix E
SCALE, MARGIN = 2.0, 0.25  # of figure 7; its SphereFace has the margin 2 and k = 0
LEVELS = np.linspace(0, 1, 41)  # steps of 0.025: few colours, so the files are small
SIDE = torch.linspace(-2, 2, 401)
LATITUDE = torch.linspace(-math.pi / 2, math.pi / 2, 241).double()
LONGITUDE = torch.linspace(-math.pi, math.pi, 481).double()  # 0 is between green and blue
TIE = 1e-9  # two extremes of the same height differ only by rounding

Probability = Callable[[Tensor], Tensor]  # points (points, 3) of the unit sphere -> probability of red (points,)


def cosine_classifier(red_logit: Callable[[Tensor], Tensor]) -> Probability:
    """A softmax of scaled cosines; `red_logit` computes the logit of the red class, with the margin, from its angle."""

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
    """Return points (..., 3) from angles in radians; longitude 0 is between green and blue."""
    turned = longitude + math.pi / 4
    return torch.stack([latitude.cos() * turned.cos(), latitude.cos() * turned.sin(), latitude.sin()], dim=-1)


def extremes(probability: Probability, sign: int) -> Tensor:
    """Return the points (points, 3) of the sphere with the highest (`sign` 1) or the lowest (-1) probability.

    A derivative-free search starts from the best points of the grid: DR has a peak, not a smooth maximum.
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
    """Return the indices of the points without a better point within the radius; the points are in order of preference."""
    kept: list[int] = []
    for i, point in enumerate(points):
        if not kept or (points[kept] - point).norm(dim=1).min() > radius:
            kept.append(i)
    return kept


@in_house_style
def plane() -> Figure:
    """The probability of the red class over the plane, for two and for three prototypes."""
    prototypes = torch.tensor([[0.0, 0.5], [-0.6, -0.5], [0.6, -0.5]])
    grid = torch.cartesian_prod(SIDE, SIDE)  # (points, 2)
    models = {
        "softmax": SoftmaxHead(),
        "DR, ρ = 1": DistanceRatioHead(0.0),
        "DR, ρ = 2": DistanceRatioHead(math.log(2)),
    }
    figure = new_figure(4.2)
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    for row, classes in zip(axes, (2, 3), strict=True):
        for place, (name, head) in zip(row, models.items(), strict=True):
            red = head(grid.double(), prototypes[:classes].double()).detach().softmax(-1)[:, 0]
            shown = _draw_field(place, SIDE, SIDE, red.reshape(len(SIDE), len(SIDE)).T, [0.1, 0.25, 0.5, 0.75, 0.9])
            _draw_classes(place, prototypes[:classes].tolist())
            _draw_extreme(place, *grid[red.argmax()].tolist(), "x")
            place.set(aspect="equal", xlim=(-2.25, 2.25), ylim=(-2.25, 2.25), xticks=(-2, 0, 2), yticks=(-2, 0, 2))
            place.set_title(name if classes == 2 else "")
        row[0].set_ylabel(f"{classes} prototypes\nsecond coordinate")
    for place in axes[-1]:
        place.set_xlabel("first coordinate")
    figure.colorbar(shown, ax=axes, shrink=0.8, aspect=30, label=BAR, ticks=LEVELS[::10])
    _legend(figure, "{} prototype", ("x",), loc="outside lower center", ncols=4)
    return figure


@in_house_style
def sphere(all_extremes: dict[str, dict[str, Tensor]]) -> Figure:
    """The same over the unit sphere, seen from outside as a map of the world; with the highest and the lowest points."""
    up, around = torch.meshgrid(LATITUDE, LONGITUDE, indexing="ij")
    figure = new_figure(7.2)
    for number, (name, probability) in enumerate(SPHERE.items(), start=1):
        place = figure.add_subplot(4, 2, number, projection="mollweide")
        shown = _draw_field(place, around, up, probability(on_sphere(up, around).reshape(-1, 3)).reshape(up.shape))
        _draw_classes(place, ((0, math.pi / 2), (math.pi / 4, 0), (-math.pi / 4, 0)))
        for kind, mark in MARKS.items():
            for point in all_extremes[name][kind]:
                y = math.asin(point[2].clamp(-1, 1))
                x = math.remainder(math.atan2(point[1], point[0]) - math.pi / 4, 2 * math.pi)
                _draw_extreme(place, 0.0 if abs(y) > math.pi / 2 - 1e-4 else x, y, mark)  # a pole has any longitude
        place.set(xticks=[], yticks=[], title=name)
    rest = figure.add_subplot(4, 2, 8)
    rest.axis("off")
    _legend(rest, "vector of {}", tuple(MARKS.values()), loc="upper center", labelspacing=0.7)
    figure.colorbar(
        shown, ax=figure.axes, location="bottom", shrink=0.6, aspect=40, pad=0.02, label=BAR, ticks=LEVELS[::10]
    )
    return figure


def draw_maps(folder: Path) -> dict[str, dict[str, list[list[float]]]]:
    """Write both figures; return the points of the sphere with the highest and the lowest probability."""
    found = {
        name: {"max": extremes(probability, 1), "min": extremes(probability, -1)}
        for name, probability in SPHERE.items()
    }
    for name, figure in (("plane", plane()), ("sphere", sphere(found))):
        pixels = Image.open(io.BytesIO(encode(figure, "png", RESOLUTION))).convert("RGB")
        pixels.quantize(256, dither=Image.Dither.NONE).save(folder / f"distance_ratio_maps_{name}.png", optimize=True)
    return {
        name: {kind: [_rounded(p) for p in points] for kind, points in kinds.items()} for name, kinds in found.items()
    }


def _draw_field(place: Axes, x: Tensor, y: Tensor, red: Tensor, lines: Sequence[float] = (0.25, 0.5, 0.75)) -> Any:
    place.grid(visible=False)
    shown = place.contourf(x, y, red, levels=LEVELS, cmap=FIELD, antialiased=False)
    with warnings.catch_warnings():  # older versions of matplotlib cannot do this, and warn
        warnings.filterwarnings("ignore", "Rasterization of")
        shown.set_rasterized(True)  # thousands of corners otherwise, in an SVG
    place.contour(
        x, y, red, levels=lines, colors=["white" if level < 0.5 else BLACK for level in lines], linewidths=0.6
    )
    for spine in place.spines.values():
        spine.set_visible(False)
    return shown


def _draw_classes(place: Axes, points: Iterable[Sequence[float]]) -> None:
    for (x, y), (colour, marker) in zip(points, CLASSES.values(), strict=False):
        place.plot(
            x,
            y,
            marker,
            color=colour,
            markeredgecolor="white",
            markeredgewidth=1,
            markersize=8,
            clip_on=False,
            zorder=5,
        )


def _draw_extreme(place: Axes, x: float, y: float, mark: str) -> None:
    """A cross on what is bright, or a ring with a white rim around what is dark."""
    for colour, width in (("white", 3.4), (EXTREME, 1.6))[mark == "x" :]:
        place.plot(
            x,
            y,
            mark,
            color=colour,
            markersize=SIZES[mark],
            markeredgewidth=width,
            fillstyle="none",
            clip_on=False,
            zorder=6,
        )


def _legend(place: Figure | Axes, what: str, marks: Sequence[str], **where: Any) -> None:
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=8) for colour, marker in CLASSES.values()
    ]
    names = [what.format(name) for name in CLASSES]
    for mark in marks:
        handles.append(
            Line2D(
                [], [], color=EXTREME, marker=mark, linestyle="", markersize=9, fillstyle="none", markeredgewidth=1.6
            )
        )
        names.append({"x": "highest probability", "o": "lowest probability"}[mark])
    place.legend(handles, names, **where)


def _rounded(point: Tensor) -> list[float]:
    return [round(x, 3) + 0.0 for x in point.tolist()]  # + 0.0: no -0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs") / "distance_ratio")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, kinds in draw_maps(output).items():
        print(f"{name}: highest at {kinds['max']}, lowest at {kinds['min']}")
    print(f"distance_ratio_maps_plane and distance_ratio_maps_sphere are in {output}, as PNG and as SVG.")
