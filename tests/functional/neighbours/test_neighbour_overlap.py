"""The overlap of neighbours equals loops over all pairs; changes that keep the neighbours keep the overlap."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewshot_callbacks import Shards, neighbour_overlap
from fewshot_callbacks.errors import InputError
from tests.cases import examples
from tests.messages import missing_facts, refused


def rows(items: int, dim: int, seed: int) -> Tensor:
    return torch.randn(items, dim, generator=torch.Generator().manual_seed(seed))


def neighbours(item: int, queries: list[list[int]], gallery: list[list[int]] | None, k: int) -> set[int]:
    """The k nearest of an item by squared distance; of equal ones, those that come first."""
    of_item = queries[item]
    candidates = [other for other in range(len(gallery or queries)) if gallery is not None or other != item]

    def distance(other: int) -> int:
        return sum((one - two) ** 2 for one, two in zip(of_item, (gallery or queries)[other], strict=True))

    return set(sorted(candidates, key=lambda other: (distance(other), other))[:k])


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), items=st.integers(3, 12), k=st.integers(1, 5), gallery=st.integers(0, 9))
def test_it_is_that_of_loops_over_all_pairs(seed: int, items: int, k: int, gallery: int) -> None:
    """Small whole numbers, so that many scores are equal."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(-2, 3, (items, 2)), rng.integers(-2, 3, (items, 3))
    galleries = (rng.integers(-2, 3, (gallery, 2)), rng.integers(-2, 3, (gallery, 3))) if gallery else (None, None)
    candidates = gallery or items - 1
    k = min(k, candidates)
    lists = [None if side is None else side.tolist() for side in galleries]
    shares = [
        Fraction(len(neighbours(item, first.tolist(), lists[0], k) & neighbours(item, second.tolist(), lists[1], k)), k)
        for item in range(items)
    ]
    found = neighbour_overlap(
        first.astype(float),
        second.astype(float),
        first_gallery=None if galleries[0] is None else galleries[0].astype(float),
        second_gallery=None if galleries[1] is None else galleries[1].astype(float),
        k=k,
        similarity="euclidean",
    )
    assert found.per_item.tolist() == [float(share) for share in shares]
    assert found.overlap == pytest.approx(float(sum(shares) / items), rel=1e-14)
    assert (found.expected, found.items, found.k) == (k / candidates, items, k)


def test_an_embedding_has_the_neighbours_of_its_rotation_and_of_itself_also_if_scores_are_equal() -> None:
    before = rows(200, 6, 0)
    rotation, _ = torch.linalg.qr(rows(6, 6, 1))
    found = neighbour_overlap(before, 3 * before @ rotation, k=7)
    assert (found.overlap, found.items_with_ties) == (1.0, 0)
    copies = torch.cat([before, before])
    assert neighbour_overlap(copies, copies, k=5).overlap == 1.0


def test_independent_embeddings_have_the_expected_overlap() -> None:
    values = [neighbour_overlap(rows(100, 8, seed), rows(100, 5, seed + 1000), k=10) for seed in range(30)]
    mean = sum(value.overlap for value in values) / 30
    assert values[0].expected == 10 / 99
    # The standard error of the mean is about 0.0016.
    assert mean == pytest.approx(10 / 99, abs=0.006)
    in_gallery = neighbour_overlap(
        rows(5, 4, 0), rows(5, 4, 1), first_gallery=rows(50, 4, 2), second_gallery=rows(50, 4, 3)
    )
    assert in_gallery.expected == 10 / 50


def test_items_whose_last_neighbour_is_tied_are_counted() -> None:
    line = torch.tensor([[0.0], [1.0], [2.0], [4.0]])  # 0 and 2 are as far from 1
    other = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    found = neighbour_overlap(line, other, k=1, similarity="euclidean")
    assert found.items_with_ties == 1
    assert missing_facts(str(found), ("4 items", "1 neighbour", f"{found.overlap:.4f}", "0.3333", "1 item has")) == []
    collapsed = neighbour_overlap(torch.ones(20, 3), rows(20, 3, 0), k=2)
    assert collapsed.items_with_ties == 20


def test_codes_are_compared() -> None:
    codes = rows(60, 16, 0) > 0
    assert neighbour_overlap(codes, codes, k=3, similarity="hamming").overlap == 1.0
    assert neighbour_overlap(codes, codes[:, [*range(1, 16), 0]], k=3, similarity="hamming").overlap == 1.0


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"second": torch.ones(4, 2)}, ("first", "3 rows", "second", 4)),
        ({"k": 3}, ("k=3", "2 candidates")),
        ({"k": 0}, ("k=0", 1)),
        ({"first": torch.ones(3)}, ("first", "(3,)", "(items, dim)")),
        ({"second": torch.full((3, 2), torch.nan)}, ("second", "NaN", "index 0")),
        ({"first_gallery": torch.ones(4, 2)}, ("first_gallery", "second_gallery")),
        ({"second_gallery": torch.ones(4, 2)}, ("first_gallery", "second_gallery")),
        (
            {"first_gallery": torch.ones(4, 2), "second_gallery": torch.ones(5, 2)},
            ("first_gallery", "4 rows", "second_gallery", 5),
        ),
        ({"first_gallery": torch.ones(4, 5), "second_gallery": torch.ones(4, 2)}, ("first", 2, "first_gallery", 5)),
        ({"memory_mb": -1}, ("neighbour_overlap", "memory_mb")),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: dict[str, Any], facts: tuple[str | int, ...]) -> None:
    with refused(InputError, "neighbour_overlap", *facts):
        neighbour_overlap(**{"first": torch.ones(3, 2), "second": torch.ones(3, 2), "k": 1} | arguments)


def test_files_are_refused_and_their_rows_are_taken(tmp_path: Any) -> None:
    np.save(tmp_path / "rows.npy", rows(20, 4, 0).numpy())
    shards = Shards(tmp_path / "rows.npy")
    with refused(InputError, "neighbour_overlap", "first"):
        neighbour_overlap(shards, rows(20, 4, 0))
    assert neighbour_overlap(shards[:], rows(20, 4, 0)).overlap == 1.0
