"""Options of all commands: numbers as people write them, and one line for an option that is mistyped."""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser


class Parsed:
    """The type of an option: a function from what was written to what is meant, and how the help names it.

    Args:
        name: Shown by the help.
        parse: Raises ValueError, with a sentence, for what cannot be meant.
    """

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name, self._parse = name, parse

    def __call__(self, word: Any) -> Any:
        """Parse a word; an error of argparse, which names the option, if that fails."""
        try:
            return self._parse(word)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    def __repr__(self) -> str:
        return self.name


def split(words: object) -> list[str]:
    """Split `[1, 5, 10]`, `1,5,10`, `1 5 10` or `5` into its entries, without quotes."""
    if isinstance(words, Sequence) and not isinstance(words, str):
        return [str(word) for word in words]
    return [word.strip("'\"") for word in re.split(r"[\s,]+", str(words).strip("[]() ")) if word]


def _whole(word: object) -> int:
    value = _number(str(word).replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", str(word)) else word)
    if not value.is_integer():
        raise ValueError(f"{word} is not a whole number, such as 5 or 1e6.")
    if abs(value) >= 2**63:
        raise ValueError(f"{word} is too large; whole numbers go up to 2^63 - 1.")
    return int(value)


def _number(word: object) -> float:
    try:
        return float(str(word))
    except ValueError:
        raise ValueError(f"{word} is not a number.") from None


def _none_or(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda word: None if word is None or str(word).lower() in ("none", "null") else parse(word)


# 5, 1e6, 1_000_000 or 1,000,000
WHOLE = Parsed("number", _whole)
WHOLE_OR_NONE = Parsed("number or none", _none_or(_whole))
# With inf, which jsonargparse does not read as a float.
NUMBER_OR_NONE = Parsed("number or none", _none_or(_number))
NUMBER_LIST = Parsed("numbers with commas between them", lambda words: [_number(word) for word in split(words)])


# ------------------------------------------------------------------------------------------------------------- mistyped


class OneLineErrors(ArgumentParser):
    """A parser that answers a command line that it cannot take with one line: what is wrong, and what is near."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the line and exit with status 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        if not self.exit_on_error:  # a parser inside another, which prints the message
            super().error(message, ex)
        command = parser.prog.replace(" [options]", "")
        self.exit(2, f"{command}: {explained(message, parser)} '{command} --help' lists the options.\n")


def explained(message: str, parser: ArgumentParser) -> str:
    """Rewrite a message of jsonargparse as one sentence or two, with the option that was probably meant."""
    options = [option for option in parser._option_string_actions if option.startswith("--") and option[-1] != "+"]
    message = _of_the_class(message)
    if found := re.search(r"class_path '([\w.]+)':\s+(?:unrecognized arguments: --|Option ')([\w.]+)", message):
        text = f"{found[1].rpartition('.')[2]} has no argument {found[2]}.{_instead(found[2], arguments_of(found[1]))}"
    elif found := re.search(r"unrecognized arguments: ([^\s=]+)", message):
        text = _unknown(found[1], options)
    elif found := re.search(r"[Oo]ption '([\w.]+)'", message):
        text = _unknown(f"--{found[1]}", options)
    elif re.search(r"arguments are required: \w+\.data$", message):
        text = "there is no data. Give a configuration, such as --config protonet_dr_glyphs."
    elif found := re.search(r"arguments are required: (.*)", message):
        text = f"{' and '.join(_shown(name, parser) for name in found[1].split(', '))} must be given."
    elif found := re.match(r"argument (\S+): (.*)", message):
        text = f"{found[1].rpartition('/')[2]}: {found[2].rstrip('.')}."
    else:
        text = _wrong_value(message, parser)
    return text


def reason(message: str) -> str:
    """Find why a value was not taken; jsonargparse lists the reasons of all types of a union, and those inside them."""
    found = _first_of_union(message)
    return message if found is None else reason(found)


def _of_the_class(message: str) -> str:
    """Find what a class says of its arguments, where it stands among the types of a union."""
    found = _first_of_union(message)
    return _of_the_class(found) if found is not None and found.startswith(_OF_A_CLASS) else message


_OF_A_CLASS = "Problem with given class_path"
_OF_ANOTHER_TYPE = re.compile(
    r"is not accepted|unexpected keyword|Expected a <class 'NoneType'>|Subclasses are disabled"
)


def _first_of_union(message: str) -> str | None:
    """Find the reason of the first type that the value was meant for; None where the message is of no union."""
    found = re.search(r"^( *)Errors:\n( *)- (.*?)(?=\n\1Given value type|\Z)", message, re.DOTALL | re.MULTILINE)
    if found is None:
        return None
    every = found[3].split(f"\n{found[2]}- ")
    return min(every, key=lambda one: _OF_ANOTHER_TYPE.search(one) is not None)


def _wrong_value(message: str, parser: ArgumentParser) -> str:
    if found := re.search(r"class_path '([\w.]+)':\s+(.*)", reason(message), re.DOTALL):
        module, _, name = found[1].rpartition(".")
        if "has no attribute" in found[2]:
            return f"there is no class {found[1]}.{_nearest(name, vars(import_module(module)))}"
        return f"{name}: {_wrong_value(found[2], parser).removeprefix('--')}"
    where = re.match(r'Parser key "([\w.]+)":\s*', message)
    start, rest = ("", message) if where is None else (f"{_shown(where[1], parser)}: ", message[where.end() :])
    expected = [_plain(kind) for kind in re.findall(r"Expected an? (.*?)(?:\. Got value|\n|$)", rest)]
    value = re.search(r"(?:Got|Given) value: (.*)", rest)
    expected = [kind for kind in expected if not kind.startswith(("path but", "dot import"))]
    if value and expected:
        return f"{start}{value[1]} is not {'a file or a class' if expected == ['null'] else ' or '.join(expected)}."
    if found := re.search(r"Expected a dot import path string: (\S+)", rest):
        return f"{start}{found[1]} is not a file or a class."
    return f"{start}{' '.join(reason(rest).split()).rstrip('.')}."


def _shown(name: str, parser: Any) -> str:
    """Show the name of a positional argument as it is, that of an option with its dashes."""
    return name if any(action.dest == name and not action.option_strings for action in parser._actions) else f"--{name}"


def arguments_of(class_path: str) -> list[str]:
    """List the arguments of a class that an import path names, with those of the settings among them."""
    module, _, name = class_path.rpartition(".")
    arguments = inspect.signature(getattr(import_module(module), name)).parameters
    inner = [f"{a}.{field}" for a in arguments for field in getattr(arguments[a].default, "__dataclass_fields__", ())]
    return [*arguments, *inner]


def _unknown(option: str, options: Iterable[str]) -> str:
    if not option.startswith("-"):
        return f"there is an unexpected word '{option}'."
    return f"there is no option {option}.{_nearest(option, options)}"


def _instead(name: str, known: Iterable[str]) -> str:
    """Return what is written in place of an argument of an earlier version, or the one that is near."""
    from fewshot_callbacks.functional.retrieval.settings import GONE  # noqa: PLC0415 - torch, after a mistake alone

    return f" Write {GONE[name]}." if name in GONE else _nearest(name, known)


def _nearest(word: str, words: Iterable[str]) -> str:
    plain = {known.lstrip("-"): known for known in words}  # dashes, which all options share, make none alike
    near = get_close_matches(word.lstrip("-"), plain, n=1)
    return f" Did you mean {plain[near[0]]}?" if near else ""


def _plain(kind: str) -> str:
    """Shorten `<class 'int'>` to `int`, `typing.Literal['a', 'b']` to `'a', 'b'`."""
    kind = re.sub(r"<class '(?:[\w]+\.)*(\w+)'>", r"\1", kind).replace("NoneType", "null")
    return re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", kind)
