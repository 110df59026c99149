"""Items that come several times: the first of each id, and copies, which are candidates equal to a query bit for bit.

A copy with the label of its query is a perfect neighbour, whatever the model has learnt. Equal rows are found by a hash
of 64 bits of each, which all processes know. That two rows are equal says that they are one item only where different
items have different rows. So it is not said of an embedding that has collapsed, nor of codes and coarse numbers.

Ids need another comparison. Items of one id may be one item embedded twice, whose rows differ by rounding, and so in every
hash. A sketch tells how far two rows are apart; but it cannot find equal rows among all, as a hash does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.duplicates import row_hashes
from fewshot_callbacks.functional._reading import default_mode, number_distinct
from fewshot_callbacks.sources.stored_rows import StoredRows

Ints = NDArray[np.int64]

# Numbers that an embedding is shortened to. Those of two that are far apart are all close with a probability below
# 1e-8.
SKETCH = 8
# The same item, embedded in another batch or on another device, differs by rounding: 1 % of its length in bfloat16.
SAME_ITEM = 0.05
# Share of the queries that have a copy from which it is noted: a hundredth moves a recall by no more than that.
NOTED_SHARE = 0.01
# Share of equal numbers in two different rows of one class from which rows are coarse. In bfloat16 it is below 0.03, of
# whole numbers from -127 to 127 about 0.02, of 16 levels 0.15 or more.
COARSE_SHARE = 0.1
# Pairs of rows that are looked at to find this out.
PAIRS = 128
# How every note on copies describes them.
BIT_FOR_BIT = "equal bit for bit"


# ---------------------------------------------------------------------------------------------------------------- ids


def first_of_each(ids: Int[Tensor, "items"]) -> Int[Tensor, "different"]:
    """Return the index of the first item of each id, ascending."""
    return number_distinct(ids)[1].sort().values


def sketches(embeddings: Tensor | StoredRows) -> Float[Tensor, "items numbers"]:
    """Return a few numbers for each row whose distances are about those of the rows: a random projection."""
    generator = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (embeddings.shape[1], SKETCH), generator=generator).double() - 1
    # a part at a time, for a copy of all rows in float64 could be eight times as large as they are
    parts: Iterable[Tensor] = embeddings.split(4096) if isinstance(embeddings, Tensor) else _pieces(embeddings)
    return torch.cat([part.double() @ signs for part in parts]) / math.sqrt(SKETCH)


@default_mode()
def note_on_ids(
    ids: Int[Tensor, "items"], labels: Int[Tensor, "items"], sketch: Float[Tensor, "items numbers"]
) -> str | None:
    """Return a description of items that are dropped as repetitions, and are not: their label or embedding is another one.

    Args:
        ids: One for each item; of each the first item is kept.
        labels: The label of each item.
        sketch: See `sketches`.

    Returns:
        A sentence or two; None where all items of an id are the same.
    """
    number, first = number_distinct(ids)
    kept = first[number]
    longer = torch.maximum(sketch.norm(dim=1), sketch[kept].norm(dim=1))
    others = ((sketch - sketch[kept]).norm(dim=1) > SAME_ITEM * longer) | (labels != labels[kept])
    if not bool(others.any()):
        return None
    shared = len(number[others].unique())
    return (
        f"{shared:,} of {len(first):,} ids are shared by items that differ in embedding or label. Only the first item of "
        f"each id is counted, so that {len(ids) - len(first):,} of {len(ids):,} items are left out, and "
        f"{int(others.sum()):,} of them are no repetitions. Pass ids that name single items, such as the path of a file or "
        "the index in the data set, or none if no item comes twice."
    )


# ------------------------------------------------------------------------------------------------------------- copies


def is_on_copies(note: str) -> bool:
    """Return whether a note of a report is on copies."""
    return BIT_FOR_BIT in note


class Side(NamedTuple):
    """The queries or the items of an evaluation, those of all processes."""

    hashes: Int[np.ndarray, "items"]
    """of each row, see `hashes_of`"""
    labels: Int[np.ndarray, "items"]


def hashes_of(rows: Tensor | StoredRows, dtype: torch.dtype) -> Ints:
    """Return the hash of each row as a row of this type, which is the same for equal rows of any type."""
    if isinstance(rows, StoredRows):
        return np.concatenate([np.empty(0, np.int64), *(hashes_of(part, dtype) for part in _pieces(rows))])
    return row_hashes(rows.to(dtype).contiguous().numpy())


def _pieces(rows: StoredRows) -> Iterable[Tensor]:
    return (part for _, part in rows.chunks())


def count_copies(
    queries: Side, items: Side, itself: Ints | None, exclusions: Sequence[tuple[Ints, Ints]]
) -> Int[np.ndarray, "queries"]:
    """Return how many candidates of each query are its copies: equal bit for bit, and of its label.

    Args:
        queries: All queries.
        items: All gallery items.
        itself: Index of the item that each query is, and that is no candidate; None if queries are no items.
        exclusions: Codes of the queries and of the items for each reason: a pair with equal codes is no candidate.
    """
    copies = np.zeros(len(queries.hashes), np.int64)
    distinct, number, holders = np.unique(items.hashes, return_inverse=True, return_counts=True)
    at = np.searchsorted(distinct, queries.hashes).clip(max=len(distinct) - 1)
    is_there = distinct[at] == queries.hashes
    if itself is not None:
        is_there &= holders[at] > 1
        exclusions = [(itself, np.arange(len(number))), *exclusions]
    if not is_there.any():
        return copies
    query, item = np.flatnonzero(is_there), np.flatnonzero(np.isin(number, at[is_there]))
    same = [(at[query], number[item]), (queries.labels[query], items.labels[item])]
    codes = [(of_queries[query], of_items[item]) for of_queries, of_items in exclusions]
    # a candidate is excluded for one reason or several: inclusion and exclusion
    for reasons in range(len(codes) + 1):
        for some in itertools.combinations(codes, reasons):
            copies[query] += (-1) ** reasons * _equal_items([*same, *some])
    return copies


def _equal_items(columns: Sequence[tuple[Ints, Ints]]) -> Ints:
    """Return how many items equal each query in all columns."""
    keys = np.zeros(sum(map(len, columns[0])), np.int64)
    for pair in columns:
        values = np.unique(np.concatenate(pair), return_inverse=True)[1]
        keys = np.unique(keys * (values.max(initial=0) + 1) + values, return_inverse=True)[1]
    queries = len(columns[0][0])
    counts = np.bincount(keys[queries:], minlength=int(keys.max(initial=0)) + 1)
    found: Ints = counts[keys[:queries]]
    return found


def are_telling(queries: Side, items: Side, copies: Ints, *, one_set: bool) -> Bool[np.ndarray, "queries"]:
    """Return which queries have copies that are no sign of an embedding that has lost what tells items apart.

    Those of a row of zeros are, of a row that several classes share, and of a class whose items are all one row.

    Args:
        queries: All queries.
        items: All gallery items.
        copies: Number of copies of each query.
        one_set: Whether the queries are items, too.
    """
    telling: NDArray[np.bool_] = (copies > 0) & (queries.hashes != 0)
    rows, row = np.unique(items.hashes, return_inverse=True)
    labels, label, number = np.unique(items.labels, return_inverse=True, return_counts=True)
    row_of_pair, label_of_pair = np.divmod(np.unique(row * len(labels) + label), len(labels))
    is_shared = np.bincount(row_of_pair, minlength=len(rows)) > 1
    telling &= ~np.isin(queries.hashes, rows[is_shared])
    is_point = (np.bincount(label_of_pair, minlength=len(labels)) == 1) & (number - one_set > 1)
    telling &= ~np.isin(queries.labels, labels[is_point])
    return telling


def count_coarse(rows: Tensor | StoredRows, labels: Ints, hashes: Ints) -> Int[np.ndarray, "4"]:
    """Return what says whether the numbers of some rows are coarse.

    Args:
        rows: (items, dim) of one process.
        labels: (items,).
        hashes: (items,) of the rows.

    Returns:
        Of pairs of different rows of one class the equal numbers, and all numbers, but for those that are the most
        frequent of their column, such as the zeros of a rectifier; rows whose numbers are all of one size, and all rows.
    """
    if isinstance(rows, StoredRows):  # a part that is read in one go
        some = slice(0, min(len(rows), rows.chunk_rows))
        rows, labels, hashes = rows.read(some), labels[some], hashes[some]
    order = np.lexsort((hashes, labels))
    different = np.flatnonzero(hashes[order][1:] != hashes[order][:-1])
    first = different[labels[order][different] == labels[order][different + 1]]
    at = order[different if not len(first) else first]
    pairs = first[_evenly(len(first))]
    left, right = (rows[torch.from_numpy(order[index])] for index in (pairs, pairs + 1))
    equal = compared = np.int64(0)
    if len(pairs):
        modes = torch.cat([left, right]).mode(dim=0).values
        counted = (left != modes) & (right != modes)
        compared = np.int64(counted.sum())
        # columns of a single number and its exceptions are as coarse as can be
        equal = np.int64(((left == right) & counted).sum()) if compared else np.int64(1)
    sample = rows[torch.from_numpy(at[_evenly(len(at))])].double().abs()
    smallest = sample.masked_fill(sample == 0, math.inf).amin(1) if len(sample) else sample.sum(1)
    largest = sample.amax(1) if len(sample) else sample.sum(1)
    is_flat = (largest - smallest).abs() <= 1e-6 * largest
    return np.array([equal, compared, int(is_flat.sum()), len(sample)], np.int64)


def _evenly(number: int) -> Ints:
    """Return indices of at most `PAIRS` of so many, evenly spaced."""
    found: Ints = np.unique(np.linspace(0, number - 1, min(number, PAIRS)).astype(np.int64))
    return found


@dataclass(frozen=True)
class Copies:
    """The copies among the candidates of each query."""

    counts: Int[np.ndarray, "queries"]
    """number of copies of each query, of all processes"""
    is_noted: bool
    """whether there are many of them, and they are likely to be items that come several times"""

    @classmethod
    def among(
        cls,
        queries: Side,
        items: Side,
        itself: Ints | None,
        exclusions: Sequence[tuple[Ints, Ints]],
        own: tuple[Tensor | StoredRows, Ints],
        processes: Processes,
        *,
        as_codes: bool,
    ) -> Copies:
        """Count the copies, and judge them. Collective.

        Args:
            queries: All queries.
            items: All gallery items.
            itself: See `count_copies`.
            exclusions: See there.
            own: Gallery rows of this process, and their indices among all items.
            processes: Those that make this call together.
            as_codes: Whether rows are binary codes, of which different items may well have the same.
        """
        counts, one_set = count_copies(queries, items, itself, exclusions), itself is not None
        telling = int(are_telling(queries, items, counts, one_set=one_set).sum()) if counts.any() else 0
        is_noted = telling > 0 and telling >= NOTED_SHARE * len(counts) and not as_codes
        if is_noted:
            rows, places = own
            found = processes.summed(count_coarse(rows, items.labels[places], items.hashes[places]))
            equal, compared, flat, seen = found.tolist()
            is_noted = equal <= COARSE_SHARE * compared and 2 * flat <= seen
        return cls(counts, is_noted)

    @property
    def queries(self) -> int:
        """Number of queries that have a copy."""
        return int((self.counts > 0).sum())

    def note(self, effect: str, cure: str) -> str:
        """Return what a reader should know of the copies.

        Args:
            effect: What copies do to the values.
            cure: What to do if they are one item.
        """
        number, share = len(self.counts), self.queries / len(self.counts)
        return (
            f"{self.queries:,} of {number:,} queries ({100 * share:.0f} %) find a copy: a candidate of their label whose "
            f"embedding is {BIT_FOR_BIT}. {effect}. If copies are items that come several times, {cure}. If they are "
            "different items, the values stand."
        )
