"""J against loops and rational arithmetic, at any scale, in batches, and shared out among processes."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import calinski_harabasz_score
from torch._subclasses.fake_tensor import FakeTensorMode

from fewshot_callbacks.functional.discriminant_ratio import EPS, ClassMoments, discriminant_ratio
from tests.functional.class_cases import LABEL_VALUES, batches, extreme_sets, made
from tests.thread_processes import in_threads

HALF = (torch.float16, torch.bfloat16)


def traces(embeddings, labels):
    """Tr(S_W), Tr(S_B) and Tr(S_T) by their definitions: float64, one item after the other."""
    items = [np.asarray(item, dtype=np.float64) for item in embeddings.detach().double()]
    labels = [int(label) for label in labels]
    centre = sum(items) / len(items)
    within = between = 0.0
    for label in set(labels):
        members = [item for item, own in zip(items, labels, strict=True) if own == label]
        mean = sum(members) / len(members)
        within += sum(float(((member - mean) ** 2).sum()) for member in members)
        between += len(members) * float(((mean - centre) ** 2).sum())
    return within, between, sum(float(((item - centre) ** 2).sum()) for item in items)


def by_definition(embeddings, labels, eps=EPS, skip_singletons=False):
    counts = {int(label): (labels == label).sum() for label in labels}
    if skip_singletons:
        keep = torch.tensor([bool(counts[int(label)] > 1) for label in labels], dtype=torch.bool)
        embeddings, labels = embeddings[keep], labels[keep]
    if len(labels) == 0 or max(counts.values()) == 1 or bool((embeddings == embeddings[0]).all()):
        return math.nan
    within, between, total = traces(embeddings, labels)
    return between / (within + eps * total)


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
    @settings(max_examples=100, deadline=None)
    @given(batches(), st.booleans())
    def test_equals_loops(self, batch, skip_singletons):
        embeddings, labels = batch
        # eps as large as the grid makes 0 / 0, and 1 / 0, comparable
        found = discriminant_ratio(embeddings, labels, eps=0.25, skip_singletons=skip_singletons)
        expected = by_definition(embeddings, labels, 0.25, skip_singletons)
        rel = 1e-12 if embeddings.dtype == torch.float64 else 1e-5
        assert found.item() == pytest.approx(expected, rel=rel, abs=rel, nan_ok=True)
        assert found.dtype == (torch.float64 if embeddings.dtype == torch.float64 else torch.float32)

    @pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
    def test_any_floating_dtype_is_computed_in_float32_at_least(self, dtype):
        embeddings, labels = made(300, 12, 32, dtype)
        expected = by_definition(embeddings, labels)
        assert discriminant_ratio(embeddings, labels).item() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
    def test_any_integer_labels(self, dtype):
        embeddings, _ = made()
        labels = (torch.arange(60) % 2).to(dtype)
        expected = by_definition(embeddings, labels)
        assert discriminant_ratio(embeddings, labels).item() == pytest.approx(expected, rel=1e-12)

    def test_uint8_labels_above_127(self):
        embeddings, labels = made()
        expected = discriminant_ratio(embeddings, labels)
        torch.testing.assert_close(discriminant_ratio(embeddings, (255 - labels).to(torch.uint8)), expected)

    def test_equals_the_index_of_calinski_and_harabasz(self):
        embeddings, labels = made()
        index = calinski_harabasz_score(embeddings.numpy(), labels.numpy())
        expected = index * (5 - 1) / (60 - 5)
        assert discriminant_ratio(embeddings, labels, eps=0.0).item() == pytest.approx(expected, rel=1e-12)
        assert ClassMoments.of(embeddings, labels).discriminant_ratio(eps=0.0).item() == pytest.approx(
            expected, rel=1e-12
        )

    def test_the_two_scatters_add_up_to_the_total(self):
        embeddings, labels = made()
        reference = traces(embeddings, labels)
        assert reference[0] + reference[1] == pytest.approx(reference[2], rel=1e-12)
        # J at eps = 1 is Tr(S_B) / (Tr(S_W) + Tr(S_T)), from which Tr(S_T) follows beside J
        j, mixed = (discriminant_ratio(embeddings, labels, eps=eps).item() for eps in (0.0, 1.0))
        within = ClassMoments.of(embeddings, labels).scatter.sum().item()
        assert (within, j * within) == pytest.approx(reference[:2], rel=1e-12)
        assert j * within / mixed - within == pytest.approx(reference[2], rel=1e-12)

    def test_chance_and_separation(self):
        embeddings, labels = made(2000, 10, 16)
        j = discriminant_ratio(embeddings, labels)
        shuffled = discriminant_ratio(embeddings, labels[torch.randperm(2000)])
        assert j > 50 * shuffled


class TestInvariance:
    def test_order_and_names_of_classes(self):
        embeddings, labels = made()
        expected = discriminant_ratio(embeddings, labels)
        order = torch.randperm(60)
        torch.testing.assert_close(discriminant_ratio(embeddings[order], labels[order]), expected)
        torch.testing.assert_close(discriminant_ratio(embeddings, torch.tensor([5, -3, 2**61, 9, 0])[labels]), expected)

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

    @pytest.mark.parametrize("offset", [1e4, 1e5, 1e6])
    def test_a_common_offset_does_not_cancel(self, offset):
        embeddings, labels = made(200, 8, 16, torch.float32)
        moved = embeddings + offset  # rounds the embeddings; what J makes of these is the question
        expected = by_definition(moved, labels)
        assert discriminant_ratio(moved, labels).item() == pytest.approx(expected, rel=1e-4)
        assert ClassMoments.of(moved, labels).discriminant_ratio().item() == pytest.approx(expected, rel=1e-9)
        assert textbook_float32(moved, labels) != pytest.approx(expected, rel=0.1)  # the test can fail


def textbook_float32(embeddings, labels):
    """E[x^2] - E[x]^2 in float32: what the specification forbids."""
    classes = [embeddings[labels == label] for label in labels.unique()]
    within = sum((members.square().mean(0) - members.mean(0).square()).sum() * len(members) for members in classes)
    total = (embeddings.square().mean(0) - embeddings.mean(0).square()).sum() * len(embeddings)
    return float((total - within) / within)


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
    @given(extreme_sets(), st.booleans(), st.sampled_from([0.0, EPS, 0.25]))
    def test_equals_rational_arithmetic(self, batch, skip_singletons, eps):
        embeddings, labels = batch
        exact = exact_ratio(embeddings, labels, eps, skip_singletons)
        options = {"eps": eps, "skip_singletons": skip_singletons}
        assert_close_to_exact(discriminant_ratio(embeddings, labels, **options), exact, embeddings.dtype)
        moments = ClassMoments.of(embeddings, labels)
        assert_close_to_exact(moments.discriminant_ratio(**options), exact, torch.float64)

    @settings(max_examples=60, deadline=None)
    @given(extreme_sets(), st.booleans(), st.lists(st.integers(0, 14), max_size=4), st.randoms(use_true_random=False))
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

    def test_an_outlier_that_is_left_out_changes_nothing(self):
        embeddings, labels = made(dtype=torch.float32)
        expected = discriminant_ratio(embeddings[1:], labels[1:])
        embeddings[0], labels[0] = torch.finfo(torch.float32).max, 99
        for order in (torch.arange(60), torch.arange(60).flip(0)):
            found = discriminant_ratio(embeddings[order], labels[order], skip_singletons=True)
            assert torch.equal(found, expected)
            found = ClassMoments.of(embeddings[order], labels[order]).discriminant_ratio(skip_singletons=True)
            assert torch.equal(found.float(), expected)

    def test_normalisation_reaches_the_smallest_and_the_largest_vectors(self):
        embeddings, labels = made()
        lengths = 10.0 ** torch.linspace(-290, 290, 60, dtype=torch.float64).unsqueeze(1)
        expected = discriminant_ratio(embeddings, labels, normalize=True)
        found = discriminant_ratio(lengths * embeddings, labels, normalize=True)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


class TestNothingToSay:
    def test_all_singletons(self):
        embeddings = torch.randn(6, 3)
        assert discriminant_ratio(embeddings, torch.arange(6)).isnan()
        assert discriminant_ratio(embeddings, torch.arange(6), skip_singletons=True).isnan()
        assert discriminant_ratio(embeddings[:1], torch.arange(1)).isnan()

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

    def test_one_class_is_not_separated_at_all(self):
        assert discriminant_ratio(torch.randn(5, 3), torch.zeros(5, dtype=torch.long)).item() == pytest.approx(
            0, abs=1e-6
        )

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("place", [0, 7])
    def test_non_finite_embeddings(self, bad, place):
        embeddings, labels = made()
        embeddings[place, 2] = bad
        assert discriminant_ratio(embeddings, labels).isnan()
        assert ClassMoments.of(embeddings, labels).discriminant_ratio().isnan()


def test_skipping_singletons_leaves_out_their_items():
    embeddings, labels = made(20, 4)
    with_singletons = torch.cat([100 + torch.randn(3, 8).double(), embeddings, 5 * torch.randn(2, 8).double()])
    their_labels = torch.cat([torch.tensor([90, 91, 92]), labels, torch.tensor([-1, -2])])
    expected = discriminant_ratio(embeddings, labels)
    skipped = discriminant_ratio(with_singletons, their_labels, skip_singletons=True)
    torch.testing.assert_close(skipped, expected)
    assert discriminant_ratio(with_singletons, their_labels) > 10 * expected
    moments = ClassMoments.of(with_singletons, their_labels)
    torch.testing.assert_close(moments.discriminant_ratio(skip_singletons=True), expected)


class TestWhileTraining:
    def test_no_gradient_and_inputs_unchanged(self):
        embeddings, labels = made()
        embeddings.requires_grad_()
        before, labels_before = embeddings.detach().clone(), labels.clone()
        found = discriminant_ratio(embeddings, labels, normalize=True)
        assert not found.requires_grad
        assert torch.equal(embeddings, before)
        assert torch.equal(labels, labels_before)
        assert torch.is_grad_enabled()
        embeddings.sum().backward()  # the graph of the step is still usable
        assert torch.equal(embeddings.grad, torch.ones_like(before))

    def test_random_state_is_left_alone(self):
        state = torch.get_rng_state()
        discriminant_ratio(*made())
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_autocast_changes_nothing(self, dtype):
        embeddings, labels = made(dtype=dtype)
        expected = discriminant_ratio(embeddings, labels, normalize=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(discriminant_ratio(embeddings, labels, normalize=True), expected)
            assert torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("label_dtype", [torch.int64, torch.uint8, torch.bool])
    @pytest.mark.parametrize("options", [{}, {"normalize": True, "skip_singletons": True}])
    def test_waits_for_no_device(self, options, label_dtype):
        # a fake tensor has shapes but no values: whatever has to read a value (and so would wait for a GPU) raises
        with FakeTensorMode():
            embeddings, labels = torch.randn(12, 4, requires_grad=True), torch.zeros(12, dtype=label_dtype)
            assert discriminant_ratio(embeddings, labels, **options).shape == ()

    @pytest.mark.parametrize(
        "waits", [lambda labels: labels.unique(), lambda labels: labels.max().item(), lambda labels: labels.nonzero()]
    )
    def test_the_fake_mode_notices_a_wait(self, waits):
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"aten\.(_unique2|_local_scalar_dense|nonzero)"):
            waits(torch.zeros(12, dtype=torch.int64))


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


@st.composite
def cut_sets(draw):
    """Items with labels, in any order, and where to cut them into batches (some of them empty)."""
    items, dim = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    labels = torch.tensor(draw(st.lists(LABEL_VALUES, min_size=items, max_size=items)), dtype=torch.int64)
    embeddings = torch.randn(items, dim, generator=generator) + draw(st.sampled_from([0.0, 1e3, 1e6]))
    cuts = sorted(draw(st.lists(st.integers(0, items), max_size=5)))
    return embeddings, labels, list(zip([0, *cuts], [*cuts, items], strict=True))


def assert_same_moments(found, expected):
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.counts, expected.counts)
    torch.testing.assert_close(found.means, expected.means, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.scatter, expected.scatter, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        found.discriminant_ratio(), expected.discriminant_ratio(), rtol=1e-9, atol=1e-9, equal_nan=True
    )


class TestClassMoments:
    @settings(max_examples=50, deadline=None)
    @given(cut_sets(), st.randoms(use_true_random=False))
    def test_any_cut_in_any_order_equals_one_shot(self, case, random):
        embeddings, labels, cuts = case
        parts = [ClassMoments.of(embeddings[a:b], labels[a:b]) for a, b in cuts]
        random.shuffle(parts)
        while len(parts) > 1:  # any tree of merges
            left, right = parts.pop(random.randrange(len(parts))), parts.pop(random.randrange(len(parts)))
            parts.append(left.merge(right))
        assert_same_moments(parts[0], ClassMoments.of(embeddings, labels))

    @settings(max_examples=30, deadline=None)
    @given(batches(), st.booleans())
    def test_equals_loops(self, batch, skip_singletons):
        embeddings, labels = batch
        found = ClassMoments.of(embeddings, labels).discriminant_ratio(eps=0.25, skip_singletons=skip_singletons)
        expected = by_definition(embeddings, labels, 0.25, skip_singletons)
        assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)

    def test_per_class(self):
        embeddings, labels = made()
        moments = ClassMoments.of(embeddings, labels + 2**61)
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

    def test_holds_no_graph(self):
        embeddings, labels = made()
        moments = ClassMoments.of(embeddings.requires_grad_(), labels)
        assert not moments.means.requires_grad
        assert not moments.scatter.requires_grad

    def test_agrees_with_the_value_of_a_batch(self):
        embeddings, labels = made(dtype=torch.float32)
        batch, whole = discriminant_ratio(embeddings, labels), ClassMoments.of(embeddings, labels).discriminant_ratio()
        torch.testing.assert_close(batch.double(), whole, rtol=1e-5, atol=0)


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
