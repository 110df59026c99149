"""Queries that are searched in batches find what they find together, with any budget and any number of processes."""

import numpy as np
import pytest
import torch

from fewshot_callbacks import Share, knn_accuracy, nearest, suspects
from tests.thread_processes import in_threads

GENERATOR = np.random.default_rng(0)
# Whole numbers, of which many are equal and have equal scores.
ROWS = torch.from_numpy(GENERATOR.integers(-2, 3, (150, 4)).astype(np.float32))
LABELS = torch.from_numpy(GENERATOR.integers(0, 6, 150))
GROUPS = torch.from_numpy(GENERATOR.integers(0, 4, 150))


def values_of(name, rows, **arguments):
    """The arrays of a result, as bytes."""
    if name == "nearest":
        found = nearest(ROWS[rows], k=9, query_groups=GROUPS[rows], **arguments)
        values = found.indices, found.scores, found.tied, found.unlisted_ties
    elif name == "suspects":
        found = suspects(ROWS[rows], LABELS[rows], k=5, groups=GROUPS[rows], min_probability=0, **arguments)
        values = found.index, found.log_odds, found.suggested, found.neighbours, found.votes, found.unlisted_ties
        values += (torch.tensor(found.noise_rate), torch.tensor(found.items_with_ties))
    else:
        report = knn_accuracy(ROWS[rows], LABELS[rows], query_groups=GROUPS[rows], k=(1, 7, 30), **arguments)
        values = tuple(report.per_query.values())
    return [value.numpy().tobytes() for value in values]


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr("fewshot_callbacks.engine.nearest.LEAST_QUERIES", 1)


@pytest.mark.parametrize("name", ["nearest", "suspects", "knn"])
@pytest.mark.parametrize(("memory_mb", "share"), [(0.5, 0.4), (0.05, 0.4), (0.01, 0.4), (0.05, 0.01)])
def test_no_value_depends_on_the_batches(small_batches, monkeypatch, name, memory_mb, share):
    monkeypatch.setattr("fewshot_callbacks.engine.nearest.TABLE_SHARE", share)
    assert values_of(name, slice(None), memory_mb=memory_mb) == values_of(name, slice(None))


@pytest.mark.parametrize("name", ["nearest", "suspects", "knn"])
@pytest.mark.parametrize("borders", [(0, 70, 150), (0, 149, 150), (0, 0, 90, 150)])
def test_processes_with_unequal_shares_take_the_same_batches(small_batches, name, borders):
    def work(process):
        rows = slice(borders[process.rank], borders[process.rank + 1])
        return values_of(name, rows, memory_mb=0.03, share=Share(process))

    whole = values_of(name, slice(None))
    assert all(values == whole for values in in_threads(len(borders) - 1, work))


def test_suspects_count_the_neighbours_that_an_order_leaves_out():
    found = suspects(ROWS, LABELS, k=5, min_probability=0)
    every = nearest(ROWS, k=5)
    assert found.items_with_ties == int((every.unlisted_ties > 0).sum()) > 0
    assert torch.equal(found.unlisted_ties, every.unlisted_ties[found.index])
    assert torch.equal(found.neighbours, every.indices[found.index])
