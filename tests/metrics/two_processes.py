"""Two processes that talk over gloo: each runs every case below and leaves its answers behind as `<rank>.pt`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CASES: dict[str, Callable[[int], Any]] = {}
ROOT = Path(__file__).parents[2]


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Run this function of the rank in both processes."""
    CASES[function.__name__] = function
    return function


def items(n: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 4 - 2**40
    return torch.randn(4, 5, generator=generator)[labels % 4] + torch.randn(n, 5, generator=generator), labels


SHARDS = {"even": (slice(0, 12), slice(12, 24)), "uneven": (slice(0, 17), slice(17, 23))}
SHARDS |= {"second empty": (slice(0, 23), slice(23, 23)), "first empty": (slice(23, 23), slice(0, 23))}
"""Who holds what; an empty shard is no batch at all."""


def shard(name: str, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a process."""
    embeddings, labels = items(24 if name == "even" else 23)
    mine = SHARDS[name][rank]
    return list(zip(embeddings[mine].split(5), labels[mine].split(5), strict=True)) if mine.start < mine.stop else []


def filled(metric, name: str, rank: int):
    for batch in shard(name, rank):
        metric.update(*batch)
    return metric


@case
def discriminant_ratio(rank: int) -> dict[str, Any]:
    from fewshot_callbacks.metrics import DiscriminantRatio

    answers: dict[str, Any] = {}
    for name in SHARDS:
        metric = filled(DiscriminantRatio(), name, rank)
        answers[name] = metric.compute(), metric.within_scatter()
    metric = filled(DiscriminantRatio(), "uneven", rank)
    metric.compute()  # what was gathered is not kept: another batch goes to this process alone
    metric.update(torch.full((2, 5), float(rank)), torch.tensor([7, 8]))
    answers["continued"] = metric.compute()
    nothing = DiscriminantRatio()
    answers["nothing"] = nothing.compute()
    return answers


@case
def retrieval(rank: int) -> dict[str, Any]:
    from fewshot_callbacks.metrics import RetrievalEvaluation

    settings = {"group_size": 2, "recall_k": (1, 3)}
    answers: dict[str, Any] = {name: filled(RetrievalEvaluation(settings), name, rank).compute() for name in SHARDS}
    half = RetrievalEvaluation(settings)
    for embeddings, labels in shard("uneven", rank):
        half.update(embeddings.half(), labels)
    answers["half"] = half.compute()
    return answers


@case
def embedding_store(rank: int) -> dict[str, Any]:
    from torch.utils.data import DistributedSampler

    from fewshot_callbacks.metrics import EmbeddingStore

    answers: dict[str, Any] = {}
    for n in (1, 22, 23):
        embeddings, labels = items(n)
        dealt = torch.tensor(list(DistributedSampler(range(n), num_replicas=2, rank=rank, shuffle=False)))
        store = EmbeddingStore()
        for some in dealt.split(4):
            store.append(embeddings[some].half(), labels[some])
        answers[f"sampler {n}"] = store.gather(dataset_size=n)
        answers[f"padded {n}"] = store.gather()
    embeddings, labels = items(23)
    dealt = torch.arange(rank, 23, 2)
    store = EmbeddingStore()  # a callback that keeps only some of the items of its loader
    kept = labels[dealt] != labels[0]
    positions = torch.arange(len(dealt))[kept]
    store.append(embeddings[dealt][kept], labels[dealt][kept], positions)
    answers["some"] = store.gather(dataset_size=23)
    for name in SHARDS:
        store = EmbeddingStore()
        for batch in shard(name, rank):
            store.append(*batch)
        answers[name] = store.gather()
    answers["nothing"] = EmbeddingStore().gather(dataset_size=23)
    return answers


def run(folder: Path) -> list[dict[str, Any]]:
    """The answers of both processes to all cases."""
    subprocess.run(
        [sys.executable, "-m", "tests.metrics.two_processes", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def answer(rank: int, folder: str) -> None:
    """What one of the two processes does."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    answers = {name: function(rank) for name, function in CASES.items()}
    torch.save(answers, Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import fewshot_callbacks.metrics  # noqa: F401 - takes seconds: once, before there are two of us

    method = "fork" if "fork" in torch.multiprocessing.get_all_start_methods() else "spawn"
    torch.multiprocessing.start_processes(answer, args=(sys.argv[1],), nprocs=2, start_method=method)
