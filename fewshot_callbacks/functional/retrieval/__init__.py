"""Retrieval metrics of embeddings, exact and in bounded memory."""

from fewshot_callbacks.engine.options import Progress
from fewshot_callbacks.engine.scores.products import Similarity
from fewshot_callbacks.functional.retrieval.compare import compare_reports
from fewshot_callbacks.functional.retrieval.cost import EvaluationPlan, plan_evaluation
from fewshot_callbacks.functional.retrieval.evaluate import check_evaluation_settings, evaluate_retrieval
from fewshot_callbacks.functional.retrieval.generalization_gap import GeneralizationGap, generalization_gap
from fewshot_callbacks.functional.retrieval.grouped_recall import GroupedRecall, grouped_recall
from fewshot_callbacks.functional.retrieval.label_groups import Unmatched, label_groups
from fewshot_callbacks.functional.retrieval.multilabel import (
    Gain,
    MultilabelReport,
    check_gain,
    evaluate_multilabel,
    multilabel_metrics,
)
from fewshot_callbacks.functional.retrieval.operating_points import Enclosure, ErrorRatePoint, OperatingPoint
from fewshot_callbacks.functional.retrieval.rank_metrics import Divisor, Ties
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings

__all__ = [
    "Divisor",
    "Enclosure",
    "ErrorRatePoint",
    "EvaluationPlan",
    "Gain",
    "GeneralizationGap",
    "GroupedRecall",
    "MultilabelReport",
    "OperatingPoint",
    "Progress",
    "RetrievalReport",
    "RetrievalSettings",
    "Similarity",
    "Ties",
    "Unmatched",
    "check_evaluation_settings",
    "check_gain",
    "compare_reports",
    "evaluate_multilabel",
    "evaluate_retrieval",
    "generalization_gap",
    "grouped_recall",
    "label_groups",
    "multilabel_metrics",
    "plan_evaluation",
]
