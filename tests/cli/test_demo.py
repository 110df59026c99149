"""`fewshot demo`: its table, its files, and what an interrupt leaves."""

import io
import json
import logging
import signal
from contextlib import redirect_stdout

import pytest

from fewshot_callbacks.cli import demo
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.plots.style import METHODS
from fewshot_callbacks.protonet import ProtoNet
from tests.cases import first_classes
from tests.plots.legible import assert_legible

QUICK = ["--epochs", "1", "--episodes", "2", "--test_episodes", "10"]


@pytest.fixture(scope="module")
def demo_of(tmp_path_factory):
    """Its folder, which held an earlier demo; what Ctrl-C in one before it left there; what it printed; and remarks."""
    drawn = first_classes(100)  # as many as two groups of Grouped Recall need
    folder, before = tmp_path_factory.mktemp("demo") / "first", signal.getsignal(signal.SIGINT)
    folder.mkdir()
    (folder / "results.json").write_text("[]")
    remarks, handler = [], logging.Handler()
    handler.emit = lambda record: remarks.append(record.getMessage())
    logging.getLogger("lightning.pytorch").addHandler(handler)

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as screen:
        patch.setattr("fewshot_callbacks.data.glyphs.load_drawing", lambda *_: drawn)
        patch.setenv("COLUMNS", "80")
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ProtoNet, "test_step", interrupted)
            status = main(["demo", "--output", str(folder), *QUICK])
            signal.signal(signal.SIGINT, before)  # which Lightning ignores from then on
        left = status, [path.name for path in folder.parent.rglob("*")]
        assert main(["demo", "--output", str(folder), *QUICK]) == 0
    logging.getLogger("lightning.pytorch").removeHandler(handler)
    return folder, left, screen.getvalue(), remarks


@pytest.fixture
def finished(demo_of):
    return demo_of[0]


def test_ctrl_c_leaves_an_earlier_demo_and_a_whole_one_replaces_it(demo_of):
    folder, left, _, remarks = demo_of
    assert left == (130, ["first", "results.json"])
    assert len(list(folder.iterdir())) > 1
    assert remarks == []  # of Lightning, such as that there is no GPU


def test_every_column_is_whole_on_a_screen_of_80_columns(demo_of):
    lines = demo_of[2].splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "never seen in training" in line) :]
    head = next(line for line in table if "accuracy" in line)
    assert head.split() == ["accuracy", "%", "mAP", "R@1", "GR@1", "of", "50", "R@P.5", "F1", "J"]
    rows = [line for line in table if line.split()[:1] in (["random"], ["softmax"], ["DR"], ["soft"])]
    assert [len(row.split()) for row in rows] == [12, 12, 12, 13]
    assert all(len(line) <= 80 and "…" not in line for line in table[: table.index(rows[-1]) + 5])


def test_it_leaves_curves_logs_checkpoints_and_results(finished):
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


def test_soft_ap_takes_as_many_steps_and_is_tested_as_it_was_kept(finished):
    steps = [len(demo.read_metric(finished / name / "metrics.csv", "train/loss")[0]) for name in demo.TRAINED]
    assert steps == [2, 2, 2]
    random, _, _, soft = json.loads((finished / "results.json").read_text())
    assert soft["retrieval"]["metrics"] != random["retrieval"]["metrics"]  # the weights that were trained


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
    assert demo.smooth([2.0, float("nan"), 2.0]) == pytest.approx([2.0, 2.0, 2.0])  # passes over what is undefined
