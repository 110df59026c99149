"""`fewshot nearest`: the file against sorting all exact scores, drawn queries, processes, kills, and refusals."""

import os
import subprocess
import sys

import numpy as np
import pytest

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.engine.nearest import nearest_items
from fewshot_callbacks.functional import read_neighbours
from tests.cli.slurm_steps import SLURM
from tests.messages import missing_facts

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

# Whole numbers, whose dot products are exact, and many of which are equal.
ROWS = np.random.default_rng(0).integers(-3, 4, (260, 4)).astype(np.float16)
IDS = np.array([f"item-{number}" for number in range(260)])


@pytest.fixture
def files(tmp_path):
    """The rows with ids in three files."""
    for part in range(3):
        rows = slice(100 * part, min(260, 100 * (part + 1)))
        np.savez(tmp_path / f"part{part}.npz", embeddings=ROWS[rows], ids=IDS[rows])
    return f"{tmp_path}/part*.npz"


def written(capsys, *words):
    assert main(["nearest", *map(str, words), "--similarity", "dot"]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main(["nearest", *map(str, words)]) == 1
    return capsys.readouterr().err


def sorted_scores(queries, gallery, k, *, one_set):
    """By the definition: rows of the nearest items, their scores, and how many further items tie with the last."""
    found = []
    for row, query in enumerate(queries.astype(int)):
        scores = gallery.astype(int) @ query
        candidates = [item for item in range(len(gallery)) if not (one_set and item == row)]
        order = sorted(candidates, key=lambda item: (-scores[item], item))
        last = scores[order[k - 1]]
        found.append((order[:k], scores[order[:k]].tolist(), sum(scores[item] == last for item in order[k:])))
    return [list(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("memory_mb", [512, 0.05])
def test_the_file_has_rows_ids_scores_and_ties(files, tmp_path, capsys, memory_mb):
    said = written(capsys, files, "-k", 7, "-o", tmp_path / "truth.parquet", "--memory_mb", memory_mb)
    indices, scores, unlisted = sorted_scores(ROWS, ROWS, 7, one_set=True)
    table = parquet.read_table(tmp_path / "truth.parquet")
    assert table["query"].to_pylist() == [*range(260)]
    assert table["query_id"].to_pylist() == IDS.tolist()
    assert table["indices"].to_pylist() == indices
    assert table["ids"].to_pylist() == IDS[np.array(indices)].tolist()
    assert table["scores"].to_pylist() == scores
    assert table["unlisted_ties"].to_pylist() == unlisted
    assert missing_facts(said, ("260 queries", "7 nearest neighbours", sum(number > 0 for number in unlisted))) == []
    found = read_neighbours(tmp_path / "truth.parquet")
    ties = [[row.count(score) > 1 for score in row] for row in scores]
    ties = [[is_tied or (more > 0 and score == row[-1]) for is_tied, score in zip(tied, row, strict=True)]
            for tied, row, more in zip(ties, scores, unlisted, strict=True)]  # fmt: skip
    assert found.tied.tolist() == ties


def test_queries_are_searched_in_files_of_a_gallery(files, tmp_path, capsys):
    queries = np.random.default_rng(1).integers(-3, 4, (30, 4)).astype(np.float32)
    np.save(tmp_path / "queries.npy", queries)
    words = [tmp_path / "queries.npy", "--gallery", files, "-k", 5]
    written(capsys, *words, "-o", tmp_path / "truth.parquet")
    written(capsys, *words, "-o", tmp_path / "truth.ivecs")
    indices, _, _ = sorted_scores(queries, ROWS, 5, one_set=False)
    table = parquet.read_table(tmp_path / "truth.parquet")
    assert table["indices"].to_pylist() == indices
    assert table["ids"].to_pylist() == IDS[np.array(indices)].tolist()
    assert "query_id" not in table.column_names
    vectors = np.fromfile(tmp_path / "truth.ivecs", "<i4").reshape(30, 6)
    assert vectors.tolist() == [[5, *row] for row in indices]


def test_drawn_queries_are_rows_of_all(files, tmp_path, capsys):
    written(capsys, files, "-o", tmp_path / "all.parquet")
    every = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    drawn = []
    for seed in (0, 0, 1):
        written(capsys, files, "--queries", 20, "--seed", seed, "-o", tmp_path / "some.parquet")
        drawn.append(parquet.read_table(tmp_path / "some.parquet").to_pylist())
        rows = [entry["query"] for entry in drawn[-1]]
        assert len(set(rows)) == 20
        assert drawn[-1] == [every[row] for row in sorted(rows)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_search_that_was_interrupted_goes_on_and_leaves_no_half_of_a_file(files, tmp_path, capsys, monkeypatch):
    words = [files, "-k", 7, "--memory_mb", 0.05]
    written(capsys, *words, "-o", tmp_path / "whole.parquet")
    words = ["nearest", *map(str, words), "--similarity", "dot"]
    words += ["-o", str(tmp_path / "truth.parquet"), "--resume", str(tmp_path / "state")]
    before = {*os.listdir(tmp_path)}
    searches = []
    stop = 3

    def counted(*arguments, **keywords):
        searches.append(arguments)
        if len(searches) == stop:
            raise KeyboardInterrupt
        return nearest_items(*arguments, **keywords)

    monkeypatch.setattr("fewshot_callbacks.functional.neighbours.nearest_items", counted)
    assert main(words) == 130
    assert {*os.listdir(tmp_path)} == before | {"state"}
    stop = None
    assert main(words) == 0
    assert missing_facts(capsys.readouterr().err, (tmp_path / "state",)) == []
    assert (tmp_path / "truth.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert {*os.listdir(tmp_path)} == before | {"truth.parquet"}
    batches = len(searches) - 1
    searches.clear()
    written(capsys, *words[1:-6], "-o", tmp_path / "again.parquet")
    assert len(searches) == batches  # none was searched twice


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="torch is imported once, and then forked")
def test_processes_of_which_one_is_killed_write_the_file_of_one_process(files, tmp_path, capsys):
    words = [files, "-k", "7", "--memory_mb", "0.05", "--similarity", "dot"]
    written(capsys, *words[:-2], "-o", tmp_path / "whole.parquet")
    command = [sys.executable, "-c", SLURM, "nearest", *words, "-o", "truth.parquet", "--resume", "state"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == ["1 -9", "1", "0 0"], done.stderr
    assert (tmp_path / "truth.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not (tmp_path / "state").exists()


def test_mistakes_take_a_line(files, tmp_path, capsys):
    part = tmp_path / "part0.npz"
    output = tmp_path / "truth.parquet"
    assert missing_facts(refused(capsys, files), ("-o", "truth.parquet")) == []
    assert missing_facts(refused(capsys, files, "-o", "truth.csv"), ("truth.csv", ".parquet", ".ivecs")) == []
    assert missing_facts(refused(capsys, files, "-o", output, "-k", 0), ("--k", 0)) == []
    assert missing_facts(refused(capsys, files, "-o", output, "--queries", 0), ("--queries", 0)) == []
    np.savez(tmp_path / "two.npz", queries=ROWS, gallery=ROWS)
    said = refused(capsys, tmp_path / "two.npz", "--gallery", part, "-o", output)
    assert missing_facts(said, ("two.npz", "--gallery")) == []
    table = arrow.table({"embeddings": ROWS.astype(np.float32).tolist()})
    parquet.write_table(table, tmp_path / "rows.parquet")
    said = refused(capsys, tmp_path / "rows.parquet", "-o", tmp_path / "rows.parquet")
    assert missing_facts(said, ("rows.parquet", "replace")) == []
    assert not output.exists()
