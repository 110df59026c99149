"""Messages about invalid command lines. They do not depend on jsonargparse's messages."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


class MistypedError(Exception):
    """Raised for an invalid command line."""


def unknown_option(words: Sequence[str], options: Iterable[str]) -> str:
    """Return a message about the first unknown option; empty if all are known.

    `options` have no dashes, and may lack the settings of classes: `--data.train.ways` may be a setting of the class
    that `--data` names.
    """
    names = {*options, "help"}
    for word in words:
        name = word.removeprefix("--").partition("=")[0].removesuffix("+")
        owners = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
        if word.startswith("--") and names.isdisjoint([name, *owners]):
            return f"unknown option --{name}.{did_you_mean(name, names, '--')}"
    return ""


def values_of(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options that have a value, without dashes, with their values."""
    pairs: list[tuple[str, str]] = []
    option = ""
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        is_option = word.startswith("--")
        if is_option and equals:
            pairs.append((name, value))
        elif option and not is_option:
            pairs.append((option, word))
        # the option to which the next word may belong
        option = name if is_option and not equals else ""
    return pairs


def reason(error: BaseException) -> str:
    """Return why jsonargparse rejects a value, in one line.

    jsonargparse repeats the texts of all causes in each error, with every type that was tried. The first line of the
    outermost error names the option; the class of an option has its own parser, whose `ArgumentError` names the
    setting. The innermost error is the reason.
    """
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    lines: list[str] = []
    for cause in [*(cause for cause in causes if isinstance(cause, ArgumentError)), causes[-1]]:
        line = str(cause).strip().partition("\n")[0]
        if not lines or line not in lines[-1]:
            lines.append(line)
    return " ".join(lines).rstrip(".") + "."


# Descriptions of the values of each type. PyTorch and NumPy have no larger integers.
NOUNS: dict[Any, str] = {
    int: "an integer below 2^63, such as 5",
    float: "a number",
    bool: "true or false",
    tuple[float, float]: "two numbers, such as [0, 1]",
    Sequence[Sequence[int | str]]: "lists, such as [[0, 1], [2, 3]]",
}


def kinds_of(kind: Any) -> str:
    """Return a description of the values of a type; empty for an unknown type.

    Examples:
        >>> kinds_of(float | None), kinds_of(Literal["error", "ignore"])
        ('a number', "one of 'error', 'ignore'")
    """
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join(filter(None, map(kinds_of, get_args(kind))))
    if get_origin(kind) is Literal:
        values = [repr(value) for value in get_args(kind)]
        if len(values) == 1:
            return values[0]
        return f"one of {', '.join(values)}"
    return NOUNS.get(kind, "")


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """Return a question that suggests the only name with this prefix, or else a similar name, if any."""
    names = sorted(known)
    matches = [other for other in names if other.startswith(name)]
    if len(matches) != 1:
        matches = get_close_matches(name, names, n=1)
    if not matches:
        return ""
    return f" Did you mean {before}{matches[0]}?"
