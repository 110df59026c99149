"""The maths: tensors in, tensors or a small frozen result out. No Lightning, no state, no logging."""

from fewshot_callbacks.functional.comparison import compare_reports
from fewshot_callbacks.functional.cost import EvaluationPlan, plan_evaluation
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, discriminant_ratio
from fewshot_callbacks.functional.dynamics import DynamicsHistory, StepDynamics, training_dynamics
from fewshot_callbacks.functional.dynamics_comparison import DynamicsComparison, MeasureComparison, compare_dynamics
from fewshot_callbacks.functional.episodes import (
    EpisodeAccuracy,
    EpisodeList,
    sample_episodes,
    split_episode,
    split_episodes,
    summarize_accuracies,
)
from fewshot_callbacks.functional.generalization_gap import GeneralizationGap, generalization_gap
from fewshot_callbacks.functional.grouped_recall import GroupedRecall, grouped_recall
from fewshot_callbacks.functional.intervals import (
    Difference,
    Interval,
    clustered_mean_interval,
    mean_interval,
    paired_difference_interval,
)
from fewshot_callbacks.functional.label_splits import label_groups
from fewshot_callbacks.functional.multilabel import MultilabelReport, evaluate_multilabel
from fewshot_callbacks.functional.operating_points import Enclosure, ErrorRatePoint, OperatingPoint
from fewshot_callbacks.functional.report import RetrievalReport
from fewshot_callbacks.functional.retrieval import evaluate_retrieval
from fewshot_callbacks.functional.subsets import class_subset
from fewshot_callbacks.functional.variance_ratio import VarianceRatioEstimate, variance_ratio, variance_ratio_of_set

__all__ = [
    "ClassMoments",
    "Difference",
    "DynamicsComparison",
    "DynamicsHistory",
    "Enclosure",
    "EpisodeAccuracy",
    "EpisodeList",
    "ErrorRatePoint",
    "EvaluationPlan",
    "GeneralizationGap",
    "GroupedRecall",
    "Interval",
    "MeasureComparison",
    "MultilabelReport",
    "OperatingPoint",
    "RetrievalReport",
    "StepDynamics",
    "VarianceRatioEstimate",
    "class_subset",
    "clustered_mean_interval",
    "compare_dynamics",
    "compare_reports",
    "discriminant_ratio",
    "evaluate_multilabel",
    "evaluate_retrieval",
    "generalization_gap",
    "grouped_recall",
    "label_groups",
    "mean_interval",
    "paired_difference_interval",
    "plan_evaluation",
    "sample_episodes",
    "split_episode",
    "split_episodes",
    "summarize_accuracies",
    "training_dynamics",
    "variance_ratio",
    "variance_ratio_of_set",
]
