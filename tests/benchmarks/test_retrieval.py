"""The benchmark runs, and its own method of sorting agrees with ours."""

import json
import sys

import pytest
import torch

from tests.scripts import loaded


@pytest.fixture(scope="module")
def retrieval():
    with loaded("benchmarks/retrieval.py") as module:
        yield module


def small(retrieval, tmp_path, *more):
    arguments = ["--items", "300", "--dim", "16", "--repeats", "1", "--threads", "1", "--in-process"]
    assert retrieval.main([*arguments, *more, "--json", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text())["results"]


def test_a_table_of_the_floor_ours_and_sorting(retrieval, tmp_path, capsys):
    results = small(retrieval, tmp_path, "--rows", "floor", "ours-auto", "argsort", "--difficulty", "middling")
    floor, ours, by_hand = results
    assert [row["row"] for row in results] == ["floor", "ours-auto", "argsort"]
    assert all(row["ratio"] > 0 and row["seconds"] > 0 for row in results)
    assert floor["values"] == {}
    assert ours["values"]["mAP"] == pytest.approx(by_hand["values"]["mAP"], abs=1e-6)
    assert ours["values"]["mAP"] == pytest.approx(0.6, abs=0.05)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + 3
    assert "from ours" not in "".join(lines)


def test_a_value_that_is_not_ours_is_marked(retrieval, tmp_path, capsys):
    ours, by_hand = small(retrieval, tmp_path, "--rows", "ours-auto", "argsort", "--difficulty", "collapsed")
    assert abs(ours["values"]["mAP"] - by_hand["values"]["mAP"]) > 1e-6  # sorting puts equal items in some order
    assert capsys.readouterr().out.count("from ours**") == 1


def test_a_row_that_cannot_run_says_why(retrieval, tmp_path, monkeypatch, capsys):
    missing = ("faiss", "oml", "pytorch_metric_learning")
    loaded = [name for name in sys.modules if name.partition(".")[0] in missing]  # by another test
    for name in {*missing, *loaded}:
        monkeypatch.setitem(sys.modules, name, None)
    rows = small(retrieval, tmp_path, "--rows", "oml", "pml", "--difficulty", "random")
    assert [row["note"] for row in rows] == [
        "not installed: open-metric-learning", "not installed: pytorch-metric-learning"
    ]  # fmt: skip
    assert capsys.readouterr().out.count("not installed") == 2
    options = retrieval.parse(["--rows", "torchmetrics"])
    assert "--all" in retrieval.skipped(retrieval.ROWS["torchmetrics"], 10**6, options)


def test_the_nearest_by_hand_give_the_same_map_at_r(retrieval, tmp_path):
    ours, by_hand = small(retrieval, tmp_path, "--rows", "ours-auto", "topk", "--difficulty", "middling")
    assert ours["values"]["MAP@R"] == pytest.approx(by_hand["values"]["MAP@R"], abs=1e-6)


def test_what_needs_a_gpu_says_so(retrieval, tmp_path, monkeypatch, capsys):
    (row,) = small(retrieval, tmp_path, "--rows", "floor-tf32", "--difficulty", "middling")
    assert row["note"] == "skipped: runs on a GPU alone"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        retrieval.main(["--device", "cuda"])
    assert "torch sees no CUDA device here, so nothing can be measured on one." in capsys.readouterr().err


def test_a_process_for_each_row(retrieval, capsys, tmp_path):
    arguments = ["--items", "300", "--dim", "16", "--difficulty", "hard", "--threads", "1", "--repeats", "1"]
    out = tmp_path / "out.json"
    assert retrieval.main([*arguments, "--rows", "argsort", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["results"]
    assert row["ratio"] == pytest.approx(row["seconds"] / row["floors"][0])
    assert 0 < row["values"]["mAP"] < 1
    if sys.platform == "linux":
        assert 0 <= row["peak_mb"] < 100
    assert retrieval.main([*arguments, "--rows", "argsort", "--timeout", "0.01"]) == 0
    assert "over 0.01 s" in capsys.readouterr().out


def test_the_floor_covers_each_pair_once(retrieval):
    embeddings = torch.eye(7)
    floor = retrieval.Floor(embeddings, retrieval.Tile(3, 4))
    seen = torch.zeros(7, 7)
    for rows, columns in floor.tiles:
        seen[rows, columns] += 1
    assert floor.share == 1
    assert (seen == 1).all()
    assert retrieval.Floor(embeddings, retrieval.Tile(3, 4), pairs_at_most=12).share < 1
