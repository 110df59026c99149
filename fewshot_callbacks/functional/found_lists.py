"""The result lists of a search index: reading, checks, and ranks of relevant items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import check_labels, encode_ids, read_labels
from fewshot_callbacks.functional._reading import as_tensor
from fewshot_callbacks.functional.items import ItemSets, Share, places_of
from fewshot_callbacks.functional.retrieval.rank_metrics import with_absent
from fewshot_callbacks.storage.stored_rows import even_slices
from fewshot_callbacks.system.words import counted

# The entry that libraries return instead of a neighbour that they did not find.
MISSING = -1
# Number of entries that are ranked at a time; each takes about 200 bytes.
ENTRIES_AT_ONCE = 2**18


class FoundLists(NamedTuple):
    """The result lists of an index for the queries of this process, in the order of the index.

    The query itself and items that ids or groups exclude are removed, and later items move up.
    """

    places: Int[np.ndarray, "queries columns"]
    """gallery place of each entry; -1 if it counts as not found"""
    faults: Int[np.ndarray, "4"]
    """number of entries of this process with each of the `FAULTS`"""
    lengths: Int[np.ndarray, "queries"]
    """number of entries of each list, without removed entries"""


# The kinds of entries that are not candidates, in the order of `FoundLists.faults`.
FAULTS = ("missing", "unknown", "repeated", "excluded")


def read_found(call: str, found: Any, gallery_ids: Any | None, share: Share, sets: ItemSets) -> FoundLists:
    """Return the found lists of the queries of this process, as gallery places. *Collective*.

    `found` has one row per query row of this process. It has ids if `gallery_ids` are passed, and indices otherwise.
    """
    values = _matrix(call, found, sets)
    rows = _rows_of_queries(call, len(values), share, sets)
    places = _places(call, values, gallery_ids, share, sets)
    is_missing = np.zeros(values.shape, bool) if values.dtype.kind in "UO" else (values == MISSING) & (places < 0)
    _refuse_strangers(call, values, places, is_missing, sets, has_ids=gallery_ids is not None)
    places = places[rows]
    is_missing = is_missing[rows]
    is_unknown = (places < 0) & ~is_missing
    is_excluded = _are_excluded(sets, places)
    # Excluded items go to the end of their list.
    order = np.argsort(is_excluded, axis=1, kind="stable")
    places = np.take_along_axis(np.where(is_excluded, -1, places), order, axis=1)
    is_repeated = _are_repeated(places)
    faults = np.array([mask.sum() for mask in (is_missing, is_unknown, is_repeated, is_excluded)])
    lengths = places.shape[1] - is_excluded.sum(axis=1)
    return FoundLists(np.where(is_repeated, -1, places), faults, lengths)


def _matrix(call: str, found: Any, sets: ItemSets) -> np.ndarray:
    """Return `found` as an array of integers or strings, with the same number of columns in all processes. *Collective*."""
    if isinstance(found, tuple) and len(found) == 2 and all(np.ndim(part) == 2 for part in found):
        raise InputError(
            f"{call}: found is a pair of arrays, such as distances and indices from faiss. Pass the indices: found[1]."
        )
    has_words = isinstance(found, np.ndarray) and found.dtype.kind in "USO"
    if isinstance(found, list) and found and np.ndim(found[0]) == 1 and len(found[0]):
        has_words = isinstance(found[0][0], str)
    array = np.asarray(found) if has_words else as_tensor(found, "found", call).cpu().numpy()
    if array.ndim != 2 or array.dtype.kind not in "iuUSO":
        raise InputError(
            f"{call}: found has shape {array.shape} of {array.dtype}. Pass one row per query: the gallery indices "
            "(integers) that the index returned, or ids if there are gallery_ids."
        )
    columns = sets.processes.gather(array.shape)
    widths = {width for rows, width in columns if rows} or {array.shape[1]}
    if len(widths) > 1 or not min(widths):
        raise InputError(
            f"{call}: found has {' and '.join(map(str, sorted(widths)))} columns. Pass equally many for each query, at "
            "least one."
        )
    [width] = widths
    if not len(array):
        return np.empty((0, width), np.int64)
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


def _rows_of_queries(call: str, rows: int, share: Share, sets: ItemSets) -> Int[np.ndarray, "queries"]:
    """Return the row of `found` of each query of this process. *Collective*."""
    by_rank = sets.processes.gather(rows)
    if sum(by_rank) != sets.queries.given:
        raise InputError(
            f"{call}: found has {counted(sum(by_rank), 'row')}, but there are {counted(sets.queries.given, 'query')}. "
            "Pass one row per query, in the order of the queries."
        )
    places = _given_places(call, rows, share.query_places, by_rank, sets)
    order = np.argsort(places)
    own = sets.queries.to_origins(sets.queries.places).numpy()
    position = np.minimum(np.searchsorted(places[order], own), max(0, rows - 1))
    if len(own) and (not rows or not np.array_equal(places[order][position], own)):
        raise InputError(
            f"{call}: the rows of found do not belong to the queries of this process. Pass one row per query of this "
            "process."
        )
    return order[position] if len(own) else np.empty(0, np.int64)


def _given_places(
    call: str, rows: int, places: Any | None, by_rank: list[int], sets: ItemSets
) -> Int[np.ndarray, "rows"]:
    """Return the places of the rows of this process among the rows of all processes."""
    if places is not None:
        return check_labels(places, rows, "places", "rows", call).numpy()
    return np.arange(rows) + sum(by_rank[: sets.processes.rank])


def _places(
    call: str, values: np.ndarray, gallery_ids: Any | None, share: Share, sets: ItemSets
) -> Int[np.ndarray, "rows columns"]:
    """Return the gallery place of each entry of `found`; -1 if the gallery does not have it. *Collective*."""
    if gallery_ids is None:
        if values.dtype.kind not in "iu":
            raise InputError(
                f"{call}: found has strings, such as {values.flat[0]!r}. Pass gallery_ids=, the ids of the gallery items."
            )
        return np.where((values >= 0) & (values < sets.gallery.length), values, -1)
    ids = read_labels(gallery_ids, len(gallery_ids), "gallery_ids", "gallery items", call)
    flat = read_labels(values.ravel(), values.size, "found", "entries", call)
    codes, codes_of_items = encode_ids(call, {"found": flat, "gallery_ids": ids}, sets.processes)
    by_rank = sets.processes.gather(len(codes_of_items))
    given = share.query_places if sets.same_set else share.gallery_places
    places = torch.from_numpy(_given_places(call, len(codes_of_items), given, by_rank, sets))
    of_all = sets.processes.placed(codes_of_items, places, sum(by_rank))
    counted_items = sets.gallery.to_origins(torch.arange(sets.gallery.length))
    return places_of(codes, of_all[counted_items]).reshape(values.shape).numpy()


def _refuse_strangers(
    call: str,
    values: np.ndarray,
    places: Int[np.ndarray, "rows columns"],
    is_missing: Bool[np.ndarray, "rows columns"],
    sets: ItemSets,
    *,
    has_ids: bool,
) -> None:
    """Refuse lists without any gallery item. *Collective*."""
    known, entries = sets.processes.summed(np.array([(places >= 0).sum(), (~is_missing).sum()])).tolist()
    if known or not entries:
        return
    example = next(iter(values[~is_missing].tolist()), "")
    what = "gallery_ids" if has_ids else f"an index of the gallery, which has {counted(sets.gallery.length, 'item')}"
    fix = "With gallery_ids, found must contain ids: pass ids[found]." if has_ids else "Pass gallery indices, from 0."
    raise InputError(f"{call}: no entry of found, such as {example!r}, is in {what}. {fix}")


def _are_excluded(sets: ItemSets, places: Int[np.ndarray, "queries columns"]) -> Bool[np.ndarray, "queries columns"]:
    """Return which entries are not candidates: the query itself, and items that ids or groups exclude."""
    own = sets.queries.places.numpy()
    is_excluded = np.zeros(places.shape, bool)
    if sets.self_match is not None:
        is_excluded |= places == sets.self_match.numpy()[own, None]
    for of_queries, of_items in sets.exclusions():
        is_excluded |= of_items[places] == of_queries[own, None]
    return is_excluded & (places >= 0)


def _are_repeated(places: Int[np.ndarray, "queries columns"]) -> Bool[np.ndarray, "queries columns"]:
    """Return which entries repeat an earlier item of the list."""
    order = np.argsort(places, axis=1, kind="stable")
    ordered = np.take_along_axis(places, order, axis=1)
    equals_last = np.zeros(places.shape, bool)
    equals_last[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    is_repeated = np.empty(places.shape, bool)
    np.put_along_axis(is_repeated, order, equals_last, axis=1)
    return is_repeated


# -------------------------------------------------------------------------------------------------------------------- ranks


def rank_blocks(
    is_relevant: Bool[np.ndarray, "queries columns"],
    scores: Float[np.ndarray, "queries columns"],
    relevant: Int[Tensor, "queries"],
) -> Iterator[tuple[slice, RankBlock]]:
    """Yield the ranks of the relevant items of found lists, in blocks of queries.

    A relevant item that was not found has no rank. Consecutive entries with equal scores are a tied group.

    `scores` are exact; NaN if there is no item. `relevant` is the number of relevant candidates of each query.
    """
    rows, columns = is_relevant.shape
    for span in even_slices(0, rows, max(1, ENTRIES_AT_ONCE // columns)):
        block = _rank_block(is_relevant[span], scores[span])
        yield span, with_absent(block, relevant[span] - block.relevant)


def _rank_block(
    is_relevant: Bool[np.ndarray, "queries columns"], scores: Float[np.ndarray, "queries columns"]
) -> RankBlock:
    """Return the ranks of the relevant items that were found."""
    rows = len(is_relevant)
    starts, stops = _tied_groups(scores)
    negatives = np.pad(np.cumsum(~is_relevant, axis=1), ((0, 0), (1, 0)))
    hits = np.pad(np.cumsum(is_relevant, axis=1), ((0, 0), (1, 0)))
    number = hits[:, -1]
    row, entry = np.nonzero(is_relevant)
    # The best item of a query is in its last valid column.
    column = number[row] - hits[row, entry + 1]
    start = starts[row, entry]
    stop = stops[row, entry]

    def padded(values: Int[np.ndarray, "found"]) -> Int[Tensor, "queries width"]:
        block = np.zeros((rows, max(1, int(number.max(initial=0)))), np.int64)
        block[row, column] = values
        return torch.from_numpy(block)

    relevant_above = hits[row, start]
    relevant_tied = hits[row, stop] - relevant_above
    return RankBlock(
        queries=torch.arange(rows),
        relevant=torch.from_numpy(number),
        valid=padded(np.ones(len(row), np.int64)).bool(),
        negatives_above=padded(negatives[row, start]),
        negatives_tied=padded(negatives[row, stop] - negatives[row, start]),
        relevant_above=padded(relevant_above),
        relevant_tied=padded(relevant_tied),
        position_in_tie=padded(relevant_above + relevant_tied - hits[row, entry + 1] + 1),
    )


def _tied_groups(
    scores: Float[np.ndarray, "queries columns"],
) -> tuple[Int[np.ndarray, "queries columns"], Int[np.ndarray, "queries columns"]]:
    """Return the first entry of the tied group of each entry, and the entry after its last one."""
    columns = scores.shape[1]
    entry = np.arange(columns)
    is_first = np.ones(scores.shape, bool)
    is_first[:, 1:] = scores[:, 1:] != scores[:, :-1]  # NaN equals nothing
    starts = np.maximum.accumulate(np.where(is_first, entry, 0), axis=1)
    is_last = np.ones(scores.shape, bool)
    is_last[:, :-1] = is_first[:, 1:]
    stops = np.minimum.accumulate(np.where(is_last, entry + 1, columns)[:, ::-1], axis=1)[:, ::-1]
    return starts, stops
