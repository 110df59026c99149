"""How far a run was trained, from the files that it leaves."""

import shutil

import pytest
import torch
import yaml

from fewshot_callbacks.cli.fit import DEFAULTS
from fewshot_callbacks.cli.training_length import TrainingLength, notes_on_lengths, training_length
from tests.cli.words import CONFIGS


def run(folder, epochs=2, steps=6, callbacks=(), **trainer):
    """The folder of a run whose last checkpoint was written in this epoch, with these settings of its trainer."""
    (folder / "checkpoints").mkdir(parents=True)
    progress = {"epoch_progress": {"current": {"started": epochs, "completed": epochs - 1}}}
    torch.save(
        {"global_step": steps, "loops": {"fit_loop": progress}, "state_dict": {}}, folder / "checkpoints" / "last.ckpt"
    )
    callbacks = callbacks or (callback("ModelCheckpoint", monitor="val/mAP"), callback("ModelCheckpoint", monitor=None))
    settings = {"max_epochs": 10, "max_steps": -1, "check_val_every_n_epoch": 1} | trainer
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": settings | {"callbacks": list(callbacks)}}))
    return folder


def callback(name, **arguments):
    return {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": arguments}


def test_an_interrupted_run_is_told_with_its_epoch(tmp_path):
    length = training_length(run(tmp_path))
    assert length == TrainingLength(epochs=2, steps=6, unfinished="epoch 2 of 10")
    assert notes_on_lengths(("a", "b"), (length, length)) == [
        "a stopped at epoch 2 of 10, by its last checkpoint: its numbers are those of an unfinished training.",
        "b stopped at epoch 2 of 10, by its last checkpoint: its numbers are those of an unfinished training.",
    ]


@pytest.mark.parametrize(("trainer", "unfinished"), [
    ({"max_epochs": 2}, None),
    ({"max_epochs": 3}, "epoch 2 of 3"),
    ({"max_epochs": 3, "check_val_every_n_epoch": 2}, None),  # the last epoch ends without a checkpoint
    ({"max_epochs": 4, "check_val_every_n_epoch": 2}, "epoch 2 of 4"),
    ({"max_epochs": 3, "callbacks": [callback("ModelCheckpoint", every_n_epochs=2)]}, None),
    ({"max_epochs": 3, "callbacks": [callback("ModelCheckpoint", every_n_epochs=None)]}, "epoch 2 of 3"),
    ({"callbacks": [callback("EarlyStopping", monitor="val/mAP")]}, None),
    ({"callbacks": [callback("LearningRateMonitor")]}, "epoch 2 of 10"),  # Lightning adds a checkpoint
    ({"callbacks": [callback("ModelCheckpoint", every_n_train_steps=100)]}, None),
    ({"check_val_every_n_epoch": None}, None),
    ({"max_epochs": None}, None),
    ({"max_steps": 6}, None),
    ({"max_steps": 8}, None),  # ends within an epoch of three steps
    ({"max_steps": 9}, "step 6 of 9"),
    ({"max_epochs": None, "max_steps": 100}, "step 6 of 100"),
    ({"max_epochs": -1}, None),
])  # fmt: skip
def test_only_what_the_files_show_is_called_unfinished(tmp_path, trainer, unfinished):
    assert training_length(run(tmp_path, **trainer)).unfinished == unfinished


@pytest.mark.parametrize(
    "file",
    ["configs/soft_ap_folder.yaml", "configs/soft_ap_glyphs.yaml", DEFAULTS],
    ids=["folder", "glyphs", "defaults"],
)
def test_what_is_configured_here_keeps_the_newest_weights(file):
    callbacks = yaml.safe_load((CONFIGS.parent / file).read_text())["trainer"]["callbacks"]
    checkpoints = [one["init_args"] for one in callbacks if one["class_path"].endswith("ModelCheckpoint")]
    assert [(one["filename"], one.get("monitor")) for one in checkpoints] == [("best", "val/mAP"), ("last", None)]


def test_two_lengths_are_told_with_their_numbers():
    short, long = TrainingLength(2, 6, "epoch 2 of 10"), TrainingLength(10, 1200, None)
    assert notes_on_lengths(("a", "b"), (short, long)) == [
        "a stopped at epoch 2 of 10, by its last checkpoint: its numbers are those of an unfinished training.",
        "a was trained for 2 epochs (6 steps), b for 10 (1,200): a difference between the two may come from that alone.",
    ]
    assert len(notes_on_lengths(("a", "b"), (long, TrainingLength(10, 1000, None)))) == 1
    assert notes_on_lengths(("a", "b"), (long, long)) == []
    assert notes_on_lengths(("a", "b"), (long, None)) == []


def test_the_checkpoint_of_most_steps_tells(tmp_path):
    run(tmp_path, epochs=4, steps=12)
    shutil.copy(tmp_path / "checkpoints" / "last.ckpt", tmp_path / "checkpoints" / "a.ckpt")
    shutil.copy(run(tmp_path / "earlier") / "checkpoints" / "last.ckpt", tmp_path / "checkpoints" / "last.ckpt")
    assert training_length(tmp_path) == TrainingLength(4, 12, "epoch 4 of 10")


def test_a_run_that_does_not_tell_has_no_length(tmp_path):
    only_the_best = [
        callback("ModelCheckpoint", monitor="val/mAP", save_last=True)
    ]  # the best epoch need not be the last
    assert training_length(run(tmp_path / "best", callbacks=only_the_best)) is None
    assert training_length(tmp_path) is None
    folder = run(tmp_path / "weights")
    torch.save({"state_dict": {}}, folder / "checkpoints" / "last.ckpt")
    assert training_length(folder) is None
    (folder / "checkpoints" / "last.ckpt").write_text("damaged")
    assert training_length(folder) is None
    (run(tmp_path / "bare") / "config.yaml").unlink()
    assert training_length(tmp_path / "bare") is None
