"""`fewshot compare` on two real runs of `fewshot fit`."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from fewshot_callbacks.cli.fit import check_checkpoint
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.cli.run_files import DYNAMICS, RECORD, TrainingRecord, best_checkpoint
from fewshot_callbacks.functional import compare_dynamics
from tests.cli.command_options import CONFIGS, MONITORS, QUIET
from tests.messages import missing_facts


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working directory in which nothing may be left behind."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def runs(few_glyphs, tmp_path_factory):
    """Two runs, softmax and DR, of six steps each."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "monitors.yaml").write_text(MONITORS)
    sizes = ["--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
    sizes += ["--data.train.episodes=3", "--data.evaluation.episodes=20"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for head in ("softmax", "dr"):
            config = ["--config", str(CONFIGS / f"protonet_{head}_glyphs.yaml"), "--config", "monitors.yaml"]
            assert main(["fit", *config, *sizes, *QUIET]) == 0
    return [folder / "runs" / f"version_{i}" for i in (0, 1)]


def compared(capsys, *words):
    """What the command prints."""
    capsys.readouterr()
    assert main(["compare", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_both_are_tested_on_the_same_episodes_and_their_steps_compared(runs, capsys):
    printed = compared(capsys, *runs, "--json", "--names", "one", "two")
    result = json.loads(printed, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [(run["name"], run["epochs"], run["steps"]) for run in result["runs"]] == [("one", 2, 6), ("two", 2, 6)]
    assert result["notes"] == []
    first, second = (run["test"] for run in result["runs"])
    assert first["episodes_hash"] == second["episodes_hash"]
    assert result["differences"]["accuracy"]["value"] == pytest.approx(second["accuracy"] - first["accuracy"])
    of = [test["retrieval"]["metrics"]["mAP"] for test in (first, second)]
    assert result["differences"]["mAP"]["value"] == pytest.approx(of[1] - of[0])
    assert result["differences"]["pair_f1"]["interval"] == [None, None]  # a pooled value has no interval
    expected = compare_dynamics(*(run / DYNAMICS for run in runs), names=("one", "two"))
    assert result["dynamics"] == expected.to_dict()


def test_both_tables_show_the_first_run_first(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    first, second = (run["test"] for run in json.loads(compared(capsys, *runs, "--json"))["runs"])
    screen = compared(capsys, *runs, "--names", "earlier", "later")
    heads = [line.split() for line in screen.splitlines() if "earlier" in line and "later" in line]
    assert heads[0][:4] == ["metric", "earlier", "later", "difference"]
    assert heads[-1] == ["earlier", "later", "Mann-", "Fisher's"]
    [row] = [line.split() for line in screen.splitlines() if line.split()[:1] == ["mAP"]]
    values = [test["retrieval"]["metrics"]["mAP"] for test in (first, second)]
    assert row[1:4] == [f"{values[0]:.4f}", f"{values[1]:.4f}", f"{values[1] - values[0]:+.4f}"]
    words = " ".join(screen.split())
    assert missing_facts(words, ("later minus earlier",)) == []
    assert "No interval: pair_f1 is one value of all pairs; J is one value of all rows." in words


def test_an_interval_that_is_unknown_says_why(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    single = []
    for run in runs:  # tested on one episode
        single.append(tmp_path / run.name)
        shutil.copytree(run, single[-1])
        config = single[-1] / "config.yaml"
        config.write_text(config.read_text().replace("episodes: 20\n", "episodes: 1\n"))
    screen = " ".join(compared(capsys, *single).split())
    assert "nan" not in screen
    assert missing_facts(screen, ("accuracy", "accuracy, other classes")) == []
    assert screen.count("single episode") == 3  # of each run, and of the difference


def test_steps_alone_when_asked_for(runs, capsys):
    screen = compared(capsys, *runs, "--test", "false")
    assert missing_facts(screen, ("Not tested", "con-alpha", "norm ratio", "con-div", "6 and 6")) == []


def test_an_interrupted_run_is_told_before_the_table(runs, tmp_path, capsys):
    # the first run as an interrupt leaves it, of ten epochs; the second as one that was trained for more steps
    interrupted, longer = tmp_path / "interrupted", tmp_path / "longer"
    changes = {"max_epochs": 10, "ended": False}, {"steps": 12}
    for run, copy, change in zip(runs, (interrupted, longer), changes, strict=True):
        shutil.copytree(run, copy)
        replace(TrainingRecord.of(run), **change).save(copy)
    told = compared(capsys, interrupted, longer, "--test", "false").splitlines()[:2]
    assert missing_facts(told[0], ("softmax", "epoch", 2, 10)) == []
    assert missing_facts(told[1], ("softmax", "2 epochs", "6 steps", "dr", 12)) == []
    files = [folder / DYNAMICS for folder in (interrupted, longer)]
    result = json.loads(compared(capsys, *files, "--names", "softmax", "dr", "--json"))
    assert result["notes"] == told
    assert [(run["epochs"], run["steps"]) for run in result["runs"]] == [(2, 6), (2, 12)]


def test_runs_without_steps_are_compared_by_their_tests_alone(runs, tmp_path, capsys):
    unmeasured = tmp_path / "unmeasured"
    shutil.copytree(runs[0], unmeasured, ignore=shutil.ignore_patterns(DYNAMICS))
    (unmeasured / RECORD).write_text("{")  # a damaged record is none
    screen = " ".join(compared(capsys, unmeasured, runs[1]).split())
    assert missing_facts(screen, ("steps", unmeasured / DYNAMICS)) == []
    for words in ("accuracy", "mAP", "recall@1", "the same for both", "version_1 minus unmeasured"):
        assert words in screen
    assert "stopped" not in screen
    assert "2 epochs" not in screen


def test_what_is_missing_is_named(runs, tmp_path, capsys):
    untested = tmp_path / "untested"
    shutil.copytree(runs[0], untested, ignore=shutil.ignore_patterns("*.ckpt"))
    for other, facts in (
        (tmp_path / "nothing", ("folder", "'fewshot fit'")),
        (tmp_path, (DYNAMICS, "config.yaml")),
        (untested, ("checkpoint", "--test false")),
    ):
        assert main(["compare", str(runs[1]), str(other)]) == 1
        assert missing_facts(capsys.readouterr().err, (other, *facts)) == []


@pytest.mark.parametrize("folder", ["checkpoints", "."])
def test_the_newest_best_checkpoint_is_found(folder, tmp_path):
    assert best_checkpoint(tmp_path) is None
    (tmp_path / folder).mkdir(exist_ok=True)
    for age, name in enumerate(("best-v1.ckpt", "best.ckpt", "last.ckpt")):
        (tmp_path / folder / name).write_text("")
        os.utime(tmp_path / folder / name, (1000 - age, 1000 - age))
    assert best_checkpoint(tmp_path) == tmp_path / folder / "best-v1.ckpt"


def test_checkpoints_that_systems_make_or_that_are_gone_are_no_checkpoints(tmp_path):
    """A Mac keeps the attributes of `best.ckpt` in `._best.ckpt`; a link of Lightning's may lead nowhere."""
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "other.ckpt").write_text("")
    for name in ("._other.ckpt", "__MACOSX/best.ckpt", ".ipynb_checkpoints-best.ckpt"):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (2e9, 2e9))
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    assert best_checkpoint(tmp_path) == tmp_path / "other.ckpt"
    hidden = tmp_path / ".runs"
    hidden.mkdir()
    (hidden / "best.ckpt").write_text("")
    assert best_checkpoint(hidden) == hidden / "best.ckpt"  # the user has named this folder


def test_a_checkpoint_that_is_missing_is_answered_with_those_that_are_there(tmp_path):
    for name in ("best.ckpt", "._best.ckpt"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="checkpoint") as raised:
        check_checkpoint("test", tmp_path / "bst.ckpt", ())
    facts = (tmp_path / "bst.ckpt", "best.ckpt", "._best.ckpt")
    assert missing_facts(str(raised.value), facts) == ["._best.ckpt"]
