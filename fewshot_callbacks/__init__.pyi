"""Where each public name of the package comes from: for type checkers, and for `__init__.py`, which reads it."""

from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor as DiscriminantRatioMonitor,
    EmbeddingHealthMonitor as EmbeddingHealthMonitor,
    EmbeddingMap as EmbeddingMap,
    EmbeddingSource as EmbeddingSource,
    GeneralizationGapMonitor as GeneralizationGapMonitor,
    ReportWriter as ReportWriter,
    RetrievalMonitor as RetrievalMonitor,
    RetrievalPanels as RetrievalPanels,
    ScorePlots as ScorePlots,
    TrainingDynamicsMonitor as TrainingDynamicsMonitor,
)
from fewshot_callbacks.data import (
    ClassBalanced as ClassBalanced,
    ClassBalancedBatchSampler as ClassBalancedBatchSampler,
    Episodes as Episodes,
    EpisodicBatchSampler as EpisodicBatchSampler,
    FewShotDataModule as FewShotDataModule,
    Glyphs as Glyphs,
    ImageFolder as ImageFolder,
)
from fewshot_callbacks.functional import (
    DynamicsHistory as DynamicsHistory,
    EmbeddingHealth as EmbeddingHealth,
    IdentificationReport as IdentificationReport,
    KnnReport as KnnReport,
    NearDuplicates as NearDuplicates,
    Neighbours as Neighbours,
    Relevance as Relevance,
    RetrievalReport as RetrievalReport,
    Share as Share,
    Suspects as Suspects,
    TrialList as TrialList,
    TrialReport as TrialReport,
    compare_dynamics as compare_dynamics,
    compare_reports as compare_reports,
    discriminant_ratio as discriminant_ratio,
    embedding_health as embedding_health,
    evaluate_identification as evaluate_identification,
    evaluate_retrieval as evaluate_retrieval,
    evaluate_trials as evaluate_trials,
    generalization_gap as generalization_gap,
    grouped_recall as grouped_recall,
    knn_accuracy as knn_accuracy,
    near_duplicates as near_duplicates,
    nearest as nearest,
    plan_evaluation as plan_evaluation,
    read_trials as read_trials,
    revisited_protocol as revisited_protocol,
    suspects as suspects,
    training_dynamics as training_dynamics,
    trial_scores as trial_scores,
    variance_ratio as variance_ratio,
)
from fewshot_callbacks.losses import (
    BinaryCodes as BinaryCodes,
    SoftAveragePrecisionLoss as SoftAveragePrecisionLoss,
)
from fewshot_callbacks.metrics import (
    DiscriminantRatio as DiscriminantRatio,
    RetrievalEvaluation as RetrievalEvaluation,
    VarianceRatio as VarianceRatio,
    all_processes as all_processes,
)
from fewshot_callbacks.protonet import (
    ClassVectors as ClassVectors,
    Conv4 as Conv4,
    DistanceRatioHead as DistanceRatioHead,
    EmbeddingModule as EmbeddingModule,
    EpisodeProtocol as EpisodeProtocol,
    ProtoNet as ProtoNet,
    SoftmaxHead as SoftmaxHead,
    SupportClassifier as SupportClassifier,
)
from fewshot_callbacks.settings import (
    DEFAULT_METRICS as DEFAULT_METRICS,
    RetrievalSettings as RetrievalSettings,
)
from fewshot_callbacks.sources import Shards as Shards

__version__: str
__all__: list[str]
