"""J against loops and rational arithmetic, at any scale, in batches, and shared out among processes."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import calinski_harabasz_score
from torch._subclasses.fake_tensor import FakeTensorMode

from fewshot_callbacks.functional.discriminant_ratio import EPS, ClassMoments, batch_ratios, discriminant_ratio
from tests.functional.class_cases import batches, extreme_sets, made
from tests.thread_processes import in_threads

HALF = (torch.float16, torch.bfloat16)


def exact_ratio(embeddings, labels, eps=0.0, skip_singletons=False):
    """J in rational arithmetic, without a rounding; inf where the classes are points, NaN where it says nothing."""
    rows, labels = [[Fraction(x) for x in row] for row in embeddings.tolist()], labels.tolist()
    members = {label: [row for row, own in zip(rows, labels, strict=True) if own == label] for label in set(labels)}
    if skip_singletons:
        members = {label: own for label, own in members.items() if len(own) > 1}
    rows = [row for own in members.values() for row in own]
    if len(rows) == len(members):
        return math.nan

    def mean(rows):
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def scatter(rows, centre):
        return sum((x - m) ** 2 for row in rows for x, m in zip(row, centre, strict=True))

    within = sum(scatter(own, mean(own)) for own in members.values())
    total = scatter(rows, mean(rows))
    if total == 0:
        return math.nan
    bottom = within + Fraction(eps) * total
    return (total - within) / bottom if bottom else math.inf  # a fraction: J may lie beyond what a float holds


class TestDefinition:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
    def test_any_integer_labels(self, dtype):
        embeddings, labels = made()[0], torch.arange(60) % 2
        expected = discriminant_ratio(embeddings, labels)
        labels = labels * 255 if dtype == torch.uint8 else labels
        torch.testing.assert_close(discriminant_ratio(embeddings, labels.to(dtype)), expected)

    def test_equals_the_index_of_calinski_and_harabasz(self):
        embeddings, labels = made()
        index = calinski_harabasz_score(embeddings.numpy(), labels.numpy())
        expected = index * (5 - 1) / (60 - 5)
        assert discriminant_ratio(embeddings, labels, eps=0.0).item() == pytest.approx(expected, rel=1e-12)
        assert ClassMoments.of(embeddings, labels).discriminant_ratio(eps=0.0).item() == pytest.approx(
            expected, rel=1e-12
        )


class TestInvariance:
    @pytest.mark.parametrize("scale", [1e-3, 3.0, 1e4])
    def test_scale_changes_nothing_but_normalisation_does(self, scale):
        embeddings, labels = made()
        expected = discriminant_ratio(embeddings, labels)
        torch.testing.assert_close(discriminant_ratio(scale * embeddings, labels), expected)
        lengths = torch.linspace(0.1, 10.0, 60).unsqueeze(1)
        normalized = discriminant_ratio(embeddings, labels, normalize=True)
        torch.testing.assert_close(discriminant_ratio(lengths * embeddings, labels, normalize=True), normalized)
        unit = embeddings / embeddings.norm(dim=1, keepdim=True)
        torch.testing.assert_close(normalized, discriminant_ratio(unit, labels))
        assert abs(discriminant_ratio(lengths * embeddings, labels) - normalized) > 0.2 * normalized

    def test_normalisation_leaves_a_zero_vector_alone(self):
        embeddings, labels = made()
        embeddings[3] = 0
        unit = embeddings / embeddings.norm(dim=1, keepdim=True).clamp(min=1e-9)
        expected = discriminant_ratio(unit, labels)
        torch.testing.assert_close(discriminant_ratio(embeddings, labels, normalize=True), expected)


def assert_close_to_exact(found, exact, dtype):
    """Relative to J (1 + 1 / sqrt(J)): centres are as exact as the scatter around them."""
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    limit = torch.finfo(found.dtype)
    exact = (
        exact if isinstance(exact, float) else float(exact) if exact < limit.max else math.inf
    )  # as the dtype rounds it
    rel = 1e-12 if found.dtype == torch.float64 else 1e-6
    tolerance = rel * (exact + math.sqrt(exact)) if exact < math.inf else 0
    assert found.item() == pytest.approx(exact, rel=0, abs=max(tolerance, 1e-28), nan_ok=True)


class TestExtremes:
    @settings(max_examples=120, deadline=None)
    @given(extreme_sets() | batches(), st.booleans(), st.sampled_from([0.0, EPS, 0.25]))
    def test_equals_rational_arithmetic(self, batch, skip_singletons, eps):
        embeddings, labels = batch
        exact = exact_ratio(embeddings, labels, eps, skip_singletons)
        options = {"eps": eps, "skip_singletons": skip_singletons}
        assert_close_to_exact(discriminant_ratio(embeddings, labels, **options), exact, embeddings.dtype)
        moments = ClassMoments.of(embeddings, labels)
        assert_close_to_exact(moments.discriminant_ratio(**options), exact, torch.float64)

    @settings(max_examples=60, deadline=None)
    @given(
        extreme_sets() | batches(),
        st.booleans(),
        st.lists(st.integers(0, 14), max_size=4),
        st.randoms(use_true_random=False),
    )
    def test_merged_batches_equal_rational_arithmetic(self, batch, skip_singletons, cuts, random):
        embeddings, labels = batch
        cuts = sorted(min(cut, len(labels)) for cut in cuts)
        parts = [
            ClassMoments.of(embeddings[a:b], labels[a:b]) for a, b in zip([0, *cuts], [*cuts, len(labels)], strict=True)
        ]
        random.shuffle(parts)
        while len(parts) > 1:
            parts.append(parts.pop(0).merge(parts.pop(0)))
        exact = exact_ratio(embeddings, labels, EPS, skip_singletons)
        assert_close_to_exact(parts[0].discriminant_ratio(skip_singletons=skip_singletons), exact, torch.float64)

    @settings(max_examples=50, deadline=None)
    @given(
        exponent=st.integers(-300, 299),
        place=st.integers(0, 59),
        normalize=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def test_neither_the_scale_nor_the_order_matters(self, exponent, place, normalize, dtype):
        embeddings, labels = made(dtype=dtype)
        expected = discriminant_ratio(embeddings, labels, normalize=normalize)
        scale = 10.0 ** (exponent if dtype == torch.float64 else exponent // 10)
        order = torch.arange(60).roll(-place)
        moved = discriminant_ratio((embeddings * scale)[order], labels[order], normalize=normalize)
        torch.testing.assert_close(moved, expected, rtol=1e-13 if dtype == torch.float64 else 1e-5, atol=0)

    def test_normalisation_reaches_the_smallest_and_the_largest_vectors(self):
        embeddings, labels = made()
        lengths = 10.0 ** torch.linspace(-290, 290, 60, dtype=torch.float64).unsqueeze(1)
        expected = discriminant_ratio(embeddings, labels, normalize=True)
        found = discriminant_ratio(lengths * embeddings, labels, normalize=True)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


class TestNothingToSay:
    @pytest.mark.parametrize("normalize", [False, True])
    def test_empty(self, normalize):
        found = discriminant_ratio(torch.empty(0, 3), torch.empty(0, dtype=torch.long), normalize=normalize)
        assert found.shape == ()
        assert found.isnan()

    @pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
    def test_collapsed(self, dtype):
        collapsed = torch.full((7, 5), 0.1, dtype=dtype)
        for labels in (torch.arange(7) % 3, torch.zeros(7, dtype=torch.long)):
            assert discriminant_ratio(collapsed, labels).isnan()
            assert discriminant_ratio(collapsed, labels, normalize=True).isnan()
            assert ClassMoments.of(collapsed, labels).discriminant_ratio().isnan()

    def test_classes_that_are_points_apart_are_infinitely_separated(self):
        embeddings, labels = torch.tensor([[0.0], [0.0], [2.0], [2.0]]), torch.tensor([0, 0, 1, 1])
        assert discriminant_ratio(embeddings, labels, eps=0.0).item() == math.inf
        assert discriminant_ratio(embeddings, labels, eps=0.5).item() == 2.0
        assert discriminant_ratio(embeddings, labels).item() == pytest.approx(1e30)  # EPS bounds it, in float32, too

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("place", [0, 7])
    def test_non_finite_embeddings(self, bad, place):
        embeddings, labels = made()
        embeddings[place, 2] = bad
        assert discriminant_ratio(embeddings, labels).isnan()
        assert ClassMoments.of(embeddings, labels).discriminant_ratio().isnan()


class TestWhileTraining:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_no_gradient_and_inputs_unchanged(self, dtype):
        embeddings, labels = made(dtype=dtype)
        embeddings.requires_grad_()
        before, labels_before, state = embeddings.detach().clone(), labels.clone(), torch.get_rng_state()
        assert not any(ratio.requires_grad for ratio in batch_ratios(embeddings, labels, normalize=True))
        assert torch.equal(embeddings, before)
        assert torch.equal(labels, labels_before)
        assert torch.is_grad_enabled()
        assert torch.equal(torch.get_rng_state(), state)
        embeddings.sum().backward()  # the graph of the step is still usable
        assert torch.equal(embeddings.grad, torch.ones_like(before))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_autocast_changes_nothing(self, dtype):
        embeddings, labels = made(dtype=dtype)
        expected = batch_ratios(embeddings, labels, normalize=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert batch_ratios(embeddings, labels, normalize=True) == expected
            assert torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("label_dtype", [torch.int64, torch.uint8, torch.bool])
    @pytest.mark.parametrize("options", [{}, {"normalize": True, "skip_singletons": True}])
    def test_waits_for_no_device(self, options, label_dtype):
        # a fake tensor has shapes but no values: whatever has to read a value (and so would wait for a GPU) raises
        with FakeTensorMode():
            embeddings, labels = torch.randn(12, 4, requires_grad=True), torch.zeros(12, dtype=label_dtype)
            assert [ratio.shape for ratio in batch_ratios(embeddings, labels, **options)] == [(), ()]


class TestRefusals:
    @pytest.mark.parametrize(
        ("embeddings", "labels", "message"),
        [
            (torch.ones(6), torch.arange(6), r"embeddings of shape \(items, dim\); got torch.float32 of shape \(6,\)"),
            (torch.ones(6, 2, 2), torch.arange(6), r"of shape \(6, 2, 2\). Flatten .* embeddings.flatten\(1\)"),
            (torch.ones(6, 2).long(), torch.arange(6), r"floating-point embeddings .* got torch.int64"),
            (torch.ones(6, 2), torch.arange(5), "needs one label for each of the 6 embeddings; got 5 labels"),
            (torch.ones(6, 2), torch.ones(6), "discriminant_ratio needs integer labels; got torch.float32"),
            (torch.ones(6, 2), torch.ones(6, 3).long(), r"needs one label for each item; labels has shape \(6, 3\)"),
        ],
    )
    def test_shapes_and_dtypes(self, embeddings, labels, message):
        with pytest.raises(ValueError, match=message):
            discriminant_ratio(embeddings, labels)


class TestClassMoments:
    def test_per_class(self):
        embeddings, labels = made()
        moments = ClassMoments.of(embeddings[:20], labels[:20] + 2**61)
        moments = moments.merge(ClassMoments.of(embeddings[20:].requires_grad_(), labels[20:] + 2**61))
        assert not moments.means.requires_grad
        embeddings = embeddings.detach()
        assert moments.labels.tolist() == [2**61 + label for label in range(5)]
        for label in range(5):
            members = embeddings[labels == label]
            assert moments.counts[label] == len(members)
            torch.testing.assert_close(moments.means[label], members.mean(0))
            scatter = (members - members.mean(0)).square().sum()
            torch.testing.assert_close(moments.scatter[label], scatter)

    def test_an_empty_batch_adds_nothing(self):
        embeddings, labels = made()
        whole, nothing = ClassMoments.of(embeddings, labels), ClassMoments.of(embeddings[:0], labels[:0])
        assert nothing.discriminant_ratio().isnan()
        for merged in (whole.merge(nothing), nothing.merge(whole)):
            for name in ("labels", "counts", "means", "scatter"):
                assert torch.equal(getattr(merged, name), getattr(whole, name)), name

    def test_merging_leaves_both_parts_alone(self):
        embeddings, labels = made()
        left, right = ClassMoments.of(embeddings[:20], labels[:20]), ClassMoments.of(embeddings[20:], labels[20:])
        means = left.means.clone(), right.means.clone()
        left.merge(right)
        assert torch.equal(left.means, means[0])
        assert torch.equal(right.means, means[1])


@settings(max_examples=25, deadline=None)
@given(
    items=st.integers(0, 40),
    count=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    offset=st.sampled_from([0.0, 10.0]),
    skip=st.booleans(),
)
def test_moments_shared_out_among_processes(items, count, seed, offset, skip):
    """The items in any parts: each class comes to one process, and J is that of one process."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-3, 4, (items,), generator=generator)
    embeddings = torch.randn(items, 3, generator=generator, dtype=torch.float64) + labels[:, None] + offset
    owner = torch.randint(0, count, (items,), generator=generator)

    def work(processes):
        mine = owner == processes.rank
        moments = ClassMoments.of(embeddings[mine], labels[mine]).shared(processes)
        value = moments.discriminant_ratio(skip_singletons=skip, processes=processes)
        return moments.labels.tolist(), float(value)

    outcomes = in_threads(count, work)
    alone = float(ClassMoments.of(embeddings, labels).discriminant_ratio(skip_singletons=skip))
    assert sorted(label for own, _ in outcomes for label in own) == labels.unique().tolist()
    assert [value for _, value in outcomes] == pytest.approx([alone] * count, rel=1e-12, nan_ok=True)
    assert len({repr(value) for _, value in outcomes}) == 1
