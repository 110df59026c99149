"""`read_trials` reads a list of trials: LFW pairs, VoxCeleb trials or a table of scores."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.files.text import Line, read_lines
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted, verb

_CALL = "read_trials"
_FORMS = (
    "Pass LFW's pairs.txt ('Ann 1 4', 'Ann 1 Bob 2'), VoxCeleb trials ('1 id1/a.wav id1/b.wav'), or a table whose "
    "first line names its columns, separated by commas: score, same and, if you have them, first, second and fold."
)
# Column separators that spreadsheets write.
_SEPARATORS = (",", "\t", ";")


@dataclass(frozen=True)
class TrialList:
    """A list of trials, as `read_trials` returns it. A field is None if the file does not have it.

    Attributes:
        same: Whether both sides of each trial have one identity.
        first: Identity of the first side.
        second: Identity of the second side.
        folds: Fold of each trial.
        scores: Score of each trial, for a table of scores.
        items: The names of all first sides and the names of all second sides, for a list without scores: `Ann_0004` in
            LFW, `id1/a.wav` in VoxCeleb.
        slices: Attribute -> its values for the first sides and for the second sides, for `evaluate_trials`.
    """

    same: tuple[bool, ...]
    first: tuple[str, ...] | None = None
    second: tuple[str, ...] | None = None
    folds: tuple[str, ...] | None = None
    scores: tuple[float, ...] | None = None
    items: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    slices: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] | None = None

    def __post_init__(self) -> None:
        """Normalise the Unicode form of item names, as `rows` does for ids.

        Raises:
            ValueError: If a field does not have one entry per trial, or if `items` is not two columns.
        """
        columns = {name: getattr(self, name) for name in ("first", "second", "folds", "scores")}
        items = None if self.items is None else _two_columns(self.items)
        if items is not None:
            columns["items[0]"], columns["items[1]"] = items
        for attribute, sides in (self.slices or {}).items():
            columns |= {f"slices[{attribute!r}][{index}]": values for index, values in enumerate(sides)}
        wrong = [f"{name} has {len(of)}" for name, of in columns.items() if of is not None and len(of) != len(self)]
        if wrong:
            raise InputError(
                f"TrialList: same has {counted(len(self), 'trial')}, but {' and '.join(wrong)}. Pass one entry per "
                "trial. items is two tuples: the names of all first sides, and the names of all second sides."
            )
        if items is not None:
            first, second = (tuple(composed_form(str(name)) for name in names) for names in items)
            object.__setattr__(self, "items", (first, second))

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self.same)

    def __str__(self) -> str:
        """Return a table of the first trials."""
        kinds = ["target" if same else "non-target" for same in self.same[:SHOWN_ROWS]]
        names: tuple[tuple[str, ...], ...] = ()
        if self.items:
            names = self.items
        elif self.first is not None and self.second is not None:
            names = (self.first, self.second)
        scores = () if self.scores is None else [f"{score:g}" for score in self.scores[:SHOWN_ROWS]]
        columns = {"trial": kinds, "score": scores, "fold": self.folds or ()}
        columns |= dict(zip(("first", "second"), names, strict=False))
        cells_of_column = {
            name: [printable(cell) for cell in cells[:SHOWN_ROWS]] for name, cells in columns.items() if cells
        }
        rows = list(zip(*cells_of_column.values(), strict=True))
        folds = "" if self.folds is None else f", {counted(len(set(self.folds)), 'fold')}"
        head = f"{counted(len(self), 'trial')}, {sum(self.same):,} target, {len(self) - sum(self.same):,} non-target{folds}"
        return "\n".join([head, *table([*cells_of_column], rows, len(self))])

    def __repr__(self) -> str:
        return str(self)

    def rows(self, ids: Sequence[str]) -> tuple[Int[Tensor, "trials"], Int[Tensor, "trials"]]:
        """Return the embedding indices of both sides, for `trial_scores`.

        Args:
            ids: Name of each embedding, as in the list. A path matches the name of its file.

        Raises:
            ValueError: If the list has scores instead of items, or if an item has no embedding.
        """
        if self.items is None:
            raise InputError(
                "TrialList.rows: this list has scores instead of items. Pass its scores to evaluate_trials."
            )
        first, second = self.known_rows(ids)
        missing: list[str] = []
        for name, other_name, row, other_row in zip(*self.items, first.tolist(), second.tolist(), strict=True):
            missing += [item for item, index in ((name, row), (other_name, other_row)) if index < 0]
        if missing:
            raise InputError(
                f"TrialList.rows: {counted(len(set(missing)), 'item')} of the list "
                f"{verb(len(set(missing)), 'does', 'do')} not have exactly one embedding. The first is {missing[0]!r}, "
                f"and the ids begin with {[str(name) for name in ids[:2]]}. Write the ids as in the list, or embed "
                "these items, too."
            )
        return first, second

    def known_rows(self, ids: Sequence[str]) -> tuple[Int[Tensor, "trials"], Int[Tensor, "trials"]]:
        """Return the indices of `rows`, but -1 for an item without an embedding or with several."""
        assert self.items is not None
        index_of: dict[str, int] = {}
        names = [composed_form(str(name)) for name in ids]
        stems = [PurePosixPath(name).stem for name in names]
        # Whole names come last and take precedence over file names. A name that two embeddings share matches neither.
        for spellings in (stems, names):
            count = Counter(spellings)
            index_of |= {name: index if count[name] == 1 else -1 for index, name in enumerate(spellings)}
        first, second = (
            torch.tensor([index_of.get(name, -1) for name in names], dtype=torch.int64) for names in self.items
        )
        return first, second

    def names(self, name: str) -> bool:
        """Return whether an item of the list has this name, or the name of this file."""
        composed = composed_form(name)
        return composed in self._item_names or PurePosixPath(composed).stem in self._item_names

    @cached_property
    def _item_names(self) -> frozenset[str]:
        """Names of all items; empty for a table of scores."""
        return frozenset(name for names in self.items or () for name in names)

    def chosen(self, trials: Sequence[int]) -> TrialList:
        """Return the trials with these indices."""

        def rows(column: tuple[Any, ...] | None) -> Any:
            return None if column is None else tuple(column[trial] for trial in trials)

        items = None if self.items is None else (rows(self.items[0]), rows(self.items[1]))
        slices = None
        if self.slices is not None:
            slices = {attribute: (rows(first), rows(second)) for attribute, (first, second) in self.slices.items()}
        return TrialList(
            rows(self.same), rows(self.first), rows(self.second), rows(self.folds), rows(self.scores), items, slices
        )


def _two_columns(items: Any) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of all first sides, and of all second sides."""
    columns = tuple(items)
    has_strings = any(isinstance(column, str) for column in columns)
    if len(columns) != 2 or has_strings:
        given = counted(len(columns), "string" if has_strings else "entry")
        raise InputError(
            "TrialList: items needs two columns, items=(first_items, second_items): the names of all first sides, and the "
            f"names of all second sides. You passed {given}. If you have a list of pairs, pass items=tuple(zip(*pairs))."
        )
    return columns


def read_trials(path: str | Path, slices: Sequence[str] = ()) -> TrialList:
    """Return the trials in a file. The format is detected from its lines.

    - LFW's `pairs.txt`: the first line has the numbers of folds and of pairs. `Ann 1 4` is two images of Ann, and
      `Ann 1 Bob 2` is images of two people. The folds are in order. Without the first line, there are no folds.
    - VoxCeleb lists: `1 id1/a/1.wav id1/b/2.wav` is two recordings of one speaker, and a line with 0 is two speakers. The
      first folder is the speaker, if this agrees with all lines.
    - A table, separated by commas, semicolons or tabs. The first line names the columns `score` and `same` (1 or 0) and, if
      you have them, `first` and `second` (identities) and `fold`.

    A byte order mark, empty lines and blanks around the cells are ignored.

    Args:
        path: The file.
        slices: Attributes to read from a table of scores. `"age"` reads the columns `first_age` and `second_age`, or the
            single column `age`.

    Returns:
        The trials, for `evaluate_trials`.

    Raises:
        ValueError: If the file does not exist, lacks the columns of an attribute, or has a line in another format. The
            message names the line.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lines = ("score,same", "0.9,1", "0.2,0")
        ...     _ = (Path(folder) / "trials.csv").write_text(chr(10).join(lines))
        ...     trials = read_trials(Path(folder) / "trials.csv")
        >>> trials.scores, trials.same
        ((0.9, 0.2), (True, False))
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{_CALL}: {path} does not exist or is not a file. Pass the path of a list of trials.")
    try:
        lines = [line._replace(text=composed_form(line.text)) for line in read_lines(path)]
    except ValueError as error:
        raise InputError(f"{_CALL}: {error} {_FORMS}") from None
    if not lines:
        raise InputError(f"{_CALL}: {path} is empty. {_FORMS}")
    reader = _reader_of(lines[0])
    if reader is _table:
        trials = _table(path, lines, slices)
    elif slices:
        raise InputError(
            f"{_CALL}: {path} lists items, so it has no column {slices[0]!r}. Omit slices= here, and pass the values of the "
            "items to evaluate_trials. (fewshot trials reads them from the file of the embeddings.)"
        )
    else:
        trials = reader(path, lines)
    if not trials.same:
        raise InputError(f"{_CALL}: {path} has no trial below its first line. {_FORMS}")
    return trials


def _reader_of(first: Line) -> Callable[..., TrialList]:
    """Return the reader for the format of the first line."""
    if "," in first.text or _separator(first) is not None:
        return _table
    is_head = re.fullmatch(r"\d+([ \t]+\d+)?", first.text) is not None
    return _lfw if is_head or _is_pair(first.words()) else _voxceleb


def _separator(heading: Line) -> str | None:
    """Return the column separator of a table of scores; None if the line is not its heading."""
    for separator in _SEPARATORS:
        if {"score", "same"} <= set(heading.cells(separator)):
            return separator
    return None


def _is_pair(words: list[str]) -> bool:
    """Return whether the words of a line are an LFW pair, and not a VoxCeleb trial of items called 1 and 4."""
    match words:
        case [name, one, two]:
            return name not in ("0", "1") and one.isdecimal() and two.isdecimal()
        case [_, one, _, two]:
            return one.isdecimal() and two.isdecimal()
    return False


def _refuse(path: Path, line: Line, reason: str = "") -> NoReturn:
    """Raise the error for a line that is not a trial."""
    raise InputError(
        f"{_CALL}: line {line.number} of {path} is {line.text!r}, which is not a trial{reason and ': '}{reason}. {_FORMS}"
    )


def _table(path: Path, lines: list[Line], slices: Sequence[str] = ()) -> TrialList:
    """Return the trials of a table of scores."""
    heading, *rows = lines
    separator = _separator(heading) or ","
    names = heading.cells(separator)
    if not {"score", "same"} <= set(names) or len(set(names)) < len(names):
        raise InputError(
            f"{_CALL}: the first line of {path} has the columns {', '.join(names)}. Name each column once, including "
            "score and same."
        )
    columns_of_slices = {attribute: _columns_of_sides(path, names, attribute) for attribute in slices}
    read = {"first", "second", "fold"}.union(*columns_of_slices.values()) & set(names)
    scores: list[float] = []
    same: list[bool] = []
    optional: dict[str, list[str]] = {}
    for line in rows:
        row = line.cells(separator)
        if len(row) < len(names) or any(row[len(names) :]):
            _refuse(
                path,
                line,
                f"it has {counted(len(row), 'cell')} for the {counted(len(names), 'column')} {', '.join(names)}",
            )
        cells = dict(zip(names, row, strict=False))
        scores.append(_score(path, line, cells["score"]))
        same.append(_is_same(path, line, cells["same"]))
        for name in read:
            optional.setdefault(name, []).append(cells[name])
    columns = {name: tuple(cells) for name, cells in optional.items()}
    sides = {name: (columns[first], columns[second]) for name, (first, second) in columns_of_slices.items() if columns}
    first, second, folds = (columns.get(name) for name in ("first", "second", "fold"))
    return TrialList(tuple(same), first, second, folds, scores=tuple(scores), slices=sides or None)


def _columns_of_sides(path: Path, names: Sequence[str], attribute: str) -> tuple[str, str]:
    """Return the columns of an attribute for the first and the second side; both may be the same column."""
    columns = (f"first_{attribute}", f"second_{attribute}")
    if set(columns) <= set(names):
        return columns
    if attribute in names:
        return attribute, attribute
    raise InputError(
        f"{_CALL}: {path} has the columns {', '.join(names)}, but neither {columns[0]} and {columns[1]} nor {attribute}. "
        "Pass slices= with attributes of the file, or add these columns."
    )


def _score(path: Path, line: Line, cell: str) -> float:
    """Return the score in a cell."""
    number = _number(cell)
    if not math.isfinite(number):
        _refuse(path, line, f"its score is {cell!r}, but a score is a finite number such as 0.5")
    return number


def _is_same(path: Path, line: Line, cell: str) -> bool:
    """Return the value of a cell in the column `same`."""
    flag = {"true": 1.0, "false": 0.0}.get(cell.lower(), _number(cell))
    if flag not in (0, 1):
        _refuse(path, line, f"its same is {cell!r}, but same must be 1 for one identity or 0 for two")
    return bool(flag)


def _number(cell: str) -> float:
    """Return the number in a cell; NaN if it is not a number."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _lfw(path: Path, lines: list[Line]) -> TrialList:
    """Return the trials of LFW pairs. Each fold has pairs of one person, then equally many pairs of two people."""
    people: list[tuple[str, str]] = []
    items: list[tuple[str, str]] = []
    # A list without its first line only lacks the folds.
    counts = [] if _is_pair(lines[0].words()) else [int(word) for word in lines[0].words()]
    for line in lines[1:] if counts else lines:
        match line.words():
            case [name, number, number_two]:
                name_two = name
            case [name, number, name_two, number_two]:
                pass
            case _:
                _refuse(path, line)
        if not (number.isdecimal() and number_two.isdecimal()):
            _refuse(path, line)
        people.append((name, name_two))
        items.append((f"{name}_{int(number):04}", f"{name_two}_{int(number_two):04}"))
    folds = None
    if len(counts) == 2:
        if len(people) != 2 * counts[0] * counts[1]:
            raise InputError(
                f"{_CALL}: {path} has {len(people)} pairs, but its first line promises {counts[0]} folds of "
                f"{counts[1]} pairs of each kind. Use the whole file, or correct the first line."
            )
        folds = tuple(str(pair // (2 * counts[1])) for pair in range(len(people)))
    first, second = _sides(people)
    same = tuple(name == name_two for name, name_two in people)
    return TrialList(same, first, second, folds, items=_sides(items))


def _voxceleb(path: Path, lines: list[Line]) -> TrialList:
    """Return the trials of a VoxCeleb list, with 1 or 0 and two items per line."""
    same: list[bool] = []
    items: list[tuple[str, str]] = []
    for line in lines:
        match line.words():
            case [("0" | "1") as kind, item, item_two]:
                same.append(kind == "1")
                items.append((item, item_two))
            case _:
                _refuse(path, line)
    # Other lists have the recordings of all speakers in one folder, which would make every trial a target trial.
    people = [(item.partition("/")[0], item_two.partition("/")[0]) for item, item_two in items]
    if [item == item_two for item, item_two in people] != same:  # these folders are not speakers
        return TrialList(tuple(same), items=_sides(items))
    return TrialList(tuple(same), *_sides(people), items=_sides(items))


def _sides(pairs: list[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the first and the second entries of all pairs."""
    return tuple(first for first, _ in pairs), tuple(second for _, second in pairs)
