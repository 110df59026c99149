"""Some rows of shards, as a source."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.sources.shards import Shards

# Smallest number of rows that are read at the same time.
LEAST_SPAN = 1024


class ChosenRows:
    """Some rows of shards as a source, with their columns.

    Args:
        shards: All rows.
        mask: (rows,) Which of them are chosen.

    Attributes:
        shape: (chosen rows, dim).
        dtype: That of the shards.
        notes: Those of the shards.
        labels: (chosen rows,) Their labels; None if the shards have none. So are `ids` and `groups`.
    """

    def __init__(self, shards: Shards | ChosenRows, mask: NDArray[np.bool_]) -> None:
        self._shards = shards
        # the index of each chosen row among all
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
        """Return rows that are neighbours among the chosen ones.

        Rows that lie between them are read as well, in spans of about as many rows as are returned: so the memory is at most
        three times that of the result.
        """
        indices = self._indices[rows]
        if len(indices) == 0:
            return self._shards[0:0]
        length = max(LEAST_SPAN, len(indices))
        spans = indices // length
        borders = [0, *(np.flatnonzero(np.diff(spans)) + 1), len(indices)]
        parts = []
        for start, stop in pairwise(borders):
            first = int(indices[start])
            last = int(indices[stop - 1])
            parts.append(self._shards[first : last + 1][indices[start:stop] - first])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)

    def where(self, row: int) -> str:
        """Say in which row of which file a row lies."""
        return self._shards.where(int(self._indices[row]))


def _masked(column: NDArray[Any] | None, mask: NDArray[np.bool_]) -> NDArray[Any] | None:
    return None if column is None else column[mask]
