"""Thin holders of state around `fewshot_callbacks.functional`: update, compute, reduction over ranks."""

from fewshot_callbacks.metrics.discriminant_ratio import DiscriminantRatio
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard
from fewshot_callbacks.metrics.processes import TorchProcesses, all_processes
from fewshot_callbacks.metrics.retrieval import RetrievalEvaluation

__all__ = [
    "DiscriminantRatio",
    "EmbeddingStore",
    "RetrievalEvaluation",
    "Shard",
    "TorchProcesses",
    "all_processes",
]
