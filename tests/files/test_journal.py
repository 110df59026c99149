"""A killed evaluation resumes from its saved state and gives the same report, to the last bit."""

import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fewshot_callbacks import Shards
from fewshot_callbacks.distributed.processes import ALONE
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.files.journal import Journal, journaling
from fewshot_callbacks.functional import Share, evaluate_retrieval
from tests.messages import refused, warned
from tests.reports import assert_same
from tests.thread_processes import in_threads

LABELS = torch.randint(0, 40, (600,), generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(600, 24, generator=torch.Generator().manual_seed(1)) + 1.5 * torch.eye(40, 24)[LABELS]
PIECES = {"memory_mb": 0.05}  # of half precision, which is converted piece by piece
METRICS = ("mAP", "recall@1", "pair_f1", "recall@precision0.9", "eer", "auc_pr", "grouped_recall@1")


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Write at one in some forty moments at which that can be done: each look at the clock is a second later."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    for name, value in (("time", clock), ("INTERVAL", 40), ("COST_FACTOR", 0)):
        monkeypatch.setattr(f"fewshot_callbacks.files.journal.{name}", value)


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

    with journaling(journal), engine_options(height=32, width=32, **options.pop("engine", {})):
        report = evaluate_retrieval(rows, labels, metrics=METRICS, progress=progress, **options)
    return report, seen


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"batch_counters": 3000},
        pytest.param({"buffer_pairs": 50, "grid_size": 20}, marks=pytest.mark.slow),
        {"precision": "int8"},
    ],
)
@pytest.mark.parametrize("rows", [VECTORS, VECTORS[torch.arange(600) % 450]], ids=["different rows", "with equal rows"])
def test_an_evaluation_that_was_killed_goes_on_to_the_same_report(tmp_path, rows, engine):
    known, _ = evaluated(rows, LABELS, engine=engine)
    for after in (0.0, 0.5, 0.95):
        with pytest.raises(Killed):
            evaluated(rows, LABELS, journal_of(tmp_path), after=after, engine=engine)
    report, seen = evaluated(rows, LABELS, journal_of(tmp_path), engine=engine)
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


def test_a_state_of_other_chunks_is_counted_again(tmp_path):
    """With another budget rows travel in other chunks, so that a step which was done is another one."""
    rows = VECTORS.numpy().astype(np.float16)
    known, _ = evaluated(rows, LABELS, memory_mb=0.05)
    for memory_mb in (0.05, 0.03):
        with pytest.raises(Killed):
            evaluated(rows, LABELS, journal_of(tmp_path), after=0.7, memory_mb=memory_mb)
    report, _ = evaluated(rows, LABELS, journal_of(tmp_path), memory_mb=0.02)
    assert all(report[key] == known[key] for key in METRICS[:-1])


@pytest.mark.parametrize("stored", [False, True])
def test_processes_go_on_from_a_moment_that_all_have(tmp_path, monkeypatch, stored):
    monkeypatch.setattr("fewshot_callbacks.files.journal.INTERVAL", 0)  # between steps alone, which are few
    known, _ = evaluated(VECTORS.half() if stored else VECTORS, LABELS)

    def work(process, after=None):
        places = torch.arange(600)[process.rank :: 3]
        rows = VECTORS[places].half() if stored else VECTORS[places]
        options = {"share": Share(process, places, places)} | (PIECES if stored else {})
        return evaluated(rows, LABELS[places], journal_of(tmp_path, process), after=after, **options)[0]

    for after in (0.3, 0.7):
        assert Killed in [*map(type, in_threads(3, lambda process, after=after: work(process, after=after)))]
    newest = max((tmp_path / "state").glob("*-1.*.npz"), key=os.path.getmtime)
    newest.write_bytes(newest.read_bytes()[:100])  # this one was killed while it wrote
    for report in in_threads(3, work):
        assert_same(known, report)


def test_another_evaluation_is_refused(tmp_path):
    journal_of(tmp_path)
    with refused(ValueError, "files", "some", "two"):
        Journal(tmp_path / "state", {"files": "two"}, ALONE)
    with refused(ValueError, "files", "some", "settings", None, 1):
        Journal(tmp_path / "state", {"settings": 1}, ALONE)


FOREIGN = (
    "cat.png",
    "0.json",
    "0.npz",
    "0.csv",
    "0.npy",
    "0.1.npz",
    "state-0.json",
    "state-0.1.npz",
    "1",
    "notes.json",
)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_holds_anything_else_is_refused_and_left_as_it_is(tmp_path, name, begun):
    if begun:
        journal_of(tmp_path)
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / name).write_bytes(b"of the user")
    before = contents(tmp_path / "state")
    with refused(ValueError, tmp_path / "state", name, "state of an evaluation", "folder"):
        journal_of(tmp_path)
    assert contents(tmp_path / "state") == before


def contents(folder):
    return {file.name: file.read_bytes() if file.is_file() else None for file in folder.iterdir()}


def test_the_name_of_a_state_with_the_content_of_another_file_is_refused(tmp_path):
    for after in (0.0, 0.5):
        with pytest.raises(Killed):
            evaluated(VECTORS, LABELS, journal_of(tmp_path), after=after)
    for file in sorted((tmp_path / "state").iterdir()):
        written = file.read_bytes()
        for content in (b"of the user", np.arange(99).tobytes()):
            file.write_bytes(content)
            with refused(ValueError, tmp_path / "state", file.name, "damaged", "folder"):
                journal_of(tmp_path)
            assert file.read_bytes() == content
        file.write_bytes(written)
    journal_of(tmp_path)  # as it was


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "state").write_text("of the user")
    with refused(ValueError, tmp_path / "state", "file", "folder"):
        journal_of(tmp_path)
    assert (tmp_path / "state").read_text() == "of the user"


def test_a_file_that_came_while_it_ran_is_left(tmp_path):
    journal = journal_of(tmp_path)
    for name in FOREIGN:
        (tmp_path / "state" / name).write_bytes(b"of the user")
    evaluated(VECTORS, LABELS, journal)
    assert contents(tmp_path / "state") == dict.fromkeys(FOREIGN, b"of the user")


def test_a_folder_that_was_there_stays_and_one_that_was_made_goes(tmp_path):
    (tmp_path / "state").mkdir()
    evaluated(VECTORS, LABELS, journal_of(tmp_path))
    assert contents(tmp_path / "state") == {}
    (tmp_path / "state").rmdir()
    evaluated(VECTORS, LABELS, journal_of(tmp_path))
    assert not (tmp_path / "state").exists()


def test_a_state_that_another_process_renames_meanwhile_is_not_damaged(tmp_path, monkeypatch):
    journal_of(tmp_path)
    folder = tmp_path / "state"
    listed = [*folder.iterdir(), folder / "fewshot_callbacks_state-1.json.0a1b2c3d.new"]
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(listed))
    assert journal_of(tmp_path).folder == folder


def test_two_processes_that_end_at_one_moment_remove_the_folder(tmp_path, monkeypatch):
    """The second one ends while the first one deletes its states, and each sees those of the other at first."""
    first, second = in_threads(2, lambda processes: journal_of(tmp_path, processes))
    unlink = Path.unlink

    def unlink_later(path, **options):
        monkeypatch.setattr(Path, "unlink", unlink)
        second.remove()
        path.unlink(**options)

    monkeypatch.setattr(Path, "unlink", unlink_later)
    first.remove()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b"null", b'"words"', b"{}", bytes(range(256)), "half", "no plain"]
)
def test_a_description_that_was_damaged_is_refused_with_the_folder(tmp_path, content):
    journal_of(tmp_path)
    (file,) = (tmp_path / "state").glob("*.json")
    written = file.read_bytes()
    damaged = {"half": written[: len(written) // 2], "no plain": written.replace(b"some", b"\xff\xfe")}
    file.write_bytes(damaged.get(content, content))
    with refused(ValueError, tmp_path / "state", file.name, "damaged", "folder"):
        journal_of(tmp_path)


def test_a_folder_that_was_deleted_while_it_ran_costs_no_result(tmp_path):
    known, _ = evaluated(VECTORS, LABELS)
    journal = journal_of(tmp_path)
    shutil.rmtree(tmp_path / "state")
    with warned(UserWarning, "state", "No such file or directory"):
        report, _ = evaluated(VECTORS, LABELS, journal)
    assert_same(known, report)


@pytest.mark.parametrize("damage", ["cut", "emptied", "one bit"])
def test_a_damaged_state_is_counted_again(tmp_path, damage):
    known, _ = evaluated(VECTORS, LABELS)
    with pytest.raises(Killed):
        evaluated(VECTORS, LABELS, journal_of(tmp_path), after=0.8)
    for file in (tmp_path / "state").glob("*.npz"):
        content = bytearray(file.read_bytes())
        if damage == "one bit":
            content[len(content) // 2] ^= 1
        file.write_bytes(content[: {"cut": len(content) - 9, "emptied": 0}.get(damage)])
    report, _ = evaluated(VECTORS, LABELS, journal_of(tmp_path))
    assert_same(known, report)
    assert not (tmp_path / "state").exists()


def test_states_without_their_description_are_not_taken_for_those_of_another_evaluation(tmp_path):
    known, _ = evaluated(VECTORS, LABELS.flip(0))
    with pytest.raises(Killed):
        evaluated(VECTORS, LABELS, journal_of(tmp_path), after=0.8)
    for file in (tmp_path / "state").glob("*.json"):
        file.unlink()
    report, _ = evaluated(VECTORS, LABELS.flip(0), Journal(tmp_path / "state", {"files": "others"}, ALONE))
    assert_same(known, report)


def test_a_full_disk_does_not_end_the_evaluation(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    known, _ = evaluated(VECTORS, LABELS)
    monkeypatch.setattr(np, "savez", full)
    with warned(UserWarning, "state", "No space left on device"):
        report, _ = evaluated(VECTORS, LABELS, journal_of(tmp_path))
    assert_same(known, report)
