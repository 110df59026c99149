"""Progress of a long evaluation, on the bar that the Trainer already shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from tqdm.auto import tqdm

QUIET_SECONDS = 1.0
"""An evaluation that is shorter than this shows no bar of its own."""


@contextmanager
def evaluation_progress(trainer: Trainer, words: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (pairs done, pairs in all) that shows them, if the evaluation is long and the Trainer shows bars."""
    shown = trainer.progress_bar_callback is not None and trainer.is_global_zero
    started, bar, task = time.monotonic(), None, None
    rich = trainer.progress_bar_callback if isinstance(trainer.progress_bar_callback, RichProgressBar) else None
    progress = getattr(rich, "progress", None)

    def show(done: int, total: int) -> None:
        nonlocal bar, task
        if not shown or time.monotonic() - started < QUIET_SECONDS:
            return
        if progress is not None:
            task = progress.add_task(words, total=total) if task is None else task
            progress.update(task, completed=done, total=total)
        elif rich is None:
            bar = bar or tqdm(desc=words, total=total, unit="pair", unit_scale=True, leave=False, dynamic_ncols=True)
            bar.total = total
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
        if progress is not None and task is not None:
            progress.remove_task(task)
