"""The variance ratio and its interval against the definitions, at any scale and for any cut into batches."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import variance_ratio, variance_ratio_of_set
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, batch_ratios
from tests.cases import examples
from tests.functional.class_cases import batches, clustered_items, exact_scatters, extreme_sets
from tests.functional.variance_ratio_reference import interval_by_definition
from tests.thread_processes import in_threads


def exact(embeddings, labels):
    """In rational arithmetic."""
    sizes, within, total = exact_scatters(embeddings, labels)
    n, k = sum(sizes), len(sizes)
    if k < 2 or n == k or within == 0:
        return math.nan
    n0 = (n - Fraction(sum(size**2 for size in sizes), n)) / (k - 1)
    return (((total - within) / (k - 1)) / (within / (n - k)) - 1) / n0


def assert_close(found, expected, rel):
    """Relative to the ratio of the mean squares: the ratio itself may be a difference of nearly equal numbers."""
    if isinstance(expected, Fraction):
        expected = float(expected) if expected < Fraction(torch.finfo(found.dtype).max) else math.inf
    tolerance = rel * (1 + abs(expected) + math.sqrt(abs(expected))) if math.isfinite(expected) else 0
    assert found.item() == pytest.approx(expected, rel=0, abs=tolerance, nan_ok=True)


class Subclass(torch.Tensor):
    """Whose values no compiled loop may read: what is asked of it is computed by PyTorch operations."""


def by_pytorch(embeddings, labels, **settings):
    found = batch_ratios(embeddings.as_subclass(Subclass), labels, **settings)
    return tuple(value.as_subclass(torch.Tensor) for value in found)


class TestDefinition:
    def test_a_scatter_within_that_underflows_beside_the_one_between(self):
        embeddings = torch.tensor([[3.9491e-291], [3.8076e-291], [1e300]], dtype=torch.float64)
        assert variance_ratio(embeddings, torch.tensor([0, 0, 99])).item() == math.inf
        assert variance_ratio(embeddings, torch.tensor([0, 1, 1])).item() < 0
        embeddings[1] = embeddings[0]
        assert variance_ratio(embeddings, torch.tensor([0, 0, 99])).isnan()

    @settings(max_examples=examples(60), deadline=None)
    @given(extreme_sets() | batches())
    def test_equals_rational_arithmetic_at_any_scale_and_offset(self, batch):
        embeddings, labels = batch
        expected, found = exact(embeddings, labels), variance_ratio(embeddings, labels)
        assert found.dtype == (torch.float64 if embeddings.dtype == torch.float64 else torch.float32)
        assert_close(found, expected, 1e-11 if embeddings.dtype == torch.float64 else 1e-6)
        of_set = torch.tensor(variance_ratio_of_set(embeddings, labels).value, dtype=torch.float64)
        assert_close(of_set, expected, 1e-11)

    def test_scale_changes_nothing_but_normalisation_does(self):
        embeddings, labels = clustered_items()
        lengths = torch.linspace(0.1, 10.0, 60).unsqueeze(1)
        found = []
        for normalize in (False, True):
            expected = variance_ratio(embeddings, labels, normalize=normalize)
            torch.testing.assert_close(variance_ratio(1e4 * embeddings, labels, normalize=normalize), expected)
            of_set = variance_ratio_of_set(embeddings, labels, normalize=normalize).value
            assert of_set == pytest.approx(expected.item(), rel=1e-12)
            found.append(float(variance_ratio(lengths * embeddings, labels, normalize=normalize)))
        assert found[0] != pytest.approx(found[1], rel=0.1)

    @settings(max_examples=examples(80), deadline=None)
    @given(extreme_sets(), st.booleans(), st.booleans())
    def test_the_compiled_kernel_and_pytorch_agree(self, batch, normalize, skip_singletons):
        settings = {"eps": 1e-12, "normalize": normalize, "skip_singletons": skip_singletons}
        compiled, plain = batch_ratios(*batch, **settings), by_pytorch(*batch, **settings)
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6, equal_nan=True)

    def test_as_many_classes_as_a_table_can_hold(self):
        labels = torch.arange(4096) * 2**52 % 4095
        embeddings = torch.randn(4096, 2)
        torch.testing.assert_close(batch_ratios(embeddings, labels), by_pytorch(embeddings, labels))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_a_transposed_batch_and_labels_that_are_a_column(self, dtype):
        embeddings, labels = torch.randn(6, 20).to(dtype), torch.arange(40).view(20, 2) // 8
        expected = batch_ratios(embeddings.T.contiguous(), labels[:, 0].contiguous())
        torch.testing.assert_close(batch_ratios(embeddings.T, labels[:, 0]), expected)


def test_batches_episodes_and_sets_agree_where_j_does_not():
    """All are drawn from a population of 300 classes whose variance between them is twice that within."""
    labels = torch.arange(300).repeat_interleave(20)
    embeddings = math.sqrt(2) * torch.randn(300, 16)[labels] + torch.randn(6000, 16)
    batches_of_200 = [torch.randperm(6000)[:200] for _ in range(60)]
    episodes = [(20 * torch.randperm(300)[:5, None] + torch.arange(20)).flatten() for _ in range(60)]
    both = [
        torch.tensor([batch_ratios(embeddings[some], labels[some]) for some in draws]).median(dim=0).values
        for draws in (batches_of_200, episodes, [torch.arange(6000)])
    ]
    j, ratio = torch.stack(both).T.tolist()
    assert ratio == pytest.approx([2.0] * 3, abs=0.16)
    assert max(j) > 2 * min(j)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows, labels: (rows, torch.arange(6)), "Each of the 6 classes has one item"),
        (lambda rows, labels: (rows, 0 * labels), "The set has a single class"),
        (lambda rows, labels: (0 * rows + 0.1, labels), "All embeddings are equal: the model has collapsed"),
        (lambda rows, labels: (rows[labels], labels), "The items of each class are equal"),
        (lambda rows, labels: (rows[:0], labels[:0]), "The set is empty"),
        (lambda rows, labels: (rows / torch.arange(6)[:, None], labels), "Some embeddings are not finite"),
        (lambda rows, labels: (rows * math.nan, labels), "Some embeddings are not finite"),
    ],
)
def test_what_is_undefined_is_nan_with_a_reason(change, reason):
    embeddings, labels = change(torch.randn(6, 3), torch.arange(6) % 3)
    for dtype in (torch.float16, torch.float32, torch.float64):
        found = variance_ratio_of_set(embeddings.to(dtype), labels)
        assert found.undefined.startswith(reason)
        assert all(map(math.isnan, (found.value, *found.interval)))
        assert variance_ratio(embeddings.to(dtype), labels).isnan()


@st.composite
def sets_of_classes(draw):
    """Normal classes, of sizes from one item on."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    labels = torch.cat([torch.full((draw(st.integers(1, 6)),), c) for c in range(draw(st.integers(1, 8)))])
    centres = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), 3, generator=generator, dtype=torch.float64)
    order = torch.randperm(len(labels), generator=generator)
    return (draw(st.sampled_from([0.0, 0.5, 3.0])) * centres[labels] + noise + 100)[order], labels[order]


class TestSets:
    @settings(max_examples=examples(50), deadline=None)
    @given(sets_of_classes(), st.sampled_from([0.8, 0.95]))
    def test_the_interval_is_that_of_leaving_out_each_class(self, case, confidence):
        embeddings, labels = case
        found = variance_ratio_of_set(embeddings, labels, confidence=confidence)
        expected = interval_by_definition(embeddings, labels, confidence)
        assert tuple(found.interval) == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
        if not math.isnan(found.interval.low):
            assert found.interval.low < found.value < found.interval.high

    @settings(max_examples=examples(15), deadline=None)
    @given(sets_of_classes(), st.integers(2, 3), st.data())
    def test_moments_shared_out_among_processes(self, case, count, data):
        embeddings, labels = case
        owner = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=len(labels), max_size=len(labels))))

        def run(processes):
            mine = owner == processes.rank
            moments = ClassMoments.of(embeddings[mine], labels[mine]).shared(processes)
            return variance_ratio_of_set(moments.class_scatter(processes=processes))

        whole = variance_ratio_of_set(embeddings, labels)
        answers = in_threads(count, run)
        assert all(repr(found) == repr(answers[0]) for found in answers)
        assert answers[0].value == pytest.approx(whole.value, rel=1e-9, abs=1e-11, nan_ok=True)
        assert tuple(answers[0].interval) == pytest.approx(tuple(whole.interval), rel=1e-6, abs=1e-9, nan_ok=True)
