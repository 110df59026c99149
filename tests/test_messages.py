"""A fact is a whole word or number of a message."""

import warnings

import pytest

from tests.messages import missing_facts, refused, warned


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


def test_a_warning_names_all_facts_in_any_order():
    with warned(UserWarning, 3, "steps"):
        warnings.warn("Of the steps\nnone of 3 is known", stacklevel=1)
    with pytest.raises(UserWarning), warned(UserWarning, 3, "steps"):
        warnings.warn("13 steps", stacklevel=1)
