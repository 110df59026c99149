"""Base of the monitors that compare each set with a bank of labelled items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from fewshot_callbacks.callbacks._collecting import CollectingMonitor
from fewshot_callbacks.callbacks._collection import Batch, Column
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._embedder import TrainingClasses, TrainingData
from fewshot_callbacks.callbacks._evaluation import Loaders
from fewshot_callbacks.callbacks._sides import SideKey
from fewshot_callbacks.callbacks.embeddings import EmbeddingSource, Entry, Source
from fewshot_callbacks.functional.retrieval import Similarity
from fewshot_callbacks.metrics.embedding_store import Shard


class BankMonitor(CollectingMonitor):
    """Compares each set with a bank: the training set, the gallery or the set itself.

    Args:
        bank: One of the words `banks`; a data set, a loader of one, or a function of the Trainer.
        banks: The words that may be given.
        similarity: How embeddings of steps and of training items are compared, to see that they are made alike.
        source: See `RetrievalMonitor`.
        gallery: See there.
        loaders: See there.
        name: See there.
        prog_bar: See there.
        strict: See there.
        columns: See `CollectingMonitor`.

    Raises:
        ValueError: If `bank` is another word.
    """

    _takes_two_encoders = True

    def __init__(
        self,
        bank: str | TrainingData,
        banks: Sequence[str],
        similarity: Similarity,
        *,
        source: Source | EmbeddingSource,
        gallery: int | Entry | None,
        loaders: Loaders | None,
        name: str | None,
        prog_bar: bool,
        strict: bool | None,
        columns: Sequence[Column] = (),
    ) -> None:
        super().__init__(
            source,
            gallery=gallery,
            loaders=loaders,
            name=name,
            prog_bar=prog_bar,
            strict=strict,
            columns=columns,
        )
        owner = self._policy.owner
        if isinstance(bank, str) and bank not in banks:
            words = ", ".join(map(repr, banks))
            raise ValueError(f"{owner}(bank={bank!r}): choose {words}, or pass a data set or loader.")
        self.bank = bank
        self.similarity: Similarity = similarity
        self._training: TrainingClasses | None = None
        if bank not in ("gallery", "self"):
            data: Any = None if isinstance(bank, str) else bank
            # All items are taken, so that the seed changes nothing.
            self._training = TrainingClasses(data, None, None, 0, owner, "bank")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: find the training items of the run anew."""
        super().setup(trainer, pl_module, stage)
        if self._training is not None:
            self._training.begin()
            self._bank = self._collection.bank(self._training)

    def _see_batch(self, trainer: Trainer, loader: int, read: Batch, batch: Any) -> None:
        """Check with the first batch that training items are embedded as the step embeds."""
        is_compared = read.first == 0 and read.embeddings is not None and not self.source.embeds_batches
        if self._bank is not None and is_compared:
            assert read.embeddings is not None
            self._bank.compare(trainer, loader, batch, read.embeddings, self.similarity)

    def _bank_shard(self, trainer: Trainer, sides: Sequence[SideKey]) -> Shard | None:
        """Return this process's part of the bank; None where the set is its own bank. *Collective*.

        Raises:
            UsageError: If two encoders leave it open which one embeds the training items.
        """
        if self._bank is None:
            return self._shard(trainer, sides[1]) if self.bank == "gallery" and len(sides) > 1 else None
        if self._collection.has_two_encoders:
            raise UsageError(
                f"{self._policy.owner} needs one encoder where the bank holds training items. Pass bank='gallery', or name "
                "the embeddings and labels of one encoder as the source."
            )
        return self._bank.shard()
