"""What `make gpu` runs works on a machine without a GPU, too: minutes on one are not spent on typing errors."""

import json
import subprocess
import sys

import pytest
import torch

from tests.scripts import ROOT, loaded


@pytest.mark.exhaustive
def test_the_check_of_a_gpu_runs_on_small_sizes_without_one(tmp_path):
    command = [sys.executable, "tools/gpu_check.py", "--device", "cpu", "--output", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == {}
    assert found["bits"]["differ"] == []
    assert {row["items"] for row in found["times"]} == {500, 1000}


def test_a_machine_without_a_device_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with loaded("tools/gpu_check.py") as tool, pytest.raises(SystemExit, match="2"):
        tool.main([])
    assert (
        "PyTorch finds no CUDA device here. `--device cpu` tries the check on small sizes." in capsys.readouterr().err
    )
