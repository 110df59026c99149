"""`evaluate_multilabel`: metrics of items with several labels each, graded by the number of shared labels.

This is the evaluation of image hashing on sets such as NUS-WIDE: for mAP a candidate is relevant if it shares a label, and
for nDCG its grade is the number of labels it shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fewshot_callbacks.engine.options import Progress, computing
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.vectors import Similarity, Vectors
from fewshot_callbacks.functional._codes import signs
from fewshot_callbacks.functional._inputs import check_embeddings, exclusion_codes
from fewshot_callbacks.functional._tensors import as_tensor
from fewshot_callbacks.functional._torch_mode import default_mode
from fewshot_callbacks.functional.retrieval.oddities import zero_vectors
from fewshot_callbacks.functional.retrieval.query_metrics import query_metrics
from fewshot_callbacks.functional.retrieval.rank_metrics import Ties, depends_on_ties
from fewshot_callbacks.functional.retrieval.report import QueryMeans, notes_on, or_none
from fewshot_callbacks.functional.retrieval.settings import (
    RankOptions,
    RetrievalSettings,
    bytes_of,
    shows_settings,
)
from fewshot_callbacks.functional.statistics.class_means import exact_mean
from fewshot_callbacks.functional.statistics.intervals import Interval, clustered_mean_interval

Gain = Literal["exponential", "linear"]
"""Gain of nDCG for a grade: 2^grade - 1 (Burges et al., 2005), or the grade itself (Järvelin and Kekäläinen, 2002)."""

_CALL = "evaluate_multilabel"

# Scores, grades, gains and their sorted copies: 147 were measured, for 20,000 items that have one in ten of 20 labels.
BYTES_PER_PAIR = 150


@dataclass(frozen=True)
class MultilabelReport(QueryMeans):
    """The result of `evaluate_multilabel`. Means, in [0, 1], are over the queries that share a label with a candidate.

    Examples:
        >>> import torch
        >>> targets = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1], [0, 0, 1]])
        >>> codes = torch.tensor([[1, 1, 1, 1], [1, 1, 1, -1], [1, 1, -1, -1], [-1, -1, -1, -1]])
        >>> report = evaluate_multilabel(codes, targets, similarity="hamming", ndcg_k=(2,))
        >>> report.queries, report.labels, report.queries_without_match
        (4, 3, 0)
    """

    mean: dict[str, float]
    """metric of each query -> its mean over the queries: `mAP`, `map@r`, `r_precision`, `mrr`, `recall@1`, `ndcg@10`, ..."""
    intervals: dict[str, Interval]
    """metric -> interval of its mean, robust to the dependence of queries with the same labels"""
    queries: int
    """number of queries"""
    gallery: int
    """number of gallery items"""
    labels: int
    """number of labels, the columns of the targets"""
    queries_without_match: int
    """queries that share no label with any candidate: left out of every mean"""
    queries_with_ties: int
    """queries with a relevant item that ties with an irrelevant one: where the rule for ties decides"""
    similarity: Similarity
    ties: Ties
    ndcg_gain: Gain
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    per_query: dict[str, Float[Tensor, "queries"]] = field(compare=False, repr=False)
    """metric -> its value for each query; NaN for a query without a match"""
    seconds: float = field(compare=False)
    """duration of the evaluation, in seconds"""

    def metrics(self) -> dict[str, float]:
        """Return all values under the names with which they are logged, the primary metric first."""
        return dict(self.mean)

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, as in `RetrievalReport.messages`."""
        return self.notes

    def to_dict(self) -> dict[str, Any]:
        """Convert to numbers, strings, lists and dictionaries for JSON (NaN becomes None)."""
        return {
            "metrics": {name: or_none(value) for name, value in self.mean.items()},
            "intervals": {name: [or_none(end) for end in interval] for name, interval in self.intervals.items()},
            "queries": self.queries,
            "gallery": self.gallery,
            "labels": self.labels,
            "queries_without_match": self.queries_without_match,
            "queries_with_ties": self.queries_with_ties,
            "similarity": self.similarity,
            "ties": self.ties,
            "ndcg_gain": self.ndcg_gain,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


@shows_settings(RankOptions, ndcg_k=(10,))
@default_mode()
def evaluate_multilabel(
    embeddings: Any,
    targets: Any,
    gallery: Any = None,
    gallery_targets: Any = None,
    *,
    ndcg_gain: Gain = "exponential",
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    progress: Progress | None = None,
    **settings: Unpack[RankOptions],
) -> MultilabelReport:
    """Compute exact retrieval metrics of items with several labels each: mAP, MAP@R, Recall@K, graded nDCG@k, and others.

    It differs from `evaluate_retrieval` in relevance: a candidate is relevant if it shares a label with the query, and its
    grade is the number of shared labels. nDCG@k discounts by log2(rank + 1) and divides by the value of the best order of
    the query's own candidates (Järvelin and Kekäläinen, 2002). Candidates with equal scores share the mean of their gains,
    which is the expected value over their orders (McSherry and Najork, 2008).

    Args:
        embeddings: (queries, dim) vectors, or (queries, bits) codes of two values where `similarity="hamming"`.
        targets: (queries, labels) zeros and ones: entry (i, j) is 1 if item i has label j.
        gallery: (gallery, dim) items to retrieve from; by default the queries themselves, each without itself.
        gallery_targets: (gallery, labels) targets of the gallery items.
        ndcg_gain: Gain of a candidate: `exponential` is 2^grade - 1; `linear` is the grade itself, and is logged as
            `ndcg@10_linear`.
        query_ids: (queries,) identity of each query; with `gallery_ids`, a query's own copy in the gallery is not a
            candidate.
        gallery_ids: (gallery,) identity of each gallery item.
        query_groups: (queries,) group of each query, for instance the video of a frame: candidates of the query's own
            group are left out of its ranking, and count neither as hits nor as misses.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` is used for both.
        progress: Called with the number of pairs done and the number of all pairs.
        **settings: See `RetrievalSettings`.

    Returns:
        A frozen report. Its values lie in [0, 1]; larger is better. Queries without a relevant candidate are left out
        of every mean; the report counts them in `queries_without_match`.

    Raises:
        ValueError: If a shape, type or setting does not fit, embeddings hold NaN or Inf, a set is empty, or no query
            has a relevant candidate.

    Examples:
        >>> import torch
        >>> targets = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1], [0, 0, 1]])
        >>> codes = torch.tensor([[1, 1, 1, 1], [1, 1, 1, -1], [1, 1, -1, -1], [-1, -1, -1, -1]])
        >>> report = evaluate_multilabel(codes, targets, similarity="hamming", ndcg_k=(2,), map_k=((2, "found"),))
        >>> round(report.ndcg_at[2], 3), report.mean["map@2_found"], round(report.map_at_r, 3)
        (0.975, 1.0, 1.0)
    """
    started = time.perf_counter()
    checked = RetrievalSettings.checked(evaluate_multilabel, {"ndcg_k": (10,), **settings}, RankOptions)
    check_gain(_CALL, ndcg_gain)
    codes = {
        "query_ids": query_ids,
        "gallery_ids": gallery_ids,
        "query_groups": query_groups,
        "gallery_groups": gallery_groups,
    }
    sets = _Sets.of(embeddings, targets, gallery, gallery_targets, checked.similarity, codes)
    queries, items = sets.queries, sets.items
    values, tied, zeros = _measure(sets, checked, ndcg_gain, progress)
    matched = ~values["mAP"].isnan()
    if not bool(matched.any()):
        raise ValueError(_no_match(sets))
    without_match = int((~matched).sum())
    clusters = sets.own[matched].unique(dim=0, return_inverse=True)[1]
    notes = notes_on(
        queries=len(queries),
        without_match=without_match,
        tied=tied,
        zero_vectors=zeros,
        collapsed=bool((queries == queries[0]).all()) and bool((items == queries[0]).all()),
    )
    return MultilabelReport(
        mean={name: exact_mean(value[matched]) for name, value in values.items()},
        intervals={
            name: clustered_mean_interval(value[matched], clusters, checked.confidence)
            for name, value in values.items()
        },
        queries=len(queries),
        gallery=len(items),
        labels=sets.own.shape[1],
        queries_without_match=without_match,
        queries_with_ties=tied,
        similarity=checked.similarity,
        ties=checked.ties,
        ndcg_gain=ndcg_gain,
        notes=tuple(notes),
        per_query=values,
        seconds=time.perf_counter() - started,
    )


def _measure(
    sets: _Sets, settings: RetrievalSettings, ndcg_gain: Gain, progress: Progress | None
) -> tuple[dict[str, Float[Tensor, "queries"]], int, int]:
    """Compute the metrics of each query.

    Returns:
        The values by metric, the number of queries with ties, and the number of zero vectors.
    """
    queries, items = len(sets.queries), len(sets.items)
    metrics = multilabel_metrics(settings, ndcg_gain)
    tied, rows = 0, int(max(1, min(1024, bytes_of(settings.memory_mb) // (BYTES_PER_PAIR * items))))
    with computing() as threads:
        values = {name: torch.full((queries,), torch.nan, dtype=torch.float64) for name in metrics}
        vectors = Vectors(sets.queries, sets.items, settings.similarity, threads=threads)
        for block in _blocks(sets, vectors, rows):
            for name, metric in metrics.items():
                values[name][block.ranks.queries] = metric(block)
            tied += int(depends_on_ties(block.ranks).sum())
            if progress is not None:
                progress((int(block.ranks.queries[-1]) + 1) * items, queries * items)
        return values, tied, zero_vectors(vectors)


def check_gain(call: str, gain: str) -> None:
    """Refuse an unknown gain of nDCG, and name the known ones."""
    if gain not in get_args(Gain):
        raise ValueError(f"{call}: ndcg_gain={gain!r} is unknown. Choose one of {', '.join(get_args(Gain))}.")


def multilabel_metrics(settings: RetrievalSettings, ndcg_gain: Gain) -> dict[str, Callable[[_Block], Tensor]]:
    """Name the metrics of each query: those of `evaluate_retrieval`, with graded nDCG."""

    def of_ranks(block: _Block, metric: Callable[[RankBlock], Tensor]) -> Tensor:
        return metric(block.ranks)

    names = query_metrics(replace(settings, ndcg_k=()))
    metrics: dict[str, Callable[[_Block], Tensor]] = {
        name: partial(of_ranks, metric=metric) for name, metric in names.items()
    }
    suffix = "" if ndcg_gain == "exponential" else f"_{ndcg_gain}"
    for k in settings.ndcg_k:
        metrics[f"ndcg@{k}{suffix}"] = partial(_graded_ndcg, k=k, gain=ndcg_gain, ties=settings.ties)
    return metrics


@dataclass(frozen=True)
class _Sets:
    """Checked inputs."""

    queries: Shaped[Tensor, "queries dim"]
    # the very tensor of the queries with one set
    items: Shaped[Tensor, "gallery dim"]
    # targets of the queries
    own: Float[Tensor, "queries labels"]
    # targets of the gallery
    others: Float[Tensor, "gallery labels"]
    # pairs of ids: a candidate whose id equals the query's is excluded
    exclusions: tuple[tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]], ...]

    @classmethod
    def of(
        cls, embeddings: Any, targets: Any, gallery: Any, gallery_targets: Any, similarity: Similarity, codes: Any
    ) -> _Sets:
        """Check what `evaluate_multilabel` was given; `codes` are its ids and groups by the name of the argument."""
        if (gallery is None) != (gallery_targets is None):
            raise ValueError(
                f"{_CALL}: gallery and gallery_targets belong together. Pass both, or neither for leave-one-out."
            )
        same_set = gallery is None
        queries = _vectors(embeddings, similarity, "embeddings")
        items = queries if same_set else _vectors(gallery, similarity, "gallery")
        if queries.shape[1] != items.shape[1]:
            raise ValueError(
                f"{_CALL}: embeddings of {queries.shape[1]} components cannot be compared with a gallery of "
                f"{items.shape[1]}. Both must come from the same model."
            )
        if not same_set:
            common = torch.promote_types(queries.dtype, items.dtype)
            queries, items = queries.to(common), items.to(common)
        own = _targets(targets, len(queries), "targets")
        others = own if same_set else _targets(gallery_targets, len(items), "gallery_targets")
        if own.shape[1] != others.shape[1]:
            raise ValueError(
                f"{_CALL}: targets have {own.shape[1]} labels, gallery_targets {others.shape[1]}. Column j must be the "
                "same label in both."
            )
        checked = exclusion_codes(_CALL, same_set, len(queries), len(items), **codes)
        kinds = [(checked[f"query_{kind}"], checked[f"gallery_{kind}"]) for kind in ("ids", "groups")]
        itself = torch.arange(len(queries))
        exclusions = [(itself, itself)] if same_set else []
        exclusions += [(one, other) for one, other in kinds if one is not None and other is not None]
        return cls(queries, items, own, others, tuple(exclusions))


@dataclass(frozen=True)
class _Block:
    """Some queries and their scores with the whole gallery; a pair that is excluded has score -inf and grade 0."""

    ranks: RankBlock
    keys: Float[Tensor, "queries gallery"]
    # number of shared labels
    grades: Float[Tensor, "queries gallery"]


def _vectors(value: Any, similarity: Similarity, name: str) -> Tensor:
    vectors = as_tensor(value, name, _CALL).detach().cpu()
    if similarity != "hamming":
        check_embeddings(vectors, name, _CALL)
        return vectors if vectors.dtype == torch.float64 else vectors.float()
    return signs(vectors, name, _CALL)


def _targets(value: Any, items: int, name: str) -> Float[Tensor, "items labels"]:
    targets = as_tensor(value, name, _CALL).detach().cpu()
    if targets.ndim != 2 or len(targets) != items or not targets.shape[1]:
        raise ValueError(
            f"{_CALL}: {name} have shape {tuple(targets.shape)}; expected one row of zeros and ones for each of the {items} "
            "items, with one column for each label. If each item has a single label, use evaluate_retrieval."
        )
    if not bool(((targets == 0) | (targets == 1)).all()):
        raise ValueError(
            f"{_CALL}: {name} must hold only zeros and ones: 1 where the item has the label of the column."
        )
    return targets.float()


def _no_match(sets: _Sets) -> str:
    same_set = sets.items is sets.queries
    shared = int(((sets.own.sum(dim=0) > 0) & (sets.others.sum(dim=0) > same_set)).sum())
    where = "another item" if same_set else "an item of the gallery"
    fact = "are those of two items or more" if same_set else "occur in both sets"
    return (
        f"{_CALL}: none of the {len(sets.own)} queries shares a label with {where} that ids or groups do not exclude "
        f"({shared} of {sets.own.shape[1]} labels {fact}), so nothing can be retrieved. Check that column j of all targets "
        "is the same label, and that a group is not a whole class."
    )


def _blocks(sets: _Sets, vectors: Vectors, rows: int) -> Iterator[_Block]:
    items = len(sets.items)
    for index in torch.arange(len(sets.queries)).split(rows):
        pairs = index.repeat_interleave(items), torch.arange(items).repeat(len(index))
        keys = torch.from_numpy(vectors.exact(*(side.numpy() for side in pairs))).view(len(index), items)
        grades = (sets.own[index] @ sets.others.T).double()  # (queries, gallery)
        for of_query, of_item in sets.exclusions:
            excluded = of_query[index, None] == of_item
            keys.masked_fill_(excluded, -torch.inf)
            grades.masked_fill_(excluded, 0.0)
        yield _Block(_ranks(index, keys, grades > 0), keys, grades)


def _ranks(
    queries: Int[Tensor, "queries"], keys: Float[Tensor, "queries gallery"], relevant: Bool[Tensor, "queries gallery"]
) -> RankBlock:
    number = relevant.sum(dim=1)
    width = int(number.max())
    ordered = keys.masked_fill(~relevant, torch.inf).sort(dim=1).values
    thresholds = ordered[:, :width].contiguous()
    negatives = keys.masked_fill(relevant, -torch.inf).sort(dim=1).values
    reached = torch.searchsorted(negatives, thresholds)
    passed = torch.searchsorted(negatives, thresholds, right=True)
    return RankBlock.of_scores(queries, thresholds, keys.shape[1] - passed, passed - reached)


def _gains(grades: Float[Tensor, "queries gallery"], gain: Gain) -> Float[Tensor, "queries gallery"]:
    """Compute the gain of each candidate, times a factor of the query, which cancels in nDCG."""
    if gain == "linear":
        return grades
    # Scaled by 2^-largest grade of the query: 2^grade overflows beyond 1,023 shared labels. exp2 of a whole number is
    # exact, so that one rounding is left, the same as without the scale.
    most = grades.amax(dim=1, keepdim=True)
    return torch.exp2(grades - most) - torch.exp2(-most)


def _graded_ndcg(block: _Block, *, k: int, gain: Gain, ties: Ties) -> Float[Tensor, "queries"]:
    gains, keys = _gains(block.grades, gain), block.keys
    ideal = gains.sort(dim=1, descending=True).values
    if ties != "expected":  # inside a tie the best come first, or last
        order = gains.argsort(dim=1, descending=ties == "optimistic", stable=True)
        gains, keys = gains.gather(1, order), keys.gather(1, order)
    order = keys.argsort(dim=1, descending=True, stable=True)
    gains, keys = gains.gather(1, order), keys.gather(1, order)
    if ties == "expected":
        first = torch.nn.functional.pad(keys[:, 1:] != keys[:, :-1], (1, 0), value=True)
        group = first.cumsum(dim=1) - 1
        total = torch.zeros_like(gains).scatter_add_(1, group, gains)
        size = torch.zeros_like(gains).scatter_add_(1, group, torch.ones_like(gains))
        gains = (total / size.clamp(min=1)).gather(1, group)
    discount = torch.log2(torch.arange(2, min(k, gains.shape[1]) + 2, dtype=torch.float64))
    best = (ideal[:, :k] / discount).sum(dim=1)
    return torch.where(best > 0, (gains[:, :k] / discount).sum(dim=1) / best, torch.nan)
