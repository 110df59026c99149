"""`linear_probe`: the accuracy of a linear classifier, or the R2 of a linear regression, on frozen embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._probe_classification import LEAVE_GROUP_OUT, LEAVE_ONE_OUT, Classification
from fewshot_callbacks.functional._probe_inputs import CALL, read_targets
from fewshot_callbacks.functional._probe_regression import R2_LEAVE_GROUP_OUT, R2_LEAVE_ONE_OUT, Regression
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional._repeated import hashes_of
from fewshot_callbacks.functional._ridge import LeaveGroupOut, LeaveOneOut, Ridge, fit_ridge, summed
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, Share
from fewshot_callbacks.functional.neighbours import positive_number
from fewshot_callbacks.functional.retrieval.settings import memory_bytes, several
from fewshot_callbacks.functional.retrieval.values import Values, or_none
from fewshot_callbacks.functional.statistics import Interval, normal_quantile
from fewshot_callbacks.settings import Metric
from fewshot_callbacks.system.words import counted

# Default strengths: from almost no penalty to a classifier that uses little more than the class means.
DEFAULT_STRENGTHS = tuple(10.0**exponent for exponent in range(-6, 3))
# A weaker penalty is below the rounding of the eigenvalues. With a stronger one, every prediction is the mean.
WEAKEST, STRONGEST = 1e-9, 1e9
# Relative difference up to which mean squared errors count as equal.
SAME_ERROR = 1e-12
# A note warns if the best strength is the smallest or largest, and its error beats its neighbour's by this share. On a
# plateau of equal errors, a strength beyond the end would not be better.
NOTED_GAIN = 1e-3

PROBE_METRICS = (
    Metric(
        "probe",
        "pairs",
        None,
        "Queries whose class gets the highest score from a linear classifier fitted on the gallery.",
    ),
    Metric("probe_top5", "pairs", None, "Queries whose class is among the five with the highest scores."),
    Metric(
        LEAVE_ONE_OUT,
        "pairs",
        None,
        "Gallery items whose class gets the highest score from a classifier that is fitted without the item.",
    ),
    Metric(
        LEAVE_GROUP_OUT,
        "pairs",
        None,
        "Gallery items whose class gets the highest score from a classifier that is fitted without their group.",
    ),
    Metric(
        "probe_r2", "pairs", None, "Share of the variance of the targets that a linear regression explains (R2).", None
    ),
    Metric("probe_spearman", "pairs", None, "Rank correlation of targets and predictions.", (-1.0, 1.0)),
    Metric(
        R2_LEAVE_ONE_OUT, "pairs", None, "R2 on the gallery items, each predicted by a fit without this item.", None
    ),
    Metric(
        R2_LEAVE_GROUP_OUT,
        "pairs",
        None,
        "R2 on the gallery items, each predicted by a fit without its group.",
        None,
    ),
)
"""The metrics that `linear_probe` reports."""


@equal_with_nan
@dataclass(frozen=True)
class ProbeReport(Values):
    """The result of `linear_probe`; `print` shows the values with their intervals.

    Attributes:
        values: Metric -> value. With classes: `probe`, `probe_leave_one_out` and, for more than five classes,
            `probe_top5`. With targets: `probe_r2`, `probe_spearman` and `probe_r2_leave_one_out`, means over the
            targets. With `gallery_groups` also `probe_leave_group_out` or `probe_r2_leave_group_out`. NaN if it is
            undefined; a note gives the reason. For balanced classes and features that carry no information,
            `probe_leave_one_out` falls to 0, because the class of the left-out item is then the smallest.
        intervals: Metric -> confidence interval of an accuracy for new queries and new classes (or groups) of queries,
            with this gallery. A regression has no intervals.
        confidence: Confidence level of the intervals.
        strength: Chosen strength of the penalty, in units of the mean non-zero eigenvalue of the gallery's scatter
            matrix (centred, summed over items). If errors are equal, it is the first strength that was passed.
        alpha: The same penalty as `alpha` in scikit-learn's `Ridge` and `RidgeClassifier`.
        errors: Strength -> mean squared error of the predictions of left-out gallery items or groups, which decides the
            strength. It includes the items counted in `gallery_not_counted`.
        queries: Number of queries in the values.
        queries_without_match: Number of queries left out because no gallery item has their label.
        gallery: Number of items that the probe was fitted on.
        gallery_not_counted: Number of gallery items that do not count in the accuracy of left-out items or groups,
            because no remaining item has their label.
        classes: Number of gallery classes; None for a regression.
        per_target: Metric -> value of each target of a regression; empty for classes.
        notes: What you should know when you read the values.
        per_query: Metric -> value of each query: 0, 1, or a fraction if classes tie. NaN for a query that is left out.
            Empty for a regression.
    """

    _known: ClassVar = PROBE_METRICS

    values: dict[str, float]
    intervals: dict[str, Interval]
    confidence: float
    strength: float
    alpha: float
    errors: dict[float, float]
    queries: int
    queries_without_match: int
    gallery: int
    gallery_not_counted: int
    classes: int | None
    per_target: dict[str, tuple[float, ...]]
    notes: tuple[str, ...]
    per_query: dict[str, Float[Tensor, "all_queries"]] = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return one line per value with its interval, and the notes."""
        sizes = f"{counted(self.queries, 'query')}, {counted(self.gallery, 'gallery item')}"
        if self.classes is not None:
            sizes += f" of {counted(self.classes, 'class')}"
        tried = f", the best of {len(self.errors)}" if len(self.errors) > 1 else ""
        penalty = f"strength {self.strength:g}{tried} (alpha={self.alpha:.4g} in scikit-learn)"
        return "\n".join([sizes, penalty, *self.lines(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, under the name that `RetrievalReport` has for them."""
        return self.notes

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (what is not finite becomes None)."""
        plain = ("queries", "queries_without_match", "gallery", "gallery_not_counted", "classes")
        penalty = {
            "strength": self.strength,
            "alpha": or_none(self.alpha),
            "errors": {f"{strength:g}": or_none(error) for strength, error in self.errors.items()},
        }
        per_target = {key: [or_none(value) for value in values] for key, values in self.per_target.items()}
        rest = {"confidence": or_none(self.confidence), "per_target": per_target, "notes": list(self.notes)}
        return self.tables() | penalty | {name: getattr(self, name) for name in plain} | rest


@default_mode()
def linear_probe(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    strengths: Any = DEFAULT_STRENGTHS,
    confidence: float = 0.95,
    memory_mb: float | None = None,
    share: Share = EVERYTHING,
) -> ProbeReport:
    """Return the accuracy or R2 on the queries of a linear probe that is fitted on the gallery. *Collective*.

    The probe is ridge regression in closed form. For a classifier, the target is 1 for the class of an item and -1 for all
    other classes, as in scikit-learn's `RidgeClassifierCV`. For a regression, the targets are the labels, as in `RidgeCV`.
    Like these two, the probe tries several strengths of the penalty, and keeps the one with the smallest squared error of
    exact leave-one-out predictions on the gallery. Nothing is random or iterative, and neither the scale nor a rotation of
    the embeddings changes the result.

    Items of one group, such as a patient or a video, resemble each other. Leave-one-out then predicts an item from near
    copies and is too optimistic. With `gallery_groups`, the strength is chosen by exact leave-one-group-out predictions.

    Args:
        queries: (queries, dim) finite floating-point rows. `Shards` bring their own labels, ids and groups, and
            `Shards` with `is_gallery` are divided into queries and gallery.
        query_labels: (queries,) integers or strings are classes. Floats of shape (queries,) or (queries, targets) are the
            targets of a regression. A query is left out and counted if the gallery does not have its class. Labels in
            files are always classes.
        gallery: (gallery, dim) items that the probe is fitted on.
        gallery_labels: Classes or targets of the gallery, in the same form.
        query_ids: (queries,) id of each query, if some queries are repeated. Only the first query of each id counts. A note
            warns if queries have the id of a gallery item.
        gallery_ids: (gallery,) id of each gallery item. The probe is fitted on the first item of each id.
        query_groups: (queries,) integers or strings. Queries of one group count as dependent, and the intervals are for new
            groups. Without groups, queries of one class count as dependent.
        gallery_groups: (gallery,) integers or strings. The items of one group are left out together. One group at a time is
            in memory, in float64.
        strengths: One or several strengths of the penalty, from 1e-9 to 1e9, in units of the mean non-zero eigenvalue of the
            gallery's scatter matrix. The default is nine strengths from 1e-6 to 100. A note warns if the smallest or the
            largest is clearly the best.
        confidence: Confidence level of the intervals, in (0, 1).
        memory_mb: Memory limit in MB; None is 512. `Shards` stay in their files if their vectors take more than a quarter of
            it. The files are then read up to eight times. With `gallery_groups`, the vectors are memory-mapped, or copied
            to a temporary file.
        share: The part of the queries and of the gallery that this process has, if several processes make the call
            together. The processes exchange sums of dim x dim and dim x classes numbers. They only send items if there are
            groups, so that each group is in one process. A process without items passes empty tensors, and empty groups and
            places if the other processes pass them. Every process returns the single-process report, up to rounding, with
            the same strength and accuracy.

    Returns:
        A frozen report on the CPU. An accuracy is in [0, 1]. R2 is at most 1, and it is negative if the mean of the targets
        predicts the queries better than the probe.

    Raises:
        ValueError: If shapes or types do not fit, embeddings or targets contain NaN or Inf, the gallery is missing or has a
            single class, group or item, no query has a class of the gallery, a strength is out of range, or the processes
            pass different arguments. Every process raises the same error.

    Examples:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> labels = torch.arange(90) % 3
        >>> embeddings = torch.eye(8)[labels] + 0.4 * torch.randn(90, 8, generator=generator)
        >>> report = linear_probe(embeddings[:30], labels[:30], embeddings[30:], labels[30:])
        >>> round(report["probe"], 3), report.strength
        (0.967, 0.1)
        >>> ages = embeddings @ torch.arange(8.0)
        >>> round(linear_probe(embeddings[:30], ages[:30], embeddings[30:], ages[30:])["probe_r2"], 3)
        1.0
    """
    processes = share.processes
    with processes.together():
        strengths = _checked_strengths(strengths)
        normal_quantile(confidence)
        memory = memory_bytes(CALL, memory_mb)
        settings = {"strengths": strengths, "confidence": confidence, "memory_mb": memory_mb}
        share.refuse_other_settings(CALL, settings)
        columns = {"query_labels": query_labels, "gallery_labels": gallery_labels}
        targets = read_targets(columns, processes)
        if targets is not None:
            # Columns are integer codes, so the targets themselves cannot be a column. The row number finds them, even
            # after items were left out.
            columns = {name: hashes_of(of_side, torch.float64) for name, of_side in targets.items()}
            rows = {"query_rows": "query_labels", "gallery_rows": "gallery_labels"}
            columns |= {name: torch.arange(len(targets[labels])) for name, labels in rows.items()}
        columns |= {"query_ids": query_ids, "gallery_ids": gallery_ids}
        columns |= {"query_groups": query_groups, "gallery_groups": gallery_groups}
        sets = read_items(CALL, queries, gallery, columns, share=share, memory=memory)
        if targets is None:
            probe: Classification | Regression = Classification.of(sets, confidence)
        else:
            probe = Regression.of(sets, targets)
        return _report(probe, strengths, confidence, processes)


def _checked_strengths(strengths: Any) -> list[float]:
    """Return the strengths without repetitions."""
    fix = f"Pass numbers from {WEAKEST:g} to {STRONGEST:g}, such as (0.001, 0.1, 10)."
    numbers = [positive_number(CALL, "strengths", strength, fix) for strength in several(strengths)]
    if not numbers:
        raise InputError(f"{CALL}: strengths is empty. {fix}")
    for number in numbers:
        if not WEAKEST <= number <= STRONGEST:
            raise InputError(f"{CALL}: the strength {number:g} in strengths is out of range. {fix}")
    return list(dict.fromkeys(numbers))


# ------------------------------------------------------------------------------------------------------------ the report


def _report(
    probe: Classification | Regression, strengths: Sequence[float], confidence: float, processes: Processes
) -> ProbeReport:
    """Return the report of the probe, fitted with the best strength of the penalty. *Collective*."""
    ridge = fit_ridge(probe.items, processes)
    scale = ridge.mean_eigenvalue
    way: LeaveOneOut | LeaveGroupOut = LeaveOneOut(ridge, probe.items)
    if probe.groups is not None:
        way = LeaveGroupOut(ridge, probe.items, probe.groups)
    [squares] = summed([way.squared_errors([strength * scale for strength in strengths])], processes)
    of_strengths = (squares / (ridge.items * probe.items.targets.columns)).tolist()
    errors = dict(zip(strengths, of_strengths, strict=True))
    strength = _best(errors)
    findings = probe.measure(ridge, strength * scale, processes)
    return ProbeReport(
        confidence=confidence,
        strength=strength,
        alpha=strength * scale * ridge.scale * ridge.scale,
        errors=errors,
        gallery=ridge.items,
        notes=(*findings.notes, *_notes_on_fit(ridge, errors, strength)),
        **findings.fields,
    )


def _best(errors: dict[float, float]) -> float:
    """Return the first strength with the smallest error, up to rounding."""
    least = min(errors.values())
    return next(strength for strength, error in errors.items() if error <= least * (1 + SAME_ERROR))


def _notes_on_fit(ridge: Ridge, errors: dict[float, float], strength: float) -> list[str]:
    """Return a note if the gallery has collapsed, or if the best strength is the smallest or largest."""
    if not ridge.rank:
        return [
            f"All {ridge.items:,} gallery items have the same embedding, so the probe predicts the same for every "
            "query: the embedding has collapsed."
        ]
    ordered = sorted(errors)
    if len(ordered) == 1 or strength not in (ordered[0], ordered[-1]):
        return []
    is_weakest = strength == ordered[0]
    neighbour = ordered[1] if is_weakest else ordered[-2]
    beyond = strength / 100 if is_weakest else strength * 100
    gains = errors[strength] < (1 - NOTED_GAIN) * errors[neighbour]
    if not gains or not WEAKEST <= beyond <= STRONGEST:
        return []
    end = "weakest" if is_weakest else "strongest"
    return [
        f"The best strength, {strength:g}, is the {end} that was tried, so a strength beyond it may be better. Pass "
        f"strengths such as {beyond:g}, too."
    ]
