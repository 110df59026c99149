"""J against rational arithmetic, at any scale, in batches, and shared out among processes."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fewshot_callbacks.functional.discriminant_ratio import EPS, ClassMoments, batch_ratios, discriminant_ratio
from tests.cases import examples
from tests.functional.class_cases import batches, clustered_items, exact_scatters, extreme_sets
from tests.thread_processes import in_threads


def exact_ratio(embeddings, labels, eps=0.0, skip_singletons=False):
    """J in rational arithmetic, without a rounding; inf where the classes are points, NaN where it says nothing."""
    sizes, within, total = exact_scatters(embeddings, labels, skip_singletons)
    if sum(sizes) == len(sizes) or total == 0:
        return math.nan
    bottom = within + Fraction(eps) * total
    return (total - within) / bottom if bottom else math.inf  # a fraction: J may lie beyond what a float holds


def assert_close_to_exact(found, exact, dtype):
    """Relative to J (1 + 1 / sqrt(J)): centres are as exact as the scatter around them."""
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if isinstance(exact, Fraction):  # as the dtype rounds it
        exact = float(exact) if exact < torch.finfo(found.dtype).max else math.inf
    rel = 1e-12 if found.dtype == torch.float64 else 1e-6
    tolerance = rel * (exact + math.sqrt(exact)) if exact < math.inf else 0
    assert found.item() == pytest.approx(exact, rel=0, abs=max(tolerance, 1e-28), nan_ok=True)


class TestInvariance:
    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
    def test_any_integer_labels(self, dtype):
        embeddings, labels = clustered_items()[0], torch.arange(60) % 2
        found = discriminant_ratio(embeddings, (labels * 255 if dtype == torch.uint8 else labels).to(dtype))
        torch.testing.assert_close(found, discriminant_ratio(embeddings, labels))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the compiled loop, and PyTorch's operations
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
    def test_epsilon_is_a_share_of_the_scatter(self, scale, dtype):
        """With one that shows: a number that is added would weigh less the larger the embeddings are."""
        embeddings, labels = clustered_items(dtype=dtype)
        without = float(discriminant_ratio(embeddings, labels, eps=0.0))
        expected = without / (1 + 0.3 * (1 + without))  # Tr(S_B) / (Tr(S_W) + 0.3 Tr(S_T)), divided by Tr(S_W)
        scaled = scale * embeddings
        assert float(discriminant_ratio(scaled, labels, eps=0.3)) == pytest.approx(expected, rel=1e-5)
        moments = ClassMoments.of(scaled, labels)
        assert float(moments.discriminant_ratio(eps=0.3)) == pytest.approx(expected, rel=1e-5)

    def test_scale_changes_nothing_but_normalisation_does(self):
        embeddings, labels = clustered_items()
        embeddings[3] = 0  # which has no length 1, and stays as it is
        torch.testing.assert_close(discriminant_ratio(1e4 * embeddings, labels), discriminant_ratio(embeddings, labels))
        lengths = torch.linspace(0.1, 10.0, 60).unsqueeze(1)
        unit = embeddings / embeddings.norm(dim=1, keepdim=True).clamp(min=1e-9)
        normalized = discriminant_ratio(lengths * embeddings, labels, normalize=True)
        torch.testing.assert_close(normalized, discriminant_ratio(unit, labels))
        assert abs(discriminant_ratio(lengths * embeddings, labels) - normalized) > 0.2 * normalized
        # also of the smallest and the largest vectors
        lengths = 10.0 ** torch.linspace(-290, 290, 60, dtype=torch.float64).unsqueeze(1)
        found = discriminant_ratio(lengths * embeddings, labels, normalize=True)
        torch.testing.assert_close(found, normalized, rtol=1e-13, atol=0)


class TestExtremes:
    @settings(max_examples=examples(100), deadline=None)
    @given(extreme_sets() | batches(), st.booleans(), st.sampled_from([0.0, EPS, 0.25]))
    def test_equals_rational_arithmetic(self, batch, skip_singletons, eps):
        embeddings, labels = batch
        exact = exact_ratio(embeddings, labels, eps, skip_singletons)
        options = {"eps": eps, "skip_singletons": skip_singletons}
        assert_close_to_exact(discriminant_ratio(embeddings, labels, **options), exact, embeddings.dtype)
        moments = ClassMoments.of(embeddings, labels)
        assert_close_to_exact(moments.discriminant_ratio(**options), exact, torch.float64)

    @settings(max_examples=examples(40), deadline=None)
    @given(
        *(extreme_sets() | batches(), st.booleans()),
        *(st.lists(st.integers(0, 14), max_size=4), st.randoms(use_true_random=False)),
    )
    def test_merged_batches_equal_rational_arithmetic(self, batch, skip_singletons, cuts, random):
        embeddings, labels = batch
        cuts = sorted(min(cut, len(labels)) for cut in cuts)
        bounds = zip([0, *cuts], [*cuts, len(labels)], strict=True)
        parts = [ClassMoments.of(embeddings[a:b], labels[a:b]) for a, b in bounds]
        random.shuffle(parts)
        while len(parts) > 1:
            parts.append(parts.pop(0).merge(parts.pop(0)))
        exact = exact_ratio(embeddings, labels, EPS, skip_singletons)
        assert_close_to_exact(parts[0].discriminant_ratio(skip_singletons=skip_singletons), exact, torch.float64)


class TestNothingToSay:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("normalize", [False, True])
    def test_empty_or_collapsed(self, dtype, normalize):
        collapsed, several = torch.full((7, 5), 0.1, dtype=dtype), torch.arange(7) % 3
        for embeddings, labels in ((collapsed, several), (collapsed, 0 * several), (collapsed[:0], several[:0])):
            assert discriminant_ratio(embeddings, labels, normalize=normalize).isnan()
            assert ClassMoments.of(embeddings, labels).discriminant_ratio().isnan()

    @pytest.mark.parametrize(("bad", "place"), [(math.nan, 7), (math.inf, 0)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_non_finite_embeddings(self, bad, place, dtype):
        embeddings, labels = clustered_items(dtype=dtype)
        embeddings[place, 2] = bad
        assert discriminant_ratio(embeddings, labels).isnan()
        assert ClassMoments.of(embeddings, labels).discriminant_ratio().isnan()


class TestWhileTraining:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_no_gradient_and_inputs_unchanged_and_autocast_changes_nothing(self, dtype):
        embeddings, labels = clustered_items(dtype=dtype)
        embeddings.requires_grad_()
        before, labels_before, state = embeddings.detach().clone(), labels.clone(), torch.get_rng_state()
        ratios = batch_ratios(embeddings, labels, normalize=True)
        assert not any(ratio.requires_grad for ratio in ratios)
        assert torch.is_grad_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert batch_ratios(embeddings, labels, normalize=True) == ratios
            assert torch.is_autocast_enabled("cpu")
        assert torch.equal(embeddings, before)
        assert torch.equal(labels, labels_before)
        assert torch.equal(torch.get_rng_state(), state)
        embeddings.sum().backward()  # the graph of the step is still usable
        assert torch.equal(embeddings.grad, torch.ones_like(before))

    @pytest.mark.parametrize("label_dtype", [torch.int64, torch.bool])
    @pytest.mark.parametrize("options", [{}, {"normalize": True, "skip_singletons": True}])
    def test_waits_for_no_device(self, options, label_dtype):
        # a fake tensor has shapes but no values: whatever has to read a value (and so would wait for a GPU) raises
        with FakeTensorMode():
            embeddings, labels = torch.randn(12, 4, requires_grad=True), torch.zeros(12, dtype=label_dtype)
            assert [ratio.shape for ratio in batch_ratios(embeddings, labels, **options)] == [(), ()]


class TestClassMoments:
    def test_per_class(self):
        embeddings, labels = clustered_items()
        left, right = ClassMoments.of(embeddings[:20], labels[:20] + 2**61), (embeddings[20:], labels[20:] + 2**61)
        before = left.means.clone()
        moments = left.merge(ClassMoments.of(right[0].requires_grad_(), right[1]))
        assert torch.equal(left.means, before)
        assert not moments.means.requires_grad
        assert moments.labels.tolist() == [2**61 + label for label in range(5)]
        for label in range(5):
            members = embeddings[labels == label].detach()
            assert moments.counts[label] == len(members)
            torch.testing.assert_close(moments.means[label], members.mean(0))
            torch.testing.assert_close(moments.scatter[label], (members - members.mean(0)).square().sum())

    def test_an_empty_batch_adds_nothing(self):
        embeddings, labels = clustered_items()
        whole, nothing = ClassMoments.of(embeddings, labels), ClassMoments.of(embeddings[:0], labels[:0])
        for merged in (whole.merge(nothing), nothing.merge(whole)):
            assert merged.labels.tolist() == whole.labels.tolist()
            for name in ("counts", "means", "scatter"):
                assert torch.equal(getattr(merged, name), getattr(whole, name)), name


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(0, 2**16), st.sampled_from([0.0, 10.0]), st.booleans())
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
