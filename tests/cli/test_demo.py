"""`fewshot demo`: its table, its files, and the same results from the same seed."""

import io
import json
import signal
from contextlib import redirect_stdout

import pytest
import yaml

from fewshot_callbacks.cli import demo
from fewshot_callbacks.cli.demo import smooth
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.data.glyphs import load_drawing
from fewshot_callbacks.plots.style import METHODS
from fewshot_callbacks.protonet import ProtoNet
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
    assert [path.name for path in finished.parent.iterdir()] == ["first"]


def test_soft_ap_sees_as_many_images_and_is_tested_as_it_was_kept(finished):
    steps = [len(demo.read_metric(finished / name / "metrics.csv", "train/loss")[0]) for name in demo.TRAINED]
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


def test_ctrl_c_leaves_an_earlier_demo_and_a_whole_one_replaces_it(finished, tmp_path, monkeypatch, caplog):
    words, before = ["demo", "--output", str(tmp_path / "demo"), *QUICK], signal.getsignal(signal.SIGINT)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/results.json").write_text("[]")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProtoNet, "test_step", interrupted)
        try:
            assert main(words) == 130
        finally:
            signal.signal(signal.SIGINT, before)  # which Lightning ignores from then on
    assert [path.name for path in tmp_path.rglob("*")] == ["demo", "results.json"]
    assert main(words) == 0
    assert "GPU available" not in caplog.text  # nor any other remark of Lightning
    assert values(tmp_path / "demo") == values(finished)
    names = [sorted(file.name for file in folder.iterdir()) for folder in (tmp_path / "demo", finished)]
    assert names[0] == names[1]


def test_it_replaces_no_folder_of_something_else(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["demo", "--output", str(tmp_path), *QUICK]) == 1
    assert "holds files that no demo has written" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("seeds", [1, 5])
def test_curves_of_seeds_are_one_line_in_its_interval(seeds):
    run = {name: ([1, 2, 3], [1.0, 2.0, 2.5]) for name, _ in demo.PANELS}
    figure = demo.training_curves({name: [run] * seeds for name in demo.TRAINED}, demo.TITLES)
    assert_legible(figure)
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "training steps", "training steps"]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["softmax", "DR", "soft AP", *(["95 % interval of the mean of 5 seeds"] if seeds > 1 else [])]
    assert "exponential mean, factor 0.9" in figure.legends[0].get_title().get_text()
    assert [line.get_color() for line in figure.axes[1].lines] == [METHODS[name].colour for name in demo.TRAINED]


def test_smooth_passes_over_what_is_undefined():
    assert smooth([2.0, float("nan"), 2.0]) == pytest.approx([2.0, 2.0, 2.0])
