"""How an optimiser step moves the embeddings of an episode: the measures of the distance-ratio paper, and a history."""

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
"""What is subtracted from each embedding before alpha and phi are computed. `"points"` is the average embedding, as in the
text of the paper. `"coordinates"` is the mean of the embedding's own coordinates, as in the authors' published program."""

# Added to squared distances, so that a query that equals its prototype has a finite ratio.
EPSILON = 1e-10
# The measures of a step if all of them are undefined.
NOTHING = (math.nan,) * 4
# With a smaller scale, the step collapsed or reversed the embeddings.
LEAST_ALPHA = 1e-6


@equal_with_nan
@dataclass(frozen=True)
class StepDynamics:
    """The result of `training_dynamics`: how the embeddings of one episode moved in one optimiser step.

    Attributes:
        alpha: The scale that best explains the new embeddings by the old ones, `<X_o, X_n> / |X_o|^2`.
        norm_ratio: Phi, `|X_n - alpha X_o| / |X_n - X_o|`, in [0, 1]. Near 0, the step only rescaled the space. At 1, it
            did not rescale the space.
        psi_con: Geometric mean over the queries of the ratio (new / old) of the distances to the own prototype.
        psi_div: Geometric mean over the queries and the other classes of the ratio (new / old) of the distances to the
            prototypes of the other classes.
        undefined: Reasons why values are NaN; empty if no value is NaN.

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
        """`psi_con / alpha`. Below 1, queries came closer to their class than the scale explains."""
        return self.psi_con / self._scale

    @property
    def div_alpha(self) -> float:
        """`psi_div / alpha`. Above 1, queries moved further from the other classes than the scale explains."""
        return self.psi_div / self._scale

    @property
    def con_div(self) -> float:
        """`psi_con / psi_div`. Below 1, queries came closer to their class relative to the other classes."""
        return self.psi_con / self.psi_div

    @property
    def _scale(self) -> float:
        """Alpha, or NaN if it is too small to divide by."""
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
    """Return measures of how an optimiser step moved the embeddings of an episode.

    Args:
        before: (rows, dim) embeddings of all support and query images before the step. The first `shots` rows of each class
            are its support.
        after: (rows, dim) embeddings of the same rows after the step.
        labels: (rows,) integers or strings, the class of each row.
        shots: Number of support rows per class.
        episodes: Number of consecutive episodes in the rows. Alpha and phi are computed over all rows.
        centering: What is subtracted from each embedding before alpha and phi are computed. `"points"` subtracts the
            average embedding, as in the text of the paper. `"coordinates"` subtracts the mean of the embedding's own
            coordinates, as in the authors' published program. Distances between embeddings do not depend on it.

    Returns:
        The measures, computed in float64. Distances are to the means of the support, even if your loss represents a class
        differently. If a value is NaN, `undefined` has the reason. All measures are NaN if no embedding moved, or if an
        embedding is not finite. The ratios are NaN if the embeddings of an episode were one point before the step. The
        ratios to alpha are NaN if alpha is at most 0. `psi_div` is NaN if there is only one class.

    Raises:
        ValueError: If `before` and `after` have different shapes, or if the rows do not form episodes.

    References:
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning", section 3.1 and appendix C.

    Examples:
        A step that only doubles the scale:

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
            f"training_dynamics compares the same rows before and after a step, but got shapes {tuple(before.shape)} and "
            f"{tuple(after.shape)}. Embed the same batch twice."
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
    if moved == 0:
        return StepDynamics(*NOTHING, ("the step moved no embedding, so there is nothing to measure",))
    # Rows are compared with each other, not with their mean, because the mean of equal rows may be rounded.
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
            f"(collapsed), so there are no earlier distances to compare with"
        )
    if old_distances.shape[1] == 1:
        undefined.append("the episode has one class, so there is no distance to another class")
    return StepDynamics(alpha, phi, psi_con, psi_div, tuple(undefined))


def _alpha(x_old: Float[Tensor, "rows dim"], x_new: Float[Tensor, "rows dim"]) -> float:
    """Return the scale that best explains the new embeddings by the old ones; NaN if the old ones are all zero."""
    norm = x_old.square().sum()
    return float((x_old * x_new).sum() / norm) if norm > 0 else math.nan


def _why_alpha_is_undefined(alpha: float) -> list[str]:
    """Return the reason why alpha or the ratios to alpha are NaN; an empty list if they are not."""
    if math.isnan(alpha):
        return ["all embeddings were one point before the step (collapsed), so the scale alpha is undefined"]
    if alpha < LEAST_ALPHA:
        return [f"the new embeddings do not align with the old ones (alpha is {alpha:.3g})"]
    return []


def _distance_ratios(
    old: Float[Tensor, "episodes ways queries ways"], new: Float[Tensor, "episodes ways queries ways"]
) -> tuple[float, float]:
    """Return psi_con and psi_div, given squared distances of queries to prototypes before and after the step."""
    logs = 0.5 * (new.log() - old.log())
    ways = logs.shape[1]
    is_own_class = torch.eye(ways, dtype=torch.bool, device=logs.device)[:, None].expand(logs.shape[1:])
    psi_con = float(logs[:, is_own_class].mean().exp())
    psi_div = float(logs[:, ~is_own_class].mean().exp()) if ways > 1 else math.nan
    return psi_con, psi_div


def _episodes_without_distances(old: Float[Tensor, "episodes ways queries ways"]) -> int:
    """Return the number of episodes that were one point. The ratios of their distances would only show `EPSILON`."""
    return int((old <= 2 * EPSILON).flatten(1).all(dim=1).sum())


def check_centering(centering: str, owner: str) -> None:
    """Refuse an unknown centering, with the name of the owner in the message."""
    fix = (
        "Choose 'points' to subtract the average embedding (the text of the paper), or 'coordinates' to subtract each "
        "embedding's own mean (the authors' program)."
    )
    refuse_unknown(owner, "centering", centering, Centering, fix)


def _exact(embeddings: Tensor) -> Tensor:
    """Return embeddings in float64 without a gradient, on the CPU if they are on MPS, which has no float64."""
    embeddings = embeddings.detach()
    if embeddings.device.type == "mps":
        embeddings = embeddings.cpu()
    return embeddings.double()


def _class_distances(embeddings: Tensor, labels: Tensor, shots: int, episodes: int) -> Tensor:
    """Return squared distances plus `EPSILON` of queries to prototypes, of shape (episodes, ways, queries, ways)."""
    support, query = split_episodes(embeddings, labels, shots=shots, episodes=episodes)
    prototypes = support.mean(dim=2)  # (episodes, ways, dim)
    ways, queries = query.shape[1:3]
    distances = torch.cdist(query.flatten(1, 2), prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square().add(EPSILON).reshape(-1, ways, queries, ways)


def episode_in(labels: Int[Tensor, "items"], shots: int) -> tuple[Int[Tensor, "chosen"], int, int]:
    """Return the items of a batch that form an episode: equally many per class, of the classes with more than `shots`.

    Labels are on the CPU. `shots` is the number of support items per class.

    Returns:
        Ascending indices of the items, the number of items per class, and the number of classes. If all classes have
        equally many items, these are all items, even if `training_dynamics` refuses them because they are too few.

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
            f"{ways} of the {len(counts)} classes of a batch have more than shots={shots} items, but an episode needs "
            "two such classes. Train with an EpisodicBatchSampler, or on larger batches of fewer classes."
        )
    size = int(counts[is_large].min())
    order = classes.argsort(stable=True)  # by class, then in the order of the batch
    class_of_item = classes[order]
    number_in_class = torch.arange(len(order), device=labels.device) - (counts.cumsum(0) - counts)[class_of_item]
    is_used = is_large[class_of_item] & (number_in_class < size)
    return order[is_used].sort().values, size, ways


FILE_FORMAT = 1
# The fields of a step that a file contains. All other values follow from them.
MEASURED = ("alpha", "norm_ratio", "psi_con", "psi_div")


@dataclass(frozen=True)
class DynamicsHistory:
    """The measured steps of a run.

    Attributes:
        steps: Number of each optimiser step, from 1.
        measures: The measures of each step.
        centering: The centring of all measurements (see `training_dynamics`).

    Raises:
        ValueError: If the number of steps differs from the number of measures.

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
                f"DynamicsHistory: there are {counted(len(self.steps), 'step')}, but "
                f"{counted(len(self.measures), 'measure')}. Pass one measure per step."
            )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, StepDynamics]]:
        return iter(zip(self.steps, self.measures, strict=True))

    def values(self, name: str) -> Float[Tensor, "steps"]:
        """Return one measure for all steps.

        Args:
            name: A field or property of `StepDynamics`.

        Returns:
            (steps,) float64; NaN if the measure is undefined.
        """
        return torch.tensor([getattr(measure, name) for measure in self.measures], dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists by name for JSON; NaN becomes None."""
        columns = {name: self.values(name).tolist() for name in MEASURED}
        undefined = [measure.undefined for measure in self.measures]
        head = {"format": FILE_FORMAT, "centering": self.centering, "steps": self.steps}
        stored: dict[str, Any] = without_nan(head | columns | {"undefined": undefined})
        return stored

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> DynamicsHistory:
        """Return the history from the result of `to_dict`.

        Raises:
            ValueError: If `state` is not a history.
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
                f"This is not a history of training dynamics ({type(error).__name__}: {error}). Pass the file "
                "training_dynamics.json that TrainingDynamicsMonitor writes."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the history as JSON. The write is atomic: an interrupted call leaves the old file.

        Args:
            path: Path or URL of the file, such as `s3://bucket/steps.json`. Its folder is created if necessary. An existing
                file is replaced.
        """
        content = json.dumps(self.to_dict()) + "\n"
        if is_address(path):
            write_file(path, content.encode())
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a unique name
        try:
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> DynamicsHistory:
        """Return the history that `save` wrote.

        Args:
            path: Path or URL of the file.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is not a history, or if its URL cannot be reached.
        """
        content = read_file(path)
        try:
            state = json.loads(content.decode("utf-8"))
            return cls.from_dict(state if isinstance(state, dict) else {})
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path_text(path)}: {error}") from error


def without_nan(value: Any) -> Any:
    """Return plain values with None instead of NaN, because JSON has no NaN."""
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
