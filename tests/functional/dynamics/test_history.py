"""Histories of training dynamics: written, read, refused."""

import math
from pathlib import Path

import pytest

from fewshot_callbacks.functional import DynamicsHistory, StepDynamics
from tests.messages import refused

MOVED, STILL = (
    StepDynamics(1.0, 0.5, 0.9, 1.1),
    StepDynamics(1.0, math.nan, 1.0, 1.0, ("the step moved no embedding",)),
)


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "training_dynamics.json"
    DynamicsHistory((100, 200), (MOVED, STILL), "coordinates").save(path)
    read = DynamicsHistory.load(path)
    assert (read.steps, read.centering, read.measures[0], len(read)) == ((100, 200), "coordinates", MOVED, 2)
    assert math.isnan(read.measures[1].norm_ratio)
    assert read.measures[1].undefined == STILL.undefined
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert "NaN" not in path.read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"format": 9}', '{"format": 1, "steps": [1]}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with refused(ValueError, path):
        DynamicsHistory.load(path)


def test_steps_and_measures_go_together() -> None:
    with refused(ValueError, "2 steps", "1 measure"):
        DynamicsHistory((1, 2), (MOVED,))
    state = DynamicsHistory((1, 2), (MOVED, STILL)).to_dict() | {"alpha": [1.0]}
    with refused(ValueError, "history", "TrainingDynamicsMonitor", "training_dynamics.json"):
        DynamicsHistory.from_dict(state)


def test_no_file_but_its_own_is_written(tmp_path):
    (tmp_path / ".history.json.part").write_text("of the user")
    DynamicsHistory((100, 200), (MOVED, STILL), "coordinates").save(tmp_path / "history.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".history.json.part", "history.json"]
    assert (tmp_path / ".history.json.part").read_text() == "of the user"
