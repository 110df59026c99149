"""When pictures are drawn, what a failure does, and that they leave no trace."""

import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from numba.core.event import trigger_event

from fewshot_callbacks.callbacks import EmbeddingMap, RetrievalMonitor, RetrievalPanels
from fewshot_callbacks.callbacks._conduct import TimeShare, UsageError
from fewshot_callbacks.callbacks._loggers import Drawing as FigureDrawing
from fewshot_callbacks.callbacks._pictures import SHARE_KEY, PictureCallback
from fewshot_callbacks.callbacks._viewers import EvaluatedSet
from fewshot_callbacks.system.compile_notice import compiling_seconds
from tests.callbacks.fit_states import RandomNet, StateRecorder, seed_everything
from tests.callbacks.models import VALIDATION, Net, are_equal, episodes, items, loader, messages_of, retrieval, trainer
from tests.callbacks.panel_rows import indexed_panels
from tests.messages import missing_facts, refused, warned

pytestmark = pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "perf_counter", lambda: NOW[0])


NOW = [0.0]
"""Seconds on the clock of all pictures, so that the machine's load changes nothing."""


class Noted(PictureCallback):
    """Notes what it is shown, draws nothing, and takes as long as it is told."""

    def __init__(self, seconds: float = 0, every_n_epochs: int = 1, max_share: Any = None, prefix: Any = None) -> None:
        super().__init__(every_n_epochs, max_share, prefix)
        self.takes, self.epochs, self.keys = seconds, [], []

    def _figures(self, trainer: Any, evaluated: EvaluatedSet) -> Mapping[str, FigureDrawing]:
        self.epochs.append(trainer.current_epoch)
        self.keys.append(evaluated.key("x"))
        NOW[0] += self.takes
        return {}


class Clock(Callback):
    """Ten seconds of training in each epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        NOW[0] += 10


def fitted(*callbacks: Any, epochs: int, **settings: Any) -> Any:
    made = trainer(*callbacks, max_epochs=epochs, **settings)
    made.fit(Net(), loader(batch_size=18), loader(VALIDATION, batch_size=36))
    return made


def test_pictures_are_drawn_in_every_epoch_or_every_third_but_not_in_the_sanity_check() -> None:
    """Both validations of an epoch."""
    often, seldom = Noted(prefix="val/often"), Noted(every_n_epochs=3, prefix="val/seldom")
    callbacks = retrieval(name="often"), retrieval(name="seldom"), often, seldom
    fitted(*callbacks, epochs=4, num_sanity_val_steps=2, val_check_interval=0.5)
    assert (often.epochs, often.keys) == ([0, 0, 1, 1, 2, 2, 3, 3], 8 * ["val/often/x"])
    assert seldom.epochs == [0, 0, 3, 3]


def test_epochs_are_skipped_until_drawing_takes_its_share_and_that_is_said_once(caplog: Any) -> None:
    """After the first epoch, six seconds of drawing and ten of training in each are more than a fifth of the time."""
    noted = Noted(seconds=6, max_share=0.2)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        made = fitted(Clock(), retrieval(), noted, epochs=8)
    assert noted.epochs == [0, 2, 4, 7]
    assert len([record for record in caplog.records if "max_share" in record.message]) == 1
    assert float(made.callback_metrics[SHARE_KEY]) == pytest.approx(24 / 104)


def test_no_epoch_is_skipped_before_drawing_has_taken_a_second() -> None:
    noted = Noted(seconds=0.3, max_share=0.01)
    fitted(Clock(), retrieval(), noted, epochs=7)
    assert noted.epochs == [0, 1, 2, 3]


class Other(Noted):
    """May draw the same sets."""


def test_the_share_of_time_is_that_of_one_moment() -> None:
    """Of the first callback, before whose turn nothing was drawn; the mean with that of the last would be of no moment."""
    made = fitted(Clock(), Noted(seconds=6), retrieval(), Other(seconds=6), epochs=1)
    assert float(made.callback_metrics[SHARE_KEY]) == 0


def compiling(seconds: float) -> None:
    """Do what numba does while it compiles a kernel of this package."""
    kernel = SimpleNamespace(py_func=compiling_seconds)
    with trigger_event("numba:compile", data={"dispatcher": kernel}):
        NOW[0] += seconds
        time.sleep(0.05)  # the notice is printed by a thread of its own


class Compiling(Noted):
    """Compiles kernels for 17 seconds when it draws for the first time."""

    def _figures(self, trainer: Any, evaluated: EvaluatedSet) -> Mapping[str, FigureDrawing]:
        if not self.epochs:
            compiling(17.0)
        return super()._figures(trainer, evaluated)


def test_the_time_of_compiling_skips_no_epoch() -> None:
    """Seen red: 17 s of compiling in the first epoch made a run of eight epochs draw in the first one only."""
    noted = Compiling(seconds=0.5, max_share=0.2)
    made = fitted(Clock(), retrieval(), noted, epochs=8)
    assert noted.epochs == [0, 1, 2, 3, 4, 5, 6, 7]
    assert float(made.callback_metrics[SHARE_KEY]) == pytest.approx(4 / (80 + 17 + 4))


def test_the_time_of_compiling_is_counted_also_after_its_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the stopwatch of the notice stopped once the notice was printed."""
    monkeypatch.setattr("fewshot_callbacks.system.compile_notice.NOTICE_AFTER", 0.0)
    before = compiling_seconds()
    for _ in range(2):
        compiling(17.0)
    assert compiling_seconds() - before == 34.0


def test_all_pictures_share_one_clock() -> None:
    slow, other = Noted(seconds=50, prefix="val/a"), Noted(max_share=0.05, prefix="val/b")
    callbacks = retrieval(name="a"), retrieval(name="b"), slow, other
    fitted(Clock(), *callbacks, epochs=3)
    assert (slow.epochs, other.epochs) == ([0, 1, 2], [0])


def test_a_stopwatch_adds_up_also_after_an_error() -> None:
    watch = TimeShare()
    for seconds in (1.0, 2.0):
        with suppress(KeyError), watch.running():
            NOW[0] += seconds
            raise KeyError
        NOW[0] += 3.0
    assert (watch.seconds, watch.share) == (3.0, 3.0 / 9.0)


@pytest.mark.parametrize(
    ("prefix", "seen"),
    [(None, ["val/our/x", "val/ours/x"]), ("val/our", ["val/our/x"]), ("test", [])],
)
def test_a_prefix_chooses_the_monitors_whose_sets_are_drawn(prefix: str | None, seen: list[str]) -> None:
    noted = Noted(prefix=prefix)
    made = trainer(retrieval(name="our"), retrieval(name="ours"), noted)
    made.validate(Net(), loader(VALIDATION), verbose=False)
    assert noted.keys == seen


TWO_MAPS = "EmbeddingMaps", "prefixes", "prefix='test'"


@pytest.mark.parametrize(
    ("callbacks", "facts"),
    [
        ([RetrievalPanels()], ("RetrievalPanels", "Trainer(callbacks=[RetrievalMonitor(), RetrievalPanels()])")),
        ([RetrievalMonitor(), EmbeddingMap(prefix="mine")], ("EmbeddingMap(prefix='mine')", "'test'", "'val'")),
        ([RetrievalMonitor(), EmbeddingMap(), EmbeddingMap(prefix="val")], TWO_MAPS),
        (
            [RetrievalMonitor(name="a"), EmbeddingMap(prefix="val"), EmbeddingMap(prefix="val/a")],
            (*TWO_MAPS[:2], "prefix='test/a'"),
        ),
    ],
)
def test_mistakes_are_said_at_the_start(callbacks: list[Any], facts: tuple[str, ...]) -> None:
    with refused(UsageError, *facts):
        trainer(*callbacks).validate(Net(), loader(VALIDATION), verbose=False)


@pytest.mark.parametrize("where", ["_figures", "see_batch", "drawing"])
def test_an_error_is_a_warning_and_the_run_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("no picture today")

    panels = indexed_panels(images=fails) if where == "see_batch" else indexed_panels()
    if where == "_figures":
        monkeypatch.setattr(panels, "_figures", fails)
    elif where == "drawing":
        monkeypatch.setattr(panels, "_figures", lambda *_: {"val/one": fails, "val/two": lambda: Figure((1, 1))})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = trainer(retrieval(), panels, max_epochs=2)
        made.fit(Net(), loader(items()), loader(VALIDATION, shuffle=where == "see_batch"))
    [words] = [words for words in messages_of(caught) if "no picture today" in words]
    assert missing_facts(words, ("RetrievalPanels", "ArithmeticError")) == []
    assert made.current_epoch == 2
    assert Path("pictures/val/two").exists() == (where == "drawing")


def test_nothing_is_drawn_of_a_set_that_cannot_be_evaluated() -> None:
    class Diverged(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"embeddings": self.embed(batch[0]) * torch.nan, "labels": batch[1]}

    noted = Noted()
    with warned(UserWarning, "val/mAP", "NaN"):
        trainer(retrieval(), noted).validate(Diverged(), loader(VALIDATION), verbose=False)
    assert noted.keys == []


def test_a_fit_with_pictures_is_bit_identical_to_one_without(tmp_path: Path) -> None:
    ends = []
    for pictures in ([], [indexed_panels(1, 1, 1, k=2), EmbeddingMap(max_share=None, method="tsne", per_class=5)]):
        seed_everything(5)
        net, recorder = RandomNet(), StateRecorder()
        logger, monitor = CSVLogger(tmp_path / str(len(pictures))), retrieval(source="encoder", strict=True)
        made = trainer(monitor, *pictures, recorder, max_epochs=2, logger=logger, num_sanity_val_steps=1)
        made.fit(net, episodes(2), loader(VALIDATION))
        ends.append(recorder.states)
    assert len(list(tmp_path.rglob("*.png"))) == 2 * 4
    assert len(ends[0]) == len(ends[1])
    assert all(are_equal(one, two) for one, two in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_breaks_off_leaves_nothing_behind(error: type[BaseException]) -> None:
    class Breaks(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if batch_idx == 2:
                raise error("broken off")
            return super().validation_step(batch, batch_idx)

    panels = indexed_panels(images=lambda batch, place: batch[0][place])
    with pytest.raises((error, SystemExit)):
        trainer(retrieval(), panels).validate(Breaks(), loader(VALIDATION, shuffle=True), verbose=False)
    assert (panels._kept, panels._is_due) == ({}, False)
