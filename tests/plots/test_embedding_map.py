"""The embedding as a map: its projection, its alignment with an earlier one, and the figure."""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from scipy.spatial import procrustes
from sklearn.decomposition import PCA

from fewshot_callbacks.plots.embedding_map import Projection, embedding_map, project
from fewshot_callbacks.plots.style import LIGHT_GREY
from tests.cases import examples
from tests.messages import missing_facts, refused
from tests.plots.legibility import assert_legible, drawn_texts

LABELS = np.arange(40) % 4
LONG = "a name that is far too long for its room, whatever room that may be " * 4
NAMES = ["cat", LONG, "日本語", "Ελληνικά", "$x$", "tab\tand\nline", "עברית", "dog", "", "wolf", "hare", "owl", "newt"]


def random_vectors(seed: int = 0, items: int = 40, dim: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(items, dim)) * np.linspace(3, 0.5, dim)


def turned(projection: Projection, angle: float, *, mirrored: bool = True, size: float = 1.0) -> Projection:
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    points = size * projection.points @ rotation @ np.diag([-1.0 if mirrored else 1.0, 1.0]) + (5, -3)
    return Projection(points, projection.labels, projection.ids)


@pytest.mark.parametrize(("items", "dim"), [(40, 8), (6, 50), (3, 3)])
def test_principal_components_are_those_of_scikit_learn_and_named_with_their_variance(items, dim):
    vectors = random_vectors(items=items, dim=dim)
    found, reference = project(vectors, range(items)), PCA(2, svd_solver="full")
    expected = reference.fit_transform(vectors)
    np.testing.assert_allclose(np.abs(found.points), np.abs(expected), atol=1e-9)
    np.testing.assert_allclose(found.shares, reference.explained_variance_ratio_)
    assert (np.take_along_axis(found.points, np.abs(found.points).argmax(0)[None], 0) > 0).all()
    assert found.axes[0] == f"first principal component, {round(100 * found.shares[0])} % of the variance"
    aligned_axis = project(vectors, range(items), found).axes[0]
    share = f"{100 * sum(found.shares):.0f} % of the variance"
    assert aligned_axis == f"principal components 1 and 2, rotated to match the previous map, {share}"


def test_the_kind_of_array_and_the_order_of_items_change_nothing():
    vectors = random_vectors().astype(np.float32)
    points = project(vectors, LABELS).points
    tensor = torch.from_numpy(vectors).requires_grad_()
    np.testing.assert_array_equal(project(tensor, torch.from_numpy(LABELS)).points, points)
    np.testing.assert_allclose(project(vectors[::-1].copy(), LABELS).points[::-1], points, atol=1e-6)


@settings(deadline=None, max_examples=examples(20))
@given(st.floats(0, 6.28), st.booleans(), st.floats(0.01, 100))
def test_alignment_recovers_a_turn_a_mirror_a_shift_and_a_size(angle, mirrored, size):
    before = turned(project(random_vectors(), LABELS), angle, mirrored=mirrored, size=size)
    again = project(random_vectors(), LABELS, before)
    assert again.aligned
    np.testing.assert_allclose(again.points, before.points, rtol=1e-6, atol=1e-6 * size)


def test_alignment_takes_the_items_in_both_maps():
    before = turned(project(random_vectors()[:30], LABELS[:30], ids=range(30)), 1.0)
    order = np.random.default_rng(0).permutation(30)
    again = project(random_vectors()[:30][order], LABELS[:30][order], before, ids=np.arange(30)[order])
    np.testing.assert_allclose(again.points, before.points[order], atol=1e-9)
    partly_shared = project(random_vectors()[10:], LABELS[10:], before, ids=range(10, 40))
    target = before.points[10:30]
    _, _, smallest_residual = procrustes(target, project(random_vectors()[10:], LABELS[10:]).points[:20])
    residual = ((partly_shared.points[:20] - target) ** 2).sum() / ((target - target.mean(0)) ** 2).sum()
    assert partly_shared.aligned
    assert residual == pytest.approx(smallest_residual)


def test_other_items_are_aligned_by_the_means_of_classes():
    centres = np.random.default_rng(1).normal(size=(4, 8)) * 10
    before = turned(project(centres[LABELS] + random_vectors(2) / 10, LABELS), 2.0)
    again = project(centres[LABELS[::-1]] + random_vectors(3) / 10, LABELS[::-1], before)
    assert again.aligned
    for label in range(4):
        gap = again.points[again.labels == label].mean(0) - before.points[before.labels == label].mean(0)
        assert np.linalg.norm(gap) < 1


def test_maps_that_share_too_little_stay_as_they_are_and_say_so():
    before = project(random_vectors(), LABELS, ids=range(40))
    again = project(random_vectors(1), LABELS + 100, before, ids=range(100, 140))
    np.testing.assert_array_equal(again.points, project(random_vectors(1), LABELS).points)
    assert not again.aligned
    figure = embedding_map(again)
    assert_legible(figure)
    assert "Not aligned" in " ".join(text for text, _ in drawn_texts(figure))


def test_a_map_after_a_collapse_is_not_aligned():
    collapsed = project(np.ones((40, 8)), LABELS)
    assert collapsed.notes == ("All embeddings are the same vector.",)
    assert collapsed.axes == ("first principal component", "second principal component")
    np.testing.assert_array_equal(collapsed.points, 0)
    for again in (
        project(random_vectors(), LABELS, collapsed),
        project(np.ones((40, 8)), LABELS, project(random_vectors(), LABELS)),
    ):
        assert not again.aligned
        assert "single point" in again.notes[-1]


@pytest.mark.parametrize(("items", "method"), [(1, "pca"), (2, "pca"), (4, "tsne"), (5, "tsne")])
def test_fewer_than_five_items_are_mapped_by_pca(items, method):
    found = project(random_vectors(items=items), LABELS[:items], method=method)
    assert found.points.shape == (items, 2)
    assert np.isfinite(found.points).all()
    assert found.method == ("pca" if items < 5 else method)
    assert_legible(embedding_map(found))


@pytest.mark.parametrize("scale", [1e-150, 1e300])
def test_huge_and_tiny_vectors_have_the_same_map(scale):
    found, expected = project(random_vectors() * scale, LABELS), project(random_vectors(), LABELS)
    np.testing.assert_allclose(found.points / scale, expected.points, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dim", [0, 1])
def test_vectors_of_less_than_two_numbers_lie_on_a_line(dim):
    found = project(np.arange(5.0 * dim).reshape(5, dim), range(5))
    assert found.points.shape == (5, 2)
    np.testing.assert_array_equal(found.points[:, 1], 0)


def test_embeddings_that_are_not_finite_are_left_out_of_the_map():
    broken = random_vectors()
    broken[3, 2] = np.nan
    broken[7] = np.inf
    found, expected = (
        project(broken, LABELS),
        project(np.delete(random_vectors(), [3, 7], axis=0), np.delete(LABELS, [3, 7])),
    )
    assert np.isnan(found.points[[3, 7]]).all()
    np.testing.assert_array_equal(np.delete(found.points, [3, 7], axis=0), expected.points)
    assert found.notes == ("Not shown: 2 of 40 embeddings are not finite.",)
    before = project(random_vectors(), LABELS)
    assert project(broken, LABELS, before).aligned
    assert np.isnan(project(random_vectors() * np.nan, LABELS, before).points).all()


def test_tsne_gives_the_same_map_twice_and_its_axes_have_no_numbers():
    first, second = (project(random_vectors(), LABELS, method="tsne") for _ in range(2))
    np.testing.assert_array_equal(first.points, second.points)
    assert "aligned with" in project(random_vectors(), LABELS, first, method="tsne").axes[0]
    axes = {"t-SNE axis 1", "t-SNE axis 2"}
    assert {text for text, _ in drawn_texts(embedding_map(first))} == axes | set("0123")


def test_umap_is_handed_the_seed_and_a_start(monkeypatch):
    settings_of_umap = {}

    def umap(**options):
        settings_of_umap.update(options)
        return types.SimpleNamespace(fit_transform=lambda rows: rows[:, :2].astype(np.float32))

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=umap))
    found = project(random_vectors(), LABELS, method="umap", seed=3)
    assert settings_of_umap["random_state"] == 3
    assert settings_of_umap["n_neighbors"] == 15
    assert settings_of_umap["init"].shape == (40, 2)
    assert (found.method, found.points.dtype) == ("umap", np.float64)


@pytest.mark.parametrize(
    ("method", "module", "package"), [("umap", "umap", "umap-learn"), ("tsne", "sklearn.manifold", "scikit-learn")]
)
def test_the_error_names_the_package_that_a_method_needs(monkeypatch, method, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with refused(ImportError, method, f"pip install {package}"):
        project(random_vectors(), LABELS, method=method)


@pytest.mark.parametrize(
    ("items", "wrong", "facts"),
    [
        (0, {"labels": []}, ("embedding", "one")),
        (40, {"labels": [1, 2, 3]}, ("40 embeddings", "3 labels")),
        (40, {"labels": LABELS, "ids": [1, 2]}, ("40 embeddings", "2 ids")),
        (40, {"labels": LABELS, "method": "lda"}, ("method", "'lda'", "'pca'", "'tsne'", "'umap'")),
    ],
)
def test_embeddings_labels_ids_and_methods_that_do_not_fit_are_refused(as_users_run_it, items, wrong, facts):
    with refused(ValueError, *facts):
        project(random_vectors(items=items), **wrong)


def class_blobs(classes: int, spread: float = 0.3, items: int = 120) -> Projection:
    labels = np.arange(items) % classes
    angles, noise = 2 * np.pi * labels / classes, np.random.default_rng(0).normal(size=(items, 2))
    return project(10 * np.stack([np.cos(angles), np.sin(angles)], 1) + spread * noise, labels)


@pytest.mark.parametrize(("classes", "spread"), [(1, 0.0), (12, 0.0), (13, 20.0), (100, 0.3)])
def test_all_text_of_the_map_can_be_read(classes, spread):
    assert_legible(embedding_map(class_blobs(classes, spread), dict(enumerate(NAMES)), LONG))


def test_every_item_is_drawn_and_every_named_class_looks_different():
    figure = embedding_map(class_blobs(100, items=1000))
    *named, unnamed = figure.axes[0].collections
    assert sum(len(items.get_offsets()) for items in (unnamed, *named)) == 1000
    assert to_hex(unnamed.get_facecolor()[0]) == LIGHT_GREY.lower()
    looks = {(to_hex(items.get_facecolor()[0]), items.get_paths()[0].vertices.tobytes()) for items in named}
    assert len(named) == len(looks) == 12
    assert "88 other classes" in [text for text, _ in drawn_texts(figure)]


def test_the_largest_classes_are_named_or_those_that_are_asked_for():
    map_ = project(random_vectors(items=33), np.repeat(["a", "b", "c"], [3, 20, 10]))
    named = {text for text, _ in drawn_texts(embedding_map(map_, most=2))}
    assert named & {"a", "b", "c", "1 other class"} == {"b", "c", "1 other class"}
    named = {text for text, _ in drawn_texts(embedding_map(map_, {"a": "ant"}, highlighted=["nowhere", "a", "a"]))}
    assert named & {"a", "b", "ant", "2 other classes"} == {"ant", "2 other classes"}


@pytest.mark.parametrize(("value", "facts"), [(7.0, ("vector",)), (np.nan, ("9 of 9", "finite"))])
def test_the_map_says_that_embeddings_are_equal_or_not_finite(value, facts):
    figure = embedding_map(project(np.full((9, 4), value), np.arange(9) % 2), title="epoch 1")
    assert_legible(figure)
    assert missing_facts(" ".join(text for text, _ in drawn_texts(figure)), facts) == []


def test_a_map_of_nothing_or_of_too_many_classes_is_refused():
    with refused(ValueError, "item"):
        embedding_map(Projection(np.zeros((0, 2)), np.zeros(0), np.zeros(0)))
    for most in (0, 13):
        with refused(ValueError, "most", most, 1, 12):
            embedding_map(class_blobs(2), most=most)


def test_classes_that_are_numbers_in_words_stand_in_their_order_and_no_two_share_a_colour():
    labels = np.array([str(number) for number in range(12)]).repeat(4)
    legend = embedding_map(project(random_vectors(items=48), labels)).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [str(number) for number in range(12)]
    colours = {to_hex(handle.get_facecolor()[0]) for handle in legend.legend_handles}
    assert len(colours) == 12
    parts = np.array(["part 10", "part 9", "whole"]).repeat(16)
    words = [text.get_text() for text in embedding_map(project(random_vectors(items=48), parts)).legends[0].get_texts()]
    assert words == ["part 9", "part 10", "whole"]
