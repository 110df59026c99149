"""The embedding as a map: a point for each item, a colour and a mark for each class that is named."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int, Num, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.linalg import eigh, orthogonal_procrustes
from torch import Tensor

from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.panels import as_array
from fewshot_callbacks.plots.style import in_house_style, new_figure, shorten

Method = Literal["pca", "tsne", "umap"]
Points = Float[np.ndarray, "items 2"]

FEWEST = 5  # items for t-SNE and UMAP; of fewer, PCA shows as much


@dataclass(frozen=True, eq=False)
class Projection:
    """Items on a plane.

    Attributes:
        points: (items, 2); NaN where an embedding was not finite.
        labels: The class of each item.
        ids: The identity of each item.
        method: The method of projection.
        shares: For PCA, each component's share of the variance; None if there is no variance.
        notes: What a reader of the map should know.
        aligned: Whether it was rotated, shifted and scaled to fit an earlier map.
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
        """Descriptions of the two axes."""
        if self.method != "pca":
            name = {"tsne": "t-SNE", "umap": "UMAP"}[self.method]
            turned = ", aligned with the previous map" if self.aligned else ""
            return f"first axis of {name}, without unit{turned}", f"second axis of {name}, without unit"
        if self.aligned:
            told = "" if self.shares is None else f", {100 * sum(self.shares):.0f} % of the variance"
            return f"plane of the first two principal components{told}", "aligned with the previous map"
        first, second = (
            ("", "") if self.shares is None else (f", {100 * share:.0f} % of the variance" for share in self.shares)
        )
        return f"first principal component{first}", f"second principal component{second}"


def project(
    embeddings: Num[Tensor, "items dim"] | Num[np.ndarray, "items dim"],
    labels: Tensor | np.ndarray | Sequence[Any],
    previous: Projection | None = None,
    method: Method = "pca",
    *,
    ids: Tensor | np.ndarray | Sequence[Any] | None = None,
    seed: int = 0,
) -> Projection:
    """Project embeddings onto a plane, aligned with an earlier map of the same items or of the same classes.

    Principal components need no further package and are deterministic; t-SNE needs scikit-learn and UMAP needs
    umap-learn, which are imported only then. The map is shifted, rotated or mirrored, and scaled so that the items in
    both maps come as close to their earlier positions as possible (orthogonal Procrustes). If fewer than three items
    are in both maps, the means of common classes are aligned instead; if fewer than three classes are common, the map
    is not aligned.

    Args:
        embeddings: (items, dim); rows that are not finite are left out.
        labels: Class of each item.
        previous: An earlier map to align with; None for none.
        method: "pca", "tsne" or "umap".
        ids: Identity of each item, to find it in the earlier map; by default its index, if both maps have the same
            labels in the same order.
        seed: Seed of t-SNE and UMAP.

    Returns:
        The map. For fewer than five items, or if all are equal, it is that of PCA.

    Raises:
        ValueError: If there is no item, the method is unknown, or the numbers of labels, ids and embeddings differ.
        ImportError: If the package of the method is not installed.

    Examples:
        >>> map_ = project(np.array([[0.0, 0.0, 1.0], [2.0, 0.0, 1.0], [4.0, 1.0, 1.0]]), ["a", "a", "b"])
        >>> map_.axes
        ('first principal component, 98 % of the variance', 'second principal component, 2 % of the variance')
    """
    if method not in get_args(Method):
        raise ValueError(f"There is no method {method!r}. Use one of {', '.join(map(repr, get_args(Method)))}.")
    vectors, kinds = as_array(embeddings).astype(np.float64), as_array(labels)
    names = np.arange(len(vectors)) if ids is None else as_array(ids)
    if not len(vectors):
        raise ValueError("There is no embedding to project. Pass at least one.")
    for what, given in (("labels", kinds), ("ids", names)):
        if len(given) != len(vectors):
            raise ValueError(f"There are {len(vectors)} embeddings and {len(given)} {what}. Pass one for each.")
    finite = np.isfinite(vectors).all(1)
    notes = [] if finite.all() else [f"{(~finite).sum():,} of {len(vectors):,} embeddings are not finite: not shown."]
    points = np.full((len(vectors), 2), np.nan)
    vectors = vectors[finite]
    if len(vectors) > 1 and (vectors == vectors[0]).all():
        notes.append("All embeddings are the same vector.")
        method = "pca"
    elif len(vectors) < FEWEST:
        method = "pca"
    points[finite], shares = _principal(vectors)
    if method != "pca":
        make, package = OTHERS[method]
        try:
            points[finite], shares = make(vectors, points[finite], seed), None
        except ImportError as error:
            raise ImportError(f'method="{method}" needs {package}: pip install {package}') from error
    result = Projection(points, kinds, names, method, shares, tuple(notes))
    return result if previous is None else _aligned(result, previous, by_id=ids is not None)


def _principal(vectors: Float[np.ndarray, "items dim"]) -> tuple[Points, tuple[float, float] | None]:
    """Coordinates on the first two principal components, and their shares of the variance; None without a variance.

    Each component points to where the item is that is farthest from the mean along it.
    """
    points = np.zeros((len(vectors), 2))
    if not vectors.size:
        return points, None
    unit = np.abs(vectors).max() or 1.0  # so that no square is infinite
    centred = vectors / unit - (vectors / unit).mean(0)
    items, dim = centred.shape
    # Both have the same eigenvalues other than zero: the smaller one is taken.
    products = centred.T @ centred if dim <= items else centred @ centred.T
    variance = float(np.trace(products))
    if variance <= 1e-24 * vectors.size:  # rounding alone: a coordinate is at most 1, its rounding error 1e-16
        return points, None
    count = min(2, len(products))
    values, axes = eigh(products, subset_by_index=(len(products) - count, len(products) - 1))
    values, axes = values[::-1].clip(min=0), axes[:, ::-1]
    found = centred @ axes if dim <= items else axes * np.sqrt(values)
    farthest = np.take_along_axis(found, np.abs(found).argmax(0)[None], axis=0)
    points[:, :count] = found * np.where(farthest < 0, -1.0, 1.0) * unit
    shares = [float(value) / variance for value in values] + [0.0]
    return points, (shares[0], shares[1])


def _tsne(vectors: Float[np.ndarray, "items dim"], start: Points, seed: int) -> Points:
    from sklearn.manifold import TSNE  # noqa: PLC0415 - only this method needs it

    # scikit-learn's default; of few items a third of the others, as it has to be less than their number.
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    start = (1e-4 * start / (start[:, 0].std() or 1.0)).astype(np.float32)  # as scikit-learn scales its own
    points: Points = TSNE(perplexity=perplexity, init=start, random_state=seed).fit_transform(vectors)
    return points


def _umap(vectors: Float[np.ndarray, "items dim"], start: Points, seed: int) -> Points:
    from umap import UMAP  # noqa: PLC0415 - only this method needs it

    # As far apart as UMAP puts the points of its own start.
    start = (10 * start / (np.abs(start).max() or 1.0)).astype(np.float32)
    # UMAP's default; of few items all others. One job, since several would not give the same map twice.
    neighbours = min(15, len(vectors) - 1)
    points: Points = UMAP(n_neighbors=neighbours, init=start, random_state=seed, n_jobs=1).fit_transform(vectors)
    return points


# Of each method but PCA: what makes the map from a start, and the package that it needs.
OTHERS = {"tsne": (_tsne, "scikit-learn"), "umap": (_umap, "umap-learn")}


def _aligned(new: Projection, old: Projection, *, by_id: bool) -> Projection:
    pairs = _common_items(new, old) if by_id or np.array_equal(new.labels, old.labels) else ()
    here, there = pairs if pairs and len(pairs[0]) >= 3 else _common_classes(new, old)
    if len(here) < 3:
        return replace(
            new, notes=(*new.notes, "Fewer than three items or classes are in the previous map: not aligned.")
        )
    centre, target = here.mean(0), there.mean(0)
    turn, stretch = orthogonal_procrustes(here - centre, there - target)
    size = ((here - centre) ** 2).sum()
    if not size or not stretch:
        return replace(new, notes=(*new.notes, "One of two maps is a single point: not aligned."))
    points = (new.points - centre) @ turn * (stretch / size) + target
    return replace(new, points=points, aligned=True)


def _common_items(new: Projection, old: Projection) -> tuple[Points, Points]:
    """Places of the items with a point in both maps, in the new one and in the old one."""
    here, there = _on_map(new), _on_map(old)
    _, first, second = np.intersect1d(new.ids[here], old.ids[there], return_indices=True)
    return new.points[here][first], old.points[there][second]


def _common_classes(new: Projection, old: Projection) -> tuple[Points, Points]:
    """Means of the classes that both maps have."""
    here, there = _on_map(new), _on_map(old)
    both = np.intersect1d(new.labels[here], old.labels[there])
    means = [
        [one.points[on_map & (one.labels == label)].mean(0) for label in both]
        for one, on_map in ((new, here), (old, there))
    ]
    first, second = np.reshape(means, (2, -1, 2))
    return first, second


def _on_map(projection: Projection) -> Bool[np.ndarray, "items"]:
    on_map: Bool[np.ndarray, "items"] = np.isfinite(projection.points).all(1)
    return on_map


# Of the classes on a map: no two share one.
COLOURS = (*style.CYCLE, style.WINE, style.OLIVE, style.INDIGO, style.BROWN, style.YELLOW)
MOST_CLASSES = 12  # more pairs of a colour and a mark are not told apart
HEIGHT = 4.4  # inches of a figure without its legend
COLUMNS = 3


@in_house_style
def embedding_map(
    projection: Projection,
    names: Mapping[Any, str] | Sequence[str] | None = None,
    title: str = "",
    *,
    highlighted: Sequence[Any] | None = None,
    most: int = MOST_CLASSES,
) -> Figure:
    """Draw a map of items: some classes have a colour and a mark each, all others are grey.

    The names of the classes are written below the map.

    Args:
        projection: What `project` returned.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the labels.
        title: A line above the map.
        highlighted: Labels to name, such as those of the weakest classes; by default the largest classes.
        most: Number of classes to name, 1 to 12.

    Returns:
        A figure of 6 inches in width.

    Raises:
        ValueError: If there is no item, or the number of classes to name is not 1 to 12.

    Examples:
        >>> from fewshot_callbacks.plots.embedding_map import project
        >>> figure = embedding_map(project(np.eye(4), ["cat", "cat", "dog", "dog"]), title="epoch 3")
    """
    if not len(projection.points):
        raise ValueError("There is no item to draw.")
    if not 1 <= most <= MOST_CLASSES:
        raise ValueError(f"most is {most}. Use 1 to {MOST_CLASSES}: more colours and marks cannot be told apart.")
    drawn = np.isfinite(projection.points).all(1)
    points, labels = projection.points[drawn], projection.labels[drawn]
    chosen = _largest(labels, most) if highlighted is None else list(dict.fromkeys(highlighted))[:most]
    found = [_name(label, names) for label in chosen]
    place = np.full(len(points), -1)
    for number, label in enumerate(chosen):
        place[labels == label] = number

    others = len(np.unique(labels[place < 0]))
    entries = len(chosen) + (others > 0)
    lines = -(-entries // COLUMNS)
    notes = [shorten(note, style.WIDTH - 0.3, style.SMALL) for note in projection.notes]
    figure = new_figure(HEIGHT + 0.1 + 0.18 * lines)
    style.entitle(figure, title)
    axes = figure.add_subplot()
    axes.set_title("\n".join(notes), fontsize=style.SMALL, color=style.GREY)
    axes.set(xlabel=projection.axes[0], ylabel=projection.axes[1], aspect="equal", adjustable="datalim")
    axes.locator_params(nbins=5)
    # Their numbers mean nothing: only what is near to what.
    if projection.method != "pca":
        axes.tick_params(length=0, labelleft=False, labelbottom=False)
    _scatter(axes, points, place, found, others)
    return figure


def _largest(labels: np.ndarray, most: int) -> list[Any]:
    kinds, counts = np.unique(labels, return_counts=True)
    # Integers that were written as words stand as integers do: 2 before 10.
    natural = sorted(range(len(kinds)), key=lambda place: _natural(kinds[place]))
    kinds, counts = kinds[natural], counts[natural]
    order = np.lexsort((np.arange(len(kinds)), -counts))[:most]
    # In the order of the labels: a class keeps its colour when another one becomes larger.
    return [kinds[place] for place in sorted(order)]


def _natural(label: Any) -> tuple[Any, ...]:
    """Return a key by which words that hold numbers are sorted by these, and numbers as they are."""
    if not isinstance(label, str):
        return (label,)
    # Every other part is a number.
    return tuple(int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", label)))


def _name(label: Any, names: Mapping[Any, str] | Sequence[str] | None) -> str:
    key = label.item() if isinstance(label, np.generic) else label
    if names is None:
        return str(key)
    if isinstance(names, Mapping):
        return names.get(key, str(key))
    return names[key] if 0 <= key < len(names) else str(key)


def _scatter(axes: Axes, points: Points, place: Int[np.ndarray, "items"], found: Sequence[str], others: int) -> None:
    """Draw the classes that were found, then all others, and name them below."""
    size = 30 if len(points) <= 300 else 14 if len(points) <= 3000 else 7
    x, y = points.T
    drawn = [
        axes.scatter(
            x[place == number],
            y[place == number],
            s=size,
            color=COLOURS[number],
            marker=style.MARKERS[number],
            edgecolors="white",
            linewidths=0.3,
            zorder=2,
        )
        for number in range(len(found))
    ]
    words = [shorten(name, style.WIDTH / COLUMNS - 0.45, style.SMALL) for name in found]
    drawn.append(axes.scatter(x[place < 0], y[place < 0], s=0.5 * size, color=style.LIGHT_GREY, linewidths=0, zorder=1))
    if others:
        words.append(f"{others:,} other class{'es' if others > 1 else ''}")
    axes.figure.legend(
        drawn[: len(words)],
        words,
        loc="outside lower left",
        ncols=COLUMNS,
        handlelength=1.0,
        columnspacing=1.2,
        markerscale=5 / size**0.5,  # 5 points wide, however many items there are
    )
