"""Reports of the same queries are compared; other queries are refused, and another gallery is warned of."""

import numpy as np
import pytest
import torch

from fewshot_callbacks import InputError, Relevance, Shards, Share, compare_reports, evaluate_retrieval, rank_reports
from fewshot_callbacks.distributed.processes import ALONE
from tests.messages import refused, warned
from tests.thread_processes import in_threads

LABELS = torch.arange(300) % 30


def model(noise, **arguments):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(30, 12, generator=generator)[LABELS] + noise * torch.randn(300, 12, generator=generator)
    return evaluate_retrieval(points, LABELS, metrics="mAP", **arguments)


IDS = tuple(f"{index}.jpg" for index in range(300))


@pytest.mark.parametrize("ids", [range(300), IDS])
def test_other_ids_are_refused(ids):
    first = model(0.3, query_ids=list(ids))
    assert compare_reports(first, model(1.0, query_ids=list(ids)))
    assert compare_reports(first, model(1.0))  # without ids only labels are known
    others = [*ids[:5], *ids[6:], ids[5]]
    with refused(InputError, "compare_reports", "300 queries", "their ids", "same items"):
        compare_reports(first, model(1.0, query_ids=others))
    with refused(InputError, "rank_reports", "'b'", "their ids"):
        rank_reports({"a": first, "b": model(1.0, query_ids=others)})


def test_other_drawn_queries_are_refused():
    labels = torch.arange(300) // 150  # any sample has the same labels in the same order
    points = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    first, other = (evaluate_retrieval(points, labels, max_queries=60, seed=seed) for seed in (0, 1))
    assert compare_reports(first, evaluate_retrieval(2 * points, labels, max_queries=60))
    with refused(InputError, "compare_reports", "the drawn queries", "max_queries"):
        compare_reports(first, other)
    ids = list(range(300))
    first, other = (evaluate_retrieval(points, labels, max_queries=60, seed=seed, query_ids=ids) for seed in (0, 1))
    with refused(InputError, "compare_reports", "their ids"):
        compare_reports(first, other)


@pytest.mark.parametrize("as_words", [False, True])
def test_another_gallery_is_warned_of(as_words):
    points = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    labels = [f"bird {label}" for label in LABELS.tolist()] if as_words else LABELS.tolist()
    distractor = "albatross" if as_words else -1
    first = evaluate_retrieval(points, labels, points + 1, labels)
    shuffled = evaluate_retrieval(points, labels, points.flip(0) + 1, labels[::-1])
    assert compare_reports(first, shuffled)["mAP"].value == 0  # the order of a gallery changes nothing
    larger = evaluate_retrieval(points, labels, torch.cat([points, points[:1]]) + 1, [*labels, distractor])
    with warned(UserWarning, "compare_reports", "gallery of the second report", "first report"):
        found = compare_reports(first, larger)
    assert found["mAP"].value == first.mAP - larger.mAP
    gallery_ids = {"query_ids": range(300), "gallery_ids": range(300, 600)}
    named = evaluate_retrieval(points, labels, points + 1, labels, **gallery_ids)
    assert compare_reports(first, named)["mAP"].value == 0  # without ids only labels are known
    gallery_ids["gallery_ids"] = range(301, 601)
    other = evaluate_retrieval(points, labels, points + 1, labels, **gallery_ids)
    with warned(UserWarning, "rank_reports", "gallery of 'b'", "'a'"):
        rank_reports({"a": named, "b": other})


def test_another_relevance_is_warned_of():
    points = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    lists = [[(query + 1) % 6] for query in range(6)]
    others = [[(query + 2) % 6] for query in range(6)]
    first, same, other = (
        evaluate_retrieval(points, relevance=Relevance.from_lists(relevant)) for relevant in (lists, lists, others)
    )
    assert compare_reports(first, same)["mAP"].is_equal
    with warned(UserWarning, "compare_reports", "relevance"):
        compare_reports(first, other)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("as_words", [False, True])
def test_digests_are_the_same_on_any_number_of_processes(count, as_words):
    points = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    labels = [f"bird {label % 10}" if as_words else label % 10 for label in range(90)]
    ids = [f"{item % 80}.jpg" if as_words else item % 80 for item in range(90)]

    def work(processes, places):
        mine = places.tolist()
        share = Share(processes, query_places=places, gallery_places=places)
        of_rows = {"query_ids": [ids[row] for row in mine], "gallery_ids": [ids[row] for row in mine]}
        named = [labels[row] for row in mine]
        arguments = (points[places], named, points[places], named)
        return evaluate_retrieval(*arguments, **of_rows, share=share, max_queries=50)

    def work_of_one(process):
        # the last of more than two processes has no item
        holders = max(2, count - 1)
        empty = torch.empty(0, dtype=torch.int64)
        places = torch.arange(process.rank, 90, holders) if process.rank < holders else empty
        return work(process, places)

    expected = work(ALONE, torch.arange(90))
    assert expected.query_ids_digest is not None
    for report in in_threads(count, work_of_one):
        assert not isinstance(report, BaseException), report
        for name in ("query_ids_digest", "gallery_digest", "gallery_ids_digest"):
            assert getattr(report, name) == getattr(expected, name), name


def test_ids_in_files_are_known(tmp_path):
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).numpy()
    labels = np.arange(40) % 5
    ids = np.array([f"{item}.jpg" for item in range(40)])
    np.savez(tmp_path / "a.npz", embeddings=points, labels=labels, ids=ids)
    of_files = evaluate_retrieval(Shards(tmp_path / "a.npz", labels="labels", ids="ids"))
    assert of_files.query_ids_digest == evaluate_retrieval(points, labels, query_ids=ids).query_ids_digest
    assert of_files.query_ids_digest is not None
