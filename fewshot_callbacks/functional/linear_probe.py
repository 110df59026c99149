"""`linear_probe`: how well a linear classifier, or a linear regression, on frozen embeddings does."""

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

# Strengths that are tried by default: from hardly any penalty to a classifier that sees little but the class means.
DEFAULT_STRENGTHS = tuple(10.0**exponent for exponent in range(-6, 3))
# Weaker ones are lost in the rounding of the eigenvalues, and stronger ones leave no prediction but the mean.
WEAKEST, STRONGEST = 1e-9, 1e9
# Mean squared errors that differ by less than this share are equal.
SAME_ERROR = 1e-12
# A note says that an end of the strengths is the best if its error is lower than that of its neighbour by this share. On a
# plateau of equal errors a strength beyond the end is no better.
NOTED_GAIN = 1e-3

PROBE_METRICS = (
    Metric("probe", "pairs", None, "Queries whose class a linear classifier on the gallery scores highest."),
    Metric("probe_top5", "pairs", None, "Queries whose class is among the five that it scores highest."),
    Metric(
        LEAVE_ONE_OUT,
        "pairs",
        None,
        "Gallery items whose class is scored highest by a classifier fitted without the item.",
    ),
    Metric(
        LEAVE_GROUP_OUT,
        "pairs",
        None,
        "Gallery items whose class is scored highest by a classifier without their group.",
    ),
    Metric("probe_r2", "pairs", None, "Share of the variance of the targets that a linear regression explains.", None),
    Metric("probe_spearman", "pairs", None, "Rank correlation of targets and predictions.", (-1.0, 1.0)),
    Metric(R2_LEAVE_ONE_OUT, "pairs", None, "probe_r2 of the gallery, each item predicted by a fit without it.", None),
    Metric(
        R2_LEAVE_GROUP_OUT,
        "pairs",
        None,
        "probe_r2 of the gallery, each item predicted by a fit without its group.",
        None,
    ),
)
"""What `linear_probe` reports."""


@equal_with_nan
@dataclass(frozen=True)
class ProbeReport(Values):
    """The result of `linear_probe`."""

    _known: ClassVar = PROBE_METRICS

    values: dict[str, float]
    """metric -> value: for classes `probe`, `probe_top5` (of more than five classes) and `probe_leave_one_out`, which
    falls to 0 for features that know nothing of balanced classes, since without an item its class is the smallest; for a
    regression `probe_r2`, `probe_spearman` and `probe_r2_leave_one_out`, means over the targets; with `gallery_groups` also
    `probe_leave_group_out` or `probe_r2_leave_group_out`. NaN where it is undefined, with a note"""
    intervals: dict[str, Interval]
    """metric -> confidence interval of an accuracy over other queries and classes, or groups, of queries, with this gallery;
    a regression has none"""
    confidence: float
    """confidence level of the intervals"""
    strength: float
    """strength of the penalty that was chosen, in units of the mean of those eigenvalues of the gallery's scatter matrix
    (centred, a sum over items) that are not zero; of equal errors the first that was passed"""
    alpha: float
    """the same penalty as `alpha` of scikit-learn's `Ridge` and `RidgeClassifier`"""
    errors: dict[float, float]
    """strength -> mean squared error of the predictions of left-out gallery items, or groups, by which it was chosen; of all
    items, also of those in `gallery_not_counted`"""
    queries: int
    """queries that the values are of"""
    queries_without_match: int
    """queries that are left out, since no gallery item has their label"""
    gallery: int
    """items that the probe was fitted on"""
    gallery_not_counted: int
    """gallery items that are not counted in the accuracy of left-out items, or groups, since no other one has their label"""
    classes: int | None
    """classes of the gallery; None for a regression"""
    per_target: dict[str, tuple[float, ...]]
    """metric -> value of each target of a regression; empty for classes"""
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    per_query: dict[str, Float[Tensor, "all_queries"]] = field(compare=False, repr=False)
    """metric -> value of each query, 0, 1, or a share between them where classes tie; NaN for those left out; empty for a
    regression"""

    def __str__(self) -> str:
        """Return the values, one in a line with its interval, and the notes."""
        sizes = f"{counted(self.queries, 'query')}, {counted(self.gallery, 'gallery item')}"
        if self.classes is not None:
            sizes += f" of {counted(self.classes, 'class')}"
        tried = f", the best of {len(self.errors)} that were tried" if len(self.errors) > 1 else ""
        penalty = f"strength {self.strength:g}{tried}; it is alpha {self.alpha:.4g} of scikit-learn"
        return "\n".join([sizes, penalty, *self.lines(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, as of a `RetrievalReport`."""
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
    """Fit a linear classifier, or a linear regression, on a gallery, and evaluate it on the queries.

    It is ridge regression in closed form: on targets of 1 for the class of an item and -1 for all others, as scikit-learn's
    `RidgeClassifierCV`, or on numbers, as `RidgeCV`. Of some strengths of its penalty, the one with the least squared error
    of exact leave-one-out predictions of the gallery is chosen, as these choose among their `alphas`. Nothing is drawn at
    random, no step is iterated, and neither the scale nor a rotation of the embeddings matters.

    Items of one group, such as a patient or a video, resemble each other. Leave-one-out then predicts an item from its
    near copies, and promises too much. With `gallery_groups`, the strength is chosen by exact predictions of each group by
    the fit without it.

    Args:
        queries: (queries, dim) finite floating-point rows. `Shards` bring their labels, ids and groups; with `is_gallery`
            they are divided into queries and gallery.
        query_labels: (queries,) integers or strings, the classes; or floats, (queries,) or (queries, targets), for a
            regression. A query whose class the gallery does not have is left out and counted. Labels in files are classes.
        gallery: (gallery, dim) items that the probe is fitted on.
        gallery_labels: Classes or targets of the gallery, in the same form.
        query_ids: (queries,) identity of each query, where some come several times: the first of each id is counted. A note
            says so if some queries have the id of a gallery item.
        gallery_ids: (gallery,) identity of each gallery item: the probe is fitted on the first of each id.
        query_groups: (queries,) integers or strings; the queries of one group are taken to be dependent, in place of those
            of one class, and intervals are over other groups.
        gallery_groups: (gallery,) integers or strings; the items of one group are left out together. A group is in
            memory at once, in float64.
        strengths: Strengths of the penalty that are tried, or one, from 1e-9 to 1e9, in units of the mean of those
            eigenvalues of the gallery's scatter matrix that are not zero; by default nine from 1e-6 to 100. A note says so
            if an end of them is clearly the best.
        confidence: Confidence level of the intervals, in (0, 1).
        memory_mb: `Shards` whose vectors take more than a quarter of it, in MB, stay in their files, which are then read up
            to eight times; None is 512. With `gallery_groups` they are mapped, or copied to a temporary file.
        share: Which of the queries and of the gallery this process holds, where several make the call together. They
            exchange sums: dim x dim and dim x classes numbers; items are only sent if groups are, to have each group in one
            process. A process without items passes empty tensors, and empty groups and places where others pass them. All
            return the report of one process but for rounding: the same strength and accuracy.

    Returns:
        A frozen report on the CPU. An accuracy lies in [0, 1]; R2 is 1 at best, and below 0 if the mean of the targets
        predicts the queries better.

    Raises:
        ValueError: If shapes or types do not fit, embeddings or targets hold NaN or Inf, the gallery is missing, or has a
            single class, group or item, no query has a class of the gallery, a strength is out of range, or processes that
            make the call together make it in different ways; the same in every process.

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
            # Targets are no codes. Those of an item are found by their row, also after items were left out.
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
    """Return the strengths that are tried, each once."""
    fix = f"Pass numbers from {WEAKEST:g} to {STRONGEST:g}, such as (0.001, 0.1, 10)."
    numbers = [positive_number(CALL, "strengths", strength, fix) for strength in several(strengths)]
    if not numbers:
        raise InputError(f"{CALL}: strengths is empty. {fix}")
    for number in numbers:
        if not WEAKEST <= number <= STRONGEST:
            raise InputError(f"{CALL}: strengths holds {number:g}. {fix}")
    return list(dict.fromkeys(numbers))


# ------------------------------------------------------------------------------------------------------------ the report


def _report(
    probe: Classification | Regression, strengths: Sequence[float], confidence: float, processes: Processes
) -> ProbeReport:
    """Fit the probe, choose the strength of its penalty, and return what it measures. *Collective*."""
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
    """Return the first strength with the least error, but for rounding."""
    least = min(errors.values())
    return next(strength for strength, error in errors.items() if error <= least * (1 + SAME_ERROR))


def _notes_on_fit(ridge: Ridge, errors: dict[float, float], strength: float) -> list[str]:
    """Return notes on a gallery without directions, or on a strength at an end of those that were tried."""
    if not ridge.rank:
        return [
            f"All {ridge.items:,} gallery items have the same embedding: the embedding has collapsed, and the probe "
            "predicts the same for every query."
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
        f"The strength with the least error, {strength:g}, is the {end} that was tried, and another one may be better. "
        f"Pass strengths beyond it, such as {beyond:g}."
    ]
