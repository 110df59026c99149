"""Settings of the data modules: each is one annotated attribute with its default, described once in a docstring."""

import re
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import TypeVar, dataclass_transform

AnyClass = TypeVar("AnyClass")

_SECTION = re.compile(r"^Args:\n(?: {4}.*\n)+", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): .*\n(?: {8}.*\n)*", re.MULTILINE)


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def with_settings(cls: type[AnyClass]) -> type[AnyClass]:
    """Make the annotated attributes of a class the keyword arguments of its constructor, as `dataclass` does.

    A subclass inherits the settings of its bases, with their descriptions: its docstring describes under `Args` what is
    new, and may describe an inherited setting anew. The descriptions of the others are added to the docstring, where
    `help` and the help of LightningCLI find them. Another default is one line, such as `ways: int = 5`.

    Args:
        cls: The class. Its `__post_init__` checks the settings. An instance only equals itself.

    Returns:
        The same class.

    Examples:
        >>> @with_settings
        ... class Episodes:
        ...     '''Episodes.
        ...
        ...     Args:
        ...         ways: Classes.
        ...     '''
        ...
        ...     ways: int = 20
        >>> @with_settings
        ... class BirdEpisodes(Episodes):
        ...     '''Episodes of birds.
        ...
        ...     Args:
        ...         calls: Whether birds are heard.
        ...     '''
        ...
        ...     ways: int = 5
        ...     calls: bool = False
        >>> BirdEpisodes(calls=True).ways
        5
        >>> list(described(BirdEpisodes.__doc__))
        ['calls', 'ways']
    """
    if cls.__doc__:  # there is none under python -OO
        inherited = [described(base.__doc__ or "") for base in reversed(cls.__bases__)]  # as fields are ordered
        cls.__doc__ = _with_descriptions(cleandoc(cls.__doc__) + "\n", inherited)
    return dataclass(kw_only=True, eq=False, repr=False)(cls)


def described(docstring: str) -> dict[str, str]:
    """Find the entries of the section `Args` of a docstring without outer indentation, by the name of the argument."""
    section = _SECTION.search(docstring)
    return {} if section is None else {entry[1]: entry[0] for entry in _ENTRY.finditer(section[0])}


def _with_descriptions(docstring: str, inherited: list[dict[str, str]]) -> str:
    entries = described(docstring)
    for others in inherited:
        entries |= {name: entry for name, entry in others.items() if name not in entries}
    section = "Args:\n" + "".join(entries.values())
    if _SECTION.search(docstring):
        return _SECTION.sub(lambda _: section, docstring, count=1)
    return f"{docstring}\n{section}"
