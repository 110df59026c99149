"""Relevance judgements (qrels) by ids: reading them from dictionaries, sequences and files, and mapping ids to rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.files.text import Line, read_lines
from fewshot_callbacks.functional._reading import as_list
from fewshot_callbacks.system.words import counted, verb

# Number of ids that a message shows.
SHOWN = 3
# What unknown='ignore' does with judgements on an unknown query or item, for messages.
IGNORED = {"query": "leave these judgements out", "item": "count the relevant ones as never retrieved"}


def check_choices(call: str, at_least: Any, unknown: str) -> float:
    """Return `at_least` of `Relevance.from_judgements`, the smallest relevant grade, as a number."""
    least = as_grade(call, at_least, "at_least")
    if not 0 < least < math.inf:
        raise InputError(
            f"{call}: at_least={at_least!r} must be a positive number, because a grade of 0 is irrelevant. Pass the "
            "smallest relevant grade, such as 1 or 2."
        )
    if unknown not in ("error", "ignore"):
        raise InputError(f"{call}: there is no unknown={unknown!r}. Pass 'error' or 'ignore'.")
    return least


def read_judgements(call: str, judgements: Any) -> tuple[list[Any], list[Any], Float[np.ndarray, "pairs"]]:
    """Return queries, items and grades of all judgements."""
    if isinstance(judgements, str | Path):
        judgements = _read_file(call, Path(judgements))
    if not isinstance(judgements, Mapping):
        sides = [as_list(side) for side in judgements]
        if len(sides) not in (2, 3) or len({*map(len, sides)}) > 1:
            raise InputError(
                f"{call}: judgements are sequences of lengths {', '.join(str(len(side)) for side in sides)}. Pass a "
                "dictionary, or two or three sequences of equal length: queries, items and optionally grades."
            )
        queries, items = sides[:2]
        values = sides[2] if len(sides) == 3 else [1] * len(queries)
    else:
        queries = []
        items = []
        values = []
        for query, judged in judgements.items():
            grade_of_item = judged if isinstance(judged, Mapping) else dict.fromkeys(judged, 1)
            for item, grade in grade_of_item.items():
                queries.append(query)
                items.append(item)
                values.append(grade)
    return queries, items, np.array([as_grade(call, value) for value in values], np.float64)


def as_grade(call: str, value: Any, name: str = "the grade") -> float:
    """Return a grade as a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{call}: {name} {value!r} is not a number. Pass numbers such as 0, 1, 2.") from None


def _read_file(call: str, file: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the queries, items and grades in a file of judgements, as strings."""
    try:
        lines = read_lines(file)
    except ValueError as error:
        raise InputError(f"{call}: {error}") from None
    if lines and _is_heading(_columns(lines[0])):
        lines = lines[1:]
    rows = [_columns(line) for line in lines]
    if not rows:
        raise InputError(
            f"{call}: {file} contains no judgements. Pass a file with the four columns of TREC (query, 0, item, grade), or "
            "the three columns of BEIR (query, item, grade)."
        )
    for line, row in zip(lines, rows, strict=True):
        if len(row) not in (3, 4) or len(row) != len(rows[0]):
            raise InputError(
                f"{call}: line {line.number} of {file} has {len(row)} columns: {' '.join(row)[:60]!r}. Pass a file with the "
                "four columns of TREC (query, 0, item, grade), or the three columns of BEIR (query, item, grade), with or "
                "without a header."
            )
        if not _is_number(row[-1]):
            raise InputError(
                f"{call}: the grade in line {line.number} of {file} is {row[-1]!r}, which is not a number. Write a number "
                "such as 1."
            )
    return [row[0] for row in rows], [row[-2] for row in rows], [row[-1] for row in rows]


def _is_heading(cells: list[str]) -> bool:
    """Return whether the first line is a header: neither the grade nor TREC's second column is a number."""
    return not _is_number(cells[-1]) and not (len(cells) == 4 and _is_number(cells[1]))


def _columns(line: Line) -> list[str]:
    """Return the tab-separated cells of a line if there are three or four, or else its words."""
    between_tabs = line.cells("\t")
    return between_tabs if len(between_tabs) in (3, 4) else line.words()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def rows_of_ids(call: str, name: str, ids: Iterable[Any], judged: Iterable[Any]) -> dict[Any, int]:
    """Return judged id -> row, for the judged ids that have a row."""
    judged_ids = set(judged)
    row_of_id: dict[Any, int] = {}
    for row, row_id in enumerate(as_list(ids)):
        if row_id not in judged_ids:
            continue
        if row_id in row_of_id:
            raise InputError(f"{call}: {name} has {row_id!r} in rows {row_of_id[row_id]} and {row}. Pass each id once.")
        row_of_id[row_id] = row
    return row_of_id | _rows_in_other_forms(ids, judged_ids - row_of_id.keys())


def _rows_in_other_forms(ids: Iterable[Any], missing: set[Any]) -> dict[Any, int]:
    """Return missing word -> row, for words that match exactly one id in another Unicode normal form."""
    word_of_form = {composed_form(word): word for word in missing if isinstance(word, str) and not word.isascii()}
    if not word_of_form:
        return {}
    rows: dict[Any, list[int]] = {word: [] for word in word_of_form.values()}
    for row, row_id in enumerate(as_list(ids)):
        if isinstance(row_id, str) and composed_form(row_id) in word_of_form:
            rows[word_of_form[composed_form(row_id)]].append(row)
    return {word: of_word[0] for word, of_word in rows.items() if len(of_word) == 1}


def refuse_unknown_ids(call: str, unknown: str, sides: Iterable[tuple[str, list[Any], dict[Any, int]]]) -> None:
    """Refuse ids without a row, unless `unknown` ignores them. A side is a name, judged ids, and id -> row."""
    if unknown != "error":
        return
    for name, judged, row_of_id in sides:
        missing = [judged_id for judged_id in dict.fromkeys(judged) if judged_id not in row_of_id]
        if missing:
            examples = ", ".join(map(repr, missing[:SHOWN]))
            if len(missing) > SHOWN:
                examples += ", ..."
            raise InputError(
                f"{call}: the judgements have ids that no {name} has: {examples} ({len(missing)} in all). Pass the ids in "
                f"the form that the judgements use (strings or integers), or unknown='ignore' to {IGNORED[name]}."
            )


def item_numbers(
    judged_items: Sequence[Any], row_of_item: Mapping[Any, int], items: int
) -> tuple[NDArray[np.int64], int]:
    """Return the item index of each judgement, and the number of indices.

    A gallery item has the index of its row. Other items have indices from `items` on.
    """
    number_of_absent: dict[Any, int] = {}
    numbers = []
    for item in judged_items:
        if item in row_of_item:
            numbers.append(row_of_item[item])
        else:
            numbers.append(number_of_absent.setdefault(item, items + len(number_of_absent)))
    return np.array(numbers, np.int64), items + len(number_of_absent)


def finite_grades(call: str, grades: Float[np.ndarray, "pairs"]) -> Float[np.ndarray, "pairs"]:
    """Return the grades, if all are finite."""
    return _checked_grades(call, grades, np.isfinite(grades), "is not finite")


def positive_grades(call: str, grades: Float[np.ndarray, "pairs"]) -> Float[np.ndarray, "pairs"]:
    """Return the grades of relevant items, if all are finite and positive."""
    return _checked_grades(call, grades, np.isfinite(grades) & (grades > 0), "is not a finite positive number")


def _checked_grades(
    call: str, grades: Float[np.ndarray, "pairs"], is_valid: NDArray[np.bool_], fact: str
) -> Float[np.ndarray, "pairs"]:
    """Return the grades if all are valid; otherwise raise an error with this fact."""
    wrong = grades[~is_valid]
    if len(wrong):
        raise InputError(
            f"{call}: {counted(len(wrong), 'grade')} {verb(len(wrong), 'is', 'are')} wrong: {wrong[0]:g} {fact}. Pass "
            "numbers such as 0, 1, 2."
        )
    return grades


def distinct_judgements(
    call: str,
    rows: Int[np.ndarray, "pairs"],
    items: Int[np.ndarray, "pairs"],
    grades: Float[np.ndarray, "pairs"],
    numbers: int,
    ids: tuple[Sequence[Any], Sequence[Any]],
) -> Int[np.ndarray, "different"]:
    """Return the indices of the distinct judgements, in the order of queries and items.

    Judgements on queries without a row are left out.

    `rows` has the row of each judgement's query; -1 for no row. `numbers` is the number of item indices.
    """
    keys = rows * numbers + items
    order = np.argsort(keys, kind="stable")
    order = order[rows[order] >= 0]
    keys = keys[order]
    values = grades[order]
    # whether a judgement is on the same pair as the judgement before it
    repeats = np.append(False, keys[1:] == keys[:-1])[: len(keys)]
    differs = repeats & (values != np.append(np.nan, values[:-1])[: len(values)])
    if differs.any():
        query_ids, item_ids = ids
        first = int(order[differs][0])
        number = int(differs.sum())
        raise InputError(
            f"{call}: {counted(number, 'pair')} {verb(number, 'has', 'have')} two judgements with different grades, such as "
            f"query {query_ids[first]!r} and item {item_ids[first]!r}. Keep one judgement for each pair."
        )
    different: NDArray[np.int64] = order[~repeats]
    return different
