"""Lightning callbacks: they collect embeddings in a running Trainer, evaluate them and log the results.

A new monitor of a number is a `BatchMonitor` (`_evaluation.py`, which also tells in which order hooks run, and which process
logs). `_collect` appends a batch to an `EmbeddingStore`; `_measure_loader` passes the whole set to a function of
`functional/` and returns name -> value; `_names` and `_better` declare the names. `EmbeddingHealthMonitor` is one to learn
from. A new picture is a `PictureCallback` (`_pictures.py`) whose `_figures` returns key -> a function that draws.
"""

from fewshot_callbacks.callbacks.discriminant_ratio import DiscriminantRatioMonitor
from fewshot_callbacks.callbacks.embedding_health import EmbeddingHealthMonitor
from fewshot_callbacks.callbacks.embeddings import EmbeddingSource, LabelSource
from fewshot_callbacks.callbacks.generalization_gap import GeneralizationGapMonitor
from fewshot_callbacks.callbacks.retrieval import RetrievalMonitor
from fewshot_callbacks.callbacks.training_dynamics import TrainingDynamicsMonitor
from fewshot_callbacks.system.extras import missing_extra

# What logs numbers alone needs neither Matplotlib nor Pillow, and stays usable where the extra is not installed.
try:
    from fewshot_callbacks.callbacks.embedding_map import EmbeddingMap
    from fewshot_callbacks.callbacks.panels import RetrievalPanels
    from fewshot_callbacks.callbacks.report import ReportWriter
    from fewshot_callbacks.callbacks.score_plots import ScorePlots
except ModuleNotFoundError as missing:
    __getattr__ = missing_extra(__name__, "report", missing)

__all__ = [
    "DiscriminantRatioMonitor",
    "EmbeddingHealthMonitor",
    "EmbeddingMap",
    "EmbeddingSource",
    "GeneralizationGapMonitor",
    "LabelSource",
    "ReportWriter",
    "RetrievalMonitor",
    "RetrievalPanels",
    "ScorePlots",
    "TrainingDynamicsMonitor",
]
