"""Items that appear several times: repeated ids, and copies, which are candidates bit-identical to a query.

A copy with its query's label is a perfect neighbour, whatever the model has learnt. All processes know a 64-bit hash of
each row, which finds equal rows. Equal rows suggest a repeated item only if different items have different rows, so there
is no note on copies for a collapsed embedding, binary codes, or coarse numbers.

Items that share an id need another comparison. One item embedded twice has rows that differ by rounding, and therefore
different hashes. A sketch estimates the distance of two rows, but unlike a hash it cannot find equal rows among all.
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
from fewshot_callbacks.storage.stored_rows import StoredRows

Ints = NDArray[np.int64]

# Number of components of a sketch. The sketches of two embeddings that are far apart are close with a probability below
# 1e-8.
SKETCH = 8
# Largest distance of two embeddings of one item, as a fraction of their length. Rounding differs between batches and
# devices: 1 % in bfloat16.
SAME_ITEM = 0.05
# Smallest fraction of queries with a copy that is noted. Fewer copies move recall by less than 0.01.
NOTED_SHARE = 0.01
# Rows are coarse if two different rows of a class share more than this fraction of their numbers. The fraction is below
# 0.03 in bfloat16, about 0.02 for integers from -127 to 127, and at least 0.15 for 16 levels.
COARSE_SHARE = 0.1
# Number of row pairs compared to judge whether rows are coarse.
PAIRS = 128
# How every note on copies describes them.
BIT_FOR_BIT = "equal bit for bit"


# ---------------------------------------------------------------------------------------------------------------- ids


def first_of_each(ids: Int[Tensor, "items"]) -> Int[Tensor, "different"]:
    """Return the index of the first item of each id, ascending."""
    return number_distinct(ids)[1].sort().values


def sketches(embeddings: Tensor | StoredRows) -> Float[Tensor, "items numbers"]:
    """Return a short random projection of each row, which approximately keeps distances."""
    generator = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (embeddings.shape[1], SKETCH), generator=generator).double() - 1
    # Chunks, because a float64 copy of all rows could take eight times their memory.
    chunks: Iterable[Tensor] = embeddings.split(4096) if isinstance(embeddings, Tensor) else _chunks(embeddings)
    return torch.cat([rows.double() @ signs for rows in chunks]) / math.sqrt(SKETCH)


@default_mode()
def note_on_ids(
    ids: Int[Tensor, "items"], labels: Int[Tensor, "items"], sketch: Float[Tensor, "items numbers"]
) -> str | None:
    """Return a note on items left out as repetitions although their label or embedding differs.

    The first item of each id counts. The result is None if all items of each id are the same.
    """
    number_of_id, first_items = number_distinct(ids)
    first = first_items[number_of_id]  # (items,) the item that counts instead of each item
    length = torch.maximum(sketch.norm(dim=1), sketch[first].norm(dim=1))
    is_far = (sketch - sketch[first]).norm(dim=1) > SAME_ITEM * length
    differs = is_far | (labels != labels[first])
    if not bool(differs.any()):
        return None
    shared = len(number_of_id[differs].unique())
    return (
        f"{shared:,} of {len(first_items):,} ids are shared by items that differ in embedding or label. Only the first item "
        f"of each id is counted, so that {len(ids) - len(first_items):,} of {len(ids):,} items are left out, and "
        f"{int(differs.sum()):,} of them are no repetitions. Pass ids that name single items, such as the path of a file or "
        "the index in the data set, or none if no item comes twice."
    )


# ------------------------------------------------------------------------------------------------------------- copies


def is_on_copies(note: str) -> bool:
    """Return whether a note of a report is on copies."""
    return BIT_FOR_BIT in note


class HashedRows(NamedTuple):
    """The queries or the items of an evaluation, of all processes."""

    hashes: Int[np.ndarray, "items"]
    """the hash of each row, see `hashes_of`"""
    labels: Int[np.ndarray, "items"]


def hashes_of(rows: Tensor | StoredRows, dtype: torch.dtype, seed: int = 0) -> Ints:
    """Return the hash of each row after conversion to a common type, so that rows of two types can be compared."""
    if isinstance(rows, StoredRows):
        return np.concatenate([np.empty(0, np.int64), *(hashes_of(chunk, dtype, seed) for chunk in _chunks(rows))])
    return row_hashes(rows.to(dtype).contiguous().numpy(), seed=seed)


def _chunks(rows: StoredRows) -> Iterable[Tensor]:
    return (chunk for _, chunk in rows.chunks())


def count_copies(
    queries: HashedRows, items: HashedRows, self_match: Ints | None, exclusions: Sequence[tuple[Ints, Ints]]
) -> Int[np.ndarray, "queries"]:
    """Return the number of copies of each query: bit-identical candidates with its label.

    `self_match` is the item that each query is; None if queries are not items. A pair with equal codes in one of the
    `exclusions` (query codes, item codes) is not a candidate.
    """
    copies = np.zeros(len(queries.hashes), np.int64)
    distinct, row_of_item, holders = np.unique(items.hashes, return_inverse=True, return_counts=True)
    row_of_query = np.searchsorted(distinct, queries.hashes).clip(max=len(distinct) - 1)
    has_equal = distinct[row_of_query] == queries.hashes
    if self_match is not None:
        has_equal &= holders[row_of_query] > 1
        exclusions = [(self_match, np.arange(len(row_of_item))), *exclusions]
    if not has_equal.any():
        return copies
    query = np.flatnonzero(has_equal)
    item = np.flatnonzero(np.isin(row_of_item, row_of_query[has_equal]))
    equal_rows = (row_of_query[query], row_of_item[item])
    equal_labels = (queries.labels[query], items.labels[item])
    codes = [(query_codes[query], item_codes[item]) for query_codes, item_codes in exclusions]
    copies[query] = count_equal_candidates([equal_rows, equal_labels], codes)
    return copies


def count_equal_candidates(columns: Sequence[tuple[Ints, Ints]], exclusions: Sequence[tuple[Ints, Ints]]) -> Ints:
    """Return how many candidates of each query equal it in all columns.

    A column has the values of the queries and of the items. `exclusions` is as in `count_copies`.
    """
    counts = np.zeros(len(columns[0][0]), np.int64)
    # Inclusion and exclusion, because a pair may be excluded for several reasons.
    for size in range(len(exclusions) + 1):
        for reasons in itertools.combinations(exclusions, size):
            counts += (-1) ** size * _count_equal([*columns, *reasons])
    return counts


def _count_equal(columns: Sequence[tuple[Ints, Ints]]) -> Ints:
    """Return how many items equal each query in all columns (query values, item values)."""
    keys = np.unique(np.concatenate(columns[0]), return_inverse=True)[1]
    for pair in columns[1:]:
        values = np.unique(np.concatenate(pair), return_inverse=True)[1]
        keys = np.unique(keys * (values.max(initial=0) + 1) + values, return_inverse=True)[1]
    queries = len(columns[0][0])
    items_with_key = np.bincount(keys[queries:], minlength=int(keys.max(initial=0)) + 1)
    counts: Ints = items_with_key[keys[:queries]]
    return counts


def are_telling(queries: HashedRows, items: HashedRows, copies: Ints, *, one_set: bool) -> Bool[np.ndarray, "queries"]:
    """Return which queries have copies that are likely to be repeated items.

    Other copies show that the embedding no longer distinguishes items: rows of zeros, rows that several classes share, and
    classes that have a single distinct row.

    `one_set`: the queries are also the items.
    """
    telling: NDArray[np.bool_] = (copies > 0) & (queries.hashes != 0)
    rows, row_of_item = np.unique(items.hashes, return_inverse=True)
    labels, label_of_item, sizes = np.unique(items.labels, return_inverse=True, return_counts=True)
    # each (row, label) pair once
    row_of_pair, label_of_pair = np.divmod(np.unique(row_of_item * len(labels) + label_of_item), len(labels))
    is_shared = np.bincount(row_of_pair, minlength=len(rows)) > 1
    telling &= ~np.isin(queries.hashes, rows[is_shared])
    is_one_row = (np.bincount(label_of_pair, minlength=len(labels)) == 1) & (sizes - one_set > 1)
    telling &= ~np.isin(queries.labels, labels[is_one_row])
    return telling


def count_coarse(rows: Tensor | StoredRows, labels: Ints, hashes: Ints) -> Int[np.ndarray, "4"]:
    """Return four counts that tell whether rows are coarse. `_are_coarse` judges their sums over processes.

    The first two are the equal and the compared numbers in pairs of different rows of one class. The most frequent number
    of each column is not compared, such as the zeros of a ReLU. The last two are the rows whose numbers all have one
    magnitude, and all rows, in a sample.
    """
    if isinstance(rows, StoredRows):
        first_chunk = slice(0, min(len(rows), rows.chunk_rows))
        rows = rows.read(first_chunk)
        labels = labels[first_chunk]
        hashes = hashes[first_chunk]
    order = np.lexsort((hashes, labels))
    # positions in this order that a different row follows
    different = np.flatnonzero(hashes[order][1:] != hashes[order][:-1])
    in_class = different[labels[order][different] == labels[order][different + 1]]
    pairs = in_class[_evenly(len(in_class))]
    equal, compared = _count_equal_numbers(
        rows[torch.from_numpy(order[pairs])], rows[torch.from_numpy(order[pairs + 1])]
    )
    sampled = order[in_class if len(in_class) else different]
    sample = rows[torch.from_numpy(sampled[_evenly(len(sampled))])]
    return np.array([equal, compared, _count_flat(sample), len(sample)], np.int64)


def _count_equal_numbers(left: Tensor, right: Tensor) -> tuple[int, int]:
    """Return how many numbers are equal in pairs of rows, and how many are compared."""
    if len(left) < 2:  # both numbers are equally frequent
        return 0, 0
    modes = torch.cat([left, right]).mode(dim=0).values
    is_compared = (left != modes) & (right != modes)
    compared = int(is_compared.sum())
    if not compared:  # columns with one frequent number and few exceptions are coarse
        return 1, 0
    return int(((left == right) & is_compared).sum()), compared


def _count_flat(rows: Tensor) -> int:
    """Return how many rows have non-zero numbers of only one magnitude."""
    if not len(rows):
        return 0
    sizes = rows.double().abs()
    smallest = sizes.masked_fill(sizes == 0, math.inf).amin(1)
    largest = sizes.amax(1)
    return int(((largest - smallest).abs() <= 1e-6 * largest).sum())


def _are_coarse(counts: Int[np.ndarray, "4"]) -> bool:
    """Return whether rows are coarse, given the summed counts of `count_coarse`."""
    equal, compared, flat, rows = counts.tolist()
    return bool(equal > COARSE_SHARE * compared or 2 * flat > rows)


def _evenly(number: int) -> Ints:
    """Return at most `PAIRS` evenly spaced numbers below this one."""
    numbers: Ints = np.unique(np.linspace(0, number - 1, min(number, PAIRS)).astype(np.int64))
    return numbers


@dataclass(frozen=True)
class Copies:
    """The copies among the candidates of each query."""

    counts: Int[np.ndarray, "queries"]
    """number of copies of each query, of all processes"""
    is_noted: bool
    """whether there are many, and they are likely to be repeated items"""

    @classmethod
    def among(
        cls,
        queries: HashedRows,
        items: HashedRows,
        self_match: Ints | None,
        exclusions: Sequence[tuple[Ints, Ints]],
        own_items: tuple[Tensor | StoredRows, Ints],
        processes: Processes,
        *,
        as_codes: bool,
    ) -> Copies:
        """Count the copies, and decide whether to note them. *Collective*.

        `own_items` are the gallery rows of this process and their indices among all items. `as_codes` says that rows
        are binary codes, which different items may share.
        """
        counts = count_copies(queries, items, self_match, exclusions)
        telling = 0
        if counts.any():
            telling = int(are_telling(queries, items, counts, one_set=self_match is not None).sum())
        is_noted = telling > 0 and telling >= NOTED_SHARE * len(counts) and not as_codes
        if is_noted:
            rows, indices = own_items
            coarse = processes.summed(count_coarse(rows, items.labels[indices], items.hashes[indices]))
            is_noted = not _are_coarse(coarse)
        return cls(counts, is_noted)

    @property
    def queries(self) -> int:
        """Number of queries that have a copy."""
        return int((self.counts > 0).sum())

    def note(self, effect: str, cure: str) -> str:
        """Return the note on copies: their `effect` on the values, and the `cure` if they are repeated items."""
        number = len(self.counts)
        share = self.queries / number
        return (
            f"{self.queries:,} of {number:,} queries ({100 * share:.0f} %) find a copy: a candidate of their label whose "
            f"embedding is {BIT_FOR_BIT}. {effect}. If copies are items that come several times, {cure}. If they are "
            "different items, the values stand."
        )
