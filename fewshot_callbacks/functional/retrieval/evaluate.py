"""`evaluate_retrieval`: every metric of a set of embeddings from one pass over its pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes, presence
from fewshot_callbacks.engine.evaluation import Evaluation, Matches
from fewshot_callbacks.engine.options import Progress, computing
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.relevance import Relevance as Candidates
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.retrieval.grouped_recall import (
    GroupedRecall,
    GroupWithoutMatchError,
    choose_groups,
    search_groups,
)
from fewshot_callbacks.functional.retrieval.inputs import EVERYTHING, RetrievalInputs, Share, collect_inputs
from fewshot_callbacks.functional.retrieval.operating_points import PooledDecisions, PooledRequest, decide
from fewshot_callbacks.functional.retrieval.prototype_accuracy import prototype_accuracy as nearest_prototype
from fewshot_callbacks.functional.retrieval.rank_metrics import (
    Gain,
    depends_on_ties,
    gains_of,
    graded_ndcg,
    recall_at_k,
    with_absent,
    without_nearest,
)
from fewshot_callbacks.functional.retrieval.registry import Asked, asked_metric
from fewshot_callbacks.functional.retrieval.relevance import Absent, Relevance
from fewshot_callbacks.functional.retrieval.report import RetrievalReport, note_of_rates, notes_on
from fewshot_callbacks.functional.retrieval.settings import (
    chooses_group_size,
    compute_device,
    consistency_rates,
    group_size,
    grouped_k,
    main_memory,
    memory_bytes,
    names_grouped_recall,
    parameters,
    reported_metrics,
    sets_groups,
    without_classes,
)
from fewshot_callbacks.functional.retrieval.threshold_consistency import ThresholdConsistency, threshold_consistency
from fewshot_callbacks.functional.statistics import (
    Interval,
    clustered_mean_interval,
    exact_mean,
    macro_mean,
    macro_mean_interval,
)
from fewshot_callbacks.settings import RetrievalOptions, RetrievalSettings, from_keywords, takes
from fewshot_callbacks.stored import in_memory

_CALL = "evaluate_retrieval"


class NothingToRetrieveError(ValueError):
    """Raised where no query has a relevant candidate, which a larger set may have."""


@takes(RetrievalOptions)
def evaluate_retrieval(
    embeddings: Any,
    labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    relevance: Relevance | Any | None = None,
    ids: Any | None = None,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    share: Share = EVERYTHING,
    progress: Progress | None = None,
    **settings: Unpack[RetrievalOptions],
) -> RetrievalReport:
    """Compute exact retrieval metrics over all pairs of queries and gallery, in bounded memory.

    With one set, each item is a query against all others (leave-one-out; the item itself is never a candidate). With
    two sets, the queries search the gallery. A candidate is relevant if it has the query's label. No ranking is
    truncated and no matrix of all similarities is made. The result does not depend on the order of the data, the number
    of threads or the memory budget.

    Args:
        embeddings: (queries, dim) floating-point tensor, array or list of rows, finite.
        labels: (queries,) integers of any value, or strings: a tensor, array, list or column of a table. Ids and groups take
            the same forms. For strings, the report lists them in `label_names` and reports the values of classes by string.
        gallery: (gallery, dim) items to retrieve from; by default the queries themselves, leave-one-out.
        gallery_labels: (gallery,) labels of the gallery items. An item whose label no query has is a distractor: it is
            never relevant, but it takes up ranks.
        relevance: Who is relevant to each query, in place of labels: judgements with grades, lists of relevant and ignored
            items, or several labels for each item. See `Relevance`.
        ids: (queries,) identity of each item of one set, where some come several times, as a sampler may give them: the
            first item of each id is counted, as query and as candidate.
        query_ids: (queries,) identity of each query; with `gallery_ids`, a query's own copy in the gallery is not a
            candidate. The first query of each id is counted.
        gallery_ids: (gallery,) identity of each gallery item. The first item of each id is a candidate.
        query_groups: (queries,) group of each query, for instance the video of a frame: candidates of the query's own
            group are left out of its ranking, and count neither as hits nor as misses.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` is used for both.
        share: Which share of the sets this process holds, where several make this call together.
        progress: Called with the number of pairs done and the number of all pairs. Where thresholds may need further passes
            over the pairs, the first counts as nine tenths of them.
        **settings: See `RetrievalSettings`.

    Returns:
        A frozen report. Its means lie in [0, 1]; larger is better. Queries without a match, that is, without a relevant
        candidate, are left out of every mean; the report counts them in `queries_without_match`.

    Raises:
        ValueError: If a shape, type or setting does not fit, embeddings hold NaN or Inf, a set is empty, or no query
            has a relevant candidate.

    Examples:
        >>> import torch
        >>> labels = torch.arange(100) % 20
        >>> embeddings = torch.nn.functional.one_hot(labels).float() + 0.05 * torch.randn(100, 20)
        >>> report = evaluate_retrieval(embeddings, labels)
        >>> 0.9 < report.mAP <= 1.0, report.queries_without_match
        (True, 0)
    """
    started = time.perf_counter()
    processes = share.processes
    with default_mode(), processes.together():
        checked = from_keywords(evaluate_retrieval, settings)
        if not isinstance(relevance, Relevance | None):
            raise ValueError(
                f"{_CALL}: relevance is a {type(relevance).__name__}. Pass Relevance.from_judgements(judgements, query_ids, "
                "gallery_ids), from_label_sets or from_lists."
            )
        ids_and_groups = {
            "ids": ids,
            "query_ids": query_ids,
            "gallery_ids": gallery_ids,
            "query_groups": query_groups,
            "gallery_groups": gallery_groups,
        }
        _refuse_other_calls(share, checked, relevance, {"gallery": gallery, **ids_and_groups})
        inputs = collect_inputs(
            _CALL,
            share,
            embeddings,
            labels,
            gallery,
            gallery_labels,
            **ids_and_groups,
            relevance=relevance,
            as_codes=checked.similarity == "hamming",
            memory=main_memory(checked),
            with_copies=True,
        )
        if inputs.given is not None:
            checked = without_classes(_CALL, checked)
        report = _evaluated(inputs, checked, progress)
        seconds = processes.largest([time.perf_counter() - started])[0]
    return replace(report, seconds=seconds)


def _refuse_other_calls(
    share: Share, settings: RetrievalSettings, relevance: Relevance | None, arrays: Mapping[str, Any]
) -> None:
    """Refuse processes that were called with different arguments; only the device may differ. Collective."""
    arguments = {name: value for name, value in settings.arguments().items() if name != "device"}
    arrays = {"query_places": share.query_places, "gallery_places": share.gallery_places, **arrays}
    arguments |= {name: presence(array) for name, array in arrays.items()}
    if share.processes.count > 1:
        arguments["relevance"] = "left out" if relevance is None else f"{relevance}, digest {relevance.digest()}"
    share.processes.refuse_other_calls(_CALL, arguments)


def _evaluated(inputs: RetrievalInputs, settings: RetrievalSettings, progress: Progress | None) -> RetrievalReport:
    """Draw the queries, rank all pairs, summarise; the report is the same in every process."""
    processes = inputs.processes
    asked = _draw(inputs, settings)
    device = compute_device(_CALL, "cpu" if settings.similarity == "hamming" else settings.device)
    if settings.memory_mb is None and device.type == "cuda":  # half of what is free there
        budget = torch.cuda.mem_get_info(device)[0] // 2
    else:
        budget = memory_bytes(_CALL, settings.memory_mb)
    with computing() as threads:
        ranked = asked.as_one_set()
        vectors = ranked.vectors(settings.similarity, threads)
        relevance, grades, absent = ranked.relevance()
        request = _request(settings)
        copies = _own_copies(asked, settings)
        per_query = _PerQuery(relevance, grades, absent, len(ranked.gallery_labels), settings, copies)
        counted = settings.threshold is not None or any(
            one.metric.source in OF_PAIRS for one in reported_metrics(settings)
        )
        evaluation = Evaluation(
            vectors,
            relevance,
            budget,
            device=None if device.type == "cpu" else device,
            progress=progress,
        )
        result = evaluation.run(per_query.add, forecast=request.foresee if counted else None, places=per_query.graded)
        matches, pairs = result.matches, result.pooled
        del result
        if any(asked.metric.source == "prototypes" for asked in reported_metrics(settings)):
            per_query.values["prototype_accuracy"] = _prototype_accuracy(inputs, asked, settings)
        per_query.gather(processes, asked.share.queries, len(asked.query_labels))
        if not bool(per_query.has_candidate.any()):
            raise NothingToRetrieveError(_no_match(asked))
        pooled = None if pairs is None else decide(pairs, request)
        own, classes = asked.own_query_labels.numpy(), asked.query_labels.unique().numpy()
        consistency = {}
        if pairs is not None:  # always, if there are rates
            consistency = {
                rate: threshold_consistency(pairs, own, classes, asked.label_names, rate)
                for rate in consistency_rates(settings)
            }
        del pairs  # collected pairs and cached scores take most of the budget
        notes = notes_on(vectors, per_query.relevant, per_query.tied)
        if inputs.given is not None:
            notes += inputs.given.notes + _note_of_grades(inputs.given, settings)
        if pooled is not None:
            others = pooled.pair_counts.irrelevant
            notes += note_of_rates("match", request.false_match_rates, others, "irrelevant pairs")
        notes += [note for rate, found in consistency.items() for note in found.notes(rate)]
        notes[:0] = asked.notes_on_repeated_items(per_query.effect_of_copies())
        memory_note = _memory_note(evaluation, processes, budget)
        if asked.drawn is not None:
            notes.insert(
                0,
                f"An estimate: {len(asked.drawn):,} of {len(inputs.query_labels):,} queries were drawn (seed "
                f"{settings.seed}); the intervals show its uncertainty. Grouped Recall is computed for all queries.",
            )
        of_all = asked.drawn is None
        grouped = _grouped(notes, ranked if of_all else inputs, settings, matches if of_all else None, threads)
        return _summarised(inputs, asked, settings, per_query, pooled, consistency, grouped, tuple(notes), memory_note)


def _draw(inputs: RetrievalInputs, settings: RetrievalSettings) -> RetrievalInputs:
    """Return the inputs with the queries that are evaluated: all, or `max_queries`, of each class in proportion to its size.

    Systematic sampling: every n-th query of those sorted by class, in random order within a class, from a random start.
    """
    labels, count = inputs.query_labels, settings.max_queries
    if count is None or count >= len(labels):
        return inputs
    generator = torch.Generator().manual_seed(settings.seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    start = float(torch.rand(1, generator=generator))
    places = ((torch.arange(count) + start) * (len(labels) / count)).long().clamp(max=len(labels) - 1)
    return inputs.sample(by_class[places].sort().values)


def _own_copies(asked: RetrievalInputs, settings: RetrievalSettings) -> Int[Tensor, "own"] | None:
    """Return the number of copies of each query of this process; None where no note will say what they do.

    By an inner product, a longer vector may score higher than the copy of a query, so that ranks do not show the copies.
    """
    if asked.copies is None or not asked.copies.is_noted or settings.similarity == "dot":
        return None
    return torch.from_numpy(asked.copies.counts)[asked.share.queries]


def _request(settings: RetrievalSettings) -> PooledRequest:
    """Return the settings of the pooled metrics."""
    return PooledRequest(
        parameters(settings, "recall@precision{p}"),
        settings.threshold_bounds or (-math.inf, math.inf),
        () if settings.threshold is None else (settings.threshold,),
        parameters(settings, "fnmr@fmr{p}"),
        "eer" in settings.metrics,
        "auc_pr" in settings.metrics,
    )


def _summarised(
    inputs: RetrievalInputs,
    asked: RetrievalInputs,
    settings: RetrievalSettings,
    per_query: _PerQuery,
    pooled: PooledDecisions | None,
    consistency: dict[float, ThresholdConsistency],
    grouped: GroupedRecall | None,
    notes: tuple[str, ...],
    memory_note: str | None,
) -> RetrievalReport:
    """Take the values that were asked for, and their intervals."""
    labels, confidence = asked.query_labels, settings.confidence
    sources: dict[str, Any] = {"pairs": pooled, "classes": consistency, "groups": grouped}
    values: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    for wanted in reported_metrics(settings):
        key, metric = wanted.key, wanted.metric
        if metric.source in ("ranks", "prototypes"):
            of_queries = per_query.values[wanted.of_queries]
            values[key], intervals[key] = mean_over_queries(wanted, of_queries, labels, confidence)
        elif (source := sources[metric.source]) is not None:
            assert metric.value is not None
            values[key] = metric.value(source, **wanted.parameters)
            if metric.source == "groups":
                intervals[key] = source.intervals[wanted.parameters["k"]]
    return RetrievalReport(
        values=values,
        pooled=pooled,
        consistency=consistency,
        grouped=grouped,
        intervals=intervals,
        confidence=confidence,
        queries=len(labels),
        gallery=len(asked.gallery_labels),
        classes=0 if inputs.given is not None else len(inputs.query_labels.unique()),
        queries_without_match=int((per_query.relevant == 0).sum()),
        queries_with_ties=int(per_query.tied.sum()),
        queries_with_copies=0 if asked.copies is None else asked.copies.queries,
        is_estimate=asked.drawn is not None,
        similarity=settings.similarity,
        ties=settings.ties,
        notes=notes,
        memory_note=memory_note,
        per_query=per_query.values,
        query_labels=labels,
        drawn=asked.drawn,
        counted=asked.counted,
        label_names=asked.label_names,
        seconds=math.nan,
    )


def _grouped(
    notes: list[str], sets: RetrievalInputs, settings: RetrievalSettings, matches: Matches | None, threads: int
) -> GroupedRecall | None:
    """Compute Grouped Recall; where that cannot be, add a note, for the other metrics stand without it.

    Args:
        notes: Those of the report, to which one may be added.
        sets: Queries and gallery.
        settings: Those of the evaluation.
        matches: The best matches of all queries; None if only some of the queries were evaluated.
        threads: To compute with.
    """
    if not grouped_k(settings):
        return None
    size = group_size(settings)
    distinct = len(sets.query_labels.unique())
    if size is not None and distinct < 2 * size:
        if sets_groups(settings) or names_grouped_recall(settings):
            notes.append(_note_of_few_classes(settings, size, distinct))
        return None
    try:
        splits = choose_groups(_CALL, sets, settings)
    except ValueError as error:
        notes.append(f"Grouped Recall is left out. {error}")
        return None
    try:
        return search_groups(sets, splits, settings, matches, threads)
    except GroupWithoutMatchError as error:
        notes.append(str(error))
        return None


def _note_of_few_classes(settings: RetrievalSettings, size: int, distinct: int) -> str:
    """Write why there is no Grouped Recall, and what gives one.

    Args:
        settings: Those of the evaluation.
        size: The number of labels in a group.
        distinct: The number of labels of the queries.
    """
    groups = f"{size} labels (label_groups='auto')" if chooses_group_size(settings) else f"label_groups={size} labels"
    # two groups of two labels are the fewest
    fix = f"Use label_groups <= {distinct // 2}." if distinct >= 4 else "Pass label_groups=None."
    return f"Grouped Recall is left out: two groups of {groups} need {2 * size}, and the queries have {distinct}. {fix}"


# Metrics that grades matter to, with their gain.
GAINS: dict[str, Gain] = {"ndcg@{k}": "exponential", "ndcg@{k}_linear": "linear"}
# Places of ranks that each thread sums at once: 8 MB.
PLACES_AT_ONCE = 2**20

# Sources of metrics that need the counts of all pairs together.
OF_PAIRS = ("pairs", "classes")

# What pictures and pages order the queries by; each report has it for each query.
ALWAYS = ("mAP", "mrr")


def mean_over_queries(
    asked: Asked, values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"], confidence: float
) -> tuple[float, Interval]:
    """Average the queries that have a value, or the means of their classes; with the interval."""
    if asked.is_macro:
        return macro_mean(values, labels), macro_mean_interval(values, labels, confidence)
    present = ~values.isnan()
    return exact_mean(values[present]), clustered_mean_interval(values[present], labels[present], confidence)


class _PerQuery:
    """The metrics of each query, filled block by block."""

    def __init__(
        self,
        relevance: Candidates,
        grades: Shaped[np.ndarray, "pairs"] | None,
        absent: Absent | None,
        items: int,
        settings: RetrievalSettings,
        copies: Int[Tensor, "queries"] | None = None,
    ) -> None:
        self.lists, self.grades, self.items, self.ties = relevance.relevant, grades, items, settings.ties
        self.absent = absent
        every = [asked_metric(key) for key in ALWAYS] + reported_metrics(settings)
        self.metrics = {asked.of_queries: asked for asked in every if asked.metric.source == "ranks"}
        queries = len(self.lists.start)
        self.values: dict[str, Float[Tensor, "queries"]] = {
            name: torch.full((queries,), torch.nan, dtype=torch.float64) for name in self.metrics
        }
        self.relevant: Int[Tensor, "queries"] = torch.zeros(queries, dtype=torch.int64)
        self.has_candidate = torch.zeros(queries, dtype=torch.bool)
        self.tied = torch.zeros(queries, dtype=torch.bool)
        # number of copies of each query, and recall@1 with and without them; None where that will not be said
        self.copies = copies
        self.of_copies: Float[Tensor, "two queries"] | None = None
        if copies is not None:
            self.of_copies = torch.full((2, queries), torch.nan, dtype=torch.float64)

    @property
    def graded(self) -> bool:
        """Whether grades matter."""
        return self.grades is not None and any(asked.metric.pattern in GAINS for asked in self.metrics.values())

    def add(self, ranks: RankBlock) -> None:
        """Compute the metrics of the queries of a block; several threads do this, each for queries of its own."""
        index = ranks.queries.cpu()
        self.has_candidate[index] = ranks.relevant.cpu() > 0
        if self.absent is not None:
            missing = torch.from_numpy(self.absent.sizes[index.numpy()])
            ranks = with_absent(ranks, missing.to(ranks.relevant.device))
        self.relevant[index] = ranks.relevant.cpu()
        if ranks.valid.shape[1] == 0:  # no query has a relevant candidate
            for values in self.values.values():
                values[index] = torch.where(self.relevant[index] > 0, 0.0, torch.nan).double()
            return
        for name, asked in self.metrics.items():
            if self.grades is not None and asked.metric.pattern in GAINS:
                self.values[name][index] = self._graded_ndcg(ranks, asked)
            else:
                assert asked.metric.value is not None
                self.values[name][index] = asked.metric.value(ranks, ties=self.ties, **asked.parameters).cpu()
        self.tied[index] = depends_on_ties(ranks).cpu()
        if self.copies is not None and self.of_copies is not None:
            copies = self.copies[index].to(ranks.relevant.device)
            self.of_copies[0, index] = recall_at_k(ranks, 1, self.ties).cpu()
            self.of_copies[1, index] = recall_at_k(without_nearest(ranks, copies), 1, self.ties).cpu()

    def effect_of_copies(self) -> str:
        """Return a sentence on what copies do, after the values of all processes were gathered."""
        if self.of_copies is None:
            return "A copy is a perfect neighbour"
        recalls = [exact_mean(values[~values.isnan()]) for values in self.of_copies]
        if math.isnan(recalls[1]):
            return f"A copy is a perfect neighbour: recall@1 is {recalls[0]:.3f}, and no query has any other match"
        return f"A copy is a perfect neighbour: recall@1 is {recalls[0]:.3f}, and {recalls[1]:.3f} without their copies"

    def _graded_ndcg(self, ranks: RankBlock, asked: Asked) -> Float[Tensor, "queries"]:
        """Compute nDCG of grades, some queries at a time, since its sums have a place for each rank up to k."""
        assert self.grades is not None
        assert ranks.places is not None
        entries = torch.from_numpy(self.lists.start)[ranks.queries, None] + ranks.places
        entries.clamp_(max=max(0, len(self.grades) - 1))
        grades = torch.from_numpy(self.grades[entries.numpy()].astype(np.float64)).masked_fill_(~ranks.valid, 0.0)
        columns, items = grades.shape[1], self.items
        if self.absent is not None:
            missing = torch.from_numpy(self.absent.padded(ranks.queries.numpy()))
            grades, items = torch.cat([grades, missing], dim=1), items + missing.shape[1]
        gains, absent = gains_of(grades, GAINS[asked.metric.pattern]).tensor_split([columns], dim=1)
        k = min(asked.parameters["k"], items)
        values = []
        for some in torch.arange(len(gains)).split(max(1, PLACES_AT_ONCE // k)):
            rows = RankBlock(*(getattr(ranks, field.name)[some] for field in fields(ranks)))
            values.append(graded_ndcg(rows, gains[some], k, self.ties, absent[some]))
        return torch.cat(values)

    def gather(self, processes: Processes, own: Int[Tensor, "own"], length: int) -> None:
        """Gather the values of the queries of all processes, in their order."""
        beside = self.relevant.double(), self.has_candidate.double(), self.tied.double()
        values = processes.placed(torch.stack([*self.values.values(), *beside]), own, length)
        self.values = dict(zip(self.values, values, strict=False))
        self.relevant, self.has_candidate, self.tied = values[-3].long(), values[-2].bool(), values[-1].bool()
        if self.of_copies is not None:
            self.of_copies = processes.placed(self.of_copies, own, length)


def _prototype_accuracy(
    inputs: RetrievalInputs, asked: RetrievalInputs, settings: RetrievalSettings
) -> Float[Tensor, "queries"]:
    """Nearest-prototype accuracy of the queries of this process that are evaluated."""
    evaluated = inputs if inputs.same_set else asked  # a drawn query is left out of its own class's mean, too
    values = nearest_prototype(  # on the CPU, where the embeddings are
        in_memory(evaluated.queries),
        evaluated.own_query_labels,
        in_memory(inputs.gallery),
        inputs.own_gallery_labels,
        similarity=settings.similarity,
        same_set=inputs.same_set,
        memory_bytes=main_memory(settings),
        processes=inputs.processes,
    )
    return values[inputs.is_here(asked.drawn)] if inputs.same_set and asked.drawn is not None else values


def _note_of_grades(relevance: Relevance, settings: RetrievalSettings) -> list[str]:
    """Note that nDCG, unlike that of trec_eval, does not take the grades that are below the smallest relevant one."""
    graded = [one.key for one in reported_metrics(settings) if one.metric.pattern in GAINS]
    if not (graded and relevance.below):
        return []
    return [
        f"{', '.join(graded)} take {relevance.below:,} judgements with grades below at_least={relevance.at_least:g} for "
        "irrelevant. trec_eval's nDCG takes every positive grade, whatever its -l: evaluate it with at_least=1."
    ]


def _no_match(asked: RetrievalInputs) -> str:
    queries, labels = len(asked.query_labels), asked.query_labels.unique()
    shared = len(torch.isin(labels, asked.gallery_labels).nonzero())
    once = asked.same_set and len(labels) == queries
    what = "another item of its class" if asked.same_set else "an item of its class in the gallery"
    if asked.given is not None:
        what = "a relevant candidate"
        fix = "the rows of the relevance are those of the embeddings, and what ids, groups and ignored items leave out"
    elif any(code is not None for code in asked.codes.values()) and shared and not once:
        what += " that ids or groups do not exclude"
        fix = "a group is not a whole class, and an id not shared by different items"
    else:
        fact = f"{shared} of the queries' {len(labels)} labels occur in the gallery"
        what += f" (each of the {len(labels)} labels occurs once)" if once else f" ({fact})"
        fix = "labels name classes, not items, and that the set holds at least two items of some class"
    return f"{_CALL}: none of the {queries} queries has {what}, so nothing can be retrieved. Check that {fix}."


def _memory_note(evaluation: Evaluation, processes: Processes, budget: float) -> str | None:
    taken, asked = processes.largest([float(evaluation.layout.bytes), -budget])
    if taken <= -asked:
        return None
    needed = math.ceil(taken / 1e5) / 10
    return (
        f"The budget of {-asked / 1e6:g} MB cannot be kept: this evaluation takes about {needed:g} MB beyond the "
        f"embeddings. Pass memory_mb={needed:g} or more."
    )
