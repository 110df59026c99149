"""The effect of one optimiser step on an episode: the measures of the distance-ratio paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._tensors import as_tensor
from fewshot_callbacks.functional.episodes.splitting import split_episodes

Centering = Literal["points", "coordinates"]
"""What is subtracted from each embedding before alpha and phi are taken: `"points"`: the average embedding, as the text
of the paper says; `"coordinates"`: the mean of the embedding's own coordinates, as the authors' published program does."""

# Added to squared distances, so that a query on its prototype gives a finite ratio.
EPSILON = 1e-10

# A scale below this is none: the embeddings collapsed, or turned around, in one step.
LEAST_ALPHA = 1e-6


@dataclass(frozen=True)
class StepDynamics:
    """How the embeddings of one episode moved in one optimiser step.

    Attributes:
        alpha: The scale that best explains the new embeddings by the old ones, `<X_o, X_n> / |X_o|^2`.
        norm_ratio: Phi, `|X_n - alpha X_o| / |X_n - X_o|` in [0, 1]: near 0 the step only rescaled the space; at 1 it
            did not rescale the space at all.
        psi_con: Geometric mean over queries of (new / old) distance to the prototype of their class.
        psi_div: Geometric mean over queries and other classes of (new / old) distance to the prototypes of these.
        undefined: The reasons why values are NaN; empty if none is.

    All other fields are NaN where they are undefined.

    Examples:
        >>> step = StepDynamics(alpha=1.25, norm_ratio=0.5, psi_con=1.0, psi_div=1.25)
        >>> step.con_alpha, step.div_alpha, step.con_div
        (0.8, 1.0, 0.8)
    """

    alpha: float
    norm_ratio: float
    psi_con: float
    psi_div: float
    undefined: tuple[str, ...] = ()

    @property
    def con_alpha(self) -> float:
        """`psi_con / alpha`; below 1 queries came closer to their class than the scale alone explains."""
        return self.psi_con / self._scale

    @property
    def div_alpha(self) -> float:
        """`psi_div / alpha`; above 1 queries went further from the other classes than the scale alone explains."""
        return self.psi_div / self._scale

    @property
    def con_div(self) -> float:
        """`psi_con / psi_div`; below 1 queries came closer to their class relative to the others."""
        return self.psi_con / self.psi_div

    @property
    def _scale(self) -> float:
        return self.alpha if self.alpha >= LEAST_ALPHA else math.nan


def training_dynamics(
    before: Any,
    after: Any,
    labels: Any,
    *,
    shots: int,
    episodes: int = 1,
    centering: Centering = "points",
) -> StepDynamics:
    """Measure the effect of an optimiser step on the embeddings of an episode.

    Args:
        before: (rows, dim) embeddings of all support and query images just before the step; the first `shots` rows of each
            class are its support.
        after: Embeddings of the same rows right after the step.
        labels: The class of each row, any integers or words.
        shots: Number of support rows of each class.
        episodes: Number of consecutive episodes in the rows; alpha and phi are computed over all rows.
        centering: What is subtracted from each embedding before alpha and phi are computed: `"points"` subtracts the
            average embedding, as the text of the paper says; `"coordinates"` the mean of the embedding's own
            coordinates, as the authors' published program does. Distances between embeddings do not depend on it.

    Returns:
        The measures, computed in float64. Distances are to the means of the support, even if the loss represents a
        class differently. Where a value is NaN, `undefined` gives the reason: no embedding moved, or a value is not
        finite (all measures); the embeddings were a single point before the step, all of them or those of an episode
        (the ratios); alpha is 0 or less (the ratios to alpha); there is only one class (psi_div).

    Raises:
        ValueError: If before and after have different shapes, or the rows do not form episodes.

    References:
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning", section 3.1 and appendix C.

    Examples:
        A step that doubles the space, and nothing else:

        >>> import torch
        >>> before, labels = torch.randn(12, 8), torch.arange(4).repeat(3)
        >>> step = training_dynamics(before, 2 * before, labels, shots=1)
        >>> round(step.alpha, 6), round(step.norm_ratio, 6), round(step.con_alpha, 6), round(step.con_div, 6)
        (2.0, 0.0, 1.0, 1.0)
    """
    call = "training_dynamics"
    before, after = as_tensor(before, "before", call), as_tensor(after, "after", call)
    if before.shape != after.shape:
        raise ValueError(
            f"training_dynamics compares the same rows before and after a step; got shapes {tuple(before.shape)} and "
            f"{tuple(after.shape)}. Embed one batch twice."
        )
    check_centering(centering, "training_dynamics")
    before, after = (_exact(embeddings) for embeddings in (before, after))
    labels = as_labels(labels, "labels", call).codes.to(before.device)
    old, new = (_class_distances(embeddings, labels, shots, episodes) for embeddings in (before, after))
    if not (before.isfinite().all() and after.isfinite().all()):
        return StepDynamics(math.nan, math.nan, math.nan, math.nan, ("embeddings are not finite (NaN or Inf)",))
    undefined = []

    dim = 0 if centering == "points" else 1
    x_old, x_new = (embeddings - embeddings.mean(dim=dim, keepdim=True) for embeddings in (before, after))
    # a mean may round, so that equal rows can differ from it
    collapsed = bool((before == before[:1]).all())
    norm = x_old.square().sum()
    alpha = float((x_old * x_new).sum() / norm) if norm > 0 and not collapsed else math.nan
    moved = torch.linalg.vector_norm(x_new - x_old)
    if moved == 0:  # no step, which is neither good nor bad
        nothing = "the step moved no embedding, so there is nothing to measure"
        return StepDynamics(math.nan, math.nan, math.nan, math.nan, (nothing,))
    if math.isnan(alpha):
        undefined.append("all embeddings were one point before the step (collapsed), so the scale alpha is undefined")
    elif alpha < LEAST_ALPHA:
        undefined.append(f"the new embeddings do not align with the old ones (alpha is {alpha:.3g})")
    phi = math.nan
    if not math.isnan(alpha):
        phi = min(1.0, float(torch.linalg.vector_norm(x_new - alpha * x_old) / moved))

    ratios = 0.5 * (new.log() - old.log())  # (episodes, ways, queries, ways): ln psi
    ways = ratios.shape[1]
    same = torch.eye(ways, dtype=torch.bool, device=ratios.device)[:, None].expand(ratios.shape[1:])
    psi_con = float(ratios[:, same].mean().exp())
    psi_div = float(ratios[:, ~same].mean().exp()) if ways > 1 else math.nan
    # Squared distances that are all no larger than what is added to them leave ratios of EPSILON alone.
    without_distances = int((old <= 2 * EPSILON).flatten(1).all(dim=1).sum())
    if without_distances:
        psi_con = psi_div = math.nan
        undefined.append(
            f"all embeddings of {without_distances} of {episodes} episodes were one point before the step "
            f"(collapsed), so the distances have nothing to be compared with"
        )
    if ways == 1:
        undefined.append("the episode has one class, so there is no distance to another class")
    return StepDynamics(alpha, phi, psi_con, psi_div, tuple(undefined))


def check_centering(centering: str, owner: str) -> None:
    """Refuse a centering that there is not.

    Args:
        centering: Name of a centring.
        owner: Who was given it, for the message.

    Raises:
        ValueError: It is none of `Centering`.
    """
    if centering not in get_args(Centering):
        raise ValueError(
            f"{owner}: there is no centering={centering!r}. Choose 'points', the average embedding (the text of the paper), "
            "or 'coordinates', each embedding's own mean (the authors' program)."
        )


def _exact(embeddings: Tensor) -> Tensor:
    embeddings = embeddings.detach()
    return (embeddings.cpu() if embeddings.device.type == "mps" else embeddings).double()


def _class_distances(embeddings: Tensor, labels: Tensor, shots: int, episodes: int) -> Tensor:
    """Squared distance of each query to each prototype of its episode, plus `EPSILON`: (episodes, ways, queries, ways)."""
    support, query = split_episodes(embeddings, labels, shots=shots, episodes=episodes)
    prototypes = support.mean(dim=2)  # (episodes, ways, dim)
    ways, queries = query.shape[1:3]
    distances = torch.cdist(query.flatten(1, 2), prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square().add(EPSILON).reshape(-1, ways, queries, ways)
