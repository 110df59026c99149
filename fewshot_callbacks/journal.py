"""The state of a long evaluation in a folder, from which one that was killed goes on.

What passes over tiles count are sums, so that a pass may stop between two tiles, write down what its observers hold, and
go on. Passes are numbered; everything between them is made again from the same data, and comes out the same. Several
processes write at a moment that all have reached, and keep what was written before as well: one of them may have been
killed before the others, and all go on from the latest moment that is there of each.
"""

from __future__ import annotations

import json
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import Processes

Arrays = list[NDArray[Any]]
# Number of the part that follows all.
END = 2**31
# Seconds between two writings, at least.
EVERY = 60.0
# So many times as long as writing took is counted before the next time.
RARELY = 20


class Journal:
    """What an evaluation writes down, in a folder of its own.

    Args:
        folder: It is made if it is not there.
        of: What is evaluated, in plain values: an evaluation of anything else is refused.
        processes: Those that evaluate together.

    Raises:
        ValueError: The folder holds the state of another evaluation; names what differs.
    """

    def __init__(self, folder: Path, of: Mapping[str, Any], processes: Processes) -> None:
        self.folder, self.processes, self._passes = folder, processes, 0
        self.kept_from = time.monotonic()
        own, now = folder / f"{processes.rank}.json", json.loads(json.dumps(dict(of), default=str))
        ours = not folder.is_dir() or all(file.name.partition(".")[0].isdigit() for file in folder.iterdir())
        if folder.is_file() or not ours:
            raise ValueError(f"{folder} is no folder for the state of an evaluation. Name a new one, or an empty one.")
        if not own.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            new = own.with_suffix(".new")  # a kill leaves none, or the whole
            new.write_text(json.dumps(now), encoding="utf-8")
            new.replace(own)
        before = json.loads(own.read_text(encoding="utf-8"))
        differing = [f"{name} ({before.get(name)}, now {now[name]})" for name in now if before.get(name) != now[name]]
        if differing:
            raise ValueError(
                f"{folder} holds the state of another evaluation, by its {'; '.join(differing)}. Delete the folder to begin "
                "anew, or name another one."
            )

    def record(self, key: str) -> Record:
        """Return the record of the next pass; one that was written of a pass with another key is passed over."""
        self._passes += 1
        return Record(self, f"{self.processes.rank}.{self._passes}", key)

    def remembered(self, make: Callable[[], str]) -> str:
        """Return what was chosen at this place before, or make the choice and write it down; collective."""
        record = self.record("choice")
        chosen = record.resumed()
        if not chosen:
            chosen = [np.array(make())]
            record.write(chosen)
        return str(chosen[0])

    def remove(self) -> None:
        """Delete what this process has written, and the folder once it is empty."""
        for file in self.folder.glob(f"{self.processes.rank}.*"):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # another process writes there, or was the last one
            self.folder.rmdir()


class Record:
    """What was written of one pass.

    Attributes:
        part: Number of the part of the gallery that the pass is in.
        tiles: So many tiles of it are done.
    """

    def __init__(self, journal: Journal, name: str, key: str) -> None:
        self.journal, self.key, self.part, self.tiles = journal, key, 0, 0
        self._file, self._before = (journal.folder / f"{name}{kind}.npz" for kind in ("", ".before"))
        self.state: Callable[[], Arrays] = list

    def resumed(self) -> Arrays:
        """Return what was written at the latest moment of which all processes have it, [] of none; collective."""
        found = [self._read(file) for file in (self._file, self._before)]
        moments = self.journal.processes.gather([moment for moment, _ in found])
        shared = [moment for moment in moments[0] if moment and all(moment in others for others in moments)]
        if not shared:
            return []
        self.part, self.tiles = max(shared)
        return next(arrays for moment, arrays in found if moment == max(shared))

    def _read(self, file: Path) -> tuple[tuple[int, int] | None, Arrays]:
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as held:
                if str(held["key"]) == self.key:
                    part, tiles = held["moment"].tolist()
                    return (part, tiles), [held[f"arr_{n}"] for n in range(len(held.files) - 2)]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # there is none, or a disk was full
            pass
        return None, []

    def write(self, arrays: Arrays) -> None:
        """Write, so that a kill at any moment leaves what was written before, or this."""
        started, new = time.monotonic(), self._file.with_suffix(".new")
        of = {"key": np.array(self.key), "moment": np.array([self.part, self.tiles])}
        try:
            with new.open("wb") as file:
                np.savez(file, *arrays, allow_pickle=False, **of)
                file.flush()
                os.fsync(file.fileno())
            if self._file.exists():
                self._file.replace(self._before)
            new.replace(self._file)
        except OSError as error:  # what has been computed is worth more than a second copy of it
            warnings.warn(f"The state of the evaluation could not be written: {error}. It goes on.", stacklevel=2)
        now = time.monotonic()
        self.journal.kept_from = now + max(0.0, RARELY * (now - started) - EVERY)

    def _is_due(self) -> bool:
        return time.monotonic() >= self.journal.kept_from + EVERY

    def spells(self, tiles: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """Yield the tiles of a part that are left, up to a moment at which what was counted is written, and so on."""
        left, alone, ended = islice(tiles, self.tiles, None), self.journal.processes.count == 1, False

        def until_due() -> Iterator[Any]:
            nonlocal ended
            for tile in left:
                yield tile
                self.tiles += 1
                if alone and self._is_due():
                    return
            ended = True

        while not ended:
            yield until_due()
            if not ended:
                self.write(self.state())

    def reached(self, part: int, *, end: bool = False) -> None:
        """Learn that all parts before this one are done; write if it is time to. Collective."""
        if (part, 0) <= (self.part, self.tiles):  # where it goes on
            return
        self.part, self.tiles = part, 0
        (due,) = self.journal.processes.largest([float(self._is_due() or (end and self._file.exists()))])
        if due:
            self.write(self.state())


_current: ContextVar[Journal | None] = ContextVar("journal", default=None)
# Returns the journal of the block around the call; None where nothing is written.
current_journal = _current.get


@contextmanager
def kept(journal: Journal | None) -> Iterator[None]:
    """Write what is evaluated inside the block into a journal, and remove it once that ends without an error."""
    token = _current.set(journal)
    try:
        yield
    finally:
        _current.reset(token)
    if journal is not None:
        journal.remove()
