"""What is said of the words and configurations of a training that cannot be understood.

LightningCLI refuses them with long texts. Here nothing is read from these: the words and the configurations are compared
with the classes that they name, the arguments of these classes, and the types of the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Any, get_args

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import Dataset

import fewshot_callbacks
from fewshot_callbacks.cli.mistakes import kinds_of, similar, unknown_option, values_of
from fewshot_callbacks.cli.parsing import accepts
from fewshot_callbacks.protonet import ProtoNet

# Options that take a class, and the base of what they take.
BASES: dict[str, type] = {
    "data": LightningDataModule,
    "model": LightningModule,
    "trainer.callbacks": Callback,
    "data.dataset": Dataset,
}
# Base of a class -> its noun, and the words that come before the name of such a class.
TAKEN_BY: dict[type, tuple[str, str]] = {
    LightningDataModule: ("data module", "--data"),
    LightningModule: ("module", "--model"),
    Callback: ("callback", "--trainer.callbacks+"),
    Dataset: ("data set", "--data FewShotDataModule --data.dataset"),
}
# The end of an option that names a class.
CLASS = ".class_path"


def mistake_of_training(words: Sequence[str], options: Iterable[str]) -> str:
    """Return a message about the first mistake in the options of a training; empty if there is none.

    Args:
        words: `fit`, `validate` or `test`, and the words that follow.
        options: The names of the options that the parser lists; those of a class that an option names are not among them.
    """
    options = {*options, "config", "print_config"}
    unknown = unknown_option(words, options)
    if unknown:
        return unknown
    settings: list[tuple[str, Any]] = []
    for option, value in values_of(words):
        if option != "config":
            settings.append((option.removesuffix("+"), value))
        elif Path(value).is_file():
            settings += settings_of(yaml.safe_load(Path(value).read_text(encoding="utf-8")))
        else:
            return f"--config: File does not exist: {value}."
    unknown = unknown_option([f"--{option}" for option, _ in settings], options)
    if unknown:
        return unknown
    if not any(option.partition(".")[0] == "data" for option, _ in settings):
        return "there is no data. Give a configuration, such as --config protonet_dr_glyphs."
    return _mistake_of_settings(settings)


def settings_of(configuration: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration as options: `data.train.ways` and 5, `data.class_path` and a class."""
    if not isinstance(configuration, Mapping):
        yield prefix, configuration
        return
    for name, value in configuration.items():
        inner = prefix if name == "init_args" else f"{prefix}.{name}".lstrip(".")
        yield from settings_of(value, inner)


def _mistake_of_settings(settings: Sequence[tuple[str, Any]]) -> str:
    """Return a message about the first setting with a wrong class, name or value; empty if there is none."""
    owners: dict[str, type] = {"model": ProtoNet, "trainer": Trainer}
    for option, value in settings:
        if _names_a_class(option, value):
            sentence = _mistake_of_class(option, value)
            named = find_class(value)
            if named is not None:
                owners[option.removesuffix(CLASS)] = named
        else:
            sentence = _mistake_of_argument(option, value, owners)
        if sentence:
            return sentence
    return ""


def _names_a_class(option: str, value: Any) -> bool:
    takes_a_class = option.endswith(CLASS) or option.removesuffix(".help") in BASES
    # A list or a mapping in brackets names several classes, and a file holds the settings of one.
    return takes_a_class and isinstance(value, str) and value[:1] not in "[{" and not Path(value).is_file()


def _mistake_of_class(option: str, name: str) -> str:
    """Return a message if a class does not exist or belongs to another option; empty otherwise."""
    base = BASES.get(option.removesuffix(CLASS).removesuffix(".help"))
    found = find_class(name)
    module, _, last = name.rpartition(".")
    if found is None and module:
        failure = _failure_of_import(module)
        return failure or f"there is no class {name}.{similar(last, _names_in(module))}"
    if base is None or (inspect.isclass(found) and issubclass(found, base)):
        return ""
    if found is None and name not in fewshot_callbacks.__all__:
        is_known = any(name == subclass.__name__ for subclass in _subclasses(base))
        hint = similar(name, fewshot_callbacks.__all__)
        return "" if is_known else f"--{option}: {name} is not a file or a class.{hint}"
    taken = next((by for by in TAKEN_BY if inspect.isclass(found) and issubclass(found, by)), None)
    if taken is None:
        return f"--{option}: {name} is no class that this option takes."
    noun, words = TAKEN_BY[taken]
    if option.endswith(".help"):
        words = f"{words.removesuffix('+')}.help"
    return f"--{option}: {name} is a {noun}. Write {words} {name}."


def find_class(name: str) -> type | None:
    """Return a class by its path, or a public one by its name; None if there is none, or its module cannot be imported."""
    module, _, last = name.rpartition(".")
    if not module and name not in fewshot_callbacks.__all__:
        return None
    try:
        found = getattr(import_module(module or "fewshot_callbacks"), last, None)
    except Exception:  # a user's module may raise anything
        return None
    return found if inspect.isclass(found) else None


def _failure_of_import(module: str) -> str:
    """Return a message if a module exists and cannot be imported; empty otherwise."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        # A module that does not exist, or one that needs a package that is not installed.
        is_itself = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        return "" if is_itself else f"{module} cannot be imported: {error}."
    except Exception as error:  # a user's module may raise anything
        return f"{module} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}."
    return ""


def _names_in(module: str) -> list[str]:
    try:
        return dir(import_module(module))
    except Exception:  # a user's module may raise anything
        return []


def _subclasses(base: type) -> Iterator[type]:
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


def _mistake_of_argument(option: str, value: Any, owners: Mapping[str, type]) -> str:
    """Return a message if the class has no such argument, or the argument takes no such value; empty otherwise."""
    names = [name for name in owners if option.startswith(f"{name}.")]
    if not names:
        return ""
    owner = owners[max(names, key=len)]
    argument = option.removeprefix(max(names, key=len)).removeprefix(".")
    types = arguments_of(owner)
    if argument not in types:
        first = argument.partition(".")[0]
        # The arguments of an argument are known if its type is a dataclass.
        is_open = takes_any(owner) or (first in types and not any(name.startswith(f"{first}.") for name in types))
        if is_open or argument == "help":
            return ""
        hint = similar(argument, types) or f" It has {', '.join(types)}."
        return f"{owner.__name__} has no argument {argument}.{hint}"
    kind = types[argument]
    is_word = isinstance(value, str | int | float)
    if is_word and kinds_of(kind) and not accepts(kind, str(value)):
        return f"--{option}: {value} is not {kinds_of(kind)}."
    return ""


def takes_any(owner: type) -> bool:
    """Return whether a class takes arguments of any name."""
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in _parameters(owner))


def arguments_of(owner: type) -> dict[str, Any]:
    """Return the types of the arguments of a class by name, with those of dataclasses among them: `train.ways`."""
    arguments: dict[str, Any] = {}
    for parameter in _parameters(owner):
        kind = parameter.annotation
        arguments[parameter.name] = kind
        for part in (kind, *get_args(kind)):
            if isinstance(part, type) and is_dataclass(part):
                fields = arguments_of(part)
                arguments |= {f"{parameter.name}.{name}": fields[name] for name in fields}
    return arguments


def _parameters(owner: type) -> list[Parameter]:
    """Return the parameters of a class, with their types if these can be found."""
    try:
        return list(inspect.signature(owner, eval_str=True).parameters.values())
    except NameError:  # a type that is imported for type checkers alone
        return list(inspect.signature(owner).parameters.values())
