"""Histories of training dynamics: written, read, refused."""

import json
import math
from pathlib import Path

import pytest

from fewshot_callbacks.functional import DynamicsHistory, StepDynamics


def some_history() -> DynamicsHistory:
    measures = (
        StepDynamics(1.0, 0.5, 0.9, 1.1),
        StepDynamics(1.0, math.nan, 1.0, 1.0, ("the step moved no embedding",)),
    )
    return DynamicsHistory((100, 200), measures, "coordinates")


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "training_dynamics.json"
    some_history().save(path)
    read = DynamicsHistory.load(path)
    assert read.steps == (100, 200)
    assert read.centering == "coordinates"
    assert read.measures[0] == some_history().measures[0]
    assert math.isnan(read.measures[1].norm_ratio)
    assert read.measures[1].undefined == ("the step moved no embedding",)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert "NaN" not in path.read_text()
    assert len(read) == 2
    assert read.values("norm_ratio")[0] == 0.5


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "steps": [1]}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: "):
        DynamicsHistory.load(path)
    with pytest.raises(FileNotFoundError):
        DynamicsHistory.load(tmp_path / "y.json")


def test_steps_and_measures_go_together() -> None:
    with pytest.raises(ValueError, match="2 steps came with 1 measures"):
        DynamicsHistory((1, 2), (StepDynamics(1.0, 1.0, 1.0, 1.0),))
    state = some_history().to_dict()
    state["alpha"] = [1.0]
    with pytest.raises(ValueError, match=r"not a history of training dynamics"):
        DynamicsHistory.from_dict(json.loads(json.dumps(state)))
