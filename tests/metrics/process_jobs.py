"""Jobs of real processes (see `tests.gloo_processes`): metrics and evaluations with a part of the items in each process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional import Share, evaluate_retrieval
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments
from fewshot_callbacks.metrics import (
    DiscriminantRatio,
    EmbeddingStore,
    RetrievalEvaluation,
    VarianceRatio,
    all_processes,
)

CASES: dict[str, Callable[[int], Any]] = {}


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Run this function of the rank in every process."""
    CASES[function.__name__] = function
    return function


def items(n: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 4 - 2**40
    return torch.randn(4, 5, generator=generator)[labels % 4] + torch.randn(n, 5, generator=generator), labels


SHARDS = {"uneven": (slice(0, 17), slice(17, 23)), "first empty": (slice(23, 23), slice(0, 23))}
"""Rows of the first two processes; an empty shard is no batch at all, and a third process has none."""

SETTINGS: dict[str, Any] = {"metrics": ("mAP", "recall@1", "recall@3")}
MORE: dict[str, Any] = SETTINGS | {
    "label_groups": 2,
    "metrics": (*DEFAULT_METRICS, "prototype_accuracy", "macro_mAP", "auc_pr", "recall@precision0.5", "eer"),
}


def shard(name: str, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a process."""
    embeddings, labels = items()
    mine = SHARDS[name][rank] if rank < 2 else slice(0, 0)
    return list(zip(embeddings[mine].split(5), labels[mine].split(5), strict=True)) if mine.start < mine.stop else []


def filled(metric, name: str, rank: int):
    for batch in shard(name, rank):
        metric.update(*batch)
    return metric


@case
def ratios(rank: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name in SHARDS:
        metric, other = filled(DiscriminantRatio(), name, rank), filled(VarianceRatio(), name, rank)
        answers[name] = metric.compute(), metric.within_scatter(), other.compute(), tuple(other.interval())
    metric, other = DiscriminantRatio(), VarianceRatio()
    embeddings, labels = items()
    for some in sampler_indices(23, rank).split(5):  # with what the sampler repeats
        for each in (metric, other):
            each.update(embeddings[some], labels[some], [f"{row}.png" for row in some.tolist()])
    answers["ids"] = metric.compute(), metric.within_scatter(), other.compute(), tuple(other.interval())
    metric = filled(DiscriminantRatio(), "first empty", rank)
    # what was gathered is not kept: another batch goes to this process alone
    metric.update(torch.full((2, 5), float(rank)), torch.tensor([7, 8]))
    return answers | {"continued": metric.compute(), "nothing": DiscriminantRatio().compute()}


@case
def retrieval(rank: int) -> dict[str, Any]:
    answers: dict[str, Any] = {name: filled(RetrievalEvaluation(**SETTINGS), name, rank).compute() for name in SHARDS}
    half = RetrievalEvaluation(**SETTINGS)
    for embeddings, labels in shard("uneven", rank):
        half.update(embeddings.half(), labels)
    answers["half"] = half.compute()
    named = RetrievalEvaluation(**SETTINGS)
    embeddings, labels = items()
    for some in sampler_indices(23, rank).split(5):  # with what the sampler repeats
        named.update(embeddings[some], labels[some], ids=some)
    answers["ids"] = named.compute()
    return answers


@case
def given_by_one(rank: int) -> dict[str, Any]:
    """What the first process says of an argument that it alone was given, and the others of its absence."""
    found: dict[str, Any] = {}
    for name, value in {
        "ids": [0, 1, 2, 3],
        "groups": [0, 1, 2, 3],
        "is_gallery": [True, False] * 2,
        "dim": None,
    }.items():
        metric = RetrievalEvaluation(metrics=("mAP",))
        rows = torch.eye(4)[:, :3] if rank == 0 and name == "dim" else torch.eye(4)[:, :2]
        metric.update(rows, [0, 0, 1, 1], **({name: value} if rank == 0 and value is not None else {}))
        try:
            found[name] = metric.compute()
        except Exception as error:
            found[name] = str(error)
    ratio = DiscriminantRatio()
    ratio.update(torch.eye(4), [0, 0, 1, 1], *([[0, 1, 2, 3]] if rank == 0 else []))
    try:
        found["ids of J"] = ratio.compute()
    except ValueError as error:
        found["ids of J"] = str(error)
    return found


def words(labels: torch.Tensor) -> list[str]:
    """Return labels as strings, the same ones for equal labels."""
    return [f"class {label % 4}" for label in labels.tolist()]


@case
def words_as_labels(rank: int) -> dict[str, Any]:
    evaluation, ratio = RetrievalEvaluation(**SETTINGS), DiscriminantRatio()
    for embeddings, labels in shard("first empty", rank):
        for metric in (evaluation, ratio):
            metric.update(embeddings, words(labels))
    evaluation.compute()
    answers: dict[str, Any] = {"first empty": (evaluation.report, ratio.within_scatter())}
    mixed = RetrievalEvaluation(**SETTINGS), DiscriminantRatio()
    for embeddings, labels in shard("uneven", rank):
        for metric in mixed:
            metric.update(embeddings, words(labels) if rank == 0 else labels)
    for name, ask in (("mixed", mixed[0].compute), ("mixed scatter", mixed[1].within_scatter)):
        try:
            ask()
        except ValueError as error:
            answers[name] = str(error)
    return answers


def sampler_indices(n: int, rank: int) -> torch.Tensor:
    """Return the indices that a DistributedSampler gives a rank."""
    count = torch.distributed.get_world_size()
    return torch.tensor(list(DistributedSampler(range(n), num_replicas=count, rank=rank, shuffle=False)))


@case
def sharded(rank: int) -> dict[str, Any]:
    """Reports of all, of parts that each process holds."""
    processes, answers = all_processes(), {}
    for n in (1, 200):
        embeddings, labels = items(n) if n > 1 else (torch.ones(1, 5), torch.zeros(1, dtype=torch.int64))
        mine = torch.arange(n)[rank :: processes.count]  # as a sampler deals
        try:
            answers[n] = evaluate_retrieval(embeddings[mine], labels[mine], share=Share(processes, mine), **MORE)
        except ValueError as error:
            answers[n] = str(error)
    for name in SHARDS:
        batches = shard(name, rank)
        embeddings, labels = (torch.cat(part) for part in zip(*batches, strict=True)) if batches else (items(0))
        answers[name] = evaluate_retrieval(embeddings, labels, share=Share(processes), **MORE)
        moments = ClassMoments.of(embeddings, labels).shared(processes)
        answers[f"J of {name}"] = float(moments.discriminant_ratio(processes=processes))
    return answers


@case
def failing(rank: int) -> dict[str, Any]:
    """What each process hears of an error in the first: as a value, and in the middle of the work."""
    embeddings, labels = items(40)
    mine = torch.arange(rank, 40, torch.distributed.get_world_size())

    def progress(done: int, total: int) -> None:
        if rank == 0:
            raise ArithmeticError("no more numbers")

    answers = {}
    for name, options in {
        "value": {"query_labels": labels[mine].float() if rank == 0 else labels[mine]},
        "work": {"query_labels": labels[mine], "progress": progress},
    }.items():
        try:
            evaluate_retrieval(embeddings[mine], share=Share(all_processes()), **options)
        except Exception as error:
            answers[name] = type(error).__name__, str(error)
    answers["afterwards"] = all_processes().gather(rank)  # they still understand each other
    return answers


@case
def embedding_store(rank: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for n in (1, 23):
        embeddings, labels = items(n)
        store = EmbeddingStore()
        for some in sampler_indices(n, rank).split(4):
            store.append(embeddings[some].half(), labels[some])
        answers[f"sampler {n}"] = store.gather(dataset_size=n), store.gather()
    own = torch.arange(rank, 23, torch.distributed.get_world_size())
    store = EmbeddingStore()  # a callback that keeps only some of the items of its loader
    kept = labels[own] != labels[0]
    store.append(embeddings[own][kept], labels[own][kept], torch.arange(len(own))[kept])
    answers["some"] = store.gather(dataset_size=23)
    for name in SHARDS:
        store = EmbeddingStore()
        for batch in shard(name, rank):
            store.append(*batch)
        answers[name] = store.gather()
    answers["nothing"] = EmbeddingStore().gather(dataset_size=23)
    store = EmbeddingStore()  # a sampler of one's own: 7 items come to every process, and one of them twice
    own = torch.cat(
        [torch.arange(7), torch.arange(7 + rank, 23, torch.distributed.get_world_size()), torch.tensor([3])]
    )
    store.append(embeddings[own], labels[own], ids=[f"{n}.png" for n in own.tolist()])
    return answers | {"ids": (store.gather(), store.shard().dropped)}


@case
def stores_of_different_calls(rank: int) -> dict[str, str]:
    """What each process hears if the last one alone gives ids or groups, or another size, or all of them in one batch."""
    embeddings, labels = items(8)
    last = torch.distributed.get_world_size() - 1
    given = {
        "ids in one process": (
            {"ids": range(8)} if rank == last else {},
            {"ids": range(8)} if rank == last else {},
            99,
        ),
        "groups in one process": ({"groups": [0] * 8} if rank == last else {},) * 2 + (99,),
        "ids in some batches of one process": ({"ids": range(8)}, {} if rank == last else {"ids": range(8)}, 99),
        "sizes": ({}, {}, 99 if rank == last else None),
    }
    answers = {}
    for name, (first, second, dataset_size) in given.items():
        store = EmbeddingStore()
        for batch in (first, second):
            store.append(embeddings, labels, **{key: list(values) for key, values in batch.items()})
        try:
            store.gather(dataset_size)
        except ValueError as error:
            answers[name] = str(error)
    return answers


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """Return the result of every case in this process, by name."""
    return {name: function(rank) for name, function in CASES.items()}
