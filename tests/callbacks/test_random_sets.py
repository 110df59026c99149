"""Random sets in any order, cut into any batches, in any precision: what must not move does not."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.callbacks import DiscriminantRatioMonitor
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments
from tests.callbacks.gloo_jobs import AsGiven
from tests.callbacks.models import retrieval, trainer


@settings(max_examples=25, deadline=None)
@given(
    items=st.integers(2, 40),
    classes=st.integers(1, 6),
    batch_size=st.integers(1, 45),
    few_values=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_order_batches_and_precision(
    items: int, classes: int, batch_size: int, few_values: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-classes, classes, (items,), generator=generator)
    labels[0] = labels[1]  # somebody has a match
    points = torch.randn(items, 3, generator=generator)
    points = (points.round() if few_values else points).to(dtype)
    order = torch.randperm(items, generator=generator)
    expected = evaluate_retrieval(points, labels, label_groups=None)
    monitor = retrieval()
    run = trainer(monitor, DiscriminantRatioMonitor())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sets without a J
        data = TensorDataset(points[order], labels[order])
        (logged,) = run.validate(AsGiven(), DataLoader(data, batch_size=batch_size), verbose=False)
    assert monitor.report is not None
    assert monitor.report.values == expected.values
    assert repr(monitor.report.decision) == repr(expected.decision)
    assert repr(monitor.report.at_precision) == repr(expected.at_precision)
    assert monitor.report.intervals.keys() == expected.intervals.keys()
    for name, interval in expected.intervals.items():
        assert monitor.report.intervals[name].low == pytest.approx(interval.low, rel=1e-12, abs=1e-12, nan_ok=True)
    ratio = float(ClassMoments.of(points, labels).discriminant_ratio())
    assert logged["val/J"] == pytest.approx(ratio, rel=1e-6, nan_ok=True)
