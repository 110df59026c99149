"""The command `fewshot` with addresses: embeddings that it reads, runs that it writes, and runs that it compares."""

import json

import numpy as np
import pytest
import yaml

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.cli.run_files import TrainingRecord, best_checkpoint
from fewshot_callbacks.functional import DynamicsHistory, compare_dynamics
from fewshot_callbacks.functional.dynamics import StepDynamics
from tests.cli.command_options import CONFIGS, MONITORS, QUIET
from tests.messages import missing_facts, refused
from tests.remote_stores import empty_memory, s3_server

LABELS = np.arange(40) % 4
VECTORS = (np.eye(4)[LABELS] + np.random.default_rng(0).normal(0, 0.3, (40, 4))).astype(np.float32)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working directory in which nothing may be left behind, and a folder of the copies."""
    monkeypatch.setenv("FEWSHOT_CALLBACKS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def memory():
    with empty_memory() as store:
        yield store


@pytest.fixture
def s3(monkeypatch):
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with s3_server(monkeypatch) as store:
        yield store


@pytest.fixture
def vectors(memory, tmp_path):
    """A store with one set in one file, and in two."""
    np.savez(tmp_path / "whole.npz", embeddings=VECTORS, labels=LABELS)
    memory.put(str(tmp_path / "whole.npz"), "/vectors/whole.npz")
    for part, rows in enumerate((slice(0, 25), slice(25, 40))):
        np.savez(tmp_path / "part.npz", embeddings=VECTORS[rows], labels=LABELS[rows])
        memory.put(str(tmp_path / "part.npz"), f"/vectors/part-{part}.npz")
    return tmp_path


def printed(capsys, *words):
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["whole.npz", "part-*.npz"])
def test_evaluate_reads_addresses(vectors, capsys, name):
    expected = json.loads(printed(capsys, "evaluate", vectors / "whole.npz", "--json"))
    address = f"memory://vectors/{name}"
    assert json.loads(printed(capsys, "evaluate", address, "--json"))["metrics"] == expected["metrics"]
    assert address in printed(capsys, "evaluate", address)
    resumed = printed(capsys, "evaluate", address, "--json", "--resume", vectors / "state")
    assert json.loads(resumed)["metrics"] == expected["metrics"]


def test_evaluate_plan_and_report_read_addresses(vectors, capsys):
    both = ("evaluate", "memory://vectors/part-*.npz", "--against", "memory://vectors/whole.npz", "--json")
    assert json.loads(printed(capsys, *both))["differences"]["mAP"]["value"] == 0
    assert json.loads(printed(capsys, "plan", "--files", "memory://vectors/part-*.npz", "--json"))["queries"] == 40
    printed(capsys, "report", "memory://vectors/whole.npz", "-o", vectors / "report.html")
    assert (vectors / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_trials_read_addresses(vectors, memory, capsys):
    np.savez(vectors / "ids.npz", embeddings=VECTORS, ids=np.arange(40).astype(str))
    memory.put(str(vectors / "ids.npz"), "/vectors/ids.npz")
    pairs = [
        f"{int(LABELS[first] == LABELS[second])} {first} {second}" for first in range(20) for second in range(20, 40)
    ]
    (vectors / "pairs.txt").write_text("\n".join(pairs), encoding="utf-8")
    words = ("trials", vectors / "pairs.txt", "--json", "--embeddings")
    assert printed(capsys, *words, "memory://vectors/ids.npz") == printed(capsys, *words, vectors / "ids.npz")


@pytest.mark.parametrize("name", ["other.npz", "*.parquet"])
def test_an_address_without_a_file_is_said_in_one_line(vectors, capsys, name):
    assert main(["evaluate", f"memory://vectors/{name}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert missing_facts(line, ("fewshot evaluate", f"memory://vectors/{name}", "folder", "file")) == []


def fit(folder, head, tmp_path, *words):
    """Train a network for an epoch, in a folder that may be an address."""
    monitors = tmp_path / "monitors.yaml"
    monitors.write_text(MONITORS, encoding="utf-8")
    config = ["--config", str(CONFIGS / f"protonet_{head}_glyphs.yaml"), "--config", str(monitors)]
    sizes = [
        "--trainer.max_epochs=1",
        "--trainer.accelerator=cpu",
        "--data.train.episodes=3",
        "--data.evaluation.episodes=5",
    ]
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}", "--trainer.logger.name=runs"]
    settings = [f"--trainer.logger.version={head}", f"--trainer.default_root_dir={folder}"]
    return main(["fit", *config, *sizes, *QUIET, *logger, *settings, *words])


def check_run(store, folder, root, tmp_path, capsys):
    """A run is written to a store and to no folder, and tested from there."""
    assert fit(folder, "dr", tmp_path) == 0
    screen = capsys.readouterr().out
    run = f"{folder}/runs/dr"
    assert missing_facts(screen, (run,)) == []
    assert yaml.safe_load(store.cat(f"{root}/runs/dr/config.yaml"))["model"]["head"] == "dr"
    record = TrainingRecord(1, 3, 1, ended=True, head="dr")
    assert TrainingRecord(**json.loads(store.cat(f"{root}/runs/dr/training.json"))) == record == TrainingRecord.of(run)
    checkpoint = best_checkpoint(run)
    assert checkpoint == f"{run}/checkpoints/best.ckpt"
    advice = screen.rpartition("fewshot ")[2].split()
    assert advice == ["test", "--config", f"{run}/config.yaml", "--ckpt_path", checkpoint]
    printed(capsys, *advice, *QUIET)
    assert len(DynamicsHistory.load(f"{run}/training_dynamics.json")) == 3


@pytest.mark.filterwarnings("ignore:(Experiment logs|Checkpoint) directory")
def test_a_run_in_memory_is_kept_and_tested(few_glyphs, memory, tmp_path, capsys):
    check_run(memory, "memory://kept", "/kept", tmp_path, capsys)


@pytest.mark.filterwarnings("ignore:(Experiment logs|Checkpoint) directory")
def test_a_run_in_memory_is_not_written_over_but_continued(few_glyphs, memory, tmp_path, capsys):
    assert fit("memory://kept", "dr", tmp_path) == 0
    assert fit("memory://kept", "dr", tmp_path) == 1
    facts = ("memory://kept/runs/dr", "config.yaml", "training.json", "--ckpt_path")
    assert missing_facts(capsys.readouterr().err, facts) == []
    last = "--ckpt_path=memory://kept/runs/dr/checkpoints/last.ckpt"
    assert fit("memory://kept", "dr", tmp_path, last, "--trainer.max_epochs=2") == 0
    assert TrainingRecord.of("memory://kept/runs/dr").epochs == 2


@pytest.mark.filterwarnings("ignore:(Experiment logs|Checkpoint) directory")
def test_runs_in_memory_are_compared(few_glyphs, memory, tmp_path, capsys):
    for head in ("softmax", "dr"):
        assert fit("memory://kept", head, tmp_path) == 0
    runs = [f"memory://kept/runs/{head}" for head in ("softmax", "dr")]
    both = json.loads(printed(capsys, "compare", *runs, "--json"))
    assert [side["folder"] for side in both["runs"]] == runs
    assert [side["epochs"] for side in both["runs"]] == [1, 1]
    assert [side["test"]["checkpoint"] for side in both["runs"]] == [best_checkpoint(run) for run in runs]
    assert both["dynamics"]["names"] == ["softmax", "dr"]


@pytest.mark.slow
def test_a_run_in_s3_is_kept_and_tested(few_glyphs, s3, tmp_path, capsys):
    check_run(s3, "s3://bucket/kept", "bucket/kept", tmp_path, capsys)


def test_histories_at_addresses_are_read_and_compared(memory, capsys):
    history = DynamicsHistory(tuple(range(9)), tuple(StepDynamics(1.1, 0.5 + i / 100, 1.0, 1.1) for i in range(9)))
    history.save("memory://steps/a.json")
    assert DynamicsHistory.load("memory://steps/a.json") == history
    assert compare_dynamics("memory://steps/a.json", history).measures["con_div"].steps == (9, 9)
    compared = printed(capsys, "compare", "memory://steps/a.json", "memory://steps/a.json", "--test=false")
    assert "9 and 9 measured steps" in compared
    with refused(FileNotFoundError, "memory://steps/b.json", "folder", "file"):
        DynamicsHistory.load("memory://steps/b.json")
    memory.pipe("/steps/c.json", b"{}")
    with refused(ValueError, "memory://steps/c.json", "training dynamics"):
        DynamicsHistory.load("memory://steps/c.json")


def test_a_run_that_is_not_there_is_named(memory, capsys):
    assert main(["compare", "memory://runs/a", "memory://runs/b"]) == 1
    assert missing_facts(capsys.readouterr().err, ("memory://runs/a", "folder", "run")) == []


def test_a_configuration_at_an_address_may_name_a_module(memory, capsys):
    memory.pipe("/settings/mine.yaml", (CONFIGS / "soft_ap_glyphs.yaml").read_bytes())
    with refused(SystemExit, 0):
        main(["fit", "--config", "memory://settings/mine.yaml", "--print_config"])
    assert "class_path" in yaml.safe_load(capsys.readouterr().out)["model"]
