"""The nearest items are the same if the gallery is in memory, is read in chunks, or is split over processes."""

import numpy as np
import pytest
import torch

from fewshot_callbacks.engine.duplicates import row_hashes
from fewshot_callbacks.engine.nearest import nearest_items
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.storage.stored_rows import StoredRows
from tests.engine.cases import SIMILARITIES
from tests.engine.parts import spread
from tests.thread_processes import in_threads

QUERIES, ITEMS, DIM = 40, 400, 6
TINY = 5e3
"""Bytes of a budget in which a chunk has the fewest rows, 64."""
VECTOR_SIMILARITIES = [name for name in SIMILARITIES if name != "hamming"]


def rows_with_ties(items, seed, dtype=torch.float32):
    """Rows of few whole numbers: many scores are equal, and many rows are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (items, DIM), generator=generator).to(dtype)


def groups_of(items, seed):
    return np.random.default_rng(seed).integers(0, 3, items)


def found(queries, gallery, similarity, k, *, memory=2.0**29, codes=(), places=None, **options):
    vectors = Vectors.of(queries, gallery, similarity, **options)
    if places is None:
        places = np.arange(vectors.items, dtype=np.int32)
    self_match = np.full(len(queries), -1, np.int32)
    return nearest_items(vectors, self_match, list(codes), k, memory, places)


def assert_equal(one, other):
    for first, second in zip(one, other, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("similarity", VECTOR_SIMILARITIES)
@pytest.mark.parametrize("k", [1, 10, 300])
def test_chunks_find_what_the_whole_gallery_finds(similarity, dtype, k):
    """Groups leave each query fewer than 300 candidates, and no chunk has so many items."""
    queries = rows_with_ties(QUERIES, 0, dtype)
    gallery = rows_with_ties(ITEMS, 1, dtype)
    codes = [(groups_of(QUERIES, 2), groups_of(ITEMS, 3))]
    whole = found(queries, gallery, similarity, k, codes=codes)
    stored = StoredRows(gallery.numpy(), TINY)
    assert stored.resident_rows + stored.chunk_rows < ITEMS / 2  # several chunks, and some rows that stay
    for threads in (1, 3):
        assert_equal(whole, found(queries, stored, similarity, k, memory=TINY, codes=codes, threads=threads))
    with engine_options(precision="float32", height=7, width=9):
        assert_equal(whole, found(queries, stored, similarity, k, memory=TINY, codes=codes))


def test_a_tie_with_an_earlier_chunk_is_decided_by_the_place():
    queries = torch.ones(1, DIM)
    gallery = torch.ones(ITEMS, DIM)
    places = np.random.default_rng(0).permutation(ITEMS).astype(np.int32)
    nearest = found(queries, StoredRows(gallery.numpy(), TINY), "cosine", 5, memory=TINY, places=places)
    assert nearest.items.tolist() == [[0, 1, 2, 3, 4]]
    assert nearest.unlisted_ties.tolist() == [ITEMS - 5]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("stored", [False, True])
def test_processes_find_what_one_finds(similarity, count, stored):
    if stored and similarity == "hamming":
        pytest.skip("codes are never read in chunks")
    queries = rows_with_ties(QUERIES, 4)
    gallery = rows_with_ties(ITEMS, 5)
    if similarity == "hamming":
        queries, gallery = ((2 * (rows > 0) - 1).to(torch.int8) for rows in (queries, gallery))
    codes = (groups_of(QUERIES, 6), groups_of(ITEMS, 7))
    whole = found(queries, gallery, similarity, 20, codes=[codes])
    queries_of = spread(QUERIES, count, 8)
    items_of = spread(ITEMS, count, 9)

    def work(processes):
        mine = queries_of[processes.rank]
        ranks = [
            (processes.rank + step) % count for step in range(count)
        ]  # numbers go from the items of this process on
        places = torch.cat([items_of[rank] for rank in ranks]).numpy().astype(np.int32)
        rows = gallery[items_of[processes.rank]]
        return found(
            queries[mine],
            StoredRows(rows.numpy(), TINY) if stored else rows,
            similarity,
            20,
            memory=TINY if stored else 2.0**29,
            codes=[(codes[0][mine], codes[1][places])],
            places=places,
            processes=processes,
        )

    for mine, part in zip(queries_of, in_threads(count, work), strict=True):
        if isinstance(part, BaseException):
            raise part
        assert_equal([values[mine] for values in whole], part)


def test_one_set_is_compared_alike_with_and_without_symmetry():
    rows = rows_with_ties(ITEMS, 10)
    self_match = np.arange(ITEMS, dtype=np.int32)
    symmetric, not_symmetric = (
        nearest_items(Vectors.of(rows, gallery, "cosine"), self_match, [], 7, 2.0**29, self_match)
        for gallery in (None, rows)
    )
    assert_equal(symmetric, not_symmetric)


@pytest.mark.parametrize("scale", [1.0, 1e200])
def test_known_hashes_find_the_same_duplicates(scale):
    """Rows out of range are divided by a power of two, so that their hashes are other ones."""
    rows = scale * rows_with_ties(ITEMS, 11, torch.float64)
    plain = Vectors.of(rows, None, "euclidean")
    known = Vectors.of(rows, None, "euclidean", hashes=(row_hashes(rows.numpy()), None))
    np.testing.assert_array_equal(known.pairs.query_first_duplicate, plain.pairs.query_first_duplicate)
    assert len(np.unique(known.pairs.query_first_duplicate)) < ITEMS


def test_two_seeds_make_two_hashes():
    rows = rows_with_ties(ITEMS, 12).numpy()
    first, second = row_hashes(rows), row_hashes(rows, seed=1)
    assert not (first == second)[rows.any(1)].any()
    assert len(np.unique(first)) == len(np.unique(second)) == len(np.unique(rows, axis=0))
