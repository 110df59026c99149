"""How far a run was trained, and its best checkpoint, from the files that it leaves."""

import os

import pytest

from fewshot_callbacks.cli.runs import RECORD, TrainingRecord, best_checkpoint, notes_on_lengths

ENDED = TrainingRecord(epochs=10, steps=1200, max_epochs=10, ended=True, head="dr")
STOPPED = TrainingRecord(epochs=2, steps=240, max_epochs=10, ended=False, head="dr")


def test_a_record_is_read_as_it_was_written(tmp_path):
    STOPPED.save(tmp_path / "new")
    assert TrainingRecord.of(tmp_path / "new") == STOPPED
    for content in ("", "[]", "{}", "{"):
        (tmp_path / RECORD).write_text(content)
        assert TrainingRecord.of(tmp_path) is None


def test_what_did_not_end_and_what_differs_is_told_with_its_numbers():
    assert notes_on_lengths(("a", "b"), (STOPPED, ENDED)) == [
        "a stopped after epoch 2 of 10: its numbers are those of an unfinished training.",
        "a was trained for 2 epochs (240 steps), b for 10 (1,200): a difference between the two may come from that alone.",
    ]
    assert notes_on_lengths(("a", "b"), (ENDED, ENDED)) == notes_on_lengths(("a", "b"), (ENDED, None)) == []


@pytest.mark.parametrize("folder", ["checkpoints", "."])
def test_the_newest_best_checkpoint_is_found(folder, tmp_path):
    assert best_checkpoint(tmp_path) is None
    (tmp_path / folder).mkdir(exist_ok=True)
    for age, name in enumerate(("best-v1.ckpt", "best.ckpt", "last.ckpt")):
        (tmp_path / folder / name).write_text("")
        os.utime(tmp_path / folder / name, (1000 - age, 1000 - age))
    assert best_checkpoint(tmp_path) == tmp_path / folder / "best-v1.ckpt"
