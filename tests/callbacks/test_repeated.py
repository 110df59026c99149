"""Items that come several times in a validation: noted by the monitor, and left out by their ids."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from fewshot_callbacks import DiscriminantRatioMonitor, EmbeddingSource, KnnMonitor, evaluate_retrieval, knn_accuracy
from tests.callbacks.models import (
    EveryBatch,
    Net,
    expected_metrics,
    expected_ratios,
    expected_ratios_of_batches,
    items,
    log_of_validation,
    messages_of,
    retrieval,
    trainer,
    with_prefix,
)
from tests.messages import missing_facts
from tests.reports import assert_same

POINTS, LABELS = items().tensors
DATA = TensorDataset(POINTS, LABELS, torch.arange(len(POINTS)))
RIGHT = with_prefix(expected_metrics(POINTS, LABELS))
IDS = {"source": EmbeddingSource(ids=lambda outputs, batch: batch[2])}


class Unshared(IterableDataset):
    """Gives all items to every worker."""

    def __iter__(self) -> Any:
        return iter(DATA)


class Step(Net):
    """Takes the points as embeddings."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": batch[0], "labels": batch[1]}


def weighted() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    drawn = WeightedRandomSampler([1.0] * len(DATA), 2 * len(DATA), generator=generator)
    return DataLoader(DATA, 8, sampler=drawn)


LOADERS = {
    "workers": lambda: DataLoader(Unshared(), batch_size=8, num_workers=2),
    "a sampler with replacement": weighted,
    "the set twice": lambda: DataLoader(DATA + DATA, batch_size=8),
    "a gallery": lambda: [DataLoader(DATA, batch_size=8), DataLoader(DATA, batch_size=7)],
}


def without_copies(name: str) -> tuple[int, float, float]:
    """Return how many queries have copies, recall@1, and recall@1 where no query may find an item that it equals."""
    came = [batch[2] for batch in weighted()] if name == "a sampler with replacement" else [torch.arange(len(DATA))] * 2
    which = torch.cat(came[:1] if name == "a gallery" else came)
    items = torch.arange(len(DATA)) if name == "a gallery" else which
    scores = torch.nn.functional.normalize(POINTS[which], dim=1) @ torch.nn.functional.normalize(POINTS[items], dim=1).T
    is_equal = which[:, None] == items
    is_itself = torch.zeros_like(is_equal) if name == "a gallery" else torch.eye(len(which), dtype=torch.bool)
    found = [LABELS[items[scores.masked_fill(out, -2).argmax(dim=1)]] for out in (is_itself, is_equal)]
    recalls = [float((labels == LABELS[which]).double().mean()) for labels in found]
    return int((is_equal & ~is_itself).any(dim=1).sum()), *recalls


def seen(name: str, votes: bool = False, **settings: Any) -> tuple[dict[str, float], list[str]]:
    """What a monitor logs, and what it says of copies."""
    gallery = {"gallery": 1} if name == "a gallery" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitors = retrieval(**gallery, **settings), KnnMonitor((1, 5), "gallery", **gallery, **settings)
        logged = log_of_validation(monitors[: 2 if votes else 1], Step(), LOADERS[name]())
    return logged, messages_of(caught, "queries", "copy")


@pytest.mark.parametrize("name", LOADERS)
def test_the_monitor_says_it_once_and_ids_cure_it(name: str) -> None:
    logged, words = seen(name)
    assert logged["val/recall@1"] > RIGHT["val/recall@1"] + 0.1
    (note,) = words
    assert "RetrievalMonitor" not in note.partition(":")[0]
    queries, recall, right = without_copies(name)
    assert missing_facts(note, ("val", queries, "recall@1", f"{recall:.3f}", f"{right:.3f}", "ids")) == []
    assert logged["val/recall@1"] == pytest.approx(recall)
    cured, words = seen(name, **IDS)
    assert words == []
    if name != "a sampler with replacement":  # which leaves out others
        assert cured == pytest.approx(RIGHT, rel=1e-6)
    else:
        drawn = torch.cat([batch[2] for batch in weighted()]).unique()
        assert cured == pytest.approx(with_prefix(expected_metrics(POINTS[drawn], LABELS[drawn])), rel=1e-6)


def test_no_item_votes_for_itself_where_ids_say_which_it_is() -> None:
    logged, words = seen("a gallery", votes=True)
    assert logged["val/knn@1"] == 1.0
    assert len(words) == 2
    cured, words = seen("a gallery", votes=True, **IDS)
    expected = knn_accuracy(POINTS, LABELS, k=(1, 5)).values
    assert {key: cured[f"val/{key}"] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert words == []


def test_ids_that_name_other_items_in_the_gallery_are_said() -> None:
    """The index in each data set is no identity across both."""
    other = TensorDataset(POINTS.roll(5, 0), LABELS.roll(5, 0), torch.arange(len(POINTS)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log_of_validation(retrieval(gallery=1, **IDS), Step(), [DataLoader(DATA, 8), DataLoader(other, 8)])
    assert messages_of(caught, "ids", "queries", "gallery", "labels")


def twice() -> DataLoader[Any]:
    """Every third item comes a second time, in batches and in an order of its own."""
    rows = torch.cat([torch.arange(len(DATA)), torch.arange(0, len(DATA), 3)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    return DataLoader(TensorDataset(*(part[rows] for part in DATA.tensors)), batch_size=7)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_j_counts_each_item_once_by_its_id(normalize: bool, spilled: bool, tmp_path: Any) -> None:
    """With another monitor beside it that shares the items, and without."""
    source = EmbeddingSource(ids=IDS["source"].ids, spill_to=str(tmp_path) if spilled else None)
    made = DiscriminantRatioMonitor(source=source, normalize=normalize)
    scaled = torch.nn.functional.normalize(POINTS.double()) if normalize else POINTS
    expected = with_prefix(expected_ratios(scaled, LABELS))
    alone = log_of_validation(made, Step(), twice())
    assert alone == pytest.approx(expected, rel=1e-6)
    beside = log_of_validation((retrieval(source=source), made), Step(), twice())
    assert {key: beside[key] for key in alone} == alone
    without_ids = log_of_validation(DiscriminantRatioMonitor(normalize=normalize), Step(), twice())
    assert abs(without_ids["val/J"] / expected["val/J"] - 1) > 0.02


def test_j_says_which_items_of_one_id_differ() -> None:
    rows = torch.cat([torch.arange(len(DATA)), torch.arange(3)])
    points, labels, ids = (part[rows].clone() for part in DATA.tensors)
    points[-1] += 5.0
    labels[-2] += 10
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = TensorDataset(points, labels, ids)
        logged = log_of_validation(DiscriminantRatioMonitor(**IDS), Step(), DataLoader(data, batch_size=7))
    assert logged == pytest.approx(with_prefix(expected_ratios(POINTS, LABELS)), rel=1e-6)
    [said] = messages_of(caught, "ids")
    assert missing_facts(said, ("DiscriminantRatioMonitor", 2, 36)) == []


def test_j_of_a_training_batch_counts_each_row_as_the_loss_does() -> None:
    """Two views of an item have one id; and a training batch need not have the ids of a validation."""

    class Pairs(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch[:2], batch_idx)

    batches = EveryBatch()
    run = trainer(DiscriminantRatioMonitor(**IDS), batches)
    run.fit(Pairs(), DataLoader(TensorDataset(POINTS, LABELS), batch_size=12), DataLoader(DATA, batch_size=7))
    assert batches.logged == pytest.approx(expected_ratios_of_batches(batches))


@pytest.mark.parametrize("name", ["the set", "the set twice", "a gallery"])
def test_reports_know_their_queries_by_the_ids_of_the_source(name: str) -> None:
    """So reports of other items with the same labels are refused; the ids of one loader change no value."""
    of_one = {"the set": lambda: DataLoader(DATA, batch_size=7)}
    gallery = {"gallery": 1} if name == "a gallery" else {}
    with_ids, without_ids = (retrieval(**gallery, **source) for source in (IDS, {}))
    for monitor in (with_ids, without_ids):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(monitor).validate(Step(), (LOADERS | of_one)[name](), verbose=False)
    expected = evaluate_retrieval(POINTS, LABELS, query_ids=torch.arange(len(POINTS)), label_groups=None)
    assert with_ids.report.query_ids_digest == expected.query_ids_digest
    assert without_ids.report.query_ids_digest is None
    if name == "the set":
        assert_same(without_ids.report, replace(with_ids.report, query_ids_digest=None, gallery_ids_digest=None))
