"""What a refusal must say, whatever its words: the facts that a reader needs to find the mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def missing_facts(message: str, facts: tuple[Any, ...]) -> list[Any]:
    """The facts that a message does not name as whole words: 3 is not in "13 rows", nor in "0.3"."""
    return [fact for fact in facts if not re.search(rf"(?<![\w.]){re.escape(str(fact))}(?!\w)", message)]


@contextmanager
def refused(error: type[Exception], *facts: Any) -> Iterator[None]:
    """The block raises this type of error, and the message names each fact: what was passed, where, and what to pass."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    missing = missing_facts(message, facts)
    assert not missing, f"{missing} not in: {message}"
