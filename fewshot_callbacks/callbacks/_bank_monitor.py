"""Base class of the monitors that compare each set with a bank of labelled items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fewshot_callbacks.callbacks._bank_items import BankData, BankItems, BankWord, data_of_bank
from fewshot_callbacks.callbacks._collecting import CollectingMonitor
from fewshot_callbacks.callbacks._collection import Batch
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._evaluation import Loaders
from fewshot_callbacks.callbacks._sides import Side
from fewshot_callbacks.callbacks.embedding_source import EmbeddingSource, Entry, Source
from fewshot_callbacks.functional._labels import no_labels
from fewshot_callbacks.functional.retrieval import Similarity
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.settings import NoFile, plain_list
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer


class BankMonitor(CollectingMonitor):
    """Compares each set with a bank: the training set, the gallery or the set itself.

    Args:
        bank: One of `allowed_banks`, a data set, a loader, or a function of the Trainer.
        similarity: How embeddings of steps and of training items are compared, to check that they are made alike.
    """

    _takes_two_encoders = True

    def __init__(
        self,
        bank: BankWord | BankData,
        allowed_banks: Sequence[str],
        similarity: Similarity,
        *,
        source: EmbeddingSource | Source | NoFile,
        gallery: int | Entry | None,
        loaders: Loaders | None,
        name: str | None,
        prog_bar: bool,
        strict: bool | None,
        groups: Sequence[Entry] | Entry | None = None,
        takes_targets: bool = False,
    ) -> None:
        super().__init__(
            source,
            gallery=gallery,
            loaders=loaders,
            name=name,
            prog_bar=prog_bar,
            strict=strict,
            groups=plain_list(groups),
            takes_targets=takes_targets,
        )
        owner = self._policy.owner
        data = data_of_bank(bank, allowed_banks, owner)
        self.bank = bank
        self.similarity: Similarity = similarity
        self._items: BankItems | None = None
        if bank not in ("gallery", "self"):
            self._items = BankItems(data, owner)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run, and find the training items again."""
        super().setup(trainer, pl_module, stage)
        if self._items is not None:
            self._items.begin()
            groups = None if self._groups is None else self._groups.entry
            self._training_bank = self._collection.shared_bank(self._items, groups)

    def _see_batch(self, trainer: Trainer, loader: int, read: Batch, batch: Any) -> None:
        """Check on the first batch that training items are embedded as in the step."""
        is_compared = read.first == 0 and read.embeddings is not None and not self.source.embeds_batches
        if self._training_bank is not None and is_compared:
            assert read.embeddings is not None
            self._training_bank.compare(trainer, loader, batch, read.embeddings, self.similarity)

    def _bank_shard(self, trainer: Trainer, sides: Sequence[Side]) -> Shard | None:
        """Return this process's part of the bank, with groups; None if the set is its own bank. *Collective*."""
        if self._training_bank is None:
            return self._shard(sides[1]) if self.bank == "gallery" and len(sides) > 1 else None
        if self._collection.has_two_encoders:
            raise UsageError(
                f"{self._policy.owner} needs one encoder if the bank has training items. Pass bank='gallery', or name "
                "the embeddings and labels of one encoder as the source."
            )
        shard = self._training_bank.shard()
        # A process without items has no groups, but must pass some, as the others do.
        return shard._replace(groups=no_labels()) if self._groups is not None and shard.groups is None else shard
