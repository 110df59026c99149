"""Neighbours in files: what is read is what was written, and other libraries read the same."""

import dataclasses
import json
import os
import struct

import numpy as np
import pytest
import torch

from fewshot_callbacks import nearest
from fewshot_callbacks.functional import read_neighbours, write_neighbours
from tests.messages import refused

parquet = pytest.importorskip("pyarrow.parquet")

ROWS = torch.from_numpy(np.random.default_rng(0).integers(-2, 3, (40, 3)).astype(np.float32))
LABELS = np.arange(40) % 5
# Groups of two thirds, so that some queries have fewer candidates than k.
GROUPS = np.arange(40) % 3 // 2


def found_of(k=20, **arguments):
    return nearest(ROWS, LABELS, query_groups=GROUPS, k=k, **arguments)


def assert_equal(found, other):
    for field in dataclasses.fields(found):
        mine, its = getattr(found, field.name), getattr(other, field.name)
        assert (mine is None) == (its is None)
        if mine is not None:
            assert mine.dtype == its.dtype
            assert torch.equal(mine.nan_to_num(nan=9e9), its.nan_to_num(nan=9e9))


@pytest.mark.parametrize("group", [2**18, 25, 7])
def test_what_was_written_is_read(tmp_path, monkeypatch, group):
    monkeypatch.setattr("fewshot_callbacks.functional.neighbour_files.GROUP_NEIGHBOURS", group)
    for found in (found_of(), found_of(k=1), found_of(query_indices=[7, 3]), nearest(ROWS, k=2)):
        write_neighbours(tmp_path / "a.parquet", found)
        assert_equal(found, read_neighbours(tmp_path / "a.parquet"))
    assert os.listdir(tmp_path) == ["a.parquet"]


@pytest.mark.parametrize("kind", [str, int])
def test_ids_are_written_next_to_rows(tmp_path, kind):
    ids = [kind(100 + 3 * item) for item in range(40)]
    found = found_of(query_indices=[5, 39])
    write_neighbours(tmp_path / "a.parquet", found, query_ids=ids, gallery_ids=ids, about={"similarity": "cosine"})
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table["query"].to_pylist() == [5, 39]
    assert table["query_id"].to_pylist() == [ids[5], ids[39]]
    assert table["indices"].to_pylist() == found.indices.tolist()
    assert table["ids"].to_pylist() == [[None if i < 0 else ids[i] for i in row] for row in found.indices.tolist()]
    assert None in table["ids"].to_pylist()[1]
    assert json.loads(table.schema.metadata[b"fewshot_callbacks"]) == {"similarity": "cosine"}


def test_vecs_are_read_as_other_libraries_read_them(tmp_path):
    found = found_of()
    write_neighbours(tmp_path / "a.ivecs", found)
    write_neighbours(tmp_path / "a.fvecs", found)
    for name, letter, values in (("a.ivecs", "i", found.indices), ("a.fvecs", "f", found.scores.float())):
        content = (tmp_path / name).read_bytes()
        expected = [struct.pack(f"<i20{letter}", 20, *row) for row in values.tolist()]
        assert content == b"".join(expected)


def test_a_file_that_cannot_be_finished_leaves_the_older_one(tmp_path):
    found = found_of()
    write_neighbours(tmp_path / "a.ivecs", found)
    too_large = dataclasses.replace(found, indices=found.indices + 2**31)
    with refused(ValueError, ".ivecs", ".parquet"):
        write_neighbours(tmp_path / "a.ivecs", too_large)
    assert len((tmp_path / "a.ivecs").read_bytes()) == 40 * 84
    assert os.listdir(tmp_path) == ["a.ivecs"]


def test_other_files_are_refused(tmp_path):
    with refused(ValueError, "a.csv", ".parquet", ".ivecs", "truth.parquet"):
        write_neighbours(tmp_path / "a.csv", found_of())
    with refused(ValueError, "read_neighbours", "none.parquet", "fewshot nearest"):
        read_neighbours(tmp_path / "none.parquet")
    write_neighbours(tmp_path / "a.ivecs", found_of())
    with refused(ValueError, "a.ivecs", ".parquet"):
        read_neighbours(tmp_path / "a.ivecs")
    (tmp_path / "b.parquet").write_bytes(b"no")
    with refused(ValueError, "b.parquet", "damaged"):
        read_neighbours(tmp_path / "b.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"embeddings": [1]}), tmp_path / "c.parquet")
    with refused(ValueError, "c.parquet", "'query'"):
        read_neighbours(tmp_path / "c.parquet")
