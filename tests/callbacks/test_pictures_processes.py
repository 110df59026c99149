"""Two processes that hold a set together draw what one would draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.callbacks import gloo_jobs
from tests.callbacks.gloo_jobs import ITEMS, shorter, uneven
from tests.callbacks.models import tagged
from tests.callbacks.pictured import AsGiven, brute_force
from tests.gloo_processes import answers

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def ranks(gloo_folder: Path) -> list[dict[str, Any]]:
    """What each of the two has seen."""
    return [seen["pictures"] for seen in answers(gloo_folder, gloo_jobs.__name__, 2)]


def check(figures: dict[str, Any], data: TensorDataset, *gallery: TensorDataset, names: Any = str) -> None:
    """Compare what was drawn with brute force."""
    net = AsGiven()
    sets = [tensor for part in (data, *gallery) for tensor in net.by_hand(part)]
    scores, relevant, precision = brute_force(*sets)
    best, first = scores.max(dim=1)
    wrong = (~relevant.gather(1, first[:, None])[:, 0]).nonzero()[:, 0]
    expected = {
        "worst_queries": precision.round(decimals=9).argsort(stable=True)[:4].tolist(),
        "confident_mistakes": wrong[best[wrong].argsort(descending=True)][:4].tolist(),
    }
    for name, [figure] in figures.items():
        queries = [int(row[0]) for row in figure]
        assert queries == expected.get(name, queries)
        assert len(queries) == 4
        for query, label, caption, neighbours in figure:
            order = scores[int(query)].argsort(descending=True)[:3]
            assert label == names(int(data.tensors[1][int(query)]))
            assert f"AP {precision[int(query)]:.3f}" in caption
            assert [int(each[0]) for each in neighbours] == order.tolist()
            assert [each[1] for each in neighbours] == [names(kind) for kind in sets[-1][order].tolist()]
            assert [each[2] for each in neighbours] == pytest.approx(scores[int(query)][order].tolist(), abs=1e-6)
            assert [each[3] for each in neighbours] == relevant[int(query)][order].tolist()


def test_the_first_process_draws_what_brute_force_finds_and_the_others_nothing(ranks: list[dict[str, Any]]) -> None:
    check(ranks[0]["one set"]["figures"], uneven())
    check(ranks[0]["words"]["figures"], uneven(), names=lambda label: f"kind {label}")
    check(ranks[0]["gallery"]["figures"], shorter(), uneven())
    for case in ("one set", "words", "gallery", "targets", "own sampler"):
        assert [rank[case]["said"] for rank in ranks] == [[], []]
        assert not any(ranks[1][case]["figures"].values())


def test_multi_label_targets(ranks: list[dict[str, Any]]) -> None:
    targets = tagged(ITEMS).tensors[1]
    rows = [row for [figure] in ranks[0]["targets"]["figures"].values() for row in figure]
    assert rows
    for query, _, _, neighbours in rows:
        shared = [bool((targets[int(query)] * targets[int(each[0])]).any()) for each in neighbours]
        assert [each[3] for each in neighbours] == shared


def test_images_that_several_processes_have_kept(ranks: list[dict[str, Any]]) -> None:
    """A sampler of one's own: items are told by their value, and some come to both processes."""
    points, labels = uneven().tensors
    place = {str(float(point)): i for i, point in enumerate(points[:, 0])}
    scores, relevant, precision = brute_force(*AsGiven().by_hand(uneven()))
    for [figure] in ranks[0]["own sampler"]["figures"].values():
        assert len(figure) == 4
        for query, label, caption, neighbours in figure:
            order = scores[place[query]].argsort(descending=True)[:3]
            assert label == str(int(labels[place[query]]))
            assert f"AP {precision[place[query]]:.3f}" in caption
            assert [place[each[0]] for each in neighbours] == order.tolist()
            assert [each[3] for each in neighbours] == relevant[place[query]][order].tolist()


def test_an_error_in_one_process_keeps_none_waiting(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert not any(rank["fails"]["figures"].values())
        assert rank["fails"]["mAP"] == ranks[0]["one set"]["mAP"]
    assert len(ranks[0]["fails"]["said"]) == 1
    assert "division by zero" in ranks[0]["fails"]["said"][0]


def test_the_map(ranks: list[dict[str, Any]]) -> None:
    [(ids, labels, points)] = ranks[0]["map"]
    assert ranks[1]["map"] == []
    vectors = AsGiven().by_hand(uneven())[0][ids].double()
    _, _, axes = torch.linalg.svd(vectors - vectors.mean(0))
    assert labels == [str(int(label)) for label in uneven().tensors[1][ids]]
    assert len(ids) == 6
    assert torch.allclose(torch.tensor(points).double(), ((vectors - vectors.mean(0)) @ axes[:2].T).abs(), atol=1e-5)


def test_the_report_of_two_processes_is_that_of_all_items(ranks: list[dict[str, Any]]) -> None:
    embeddings, labels = AsGiven().by_hand(uneven())
    scores, *_ = brute_force(embeddings, labels)
    found = ranks[0]["report"]
    assert found == ranks[1]["report"]
    assert found["items"] == {name: str(int(labels[int(name.partition("-")[2])])) for name in found["items"]}
    assert len(found["panels"]) == ITEMS
    for panel in found["panels"]:
        order = scores[int(panel["query"].partition("-")[2])].argsort(descending=True)[:6]
        assert [int(name.partition("-")[2]) for name, *_ in panel["found"]] == order.tolist()
