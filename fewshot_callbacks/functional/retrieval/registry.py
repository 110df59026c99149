"""The metrics of an evaluation. You request a metric by the key that it is logged under.

Users can add their own metrics, which are `Metric` objects and are accepted wherever a key is. No list here contains them.

To add a metric to the package, add an entry to `METRICS`. Its keys, reports, tables and messages follow from the entry. A
metric of ranks is a function in `rank_metrics.py` and has the input `ranks`. Two lists for readers are written by hand: the
keys in the docstring of `RetrievalSettings` (`fewshot_callbacks/settings.py`), which `help` shows, and the table in
`docs/metrics/index.md`. `docs/project/add_a_metric.md` describes all steps.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, cast, get_args

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval import rank_metrics
from fewshot_callbacks.settings import MACRO, Divisor, Metric, Metrics, RequestedMetric, read_parameters
from fewshot_callbacks.system.words import with_article

METRICS = (
    Metric("mAP", "ranks", rank_metrics.average_precision, "Mean over queries of the precision at each relevant rank."),
    Metric(
        "map@r",
        "ranks",
        rank_metrics.map_at_r,
        "Sum of the precisions at the relevant ranks up to R, over R, the number of relevant items.",
    ),
    Metric("r_precision", "ranks", rank_metrics.r_precision, "Share of relevant items among the first R."),
    Metric("mrr", "ranks", rank_metrics.reciprocal_rank, "One over the rank of the first relevant item."),
    Metric(
        "mrr@{k}",
        "ranks",
        rank_metrics.reciprocal_rank,
        "One over the rank of the first relevant item, 0 beyond the first {k}.",
    ),
    Metric("minp", "ranks", rank_metrics.inverse_penalty, "Number of relevant items over the rank of the last."),
    Metric(
        "ap_trapezoid",
        "ranks",
        rank_metrics.trapezoid_average_precision,
        "Average precision by trapezoids, as the Oxford and Paris benchmarks measure it.",
    ),
    Metric(
        "map@{k}_{divisor}",
        "ranks",
        rank_metrics.average_precision_at_k,
        "Precision at the relevant ranks up to {k}; min divides by min(R, {k}), relevant by R, found by those found.",
    ),
    Metric("recall@{k}", "ranks", rank_metrics.recall_at_k, "Queries with a relevant item among the first {k}."),
    Metric("ir_recall@{k}", "ranks", rank_metrics.ir_recall_at_k, "Share of the relevant items among the first {k}."),
    Metric("precision@{k}", "ranks", rank_metrics.precision_at_k, "Share of the first {k} that is relevant."),
    Metric(
        "precision@{k}_last",
        "ranks",
        rank_metrics.precision_up_to_last,
        "Share of the first {k} that is relevant, or of the items up to the last relevant one: revisited Oxford and Paris.",
    ),
    Metric("ndcg@{k}", "ranks", rank_metrics.ndcg, "Discounted gain of the first {k}, over the best possible."),
    # With one label per item, relevance is 0 or 1, and both gains are equal.
    Metric(
        "ndcg@{k}_linear",
        "ranks",
        rank_metrics.ndcg,
        "Discounted gain of the first {k}, over the best possible; n shared labels gain n.",
    ),
    Metric(
        "auroc",
        "ranks",
        rank_metrics.auroc,
        "Probability that a relevant item scores higher than an irrelevant one; ties count one half.",
    ),
    Metric("prototype_accuracy", "prototypes", None, "Share of queries nearest to the mean of their own class."),
    Metric(
        "grouped_recall@{k}",
        "groups",
        lambda grouped, k: grouped.at[k],
        "recall@{k} inside groups of classes; queries without a match are left out.",
    ),
    Metric(
        "grouped_recall@{k}_miss",
        "groups",
        lambda grouped, k: grouped.at[k],
        "recall@{k} inside groups of classes; queries without a match are misses.",
    ),
    Metric(
        "pair_precision", "pairs", attrgetter("decision.precision"), "Share of the accepted pairs that is relevant."
    ),
    Metric("pair_recall", "pairs", attrgetter("decision.recall"), "Share of the relevant pairs that is accepted."),
    Metric(
        "pair_f1",
        "pairs",
        attrgetter("decision.f1"),
        "Harmonic mean of pair_precision and pair_recall, at the best threshold unless threshold is set.",
    ),
    Metric(
        "pair_threshold",
        "pairs",
        attrgetter("decision.threshold"),
        "Smallest accepted score for pair_precision, pair_recall and pair_f1.",
        range=None,
        better=None,
    ),
    Metric("auc_pr", "pairs", attrgetter("auc_pr.value"), "Area under the pooled precision-recall curve."),
    Metric(
        "pair_auroc",
        "pairs",
        attrgetter("auroc"),
        "Probability that a relevant pair scores higher than an irrelevant one; ties count one half.",
    ),
    Metric(
        "recall@precision{p}",
        "pairs",
        lambda pooled, p: pooled.at_precision[p].recall,
        "Pooled recall at the smallest threshold with precision {p}.",
    ),
    Metric(
        "fnmr@fmr{p}",
        "pairs",
        lambda pooled, p: pooled.at_false_match_rate[p].false_non_match_rate,
        "Share of the relevant pairs rejected at a threshold that accepts at most {p} of the irrelevant pairs.",
        better="lower",
    ),
    Metric(
        "eer",
        "pairs",
        attrgetter("equal_error_rate"),
        "Rate at which the shares of rejected relevant pairs and of accepted irrelevant pairs are equal.",
        better="lower",
    ),
    Metric(
        "opis@fmr{p}",
        "classes",
        lambda consistency, p: consistency[p].opis,
        "Variance of a threshold's utility between classes, at thresholds with false match rates from {p} / 10 to {p}.",
        range=(0.0, 0.25),
        better="lower",
    ),
    Metric(
        "opis_gap@fmr{p}",
        "classes",
        lambda consistency, p: consistency[p].gap(),
        "Mean utility of thresholds with false match rates up to {p}: all classes minus the worst tenth of the classes.",
        better="lower",
    ),
)

RELEVANCE_METRICS = ("mAP", "map@r", "r_precision", "mrr", "recall@1", "recall@5", "recall@10", "ndcg@10")
"""The default metrics if items do not have exactly one label each: with judgements, lists, or several labels per item."""


def requested_metric(key: object, among: Sequence[Metric] | None = None) -> RequestedMetric:
    """Return the metric with this key.

    Args:
        key: The key that the metric is logged under.
        among: All available metrics; by default the retrieval metrics.

    Raises:
        ValueError: If there is no such metric. The message suggests the key that you probably mean, also for misspelt keys
            and for names from other libraries.

    Examples:
        >>> requested_metric("recall@5").meaning
        'Queries with a relevant item among the first 5.'
        >>> requested_metric("recal@5")
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: there is no metric 'recal@5'; did you mean 'recall@5'?
        >>> requested_metric("RetrievalHitRate@5")
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: there is no metric 'RetrievalHitRate@5'; did you mean 'recall@5'?
    """
    if not isinstance(key, str):
        raise InputError(f"metrics contain {key!r}, which is not a key. Pass the keys of metrics, such as 'recall@1'.")
    of_queries = key.removeprefix(MACRO)
    if among is None:
        among = METRICS  # as a default in the signature, it would keep the value from the first import
    for metric in among:
        match = metric.keys.fullmatch(of_queries)
        if match is not None:
            return RequestedMetric(key, metric, _parameters(key, metric, match))
    meant = _meant(key, among)
    if meant is not None:
        explanation = _EXPLANATIONS.get(meant, "")
        raise InputError(f"there is no metric {key!r}; did you mean {meant!r}? {explanation}".rstrip())
    known = ", ".join(metric.pattern for metric in among)
    if any(metric.input == "ranks" for metric in among):
        known += ", and macro_ before metrics of single queries"
    raise InputError(f"there is no metric {key!r}. Pass one of {known}.")


def _parameters(key: str, metric: Metric, match: re.Match[str]) -> dict[str, Any]:
    """Return the parameters of a key. Refuse ranks and rates out of range, and `macro_` without per-query values."""
    of_queries = key.removeprefix(MACRO)
    if key != of_queries and not metric.is_of_queries:
        raise InputError(
            f"there is no metric {key!r}, because {of_queries} has no per-query values and therefore no mean over classes. "
            f"Request {of_queries!r}."
        )
    return read_parameters(key, match)


def is_pattern(pattern: object, among: Sequence[Metric]) -> bool:
    """Return whether this is a metric's key with `{k}` or `{p}` for one number, as in `RequestedMetric.patterns`."""
    if not isinstance(pattern, str) or len(re.findall(r"\{[kp]\}", pattern)) != 1:
        return False
    try:
        return pattern in requested_metric(pattern.replace("{k}", "1").replace("{p}", "0.5"), among).patterns
    except ValueError:
        return False


# Names of metrics in other libraries, programs and papers, in the form of `_bare` -> the metric here. The names in
# docs/coming_from are included. A number in a name is a rank.
_PEERS = (
    (r"(mean)?averageprecision|m?ap|retrievalmap", "mAP"),
    (r"((mean)?averageprecision|retrievalmap|ap)@r", "map@r"),
    (r"(retrieval)?rprec(ision)?|precision@r", "r_precision"),
    (r"(mean)?(reciprocalrank|reciprank)|retrievalmrr", "mrr"),
    (r"(mean)?(reciprocalrank|reciprank)@?\d+|(retrieval)?mrr(top)?\d+|retrievalmrr@\d+", "mrr@{k}"),
    (r"meaninversenegativepenalty|inversenegativepenalty|inp", "minp"),
    # trec_eval divides by R, papers on hashing and torchmetrics by the number of items found
    (r"mapcut@?\d+", "map@{k}_relevant"),
    (r"(retrievalmap|map)top(k=?)?@?\d+|retrievalmap@\d+", "map@{k}_found"),
    (r"((mean)?averageprecision|m?ap)@?\d+", "map@{k}_min"),
    # papers on metric learning use "recall" for the share of queries with a hit
    (r"(retrieval)?(hitrate|hits?|success|cmc|rank|cmcrank|r|acc|accuracy)(top)?@?\d*", "recall@{k}"),
    (r"(top|recalltop)@?\d+(acc|accuracy)?|precision@1|(top|rank)?\d+(acc|accuracy)", "recall@{k}"),
    (r"retrievalrecall(top)?@?\d*|recall\d+", "ir_recall@{k}"),
    (r"(retrievalprecision|precision|prec|p)(top)?@?\d+|retrievalprecision", "precision@{k}"),
    (r"ndcgcut@?\d+", "ndcg@{k}_linear"),
    (r"(retrieval)?(normalizeddcg|ndcg)(top)?@?\d*", "ndcg@{k}"),
    (r"(pooled|micro|best|max)?(f1?|f1?score|f1?measure)", "pair_f1"),
    (r"(pooled|micro)?precision", "pair_precision"),
    (r"(pooled|micro)?recall|tpr|sensitivity|true(positive|accept|match)rate", "pair_recall"),
    (r"(pooled|best|f1|bestf1)?threshold", "pair_threshold"),
    (r"equalerrorrate", "eer"),
    (r"aucpr|auprc|prauc|aupr|pooledap|microap", "auc_pr"),
    (r"retrievalauroc", "auroc"),
    (r"(pooled|micro)?(auroc|rocauc|aucroc|areaunderroc)(score|curve)?", "pair_auroc"),
    (r"(true(accept|match)rate|tar|tmr|tpr)(@|at)(far|fmr)\d*\.?\d+(e-?\d+)?", "tar@far{p}"),
    (r"mindcf(@?\d*\.?\d+)?|mincost", "min_dcf@{p}"),
)

# What a message adds to a suggested key, because other libraries use its name for another metric.
_EXPLANATIONS = {
    "pair_precision": "It is over all pairs at one threshold; precision@5 is over the first items of each query.",
    "pair_recall": "It is over all pairs at one threshold. recall@1 is the share of queries with a hit, grouped_recall@1 "
    "the same in groups of classes, ir_recall@10 the share of a query's relevant items that are found, and "
    "recall@precision0.95 is over all pairs at this precision.",
    "pair_f1": "It is over all pairs at one threshold, like pair_precision and pair_recall; recall@1 is the share of "
    "queries with a hit.",
    "pair_auroc": "It is over all pairs together; auroc is the mean over queries of the area for each query.",
    "pair_threshold": "It is the smallest accepted score for pair_precision, pair_recall and pair_f1.",
}


def _bare(key: str) -> str:
    """Return a key in lower case, without the signs between its words."""
    return re.sub(r"[\s_\-=:()]", "", re.sub(r"[_\- ]at[_\- ]", "@", key.lower()))


def _meant(key: str, among: Sequence[Metric]) -> str | None:
    """Return the key that a wrong key probably means; None if there is no similar key.

    It tries, in this order: the key in another case, the name in another library, the key with other signs between its
    words, a similarly spelt key, and a key with the same beginning.
    """
    of_queries = key[len(MACRO) :] if key.lower().startswith(MACRO) else key
    parameters = _numbers_in(of_queries)
    # One example per metric and divisor, to find keys in another case.
    examples = {
        metric.pattern.format(**parameters | {"divisor": divisor}): metric
        for metric in among
        for divisor in (get_args(Divisor) if "{divisor}" in metric.pattern else ("",))
    }
    bare = re.sub(r"^(cosine|dot|euclidean|manhattan)(?=.)", "", _bare(of_queries))  # a prefix of sentence-transformers
    meant = [example for example in examples if example.lower() == of_queries.lower()]
    for names, pattern in _PEERS:
        if re.fullmatch(names, bare):
            meant += [example for example in examples if example == pattern.format(**parameters)]
    meant += [example for example in examples if _bare(example) == bare]
    meant += difflib.get_close_matches(of_queries.lower(), examples, n=1)
    meant += [example for example in examples if of_queries and example.startswith(of_queries.lower())]
    if not meant:
        return None
    has_macro = key != of_queries and examples[meant[0]].is_of_queries
    return MACRO + meant[0] if has_macro else meant[0]


def _numbers_in(key: str) -> dict[str, str]:
    """Return the parameters of an example key: the rank and the rate in a key, or defaults."""
    rank = re.search(r"[1-9]\d*", key)
    rate = re.search(r"\d*\.\d+(e-?\d+)?|\d+e-\d+", key)
    return {"k": rank[0] if rank else "1", "p": rate[0] if rate else "0.95", "divisor": "min"}


def requested_metrics(call: str, metrics: Metrics, among: Sequence[Metric] | None = None) -> list[RequestedMetric]:
    """Return the requested metrics, each once.

    Keys may also name custom metrics in the same list: `macro_f1@2`, `F1.at(k=2)`. By default, all retrieval metrics
    and custom metrics are available.
    """
    if isinstance(metrics, str):
        raise InputError(f"{call}: metrics={metrics!r} is a string. Pass a tuple of keys: metrics=({metrics!r},).")
    if not metrics:
        first = (among or METRICS)[0].pattern
        raise InputError(f"{call}: metrics are empty. Pass at least one key, such as metrics=({first!r},).")
    try:
        for metric in cast(Iterable[Any], metrics):
            if isinstance(metric, Metric | RequestedMetric):
                _check_users_metric(metric, among)
        requested = find_metrics(metrics, among)
    except ValueError as error:
        raise InputError(f"{call}: {error}") from None
    keys = [metric.key for metric in requested]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(
                f"{call}: metrics contain two metrics with the key {key!r}. Give one of them another pattern."
            )
    return requested


def find_metrics(metrics: Metrics, among: Sequence[Metric] | None = None) -> list[RequestedMetric]:
    """Return the metrics from `stored_metrics`, each once, without a check of custom metrics."""
    stored = tuple(cast(Iterable[Any], metrics))
    users_metrics = [metric.metric for metric in stored if isinstance(metric, RequestedMetric)]
    known = (*(METRICS if among is None else among), *users_metrics)
    requested = [
        metric if isinstance(metric, RequestedMetric) else requested_metric(metric, known) for metric in stored
    ]
    return list(dict.fromkeys(requested))


# ---------------------------------------------------------------------------------------------------- metrics of a user


# The import path of a metric, and its parameters: `my_metrics.F1@k=2`.
_IMPORT_PATH = re.compile(
    r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*)\.(?P<name>[^\W\d]\w*)(?P<parameters>(?:@\w+=[^@]*)*)"
)


def stored_metrics(call: str, metrics: Iterable[Any]) -> tuple[Any, ...]:
    """Return metrics as settings store them, each once: keys, and `RequestedMetric` for custom metrics.

    `metrics` are keys, import paths and objects. Anything else is returned unchanged.
    """
    return tuple(dict.fromkeys(_stored_metric(call, metric) for metric in metrics))


def _stored_metric(call: str, metric: Any) -> Any:
    path = _IMPORT_PATH.fullmatch(metric) if isinstance(metric, str) else None
    if path is not None:
        metric = _imported_metric(call, path)
    if isinstance(metric, Metric):
        if metric.keys.groups:
            fields = " and ".join(metric.keys.groupindex)
            raise InputError(
                f"{call}: the metric {metric.pattern!r} needs {fields}. Pass the result of its {metric.example}."
            )
        metric = metric.at()
    if isinstance(metric, RequestedMetric) and not is_users(metric.metric):
        return metric.key
    return metric


def _imported_metric(call: str, path: re.Match[str]) -> Metric | RequestedMetric:
    """Return the metric that an import path names, with the parameters after the path."""
    fact = f"{call}: metrics contain {path[0]!r}"
    name = path["name"]
    try:
        module = import_module(path["module"])
    except ModuleNotFoundError as error:
        raise InputError(
            f"{fact}, but there is no module {error.name!r}. Write the module and the name of a Metric in it, such as "
            "my_metrics.F1@k=2. Start Python in the module's folder, or install the module."
        ) from error
    metric = getattr(module, name, None)
    if metric is None:
        names = [name for name, value in vars(module).items() if isinstance(value, Metric | RequestedMetric)]
        raise InputError(f"{fact}, but {path['module']} has no {name}. Its metrics are {', '.join(names) or 'none'}.")
    if not isinstance(metric, Metric | RequestedMetric):
        raise InputError(
            f"{fact}, which is {with_article(type(metric).__name__)}, not a Metric. Name a Metric, or what its at() returns."
        )
    given = [part.split("=", 1) for part in path["parameters"].split("@")[1:]]
    parameters = dict(given)
    if len(parameters) < len(given):
        raise InputError(f"{fact}, which has a parameter twice. Write each parameter once, such as my_metrics.F1@k=2.")
    if not parameters:
        return metric
    if isinstance(metric, RequestedMetric):
        raise InputError(f"{fact}, but this metric already has parameters: its key is {metric.key!r}. Leave them out.")
    try:
        return metric.at(**parameters)
    except ValueError as error:
        raise InputError(f"{call}: {error}") from None


def is_users(metric: Metric) -> bool:
    """Return whether a metric of an evaluation is a custom metric."""
    return metric not in METRICS


def _check_users_metric(requested: Metric | RequestedMetric, among: Sequence[Metric] | None) -> None:
    """Refuse a custom metric that cannot be computed, or that has the key of a metric of this package."""
    if among is not None or isinstance(requested, Metric):
        key = requested.pattern if isinstance(requested, Metric) else requested.key
        raise InputError(
            f"metrics contain the custom metric {key!r}, which only evaluate_retrieval accepts. Pass keys."
        )
    key = requested.key
    metric = requested.metric
    if any(known.keys.fullmatch(key) for known in METRICS):
        raise InputError(f"{key!r} is the key of a metric of this package. Give your metric another pattern.")
    if metric.input not in ("ranks", "pairs"):
        raise InputError(
            f"the metric {key!r} has input={metric.input!r}. Pass input='ranks' with a function of a RankBlock, or "
            "input='pairs' with a function of PooledDecisions."
        )
    if metric.value is None:
        raise InputError(f"the metric {key!r} has no function. Pass value=, a function of its {metric.input}.")
    arguments = dict(requested.parameters)
    if metric.input == "ranks":
        arguments["ties"] = "expected"
    try:
        signature = inspect.signature(metric.value)
    except ValueError:  # some compiled functions have no signature
        return
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        first = "ranks" if metric.input == "ranks" else "pooled"
        shown = ", ".join([first, *(f"{name}={value!r}" for name, value in arguments.items())])
        raise InputError(
            f"the function of {key!r} cannot be called as value({shown}): {error}. Give the function these parameters."
        ) from None
