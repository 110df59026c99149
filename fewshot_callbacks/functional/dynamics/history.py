"""The measures of the steps of one training, in memory and on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.functional.dynamics.step import Centering, StepDynamics

# The four measures that the paper compares, and where a step counts as good.
RATIOS: dict[str, Literal["above 1", "below 1"] | None] = {
    "norm_ratio": None,
    "con_alpha": "below 1",
    "div_alpha": "above 1",
    "con_div": "below 1",
}


FILE_FORMAT = 1


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
            raise ValueError(
                f"{len(self.steps)} steps came with {len(self.measures)} measures. Pass one for each step."
            )

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, StepDynamics]]:
        return iter(zip(self.steps, self.measures, strict=True))

    def values(self, name: str) -> Float[Tensor, "steps"]:
        """Collect one measure of all steps.

        Args:
            name: A field or property of `StepDynamics`.

        Returns:
            (steps,) float64; NaN where the measure is undefined, empty for no steps.
        """
        return torch.tensor([getattr(measure, name) for measure in self.measures], dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists by name, for JSON; NaN becomes None."""
        columns = ("alpha", "norm_ratio", "psi_con", "psi_div")
        return {
            "format": FILE_FORMAT,
            "centering": self.centering,
            "steps": list(self.steps),
            **{
                name: [None if math.isnan(value) else value for value in self.values(name).tolist()] for name in columns
            },
            "undefined": [list(measure.undefined) for measure in self.measures],
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> DynamicsHistory:
        """Read what `to_dict` returned.

        Raises:
            ValueError: If it does not hold a history.
        """
        try:
            if state["format"] != FILE_FORMAT:
                raise ValueError(f"format {state['format']!r} is unknown")
            columns: list[Any] = [state[name] for name in ("alpha", "norm_ratio", "psi_con", "psi_div")]
            measures = []
            for *row, why in zip(*columns, state["undefined"], strict=True):
                alpha, phi, psi_con, psi_div = (math.nan if value is None else float(value) for value in row)
                measures.append(StepDynamics(alpha, phi, psi_con, psi_div, tuple(why)))
            return cls(tuple(state["steps"]), tuple(measures), state["centering"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"This is not a history of training dynamics ({type(error).__name__}: {error}). TrainingDynamicsMonitor "
                "writes one, training_dynamics.json."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the history as JSON, atomically: an interrupted call leaves the old file.

        Args:
            path: The file; its folder is created if necessary.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        beside.write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")
        beside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> DynamicsHistory:
        """Read what `save` wrote.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If it does not hold a history.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_dict(state if isinstance(state, dict) else {})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
