"""`RetrievalSettings`: the settings of an evaluation, named, explained and checked in one place."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypedDict, TypeGuard, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from fewshot_callbacks.engine.vectors import Similarity, check_similarity
from fewshot_callbacks.functional._labels import Labels, as_labels, join, on_cpu
from fewshot_callbacks.functional._reading import check_seed
from fewshot_callbacks.functional.retrieval.rank_metrics import Ties, check_ties
from fewshot_callbacks.functional.retrieval.registry import (
    DEFAULT_METRICS,
    RELEVANCE_METRICS,
    Asked,
    asked_metric,
    asked_metrics,
)
from fewshot_callbacks.functional.statistics import normal_quantile

DEFAULT_MEMORY_MB: float = 512
# A budget from here on, such as infinity, is no limit: no machine has as much, and as bytes it still has 64 bits.
UNLIMITED_MB = 2**40
# Labels in a random group where `label_groups` is "auto". It is one number, whatever the set: Recall@K among other numbers
# of classes cannot be compared with it.
AUTO_GROUP_SIZE = 10

T = TypeVar("T", bound=Callable[..., Any])

Unmatched = Literal["exclude", "miss"]
"""What a query without a relevant candidate in its group is: left out of the mean, or a query whose search failed."""


class SearchOptions(TypedDict, total=False):
    """The settings of every search of a gallery, with the types that a caller may pass."""

    similarity: Similarity
    ties: Ties
    confidence: float
    memory_mb: float | None


class GroupedOptions(SearchOptions, total=False):
    """The settings of `grouped_recall`, with the types that a caller may pass."""

    label_groups: int | Sequence[Sequence[int | str]] | Literal["auto"] | None
    seed: int


class RetrievalOptions(GroupedOptions, total=False):
    """The settings of `evaluate_retrieval`, with the types that a caller may pass.

    mypy and editors read them here; meanings and defaults are those of `RetrievalSettings`.
    """

    metrics: str | Sequence[str]
    threshold: float | None
    threshold_bounds: tuple[float, float] | None
    max_queries: int | None
    device: str


# Name of a setting of an earlier version, or one that may be looked for -> what is written in its place.
GONE = {
    "recall_k": "metrics=('recall@1', ...)",
    "ir_recall_k": "metrics=('ir_recall@10', ...)",
    "map_k": "metrics=('map@10_min', ...)",
    "precision_k": "metrics=('precision@10', ...)",
    "ndcg_k": "metrics=('ndcg@10', ...)",
    "ndcg_gain": "metrics=('ndcg@10_linear', ...)",
    "precisions": "metrics=('recall@precision0.95', ...)",
    "false_match_rates": "metrics=('fnmr@fmr0.001', ...)",
    "equal_error_rate": "metrics=('eer', ...)",
    "auc_pr": "metrics=('auc_pr', ...)",
    "prototype_accuracy": "metrics=('prototype_accuracy', ...)",
    "macro": "metrics=('macro_mAP', ...)",
    "grouped_k": "metrics=('grouped_recall@1', ...)",
    "grouped_unmatched": "metrics=('grouped_recall@1_miss', ...)",
    "group_size": "label_groups=10, or label_groups=None for no Grouped Recall",
    "groups": "label_groups=[[0, 1, 2], [3, 4, 5]]",
    "group_seed": "seed=0",
    "query_seed": "seed=0",
    "device_memory_mb": "memory_mb, which bounds the memory of the device",
    "per_class": "report.per_class()",
    "query_places": "share=Share(query_places=...)",
    "gallery_places": "share=Share(gallery_places=...)",
    "processes": "share=Share(processes)",
    "threshold_consistency": "metrics=('opis@fmr0.1', 'opis_gap@fmr0.1', ...)",
    "gallery_loader": "gallery=1, the index or the name of the loader",
    "gallery_flag": "gallery='is_gallery', the entry of the batch, or a function of (outputs, batch)",
    "prefix": "name='t2i' for val/t2i/mAP and test/t2i/mAP",
    "exclude": "query_groups=..., and gallery_groups=... with a gallery, or update(groups=...) of a metric",
}


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
        >>> settings = RetrievalSettings(similarity="euclidean", metrics=("mAP", "recall@10"))
        >>> settings.ties, settings.confidence
        ('expected', 0.95)
    """

    similarity: Similarity = "cosine"
    """How two embeddings are compared: `cosine`, `dot` or `euclidean` (minus the distance); `hamming` for binary codes of
    -1 and +1, or 0 and 1, in any dtype: minus the number of bits that differ."""
    metrics: Sequence[str] = DEFAULT_METRICS
    """What is reported, each by the key under which it is logged, in this order: `mAP`, `recall@5`, `ndcg@10`,
    `map@10_found`, `recall@precision0.95`, `fnmr@fmr0.001`, `macro_mAP` and so on."""
    threshold: float | None = None
    """Lowest score at which a pair is accepted, for pooled precision, recall and F1; None takes the threshold of the
    best F1."""
    threshold_bounds: tuple[float, float] | None = None
    """Smallest and largest threshold allowed for recall at fixed precision; None sets no bounds. (0, 1) reproduces
    definitions that search thresholds in [0, 1]."""
    label_groups: int | Sequence[Sequence[int | str]] | Literal["auto"] | None = "auto"
    """Groups of labels for Grouped Recall: the number of labels in a random group, at least 2; or the labels of each group,
    for instance the classes of each family, [[0, 1, 2], [3, 4, 5]] (`grouped_recall` explains what the interval then
    means); None for no Grouped Recall. `auto` takes 10 labels where the queries have the 20 classes that two groups need.
    Where they have fewer, the Grouped Recall of the default metrics is left out without a note."""
    ties: Ties = "expected"
    """How equal scores count: `expected` (the mean over all orders), `optimistic` or `pessimistic`."""
    max_queries: int | None = None
    """Evaluate at most this many queries, drawn from all classes in proportion to their size, against the whole
    gallery. The result is an estimate; its intervals show the uncertainty. None evaluates all queries."""
    seed: int = 0
    """Seed of the random groups, which depend on it and the set of labels alone, and of the draw of queries, which also
    depends on their order."""
    confidence: float = 0.95
    """Confidence level of the intervals, in (0, 1)."""
    memory_mb: float | None = None
    """Bound on the memory used beyond the embeddings, in MB; infinity is no limit. None is 512, and with a CUDA `device`,
    whose memory it then bounds, half of what is free. If more is needed, `memory_note` of the report says how much. Binary
    codes take as much as their number and the largest class need, without a note."""
    device: str = "cpu"
    """Device that computes the scores: `cpu`, `cuda` (or `cuda:1`, ...) or `auto`. The results are the same. The embeddings
    stay where they are and are copied in slices."""

    @classmethod
    def checked(
        cls, target: Callable[..., Any], given: Mapping[str, Any], options: type = RetrievalOptions
    ) -> RetrievalSettings:
        """Read the settings that a function or class was given.

        Args:
            target: The function or class, whose name messages begin with.
            given: Settings by name.
            options: The settings it has.

        Raises:
            UnknownSettingError: With a similar name, or with what is written in place of an old one.
            ValueError: For a value that is wrong for any data, with what to pass instead.
        """
        known = _names_of(options)
        for name in given:
            if name in GONE:
                raise UnknownSettingError(f"{target.__name__}: {name} is no setting. Write {GONE[name]}.")
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *signature(target).parameters], n=1)
                fix = f"Did you mean {near[0]!r}?" if near else f"The settings are {', '.join(known)}."
                raise UnknownSettingError(f"{target.__name__}: there is no setting {name!r}. {fix}")
        settings = cls(**{name: _plain(value) for name, value in given.items()})
        settings = replace(settings, metrics=tuple(dict.fromkeys(several(settings.metrics))))
        check_settings(target.__name__, settings)
        return settings

    def arguments(self) -> RetrievalOptions:
        """Return the settings as keyword arguments of `evaluate_retrieval`."""
        return cast(RetrievalOptions, dict(vars(self)))

    def without_classes(self, call: str) -> RetrievalSettings:
        """Return the settings for a relevance that is no single label: with other metrics by default.

        Args:
            call: The public function or class, for messages.

        Raises:
            ValueError: If they ask for what needs classes.
        """
        metrics = RELEVANCE_METRICS if self.metrics == DEFAULT_METRICS else self.metrics
        settings = replace(self, metrics=metrics, label_groups=None)
        needing = [
            key
            for key in metrics
            if (one := asked_metric(key)).is_macro or one.metric.source in ("prototypes", "groups", "classes")
        ]
        needing += ["label_groups"] if self.sets_groups else []
        if needing:
            raise ValueError(
                f"{call}: {', '.join(needing)} cannot be computed where items have several labels each, or relevance is "
                "given: means and groups of classes need one label for each item. Leave them out."
            )
        return settings

    def asked(self) -> list[Asked]:
        """List the metrics that are reported, without Grouped Recall where no groups are wanted."""
        every = [asked_metric(key) for key in self.metrics]
        return [asked for asked in every if asked.metric.source != "groups" or self.label_groups is not None]

    def keys(self) -> tuple[str, ...]:
        """List the keys of the report, also where nothing could be computed."""
        return tuple(asked.key for asked in self.asked())

    @property
    def sets_groups(self) -> bool:
        """Whether a group size or groups were set, rather than left to `auto`, or ruled out by None."""
        return self.label_groups is not None and not self.chooses_group_size

    @property
    def chooses_group_size(self) -> bool:
        """Whether the classes that there are decide on Grouped Recall."""
        return isinstance(self.label_groups, str) and self.label_groups == "auto"

    @property
    def group_size(self) -> int | None:
        """The number of labels in a random group; None where groups are given, or none are wanted."""
        if self.chooses_group_size:
            return AUTO_GROUP_SIZE
        return self.label_groups if isinstance(self.label_groups, int) else None

    @property
    def names_grouped_recall(self) -> bool:
        """Whether `metrics` asks for Grouped Recall in so many words, and not as one of the default metrics."""
        grouped = {asked.key for asked in self.asked() if asked.metric.source == "groups"}
        return bool(grouped - {*DEFAULT_METRICS}) or (bool(grouped) and not {*DEFAULT_METRICS} <= {*self.metrics})

    @property
    def consistency_rates(self) -> tuple[float, ...]:
        """The false match rates below which classes are compared."""
        return tuple(dict.fromkeys(self.parameters("opis@fmr{p}") + self.parameters("opis_gap@fmr{p}")))

    def parameters(self, pattern: str) -> tuple[Any, ...]:
        """Return the parameter of each metric of a pattern that is asked for: the ranks of `grouped_recall@{k}`."""
        every = [asked.parameters for asked in self.asked() if asked.metric.pattern == pattern]
        return tuple(value for parameters in every for value in parameters.values())

    @property
    def grouped_k(self) -> tuple[int, ...]:
        """The K of Grouped Recall@K; none where it is not asked for."""
        return self.parameters("grouped_recall@{k}") or self.parameters("grouped_recall@{k}_miss")

    @property
    def grouped_unmatched(self) -> Unmatched:
        """How Grouped Recall counts a query without a match."""
        return "miss" if self.parameters("grouped_recall@{k}_miss") else "exclude"

    def main_memory(self) -> int:
        """Return the bound on the main memory in bytes; with a CUDA device, whose memory `memory_mb` bounds, the default."""
        on_cpu = compute_device("evaluate_retrieval", self.device).type == "cpu"
        return memory_bytes("evaluate_retrieval", self.memory_mb if on_cpu else None)


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


def _names_of(options: type) -> list[str]:
    """Name the settings of a function, in the order of `RetrievalSettings`."""
    own = get_type_hints(options)
    return [field.name for field in fields(RetrievalSettings) if field.name in own]


def shows_settings(options: type = RetrievalOptions, /, **defaults: Any) -> Callable[[T], T]:
    """Make `help`, notebooks and jsonargparse show each setting of a function or class that takes them as `**settings`.

    mypy and editors read `Unpack[RetrievalOptions]`; this does the same for what reads signatures and docstrings.

    Args:
        options: The settings, with their types.
        **defaults: Those that differ from `RetrievalSettings`.
    """

    def decorate(target: T) -> T:
        function: Any = vars(target)["__init__"] if isinstance(target, type) else target
        described = described_settings()
        shown = {name: described[name] for name in _names_of(options)}
        own = [entry for entry in signature(function).parameters.values() if entry.kind is not entry.VAR_KEYWORD]
        added = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, entry.default), annotation=entry.type)
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


# ----------------------------------------------------------------------------------------------------------------- checks


def check_settings(call: str, settings: RetrievalSettings) -> None:
    """Refuse settings that are wrong for any data.

    Args:
        call: The public function, for messages.
        settings: In one form.

    Raises:
        ValueError: With the setting, its value and what to pass instead.
    """
    check_similarity(settings.similarity)
    check_ties(settings.ties)
    asked = asked_metrics(call, settings.metrics)
    threshold, bounds, most = settings.threshold, settings.threshold_bounds, settings.max_queries
    if threshold is not None and not (_is_number(threshold) and math.isfinite(threshold)):
        raise ValueError(
            f"{call}: threshold={threshold!r} must be a finite score; None takes the threshold of the best F1."
        )
    is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(map(_is_number, bounds))
    if bounds is not None and not (is_pair and bounds[0] <= bounds[1]):  # NaN is refused, too
        raise ValueError(
            f"{call}: threshold_bounds={bounds!r} must hold the smallest threshold and the largest, in this order, "
            "such as (0.0, 1.0); None sets no bounds."
        )
    _check_groups(call, settings)
    if most is not None and not (isinstance(most, int) and not isinstance(most, bool) and most >= 1):
        wanted = "positive" if isinstance(most, int) else "a positive whole number"
        raise ValueError(f"{call}: max_queries={most!r} must be {wanted}; None evaluates all queries.")
    check_seed(call, "seed", settings.seed)
    normal_quantile(settings.confidence)  # a wrong one is refused before the work, not after it
    memory_bytes(call, settings.memory_mb)
    compute_device(call, settings.device)
    means = any(one.metric.source == "prototypes" for one in asked)
    if settings.similarity == "hamming" and (means or settings.device not in ("cpu", "auto")):
        raise ValueError(
            f"{call}: binary codes have no mean that could be a prototype, and are compared on the CPU. "
            "With similarity='hamming' leave out prototype_accuracy and device."
        )


def _check_groups(call: str, settings: RetrievalSettings) -> None:
    if all(settings.parameters(f"grouped_recall@{{k}}{end}") for end in ("", "_miss")):
        raise ValueError(
            f"{call}: metrics ask for Grouped Recall with and without queries that have no match. Ask for one of them, and "
            "evaluate twice for both."
        )
    groups = settings.label_groups
    if groups is None:
        if not settings.asked():
            raise ValueError(
                f"{call}: label_groups=None leaves out Grouped Recall, and metrics asks for nothing else. Add 'mAP' to "
                "metrics, or leave out label_groups."
            )
        return
    if settings.chooses_group_size:
        smallest = AUTO_GROUP_SIZE
        fact = f"label_groups={AUTO_GROUP_SIZE}, which 'auto' takes"
    elif isinstance(groups, Sequence | Tensor) and not isinstance(groups, str):
        checked = checked_groups(call, groups)
        if len(checked) < 2 and call != "grouped_recall":  # which warns that there is no interval
            raise ValueError(f"{call}: label_groups holds one group; its interval needs two. Give another group.")
        smallest = min(map(len, checked))
        fact = f"{smallest}, the labels of the smallest group"
    elif isinstance(groups, int) and not isinstance(groups, bool) and groups > 1:
        smallest, fact = groups, f"label_groups={groups}"
    else:
        raise ValueError(
            f"{call}: label_groups={groups!r} must be a whole number of at least 2 labels, or the labels of each group; "
            f"'auto' takes {AUTO_GROUP_SIZE} labels where there are {2 * AUTO_GROUP_SIZE} classes, and None omits Grouped "
            "Recall."
        )
    if settings.sets_groups and not settings.grouped_k:
        shown = f"={groups}" if isinstance(groups, int) else ""
        raise ValueError(
            f"{call}: label_groups{shown} is for Grouped Recall, which metrics does not ask for. Add 'grouped_recall@1' to "
            "metrics, or leave out label_groups."
        )
    if max(settings.grouped_k, default=1) >= smallest:
        raise ValueError(
            f"{call}: the ranks of Grouped Recall, {settings.grouped_k}, must lie below {fact}: with as many candidates as "
            "classes, recall says little. Use larger groups or smaller ranks."
        )


def checked_groups(call: str, groups: Any) -> list[Labels]:
    """Read the groups that a caller gives.

    Args:
        call: The public function, for the message.
        groups: The labels of each group, integers or strings.

    Raises:
        ValueError: If they are not groups of at least two labels each, or a label is in two groups.
    """
    if not len(groups):
        raise ValueError(
            f"{call}: label_groups must hold the labels of each group, such as label_groups=[[0, 1, 2], [3, 4, 5]]."
        )
    checked = [on_cpu(as_labels(group, "label_groups", call)) for group in groups]
    for number, group in enumerate(checked):
        if len(group) < 2:
            raise ValueError(
                f"{call}: group {number} of label_groups holds {len(group)} labels; Recall@K inside a group needs at "
                "least 2. Leave it out, or join it to another."
            )
    times = Counter(join(call, checked).tolist())
    repeated = [label for label, count in times.items() if count > 1]
    if repeated:
        raise ValueError(
            f"{call}: label {repeated[0]!r} comes more than once in label_groups. A label is in one group at most."
        )
    return checked


def compute_device(call: str, device: str | torch.device) -> torch.device:
    """Choose the device that computes scores; `"auto"` is the first CUDA device, or the CPU if there is none.

    Raises:
        ValueError: For a device that does not exist, or that does not support float64.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fix = "Pass 'cpu', 'cuda' or 'auto'."
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{call}: device={device!r} is not a device ({error}). {fix}") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"{call}: device={device!r} has no float64, which exact counts need. {fix}")
    there = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= there:
        raise ValueError(f"{call}: device={device!r}, but torch sees {there} CUDA devices. Pass 'cpu' or 'auto'.")
    return found


def memory_bytes(call: str, memory_mb: Any) -> int:
    """Return a bound on the memory in bytes; None is the default, and infinity is more than any machine's memory.

    Raises:
        ValueError: If it is not a positive number of MB.
    """
    memory_mb = DEFAULT_MEMORY_MB if memory_mb is None else _plain(memory_mb)
    if not (_is_number(memory_mb) and memory_mb > 0):
        raise ValueError(
            f"{call}: memory_mb={memory_mb!r} must be positive, in MB; None is the default, {DEFAULT_MEMORY_MB:g}."
        )
    return int(min(memory_mb, UNLIMITED_MB) * 10**6)


def several(value: Any) -> tuple[Any, ...]:
    """Make a tuple of the values of an iterable, or of a single value."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return (value,)
    return tuple(value)


def _plain(value: Any) -> Any:
    """Convert a number of NumPy or a tensor of one to Python's; what else is given is refused or taken as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
