"""A search for neighbours or near duplicates that was killed finds the same, and repeats little."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fewshot_callbacks import Shards, Share, near_duplicates, nearest
from fewshot_callbacks.distributed.processes import ALONE
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.files.journal import Journal, journaling, recorded_result
from tests.thread_processes import in_threads

# Whole numbers, of which many are equal and have equal scores.
ROWS = torch.from_numpy(np.random.default_rng(0).integers(-2, 3, (400, 5)).astype(np.float32))


class Killed(BaseException):
    """What no code of ours expects."""


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Write at one in some moments at which that can be done: each look at the clock is a second later."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    for name, value in (("time", clock), ("INTERVAL", 5), ("COST_FACTOR", 0)):
        monkeypatch.setattr(f"fewshot_callbacks.files.journal.{name}", value)


def searched(name, rows, folder=None, *, after=None, processes=ALONE, **arguments):
    """The arrays that a search finds, and the numbers of pairs that it reported."""
    seen = []

    def progress(done, total):
        seen.append(done / total)
        if after is not None and done > after * total:
            raise Killed

    journal = None if folder is None else Journal(folder / "state", {"search": name}, processes)
    with journaling(journal), engine_options(height=32, width=40, threads=2):
        if name == "nearest":
            found = nearest(rows, k=12, progress=progress, **arguments)
            arrays = found.indices, found.scores, found.unlisted_ties
        else:
            found = near_duplicates(rows, min_score=0.7, most=500, progress=progress, **arguments)
            arrays = found.first, found.second, found.scores, torch.tensor(found.total)
    return [array.numpy().tobytes() for array in arrays], seen


@pytest.mark.parametrize("name", ["nearest", "near_duplicates"])
@pytest.mark.parametrize("form", ["one set", "batches", "files"])
def test_a_search_that_was_killed_goes_on_to_the_same(tmp_path, monkeypatch, name, form):
    rows = ROWS
    arguments = {} if form == "one set" else {"memory_mb": 0.1}
    if form == "files":
        np.savez(tmp_path / "rows.npz", embeddings=ROWS.numpy().astype(np.float16))
        rows = Shards(tmp_path / "rows.npz")
    known, _ = searched(name, rows)
    for after in (0.0, 0.5, 0.9):
        with pytest.raises(Killed):
            searched(name, rows, tmp_path, after=after, **arguments)
    found, seen = searched(name, rows, tmp_path, **arguments)
    assert found == known
    assert seen[0] > 0.4
    assert not (tmp_path / "state").exists()


def test_a_search_that_was_killed_after_its_last_tile_reports_that_all_is_done(tmp_path, monkeypatch):
    known, _ = searched("near_duplicates", ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda journal: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            searched("near_duplicates", ROWS, tmp_path)
    assert searched("near_duplicates", ROWS, tmp_path) == (known, [1.0])


@pytest.mark.parametrize("name", ["nearest", "near_duplicates"])
def test_processes_go_on_from_a_moment_that_all_have(tmp_path, monkeypatch, name):
    monkeypatch.setattr("fewshot_callbacks.files.journal.INTERVAL", 0)
    known, _ = searched(name, ROWS)

    def work(process, after=None):
        rows = ROWS[:250] if process.rank == 0 else ROWS[250:]
        share = Share(process)
        return searched(name, rows, tmp_path, after=after, processes=process, share=share, memory_mb=0.1)[0]

    for after in (0.3, 0.7):
        assert Killed in [*map(type, in_threads(2, lambda process, after=after: work(process, after=after)))]
    assert in_threads(2, work) == [known, known]


def test_a_result_is_computed_once_and_later_entries_keep_their_numbers(tmp_path):
    computed = []

    def run(*, stop=False):
        with journaling(Journal(tmp_path / "state", {}, ALONE)):
            results = []
            for number in range(3):

                def compute(number=number):
                    computed.append(number)
                    nearest(ROWS[:50], k=number + 1)
                    return [np.arange(number), np.array(["word"])]

                results.append([array.tolist() for array in recorded_result(compute)])
                if stop and number == 1:
                    raise Killed
        return results

    with pytest.raises(Killed):
        run(stop=True)
    assert run() == [[[*range(number)], ["word"]] for number in range(3)]
    assert computed == [0, 1, 2]
    assert not (tmp_path / "state").exists()
