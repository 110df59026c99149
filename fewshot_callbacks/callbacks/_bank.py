"""Training items that a validation is compared with, embedded once per validation for all monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fewshot_callbacks.callbacks._bank_items import BankItems
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._embedder import Embedder
from fewshot_callbacks.callbacks.embedding_source import Entry
from fewshot_callbacks.functional.retrieval import Similarity
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard
from fewshot_callbacks.trainer.lightning import Trainer
from fewshot_callbacks.trainer.weights import weight_fingerprints


class Bank:
    """Training items with their embeddings in one validation.

    They are embedded after its first batch, with the weights of its steps: a callback that averages weights may have
    restored the original weights by the end of the epoch.

    Args:
        groups: Entry of a batch with the group of each item; None without groups.
    """

    def __init__(self, items: BankItems, embedder: Embedder, groups: Entry | Sequence[Entry] | None = None) -> None:
        self.items = items
        self.groups = groups
        self.embedder = embedder
        self.clear()

    def is_for(self, items: BankItems, groups: Entry | Sequence[Entry] | None) -> bool:
        """Return whether the bank has these items, and has these groups or can still add them."""
        has_groups = groups is None or self.groups in (None, groups)
        return self.items.are_those_of(items) and has_groups

    def serve(self, groups: Entry | Sequence[Entry] | None) -> None:
        """Also read groups for another monitor; called at its setup."""
        self.groups = self.groups if groups is None else groups

    def clear(self) -> None:
        """Drop the embeddings."""
        # the items of this process, and its part without repeated items, which is joined when the first set is measured
        self._store: EmbeddingStore | None = None
        self._shard: Shard | None = None
        # why the items could not be embedded
        self._error: Exception | None = None
        # fingerprints of the weights with which the items are embedded
        self._weights: list[int] = []
        # loader -> whether its first batch was embedded with the same weights
        self._has_same_weights: dict[int, bool] = {}
        # (similarity, loader) -> error of the comparison of its first batch
        self._comparisons: dict[tuple[Similarity, int], Exception | None] = {}

    def begin(self, trainer: Trainer) -> None:
        """Begin a validation. *Collective*."""
        self.items.prepare(trainer)
        self._weights = weight_fingerprints(trainer.lightning_module)

    @property
    def is_embedded(self) -> bool:
        """Whether embedding the items has succeeded or failed in this validation."""
        return self._store is not None or self._shard is not None or self._error is not None

    def after_first_batch(self, trainer: Trainer, loader: int) -> bool:
        """Embed the items after the first batch of the first loader; check the weights for later loaders.

        Returns:
            Whether the weights of this loader's steps are the weights of the items. `check` raises an error in the
            items.
        """
        if loader not in self._has_same_weights:
            weights = weight_fingerprints(trainer.lightning_module)
            if not self.is_embedded:
                self._weights = weights
                self._embed(trainer)
            self._has_same_weights[loader] = self._weights == weights
        return self._has_same_weights[loader]

    def embed_without_batch(self, trainer: Trainer) -> bool:
        """Embed the items at the end of a validation in which this process had no batch.

        Returns:
            Whether the weights are unchanged since the start of the validation, and so equal those of other processes'
            steps.
        """
        if self.is_embedded:
            return True
        if self._weights != weight_fingerprints(trainer.lightning_module):
            return False
        self._embed(trainer)
        return True

    def _embed(self, trainer: Trainer) -> None:
        """Embed this process's items. `check` raises an error later, for every monitor."""
        try:
            self._store = self.items.embedded(trainer, self.embedder, self.groups)
        except Exception as error:  # a metric must not end the run
            self._error = error

    def check(self) -> None:
        """Raise the error that embedding the items gave, if any."""
        if self._error is not None:
            raise self._error

    def compare(self, trainer: Trainer, loader: int, batch: Any, embeddings: Tensor, similarity: Similarity) -> None:
        """Check once for each loader that training items are embedded in the same way as in its steps.

        The cosine ignores the length of embeddings.
        """
        key = (similarity, loader)
        if key not in self._comparisons:
            self._comparisons[key] = None
            try:
                self.embedder.check(trainer, trainer.lightning_module, batch, embeddings, similarity)
            except Exception as error:
                self._comparisons[key] = error
        failure = self._comparisons[key]
        if failure is not None:
            raise failure

    def shard(self) -> Shard:
        """Return this process's part of the items, the same for all sets of a validation. *Collective*."""
        if self._shard is None:
            assert self._store is not None
            self._shard = self._store.shard(clear=True)
            self._store = None
        return self._shard


def changed_weights(owner: str, remedy: str) -> UsageError:
    """Return the error that weights changed between the training items and the steps, with the fix."""
    return UsageError(
        f"{owner}: the weights have changed since the training items were embedded, at the first batch of this "
        "validation. Training and validation items need the same weights to be compared. Exchange weights only before "
        f"the first batch and after the last batch.{remedy}"
    )
