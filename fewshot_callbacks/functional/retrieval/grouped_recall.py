"""Grouped Recall@K: recall among a fixed number of classes, comparable between sets of different size.

Plain Recall@K falls as the number of classes grows, so it cannot compare training and test sets with different numbers of
classes. Zhdanov and Karpukhin, who propose the metric, split the labels into groups of equal size, compute Recall@K inside
each group, and average.

A group contains whole classes, so the best match of a query is the same inside its group. It is found once, and only its
rank is counted again, for one batch of groups at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.chunks import gather_in_item_order
from fewshot_callbacks.engine.evaluation import Matches, best_matches, rank_of_best
from fewshot_callbacks.engine.options import Progress, computing, part_of_progress
from fewshot_callbacks.engine.relevance import Ints, Lists, PairRelevance
from fewshot_callbacks.engine.thresholds import BestMatches
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import as_labels, join, refuse_other_forms
from fewshot_callbacks.functional._reading import check_seed, default_mode, refuse_unknown
from fewshot_callbacks.functional.items import EVERYTHING, Share
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.retrieval.inputs import RetrievalInputs, collect_inputs
from fewshot_callbacks.functional.retrieval.rank_metrics import recall_at_k
from fewshot_callbacks.functional.retrieval.settings import (
    RetrievalSettings,
    Unmatched,
    checked_groups,
    from_keywords,
    main_memory,
    request_of,
    several,
)
from fewshot_callbacks.functional.statistics import (
    UNKNOWN,
    Difference,
    Interval,
    independent_difference_interval,
    mean_interval,
)
from fewshot_callbacks.settings import GroupedOptions, RetrievalOptions, takes
from fewshot_callbacks.system.words import counted, verb

Splits = list[list[Tensor]]
"""The labels of each group of each split."""


@default_mode()
def label_groups(
    labels: Any, group_size: int, seed: int = 0, repeats: int = 1
) -> Int[Tensor, "repeats groups group_size"]:
    """Return random disjoint groups of exactly `group_size` labels.

    The split depends only on the set of labels and the seed, and not on the order or the number of items.

    Args:
        labels: Integers of any value, as a tensor, array or list; a repeated label counts once.
        group_size: Number of labels in each group, at least 2.
        seed: Seed of the random split.
        repeats: Number of independent splits.

    Returns:
        (repeats, groups, group_size) labels, int64. The remaining labels, fewer than `group_size`, are in no group.

    Raises:
        ValueError: If there are fewer than `group_size` labels, `group_size` is below 2, `repeats` is below 1, labels are
            strings, or the seed has more than 64 bits.

    Examples:
        >>> import torch
        >>> label_groups(torch.arange(7), group_size=3)
        tensor([[[4, 0, 5],
                 [3, 2, 6]]])
    """
    item_labels = as_labels(labels, "labels", "label_groups")
    if item_labels.form == "strings":
        raise InputError(
            "label_groups: labels are strings, but the result is a tensor of integers. Encode them first: "
            "np.unique(labels, return_inverse=True)[1]."
        )
    distinct = item_labels.codes.unique()
    if group_size < 2:
        raise InputError(f"label_groups: group_size={group_size} is too small. Pass at least 2 labels per group.")
    if repeats < 1:
        raise InputError(f"label_groups: repeats={repeats} must be at least one split.")
    if len(distinct) < group_size:
        raise InputError(
            f"{counted(len(distinct), 'label')} {verb(len(distinct), 'is', 'are')} too few for a group of {group_size}. Use "
            f"group_size <= {len(distinct)}."
        )
    generator = torch.Generator().manual_seed(check_seed("label_groups", "seed", seed))
    groups = len(distinct) // group_size
    splits = [torch.randperm(len(distinct), generator=generator)[: groups * group_size] for _ in range(repeats)]
    grouped: Tensor = distinct.cpu()[torch.stack(splits)]
    return grouped.view(repeats, groups, group_size)


@equal_with_nan
@dataclass(frozen=True)
class GroupedRecall:
    """Grouped Recall@K for one or several K, all with the same groups; the result of `grouped_recall`.

    Attributes:
        at: K -> mean over the groups of Recall@K inside the group, in [0, 1].
        intervals: K -> confidence interval of this mean over groups; NaN for fewer than two groups.
        group_size: Number of labels in each group; None if the groups that you passed differ in size.
        groups: Number of groups in one split.
        dropped_labels: Number of labels in no group: the remainder of a random split, or labels in none of your groups.
        repeats: Number of independent splits that the values are averaged over.
        per_group: K -> (repeats, groups) Recall@K inside each group of each split.
        confidence: Confidence level of the intervals.
        unmatched: Whether queries without a relevant candidate were left out (`exclude`) or counted as misses (`miss`).
        are_given: Whether you passed the groups; otherwise they are random.
        labels: The labels of each group of each split.

    Examples:
        >>> import torch
        >>> labels = torch.arange(40).repeat_interleave(5)
        >>> noise = torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
        >>> result = grouped_recall(torch.eye(40)[labels] + 0.3 * noise, labels, label_groups=10)
        >>> {k: round(value, 4) for k, value in result.at.items()}, result.groups, result.dropped_labels
        ({1: 0.545}, 4, 0)
    """

    at: dict[int, float]
    intervals: dict[int, Interval]
    group_size: int | None
    groups: int
    dropped_labels: int
    repeats: int
    per_group: dict[int, Float[Tensor, "repeats groups"]] = field(compare=False, repr=False)
    confidence: float = 0.95
    unmatched: Unmatched = "exclude"
    are_given: bool = False
    labels: tuple[tuple[tuple[int, ...], ...], ...] = field(default=(), compare=False, repr=False)

    def in_words(self) -> str:
        """Return the number of groups and their size, such as "4 groups of 10 classes"."""
        return f"{self.groups:,} {'group' if self.groups == 1 else 'groups'} of {self.group_size or 'several'} classes"

    def minus(self, other: GroupedRecall) -> dict[int, Difference]:
        """Return K -> this result minus another set's result, with the interval of the difference.

        The interval treats the two sets as independent, as training and validation classes are.

        Raises:
            ValueError: If the group sizes differ, only one of the results has groups that you passed, or the results differ
                in confidence level or in `unmatched`.
        """
        if self.are_given != other.are_given or self.group_size is None or other.group_size is None:
            raise InputError(
                "GroupedRecall.minus: groups of different sizes cannot be compared, and neither can passed groups and "
                "random groups. Pass groups of one size for both sets, or for neither."
            )
        if (self.group_size, self.confidence) != (other.group_size, other.confidence):
            raise InputError(
                f"GroupedRecall.minus: groups of {self.group_size} labels at confidence {self.confidence:g} cannot be "
                f"compared with groups of {other.group_size} at {other.confidence:g}. Compute both in the same way."
            )
        if self.unmatched != other.unmatched:
            raise InputError(
                f"GroupedRecall.minus: unmatched={self.unmatched!r} cannot be compared with unmatched={other.unmatched!r}. "
                "Compute both in the same way."
            )
        differences = {}
        for k in self.at:
            if k not in other.at:
                continue
            interval = independent_difference_interval(self.at[k], self.intervals[k], other.at[k], other.intervals[k])
            differences[k] = Difference(self.at[k], other.at[k], interval)
        return differences


_CALL = "grouped_recall"
# Approximate share of the budget for the copied rows of a batch of groups.
BATCH_SHARE = 0.25


class _LoneGroupSettings(RetrievalSettings):
    """The settings of `grouped_recall`, which allows a single group, without an interval and with a warning."""

    fewest_groups = 1


@takes(GroupedOptions)
def grouped_recall(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    k: int | Sequence[int] = 1,
    repeats: int = 1,
    unmatched: Unmatched = "exclude",
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    progress: Progress | None = None,
    share: Share = EVERYTHING,
    **settings: Unpack[GroupedOptions],
) -> GroupedRecall:
    """Return Grouped Recall@K: the mean of Recall@K inside groups of classes, with its confidence interval.

    Recall@K falls as the number of classes grows. Recall inside groups of a fixed number of classes can be compared between
    sets with different numbers of classes, such as training and validation. The metric is from Zhdanov and Karpukhin.

    With the default, `label_groups="auto"`, each group has 10 random labels. Between 10 and 19 labels make a single group,
    which has no interval and gives a warning. Fewer than 10 labels are an error.

    You can pass groups of different sizes; each group has the same weight. Labels in no group are left out, and `seed` has
    no effect. The interval treats your groups as a sample of similar groups, so few or very different groups make it wide.
    It does not treat the classes inside one of your groups as independent, so groups without a miss have a wider interval
    than random groups.

    The cost is N^2 / groups pairs in total, which is linear in N for groups of a fixed size.

    Args:
        queries: (queries, dim) finite floating-point tensor, array or list of rows.
        query_labels: (queries,) integers or strings: a tensor, array, list or column of a table. Ids and groups have the
            same forms.
        gallery: (gallery, dim) items to retrieve from. By default each item is a query against all other items.
        gallery_labels: (gallery,) labels of the gallery items. Items with a label that no query has are in no group.
        k: One rank or several, each smaller than the number of labels in a group.
        repeats: Number of independent random splits to average over, at least 1. More splits do not narrow the interval,
            since all splits have the same items.
        unmatched: How a query without a match in its group counts: `exclude` leaves it out, `miss` counts it as a miss, as
            in the metric's paper. All other metrics leave it out.
        query_ids: (queries,) identity of each query. If an id is repeated, only its first item counts, also as a candidate
            if there is one set. With `gallery_ids`, a gallery item with the query's id is not a candidate.
        gallery_ids: (gallery,) identity of each gallery item. Only the first item of each id is a candidate.
        query_groups: (queries,) group of each query. Candidates of the query's own group are left out of its ranking: they
            are neither hits nor misses.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` is used for both.
        progress: Called with the number of pairs done and the number of all pairs, after each batch of groups.
        share: Which part of the sets this process has, if several processes make this call together.
        **settings: `label_groups`, `seed`, `similarity` and more: see `RetrievalSettings`.

    Returns:
        A frozen result with values in [0, 1]; larger is better.

    Raises:
        ValueError: If a shape, type or setting is wrong, there are fewer labels than one group needs, or a group has no
            query with a relevant candidate (with `unmatched="miss"`: if no query has one).

    Examples:
        >>> import torch
        >>> labels = torch.arange(40).repeat_interleave(5)
        >>> noise = torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
        >>> result = grouped_recall(torch.eye(40)[labels] + 0.3 * noise, labels, label_groups=10, k=(1, 5))
        >>> {k: round(value, 4) for k, value in result.at.items()}
        {1: 0.545, 5: 0.87}
        >>> low, high = result.intervals[1]
        >>> f"{result.in_words()}, {low:.4f} to {high:.4f}"
        '4 groups of 10 classes, 0.4427 to 0.6437'
    """
    ids_and_groups = {
        "query_ids": query_ids,
        "gallery_ids": gallery_ids,
        "query_groups": query_groups,
        "gallery_groups": gallery_groups,
    }
    with default_mode(), share.processes.together():
        checked = _checked_settings(k, repeats, unmatched, settings)
        share.refuse_other_settings(_CALL, {**checked.arguments(), "repeats": repeats})
        inputs = collect_inputs(
            _CALL,
            share,
            queries,
            query_labels,
            gallery,
            gallery_labels,
            **ids_and_groups,
            similarity=checked.similarity,
            memory=main_memory(checked),
        )
        splits = choose_groups(_CALL, inputs, checked, repeats)
        for note in inputs.notes_on_copies(inputs.copies_of_queries):
            warnings.warn(f"{_CALL}: {note}", stacklevel=2)
        with computing() as threads:
            return search_groups(inputs, splits, checked, threads=threads, progress=progress)


def _checked_settings(k: Any, repeats: int, unmatched: Unmatched, settings: Mapping[str, Any]) -> RetrievalSettings:
    """Return the checked settings of `grouped_recall`."""
    fix = "Pass 'exclude' to leave queries without a match out of the mean, or 'miss' to count them as misses."
    refuse_unknown(_CALL, "unmatched", unmatched, Unmatched, fix)
    suffix = "_miss" if unmatched == "miss" else ""
    checked = from_keywords(grouped_recall, settings, GroupedOptions, _LoneGroupSettings)
    if checked.label_groups is None:
        raise InputError(
            f"{_CALL}: label_groups=None leaves nothing to compute. Pass the number of labels in a group, such as 10."
        )
    metrics = tuple(f"grouped_recall@{rank}{suffix}" for rank in several(k))
    arguments = {**checked.arguments(), "metrics": metrics}
    checked = from_keywords(grouped_recall, arguments, RetrievalOptions, _LoneGroupSettings)
    if request_of(checked).group_size is None and repeats != 1:
        raise InputError(f"{_CALL}: repeats={repeats} is for random groups, but you passed groups. Leave out repeats.")
    return checked


def choose_groups(call: str, inputs: RetrievalInputs, settings: RetrievalSettings, repeats: int = 1) -> Splits:
    """Return the groups of labels that the user passed, or random groups."""
    labels = inputs.queries.labels
    names = inputs.label_names
    size = request_of(settings).group_size
    if size is not None:
        return [list(split) for split in label_groups(labels, size, settings.seed, repeats)]
    checked = checked_groups(call, settings.label_groups)
    labels_in_groups = join(call, checked, "label_groups")
    refuse_other_forms(
        call, {"label_groups": labels_in_groups.form, "query_labels": "integers" if names is None else "strings"}
    )
    code_of = {code if names is None else names[code]: code for code in labels.unique().tolist()}
    unknown = [label for label in labels_in_groups.tolist() if label not in code_of]
    if unknown:
        raise InputError(
            f"{call}: no query has {len(unknown)} of the {len(labels_in_groups)} labels in label_groups; the first is "
            f"{unknown[0]!r}. Pass groups of labels that the queries have."
        )
    codes = torch.tensor([code_of[label] for label in labels_in_groups.tolist()])
    return [list(codes.split([*map(len, checked)]))]


def search_groups(
    inputs: RetrievalInputs,
    splits: Splits,
    settings: RetrievalSettings,
    matches: Matches | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> GroupedRecall:
    """Return Recall@K inside groups of labels. *Collective*.

    All labels of the groups are labels of queries. `matches` are the best matches of all queries; None if they are not
    known.
    """
    if matches is None:
        inputs = inputs.as_one_set()
        vectors = inputs.vectors(threads)
        matches = best_matches(vectors, inputs.relevance()[0], main_memory(settings))
    labels = inputs.queries.labels
    values = torch.empty(len(splits), len(splits[0]), len(request_of(settings).grouped_k), dtype=torch.float64)
    for repeat, split in enumerate(splits):
        group_of_query = _groups_of(labels.numpy(), split)
        of_split = part_of_progress(progress, repeat, len(splits))
        recalls = _recalls(matches, inputs, group_of_query, split, settings, of_split)
        recalls = inputs.processes.placed(recalls, inputs.queries.places, len(labels))
        values[repeat] = _means_of_groups(
            recalls, torch.from_numpy(group_of_query), split, settings, inputs.label_names
        )
    dropped = len(labels.unique()) - sum(len(group) for group in splits[0])
    return _summary(values, splits, dropped, settings)


def _recalls(
    matches: Matches,
    inputs: RetrievalInputs,
    group_of_query: Ints,
    split: Sequence[Tensor],
    settings: RetrievalSettings,
    progress: Progress | None,
) -> Float[Tensor, "ks own_queries"]:
    """Return Recall@K of each query of this process among the items of its group; NaN without a match. *Collective*.

    `matches` are of the queries of this process. `group_of_query` is the group of each query of all processes; -1 for
    no group, with recall NaN.
    """
    sides = _grouped_sides(inputs, group_of_query, split)
    items_of_groups = _rows_of_groups(sides.group_of_item, len(split))
    sizes = _rows_of_groups(group_of_query, len(split)) + items_of_groups
    pairs = _rows_of_groups(sides.group_of_query, len(split)) * items_of_groups
    all_pairs = len(sides.query_labels) * len(sides.item_labels)  # the same for each split
    batch_of_group = _batches_of_groups(sizes, matches, main_memory(settings))
    recalls = torch.full((len(request_of(settings).grouped_k), len(sides.query_labels)), torch.nan, dtype=torch.float64)
    for batch in np.unique(batch_of_group):
        queries, items = sides.members(batch_of_group == batch)
        ranks = rank_of_best(_inside_groups(matches, sides, queries, items))
        for row, k in enumerate(request_of(settings).grouped_k):
            recalls[row, torch.from_numpy(queries)] = recall_at_k(ranks, k, settings.ties)
        if progress is not None:
            done = int(pairs[batch_of_group <= batch].sum())
            progress(done * all_pairs // max(1, int(pairs.sum())), all_pairs)
    return recalls


class _GroupedSides(NamedTuple):
    """Labels and groups of this process's queries, and of the items of all processes, with its own items first."""

    query_labels: Ints  # (own queries,)
    group_of_query: Ints  # (own queries,) -1 for no group
    item_labels: Ints  # (items,)
    group_of_item: Ints  # (items,) -1 for no group
    is_own_item: Bool[np.ndarray, "items"]
    # (own queries,) queries by group
    query_order: Ints
    # (items,) items process by process, and by group within a process
    item_order: Ints

    def members(self, mask: Bool[np.ndarray, "groups"]) -> tuple[Ints, Ints]:
        """Return the indices of the queries and of the items of some groups, in the order of `PairRelevance.groups`."""
        # The last entry is for -1, no group.
        is_meant = np.append(mask, [False])
        queries = self.query_order[is_meant[self.group_of_query[self.query_order]]]
        items = self.item_order[is_meant[self.group_of_item[self.item_order]]]
        return queries, items


def _grouped_sides(inputs: RetrievalInputs, group_of_query: Ints, split: Sequence[Tensor]) -> _GroupedSides:
    """Return labels and groups of both sides. *Collective*."""
    processes = inputs.processes
    own_item_labels = inputs.gallery.of_rows("labels").numpy()
    item_labels = gather_in_item_order(processes, own_item_labels)
    holders = gather_in_item_order(processes, np.full(len(own_item_labels), processes.rank))
    group_of_own_query = group_of_query[inputs.queries.places.numpy()]
    group_of_item = _groups_of(item_labels, split)
    return _GroupedSides(
        query_labels=inputs.queries.of_rows("labels").numpy(),
        group_of_query=group_of_own_query,
        item_labels=item_labels,
        group_of_item=group_of_item,
        is_own_item=holders == processes.rank,
        query_order=np.argsort(group_of_own_query, kind="stable"),
        item_order=np.lexsort((group_of_item, (holders - processes.rank) % processes.count)),
    )


def _rows_of_groups(groups: Ints, number: int) -> Ints:
    """Return the number of rows of each group."""
    return np.bincount(groups[groups >= 0], minlength=number)


def _batches_of_groups(sizes: Ints, matches: Matches, memory: float) -> Ints:
    """Return the index of the batch of each group, which is the same in all processes.

    The rows of a batch are copied. The copies take about `BATCH_SHARE` of the budget, plus at most one group.

    `sizes` is the number of queries and items of each group, over all processes. `memory` is in bytes.
    """
    if not math.isfinite(memory):
        return np.zeros(len(sizes), np.int64)
    row_bytes = matches.vectors.pairs.queries.itemsize * matches.vectors.scale.dim
    copied_bytes = np.cumsum(sizes * row_bytes)
    return copied_bytes // max(1, int(BATCH_SHARE * memory))


def _inside_groups(matches: Matches, sides: _GroupedSides, queries: Ints, items: Ints) -> Matches:
    """Return the best matches of some queries, to be ranked among the items of their groups. *Collective*.

    `queries` are the indices of the queries of some groups, and `items` of all items of these groups.
    """
    # Index of each item among the items of the groups; -1 for other items and, at the end, for the self-match -1.
    number = np.full(len(sides.item_labels) + 1, -1, np.int32)
    number[items] = np.arange(len(items))
    relevance = PairRelevance(
        Lists.of_labels(sides.query_labels[queries], sides.item_labels[items]),
        number[matches.relevance.self_match[queries]],
        [(of_queries[queries], of_items[items]) for of_queries, of_items in matches.relevance.codes],
        symmetric=matches.relevance.symmetric,
        groups=(sides.group_of_query[queries], sides.group_of_item[items]),
    )
    vectors = matches.vectors.take(queries, items[sides.is_own_item[items]])
    return replace(
        matches,
        vectors=vectors,
        relevance=relevance,
        best=BestMatches(matches.best.scores[queries], matches.best.tied[queries]),
        memory=_memory_beside(vectors, matches),
    )


def _memory_beside(vectors: Vectors, matches: Matches) -> float:
    """Return the budget minus the copied rows of a batch, the same in all processes. *Collective*.

    The budget of a GPU is not reduced, since the rows are copied in main memory.
    """
    if matches.device is not None:
        return matches.memory
    queries = vectors.pairs.queries
    gallery = vectors.pairs.gallery
    copied_bytes = queries.nbytes if gallery is queries else queries.nbytes + gallery.nbytes
    (most_copied,) = vectors.processes.largest([float(copied_bytes)])
    return max(0.0, matches.memory - most_copied)


def _groups_of(labels: Ints, split: Sequence[Tensor]) -> Ints:
    """Return the index of the group of each label; -1 for no group."""
    members = torch.cat(list(split)).numpy()
    group_of_member = np.repeat(np.arange(len(split)), [len(group) for group in split])
    order = np.argsort(members)
    position = order[np.searchsorted(members, labels, sorter=order).clip(max=len(order) - 1)]
    groups: Ints = np.where(members[position] == labels, group_of_member[position], -1)
    return groups


def _means_of_groups(
    recalls: Float[Tensor, "ks queries"],
    group_of_query: Int[Tensor, "queries"],
    split: Sequence[Tensor],
    settings: RetrievalSettings,
    label_names: tuple[str, ...] | None,
) -> Float[Tensor, "groups ks"]:
    """Return the mean over the queries of each group."""
    in_groups = group_of_query >= 0
    if request_of(settings).unmatched == "miss" and not bool(recalls[0, in_groups].isnan().all()):
        recalls = recalls.nan_to_num(0.0)
    sizes = torch.bincount(group_of_query[in_groups], minlength=len(split)).tolist()
    in_none = int((~in_groups).sum())
    members_of_groups = group_of_query.argsort(stable=True)[in_none:].split(sizes)
    means = []
    for number, members in enumerate(members_of_groups):
        matched = members[~recalls[0, members].isnan()]
        if not len(matched):
            raise _without_match(number, len(members), split[number], label_names)
        means.append([exact_mean(of_k) for of_k in recalls[:, matched]])
    return torch.tensor(means, dtype=torch.float64)


class GroupWithoutMatchError(InputError):
    """No query of some group has a match."""


def _without_match(
    number: int, queries: int, labels: Int[Tensor, "group_size"], names: tuple[str, ...] | None
) -> GroupWithoutMatchError:
    """Return the error for the group with this index and these labels."""
    words = labels.tolist() if names is None else [names[label] for label in labels.tolist()]
    return GroupWithoutMatchError(
        f"grouped_recall: none of the {queries} queries of group {number} (labels {words}) has a match. Use a label_groups "
        f"larger than {len(labels)} (or larger groups), or drop the labels that have only one item."
    )


def _summary(
    values: Float[Tensor, "repeats groups ks"], splits: Splits, dropped: int, settings: RetrievalSettings
) -> GroupedRecall:
    """Return the result, given Recall@K inside each group."""
    repeats, groups, _ = values.shape
    sizes = {len(group) for group in splits[0]}
    are_given = request_of(settings).group_size is None
    confidence = settings.confidence
    # Classes in a passed group, such as a family of species, are not independent, so the group counts as one unit.
    classes_per_group = 1 if are_given else max(sizes)
    if groups < 2:
        warnings.warn(
            f"Grouped Recall over {groups} group of {min(sizes)} labels has no interval, which needs at least two groups. "
            "Use a smaller label_groups, or pass more groups.",
            stacklevel=4,  # the caller of grouped_recall
        )
    per_group = {k: values[:, :, position] for position, k in enumerate(request_of(settings).grouped_k)}
    intervals = {}
    for k, of_groups in per_group.items():
        intervals[k] = over_splits(mean_interval(split, confidence, classes_per_group) for split in of_groups)
    return GroupedRecall(
        at={k: exact_mean(of_groups.flatten()) for k, of_groups in per_group.items()},
        intervals=intervals,
        group_size=max(sizes) if len(sizes) == 1 else None,
        groups=groups,
        dropped_labels=dropped,
        repeats=repeats,
        per_group=per_group,
        confidence=confidence,
        unmatched=request_of(settings).unmatched,
        are_given=are_given,
        labels=tuple(tuple(tuple(group.tolist()) for group in split) for split in splits),
    )


def over_splits(intervals: Iterable[Interval]) -> Interval:
    """Return the mean of the intervals of several splits.

    All splits have the same items, so more of them add no certainty.
    """
    lows, highs = zip(*intervals, strict=True)
    if any(map(math.isnan, lows)):
        return UNKNOWN
    return Interval(math.fsum(lows) / len(lows), math.fsum(highs) / len(highs))
