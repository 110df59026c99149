"""`evaluate_retrieval`: all metrics of a set of embeddings, from one pass over its pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.evaluation import Evaluation, Matches, PooledPairs
from fewshot_callbacks.engine.options import Progress, computing
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.items import EVERYTHING, Share
from fewshot_callbacks.functional.retrieval._per_query import CALL, GAINS, PerQuery
from fewshot_callbacks.functional.retrieval.decisions import PooledDecisions, decide
from fewshot_callbacks.functional.retrieval.evaluation_notes import LEFT_OUT, note_of_rates, notes_on
from fewshot_callbacks.functional.retrieval.grouped_recall import (
    GroupedRecall,
    GroupWithoutMatchError,
    choose_groups,
    search_groups,
)
from fewshot_callbacks.functional.retrieval.inputs import RetrievalInputs, collect_inputs
from fewshot_callbacks.functional.retrieval.prototype_accuracy import prototype_accuracy as nearest_prototype
from fewshot_callbacks.functional.retrieval.query_means import mean_of_queries, mean_over_queries
from fewshot_callbacks.functional.retrieval.registry import is_users
from fewshot_callbacks.functional.retrieval.relevance import Relevance
from fewshot_callbacks.functional.retrieval.report import RetrievalReport, TieRange
from fewshot_callbacks.functional.retrieval.settings import (
    RetrievalRequest,
    RetrievalSettings,
    compute_device,
    from_keywords,
    main_memory,
    memory_bytes,
    request_of,
    without_classes,
)
from fewshot_callbacks.functional.retrieval.slices import checked_slices
from fewshot_callbacks.functional.retrieval.threshold_consistency import ThresholdConsistency, threshold_consistency
from fewshot_callbacks.functional.retrieval.users_metrics import (
    call_on_pairs,
    check_range,
    notes_on_nan,
    without_function,
)
from fewshot_callbacks.functional.statistics import Interval
from fewshot_callbacks.settings import RetrievalOptions, takes
from fewshot_callbacks.storage.stored_rows import as_one_tensor
from fewshot_callbacks.system.words import counted, none_has, verb, with_article


class NothingToRetrieveError(InputError):
    """Raised if no query has a relevant candidate. A larger set may have one."""


@takes(RetrievalOptions)
def evaluate_retrieval(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    relevance: Relevance | Any | None = None,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    slices: Mapping[str, Any] | Any | None = None,
    share: Share = EVERYTHING,
    progress: Progress | None = None,
    **settings: Unpack[RetrievalOptions],
) -> RetrievalReport:
    """Return exact retrieval metrics over all pairs of queries and gallery items, computed in bounded memory.

    With one set, each item searches all other items (leave-one-out; an item is never a candidate for itself). With two sets,
    the queries search the gallery. A candidate is relevant if it has the label of the query. Rankings are not truncated, and
    the matrix of all similarities is never in memory. The result does not depend on the order of the data, the number of
    threads or the memory budget.

    The first key, `mAP`, is the mean over queries of the average precision. For a query with R relevant candidates at the
    ranks k_1 < ... < k_R,

        AP = (1 / k_1 + 2 / k_2 + ... + R / k_R) / R

    docs/metrics/index.md defines all other keys.

    Args:
        queries: (queries, dim) floating-point tensor, array or list of rows, finite.
        query_labels: (queries,) integers of any value, or strings: a tensor, array, list or column of a table. Ids and
            groups have the same forms. The report lists strings in `label_names` and gives values per class by string.
        gallery: (gallery, dim) items to retrieve from; by default the queries themselves, leave-one-out.
        gallery_labels: (gallery,) labels of the gallery items. An item with a label that no query has is a distractor: it is
            never relevant, but it occupies a rank.
        relevance: Which items are relevant to each query, instead of labels: graded judgements, lists of relevant and
            ignored items, or several labels per item. See `Relevance`.
        query_ids: (queries,) identity of each query. If an id is repeated, as samplers do, only its first item counts, also
            as a candidate if there is one set. With `gallery_ids`, a gallery item with the query's id is not a candidate.
        gallery_ids: (gallery,) identity of each gallery item. Only the first item of each id is a candidate.
        query_groups: (queries,) group of each query, for instance the video that a frame is from. Candidates of the query's
            own group are left out of its ranking: they are neither hits nor misses.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` is used for both.
        slices: Attribute -> its value for each query, integers or strings, such as `{"camera": cameras}`.
            `report.of_slices` returns the metrics for each value, and `compare_slices` compares two reports slice by slice.
            An attribute can have 30 values, or a tenth of the number of classes if that is more. Divide ages into bins.
        share: Which part of the sets this process has, if several processes make this call together.
        progress: Called with the number of pairs done and the number of all pairs. If thresholds may need further passes
            over the pairs, the first pass counts as 90 % of all pairs.
        **settings: `metrics`, `similarity`, `ties`, `memory_mb` and more: see `RetrievalSettings`.

    Returns:
        A frozen report. Its means are in [0, 1], and larger is better. Queries without a match, that is, without a relevant
        candidate, are left out of every mean. `queries_without_match` counts them.

    Raises:
        ValueError: If a shape, type or setting is wrong, embeddings contain NaN or Inf, a set is empty, `gallery_ids` are
            passed without a gallery, or no query has a relevant candidate.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]])
        >>> round(evaluate_retrieval(embeddings, [0, 0, 1, 1]).mAP, 4)  # relevant items at ranks 2, 3, 2 and 3
        0.4167

        A larger set, with a confidence interval:

        >>> labels = torch.arange(100) % 20
        >>> noise = torch.randn(100, 20, generator=torch.Generator().manual_seed(0))
        >>> report = evaluate_retrieval(torch.eye(20)[labels] + 0.3 * noise, labels)
        >>> round(report.mAP, 4), report["recall@1"], round(report["pair_f1"], 4)
        (0.4911, 0.53, 0.4563)
        >>> low, high = report.intervals["mAP"]
        >>> f"{low:.4f} to {high:.4f}"
        '0.4121 to 0.5706'
    """
    started = time.perf_counter()
    processes = share.processes
    with default_mode(), processes.together():
        checked = from_keywords(evaluate_retrieval, settings)
        if not isinstance(relevance, Relevance | None):
            raise InputError(
                f"{CALL}: relevance is {with_article(type(relevance).__name__)}, not a Relevance. Pass "
                "Relevance.from_judgements(judgements, query_ids, gallery_ids), or use from_label_sets or from_lists."
            )
        ids_and_groups = {
            "query_ids": query_ids,
            "gallery_ids": gallery_ids,
            "query_groups": query_groups,
            "gallery_groups": gallery_groups,
        }
        slices = checked_slices(CALL, slices)
        _refuse_other_settings(share, checked, relevance, slices)
        inputs = collect_inputs(
            CALL,
            share,
            queries,
            query_labels,
            gallery,
            gallery_labels,
            **ids_and_groups,
            relevance=relevance,
            slices=slices,
            similarity=checked.similarity,
            memory=main_memory(checked),
        )
        if inputs.judgements is not None:
            checked = without_classes(CALL, checked)
        report = _evaluated(inputs, checked, progress)
        seconds = processes.largest([time.perf_counter() - started])[0]
    return replace(report, seconds=seconds)


def _refuse_other_settings(
    share: Share, settings: RetrievalSettings, relevance: Relevance | None, slices: Mapping[str, Any]
) -> None:
    """Raise an error if the processes have different settings. Only the device may differ. *Collective*."""
    arguments = {name: value for name, value in settings.arguments().items() if name != "device"}
    arguments["slices"] = tuple(sorted(slices))
    if share.processes.count > 1:
        arguments["relevance"] = "left out" if relevance is None else f"{relevance}, digest {relevance.digest()}"
    share.refuse_other_settings(CALL, arguments)


def _evaluated(inputs: RetrievalInputs, settings: RetrievalSettings, progress: Progress | None) -> RetrievalReport:
    """Return the report, without its duration. It is the same in every process. *Collective*."""
    processes = inputs.processes
    sample = _draw(inputs, settings)
    device = compute_device(CALL, "cpu" if settings.similarity == "hamming" else settings.device)
    budget = _budget(settings, device)
    with computing() as threads:
        sets = sample.as_one_set()
        vectors = sets.vectors(threads)
        relevance, grades, absent = sets.relevance()
        per_query = PerQuery(
            relevance, grades, absent, len(sets.gallery.labels), settings, _copies_of_queries(sample, settings)
        )
        request = request_of(settings)
        evaluation = Evaluation(
            vectors,
            relevance,
            budget,
            device=None if device.type == "cpu" else device,
            progress=progress,
        )
        result = evaluation.run(
            per_query.add,
            questions=request.pooled.questions() if request.needs_all_pairs else None,
            places=per_query.graded,
        )
        if request.has_input("prototypes"):
            per_query.values["prototype_accuracy"] = _prototype_accuracy(inputs, sample, settings)
        per_query.gather(processes, sample.queries.places, len(sample.queries.labels))
        if not bool(per_query.has_candidate.any()):
            raise NothingToRetrieveError(_no_match(sample))
        pooled, consistency = _decide_pooled(result.pooled, sample, request)
        matches = result.matches
        del result  # its collected pairs and cached scores take most of the budget
        notes = _notes_on_sample(inputs, sample, settings)
        notes += sample.notes_on_copies(sample.copies_of_queries, per_query.effect_of_copies())
        notes += notes_on(vectors, sample.gallery.places, per_query.relevant, per_query.tied)
        notes += _notes_on_values(inputs.judgements, settings, pooled, consistency)
        memory_note = _memory_note(evaluation, processes, budget)
        if sample.drawn is None:
            grouped, note_on_groups = _grouped(sets, settings, matches, threads)
        else:
            grouped, note_on_groups = _grouped(inputs, settings, None, threads)
        notes += note_on_groups
        return _summarised(inputs, sample, settings, per_query, pooled, consistency, grouped, tuple(notes), memory_note)


def _budget(settings: RetrievalSettings, device: torch.device) -> float:
    """Return the memory budget in bytes; by default half of the free memory of a GPU."""
    if settings.memory_mb is None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return memory_bytes(CALL, settings.memory_mb)


def _decide_pooled(
    pairs: PooledPairs | None, sample: RetrievalInputs, request: RetrievalRequest
) -> tuple[PooledDecisions | None, dict[float, ThresholdConsistency]]:
    """Return the pooled metrics, and largest false match rate -> threshold consistency. *Collective*.

    `pairs` is None if no metric needs them.
    """
    if pairs is None:
        return None, {}
    pooled = decide(pairs, request.pooled)
    labels = sample.queries.of_rows("labels").numpy()
    classes = sample.queries.labels.unique().numpy()
    consistency = {
        rate: threshold_consistency(pairs, labels, classes, sample.label_names, rate)
        for rate in request.consistency_rates
    }
    return pooled, consistency


def _draw(inputs: RetrievalInputs, settings: RetrievalSettings) -> RetrievalInputs:
    """Return the inputs with all queries, or with `max_queries` of them, from each class in proportion to its size.

    This is systematic sampling: queries are sorted by class, in random order within a class, and every n-th query is drawn
    from a random start.
    """
    labels = inputs.queries.labels
    count = settings.max_queries
    if count is None or count >= len(labels):
        return inputs
    generator = torch.Generator().manual_seed(settings.seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    start = float(torch.rand(1, generator=generator, dtype=torch.float32))
    places = torch.arange(count, dtype=torch.float64) + start
    drawn = (places * (len(labels) / count)).long().clamp(max=len(labels) - 1)
    return inputs.sample(by_class[drawn].sort().values)


def _copies_of_queries(sample: RetrievalInputs, settings: RetrievalSettings) -> Int[Tensor, "own"] | None:
    """Return the number of copies of each query of this process; None if no note will report their effect.

    With the inner product, a longer vector may score higher than a query's copy, so ranks do not reveal copies.
    """
    if sample.copies_of_queries is None or not sample.copies_of_queries.is_noted or settings.similarity == "dot":
        return None
    return torch.from_numpy(sample.copies_of_queries.counts)[sample.queries.places]


def _notes_on_sample(inputs: RetrievalInputs, sample: RetrievalInputs, settings: RetrievalSettings) -> list[str]:
    """Return a note if only a sample of the queries was evaluated."""
    if sample.drawn is None:
        return []
    return [
        f"These are estimates from {len(sample.drawn):,} of {len(inputs.queries.labels):,} queries, drawn with seed "
        f"{settings.seed}. The intervals show the uncertainty. Grouped Recall is computed for all queries."
    ]


def _notes_on_values(
    given: Relevance | None,
    settings: RetrievalSettings,
    pooled: PooledDecisions | None,
    consistency: Mapping[float, ThresholdConsistency],
) -> list[str]:
    """Return notes on the `relevance` that was passed, on rates that need more pairs, and on thresholds of classes."""
    notes: list[str] = []
    if given is not None:
        notes += given.notes + _note_of_grades(given, settings)
    if pooled is not None:
        rates = request_of(settings).pooled.false_match_rates
        notes += note_of_rates("match", rates, pooled.pair_counts.irrelevant, "irrelevant pairs")
    for rate, of_rate in consistency.items():
        notes += of_rate.notes(rate)
    return notes


def _summarised(
    inputs: RetrievalInputs,
    sample: RetrievalInputs,
    settings: RetrievalSettings,
    per_query: PerQuery,
    pooled: PooledDecisions | None,
    consistency: dict[float, ThresholdConsistency],
    grouped: GroupedRecall | None,
    notes: tuple[str, ...],
    memory_note: str | None,
) -> RetrievalReport:
    """Return the report with the requested values and their intervals."""
    labels = sample.queries.labels
    computed = {"pairs": pooled, "classes": consistency, "groups": grouped}
    values, intervals = _values_and_intervals(settings, per_query, labels, computed)
    users_metrics = [requested for requested in request_of(settings).reported if is_users(requested.metric)]
    matched = int((per_query.relevant > 0).sum())
    return RetrievalReport(
        values=values,
        pooled=pooled,
        consistency=consistency,
        grouped=grouped,
        intervals=intervals,
        tie_ranges=_tie_ranges(settings, per_query, labels),
        confidence=settings.confidence,
        queries=len(labels),
        gallery=len(sample.gallery.labels),
        classes=0 if inputs.judgements is not None else len(inputs.queries.labels.unique()),
        queries_without_match=int((per_query.relevant == 0).sum()),
        queries_with_ties=int(per_query.tied.sum()),
        queries_with_copies=0 if sample.copies_of_queries is None else sample.copies_of_queries.queries,
        is_estimate=sample.drawn is not None,
        similarity=settings.similarity,
        ties=settings.ties,
        notes=notes + _notes_on_one_kind(settings, values) + notes_on_nan(users_metrics, values, matched),
        memory_note=memory_note,
        per_query=per_query.values,
        query_labels=labels,
        drawn=sample.drawn,
        counted=inputs.queries.origins,
        label_names=sample.label_names,
        slices=dict(sample.attributes),
        query_ids_digest=sample.query_ids_digest,
        gallery_digest=sample.gallery_digest,
        gallery_ids_digest=sample.gallery_ids_digest,
        users_metrics={requested.key: without_function(requested) for requested in users_metrics},
        seconds=math.nan,
    )


def _notes_on_one_kind(settings: RetrievalSettings, values: Mapping[str, float]) -> tuple[str, ...]:
    """Return a note on metrics that are NaN because no candidate is irrelevant."""
    # Metrics of class thresholds and custom metrics have their own notes.
    undefined = [
        requested.key
        for requested in request_of(settings).reported
        if requested.metric.input != "classes"
        and not is_users(requested.metric)
        and math.isnan(values.get(requested.key, 0.0))
    ]
    if not undefined:
        return ()
    verb = "is" if len(undefined) == 1 else "are"
    return (
        f"{', '.join(undefined)} {verb} NaN: no query has an irrelevant candidate, and without one they are not defined.",
    )


def _values_and_intervals(
    settings: RetrievalSettings, per_query: PerQuery, labels: Int[Tensor, "queries"], computed: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return key -> value, and key -> interval, for the requested metrics.

    `computed` maps an input to what its metrics are computed from; None leaves these metrics out.
    """
    values: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    for requested in request_of(settings).reported:
        key = requested.key
        metric = requested.metric
        metric_input = computed.get(metric.input)
        if metric.is_of_queries:
            of_queries = per_query.values[requested.of_queries]
            check_range(CALL, requested, of_queries)
            values[key], intervals[key] = mean_over_queries(requested, of_queries, labels, settings.confidence)
        elif metric_input is None:
            continue
        elif is_users(metric):
            values[key] = call_on_pairs(CALL, requested, metric_input)
        else:
            assert metric.value is not None
            values[key] = metric.value(metric_input, **requested.parameters)
        if metric.input == "groups":
            assert metric_input is not None
            intervals[key] = metric_input.intervals[requested.parameters["k"]]
    return values, intervals


def _tie_ranges(
    settings: RetrievalSettings, per_query: PerQuery, labels: Int[Tensor, "queries"]
) -> dict[str, TieRange]:
    """Return key -> range over the orders of equal scores, for the requested metrics of ranks."""
    ranges: dict[str, TieRange] = {}
    for requested in request_of(settings).reported:
        if requested.of_queries not in per_query.values_of_tied:
            continue
        means = []
        for of_tied in per_query.values_of_tied[requested.of_queries]:
            values = per_query.values[requested.of_queries].clone()
            values[per_query.tied] = of_tied
            means.append(mean_of_queries(requested, values, labels))
        ranges[requested.key] = TieRange(min(means), max(means))
    return ranges


def _grouped(
    sets: RetrievalInputs, settings: RetrievalSettings, matches: Matches | None, threads: int
) -> tuple[GroupedRecall | None, list[str]]:
    """Return Grouped Recall, or None and a note on why it is left out. *Collective*.

    `matches` are the best matches of all queries; None if only some of the queries were evaluated.
    """
    request = request_of(settings)
    size = request.group_size
    if not request.grouped_k:
        return None, []
    distinct = len(sets.queries.labels.unique())
    if size is not None and distinct < 2 * size:
        is_wanted = request.sets_groups or request.names_grouped_recall
        return None, [_note_of_few_classes(settings, size, distinct)] if is_wanted else []
    try:
        splits = choose_groups(CALL, sets, settings)
    except ValueError as error:
        return None, [f"{LEFT_OUT}. {error}"]
    try:
        return search_groups(sets, splits, settings, matches, threads), []
    except GroupWithoutMatchError as error:
        return None, [str(error)]


def _note_of_few_classes(settings: RetrievalSettings, size: int, distinct: int) -> str:
    """Return the note that Grouped Recall needs more classes or smaller groups.

    `size` is the number of labels in a group, and `distinct` the number of distinct labels of the queries.
    """
    is_chosen = request_of(settings).chooses_group_size
    groups = f"{size} labels (label_groups='auto')" if is_chosen else f"label_groups={size} labels"
    # At least two groups of two labels are needed.
    fix = f"Use label_groups <= {distinct // 2}." if distinct >= 4 else "Pass label_groups=None."
    return f"{LEFT_OUT}: two groups of {groups} need {2 * size}, and the queries have {distinct}. {fix}"


def _prototype_accuracy(
    inputs: RetrievalInputs, sample: RetrievalInputs, settings: RetrievalSettings
) -> Float[Tensor, "queries"]:
    """Return the nearest-prototype accuracy of this process's evaluated queries. *Collective*."""
    # In one set, the queries are the gallery, and a sample does not contain all of it. So all are computed.
    queries = inputs if inputs.same_set else sample
    values = nearest_prototype(  # on the CPU, where the embeddings are
        as_one_tensor(queries.queries.rows),
        queries.queries.of_rows("labels"),
        as_one_tensor(inputs.gallery.rows),
        inputs.gallery.of_rows("labels"),
        similarity=settings.similarity,
        same_set=inputs.same_set,
        memory_bytes=main_memory(settings),
        processes=inputs.processes,
    )
    if inputs.same_set and sample.drawn is not None:
        return values[inputs.queries.is_row_of(sample.drawn)]
    return values


def _note_of_grades(relevance: Relevance, settings: RetrievalSettings) -> list[str]:
    """Return a note on positive grades below `at_least`, which trec_eval's nDCG counts and this nDCG does not."""
    graded = [requested.key for requested in request_of(settings).reported if requested.metric.pattern in GAINS]
    if not (graded and relevance.below):
        return []
    return [
        f"{', '.join(graded)}: {relevance.below:,} judgements have grades below at_least={relevance.at_least:g} and count "
        "as irrelevant. trec_eval's nDCG uses every positive grade, whatever its -l. To reproduce it, pass at_least=1."
    ]


def _no_match(sample: RetrievalInputs) -> str:
    """Return the error message for an evaluation in which no query has a relevant candidate."""
    queries = len(sample.queries.labels)
    labels = sample.queries.labels.unique()
    shared = len(torch.isin(labels, sample.gallery.labels).nonzero())
    occurs_once = sample.same_set and len(labels) == queries
    missing = "another item of its class" if sample.same_set else "an item of its class in the gallery"
    if sample.judgements is not None:
        missing = "a relevant candidate"
        fix = "the relevance has the same rows as the embeddings, and what ids, groups and ignored items leave out"
    elif len(sample.exclusions()) and shared and not occurs_once:
        missing += " that ids or groups do not exclude"
        fix = "a group is not a whole class, and different items do not share an id"
    else:
        if occurs_once:
            missing += (
                f" (each of the {len(labels)} labels occurs once)" if len(labels) > 1 else " (its label occurs once)"
            )
        else:
            missing += (
                f" ({shared} of the queries' {counted(len(labels), 'label')} {verb(shared, 'occurs', 'occur')} in the "
                "gallery)"
            )
        fix = "labels name classes, not items, and that the set has at least two items of some class"
    return f"{CALL}: {none_has(queries, 'query')} {missing}, so nothing can be retrieved. Check that {fix}."


def _memory_note(evaluation: Evaluation, processes: Processes, budget: float) -> str | None:
    """Return a note if the evaluation needs more than its budget in some process. *Collective*."""
    taken, negative_budget = processes.largest([float(evaluation.layout.bytes), -budget])
    smallest_budget = -negative_budget
    if taken <= smallest_budget:
        return None
    needed = math.ceil(taken / 1e5) / 10
    return (
        f"The memory budget of {smallest_budget / 1e6:g} MB is too small: this evaluation needs about {needed:g} MB beyond "
        f"the embeddings. Pass memory_mb={needed:g} or more."
    )
