"""`fewshot demo`: its table, its files, and what an interrupt leaves."""

import io
import json
import logging
import signal
from contextlib import redirect_stdout

import pytest

from fewshot_callbacks.cli import demo
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.cli.signals import Terminated
from fewshot_callbacks.plots.style import METHODS, new_figure
from fewshot_callbacks.protonet import ProtoNet
from tests.cases import first_classes
from tests.messages import missing_facts
from tests.plots.legibility import assert_legible

QUICK = ["--epochs", "1", "--episodes", "2", "--test_episodes", "10"]


@pytest.fixture(scope="module")
def demo_of(tmp_path_factory):
    """Its folder, which held an earlier demo; what Ctrl-C in one before it left there; what it printed; and remarks."""
    drawn = first_classes(100)  # as many as two groups of Grouped Recall need
    folder, before = tmp_path_factory.mktemp("demo") / "first", signal.getsignal(signal.SIGINT)
    as_of_a_demo(folder)
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


def as_of_a_demo(folder):
    """Make a folder that is taken for an earlier demo."""
    (folder / "dr").mkdir(parents=True)
    (folder / "results.json").write_text("[]")
    (folder / "dr" / "best.ckpt").write_text("weights")
    demo.sign(folder)


@pytest.fixture
def finished(demo_of):
    return demo_of[0]


def test_ctrl_c_leaves_an_earlier_demo_and_a_whole_one_replaces_it(demo_of):
    folder, left, _, remarks = demo_of
    assert left[0] == 130
    assert sorted(left[1]) == [".fewshot_demo.json", "best.ckpt", "dr", "first", "results.json"]
    assert len(list(folder.iterdir())) > 3
    assert remarks == []  # of Lightning, such as that there is no GPU


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_demo_that_is_stopped_in_a_training_says_that_nothing_is_kept(stop, status, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise stop("Kept: best.ckpt")

    monkeypatch.setattr(demo, "train_and_test", stopped)
    assert main(["demo", "--output", str(tmp_path / "demo"), *QUICK]) == status
    said = capsys.readouterr().err
    assert "best.ckpt" not in said
    assert missing_facts(said, ("Nothing",)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["epochs", "episodes", "test_episodes"])
@pytest.mark.parametrize("number", ["-1", "0"])
def test_a_demo_without_an_end_or_without_a_training_is_refused(option, number, tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path / "demo"), f"--{option}", number]) == 1
    assert missing_facts(capsys.readouterr().err, (f"--{option} {number}", 1)) == []
    assert list(tmp_path.iterdir()) == []


def test_every_column_is_whole_on_a_screen_of_80_columns(demo_of):
    lines = demo_of[2].splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "never seen in training" in line) :]
    head = next(line for line in table if "accuracy" in line)
    assert head.split() == ["accuracy", "%", "mAP", "R@1", "GR@1", "of", "50", "R@P.5", "F1", "J"]
    rows = [line for line in table if line.split()[:1] in (["random"], ["softmax"], ["DR"], ["soft"])]
    assert [len(row.split()) for row in rows] == [12, 12, 12, 13]
    assert all(len(line) <= 80 and "…" not in line for line in table[: table.index(rows[-1]) + 5])


def test_a_demo_leaves_curves_logs_checkpoints_and_results(finished):
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


@pytest.fixture
def untrained(monkeypatch):
    """A demo that would be over at once: only its folder is looked at."""
    monkeypatch.setattr(demo, "train_and_test", lambda *_: pytest.fail("the folder was not looked at"))


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FOREIGN = {
    "a thesis": {"thesis.tex": "years of work"},
    "results of something else": {"results.json": "[]", "weights.ckpt": "days of training"},
    "a signature of something else": {".fewshot_demo.json": "[]", "weights.ckpt": "days of training"},
    "a signature that is damaged": {".fewshot_demo.json": '{"fewshot_demo": {"dr', "weights.ckpt": "days of training"},
}


@pytest.mark.parametrize("held", FOREIGN)
def test_a_demo_replaces_no_folder_of_something_else(tmp_path, capsys, held, untrained):
    for name, text in FOREIGN[held].items():
        (tmp_path / name).write_text(text)
    before = everything(tmp_path)
    assert main(["demo", "--output", str(tmp_path), *QUICK]) == 1
    said = capsys.readouterr().err
    assert missing_facts(said, (tmp_path, "demo")) == []
    assert len(missing_facts(said, (*FOREIGN[held],))) < len(FOREIGN[held])  # it names one of them
    assert everything(tmp_path) == before


@pytest.mark.parametrize("change", ["a file beside it", "a file in a folder of it", "a file of it"])
def test_a_demo_replaces_no_demo_in_which_somebody_has_written(tmp_path, capsys, change, untrained):
    folder = tmp_path / "demo"
    as_of_a_demo(folder)
    name = {"a file beside it": "notes.txt", "a file in a folder of it": "dr/notes.txt", "a file of it": "results.json"}
    (folder / name[change]).write_text("hours of work")
    before = everything(folder)
    assert main(["demo", "--output", str(folder), *QUICK]) == 1
    assert missing_facts(capsys.readouterr().err, (folder, name[change], "demo")) == []
    assert everything(folder) == before


def test_a_file_that_came_while_it_trained_is_left_and_so_is_the_demo(tmp_path, capsys, monkeypatch):
    def trained(_, folder, __):
        for name in demo.TRAINED:
            (folder / name).mkdir(parents=True)
        (tmp_path / "demo").mkdir()
        (tmp_path / "demo" / "notes.txt").write_text("hours of work")
        return {}

    for name, stand_in in {
        "train_and_test": trained, "read_curves": lambda _: {}, "training_curves": lambda *_: new_figure(1),
        "comparison": lambda _: "",
    }.items():  # fmt: skip
        monkeypatch.setattr(demo, name, stand_in)
    assert main(["demo", "--output", str(tmp_path / "demo"), *QUICK]) == 0
    assert everything(tmp_path / "demo") == {"notes.txt": b"hours of work"}
    assert {"results.json", "curves.png"} < set(everything(tmp_path / "demo-2"))
    assert "demo-2/curves.png" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("seeds", [1, 5])
def test_curves_of_seeds_are_one_line_in_its_interval(seeds):
    run = {name: ([1, 2, 3], [1.0, 2.0, 2.5]) for name, _ in demo.PANELS}
    figure = demo.training_curves({name: [run] * seeds for name in demo.TRAINED}, demo.TITLES)
    assert_legible(figure)
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "training steps", "training steps"]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["softmax", "DR", "soft AP", *(["95 % interval of the mean of 5 seeds"] if seeds > 1 else [])]
    assert "factor 0.9" in figure.legends[0].get_title().get_text()
    assert [line.get_color() for line in figure.axes[1].lines] == [METHODS[name].colour for name in demo.TRAINED]
    assert demo.smooth([2.0, float("nan"), 2.0]) == pytest.approx([2.0, 2.0, 2.0])  # passes over what is undefined
