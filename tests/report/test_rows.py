"""`write_rows`: a Parquet file with a row for each query, read by pyarrow and by pandas."""

import math

import numpy as np
import pyarrow.parquet
import torch

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.functional import nearest, suspects
from fewshot_callbacks.report import write_rows
from tests.integration_packages import integration
from tests.messages import refused

LABELS = ["owl"] * 20 + ["heron"] * 20
ROWS = torch.eye(2).repeat_interleave(20, dim=0) + 0.1 * torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
GIVEN = ["heron" if position == 3 else label for position, label in enumerate(LABELS)]
PATHS = [f"{position}.png" for position in range(40)]


def written(tmp_path, report, **columns):
    write_rows(tmp_path / "rows.parquet", report, **columns)
    return pyarrow.parquet.read_table(tmp_path / "rows.parquet")


def test_each_query_is_a_row_with_all_that_was_given(tmp_path):
    report = evaluate_retrieval(ROWS, GIVEN)
    neighbours = nearest(ROWS, k=3)
    coordinates = np.arange(80.0).reshape(40, 2)
    found = suspects(ROWS, GIVEN, k=5)
    table = written(tmp_path, report, suspects=found, neighbours=neighbours, coordinates=coordinates, paths=PATHS)
    columns = table.to_pydict()
    assert columns["position"] == list(range(40))
    assert columns["label"] == GIVEN
    assert columns["average_precision"] == report.per_query["mAP"].tolist()
    assert [position for position in range(40) if columns["is_suspect"][position]] == sorted(found.index.tolist())
    assert columns["suggested_label"][3] == "owl"
    assert columns["suggested_label"][4] is None
    assert columns["scores"] == neighbours.scores.double().tolist()
    assert [pair["ids"] for pair in columns["neighbors"]] == neighbours.indices.tolist()
    assert columns["neighbors"][7]["distances"] == [1 - score for score in columns["scores"][7]]
    assert columns["x"] == coordinates[:, 0].tolist()
    assert columns["y"] == coordinates[:, 1].tolist()
    assert columns["path"] == PATHS


def test_drawn_and_counted_queries_keep_their_positions(tmp_path):
    ids = torch.arange(40) // 2
    report = evaluate_retrieval(ROWS, LABELS, query_ids=ids, max_queries=8)
    columns = written(tmp_path, report, paths=PATHS, neighbours=nearest(ROWS[:4], gallery=ROWS, k=2)).to_pydict()
    assert columns["position"] == report.counted[report.drawn].tolist()
    assert columns["label"] == [LABELS[position] for position in columns["position"]]
    assert columns["path"] == [PATHS[position] for position in columns["position"]]
    for position, pair in zip(columns["position"], columns["neighbors"], strict=True):
        assert (pair is None) == (position >= 4)


def test_without_a_match_and_without_classes_values_are_missing(tmp_path):
    report = evaluate_retrieval(ROWS[:5], [7, 7, 8, 8, 9])
    columns = written(tmp_path, report).to_pydict()
    assert columns["label"] == [7, 7, 8, 8, 9]
    assert columns["average_precision"][4] is None
    assert not any(value is None or math.isnan(value) for value in columns["average_precision"][:4])
    report = evaluate_retrieval(ROWS[:4], torch.tensor([[1, 0], [1, 1], [0, 1], [0, 1]]), similarity="euclidean")
    neighbours = nearest(ROWS[:4], k=9, similarity="euclidean")
    columns = written(tmp_path, report, neighbours=neighbours).to_pydict()
    assert columns["label"] == [None] * 4
    assert columns["neighbors"][0]["distances"] == [-score for score in columns["scores"][0]]
    assert len(columns["scores"][0]) == 3


def test_paths_and_coordinates_that_are_not_one_for_each_query_are_refused(tmp_path):
    report = evaluate_retrieval(ROWS, LABELS)
    with refused(ValueError, "write_rows", "39 paths", "40 queries"):
        write_rows(tmp_path / "rows.parquet", report, paths=PATHS[:39])
    with refused(ValueError, "write_rows", "coordinates", "(40, 3)", "(queries, 2)"):
        write_rows(tmp_path / "rows.parquet", report, coordinates=np.zeros((40, 3)))
    assert not (tmp_path / "rows.parquet").exists()


def test_pandas_reads_the_file(tmp_path):
    pandas = integration("pandas")
    written(tmp_path, evaluate_retrieval(ROWS, LABELS), paths=PATHS)
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert list(frame.columns) == ["position", "label", "average_precision", "path"]
    assert frame["label"].tolist() == LABELS
