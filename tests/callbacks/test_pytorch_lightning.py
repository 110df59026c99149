"""A Trainer of `pytorch_lightning` works like one of `lightning`, if that package is imported before this one.

Each test starts processes of its own: a process works with one of the two packages.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.callbacks.models import close
from tests.messages import missing_facts

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("pytorch_lightning_job.py")


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with the package of this tree."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore:::torch,ignore:::pytorch_lightning"}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def answers(folder: Path, processes: int) -> dict[str, Any]:
    """What the script has seen, in this number of processes."""
    finished = run(str(JOB), str(folder), str(processes), folder=folder)
    assert finished.returncode == 0, finished.stderr
    return json.loads((folder / "seen.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    return folder, answers(folder, 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, answers(folder, 2)


@pytest.fixture(params=["one", pytest.param("two", marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """What one process has seen, and two."""
    return request.getfixturevalue(request.param)


def test_values_are_those_of_the_functions(seen: tuple[Path, dict[str, Any]]) -> None:
    _, answer = seen
    assert answer["package"] == "pytorch_lightning"
    for run_of_trainer in ("first", "resumed", "validated"):
        expected = answer[run_of_trainer]["by hand"]
        logged = answer[run_of_trainer]["values"]
        assert {key: logged[key] for key in expected} == close(expected, rel=1e-5)


@pytest.mark.slow
def test_pictures_and_points_are_in_tensorboard(two: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = two
    logs = folder / "logs" / "until 2"
    accumulator = EventAccumulator(str(logs)).Reload()
    assert {"val/score_histograms", "val/embedding_map"} <= set(accumulator.Tags()["images"])
    assert len(accumulator.Images("val/score_histograms")) == 2  # one for each epoch
    assert list(logs.rglob("tensors.tsv"))
    assert not list(folder.rglob("pictures"))


def test_a_checkpoint_of_the_best_value_resumes_the_fit(seen: tuple[Path, dict[str, Any]]) -> None:
    folder, answer = seen
    first, resumed = answer["first"], answer["resumed"]
    assert Path(first["best"]).is_relative_to(folder / "until 2")
    epochs = len(first["steps"]) / 2
    assert len(resumed["steps"]) == 3 * epochs
    assert resumed["steps"][: len(first["steps"])] == first["steps"]


def test_a_module_of_this_package_is_trained_and_loaded(one: tuple[Path, dict[str, Any]]) -> None:
    _, answer = one
    assert answer["module"]["same weights"]
    assert 0 < answer["module"]["values"]["val/mAP"] <= 1


OURS = "from fewshot_callbacks.trainer.lightning import PACKAGE; print(PACKAGE)"


def slow(lines: list[str], package: str) -> Any:
    """A case whose process takes as long as the others, for `make test-rest`."""
    return pytest.param(lines, package, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("lines", "package"),
    [
        (["import pytorch_lightning", OURS], "pytorch_lightning"),
        slow(["from pytorch_lightning import Trainer", OURS, "import lightning.pytorch"], "pytorch_lightning"),
        ([OURS], "lightning"),
        slow([OURS, "import pytorch_lightning"], "lightning"),
        slow(["import lightning.pytorch", OURS], "lightning"),
        slow(["import pytorch_lightning, lightning.pytorch", OURS], "lightning"),
        (["import sys; sys.modules['lightning'] = None", OURS], "pytorch_lightning"),
        slow(["import sys; sys.modules['pytorch_lightning'] = None", OURS], "lightning"),
    ],
)
def test_the_package_is_the_one_that_is_imported_first(lines: list[str], package: str, tmp_path: Path) -> None:
    """With `lightning` as the default, and if both are imported; a package that is not installed is none."""
    finished = run("-c", "\n".join(lines), folder=tmp_path)
    assert finished.stdout.split() == [package], finished.stderr


NOTEBOOK = """
cells = [
    "from fewshot_callbacks import EmbeddingModule, RetrievalMonitor, SoftAveragePrecisionLoss",
    "import torch, pytorch_lightning as pl",
    '''
module = EmbeddingModule(torch.nn.Linear(4, 2), SoftAveragePrecisionLoss())
class Net(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        return {"embeddings": batch[0], "labels": batch[1]}
data = torch.utils.data.TensorDataset(torch.eye(4).repeat(2, 1), torch.arange(4).repeat(2))
loader = torch.utils.data.DataLoader(data, batch_size=4)
settings = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
trainer = pl.Trainer(callbacks=[RetrievalMonitor()], **settings)
trainer.validate(Net(), loader, verbose=False)
print(float(trainer.callback_metrics["val/mAP"]), isinstance(module, pl.LightningModule))
try:
    pl.Trainer(callbacks=RetrievalMonitor(), **settings)
except TypeError as error:
    print(error)
''',
]
for number, cell in enumerate(cells):
    exec(compile(cell, f"cell {number}", "exec"), globals())
"""


@pytest.mark.slow
def test_a_trainer_of_the_other_package_takes_callbacks_in_a_list_and_no_modules(tmp_path: Path) -> None:
    """In a notebook, whose cells are not known in advance."""
    finished = run("-c", NOTEBOOK, folder=tmp_path)
    assert finished.stdout.splitlines() == ["1.0 False", "'RetrievalMonitor' object is not iterable"], finished.stderr
    facts = "EmbeddingModule is a class of lightning.pytorch", "import pytorch_lightning before", "# isort: split"
    [line] = [line for line in finished.stderr.splitlines() if line.startswith("cell 2:2: UserWarning: ")]
    assert missing_facts(line, facts) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        ["import lightning.pytorch", "from fewshot_callbacks import EmbeddingModule", "import pytorch_lightning"],
        ["import pytorch_lightning", "from fewshot_callbacks import EmbeddingModule", "import lightning.pytorch"],
    ],
)
def test_no_warning_comes_if_a_package_is_imported_first(imports: list[str], tmp_path: Path) -> None:
    """Any other library may import the other package."""
    lines = [*imports, "import torch", "EmbeddingModule(torch.nn.Linear(4, 2), torch.dist)"]
    finished = run("-W", "error:EmbeddingModule", "-c", "\n".join(lines), folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
