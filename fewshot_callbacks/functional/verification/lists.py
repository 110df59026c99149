"""Reads lists of trials: pairs of LFW, of VoxCeleb, or a table of scores."""

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
    "Lines are those of LFW's pairs.txt ('Ann 1 4', 'Ann 1 Bob 2'), of VoxCeleb ('1 id1/a.wav id1/b.wav'), or of a table "
    "whose first line names its columns with commas between them: score, same, and if known first, second and fold."
)
# Signs between the columns of a table: spreadsheets write each of them.
_SEPARATORS = (",", "\t", ";")


@dataclass(frozen=True)
class TrialList:
    """The trials of a file, as `read_trials` returns them; fields that the file does not have are None."""

    same: tuple[bool, ...]
    """whether both sides have one identity"""
    first: tuple[str, ...] | None = None
    """identity of the first side"""
    second: tuple[str, ...] | None = None
    """identity of the second side"""
    folds: tuple[str, ...] | None = None
    """fold of each trial"""
    scores: tuple[float, ...] | None = None
    """score of each trial, of a table of scores"""
    items: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """the two items of each trial, of a list without scores: `Ann_0004` of LFW, `id1/a.wav` of VoxCeleb"""
    slices: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] | None = None
    """attribute -> its value for the first and for the second side of each trial, for `evaluate_trials`"""

    def __post_init__(self) -> None:
        """Compose the names of items, as `rows` composes ids.

        Raises:
            ValueError: If the fields are not of as many trials each.
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
                f"TrialList: same has {counted(len(self), 'trial')}, but {' and '.join(wrong)}. Pass one entry for each "
                "trial; items are two tuples, the names of all first sides and of all second sides."
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
        """Return the indices of the items of both sides among some embeddings, as `trial_scores` takes them.

        Args:
            ids: The name of each embedding, as the list has it; the name of a file stands for its path.

        Raises:
            ValueError: If the list has scores in place of items, or names an item that is not there.
        """
        if self.items is None:
            raise InputError("TrialList.rows: this list has scores, and no items. Pass its scores to evaluate_trials.")
        first, second = self.known_rows(ids)
        missing: list[str] = []
        for name, other_name, row, other_row in zip(*self.items, first.tolist(), second.tolist(), strict=True):
            missing += [item for item, index in ((name, row), (other_name, other_row)) if index < 0]
        if missing:
            raise InputError(
                f"TrialList.rows: {counted(len(set(missing)), 'item')} of the list "
                f"{verb(len(set(missing)), 'has', 'have')} no embedding, or several, the first is {missing[0]!r}; the "
                f"ids begin with {[str(name) for name in ids[:2]]}. Write ids as the list does, or embed these items, "
                "too."
            )
        return first, second

    def known_rows(self, ids: Sequence[str]) -> tuple[Int[Tensor, "trials"], Int[Tensor, "trials"]]:
        """Return the same indices as `rows`, and -1 for an item that is not there, or under whose name there are several.

        Args:
            ids: See `rows`.
        """
        assert self.items is not None
        index_of: dict[str, int] = {}
        names = [composed_form(str(name)) for name in ids]
        stems = [PurePosixPath(name).stem for name in names]
        # Whole names come last and overrule the names of files. A name of two embeddings names neither.
        for spellings in (stems, names):
            count = Counter(spellings)
            index_of |= {name: index if count[name] == 1 else -1 for index, name in enumerate(spellings)}
        first, second = (
            torch.tensor([index_of.get(name, -1) for name in names], dtype=torch.int64) for names in self.items
        )
        return first, second

    def names(self, name: str) -> bool:
        """Return whether an item of the list has this name, or that of this file."""
        composed = composed_form(name)
        return composed in self._item_names or PurePosixPath(composed).stem in self._item_names

    @cached_property
    def _item_names(self) -> frozenset[str]:
        """The names of all items; empty for a table of scores."""
        return frozenset(name for names in self.items or () for name in names)

    def chosen(self, trials: Sequence[int]) -> TrialList:
        """Return some of the trials, by their indices."""

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
    """Return the names of all first sides, and of all second sides.

    Raises:
        ValueError: If there are not two columns, as in a list of pairs.
    """
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
    """Return the trials of a file; its lines tell which form it has.

    - LFW's `pairs.txt`: the first line has the number of folds and of pairs; `Ann 1 4` are two images of Ann,
      `Ann 1 Bob 2` images of two people. Folds follow each other. Without the first line there are no folds.
    - VoxCeleb's lists: `1 id1/a/1.wav id1/b/2.wav` are two recordings of one speaker, a line with 0 of two. The first
      folder is the speaker, where all lines agree with that.
    - A table with commas, semicolons or tabs, whose first line names the columns `score` and `same` (1 or 0), and if they
      are known `first`, `second` (identities) and `fold`.

    A mark of byte order, empty lines and blanks beside the columns are passed over.

    Args:
        path: The file.
        slices: Attributes that are read from a table of scores: `"age"` from its columns `first_age` and `second_age`, or
            from one column `age`.

    Returns:
        The trials, for `evaluate_trials`.

    Raises:
        ValueError: If there is no such file, it lacks the columns of an attribute, or a line has another form; names the
            line.

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
        raise InputError(f"{_CALL}: {path} does not exist, or is no file. Pass a list of trials.")
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
            f"{_CALL}: {path} lists items, and has no column {slices[0]!r}. Leave out slices=, and pass evaluate_trials the "
            "values of the items; fewshot trials reads them from the file of the embeddings."
        )
    else:
        trials = reader(path, lines)
    if not trials.same:
        raise InputError(f"{_CALL}: {path} holds no trial below its first line. {_FORMS}")
    return trials


def _reader_of(first: Line) -> Callable[..., TrialList]:
    """Return the reader of a list, by the form of its first line."""
    if "," in first.text or _separator(first) is not None:
        return _table
    is_head = re.fullmatch(r"\d+([ \t]+\d+)?", first.text) is not None
    return _lfw if is_head or _is_pair(first.words()) else _voxceleb


def _separator(heading: Line) -> str | None:
    """Return the sign between the columns of a table of scores; None if the line is not the heading of one."""
    for separator in _SEPARATORS:
        if {"score", "same"} <= set(heading.cells(separator)):
            return separator
    return None


def _is_pair(words: list[str]) -> bool:
    """Return whether the words of a line are a pair of LFW, and no trial of VoxCeleb between items called 1 and 4."""
    match words:
        case [name, one, two]:
            return name not in ("0", "1") and one.isdecimal() and two.isdecimal()
        case [_, one, _, two]:
            return one.isdecimal() and two.isdecimal()
    return False


def _refuse(path: Path, line: Line, reason: str = "") -> NoReturn:
    """Raise an error for a line that is no trial."""
    raise InputError(
        f"{_CALL}: line {line.number} of {path} is {line.text!r}, which is no trial{reason and ': '}{reason}. {_FORMS}"
    )


def _table(path: Path, lines: list[Line], slices: Sequence[str] = ()) -> TrialList:
    """Return the trials of a table of scores."""
    heading, *rows = lines
    separator = _separator(heading) or ","
    names = heading.cells(separator)
    if not {"score", "same"} <= set(names) or len(set(names)) < len(names):
        raise InputError(
            f"{_CALL}: the first line of {path} names {', '.join(names)}. Name each column once, score and same among them."
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
    """Return the columns that have an attribute of both sides: one for each, or a single one for both."""
    columns = (f"first_{attribute}", f"second_{attribute}")
    if set(columns) <= set(names):
        return columns
    if attribute in names:
        return attribute, attribute
    raise InputError(
        f"{_CALL}: {path} has the columns {', '.join(names)}, but neither {columns[0]} and {columns[1]} nor {attribute}. "
        "Pass slices= with attributes that it has, or add their columns."
    )


def _score(path: Path, line: Line, cell: str) -> float:
    """Return the score in a cell."""
    number = _number(cell)
    if not math.isfinite(number):
        _refuse(path, line, f"its score is {cell!r}, and a score is a finite number such as 0.5")
    return number


def _is_same(path: Path, line: Line, cell: str) -> bool:
    """Return whether a cell says that both sides have one identity."""
    flag = {"true": 1.0, "false": 0.0}.get(cell.lower(), _number(cell))
    if flag not in (0, 1):
        _refuse(path, line, f"its same is {cell!r}, and 1 stands for one identity, 0 for two")
    return bool(flag)


def _number(cell: str) -> float:
    """Return the number in a cell; NaN if there is none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _lfw(path: Path, lines: list[Line]) -> TrialList:
    """Return the trials of LFW's pairs: in each fold pairs of one person, then equally many of two."""
    people: list[tuple[str, str]] = []
    items: list[tuple[str, str]] = []
    # A list that has lost its first line lacks the folds alone.
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
                f"{_CALL}: {path} has {len(people)} pairs, and its first line says {counts[0]} folds of {counts[1]} pairs "
                "of each kind. Take the whole file, or correct the line."
            )
        folds = tuple(str(pair // (2 * counts[1])) for pair in range(len(people)))
    first, second = _sides(people)
    same = tuple(name == name_two for name, name_two in people)
    return TrialList(same, first, second, folds, items=_sides(items))


def _voxceleb(path: Path, lines: list[Line]) -> TrialList:
    """Return the trials of lines with a kind and two items, as VoxCeleb has them."""
    same: list[bool] = []
    items: list[tuple[str, str]] = []
    for line in lines:
        match line.words():
            case [("0" | "1") as kind, item, item_two]:
                same.append(kind == "1")
                items.append((item, item_two))
            case _:
                _refuse(path, line)
    # Other lists keep the recordings of all speakers in one folder, by which all trials would be target trials.
    people = [(item.partition("/")[0], item_two.partition("/")[0]) for item, item_two in items]
    if [item == item_two for item, item_two in people] != same:  # folders, but not those of speakers
        return TrialList(tuple(same), items=_sides(items))
    return TrialList(tuple(same), *_sides(people), items=_sides(items))


def _sides(pairs: list[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the first and the second of each pair."""
    return tuple(first for first, _ in pairs), tuple(second for _, second in pairs)
