"""PyTorch Lightning callbacks that evaluate an embedding exactly while it trains, and networks to train it with.

Names are loaded when they are first used, so that the functions can be used without Lightning, and nothing here imports
torchvision before an image model or an image folder asks for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewshot_callbacks.callbacks import (
        DiscriminantRatioMonitor,
        EmbeddingMap,
        EmbeddingSource,
        GeneralizationGapMonitor,
        ReportWriter,
        RetrievalMonitor,
        RetrievalPanels,
        ScorePlots,
        TrainingDynamicsMonitor,
    )
    from fewshot_callbacks.data import (
        ClassBalanced,
        ClassBalancedBatchSampler,
        Episodes,
        EpisodicBatchSampler,
        FewShotDataModule,
        Glyphs,
        ImageFolder,
    )
    from fewshot_callbacks.functional import (
        DEFAULT_METRICS,
        DynamicsHistory,
        NearDuplicates,
        Neighbours,
        RetrievalReport,
        RetrievalSettings,
        Share,
        Suspects,
        compare_dynamics,
        compare_reports,
        discriminant_ratio,
        evaluate_multilabel,
        evaluate_retrieval,
        generalization_gap,
        grouped_recall,
        near_duplicates,
        nearest,
        plan_evaluation,
        suspects,
        training_dynamics,
        variance_ratio,
    )
    from fewshot_callbacks.losses import BinaryCodes, SoftAveragePrecisionLoss
    from fewshot_callbacks.metrics import DiscriminantRatio, RetrievalEvaluation, VarianceRatio, all_processes
    from fewshot_callbacks.protonet import (
        ClassVectors,
        Conv4,
        DistanceRatioHead,
        EmbeddingModule,
        EpisodeProtocol,
        ProtoNet,
        SoftmaxHead,
        SupportClassifier,
    )

_HOME = {
    "callbacks": (
        "DiscriminantRatioMonitor",
        "EmbeddingMap",
        "EmbeddingSource",
        "GeneralizationGapMonitor",
        "ReportWriter",
        "RetrievalMonitor",
        "RetrievalPanels",
        "ScorePlots",
        "TrainingDynamicsMonitor",
    ),
    "data": (
        "ClassBalanced",
        "ClassBalancedBatchSampler",
        "Episodes",
        "EpisodicBatchSampler",
        "FewShotDataModule",
        "Glyphs",
        "ImageFolder",
    ),
    "functional": (
        "DEFAULT_METRICS",
        "DynamicsHistory",
        "NearDuplicates",
        "Neighbours",
        "RetrievalReport",
        "RetrievalSettings",
        "Share",
        "Share",
        "Suspects",
        "compare_dynamics",
        "compare_reports",
        "discriminant_ratio",
        "evaluate_multilabel",
        "evaluate_retrieval",
        "generalization_gap",
        "grouped_recall",
        "near_duplicates",
        "nearest",
        "plan_evaluation",
        "suspects",
        "training_dynamics",
        "variance_ratio",
    ),
    "losses": ("BinaryCodes", "SoftAveragePrecisionLoss"),
    "metrics": ("DiscriminantRatio", "RetrievalEvaluation", "VarianceRatio", "all_processes"),
    "protonet": (
        "ClassVectors",
        "Conv4",
        "DistanceRatioHead",
        "EmbeddingModule",
        "EpisodeProtocol",
        "ProtoNet",
        "SoftmaxHead",
        "SupportClassifier",
    ),
}
_LAYER_OF = {name: layer for layer, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "DEFAULT_METRICS",
    "BinaryCodes",
    "ClassBalanced",
    "ClassBalancedBatchSampler",
    "ClassVectors",
    "Conv4",
    "DiscriminantRatio",
    "DiscriminantRatioMonitor",
    "DistanceRatioHead",
    "DynamicsHistory",
    "EmbeddingMap",
    "EmbeddingModule",
    "EmbeddingSource",
    "EpisodeProtocol",
    "Episodes",
    "EpisodicBatchSampler",
    "FewShotDataModule",
    "GeneralizationGapMonitor",
    "Glyphs",
    "ImageFolder",
    "NearDuplicates",
    "Neighbours",
    "ProtoNet",
    "ReportWriter",
    "RetrievalEvaluation",
    "RetrievalMonitor",
    "RetrievalPanels",
    "RetrievalReport",
    "RetrievalSettings",
    "ScorePlots",
    "Share",
    "SoftAveragePrecisionLoss",
    "SoftmaxHead",
    "SupportClassifier",
    "Suspects",
    "TrainingDynamicsMonitor",
    "VarianceRatio",
    "all_processes",
    "compare_dynamics",
    "compare_reports",
    "discriminant_ratio",
    "evaluate_multilabel",
    "evaluate_retrieval",
    "generalization_gap",
    "grouped_recall",
    "near_duplicates",
    "nearest",
    "plan_evaluation",
    "suspects",
    "training_dynamics",
    "variance_ratio",
]


def __getattr__(name: str) -> Any:
    if name not in _LAYER_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAYER_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
