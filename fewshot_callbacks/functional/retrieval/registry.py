"""The metrics of an evaluation. A user asks for a metric by the key under which it is logged.

To add a metric, add an entry to `METRICS`: its keys, reports, tables and messages follow from it. A metric of ranks is a
function in `rank_metrics.py`; its entry has the source `ranks`. Two lists for readers are written by hand: the keys in
the docstring of `RetrievalSettings` (`fewshot_callbacks/settings.py`), which `help` shows, and the table of
`docs/metrics.md`. `CONTRIBUTING.md` goes through all steps.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args

from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional.retrieval import rank_metrics
from fewshot_callbacks.functional.retrieval.rank_metrics import Divisor

# Ranks are compared as integers of 64 bits.
LARGEST_RANK = 2**63 - 1
# Before the key of a metric of queries, for the mean over classes.
MACRO = "macro_"


@equal_with_nan
@dataclass(frozen=True)
class Metric:
    """A metric: its key, its meaning, and how it is computed.

    Attributes:
        pattern: Its key; `{k}` is a rank, `{p}` a share, `{divisor}` the divisor of AP@k.
        source: From where its value comes: the `ranks` of a query, the `prototypes` of the classes, the `groups` of Grouped
            Recall, the `pairs` of all queries and candidates, or the pairs of each of the `classes`. The first two have a
            value for each query.
        value: The value, from the ranks of some queries and the rule for ties, from a `GroupedRecall`, from
            `PooledDecisions`, or from a `ThresholdConsistency` for each rate; the parameters of the key are passed by name.
            None for prototypes.
        meaning: One sentence, with the parameters of the key.
        range: The smallest and the largest value; None for a score, in the units of the data.
        better: Which values are better; None where neither are.
    """

    pattern: str
    source: Literal["ranks", "prototypes", "groups", "pairs", "classes"]
    value: Callable[..., Any] | None
    meaning: str
    range: tuple[float, float] | None = (0.0, 1.0)
    better: Literal["higher", "lower"] | None = "higher"

    @functools.cached_property
    def keys(self) -> re.Pattern[str]:
        """The keys that name this metric; its parameters are groups of the match."""
        return re.compile(re.sub(r"\\{(\w+)\\}", lambda field: _FIELDS[field[1]], re.escape(self.pattern)))


# How the parameters of a key are written, and how each is read.
_FIELDS = {
    "k": r"(?P<k>[1-9]\d*)",
    "p": r"(?P<p>\d*\.?\d+(?:e-?\d+)?)",
    "divisor": f"(?P<divisor>{'|'.join(get_args(Divisor))})",
}
_TYPES: dict[str, Callable[[str], Any]] = {"k": int, "p": float, "divisor": str}

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
        "Share of the first {k} that is relevant, or of those up to the last relevant item: revisited Oxford and Paris.",
    ),
    Metric("ndcg@{k}", "ranks", rank_metrics.ndcg, "Discounted gain of the first {k}, over the best possible."),
    # With one label for each item the relevance is 0 or 1, and both gains are the same.
    Metric(
        "ndcg@{k}_linear",
        "ranks",
        rank_metrics.ndcg,
        "Discounted gain of the first {k}, over the best possible; n shared labels gain n.",
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
        "Harmonic mean of pair_precision and pair_recall; the best, unless threshold is given.",
    ),
    Metric(
        "pair_threshold",
        "pairs",
        attrgetter("decision.threshold"),
        "Score from which a pair is accepted for pair_precision, pair_recall and pair_f1.",
        range=None,
        better=None,
    ),
    Metric("auc_pr", "pairs", attrgetter("auc_pr.value"), "Area under the pooled precision-recall curve."),
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
        "Relevant pairs rejected where at most {p} of the irrelevant ones are accepted.",
        better="lower",
    ),
    Metric(
        "eer",
        "pairs",
        attrgetter("equal_error_rate"),
        "Rate at which as many relevant pairs are rejected as irrelevant ones accepted.",
        better="lower",
    ),
    Metric(
        "opis@fmr{p}",
        "classes",
        lambda consistency, p: consistency[p].opis,
        "Variance between classes of what a threshold is worth to them, where a tenth of {p} to {p} of the others match.",
        range=(0.0, 0.25),
        better="lower",
    ),
    Metric(
        "opis_gap@fmr{p}",
        "classes",
        lambda consistency, p: consistency[p].gap(),
        "How much less thresholds at these rates, up to {p}, are worth to the worst tenth of the classes than to all.",
        better="lower",
    ),
)

RELEVANCE_METRICS = ("mAP", "map@r", "r_precision", "mrr", "recall@1", "recall@5", "recall@10", "ndcg@10")
"""What is reported by default if relevance is no single label: with judgements, lists, or several labels an item."""


@dataclass(frozen=True)
class RequestedMetric:
    """A requested key, with its metric and the parameters that the key holds."""

    key: str
    metric: Metric
    parameters: Mapping[str, Any]

    @property
    def is_macro(self) -> bool:
        """Whether the mean over classes is requested, rather than that over queries."""
        return self.key.startswith(MACRO)

    @property
    def of_queries(self) -> str:
        """The key of the same metric as a mean over queries."""
        return self.key.removeprefix(MACRO)

    @property
    def patterns(self) -> dict[str, float]:
        """Its key with one number left open, such as `recall@{k}` -> that number; empty for a key without a number."""
        prefix = MACRO if self.is_macro else ""
        patterns = {}
        for name in ("k", "p"):
            if name in self.parameters:
                left_open = {**self.parameters, name: f"{{{name}}}"}
                patterns[prefix + self.metric.pattern.format(**left_open)] = self.parameters[name]
        return patterns

    @property
    def meaning(self) -> str:
        """A sentence on what the metric is."""
        if self.is_macro:
            return f"Mean over classes of {self.of_queries}, so that large classes do not dominate."
        return self.metric.meaning.format(**self.parameters)


def requested_metric(key: object, among: Sequence[Metric] | None = None) -> RequestedMetric:
    """Return the metric of a key.

    Args:
        key: The key under which the metric is logged.
        among: The metrics that there are; by default those of retrieval.

    Raises:
        ValueError: If there is no such metric. The message names the one that is meant: written in other letters, under the
            name of another library, or misspelt.

    Examples:
        >>> requested_metric("recall@5").meaning
        'Queries with a relevant item among the first 5.'
        >>> requested_metric("recal@5")
        Traceback (most recent call last):
        ValueError: there is no metric 'recal@5'; did you mean 'recall@5'?
        >>> requested_metric("RetrievalHitRate@5")
        Traceback (most recent call last):
        ValueError: there is no metric 'RetrievalHitRate@5'; did you mean 'recall@5'?
    """
    if not isinstance(key, str):
        raise ValueError(f"metrics hold {key!r}. Each is the key under which it is logged, such as 'recall@1'.")
    of_queries = key.removeprefix(MACRO)
    if among is None:
        among = METRICS  # not in the signature, where it would be that of the first import
    for metric in among:
        match = metric.keys.fullmatch(of_queries)
        if match is not None:
            return RequestedMetric(key, metric, _parameters(key, metric, match))
    meant = _meant(key, among)
    if meant is not None:
        explanation = _EXPLANATIONS.get(meant, "")
        raise ValueError(f"there is no metric {key!r}; did you mean {meant!r}? {explanation}".rstrip())
    known = ", ".join(metric.pattern for metric in among)
    if any(metric.source == "ranks" for metric in among):
        known += ", and macro_ before those of single queries"
    raise ValueError(f"there is no metric {key!r}. There are {known}.")


def _parameters(key: str, metric: Metric, match: re.Match[str]) -> dict[str, Any]:
    """Return the parameters of a key, if its rank and its rate are in range, and if it has a mean over classes."""
    of_queries = key.removeprefix(MACRO)
    if key != of_queries and metric.source not in ("ranks", "prototypes"):
        raise ValueError(
            f"there is no metric {key!r}: {of_queries} has no value for each query, and so no mean over classes. "
            f"Ask for {of_queries!r}."
        )
    parameters = {name: _TYPES[name](word) for name, word in match.groupdict().items()}
    if parameters.get("k", 1) > LARGEST_RANK:
        raise ValueError(
            f"metrics hold {key!r}, and ranks end at 2**63 - 1. From the number of gallery items on, all "
            "candidates count: pass that number."
        )
    if not 0 < parameters.get("p", 1) <= 1:
        raise ValueError(f"metrics hold {key!r}, but a rate lies in (0, 1], such as 0.95.")
    return parameters


def is_pattern(pattern: object, among: Sequence[Metric]) -> bool:
    """Return whether this is the key of a metric with one number left open, as `RequestedMetric.patterns` writes it."""
    if not isinstance(pattern, str) or len(re.findall(r"\{[kp]\}", pattern)) != 1:
        return False
    try:
        return pattern in requested_metric(pattern.replace("{k}", "1").replace("{p}", "0.5"), among).patterns
    except ValueError:
        return False


# Names that other libraries, programs and papers give a metric, as `_bare` writes them -> the metric here. Those of
# docs/coming_from are among them. A number in a name is a rank.
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
    # papers on metric learning call the share of queries with a hit recall
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
    (r"(true(accept|match)rate|tar|tmr|tpr)(@|at)(far|fmr)\d*\.?\d+(e-?\d+)?", "tar@far{p}"),
    (r"mindcf(@?\d*\.?\d+)?|mincost", "min_dcf@{p}"),
)

# What a message adds to the key that is meant, since other metrics have the same name elsewhere.
_EXPLANATIONS = {
    "pair_precision": "It is of all pairs at one threshold; precision@5 is of the first items of each query.",
    "pair_recall": "It is of all pairs at one threshold; recall@1 is of queries with a hit, grouped_recall@1 the same in "
    "groups of classes, ir_recall@10 of the relevant items of a query, recall@precision0.95 of all pairs at that precision.",
    "pair_f1": "It is of all pairs at one threshold, as pair_precision and pair_recall; recall@1 is of queries with a hit.",
    "pair_threshold": "It is the score from which pairs are accepted for pair_precision, pair_recall and pair_f1.",
}


def _bare(key: str) -> str:
    """Return a key in small letters, without the signs between its words."""
    return re.sub(r"[\s_\-=:()]", "", re.sub(r"[_\- ]at[_\- ]", "@", key.lower()))


def _meant(key: str, among: Sequence[Metric]) -> str | None:
    """Return the key that is meant by a wrong one; None if no key is near.

    In this order: the same key in other letters, the name of another library, the same key with other signs between its
    words, a key that is spelt nearly alike, and one that begins alike.
    """
    of_queries = key[len(MACRO) :] if key.lower().startswith(MACRO) else key
    parameters = _numbers_in(of_queries)
    # An example of each metric, with each divisor, so that one in other letters is found.
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
    has_macro = key != of_queries and examples[meant[0]].source in ("ranks", "prototypes")
    return MACRO + meant[0] if has_macro else meant[0]


def _numbers_in(key: str) -> dict[str, str]:
    """Return the parameters of an example: the rank and the rate in a key, or usual ones."""
    rank = re.search(r"[1-9]\d*", key)
    rate = re.search(r"\d*\.\d+(e-?\d+)?|\d+e-\d+", key)
    return {"k": rank[0] if rank else "1", "p": rate[0] if rate else "0.95", "divisor": "min"}


def requested_metrics(call: str, keys: Sequence[str], among: Sequence[Metric] | None = None) -> list[RequestedMetric]:
    """Return the metrics of some keys, each once.

    Raises:
        ValueError: As `requested_metric`; or if the keys are a single string, or there are none.
    """
    if isinstance(keys, str):
        raise ValueError(f"{call}: metrics={keys!r} is one word. Pass several keys: metrics=({keys!r},).")
    if not keys:
        first = (among or METRICS)[0].pattern
        raise ValueError(f"{call}: metrics are empty. Ask for at least one, such as metrics=({first!r},).")
    try:
        return [requested_metric(key, among) for key in dict.fromkeys(keys)]
    except ValueError as error:
        raise ValueError(f"{call}: {error}") from None
