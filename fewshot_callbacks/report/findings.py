"""The contents of a report besides the metrics: neighbours, confused classes, suspects, near duplicates.

To add a finding:

1. Compute it in `find`.
2. Add a field to `ReportFindings`.
3. Write it for the script in `page.page_data`. Get the name of each item from `PageWriter.item`, which also requests the
   item's thumbnail. Thumbnails are added in the order of these calls until the file is full, so more important findings
   come first.
4. Show it in `templates/report.html.jinja`, where all findings are available as `findings`, and in `templates/report.js`.
5. If it is sampled or cut, add a sentence to `page._omissions`.
6. Add it to the table of sections in `docs/evaluate/report.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.functional.leaks import Leakage, copy_score, leakage
from fewshot_callbacks.functional.neighbours import Neighbours, near_duplicates, nearest
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.functional.suspects import Suspects, suspects
from fewshot_callbacks.report.items import Key, ReportItems
from fewshot_callbacks.report.settings import ReportSettings

# Largest number of worst queries per class, so that one class does not fill the list. The documentation states this number,
# and `tests/report/test_findings.py` checks it.
WORST_OF_A_CLASS = 3
# Confusions are counted among this many nearest neighbours of a query.
CONFUSION_K = 5
# Number of neighbours that vote on a label.
SUSPECT_K = 10
# Largest number of queries that one model ranks better than the other, in total and per class.
CHANGED = 4
CHANGED_OF_A_CLASS = 2


class RetrievedItem(NamedTuple):
    """A retrieved item.

    Attributes:
        item: The index of the item in the searched set.
        score: The score; a larger score is closer.
        relevant: Whether the item is relevant to the query.
        tied: Whether another candidate has the same score.
    """

    item: int
    score: float
    relevant: bool
    tied: bool


# The retrieved items of a query, the closest first.
Retrieved = list[RetrievedItem]


@dataclass(frozen=True, eq=False)
class Model:
    """An evaluation with its items.

    Attributes:
        report: The result of `evaluate_retrieval` for all queries.
        queries: The queries.
        gallery: The gallery; None if each query is searched among all other queries.
        name: Name of the model or of its file.
    """

    report: RetrievalReport
    queries: ReportItems
    gallery: ReportItems | None = None
    name: str = "embeddings"

    @property
    def searched(self) -> ReportItems:
        """The searched items: the gallery, or the queries if there is none."""
        return self.queries if self.gallery is None else self.gallery

    def nearest(
        self, query_indices: Sequence[int] | Int[np.ndarray, "chosen"], k: int, memory_mb: float | None = None
    ) -> Neighbours:
        """Return the k nearest neighbours of the chosen queries, in the order of `query_indices`.

        Args:
            query_indices: Indices of the chosen queries.
            k: Number of neighbours; their `indices` refer to `self.searched`.
            memory_mb: Memory bound of the search beyond the embeddings, in MB; None is 512.
        """
        gallery = self.gallery
        return nearest(
            self.queries.embeddings,
            gallery=None if gallery is None else gallery.embeddings,
            query_indices=torch.as_tensor(query_indices, dtype=torch.int64, device="cpu"),
            k=k,
            similarity=self.report.similarity,
            query_ids=self.queries.ids,
            gallery_ids=None if gallery is None else gallery.ids,
            query_groups=self.queries.groups,
            gallery_groups=None if gallery is None else gallery.groups,
            memory_mb=memory_mb,
        )

    def retrieved(self, neighbours: Neighbours, k: int | None = None) -> list[Retrieved]:
        """Return the first k neighbours of each query in a result of `nearest`; by default all neighbours."""
        query_labels = self.queries.labels
        item_labels = self.searched.labels
        results = []
        for query, indices, scores, ties in zip(
            neighbours.query_indices.tolist(),
            neighbours.indices[:, :k].tolist(),
            neighbours.scores[:, :k].tolist(),
            neighbours.tied[:, :k].tolist(),
            strict=True,
        ):
            row = [
                RetrievedItem(index, score, _is_relevant(query_labels[query], item_labels[index]), tied)
                for index, score, tied in zip(indices, scores, ties, strict=True)
                if index >= 0  # fewer than k candidates
            ]
            results.append(row)
        return results


def _is_relevant(query_label: Any, item_label: Any) -> bool:
    """Return whether the item has the query's label, or shares one of several labels."""
    if isinstance(query_label, tuple) and isinstance(item_label, tuple):
        return not set(query_label).isdisjoint(item_label)
    return bool(query_label == item_label)


@dataclass(frozen=True)
class Duplicates:
    """Near duplicates in one set or between two sets.

    Attributes:
        kind: The sets, such as "inside queries" or "between queries and gallery".
        pairs: The two items and the score of each listed pair, the most similar pair first.
        total: Number of all pairs.
    """

    kind: str
    pairs: Sequence[tuple[Key, Key, float]]
    total: int


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """The queries that two models rank most differently, the largest difference first.

    Attributes:
        retrieved: Query -> the items that the second model retrieves.
    """

    better: list[int]
    worse: list[int]
    retrieved: dict[int, Retrieved]


@dataclass(frozen=True, eq=False)
class ReportFindings:
    """The contents of a report besides the metrics.

    Attributes:
        worst: The queries with the lowest average precision, at most `WORST_OF_A_CLASS` per class.
        searchable: The queries that the search covers, including the worst queries.
        retrieved: Shown query -> its retrieved items.
        confused: Label of queries -> the most frequent other label among their `CONFUSION_K` nearest neighbours, and its
            fraction.
        confusion_queries: Number of queries whose neighbours were counted for `confused`.
        suspects: Items that are probably mislabelled, according to `SUSPECT_K` neighbours; None if they were not
            requested or could not be computed.
        suspect_keys: The set and the index of each item to which the indices in `suspects` refer.
        leakage: The queries that have a copy among the training items, and the metrics without these queries; None without
            training items, or if near duplicates were not requested.
    """

    worst: list[int]
    searchable: list[int]
    retrieved: dict[int, Retrieved]
    comparison: ModelComparison | None
    confused: dict[Any, tuple[Any, float]]
    confusion_queries: int
    suspects: Suspects | None
    suspect_keys: list[Key]
    duplicates: list[Duplicates]
    leakage: Leakage | None
    notes: list[str]


def find(
    model: Model, other: Model | None, train: ReportItems | None, settings: ReportSettings, sets: Sequence[ReportItems]
) -> ReportFindings:
    """Return all findings of a report.

    `sets` are the queries, the gallery if there is one, and the training items if there are any.
    """
    labels = model.report.query_labels.numpy()
    worst = worst_queries(model.report, settings.worst)
    searchable = _each_once([*worst, *sample_of_classes(labels, settings.searchable)])
    panel_queries = searchable
    comparison = None
    if other is not None:
        comparison = _compare(model, other, settings)
        panel_queries = _each_once([*searchable, *comparison.better, *comparison.worse])

    # One search for both the queries with a panel and the sample for confusions.
    confusion_sample = sample_of_classes(labels, settings.confusion_queries)
    queries = np.union1d(np.array(panel_queries, np.int64), np.array(confusion_sample, np.int64))
    neighbours = model.nearest(queries, max(settings.neighbours, CONFUSION_K), settings.memory_mb)
    retrieved = dict(zip(queries.tolist(), model.retrieved(neighbours, settings.neighbours), strict=True))
    confusion_neighbours = _rows_of(neighbours, np.searchsorted(queries, confusion_sample), CONFUSION_K)

    suspect_items, suspect_keys, notes = _find_suspects(model, settings)
    return ReportFindings(
        worst=worst,
        searchable=searchable,
        retrieved={query: retrieved[query] for query in panel_queries},
        comparison=comparison,
        confused=_most_confused(confusion_neighbours, model),
        confusion_queries=len(confusion_sample),
        suspects=suspect_items,
        suspect_keys=suspect_keys,
        duplicates=_find_duplicates(model, train, settings, sets),
        leakage=_find_leakage(model, train, settings),
        notes=notes,
    )


def _each_once(queries: Sequence[int]) -> list[int]:
    """Return the queries without duplicates, in the same order."""
    return list(dict.fromkeys(queries))


def _compare(model: Model, other: Model, settings: ReportSettings) -> ModelComparison:
    """Return the queries that two models rank most differently, with the second model's retrieved items.

    At most `CHANGED` queries per model, and at most `CHANGED_OF_A_CLASS` per class.
    """
    labels = model.report.query_labels.numpy()
    gain = (model.report.per_query["mAP"] - other.report.per_query["mAP"]).numpy()
    better = _lowest_of_classes(np.where(gain > 0, -gain, np.nan), labels, CHANGED, CHANGED_OF_A_CLASS)
    worse = _lowest_of_classes(np.where(gain < 0, gain, np.nan), labels, CHANGED, CHANGED_OF_A_CLASS)
    queries = better + worse
    if not queries:
        return ModelComparison(better, worse, {})
    neighbours = other.nearest(queries, settings.neighbours, settings.memory_mb)
    return ModelComparison(better, worse, dict(zip(queries, other.retrieved(neighbours), strict=True)))


def worst_queries(report: RetrievalReport, count: int, among: Bool[np.ndarray, "queries"] | None = None) -> list[int]:
    """Return the queries with the lowest average precision below 1, at most `WORST_OF_A_CLASS` per class.

    `among` masks the queries that may be chosen.
    """
    precision = report.per_query["mAP"].numpy()
    may_be_chosen = precision < 1
    if among is not None:
        may_be_chosen &= among
    # Without classes, each query counts as a class.
    labels = report.query_labels.numpy() if report.classes else np.arange(len(precision))
    return _lowest_of_classes(np.where(may_be_chosen, precision, np.nan), labels, count, WORST_OF_A_CLASS)


def confident_mistakes(model: Model, queries: Int[np.ndarray, "chosen"], count: int) -> list[int]:
    """Return up to `count` of the queries with an irrelevant nearest neighbour, the highest score first."""
    if not count or not len(queries):
        return []
    mistakes = []
    for query, retrieved in zip(queries.tolist(), model.retrieved(model.nearest(queries, 1)), strict=True):
        mistakes += [(-first.score, query) for first in retrieved if not first.relevant]
    return [query for _, query in sorted(mistakes)[:count]]


def _lowest_of_classes(
    values: Float[np.ndarray, "queries"], labels: Int[np.ndarray, "queries"], count: int, most_of_a_class: int
) -> list[int]:
    """Return the queries with the lowest finite values, at most `count` in total and `most_of_a_class` per class."""
    lowest: list[int] = []
    count_of_class: Counter[int] = Counter()
    for query in np.argsort(values, kind="stable").tolist():  # NaN comes last
        if len(lowest) >= count or np.isnan(values[query]):
            break
        label = int(labels[query])
        if count_of_class[label] < most_of_a_class:
            count_of_class[label] += 1
            lowest.append(query)
    return lowest


def sample_of_classes(labels: Int[np.ndarray, "queries"], count: int) -> list[int]:
    """Return a sample of at most `count` queries, with classes in proportion to their sizes."""
    if len(labels) <= count:
        return list(range(len(labels)))
    if not count:
        return []
    # With a fixed seed, two reports of the same files are equal.
    shuffled = np.random.default_rng(0).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    steps = ((np.arange(count) + 0.5) * (len(labels) / count)).astype(np.int64)
    return sorted(by_class[steps].tolist())


def confusions(
    neighbours: Neighbours, query_labels: Sequence[Any], item_labels: Sequence[Any]
) -> Counter[tuple[Any, Any]]:
    """Return (query label, other neighbour label) -> number of neighbours."""
    counts: Counter[tuple[Any, Any]] = Counter()
    for query, indices in zip(neighbours.query_indices.tolist(), neighbours.indices.tolist(), strict=True):
        query_label = query_labels[query]
        for index in indices:
            if index >= 0 and item_labels[index] != query_label:
                counts[query_label, item_labels[index]] += 1
    return counts


def _rows_of(neighbours: Neighbours, rows: Int[np.ndarray, "chosen"], k: int) -> Neighbours:
    """Return the first k neighbours of the queries in these rows."""
    return Neighbours(
        neighbours.query_indices[rows],
        neighbours.indices[rows, :k],
        neighbours.scores[rows, :k],
        neighbours.tied[rows, :k],
        neighbours.unlisted_ties[rows],
    )


def _most_confused(neighbours: Neighbours, model: Model) -> dict[Any, tuple[Any, float]]:
    """Return query label -> the most frequent other label among the queries' neighbours, and its fraction."""
    labels = model.queries.labels
    neighbours_of_label: Counter[Any] = Counter()
    for query, count in zip(neighbours.query_indices.tolist(), neighbours.found.tolist(), strict=True):
        neighbours_of_label[labels[query]] += count
    counts = confusions(neighbours, labels, model.searched.labels)
    confused: dict[Any, tuple[Any, float]] = {}
    # The most frequent confusion first; ties are ordered by name.
    for (label, wrong_label), count in sorted(counts.items(), key=lambda pair: (-pair[1], str(pair[0][1]))):
        if label not in confused:
            confused[label] = (wrong_label, count / neighbours_of_label[label])
    return confused


class _EvaluatedItems(NamedTuple):
    """Queries and gallery items as one set; each item is in it once."""

    embeddings: Any
    labels: list[Any]
    keys: list[Key]


def _evaluated_items(model: Model) -> _EvaluatedItems:
    queries = model.queries
    gallery = model.gallery
    query_keys: list[Key] = [(0, index) for index in range(len(queries))]
    if gallery is None:
        return _EvaluatedItems(queries.embeddings, list(queries.labels), query_keys)
    # A gallery item that is also a query would confirm its own label.
    added = np.arange(len(gallery))
    if queries.ids is not None and gallery.ids is not None:
        added = np.flatnonzero(~np.isin(np.asarray(gallery.ids), np.asarray(queries.ids)))
    added_rows = torch.as_tensor(gallery.embeddings)[torch.as_tensor(added)]
    added_labels = [gallery.labels[index] for index in added.tolist()]
    added_keys: list[Key] = [(1, index) for index in added.tolist()]
    return _EvaluatedItems(
        torch.cat([torch.as_tensor(queries.embeddings), added_rows]),
        [*queries.labels, *added_labels],
        [*query_keys, *added_keys],
    )


def _find_suspects(model: Model, settings: ReportSettings) -> tuple[Suspects | None, list[Key], list[str]]:
    """Return the suspects, the keys of their indices, and a note if they cannot be computed."""
    if not settings.suspects:
        return None, [], []
    items = _evaluated_items(model)
    try:
        result = suspects(
            items.embeddings,
            items.labels,
            k=SUSPECT_K,
            similarity=model.report.similarity,
            memory_mb=settings.memory_mb,
        )
    except ValueError as error:
        return None, [], [f"Suspects could not be computed. {error}"]
    return result, items.keys, []


def _find_duplicates(
    model: Model, train: ReportItems | None, settings: ReportSettings, sets: Sequence[ReportItems]
) -> list[Duplicates]:
    """Return near duplicates in the searched set, between queries and gallery, and with training items.

    A query and a gallery item with the same id are one item; an evaluated item and a training item with the same id are
    duplicates.
    """
    if not settings.duplicates:
        return []
    compared = [(0, 0)] if model.gallery is None else [(0, 1), (1, 1)]
    if train is not None:
        train_number = len(sets) - 1
        compared = [(number, train_number) for number in range(train_number)] + compared
    return [
        _duplicates_between(sets, first, second, settings, model.report, with_ids=sets[second] is not train)
        for first, second in compared
    ]


def _find_leakage(model: Model, train: ReportItems | None, settings: ReportSettings) -> Leakage | None:
    """Return the queries that have a near duplicate among the training items, and the metrics without these queries."""
    if train is None or not settings.duplicates:
        return None
    queries = model.queries
    return leakage(
        model.report,
        queries.embeddings,
        train.embeddings,
        query_ids=queries.ids,
        train_ids=train.ids,
        min_score=copy_score(settings.duplicates_from, model.report, _dim(queries)),
        memory_mb=settings.memory_mb,
    )


def _dim(items: ReportItems) -> int:
    """Return the dimension of the embeddings."""
    return int(torch.as_tensor(items.embeddings[:1]).shape[1])


def _duplicates_between(
    sets: Sequence[ReportItems],
    first: int,
    second: int,
    settings: ReportSettings,
    report: RetrievalReport,
    *,
    with_ids: bool,
) -> Duplicates:
    """Return the near duplicates between two sets, or in one set; binary codes are compared by their Hamming distance.

    `with_ids` means that two items with the same id are one item, and so not a pair.
    """
    first_items = sets[first]
    second_items = sets[second]
    is_one_set = first == second
    kind = f"inside {first_items.name}" if is_one_set else f"between {first_items.name} and {second_items.name}"
    if is_one_set and len(first_items) < 2:
        return Duplicates(kind, [], 0)
    first_ids: list[Any] = []
    second_ids: list[Any] = []
    has_ids = with_ids and not is_one_set and first_items.ids is not None and second_items.ids is not None
    if has_ids:
        first_ids = np.asarray(first_items.ids).tolist()
        second_ids = np.asarray(second_items.ids).tolist()
    duplicates = near_duplicates(
        first_items.embeddings,
        None if is_one_set else second_items.embeddings,
        min_score=copy_score(settings.duplicates_from, report, _dim(first_items)),
        similarity="hamming" if report.similarity == "hamming" else "cosine",
        # Each item may also be found as its own duplicate in the other set; these pairs are removed below.
        most=settings.duplicates + (len(first_items) if has_ids else 0),
        memory_mb=settings.memory_mb,
    )
    pairs: list[tuple[Key, Key, float]] = []
    for i, j, score in zip(
        duplicates.first.tolist(), duplicates.second.tolist(), duplicates.scores.tolist(), strict=True
    ):
        is_same_item = has_ids and first_ids[i] == second_ids[j]
        if not is_same_item:
            pairs.append(((first, i), (second, j), score))
    same_items = len(duplicates.first) - len(pairs)
    return Duplicates(kind, pairs[: settings.duplicates], duplicates.total - same_items)
