"""jsonargparse parsers for the options of the commands. They accept numbers and lists in the forms that people write."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from fewshot_callbacks.cli.mistakes import MistypedError, kinds_of, reason, unknown_option, values_of
from fewshot_callbacks.cli.options import OPTIONS, metric_keys, options_of
from fewshot_callbacks.errors import InputError

# By default, jsonargparse expects `--json true`, `--metrics [mAP,pair_f1]`, `--dims [64,256]` and `--names [a,b]`.
AS_TYPED: dict[str, dict[str, Any]] = {
    "float64": {"action": "store_true"},
    "json": {"action": "store_true"},
    "here": {"action": "store_true"},
    "per_class": {"action": "store_true"},
    "metrics": {"nargs": "+", "metavar": "KEY"},
    "dims": {"nargs": "+", "metavar": "DIMS"},
    "codes": {"nargs": "+", "metavar": "CODE"},
    "names": {"nargs": "+", "metavar": "NAME"},
    "k": {"nargs": "+", "type": int, "metavar": "K"},
    "slices": {"nargs": "+", "metavar": "COLUMN"},
    "require": {"action": "append", "metavar": "REQUIREMENT"},
    "others": {"nargs": "*", "type": Path, "default": ()},
}
SHORT = {"output": ["-o"], "k": ["-k"]}
# Words with a different spelling in YAML.
YAML = {"none": "null", "auto": "auto", "inf": ".inf", "infinity": ".inf", "-inf": "-.inf", "nan": ".nan"}


class HelpFormatter(DefaultHelpFormatter):
    """jsonargparse's formatter, but it keeps paragraphs, and it does not wrap indented lines such as tables."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.split("\n\n"):
            is_table = paragraph.startswith(" ")
            filled.append(paragraph if is_table else super()._fill_text(paragraph, width, indent))
        return "\n\n".join(filled)


def parse(command: str, words: Sequence[str]) -> Any:
    """Return the options of a command: an instance of its class in `OPTIONS`."""
    owner = OPTIONS[command]
    types = {field.name: kind for _, field, kind in options_of(owner)}
    encodable = [_encodable(word) for word in words]
    try:
        parsed = parser_of(command).parse_args(in_yaml(encodable, types))
    except ArgumentError as error:
        raise MistypedError(unknown_option(words, types) or _refused_value(words, types) or reason(error)) from error
    values = {name: _as_given(value) for name, value in vars(parsed).items()}
    if values.get("metrics") is not None:
        values["metrics"] = metric_keys(values["metrics"])
    return _instance(owner, values)


def _instance(owner: type, values: Mapping[str, Any]) -> Any:
    """Return an instance of a class of options, with its nested classes."""
    arguments = {field.name: values[field.name] for field in fields(owner) if field.name in values}
    for name, kind in get_type_hints(owner).items():
        if isinstance(kind, type) and is_dataclass(kind):
            arguments[name] = _instance(kind, values)
    return owner(**arguments)


# Python represents bytes that are not UTF-8 by these characters, which YAML rejects. Private-use characters replace them
# while jsonargparse reads the words.
_BYTES = range(0xDC80, 0xDD00)
_PRIVATE = 0xF0000


def _encodable(word: str) -> str:
    """Return a word with a private-use character for each byte that is not UTF-8."""
    return word.translate({byte: byte + _PRIVATE for byte in _BYTES})


def _as_given(value: Any) -> Any:
    """Return a value with the bytes that `_encodable` replaced."""
    if isinstance(value, str):
        return value.translate({byte + _PRIVATE: byte for byte in _BYTES})
    if isinstance(value, Path):
        return Path(_as_given(str(value)))
    if isinstance(value, list | tuple):
        return type(value)(map(_as_given, value))
    return value


def parser_of(command: str) -> ArgumentParser:
    """Return the parser of a command. It raises an `ArgumentError` for invalid words."""
    description = docstring_parser.parse(OPTIONS[command].__doc__ or "").description
    parser = ArgumentParser(
        prog=f"fewshot {command}",
        description=description,
        formatter_class=HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    options = list(options_of(OPTIONS[command]))
    owners = {owner for owner, _, _ in options}
    entries = {owner: docstring_parser.parse(owner.__doc__ or "").params for owner in owners}
    for owner, field, kind in options:
        meaning = next((entry.description or "" for entry in entries[owner] if entry.arg_name == field.name), None)
        if meaning is None:
            raise InputError(
                f"the docstring of {owner.__name__} does not describe {field.name}. Add an entry to its Args, which is the "
                "help of the option."
            )
        # argparse interprets a single percent sign.
        meaning = meaning.replace("%", "%%")
        if field.default is MISSING:
            parser.add_argument(field.name, type=kind, help=meaning)
            continue
        if field.metadata.get("positional"):
            parser.add_argument(field.name, help=meaning, **AS_TYPED[field.name])
            continue
        names = [*SHORT.get(field.name, []), f"--{field.name}"]
        parser.add_argument(*names, default=field.default, help=meaning, **_as_typed(field.name, kind))
    return parser


def _refused_value(words: Sequence[str], types: Mapping[str, Any]) -> str:
    """Return a message about the first invalid value; empty if all are valid."""
    for option, value in values_of(words):
        kind = types.get(option)
        if kind is None or _as_typed(option, kind) != {"type": kind}:
            continue
        if not _accepts(kind, as_yaml(value, kind)):
            return f"--{option}: {value} is not {kinds_of(kind)}."
    return ""


def _as_typed(name: str, kind: Any) -> dict[str, Any]:
    """Return arguments of `add_argument`. `-k` takes one number in `nearest` and several in `search-quality`."""
    return {"type": kind} if kind is int else AS_TYPED.get(name, {"type": kind})


def _accepts(kind: Any, word: str) -> bool:
    """Return whether jsonargparse accepts a word as a value of a type."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        parser.parse_args([f"--value={word}"])
    except ArgumentError:
        return False
    return True


def in_yaml(words: Sequence[str], types: Mapping[str, Any]) -> list[str]:
    """Return a command line with the numbers of its options in YAML's spelling."""
    words_in_yaml: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--") and equals:
            words_in_yaml.append(f"{name}={as_yaml(value, types.get(name.removeprefix('--')))}")
        else:
            words_in_yaml.append(as_yaml(word, types.get(option.removeprefix("--"))))
        option = word
    return words_in_yaml


def as_yaml(word: str, kind: Any) -> str:
    """Return a number, or a list of numbers, in YAML's spelling; other words unchanged.

    Examples:
        >>> [as_yaml(word, int | None) for word in ("1e6", "158,652", "5", "none")]
        ['1000000', '158652', '5', 'null']
        >>> [as_yaml(word, tuple[float, float]) for word in ("0,1", "(0.5, inf)", "[0, 1]")]
        ['[0, 1]', '[0.5, .inf]', '[0, 1]']
        >>> as_yaml("1e6", str)
        '1e6'
    """
    parts = set(_parts(kind))
    if parts.isdisjoint({int, float}) or word.startswith("["):
        return word
    if int in parts and re.fullmatch(r"\d{1,3}(,\d{3})+", word):
        word = word.replace(",", "")
    numbers = [_number_as_yaml(number) for number in re.findall(r"[^\s,()]+", word)]
    if len(numbers) == 1:
        return numbers[0]
    return f"[{', '.join(numbers)}]"


def _parts(kind: Any) -> Iterator[Any]:
    """Yield a type and its type arguments, recursively."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _number_as_yaml(word: str) -> str:
    if word.lower() in YAML:
        return YAML[word.lower()]
    try:
        number = float(word)
    except ValueError:
        return word
    # PyTorch and NumPy have no larger integers.
    if not number.is_integer() or abs(number) >= 2**63:
        return repr(number)
    try:
        return str(int(word))
    except ValueError:  # such as 1e6; integers are read directly above, since a float is inexact from 2^53 on
        return str(int(number))
