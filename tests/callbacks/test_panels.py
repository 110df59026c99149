"""Panels show the right queries with their right neighbours, in every logger, whatever the data set is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fewshot_callbacks.callbacks import RetrievalPanels
from fewshot_callbacks.callbacks import panels as panels_module
from fewshot_callbacks.report.findings import worst_queries
from tests.callbacks.models import Net, items, loader, retrieval, said, trainer
from tests.callbacks.pictured import SETS, AsGiven, Drawn, brute_force, told

DATA = items()


class Shown(Dataset[Any]):
    """Images of one channel whose pixels are the points."""

    def __init__(self, data: TensorDataset = DATA) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        points, label = self.data[index]
        return points.reshape(1, 3, 4), label


class Stream(IterableDataset[Any]):
    """Without a length or an index."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))  # type: ignore[arg-type]


def validated(net: Net, loaders: Any, panels: RetrievalPanels, monitor: Any = None, **settings: Any) -> list[str]:
    """What was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(monitor or retrieval(), panels, **settings)
        made.validate(net, loaders, verbose=False)
    return [words for words in said(caught) if "Panels" in words or "picture" in words]


def by_value(batch: Any, place: int) -> str:
    """Show an item of a batch as its first value."""
    return str(float(batch[0][place][0]))


class Adds(AsGiven):
    """Its step returns more of each batch."""

    def __init__(self, **more: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.more = more

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        added = {name: of(*batch) for name, of in self.more.items()}
        return super().validation_step(batch, batch_idx) | added


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What is drawn from now on."""
    seen = Drawn()
    monkeypatch.setattr(panels_module, "retrieval_panels", seen)
    return seen


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --------------------------------------------------------------------------------------------- queries and neighbours


def test_the_queries_and_neighbours_are_those_of_brute_force(drawn: Drawn) -> None:
    net = AsGiven()
    assert validated(net, loader(DATA), told(worst=5, mistakes=4, sample=3, k=4)) == []
    embeddings, labels = net.by_hand(DATA)
    scores, relevant, precision = brute_force(embeddings, labels)
    best, first = scores.max(dim=1)
    wrong = (~relevant.gather(1, first[:, None])[:, 0]).nonzero()[:, 0]
    assert drawn.queries("worst_queries") == precision.argsort()[:5].tolist()
    assert drawn.queries("confident_mistakes") == wrong[best[wrong].argsort(descending=True)][:4].tolist()
    assert len(set(drawn.queries("sample_queries"))) == 3
    for name in SETS:
        for query, label, caption, neighbours in drawn.figures[name][0]:
            place = int(query)
            order = scores[place].argsort(descending=True)
            rank = int(relevant[place][order].nonzero()[0]) + 1
            assert label == str(int(labels[place]))
            assert caption == f"item {place}, AP {precision[place]:.3f}, first hit at rank {rank}"
            assert [int(shown) for shown, *_ in neighbours] == order[:4].tolist()
            assert [score for _, _, score, *_ in neighbours] == pytest.approx(
                scores[place][order[:4]].tolist(), abs=1e-6
            )
            assert [each[3] for each in neighbours] == relevant[place][order[:4]].tolist()
            assert [each[1] for each in neighbours] == [str(int(kind)) for kind in labels[order[:4]]]


def test_the_worst_are_those_of_a_report_none_perfect_and_three_of_a_class_at_most(drawn: Drawn) -> None:
    monitor = retrieval()
    validated(AsGiven(), loader(DATA), told(worst=99), monitor)
    chosen, left, labels = drawn.queries("worst_queries"), [], DATA.tensors[1].tolist()
    for query in monitor.report.per_query["mAP"].argsort().tolist():
        if monitor.report.per_query["mAP"][query] < 1 and [labels[each] for each in left].count(labels[query]) < 3:
            left.append(query)
    assert chosen == left == worst_queries(monitor.report, 99)


def test_what_is_excluded_is_no_neighbour(drawn: Drawn) -> None:
    net = Adds(camera=lambda points, _: (points[:, 0] > 0.3).long())
    validated(net, loader(DATA), told(sample=36), retrieval(exclude="camera"))
    camera = (DATA.tensors[0][:, 0] > 0.3).tolist()
    rows = drawn.figures["sample_queries"][0]
    assert all(camera[int(row[0])] != camera[int(each[0])] for row in rows for each in row[3])


def test_the_gallery_of_another_loader(drawn: Drawn) -> None:
    net, gallery = AsGiven(), items(seed=5)
    panels = told(images=lambda data, index: f"{'gallery' if data is gallery else 'query'} {index}", sample=36, k=3)
    validated(net, {"ours": loader(DATA), "all": loader(gallery)}, panels, retrieval(gallery="all"))
    scores, relevant, precision = brute_force(*net.by_hand(DATA), *net.by_hand(gallery))
    rows = drawn.figures["sample_queries"][0]
    assert len(rows) == len(DATA)
    for query, _, caption, neighbours in rows:
        place = int(query.removeprefix("query "))
        order = scores[place].argsort(descending=True)[:3]
        assert f"AP {precision[place]:.3f}" in caption
        assert [shown for shown, *_ in neighbours] == [f"gallery {other}" for other in order.tolist()]
        assert [each[3] for each in neighbours] == relevant[place][order].tolist()


def test_a_gallery_by_a_flag(drawn: Drawn) -> None:
    net = Adds(gallery=lambda points, _: points[:, 0] > 0.3)
    validated(net, loader(DATA), told(), retrieval(gallery="gallery"))
    in_gallery = DATA.tensors[0][:, 0] > 0.3
    rows = drawn.figures["sample_queries"][0]
    assert not any(in_gallery[int(row[0])] for row in rows)
    assert all(in_gallery[int(each[0])] for row in rows for each in row[3])


def test_several_loaders_have_pictures_of_their_own(tmp_path: Path) -> None:
    panels = told(worst=1, mistakes=0, sample=1)
    validated(AsGiven(), [loader(DATA), loader(items(seed=4))], panels, logger=CSVLogger(tmp_path))
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
    assert [file.split("pictures/")[1].rsplit("/", 1)[0] for file in files] == [
        f"val/{name}/dataloader_idx_{number}" for name in ("sample_queries", "worst_queries") for number in (0, 1)
    ]


def test_a_sample_of_queries_is_searched_for_the_worst(drawn: Drawn) -> None:
    monitor = retrieval(max_queries=9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*An estimate.*")
        trainer(monitor, told(worst=9, sample=9)).validate(AsGiven(), loader(DATA), verbose=False)
    _, _, precision = brute_force(*AsGiven().by_hand(DATA))
    chosen = monitor.report.drawn
    assert sorted(drawn.queries("sample_queries")) == chosen.tolist()
    imperfect = chosen[precision[chosen] < 1]
    assert drawn.queries("worst_queries") == imperfect[precision[imperfect].argsort()].tolist()


def test_words_for_labels_and_names_of_classes(drawn: Drawn) -> None:
    net = Adds(labels=lambda _, labels: [f"kind {n}" for n in labels.tolist()])
    validated(net, loader(DATA), told())
    kinds = [f"kind {label}" for label in DATA.tensors[1].tolist()]
    assert all(row[1] == kinds[int(row[0])] for row in drawn.figures["sample_queries"][0])
    validated(AsGiven(), loader(DATA), told(names={-7: "owl"}))
    names = ["owl" if label == -7 else str(label) for label in DATA.tensors[1].tolist()]
    assert all(row[1] == names[int(row[0])] for row in drawn.figures["sample_queries"][-1])
    data = TensorDataset(DATA.tensors[0], (DATA.tensors[1] + 7) // 10)
    data.classes = [f"kind {number}" for number in range(6)]
    validated(AsGiven(), loader(Subset(data, range(20))), told())
    assert all(row[1] == f"kind {data.tensors[1][int(row[0])]}" for row in drawn.figures["sample_queries"][-1])


def test_equal_embeddings_are_told_as_ties(drawn: Drawn) -> None:
    same = TensorDataset(torch.ones(8, 12), torch.arange(8) % 2)
    validated(AsGiven(), loader(same), told(mistakes=0))
    assert all(tied for row in drawn.figures["worst_queries"][0] for *_, tied in row[3])
    assert all("about" in row[2] for row in drawn.figures["worst_queries"][0])


# ------------------------------------------------------------------------------------------------------- from epoch to epoch


def test_the_sample_is_the_same_in_every_epoch(drawn: Drawn) -> None:
    made = trainer(retrieval(), told(worst=0, mistakes=0, sample=5), max_epochs=3)
    made.fit(Net(), loader(items(), shuffle=True), loader(DATA))
    first, *more = [drawn.queries("sample_queries", time) for time in range(3)]
    assert len(set(first)) == 5
    assert more == [first, first]
    assert "epoch 2" in drawn.titles[2]


def test_a_stream_shows_the_items_that_it_says(drawn: Drawn) -> None:
    panels = told(sample=36, images=by_value)
    validated(AsGiven(), DataLoader(Stream(DATA), batch_size=7), panels)
    shown = {str(float(point)): place for place, point in enumerate(DATA.tensors[0][:, 0])}
    rows = drawn.figures["sample_queries"][0]
    assert len(rows) == 36
    for query, _, caption, neighbours in rows:
        assert caption.startswith(f"item {shown[query]},")
        assert None not in [each[0] for each in neighbours]
    scores, _, _ = brute_force(*AsGiven().by_hand(DATA))
    assert [shown[each[0]] for each in rows[0][3]] == scores[shown[rows[0][0]]].argsort(descending=True)[:5].tolist()


def test_a_shuffled_loader_keeps_images_of_its_batches(drawn: Drawn) -> None:
    texts = {
        str(float(point)): str(int(label)) for point, label in zip(DATA.tensors[0][:, 0], DATA.tensors[1], strict=True)
    }
    panels = told(images=by_value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(retrieval(), panels).validate(AsGiven(), loader(DATA, shuffle=True), verbose=False)
    for figures in drawn.figures.values():
        for query, label, _, neighbours in figures[0]:
            assert texts[query] == label
            assert [texts[each[0]] for each in neighbours] == [each[1] for each in neighbours]
    assert "whose images were kept" in drawn.titles[0]


def test_only_items_whose_images_were_kept_are_queries(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels_module, "MOST_KEPT", 10)
    panels = RetrievalPanels(worst=36, mistakes=36, sample=36, max_share=None)
    validated(AsGiven(), DataLoader(Stream(Shown()), batch_size=7), panels)
    assert len(drawn.figures["sample_queries"][0]) == 10
    kept = {row[2].split(",")[0] for row in drawn.figures["sample_queries"][0]}
    for figures in drawn.figures.values():
        assert {row[2].split(",")[0] for row in figures[0]} <= kept
        assert all(row[0] is not None for row in figures[0])
    assert any(each[0] is None for row in drawn.figures["sample_queries"][0] for each in row[3])


# -------------------------------------------------------------------------------------------------------------- images


def test_images_of_the_data_set_without_their_normalisation(drawn: Drawn) -> None:
    validated(AsGiven(), loader(Shown()), RetrievalPanels(mean=[0.4], std=0.1, max_share=None))
    for query, _, caption, neighbours in drawn.figures["sample_queries"][0]:
        place = int(caption.split(",")[0].removeprefix("item "))
        expected = (DATA.tensors[0][place].reshape(3, 4, 1) * 0.1 + 0.4).clip(0, 1)
        assert np.allclose(query, expected, atol=1e-6)
        assert all(each[0].shape == (3, 4, 1) for each in neighbours)


def test_the_entry_image_of_a_mapping(drawn: Drawn) -> None:
    class Mapped(Shown):
        def __getitem__(self, index: int) -> Any:
            points, label = self.data[index]
            return {"points": points, "labels": label, "image": np.full((5, 6, 3), index, dtype=np.uint8)}

    class TakesMappings(AsGiven):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"embeddings": self.embed(batch["points"])}

    validated(TakesMappings(), loader(Mapped()), RetrievalPanels(max_share=None))
    for query, _, caption, _ in drawn.figures["sample_queries"][0]:
        assert query[0, 0, 0] == pytest.approx(int(caption.split(",")[0].removeprefix("item ")) / 255)


def test_an_image_that_cannot_be_read_is_named_and_the_rest_is_shown(drawn: Drawn) -> None:
    def images(data: Any, index: int) -> Any:
        if index % 3 == 0:
            raise OSError("the file is truncated")
        return torch.zeros(3, 4, 4) if index % 3 == 1 else "a text"

    words = validated(AsGiven(), loader(DATA), told(images=images))
    assert len(words) == 1
    assert "of dataloader_idx_0 (OSError: the file is truncated)" in words[0]
    assert "item " in words[0]
    pictures = [row[0] for row in drawn.figures["sample_queries"][0]]
    places = [int(row[2].split(",")[0].removeprefix("item ")) for row in drawn.figures["sample_queries"][0]]
    assert [picture is None for picture in pictures] == [place % 3 == 0 for place in places]


def test_items_without_a_picture_are_grey_boxes(drawn: Drawn) -> None:
    words = validated(AsGiven(), loader(DATA), RetrievalPanels(max_share=None))
    assert len(words) == 1
    assert "An image needs the axes height and width" in words[0]
    assert all(row[0] is None for row in drawn.figures["sample_queries"][0])
    assert len(drawn.figures["worst_queries"][0]) == 8


# ------------------------------------------------------------------------------------------------------------- loggers


def test_pictures_reach_the_loggers(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path / "events"), CSVLogger(tmp_path / "csv")]
    made = trainer(retrieval(), RetrievalPanels(2, 2, 2, max_share=None), logger=loggers, log_every_n_steps=1)
    made.fit(AsGiven(), loader(Shown()), loader(Shown()))
    made.test(AsGiven(), loader(Shown()), verbose=False)
    steps = {"val": len(loader(DATA)) - 1, "test": len(loader(DATA))}  # those of the metrics
    names = sorted(f"{stage}/{name}" for stage in steps for name in SETS)
    files = {
        path.relative_to(tmp_path / "csv").as_posix().split("pictures/")[1]: path for path in tmp_path.rglob("*.png")
    }
    assert sorted(files) == [f"{name}/step={steps[name.partition('/')[0]]:06d}.png" for name in names]
    for path in files.values():
        with Image.open(path) as image:
            assert image.size[0] == 600
    events = EventAccumulator(str(made.loggers[0].log_dir))
    events.Reload()
    assert sorted(events.Tags()["images"]) == names
    assert 0 < made.callback_metrics["pictures/share_of_time"] < 1


def test_settings_out_of_range() -> None:
    for settings in ({"worst": -1}, {"k": 0}, {"every_n_epochs": 0}, {"max_share": 1.5}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            RetrievalPanels(**settings)
