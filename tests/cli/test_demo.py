"""`fewshot demo`: its table, its files, and the same results from the same seed."""

import io
import json
import signal
from contextlib import redirect_stdout

import pytest
import yaml

from fewshot_callbacks.cli import curves, demo
from fewshot_callbacks.cli.curves import smooth
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.cli.runs import TrainingRecord
from fewshot_callbacks.data.glyphs import load_drawing
from fewshot_callbacks.plots.style import METHODS
from fewshot_callbacks.protonet import DistanceRatioHead, ProtoNet
from tests.cli.conftest import first_classes
from tests.cli.words import CONFIGS
from tests.plots.legible import assert_legible

QUICK = ["--epochs", "1", "--episodes", "2", "--test_episodes", "10"]


@pytest.fixture(scope="module", autouse=True)
def glyphs():
    """As many classes as two groups of Grouped Recall need."""
    drawn = first_classes(load_drawing(), 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewshot_callbacks.data.glyphs.load_drawing", lambda *_: drawn)
        yield


@pytest.fixture(scope="module")
def screen():
    """What the first demo printed on a screen of 80 columns."""
    return io.StringIO()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, glyphs, screen):
    folder = tmp_path_factory.mktemp("demo") / "first"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen):
        patch.setenv("COLUMNS", "80")
        assert main(["demo", "--output", str(folder), *QUICK]) == 0
    return folder


def test_every_column_is_whole_on_a_screen_of_80_columns(finished, screen):
    lines = screen.getvalue().splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "never seen in training" in line) :]
    head = next(line for line in table if "accuracy" in line)
    assert head.split() == ["accuracy", "%", "mAP", "R@1", "GR@1", "of", "50", "R@P.5", "F1", "J"]
    rows = [line for line in table if line.split()[:1] in (["random"], ["softmax"], ["DR"], ["soft"])]
    assert [len(row.split()) for row in rows] == [12, 12, 12, 13]
    assert all(len(line) <= 80 and "…" not in line for line in table[: table.index(rows[-1]) + 5])


def test_it_leaves_curves_logs_checkpoints_and_results(finished, capsys):
    assert (finished / "curves.png").read_bytes()[:4] == b"\x89PNG"
    rows = json.loads((finished / "results.json").read_text())
    assert [row["name"] for row in rows] == ["random", "softmax", "dr", "soft_ap"]
    assert all(row["episodes"] == 10 for row in rows)
    assert len({row["episodes_hash"] for row in rows}) == 1
    assert all(0 < row["retrieval"]["metrics"]["mAP"] < 1 for row in rows)
    for name in demo.TRAINED:
        assert (finished / name / "best.ckpt").stat().st_size > 0
        assert "train/J" in (finished / name / "metrics.csv").read_text().splitlines()[0]
        assert list((finished / name).glob("events*"))
    assert not list(finished.parent.glob("*incomplete*"))


def test_soft_ap_sees_as_many_images_and_is_tested_as_it_was_kept(finished):
    steps = [len(curves.read_metric(finished / name / "metrics.csv", "train/loss")[0]) for name in demo.TRAINED]
    assert steps == [2, 2, 2]
    random, _, _, soft = json.loads((finished / "results.json").read_text())
    assert soft["retrieval"]["metrics"] != random["retrieval"]["metrics"]  # the weights that were trained
    episodes, batches = (
        yaml.safe_load((CONFIGS / f"demo_{name}.yaml").read_text())["data"]["init_args"]["train"]
        for name in ("protonet", "soft_ap")
    )
    assert batches["classes_per_batch"] == episodes["ways"]
    assert batches["items_per_class"] == episodes["shots"] + episodes["queries"]


def values(folder):
    """Everything but times and places."""
    rows = json.loads((folder / "results.json").read_text())
    for row in rows:
        del row["checkpoint"], row["retrieval"]["seconds"]
    return rows


def test_ctrl_c_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "demo"
    target.mkdir()
    (target / demo.MARKER).write_text("an earlier demo")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ProtoNet, "test_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(["demo", "--output", str(target), *QUICK]) == 130
    finally:
        signal.signal(signal.SIGINT, before)  # which Lightning ignores from then on
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert (target / demo.MARKER).read_text() == "an earlier demo"


def test_what_an_interrupted_demo_has_trained_is_kept_and_gone_on_with(finished, tmp_path, monkeypatch, capsys):
    """And the networks that are trained then are those of a demo of the same seed that nobody interrupted."""
    before, step, trained = signal.getsignal(signal.SIGINT), ProtoNet.training_step, []
    words = ["demo", "--output", str(tmp_path / "demo"), *QUICK]

    def stopped_by(name):
        def training_step(self, batch, batch_idx):
            trained.append(type(self.head))
            if name and isinstance(self.head, DistanceRatioHead):
                signal.raise_signal(getattr(signal, name))
            return step(self, batch, batch_idx)

        return training_step

    for name, status, word in (("SIGINT", 130, "Interrupted"), ("SIGTERM", 143, "Terminated")):
        monkeypatch.setattr(ProtoNet, "training_step", stopped_by(name))
        try:
            assert main(words) == status
        finally:
            signal.signal(signal.SIGINT, before)
        (kept,) = tmp_path.iterdir()
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"{word}. Kept in {kept}: softmax, trained. The same command goes on from there."
    trained.clear()
    monkeypatch.setattr(ProtoNet, "training_step", stopped_by(None))
    assert main(words) == 0
    assert set(trained) == {DistanceRatioHead}
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert values(tmp_path / "demo") == values(finished)
    names = [sorted(file.name for file in folder.iterdir()) for folder in (tmp_path / "demo", finished)]
    assert names[0] == names[1]
    assert (tmp_path / "demo/softmax/metrics.csv").stat().st_size > 0


def test_other_settings_begin_anew_and_a_failure_leaves_nothing(tmp_path):
    def stopped(seed, error=KeyboardInterrupt):
        with demo.replaced_folder(tmp_path / "demo", {"seed": seed}) as folder:
            there = TrainingRecord.of(folder / "softmax") is not None
            TrainingRecord(1, 2, 1, ended=seed == 0, head="softmax").save(folder / "softmax")
            found.append(there)
            raise error

    found = []
    for seed in (0, 1, 0):
        with pytest.raises(KeyboardInterrupt):
            stopped(seed)
        assert len(list(tmp_path.iterdir())) == 1
    assert found == [False, False, True]
    with pytest.raises(RuntimeError):
        stopped(0, RuntimeError)
    assert list(tmp_path.iterdir()) == []


def test_it_replaces_no_folder_of_something_else(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["demo", "--output", str(tmp_path), *QUICK]) == 1
    assert "holds files that no demo has written" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("seeds", [1, 5])
def test_curves_of_seeds_are_one_line_in_its_interval(seeds):
    run = {name: ([1, 2, 3], [1.0, 2.0, 2.5]) for name, _ in curves.PANELS}
    figure = curves.training_curves({name: [run] * seeds for name in demo.TRAINED}, demo.TITLES)
    assert_legible(figure)
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "training steps", "training steps"]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["softmax", "DR", "soft AP", *(["95 % interval of the mean of 5 seeds"] if seeds > 1 else [])]
    assert "exponential mean, factor 0.9" in figure.legends[0].get_title().get_text()
    assert [line.get_color() for line in figure.axes[1].lines] == [METHODS[name].colour for name in demo.TRAINED]


def test_smooth_passes_over_what_is_undefined():
    assert smooth([2.0, float("nan"), 2.0]) == pytest.approx([2.0, 2.0, 2.0])
