"""Grouped Recall@K: recall among a fixed number of classes, comparable between sets of different size.

Plain Recall@K falls as the number of classes grows, so train and test sets with different class counts cannot be
compared by it. Zhdanov and Karpukhin, who propose the metric, split the labels into groups of equal size, measure
Recall@K inside each group and average.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional._precision import full_precision
from fewshot_callbacks.functional.averages import exact_mean
from fewshot_callbacks.functional.candidates import find_candidates
from fewshot_callbacks.functional.intervals import (
    UNKNOWN,
    Difference,
    Interval,
    independent_difference_interval,
    mean_interval,
    normal_quantile,
)
from fewshot_callbacks.functional.processes import ALONE, Processes
from fewshot_callbacks.functional.ranking import Ties, check_ties, recall_at_k
from fewshot_callbacks.functional.ranks import BestMatches
from fewshot_callbacks.functional.sets import Sets, collect_sets
from fewshot_callbacks.functional.sharded_pass import PIECES
from fewshot_callbacks.functional.similarity import Similarity, check_similarity
from fewshot_callbacks.functional.walkers import Begin, Regroup, passes, scores_of
from fewshot_callbacks.functional.workers import threads_for

Unmatched = Literal["exclude", "miss"]
"""What a query without a relevant candidate in its group is: left out of the mean, or a query whose search failed."""

ENOUGH_GROUPS = 2
"""With so many groups for each process at a time, groups share out the items evenly enough."""


@dataclass(frozen=True)
class GroupedRecall:
    """Grouped Recall@K for one or several K, all on the same groups."""

    at: dict[int, float]
    """K -> mean over the groups of Recall@K inside the group, in [0, 1]"""
    intervals: dict[int, Interval]
    """K -> interval of that mean over groups, see `functional.intervals`; NaN for fewer than two groups"""
    group_size: int
    """labels in each group"""
    groups: int
    """groups of one split"""
    dropped_labels: int
    """labels left over by one split, because the group size does not divide their number"""
    repeats: int
    """independent splits that were averaged over"""
    per_group: dict[int, Float[Tensor, "repeats groups"]] = field(compare=False, repr=False)
    """K -> Recall@K inside each group of each split"""
    confidence: float = 0.95
    """of the intervals"""
    unmatched: Unmatched = "exclude"
    """whether queries without a match were left out or counted as misses"""

    def minus(self, other: GroupedRecall) -> dict[int, Difference]:
        """The difference to another set, of whatever classes: K -> value and interval.

        The two sets are taken as independent, as the training and the validation classes are.

        Raises:
            ValueError: if the groups are not of the same size, the intervals not of the same confidence, or queries without
                a match not counted in the same way.
        """
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


def label_groups(
    labels: Int[Tensor, "labels"], group_size: int, seed: int = 0, repeats: int = 1
) -> Int[Tensor, "repeats groups group_size"]:
    """Split the set of labels at random into groups of exactly `group_size` labels.

    The split depends on the set of labels and the seed only: not on the order or the number of the items.

    Args:
        labels: any integers; what repeats counts once.
        group_size: labels in each group, at least 2.
        seed: of the random split.
        repeats: how many independent splits.

    Returns:
        The labels of each group of each split. Left-over labels are in no group.

    Raises:
        ValueError: if there are fewer labels than a group needs.

    Examples:
        >>> import torch
        >>> label_groups(torch.arange(7), group_size=3).shape
        torch.Size([1, 2, 3])
    """
    distinct = labels.unique()
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: Recall@K inside a group needs at least 2 labels in it.")
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least one split is needed.")
    if len(distinct) < group_size:
        raise ValueError(
            f"Groups of {group_size} labels cannot be made of {len(distinct)} labels. Use group_size <= {len(distinct)}."
        )
    generator = torch.Generator().manual_seed(seed)
    groups = len(distinct) // group_size
    splits = [torch.randperm(len(distinct), generator=generator)[: groups * group_size] for _ in range(repeats)]
    grouped: Tensor = distinct.cpu()[torch.stack(splits)]
    return grouped.view(repeats, groups, group_size)


def grouped_recall(
    embeddings: Any,
    labels: Any,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    k: int | Sequence[int] = 1,
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
    memory_mb: float = 512,
) -> GroupedRecall:
    """Recall@K inside random groups of `group_size` labels, averaged over the groups, with its interval.

    The cost is that of `groups` small evaluations, N^2 / groups pairs in all: linear in N for groups of a fixed size.

    Args:
        embeddings: (items, dim) queries; tensor or array.
        labels: (items,) integer labels.
        gallery: (gallery, dim) items to retrieve from. By default each item is a query against all others.
        gallery_labels: (gallery,) their labels; items of a label that no query has belong to no group.
        k: one or several K, smaller than `group_size`; a query counts if a relevant item is among its first K.
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
        memory_mb: bound on the memory beyond the embeddings.

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
    ks = (k,) if isinstance(k, int) else tuple(k)
    if not ks or min(ks) < 1:
        raise ValueError(f"{call}: k={k} is no positive rank. Pass for instance k=(1, 5).")
    if max(ks) >= group_size >= 2:
        raise ValueError(
            f"{call}: k={max(ks)} must be smaller than group_size={group_size}: with K candidates for as many classes, "
            "recall says little. Use larger groups or a smaller k."
        )
    normal_quantile(confidence)  # a wrong confidence is refused before the work, not after it
    if not memory_mb > 0:
        raise ValueError(f"{call}: memory_mb={memory_mb} must be positive; the default is 512.")
    sets = collect_sets(
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
    splits = label_groups(sets.query_labels, group_size, seed, repeats)
    sets = sets.among_queries_labels()
    if not len(sets.gallery_labels):
        first = splits[0, 0]
        raise without_match(0, int(torch.isin(sets.query_labels, first).sum()), first)
    cpu = torch.device("cpu")
    with full_precision(), threads_for(cpu):
        begin = passes(scores_of(sets.queries, sets.gallery, similarity), int(memory_mb * 10**6))
        return GroupedSearch.of(sets, begin, cpu, ALONE).recall(splits, ks, ties, confidence, unmatched)


@dataclass(frozen=True)
class GroupedSearch:
    """Queries and a gallery in which every label is that of some query, to be searched in groups of labels.

    Args:
        begin: makes a pass over these candidates, given the best matches of each query if they are known.
        same_set: the gallery is the queries.
        query_labels: (queries,) on the device of the scores.
        gallery_labels: (gallery,) likewise.
        codes: the exclusions, as in `candidates.find_candidates`.
        best: the best matches of each query, if they are known.
        processes: who else holds some of the queries.
        own: which queries this process holds; by default all.
        regroup: brings the items of a group together in one process.
    """

    begin: Begin
    same_set: bool
    query_labels: Int[Tensor, "queries"]
    gallery_labels: Int[Tensor, "gallery"]
    codes: Mapping[str, Tensor | None]
    best: BestMatches | None = None
    processes: Processes = ALONE
    own: Int[Tensor, "own"] | None = None
    regroup: Regroup | None = None

    @classmethod
    def of(
        cls,
        sets: Sets,
        begin: Begin,
        device: torch.device,
        processes: Processes,
        best: BestMatches | None = None,
        regroup: Regroup | None = None,
    ) -> GroupedSearch:
        """Of sets in which every label is that of some query."""
        codes = {name: None if code is None else code.to(device) for name, code in sets.codes.items()}
        query_labels, gallery_labels = sets.query_labels.to(device), sets.gallery_labels.to(device)
        own = None if sets.share is None else sets.share.queries
        return cls(begin, sets.same_set, query_labels, gallery_labels, codes, best, processes, own, regroup)

    def recall(
        self,
        splits: Int[Tensor, "repeats groups group_size"],
        ks: Sequence[int],
        ties: Ties,
        confidence: float,
        unmatched: Unmatched = "exclude",
    ) -> GroupedRecall:
        """Grouped Recall over the groups of `label_groups`.

        Raises:
            ValueError: if no query of some group has a match; where these count as misses, if no query has one.
        """
        distinct = self.query_labels.unique()
        repeats, groups, group_size = splits.shape
        values = torch.empty(repeats, groups, len(ks), dtype=torch.float64)
        best = self.best
        for repeat, split in enumerate(splits):
            # what is left over makes a group of its own, which counts for nothing
            group_of = torch.full((len(distinct),), groups)
            group_of[torch.searchsorted(distinct.cpu(), split.flatten())] = torch.arange(groups).repeat_interleave(
                group_size
            )
            group = group_of.to(distinct.device)[torch.searchsorted(distinct, self.query_labels)]
            candidates = find_candidates(
                self.query_labels, self.gallery_labels, same_set=self.same_set, query_part=group, **self.codes
            )
            mine, places = [], []
            for begin, own, known in self._rounds(group_of, distinct, groups, best if repeats > 1 else self.best):
                walk = begin(candidates, known)
                recalls = torch.full((len(ks), len(own)), torch.nan, dtype=torch.float64)
                for ranks in walk.run():
                    recalls[:, ranks.queries.cpu()] = torch.stack([recall_at_k(ranks, k, ties) for k in ks]).cpu()
                mine.append(recalls)
                places.append(own)
                best = walk.best_matches()
            found = self.processes.placed(torch.cat(mine, dim=1), torch.cat(places), len(group))
            if unmatched == "miss" and not bool(found[0, (group < groups).cpu()].isnan().all()):
                found = found.nan_to_num(0.0)
            for number, members in enumerate(_members(group.cpu(), groups)):
                matched = members[~found[0, members].isnan()]
                if not len(matched):
                    raise without_match(number, len(members), split[number])
                means = [exact_mean(part) for part in found[:, matched]]
                values[repeat, number] = torch.tensor(means, dtype=torch.float64)
        summary = _summary(values, ks, group_size, len(distinct) - groups * group_size, confidence)
        return replace(summary, unmatched=unmatched)

    def _rounds(
        self, group_of: Int[Tensor, "labels"], distinct: Int[Tensor, "labels"], groups: int, best: BestMatches | None
    ) -> Iterator[tuple[Begin, Int[Tensor, "own"], BestMatches | None]]:
        """What begins a pass in this process, over which queries, and their best matches if they are known.

        One round, in which all groups are searched where their items are; or some groups at a time, for which they are
        brought together, so that a process never holds more than a piece of the others' items.
        """
        own = torch.arange(len(self.query_labels)) if self.own is None else self.own
        count = self.processes.count
        if self.regroup is None or groups < ENOUGH_GROUPS * PIECES * count:
            yield self.begin, own, best
            return
        distinct = distinct.cpu()
        of_query = torch.searchsorted(distinct, self.query_labels.cpu())
        of_item = torch.searchsorted(distinct, self.gallery_labels.cpu())
        for piece in range(PIECES):
            first, last = (groups * end // PIECES for end in (piece, piece + 1))
            inside = (group_of >= first) & (group_of < last)
            owner = torch.where(inside, (group_of - first) * count // (last - first), -1)
            yield self.regroup((owner[of_query], owner[of_item]))


def check_unmatched(unmatched: str) -> None:
    """Refuse what is none of `Unmatched`.

    Raises:
        ValueError: with the choices.
    """
    if unmatched not in get_args(Unmatched):
        raise ValueError(
            f"grouped_recall: there is no unmatched={unmatched!r}. Pass 'exclude' to leave queries without a match out "
            "of the mean, or 'miss' to count them as misses."
        )


class GroupWithoutMatchError(ValueError):
    """No query of some group has a match."""


def without_match(number: int, queries: int, labels: Int[Tensor, "group_size"]) -> GroupWithoutMatchError:
    """The error that says so of the group of this number and these labels."""
    return GroupWithoutMatchError(
        f"grouped_recall: none of the {queries} queries of group {number} (labels {labels.tolist()}) has a match. Use a "
        f"larger group_size than {len(labels)}, or drop the labels that have one item only."
    )


def _members(group: Int[Tensor, "items"], groups: int) -> list[Int[Tensor, "members"]]:
    """For each group the indices of its items."""
    order = group.argsort(stable=True)
    bounds = torch.searchsorted(group[order], torch.arange(groups + 1))
    return [order[bounds[i] : bounds[i + 1]] for i in range(groups)]


def _summary(
    values: Float[Tensor, "repeats groups ks"], ks: Sequence[int], group_size: int, dropped: int, confidence: float
) -> GroupedRecall:
    repeats, groups, _ = values.shape
    if groups < 2:
        warnings.warn(
            f"Grouped recall over {groups} group of {group_size} labels has no interval: at least two groups are "
            f"needed. Use a smaller group_size.",
            stacklevel=3,
        )
    per_group = {k: values[:, :, position] for position, k in enumerate(ks)}
    return GroupedRecall(
        at={k: exact_mean(of_groups.flatten()) for k, of_groups in per_group.items()},
        intervals={k: over_splits(mean_interval(split, confidence) for split in per_group[k]) for k in ks},
        group_size=group_size,
        groups=groups,
        dropped_labels=dropped,
        repeats=repeats,
        per_group=per_group,
        confidence=confidence,
    )


def over_splits(intervals: Iterable[Interval]) -> Interval:
    """The mean of the intervals of several splits: the same items return in each, so that more splits add no certainty."""
    lows, highs = zip(*intervals, strict=True)
    if any(map(math.isnan, lows)):
        return UNKNOWN
    return Interval(math.fsum(lows) / len(lows), math.fsum(highs) / len(highs))
