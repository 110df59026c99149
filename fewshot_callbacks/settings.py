"""Settings of evaluations and reports: types, defaults and meanings. This module does not import torch.

The docstring of a class explains its settings. `takes` copies this text to the functions that take the settings as
keywords, where `help`, editors, the documentation and the command line show it.

`Metric` and `RequestedMetric` are here because they are types of a setting. The metrics themselves are in
`functional/retrieval/registry.py`.

To add a setting of an evaluation, add a field with its meaning to `RetrievalDefaults`, an entry to `RetrievalOptions`,
and a check to `functional/retrieval/settings.py`.
"""

from __future__ import annotations

import functools
import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter
from os import PathLike
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from fewshot_callbacks.errors import InputError

# `cosine`: cosine of the angle; 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance.
# `hamming`: minus the number of differing bits of two codes.
Similarity = Literal["cosine", "dot", "euclidean", "hamming"]
Ties = Literal["expected", "optimistic", "pessimistic"]
LabelGroups = int | Sequence[Sequence[int | str]] | Literal["auto"] | None
Divisor = Literal["min", "relevant", "found"]
"""Divisor of AP@k: `min` is min(R, k), `relevant` is R, `found` is the number of relevant items in the top k."""
Code = Literal["int8", "binary"]
"""Storage of each dimension of a compressed embedding: `int8` is a byte, `binary` a bit."""
MetricInput = Literal["ranks", "prototypes", "groups", "pairs", "classes"]


class NoFile(PathLike[str]):
    """A type without values. In a union, it keeps jsonargparse from reading a configuration file.

    If a union has a class, such as EmbeddingSource, and a string is the name of an existing file, jsonargparse passes
    the content of the file. It does not do so if the union contains a path type.
    """


FilePath = str | PathLike[str] | NoFile
"""Path of a file or a folder."""

DEFAULT_METRICS = (
    *("mAP", "map@r", "r_precision", "mrr", "recall@1", "recall@5", "recall@10", "grouped_recall@1"),
    *("pair_precision", "pair_recall", "pair_f1", "pair_threshold", "recall@precision0.95"),
)
"""The metrics that are reported by default. `metrics=(*DEFAULT_METRICS, "eer")` adds one."""

Target = TypeVar("Target", bound=Callable[..., Any])


class UnknownSettingError(TypeError, InputError):
    """Raised for an unknown setting. It is a TypeError (unexpected keyword) and a ValueError (wrong setting)."""


# Ranks are compared as 64-bit integers.
LARGEST_RANK = 2**63 - 1
# Prefix of the key of a metric, for the mean over classes.
MACRO = "macro_"

# Parameter of a key -> how it is written.
_FIELDS = {
    "k": r"(?P<k>[1-9]\d*)",
    "p": r"(?P<p>\d*\.?\d+(?:e-?\d+)?)",
    "divisor": f"(?P<divisor>{'|'.join(get_args(Divisor))})",
}
_TYPES: dict[str, Callable[[str], Any]] = {"k": int, "p": float, "divisor": str}
# an example of each parameter, for messages
_EXAMPLES = {"k": "5", "p": "0.95", "divisor": "'min'"}


@dataclass(frozen=True, repr=False)
class Metric:
    """A metric: its key, its meaning and its function.

    You can pass your own metric wherever a key such as `"mAP"` is accepted, or name it by its import path, such as
    `my_metrics.F1@k=2`. Its function takes `ranks` or `pairs`. Define the function at the top of a module: spawned
    processes pickle it, and a lambda cannot be pickled. `METRICS` are the metrics of this package.

    Args:
        pattern: Its key. `{k}` is a rank, from 1 on, and `{p}` a rate in (0, 1]. `{divisor}` is the divisor of AP@k.
        input: What the function gets: the `ranks` of the candidates of each query, or the `pairs` of all queries and
            candidates. Metrics of this package can also use the `prototypes` of the classes, the `groups` of Grouped
            Recall, or the pairs of each of the `classes`. Metrics of ranks and prototypes have a value for each query.
        value: The function. With `ranks` it is called as value(ranks, ties=ties, k=k), with a `RankBlock` and the rule
            for ties, and returns a value for each query. With `pairs` it is called as value(pooled, k=k), with
            `PooledDecisions`, and returns a number. Parameters of the key are passed by name. With `groups` it gets a
            `GroupedRecall`, with `classes` a `ThresholdConsistency` for each rate. None for prototypes.
        meaning: One sentence with the parameters of the key, such as "Share of the first {k} that is relevant."
        range: Smallest and largest value; None for a value without bounds, such as a score. With a range, the interval
            of the mean is a t interval on the logit scale of the range; without one, it is a plain t interval.
        better: Which values are better, for `ModelCheckpoint` and others; None if neither are.

    Raises:
        ValueError: If the pattern is not a key, or an argument has another form.

    Examples:
        >>> from fewshot_callbacks import evaluate_retrieval, hits_within
        >>> def hits(ranks, k, ties="expected"):
        ...     return hits_within(ranks, ranks.relevant * 0 + k, ties)
        >>> metric = Metric("hits@{k}", "ranks", hits, "Relevant items among the first {k}.", range=None)
        >>> metric.at(k=5).key, metric.at(k=5).meaning
        ('hits@5', 'Relevant items among the first 5.')
        >>> embeddings = [[1.0, 0.0], [1.0, 0.1], [0.9, 0.2], [0.0, 1.0], [0.1, 1.0]]
        >>> evaluate_retrieval(embeddings, [0, 0, 0, 1, 1], metrics=metric.at(k=2))["hits@2"]
        1.6
    """

    pattern: str
    input: MetricInput
    # A callable object may have no hash.
    value: Callable[..., Any] | None = field(hash=False)
    meaning: str
    range: tuple[float, float] | None = (0.0, 1.0)
    better: Literal["higher", "lower"] | None = "higher"

    @property
    def is_of_queries(self) -> bool:
        """Whether it has a value for each query."""
        return self.input in ("ranks", "prototypes")

    def __post_init__(self) -> None:
        known = _fields_of(self.pattern)
        if self.input not in get_args(MetricInput):
            raise InputError(
                f"Metric({self.pattern!r}): input={self.input!r} is unknown. Pass 'ranks' for a function of the ranks of "
                "each query, or 'pairs' for a function of all pairs."
            )
        if self.value is not None and not callable(self.value):
            raise InputError(f"Metric({self.pattern!r}): value={self.value!r} is not a function. Pass one.")
        for name in _fields_of_text(self.meaning):
            if name not in known:
                raise InputError(
                    f"Metric({self.pattern!r}): the meaning has {{{name}}}, but the pattern does not. Use the same fields."
                )
        if self.range is not None:
            ends = tuple(self.range)
            if len(ends) != 2 or not ends[0] < ends[1]:
                raise InputError(
                    f"Metric({self.pattern!r}): range={self.range!r} must be the smallest and the largest value, such as "
                    "(0.0, 1.0). Pass None for a value without bounds."
                )
            object.__setattr__(self, "range", ends)
        if self.better not in ("higher", "lower", None):
            raise InputError(
                f"Metric({self.pattern!r}): better={self.better!r} is unknown. Pass 'higher', 'lower' or None."
            )

    def __repr__(self) -> str:
        """Return the pattern and the name of the function; its address would differ between processes."""
        function = getattr(self.value, "__qualname__", type(self.value).__name__)
        return f"Metric({self.pattern!r}, {self.input!r}, {function})"

    @functools.cached_property
    def keys(self) -> re.Pattern[str]:
        """A regular expression for the keys of this metric; the groups are its parameters."""
        return re.compile(re.sub(r"\\{(\w+)\\}", lambda match: _FIELDS[match[1]], re.escape(self.pattern)))

    @property
    def example(self) -> str:
        """An example call of `at`, for messages."""
        return f".at({', '.join(f'{name}={_EXAMPLES[name]}' for name in _fields_of(self.pattern))})"

    def at(self, **parameters: Any) -> RequestedMetric:
        """Return this metric with values for its parameters, to pass among `metrics`: `F1.at(k=5)`.

        Args:
            **parameters: The fields of the pattern, by name.

        Raises:
            ValueError: If one is missing, unknown or out of range.
        """
        shown = ", ".join(f"{name}={value}" for name, value in parameters.items())
        call = f"Metric({self.pattern!r}).at({shown})"
        needed = _fields_of(self.pattern)
        missing = [name for name in needed if name not in parameters]
        unknown = [name for name in parameters if name not in needed]
        if missing:
            raise InputError(f"{call} lacks {' and '.join(missing)}. Pass {self.example}.")
        if unknown:
            raise InputError(f"{call}: the pattern has no {' and no '.join(unknown)}. Pass {self.example}.")
        key = self.pattern.format(**parameters)
        match = self.keys.fullmatch(key)
        if match is None:
            raise InputError(
                f"the metric {self.pattern!r} has no key {key!r}. k is a rank, a whole number from 1 on, and p a rate in "
                f"(0, 1]. Pass, for instance, {self.example}."
            )
        return RequestedMetric(key, self, read_parameters(key, match))


@dataclass(frozen=True)
class RequestedMetric:
    """A requested key, with its metric and the parameters in the key. `Metric.at` returns it."""

    key: str
    metric: Metric
    parameters: Mapping[str, Any] = field(hash=False, repr=False)

    @property
    def is_macro(self) -> bool:
        """Whether the mean over classes is requested, not the mean over queries."""
        return self.key.startswith(MACRO)

    @property
    def of_queries(self) -> str:
        """The key of the same metric as a mean over queries."""
        return self.key.removeprefix(MACRO)

    @property
    def patterns(self) -> dict[str, float]:
        """Its key with a number replaced by its name -> the number: `recall@{k}` -> 5. Empty without numbers."""
        prefix = MACRO if self.is_macro else ""
        patterns = {}
        for name in ("k", "p"):
            if name in self.parameters:
                left_open = {**self.parameters, name: f"{{{name}}}"}
                patterns[prefix + self.metric.pattern.format(**left_open)] = self.parameters[name]
        return patterns

    @property
    def meaning(self) -> str:
        """What the metric is, in a sentence."""
        if self.is_macro:
            return f"Mean over classes of {self.of_queries}, so that large classes do not dominate."
        return self.metric.meaning.format(**self.parameters)


def _fields_of(pattern: str) -> list[str]:
    """Return the fields in the pattern of a key.

    Raises:
        ValueError: If the text is not the pattern of a key.
    """
    call = f"Metric({pattern!r})"
    try:
        names = _fields_of_text(pattern)
    except ValueError:
        raise InputError(f"{call}: the braces of the pattern do not match. Write, for instance, 'f1@{{k}}'.") from None
    for name in names:
        if name not in _FIELDS:
            raise InputError(
                f"{call}: {{{name}}} is not a field. Write {{k}} for a rank and {{p}} for a rate, such as 'f1@{{k}}'."
            )
    if pattern.startswith(MACRO):
        raise InputError(f"{call}: {MACRO} before a key requests the mean over classes. Leave it out of the pattern.")
    if re.fullmatch(r"[\w@-]+", re.sub(r"{\w+}", "", pattern)) is None:
        raise InputError(f"{call}: a key has only letters, digits, _, - and @. Write, for instance, 'f1@{{k}}'.")
    return names


def _fields_of_text(text: str) -> list[str]:
    """Return the names in braces. Raises a ValueError if braces do not match."""
    return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]


def read_parameters(key: str, match: re.Match[str]) -> dict[str, Any]:
    """Return the parameters in the key of a metric.

    Args:
        key: The key, for messages.
        match: The match of `Metric.keys` with it.

    Raises:
        ValueError: If a rank or a rate is out of range.
    """
    parameters = {name: _TYPES[name](word) for name, word in match.groupdict().items()}
    if parameters.get("k", 1) > LARGEST_RANK:
        raise InputError(
            f"metrics contains {key!r}, but the largest rank is 2**63 - 1. Pass the number of gallery items to "
            "count all candidates."
        )
    if not 0 < parameters.get("p", 1) <= 1:
        raise InputError(f"metrics contains {key!r}, but a rate must be in (0, 1], such as 0.95.")
    return parameters


Metrics = str | Metric | RequestedMetric | Sequence[str | Metric | RequestedMetric]
"""A key, an import path or a metric object, or several of them."""


@dataclass(frozen=True, kw_only=True)
class RetrievalDefaults:
    """The settings of `evaluate_retrieval` with their defaults. `RetrievalSettings` also checks them.

    Args:
        similarity: How two embeddings are compared: `cosine`, `dot`, `euclidean` (minus the distance) or `hamming`
            (minus the number of differing bits, for binary codes of -1 and +1, or 0 and 1, in any dtype).
        metrics: Keys of the metrics that are reported and logged, in this order: mAP, map@r, r_precision, mrr, mrr@{k},
            minp, ap_trapezoid, map@{k}_{divisor}, recall@{k}, ir_recall@{k}, precision@{k}, precision@{k}_last,
            ndcg@{k}, ndcg@{k}_linear, auroc, prototype_accuracy, grouped_recall@{k}, grouped_recall@{k}_miss,
            pair_precision, pair_recall, pair_f1, pair_threshold, auc_pr, pair_auroc, recall@precision{p}, fnmr@fmr{p},
            eer, opis@fmr{p} and opis_gap@fmr{p}. Write macro_ before the key of a per-query metric for its mean over
            classes. Pass your own metric as a `Metric`, such as F1.at(k=2), or by its import path, such as
            my_metrics.F1@k=2.
        threshold: Lowest score at which a pair is accepted, for pair_precision, pair_recall and pair_f1. None uses the
            threshold with the best F1.
        threshold_bounds: Smallest and largest threshold allowed for recall at fixed precision. None sets no bounds. (0,
            1) reproduces definitions that search thresholds in [0, 1].
        label_groups: Groups of labels for Grouped Recall. A number, at least 2: random groups of this many labels.
            Lists: the labels of each group, for instance the classes of each family, [[0, 1, 2], [3, 4, 5]]
            (`grouped_recall` explains what the interval then means). None: no Grouped Recall. `auto`: groups of 10
            labels if the queries have at least 20 classes; with fewer classes, the Grouped Recall of the default
            metrics is left out without a note.
        ties: How equal scores count: `expected` (the mean over all orders), `optimistic` or `pessimistic`.
        max_queries: Evaluate at most this many queries, drawn from all classes in proportion to their size, against the
            whole gallery. The values are then estimates, and their intervals show the uncertainty. None evaluates all
            queries.
        seed: Seed of the random groups and of the drawn queries. The groups also depend on the set of labels, the
            queries on their order.
        confidence: Confidence level of the intervals, in (0, 1).
        memory_mb: Bound on the memory in addition to the embeddings, in MB. Infinity sets no bound. None is 512; on a
            CUDA `device` the bound applies to its memory, and None is half of what is free. If an evaluation needs
            more, `memory_note` of the report gives the number. Binary codes take what their number and the largest
            class need, without a note.
        device: Device that computes the scores: `cpu`, `cuda` (or `cuda:1`, ...) or `auto`. The results are the same.
            The embeddings stay where they are and are copied in slices.
    """

    similarity: Similarity = "cosine"
    metrics: Metrics = DEFAULT_METRICS
    threshold: float | None = None
    threshold_bounds: tuple[float, float] | None = None
    label_groups: LabelGroups = "auto"
    ties: Ties = "expected"
    max_queries: int | None = None
    seed: int = 0
    confidence: float = 0.95
    memory_mb: float | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class ReportDefaults:
    """Size and content of a report, with the defaults. `ReportSettings` also checks them.

    Numbers of items and pairs are upper bounds.

    Args:
        max_mb: Largest size of the file in MB. Pictures that do not fit are left out, and the report notes this.
        worst: Number of queries with the lowest average precision, at most three of a class, and only below 1.
        searchable: Number of other queries that you can search for: a seeded sample from all classes.
        neighbours: Number of neighbours shown for a query or a suspect.
        suspects: Number of items whose label is probably wrong, the most suspicious first.
        duplicates: Number of pairs of near duplicates, the most similar first, inside the set and between sets.
        duplicates_from: Lowest cosine of near duplicates; for binary codes the lowest fraction of equal bits.
        confusion_queries: Number of queries whose neighbours show which classes are confused; a seeded sample of a
            larger set.
        thumbnail: Longer side of a picture, in pixels.
        background: Colour behind transparent parts of a picture, such as white or #00ff00: use the colour of your
            training data.
        memory_mb: Bound on the memory of each search in addition to the embeddings, in MB. None is 512.
    """

    max_mb: float = 20.0
    worst: int = 24
    searchable: int = 200
    neighbours: int = 6
    suspects: int = 100
    duplicates: int = 60
    duplicates_from: float = 0.98
    confusion_queries: int = 20_000
    thumbnail: int = 96
    background: str = "white"
    memory_mb: float | None = None


# Type checkers learn the types of **settings only from a TypedDict (PEP 692), so the types are repeated here. A test
# compares them with the types in `RetrievalDefaults`.
#
# Each TypedDict adds settings to its parent. Add a new setting to the last TypedDict whose functions all take it.
# `RetrievalOptions` must have every field of `RetrievalDefaults`.


class SearchOptions(TypedDict, total=False):
    """The settings of every search of a gallery."""

    similarity: Similarity
    ties: Ties
    confidence: float
    memory_mb: float | None


class GroupedOptions(SearchOptions, total=False):
    """The settings of `grouped_recall`."""

    label_groups: LabelGroups
    seed: int


class GapOptions(GroupedOptions, total=False):
    """The settings of `GeneralizationGapMonitor`."""

    metrics: Metrics


class RetrievalOptions(GapOptions, total=False):
    """The settings of `evaluate_retrieval`."""

    threshold: float | None
    threshold_bounds: tuple[float, float] | None
    max_queries: int | None
    device: str


def plain_list(value: Any) -> Any:
    """Return a list of another library, and the lists inside it, as lists; any other value unchanged.

    Hydra and OmegaConf pass a `ListConfig`. It is not a `list`, and it keeps the whole configuration.

    Examples:
        >>> from collections import UserList
        >>> plain_list(UserList([UserList([0, 1]), UserList([2, 3])]))
        [[0, 1], [2, 3]]
        >>> plain_list((0.0, 1.0)), plain_list("mAP")
        ((0.0, 1.0), 'mAP')
    """
    if not isinstance(value, Sequence) or isinstance(value, list | tuple | str | bytes | range):
        return value
    return [plain_list(entry) for entry in value]


def refuse_other_arguments(
    owner: str, settings: Mapping[str, Any], written: Mapping[str, Callable[[Any], str]]
) -> None:
    """Refuse keywords that are arguments of something else.

    Args:
        owner: The class that got them, for messages.
        settings: The keywords.
        written: Name of such an argument -> a function of its value that returns what to write instead.

    Raises:
        UnknownSettingError: With the fix of the first one.
    """
    for name in settings:
        if name in written:
            raise UnknownSettingError(f"{owner}: {name} is not a setting. Write {written[name](settings[name])}.")


def names_of(options: type) -> list[str]:
    """Return the names of the settings in a TypedDict, in the order of `RetrievalDefaults`."""
    types = get_type_hints(options)
    return [setting.name for setting in fields(RetrievalDefaults) if setting.name in types]


def takes(options: type, **defaults: Any) -> Callable[[Target], Target]:
    """Return a decorator for a function or a class that takes settings as keywords.

    The decorator adds each setting to the signature and to the docstring, so that `help`, notebooks and jsonargparse
    show it. Without it, the meaning of each setting would be written eight times.

    Args:
        options: The TypedDict of the settings. The docstring needs a line that begins with `**settings:` in their
            place.
        **defaults: Defaults that differ from `RetrievalDefaults`.
    """

    def decorate(target: Target) -> Target:
        function: Any = vars(target)["__init__"] if isinstance(target, type) else target
        signature = inspect.signature(function)
        others = [entry for entry in signature.parameters.values() if entry.kind is not Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*others, *_parameters(options, defaults)])
        return with_meanings(target, RetrievalDefaults, names_of(options))

    return decorate


def with_meanings(target: Target, settings: type, names: Sequence[str] | None = None) -> Target:
    """Return a function or a class whose docstring explains settings in place of its line `**settings:`.

    Args:
        target: The function or the class.
        settings: The class whose docstring explains the settings.
        names: Names of the settings; None for all.
    """
    if target.__doc__ is not None:  # it is None under `python -OO`
        entries = _entries(settings)
        target.__doc__ = _with_entries(target.__doc__, [entries[name] for name in names or entries])
    return target


def _parameters(options: type, defaults: Mapping[str, Any]) -> list[Parameter]:
    """Return the settings as parameters of a signature."""
    # Types, not their names, which jsonargparse would look up in the module of the function.
    types = get_type_hints(options)
    usual = {setting.name: setting.default for setting in fields(RetrievalDefaults)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, usual[name]), annotation=types[name])
        for name in names_of(options)
    ]


def _with_entries(docstring: str, entries: Sequence[str]) -> str:
    """Return a docstring whose line `**settings:` is replaced by entries of settings."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if line.startswith("    **settings:"):
            lines.extend(entries)
        else:
            lines.append(line)
    return "\n".join(lines)


def _entries(settings: type) -> dict[str, str]:
    """Return name of a field -> its entry in the `Args:` of a class, one line or several."""
    # Up to Python 3.12 a docstring keeps the indentation of the source.
    section = inspect.cleandoc(settings.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith(" " * 8):
            entries[name] += f"\n{line}"
        else:
            name = line.partition(":")[0].strip()
            entries[name] = line
    return entries
