"""The run-time type checker of the tests, several times as fast as jaxtyping's own way around beartype.

jaxtyping binds the arguments of each call to its signature, runs beartype's checks twice, and does all it needs for that
again whenever a function inside another is defined: an evaluation of 40 items took 61 ms, of which 5 ms without any check.
Here beartype checks each call once, sizes are remembered only for a function whose signature has any, and a function
inside another is checked in the first of its lives.
"""

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass
from types import CodeType
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

CHECKED = os.environ.get("FEWSHOT_CHECK_SHAPES", "1") == "1"
"""Whether this run checks: `make test` does not, where an evaluation of a few items takes twice as long with it."""

# an int is a fine float, as PEP 484 says
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))

original = jaxtyping.jaxtyped
LIVES = 20
"""So many times a function inside another is checked: its check is compiled each time that it is defined."""
lives: Counter[CodeType] = Counter()


def hint(annotation: Any, names: dict[str, Any]) -> Any:
    """What an annotation means; anything, as for jaxtyping, where that cannot be known yet."""

    def holder(value: Any) -> None: ...

    holder.__annotations__ = {"value": annotation}
    try:
        return get_type_hints(holder, names, include_extras=True)["value"]
    except Exception:
        return Any


def has_sizes(annotation: Any) -> bool:
    """Whether an annotation names sizes of arrays."""
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(has_sizes(part) for part in get_args(annotation))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose arguments and result are checked while jaxtyping is not switched off."""
    if "<locals>" in function.__qualname__:
        lives[function.__code__] += 1
        if lives[function.__code__] > LIVES:
            return function
    if inspect.isgeneratorfunction(function):  # beartype's check of its arguments waits for the first value
        return original(function, typechecker=typechecked)
    written = function.__annotations__
    hints = {name: hint(annotation, function.__globals__) for name, annotation in written.items()}
    function.__annotations__ = hints
    strict = typechecked(function)
    function.__annotations__ = written
    if strict is function:
        return function
    sizes = any(map(has_sizes, hints.values()))

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if not sizes:
            return strict(*args, **kwargs)
        with original("context"):
            return strict(*args, **kwargs)

    return wrapped


def jaxtyped(*_: Any, typechecker: Any = None) -> Callable[[Any], Any]:
    """In the place of the decorator that jaxtyping's import hook writes at functions and classes."""

    def decorate(of: Any) -> Any:
        if not inspect.isclass(of):
            return checked(of)
        if is_dataclass(of) and not hasattr(of.__init__, "__wrapped__"):
            of.__init__ = checked(of.__init__)
        return of

    return decorate


jaxtyping.jaxtyped = jaxtyped
