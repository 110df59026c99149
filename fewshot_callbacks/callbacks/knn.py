"""kNN accuracy at the end of every validation and test."""

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
    """Logs the kNN accuracy of your embeddings: how often the nearest items of a bank vote for the right class.

    By default it logs these keys, which are in [0, 1]; higher is better. A test logs them with `test/`.

    - `val/knn@10`, `val/knn@20`: fraction of items for which the 10 or 20 nearest items vote for the right class
    - `val/knn@10_top5`, `val/knn@20_top5`: fraction of items whose class is among the five classes with the most votes

    Votes are weighted by the cosine. With other similarities all votes have the same weight.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.tensor([[0.0], [2.0], [5.0], [6.0], [9.0], [11.0]])
        >>> loader = DataLoader(TensorDataset(items, torch.tensor([0, 0, 0, 1, 1, 1])), batch_size=3)
        >>> monitor = KnnMonitor(1, bank="self", source="encoder", similarity="euclidean")
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> round(trainer.callback_metrics["val/knn@1"].item(), 4)
        0.6667

    Args:
        k: Number of neighbours that vote, or several numbers, each at least 1. See `knn_accuracy`.
        bank: The items that vote: a data set, a loader or a stream with evaluation transforms, or a function of the
            Trainer that returns one of them. `train` calls `training_data_for_evaluation()` of the Trainer's data
            module, which the data modules of this package have. Bank items are embedded once in each validation, after
            its first batch, for all monitors that use them. Each item counts once. `gallery` is the gallery of the set,
            or the set itself if it has no gallery. `self` is the set without the item itself. If the source has ids, an
            item never votes for itself.
        similarity: How embeddings are compared: `cosine`, `dot`, `euclidean` or `hamming`. See `RetrievalSettings`.
        confidence: Confidence level of the intervals in `reports`, in (0, 1).
        memory_mb: Bound on the memory of the search, in MB; None is 512. In addition each process holds the whole bank.
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings.
        gallery: Index or name of the loader with the gallery. If no loader has that name: an entry of the step's output
            or of the batch, or a function of (outputs, batch), with a boolean for each item that is True for gallery
            items.
        loaders: Index or name of the loader that is measured, or several of them, such as `("retrieval",)` if the steps
            of another loader give no embeddings. By default all loaders are measured. With only one measured loader,
            its name is not part of the keys.
        name: Part of the keys between the stage and the metric: `t2i` gives `val/t2i/knn@10`. Several monitors of this
            kind in one Trainer need different names.
        prog_bar: Show the first of the accuracies in the progress bar.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does.

    Attributes:
        reports: The latest `KnnReport` of each set. The key is `""` for a single loader, otherwise the end of its
            logged keys; with two encoders it begins with their direction, such as `"image_to_text"`.

    Raises:
        ValueError: If a number of neighbours is below 1, or `bank` is an unknown word.
    """

    _remedy_for_weights = " Or let the set vote itself: bank='self'."

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
        """Return name -> accuracy. *Collective*."""
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
        """Return whether an id names the same item among the queries and in the bank. *Collective*."""
        if bank is None:
            return False
        if self._training_bank is None:
            return self._ids_are_shared(sides)
        return self.source.ids is not None and any(gather_objects(bank.ids is not None and len(bank.ids) > 0))
