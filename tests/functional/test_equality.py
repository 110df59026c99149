"""Results with NaN equal a copy of themselves, in every version of Python."""

import pickle
import re
from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from fewshot_callbacks import functional
from fewshot_callbacks.functional import Metric, RetrievalSettings, evaluate_retrieval, verification
from fewshot_callbacks.functional.retrieval.operating_points import OperatingPoint
from fewshot_callbacks.functional.statistics import Difference, Interval

ITEMS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
NAN = float("nan")


def public_results():
    """Return the public dataclasses that compare numbers and may contain NaN."""
    public = {getattr(module, name) for module in (functional, verification) for name in module.__all__}
    classes = {
        kind for kind in public if is_dataclass(kind) and isinstance(kind, type) and kind.__eq__ != object.__eq__
    }
    classes -= {RetrievalSettings, Metric, verification.TrialList}  # settings and input, of which NaN is refused
    return [
        kind for kind in classes if any(re.search(r"\bfloat\b|Interval", str(field.type)) for field in fields(kind))
    ]


def with_nan(kind):
    """A result whose fields all hold NaN, each a number of its own, as a process that received the result has it."""
    result = object.__new__(kind)
    for field in fields(kind):
        object.__setattr__(result, field.name, float("nan"))
    return result


@pytest.mark.parametrize("kind", sorted(public_results(), key=lambda kind: kind.__name__))
def test_equal_with_nan(kind):
    assert with_nan(kind) == with_nan(kind)
    assert hash(with_nan(kind)) == hash(with_nan(kind))
    [first, *_] = [field.name for field in fields(kind) if field.compare]
    changed = with_nan(kind)
    object.__setattr__(changed, first, 1.0)
    assert changed != with_nan(kind)
    assert with_nan(kind) != NAN


def test_a_report_equals_its_copy_and_no_other():
    report = evaluate_retrieval(ITEMS, [0] * 2 + [*range(1, 11)], metrics=("recall@1", "recall@precision0.95"))
    copy = pickle.loads(pickle.dumps(report))
    assert "nan" in str([copy.pooled, copy.intervals])
    assert report == copy
    assert report != replace(copy, queries=13)
    assert report != replace(copy, intervals={})


def test_nan_in_tuples_and_dictionaries():
    interval = Interval(NAN, NAN)
    assert Difference(0.5, 1.0, interval) == Difference(0.5, 1.0, Interval(float("nan"), -NAN))
    assert Difference(0.5, 1.0, interval) != Difference(0.5, 1.0, Interval(NAN, 1.0))
    assert len({OperatingPoint(float("nan"), 0, 0, 3), OperatingPoint(float("nan"), 0, 0, 3)}) == 1
