"""The study of losses: a tiny run of it, which is not trained again, and the tables that it writes into a page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytorch_metric_learning")

ROOT = Path(__file__).parents[2]
TINY = ["--images", "256", "--data", "glyphs", "--methods", "triplet", "ap-batch-1024", "--seeds", "0", "1"]


def study(folder: Path, *more: str) -> str:
    """What a call prints."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, ROOT / "studies/train_on_average_precision.py", "--quick", *TINY, "--output", folder, *more],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def test_it_trains_compares_and_goes_on_where_it_was(tmp_path):
    printed = study(tmp_path / "out")
    assert "classes never seen" in printed
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
    study(tmp_path / "out", "--page", str(page))
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
