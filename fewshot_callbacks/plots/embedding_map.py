"""A map of the embedding: a point per item, and a colour and a marker per named class."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int, Num, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.linalg import eigh, orthogonal_procrustes
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.fitted_text import shorten
from fewshot_callbacks.plots.panels import as_array
from fewshot_callbacks.plots.style import in_house_style, new_figure
from fewshot_callbacks.system.words import counted

Method = Literal["pca", "tsne", "umap"]
Points = Float[np.ndarray, "items 2"]

MIN_ITEMS = 5  # for t-SNE and UMAP; PCA is as good for fewer items
MIN_SHARED = 3  # items or classes that two maps must have in common to be aligned


@dataclass(frozen=True, eq=False)
class Projection:
    """A two-dimensional projection of embeddings.

    Attributes:
        points: (items, 2); NaN if an embedding was not finite.
        labels: (items,), the class of each item.
        ids: (items,), the identity of each item.
        method: The projection method.
        shares: Fraction of the variance that each component explains; None for t-SNE and UMAP, and if the variance is 0.
        notes: Remarks for the reader of the map.
        aligned: Whether the map was rotated, shifted and scaled to match an earlier map.
    """

    points: Points
    labels: Shaped[np.ndarray, "items"]
    ids: Shaped[np.ndarray, "items"]
    method: Method = "pca"
    shares: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    aligned: bool = False

    @property
    def axes(self) -> tuple[str, str]:
        """The labels of the two axes."""
        if self.method != "pca":
            name = {"tsne": "t-SNE", "umap": "UMAP"}[self.method]
            alignment = ", aligned with the previous map" if self.aligned else ""
            return f"{name} axis 1{alignment}", f"{name} axis 2"
        if self.aligned:
            share = "" if self.shares is None else _share_text(sum(self.shares))
            return f"principal components 1 and 2, rotated to match the previous map{share}", ""
        if self.shares is None:
            return "first principal component", "second principal component"
        first, second = self.shares
        return f"first principal component{_share_text(first)}", f"second principal component{_share_text(second)}"


def _share_text(share: float) -> str:
    return f", {100 * share:.0f} % of the variance"


def project(
    embeddings: Num[Tensor, "items dim"] | Num[np.ndarray, "items dim"],
    labels: Tensor | np.ndarray | Sequence[Any],
    previous: Projection | None = None,
    method: Method = "pca",
    *,
    ids: Tensor | np.ndarray | Sequence[Any] | None = None,
    seed: int = 0,
) -> Projection:
    """Return a two-dimensional projection of embeddings, aligned with an earlier map if you pass one.

    PCA is deterministic and needs no other package. t-SNE needs scikit-learn, and UMAP needs umap-learn. Sets with fewer
    than five items, and sets of equal embeddings, always use PCA.

    The alignment shifts, rotates or mirrors, and scales the map, so that items are as close as possible to their earlier
    positions (orthogonal Procrustes). If the maps have fewer than three common items, the means of the common classes are
    aligned. If they also have fewer than three common classes, the map is not aligned.

    Args:
        embeddings: (items, dim); rows that are not finite become NaN points.
        labels: (items,), the class of each item.
        previous: An earlier map to align with.
        method: "pca", "tsne" or "umap".
        ids: (items,), the identity of each item in both maps. By default the index of an item is its identity if both maps
            have the same labels in the same order.
        seed: Seed of t-SNE and UMAP.

    Raises:
        ValueError: There are no items, the method is unknown, or the numbers of labels, ids and embeddings differ.
        ImportError: The package of the method is not installed.

    Examples:
        >>> map_ = project(np.array([[0.0, 0.0, 1.0], [2.0, 0.0, 1.0], [4.0, 1.0, 1.0]]), ["a", "a", "b"])
        >>> map_.axes
        ('first principal component, 98 % of the variance', 'second principal component, 2 % of the variance')
    """
    if method not in get_args(Method):
        raise InputError(f"There is no method {method!r}. Use one of {', '.join(map(repr, get_args(Method)))}.")
    vectors = as_array(embeddings).astype(np.float64)
    label_array = as_array(labels)
    id_array = np.arange(len(vectors)) if ids is None else as_array(ids)
    if not len(vectors):
        raise InputError("project: there is no embedding. Pass at least one.")
    for argument, values in (("labels", label_array), ("ids", id_array)):
        if len(values) != len(vectors):
            raise InputError(
                f"project: {counted(len(vectors), 'embedding')}, but {len(values)} {argument}. Pass one per embedding."
            )
    notes = []
    is_finite = np.isfinite(vectors).all(1)
    if not is_finite.all():
        notes.append(f"Not shown: {(~is_finite).sum():,} of {counted(len(vectors), 'embedding')} are not finite.")
    finite = vectors[is_finite]
    if len(finite) > 1 and (finite == finite[0]).all():
        notes.append("All embeddings are the same vector.")
        method = "pca"
    elif len(finite) < MIN_ITEMS:
        method = "pca"
    placed, shares = _principal_components(finite)
    if method != "pca":
        placed = _neighbour_map(finite, placed, method, seed)
        shares = None
    points = np.full((len(vectors), 2), np.nan)
    points[is_finite] = placed
    result = Projection(points, label_array, id_array, method, shares, tuple(notes))
    if previous is None:
        return result
    return _aligned(result, previous, by_id=ids is not None)


def _principal_components(vectors: Float[np.ndarray, "items dim"]) -> tuple[Points, tuple[float, float] | None]:
    """Return the first two principal components and their fractions of the variance.

    The farthest item of a component has a positive coordinate. Without variance all coordinates are 0 and the fractions
    None.
    """
    points = np.zeros((len(vectors), 2))
    if not vectors.size:
        return points, None
    scale = np.abs(vectors).max() or 1.0  # so that no square is infinite
    centred = vectors / scale - (vectors / scale).mean(0)
    items, dim = centred.shape
    # Both products have the same nonzero eigenvalues, so the smaller product is decomposed.
    is_long = dim <= items
    products = centred.T @ centred if is_long else centred @ centred.T
    variance = float(np.trace(products))
    if variance <= 1e-24 * vectors.size:  # only rounding: a coordinate is at most 1, its rounding error 1e-16
        return points, None
    count = min(2, len(products))
    eigenvalues, eigenvectors = eigh(products, subset_by_index=(len(products) - count, len(products) - 1))
    # `eigh` lists the eigenvalues in ascending order.
    eigenvalues = eigenvalues[::-1].clip(min=0)
    eigenvectors = eigenvectors[:, ::-1]
    coordinates = centred @ eigenvectors if is_long else eigenvectors * np.sqrt(eigenvalues)
    farthest = np.take_along_axis(coordinates, np.abs(coordinates).argmax(0)[None], axis=0)
    signs = np.where(farthest < 0, -1.0, 1.0)
    points[:, :count] = coordinates * signs * scale
    first = float(eigenvalues[0]) / variance
    second = float(eigenvalues[1]) / variance if count > 1 else 0.0
    return points, (first, second)


def _neighbour_map(vectors: Float[np.ndarray, "items dim"], start: Points, method: Method, seed: int) -> Points:
    """Return a t-SNE or UMAP map, initialised with the PCA map `start`."""
    make_map, package = NEIGHBOUR_METHODS[method]
    try:
        return make_map(vectors, start, seed)
    except ImportError as error:
        raise ImportError(f'method="{method}" needs {package}: pip install {package}') from error


def _tsne(vectors: Float[np.ndarray, "items dim"], start: Points, seed: int) -> Points:
    from sklearn.manifold import TSNE  # noqa: PLC0415 - only this method needs it

    # scikit-learn's default is 30, but the perplexity must be less than the number of items.
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    # scikit-learn's own initialisation has this standard deviation.
    start = (1e-4 * start / (start[:, 0].std() or 1.0)).astype(np.float32)
    points: Points = TSNE(perplexity=perplexity, init=start, random_state=seed).fit_transform(vectors)
    return points


def _umap(vectors: Float[np.ndarray, "items dim"], start: Points, seed: int) -> Points:
    from umap import UMAP  # noqa: PLC0415 - only this method needs it

    # UMAP's own initialisation has this extent.
    start = (10 * start / (np.abs(start).max() or 1.0)).astype(np.float32)
    # UMAP's default is 15, but the number of neighbours must be less than the number of items.
    neighbours = min(15, len(vectors) - 1)
    # With several jobs, two runs would give different maps.
    points: Points = UMAP(n_neighbors=neighbours, init=start, random_state=seed, n_jobs=1).fit_transform(vectors)
    return points


# Method -> function that makes a map from vectors, initial map and seed, and the package that it needs.
NEIGHBOUR_METHODS: Mapping[Method, tuple[Callable[[np.ndarray, Points, int], Points], str]] = {
    "tsne": (_tsne, "scikit-learn"),
    "umap": (_umap, "umap-learn"),
}


def _aligned(new: Projection, old: Projection, *, by_id: bool) -> Projection:
    """Return the new map, aligned with the old map; if that is impossible, the new map with a note.

    `by_id` matches items by their ids. Otherwise items are matched by index if all labels agree.
    """
    pair = None
    if by_id or np.array_equal(new.labels, old.labels):
        pair = _common_items(new, old)
    if pair is None or len(pair.new) < MIN_SHARED:
        pair = _common_classes(new, old)
    if len(pair.new) < MIN_SHARED:
        return _with_note(new, "Not aligned: fewer than three of the items or classes are in the previous map.")
    new_centre = pair.new.mean(0)
    old_centre = pair.old.mean(0)
    rotation, stretch = orthogonal_procrustes(pair.new - new_centre, pair.old - old_centre)
    extent = ((pair.new - new_centre) ** 2).sum()
    if not extent or not stretch:
        return _with_note(new, "Not aligned: this map or the previous map is a single point.")
    points = (new.points - new_centre) @ rotation * (stretch / extent) + old_centre
    return replace(new, points=points, aligned=True)


def _with_note(projection: Projection, note: str) -> Projection:
    return replace(projection, notes=(*projection.notes, note))


class _Pair(NamedTuple):
    """Points of the same items or classes on two maps, in the same order."""

    new: Points
    old: Points


def _common_items(new: Projection, old: Projection) -> _Pair:
    """Return the points of the items that both maps show."""
    new_shown = _has_point(new)
    old_shown = _has_point(old)
    _, new_rows, old_rows = np.intersect1d(new.ids[new_shown], old.ids[old_shown], return_indices=True)
    return _Pair(new.points[new_shown][new_rows], old.points[old_shown][old_rows])


def _common_classes(new: Projection, old: Projection) -> _Pair:
    """Return the means of the classes that both maps show."""
    labels = np.intersect1d(new.labels[_has_point(new)], old.labels[_has_point(old)])
    return _Pair(_class_means(new, labels), _class_means(old, labels))


def _class_means(projection: Projection, labels: Shaped[np.ndarray, "classes"]) -> Float[np.ndarray, "classes 2"]:
    shown = _has_point(projection)
    means = [projection.points[shown & (projection.labels == label)].mean(0) for label in labels]
    return np.reshape(means, (-1, 2))


def _has_point(projection: Projection) -> Bool[np.ndarray, "items"]:
    finite: Bool[np.ndarray, "items"] = np.isfinite(projection.points).all(1)
    return finite


# Colours of the named classes, all different.
COLOURS = (*style.CYCLE, style.WINE, style.OLIVE, style.INDIGO, style.BROWN, style.YELLOW)
MAX_CLASSES = 12  # more colours and markers are hard to distinguish
HEIGHT = 4.4  # inches, without the legend
LEGEND_LINE = 0.18  # inches
LEGEND_COLUMNS = 3
# The index of all classes that are not named.
UNNAMED = -1


@in_house_style
def embedding_map(
    projection: Projection,
    names: Mapping[Any, str] | Sequence[str] | None = None,
    title: str = "",
    *,
    highlighted: Sequence[Any] | None = None,
    most: int = MAX_CLASSES,
) -> Figure:
    """Return a figure of a map, 6 inches wide: each named class has a colour and a marker, all other classes are grey.

    The legend below the map lists the named classes.

    Args:
        projection: The result of `project`.
        names: Class names, as a mapping from labels, or as a list for the labels 0, 1, 2, ...; by default the labels.
        title: Title of the figure.
        highlighted: Labels of the classes to name, such as the weakest classes; by default the largest classes.
        most: Largest number of classes to name, 1 to 12.

    Raises:
        ValueError: There are no items, or `most` is out of range.

    Examples:
        >>> from fewshot_callbacks.plots.embedding_map import project
        >>> figure = embedding_map(project(np.eye(4), ["cat", "cat", "dog", "dog"]), title="epoch 3")
        >>> figure.get_axes()[0].get_xlabel()
        'first principal component, 33 % of the variance'
    """
    if not len(projection.points):
        raise InputError("embedding_map: there are no items to draw. Pass a projection of at least one item.")
    if not 1 <= most <= MAX_CLASSES:
        raise InputError(
            f"embedding_map: most is {most}. Use 1 to {MAX_CLASSES}: more colours and markers are hard to distinguish."
        )
    has_point = _has_point(projection)
    points = projection.points[has_point]
    labels = projection.labels[has_point]
    if highlighted is None:
        highlighted = _largest_classes(labels, most)
    named_labels = list(dict.fromkeys(highlighted))[:most]
    numbers = _numbers_among(named_labels, labels)
    legend = [_class_name(label, names) for label in named_labels]
    unnamed_classes = len(np.unique(labels[numbers == UNNAMED]))
    if unnamed_classes:
        legend.append(f"{unnamed_classes:,} other class{'es' if unnamed_classes > 1 else ''}")
    figure, axes = _new_map(projection, title, len(legend))
    _draw_items(axes, points, numbers, legend, len(named_labels))
    return figure


def _new_map(projection: Projection, title: str, legend_entries: int) -> tuple[Figure, Axes]:
    """Return a figure with empty axes for a map, the notes above the axes, and room for the legend below."""
    legend_lines = -(-legend_entries // LEGEND_COLUMNS)  # rounded up
    figure = new_figure(HEIGHT + 0.1 + LEGEND_LINE * legend_lines)
    style.entitle(figure, title)
    axes = figure.add_subplot()
    notes = [shorten(note, style.WIDTH - 0.3, style.SMALL) for note in projection.notes]
    axes.set_title("\n".join(notes), fontsize=style.SMALL, color=style.GREY)
    x_label, y_label = projection.axes
    axes.set(xlabel=x_label, ylabel=y_label, aspect="equal", adjustable="datalim")
    axes.locator_params(nbins=5)
    if projection.method != "pca":
        # Coordinates of these maps have no meaning; only the closeness of items does.
        axes.tick_params(length=0, labelleft=False, labelbottom=False)
    return figure, axes


def _numbers_among(named_labels: Sequence[Any], labels: Shaped[np.ndarray, "items"]) -> Int[np.ndarray, "items"]:
    """Return the index of each item's class among the named classes; `UNNAMED` for all other classes."""
    numbers = np.full(len(labels), UNNAMED)
    for number, label in enumerate(named_labels):
        numbers[labels == label] = number
    return numbers


def _largest_classes(labels: Shaped[np.ndarray, "items"], most: int) -> list[Any]:
    """Return the labels of the largest classes, in the order of labels."""
    classes, sizes = np.unique(labels, return_counts=True)
    # String labels with numbers are sorted by these numbers: "2" before "10".
    order = sorted(range(len(classes)), key=lambda index: _natural_key(classes[index]))
    classes = classes[order]
    sizes = sizes[order]
    largest = np.argsort(-sizes, kind="stable")[:most]
    # In label order, a class keeps its colour when another class becomes larger.
    return [classes[index] for index in sorted(largest)]


def _natural_key(label: Any) -> tuple[Any, ...]:
    """Return a sort key: strings sort by the numbers in them, and numeric labels by their value."""
    if not isinstance(label, str):
        return (label,)
    # Every second element is a number.
    runs = re.split(r"([0-9]+)", label)
    return tuple(int(run) if index % 2 else run for index, run in enumerate(runs))


def _class_name(label: Any, names: Mapping[Any, str] | Sequence[str] | None) -> str:
    """Return the name of a class; if there is none, its label."""
    key = label.item() if isinstance(label, np.generic) else label
    if names is None:
        return str(key)
    if isinstance(names, Mapping):
        return names.get(key, str(key))
    return names[key] if 0 <= key < len(names) else str(key)


def _draw_items(
    axes: Axes, points: Points, numbers: Int[np.ndarray, "items"], legend: Sequence[str], named_classes: int
) -> None:
    """Draw the items of the named classes, all other items in grey, and the legend below the map.

    `numbers` are indices among the named classes, or `UNNAMED`. `legend` ends with an entry for all other classes if
    there are any.
    """
    size = _marker_area(len(points))
    x, y = points.T
    drawn = [
        axes.scatter(
            x[numbers == number],
            y[numbers == number],
            s=size,
            color=COLOURS[number],
            marker=style.MARKERS[number],
            edgecolors="white",
            linewidths=0.3,
            zorder=2,
        )
        for number in range(named_classes)
    ]
    unnamed = numbers == UNNAMED
    drawn.append(axes.scatter(x[unnamed], y[unnamed], s=0.5 * size, color=style.LIGHT_GREY, linewidths=0, zorder=1))
    axes.figure.legend(
        drawn[: len(legend)],
        [shorten(name, style.WIDTH / LEGEND_COLUMNS - 0.45, style.SMALL) for name in legend],
        loc="outside lower left",
        ncols=LEGEND_COLUMNS,
        handlelength=1.0,
        columnspacing=1.2,
        markerscale=5 / size**0.5,  # always 5 points wide
    )


def _marker_area(items: int) -> int:
    """Return the area of a marker in square points; it is smaller for more items."""
    if items <= 300:
        return 30
    if items <= 3000:
        return 14
    return 7
