"""Retrieval metrics of embeddings, exact and in bounded memory."""

from fewshot_callbacks.engine.options import Progress
from fewshot_callbacks.engine.vectors import Similarity
from fewshot_callbacks.functional.retrieval.compare import compare_reports
from fewshot_callbacks.functional.retrieval.cost import EvaluationPlan, plan_evaluation
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
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
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.functional.retrieval.query_metrics import metric_names
from fewshot_callbacks.functional.retrieval.rank_metrics import Divisor, Ties
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.retrieval.settings import (
    RankOptions,
    RetrievalOptions,
    RetrievalSettings,
    SearchOptions,
    described_settings,
    shows_settings,
)

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
    "PairCounts",
    "Progress",
    "RankOptions",
    "RetrievalOptions",
    "RetrievalReport",
    "RetrievalSettings",
    "SearchOptions",
    "Similarity",
    "Ties",
    "Unmatched",
    "check_gain",
    "compare_reports",
    "described_settings",
    "evaluate_multilabel",
    "evaluate_retrieval",
    "generalization_gap",
    "grouped_recall",
    "label_groups",
    "metric_names",
    "multilabel_metrics",
    "plan_evaluation",
    "shows_settings",
]
