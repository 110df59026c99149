"""The settings of evaluations and reports: each with its type, its default and its meaning. Nothing here imports torch.

The meaning of a setting stands in the docstring of its class. `help`, editors and the documentation show it there.
`takes` copies it to the functions that take the settings as keywords. jsonargparse prints it as the help of an option.

`Metric` and `RequestedMetric` stand here because they are types of a setting. The metrics that there are stand in
`functional/retrieval/registry.py`.

A new setting of an evaluation is a field of `RetrievalDefaults` with its meaning, an entry of `RetrievalOptions`, and a
check in `functional/retrieval/settings.py`.
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

# `cosine`: cosine of the angle, 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance.
# `hamming`: minus the number of bits in which two codes of -1 and +1 differ.
Similarity = Literal["cosine", "dot", "euclidean", "hamming"]
Ties = Literal["expected", "optimistic", "pessimistic"]
LabelGroups = int | Sequence[Sequence[int | str]] | Literal["auto"] | None
Divisor = Literal["min", "relevant", "found"]
"""What AP@k divides by: `min` is min(R, k), `relevant` is R, `found` is the number of relevant items in the top k."""
Code = Literal["int8", "binary"]
"""How a compressed embedding stores each dimension: `int8` in a byte, `binary` in a bit."""
MetricInput = Literal["ranks", "prototypes", "groups", "pairs", "classes"]


class NoFile(PathLike[str]):
    """No value has this type. It stands in unions, of which jsonargparse then reads no file.

    Where a union has a class, as EmbeddingSource, jsonargparse takes a word that is the name of a file for that of a
    configuration, and passes what the file holds. It does not if the union has a path of any kind.
    """


FilePath = str | PathLike[str] | NoFile
"""Where a file or a folder is."""

DEFAULT_METRICS = (
    *("mAP", "map@r", "r_precision", "mrr", "recall@1", "recall@5", "recall@10", "grouped_recall@1"),
    *("pair_precision", "pair_recall", "pair_f1", "pair_threshold", "recall@precision0.95"),
)
"""The metrics that are reported by default: `metrics=(*DEFAULT_METRICS, "eer")` asks for one more."""

Target = TypeVar("Target", bound=Callable[..., Any])


class UnknownSettingError(TypeError, InputError):
    """Raised for an unknown setting: a TypeError (an unexpected keyword) and a ValueError (a wrong setting) at once."""


# Ranks are compared as integers of 64 bits.
LARGEST_RANK = 2**63 - 1
# Before the key of a metric of queries, for the mean over classes.
MACRO = "macro_"

# How the parameters of a key are written, and how each is read.
_FIELDS = {
    "k": r"(?P<k>[1-9]\d*)",
    "p": r"(?P<p>\d*\.?\d+(?:e-?\d+)?)",
    "divisor": f"(?P<divisor>{'|'.join(get_args(Divisor))})",
}
_TYPES: dict[str, Callable[[str], Any]] = {"k": int, "p": float, "divisor": str}
# An example of each parameter, for messages.
_EXAMPLES = {"k": "5", "p": "0.95", "divisor": "'min'"}


@dataclass(frozen=True, repr=False)
class Metric:
    """A metric: its key, its meaning, and the function that computes it.

    Pass your own metric wherever a key such as `"mAP"` is accepted: as an object, or by its import path, such as
    `my_metrics.F1@k=2`. `METRICS` has the metrics of this package, which you request by their keys. Define the function at
    the top level of a module if processes are spawned, because a lambda cannot be pickled.

    Args:
        pattern: The key. `{k}` is a rank from 1 on, and `{p}` a rate in (0, 1]. (`{divisor}` is only for AP@k.)
        input: What the value is computed from: the `ranks` of each query, or the `pairs` of all queries and candidates.
            Metrics of this package may also use the `prototypes` of the classes, the `groups` of Grouped Recall, or the
            pairs of each class (`classes`). Ranks and prototypes give a value for each query.
        value: The function. For `ranks`, it is called as value(ranks, ties=ties, k=k) with a `RankBlock` and the rule for
            ties, and returns one value for each query. For `pairs`, it is called as value(pooled, k=k) with
            `PooledDecisions`, and returns a number. The parameters of the key are passed by name. For `groups`, it gets a
            `GroupedRecall`, and for `classes` the `ThresholdConsistency` of each rate. None for prototypes.
        meaning: One sentence with the parameters of the key, such as "Share of the first {k} that is relevant."
        range: The smallest and the largest value; None for a value without bounds, such as a score. The interval of a mean
            is a t interval, on the logit scale of the range if there is one.
        better: Whether `higher` or `lower` values are better, for instance for `ModelCheckpoint`; None for neither.

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
    # An object that can be called need not have a hash.
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
                "a query, or 'pairs' for one of all pairs."
            )
        if self.value is not None and not callable(self.value):
            raise InputError(f"Metric({self.pattern!r}): value={self.value!r} is no function. Pass one.")
        for name in _fields_of_text(self.meaning):
            if name not in known:
                raise InputError(
                    f"Metric({self.pattern!r}): the meaning has {{{name}}}, and the pattern has not. Use the same fields."
                )
        if self.range is not None:
            ends = tuple(self.range)
            if len(ends) != 2 or not ends[0] < ends[1]:
                raise InputError(
                    f"Metric({self.pattern!r}): range={self.range!r} must hold the smallest value and the largest, such as "
                    "(0.0, 1.0); None is no range."
                )
            object.__setattr__(self, "range", ends)
        if self.better not in ("higher", "lower", None):
            raise InputError(
                f"Metric({self.pattern!r}): better={self.better!r} is unknown. Pass 'higher', 'lower' or None."
            )

    def __repr__(self) -> str:
        """Return pattern and name of the function, whose address would differ between processes that compare settings."""
        function = getattr(self.value, "__qualname__", type(self.value).__name__)
        return f"Metric({self.pattern!r}, {self.input!r}, {function})"

    @functools.cached_property
    def keys(self) -> re.Pattern[str]:
        """The keys that name this metric; its parameters are groups of the match."""
        return re.compile(re.sub(r"\\{(\w+)\\}", lambda match: _FIELDS[match[1]], re.escape(self.pattern)))

    @property
    def example(self) -> str:
        """A call of `at` with its parameters, for messages."""
        return f".at({', '.join(f'{name}={_EXAMPLES[name]}' for name in _fields_of(self.pattern))})"

    def at(self, **parameters: Any) -> RequestedMetric:
        """Return this metric at some parameters, to be passed among `metrics`: `F1.at(k=5)`, as `recall@5` names both.

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
            raise InputError(f"{call}: its pattern has no {' and no '.join(unknown)}. Pass {self.example}.")
        key = self.pattern.format(**parameters)
        match = self.keys.fullmatch(key)
        if match is None:
            raise InputError(
                f"the metric {self.pattern!r} has no key {key!r}. k is a rank, a whole number from 1 on, and p a rate in "
                f"(0, 1]. Pass such as {self.example}."
            )
        return RequestedMetric(key, self, read_parameters(key, match))


@dataclass(frozen=True)
class RequestedMetric:
    """A requested key, with its metric and the parameters that the key holds. `Metric.at` returns it."""

    key: str
    metric: Metric
    parameters: Mapping[str, Any] = field(hash=False, repr=False)

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


def _fields_of(pattern: str) -> list[str]:
    """Return the fields of the pattern of a key.

    Raises:
        ValueError: If it is no pattern of a key.
    """
    call = f"Metric({pattern!r})"
    try:
        names = _fields_of_text(pattern)
    except ValueError:
        raise InputError(f"{call}: the braces of the pattern do not match. Write such as 'f1@{{k}}'.") from None
    for name in names:
        if name not in _FIELDS:
            raise InputError(
                f"{call}: {{{name}}} is no field. A pattern has {{k}} for a rank and {{p}} for a rate, such as 'f1@{{k}}'."
            )
    if pattern.startswith(MACRO):
        raise InputError(
            f"{call}: {MACRO} before the key of a metric asks for its mean over classes. Leave it out of the pattern."
        )
    if re.fullmatch(r"[\w@-]+", re.sub(r"{\w+}", "", pattern)) is None:
        raise InputError(
            f"{call}: a key is a word of letters, digits, _, - and @, by which it is logged. Write such as 'f1@{{k}}'."
        )
    return names


def _fields_of_text(text: str) -> list[str]:
    """Return the names in braces; raises a ValueError if braces do not match."""
    return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]


def read_parameters(key: str, match: re.Match[str]) -> dict[str, Any]:
    """Return the parameters of a key of a metric.

    Args:
        key: The key, for messages.
        match: The match of `Metric.keys` with it.

    Raises:
        ValueError: If a rank or a rate is out of range.
    """
    parameters = {name: _TYPES[name](word) for name, word in match.groupdict().items()}
    if parameters.get("k", 1) > LARGEST_RANK:
        raise InputError(
            f"metrics hold {key!r}, and ranks end at 2**63 - 1. From the number of gallery items on, all "
            "candidates count: pass that number."
        )
    if not 0 < parameters.get("p", 1) <= 1:
        raise InputError(f"metrics hold {key!r}, but a rate lies in (0, 1], such as 0.95.")
    return parameters


Metrics = str | Metric | RequestedMetric | Sequence[str | Metric | RequestedMetric]
"""Keys, import paths, and the objects of a user: one alone, or several."""


@dataclass(frozen=True, kw_only=True)
class RetrievalDefaults:
    """The settings of `evaluate_retrieval` with their defaults. `RetrievalSettings` has the same, and checks them.

    Args:
        similarity: How two embeddings are compared: `cosine`, `dot` or `euclidean` (minus the distance); `hamming` for
            binary codes of -1 and +1, or 0 and 1, in any dtype: minus the number of bits that differ.
        metrics: The keys of the metrics that are reported, in this order; they are logged by the same keys. There are
            mAP, map@r, r_precision, mrr, mrr@{k}, minp, ap_trapezoid, map@{k}_{divisor}, recall@{k}, ir_recall@{k},
            precision@{k}, precision@{k}_last, ndcg@{k}, ndcg@{k}_linear, auroc, prototype_accuracy, grouped_recall@{k},
            grouped_recall@{k}_miss, pair_precision, pair_recall, pair_f1, pair_threshold, auc_pr, pair_auroc,
            recall@precision{p},
            fnmr@fmr{p}, eer, opis@fmr{p} and opis_gap@fmr{p}; macro_ before one is its mean over classes.
            A metric of a user is passed as a `Metric`, such as F1.at(k=2), or named by its import path, such as
            my_metrics.F1@k=2.
        threshold: Lowest score at which a pair is accepted, for pair_precision, pair_recall and pair_f1; None takes the
            threshold of the best F1.
        threshold_bounds: Smallest and largest threshold allowed for recall at fixed precision; None sets no bounds.
            (0, 1) reproduces definitions that search thresholds in [0, 1].
        label_groups: Groups of labels for Grouped Recall: the number of labels in a random group, at least 2; or the
            labels of each group, for instance the classes of each family, [[0, 1, 2], [3, 4, 5]] (`grouped_recall`
            explains what the interval then means); None for no Grouped Recall. `auto` takes 10 labels where the queries
            have the 20 classes that two groups need. Where they have fewer, the Grouped Recall of the default metrics is
            left out without a note.
        ties: How equal scores count: `expected` (the mean over all orders), `optimistic` or `pessimistic`.
        max_queries: Evaluate at most this many queries, drawn from all classes in proportion to their size, against the
            whole gallery. The result is an estimate; its intervals show the uncertainty. None evaluates all queries.
        seed: Seed of the random groups, which depend on it and the set of labels alone, and of the draw of queries,
            which also depends on their order.
        confidence: Confidence level of the intervals, in (0, 1).
        memory_mb: Bound on the memory used beyond the embeddings, in MB; infinity is no limit. None is 512, and with a
            CUDA `device`, whose memory it then bounds, half of what is free. If more is needed, `memory_note` of the
            report says how much. Binary codes take as much as their number and the largest class need, without a note.
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
    """Size and content of a report, with the defaults. `ReportSettings` has the same, and checks them.

    Numbers of items and pairs are upper bounds.

    Args:
        max_mb: Largest size of the file in MB; pictures that do not fit are left out, and the report says so.
        worst: Queries of the lowest average precision, at most three of a class, and none whose average precision is 1.
        searchable: Further queries that the search finds: a seeded sample from all classes.
        neighbours: Neighbours that are shown of a query or a suspect.
        suspects: Items whose label is probably wrong, the most suspicious first.
        duplicates: Pairs of near duplicates, the most similar first, of each kind: inside the set, and between sets.
        duplicates_from: Lowest cosine of near duplicates; for binary codes the lowest share of equal bits.
        confusion_queries: Queries from whose neighbours confusions of classes are counted; a seeded sample if there are
            more.
        thumbnail: Pixels of the longer side of a picture.
        background: Colour behind what is transparent in a picture, such as white or #00ff00: that of the training.
        memory_mb: Bound on the memory of each search beyond the embeddings, in MB; None is 512.
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


# If a function has other keywords, too, a type checker learns the settings from a TypedDict alone (PEP 692). So the types of
# the settings stand here a second time. A test compares them with those of `RetrievalDefaults`.
#
# Each TypedDict has the settings of the one that it inherits from, and further ones. A new setting belongs into the last of
# them whose functions all have it. `RetrievalOptions`, the last of all, must have every field of `RetrievalDefaults`.


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
    """Return a list of another library as a list, and so those inside it; any other value unchanged.

    Hydra and OmegaConf give a `ListConfig`, which is no `list`, and which holds the whole configuration.

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
        owner: The class that was given them, for messages.
        settings: The keywords.
        written: Name of such an argument -> a function of its value that returns how it is written.

    Raises:
        UnknownSettingError: With the fix of the first one.
    """
    for name in settings:
        if name in written:
            raise UnknownSettingError(f"{owner}: {name} is no setting. Write {written[name](settings[name])}.")


def names_of(options: type) -> list[str]:
    """Return the names of the settings in a TypedDict, in the order of `RetrievalDefaults`."""
    types = get_type_hints(options)
    return [setting.name for setting in fields(RetrievalDefaults) if setting.name in types]


def takes(options: type, **defaults: Any) -> Callable[[Target], Target]:
    """Return a decorator for a function or a class that takes settings as keywords.

    It lists each of them in the signature and in the docstring, where `help`, notebooks and jsonargparse show them. Eight
    targets share these settings: written out, each meaning would stand eight times, and type checkers read the TypedDict.

    Args:
        options: The TypedDict of the settings. For these, the docstring of the target has a line that begins with
            `**settings:`.
        **defaults: The defaults that differ from those of `RetrievalDefaults`.
    """

    def decorate(target: Target) -> Target:
        function: Any = vars(target)["__init__"] if isinstance(target, type) else target
        signature = inspect.signature(function)
        others = [entry for entry in signature.parameters.values() if entry.kind is not Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*others, *_parameters(options, defaults)])
        return with_meanings(target, RetrievalDefaults, names_of(options))

    return decorate


def with_meanings(target: Target, settings: type, names: Sequence[str] | None = None) -> Target:
    """Return a function or a class, after the line `**settings:` of its docstring was replaced by the meanings of settings.

    Args:
        target: The function or the class.
        settings: The class whose docstring holds the meanings.
        names: Which settings, by default all.
    """
    if target.__doc__ is not None:  # there is none under `python -OO`
        entries = _entries(settings)
        target.__doc__ = _with_entries(target.__doc__, [entries[name] for name in names or entries])
    return target


def _parameters(options: type, defaults: Mapping[str, Any]) -> list[Parameter]:
    """Return the settings as parameters of a signature."""
    # The types themselves, and not their names: jsonargparse would look these up in the module of the function.
    types = get_type_hints(options)
    usual = {setting.name: setting.default for setting in fields(RetrievalDefaults)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, usual[name]), annotation=types[name])
        for name in names_of(options)
    ]


def _with_entries(docstring: str, entries: Sequence[str]) -> str:
    """Return a docstring with entries of settings in the place of its line `**settings:`."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if line.startswith("    **settings:"):
            lines.extend(entries)
        else:
            lines.append(line)
    return "\n".join(lines)


def _entries(settings: type) -> dict[str, str]:
    """Return what the `Args:` of a class hold of each of its fields: a line or several."""
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
