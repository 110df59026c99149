"""Two processes that share a set draw the same figures as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks import process_jobs
from tests.callbacks.models import multi_label_items
from tests.callbacks.panel_rows import IdentityNet, assert_rows, brute_force
from tests.callbacks.process_jobs import ITEMS, shorter, uneven
from tests.gloo_processes import answers

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
PLACES = {str(float(point)): place for place, point in enumerate(uneven().tensors[0][:, 0])}
"""Items of a sampler of one's own are told by their value, and some come to both processes."""


@pytest.fixture(scope="module")
def ranks(gloo_folder: Path) -> list[dict[str, Any]]:
    """What each of the two has seen."""
    return [seen["pictures"] for seen in answers(gloo_folder, process_jobs.__name__, 2)]


@pytest.mark.parametrize(
    ("case", "data", "place", "names"),
    [
        ("words", [uneven()], int, lambda label: f"kind {label}"),
        ("gallery", [shorter(), uneven()], int, str),
        ("own sampler", [uneven()], PLACES.__getitem__, str),
    ],
)
def test_the_first_process_draws_what_brute_force_finds_and_the_others_nothing(
    ranks: list[dict[str, Any]], case: str, data: Any, place: Any, names: Any
) -> None:
    assert [rank[case]["said"] for rank in ranks] == [[], []]
    assert not any(ranks[1][case]["figures"].values())
    sets = [tensor for part in data for tensor in IdentityNet().by_hand(part)]
    scores, relevant, precision = brute_force(*sets)
    best, first = scores.max(dim=1)
    wrong = (~relevant.gather(1, first[:, None])[:, 0]).nonzero()[:, 0]
    expected = {
        "worst_queries": precision.round(decimals=9).argsort(stable=True)[:4].tolist(),
        "confident_mistakes": wrong[best[wrong].argsort(descending=True)][:4].tolist(),
    }
    for name, [figure] in ranks[0][case]["figures"].items():
        queries = [place(row[0]) for row in figure]
        assert [len(row[3]) for row in figure] == [3] * 4
        assert case == "own sampler" or queries == expected.get(name, queries)
        assert_rows(figure, sets, place, names)


def test_neighbours_that_share_a_label_are_right_on_several_processes(ranks: list[dict[str, Any]]) -> None:
    targets = multi_label_items(ITEMS).tensors[1]
    assert [rank["targets"]["said"] for rank in ranks] == [[], []]
    rows = [row for [figure] in ranks[0]["targets"]["figures"].values() for row in figure]
    assert rows
    for query, _, _, neighbours in rows:
        shared = [bool((targets[int(query)] * targets[int(each[0])]).any()) for each in neighbours]
        assert [each[3] for each in neighbours] == shared


def test_an_error_in_one_process_keeps_none_waiting(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert not any(rank["fails"]["figures"].values())
        assert rank["fails"]["mAP"] == ranks[0]["words"]["mAP"]
    [words] = ranks[0]["fails"]["said"]
    assert "division by zero" in words
