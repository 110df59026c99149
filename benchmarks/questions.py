"""The cost of each monitor in a validation that also has retrieval, and the memory of several monitors.

    python benchmarks/questions.py [--items 31730] [--dim 512] [--difficulty well-trained] [--rounds 3] [--json FILE]

The embeddings are made beforehand (`_embeddings.py`), and a module passes them to a real Trainer, so that only the monitors
are measured. The table shows the best round for each set of monitors: processor and wall-clock seconds minus a validation
without monitors (the first row), the processor seconds as a multiple of a RetrievalMonitor, and the peak memory minus the
memory before.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _embeddings import make
from _results import Column, Results, add_file_option
from lightning.pytorch import LightningModule, Trainer
from retrieval import PeakMemory
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    KnnMonitor,
    ProbeMonitor,
    RetrievalMonitor,
    TrialList,
    VerificationMonitor,
)

TRIALS = 40_000
COLUMNS = (
    Column("monitors"),
    Column("processor seconds", ".2f"),
    Column("seconds", ".2f"),
    Column("x RetrievalMonitor", ".2f"),
    Column("MB beyond the data", ",.0f"),
)


class Points(Dataset[Any]):
    """Embeddings with their labels and indices."""

    def __init__(self, embeddings: Tensor, labels: Tensor) -> None:
        self.embeddings = embeddings
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.embeddings[index], self.labels[index], index


class HandsOver(LightningModule):
    """A module that returns its inputs as embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = torch.nn.Parameter(torch.zeros(1))

    def forward(self, points: Tensor) -> Tensor:
        return points

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"embeddings": self(batch[0]), "labels": batch[1]}


def trial_list(labels: Tensor) -> TrialList:
    """Return trials of which about half are within one class."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, len(labels), (2, TRIALS), generator=generator)
    order = labels.argsort()
    half = TRIALS // 2
    place = torch.randint(0, len(labels) - 1, (half,), generator=generator)
    first[:half], second[:half] = order[place], order[place + 1]
    same = (labels[first] == labels[second]).tolist()
    return TrialList(tuple(same), items=(tuple(map(str, first.tolist())), tuple(map(str, second.tolist()))))


def sets_of_monitors(labels: Tensor, bank: Points) -> dict[str, Callable[[], list[Any]]]:
    """Return name -> the monitors of a validation."""
    trials = trial_list(labels)
    euclidean: dict[str, Any] = {"similarity": "euclidean", "name": "far"}
    source = EmbeddingSource(labels=1)
    apart = EmbeddingSource(labels=lambda batch: batch[1])
    return {
        "`RetrievalMonitor`": lambda: [RetrievalMonitor(source=source)],
        '`KnnMonitor((10, 20), "self")`': lambda: [KnnMonitor((10, 20), "self", source=source)],
        f"`KnnMonitor((10, 20), bank)`, of {len(bank):,} items": lambda: [KnnMonitor((10, 20), bank, source=source)],
        f"`ProbeMonitor(bank)`, {len(bank.labels.unique()):,} classes": lambda: [ProbeMonitor(bank, source=source)],
        f"`VerificationMonitor`, {TRIALS:,} trials": lambda: [VerificationMonitor(trials, ids=2, source=source)],
        "`EmbeddingHealthMonitor`": lambda: [EmbeddingHealthMonitor(every_n_steps=None, source=source)],
        "`DiscriminantRatioMonitor`": lambda: [DiscriminantRatioMonitor(every_n_steps=None, source=source)],
        "two `RetrievalMonitor`s that share a source": lambda: [
            RetrievalMonitor(source=source),
            RetrievalMonitor(source=source, name="two"),
        ],
        "two, each with its own source": lambda: [
            RetrievalMonitor(source=source),
            RetrievalMonitor(name="two", source=apart),
        ],
        "three that share a source": lambda: [
            RetrievalMonitor(source=source),
            *(RetrievalMonitor(source=source, name=name) for name in "ab"),
        ],
        "two that share a source, one of them Euclidean": lambda: [
            RetrievalMonitor(source=source),
            RetrievalMonitor(source=source, **euclidean),
        ],
    }


def validated(monitors: list[Any], data: Points) -> tuple[float, float, float]:
    """Return the processor seconds, the wall-clock seconds and the peak memory in MB of a validation."""
    trainer = Trainer(
        callbacks=monitors,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    loader = DataLoader(data, batch_size=512)
    with PeakMemory(torch.device("cpu")) as memory:
        clock = time.perf_counter()
        processor = time.process_time()
        trainer.validate(HandsOver(), loader, verbose=False)
        seconds = time.process_time() - processor, time.perf_counter() - clock
    return (*seconds, memory.mb)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=31_730)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--difficulty", default="well-trained")
    parser.add_argument("--rounds", type=int, default=3)
    add_file_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = Points(*make(options.items, options.dim, options.difficulty))
    bank = Points(*make(options.items, options.dim, options.difficulty, seed=1))
    bank.labels = bank.labels % (int(data.labels.max()) + 1)
    few = Points(data.embeddings[:600], data.labels[:600])
    monitors_of = sets_of_monitors(data.labels, bank)
    small_monitors = sets_of_monitors(few.labels, Points(bank.embeddings[:600], few.labels))
    for make_monitors in small_monitors.values():
        validated(make_monitors(), few)  # compiles
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        bare = best(list, data, options.rounds)
        results.add("no monitor: the validation itself", bare[0], bare[1], None, bare[2])
        alone = None
        for name, make_monitors in monitors_of.items():
            processor, clock, peak = best(make_monitors, data, options.rounds)
            processor -= bare[0]
            alone = processor if alone is None else alone
            results.add(name, processor, clock - bare[1], processor / alone, peak)


def best(make_monitors: Callable[[], list[Any]], data: Points, rounds: int) -> tuple[float, float, float]:
    """Return the minimum of each figure of `validated` over the rounds."""
    runs = [validated(make_monitors(), data) for _ in range(rounds)]
    processor, clock, peak = map(min, zip(*runs, strict=True))
    return processor, clock, peak


if __name__ == "__main__":
    main()
