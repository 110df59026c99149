"""How a training step moves the embeddings of an episode: the measures of the distance-ratio paper, and their history."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_address, path_text, read_file, write_file
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._reading import as_tensor, refuse_unknown
from fewshot_callbacks.functional.episodes import split_episodes
from fewshot_callbacks.system.words import counted

Centering = Literal["points", "coordinates"]
"""What is subtracted from each embedding before alpha and phi are taken: `"points"`: the average embedding, as the text
of the paper says; `"coordinates"`: the mean of the embedding's own coordinates, as the authors' published program does."""

# Added to squared distances, so that a query on its prototype gives a finite ratio.
EPSILON = 1e-10
# The measures of a step that has none.
NOTHING = (math.nan,) * 4
# With a smaller scale the embeddings collapsed, or turned around, in one step.
LEAST_ALPHA = 1e-6


@equal_with_nan
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
        """Alpha as a divisor; NaN if it is too small for one."""
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
    """Return measures of the effect of an optimiser step on the embeddings of an episode.

    Args:
        before: (rows, dim) embeddings of all support and query images just before the step; the first `shots` rows of each
            class are its support.
        after: Embeddings of the same rows right after the step.
        labels: The class of each row, any integers or strings.
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
    before = as_tensor(before, "before", call)
    after = as_tensor(after, "after", call)
    if before.shape != after.shape:
        raise InputError(
            f"training_dynamics compares the same rows before and after a step; got shapes {tuple(before.shape)} and "
            f"{tuple(after.shape)}. Embed one batch twice."
        )
    check_centering(centering, "training_dynamics")
    before = _exact(before)
    after = _exact(after)
    labels = as_labels(labels, "labels", call).codes.to(before.device)
    old_distances = _class_distances(before, labels, shots, episodes)
    new_distances = _class_distances(after, labels, shots, episodes)
    if not (before.isfinite().all() and after.isfinite().all()):
        return StepDynamics(*NOTHING, ("embeddings are not finite (NaN or Inf)",))
    dim = 0 if centering == "points" else 1
    x_old = before - before.mean(dim=dim, keepdim=True)
    x_new = after - after.mean(dim=dim, keepdim=True)
    moved = torch.linalg.vector_norm(x_new - x_old)
    if moved == 0:  # no step, which is neither good nor bad
        return StepDynamics(*NOTHING, ("the step moved no embedding, so there is nothing to measure",))
    # The rows themselves are compared: a mean may round, so that equal rows differ from it.
    collapsed = bool((before == before[:1]).all())
    alpha = math.nan if collapsed else _alpha(x_old, x_new)
    undefined = _why_alpha_is_undefined(alpha)
    phi = math.nan
    if not math.isnan(alpha):
        phi = min(1.0, float(torch.linalg.vector_norm(x_new - alpha * x_old) / moved))
    psi_con, psi_div = _distance_ratios(old_distances, new_distances)
    without_distances = _episodes_without_distances(old_distances)
    if without_distances:
        psi_con = psi_div = math.nan
        undefined.append(
            f"all embeddings of {without_distances} of {counted(episodes, 'episode')} were one point before the step "
            f"(collapsed), so the distances have nothing to be compared with"
        )
    if old_distances.shape[1] == 1:
        undefined.append("the episode has one class, so there is no distance to another class")
    return StepDynamics(alpha, phi, psi_con, psi_div, tuple(undefined))


def _alpha(x_old: Float[Tensor, "rows dim"], x_new: Float[Tensor, "rows dim"]) -> float:
    """Return the scale that best explains the new embeddings by the old ones; NaN if these are all zero."""
    norm = x_old.square().sum()
    return float((x_old * x_new).sum() / norm) if norm > 0 else math.nan


def _why_alpha_is_undefined(alpha: float) -> list[str]:
    """Return the reason why alpha or the ratios to alpha are NaN; empty if they are not."""
    if math.isnan(alpha):
        return ["all embeddings were one point before the step (collapsed), so the scale alpha is undefined"]
    if alpha < LEAST_ALPHA:
        return [f"the new embeddings do not align with the old ones (alpha is {alpha:.3g})"]
    return []


def _distance_ratios(
    old: Float[Tensor, "episodes ways queries ways"], new: Float[Tensor, "episodes ways queries ways"]
) -> tuple[float, float]:
    """Return psi_con and psi_div, given squared distances of the queries to the prototypes before and after the step."""
    logs = 0.5 * (new.log() - old.log())
    ways = logs.shape[1]
    is_own_class = torch.eye(ways, dtype=torch.bool, device=logs.device)[:, None].expand(logs.shape[1:])
    psi_con = float(logs[:, is_own_class].mean().exp())
    psi_div = float(logs[:, ~is_own_class].mean().exp()) if ways > 1 else math.nan
    return psi_con, psi_div


def _episodes_without_distances(old: Float[Tensor, "episodes ways queries ways"]) -> int:
    """Return the number of episodes that were one point: the ratios of their distances would be those of `EPSILON`."""
    return int((old <= 2 * EPSILON).flatten(1).all(dim=1).sum())


def check_centering(centering: str, owner: str) -> None:
    """Raise an error of this owner for an unknown centering."""
    fix = (
        "Choose 'points', the average embedding (the text of the paper), or 'coordinates', each embedding's own mean (the "
        "authors' program)."
    )
    refuse_unknown(owner, "centering", centering, Centering, fix)


def _exact(embeddings: Tensor) -> Tensor:
    """Return embeddings in float64, without a gradient; on the CPU if their device is MPS, which has no float64."""
    embeddings = embeddings.detach()
    if embeddings.device.type == "mps":
        embeddings = embeddings.cpu()
    return embeddings.double()


def _class_distances(embeddings: Tensor, labels: Tensor, shots: int, episodes: int) -> Tensor:
    """Return squared distances, plus `EPSILON`, of each query to each prototype: (episodes, ways, queries, ways)."""
    support, query = split_episodes(embeddings, labels, shots=shots, episodes=episodes)
    prototypes = support.mean(dim=2)  # (episodes, ways, dim)
    ways, queries = query.shape[1:3]
    distances = torch.cdist(query.flatten(1, 2), prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square().add(EPSILON).reshape(-1, ways, queries, ways)


def episode_in(labels: Int[Tensor, "items"], shots: int) -> tuple[Int[Tensor, "chosen"], int, int]:
    """Return the items of a batch that make one episode: equally many of each class that has more than `shots`.

    Args:
        labels: Labels of the batch, on the CPU.
        shots: Support items of each class.

    Returns:
        Indices of the items, ascending; the items of each class; the number of classes. All items of a batch with equally
        many of each class, even if they are too few, which `training_dynamics` refuses.

    Raises:
        ValueError: If fewer than two classes have more than `shots` items.

    Examples:
        >>> episode_in(torch.tensor([5, 7, 7, 5, 7, 9]), shots=1)
        (tensor([0, 1, 2, 3]), 2, 2)
    """
    _, classes, counts = labels.unique(return_inverse=True, return_counts=True)
    if bool((counts == counts[0]).all()):
        return torch.arange(len(labels), device=labels.device), int(counts[0]), len(counts)
    is_large = counts > shots
    ways = int(is_large.sum())
    if ways < 2:
        raise InputError(
            f"{ways} of the {len(counts)} classes of a batch have more than shots={shots} items, and two are needed. Train "
            "with an EpisodicBatchSampler, or on larger batches of fewer classes."
        )
    size = int(counts[is_large].min())
    order = classes.argsort(stable=True)  # by class, in the order of the batch
    class_of_item = classes[order]
    number_in_class = torch.arange(len(order), device=labels.device) - (counts.cumsum(0) - counts)[class_of_item]
    is_used = is_large[class_of_item] & (number_in_class < size)
    return order[is_used].sort().values, size, ways


FILE_FORMAT = 1
# Fields of a step that a file holds; the others follow from them.
MEASURED = ("alpha", "norm_ratio", "psi_con", "psi_div")


@dataclass(frozen=True)
class DynamicsHistory:
    """The measured steps of a run.

    Attributes:
        steps: Numbers of the optimiser steps, counted from 1.
        measures: The measures of each step.
        centering: The centring with which all of them were measured (see `training_dynamics`).

    Raises:
        ValueError: If the numbers of steps and measures differ.

    Examples:
        >>> history = DynamicsHistory((100, 200), (StepDynamics(1.1, 0.9, 1.0, 1.2), StepDynamics(1.0, 0.8, 0.9, 1.1)))
        >>> history.values("con_div")
        tensor([0.8333, 0.8182], dtype=torch.float64)
    """

    steps: tuple[int, ...] = ()
    measures: tuple[StepDynamics, ...] = ()
    centering: Centering = "points"

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.measures):
            raise InputError(
                f"{counted(len(self.steps), 'step')} came with {counted(len(self.measures), 'measure')}. Pass one for "
                "each step."
            )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, StepDynamics]]:
        return iter(zip(self.steps, self.measures, strict=True))

    def values(self, name: str) -> Float[Tensor, "steps"]:
        """Return one measure of all steps.

        Args:
            name: A field or property of `StepDynamics`.

        Returns:
            (steps,) float64; NaN where the measure is undefined, empty for no steps.
        """
        return torch.tensor([getattr(measure, name) for measure in self.measures], dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists by name, for JSON; NaN becomes None."""
        columns = {name: self.values(name).tolist() for name in MEASURED}
        undefined = [measure.undefined for measure in self.measures]
        head = {"format": FILE_FORMAT, "centering": self.centering, "steps": self.steps}
        stored: dict[str, Any] = without_nan(head | columns | {"undefined": undefined})
        return stored

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> DynamicsHistory:
        """Return the history that `to_dict` has stored.

        Raises:
            ValueError: If it does not hold a history.
        """
        try:
            if state["format"] != FILE_FORMAT:
                raise InputError(f"format {state['format']!r} is unknown")
            columns: list[Any] = [state[name] for name in MEASURED]
            measures = []
            for *row, why in zip(*columns, state["undefined"], strict=True):
                alpha, phi, psi_con, psi_div = (math.nan if value is None else float(value) for value in row)
                measures.append(StepDynamics(alpha, phi, psi_con, psi_div, tuple(why)))
            return cls(tuple(state["steps"]), tuple(measures), state["centering"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"This is not a history of training dynamics ({type(error).__name__}: {error}). TrainingDynamicsMonitor "
                "writes one, training_dynamics.json."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the history as JSON, atomically: an interrupted call leaves the old file.

        Args:
            path: The file, or its address, such as `s3://bucket/steps.json`; its folder is created if necessary. A file of
                this name is replaced, whoever has written it.
        """
        content = json.dumps(self.to_dict()) + "\n"
        if is_address(path):
            write_file(path, content.encode())
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a name that no other file has
        try:
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> DynamicsHistory:
        """Return the history that `save` has written.

        Args:
            path: The file, or its address.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If it does not hold a history, or its address cannot be reached.
        """
        content = read_file(path)
        try:
            state = json.loads(content.decode("utf-8"))
            return cls.from_dict(state if isinstance(state, dict) else {})
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path_text(path)}: {error}") from error


def without_nan(value: Any) -> Any:
    """Return plain values with None in the place of NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
