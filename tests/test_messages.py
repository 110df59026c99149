"""A fact is a whole word or number of a message."""

import pytest

from tests.messages import missing_facts, refused


@pytest.mark.parametrize(
    ("message", "facts", "missing"),
    [
        ("3 steps came with 0 measures", ("steps", 3, 0), []),
        ("13 rows, 0.3 of them", (3,), [3]),
        ("Pass k=1.", ("k=1",), []),
        ("Pass k=10.", ("k=1",), ["k=1"]),
    ],
)
def test_facts_are_whole_words(message, facts, missing):
    assert missing_facts(message, facts) == missing


def test_the_type_counts():
    with pytest.raises(KeyError), refused(ValueError, "a"):
        raise KeyError("a")
    with pytest.raises(AssertionError, match="not in: b"), refused(ValueError, "a"):
        raise ValueError("b")
