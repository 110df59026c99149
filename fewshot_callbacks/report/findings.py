"""What a report tells beyond the metrics, and how much of it: neighbours, confused classes, suspects, near duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.functional.neighbours import Neighbours, near_duplicates, nearest
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.functional.suspects import Suspects, suspects
from fewshot_callbacks.report.items import Items, Key
from fewshot_callbacks.settings import ReportSettings

# Worst queries of one class, so that one class does not fill the list.
MOST_OF_A_CLASS = 3
# First neighbours in which confusions are counted.
CONFUSION_K = 5
# Neighbours that vote on a label.
SUSPECT_K = 10
# What was retrieved for a query: index, score, whether it is relevant, and whether another candidate has that score.
Retrieved = list[tuple[int, float, bool, bool]]
# Queries that two models rank most differently, for each of both.
CHANGED = 4


@dataclass(frozen=True, eq=False)
class Model:
    """An evaluation with the sets that were evaluated.

    Attributes:
        report: The result of `evaluate_retrieval` for all queries.
        queries: The queries.
        gallery: The gallery; None if each query is searched among all others.
        name: Name of the model or of its file.
    """

    report: RetrievalReport
    queries: Items
    gallery: Items | None = None
    name: str = "embeddings"

    @property
    def searched(self) -> Items:
        """The items among which the queries are searched."""
        return self.queries if self.gallery is None else self.gallery

    def nearest(
        self, queries: Sequence[int] | Int[np.ndarray, "chosen"], k: int, memory_mb: float | None = None
    ) -> Neighbours:
        """Find the first k candidates of some queries."""
        gallery = self.gallery
        return nearest(
            self.queries.embeddings,
            gallery=None if gallery is None else gallery.embeddings,
            queries=torch.as_tensor(queries, dtype=torch.int64, device="cpu"),
            k=k,
            similarity=self.report.similarity,
            query_ids=self.queries.ids,
            gallery_ids=None if gallery is None else gallery.ids,
            query_groups=self.queries.groups,
            gallery_groups=None if gallery is None else gallery.groups,
            memory_mb=memory_mb,
        )

    def retrieved(self, found: Neighbours, k: int | None = None) -> list[Retrieved]:
        """List the first k neighbours of each query that `nearest` was asked for."""
        labels, of_items = self.queries.labels, self.searched.labels
        columns = (part[:, :k].tolist() for part in (found.indices, found.scores, found.tied))
        return [
            [(i, score, _is_relevant(labels[query], of_items[i]), tied) for i, score, tied in row if i >= 0]
            for query, row in zip(found.queries.tolist(), map(zip, *columns), strict=True)
        ]


def _is_relevant(one: Any, other: Any) -> bool:
    """Decide whether items of these labels are what a query of one asks for: of several labels each, any in common."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return not set(one).isdisjoint(other)
    return bool(one == other)


@dataclass(frozen=True)
class Duplicates:
    """Near duplicates of one kind."""

    kind: str
    # the two items and the score of the most similar ones
    pairs: Sequence[tuple[Key, Key, float]]
    # how many there are
    total: int


@dataclass(frozen=True, eq=False)
class Findings:
    """All that was found."""

    # queries of the lowest average precision
    worst: list[int]
    # queries that the search finds, the worst among them
    searchable: list[int]
    # queries that the first model ranks better than the second, and the reverse, the greatest difference first
    changed: tuple[list[int], list[int]]
    # of each of these queries
    neighbours: dict[int, Retrieved]
    # the same by the second model
    others: dict[int, Retrieved]
    # label of the queries -> the other label found most often among their first neighbours, and its share of these
    confused: dict[Any, tuple[Any, float]]
    # queries that were looked at for this
    confusions_of: int
    suspects: Suspects | None
    # of each item that `suspects` numbers, its set and its index there
    places: list[Key]
    duplicates: list[Duplicates]
    notes: list[str] = field(default_factory=list)


def find(
    model: Model, other: Model | None, train: Items | None, settings: ReportSettings, sets: Sequence[Items]
) -> Findings:
    """Look for all that a report tells.

    Args:
        model: The evaluation.
        other: Of the same queries by a second model.
        train: Another split, to be searched for near duplicates of the evaluated items.
        settings: How much is shown.
        sets: Queries, gallery if there is one, training items if there are some.
    """
    notes: list[str] = []
    labels = model.report.query_labels.numpy()
    worst = worst_queries(model.report, settings.worst)
    searchable = list(dict.fromkeys([*worst, *sample_of_classes(labels, settings.searchable)]))
    changed: tuple[list[int], list[int]] = [], []
    others = {}
    if other is not None:
        loss = (other.report.per_query["mAP"] - model.report.per_query["mAP"]).numpy()
        better, weaker = (_spread(np.where(each < 0, each, np.nan), labels, CHANGED, 2) for each in (loss, -loss))
        changed = better, weaker
        if ours := better + weaker:
            theirs = other.nearest(ours, settings.neighbours, settings.memory_mb)
            others = dict(zip(ours, other.retrieved(theirs), strict=True))
    shown = list(dict.fromkeys([*searchable, *changed[0], *changed[1]]))
    asked = sample_of_classes(labels, settings.confusion_queries)
    both = np.union1d(np.array(shown, np.int64), np.array(asked, np.int64))
    found = model.nearest(both, max(settings.neighbours, CONFUSION_K), settings.memory_mb)
    retrieved = dict(zip(both.tolist(), model.retrieved(found, settings.neighbours), strict=True))
    suspected, places = _suspects(model, settings, notes)
    return Findings(
        worst,
        searchable,
        changed,
        {query: retrieved[query] for query in shown},
        others,
        _confused(found, np.searchsorted(both, asked), model),
        len(asked),
        suspected,
        places,
        _duplicates(model, train, settings, sets),
        notes,
    )


def worst_queries(report: RetrievalReport, count: int, among: Bool[np.ndarray, "queries"] | None = None) -> list[int]:
    """Choose the queries of the lowest average precision, at most three of a class; those answered perfectly never.

    Args:
        report: The evaluation.
        count: How many, at most.
        among: Which of its queries may be chosen; by default all.
    """
    precision = report.per_query["mAP"].numpy()
    failed = precision < 1 if among is None else (precision < 1) & among
    # without classes each query is one of its own
    labels = report.query_labels.numpy() if report.classes else np.arange(len(precision))
    return _spread(np.where(failed, precision, np.nan), labels, count, MOST_OF_A_CLASS)


def confident_mistakes(model: Model, queries: Int[np.ndarray, "chosen"], count: int) -> list[int]:
    """Choose of some queries, by their places, those with the highest score of an irrelevant first neighbour."""
    if not count or not len(queries):
        return []
    first = zip(queries.tolist(), model.retrieved(model.nearest(queries, 1)), strict=True)
    wrong = sorted((-score, query) for query, found in first for _, score, is_hit, _ in found if not is_hit)
    return [query for _, query in wrong[:count]]


def _spread(
    values: Float[np.ndarray, "queries"], labels: Int[np.ndarray, "queries"], count: int, most: int
) -> list[int]:
    """Take the queries of the lowest values, at most some of each class; those without a value never."""
    chosen: list[int] = []
    taken: Counter[int] = Counter()
    for query in np.argsort(values, kind="stable").tolist():  # NaN comes last
        if len(chosen) >= count or np.isnan(values[query]):
            break
        if taken[int(labels[query])] < most:
            taken[int(labels[query])] += 1
            chosen.append(query)
    return chosen


def sample_of_classes(labels: Int[np.ndarray, "queries"], count: int) -> list[int]:
    """Draw queries from all classes in proportion to their size; all where there are no more."""
    if len(labels) <= count:
        return list(range(len(labels)))
    if not count:
        return []
    # A seed of its own, so that a report of the same files is the same.
    shuffled = np.random.default_rng(0).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    steps = ((np.arange(count) + 0.5) * (len(labels) / count)).astype(np.int64)
    return sorted(by_class[steps].tolist())


def confusions(found: Neighbours, labels: Sequence[Any], of_items: Sequence[Any]) -> Counter[tuple[Any, Any]]:
    """Count the items of another class among the neighbours of some queries: (label of a query, other label) -> times.

    Args:
        found: The neighbours.
        labels: Of all queries.
        of_items: Labels of the items that were searched.
    """
    pairs: Counter[tuple[Any, Any]] = Counter()
    for query, indices in zip(found.queries.tolist(), found.indices.tolist(), strict=True):
        pairs.update(
            (labels[query], of_items[index]) for index in indices if index >= 0 and of_items[index] != labels[query]
        )
    return pairs


def _confused(found: Neighbours, rows: Int[np.ndarray, "asked"], model: Model) -> dict[Any, tuple[Any, float]]:
    """Find the other label met most often among the first neighbours of the queries of each label, and its share."""
    labels, k = model.queries.labels, CONFUSION_K
    indices, scores, tied = (part[rows, :k] for part in (found.indices, found.scores, found.tied))
    some = Neighbours(found.queries[rows], indices, scores, tied, found.left_out[rows])
    looked: Counter[Any] = Counter()
    for query, number in zip(some.queries.tolist(), some.found.tolist(), strict=True):
        looked[labels[query]] += number
    most: dict[Any, tuple[Any, float]] = {}
    pairs = confusions(some, labels, model.searched.labels)
    for (own, other), times in sorted(pairs.items(), key=lambda pair: (-pair[1], str(pair[0][1]))):
        most.setdefault(own, (other, times / looked[own]))
    return most


def _together(model: Model) -> tuple[Any, list[Any], list[Key]]:
    """Embeddings and labels of the evaluated items, each once, with the set and index of each."""
    queries, gallery = model.queries, model.gallery
    places: list[Key] = [(0, index) for index in range(len(queries))]
    if gallery is None:
        return queries.embeddings, list(queries.labels), places
    # An item that is query and gallery at once would vouch for its own label.
    kept = np.arange(len(gallery))
    if queries.ids is not None and gallery.ids is not None:
        kept = np.flatnonzero(~np.isin(np.asarray(gallery.ids), np.asarray(queries.ids)))
    rows = torch.cat([torch.as_tensor(queries.embeddings), torch.as_tensor(gallery.embeddings)[torch.as_tensor(kept)]])
    labels = [*queries.labels, *(gallery.labels[index] for index in kept.tolist())]
    return rows, labels, [*places, *((1, index) for index in kept.tolist())]


def _suspects(model: Model, settings: ReportSettings, notes: list[str]) -> tuple[Suspects | None, list[Key]]:
    if not settings.suspects:
        return None, []
    rows, labels, places = _together(model)
    try:
        similarity = model.report.similarity
        return suspects(rows, labels, k=SUSPECT_K, similarity=similarity, memory_mb=settings.memory_mb), places
    except ValueError as error:
        notes.append(f"Suspects are left out. {error}")
        return None, []


def _duplicates(model: Model, train: Items | None, settings: ReportSettings, sets: Sequence[Items]) -> list[Duplicates]:
    """Near duplicates inside each set, between queries and gallery, and between training items and both."""
    if not settings.duplicates:
        return []
    compared = [(0, 0)] if model.gallery is None else [(0, 1), (1, 1)]
    if train is not None:
        last = len(sets) - 1
        compared = [(number, last) for number in range(last)] + compared
    return [_between(sets, one, other, settings, model.report.similarity == "hamming") for one, other in compared]


def _between(sets: Sequence[Items], one: int, other: int, settings: ReportSettings, codes: bool) -> Duplicates:
    first, second = sets[one], sets[other]
    kind = f"inside {first.name}" if one == other else f"between {first.name} and {second.name}"
    if one == other and len(first) < 2:
        return Duplicates(kind, [], 0)
    min_score = settings.duplicates_from
    if codes:
        # A share of equal bits as the score of codes: minus the number of those that differ.
        min_score = -float(round((1 - min_score) * torch.as_tensor(first.embeddings[:1]).shape[1]))
    same_items = one != other and first.ids is not None and second.ids is not None
    found = near_duplicates(
        first.embeddings,
        None if one == other else second.embeddings,
        min_score=min_score,
        similarity="hamming" if codes else "cosine",
        # Each item may be found as a duplicate of itself in the other set; these pairs are left out below.
        most=settings.duplicates + (len(first) if same_items else 0),
        memory_mb=settings.memory_mb,
    )
    ids, others = (np.asarray(items.ids).tolist() if same_items else range(len(items)) for items in (first, second))
    listed = zip(found.first.tolist(), found.second.tolist(), found.scores.tolist(), strict=True)
    # The same item in both sets is expected.
    shown = [((one, i), (other, j), score) for i, j, score in listed if not (same_items and ids[i] == others[j])]
    return Duplicates(kind, shown[: settings.duplicates], found.total - (len(found.first) - len(shown)))
