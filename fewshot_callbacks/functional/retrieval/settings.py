"""The settings of an evaluation: what follows from them (metrics, their parameters, memory), and their checks.

`fewshot_callbacks/settings.py` declares each setting. A new setting has its check here, in `check_settings`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fewshot_callbacks.engine.vectors import check_similarity
from fewshot_callbacks.functional._labels import Labels, as_labels, join, on_cpu
from fewshot_callbacks.functional._reading import check_seed
from fewshot_callbacks.functional.retrieval.rank_metrics import check_ties
from fewshot_callbacks.functional.retrieval.registry import (
    RELEVANCE_METRICS,
    find_metrics,
    requested_metrics,
    stored_metrics,
)
from fewshot_callbacks.functional.statistics import normal_quantile
from fewshot_callbacks.settings import DEFAULT_METRICS, RequestedMetric, RetrievalSettings, plain_list
from fewshot_callbacks.system.words import counted

DEFAULT_MEMORY_MB: float = 512
# The largest budget. Larger ones, such as infinity, count as this one: no machine has as much memory, and its number of
# bytes still has 64 bits.
UNLIMITED_MB = 2**40
# Number of labels in a random group if `label_groups` is "auto". It is the same for every set, since Recall@K cannot be
# compared among different numbers of classes.
AUTO_GROUP_SIZE = 10

Unmatched = Literal["exclude", "miss"]
"""How a query without a relevant candidate in its group counts: not at all (`exclude`), or as a failed search (`miss`)."""


# --------------------------------------------------------------------------------------------- what follows from settings


def reported_metrics(settings: RetrievalSettings) -> list[RequestedMetric]:
    """Return the metrics that are reported: those of `metrics`, without Grouped Recall if `label_groups` is None."""
    metrics = find_metrics(settings.metrics)
    return [metric for metric in metrics if metric.metric.source != "groups" or settings.label_groups is not None]


def parameters(settings: RetrievalSettings, pattern: str) -> tuple[Any, ...]:
    """Return the parameter of each reported metric of a pattern, such as the ranks of `grouped_recall@{k}`."""
    metrics = [metric for metric in reported_metrics(settings) if metric.metric.pattern == pattern]
    return tuple(value for metric in metrics for value in metric.parameters.values())


def consistency_rates(settings: RetrievalSettings) -> tuple[float, ...]:
    """Return the false match rates below which classes are compared."""
    rates = parameters(settings, "opis@fmr{p}") + parameters(settings, "opis_gap@fmr{p}")
    return tuple(dict.fromkeys(rates))


def grouped_k(settings: RetrievalSettings) -> tuple[int, ...]:
    """Return the K of Grouped Recall@K; none if it is not reported."""
    return parameters(settings, "grouped_recall@{k}") or parameters(settings, "grouped_recall@{k}_miss")


def grouped_unmatched(settings: RetrievalSettings) -> Unmatched:
    """Return how Grouped Recall counts a query without a match."""
    return "miss" if parameters(settings, "grouped_recall@{k}_miss") else "exclude"


def sets_groups(settings: RetrievalSettings) -> bool:
    """Return whether `label_groups` is a size or groups, and neither `auto` nor None."""
    return settings.label_groups is not None and not chooses_group_size(settings)


def chooses_group_size(settings: RetrievalSettings) -> bool:
    """Return whether `label_groups` is `auto`, so that the number of classes decides whether there is Grouped Recall."""
    return isinstance(settings.label_groups, str) and settings.label_groups == "auto"


def group_size(settings: RetrievalSettings) -> int | None:
    """Return the number of labels in a random group; None if `label_groups` is groups or None."""
    if chooses_group_size(settings):
        return AUTO_GROUP_SIZE
    return settings.label_groups if isinstance(settings.label_groups, int) else None


def names_grouped_recall(settings: RetrievalSettings) -> bool:
    """Return whether `metrics` names Grouped Recall itself, and not only as one of the default metrics."""
    grouped = {metric.key for metric in reported_metrics(settings) if metric.metric.source == "groups"}
    keys = {metric.key for metric in find_metrics(settings.metrics)}
    if grouped <= {*DEFAULT_METRICS} <= keys:
        return False
    return bool(grouped)


def without_classes(call: str, settings: RetrievalSettings) -> RetrievalSettings:
    """Return the settings for items with several labels or a given relevance: with other metrics by default.

    Args:
        call: The public function or class, for messages.
        settings: The settings for labels.

    Raises:
        ValueError: If a metric or a setting needs classes.
    """
    metrics = RELEVANCE_METRICS if settings.metrics == DEFAULT_METRICS else settings.metrics
    need_classes = [metric.key for metric in find_metrics(metrics) if _needs_classes(metric)]
    if sets_groups(settings):
        need_classes.append("label_groups")
    if need_classes:
        raise ValueError(
            f"{call}: {', '.join(need_classes)} cannot be computed where items have several labels each, or relevance is "
            "given: means and groups of classes need one label for each item. Leave them out."
        )
    return replace(settings, metrics=metrics, label_groups=None)


def _needs_classes(metric: RequestedMetric) -> bool:
    return metric.is_macro or metric.metric.source in ("prototypes", "groups", "classes")


def main_memory(settings: RetrievalSettings) -> int:
    """Return the bound on the main memory in bytes. With a CUDA device it is the default: `memory_mb` bounds the device."""
    on_cpu = compute_device("evaluate_retrieval", settings.device).type == "cpu"
    return memory_bytes("evaluate_retrieval", settings.memory_mb if on_cpu else None)


# ----------------------------------------------------------------------------------------------------------------- checks


def plain_values(settings: RetrievalSettings) -> dict[str, Any]:
    """Return the values that the constructor stores: a tuple of metrics, each once, and Python's numbers.

    Raises:
        ValueError: If an import path names no metric, or a metric stands without its parameters.
    """
    values = {field.name: plain_list(_plain(getattr(settings, field.name))) for field in fields(settings)}
    values["metrics"] = stored_metrics(type(settings).__name__, several(values["metrics"]))
    return values


def check_settings(settings: RetrievalSettings) -> None:
    """Refuse settings that are wrong for any data.

    Raises:
        ValueError: With the setting, its value and what to pass instead.
    """
    call = type(settings).__name__
    check_similarity(settings.similarity)
    check_ties(settings.ties)
    requested_metrics(call, settings.metrics)
    _check_thresholds(call, settings)
    _check_groups(call, settings)
    _check_max_queries(call, settings.max_queries)
    check_seed(call, "seed", settings.seed)
    normal_quantile(settings.confidence)  # a wrong one is refused before the work, not after it
    memory_bytes(call, settings.memory_mb)
    compute_device(call, settings.device)
    has_prototypes = any(metric.metric.source == "prototypes" for metric in find_metrics(settings.metrics))
    if settings.similarity == "hamming" and (has_prototypes or settings.device not in ("cpu", "auto")):
        raise ValueError(
            f"{call}: binary codes have no mean that could be a prototype, and are compared on the CPU. "
            "With similarity='hamming' leave out prototype_accuracy and device."
        )


def _check_thresholds(call: str, settings: RetrievalSettings) -> None:
    threshold = settings.threshold
    bounds = settings.threshold_bounds
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


def _check_max_queries(call: str, max_queries: Any) -> None:
    if max_queries is None:
        return
    if not isinstance(max_queries, int) or isinstance(max_queries, bool):
        raise ValueError(
            f"{call}: max_queries={max_queries!r} must be a positive whole number; None evaluates all queries."
        )
    if max_queries < 1:
        raise ValueError(f"{call}: max_queries={max_queries!r} must be positive; None evaluates all queries.")


def _check_groups(call: str, settings: RetrievalSettings) -> None:
    of_both = [parameters(settings, f"grouped_recall@{{k}}{end}") for end in ("", "_miss")]
    if all(of_both):
        keys = [f"grouped_recall@{ranks[0]}{end}" for ranks, end in zip(of_both, ("", "_miss"), strict=True)]
        raise ValueError(
            f"{call}: metrics ask for Grouped Recall with and without queries that have no match, {keys[0]!r} and "
            f"{keys[1]!r}. Ask for one of them, and evaluate twice for both."
        )
    if settings.label_groups is None:
        if not reported_metrics(settings):
            raise ValueError(
                f"{call}: label_groups=None leaves out Grouped Recall, and metrics asks for nothing else. Add 'mAP' to "
                "metrics, or leave out label_groups."
            )
        return
    smallest, fact = _smallest_group(call, settings)
    if sets_groups(settings) and not grouped_k(settings):
        size = f"={settings.label_groups}" if isinstance(settings.label_groups, int) else ""
        raise ValueError(
            f"{call}: label_groups{size} is for Grouped Recall, which metrics does not ask for. Add 'grouped_recall@1' to "
            "metrics, or leave out label_groups."
        )
    if max(grouped_k(settings), default=1) >= smallest:
        raise ValueError(
            f"{call}: the ranks of Grouped Recall, {grouped_k(settings)}, must lie below {fact}: with as many candidates as "
            "classes, recall says little. Use larger groups or smaller ranks."
        )


def _smallest_group(call: str, settings: RetrievalSettings) -> tuple[int, str]:
    """Return the number of labels of the smallest group, and words for it; refuse `label_groups` of another form."""
    groups = settings.label_groups
    if chooses_group_size(settings):
        return AUTO_GROUP_SIZE, f"label_groups={AUTO_GROUP_SIZE}, which 'auto' takes"
    if isinstance(groups, Sequence | Tensor) and not isinstance(groups, str):
        checked = checked_groups(call, groups)
        if len(checked) < settings.fewest_groups:
            raise ValueError(f"{call}: label_groups holds one group; its interval needs two. Give another group.")
        smallest = min(map(len, checked))
        return smallest, f"{smallest}, the labels of the smallest group"
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 1:
        return groups, f"label_groups={groups}"
    raise ValueError(
        f"{call}: label_groups={groups!r} must be a whole number of at least 2 labels, or the labels of each group; "
        f"'auto' takes {AUTO_GROUP_SIZE} labels where there are {2 * AUTO_GROUP_SIZE} classes, and None omits Grouped "
        "Recall."
    )


def checked_groups(call: str, groups: Any) -> list[Labels]:
    """Return the groups of a caller as labels.

    Args:
        call: The public function, for the message.
        groups: The labels of each group, integers or strings.

    Raises:
        ValueError: If they are not groups of at least two labels each, or a label is in two groups.
    """
    single = next((group for group in groups if isinstance(group, str) or np.ndim(group) == 0), None)
    if not len(groups) or single is not None:
        fact = "is empty" if single is None else f"holds {single!r}, which is a single label"
        raise ValueError(
            f"{call}: label_groups {fact}. Pass the labels of each group, such as label_groups=[[0, 1, 2], [3, 4, 5]]."
        )
    checked = [on_cpu(as_labels(group, "label_groups", call)) for group in groups]
    for number, group in enumerate(checked):
        if len(group) < 2:
            raise ValueError(
                f"{call}: group {number} of label_groups holds {counted(len(group), 'label')}; Recall@K inside a group "
                "needs at least 2. Leave it out, or join it to another."
            )
    times = Counter(join(call, checked).tolist())
    repeated = [label for label, count in times.items() if count > 1]
    if repeated:
        raise ValueError(
            f"{call}: label {repeated[0]!r} comes more than once in label_groups. A label is in one group at most."
        )
    return checked


def compute_device(call: str, device: str | torch.device) -> torch.device:
    """Return the device that computes scores; `"auto"` is the first CUDA device, or the CPU if there is none.

    Raises:
        ValueError: For a device that does not exist, or that does not support float64.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fix = "Pass 'cpu', 'cuda' or 'auto'."
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{call}: device={device!r} is not a device ({error}). {fix}") from error
    if torch_device.type not in ("cpu", "cuda"):
        raise ValueError(f"{call}: device={device!r} has no float64, which exact counts need. {fix}")
    count = torch.cuda.device_count()
    if torch_device.type == "cuda" and (torch_device.index or 0) >= count:
        raise ValueError(f"{call}: device={device!r}, but torch sees {count} CUDA devices. Pass 'cpu' or 'auto'.")
    return torch_device


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
    """Return the values of an iterable, or a single value, as a tuple."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return (value,)
    return tuple(value)


def _plain(value: Any) -> Any:
    """Return Python's number for a number of NumPy or a tensor of one number; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
