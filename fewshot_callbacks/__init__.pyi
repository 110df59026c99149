"""Where each name that users type comes from: for type checkers, and for `__init__.py`, which reads it.

A name stands here if a user writes it after reading the pages: to construct it, call it, subclass it or catch it. Results,
their rows, options, protocols and what a function of a user is given are imported from their layer. The one constant is
`DEFAULT_METRICS`, to which users add keys. `tests/test_public_names.py` checks this.
"""

from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor as DiscriminantRatioMonitor,
    EmbeddingHealthMonitor as EmbeddingHealthMonitor,
    EmbeddingMap as EmbeddingMap,
    EmbeddingSource as EmbeddingSource,
    GeneralizationGapMonitor as GeneralizationGapMonitor,
    KnnMonitor as KnnMonitor,
    Monitor as Monitor,
    ProbeMonitor as ProbeMonitor,
    ReportWriter as ReportWriter,
    RetrievalMonitor as RetrievalMonitor,
    RetrievalPanels as RetrievalPanels,
    ScorePlots as ScorePlots,
    TrainingDynamicsMonitor as TrainingDynamicsMonitor,
    VerificationMonitor as VerificationMonitor,
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
from fewshot_callbacks.errors import InputError as InputError
from fewshot_callbacks.functional import (
    Relevance as Relevance,
    Share as Share,
    TrialList as TrialList,
    classes_needed as classes_needed,
    compare_dynamics as compare_dynamics,
    compare_reports as compare_reports,
    compare_slices as compare_slices,
    compression_costs as compression_costs,
    discriminant_ratio as discriminant_ratio,
    embedding_health as embedding_health,
    embedding_movement as embedding_movement,
    evaluate_identification as evaluate_identification,
    evaluate_retrieval as evaluate_retrieval,
    evaluate_trials as evaluate_trials,
    failed_requirements as failed_requirements,
    generalization_gap as generalization_gap,
    grouped_recall as grouped_recall,
    hits_within as hits_within,
    knn_accuracy as knn_accuracy,
    leakage as leakage,
    linear_probe as linear_probe,
    measure_evaluation as measure_evaluation,
    near_duplicates as near_duplicates,
    nearest as nearest,
    neighbour_overlap as neighbour_overlap,
    plan_evaluation as plan_evaluation,
    rank_reports as rank_reports,
    read_trials as read_trials,
    relevant_ranks as relevant_ranks,
    revisited_protocol as revisited_protocol,
    search_quality as search_quality,
    suspects as suspects,
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
)
from fewshot_callbacks.protonet import (
    Conv4 as Conv4,
    DistanceRatioHead as DistanceRatioHead,
    EmbeddingModule as EmbeddingModule,
    EpisodeProtocol as EpisodeProtocol,
    ProtoNet as ProtoNet,
    SoftmaxHead as SoftmaxHead,
    SupportClassifier as SupportClassifier,
)
from fewshot_callbacks.report import ReportSettings as ReportSettings
from fewshot_callbacks.settings import (
    DEFAULT_METRICS as DEFAULT_METRICS,
    Metric as Metric,
)
from fewshot_callbacks.storage import Shards as Shards

__version__: str
__all__: list[str]
