"""A long evaluation that was killed goes on from what it had written: the same report, to the last bit."""

import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fewshot_callbacks import Shards
from fewshot_callbacks.distributed.processes import ALONE
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional import Share, evaluate_retrieval
from fewshot_callbacks.journal import Journal, kept
from tests.reports import assert_same
from tests.thread_processes import in_threads

LABELS = torch.randint(0, 40, (600,), generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(600, 24, generator=torch.Generator().manual_seed(1)) + 1.5 * torch.eye(40, 24)[LABELS]
PIECES = {"memory_mb": 0.05}  # of half precision, which is converted piece by piece
METRICS = ("mAP", "recall@1", "f1", "recall@precision0.9", "eer", "auc_pr", "grouped_recall@1")


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Write at one in some forty moments at which that can be done: each look at the clock is a second later."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    for name, value in (("time", clock), ("EVERY", 40), ("RARELY", 0)):
        monkeypatch.setattr(f"fewshot_callbacks.journal.{name}", value)


def journal_of(folder, processes=ALONE):
    return Journal(folder / "state", {"files": "some"}, processes)


class Killed(BaseException):
    """What no code of ours expects."""


def evaluated(rows, labels, journal=None, *, after=None, **options):
    seen = []

    def progress(done, total):
        seen.append(done)
        if after is not None and done > after * total:
            raise Killed

    with kept(journal), engine_options(height=32, width=32, **options.pop("engine", {})):
        report = evaluate_retrieval(rows, labels, metrics=METRICS, progress=progress, **options)
    return report, seen


@pytest.mark.parametrize("engine", [{}, {"batch": 3000}, {"collected": 50, "grid_size": 20}, {"precision": "bytes"}])
def test_what_was_killed_goes_on(tmp_path, engine):
    known, _ = evaluated(VECTORS, LABELS, engine=engine)
    for after in (0.0, 0.5, 0.95):
        with pytest.raises(Killed):
            evaluated(VECTORS, LABELS, journal_of(tmp_path), after=after, engine=engine)
    report, seen = evaluated(VECTORS, LABELS, journal_of(tmp_path), engine=engine)
    assert_same(known, report)
    assert seen[0] > 0.4 * seen[-1]  # that much was not done again
    assert not (tmp_path / "state").exists()


def test_pieces_of_files_are_not_read_again(tmp_path):
    np.savez(tmp_path / "all.npz", embeddings=VECTORS.numpy().astype(np.float16))
    shards = Shards(tmp_path / "all.npz", labels=LABELS.numpy())
    known, _ = evaluated(shards, None, **PIECES)
    for after in (0.3, 0.7):
        with pytest.raises(Killed):
            evaluated(shards, None, journal_of(tmp_path), after=after, **PIECES)
    report, seen = evaluated(shards, None, journal_of(tmp_path), **PIECES)
    assert_same(known, report)
    assert seen[0] > 0.5 * seen[-1]


@pytest.mark.parametrize("stored", [False, True])
def test_processes_go_on_from_a_moment_that_all_have(tmp_path, monkeypatch, stored):
    monkeypatch.setattr("fewshot_callbacks.journal.EVERY", 0)  # between parts alone, which are few
    known, _ = evaluated(VECTORS.half() if stored else VECTORS, LABELS)

    def work(process, after=None):
        places = torch.arange(600)[process.rank :: 3]
        rows = VECTORS[places].half() if stored else VECTORS[places]
        options = {"share": Share(process, places, places)} | (PIECES if stored else {})
        return evaluated(rows, LABELS[places], journal_of(tmp_path, process), after=after, **options)[0]

    for after in (0.3, 0.7):
        assert Killed in [*map(type, in_threads(3, lambda process, after=after: work(process, after=after)))]
    newest = max((tmp_path / "state").glob("1.*.npz"), key=os.path.getmtime)
    newest.write_bytes(newest.read_bytes()[:100])  # this one was killed while it wrote
    for report in in_threads(3, work):
        assert_same(known, report)


def test_another_evaluation_is_refused(tmp_path):
    journal_of(tmp_path)
    with pytest.raises(ValueError, match=r"another evaluation, by its files \(some, now two\)\. Delete the folder"):
        Journal(tmp_path / "state", {"files": "two"}, ALONE)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("")
    with pytest.raises(ValueError, match="is no folder for the state of an evaluation"):
        Journal(tmp_path / "photos", {}, ALONE)


def test_a_full_disk_does_not_end_the_evaluation(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    known, _ = evaluated(VECTORS, LABELS)
    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="could not be written: .*No space left on device. It goes on"):
        report, _ = evaluated(VECTORS, LABELS, journal_of(tmp_path))
    assert_same(known, report)
