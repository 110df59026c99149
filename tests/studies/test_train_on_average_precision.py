"""The study of losses: a tiny run of it, which is not trained again, and the tables that it writes into a page."""

import json
import runpy

import pytest

from tests.scripts import ROOT

pytest.importorskip("pytorch_metric_learning")

TINY = ["--images", "256", "--data", "glyphs", "--methods", "triplet", "ap-batch-1024", "--seeds", "0", "1"]


@pytest.fixture
def study(monkeypatch, as_users_run_it):
    """Run it with some words."""
    script = ROOT / "studies/train_on_average_precision.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr("sys.argv", [str(script), "--quick", *TINY, *map(str, words)])
        runpy.run_path(str(script), run_name="__main__")

    return run


@pytest.mark.filterwarnings("ignore")  # of Lightning, about tiny data
def test_it_trains_compares_and_goes_on_where_it_was(study, tmp_path, capsys):
    study("--output", tmp_path / "out")
    assert "classes never seen" in capsys.readouterr().out
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["method"], record["seed"]) for record in records] == [
        ("ap", 0), ("triplet", 0), ("ap", 1), ("triplet", 1),
    ]  # fmt: skip
    for record in records:
        assert record["mAP"] == pytest.approx(sum(record["per_query"]["mAP"]) / len(record["labels"]), abs=1e-4)
    assert (tmp_path / "out" / "average_precision_loss.png").read_bytes()[:4] == b"\x89PNG"
    drawn = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert drawn["mAP"]["glyphs"]["triplet"] == pytest.approx(
        [r["mAP"] for r in records if r["method"] == "triplet"], abs=1e-5
    )

    soft = records[0]
    assert list(soft["surrogate"].values()) == sorted(soft["surrogate"].values())  # more bins come nearer
    assert soft["surrogate"]["1000"] < soft["mAP"]
    everywhere = soft["gradient"]["before"]["all pairs alike"]
    assert everywhere == pytest.approx([3 / 252, 25 / 252, 1 / 3], abs=1e-6)
    assert all(len(shares) == 3 for of_time in soft["gradient"].values() for shares in of_time.values())

    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: glyphs 256 -->\nold\n<!-- end -->\nafter\n")
    study("--output", tmp_path / "out", "--page", page)
    assert (tmp_path / "out" / "results.jsonl").read_text().splitlines() == lines
    before, *table, after = page.read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert "old" not in table
    triplet = next(line.split(" | ") for line in table if "triplet" in line)
    expected = sum(record["mAP"] for record in records if record["method"] == "triplet") / 2
    assert float(triplet[2].split()[0]) == pytest.approx(expected, abs=6e-4)
    difference = expected - sum(record["mAP"] for record in records if record["method"] == "ap") / 2
    assert float(triplet[5].split()[0]) == pytest.approx(difference, abs=6e-4)
    assert next(line for line in table if "1,024" in line).count("|  ") == 7  # larger than what is seen: not trained
