"""How a training step moves the embeddings of an episode: measures, their history and comparison."""

from fewshot_callbacks.functional.dynamics.compare import (
    DynamicsComparison,
    MeasureComparison,
    compare_dynamics,
    p_value,
    without_nan,
)
from fewshot_callbacks.functional.dynamics.history import RATIOS, DynamicsHistory
from fewshot_callbacks.functional.dynamics.step import Centering, StepDynamics, check_centering, training_dynamics

__all__ = [
    "RATIOS",
    "Centering",
    "DynamicsComparison",
    "DynamicsHistory",
    "MeasureComparison",
    "StepDynamics",
    "check_centering",
    "compare_dynamics",
    "p_value",
    "training_dynamics",
    "without_nan",
]
