"""The variance ratio and its interval against the definitions, at any scale and for any cut into batches."""

import math
from fractions import Fraction
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import discriminant_ratio, variance_ratio, variance_ratio_of_set
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, batch_ratios
from tests.functional.class_cases import batches, extreme_sets, made
from tests.functional.variance import interval_by_definition
from tests.thread_processes import in_threads


def exact(embeddings, labels):
    """In rational arithmetic."""
    rows, labels = [[Fraction(x) for x in row] for row in embeddings.tolist()], labels.tolist()
    classes = [[row for row, own in zip(rows, labels, strict=True) if own == label] for label in set(labels)]
    n, k = len(rows), len(classes)

    def scatter(rows):
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        return sum((x - m) ** 2 for row in rows for x, m in zip(row, means, strict=True))

    within = sum(scatter(own) for own in classes)
    if k < 2 or n == k or within == 0:
        return math.nan
    n0 = (n - Fraction(sum(len(own) ** 2 for own in classes), n)) / (k - 1)
    msw = within / (n - k)
    return (((scatter(rows) - within) / (k - 1)) / msw - 1) / n0


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


def as_tensor(found):
    return torch.tensor(found.value, dtype=torch.float64)


class TestDefinition:
    def test_by_hand(self):
        # class means 1 and 5, centre 3 of four items: MSB = 16, MSW = 4 / 2, n0 = 2
        embeddings, labels = torch.tensor([[0.0], [2.0], [4.0], [6.0]]), torch.tensor([7, 7, -3, -3])
        assert variance_ratio(embeddings, labels).item() == pytest.approx((16 - 2) / (2 * 2))
        # with a single item at 3 of a third class: the centre stays, MSB = 16 / 2, n0 = (5 - 9 / 5) / 2
        embeddings, labels = torch.cat([embeddings, torch.tensor([[3.0]])]), torch.tensor([7, 7, -3, -3, 0])
        assert variance_ratio(embeddings, labels).item() == pytest.approx((8 - 2) / (1.6 * 2))

    def test_a_scatter_within_that_underflows_beside_the_one_between(self):
        embeddings = torch.tensor([[3.9491e-291], [3.8076e-291], [1e300]], dtype=torch.float64)
        assert variance_ratio(embeddings, torch.tensor([0, 0, 99])).item() == math.inf
        assert variance_ratio(embeddings, torch.tensor([0, 1, 1])).item() < 0
        embeddings[1] = embeddings[0]
        assert variance_ratio(embeddings, torch.tensor([0, 0, 99])).isnan()

    @settings(max_examples=80, deadline=None)
    @given(extreme_sets() | batches())
    def test_equals_rational_arithmetic_at_any_scale_and_offset(self, batch):
        embeddings, labels = batch
        expected, found = exact(embeddings, labels), variance_ratio(embeddings, labels)
        assert found.dtype == (torch.float64 if embeddings.dtype == torch.float64 else torch.float32)
        assert_close(found, expected, 1e-11 if embeddings.dtype == torch.float64 else 1e-6)
        assert_close(as_tensor(variance_ratio_of_set(embeddings, labels)), expected, 1e-11)

    @pytest.mark.parametrize("normalize", [False, True])
    def test_scale_changes_nothing_but_normalisation_does(self, normalize):
        embeddings, labels = made()
        expected = variance_ratio(embeddings, labels, normalize=normalize)
        torch.testing.assert_close(variance_ratio(1e4 * embeddings, labels, normalize=normalize), expected)
        of_set = variance_ratio_of_set(embeddings, labels, normalize=normalize).value
        assert of_set == pytest.approx(expected.item(), rel=1e-12)
        lengths = torch.linspace(0.1, 10.0, 60).unsqueeze(1)
        plain, unit = (
            float(variance_ratio(lengths * embeddings, labels, normalize=choice)) for choice in (False, True)
        )
        assert plain != pytest.approx(unit, rel=0.1)

    @settings(max_examples=40, deadline=None)
    @given(batches(), st.booleans(), st.booleans())
    def test_both_ratios_of_one_computation_are_those_of_two_to_the_last_bit(self, batch, normalize, skip_singletons):
        settings = {"normalize": normalize, "skip_singletons": skip_singletons}
        j, ratio = batch_ratios(*batch, eps=0.25, **settings)
        torch.testing.assert_close(j, discriminant_ratio(*batch, eps=0.25, **settings), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ratio, variance_ratio(*batch, normalize=normalize), rtol=0, atol=0, equal_nan=True)

    @settings(max_examples=200, deadline=None)
    @given(extreme_sets(), st.booleans(), st.booleans())
    def test_the_compiled_kernel_and_pytorch_agree(self, batch, normalize, skip_singletons):
        settings = {"eps": 1e-12, "normalize": normalize, "skip_singletons": skip_singletons}
        compiled, plain = batch_ratios(*batch, **settings), by_pytorch(*batch, **settings)
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6, equal_nan=True)

    def test_as_many_classes_as_a_table_can_hold(self):
        labels = torch.arange(4096) * 2**52 % 4095
        embeddings = torch.randn(4096, 2)
        torch.testing.assert_close(batch_ratios(embeddings, labels), by_pytorch(embeddings, labels))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_a_transposed_batch_and_labels_that_are_a_column(self, dtype):
        embeddings, labels = torch.randn(6, 20).to(dtype), torch.arange(40).view(20, 2) // 8
        expected = batch_ratios(embeddings.T.contiguous(), labels[:, 0].contiguous())
        torch.testing.assert_close(batch_ratios(embeddings.T, labels[:, 0]), expected)


def population(ratio, classes=300, items=20, dim=16):
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(classes).repeat_interleave(items)
    centres = math.sqrt(ratio) * torch.randn(classes, dim, generator=generator)
    return centres[labels] + torch.randn(len(labels), dim, generator=generator), labels


@pytest.mark.parametrize("truth", [0.0, 0.3, 2.0])
def test_batches_episodes_and_sets_agree_where_j_does_not(truth):
    embeddings, labels = population(truth)
    generator = torch.Generator().manual_seed(2)
    shuffled = [torch.randperm(len(labels), generator=generator)[:200] for _ in range(60)]
    episodes = []
    for ways, shots in ((20, 4), (5, 20)):
        classes = [torch.randperm(300, generator=generator)[:ways] for _ in range(60)]
        rows = [torch.rand(ways, 20, generator=generator).argsort(dim=1)[:, :shots] for _ in range(60)]
        episodes.append([(20 * c[:, None] + r).flatten() for c, r in zip(classes, rows, strict=True)])
    drawn = [shuffled, *episodes, [torch.arange(len(labels))]]
    both = [[batch_ratios(embeddings[some], labels[some]) for some in draws] for draws in drawn]
    j, ratio = ([median(float(pair[i]) for pair in pairs) for pairs in both] for i in (0, 1))
    assert ratio == pytest.approx([truth] * 4, abs=0.02 + 0.07 * truth)
    assert max(j) > 2 * min(j) + 0.05


REASONS = {
    "one item": "Each of the 6 classes has one item",
    "one class": "The set has a single class",
    "collapsed": "All embeddings are equal: the model has collapsed",
    "points": "The items of each class are equal",
    "empty": "The set is empty",
    "nan": "Some embeddings are not finite",
    "inf": "Some embeddings are not finite",
}


class TestUndefined:
    @pytest.mark.parametrize("case", REASONS)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_nan_with_a_reason(self, case, dtype):
        embeddings, labels = torch.randn(6, 3), torch.arange(6) % 3
        if case in ("one item", "one class"):
            labels = torch.arange(6) if case == "one item" else torch.zeros(6, dtype=torch.int64)
        elif case in ("collapsed", "points"):
            embeddings = torch.full((6, 3), 0.1) if case == "collapsed" else embeddings[labels]
        elif case in ("nan", "inf"):
            embeddings[4, 1] = float(case)
        else:
            embeddings, labels = embeddings[:0], labels[:0]
        found = variance_ratio_of_set(embeddings.to(dtype), labels)
        assert found.undefined is not None
        assert found.undefined.startswith(REASONS[case])
        assert math.isnan(found.value)
        assert all(map(math.isnan, found.interval))
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
    @settings(max_examples=80, deadline=None)
    @given(sets_of_classes(), st.sampled_from([0.8, 0.95]))
    def test_the_interval_is_that_of_leaving_out_each_class(self, case, confidence):
        embeddings, labels = case
        found = variance_ratio_of_set(embeddings, labels, confidence=confidence)
        expected = interval_by_definition(embeddings, labels, confidence)
        assert tuple(found.interval) == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
        if not math.isnan(found.interval.low):
            assert found.interval.low < found.value < found.interval.high

    @settings(max_examples=15, deadline=None)
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

    @pytest.mark.parametrize(("truth", "classes"), [(0.0, 10), (0.3, 20), (2.0, 50)])
    def test_the_interval_holds_the_truth(self, truth, classes):
        """Seeded; benchmarks/variance_ratio.py --coverage has more of it."""
        held = 0
        for seed in range(200):
            generator = torch.Generator().manual_seed(seed)
            labels = torch.arange(classes).repeat_interleave(torch.randint(1, 9, (classes,), generator=generator))
            centres = math.sqrt(truth) * torch.randn(classes, 4, generator=generator)
            embeddings = centres[labels] + torch.randn(len(labels), 4, generator=generator)
            low, high = variance_ratio_of_set(embeddings, labels).interval
            held += low <= truth <= high
        assert 0.90 <= held / 200 <= 0.99


@pytest.mark.parametrize("function", [variance_ratio, variance_ratio_of_set])
def test_refusals(function):
    with pytest.raises(
        ValueError, match=rf"{function.__name__} needs floating-point embeddings of shape \(items, dim\)"
    ):
        function(torch.ones(6), torch.arange(6))
    with pytest.raises(
        ValueError, match=rf"{function.__name__} needs one label for each of the 6 embeddings; got 5 labels"
    ):
        function(torch.ones(6, 2), torch.arange(5))


def test_refusals_of_sets():
    with pytest.raises(ValueError, match=r"confidence=95 is not between 0 and 1"):
        variance_ratio_of_set(*made(), confidence=95)
    with pytest.raises(ValueError, match=r"needs labels. Pass one integer or word for each embedding"):
        variance_ratio_of_set(made()[0])
