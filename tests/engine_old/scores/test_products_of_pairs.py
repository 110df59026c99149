"""Exact scores of many pairs at once are those of the pairs one by one."""

import pytest
import torch

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.scores.pairs import PAIRS_AT_ONCE
from fewshot_callbacks.engine.scores.products import ScoreTiles


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("kernel", ["compiled", "pytorch"])
def test_keys_of_more_pairs_than_are_made_at_once_are_those_of_the_matrix(similarity, kernel):
    with engine_options(kernel=kernel):
        tiles = ScoreTiles.from_rows(torch.randn(180, 5), torch.randn(190, 5), similarity)
    rows, columns = torch.cartesian_prod(torch.arange(180), torch.arange(190)).T
    chance = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    rows, columns = rows[chance], columns[chance]
    assert len(rows) > 2 * PAIRS_AT_ONCE["cpu"]
    matrix = tiles.exact_scores(torch.arange(180), torch.arange(190))
    assert torch.equal(tiles.pair_scores(rows, columns), matrix[rows, columns])
    blocks = tiles.batched_scores(torch.arange(180).view(6, 30), torch.arange(114).view(6, 19))
    for block in range(6):
        assert torch.equal(blocks[block], matrix[30 * block : 30 * block + 30, 19 * block : 19 * block + 19])


def test_no_pair():
    tiles = ScoreTiles.from_rows(torch.randn(3, 5), torch.randn(4, 5), "dot")
    none = torch.empty(0, dtype=torch.int64)
    assert tiles.pair_scores(none, none).shape == (0,)
