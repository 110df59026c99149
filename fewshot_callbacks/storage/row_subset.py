"""A subset of the rows of shards, as an array."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.storage.shards import Shards

# Smallest number of rows that are read at once.
LEAST_SPAN = 1024


class RowSubset:
    """A subset of the rows of shards, with their columns, as an array.

    Args:
        shards: All rows.
        mask: (rows,) Whether each row is in the subset.

    Attributes:
        shape: (rows of the subset, dim).
        dtype: The dtype of the shards.
        notes: The notes of the shards.
        labels: (rows of the subset,) Labels; None if the shards have no labels.
        ids: (rows of the subset,) Ids; None if the shards have no ids.
        groups: (rows of the subset,) Groups; None if the shards have no groups.
    """

    def __init__(self, shards: Shards | RowSubset, mask: NDArray[np.bool_]) -> None:
        self._shards = shards
        # the index of each row among all rows of the shards
        self._indices = np.flatnonzero(mask)
        self.shape: tuple[int, int] = (len(self._indices), shards.shape[1])
        self.dtype: Any = shards.dtype
        self.notes: tuple[str, ...] = shards.notes
        self.labels: NDArray[Any] | None = _masked(shards.labels, mask)
        self.ids: NDArray[Any] | None = _masked(shards.ids, mask)
        self.groups: NDArray[Any] | None = _masked(shards.groups, mask)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, rows: slice) -> Any:
        """Return contiguous rows of the subset.

        Rows of the shards between them are read, too, in spans of about as many rows as are returned. Therefore reading
        takes at most three times the memory of the result.
        """
        indices = self._indices[rows]
        if len(indices) == 0:
            return self._shards[0:0]
        span_length = max(LEAST_SPAN, len(indices))
        span_numbers = indices // span_length
        borders = [0, *(np.flatnonzero(np.diff(span_numbers)) + 1), len(indices)]
        by_span = []
        for start, stop in pairwise(borders):
            first = int(indices[start])
            last = int(indices[stop - 1])
            by_span.append(self._shards[first : last + 1][indices[start:stop] - first])
        if len(by_span) == 1:
            return by_span[0]
        return np.concatenate(by_span) if isinstance(by_span[0], np.ndarray) else torch.cat(by_span)

    def where(self, row: int) -> str:
        """Return the row number and the file of a row of the subset, as `Shards.where` does."""
        return self._shards.where(int(self._indices[row]))


def _masked(column: NDArray[Any] | None, mask: NDArray[np.bool_]) -> NDArray[Any] | None:
    return None if column is None else column[mask]
