"""Lightning callbacks: they collect embeddings in a running Trainer, evaluate them and log the results.

`EmbeddingSource` names where the items of a step are (`embedding_source.py`). A `Collection` reads them once for all
monitors of a Trainer with equal sources (`_collection.py`). A monitor is a `CollectingMonitor` (`_collecting.py`, which
lists the order of the hooks): its `_measure_set` passes a whole set to a function of `functional/` and returns name ->
value, and `_names` and `_better` declare the names. `KnnMonitor` is a short example. Users write a `Monitor`
(`monitor.py`). A new figure is a `PictureCallback` (`_pictures.py`) whose `_figures` returns key -> a function that
draws.
"""

from fewshot_callbacks.callbacks._viewers import ItemSet
from fewshot_callbacks.callbacks.discriminant_ratio import DiscriminantRatioMonitor
from fewshot_callbacks.callbacks.embedding_health import EmbeddingHealthMonitor
from fewshot_callbacks.callbacks.embedding_source import EmbeddingSource, LabelSource
from fewshot_callbacks.callbacks.generalization_gap import GeneralizationGapMonitor
from fewshot_callbacks.callbacks.knn import KnnMonitor
from fewshot_callbacks.callbacks.monitor import EmbeddedSet, Monitor
from fewshot_callbacks.callbacks.probe import ProbeMonitor
from fewshot_callbacks.callbacks.retrieval import RetrievalMonitor
from fewshot_callbacks.callbacks.training_dynamics import TrainingDynamicsMonitor
from fewshot_callbacks.callbacks.verification import VerificationMonitor
from fewshot_callbacks.system.extras import missing_extra

# Callbacks that only log numbers need neither Matplotlib nor Pillow, and work without the extra.
try:
    from fewshot_callbacks.callbacks.embedding_map import EmbeddingMap
    from fewshot_callbacks.callbacks.panels import RetrievalPanels
    from fewshot_callbacks.callbacks.report import ReportWriter
    from fewshot_callbacks.callbacks.score_plots import ScorePlots
except ModuleNotFoundError as missing:
    __getattr__ = missing_extra(__name__, "report", missing)

__all__ = [
    "DiscriminantRatioMonitor",
    "EmbeddedSet",
    "EmbeddingHealthMonitor",
    "EmbeddingMap",
    "EmbeddingSource",
    "GeneralizationGapMonitor",
    "ItemSet",
    "KnnMonitor",
    "LabelSource",
    "Monitor",
    "ProbeMonitor",
    "ReportWriter",
    "RetrievalMonitor",
    "RetrievalPanels",
    "ScorePlots",
    "TrainingDynamicsMonitor",
    "VerificationMonitor",
]
