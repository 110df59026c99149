"""Error rates of slices of trials. A slice has the trials with one value of an attribute, such as one age group.

All slices use the threshold of all trials, as in a system that treats everyone alike. At this threshold, FNMR of a slice is
the share of its target trials that are rejected, and FMR is the share of its non-target trials that are accepted. Trials
whose sides have different values are a separate slice. As in `retrieval/slices.py`, the confidence applies to the
intervals of all slices together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import encode, read_labels
from fewshot_callbacks.functional.retrieval.slices import (
    MeasuredSlices,
    cells_of,
    confidence_of_each,
    refuse_many_slices,
    refuse_unnamed_slices,
    slices_argument,
)
from fewshot_callbacks.functional.retrieval.values import or_none
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval
from fewshot_callbacks.functional.verification.by_identity import Identities
from fewshot_callbacks.functional.verification.curve import Curve
from fewshot_callbacks.system.words import counted

# The slice of trials whose sides have different values.
ACROSS = "across"
_BOTH_SIDES = 'Pass slices={"age": (ages_of_first_sides, ages_of_second_sides)}, or one value per trial.'


class SliceRate(NamedTuple):
    """The error rate of the trials in one slice.

    Attributes:
        value: Share of the trials that are decided wrongly; NaN without trials.
        interval: Interval of the value. The intervals of all slices together have the confidence of the report.
        mistakes: Number of trials that are decided wrongly.
        trials: Number of trials.
        identities: Number of identities, the independent units of the interval; 0 if you passed none.

    Examples:
        >>> SliceRate(0.25, Interval(0.125, 0.5), 10, 40, 8).mistakes
        10
    """

    value: float
    interval: Interval
    mistakes: int
    trials: int
    identities: int


class SliceRates(MeasuredSlices[SliceRate]):
    """Slice -> error rate of its trials; `print` shows a table with the worst slice first.

    Args:
        slices: Slice -> error rate of its trials.
        attribute: The attribute whose values are the slices.
        rate: "FNMR" or "FMR".
        overall: The rate of all trials.
        confidence: Joint confidence of all intervals.

    Examples:
        >>> young = SliceRate(0.25, Interval(0.125, 0.5), 10, 40, 8)
        >>> old = SliceRate(0.5, Interval(0.25, 0.75), 20, 40, 8)
        >>> SliceRates({"young": young, "old": old}, "age", "FMR", 0.375, 0.95).worst
        'old'
    """

    def __init__(
        self, slices: Mapping[int | str, SliceRate], attribute: str, rate: str, overall: float, confidence: float
    ) -> None:
        super().__init__(slices, attribute, confidence, lower_is_better=True)
        self.rate = rate
        self.overall = overall

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the columns of `rows`."""
        counts = ("rejected", "targets") if self.rate == "FNMR" else ("accepted", "non-targets")
        return self.attribute, self.rate, "interval", *counts, "identities"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table cells of each slice, the worst slice first."""
        rows: list[tuple[str, ...]] = []
        for name in self._ordered():
            value, interval, *counts = self[name]
            rows.append((str(name), *cells_of(value, interval), *(f"{count:,}" for count in counts)))
        return rows

    @property
    def explanation(self) -> str:
        """Sentences that explain the table."""
        return (
            f"The intervals of a rate have a joint confidence of {100 * self.confidence:g} %. The worst of several "
            f"slices looks worse than it is, so judge it by the lower end of its interval."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the slices as plain values for JSON, the worst slice first; NaN becomes None."""
        return {
            str(name): self[name]._asdict()
            | {"value": or_none(self[name].value), "interval": [or_none(end) for end in self[name].interval]}
            for name in self._ordered()
        }


@equal_with_nan
@dataclass(frozen=True)
class TrialSlices:
    """Both error rates of each slice of an attribute, at one threshold; `print` shows a table per rate.

    Attributes:
        metric: Key of the metric with the threshold.
        threshold: Lowest score at which a trial is accepted, in every slice.
        false_non_match_rate: Slice -> its FNMR.
        false_match_rate: Slice -> its FMR.

    Examples:
        >>> from fewshot_callbacks import evaluate_trials
        >>> report = evaluate_trials([0.9, 0.3, 0.8, 0.2], [1, 0, 1, 0], slices={"sensor": ["a", "a", "b", "b"]})
        >>> report.of_slices("sensor", "tar@far0.01").false_match_rate["a"].value
        0.0
    """

    metric: str
    threshold: float
    false_non_match_rate: SliceRates
    false_match_rate: SliceRates

    @property
    def heading(self) -> str:
        """Sentence on the threshold and the rates of all trials."""
        return (
            f"At the threshold of {self.metric}, {self.threshold:.4f}, all trials together have FNMR "
            f"{self.false_non_match_rate.overall:.4f} and FMR {self.false_match_rate.overall:.4f}."
        )

    def __str__(self) -> str:
        """Return a table per rate, with the worst slice first."""
        tables = [*self.false_non_match_rate.lines(), *self.false_match_rate.lines()]
        return "\n".join([self.heading, *tables, self.false_match_rate.explanation])

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the slices as plain values for JSON; a number that is not finite becomes None."""
        return {
            "threshold": or_none(self.threshold),
            "overall": {
                "false_non_match_rate": self.false_non_match_rate.overall,
                "false_match_rate": self.false_match_rate.overall,
            },
            "false_non_match_rate": self.false_non_match_rate.to_dict(),
            "false_match_rate": self.false_match_rate.to_dict(),
        }


class _TrialsOfKind(NamedTuple):
    """The target trials, or the non-target trials, of a slice."""

    mask: Bool[np.ndarray, "trials"]
    """whether each trial is one of them"""
    people: Identities | None
    """their identities; None if the caller passed none"""

    def rate(self, is_wrong: Bool[np.ndarray, "trials"], confidence: float) -> SliceRate:
        """Return the share of these trials that are decided wrongly."""
        wrong = is_wrong[self.mask]
        trials = len(wrong)
        mistakes = int(np.count_nonzero(wrong))
        identities = 0 if self.people is None else self.people.count
        if not trials:
            return SliceRate(math.nan, UNKNOWN, 0, 0, identities)
        value = mistakes / trials
        interval = UNKNOWN
        if self.people is not None:
            # The rate is the mean over this one kind of trial.
            interval = self.people.interval(value, wrong.astype(np.float64), (1.0, 1.0), 1.0, confidence)
        return SliceRate(value, interval, mistakes, trials, identities)


class TrialAttribute(NamedTuple):
    """The slice of each trial."""

    codes: Int[np.ndarray, "trials"]
    """index of the slice in `names`; -1 if the sides have different values"""
    names: tuple[int | str, ...]
    """the slices, ascending"""

    def in_order(self, order: Int[np.ndarray, "trials"]) -> TrialAttribute:
        """Return the attribute with the trials in this order."""
        return TrialAttribute(self.codes[order], self.names)

    def parts(self, kind: Bool[np.ndarray, "trials"], people: Identities | None) -> dict[int | str, _TrialsOfKind]:
        """Return slice -> its trials of one kind. `ACROSS` is a slice if it has any trials."""
        masks: dict[int | str, Bool[np.ndarray, "trials"]] = {
            name: kind & (self.codes == code) for code, name in enumerate(self.names)
        }
        is_across = kind & (self.codes < 0)
        if is_across.any():
            masks[ACROSS] = is_across
        return {
            name: _TrialsOfKind(mask, None if people is None else people.chosen(mask)) for name, mask in masks.items()
        }


def slices_of_trials(
    name: str,
    attribute: TrialAttribute,
    curve: Curve,
    people: Identities | None,
    thresholds: Mapping[str, float],
    confidence: float,
) -> dict[str, TrialSlices]:
    """Return metric -> both error rates of each slice of an attribute, at the threshold of the metric.

    `attribute` and `people` are in the order of the curve; `people` is None if the caller passed none. `confidence` is
    the joint confidence of all intervals of a rate.
    """
    kinds = {"FNMR": curve.same, "FMR": ~curve.same}
    parts_of_rate = {rate: attribute.parts(kind, people) for rate, kind in kinds.items()}
    slices = {}
    for metric, threshold in thresholds.items():
        is_wrong = (curve.scores >= threshold) != curve.same
        rates = {}
        for rate, parts in parts_of_rate.items():
            level = confidence_of_each(confidence, sum(bool(part.mask.any()) for part in parts.values()))
            of_slices = {slice_name: part.rate(is_wrong, level) for slice_name, part in parts.items()}
            wrong = is_wrong[kinds[rate]]
            rates[rate] = SliceRates(of_slices, name, rate, int(np.count_nonzero(wrong)) / len(wrong), confidence)
        slices[metric] = TrialSlices(metric, threshold, rates["FNMR"], rates["FMR"])
    return slices


def read_slices(call: str, slices: Any, trials: int, identities: int) -> dict[str, TrialAttribute]:
    """Return the slice of each trial, by attribute.

    `slices` has one value per trial by attribute, or a pair: the values of the first sides and of the second sides.
    `identities` is 0 if the caller passed none.
    """
    if slices is None:
        return {}
    refuse_unnamed_slices(call, slices, _BOTH_SIDES)
    attributes = {name: _read_attribute(call, name, values, trials) for name, values in slices.items()}
    values_of = {name: len(attribute.names) for name, attribute in attributes.items()}
    fact = f"the trials have {counted(identities, 'identity')}" if identities else "the identities are not known"
    refuse_many_slices(call, values_of, identities, fact)
    return attributes


def _read_attribute(call: str, name: str, values: Any, trials: int) -> TrialAttribute:
    """Return the slice of each trial."""
    argument = slices_argument(name)
    sides = {argument: values}
    if isinstance(values, tuple | list) and len(values) == 2 and np.ndim(values[0]):
        sides = {f"{argument}[{side}]": values[side] for side in (0, 1)}
    labels = {side: read_labels(of_side, trials, side, "scores", call) for side, of_side in sides.items()}
    codes, labels_of_codes = encode(call, labels)
    present, numbers = np.unique(np.stack([of_side.numpy() for of_side in codes]), return_inverse=True)
    names = present.tolist() if labels_of_codes is None else [labels_of_codes[code] for code in present.tolist()]
    if ACROSS in names:
        raise InputError(
            f"{call}: {argument} has the value {ACROSS!r}, which is the name of the slice of trials whose sides have "
            "different values. Rename the value."
        )
    of_sides = numbers.reshape(len(sides), trials)
    return TrialAttribute(np.where(of_sides[0] == of_sides[-1], of_sides[0], -1), tuple(names))
