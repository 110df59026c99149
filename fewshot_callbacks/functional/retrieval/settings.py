"""The settings of an evaluation: their checks, and what follows from them (metrics, their parameters, memory).

`fewshot_callbacks/settings.py` declares each setting. Check a new setting here, in `check_settings`. `RetrievalRequest`
reads once what follows from the requested metrics.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, Literal, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from fewshot_callbacks.engine.scale import check_similarity
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, as_labels, join, on_cpu
from fewshot_callbacks.functional._reading import check_seed
from fewshot_callbacks.functional.retrieval.decisions import PooledRequest
from fewshot_callbacks.functional.retrieval.rank_metrics import check_ties
from fewshot_callbacks.functional.retrieval.registry import (
    RELEVANCE_METRICS,
    requested_metrics,
    stored_metrics,
)
from fewshot_callbacks.functional.statistics import normal_quantile
from fewshot_callbacks.settings import (
    DEFAULT_METRICS,
    MetricInput,
    RequestedMetric,
    RetrievalDefaults,
    RetrievalOptions,
    UnknownSettingError,
    names_of,
    plain_list,
    with_meanings,
)
from fewshot_callbacks.system.words import counted

DEFAULT_MEMORY_MB: float = 512
# The largest budget. Larger budgets, such as infinity, are reduced to it: no machine has as much memory, and the number of
# bytes still fits into 64 bits.
UNLIMITED_MB = 2**40
# Number of labels in a random group if `label_groups` is "auto". It is the same for every set, because Recall@K cannot be
# compared between different numbers of classes.
AUTO_GROUP_SIZE = 10

# Inputs of metrics that need the counts of all pairs together.
OF_PAIRS: tuple[MetricInput, ...] = ("pairs", "classes")

Unmatched = Literal["exclude", "miss"]
"""How a query without a relevant candidate in its group counts: it is left out (`exclude`), or it is a miss (`miss`)."""


# -------------------------------------------------------------------------------------------------------------- settings


@partial(with_meanings, settings=RetrievalDefaults)
@dataclass(frozen=True, kw_only=True)
class RetrievalSettings(RetrievalDefaults):
    """The settings of `evaluate_retrieval`. The constructor refuses values that are wrong for any data.

    Metrics are stored as a tuple of keys, with a `RequestedMetric` for each custom metric. NumPy and PyTorch numbers are
    stored as Python numbers.

    Args:
        **settings: See `RetrievalDefaults`, which explains each setting.

    Raises:
        ValueError: If a value is wrong for any data. The message states what to pass instead.

    Examples:
        >>> settings = RetrievalSettings(similarity="euclidean", metrics=("mAP", "recall@10"))
        >>> settings.ties, settings.confidence
        ('expected', 0.95)
        >>> RetrievalSettings(metrics="recall@5").metrics
        ('recall@5',)
        >>> RetrievalSettings(max_queries=0)
        Traceback (most recent call last):
        fewshot_callbacks.errors.InputError: RetrievalSettings: max_queries=0 must be positive; None evaluates all queries.
    """

    fewest_groups: ClassVar[int] = 2
    """The number of groups that the interval of Grouped Recall needs."""

    def __post_init__(self) -> None:
        for name, value in _plain_values(self).items():
            object.__setattr__(self, name, value)
        named = requested_metrics(type(self).__name__, self.metrics)
        # Not a field, so that it is neither printed nor compared.
        object.__setattr__(self, "_request", RetrievalRequest.of(self, named))
        check_settings(self)

    def __reduce__(self) -> Any:
        """Pickle only the settings, because the functions of some metrics cannot be pickled."""
        return partial(type(self), **self.arguments()), ()

    def arguments(self) -> RetrievalOptions:
        """Return the settings as keyword arguments of `evaluate_retrieval`."""
        return cast(RetrievalOptions, {name: getattr(self, name) for name in names_of(RetrievalOptions)})


@dataclass(frozen=True)
class RetrievalRequest:
    """What the settings request. It is derived once, so the evaluation does not parse metric keys.

    Attributes:
        named: The metrics in `metrics`, each once.
        reported: The metrics that are reported: all, except Grouped Recall if `label_groups` is None.
        pooled: The metrics of all pairs together.
        consistency_rates: The largest false match rates at which classes are compared.
        grouped_k: The K of Grouped Recall@K; empty if it is not reported.
        unmatched: How Grouped Recall counts a query without a match.
        group_size: Number of labels in a random group; None if `label_groups` is a list of groups or None.
        chooses_group_size: Whether `label_groups` is `auto`. The number of classes then decides whether there is Grouped
            Recall.
        sets_groups: Whether `label_groups` is a size or a list of groups, and neither `auto` nor None.
    """

    named: tuple[RequestedMetric, ...]
    reported: tuple[RequestedMetric, ...]
    pooled: PooledRequest
    consistency_rates: tuple[float, ...]
    grouped_k: tuple[int, ...]
    unmatched: Unmatched
    group_size: int | None
    chooses_group_size: bool
    sets_groups: bool

    @classmethod
    def of(cls, settings: RetrievalDefaults, named: Sequence[RequestedMetric]) -> RetrievalRequest:
        """Return what the settings request."""
        groups = settings.label_groups
        reported = tuple(metric for metric in named if metric.metric.input != "groups" or groups is not None)
        chooses = isinstance(groups, str) and groups == "auto"
        ranks = _parameters(reported, "grouped_recall@{k}")
        ranks_with_misses = _parameters(reported, "grouped_recall@{k}_miss")
        if ranks and ranks_with_misses:
            keys = f"'grouped_recall@{ranks[0]}' and 'grouped_recall@{ranks_with_misses[0]}_miss'"
            raise InputError(
                f"{type(settings).__name__}: metrics request Grouped Recall with and without queries that have no match, "
                f"{keys}. Request one of them, and evaluate twice to get both."
            )
        rates = _parameters(reported, "opis@fmr{p}") + _parameters(reported, "opis_gap@fmr{p}")
        return cls(
            named=tuple(named),
            reported=reported,
            pooled=_pooled_request(settings, reported),
            consistency_rates=tuple(dict.fromkeys(rates)),
            grouped_k=ranks or ranks_with_misses,
            unmatched="miss" if ranks_with_misses else "exclude",
            group_size=AUTO_GROUP_SIZE if chooses else groups if isinstance(groups, int) else None,
            chooses_group_size=chooses,
            sets_groups=groups is not None and not chooses,
        )

    def has_input(self, *inputs: MetricInput) -> bool:
        """Return whether a reported metric is computed from one of these inputs."""
        return any(metric.metric.input in inputs for metric in self.reported)

    @property
    def needs_all_pairs(self) -> bool:
        """Whether a metric or the threshold needs the counts of all pairs together."""
        return bool(self.pooled.thresholds) or self.has_input(*OF_PAIRS)

    @property
    def names_grouped_recall(self) -> bool:
        """Whether `metrics` names Grouped Recall explicitly, and not only as one of the default metrics."""
        grouped = {metric.key for metric in self.reported if metric.metric.input == "groups"}
        if grouped <= {*DEFAULT_METRICS} <= {metric.key for metric in self.named}:
            return False
        return bool(grouped)


def request_of(settings: RetrievalSettings) -> RetrievalRequest:
    """Return what the settings request, as derived in their constructor."""
    request: RetrievalRequest = vars(settings)["_request"]
    return request


def _parameters(metrics: Sequence[RequestedMetric], pattern: str) -> tuple[Any, ...]:
    """Return the parameter of each metric of a pattern, such as the ranks of `grouped_recall@{k}`."""
    return tuple(
        value for metric in metrics if metric.metric.pattern == pattern for value in metric.parameters.values()
    )


def _pooled_request(settings: RetrievalDefaults, reported: Sequence[RequestedMetric]) -> PooledRequest:
    """Return the reported metrics of all pairs together."""
    patterns = {metric.metric.pattern for metric in reported}
    return PooledRequest(
        precisions=_parameters(reported, "recall@precision{p}"),
        allowed_thresholds=(-math.inf, math.inf) if settings.threshold_bounds is None else settings.threshold_bounds,
        thresholds=() if settings.threshold is None else (settings.threshold,),
        false_match_rates=_parameters(reported, "fnmr@fmr{p}"),
        equal_error_rate="eer" in patterns,
        average_precision="auc_pr" in patterns,
        auroc="pair_auroc" in patterns,
    )


def from_keywords(
    target: Callable[..., Any],
    keywords: Mapping[str, Any],
    options: type = RetrievalOptions,
    settings: type[RetrievalSettings] = RetrievalSettings,
) -> RetrievalSettings:
    """Return the settings that were passed to a function or a class as keywords.

    Messages begin with the name of the target. `options` is the TypedDict of its settings.
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
        message = str(error)
        # `RetrievalSettings: ...`, or a sentence that begins with this name
        if re.match(rf"{settings.__name__}\b", message):
            raise InputError(message.replace(settings.__name__, target.__name__, 1)) from error
        raise InputError(f"{target.__name__}: {message}") from error


def without_classes(call: str, settings: RetrievalSettings) -> RetrievalSettings:
    """Return the settings for items with several labels or a passed relevance, which have other default metrics."""
    request = request_of(settings)
    is_default = settings.metrics == DEFAULT_METRICS
    need_classes = [] if is_default else [metric.key for metric in request.named if _needs_classes(metric)]
    if request.sets_groups:
        need_classes.append("label_groups")
    if need_classes:
        raise InputError(
            f"{call}: {', '.join(need_classes)} cannot be computed, because means and groups of classes need exactly one "
            "label per item. Leave them out if items have several labels, or if you pass relevance."
        )
    return replace(settings, metrics=RELEVANCE_METRICS if is_default else settings.metrics, label_groups=None)


def _needs_classes(metric: RequestedMetric) -> bool:
    return metric.is_macro or metric.metric.input in ("prototypes", "groups", "classes")


def main_memory(settings: RetrievalSettings) -> int:
    """Return the budget of main memory in bytes. With a CUDA device it is the default, since `memory_mb` is for the GPU."""
    on_cpu = compute_device("evaluate_retrieval", settings.device).type == "cpu"
    return memory_bytes("evaluate_retrieval", settings.memory_mb if on_cpu else None)


# ----------------------------------------------------------------------------------------------------------------- checks


def _plain_values(settings: RetrievalDefaults) -> dict[str, Any]:
    """Return the values that the constructor stores: a tuple of metrics, each once, and Python numbers."""
    values = {name: plain_list(_plain(getattr(settings, name))) for name in names_of(RetrievalOptions)}
    values["metrics"] = stored_metrics(type(settings).__name__, several(values["metrics"]))
    return values


def check_settings(settings: RetrievalSettings) -> None:
    """Refuse settings that are wrong for any data."""
    call = type(settings).__name__
    check_similarity(settings.similarity)
    check_ties(settings.ties)
    _check_thresholds(call, settings)
    _check_groups(call, settings)
    _check_max_queries(call, settings.max_queries)
    check_seed(call, "seed", settings.seed)
    normal_quantile(settings.confidence)  # refuses a wrong confidence before the work
    memory_bytes(call, settings.memory_mb)
    compute_device(call, settings.device)
    has_prototypes = any(metric.metric.input == "prototypes" for metric in request_of(settings).named)
    if settings.similarity == "hamming" and (has_prototypes or settings.device not in ("cpu", "auto")):
        raise InputError(
            f"{call}: binary codes have no prototypes, and are compared on the CPU. With similarity='hamming', leave out "
            "prototype_accuracy and device."
        )


def _check_thresholds(call: str, settings: RetrievalSettings) -> None:
    threshold = settings.threshold
    bounds = settings.threshold_bounds
    if threshold is not None and not (_is_number(threshold) and math.isfinite(threshold)):
        raise InputError(
            f"{call}: threshold={threshold!r} must be a finite score; None takes the threshold of the best F1."
        )
    is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(map(_is_number, bounds))
    if bounds is not None and not (is_pair and bounds[0] <= bounds[1]):  # NaN is refused, too
        raise InputError(
            f"{call}: threshold_bounds={bounds!r} must be the smallest and the largest threshold, in this order, such as "
            "(0.0, 1.0); None sets no bounds."
        )


def _check_max_queries(call: str, max_queries: Any) -> None:
    if max_queries is None:
        return
    if not isinstance(max_queries, int) or isinstance(max_queries, bool):
        raise InputError(
            f"{call}: max_queries={max_queries!r} must be a positive whole number; None evaluates all queries."
        )
    if max_queries < 1:
        raise InputError(f"{call}: max_queries={max_queries!r} must be positive; None evaluates all queries.")


def _check_groups(call: str, settings: RetrievalSettings) -> None:
    request = request_of(settings)
    if settings.label_groups is None:
        if not request.reported:
            raise InputError(
                f"{call}: label_groups=None leaves out Grouped Recall, but metrics contains nothing else. Add 'mAP' to "
                "metrics, or leave out label_groups."
            )
        return
    smallest, fact = _smallest_group(call, settings)
    if request.sets_groups and not request.grouped_k:
        size = f"={settings.label_groups}" if isinstance(settings.label_groups, int) else ""
        raise InputError(
            f"{call}: label_groups{size} is for Grouped Recall, but metrics does not contain it. Add 'grouped_recall@1' to "
            "metrics, or leave out label_groups."
        )
    if max(request.grouped_k, default=1) >= smallest:
        raise InputError(
            f"{call}: the ranks of Grouped Recall, {request.grouped_k}, must be below {fact}, because recall is not "
            "informative at ranks as large as the number of classes. Use larger groups or smaller ranks."
        )


def _smallest_group(call: str, settings: RetrievalSettings) -> tuple[int, str]:
    """Return the size of the smallest group, and its description; refuse any other form of `label_groups`."""
    groups = settings.label_groups
    if request_of(settings).chooses_group_size:
        return AUTO_GROUP_SIZE, f"label_groups={AUTO_GROUP_SIZE}, which is the size with 'auto'"
    if isinstance(groups, Sequence | Tensor) and not isinstance(groups, str):
        checked = checked_groups(call, groups)
        if len(checked) < settings.fewest_groups:
            raise InputError(f"{call}: label_groups has one group, but the interval needs two. Pass another group.")
        smallest = min(map(len, checked))
        return smallest, f"{smallest}, the number of labels in the smallest group"
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 1:
        return groups, f"label_groups={groups}"
    raise InputError(
        f"{call}: label_groups={groups!r} must be a group size of at least 2 labels, or the labels of each group. "
        f"'auto' uses {AUTO_GROUP_SIZE} labels if there are at least {2 * AUTO_GROUP_SIZE} classes, and None omits Grouped "
        "Recall."
    )


def checked_groups(call: str, groups: Any) -> list[Labels]:
    """Return the user's groups as labels."""
    single = next((group for group in groups if isinstance(group, str) or np.ndim(group) == 0), None)
    if not len(groups) or single is not None:
        fact = "is empty" if single is None else f"holds {single!r}, which is a single label"
        raise InputError(
            f"{call}: label_groups {fact}. Pass the labels of each group, such as label_groups=[[0, 1, 2], [3, 4, 5]]."
        )
    checked = [on_cpu(as_labels(group, "label_groups", call)) for group in groups]
    for number, group in enumerate(checked):
        if len(group) < 2:
            raise InputError(
                f"{call}: group {number} of label_groups has {counted(len(group), 'label')}, but Recall@K inside a group "
                "needs at least 2. Leave the group out, or merge it with another group."
            )
    times = Counter(join(call, checked).tolist())
    repeated = [label for label, count in times.items() if count > 1]
    if repeated:
        raise InputError(
            f"{call}: label {repeated[0]!r} appears more than once in label_groups. Put each label into one group at most."
        )
    return checked


def compute_device(call: str, device: str | torch.device) -> torch.device:
    """Return the device that computes scores. `"auto"` is the first CUDA device, or the CPU if there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fix = "Pass 'cpu', 'cuda' or 'auto'."
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"{call}: device={device!r} is not a device ({error}). {fix}") from error
    if torch_device.type not in ("cpu", "cuda"):
        raise InputError(f"{call}: device={device!r} does not support float64, which exact counts need. {fix}")
    count = torch.cuda.device_count()
    if torch_device.type == "cuda" and (torch_device.index or 0) >= count:
        raise InputError(f"{call}: device={device!r}, but torch sees {count} CUDA devices. Pass 'cpu' or 'auto'.")
    return torch_device


def memory_bytes(call: str, memory_mb: Any) -> int:
    """Return the memory budget in bytes. None is the default, and infinity is more than any machine's memory."""
    memory_mb = DEFAULT_MEMORY_MB if memory_mb is None else _plain(memory_mb)
    if not (_is_number(memory_mb) and memory_mb > 0):
        raise InputError(
            f"{call}: memory_mb={memory_mb!r} must be a positive number of MB; None is the default, {DEFAULT_MEMORY_MB:g}."
        )
    return int(min(memory_mb, UNLIMITED_MB) * 10**6)


def several(value: Any) -> tuple[Any, ...]:
    """Return the values of an iterable, or a single value, as a tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return (value,)
    return tuple(value)


def _plain(value: Any) -> Any:
    """Return a Python number for a NumPy scalar or a tensor with one number; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
