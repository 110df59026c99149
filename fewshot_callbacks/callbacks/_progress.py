"""Progress of a long evaluation, on the bar that the Trainer already shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from tqdm.auto import tqdm

# An evaluation that is shorter than this shows no progress bar, which would be gone as soon as it is seen.
QUIET_SECONDS = 1.0


@contextmanager
def evaluation_progress(trainer: Trainer, words: str, unit: str = "pair") -> Iterator[Callable[[int, int], None]]:
    """A function of (units done, units in all) that shows them, if the evaluation is long and the Trainer shows bars."""
    trainer_bar = trainer.progress_bar_callback
    shown = trainer_bar is not None and not getattr(trainer_bar, "is_disabled", False) and trainer.is_global_zero
    started, bar, task = time.monotonic(), None, None
    rich = trainer_bar if isinstance(trainer_bar, RichProgressBar) else None
    progress = getattr(rich, "progress", None)

    def show(done: int, total: int) -> None:
        nonlocal bar, task
        if not shown or time.monotonic() - started < QUIET_SECONDS:
            return
        if progress is not None:
            task = progress.add_task(words, total=total) if task is None else task
            progress.update(task, completed=done, total=total)
        # tqdm and Rich would write into one another.
        elif rich is None:
            if bar is None:
                bar = tqdm(desc=words, total=total, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True)
            bar.total = total
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
        if progress is not None and task is not None:
            progress.remove_task(task)
