"""A run with its folder in a remote store: reports, histories and figures are there, and there is no local folder."""

import json

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from fewshot_callbacks import ReportWriter, RetrievalMonitor, ScorePlots, TrainingDynamicsMonitor
from tests.callbacks.models import Net, episodes, loader, protonet, trainer
from tests.messages import warned


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The files of an empty store; the working folder is empty, too."""
    monkeypatch.chdir(tmp_path)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


def str_of(data, index):
    return f"item {index}"


def fit(*callbacks, **settings):
    run = trainer(RetrievalMonitor(label_groups=None), *callbacks, default_root_dir="memory://run", **settings)
    run.fit(Net(), loader(), loader())


def test_reports_and_pictures_are_in_the_store(store, tmp_path):
    fit(ReportWriter("reports/report.html", images=str_of, max_share=None), ScorePlots(max_share=None), max_epochs=2)
    assert store.cat("/run/reports/report.html").startswith(b"<!DOCTYPE html>")
    assert store.glob("/run/pictures/**/*.png")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_report_is_left(store):
    store.pipe("/run/report.html", b"notes")
    with warned(UserWarning, "ReportWriter", "val", "FileExistsError", "memory://run/report.html"):
        fit(ReportWriter("report.html", images=str_of))
    assert store.cat("/run/report.html") == b"notes"


class Foreign(Callback):
    """Somebody else's file, where the history would be written."""

    def on_train_start(self, trainer, pl_module):
        MemoryFileSystem().pipe(HISTORY, b"{}")


HISTORY = "/run/lightning_logs/1/training_dynamics.json"
WITHOUT_VALIDATION = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


def fit_episodes(*callbacks):
    run = trainer(*callbacks, logger=CSVLogger("memory://run", version="1"), max_epochs=2)
    run.fit(protonet(), episodes())


@WITHOUT_VALIDATION
def test_histories_are_in_the_store(store, tmp_path):
    fit_episodes(TrainingDynamicsMonitor(every_n_steps=1))
    assert json.loads(store.cat(HISTORY))["steps"]
    assert list(tmp_path.iterdir()) == []


@WITHOUT_VALIDATION
def test_a_history_of_another_run_is_left(store):
    with warned(UserWarning, "FileExistsError", f"memory:/{HISTORY}", "TrainingDynamicsMonitor(strict=True)"):
        fit_episodes(Foreign(), TrainingDynamicsMonitor(every_n_steps=1))
    assert store.cat(HISTORY) == b"{}"
