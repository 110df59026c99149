"""Finds the reason that matters in a message of jsonargparse, which tells of every type that a value might have had."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from importlib import import_module

import fewshot_callbacks
from fewshot_callbacks.cli.options import instead, nearest, unknown

# Lines that hold for any value of the option: the alternatives that nobody meant, and the value, which was typed just now.
_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
)
# The words of jsonargparse from 4.51 on. A message that fits none of the patterns here and below is shown as it is.
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |Option '|Subcommand '\w+' does not accept option ')([^\s=']+)")


def explained(message: str, options: Iterable[str]) -> str:
    """Rewrite a message of jsonargparse as one sentence or two, with what was probably meant.

    Args:
        message: Of the parser.
        options: Those that it knows.
    """
    keys, owner, text = _deepest(message)
    module, _, name = owner.rpartition(".")
    start = f"--{'.'.join(keys)}: " if keys else ""
    if (found := _UNKNOWN.match(text)) and owner:
        word = found[1].lstrip("-")
        end = f" {instead(word)}" if instead(word) else nearest(word, _arguments_of(module, name))
        return f"{name} has no argument {word}.{end}"
    if found:
        return unknown(found[1] if text.startswith("unrecognized") else f"--{found[1]}", options)
    if "has no attribute" in text and owner:
        return f"there is no class {owner}.{nearest(name, vars(import_module(module)))}"
    if text.endswith(".data"):  # the following arguments are required
        return "there is no data. Give a configuration, such as --config protonet_dr_glyphs."
    value = re.search(r"Got value: (.*)", text) or re.search(r"Given value: (.*)", message)
    if found := re.search(r"Expected a dot import path string: (\S+)", text):
        text = f"{found[1]} is not a file or a class.{nearest(found[1], fewshot_callbacks.__all__)}"
    elif value and (found := re.match(r"Expected an? (.*?)(?:\. Got value|$)", text)):
        text = f"{value[1]} is not {_plain(found[1])}"
    return start + text.rstrip(".?") + ("?" if text.endswith("?") else ".")


def reason(message: str) -> str:
    """Find why a class refused its arguments."""
    return _deepest(message)[2]


def _deepest(message: str) -> tuple[list[str], str, str]:
    """Return the line that is indented most, with the keys and the last class on the way to it.

    The alternatives of a union stand side by side, and that which took most of the value has the longest explanation: of
    `Episodes` and `ClassBalanced` the one that knows the argument. The first of several counts.
    """
    if "Parser key" not in message and "class_path" not in message:
        return [], "", " ".join(message.split())
    lines: list[tuple[int, str]] = []
    way: list[tuple[int, str]] = []
    # A reason that follows its key on the same line gets a line of its own, one level deeper.
    for line in re.sub(r'(Parser key "[^"]+":) (\S)', r"\1\n  \2", message).splitlines():
        text = line.lstrip(" -")
        depth = len(line) - len(text)
        if not text or _NOISE.match(text):
            continue
        way = [*((before, head) for before, head in way if before < depth), (depth, text)]
        if not lines or depth > lines[-1][0]:
            lines = way
    heads = "\n".join(text for _, text in lines)
    owners = re.findall(r"class_path '([\w.]+)'", heads)
    return re.findall(r'Parser key "([^"]+)"', heads), owners[-1] if owners else "", lines[-1][1] if lines else message


def _arguments_of(module: str, name: str) -> list[str]:
    """List the arguments of a class, with those of the settings among them."""
    arguments = inspect.signature(getattr(import_module(module), name)).parameters
    inner = [f"{a}.{field}" for a in arguments for field in getattr(arguments[a].default, "__dataclass_fields__", ())]
    return [*arguments, *inner]


def _plain(kind: str) -> str:
    """Shorten `<class 'int'>` to `int`, `typing.Literal['a', 'b']` to `one of 'a', 'b'`."""
    kind = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind)
    return re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", kind)
