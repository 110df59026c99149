"""The items of each side in this process: appended in batches, joined for the first monitor that measures them."""

from __future__ import annotations

import os

from torch import Tensor

from fewshot_callbacks.callbacks._sides import Side
from fewshot_callbacks.functional._labels import no_labels
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore, Shard


class SideItems:
    """Stores the items of each side, first as batches, then as a shard."""

    def __init__(self, spill_to: str | os.PathLike[str] | None, owner: str) -> None:
        self._spill_to = spill_to
        self._owner = owner
        # undivided side -> its batches, until they are joined
        self._stores: dict[Side, EmbeddingStore] = {}
        self._shards: dict[Side, Shard] = {}

    def __len__(self) -> int:
        """Return the number of stored sides."""
        return len(self._stores) + len(self._shards)

    def store(self, side: Side) -> EmbeddingStore:
        """Return the store of an undivided side; a new store before its first batch."""
        if side not in self._stores:
            self._stores[side] = EmbeddingStore(self._spill_to, self._owner)
        return self._stores[side]

    def shard(self, side: Side, dataset_size: int | None, part: tuple[int, int], *, needs_undivided: bool) -> Shard:
        """Return the items of a side, which are joined and divided once. *Collective*.

        With `needs_undivided`, the items are also kept before a flag divides them, because another monitor measures
        them together. This costs a second copy of the embeddings.
        """
        whole = side.undivided
        if side not in self._shards and whole not in self._shards:
            self._shards[whole] = self.store(whole).shard(dataset_size, part, clear=True)
            del self._stores[whole]
        if side not in self._shards:
            assert side.flag is not None
            undivided = self._shards[whole]
            is_gallery = undivided.columns.get(side.flag, no_labels()).values
            assert isinstance(is_gallery, Tensor)
            for is_flagged in (False, True):
                part_of_flag = undivided.part(is_gallery == int(is_flagged), self._spill_to, self._owner)
                self._shards[side._replace(is_flagged=is_flagged)] = part_of_flag
            if not needs_undivided:
                del self._shards[whole]
        return self._shards[side]

    def drop(self, undivided: Side) -> None:
        """Drop the shards of a side, divided or not."""
        self._shards = {side: shard for side, shard in self._shards.items() if side.undivided != undivided}
