"""Means of classes and their mean, in fractions, and the interval of it."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.means import class_means, macro_mean
from fewshot_callbacks.functional.statistics import macro_mean_interval, mean_interval
from tests.cases import examples
from tests.messages import refused

NAN = math.nan
queries = st.lists(
    st.tuples(st.one_of(st.floats(0, 1), st.just(NAN), st.sampled_from([1e-300, 1 / 3])), st.integers(-3, 3)),
    max_size=30,
)


def tensors(pairs):
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    return values, torch.tensor([label for _, label in pairs], dtype=torch.int64)


def means_by_hand(pairs):
    """label -> mean of what is no NaN, in exact fractions and rounded once."""
    of = {}
    for value, label in pairs:
        if not math.isnan(value):
            of.setdefault(label, []).append(Fraction(value))
    return {label: (sum(of[label]) / len(of[label]), len(of[label])) for label in sorted(of)}


@settings(max_examples=examples(60), deadline=None)
@given(queries)
def test_equal_the_means_by_hand(pairs):
    expected = means_by_hand(pairs)
    labels, means, counts = class_means(*tensors(pairs))
    assert labels.tolist() == list(expected)
    assert counts.tolist() == [count for _, count in expected.values()]
    assert means.tolist() == pytest.approx([float(mean) for mean, _ in expected.values()], rel=1e-15)
    found = macro_mean(*tensors(pairs))
    if expected:
        assert found == pytest.approx(float(sum(mean for mean, _ in expected.values()) / len(expected)), rel=1e-15)
    else:
        assert math.isnan(found)


@settings(max_examples=examples(40), deadline=None)
@given(queries, st.randoms(use_true_random=False))
def test_neither_the_order_nor_the_names_of_the_classes_change_a_bit(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    renamed = [(value, (5 * label + 1) % 7 - 10) for value, label in pairs]  # another order of the classes
    for other in (shuffled, renamed):
        assert repr(macro_mean(*tensors(other))) == repr(macro_mean(*tensors(pairs)))
        assert repr(macro_mean_interval(*tensors(other))) == repr(macro_mean_interval(*tensors(pairs)))
    assert [part.tolist() for part in class_means(*tensors(shuffled))] == [
        part.tolist() for part in class_means(*tensors(pairs))
    ]


def test_interval_is_that_of_independent_class_means():
    values = torch.tensor([0.1, 0.3, 0.6, 0.8, 0.9, NAN], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    expected = mean_interval(torch.tensor([0.2, 0.6, 0.85], dtype=torch.float64), 0.9)
    assert tuple(macro_mean_interval(values, labels, 0.9)) == pytest.approx(tuple(expected), rel=1e-14)
    assert all(math.isnan(end) for end in macro_mean_interval(values[:2], labels[:2]))
    with refused(ValueError, "confidence=2"):
        macro_mean_interval(values, labels, 2)
