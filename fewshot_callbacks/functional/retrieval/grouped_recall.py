"""Grouped Recall@K: recall among a fixed number of classes, comparable between sets of different size.

Plain Recall@K falls as the number of classes grows, so train and test sets with different class counts cannot be
compared by it. Zhdanov and Karpukhin, who propose the metric, split the labels into groups of equal size, measure
Recall@K inside each group and average.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine import BestMatches, Pass, find_candidates, open_pass
from fewshot_callbacks.engine.options import computing_on
from fewshot_callbacks.engine.scores import Similarity, check_similarity, compare
from fewshot_callbacks.functional.retrieval.inputs import RetrievalInputs, collect_inputs
from fewshot_callbacks.functional.retrieval.label_groups import (
    Splits,
    Unmatched,
    check_unmatched,
    checked_groups,
    given_split,
    random_splits,
)
from fewshot_callbacks.functional.retrieval.rank_metrics import Ties, check_ties, recall_at_k
from fewshot_callbacks.functional.retrieval.settings import DEFAULT_MEMORY_MB, check_memory, memory_or_default, ranks_of
from fewshot_callbacks.functional.statistics.class_means import exact_mean
from fewshot_callbacks.functional.statistics.intervals import (
    UNKNOWN,
    Difference,
    Interval,
    independent_difference_interval,
    mean_interval,
    normal_quantile,
)


@dataclass(frozen=True)
class GroupedRecall:
    """Grouped Recall@K for one or several K, all on the same groups."""

    at: dict[int, float]
    """K -> mean over the groups of Recall@K inside the group, in [0, 1]"""
    intervals: dict[int, Interval]
    """K -> interval of that mean over groups, see `functional.intervals`; NaN for fewer than two groups"""
    group_size: int | None
    """labels in each group; None where the groups that were given differ in it"""
    groups: int
    """groups of one split"""
    dropped_labels: int
    """labels in no group: left over by one split, because the group size does not divide their number, or not given"""
    repeats: int
    """independent splits that were averaged over"""
    per_group: dict[int, Float[Tensor, "repeats groups"]] = field(compare=False, repr=False)
    """K -> Recall@K inside each group of each split"""
    confidence: float = 0.95
    """of the intervals"""
    unmatched: Unmatched = "exclude"
    """whether queries without a match were left out or counted as misses"""
    are_given: bool = False
    """the groups were given, not drawn at random"""
    labels: tuple[tuple[tuple[int, ...], ...], ...] = field(default=(), compare=False, repr=False)
    """the labels of each group of each split"""

    def minus(self, other: GroupedRecall) -> dict[int, Difference]:
        """The difference to another set, of whatever classes: K -> value and interval.

        The two sets are taken as independent, as the training and the validation classes are.

        Raises:
            ValueError: if the groups are not of the same size, those of one set alone were given, the intervals are not of
                the same confidence, or queries without a match not counted in the same way.
        """
        if self.are_given != other.are_given or self.group_size is None or other.group_size is None:
            raise ValueError(
                "GroupedRecall.minus: groups of different sizes cannot be compared, nor groups that were given with groups "
                "drawn at random. Give groups of one size for both sets, or for neither."
            )
        if (self.group_size, self.confidence) != (other.group_size, other.confidence):
            raise ValueError(
                f"GroupedRecall.minus: groups of {self.group_size} labels at confidence {self.confidence:g} cannot be "
                f"compared with groups of {other.group_size} at {other.confidence:g}. Compute both in the same way."
            )
        if self.unmatched != other.unmatched:
            raise ValueError(
                f"GroupedRecall.minus: unmatched={self.unmatched!r} cannot be compared with unmatched={other.unmatched!r}. "
                "Compute both in the same way."
            )
        differences = {}
        for k in (k for k in self.at if k in other.at):
            interval = independent_difference_interval(self.at[k], self.intervals[k], other.at[k], other.intervals[k])
            differences[k] = Difference(self.at[k], other.at[k], interval)
        return differences


def grouped_recall(
    embeddings: Any,
    labels: Any,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    k: int | Sequence[int] = 1,
    groups: Sequence[Sequence[int | str]] | None = None,
    group_size: int = 10,
    repeats: int = 1,
    seed: int = 0,
    similarity: Similarity = "cosine",
    ties: Ties = "expected",
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    unmatched: Unmatched = "exclude",
    confidence: float = 0.95,
    memory_mb: float | None = DEFAULT_MEMORY_MB,
) -> GroupedRecall:
    """Recall@K inside random groups of `group_size` labels, or given groups, averaged over the groups, with its interval.

    The cost is that of `groups` small evaluations, N^2 / groups pairs in all: linear in N for groups of a fixed size.

    Args:
        embeddings: (items, dim) queries; tensor or array.
        labels: (items,) integers or words: a tensor, array, list or column of a table, as ids and groups are.
        gallery: (gallery, dim) items to retrieve from. By default each item is a query against all others.
        gallery_labels: (gallery,) their labels; items of a label that no query has belong to no group.
        k: one or several K, smaller than the number of labels in a group; a query counts if a relevant item is among its
            first K.
        groups: the labels of each group, such as `[[0, 1, 2], [3, 4, 5]]` for the classes of each family, in place of random
            groups: `group_size` and `seed` are not used then. The groups may differ in size, and each counts the same.
            Labels in no group are left out. The interval is that of the mean over groups like these: it takes them
            for a sample of such groups, and is wide where they are few or differ much. Classes of one given group are
            not taken as independent, so that groups without a single miss have a wider interval than random ones.
        group_size: labels in each group.
        repeats: average over so many independent splits; the interval is the mean over the splits' intervals, since the
            same items return in each of them.
        seed: of the split, which depends on the set of labels only.
        similarity: see `Similarity`.
        ties: what equal scores count as, see `functional.ranking`.
        query_ids: (queries,) identity of each query; with `gallery_ids`, the same item in both sets is no candidate.
        gallery_ids: (gallery,) identity of each gallery item.
        query_groups: (queries,) candidates of the query's own group are neither hit nor miss.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` serves for both.
        unmatched: what a query counts for that has no relevant candidate, whatever the embedding: `"exclude"` leaves it out
            of its group's mean; `"miss"` counts it as a miss, as the denominator of the paper's equations 4 and 5 does.
        confidence: of the interval.
        memory_mb: bound on the memory beyond the embeddings, in MB; None is the default. One that is too small is exceeded
            without a note, which only `evaluate_retrieval` gives.

    Returns:
        Values in [0, 1], larger is better.

    Raises:
        ValueError: on unusable input, fewer labels than one group needs, or a group without any query with a match (with
            `unmatched="miss"`: if no query has one).

    Examples:
        >>> import torch
        >>> labels = torch.arange(40).repeat_interleave(5)
        >>> embeddings = torch.nn.functional.one_hot(labels).float()
        >>> result = grouped_recall(embeddings, labels, group_size=10)
        >>> result.at[1], result.groups
        (1.0, 4)
    """
    call = "grouped_recall"
    check_similarity(similarity)
    check_ties(ties)
    check_unmatched(unmatched)
    given = None if groups is None else checked_groups(call, "groups", groups)
    if given is not None and repeats != 1:
        raise ValueError(
            f"{call}: repeats={repeats} draws random groups again, but groups are given. Leave repeats out."
        )
    smallest = group_size if given is None else min(map(len, given))
    ks = ranks_of(k)
    if not ks or not all(isinstance(rank, int) and rank >= 1 for rank in ks):
        raise ValueError(f"{call}: k={k} is no positive rank. Pass for instance k=(1, 5).")
    if max(ks) >= smallest >= 2:
        size = f"group_size={group_size}" if given is None else f"the {smallest} labels of the smallest group"
        raise ValueError(
            f"{call}: k={max(ks)} must be smaller than {size}: with K candidates for as many classes, "
            "recall says little. Use larger groups or a smaller k."
        )
    normal_quantile(confidence)  # a wrong confidence is refused before the work, not after it
    memory_mb = memory_or_default(memory_mb)
    check_memory(call, memory_mb)
    sets = collect_inputs(
        call,
        ALONE,
        embeddings,
        labels,
        gallery,
        gallery_labels,
        query_ids=query_ids,
        gallery_ids=gallery_ids,
        query_groups=query_groups,
        gallery_groups=gallery_groups,
        as_codes=similarity == "hamming",
    )
    labels_of_queries = sets.query_labels
    splits = (
        random_splits(labels_of_queries, group_size, seed, repeats)
        if given is None
        else given_split(call, "groups", given, labels_of_queries, sets.label_names)
    )
    sets = sets.among_queries_labels()
    if not len(sets.gallery_labels):
        first = splits[0][0]
        raise without_match(0, int(torch.isin(sets.query_labels, first).sum()), first, sets.label_names)
    cpu = torch.device("cpu")
    with computing_on(cpu):
        compared = compare(sets.queries, sets.gallery, similarity)
        begin = partial(open_pass, compared, memory_bytes=int(memory_mb * 10**6))
        search = GroupedSearch.of(sets, begin, cpu, ALONE)
        return search.recall(splits, ks, ties, confidence, unmatched, are_given=given is not None)


@dataclass(frozen=True)
class GroupedSearch:
    """Queries and a gallery in which every label is that of some query, to be searched in groups of labels.

    Args:
        begin: opens a pass over these vectors: called with candidates, and with `best` matches if they are known.
        same_set: the gallery is the queries.
        query_labels: (queries,) on the device of the scores.
        gallery_labels: (gallery,) likewise.
        codes: the exclusions, as in `candidates.find_candidates`.
        best: the best matches of each query, if they are known.
        processes: who else holds some of the queries.
        own: which queries this process holds; by default all.
        label_names: the word of each label, if they were words.
    """

    begin: Callable[..., Pass]
    same_set: bool
    query_labels: Int[Tensor, "queries"]
    gallery_labels: Int[Tensor, "gallery"]
    codes: Mapping[str, Tensor | None]
    best: BestMatches | None = None
    processes: Processes = ALONE
    own: Int[Tensor, "own"] | None = None
    label_names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        sets: RetrievalInputs,
        begin: Callable[..., Pass],
        device: torch.device,
        processes: Processes,
        best: BestMatches | None = None,
    ) -> GroupedSearch:
        """Of sets in which every label is that of some query."""
        codes = {name: None if code is None else code.to(device) for name, code in sets.codes.items()}
        query_labels, gallery_labels = sets.query_labels.to(device), sets.gallery_labels.to(device)
        own = None if sets.share is None else sets.share.queries
        return cls(begin, sets.same_set, query_labels, gallery_labels, codes, best, processes, own, sets.label_names)

    def recall(
        self,
        splits: Splits,
        ks: Sequence[int],
        ties: Ties,
        confidence: float,
        unmatched: Unmatched = "exclude",
        *,
        are_given: bool = False,
    ) -> GroupedRecall:
        """Grouped Recall over groups of labels, all of which are those of queries; they were drawn at random, or given.

        Raises:
            ValueError: if no query of some group has a match; where these count as misses, if no query has one.
        """
        distinct = self.query_labels.unique()
        repeats, groups = len(splits), len(splits[0])
        values = torch.empty(repeats, groups, len(ks), dtype=torch.float64)
        best = self.best
        own = torch.arange(len(self.query_labels)) if self.own is None else self.own
        for repeat, split in enumerate(splits):
            group_of = _group_of_each(distinct.cpu(), split)
            group = group_of.to(distinct.device)[torch.searchsorted(distinct, self.query_labels)]
            candidates = find_candidates(
                self.query_labels, self.gallery_labels, same_set=self.same_set, query_part=group, **self.codes
            )
            ranking_pass = self.begin(candidates, best=best)
            recalls = torch.full((len(ks), len(own)), torch.nan, dtype=torch.float64)
            for ranks in ranking_pass.run():
                recalls[:, ranks.queries.cpu()] = torch.stack([recall_at_k(ranks, k, ties) for k in ks]).cpu()
            best = ranking_pass.best_matches()
            found = self.processes.placed(recalls, own, len(group))
            if unmatched == "miss" and not bool(found[0, (group < groups).cpu()].isnan().all()):
                found = found.nan_to_num(0.0)
            for number, members in enumerate(_members(group.cpu(), groups)):
                matched = members[~found[0, members].isnan()]
                if not len(matched):
                    raise without_match(number, len(members), split[number], self.label_names)
                means = [exact_mean(part) for part in found[:, matched]]
                values[repeat, number] = torch.tensor(means, dtype=torch.float64)
        dropped = len(distinct) - sum(map(len, splits[0]))
        summary = _summary(values, ks, splits, dropped, confidence, are_given=are_given)
        return replace(summary, unmatched=unmatched)


def _group_of_each(distinct: Int[Tensor, "labels"], split: Sequence[Tensor]) -> Int[Tensor, "labels"]:
    """The number of the group of each label. What is left over makes groups of its own, which count for nothing."""
    sizes = torch.tensor([len(group) for group in split])
    group_of = torch.full((len(distinct),), -1)
    group_of[torch.searchsorted(distinct, torch.cat(list(split)))] = torch.arange(len(split)).repeat_interleave(sizes)
    rest = (group_of < 0).nonzero().flatten()
    group_of[rest] = len(split) + torch.arange(len(rest)) // int(sizes.max())  # no larger, so that they cost no more
    return group_of


class GroupWithoutMatchError(ValueError):
    """No query of some group has a match."""


def without_match(
    number: int, queries: int, labels: Int[Tensor, "group_size"], names: tuple[str, ...] | None
) -> GroupWithoutMatchError:
    """The error that says so of the group of this number and these labels."""
    shown = labels.tolist() if names is None else [names[label] for label in labels.tolist()]
    return GroupWithoutMatchError(
        f"grouped_recall: none of the {queries} queries of group {number} (labels {shown}) has a match. Use a "
        f"larger group_size than {len(labels)} (or larger groups), or drop the labels that have one item only."
    )


def _members(group: Int[Tensor, "items"], groups: int) -> list[Int[Tensor, "members"]]:
    """For each group the indices of its items."""
    order = group.argsort(stable=True)
    bounds = torch.searchsorted(group[order], torch.arange(groups + 1))
    return [order[bounds[i] : bounds[i + 1]] for i in range(groups)]


def _summary(
    values: Float[Tensor, "repeats groups ks"],
    ks: Sequence[int],
    splits: Splits,
    dropped: int,
    confidence: float,
    *,
    are_given: bool,
) -> GroupedRecall:
    repeats, groups, _ = values.shape
    sizes = {len(group) for group in splits[0]}
    # Classes that were put together for a reason, such as those of one family, are not independent: a group is one part.
    parts = 1 if are_given else max(sizes)
    if groups < 2:
        warnings.warn(
            f"Grouped recall over {groups} group of {min(sizes)} labels has no interval: at least two groups are "
            "needed. Use a smaller group_size, or give more groups.",
            stacklevel=3,
        )
    per_group = {k: values[:, :, position] for position, k in enumerate(ks)}
    return GroupedRecall(
        at={k: exact_mean(of_groups.flatten()) for k, of_groups in per_group.items()},
        intervals={k: over_splits(mean_interval(split, confidence, parts) for split in per_group[k]) for k in ks},
        group_size=max(sizes) if len(sizes) == 1 else None,
        groups=groups,
        dropped_labels=dropped,
        repeats=repeats,
        per_group=per_group,
        confidence=confidence,
        are_given=are_given,
        labels=tuple(tuple(tuple(group.tolist()) for group in split) for split in splits),
    )


def over_splits(intervals: Iterable[Interval]) -> Interval:
    """The mean of the intervals of several splits: the same items return in each, so that more splits add no certainty."""
    lows, highs = zip(*intervals, strict=True)
    if any(map(math.isnan, lows)):
        return UNKNOWN
    return Interval(math.fsum(lows) / len(lows), math.fsum(highs) / len(highs))
