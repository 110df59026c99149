"""The study of losses: a tiny run of it, which is not trained again, and the tables that it writes into a page."""

import json
import runpy

import pytest

from tests.cases import first_classes
from tests.integration_packages import integration
from tests.scripts import ROOT

integration("pytorch_metric_learning")


@pytest.mark.filterwarnings("ignore")  # of Lightning, about tiny data
def test_it_trains_compares_and_goes_on_where_it_was(monkeypatch, as_users_run_it, tmp_path):
    script, page, results = ROOT / "studies/train_on_average_precision.py", tmp_path / "page.md", tmp_path / "out"
    monkeypatch.syspath_prepend(script.parent)
    drawn = first_classes(64)  # as many as a batch has
    monkeypatch.setattr("fewshot_callbacks.data.glyphs.load_drawing", lambda *_: drawn)
    words = ["--images", "256", "--data", "glyphs", "--methods", "triplet", "--seeds", "0", "1", "--page", str(page)]
    monkeypatch.setattr("sys.argv", [str(script), "--quick", *words, "--output", str(results)])
    page.write_text("before\n<!-- table: glyphs 256 -->\nold\n<!-- end -->\nafter\n")
    for _ in range(2):
        runpy.run_path(str(script), run_name="__main__")
    records = [json.loads(line) for line in (results / "results.jsonl").read_text().splitlines()]
    names = [(record["method"], record["seed"]) for record in records]
    assert names == [("ap", 0), ("triplet", 0), ("ap", 1), ("triplet", 1)]  # once each
    for record in records:
        assert record["mAP"] == pytest.approx(sum(record["per_query"]["mAP"]) / len(record["labels"]), abs=1e-4)
    drawn = json.loads((results / "figures.json").read_text())["mAP"]["glyphs"]["triplet"]
    assert drawn == pytest.approx([record["mAP"] for record in records[1::2]], abs=1e-5)

    soft = records[0]
    assert list(soft["surrogate"].values()) == sorted(soft["surrogate"].values())  # more bins come nearer
    assert soft["surrogate"]["1000"] < soft["mAP"]
    everywhere = soft["gradient"]["before"]["all pairs alike"]
    assert everywhere == pytest.approx([3 / 252, 25 / 252, 1 / 3], abs=1e-6)

    before, *table, after = page.read_text().splitlines()
    assert (before, after, "old" in table) == ("before", "after", False)
    triplet = next(line.split(" | ") for line in table if "triplet" in line)
    ours, theirs = (sum(record["mAP"] for record in records[part::2]) / 2 for part in range(2))
    assert float(triplet[1].split()[0]) == pytest.approx(theirs, abs=6e-4)
    assert float(triplet[3].split()[0]) == pytest.approx(theirs - ours, abs=6e-4)
