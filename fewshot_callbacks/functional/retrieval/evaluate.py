"""`evaluate_retrieval`: every metric of a set of embeddings from one pass over its pairs."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.budget import SHARE_OF_KEYS
from fewshot_callbacks.engine.candidates import find_candidates
from fewshot_callbacks.engine.codes.hamming_pass import HammingCounts, HammingPass
from fewshot_callbacks.engine.exchange import ShardIndex
from fewshot_callbacks.engine.open_pass import passes, regrouping, scores_of
from fewshot_callbacks.engine.options import Progress
from fewshot_callbacks.engine.precision import full_precision
from fewshot_callbacks.engine.ranking_pass import RankingPass
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.scores.products import ScoreTiles, Similarity
from fewshot_callbacks.engine.threads import threads_for
from fewshot_callbacks.functional.retrieval.grouped_recall import (
    GroupedRecall,
    GroupedSearch,
    GroupWithoutMatchError,
    without_match,
)
from fewshot_callbacks.functional.retrieval.inputs import RetrievalInputs, collect_inputs
from fewshot_callbacks.functional.retrieval.label_groups import (
    Splits,
    Unmatched,
    checked_groups,
    given_split,
    random_splits,
)
from fewshot_callbacks.functional.retrieval.operating_points import PooledCounts, PooledRequest, decide
from fewshot_callbacks.functional.retrieval.prototype_accuracy import prototype_accuracy as nearest_prototype
from fewshot_callbacks.functional.retrieval.rank_metrics import Divisor, Ties, depends_on_ties
from fewshot_callbacks.functional.retrieval.report import RetrievalReport, notes_on
from fewshot_callbacks.functional.retrieval.settings import DEFAULT_MEMORY_MB, RetrievalSettings, compute_device
from fewshot_callbacks.functional.statistics.class_means import class_means, exact_mean, macro_mean
from fewshot_callbacks.functional.statistics.intervals import (
    clustered_mean_interval,
    macro_mean_interval,
    normal_quantile,
)

LONGEST_RATIO = 1000.0
"""From so many times the median length on, a note names the longest embedding."""

_CALL = "evaluate_retrieval"
_OF_TWO_SETS_OR_PROCESSES = (
    "query_ids", "gallery_ids", "gallery_groups", "processes", "query_places", "gallery_places",
)  # fmt: skip


def evaluate_retrieval(
    embeddings: Any,
    labels: Any,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    similarity: Similarity = "cosine",
    recall_k: int | Sequence[int] = (1, 5, 10),
    ir_recall_k: int | Sequence[int] = (),
    map_k: int | Sequence[int | tuple[int, Divisor]] = (),
    precision_k: int | Sequence[int] = (),
    ndcg_k: int | Sequence[int] = (),
    macro: bool = False,
    per_class: bool = False,
    precisions: float | Sequence[float] = (0.95,),
    threshold: float | None = None,
    threshold_bounds: tuple[float, float] | None = None,
    false_match_rates: float | Sequence[float] = (),
    equal_error_rate: bool = False,
    auc_pr: bool = False,
    prototype_accuracy: bool = False,
    grouped_k: int | Sequence[int] = (1,),
    group_size: int | None = 10,
    group_seed: int = 0,
    label_groups: Sequence[Sequence[int | str]] | None = None,
    grouped_unmatched: Unmatched = "exclude",
    ties: Ties = "expected",
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    max_queries: int | None = None,
    query_seed: int = 0,
    confidence: float = 0.95,
    memory_mb: float | None = DEFAULT_MEMORY_MB,
    device: str = "cpu",
    device_memory_mb: float | None = None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
    query_places: Any | None = None,
    gallery_places: Any | None = None,
) -> RetrievalReport:
    """Exact retrieval metrics over all pairs of queries and gallery, in bounded memory.

    With one set, each item is a query against all others (leave-one-out; the item itself is never a candidate). With
    two sets, the queries search the gallery. Relevant is what has the query's label. Nothing is truncated and no matrix
    of all similarities is made; the result does not depend on the order of the data, the number of threads or the
    memory budget.

    Args:
        embeddings: (queries, dim) floating-point tensor, array or list of rows, finite.
        labels: (queries,) integers of any value, or words: a tensor, array, list or column of a table. Ids and groups are
            given in the same forms. Of words the report keeps the code book, `label_names`, and values of classes by word.
        gallery: (gallery, dim) items to retrieve from; by default the queries themselves, leave-one-out.
        gallery_labels: (gallery,) their labels. An item whose label no query has is a distractor: it takes ranks.
        similarity: `"cosine"`, `"dot"` or `"euclidean"` (minus the distance); `"hamming"` for binary codes, minus the number
            of bits that differ: `embeddings` then hold -1 and +1, or 0 and 1, in any dtype, and are packed to bits.
        recall_k: the K of Recall@K, the share of queries with a relevant item among the first K; here and below one value or
            several.
        ir_recall_k: the k of information retrieval's Recall@k, the share of a query's relevant items that are among the
            first k. Logged as `ir_recall@10`. It is small where a query has many more than k relevant items.
        map_k: AP@k, each as k or as (k, divisor): `"min"` divides by min(R, k), `"relevant"` by R, the number of relevant
            items, `"found"` by those among the first k (the hashing papers' choice). Logged as `map@10_min`.
        precision_k: the K of Precision@K, the share of relevant items among the first K.
        ndcg_k: the K of nDCG@K, with relevance 0 or 1.
        macro: also the mean over classes of each metric of a query (`macro_mAP`), so that large classes do not rule.
        per_class: also each of these metrics for each class.
        precisions: for each, the pooled recall at the smallest threshold with at least this precision (R@P), compared as
            the rounded quotient of two counts.
        threshold: score from which a pair is accepted, for pooled precision, recall and F1; by default the one of the
            best F1.
        threshold_bounds: smallest and largest threshold that may be chosen for recall at fixed precision; None sets no
            bounds. A definition that searches thresholds in [0, 1] is `threshold_bounds=(0, 1)`.
        false_match_rates: for each, the pooled share of relevant pairs that are rejected where at most this share of
            the others is accepted (FNMR at FMR).
        equal_error_rate: also where these two shares are the same. May take a second look at all pairs.
        auc_pr: also the area under the pooled precision-recall curve, exactly, for which all pairs are looked at twice.
            Bounds of it are in the report without that.
        prototype_accuracy: also the share of queries whose class has the most similar mean embedding; a query is left
            out of its own class's mean.
        grouped_k: the K of Grouped Recall@K.
        group_size: labels in a group for Grouped Recall; None leaves it out.
        group_seed: of the split into groups, the same split for the same labels.
        label_groups: the labels of each group for Grouped Recall, such as `[[0, 1, 2], [3, 4, 5]]`, in place of random ones;
            see `groups` of `grouped_recall`, also for what the interval then says.
        grouped_unmatched: what a query without a match in its group counts for in Grouped Recall: `"exclude"` leaves it
            out, `"miss"` counts it as a miss, as the metric's paper does. All other means leave it out.
        ties: what equal scores count as: `"expected"` (mean over all orders), `"optimistic"` or `"pessimistic"`.
        query_ids: (queries,) identity of each query; with `gallery_ids`, the same item in both sets is no candidate.
        gallery_ids: (gallery,) identity of each gallery item.
        query_groups: (queries,) for instance the video of each frame: candidates of the query's own group are neither
            hit nor miss.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` serves for both.
        max_queries: evaluate at most so many queries, drawn from all classes in proportion to their size, against the
            whole gallery. The report then says that it is an estimate; the intervals say how good it is.
        query_seed: of that draw, which depends on the order of the queries.
        confidence: of the intervals.
        memory_mb: bound on the memory used beyond the embeddings, in MB; None is the default. Where it is smaller than what
            vectors of so many queries and items are estimated to need, `memory_note` of the report says so. Binary codes
            take what their number and the largest class ask for, without a note.
        device: where the scores are made: `"cpu"`, `"cuda"` (or one of several), `"auto"`. The results are the same.
            The embeddings stay where they are and come over in slices.
        device_memory_mb: bound on the memory used on that device; by default half of what is free there.
        progress: called with the pairs done and the pairs to do.
        processes: those that call this together, each with a part of the sets (perhaps an empty one). All of them get the
            report of the whole, the same as that of one process. The parts of the gallery travel in pieces, so that none
            ever holds all. See `metrics.TorchProcesses`.
        query_places: (queries,) place of each query in the whole set, for the order of `per_query` and of draws; by default
            the queries of one process follow those of the one before.
        gallery_places: (gallery,) the same of the gallery.

    Returns:
        A frozen report. Queries without a match are left out of every mean and counted in it.

    Raises:
        ValueError: if shapes or types do not fit, embeddings hold NaN or Inf, a set is empty, or no query has a match.

    Examples:
        >>> import torch
        >>> labels = torch.arange(100) % 20
        >>> embeddings = torch.nn.functional.one_hot(labels).float() + 0.05 * torch.randn(100, 20)
        >>> report = evaluate_retrieval(embeddings, labels)
        >>> 0.9 < report.mAP <= 1.0, report.queries_without_match
        (True, 0)
    """
    started = time.perf_counter()
    settings = RetrievalSettings.of(
        similarity=similarity,
        recall_k=recall_k,
        ir_recall_k=ir_recall_k,
        map_k=map_k,
        precision_k=precision_k,
        ndcg_k=ndcg_k,
        macro=macro,
        precisions=precisions,
        threshold=threshold,
        threshold_bounds=threshold_bounds,
        false_match_rates=false_match_rates,
        equal_error_rate=equal_error_rate,
        auc_pr=auc_pr,
        prototype_accuracy=prototype_accuracy,
        grouped_k=grouped_k,
        group_size=group_size,
        group_seed=group_seed,
        label_groups=label_groups,
        grouped_unmatched=grouped_unmatched,
        ties=ties,
        max_queries=max_queries,
        query_seed=query_seed,
        memory_mb=memory_mb,
        device=device,
    )
    with processes.together():
        settings.check(_CALL)
        normal_quantile(confidence)  # refuses what is no probability, before the work is done
        tensors = {
            "gallery": gallery,
            "query_ids": query_ids,
            "gallery_ids": gallery_ids,
            "query_groups": query_groups,
            "gallery_groups": gallery_groups,
        }
        given = {name: "left out" if tensor is None else "given" for name, tensor in tensors.items()}
        _check_calls(processes, settings.arguments() | given)
        sets = collect_inputs(
            _CALL,
            processes,
            embeddings,
            labels,
            gallery,
            gallery_labels,
            query_ids=query_ids,
            gallery_ids=gallery_ids,
            query_groups=query_groups,
            gallery_groups=gallery_groups,
            query_places=query_places,
            gallery_places=gallery_places,
            as_codes=similarity == "hamming",
        )
        request = PooledRequest(
            settings.precisions,
            settings.threshold_bounds or (-math.inf, math.inf),
            () if settings.threshold is None else (settings.threshold,),
            settings.false_match_rates,
            equal_error_rate,
            auc_pr,
        )
        where = compute_device(_CALL, "cpu" if similarity == "hamming" else device)
        budget = memory_bytes(where, settings.memory_mb, device_memory_mb)
        report = _evaluated(sets, settings, request, processes, where, budget, confidence, per_class, progress)
        seconds = processes.largest([time.perf_counter() - started])[0]
    return replace(report, seconds=seconds)


def check_evaluation_settings(call: str, given: Mapping[str, Any]) -> None:
    """Refuse what is no setting of an evaluation of one set, and settings that no data could make sense of.

    Args:
        call: who was given them, for messages.
        given: keyword arguments of `evaluate_retrieval`.

    Raises:
        ValueError: with the names that are near, or what to pass instead.
    """
    known = [
        name
        for name, parameter in signature(evaluate_retrieval).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in _OF_TWO_SETS_OR_PROCESSES
    ]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"Did you mean {near[0]!r}?" if near else f"The settings are {', '.join(known)}."
            raise ValueError(f"{call}: there is no setting {name!r}. {fix}")
    of_settings = {field.name for field in fields(RetrievalSettings)}
    RetrievalSettings.of(**{name: value for name, value in given.items() if name in of_settings}).check(call)
    normal_quantile(given.get("confidence", 0.95))


def _check_calls(processes: Processes, arguments: dict[str, Any]) -> None:
    """Refuse processes that were called with different arguments; only the device may be another one."""
    own = {name: str(value) for name, value in arguments.items() if name != "device"}
    calls = processes.gather(own)
    for rank, call in enumerate(calls):
        for name, value in calls[0].items():
            if call[name] != value:
                raise ValueError(
                    f"{_CALL}: {name} is {value} in process 0, {call[name]} in process {rank}. Call it in the same way in "
                    "every process; one that holds no item passes empty tensors."
                )


def _evaluated(
    sets: RetrievalInputs,
    settings: RetrievalSettings,
    request: PooledRequest,
    processes: Processes,
    where: torch.device,
    budget: int,
    confidence: float,
    per_class: bool,
    progress: Progress | None,
) -> RetrievalReport:
    """The report, the same in every process."""
    similarity, same_set = settings.similarity, sets.same_set
    query_labels, item_labels, codes = sets.query_labels, sets.gallery_labels, sets.codes
    any_code = any(code is not None for code in codes.values())
    drawn = settings.max_queries is not None and settings.max_queries < len(query_labels)
    chosen = _drawn(query_labels, settings.max_queries or 0, settings.query_seed) if drawn else None
    asked, share, asked_labels, asked_codes = sets.queries, sets.share, query_labels, codes
    if chosen is not None:
        own = torch.arange(len(query_labels)) if share is None else share.queries
        here = torch.isin(own, chosen)
        asked, asked_labels = asked[here], query_labels[chosen]
        if share is None:  # in their order
            asked = sets.queries[chosen]
        else:
            share = ShardIndex(torch.searchsorted(chosen, own[here]), share.gallery)
        asked_codes = {
            name: code[chosen] if code is not None and name.startswith("query") else code
            for name, code in codes.items()
        }

    with full_precision(), threads_for(where):
        candidates = find_candidates(
            asked_labels.to(where),
            item_labels.to(where),
            same_set=same_set and chosen is None,
            query_place=chosen.to(where) if same_set and chosen is not None else None,
            **{name: None if code is None else code.to(where) for name, code in asked_codes.items()},
        )
        scores = scores_of(asked, sets.gallery, similarity, where, processes)
        begin = passes(scores, budget, processes=processes, share=share, progress=progress)
        walk = begin(candidates, None)
        per_query = _PerQuery(len(asked), settings)
        look = _observed(walk, request, per_query)
        if isinstance(asked, Tensor) and isinstance(sets.gallery, Tensor) and settings.prototype_accuracy:
            per_query.values["prototype_accuracy"] = _prototype_accuracy(
                sets, asked, asked_labels, share, settings, processes, alone=chosen is None
            )
        if share is not None:
            per_query.gather(processes, share.queries, len(asked_labels))
        matched = per_query.relevant > 0
        if not bool(matched.any()):
            raise ValueError(_no_match(len(asked_labels), asked_labels, item_labels, same_set, any_code=any_code))
        pooled = decide(look)
        if isinstance(walk, RankingPass):
            walk.release()
        notes = _notes(walk, per_query, matched, processes)
        memory_note = _memory_note(walk, processes, budget)
        if chosen is not None:
            notes.insert(
                0,
                f"An estimate: {len(chosen):,} of {len(query_labels):,} queries were drawn (seed {settings.query_seed}); "
                "the intervals say how good it is. Grouped Recall is of all queries.",
            )
        grouped = _grouped(notes, sets, settings, confidence, processes, walk if chosen is None else None)
    present = {name: ~values.isnan() for name, values in per_query.values.items()}
    intervals = {
        name: clustered_mean_interval(values[present[name]], asked_labels[present[name]], confidence)
        for name, values in per_query.values.items()
    }
    by_macro = {name: macro_mean(values, asked_labels) for name, values in per_query.values.items() if settings.macro}
    intervals |= {
        f"macro_{name}": macro_mean_interval(per_query.values[name], asked_labels, confidence) for name in by_macro
    }
    by_class = {
        name: _by_class(values, asked_labels, sets.label_names)
        for name, values in per_query.values.items()
        if per_class
    }
    if grouped is not None:
        intervals |= {f"grouped_recall@{k}": interval for k, interval in grouped.intervals.items()}
    return RetrievalReport(
        mean={name: exact_mean(values[present[name]]) for name, values in per_query.values.items()},
        macro=by_macro,
        per_class=by_class,
        decision=pooled.best_f1 if settings.threshold is None else pooled.at_threshold[settings.threshold],
        at_precision=pooled.at_precision,
        at_false_match_rate=pooled.at_false_match_rate,
        equal_error_rate=pooled.equal_error_rate,
        auc_pr=pooled.average_precision,
        curve=pooled.curve,
        grouped=grouped,
        intervals=intervals,
        queries=len(asked_labels),
        gallery=len(item_labels),
        classes=len(query_labels.unique()),
        queries_without_match=int((~matched).sum()),
        queries_with_ties=int(per_query.tied.sum()),
        is_estimate=chosen is not None,
        has_exact_auc_pr=settings.auc_pr,
        similarity=similarity,
        ties=settings.ties,
        notes=tuple(notes),
        memory_note=memory_note,
        per_query=per_query.values,
        query_labels=asked_labels,
        label_names=sets.label_names,
        seconds=math.nan,
    )


def _observed(
    walk: RankingPass | HammingPass, request: PooledRequest, per_query: _PerQuery
) -> PooledCounts | HammingCounts:
    """Run a pass; what it tells of each query, and what of all pairs."""
    if isinstance(walk, HammingPass):
        for ranks in walk.run():
            per_query.add(ranks)
        return HammingCounts(walk, request)
    look = PooledCounts(walk, request, max(1000, int(walk.free_bytes * SHARE_OF_KEYS / 8)))
    for ranks in walk.run(look):
        per_query.add(ranks)
    look.reduce_over_processes()
    return look


def _grouped(
    notes: list[str],
    sets: RetrievalInputs,
    settings: RetrievalSettings,
    confidence: float,
    processes: Processes,
    walk: RankingPass | HammingPass | None,
) -> GroupedRecall | None:
    """Grouped Recall, or a note on why there is none: the other metrics stand without it.

    Args:
        notes: what the report will say.
        sets: queries and gallery.
        settings: of the evaluation.
        confidence: of the interval.
        processes: who else holds a part of them.
        walk: a pass over all these pairs, of which much can be used again.
    """
    splits = _splits(notes, sets, settings)
    if splits is None:
        return None
    memory = int(settings.memory_mb * 10**6)
    if walk is not None and bool(torch.isin(sets.gallery_labels, sets.query_labels).all()):
        scores = (walk.queries, walk.gallery) if isinstance(walk, HammingPass) else walk.scores
        precision = None if isinstance(walk, HammingPass) else walk.precision
        begin = passes(scores, walk.memory_bytes, precision=precision, processes=processes, share=sets.share)
        device, best, regroup = walk.candidates.query_order.device, walk.best_matches(), None
        if sets.share is not None and isinstance(scores, ScoreTiles):
            regroup = regrouping(scores, walk.memory_bytes, processes, sets.share, best, precision)
        search = GroupedSearch.of(sets, begin, device, processes, best, regroup)
    else:
        sets = sets.among_queries_labels()
        if not len(sets.gallery_labels):
            first = splits[0][0]
            unmatched = int(torch.isin(sets.query_labels, first).sum())
            notes.append(str(without_match(0, unmatched, first, sets.label_names)))
            return None
        cpu = torch.device("cpu")
        scores = scores_of(sets.queries, sets.gallery, settings.similarity, cpu, processes)
        search = GroupedSearch.of(sets, passes(scores, memory, processes=processes, share=sets.share), cpu, processes)
    try:
        return search.recall(
            splits,
            tuple(settings.grouped_k),
            settings.ties,
            confidence,
            settings.grouped_unmatched,
            are_given=settings.label_groups is not None,
        )
    except GroupWithoutMatchError as error:
        notes.append(str(error))
        return None


def _note_of_longest(walk: RankingPass | HammingPass, processes: Processes) -> list[str]:
    """A sentence on an embedding that is far longer than the others: seldom meant, and the evaluation is slow with it."""
    if isinstance(walk, HammingPass):
        return []
    place, ratio = walk.scores.longest_item
    ratio = processes.largest([ratio])[0]
    if ratio < LONGEST_RATIO:
        return []
    which = f"Gallery row {place}" if processes.count == 1 else "One gallery row"
    return [
        f"{which} is {ratio:.2g} times as long as the median embedding. The metrics are exact, but the evaluation is slow "
        'with it. Look for a diverged batch, leave the row out, or use similarity="cosine".'
    ]


def _splits(notes: list[str], sets: RetrievalInputs, settings: RetrievalSettings) -> Splits | None:
    """The groups for Grouped Recall; None if it is not wanted, or, with a note, if the labels do not allow it."""
    if not settings.grouped_k:
        return None
    if settings.label_groups is not None:
        groups = checked_groups(_CALL, "label_groups", settings.label_groups)
        try:
            return given_split(_CALL, "label_groups", groups, sets.query_labels, sets.label_names)
        except ValueError as error:
            notes.append(f"Grouped Recall is left out. {error}")
            return None
    group_size = settings.group_size
    if group_size is None:
        return None
    distinct = len(sets.query_labels.unique())
    if distinct < 2 * group_size:
        notes.append(
            f"Grouped Recall is left out: two groups of group_size={group_size} labels need {2 * group_size}, and the "
            f"queries have {distinct}. "
            + (f"Use group_size <= {distinct // 2}." if distinct >= 4 else "Pass group_size=None.")
        )
        return None
    return random_splits(sets.query_labels, group_size, settings.group_seed)


def _by_class(
    values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"], names: tuple[str, ...] | None
) -> dict[int | str, float]:
    present, means, _ = class_means(values, labels)
    keys = present.tolist() if names is None else [names[label] for label in present.tolist()]
    return dict(zip(keys, means.tolist(), strict=True))


def memory_bytes(device: torch.device, memory_mb: float, device_memory_mb: float | None) -> int:
    """The budget of the pass: of the main memory on the CPU, else of the device's own."""
    if device.type == "cpu":
        return int(memory_mb * 10**6)
    if device_memory_mb is not None:
        return int(device_memory_mb * 10**6)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free // 2)


class _PerQuery:
    """The metrics of each query, filled block by block."""

    def __init__(self, queries: int, settings: RetrievalSettings) -> None:
        self.metrics = settings.per_query()
        self.values: dict[str, Float[Tensor, "queries"]] = {
            name: torch.full((queries,), torch.nan, dtype=torch.float64) for name in self.metrics
        }
        self.relevant: Int[Tensor, "queries"] = torch.zeros(queries, dtype=torch.int64)
        self.tied = torch.zeros(queries, dtype=torch.bool)

    def add(self, ranks: RankBlock) -> None:
        index = ranks.queries.cpu()
        for name, metric in self.metrics.items():
            self.values[name][index] = metric(ranks).cpu()
        self.relevant[index] = ranks.relevant.cpu()
        self.tied[index] = depends_on_ties(ranks).cpu()

    def gather(self, processes: Processes, own: Int[Tensor, "own"], length: int) -> None:
        """Turn the values of this process's queries into those of all, in their order."""
        values = torch.stack([*self.values.values(), self.relevant.double(), self.tied.double()])
        values = processes.placed(values, own, length)
        self.values = dict(zip(self.values, values, strict=False))
        self.relevant, self.tied = values[-2].long(), values[-1].bool()


def _drawn(labels: Int[Tensor, "queries"], count: int, seed: int) -> Int[Tensor, "drawn"]:
    """Indices of `count` queries, of each class in proportion to its size: every n-th of the classes one after the other.

    Inside a class the order is random, and so is the query at which the count begins.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    start = float(torch.rand(1, generator=generator))
    places = ((torch.arange(count) + start) * (len(labels) / count)).long().clamp(max=len(labels) - 1)
    drawn: Tensor = by_class[places].sort().values
    return drawn


def _prototype_accuracy(
    sets: RetrievalInputs,
    asked: Tensor,
    asked_labels: Tensor,
    share: ShardIndex | None,
    settings: RetrievalSettings,
    processes: Processes,
    *,
    alone: bool,
) -> Float[Tensor, "queries"]:
    """Of the queries of this process that are asked; `alone` if these are all that it holds."""
    assert isinstance(sets.queries, Tensor)
    assert isinstance(sets.gallery, Tensor)
    own_labels = sets.gallery_labels if sets.share is None else sets.gallery_labels[sets.share.gallery]
    # it is computed where the embeddings are, whatever the device
    options: dict[str, Any] = {
        "similarity": settings.similarity,
        "same_set": sets.same_set,
        "memory_bytes": int(settings.memory_mb * 10**6),
        "processes": processes,
    }
    if not alone and sets.same_set:  # a drawn query must still be left out of its own class's mean
        every = nearest_prototype(sets.queries, own_labels, sets.gallery, own_labels, **options)
        chosen = _drawn(sets.query_labels, settings.max_queries or 0, settings.query_seed)
        return every[chosen] if sets.share is None else every[torch.isin(sets.share.queries, chosen)]
    labels = asked_labels if share is None else asked_labels[share.queries]
    return nearest_prototype(asked, labels, sets.gallery, own_labels, **options)


def _no_match(queries: int, query_labels: Tensor, item_labels: Tensor, same_set: bool, *, any_code: bool) -> str:
    where = "another item of its class" if same_set else "an item of its class in the gallery"
    labels, shared = query_labels.unique(), len(torch.isin(query_labels.unique(), item_labels).nonzero())
    fact = (
        f"each of the {len(labels)} labels occurs once"
        if same_set and len(labels) == queries
        else f"{shared} of the queries' {len(labels)} labels occur in the gallery"
    )
    if any_code and (shared if not same_set else len(labels) < queries):
        return (
            f"{_CALL}: none of the {queries} queries has {where} that ids or groups do not exclude, so nothing can be "
            "retrieved. Check that a group is not a whole class, and an id not shared by different items."
        )
    return (
        f"{_CALL}: none of the {queries} queries has {where} ({fact}), so nothing can be retrieved. Check that labels "
        "name classes, not items, and that the set holds at least two items of some class."
    )


def _memory_note(walk: RankingPass | HammingPass, processes: Processes, budget: int) -> str | None:
    taken, asked = processes.largest([walk.memory_bytes, -budget])
    if taken <= -asked:
        return None
    needed = math.ceil(taken / 1e5) / 10
    return (
        f"The budget of {-asked / 1e6:g} MB cannot be kept: this evaluation takes about {needed:g} MB beyond the "
        f"embeddings. Pass memory_mb={needed:g} or more."
    )


def _notes(walk: RankingPass | HammingPass, per_query: _PerQuery, matched: Tensor, processes: Processes) -> list[str]:
    zero_queries, zero_items = processes.summed(np.array(walk.scores.zero_vectors)).tolist()
    notes = notes_on(
        queries=len(matched),
        without_match=int((~matched).sum()),
        tied=int(per_query.tied.sum()),
        zero_vectors=max(zero_queries, zero_items),
        collapsed=walk.distinct_rows == 1,
    )
    return notes + _note_of_longest(walk, processes)
