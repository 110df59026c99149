"""`fewshot demo`: its table, its files, and the same results from the same seed."""

import io
import json
import signal
from contextlib import redirect_stdout

import pytest

from fewshot_callbacks.cli import _demo_run, curves, demo
from fewshot_callbacks.cli.curves import smooth
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.data import Glyphs
from fewshot_callbacks.plots.style import METHODS
from fewshot_callbacks.protonet import DistanceRatioHead, ProtoNet
from tests.plots.legible import assert_legible

QUICK = ["--epochs", "1", "--episodes", "2", "--test_episodes", "10"]


@pytest.fixture(scope="module")
def screen():
    """What the first demo printed on a screen of 80 columns."""
    return io.StringIO()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, few_glyphs, screen):
    folder = tmp_path_factory.mktemp("demo") / "first"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen):
        patch.setenv("COLUMNS", "80")
        assert main(["demo", "--output", str(folder), *QUICK]) == 0
    return folder


def test_every_column_is_whole_on_a_screen_of_80_columns(finished, screen):
    lines = screen.getvalue().splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "never seen in training" in line) :]
    head = next(line for line in table if "accuracy" in line)
    assert head.split() == ["accuracy", "%", "mAP", "R@1", "GR@1", "of", "15", "R@P.5", "F1", "J"]
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
        assert list((finished / name / "tensorboard").glob("events*"))
    assert not list(finished.parent.glob("*incomplete*"))


def test_soft_ap_sees_as_many_images_and_is_tested_as_it_was_kept(finished):
    steps = [len(curves.read_metric(finished / name / "metrics.csv", "train/loss")[0]) for name in demo.TRAINED]
    assert steps == [2, 2, 2]
    random, _, _, soft = json.loads((finished / "results.json").read_text())
    assert soft["retrieval"]["metrics"] != random["retrieval"]["metrics"]  # the weights that were trained
    options = demo.parser().parse_args(QUICK)
    images, labels = next(iter(_demo_run.data_of(Glyphs(), options, balanced=True).train_dataloader()))
    episode, _ = next(iter(_demo_run.data_of(Glyphs(), options).train_dataloader()))
    assert images.shape == episode.shape
    assert set(labels.bincount().tolist()) == {0, 1 + _demo_run.QUERIES}


def values(folder):
    rows = json.loads((folder / "results.json").read_text())
    for row in rows:
        del row["retrieval"]["seconds"]
    return rows


def test_the_same_seed_gives_the_same_results(finished, tmp_path):
    again = tmp_path / "again"
    assert main(["demo", "--output", str(again), *QUICK]) == 0
    assert values(again) == values(finished)


def test_ctrl_c_leaves_what_was_there(finished, tmp_path, monkeypatch, capsys):
    target = tmp_path / "demo"
    target.mkdir()
    (target / demo.MARKER).write_text("an earlier demo")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo_run, "evaluate_random", interrupted)
    assert main(["demo", "--output", str(target), *QUICK]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert (target / demo.MARKER).read_text() == "an earlier demo"


@pytest.mark.parametrize(("name", "status", "word"), [("SIGINT", 130, "Interrupted"), ("SIGTERM", 143, "Terminated")])
def test_what_an_interrupted_demo_has_trained_is_kept_and_gone_on_with(
    name, status, word, finished, tmp_path, monkeypatch, capsys
):
    before, step = signal.getsignal(signal.SIGINT), ProtoNet.training_step

    def interrupted(self, batch, batch_idx):
        if isinstance(self.head, DistanceRatioHead):
            signal.raise_signal(getattr(signal, name))
        return step(self, batch, batch_idx)

    words = ["demo", "--output", str(tmp_path / "demo"), *QUICK]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ProtoNet, "training_step", interrupted)
            assert main(words) == status
    finally:
        signal.signal(signal.SIGINT, before)  # which Lightning ignores from then on
    (kept,) = tmp_path.iterdir()
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"{word}. Kept in {kept}: softmax, trained. The same command goes on from there."
    heads = []

    def noted(self, batch, batch_idx):
        heads.append(type(self.head))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ProtoNet, "training_step", noted)
    assert main(words) == 0
    assert set(heads) == {DistanceRatioHead}
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert values(tmp_path / "demo") == values(finished)
    names = [sorted(file.name for file in folder.iterdir()) for folder in (tmp_path / "demo", finished)]
    assert names[0] == names[1]
    assert (tmp_path / "demo/softmax/metrics.csv").stat().st_size > 0


def test_other_settings_begin_anew(tmp_path):
    def interrupted(seed, expected):
        with demo.replaced_folder(tmp_path / "demo", {"seed": seed}) as folder:
            assert demo.trained_in(folder) == expected
            if seed == 0:
                demo.note_trained(folder, "softmax", "best.ckpt")
            raise KeyboardInterrupt

    for seed, expected in ((0, {}), (1, {}), (0, {"softmax": "best.ckpt"})):
        with pytest.raises(KeyboardInterrupt):
            interrupted(seed, expected)
        assert len(list(tmp_path.iterdir())) == 1
    with demo.replaced_folder(tmp_path / "demo", {"seed": 0}) as folder:
        assert demo.trained_in(folder) == {"softmax": "best.ckpt"}
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


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
