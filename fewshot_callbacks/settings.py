"""The settings of evaluations and reports: each with its type, its default and its meaning. Nothing here imports torch.

The meaning of a setting stands in the docstring of its class. `help`, editors and the documentation show it there.
`takes` copies it to the functions that take the settings as keywords. jsonargparse prints it as the help of an option.

A new setting of an evaluation is a field of `RetrievalSettings` with its meaning, an entry of `RetrievalOptions`, and a
check in `functional/retrieval/settings.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter
from types import ModuleType
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, cast, get_type_hints

# `cosine`: cosine of the angle, 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance.
# `hamming`: minus the number of bits in which two codes of -1 and +1 differ.
Similarity = Literal["cosine", "dot", "euclidean", "hamming"]
Ties = Literal["expected", "optimistic", "pessimistic"]
LabelGroups = int | Sequence[Sequence[int | str]] | Literal["auto"] | None

DEFAULT_METRICS = (
    *("mAP", "map@r", "r_precision", "mrr", "recall@1", "recall@5", "recall@10", "grouped_recall@1"),
    *("pair_precision", "pair_recall", "pair_f1", "pair_threshold", "recall@precision0.95"),
)
"""The metrics that are reported by default: `metrics=(*DEFAULT_METRICS, "eer")` asks for one more."""

Target = TypeVar("Target", bound=Callable[..., Any])


class UnknownSettingError(TypeError, ValueError):
    """Raised for an unknown setting: a TypeError (an unexpected keyword) and a ValueError (a wrong setting) at once."""


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings:
    """The settings of `evaluate_retrieval`. The constructor refuses values that are wrong for any data.

    It stores a single metric as a tuple, and numbers of NumPy and PyTorch as Python's numbers.

    Args:
        similarity: How two embeddings are compared: `cosine`, `dot` or `euclidean` (minus the distance); `hamming` for
            binary codes of -1 and +1, or 0 and 1, in any dtype: minus the number of bits that differ.
        metrics: The keys of the metrics that are reported, in this order; they are logged by the same keys. There are
            mAP, map@r, r_precision, mrr, mrr@{k}, minp, ap_trapezoid, map@{k}_{divisor}, recall@{k}, ir_recall@{k},
            precision@{k}, precision@{k}_last, ndcg@{k}, ndcg@{k}_linear, prototype_accuracy, grouped_recall@{k},
            grouped_recall@{k}_miss, pair_precision, pair_recall, pair_f1, pair_threshold, auc_pr, recall@precision{p},
            fnmr@fmr{p}, eer, opis@fmr{p} and opis_gap@fmr{p}; macro_ before one is its mean over classes.
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

    Raises:
        ValueError: If a value is wrong for any data; the message says what to pass instead.

    Examples:
        >>> settings = RetrievalSettings(similarity="euclidean", metrics=("mAP", "recall@10"))
        >>> settings.ties, settings.confidence
        ('expected', 0.95)
        >>> RetrievalSettings(metrics="recall@5").metrics
        ('recall@5',)
        >>> RetrievalSettings(max_queries=0)
        Traceback (most recent call last):
        ValueError: RetrievalSettings: max_queries=0 must be positive; None evaluates all queries.
    """

    similarity: Similarity = "cosine"
    metrics: str | Sequence[str] = DEFAULT_METRICS
    threshold: float | None = None
    threshold_bounds: tuple[float, float] | None = None
    label_groups: LabelGroups = "auto"
    ties: Ties = "expected"
    max_queries: int | None = None
    seed: int = 0
    confidence: float = 0.95
    memory_mb: float | None = None
    device: str = "cpu"

    fewest_groups: ClassVar[int] = 2
    """The number of groups that the interval of Grouped Recall needs."""

    def __post_init__(self) -> None:
        for name, value in _checks().plain_values(self).items():
            object.__setattr__(self, name, value)
        _checks().check_settings(self)

    def arguments(self) -> RetrievalOptions:
        """Return the settings as keyword arguments of `evaluate_retrieval`."""
        return cast(RetrievalOptions, dict(vars(self)))


def _checks() -> ModuleType:
    """Return the module of the checks. It imports torch, which `--help` does without, since it constructs no settings."""
    return import_module("fewshot_callbacks.functional.retrieval.settings")


@dataclass(frozen=True)
class ReportSettings:
    """Size and content of a report; numbers of items and pairs are upper bounds.

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

    Raises:
        ValueError: If a number is out of range, or the background no colour.

    Examples:
        >>> ReportSettings(worst=12).worst
        12
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

    def __post_init__(self) -> None:
        # It imports Pillow, which `--help` does without.
        import_module("fewshot_callbacks.files.images").parse_colour(self.background)
        for field in fields(self):
            value = getattr(self, field.name)
            smallest = 1 if field.name in ("neighbours", "thumbnail", "confusion_queries") else 0
            is_number = field.name != "background" and value is not None
            if is_number and not value >= smallest:  # NaN is refused, too
                raise ValueError(f"{field.name} is {value}. Pass {smallest} or more.")


# If a function has other keywords, too, a type checker learns the settings from a TypedDict alone (PEP 692). So the types of
# the settings stand here a second time. A test compares them with those of `RetrievalSettings`.
#
# Each TypedDict has the settings of the one that it inherits from, and further ones. A new setting belongs into the last of
# them whose functions all have it. `RetrievalOptions`, the last of all, must have every field of `RetrievalSettings`.


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

    metrics: str | Sequence[str]


class RetrievalOptions(GapOptions, total=False):
    """The settings of `evaluate_retrieval`."""

    threshold: float | None
    threshold_bounds: tuple[float, float] | None
    max_queries: int | None
    device: str


def refuse_other_arguments(owner: str, settings: Mapping[str, Any], written: Mapping[str, str]) -> None:
    """Refuse keywords that are arguments of something else.

    Args:
        owner: The class that was given them, for messages.
        settings: The keywords.
        written: Name of such an argument -> how it is written.

    Raises:
        UnknownSettingError: With the fix of the first one.
    """
    for name in settings:
        if name in written:
            raise UnknownSettingError(f"{owner}: {name} is no setting. Write {written[name]}.")


def from_keywords(
    target: Callable[..., Any],
    keywords: Mapping[str, Any],
    options: type = RetrievalOptions,
    settings: type[RetrievalSettings] = RetrievalSettings,
) -> RetrievalSettings:
    """Return the settings that a function or a class was given as keywords.

    Args:
        target: The function or the class. Messages begin with its name.
        keywords: Values by the names of the settings.
        options: The TypedDict of the settings that the target has.
        settings: The class of what is returned.

    Raises:
        UnknownSettingError: If there is no such setting. The message suggests a similar name.
        ValueError: If a value is wrong for any data.
    """
    known = names_of(options)
    for name in keywords:
        if name not in known:
            similar = get_close_matches(name, [*known, *inspect.signature(target).parameters], n=1)
            fix = f"Did you mean {similar[0]!r}?" if similar else f"The settings are {', '.join(known)}."
            raise UnknownSettingError(f"{target.__name__}: there is no setting {name!r}. {fix}")
    try:
        return settings(**keywords)
    except ValueError as error:
        message = str(error).removeprefix(f"{settings.__name__}: ")
        raise ValueError(f"{target.__name__}: {message}") from error


def names_of(options: type) -> list[str]:
    """Return the names of the settings in a TypedDict, in the order of `RetrievalSettings`."""
    types = get_type_hints(options)
    return [field.name for field in fields(RetrievalSettings) if field.name in types]


def takes(options: type, **defaults: Any) -> Callable[[Target], Target]:
    """Return a decorator for a function or a class that takes settings as keywords.

    It lists each of them in the signature and in the docstring, where `help`, notebooks and jsonargparse show them.

    Args:
        options: The TypedDict of the settings. For these, the docstring of the target has a line that begins with
            `**settings:`.
        **defaults: The defaults that differ from those of `RetrievalSettings`.
    """

    def decorate(target: Target) -> Target:
        function: Any = vars(target)["__init__"] if isinstance(target, type) else target
        signature = inspect.signature(function)
        others = [entry for entry in signature.parameters.values() if entry.kind is not Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*others, *_parameters(options, defaults)])
        if target.__doc__ is not None:  # there is none under `python -OO`
            target.__doc__ = _with_meanings(target.__doc__, names_of(options))
        return target

    return decorate


def _parameters(options: type, defaults: Mapping[str, Any]) -> list[Parameter]:
    """Return the settings as parameters of a signature."""
    # The types themselves, and not their names: jsonargparse would look these up in the module of the function.
    types = get_type_hints(options)
    usual = {field.name: field.default for field in fields(RetrievalSettings)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, usual[name]), annotation=types[name])
        for name in names_of(options)
    ]


def _with_meanings(docstring: str, names: Sequence[str]) -> str:
    """Return a docstring with the entries of settings in the place of its line `**settings:`."""
    entries = _entries(RetrievalSettings)
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if line.startswith("    **settings:"):
            lines.extend(entries[name] for name in names)
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
