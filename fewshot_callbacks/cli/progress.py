"""The progress bar of long commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(*, is_wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of finished pairs, and yield the function that moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    # A bar writes control characters, which do not belong in a file or a pipe.
    is_hidden = not is_wanted or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_hidden) as bar:
        task = bar.add_task("pairs", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
