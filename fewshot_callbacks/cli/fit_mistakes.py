"""Messages about words of `fewshot fit` that LightningCLI rejects, if its own message would not help."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import Dataset

import fewshot_callbacks
from fewshot_callbacks.cli.mistakes import did_you_mean, unknown_option, values_of
from fewshot_callbacks.data import FewShotDataset

# Options that take a class -> the base of this class.
BASES: dict[str, type] = {
    "data": LightningDataModule,
    "model": LightningModule,
    "trainer.callbacks": Callback,
    "data.dataset": Dataset,
}
# Base of a class -> its noun, and the words before the name of such a class.
TAKEN_BY: dict[type, tuple[str, str]] = {
    LightningDataModule: ("data module", "--data"),
    LightningModule: ("module", "--model"),
    Callback: ("callback", "--trainer.callbacks+"),
    Dataset: ("data set", "--data FewShotDataModule --data.dataset"),
}


def mistake_of_training(words: Sequence[str], options: Iterable[str]) -> str:
    """Return a message about an unknown option, missing data, or a wrong class; empty for any other mistake.

    `options` are the names that the parser lists, without the settings of classes that options name.
    """
    unknown = unknown_option(words, {*options, "config", "print_config"})
    if unknown:
        return unknown
    if not any(word.startswith(("--config", "--data")) for word in words):
        return "no data was given. Pass a configuration, such as --config protonet_dr_glyphs."
    for option, value in values_of(words):
        # An import path, a file or settings in brackets are not identifiers.
        if value.isidentifier():
            sentence = _mistake_of_class(option.removesuffix("+"), value)
            if sentence:
                return sentence
    return ""


def _mistake_of_class(option: str, name: str) -> str:
    """Return a message if an option takes a different class; empty otherwise."""
    base = BASES.get(option.removesuffix(".class_path").removesuffix(".help"))
    if base is None or name in _names_of_subclasses(base):
        return ""
    if name not in fewshot_callbacks.__all__:
        return f"--{option}: {name} is not a file or a class.{did_you_mean(name, fewshot_callbacks.__all__)}"
    found = getattr(fewshot_callbacks, name)
    if not inspect.isclass(found):
        return f"--{option}: {name} is not a class."
    for other_base, (noun, words) in TAKEN_BY.items():
        if issubclass(found, other_base):
            fix = f"{words.removesuffix('+')}.help" if option.endswith(".help") else words
            return f"--{option}: {name} is a {noun}. Write {fix} {name}."
    return f"--{option}: this option does not take {name}."


def _names_of_subclasses(base: type) -> Iterator[str]:
    """Yield the names of all imported subclasses, direct and indirect."""
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        yield subclass.__name__
        yield from _names_of_subclasses(subclass)


def option_of_training(name: str) -> str:
    """Return the option that sets an argument of a data set, data module or module; empty unless exactly one does.

    Examples:
        >>> option_of_training("train_folder"), option_of_training("shots"), option_of_training("colour")
        ('--data.dataset.train_folder', '--model.shots', '')
    """
    owners = {
        "--data.dataset": FewShotDataset,
        "--data": LightningDataModule,
        "--model": LightningModule,
    }
    found = [
        option
        for option, base in owners.items()
        for class_name in _names_of_subclasses(base)
        if name in _arguments_of(getattr(fewshot_callbacks, class_name, None))
    ]
    options = sorted(set(found))
    return f"{options[0]}.{name}" if len(options) == 1 else ""


def _arguments_of(found: Any) -> Iterable[str]:
    """Return the names of the arguments of a class; empty if it is not a class."""
    return inspect.signature(found).parameters if inspect.isclass(found) else ()
