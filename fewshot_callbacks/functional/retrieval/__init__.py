"""Exact retrieval metrics for embeddings, computed in bounded memory."""

from fewshot_callbacks.engine.options import Progress
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.functional.items import Share
from fewshot_callbacks.functional.retrieval.compare import GeneralizationGap, compare_reports, generalization_gap
from fewshot_callbacks.functional.retrieval.compression import (
    CompressionReport,
    CompressionVariant,
    compression_costs,
)
from fewshot_callbacks.functional.retrieval.cost import EvaluationPlan, plan_evaluation
from fewshot_callbacks.functional.retrieval.decisions import PooledDecisions
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.gain import Gain
from fewshot_callbacks.functional.retrieval.gate import failed_requirements
from fewshot_callbacks.functional.retrieval.grouped_recall import GroupedRecall, grouped_recall, label_groups
from fewshot_callbacks.functional.retrieval.measured_cost import MeasuredEvaluation, TimedSample, measure_evaluation
from fewshot_callbacks.functional.retrieval.needed_classes import ClassesNeeded, classes_needed
from fewshot_callbacks.functional.retrieval.operating_points import Enclosure, ErrorRatePoint, OperatingPoint
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.functional.retrieval.rank_metrics import hits_within, relevant_ranks
from fewshot_callbacks.functional.retrieval.ranking import Ranking, RankInterval, rank_reports
from fewshot_callbacks.functional.retrieval.registry import METRICS, RELEVANCE_METRICS, requested_metric
from fewshot_callbacks.functional.retrieval.relevance import Relevance
from fewshot_callbacks.functional.retrieval.report import RetrievalReport, TieRange
from fewshot_callbacks.functional.retrieval.revisited import revisited_protocol
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings, Unmatched
from fewshot_callbacks.functional.retrieval.slice_gains import SliceGain, SliceGains, compare_slices
from fewshot_callbacks.functional.retrieval.slices import Attribute, Slice, Slices
from fewshot_callbacks.functional.retrieval.threshold_consistency import ThresholdConsistency
from fewshot_callbacks.settings import (
    DEFAULT_METRICS,
    Code,
    Divisor,
    Metric,
    RequestedMetric,
    RetrievalOptions,
    SearchOptions,
    Similarity,
    Ties,
)

__all__ = [
    "DEFAULT_METRICS",
    "METRICS",
    "RELEVANCE_METRICS",
    "Attribute",
    "ClassesNeeded",
    "Code",
    "CompressionReport",
    "CompressionVariant",
    "Divisor",
    "Enclosure",
    "ErrorRatePoint",
    "EvaluationPlan",
    "Gain",
    "GeneralizationGap",
    "GroupedRecall",
    "MeasuredEvaluation",
    "Metric",
    "OperatingPoint",
    "PairCounts",
    "PooledDecisions",
    "Progress",
    "RankBlock",
    "RankInterval",
    "Ranking",
    "Relevance",
    "RequestedMetric",
    "RetrievalOptions",
    "RetrievalReport",
    "RetrievalSettings",
    "SearchOptions",
    "Share",
    "Similarity",
    "Slice",
    "SliceGain",
    "SliceGains",
    "Slices",
    "ThresholdConsistency",
    "TieRange",
    "Ties",
    "TimedSample",
    "Unmatched",
    "classes_needed",
    "compare_reports",
    "compare_slices",
    "compression_costs",
    "evaluate_retrieval",
    "failed_requirements",
    "generalization_gap",
    "grouped_recall",
    "hits_within",
    "label_groups",
    "measure_evaluation",
    "plan_evaluation",
    "rank_reports",
    "relevant_ranks",
    "requested_metric",
    "revisited_protocol",
]
