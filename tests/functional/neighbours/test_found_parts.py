"""Several processes write the same file as one process, byte for byte, with any budget."""

import os

import numpy as np
import pytest
import torch

from fewshot_callbacks import Share
from fewshot_callbacks.functional.found_parts import write_nearest
from fewshot_callbacks.functional.neighbour_files import UserIds, write_neighbours
from fewshot_callbacks.functional.neighbours import nearest
from tests.messages import refused
from tests.thread_processes import in_threads

pytest.importorskip("pyarrow")

ROWS = np.random.default_rng(0).integers(-2, 3, (150, 4)).astype(np.float32)
GROUPS = np.arange(150) % 4
IDS = UserIds(np.arange(150) + 7, np.arange(150) + 7)
OPTIONS = {"k": 6, "similarity": "cosine", "ids": IDS, "about": {"k": 6}}


def write(folder, borders, memory, group, **options):
    """Write by as many processes as there are spans between borders."""

    def work(process):
        rows = slice(borders[process.rank], borders[process.rank + 1])
        path = folder / f"{len(borders)}-{memory}.parquet"
        columns = {"query_groups": group[rows]}
        return write_nearest(
            path, ROWS[rows], None, columns, memory=memory, share=Share(process), **(OPTIONS | options)
        )

    return in_threads(len(borders) - 1, work)


def test_processes_and_budgets_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("fewshot_callbacks.engine.nearest.LEAST_QUERIES", 5)
    monkeypatch.setattr("fewshot_callbacks.functional.neighbour_files.GROUP_NEIGHBOURS", 100)
    found = nearest(ROWS, query_groups=GROUPS, k=6)
    write_neighbours(tmp_path / "known.parquet", found, query_ids=IDS.queries, gallery_ids=IDS.gallery, about={"k": 6})
    for borders in ((0, 150), (0, 60, 150), (0, 149, 149, 150)):
        for memory in (5e8, 2e4):
            for summary in write(tmp_path, borders, memory, GROUPS):
                assert (summary.queries, summary.gallery, summary.queries_with_fewer) == (150, 150, 0)
                assert summary.queries_with_ties == int((found.unlisted_ties > 0).sum())
    contents = {file.read_bytes() for file in tmp_path.iterdir()}
    assert len(os.listdir(tmp_path)) == 7
    assert len(contents) == 1


def test_a_search_without_candidates_writes_nothing(tmp_path):
    for error in write(tmp_path, (0, 60, 150), 5e8, np.zeros(150, int)):
        with refused(ValueError, "nearest", "candidate", "groups"):
            raise error
    assert not os.listdir(tmp_path)


def test_chosen_queries_keep_their_rows(tmp_path):
    chosen = torch.tensor([3, 70, 149])
    [summary] = write(tmp_path, (0, 150), 5e8, GROUPS, choose=lambda _: chosen)
    assert summary.queries == 3
    found = nearest(ROWS, query_groups=GROUPS, k=6, query_indices=chosen)
    write_neighbours(tmp_path / "known.parquet", found, query_ids=IDS.queries, gallery_ids=IDS.gallery, about={"k": 6})
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
