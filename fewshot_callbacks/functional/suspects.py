"""`suspects`: items whose label disagrees with the labels of their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.options import Progress, computing, split
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, ItemSets, Share
from fewshot_callbacks.functional.neighbours import found_in_batches, positive_whole, without_candidates
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted

_CALL = "suspects"

# The neighbours of an item are often neighbours of each other, so k neighbours are weaker evidence than k independent
# ones. The log likelihood ratio is divided by this number. It hardly changes the order of the items (average precision
# changes by at most 0.01 on full sets), but it changes how many items are returned. For 1, 2 and 3, `python
# benchmarks/suspects.py --shares 0.05 --seeds 5` prints precision 0.66, 0.86, 0.92 and recall 1.00, 0.99, 0.99 on glyphs
# of the test split. With `--flips close`, it prints precision 0.61, 0.76, 0.79 and recall 0.68, 0.44, 0.28.
DEPENDENCE = 2.0
# Pseudo-votes per class, distributed as in the whole set, so that a class of two or three items has a likelihood.
PSEUDO_VOTES = 3.0
# Initial estimate of the share of wrong labels.
FIRST_RATE = 0.05
# Steps of EM, enough for the estimate to converge.
ITERATIONS = 50
# Pairs of a candidate class and a vote that are looked up at a time. For 12,000 items and memory_mb=16, 2**18 takes 28 MB
# and 2**15 takes 17 MB, in the same time. With fewer, only one item would fit if k is a few hundred.
LOOKUPS_AT_ONCE = 2**16
# Votes that are counted at a time.
VOTES_AT_ONCE = 2**17


@dataclass(frozen=True, eq=False)
class Suspects:
    """The result of `suspects`: items whose label may be wrong, the most suspicious first; `print` shows a table.

    Attributes:
        index: Index of each item among the embeddings.
        given: Given label of each item; if labels are strings, its index in `label_names`.
        suggested: The label that best explains the labels of the neighbours.
        log_odds: Log odds that the label is wrong, given the labels of the neighbours.
        probability: Probability that the label is wrong, in [0, 1]: the sigmoid of `log_odds`.
        neighbours: (items, k) indices of the neighbours, the nearest first; -1 if an item has fewer than k.
        votes: (items, k) labels of the neighbours; -1 if there is no neighbour.
        unlisted_ties: Number of items that tie with the last neighbour and do not vote, only because their index is
            higher.
        items_with_ties: Number of items in the whole set, suspicious or not, that have such ties. Their votes depend on
            the order of the data.
        noise_rate: Estimated share of wrong labels in the whole set.
        label_names: The string of each label, sorted; None if labels were integers.

    Examples:
        >>> import torch
        >>> labels = ["owl"] * 20 + ["heron"] * 20
        >>> generator = torch.Generator().manual_seed(0)
        >>> embeddings = torch.eye(2).repeat_interleave(20, dim=0) + 0.1 * torch.randn(40, 2, generator=generator)
        >>> labels[3] = "heron"
        >>> found = suspects(embeddings, labels, k=5)
        >>> print(found)
        1 item whose label may be wrong (estimated share of wrong labels: 2.50 %)
        item  given  suggested  probability
           3  heron        owl       0.9989
    """

    index: Int[Tensor, "items"]
    given: Int[Tensor, "items"]
    suggested: Int[Tensor, "items"]
    log_odds: Float[Tensor, "items"]
    probability: Float[Tensor, "items"]
    neighbours: Int[Tensor, "items k"]
    votes: Int[Tensor, "items k"]
    unlisted_ties: Int[Tensor, "items"]
    items_with_ties: int
    noise_rate: float
    label_names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """Return the number of suspicious items."""
        return len(self.index)

    def __str__(self) -> str:
        """Return a table of the most suspicious items, with the given and the suggested label."""
        lines = [
            f"{counted(len(self), 'item')} whose label may be wrong (estimated share of wrong labels: "
            f"{100 * self.noise_rate:.2f} %)"
        ]
        rows = []
        for row in range(min(len(self), SHOWN_ROWS)):
            item = str(int(self.index[row]))
            given = self._name(int(self.given[row]))
            suggested = self._name(int(self.suggested[row]))
            rows.append((item, given, suggested, f"{float(self.probability[row]):.4f}"))
        if rows:
            lines += table(("item", "given", "suggested", "probability"), rows, len(self))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _name(self, label: int) -> str:
        """Return a label as it is printed."""
        return str(label) if self.label_names is None else printable(self.label_names[label])


@default_mode()
def suspects(
    embeddings: Any,
    labels: Any | None = None,
    *,
    ids: Any | None = None,
    groups: Any | None = None,
    k: int = 10,
    similarity: Similarity = "cosine",
    min_probability: float = 0.5,
    memory_mb: float | None = None,
    progress: Progress | None = None,
    share: Share = EVERYTHING,
) -> Suspects:
    """Return the items whose label disagrees with the labels of their neighbours, by a likelihood ratio. *Collective*.

    Items of one class usually have neighbours of the same classes: their own class, and classes that it is confused with.
    The function compares the labels of an item's k nearest neighbours with the usual neighbour labels of its own class
    (without the item itself), and with the usual neighbour labels of each class among its neighbours. The statistic is
    the log odds of a wrong label (Bayes): half the log likelihood ratio of the two classes, because neighbours are not
    independent, plus the log ratio of the class sizes, plus the prior log odds of a wrong label. The share of wrong labels
    is estimated as the mean probability (EM). So an item is not a suspect if its neighbours have a class that is often
    confused with its own class. It is a suspect if its neighbours have a class that is never confused with its own
    class, even if the neighbours disagree with each other.

    Exactly k neighbours vote. If several items tie for the last place, the items with the lowest indices vote. (In
    `knn_accuracy`, all of them share the votes.) If many scores are equal, as with binary codes or a collapsed embedding,
    the result depends on the order of the items. `unlisted_ties` and `items_with_ties` of the result count these ties.

    A likelihood ratio is the most powerful test between two labels (Neyman and Pearson 1933). The likelihood is
    multinomial with a confusion table (Dawid and Skene 1979). Zhu, Dong and Liu, "Detecting corrupted labels without
    training a model to predict", ICML 2022, use the labels of neighbours as evidence, too.
    docs/evaluate/data_quality.md shows how many wrong labels this function and cleanlab find. An embedding that was
    trained on wrong labels may hide them.

    Args:
        embeddings: (items, dim) finite floating-point rows. For `hamming`, codes of -1 and +1, or of 0 and 1. `Shards`
            bring their own labels, ids and groups.
        labels: (items,) integers or strings, of at least two classes. Two items per class are enough. The only item of a
            class can be a suspect, too, but there is little evidence.
        ids: (items,) id of each item, if some items are repeated. Only the first item of each id counts.
        groups: (items,) group of each item, such as its video. Items of its own group are not neighbours of an item.
        k: Number of neighbours that vote, at least 1. A larger k averages over more labels, and some of these are wrong.
            As a rule, k should not exceed the number of items per class.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`.
        min_probability: An item is returned if the probability that its label is wrong is at least this number, in
            [0, 1]. 0 returns every item that has a neighbour of another class.
        memory_mb: Memory limit of the search in MB, in addition to the embeddings; None is 512. A neighbour takes 4 bytes.
            If all neighbours together take more than half of the limit, they exceed it.
        progress: Function of (pairs done, all pairs).
        share: The part of the items that this process has, if several processes make the call together. Every process
            returns the suspects of the whole set.

    Returns:
        A frozen result on the CPU. Its tensors are empty if there are no suspects.

    Raises:
        ValueError: If shapes or types do not fit, embeddings contain NaN or Inf, k < 1, `min_probability` is outside
            [0, 1], all labels are equal, groups exclude all candidates, or the processes pass different arguments. Every
            process raises the same error.

    Examples:
        >>> import torch
        >>> labels = ["owl"] * 20 + ["heron"] * 20
        >>> generator = torch.Generator().manual_seed(0)
        >>> embeddings = torch.eye(2).repeat_interleave(20, dim=0) + 0.1 * torch.randn(40, 2, generator=generator)
        >>> labels[3] = "heron"
        >>> found = suspects(embeddings, labels, k=5)
        >>> found.index.tolist(), [found.label_names[label] for label in found.suggested]
        ([3], ['owl'])
    """
    with share.processes.together():
        is_number = isinstance(min_probability, int | float) and not isinstance(min_probability, bool)
        if not (is_number and 0 <= min_probability <= 1):
            raise InputError(
                f"{_CALL}: min_probability={min_probability!r} is not a probability. Pass a number from 0 to 1, such as 0.5."
            )
        k = positive_whole(_CALL, "k", k, "Pass the number of neighbours, such as 10.")
        memory = memory_bytes(_CALL, memory_mb)
        arguments = {"k": k, "similarity": similarity, "min_probability": min_probability, "memory_mb": memory_mb}
        share.refuse_other_settings(_CALL, arguments)
        columns = {"query_labels": labels, "query_ids": ids, "query_groups": groups}
        sets = read_items(_CALL, embeddings, None, columns, share=share, similarity=similarity, memory=memory)
        items = sets.queries
        distinct, classes = items.labels.unique(return_inverse=True)
        if len(distinct) < 2:
            raise InputError(
                f"{_CALL}: all labels are the same ({counted(items.length, 'item')}), so no neighbour can disagree with a "
                "label. Pass labels of at least two classes."
            )
        found = _search(sets, k, progress)
        ratio, suggested = _odds_of_all(sets, classes, found, len(distinct))
        log_odds, rate = _with_prior(ratio, len(distinct))
        probability = log_odds.sigmoid()
        suspicious = ((probability >= min_probability) & log_odds.isfinite()).nonzero().flatten()
        suspicious = suspicious[log_odds[suspicious].argsort(descending=True, stable=True)]
        neighbours, unlisted_ties = found.of(suspicious, sets)
        [items_with_ties] = sets.processes.summed(np.array([(found.unlisted_ties > 0).sum()])).tolist()
    votes = torch.where(neighbours >= 0, classes[neighbours], -1)
    label_of_class = torch.cat([distinct, distinct.new_tensor([-1])])  # class -1 (no vote) reads the last entry
    return Suspects(
        index=items.to_origins(suspicious),
        given=items.labels[suspicious],
        suggested=distinct[suggested[suspicious]],
        log_odds=log_odds[suspicious],
        probability=probability[suspicious],
        neighbours=items.to_origins(neighbours),
        votes=label_of_class[votes],
        unlisted_ties=unlisted_ties,
        items_with_ties=items_with_ties,
        noise_rate=rate,
        label_names=sets.label_names,
    )


@dataclass(frozen=True, eq=False)
class _FoundPlaces:
    """The neighbours of the items of this process, 4 bytes each."""

    places: Int[np.ndarray, "rows k"]
    """place of each neighbour, the nearest first; -1 if there are fewer than k"""
    unlisted_ties: Int[np.ndarray, "rows"]

    def votes(self, rows: slice, classes: Int[Tensor, "items"]) -> Int[Tensor, "block k"]:
        """Return the classes of the neighbours of these rows; -1 if there is no neighbour."""
        places = torch.from_numpy(self.places[rows]).long()
        return torch.where(places >= 0, classes[places], -1)

    def of(
        self, chosen: Int[Tensor, "chosen"], sets: ItemSets
    ) -> tuple[Int[Tensor, "chosen k"], Int[Tensor, "chosen"]]:
        """Return the places of the neighbours, and the unlisted ties, of items of all processes. *Collective*."""
        row_of_place = torch.full((sets.queries.length,), -1)
        row_of_place[sets.queries.places] = torch.arange(len(self.places))
        rows = row_of_place[chosen]
        is_own = rows >= 0
        own_rows = rows[is_own].numpy()
        columns = np.column_stack([self.places[own_rows], self.unlisted_ties[own_rows]]).T
        of_chosen = sets.processes.placed(
            torch.from_numpy(columns.astype(np.int64)), is_own.nonzero().flatten(), len(chosen)
        ).T
        return of_chosen[:, :-1], of_chosen[:, -1]


def _search(sets: ItemSets, k: int, progress: Progress | None) -> _FoundPlaces:
    """Return the neighbours of the items of this process; they count towards the memory, up to half of it. *Collective*."""
    rules = sets.rules()
    rows = len(rules.self_match)
    found = _FoundPlaces(np.empty((rows, k), np.int32), np.empty(rows, np.int64))
    largest_bytes = sets.processes.largest([float(found.places.nbytes)])[0]
    memory = max(sets.memory / 2, sets.memory - largest_bytes)
    with computing() as threads:
        vectors = sets.vectors(threads)
        for batch, of_batch in found_in_batches(vectors, rules, np.arange(rows), k, memory, progress=progress):
            found.places[batch] = of_batch.items
            found.unlisted_ties[batch] = of_batch.unlisted_ties
            del of_batch  # frees the memory before the next search
    if not sets.processes.largest([float((found.places >= 0).any())])[0]:
        raise without_candidates(_CALL, sets)
    return found


def _odds_of_all(
    sets: ItemSets, classes: Int[Tensor, "items"], found: _FoundPlaces, number: int
) -> tuple[Float[Tensor, "items"], Int[Tensor, "items"]]:
    """Return the log odds, without a prior, of the other classes against the given one, and the likeliest other class.

    *Collective*.

    `classes` are numbered from 0. `found` has the neighbours of the items of this process.
    """
    rows, k = found.places.shape
    counts = _VoteCounts.of(sets, classes, found, number)
    classes_of_rows = classes[sets.queries.places]
    log_odds = torch.full((rows,), -torch.inf, dtype=torch.float64)
    suggested = classes_of_rows.clone()
    for block in split(rows, max(1, LOOKUPS_AT_ONCE // (k * k))):
        votes = found.votes(block, classes)
        odds = _odds_of_votes(counts, classes_of_rows[block], votes)  # (block, k)
        log_odds[block] = odds.logsumexp(dim=1)
        likeliest = votes.gather(1, odds.argmax(dim=1, keepdim=True))[:, 0]
        suggested[block] = torch.where(odds.isfinite().any(dim=1), likeliest, classes_of_rows[block])
    items = sets.queries
    return items.of_all(sets.processes, log_odds), items.of_all(sets.processes, suggested)


@dataclass(frozen=True, eq=False)
class _VoteCounts:
    """Numbers of votes by the class of the item and the class of its neighbour, as a sparse table."""

    number: int
    """number of classes"""
    codes: Int[Tensor, "entries"]
    """class of the item times `number`, plus class of the neighbour; ascending"""
    counts: Int[Tensor, "entries"]
    totals: Int[Tensor, "classes"]
    """number of votes for the items of each class"""
    log_sizes: Float[Tensor, "classes"]
    """log of the number of items per class"""
    shares: Float[Tensor, "classes"]
    """share of each class among all votes, with one extra vote per class"""

    @classmethod
    def of(cls, sets: ItemSets, classes: Int[Tensor, "items"], found: _FoundPlaces, number: int) -> _VoteCounts:
        """Return the counts of the votes of all processes. *Collective*."""
        processes = sets.processes
        classes_of_rows = classes[sets.queries.places]
        codes, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for block in split(len(found.places), max(1, VOTES_AT_ONCE // found.places.shape[1])):
            votes = found.votes(block, classes)
            of_block = (classes_of_rows[block, None] * number + votes)[votes >= 0].numpy()
            codes, counts = _summed([(codes, counts), np.unique(of_block, return_counts=True)])
        codes, counts = _summed(processes.gather((codes, counts)))
        of_items, of_votes = np.divmod(codes, number)
        totals, of_class = (np.bincount(column, counts, number) for column in (of_items, of_votes))
        log_sizes = torch.bincount(classes, minlength=number).double().log()
        shares = torch.from_numpy((of_class + 1) / (counts.sum() + number))
        return cls(
            number,
            torch.from_numpy(codes),
            torch.from_numpy(counts),
            torch.from_numpy(totals).long(),
            log_sizes,
            shares,
        )

    def of_pairs(self, classes: Int[Tensor, "*#pairs"], votes: Int[Tensor, "*#pairs"]) -> Int[Tensor, "..."]:
        """Return, for each pair, how often neighbours of items in `classes` are in the class `votes`."""
        codes = classes * self.number + votes
        positions = torch.searchsorted(self.codes, codes).clamp(max=len(self.codes) - 1)
        return torch.where(self.codes[positions] == codes, self.counts[positions], 0)


def _summed(
    tables: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ascending codes of several tables, and the total count of each code."""
    codes, number = np.unique(np.concatenate([codes for codes, _ in tables]), return_inverse=True)
    counts = np.zeros(len(codes), np.int64)
    np.add.at(counts, number, np.concatenate([counts for _, counts in tables]))
    return codes, counts


def _odds_of_votes(
    counts: _VoteCounts, classes: Int[Tensor, "items"], votes: Int[Tensor, "items k"]
) -> Float[Tensor, "items k"]:
    """Return the log odds of the class of each vote against the class of the item, without a prior.

    The odds of a class are at its first vote. They are -inf at later votes for the class, and at votes for the class of
    the item.

    `classes` are of the items of a batch. `votes` are the classes of the neighbours; -1 if there is none.
    """
    is_vote = votes >= 0
    candidates = votes.clamp(min=0)
    pseudo_votes = PSEUDO_VOTES * counts.shares[candidates]  # (items, k)
    are_equal = votes[:, :, None] == votes[:, None, :]  # (items, k, k)

    # Likelihood of the votes under the class of the item, estimated from the other items of this class.
    class_votes = counts.of_pairs(classes[:, None], votes) - are_equal.sum(dim=2)
    total = counts.totals[classes] - is_vote.sum(dim=1) + PSEUDO_VOTES
    shares = (class_votes.clamp(min=0) + pseudo_votes) / total[:, None]
    own_likelihood = torch.where(is_vote, shares.log(), 0.0).sum(dim=1)

    # Likelihood of the votes under the class of each vote.
    class_votes = counts.of_pairs(candidates[:, :, None], votes[:, None, :])  # (items, candidates, votes)
    total = counts.totals[candidates] + PSEUDO_VOTES
    shares = (class_votes + pseudo_votes[:, None]) / total[:, :, None]
    likelihoods = torch.where(is_vote[:, None, :], shares.log(), 0.0).sum(dim=2)

    odds = likelihoods / DEPENDENCE
    odds += counts.log_sizes[candidates] - (own_likelihood / DEPENDENCE + counts.log_sizes[classes])[:, None]
    is_first = ~are_equal.tril(-1).any(dim=2)
    is_other = votes != classes[:, None]
    return torch.where(is_vote & is_first & is_other, odds, -torch.inf)


def _with_prior(ratio: Float[Tensor, "items"], number: int) -> tuple[Float[Tensor, "items"], float]:
    """Return the log odds with the prior odds of a wrong label, and the estimated rate of wrong labels (EM).

    `ratio` are log odds without a prior. The prior odds are divided among the `number` - 1 other classes.
    """
    rate = torch.tensor(FIRST_RATE, dtype=torch.float64)
    for _ in range(ITERATIONS):
        log_odds = ratio + (rate / (1 - rate) / (number - 1)).log()
        rate = log_odds.sigmoid().mean().clamp(1 / (len(ratio) + 1), 0.5)
    return log_odds, float(rate)
