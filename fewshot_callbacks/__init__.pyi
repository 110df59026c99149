"""Where each public name of the package comes from: for type checkers, and for `__init__.py`, which reads it.

Public here is what a user constructs or calls, and the type of what a public function, method, property or field gives.
Plumbing goes to its layer, and whatever gives it has a name with an underscore. What only a layer exports stays there.
There are two constants: `DEFAULT_METRICS`, to which users add keys, and `METRICS`, beside which they write their own.
What a function of theirs is given, such as `RankBlock`, is public, too. `tests/test_public_names.py` checks all of it.
"""

from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor as DiscriminantRatioMonitor,
    EmbeddedSet as EmbeddedSet,
    EmbeddingHealthMonitor as EmbeddingHealthMonitor,
    EmbeddingMap as EmbeddingMap,
    EmbeddingSource as EmbeddingSource,
    GeneralizationGapMonitor as GeneralizationGapMonitor,
    ItemSet as ItemSet,
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
    FewShotDataset as FewShotDataset,
    Glyphs as Glyphs,
    ImageFolder as ImageFolder,
)
from fewshot_callbacks.errors import InputError as InputError
from fewshot_callbacks.functional import (
    METRICS as METRICS,
    CompressionReport as CompressionReport,
    CompressionVariant as CompressionVariant,
    Difference as Difference,
    DynamicsComparison as DynamicsComparison,
    DynamicsHistory as DynamicsHistory,
    EmbeddingHealth as EmbeddingHealth,
    Enclosure as Enclosure,
    EpisodeAccuracy as EpisodeAccuracy,
    EpisodeList as EpisodeList,
    ErrorRatePoint as ErrorRatePoint,
    EvaluationPlan as EvaluationPlan,
    GeneralizationGap as GeneralizationGap,
    GroupedRecall as GroupedRecall,
    IdentificationReport as IdentificationReport,
    Interval as Interval,
    KnnReport as KnnReport,
    MeasureComparison as MeasureComparison,
    MeasuredEvaluation as MeasuredEvaluation,
    NearDuplicates as NearDuplicates,
    Neighbours as Neighbours,
    OperatingPoint as OperatingPoint,
    PairCounts as PairCounts,
    PooledDecisions as PooledDecisions,
    ProbeReport as ProbeReport,
    RankBlock as RankBlock,
    Relevance as Relevance,
    RetrievalOptions as RetrievalOptions,
    RetrievalReport as RetrievalReport,
    RetrievalSettings as RetrievalSettings,
    Share as Share,
    StepDynamics as StepDynamics,
    Suspects as Suspects,
    ThresholdConsistency as ThresholdConsistency,
    TieRange as TieRange,
    TimedSample as TimedSample,
    TrialList as TrialList,
    TrialReport as TrialReport,
    compare_dynamics as compare_dynamics,
    compare_reports as compare_reports,
    compression_costs as compression_costs,
    discriminant_ratio as discriminant_ratio,
    embedding_health as embedding_health,
    evaluate_identification as evaluate_identification,
    evaluate_retrieval as evaluate_retrieval,
    evaluate_trials as evaluate_trials,
    generalization_gap as generalization_gap,
    grouped_recall as grouped_recall,
    hits_within as hits_within,
    knn_accuracy as knn_accuracy,
    linear_probe as linear_probe,
    measure_evaluation as measure_evaluation,
    near_duplicates as near_duplicates,
    nearest as nearest,
    plan_evaluation as plan_evaluation,
    read_trials as read_trials,
    relevant_ranks as relevant_ranks,
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
    Processes as Processes,
    RetrievalEvaluation as RetrievalEvaluation,
    VarianceRatio as VarianceRatio,
    all_processes as all_processes,
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
    RequestedMetric as RequestedMetric,
)
from fewshot_callbacks.sources import Shards as Shards

__version__: str
__all__: list[str]
