"""Score plots, maps and reports of an evaluated set show the content of the report and its embeddings."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from PIL import Image
from torch.utils.data import TensorDataset

from fewshot_callbacks.callbacks import (
    EmbeddingMap,
    ReportWriter,
    RetrievalPanels,
    ScorePlots,
    embedding_map,
    score_plots,
)
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks.score_plots import FIGURES
from fewshot_callbacks.plots.embedding_map import Projection
from fewshot_callbacks.plots.scores import operating_marks
from fewshot_callbacks.report import ReportSettings
from tests.callbacks.models import Net, items, loader, multi_label_items, retrieval, trainer
from tests.callbacks.panel_rows import IdentityNet, brute_force
from tests.messages import refused, warned

DATA = items()
ASKED = {"metrics": ("mAP", "recall@1", "recall@3", "recall@5", "recall@precision0.5", "fnmr@fmr0.1")}
PAIRS = ("score_histograms", "precision_recall_curve", "error_tradeoff_curve")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def validated(*callbacks: Any, data: Any = DATA, stage: str = "validate") -> None:
    getattr(trainer(*callbacks), stage)(IdentityNet(), loader(data), verbose=False)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each function of a figure was given."""
    seen: dict[str, Any] = {}

    def notes(name: str) -> Any:
        return lambda *given, **_: seen.update({name: given}) or Figure(figsize=(1, 1), dpi=10)

    for name in (*PAIRS, "recall_at_k_curve", "weakest_classes", "confused_classes"):
        monkeypatch.setattr(score_plots, name, notes(name))
    return seen


def test_classes_are_counted_as_by_hand(drawn: dict[str, Any]) -> None:
    names = {10 * number - 7: f"kind {number}" for number in range(6)}
    validated(retrieval(**ASKED), ScorePlots(k=3, names=names))
    embeddings, labels = IdentityNet().by_hand(DATA)
    scores, relevant, precision = brute_force(embeddings, labels)
    classes = {each.name: each.value for each in drawn["weakest_classes"][0]}
    by_hand = {names[label]: float(precision[labels == label].mean()) for label in labels.unique().tolist()}
    assert classes == pytest.approx(by_hand, rel=1e-6)
    found: Counter[Any] = Counter()
    for query, order in enumerate(scores.argsort(dim=1, descending=True)[:, :3]):
        found.update((names[int(labels[query])], names[int(labels[o])]) for o in order if not relevant[query, o])
    assert {(each.query, each.retrieved): each.count for each in drawn["confused_classes"][0]} == found


def test_operating_points_are_those_of_the_report(drawn: dict[str, Any]) -> None:
    monitor = retrieval(**ASKED)
    validated(monitor, ScorePlots())
    scores, relevant, _ = brute_force(*IdentityNet().by_hand(DATA))
    pairs = ~torch.eye(len(scores), dtype=torch.bool)
    marks, errors = operating_marks(monitor.report)
    assert [mark.name.split(",")[0] for mark in marks] == ["decision", "precision 0.5", "FMR 0.1"]
    for mark, error in zip(marks, errors, strict=True):
        accepted = (scores >= mark.threshold - 1e-9) & pairs
        recall = float((accepted & relevant).sum() / relevant.sum())
        precision = float((accepted & relevant).sum() / accepted.sum())
        false_matches = float((accepted & ~relevant).sum() / (~relevant & pairs).sum())
        assert (mark.x, mark.y) == pytest.approx((recall, precision), rel=1e-6)
        assert (error.x, error.y) == pytest.approx((false_matches, 1 - recall), rel=1e-6)
        assert error.threshold == mark.threshold
    assert drawn["score_histograms"][:2] == (monitor.report.pair_counts, marks)
    assert drawn["error_tradeoff_curve"][2] == errors
    assert drawn["recall_at_k_curve"][0] == {"recall@k": monitor.report.at("recall@{k}")}


def test_the_figures_that_are_asked_for_arrive(drawn: dict[str, Any]) -> None:
    validated(retrieval(**ASKED), ScorePlots())
    assert {path.name for path in Path("pictures/val").iterdir()} == set(FIGURES)
    validated(retrieval(), ScorePlots(["recall_at_k"]), stage="test")
    assert {path.name for path in Path("pictures/test").iterdir()} == {"recall_at_k"}


@pytest.mark.filterwarnings(r"ignore:.*\d+ of \d+ queries")
def test_multi_label_targets_have_no_classes_and_pairs_where_they_are_asked_for(drawn: dict[str, Any]) -> None:
    with warned(UserWarning, "ScorePlots", "score_histograms", "RetrievalMonitor(metrics=(..., 'pair_f1'))"):
        validated(retrieval(), ScorePlots(), data=multi_label_items())
    assert set(drawn) == {"recall_at_k_curve"}
    validated(retrieval(metrics=("recall@1", "pair_f1")), ScorePlots(), data=multi_label_items())
    assert set(drawn) == {"recall_at_k_curve", *PAIRS}


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[Projection]:
    """What is drawn from now on."""
    seen: list[Projection] = []
    monkeypatch.setattr(
        embedding_map, "embedding_map", lambda found, title: seen.append(found) or Figure((1, 1), dpi=10)
    )
    return seen


def test_the_same_items_in_every_epoch_turned_to_fit_and_a_second_fit_begins_anew(maps: list[Projection]) -> None:
    drawing = EmbeddingMap(classes=4, per_class=3, max_share=None)
    for _ in range(2):
        made = trainer(retrieval(), drawing, max_epochs=2)
        made.fit(Net(), loader(items(), shuffle=True), loader(DATA))
    first = maps[0]
    assert len(first.points) == 12
    assert first.labels.tolist() == [str(int(DATA.tensors[1][index])) for index in first.ids]
    assert np.unique(first.labels, return_counts=True)[1].tolist() == [3, 3, 3, 3]
    assert all(np.array_equal(each.ids, first.ids) for each in maps)
    assert [each.aligned for each in maps] == [False, True, False, True]


@pytest.mark.filterwarnings(r"ignore:.*\d+ of \d+ queries")
def test_multi_label_targets_have_no_map(maps: list[Projection]) -> None:
    with warned(UserWarning, "EmbeddingMap", "val", "multi-label"):
        validated(retrieval(), EmbeddingMap(), data=multi_label_items())
    assert maps == []


def test_tensorboard_shows_the_points_with_thumbnails(maps: Any, tmp_path: Path) -> None:
    points, labels = DATA.tensors
    data = TensorDataset(points.reshape(-1, 1, 3, 4), labels)
    drawing = EmbeddingMap(classes=6, per_class=2, projector=True, names={-7: "owl"})
    trainer(retrieval(), drawing, logger=TensorBoardLogger(tmp_path)).validate(
        IdentityNet(), loader(data), verbose=False
    )
    [sprite] = tmp_path.rglob("sprite.png")
    with Image.open(sprite) as image:
        assert image.size == (4 * 32, 4 * 32)  # twelve pictures in rows of four
    [table] = tmp_path.rglob("metadata.tsv")
    heading, *rows = (row.split("\t") for row in table.read_text().splitlines())
    assert heading == ["class", "item"]
    names = ["owl" if label == -7 else str(label) for label in labels.tolist()]
    assert [name for name, _ in rows] == [names[int(item)] for _, item in rows]
    assert len(rows) == 12


def test_the_report_is_that_of_the_evaluation_with_the_pictures_of_the_data_set(tmp_path):
    asked, monitor = [], retrieval(name="ours")
    names = {10 * number - 7: f"kind {number}" for number in range(6)}

    def image(dataset, index):
        asked.append(index)
        return torch.full((1, 8, 8), 0.5)

    settings = ReportSettings(worst=4, searchable=8)
    validated(monitor, ReportWriter(tmp_path / "new/{prefix}.html", images=image, names=names, settings=settings))
    html = (tmp_path / "new/val_ours.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert f"{monitor.report.mAP:.4f}" in html
    assert {row[0] for row in data["classes"]} <= set(names.values())
    labels = DATA.tensors[1]
    for name, (label, *_) in data["items"].items():
        assert label == names[int(labels[int(name.partition("-")[2])])]
    assert data["images"].keys() == {f"0-{index}" for index in asked}


def test_the_report_shows_the_slices_of_the_monitor(tmp_path):
    monitor = retrieval(slices={"kind": 1})
    validated(monitor, ReportWriter(tmp_path / "report.html"))
    section = (
        (tmp_path / "report.html").read_text(encoding="utf-8").partition('id="slices"')[2].partition("</section>")[0]
    )
    precision, labels = monitor.report.per_query["mAP"], DATA.tensors[1]
    means = {str(label): float(precision[labels == label].mean()) for label in labels.unique().tolist()}
    listed = re.findall(r'<th scope="row"><bdi>([^<]*)</bdi></th><td[^>]*>([^<]*)</td>', section)
    assert {name: float(value) for name, value in listed} == pytest.approx(means, abs=6e-5)


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "report.html").mkdir()
    monitor = retrieval()
    with warned(UserWarning, "ReportWriter", "val", "IsADirectoryError", "report.html"):
        validated(monitor, ReportWriter(tmp_path / "report.html"))
    assert monitor.report is not None


def test_a_file_that_is_no_report_is_left_and_the_report_has_the_next_name(tmp_path):
    """Reports of its own are replaced."""
    (tmp_path / "report.html").write_text("<title>Of the user</title>")
    for _ in range(2):
        with warned(UserWarning, "ReportWriter", "report.html", "report-2.html"):
            validated(retrieval(), ReportWriter(tmp_path / "report.html"))
    assert (tmp_path / "report.html").read_text() == "<title>Of the user</title>"
    assert sorted(file.name for file in tmp_path.glob("*.html")) == ["report-2.html", "report.html"]


def test_an_unknown_field_of_the_path_is_refused_at_once():
    with refused(UsageError, "ReportWriter(path='{loss}.html')", "{epoch}", "{step}", "{prefix}", "{suffix}"):
        validated(retrieval(), ReportWriter("{loss}.html"))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        *((RetrievalPanels, *one) for one in (("worst", -1), ("k", 0), ("every_n_epochs", 0), ("max_share", 1.5))),
        *((ScorePlots, *one) for one in (("figures", ["curve"]), ("figures", "recall_at_k"), ("k", 0))),
        *((EmbeddingMap, *one) for one in (("classes", 13), ("classes", 0), ("per_class", 0))),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, name: str, value: Any) -> None:
    with refused(ValueError, f"{make.__name__}({name}={value!r})"):
        make(**{name: value})
