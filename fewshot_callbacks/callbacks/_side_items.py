"""The items of each side in this process: appended as batches, joined for the first monitor that measures them."""

from __future__ import annotations

import os

from torch import Tensor

from fewshot_callbacks.callbacks._sides import Column, Side
from fewshot_callbacks.functional._labels import no_labels
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard


class SideItems:
    """Batches, and then shards, of the sides of a validation. A side is held in one form at a time.

        store             the batches of a loader, or of one of its encoders
        join              all of them as a shard; the store is gone
        divide            the shards of the queries and of the gallery, where a flag tells them apart

    Args:
        spill_to: See `EmbeddingStore`.
    """

    def __init__(self, spill_to: str | os.PathLike[str] | None) -> None:
        self._spill_to = spill_to
        self._stores: dict[Side, EmbeddingStore] = {}
        self._joined: dict[Side, Shard] = {}
        # (joined side, flag) -> the items without and with the flag
        self._divided: dict[tuple[Side, Column], tuple[Shard, Shard]] = {}

    def __len__(self) -> int:
        """Return the number of sides that are held."""
        return len(self._stores) + len(self._joined) + len(self._divided)

    def store(self, side: Side) -> EmbeddingStore:
        """Return the store of a side; a new one before the first batch."""
        if side not in self._stores:
            self._stores[side] = EmbeddingStore(self._spill_to)
        return self._stores[side]

    def count(self, side: Side) -> int | None:
        """Return the number of items in the store of a side; None without a store."""
        return len(self._stores[side]) if side in self._stores else None

    def join(self, side: Side, dataset_size: int | None, part: tuple[int, int]) -> Shard:
        """Return the items of a side, see `EmbeddingStore.shard`. *Collective*."""
        if side not in self._joined:
            self._joined[side] = self.store(side).shard(dataset_size, part, clear=True)
            del self._stores[side]
        return self._joined[side]

    def divide(self, side: Side, flag: Column, *, needs_whole: bool) -> tuple[Shard, Shard]:
        """Return the items of a joined side without and with a flag. *Collective*.

        Args:
            side: The side.
            flag: Its column.
            needs_whole: Whether the joined side is still needed: it is a second copy of the embeddings.
        """
        if (side, flag) not in self._divided:
            whole = self._joined[side]
            is_gallery = whole.columns.get(flag, no_labels()).values
            assert isinstance(is_gallery, Tensor)
            queries, gallery = (whole.part(is_gallery == number, self._spill_to) for number in (0, 1))
            self._divided[side, flag] = (queries, gallery)
            if not needs_whole:
                del self._joined[side]
        return self._divided[side, flag]

    def is_divided(self, side: Side, flag: Column) -> bool:
        """Return whether a side was divided by a flag."""
        return (side, flag) in self._divided

    def drop(self, side: Side) -> None:
        """Drop the shards of a side."""
        self._joined.pop(side, None)
        self._divided = {place: parts for place, parts in self._divided.items() if place[0] != side}
