"""`RetrievalSettings`: the settings of an evaluation, named, explained and checked in one place."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, TypeGuard, TypeVar, cast, get_args, get_type_hints

import torch

from fewshot_callbacks.engine.vectors import Similarity, check_similarity
from fewshot_callbacks.functional._inputs import check_seed
from fewshot_callbacks.functional.retrieval.label_groups import Unmatched, checked_groups
from fewshot_callbacks.functional.retrieval.rank_metrics import Divisor, Ties, check_ties
from fewshot_callbacks.functional.statistics.intervals import normal_quantile

DEFAULT_MEMORY_MB: float = 512
# A budget from here on, such as infinity, is no limit: no machine has as much, and as bytes it still has 64 bits.
UNLIMITED_MB = 2**40
# Ranks are compared as integers of 64 bits.
LARGEST_RANK = 2**63 - 1

T = TypeVar("T", bound=Callable[..., Any])


class SearchOptions(TypedDict, total=False):
    """The settings of every search of a gallery, with the types that a caller may pass."""

    similarity: Similarity
    ties: Ties
    confidence: float
    memory_mb: float | None


class RankOptions(SearchOptions, total=False):
    """The settings that single-label and multi-label evaluations share, with the types that a caller may pass."""

    recall_k: int | Sequence[int]
    ir_recall_k: int | Sequence[int]
    map_k: int | Sequence[int | tuple[int, Divisor]]
    precision_k: int | Sequence[int]
    ndcg_k: int | Sequence[int]


class GroupedOptions(SearchOptions, total=False):
    """The settings of `grouped_recall`, with the types that a caller may pass."""

    k: int | Sequence[int]
    groups: Sequence[Sequence[int | str]] | None
    group_size: int
    seed: int
    unmatched: Unmatched


# Name of a setting in `grouped_recall` -> its name in `RetrievalSettings`, where these differ.
GROUPED_NAMES = {"k": "grouped_k", "groups": "label_groups", "seed": "group_seed", "unmatched": "grouped_unmatched"}


class RetrievalOptions(RankOptions, total=False):
    """The settings of `evaluate_retrieval`, with the types that a caller may pass.

    mypy and editors read them here; meanings and defaults are those of `RetrievalSettings`.
    """

    macro: bool
    per_class: bool
    precisions: float | Sequence[float]
    threshold: float | None
    threshold_bounds: tuple[float, float] | None
    false_match_rates: float | Sequence[float]
    equal_error_rate: bool
    auc_pr: bool
    prototype_accuracy: bool
    grouped_k: int | Sequence[int]
    group_size: int | None
    group_seed: int
    label_groups: Sequence[Sequence[int | str]] | None
    grouped_unmatched: Unmatched
    max_queries: int | None
    query_seed: int
    device: str
    device_memory_mb: float | None


class UnknownSettingError(TypeError, ValueError):
    """Raised for an unknown setting: a TypeError (an unexpected keyword) and a ValueError (a wrong setting) at once."""


@dataclass(frozen=True)
class RetrievalSettings:
    """The settings of `evaluate_retrieval`, each named, explained and given its default here.

    Signatures, docstrings and command-line options list them from here (`shows_settings`, `described_settings`). A
    function that takes them as keyword arguments makes a tuple of a single value where several are allowed, converts
    NumPy numbers to Python numbers, and raises a ValueError for a value out of range; the constructor does none of
    this.

    Examples:
        >>> settings = RetrievalSettings(similarity="euclidean", recall_k=(1, 10))
        >>> settings.ties, settings.confidence
        ('expected', 0.95)
    """

    similarity: Similarity = "cosine"
    """How two embeddings are compared: `cosine`, `dot` or `euclidean` (minus the distance); `hamming` for binary codes of
    -1 and +1, or 0 and 1, in any dtype: minus the number of bits that differ."""
    recall_k: Sequence[int] = (1, 5, 10)
    """The K of Recall@K, the share of queries with a relevant item among the first K; here and below, one value or
    several."""
    ir_recall_k: Sequence[int] = ()
    """The k of information retrieval's Recall@k, the share of a query's relevant items that are among the first k, logged
    as `ir_recall@10`. It is small where a query has many more than k relevant items."""
    map_k: Sequence[int | tuple[int, Divisor]] = ()
    """AP@k, each as k or (k, divisor), logged as `map@10_min`: `min` divides by min(R, k), `relevant` by R, the number of
    relevant items, `found` by the number of them among the first k (as papers on hashing do)."""
    precision_k: Sequence[int] = ()
    """The K of Precision@K, the share of relevant items among the first K."""
    ndcg_k: Sequence[int] = ()
    """The K of nDCG@K; the relevance is 0 or 1, and for multi-label targets the number of shared labels."""
    macro: bool = False
    """Also report the mean over classes of each per-query metric (`macro_mAP`), in which large classes do not
    dominate."""
    per_class: bool = False
    """Also report each per-query metric for each class."""
    precisions: Sequence[float] = (0.95,)
    """Precisions in (0, 1]: for each, report the pooled recall at the smallest threshold that reaches it (R@P). A
    precision is compared as the rounded quotient of two counts."""
    threshold: float | None = None
    """Lowest score at which a pair is accepted, for pooled precision, recall and F1; None takes the threshold of the
    best F1."""
    threshold_bounds: tuple[float, float] | None = None
    """Smallest and largest threshold allowed for recall at fixed precision; None sets no bounds. (0, 1) reproduces
    definitions that search thresholds in [0, 1]."""
    false_match_rates: Sequence[float] = ()
    """Rates in (0, 1): for each, report the pooled share of relevant pairs that are rejected by the threshold that
    accepts at most this share of the irrelevant pairs (FNMR at FMR), logged as `fnmr@fmr0.001`. A note names the rates
    that are too small for the number of irrelevant pairs."""
    equal_error_rate: bool = False
    """Also report the rate at which these two shares are equal, as `eer`. It may take a second pass over all pairs."""
    auc_pr: bool = False
    """Also report the exact area under the pooled precision-recall curve, which takes a second pass over all pairs. The
    report always holds bounds on it."""
    prototype_accuracy: bool = False
    """Also report the share of queries to which the mean embedding of their own class is the most similar; a query is
    left out of the mean of its own class."""
    grouped_k: Sequence[int] = (1,)
    """The K of Grouped Recall@K, smaller than the number of labels in a group."""
    group_size: int | None = 10
    """Number of labels in a group for Grouped Recall, at least 2; None omits Grouped Recall."""
    group_seed: int = 0
    """Seed of the random groups. The same set of labels and seed give the same groups."""
    label_groups: Sequence[Sequence[int | str]] | None = None
    """The labels of each group for Grouped Recall, in place of random groups: for instance the classes of each family,
    [[0, 1, 2], [3, 4, 5]]. `grouped_recall` explains what the interval then means."""
    grouped_unmatched: Unmatched = "exclude"
    """How Grouped Recall counts a query without a match in its group: `exclude` leaves it out, `miss` counts it as a miss,
    as the metric's paper does. All other means leave it out."""
    ties: Ties = "expected"
    """How equal scores count: `expected` (the mean over all orders), `optimistic` or `pessimistic`."""
    max_queries: int | None = None
    """Evaluate at most this many queries, drawn from all classes in proportion to their size, against the whole
    gallery. The result is an estimate; its intervals show the uncertainty. None evaluates all queries."""
    query_seed: int = 0
    """Seed of that draw, which also depends on the order of the queries."""
    confidence: float = 0.95
    """Confidence level of the intervals, in (0, 1)."""
    memory_mb: float = DEFAULT_MEMORY_MB
    """Bound on the memory used beyond the embeddings, in MB; None is the default, infinity no limit. If more is needed,
    `memory_note` of the report says how much. Binary codes take as much as their number and the largest class need,
    without a note."""
    device: str = "cpu"
    """Device that computes the scores: `cpu`, `cuda` (or `cuda:1`, ...) or `auto`. The results are the same. The embeddings
    stay where they are and are copied in slices."""
    device_memory_mb: float | None = None
    """Bound on the memory used on that device, in MB; None takes half of the free memory."""

    @classmethod
    def checked(
        cls,
        target: Callable[..., Any],
        given: Mapping[str, Any],
        options: type = RetrievalOptions,
        names: Mapping[str, str] | None = None,
    ) -> RetrievalSettings:
        """Read the settings that a function or class was given.

        Args:
            target: The function or class, whose name messages begin with.
            given: Settings by name.
            options: The settings it has.
            names: Name of a setting in the signature of `target` -> its name here, where these differ.

        Raises:
            UnknownSettingError: With a similar name.
            ValueError: For a value that is wrong for any data, with what to pass instead.
        """
        known = _names_of(options, names or {})
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *signature(target).parameters], n=1)
                fix = f"Did you mean {near[0]!r}?" if near else f"The settings are {', '.join(known)}."
                raise UnknownSettingError(f"{target.__name__}: there is no setting {name!r}. {fix}")
        settings = cls(**{known[name]: in_one_form(known[name], value) for name, value in given.items()})
        check_settings(target.__name__, settings, {name: own for own, name in known.items()})
        return settings

    def arguments(self) -> RetrievalOptions:
        """Return the settings as keyword arguments of `evaluate_retrieval`."""
        return cast(RetrievalOptions, {field.name: getattr(self, field.name) for field in fields(self)})


# ------------------------------------------------------------------------------------------------- where they are shown


class Setting(NamedTuple):
    """A setting as signatures, docstrings and command-line options show it."""

    type: Any
    """what may be given"""
    default: Any
    meaning: str


@functools.cache
def described_settings() -> dict[str, Setting]:
    """Describe each setting by name; without Python's sources the meanings are empty."""
    types = get_type_hints(RetrievalOptions)
    meanings = meanings_of(RetrievalSettings)
    return {
        field.name: Setting(types[field.name], field.default, meanings.get(field.name, ""))
        for field in fields(RetrievalSettings)
    }


def meanings_of(owner: type) -> dict[str, str]:
    """Return the string that follows each field of a class; without Python's sources there is none."""
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except OSError:
        return {}
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(cast(ast.ClassDef, definition).body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _names_of(options: type, names: Mapping[str, str]) -> dict[str, str]:
    """Name of each setting of a function -> its name in `RetrievalSettings`, in the order of these."""
    own = {names.get(name, name): name for name in get_type_hints(options)}
    return {own[field.name]: field.name for field in fields(RetrievalSettings) if field.name in own}


def shows_settings(
    options: type = RetrievalOptions, names: Mapping[str, str] | None = None, /, **defaults: Any
) -> Callable[[T], T]:
    """Make `help`, notebooks and jsonargparse show each setting of a function or class that takes them as `**settings`.

    mypy and editors read `Unpack[RetrievalOptions]`; this does the same for what reads signatures and docstrings.

    Args:
        options: The settings, with their types.
        names: Name of a setting in `options` -> its name in `RetrievalSettings`, where these differ.
        **defaults: Those that differ from `RetrievalSettings`.
    """

    def decorate(target: T) -> T:
        function: Any = vars(target)["__init__"] if isinstance(target, type) else target
        types, described = get_type_hints(options), described_settings()
        shown = {own: described[name] for own, name in _names_of(options, names or {}).items()}
        own = [entry for entry in signature(function).parameters.values() if entry.kind is not entry.VAR_KEYWORD]
        added = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, entry.default), annotation=types[name])
            for name, entry in shown.items()
        ]
        function.__signature__ = signature(function).replace(parameters=[*own, *added])
        lines = "\n".join(
            textwrap.fill(f"{name}: {entry.meaning}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
            for name, entry in shown.items()
        )
        target.__doc__ = re.sub(r" {8}\*\*settings: .*", lambda _: lines, target.__doc__ or "")
        return target

    return decorate


def in_one_form(name: str, value: Any) -> Any:
    """Bring a setting's value into the form that the code reads: a single K becomes a tuple, NumPy's numbers Python's.

    What has no such form is handed back as it is, to be refused by `check_settings`.
    """
    if name.endswith("_k"):
        return ranks_of(value)
    if name in ("precisions", "false_match_rates"):
        return tuple(map(_number, _several(value)))
    if name in ("group_size", "group_seed", "max_queries", "query_seed"):
        return _whole(value)
    if name in ("threshold", "device_memory_mb"):
        return _number(value)
    return memory_or_default(value) if name == "memory_mb" else value


# ----------------------------------------------------------------------------------------------------------------- checks


def check_settings(call: str, settings: RetrievalSettings, shown: Mapping[str, str]) -> None:
    """Refuse settings that are wrong for any data.

    Args:
        call: The public function, for messages.
        settings: In one form.
        shown: The name that the function has for each of its settings, for messages.

    Raises:
        ValueError: With the setting, its value and what to pass instead.
    """
    check_similarity(settings.similarity)
    check_ties(settings.ties)
    for name in ("recall_k", "ir_recall_k", "precision_k", "ndcg_k", "grouped_k"):
        ks = getattr(settings, name)
        if any(not _is_rank(k) for k in ks):
            raise ValueError(f"{call}: {shown[name]}={ks} must hold positive whole numbers, such as (1, 5, 10).")
        _check_largest(call, shown.get(name, name), ks)
    for entry in settings.map_k:
        k, divisor = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, "min")
        if not _is_rank(k) or divisor not in get_args(Divisor):
            raise ValueError(
                f"{call}: map_k={settings.map_k} must hold ranks, alone or with the divisor of AP@k, such as "
                f"(10, (100, 'found')). The divisors are {', '.join(map(repr, get_args(Divisor)))}."
            )
    _check_largest(call, "map_k", [entry[0] if isinstance(entry, tuple | list) else entry for entry in settings.map_k])
    if any(not (_is_number(precision) and 0 < precision <= 1) for precision in settings.precisions):
        raise ValueError(f"{call}: precisions={settings.precisions} must lie in (0, 1], such as (0.95,).")
    if any(not (_is_number(rate) and 0 < rate < 1) for rate in settings.false_match_rates):
        raise ValueError(
            f"{call}: false_match_rates={settings.false_match_rates} must lie between 0 and 1, such as (0.001,)."
        )
    if settings.threshold is not None and not (_is_number(settings.threshold) and math.isfinite(settings.threshold)):
        raise ValueError(
            f"{call}: threshold={settings.threshold!r} must be a finite score; None takes the threshold of the best F1."
        )
    _check_range(call, settings.threshold_bounds)
    _check_groups(call, settings, shown)
    _check_draws(call, settings, shown)
    normal_quantile(settings.confidence)  # a wrong one is refused before the work, not after it
    check_memory(call, settings.memory_mb)
    if settings.device_memory_mb is not None and not (
        _is_number(settings.device_memory_mb) and settings.device_memory_mb > 0
    ):
        raise ValueError(
            f"{call}: device_memory_mb={settings.device_memory_mb!r} must be positive, in MB; None takes half of the free "
            "memory."
        )
    compute_device(call, settings.device)
    if settings.similarity == "hamming" and (settings.prototype_accuracy or settings.device not in ("cpu", "auto")):
        raise ValueError(
            f"{call}: binary codes have no mean that could be a prototype, and are compared on the CPU. "
            "With similarity='hamming' leave out prototype_accuracy and device."
        )


def _check_groups(call: str, settings: RetrievalSettings, shown: Mapping[str, str]) -> None:
    if settings.grouped_unmatched not in get_args(Unmatched):
        raise ValueError(
            f"{call}: there is no {shown['grouped_unmatched']}={settings.grouped_unmatched!r}. Pass 'exclude' to leave "
            "queries without a match out of the mean, or 'miss' to count them as misses."
        )
    if settings.group_size is not None and not (_is_rank(settings.group_size) and settings.group_size > 1):
        raise ValueError(
            f"{call}: group_size={settings.group_size!r} must be a whole number of at least 2 labels; None omits "
            "Grouped Recall."
        )
    smallest, fact = settings.group_size, f"group_size={settings.group_size}"
    if settings.label_groups is not None:
        groups = checked_groups(call, shown["label_groups"], settings.label_groups)
        if len(groups) < 2 and call != "grouped_recall":  # which warns that there is no interval
            raise ValueError(f"{call}: label_groups holds one group; its interval needs two. Give another group.")
        smallest = min(map(len, groups))
        fact = f"{smallest}, the labels of the smallest group"
    if smallest is not None and max(settings.grouped_k, default=1) >= smallest:
        raise ValueError(
            f"{call}: {shown['grouped_k']}={settings.grouped_k} must hold ranks below {fact}: with as many candidates as "
            "classes, recall says little. Use larger groups or smaller ranks."
        )


def _check_draws(call: str, settings: RetrievalSettings, shown: Mapping[str, str]) -> None:
    if settings.max_queries is not None and not _is_rank(settings.max_queries):
        wanted = "positive" if isinstance(settings.max_queries, int) else "a positive whole number"
        raise ValueError(f"{call}: max_queries={settings.max_queries!r} must be {wanted}; None evaluates all queries.")
    for name in ("group_seed", "query_seed"):
        check_seed(call, shown.get(name, name), getattr(settings, name))


def compute_device(call: str, device: str | torch.device) -> torch.device:
    """Choose the device that computes scores; `"auto"` is the first CUDA device, or the CPU if there is none.

    Raises:
        ValueError: For a device that does not exist, or that does not support float64.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"{call}: device={device!r} is not a device ({error}). Pass 'cpu', 'cuda' or 'auto'."
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{call}: device={device!r} has no float64, which exact counts need. Pass 'cpu', 'cuda' or 'auto'."
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{call}: device={device!r}, but torch sees {torch.cuda.device_count()} CUDA devices. Pass 'cpu' or 'auto'."
        )
    return found


def ranks_of(value: Any) -> tuple[Any, ...]:
    """Make a tuple of one rank or several, with NumPy numbers as Python numbers; anything else is left for the check."""
    return tuple(map(_whole, _several(value)))


def memory_or_default(memory_mb: Any) -> Any:
    """Return the bound in MB; for None the default."""
    return DEFAULT_MEMORY_MB if memory_mb is None else _number(memory_mb)


def check_memory(call: str, memory_mb: object) -> None:
    """Refuse a bound on the memory that is not a positive number.

    Raises:
        ValueError: With the default.
    """
    if not (_is_number(memory_mb) and memory_mb > 0):
        raise ValueError(
            f"{call}: memory_mb={memory_mb!r} must be positive, in MB; None is the default, {DEFAULT_MEMORY_MB:g}."
        )


def bytes_of(memory_mb: float) -> int:
    """Return a bound on the memory in bytes; that of infinity is larger than any machine's memory."""
    return int(min(memory_mb, UNLIMITED_MB) * 10**6)


def _several(value: Any) -> tuple[Any, ...]:
    """Make a tuple of the values of an iterable, or of a single value."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return (value,)
    return tuple(value)


def _whole(value: Any) -> Any:
    """Convert a whole number of any library to int, also the k of (k, divisor)."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return (_whole(value[0]), value[1])
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _number(value: Any) -> Any:
    """Convert a number of any library to float."""
    if type(value) in (int, float, bool) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        return value
    return float(value)


def _check_largest(call: str, name: str, ks: Iterable[int]) -> None:
    if (largest := max(ks, default=0)) > LARGEST_RANK:
        raise ValueError(
            f"{call}: {name} holds {largest}, and ranks end at 2**63 - 1. From the number of gallery items on, all "
            "candidates count: pass that number."
        )


def _is_rank(k: object) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_range(call: str, bounds: object) -> None:
    if bounds is None:
        return
    is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(isinstance(b, int | float) for b in bounds)
    if not (is_pair and bounds[0] <= bounds[1]):  # type: ignore[index]  # NaN is refused, too
        raise ValueError(
            f"{call}: threshold_bounds={_shown(bounds)} must hold the smallest threshold and the largest, in this order, "
            "such as (0.0, 1.0); None sets no bounds."
        )


def _shown(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
