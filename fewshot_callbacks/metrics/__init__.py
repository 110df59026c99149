"""torchmetrics metrics for `fewshot_callbacks.functional`: update, compute, reduction over ranks."""

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.distributed.torch_distributed import TorchProcesses, all_processes
from fewshot_callbacks.metrics.class_moments import DiscriminantRatio, VarianceRatio
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard
from fewshot_callbacks.metrics.retrieval import RetrievalEvaluation

__all__ = [
    "DiscriminantRatio",
    "EmbeddingStore",
    "Processes",
    "RetrievalEvaluation",
    "Shard",
    "TorchProcesses",
    "VarianceRatio",
    "all_processes",
]
