"""Panels show the right queries with their right neighbours and images, whatever the data set is."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from fewshot_callbacks.callbacks import RetrievalPanels
from fewshot_callbacks.callbacks import panels as panels_module
from fewshot_callbacks.callbacks._pictures import ImageReader, first_part, has_index
from fewshot_callbacks.callbacks.panels import KeptImages, mixed
from tests.callbacks.models import Net, items, loader, messages_of, retrieval, trainer
from tests.callbacks.panel_rows import SETS, IdentityNet, PanelRecorder, assert_rows, brute_force, indexed_panels
from tests.messages import missing_facts, refused, warned

DATA = items()


class Shown(Dataset[Any]):
    """One-channel images with the points as pixels."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Any:
        points, label = DATA[index]
        return points.reshape(1, 3, 4), label


class Stream(IterableDataset[Any]):
    """Without a length or an index."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))  # type: ignore[arg-type]


def validated(net: Net, loaders: Any, panels: RetrievalPanels, monitor: Any = None) -> list[str]:
    """Return the messages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(monitor or retrieval(), panels).validate(net, loaders, verbose=False)
    return [words for words in messages_of(caught) if "Panels" in words or "picture" in words]


class Adds(IdentityNet):
    """Its step returns more of each batch."""

    def __init__(self, **more: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.more = more

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx) | {name: of(*batch) for name, of in self.more.items()}


def item_of(row: Any) -> int:
    """The query of a row, by its caption."""
    return int(row[2].split(",")[0].removeprefix("item "))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PanelRecorder:
    """What is drawn from now on."""
    monkeypatch.chdir(tmp_path)
    seen = PanelRecorder()
    monkeypatch.setattr(panels_module, "retrieval_panels", seen)
    return seen


def test_the_queries_and_neighbours_are_those_of_brute_force(drawn: PanelRecorder) -> None:
    net = IdentityNet()
    assert validated(net, loader(DATA), indexed_panels(worst=5, mistakes=4, sample=3, k=4)) == []
    embeddings, labels = net.by_hand(DATA)
    scores, relevant, precision = brute_force(embeddings, labels)
    best, first = scores.max(dim=1)
    wrong = (~relevant.gather(1, first[:, None])[:, 0]).nonzero()[:, 0]
    assert drawn.queries("worst_queries") == precision.argsort()[:5].tolist()
    assert drawn.queries("confident_mistakes") == wrong[best[wrong].argsort(descending=True)][:4].tolist()
    assert len(set(drawn.queries("sample_queries"))) == 3
    for name in SETS:
        rows = drawn.figures[name][0]
        assert [(item_of(row), len(row[3])) for row in rows] == [(int(row[0]), 4) for row in rows]
        assert_rows(rows, (embeddings, labels))


def test_the_worst_are_those_of_a_report_none_perfect_and_three_of_a_class_at_most(drawn: PanelRecorder) -> None:
    monitor = retrieval()
    validated(IdentityNet(), loader(DATA), indexed_panels(worst=99), monitor)
    left, precision, labels = [], monitor.report.per_query["mAP"], DATA.tensors[1].tolist()
    for query in precision.argsort().tolist():
        if precision[query] < 1 and [labels[each] for each in left].count(labels[query]) < 3:
            left.append(query)
    assert drawn.queries("worst_queries") == left


def test_what_is_excluded_is_no_neighbour(drawn: PanelRecorder) -> None:
    net = Adds(camera=lambda points, _: (points[:, 0] > 0.3).long())
    validated(net, loader(DATA), indexed_panels(sample=36), retrieval(groups="camera"))
    camera = (DATA.tensors[0][:, 0] > 0.3).tolist()
    rows = drawn.figures["sample_queries"][0]
    assert all(camera[int(row[0])] != camera[int(each[0])] for row in rows for each in row[3])


def test_panels_show_the_gallery_of_another_loader(drawn: PanelRecorder) -> None:
    net, gallery = IdentityNet(), items(seed=5)
    panels = indexed_panels(
        images=lambda data, index: f"{index}{' in the gallery' * (data is gallery)}", sample=36, k=3
    )
    validated(net, {"ours": loader(DATA), "all": loader(gallery)}, panels, retrieval(gallery="all"))
    rows = drawn.figures["sample_queries"][0]
    assert len(rows) == len(DATA)
    assert all(row[0].isdigit() and len(row[3]) == 3 for row in rows)
    assert all(each[0].endswith(" in the gallery") for row in rows for each in row[3])
    assert_rows(rows, net.by_hand(DATA) + net.by_hand(gallery), place=lambda shown: int(shown.split()[0]))


def test_panels_show_a_gallery_that_a_flag_marks(drawn: PanelRecorder) -> None:
    net = Adds(gallery=lambda points, _: points[:, 0] > 0.3)
    validated(net, loader(DATA), indexed_panels(), retrieval(gallery="gallery"))
    in_gallery = DATA.tensors[0][:, 0] > 0.3
    rows = drawn.figures["sample_queries"][0]
    assert not any(in_gallery[int(row[0])] for row in rows)
    assert all(in_gallery[int(each[0])] for row in rows for each in row[3])


@pytest.mark.filterwarnings("ignore:.*estimate")
def test_a_sample_of_queries_is_searched_for_the_worst(drawn: PanelRecorder) -> None:
    monitor = retrieval(max_queries=9)
    trainer(monitor, indexed_panels(worst=9, sample=9)).validate(IdentityNet(), loader(DATA), verbose=False)
    _, _, precision = brute_force(*IdentityNet().by_hand(DATA))
    chosen = monitor.report.drawn
    assert sorted(drawn.queries("sample_queries")) == chosen.tolist()
    imperfect = chosen[precision[chosen] < 1]
    assert drawn.queries("worst_queries") == imperfect[precision[imperfect].argsort()].tolist()


def test_panels_show_labels_as_words_and_names_of_classes(drawn: PanelRecorder) -> None:
    labels = DATA.tensors[1]
    data = TensorDataset(DATA.tensors[0], (labels + 7) // 10)
    data.classes = [f"kind {number}" for number in range(6)]
    for net, given, settings, names in (
        (Adds(labels=lambda _, labels: [f"a {n}" for n in labels.tolist()]), DATA, {}, [f"a {n}" for n in labels]),
        (
            IdentityNet(),
            DATA,
            {"names": {-7: "owl"}},
            ["owl" if label == -7 else str(int(label)) for label in labels],
        ),
        (IdentityNet(), Subset(data, range(20)), {}, [f"kind {number}" for number in data.tensors[1]]),
    ):
        validated(net, loader(given), indexed_panels(**settings))
        assert all(row[1] == names[int(row[0])] for row in drawn.figures["sample_queries"][-1])


def test_equal_embeddings_are_told_as_ties(drawn: PanelRecorder) -> None:
    validated(IdentityNet(), loader(TensorDataset(torch.ones(8, 12), torch.arange(8) % 2)), indexed_panels(mistakes=0))
    assert all(tied for row in drawn.figures["worst_queries"][0] for *_, tied in row[3])
    assert all("about" in row[2] for row in drawn.figures["worst_queries"][0])


def test_the_sample_is_the_same_in_every_epoch(drawn: PanelRecorder) -> None:
    trainer(retrieval(), indexed_panels(worst=0, mistakes=0, sample=5), max_epochs=2).fit(Net(), loader(), loader(DATA))
    first, second = (drawn.queries("sample_queries", time) for time in range(2))
    assert len(set(first)) == 5
    assert second == first
    assert "epoch 1" in drawn.titles[1]


def test_panels_show_images_without_their_normalisation(drawn: PanelRecorder) -> None:
    validated(IdentityNet(), loader(Shown()), RetrievalPanels(mean=[0.4], std=0.1, max_share=None))
    for row in drawn.figures["sample_queries"][0]:
        expected = (DATA.tensors[0][item_of(row)].reshape(3, 4, 1) * 0.1 + 0.4).clip(0, 1)
        assert np.allclose(row[0], expected, atol=1e-6)
        assert all(each[0].shape == (3, 4, 1) for each in row[3])


def test_an_image_that_cannot_be_read_is_named_and_the_rest_is_shown(drawn: PanelRecorder) -> None:
    def images(data: Any, index: int) -> Any:
        if index % 3 == 0:
            raise OSError("the file is truncated")
        return torch.zeros(3, 4, 4) if index % 3 == 1 else "a text"

    [words] = validated(IdentityNet(), loader(DATA), indexed_panels(images=images))
    facts = "RetrievalPanels", "item", "dataloader_idx_0", "OSError: the file is truncated"
    assert missing_facts(words, facts) == []
    assert all((row[0] is None) == (item_of(row) % 3 == 0) for row in drawn.figures["sample_queries"][0])


def test_a_stream_shows_the_items_that_it_says(drawn: PanelRecorder) -> None:
    panels = indexed_panels(sample=36, images=lambda batch, place: str(float(batch[0][place][0])))
    validated(IdentityNet(), DataLoader(Stream(DATA), batch_size=7), panels)
    place = {str(float(point)): place for place, point in enumerate(DATA.tensors[0][:, 0])}.__getitem__
    rows = drawn.figures["sample_queries"][0]
    assert sorted(map(item_of, rows)) == list(range(36))
    assert all(place(row[0]) == item_of(row) and len(row[3]) == 5 for row in rows)
    assert_rows(rows, IdentityNet().by_hand(DATA), place)
    assert "whose images were kept" in drawn.titles[0]


def test_only_items_whose_images_were_kept_are_queries(drawn: PanelRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels_module, "MAX_KEPT", 10)
    panels = RetrievalPanels(worst=36, mistakes=36, sample=36, max_share=None)
    validated(IdentityNet(), DataLoader(Stream(Shown()), batch_size=7), panels)
    kept = {item_of(row) for row in drawn.figures["sample_queries"][0]}
    assert len(kept) == 10
    for figures in drawn.figures.values():
        assert {item_of(row) for row in figures[0]} <= kept
        assert all(row[0] is not None for row in figures[0])
    assert any(each[0] is None for row in drawn.figures["sample_queries"][0] for each in row[3])


def test_a_loader_has_an_index_if_it_goes_through_its_data_set_in_order() -> None:
    class Paired(BatchSampler):
        """Batches in an order of its own."""

    assert has_index(DataLoader(DATA, batch_size=4, drop_last=True))
    assert has_index(DataLoader(Subset(DATA, range(9, 0, -1)), batch_size=None))
    assert not has_index(DataLoader(DATA, shuffle=True))
    assert not has_index(DataLoader(Stream(DATA)))
    assert not has_index(DataLoader(DATA, batch_sampler=Paired(SequentialSampler(DATA), 4, drop_last=False)))
    assert not has_index([torch.zeros(3)])


def kept_of(loader: DataLoader[Any], size: int, side: int = 1) -> dict[int, Any]:
    kept = KeptImages(loader, ImageReader(None, mean=0, std=1 / 255))
    for positions in torch.arange(len(DATA)).split(size):
        batch = positions.float()[:, None, None, None].expand(-1, 3, side, side)
        kept.see_batch(range(int(positions[0]), int(positions[-1]) + 1), [batch])
    return kept.images


def test_what_is_kept_is_small_and_the_sample_of_the_least_hashes_in_batches_of_any_size(monkeypatch: Any) -> None:
    monkeypatch.setattr(panels_module, "MAX_KEPT", 8)
    expected = mixed(np.arange(len(DATA))).argsort()[:8].tolist()
    for size in (1, 7, 36):
        kept = kept_of(DataLoader(Stream(DATA)), size)
        assert sorted(kept) == sorted(expected)
        assert all(image[0, 0, 0] == position for position, image in kept.items())
    for image in kept_of(DataLoader(Stream(DATA)), 2, 300).values():
        assert (image.shape, image.dtype) == ((100, 100, 3), np.dtype("uint8"))
    assert kept_of(DataLoader(DATA, batch_size=7), 7) == {}  # there is an index


def test_several_embeddings_of_an_item_show_its_image() -> None:
    images = KeptImages(DataLoader(DATA, batch_size=5), ImageReader(None, 0, 1 / 255))
    images.see_batch(range(10), [torch.arange(5.0).reshape(5, 1, 1, 1)])
    assert {position: int(image[0, 0, 0]) for position, image in images.images.items()} == {i: i % 5 for i in range(10)}


def test_the_image_of_a_sample_is_its_first_part_or_a_known_entry() -> None:
    assert [first_part(each) for each in (("image", 3), "a text", {"label": 3, "img": 4})] == ["image", "a text", 4]
    with refused(ValueError, "'label'", "'image'", "images"):
        first_part({"label": 3})


def test_pictures_of_each_loader_are_at_the_steps_of_the_metrics(tmp_path: Path) -> None:
    made = trainer(retrieval(), RetrievalPanels(2, 2, 2, max_share=None), logger=CSVLogger(tmp_path))
    made.fit(IdentityNet(), loader(Shown()), [loader(Shown()), loader(Shown())])
    made.test(IdentityNet(), loader(Shown()), verbose=False)
    files = {path.as_posix().split("pictures/")[1]: path for path in tmp_path.rglob("*.png")}
    assert set(files) == {
        *(f"val/{name}/dataloader_idx_{number}/step=000003.png" for name in SETS for number in (0, 1)),
        *(f"test/{name}/step=000004.png" for name in SETS),
    }
    for path in files.values():
        with Image.open(path) as image:
            assert image.size[0] == 600
    assert 0 < made.callback_metrics["pictures/share_of_time"] < 1


@pytest.mark.parametrize("images", [None, lambda dataset, index: dataset[index].missing])
def test_items_without_an_index_are_said_to_need_a_function_of_the_batch(images: Any) -> None:
    """The warning is not shown at a line of the standard library."""

    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for point, label in DATA:
                yield {"points": point, "labels": label}

    class OfRows(IdentityNet):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step((batch["points"], batch["labels"]), batch_idx)

    run = trainer(retrieval(), RetrievalPanels(images=images, max_share=None))
    facts = "RetrievalPanels", "images", "(batch, place in the batch)"
    with warned(UserWarning, *facts) as caught:
        run.validate(OfRows(), DataLoader(Rows(), batch_size=7), verbose=False)
    [warning] = [each for each in caught if not missing_facts(str(each.message), facts)]
    assert "contextlib" not in warning.filename
    assert "data set, index" not in str(warning.message)
