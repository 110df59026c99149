"""Rows that equal other rows bit for bit: equal rows have equal scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.options import run_tasks, split

# The integer type that has as many bytes as a component.
_INTEGERS: dict[int, Any] = {8: np.int64, 4: np.int32, 1: np.int8}


def first_duplicates(values: NDArray[Any], threads: int, hashes: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return, for each row, the number of the first row that equals it bit for bit.

    Args:
        values: (rows, dim), contiguous.
        threads: Number of threads to compute with.
        hashes: `row_hashes` of these rows, and perhaps of rows after them; None if they are not known.
    """
    bits = values.view(_INTEGERS[values.itemsize])
    known = row_hashes(values, threads) if hashes is None else hashes[: len(values)]
    _, first, number = np.unique(known, return_index=True, return_inverse=True)
    first_equal = first[number]

    def check_rows(block: slice, _: None) -> None:
        # Different rows may have one hash.
        differs = (bits[block] != bits[first_equal[block]]).any(1)
        first_equal[block] = np.where(differs, np.arange(block.start, block.stop), first_equal[block])

    run_tasks(split(len(bits)), check_rows, threads)
    return first_equal


def row_hashes(values: NDArray[Any], threads: int = 1, seed: int = 0) -> NDArray[np.int64]:
    """Return a 64-bit hash of each row: the same in every process, and 0 for a row of zeros.

    Args:
        values: (rows, dim), contiguous.
        threads: Number of threads to compute with.
        seed: Seed of the random factors. Hashes with two seeds are independent, 128 bits together.
    """
    bits = values.view(_INTEGERS[values.itemsize])
    odd_factors = np.random.default_rng(seed).integers(2**62, size=bits.shape[1]) | 1
    hashes = np.empty(len(bits), np.int64)
    # About half of the bits, so that the upper bits affect the lower bits. Any number near it works.
    shift = 4 * bits.itemsize - 3

    def hash_rows(block: slice, _: None) -> None:
        rows = bits[block]
        hashes[block] = (rows ^ (rows >> shift)) @ odd_factors  # mixed, since small integers end in zeros

    run_tasks(split(len(bits)), hash_rows, threads)
    return hashes
