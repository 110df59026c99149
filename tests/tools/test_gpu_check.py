"""The check of a device leaves its file where git ignores it."""

import json

from tests.scripts import imported_script


def test_the_file_lies_below_build(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with imported_script("tools/gpu_check.py") as check:
        monkeypatch.setattr(check, "CHECKS", {"a part": lambda setting: "fine"})
        assert check.main(["--device", "cpu"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    assert json.loads((tmp_path / "build" / "gpu_check.json").read_text())["failed"] == {}
    assert "build/gpu_check.json" in capsys.readouterr().out


def test_what_was_found_becomes_tables_of_the_page():
    times = [
        {"items": items, "dim": 8, "difficulty": "hard", "seconds": 2.0, "tf32": 7.0, "topk": 0.5, "cpu": cpu}
        for items, cpu in ((8_000, 3.0), (31_730, None))
    ]
    step = {"without": 0.04, "with J": 0.05, "quotients": [1.0, 1.1, 1.3]}
    found = {
        "machine": {"torch": "2.11"},
        "times": times,
        "step": step,
        "memory": {"64": 9.0},
        "stops": {"with J": 0.0},
    }
    with imported_script("tools/gpu_check.py") as check:
        tables = check.tables(found)
        assert check.tables({"machine": {}}) == {}
    (gpu,), (training,) = tables["gpu"], tables["gpu_training"]
    assert gpu["machine"] == training["machine"] == found["machine"]
    assert gpu["rows"] == [
        ["8,000", "hard", "8", 2.0, None, 0.5, 3.0],
        ["31,730", "hard", "8", 2.0, 7.0, 0.5, None],
    ]
    assert [cells[1] for cells in training["rows"]] == [9.0, 0.0, 40.0, 50.0, (1.1, 1.0, 1.3)]
    for table in (gpu, training):
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
