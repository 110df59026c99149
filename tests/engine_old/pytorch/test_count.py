"""Counting in plain PyTorch against loops over pairs, and the choice between it and compiled code."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine import options as kernels
from fewshot_callbacks.engine.pytorch.count import Counts, count_pairs, count_tile
from fewshot_callbacks.functional import evaluate_retrieval

INF = float("inf")
GRID = 2.0**-30  # finer than float32 near 1, so that margins have to be rounded outwards


@st.composite
def tiles(draw):
    """Thresholds of some queries, padded, and a tile of estimates near and far from them, with margins."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    queries, relevant, candidates = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    spread = draw(st.sampled_from([3, 2**10, 2**31]))  # many ties, close calls, or everything decided
    thresholds = np.sort(rng.integers(-spread, spread + 1, (queries, relevant)) * GRID, axis=1)
    for row, width in enumerate(rng.integers(0, relevant + 1, queries)):
        thresholds[row, width:] = INF  # queries differ in how much there is to find; some have nothing
    error = rng.integers(0, draw(st.sampled_from([1, 3, 2**8])), queries) * GRID
    keys = rng.integers(-spread, spread + 1, (queries, candidates)) * GRID
    from_threshold = rng.random((queries, candidates)) < 0.5
    picked = np.take_along_axis(thresholds, rng.integers(0, relevant, (queries, candidates)), axis=1)
    keys = np.where(from_threshold & np.isfinite(picked), picked, keys)
    estimates = torch.from_numpy(keys + rng.integers(-3, 4, keys.shape) * GRID).to(dtype)
    estimates[torch.from_numpy(rng.random(keys.shape) < draw(st.sampled_from([0.0, 0.2, 0.9])))] = -INF
    weights = torch.from_numpy(rng.integers(1, 5, candidates)) if draw(st.booleans()) else None
    return torch.from_numpy(thresholds), torch.from_numpy(error), estimates, weights


def exact(value):
    return Fraction(float(value))


def sides(threshold, error, estimate, slack=0):
    """+1 if the key surely beats the threshold, -1 if it surely lies below, 0 if neither can be told."""
    if threshold == INF or estimate == -INF:
        return -1
    distance = exact(estimate) - exact(threshold)
    reach = exact(error) + slack
    return 1 if distance > reach else -1 if distance < -reach else 0


def expected_counts(thresholds, error, estimates, weights, open_pairs):
    """For each threshold, the weight of the decided candidates above it."""
    better = torch.zeros(thresholds.shape, dtype=torch.int64)
    for q, row in enumerate(thresholds.tolist()):
        for r, threshold in enumerate(row):
            for c, estimate in enumerate(estimates[q].tolist()):
                if (q, c) not in open_pairs and sides(threshold, error[q], estimate) > 0:
                    better[q, r] += 1 if weights is None else int(weights[c])
    return better


def valid(thresholds, counts):
    return counts[thresholds.isfinite()]


@settings(max_examples=120, deadline=None)
@given(tiles())
def test_a_tile_is_counted_as_loops_count_it(tile):
    thresholds, error, estimates, weights = tile
    counts = Counts.zeros(thresholds)
    rows, columns = count_tile(counts, estimates, error, weights)
    open_pairs = set(zip(rows.tolist(), columns.tolist(), strict=True))
    assert len(open_pairs) == len(rows)
    for q in range(len(thresholds)):
        # a margin is rounded outwards to the dtype of the estimates: by less than its spacing there
        largest = float(thresholds[q][thresholds[q].isfinite()].abs().max()) if thresholds[q].isfinite().any() else 0.0
        spacing = exact(torch.finfo(estimates.dtype).eps) * exact(largest + float(error[q]) + GRID)
        for c in range(estimates.shape[1]):
            undecided = any(sides(t, error[q], estimates[q, c]) == 0 for t in thresholds[q].tolist())
            surely_decided = all(sides(t, error[q], estimates[q, c], spacing) for t in thresholds[q].tolist())
            if undecided:  # a pair within the error of a threshold is never decided
                assert (q, c) in open_pairs
            elif surely_decided:  # and a pair beyond it always is
                assert (q, c) not in open_pairs
    expected = expected_counts(thresholds, error, estimates, weights, open_pairs)
    assert torch.equal(valid(thresholds, counts.better()), valid(thresholds, expected))
    assert torch.equal(valid(thresholds, counts.better_or_tied()), valid(thresholds, expected))


@settings(max_examples=60, deadline=None)
@given(tiles())
def test_open_pairs_in_float64_are_exactly_those_within_the_error(tile):
    thresholds, error, estimates, weights = tile
    estimates = estimates.double()
    rows, columns = count_tile(Counts.zeros(thresholds), estimates, error, weights)
    expected = {
        (q, c)
        for q in range(len(thresholds))
        for c in range(estimates.shape[1])
        if any(sides(t, error[q], estimates[q, c]) == 0 for t in thresholds[q].tolist())
    }
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == expected


@settings(max_examples=60, deadline=None)
@given(tiles())
def test_single_pairs_are_counted_as_a_tile(tile):
    thresholds, error, estimates, weights = tile
    of_tile, of_pairs = Counts.zeros(thresholds), Counts.zeros(thresholds)
    open_rows, open_columns = count_tile(of_tile, estimates, error, weights)
    rows, columns = (index.flatten() for index in torch.meshgrid(*map(torch.arange, estimates.shape), indexing="ij"))
    order = torch.randperm(len(rows))
    rows, columns = rows[order], columns[order]
    pair_weights = None if weights is None else weights[columns]
    still = count_pairs(of_pairs, rows, estimates[rows, columns], error, pair_weights)
    found = set(zip(rows[still].tolist(), columns[still].tolist(), strict=True))
    assert found == set(zip(open_rows.tolist(), open_columns.tolist(), strict=True))
    for counts in ("better", "better_or_tied"):
        of_both = (valid(thresholds, getattr(part, counts)()) for part in (of_tile, of_pairs))
        assert torch.equal(*of_both)


@settings(max_examples=60, deadline=None)
@given(tiles())
def test_known_keys_are_counted_with_their_ties(tile):
    thresholds, _, estimates, weights = tile
    keys = estimates.double()
    counts = Counts.zeros(thresholds)
    rows, columns = keys.isfinite().nonzero(as_tuple=True)
    counts.add_scores(rows, keys[rows, columns], None if weights is None else weights[columns])
    better, not_below = torch.zeros_like(counts.better()), torch.zeros_like(counts.better())
    for q, c in zip(rows.tolist(), columns.tolist(), strict=True):
        weight = 1 if weights is None else int(weights[c])
        for r in range(thresholds.shape[1]):
            better[q, r] += weight * int(keys[q, c] > thresholds[q, r])
            not_below[q, r] += weight * int(keys[q, c] >= thresholds[q, r])
    assert torch.equal(valid(thresholds, counts.better()), valid(thresholds, better))
    assert torch.equal(valid(thresholds, counts.better_or_tied()), valid(thresholds, not_below))


@settings(max_examples=60, deadline=None)
@given(tiles(), st.integers(0, 12))
def test_rungs_together_give_the_counts_of_the_keys(tile, cut):
    # estimates off by at most the error, in two tiles; open pairs by their keys: as the whole pass does it
    thresholds, error, estimates, weights = tile
    noise = torch.rand(estimates.shape, dtype=torch.float64) * 2 - 1
    keys = estimates.double() + noise * error[:, None] * (1 - 2.0**-20)
    counts, known = Counts.zeros(thresholds), Counts.zeros(thresholds)
    for part in (slice(0, cut), slice(cut, None)):
        if estimates[:, part].shape[1] == 0:
            continue
        own = None if weights is None else weights[part]
        rows, columns = count_tile(counts, estimates[:, part].contiguous(), error, own)
        counts.add_scores(rows, keys[:, part][rows, columns], None if own is None else own[columns])
    rows, columns = keys.isfinite().nonzero(as_tuple=True)
    known.add_scores(rows, keys[rows, columns], None if weights is None else weights[columns])
    assert torch.equal(valid(thresholds, counts.better()), valid(thresholds, known.better()))
    assert torch.equal(valid(thresholds, counts.better_or_tied()), valid(thresholds, known.better_or_tied()))


@pytest.mark.parametrize("share", [0.05, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_and_dense_tiles_are_counted_alike(share, weighted):
    # few candidates above the lowest threshold are counted one by one, many in one go
    generator = torch.Generator().manual_seed(0)
    thresholds = (1 + torch.rand(20, 7, generator=generator, dtype=torch.float64)).sort(dim=1).values
    above = torch.rand(20, 300, generator=generator) < share
    estimates = torch.where(above, 1 + torch.rand(20, 300, generator=generator), 0.0)
    weights = torch.randint(1, 9, (300,), generator=generator) if weighted else None
    counts = Counts.zeros(thresholds)
    rows, _ = count_tile(counts, estimates, torch.zeros(20, dtype=torch.float64), weights)
    assert len(rows) == 0
    beats = estimates.double()[:, None, :] > thresholds[:, :, None]
    expected = (beats * (1 if weights is None else weights)).sum(dim=2)
    assert torch.equal(counts.better(), expected)
    assert int(expected.sum()) > 0


def test_tiles_add_up():
    thresholds = torch.tensor([[0.25, 0.5, INF]], dtype=torch.float64)
    counts, none = Counts.zeros(thresholds), torch.zeros(1, dtype=torch.float64)
    for tile in ([[0.1, 0.3, 0.6]], [[0.9, -INF, 0.4]]):
        rows, columns = count_tile(counts, torch.tensor(tile), none)
        assert (len(rows), len(columns)) == (0, 0)
    assert counts.better()[0, :2].tolist() == [4, 2]


def test_a_tie_is_open_and_then_counted_as_a_tie():
    thresholds = torch.tensor([[0.25, 0.5, 0.5]], dtype=torch.float64)
    counts = Counts.zeros(thresholds)
    rows, columns = count_tile(counts, torch.tensor([[0.5, 0.25, 0.75]]), torch.zeros(1, dtype=torch.float64))
    assert columns.tolist() == [0, 1]
    counts.add_scores(rows, torch.tensor([0.5, 0.25], dtype=torch.float64), None)
    assert counts.better().tolist() == [[2, 1, 1]]
    assert counts.better_or_tied().tolist() == [[3, 2, 2]]


def test_counts_begin_at_zero_and_hold_many_candidates():
    thresholds = torch.zeros(1, 1, dtype=torch.float64)
    counts, weight = Counts.zeros(thresholds), 2**40
    assert counts.better().tolist() == [[0]]
    count_tile(counts, torch.ones(1, 3), torch.zeros(1, dtype=torch.float64), torch.full((3,), weight))
    assert counts.better().tolist() == [[3 * weight]]


class TestChoice:
    @pytest.mark.parametrize(
        ("error", "fix"),
        [
            (ImportError("no numba here"), r"ImportError: no numba here.*falls back to PyTorch.*pip install -U numba"),
            (RuntimeError("cannot cache: no locator available for file"), "can be written in NUMBA_CACHE_DIR brings"),
        ],
    )
    def test_what_cannot_be_loaded_is_said_once_and_replaced(self, monkeypatch, error, fix):
        def broken(name):
            raise error

        kernels._load.cache_clear()
        monkeypatch.setattr(kernels, "importlib", SimpleNamespace(import_module=broken))
        try:
            with pytest.warns(UserWarning, match=fix):
                assert kernels.compiled_kernels() is None
            assert kernels.compiled_kernels() is None  # warnings are errors: a second one would raise
            embeddings = torch.nn.functional.one_hot(torch.arange(12) % 3).float()
            report = evaluate_retrieval(embeddings, torch.arange(12) % 3, group_size=None)
            assert report.mAP == 1.0
        finally:
            kernels._load.cache_clear()
