"""The state of a long evaluation in a folder, from which one that was killed goes on.

What passes over tiles count are sums, so that a pass may stop between two tiles, write down what its observers hold, and
go on. Passes are numbered; everything between them is made again from the same data, and comes out the same. Several
processes write at a moment that all have reached, and keep what was written before as well: one of them may have been
killed before the others, and all go on from the latest moment that is there of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

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


# Stands at the beginning of every file that is written here, beside a name that begins with the same word.
MARK = "fewshot_callbacks_state"
# Bytes at the beginning of a file in which the mark is found: those of a zip file stand behind 30 others.
HEAD = 64
_NAME = re.compile(rf"{MARK}-(?P<rank>\d+)(\.json|\.\d+(\.before)?\.npz)(\.[0-9a-f]+\.new)?|{MARK}\.folder")


class Journal:
    """What an evaluation writes down, in a folder of its own.

    A folder that holds anything else is refused, so that no file is removed or overwritten that was not written here.

    Args:
        folder: It is made if it is not there.
        of: What is evaluated, in plain values: an evaluation of anything else is refused.
        processes: Those that evaluate together.

    Raises:
        ValueError: The folder holds the state of another evaluation, and the message names what differs; or a file that is
            no state, or a damaged one.
    """

    def __init__(self, folder: Path, of: Mapping[str, Any], processes: Processes) -> None:
        self.folder = folder
        self.processes = processes
        self.kept_from = time.monotonic()
        self._passes = 0
        now = json.loads(json.dumps(dict(of), default=str))
        # no state of another evaluation is read, even where its description is lost
        self.fingerprint = hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()
        _refuse_foreign_files(folder)
        description = folder / f"{MARK}-{processes.rank}.json"
        if description.is_file():
            self._compare(_read_description(description), now)
        else:
            _make_folder(folder)
            _write_whole(description, lambda file: file.write(json.dumps({MARK: now}).encode()))

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Refuse an evaluation of anything else than what was evaluated before.

        Raises:
            ValueError: Names what differs.
        """
        names = dict.fromkeys((*before, *now))
        differing = [
            f"{name} ({before.get(name)}, now {now.get(name)})" for name in names if before.get(name) != now.get(name)
        ]
        if differing:
            raise ValueError(
                f"{self.folder} holds the state of another evaluation, by its {', '.join(differing)}. Delete the folder to "
                "begin anew, or name another one."
            )

    def record(self, key: str) -> Record:
        """Return the record of the next pass; one that was written of a pass with another key is passed over."""
        self._passes += 1
        return Record(self, f"{MARK}-{self.processes.rank}.{self._passes}", f"{self.fingerprint} {key}")

    def remembered(self, make: Callable[[], str]) -> str:
        """Return what was chosen at this place before, or make the choice and write it down; collective."""
        record = self.record("choice")
        chosen = record.resumed()
        if not chosen:
            chosen = [np.array(make())]
            record.write(chosen)
        return str(chosen[0])

    def remove(self) -> None:
        """Delete what this process has written, and the folder once it is empty, if it was made here."""
        own = [file for file, rank in self._states().items() if rank == str(self.processes.rank)]
        for file in sorted(own, key=lambda file: file.suffix == ".json"):  # last what says of which evaluation they are
            file.unlink(missing_ok=True)
        # Looked at anew: of several processes that end at the same time, the last one finds no state any more.
        made = self.folder / f"{MARK}.folder"
        if self._states() or not made.exists():
            return
        made.unlink(missing_ok=True)
        with suppress(OSError):  # another process was faster, or somebody has put a file there
            self.folder.rmdir()

    def _states(self) -> dict[Path, str]:
        """Return the files of states in the folder, each with the rank of the process that wrote it."""
        try:
            found = {file: _NAME.fullmatch(file.name) for file in self.folder.iterdir()}
        except FileNotFoundError:  # another process has removed the folder
            return {}
        return {file: match["rank"] for file, match in found.items() if match is not None and match["rank"] is not None}


def _refuse_foreign_files(folder: Path) -> None:
    """Check that a folder is missing, or holds nothing but states.

    Raises:
        ValueError: It holds something else; names the first such file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Name a new folder, or an empty one.")
    for file in sorted(folder.iterdir()) if folder.exists() else ():
        if _NAME.fullmatch(file.name) is None:
            raise ValueError(
                f"{folder} holds {file.name}, which is no state of an evaluation, and would not be safe there. Name a new "
                "folder, or an empty one."
            )
        with suppress(FileNotFoundError):  # another process has just given it its name
            if not _has_mark(file):
                raise _damaged(file)


def _has_mark(file: Path) -> bool:
    """Find out whether a file begins as a state does; one that is empty was about to be written.

    Raises:
        FileNotFoundError: Another process has given it another name meanwhile.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        return False
    with file.open("rb") as opened:
        head = opened.read(HEAD)
    return not head or MARK.encode() in head


def _damaged(file: Path) -> ValueError:
    return ValueError(
        f"{file.parent} holds {file.name}, which was damaged. Delete the folder to begin anew, or name another one."
    )


def _read_description(file: Path) -> dict[str, Any]:
    """Read of which evaluation the states of a process are.

    Raises:
        ValueError: The file was damaged.
    """
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        return dict(held[MARK].items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(file) from error


def _make_folder(folder: Path) -> None:
    """Make a folder that is not there, and note in it that it was made here."""
    with suppress(FileExistsError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        (folder / f"{MARK}.folder").write_text(f"{MARK}: the folder is removed with the last state in it.")


def _write_whole(path: Path, write: Callable[[BinaryIO], Any], before: Path | None = None) -> None:
    """Write a file on the disk, so that a kill leaves an older one or the whole.

    Args:
        path: The file.
        write: Writes its content.
        before: Name that an older file is given.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")  # a second process may write the same one
    try:
        with new.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if before is not None and path.exists():
            path.replace(before)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


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
                if str(held[MARK]) == self.key:
                    part, tiles = held["moment"].tolist()
                    return (part, tiles), [held[f"arr_{n}"] for n in range(len(held.files) - 2)]
        except Exception:  # there is none, or it was damaged: zipfile and NumPy promise no class of error for that
            return None, []
        return None, []

    def write(self, arrays: Arrays) -> None:
        """Write, so that a kill at any moment leaves what was written before, or this."""
        started = time.monotonic()
        # the mark is the first of them, and so at the beginning of the file
        of = {MARK: np.array(self.key), "moment": np.array([self.part, self.tiles])}
        try:
            _write_whole(self._file, lambda file: np.savez(file, *arrays, allow_pickle=False, **of), self._before)
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
        try:
            journal.remove()
        except OSError as error:  # what has been computed is worth more than a tidy disk
            warnings.warn(f"The state of the evaluation could not be removed: {error}.", stacklevel=2)
