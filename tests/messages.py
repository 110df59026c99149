"""What a message must say, whatever its words: the facts that a reader needs to find the mistake and to mend it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest


def pattern(fact: Any) -> str:
    """A regular expression that finds the fact as a whole word: 3 is not in "13 rows", nor in "0.3"."""
    return rf"(?<![\w.]){re.escape(str(fact))}(?!\w|\.\d)"


def missing_facts(message: str, facts: tuple[Any, ...]) -> list[Any]:
    """The facts that a message does not name."""
    return [fact for fact in facts if not re.search(pattern(fact), message)]


@contextmanager
def refused(error: type[BaseException], *facts: Any) -> Iterator[Any]:
    """The block raises this type of error, and the message names each fact: what was passed, where, and what to pass.

    It yields what `pytest.raises` does: `value` is the error.
    """
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    missing = missing_facts(message, facts)
    assert not missing, f"{missing} not in: {message}"


def warned(category: type[Warning], *facts: Any) -> AbstractContextManager[Any]:
    """The block gives a warning of this category that names each fact; other warnings are given as they are."""
    return pytest.warns(category, match="(?s)" + "".join(f"(?=.*{pattern(fact)})" for fact in facts))
