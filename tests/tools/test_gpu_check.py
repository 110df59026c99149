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
