"""The state of a long evaluation in a folder, from which the evaluation resumes after a kill.

A pass over tiles adds up counts. So it may stop between two tiles, write the state of its observers, and continue.
Passes are numbered. Everything between them is computed again from the same data, with the same result.

Several processes write at a position that all processes have reached. Each process also keeps its previous state, since one
process may be killed before the others: all resume from the latest position for which every process has a state.
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
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError

Arrays = list[NDArray[Any]]

# Smallest number of seconds between the end of a write and the next write.
INTERVAL = 60.0
# After a write that took t seconds, the next write follows after `COST_FACTOR * t` seconds if that is more than `INTERVAL`.
# So writing takes at most a twentieth of the time.
COST_FACTOR = 20

# The name and the content of every file that is written here begin with it.
MARK = "fewshot_callbacks_state"
# The mark is among this many first bytes of a file: in a zip file it follows after 30 other bytes.
HEAD_BYTES = 64
_STATE_NAME = re.compile(rf"{MARK}-(?P<rank>\d+)(\.json|\.\d+(\.before)?\.npz)(\.[0-9a-f]+\.new)?|{MARK}\.folder")


class Position(NamedTuple):
    """The progress of a pass: all steps before `step` are done, and the first `tiles` tiles of `step`."""

    step: int = 0
    tiles: int = 0


# Number of the step that follows all steps of a pass.
_AFTER_ALL_STEPS = 2**31


class Journal:
    """The states that an evaluation writes into a folder.

    A folder with any other file is an error, so only files that were written here are removed or overwritten.

    There is no lock: two evaluations in one folder at the same time lose states, but their results are correct.

    Args:
        folder: The folder of the states. It is created if it does not exist.
        description: Description of the evaluation, in plain values. The state of any other evaluation is an error.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any], processes: Processes) -> None:
        self.folder = folder
        self.processes = processes
        self._timer = WriteTimer()
        # number of passes, choices and results that have begun
        self._entries = 0
        plain = json.loads(json.dumps(dict(description), default=str))
        # Every key contains it, so the state of another evaluation is never read, even if its description is lost.
        self._fingerprint = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
        _refuse_foreign_files(folder)
        file = folder / f"{MARK}-{processes.rank}.json"
        self.goes_on = file.is_file()
        """whether the folder contained the state of this evaluation"""
        if self.goes_on:
            self._refuse_another_evaluation(_read_description(file), plain)
        else:
            _make_folder(folder)
            _write_whole(file, lambda opened: opened.write(json.dumps({MARK: plain}).encode()))

    def begin_pass(self, key: str, state: Callable[[], Arrays]) -> tuple[PassRecord, Arrays]:
        """Return the record of the next pass, and the state from which the pass resumes. *Collective*.

        A state with another key is ignored. `state` returns the state between two tiles.

        Returns:
            The record, and what `state` returned at the position of the record; [] if the pass starts from the beginning.
        """
        files = self._next_files(key)
        position, arrays = files.read()
        return PassRecord(files, position, state), arrays

    def recorded_choice(self, choose: Callable[[], str]) -> str:
        """Return the choice from before the evaluation was killed; otherwise choose, and write it. *Collective*."""
        files = self._next_files("choice")
        position, arrays = files.read()
        if arrays:
            return str(arrays[0])
        choice = np.array(choose())
        files.write(position, [choice])
        return str(choice)

    def recorded_result(self, compute: Callable[[], Arrays]) -> Arrays:
        """Return the result from before the evaluation was killed; otherwise compute and write it. *Collective*.

        The states of the passes in between are then removed. `compute` may begin passes.
        """
        files = self._next_files("result")
        position, arrays = files.read()
        first = self._entries
        if arrays:  # later passes get the same numbers as without a kill
            self._entries += int(arrays[0])
            return arrays[1:]
        result = compute()
        files.write(position, [np.array(self._entries - first), *result])
        for number in range(first + 1, self._entries + 1):
            self._files_of(number, "").remove()
        return result

    def remove(self) -> None:
        """Delete this rank's files, and the folder if it was created here and is empty."""
        files = [file for file, rank in self._state_files().items() if rank == str(self.processes.rank)]
        # The description is removed last, because it identifies the evaluation of the other files.
        for file in sorted(files, key=lambda file: file.suffix == ".json"):
            file.unlink(missing_ok=True)
        # The folder is listed again. If several processes end at the same time, the last process finds no state.
        folder_mark = self.folder / f"{MARK}.folder"
        if self._state_files() or not folder_mark.exists():
            return
        folder_mark.unlink(missing_ok=True)
        with suppress(OSError):  # another process was faster, or the folder has a new file
            self.folder.rmdir()

    def _next_files(self, key: str) -> StateFiles:
        """Return the files of the next pass or choice."""
        self._entries += 1
        return self._files_of(self._entries, key)

    def _files_of(self, number: int, key: str) -> StateFiles:
        """Return the files of a pass, a choice or a result."""
        name = f"{MARK}-{self.processes.rank}.{number}"
        return StateFiles(self.folder, name, f"{self._fingerprint} {key}", self.processes, self._timer)

    def _refuse_another_evaluation(self, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        """Raise an error if an evaluation differs from the recorded evaluation."""
        names = dict.fromkeys((*recorded, *current))
        differences = [
            f"{name} ({recorded.get(name)}, now {current.get(name)})"
            for name in names
            if recorded.get(name) != current.get(name)
        ]
        if differences:
            raise InputError(
                f"{self.folder} contains the state of another evaluation, which differs in {', '.join(differences)}. "
                "Repeat that evaluation, delete the folder to start again, or pass another folder."
            )

    def _state_files(self) -> dict[Path, str]:
        """Return a dictionary: state file in the folder -> rank of the process that wrote it."""
        try:
            matches = {file: _STATE_NAME.fullmatch(file.name) for file in self.folder.iterdir()}
        except FileNotFoundError:  # another process has removed the folder
            return {}
        ranks = {file: match["rank"] for file, match in matches.items() if match is not None}
        return {file: rank for file, rank in ranks.items() if rank is not None}


_current: ContextVar[Journal | None] = ContextVar("journal", default=None)


def current_journal() -> Journal | None:
    """Return the journal of the surrounding `journaling` block; None if nothing is written."""
    return _current.get()


def recorded_result(compute: Callable[[], Arrays]) -> Arrays:
    """Return the result of a killed process, or else compute it. *Collective*."""
    journal = current_journal()
    return compute() if journal is None else journal.recorded_result(compute)


@contextmanager
def journaling(journal: Journal | None) -> Iterator[None]:
    """Write states of evaluations in the block; delete the files if it ends without an error."""
    token = _current.set(journal)
    try:
        yield
    finally:
        _current.reset(token)
    if journal is None:
        return
    try:
        journal.remove()
    except OSError as error:  # the result matters more than a tidy disk
        warnings.warn(f"The state of the evaluation could not be removed: {error}.", stacklevel=2)


class PassRecord:
    """The progress of one pass, whose state is written from time to time.

    Args:
        position: The position at which the pass begins.
    """

    def __init__(self, files: StateFiles, position: Position, state: Callable[[], Arrays]) -> None:
        self._files = files
        self._position = position
        self._state = state

    @property
    def step(self) -> int:
        """The current step of the pass."""
        return self._position.step

    def begin_step(self, step: int) -> None:
        """Record that all steps before this one are done; write the state if it is due. *Collective*."""
        if self._enter(step):
            self._write_if(self._files.timer.is_due())

    def finish(self) -> None:
        """Record that all steps are done; write the state if it is due or an earlier state was written. *Collective*."""
        if self._enter(_AFTER_ALL_STEPS):
            self._write_if(self._files.timer.is_due() or self._files.exist())

    def until_due(self, tiles: Iterable[Any]) -> Iterator[Iterator[Any]]:
        """Yield the remaining tiles of a step in groups; the state is written between two groups.

        All tiles of a group have to be done before the next group is requested. `tiles` includes finished tiles.
        """
        remaining = islice(tiles, self._position.tiles, None)
        tile = next(remaining, None)
        while tile is not None:
            yield self._group(chain([tile], remaining))
            tile = next(remaining, None)
            if tile is not None:
                self._files.write(self._position, self._state())

    def _group(self, tiles: Iterator[Any]) -> Iterator[Any]:
        """Yield tiles until the state is due; several processes write only between steps."""
        is_alone = self._files.processes.count == 1
        for tile in tiles:
            yield tile
            self._position = self._position._replace(tiles=self._position.tiles + 1)
            if is_alone and self._files.timer.is_due():
                return

    def _enter(self, step: int) -> bool:
        """Return whether the pass has not reached the beginning of a step before, and move it there."""
        position = Position(step)
        if position <= self._position:  # the pass resumes from there
            return False
        self._position = position
        return True

    def _write_if(self, is_due: bool) -> None:
        """Write the state in all processes if it is due in one process. *Collective*."""
        (due,) = self._files.processes.largest([float(is_due)])
        if due:
            self._files.write(self._position, self._state())


class StateFiles:
    """The files in which one process writes the latest state of one pass, and the previous state.

    Args:
        key: The pass, choice or result that the state belongs to.
    """

    def __init__(self, folder: Path, name: str, key: str, processes: Processes, timer: WriteTimer) -> None:
        self.processes = processes
        self.timer = timer
        self._key = key
        self._latest = folder / f"{name}.npz"
        self._previous = folder / f"{name}.before.npz"

    def exist(self) -> bool:
        """Return whether a state was written."""
        return self._latest.exists()

    def remove(self) -> None:
        """Delete the files."""
        self._latest.unlink(missing_ok=True)
        self._previous.unlink(missing_ok=True)

    def read(self) -> tuple[Position, Arrays]:
        """Return the latest position for which all processes have a state, and the state. *Collective*.

        Without one, return the first position and [].
        """
        states = [state for state in map(self._read_file, (self._latest, self._previous)) if state is not None]
        positions = self.processes.gather([position for position, _ in states])
        common = set(positions[0]).intersection(*positions[1:])
        if not common:
            return Position(), []
        latest = max(common)
        return next(state for state in states if state[0] == latest)

    def write(self, position: Position, arrays: Arrays) -> None:
        """Write a state. A kill leaves the previous or this state; a full disk gives a warning."""
        started = time.monotonic()
        # The mark is the first array, so that it is at the beginning of the file.
        named_arrays = {MARK: np.array(self._key), "position": np.array(position)}
        try:
            _write_whole(
                self._latest, lambda file: np.savez(file, *arrays, allow_pickle=False, **named_arrays), self._previous
            )
        except OSError as error:  # the computed state matters more than a second copy of it
            warnings.warn(
                f"The state of the evaluation could not be written: {error}. It continues anyway.", stacklevel=2
            )
        self.timer.restart(started)

    def _read_file(self, file: Path) -> tuple[Position, Arrays] | None:
        """Return the position and the state of a file; None if missing, damaged, or of another key."""
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as content:
                if str(content[MARK]) != self._key:
                    return None
                position = Position(*content["position"].tolist())
                return position, [content[f"arr_{number}"] for number in range(len(content.files) - 2)]
        except Exception:  # zipfile and NumPy document no error class for a damaged file
            return None


class WriteTimer:
    """A timer of states: the next is due `INTERVAL` seconds after the last write, or later if that write took long."""

    def __init__(self) -> None:
        self._next_write = time.monotonic() + INTERVAL

    def is_due(self) -> bool:
        """Return whether the next state should be written now."""
        return time.monotonic() >= self._next_write

    def restart(self, started: float) -> None:
        """Restart the timer after a write that started at a time of `time.monotonic` and ends now."""
        ended = time.monotonic()
        self._next_write = ended + max(INTERVAL, COST_FACTOR * (ended - started))


# ---------------------------------------------------------------------------------------------------- files in the folder


def _refuse_foreign_files(folder: Path) -> None:
    """Raise an error unless a folder does not exist or only contains states."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file. Pass a new or an empty folder.")
    for file in sorted(folder.iterdir()):
        if _STATE_NAME.fullmatch(file.name) is None:
            raise InputError(
                f"{folder} contains {file.name}, which is not the state of an evaluation and might be overwritten. Pass a "
                "new or an empty folder."
            )
        with suppress(FileNotFoundError):  # another process has just renamed it
            if not _has_mark(file):
                raise _damaged(file)


def _has_mark(file: Path) -> bool:
    """Return whether a file begins like a state, or is empty: a process may be about to write it.

    Raises:
        FileNotFoundError: Another process has renamed it meanwhile.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        return False
    with file.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
    return not head or MARK.encode() in head


def _damaged(file: Path) -> ValueError:
    return InputError(
        f"{file.parent} contains {file.name}, which is damaged. Delete the folder to start again, or pass another folder."
    )


def _read_description(file: Path) -> dict[str, Any]:
    """Return the description of the evaluation whose states a process has written."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content[MARK].items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(file) from error


def _make_folder(folder: Path) -> None:
    """Create a folder if it does not exist, and note in it that it was created here."""
    with suppress(FileExistsError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        (folder / f"{MARK}.folder").write_text(f"{MARK}: the folder is removed with the last state in it.")


def _write_whole(path: Path, write: Callable[[BinaryIO], Any], older_path: Path | None = None) -> None:
    """Write a file. A kill leaves the old file or the complete new file.

    The old file is moved to `older_path` if that is given, and replaced otherwise.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")  # a second evaluation may write the same file
    try:
        with new.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if older_path is not None and path.exists():
            path.replace(older_path)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
