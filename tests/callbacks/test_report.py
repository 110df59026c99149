"""`ReportWriter` writes what a `RetrievalMonitor` has evaluated, and ends no run."""

import json
import re

import pytest
import torch

from fewshot_callbacks import ReportWriter
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.report import ReportSettings
from tests.callbacks.models import items, loader, retrieval, trainer
from tests.callbacks.pictured import AsGiven

DATA = items()
SMALL = ReportSettings(worst=4, searchable=8)


def written(path):
    html = path.read_text(encoding="utf-8")
    return html, json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_report_is_that_of_the_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor, model = retrieval(name="ours"), AsGiven()
    names = {10 * number - 7: f"kind {number}" for number in range(6)}
    writer = ReportWriter(tmp_path / "new" / "{prefix}.html", names=names, settings=SMALL)
    trainer(monitor, writer).validate(model, loader(DATA), verbose=False)
    html, data = written(tmp_path / "new/val_ours.html")
    assert f"{monitor.report.mAP:.4f}" in html
    assert {row[0] for row in data["classes"]} <= set(names.values())
    labels = model.by_hand(DATA)[1]
    for name, (label, *_) in data["items"].items():
        assert label == names[int(labels[int(name.partition("-")[2])])]


def test_pictures_are_those_of_the_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def image(dataset, index):
        asked.append(index)
        return torch.full((1, 8, 8), 0.5)

    writer = ReportWriter(tmp_path / "report.html", images=image, settings=SMALL)
    trainer(retrieval(), writer).validate(AsGiven(), loader(DATA), verbose=False)
    _, data = written(tmp_path / "report.html")
    assert data["images"].keys() == {f"0-{index}" for index in asked}


def test_an_error_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").mkdir()
    monitor = retrieval()
    with pytest.warns(UserWarning, match=r"ReportWriter.*is a folder"):
        trainer(monitor, ReportWriter(tmp_path / "report.html")).validate(AsGiven(), loader(DATA), verbose=False)
    assert monitor.report is not None


def test_an_unknown_field_of_the_path_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"The fields are \{epoch\}"):
        trainer(retrieval(), ReportWriter("{loss}.html")).validate(AsGiven(), loader(DATA), verbose=False)
