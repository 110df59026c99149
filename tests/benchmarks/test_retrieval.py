"""The benchmark runs, and its own method of sorting agrees with ours."""

import json
import sys

import pytest
import torch

from tests.messages import missing_facts
from tests.scripts import imported_script


@pytest.fixture(scope="module")
def retrieval():
    with imported_script("benchmarks/retrieval.py") as module:
        yield module


def measured(retrieval, tmp_path, *rows, place=("--in-process",)):
    arguments = ["--items", "300", "--dim", "16", "--repeats", "1", "--threads", "1", *place, "--rows", *rows]
    assert retrieval.main([*arguments, "--difficulty", "middling", "--json", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text())["results"]


def test_a_table_of_the_floor_ours_and_other_ways(retrieval, tmp_path, capsys):
    names = ["floor", "ours-auto", "argsort", "topk", "floor-tf32"]
    results = measured(retrieval, tmp_path, *names)
    floor, ours, by_hand, nearest, of_gpus = results
    assert [row["row"] for row in results] == names
    assert all(row["ratio"] > 0 and row["seconds"] > 0 for row in results[:4])
    assert floor["values"] == {}
    assert ours["values"]["mAP"] == pytest.approx(by_hand["values"]["mAP"], abs=1e-6)
    assert ours["values"]["mAP"] == pytest.approx(0.6, abs=0.05)
    assert ours["values"]["MAP@R"] == pytest.approx(nearest["values"]["MAP@R"], abs=1e-6)
    assert missing_facts(of_gpus["note"], ("skipped", "GPU")) == []
    assert "**" not in capsys.readouterr().out  # no value is marked, since all are near ours


def test_the_table_of_all_sets_has_a_line_for_each_size_and_row(retrieval, tmp_path, capsys):
    file = tmp_path / "out.json"
    words = "--items 200 300 --dim 16 --repeats 1 --threads 1 --in-process --rows ours-auto floor-tf32"
    assert retrieval.main([*words.split(), "--difficulty", "middling", "hard", "--json", str(file)]) == 0
    kept = json.loads(file.read_text())
    titles = [title for title, _ in kept["columns"]]
    assert titles[:5] == ["items", "dim", "what", "middling, x product", "hard, x product"]
    ours, of_gpus = "evaluate_retrieval, default metrics", "TF32 product of all pairs"
    assert [row[:3] for row in kept["rows"]] == [[n, 16, what] for n in (200, 300) for what in (ours, of_gpus)]
    ratios = {(result["items"], result["difficulty"]): result.get("ratio") for result in kept["results"][::2]}
    assert kept["rows"][2][3:5] == [ratios[300, "middling"], ratios[300, "hard"]]
    assert kept["rows"][3][3:] == [kept["results"][1]["note"]] * 2 + [None, None]
    from _results import Column, markdown

    table = markdown([Column(*column) for column in kept["columns"]], kept["rows"])
    assert capsys.readouterr().out.endswith(f"{table}\n")


def test_a_missing_package_or_device_is_named(retrieval, tmp_path, monkeypatch, capsys):
    for name in {"oml", *(name for name in sys.modules if name.partition(".")[0] == "oml")}:
        monkeypatch.setitem(sys.modules, name, None)
    (row,) = measured(retrieval, tmp_path, "oml")
    assert missing_facts(row["note"], ("open-metric-learning",)) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        retrieval.main(["--device", "cuda"])
    assert missing_facts(capsys.readouterr().err.partition("error: ")[2], ("--device cuda", "CUDA")) == []


def test_each_row_has_a_process_that_ends_after_the_timeout(retrieval, capsys, tmp_path):
    (row,) = measured(retrieval, tmp_path, "argsort", place=())
    assert row["ratio"] == pytest.approx(row["seconds"] / row["floors"][0])
    assert 0 < row["values"]["mAP"] < 1
    (row,) = measured(retrieval, tmp_path, "argsort", place=("--timeout", "0.01"))
    assert missing_facts(row["note"], ("0.01 s",)) == []
    assert row["note"] in capsys.readouterr().out
