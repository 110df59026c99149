"""Messages about words of `fewshot fit` that LightningCLI refuses, where its own message would not help."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import Dataset

import fewshot_callbacks
from fewshot_callbacks.cli.mistakes import did_you_mean, unknown_option, values_of
from fewshot_callbacks.data import FewShotDataset

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


def mistake_of_training(words: Sequence[str], options: Iterable[str]) -> str:
    """Return a message about an unknown option, data that are missing, or a class that an option does not take.

    Args:
        words: `fit`, `validate` or `test`, and the words that follow.
        options: The names of the options that the parser lists, without the options of a class that an option names.

    Returns:
        The message; empty if the mistake is another one.
    """
    unknown = unknown_option(words, {*options, "config", "print_config"})
    if unknown:
        return unknown
    if not any(word.startswith(("--config", "--data")) for word in words):
        return "there is no data. Give a configuration, such as --config protonet_dr_glyphs."
    for option, value in values_of(words):
        # The path of a class, a file and settings in brackets are not identifiers.
        if value.isidentifier():
            sentence = _mistake_of_class(option.removesuffix("+"), value)
            if sentence:
                return sentence
    return ""


def _mistake_of_class(option: str, name: str) -> str:
    """Return a message if an option takes a class, but not this one; empty otherwise."""
    base = BASES.get(option.removesuffix(".class_path").removesuffix(".help"))
    if base is None or name in _names_of_subclasses(base):
        return ""
    if name not in fewshot_callbacks.__all__:
        return f"--{option}: {name} is not a file or a class.{did_you_mean(name, fewshot_callbacks.__all__)}"
    found = getattr(fewshot_callbacks, name)
    if not inspect.isclass(found):
        return f"--{option}: {name} is no class that this option takes."
    for other_base, (noun, words) in TAKEN_BY.items():
        if issubclass(found, other_base):
            fix = f"{words.removesuffix('+')}.help" if option.endswith(".help") else words
            return f"--{option}: {name} is a {noun}. Write {fix} {name}."
    return f"--{option}: {name} is no class that this option takes."


def _names_of_subclasses(base: type) -> Iterator[str]:
    """Yield the names of all classes below a base that are imported."""
    subclasses: list[type] = base.__subclasses__()
    for subclass in subclasses:
        yield subclass.__name__
        yield from _names_of_subclasses(subclass)


def option_of_training(name: str) -> str:
    """Return the option that gives an argument of a data set, a data module or a module; empty if it is not exactly one.

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
    """Return the names of the arguments of a class; empty for anything else."""
    return inspect.signature(found).parameters if inspect.isclass(found) else ()
