"""Classification by a vote of the nearest items, at the end of every validation and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fewshot_callbacks.callbacks._bank_items import BankData, BankWord
from fewshot_callbacks.callbacks._bank_monitor import BankMonitor
from fewshot_callbacks.callbacks._evaluation import Loaders
from fewshot_callbacks.callbacks._sides import MeasuredSet, Side
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Entry, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes, gather_objects
from fewshot_callbacks.functional._reading import named, reworded
from fewshot_callbacks.functional.knn import FEW_VOTERS_REMEDY, LAST_RANKS, NO_MATCH_REMEDY, KnnReport, knn_accuracy
from fewshot_callbacks.functional.neighbours import positive_whole
from fewshot_callbacks.functional.retrieval import Share, Similarity
from fewshot_callbacks.functional.retrieval.settings import several
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.trainer.lightning import Trainer


class KnnMonitor(BankMonitor):
    """Logs how often the nearest items of a bank vote for the label of an item, such as `val/knn@20`.

    `val/knn@20_top5` counts an item as right if its label is one of the five with the most votes. Votes are weighted by the
    cosine; with other similarities they are equal. Values are in [0, 1]; larger is better.

    Args:
        k: Number of neighbours that vote, or several, each at least 1; see `knn_accuracy`.
        bank: What votes: a data set, a loader or a stream with the transforms of an evaluation, or a function of the
            Trainer that returns one. `train` is the result of `training_data_for_evaluation()` of the Trainer's data
            module, which the data modules of this package have. The bank has the items that its loader gives, each once;
            they are embedded once in each validation, after its first batch, for all monitors that compare with them.
            `gallery` is the gallery of the set, without one the set itself. `self` is the set without the item itself.
            With ids in the source no item votes for itself.
        similarity: See `RetrievalSettings`.
        confidence: Confidence level of the intervals in `reports`, in (0, 1).
        memory_mb: Memory of the search, see `RetrievalSettings`. Each process holds all items that vote while they are
            searched.
        source: See `RetrievalMonitor`.
        gallery: See there.
        loaders: See there.
        name: See there.
        prog_bar: Show the first of the accuracies in the progress bar.
        strict: Which errors end the run, see `RetrievalMonitor`.

    Attributes:
        reports: The latest `KnnReport` of each set, by the suffix of its keys (`""` for a single loader), after the
            direction of two encoders.

    Raises:
        ValueError: If a number of neighbours is below 1, or `bank` is another word.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> monitors = [KnnMonitor((10, 20), bank="self", source="encoder")]
        >>> trainer = Trainer(callbacks=monitors, logger=False, accelerator="cpu")
    """

    _remedy_for_weights = " Or let the set vote itself, bank='self'."

    def __init__(
        self,
        k: int | Sequence[int] = (10, 20),
        bank: BankWord | BankData = "train",
        *,
        similarity: Similarity = "cosine",
        confidence: float = 0.95,
        memory_mb: float | None = None,
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        gallery: int | Entry | None = None,
        loaders: Loaders | None = None,
        name: str | None = None,
        prog_bar: bool = False,
        strict: bool | None = None,
    ) -> None:
        super().__init__(
            bank,
            ("train", "gallery", "self"),
            similarity,
            source=source,
            gallery=gallery,
            loaders=loaders,
            name=name,
            prog_bar=prog_bar,
            strict=strict,
        )
        fix = "Pass numbers of neighbours, such as (10, 20)."
        self.k = [positive_whole("KnnMonitor", "k", neighbours, fix) for neighbours in several(k)]
        self.confidence = confidence
        self.memory_mb = memory_mb
        self._accuracies = [f"knn@{k}{place}" for k in dict.fromkeys(self.k) for place in LAST_RANKS]
        self._better = dict.fromkeys(self._accuracies, "higher")
        self.reports: dict[str, KnnReport] = {}

    def _names(self) -> Sequence[str]:
        return self._accuracies

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return the accuracies of the queries, by name. *Collective*."""
        sides = measured_set.sides
        queries = self._shard(sides[0])
        bank = self._bank_shard(trainer, sides)
        shards = [queries] if bank is None else [queries, bank]
        options: dict[str, Any] = {} if self.memory_mb is None else {"memory_mb": self.memory_mb}
        if self._has_ids(sides, bank):
            assert bank is not None
            options |= {"query_ids": queries.ids, "gallery_ids": bank.ids}
        remedies = self._remedies()
        with named(self._policy.owner, "knn_accuracy", remedies):
            report = knn_accuracy(
                *(column for shard in shards for column in (shard.embeddings, shard.labels)),
                k=self.k,
                temperature=0.07 if self.similarity == "cosine" else None,
                similarity=self.similarity,
                confidence=self.confidence,
                share=Share(all_processes(), *(shard.places for shard in shards)),
                **options,
            )
        self.reports[measured_set.direction + measured_set.suffix] = report
        self._tell([reworded(note, remedies) for note in report.notes], f"{set_name}, knn")
        return report.values

    def _remedies(self) -> dict[str, str]:
        """Return sentence of `knn_accuracy` -> the same advice in the arguments of this monitor."""
        or_self = "" if self.bank == "self" else ", or bank='self' for leave-one-out"
        return {
            NO_MATCH_REMEDY: f"Pass bank=... with the labels of this set{or_self}.",
            FEW_VOTERS_REMEDY: "Pass a larger bank=..., or k of at most",
        }

    def _has_ids(self, sides: Sequence[Side], bank: Shard | None) -> bool:
        """Return whether ids identify the item of the bank that is the query. *Collective*."""
        if bank is None:
            return False
        if self._training_bank is None:
            return self._ids_are_shared(sides)
        return self.source.ids is not None and any(gather_objects(bank.ids is not None and len(bank.ids) > 0))
