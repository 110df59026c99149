"""Maps of embeddings and their alignment."""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import procrustes
from sklearn.decomposition import PCA

from fewshot_callbacks.plots.embedding_map import Projection, project

LABELS = np.arange(40) % 4


def vectors(seed: int = 0, items: int = 40, dim: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(items, dim)) * np.linspace(3, 0.5, dim)


def turned(points: np.ndarray, angle: float, *, mirrored: bool, size: float = 1.0) -> np.ndarray:
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return size * points @ turn @ np.diag([-1.0 if mirrored else 1.0, 1.0]) + (5, -3)


@pytest.mark.parametrize(("items", "dim"), [(40, 8), (6, 50), (3, 3)])
def test_principal_components_are_those_of_scikit_learn(items, dim):
    given_vectors = vectors(items=items, dim=dim)
    found, reference = project(given_vectors, range(items)), PCA(2, svd_solver="full")
    expected = reference.fit_transform(given_vectors)
    np.testing.assert_allclose(np.abs(found.points), np.abs(expected), atol=1e-9)
    np.testing.assert_allclose(found.shares, reference.explained_variance_ratio_)
    assert (np.take_along_axis(found.points, np.abs(found.points).argmax(0)[None], 0) > 0).all()


def test_the_kind_of_array_and_the_order_of_items_change_nothing():
    given_vectors = vectors().astype(np.float32)
    points = project(given_vectors, LABELS).points
    tensor = torch.from_numpy(given_vectors).requires_grad_()
    np.testing.assert_array_equal(project(tensor, torch.from_numpy(LABELS)).points, points)
    np.testing.assert_allclose(project(given_vectors[::-1].copy(), LABELS).points[::-1], points, atol=1e-6)


@settings(deadline=None)
@given(st.floats(0, 6.28), st.booleans(), st.floats(0.01, 100))
def test_alignment_recovers_a_turn_a_mirror_a_shift_and_a_size(angle, mirrored, size):
    first = project(vectors(), LABELS)
    before = Projection(turned(first.points, angle, mirrored=mirrored, size=size), first.labels, first.ids)
    again = project(vectors(), LABELS, before)
    assert again.aligned
    np.testing.assert_allclose(again.points, before.points, rtol=1e-6, atol=1e-6 * size)


def test_alignment_takes_the_items_in_both_maps():
    before = project(vectors()[:30], LABELS[:30], ids=range(30))
    before = Projection(turned(before.points, 1.0, mirrored=True), before.labels, before.ids)
    order = np.random.default_rng(0).permutation(30)
    again = project(vectors()[:30][order], LABELS[:30][order], before, ids=np.arange(30)[order])
    np.testing.assert_allclose(again.points, before.points[order], atol=1e-9)
    some = project(vectors()[10:], LABELS[10:], before, ids=range(10, 40))
    target = before.points[10:30]
    _, _, least = procrustes(target, project(vectors()[10:], LABELS[10:]).points[:20])
    left = ((some.points[:20] - target) ** 2).sum() / ((target - target.mean(0)) ** 2).sum()
    assert some.aligned
    assert left == pytest.approx(least)


def test_other_items_are_aligned_by_the_means_of_classes():
    centres = np.random.default_rng(1).normal(size=(4, 8)) * 10
    first, second = centres[LABELS] + vectors(2) / 10, centres[LABELS[::-1]] + vectors(3) / 10
    before = project(first, LABELS)
    before = Projection(turned(before.points, 2.0, mirrored=True), before.labels, before.ids)
    again = project(second, LABELS[::-1], before)
    assert again.aligned
    for label in range(4):
        gap = again.points[again.labels == label].mean(0) - before.points[before.labels == label].mean(0)
        assert np.linalg.norm(gap) < 1


def test_maps_that_share_too_little_stay_as_they_are():
    before = project(vectors(), LABELS, ids=range(40))
    again = project(vectors(1), LABELS + 100, before, ids=range(100, 140))
    np.testing.assert_array_equal(again.points, project(vectors(1), LABELS).points)
    assert not again.aligned
    assert "not aligned" in again.notes[-1]


def test_a_map_after_a_collapse_is_not_aligned():
    collapsed = project(np.ones((40, 8)), LABELS)
    assert collapsed.notes == ("All embeddings are the same vector.",)
    np.testing.assert_array_equal(collapsed.points, 0)
    for again in (project(vectors(), LABELS, collapsed), project(np.ones((40, 8)), LABELS, project(vectors(), LABELS))):
        assert not again.aligned
        assert "single point" in again.notes[-1]


@pytest.mark.parametrize("method", ["pca", "tsne"])
@pytest.mark.parametrize("items", [1, 2, 3, 4, 5, 6])
def test_few_items(method, items):
    found = project(vectors(items=items), LABELS[:items], method=method)
    assert found.points.shape == (items, 2)
    assert np.isfinite(found.points).all()
    assert found.method == ("pca" if items < 5 else method)


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e300])
def test_vectors_of_any_length(scale):
    found, expected = project(vectors() * scale, LABELS), project(vectors(), LABELS)
    np.testing.assert_allclose(found.points / scale, expected.points, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(5, 0), (5, 1)])
def test_vectors_of_few_numbers(shape):
    found = project(np.arange(np.prod(shape), dtype=float).reshape(shape), range(5))
    assert found.points.shape == (5, 2)
    np.testing.assert_array_equal(found.points[:, 1], 0)


def test_what_is_not_finite_is_left_out():
    broken = vectors()
    broken[3, 2], broken[7] = np.nan, np.inf
    found, expected = project(broken, LABELS), project(np.delete(vectors(), [3, 7], axis=0), np.delete(LABELS, [3, 7]))
    assert np.isnan(found.points[[3, 7]]).all()
    np.testing.assert_array_equal(np.delete(found.points, [3, 7], axis=0), expected.points)
    assert found.notes == ("2 of 40 embeddings are not finite: not shown.",)
    before = project(vectors(), LABELS)
    assert project(broken, LABELS, before).aligned
    assert np.isnan(project(vectors() * np.nan, LABELS, before).points).all()


def test_tsne_does_not_change_by_chance():
    one, other = (project(vectors(), LABELS, method="tsne") for _ in range(2))
    np.testing.assert_array_equal(one.points, other.points)
    assert one.axes[0] == "first axis of t-SNE, without unit"
    assert "aligned with" in project(vectors(), LABELS, one, method="tsne").axes[0]


def test_umap_is_handed_the_seed_and_a_start(monkeypatch):
    seen = {}

    class UMAP:
        def __init__(self, **options):
            seen.update(options)

        def fit_transform(self, given_vectors):
            return given_vectors[:, :2].astype(np.float32)

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=UMAP))
    found = project(vectors(), LABELS, method="umap", seed=3)
    assert seen["random_state"] == 3
    assert seen["n_neighbors"] == 15
    assert seen["init"].shape == (40, 2)
    assert found.method == "umap"
    assert found.points.dtype == np.float64


@pytest.mark.parametrize(
    ("method", "module", "package"), [("umap", "umap", "umap-learn"), ("tsne", "sklearn.manifold", "scikit-learn")]
)
def test_a_missing_package_is_named(monkeypatch, method, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        project(vectors(), LABELS, method=method)


def test_axes_are_named_with_their_variance():
    first = project(vectors(), LABELS)
    share = round(100 * first.shares[0])
    assert first.axes[0] == f"first principal component, {share} % of the variance"
    both = project(vectors(), LABELS, first).axes[0]
    assert both == f"plane of the first two principal components, {100 * sum(first.shares):.0f} % of the variance"
    assert project(np.ones((3, 3)), list("abc")).axes == ("first principal component", "second principal component")


@pytest.mark.parametrize(
    ("given_vectors", "settings", "words"),
    [
        (np.zeros((0, 3)), {"labels": []}, "no embedding"),
        (vectors(), {"labels": [1, 2, 3]}, "40 embeddings and 3 labels"),
        (vectors(), {"labels": LABELS, "ids": [1, 2]}, "40 embeddings and 2 ids"),
        (vectors(), {"labels": LABELS, "method": "lda"}, "no method 'lda'"),
    ],
)
def test_what_makes_no_sense_is_refused(as_users_run_it, given_vectors, settings, words):
    with pytest.raises(ValueError, match=words):
        project(given_vectors, **settings)
