"""`evaluate_trials`: verification metrics of listed pairs, from their scores."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import Labels, encode, read_labels
from fewshot_callbacks.functional._reading import as_tensor, default_mode
from fewshot_callbacks.functional.neighbours import positive_number
from fewshot_callbacks.functional.retrieval.evaluation_notes import note_of_rates
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.functional.retrieval.registry import requested_metrics
from fewshot_callbacks.functional.retrieval.values import Values, or_none
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval, normal_quantile
from fewshot_callbacks.functional.verification.by_identity import FEWEST_MISTAKES, Identities
from fewshot_callbacks.functional.verification.curve import Curve, best_threshold
from fewshot_callbacks.functional.verification.slices import (
    TrialAttribute,
    TrialSlices,
    read_slices,
    slices_of_trials,
)
from fewshot_callbacks.settings import Metric, RequestedMetric
from fewshot_callbacks.system.words import counted, verb

_CALL = "evaluate_trials"
# Largest absolute score. The difference of larger scores may overflow, and then there are no bins.
LARGEST = 1e300


@dataclass(frozen=True, eq=False)
class _TrialInputs:
    """The inputs of the metrics: all trials, their folds and slices, and the costs of mistakes."""

    curve: Curve
    miss_cost: float
    match_cost: float
    folds: dict[int | str, Bool[np.ndarray, "trials"]]
    """fold -> whether each trial is in it, in the order of the curve"""
    attributes: dict[str, TrialAttribute]
    """attribute -> the slice of each trial, in the order of the curve"""


class _Value(NamedTuple):
    """The value of a metric, and how it depends on the means over target and over non-target trials, for its interval."""

    value: float
    threshold: float
    weights: tuple[float, float] | None
    """derivatives by the mean over target trials and by the mean over non-target trials; None if there are too few mistakes
    for an interval"""
    contributions: Float[np.ndarray, "trials"] | None = None
    """contribution of each trial to these means; None for 1 per mistake at the threshold"""
    folds: Mapping[int | str, tuple[float, float]] = MappingProxyType({})
    """fold -> accuracy and threshold"""


def _equal_error(trials: _TrialInputs) -> _Value:
    """Return the equal error rate."""
    value, threshold = trials.curve.equal_error()
    slope = trials.curve.slope(value)  # if one rate changes, the threshold moves until both are equal again
    return _Value(value, threshold, (1 / (1 + slope), slope / (1 + slope)))


def _least_cost(trials: _TrialInputs, p: float) -> _Value:
    """Return the lowest detection cost over the cost of the better blind decision, for a share p of target trials."""
    if p == 1:
        raise InputError(f"{_CALL}: min_dcf@1 has no non-target trial to accept wrongly. Pass a share below 1.")
    curve = trials.curve
    miss_price = trials.miss_cost * p
    match_price = trials.match_cost * (1 - p)
    blind = min(miss_price, match_price)
    costs = (miss_price * curve.false_non_match_rate + match_price * curve.false_match_rate) / blind
    best = len(costs) - 1 - int(np.argmin(costs[::-1]))  # of equal costs, the highest threshold, as for the best F1
    # At the minimum, the derivative of the cost by the threshold is 0.
    weights = (miss_price / blind, match_price / blind)
    has_enough = curve.accepted[1, best] >= FEWEST_MISTAKES
    return _Value(float(costs[best]), float(curve.thresholds[best]), weights if has_enough else None)


def _accepted_at(trials: _TrialInputs, p: float) -> _Value:
    """Return the share of target trials accepted at the lowest threshold with a false match rate of at most p."""
    curve = trials.curve
    position = curve.keeping(p)
    has_enough = p * curve.nontargets >= FEWEST_MISTAKES
    weights = (-1.0, -curve.slope(p)) if has_enough else None
    return _Value(int(curve.accepted[0, position]) / curve.targets, float(curve.thresholds[position]), weights)


def _area_under_roc(trials: _TrialInputs) -> _Value:
    """Return the share of (target trial, non-target trial) pairs in the right order."""
    curve = trials.curve
    # The contribution of a trial to the mean over its kind is its share of pairs in the right order.
    return _Value(curve.area_under_roc(), math.nan, (1.0, 1.0), curve.shares_in_right_order())


def _accuracy(trials: _TrialInputs) -> _Value:
    """Return the mean over folds of the fraction of right decisions, at the best threshold of the other folds."""
    curve = trials.curve
    folds: dict[int | str, tuple[float, float]] = {}
    contributions = np.zeros(len(curve.same))
    for name, in_fold in trials.folds.items():
        threshold = best_threshold(curve.scores[~in_fold], curve.same[~in_fold])
        is_right = (curve.scores[in_fold] >= threshold) == curve.same[in_fold]
        folds[name] = int(np.count_nonzero(is_right)) / len(is_right), threshold
        # The mean over folds, written as a mean over trials. A trial of a small fold has a larger weight.
        contributions[in_fold] = is_right * (len(contributions) / len(trials.folds) / len(is_right))
    mean = math.fsum(accuracy for accuracy, _ in folds.values()) / len(folds)
    weights = (curve.targets / len(contributions), curve.nontargets / len(contributions))
    return _Value(mean, math.nan, weights, contributions, folds)


def _likelihood_cost(trials: _TrialInputs) -> _Value:
    """Return Cllr, the cost in bits of scores that are log likelihood ratios."""
    curve = trials.curve
    bits = np.logaddexp(0.0, np.where(curve.same, -curve.scores, curve.scores)) / math.log(2)
    value = (float(bits[curve.same].mean()) + float(bits[~curve.same].mean())) / 2
    return _Value(value, math.nan, (0.5, 0.5), bits)


TRIAL_METRICS = (
    Metric(
        "eer",
        "pairs",
        _equal_error,
        "Rate at which the share of rejected target trials equals the share of accepted non-target trials.",
        better="lower",
    ),
    Metric(
        "min_dcf@{p}",
        "pairs",
        _least_cost,
        "Lowest detection cost for a share {p} of target trials, over the cost of the better blind decision.",
        better="lower",
    ),
    Metric(
        "tar@far{p}",
        "pairs",
        _accepted_at,
        "Share of accepted target trials, if at most {p} of non-target trials are accepted.",
    ),
    Metric(
        "pair_auroc",
        "pairs",
        _area_under_roc,
        "Share of (target, non-target) pairs of trials in the right order; ties count one half.",
    ),
    Metric(
        "accuracy",
        "pairs",
        _accuracy,
        "Mean over folds of the share of right decisions, at the best threshold of the other folds.",
    ),
    Metric(
        "cllr",
        "pairs",
        _likelihood_cost,
        "Cost in bits of scores that are log likelihood ratios; 1 for scores without information.",
        range=(0.0, math.inf),
        better="lower",
    ),
)
"""The metrics that `evaluate_trials` can report."""

DEFAULT_TRIAL_METRICS = ("eer", "min_dcf@0.01", "tar@far0.01", "tar@far0.001")
"""The metrics that `evaluate_trials` reports by default; with folds also "accuracy"."""


@equal_with_nan
@dataclass(frozen=True)
class TrialReport(Values):
    """The result of `evaluate_trials`; `print` shows the values with their intervals.

    Attributes:
        values: Metric -> value, in the order of `metrics`.
        thresholds: Metric -> lowest score at which a trial is accepted; infinite if none may be accepted. For `eer` it
            is the score at which both rates cross. `accuracy` has one threshold per fold (see `folds`); `pair_auroc`
            and `cllr` have none.
        intervals: Metric -> confidence interval, robust to the dependence of trials that share an identity; empty
            without identities.
        confidence: Confidence level of the intervals.
        trials: Number of trials.
        same: Number of target trials, with both sides of one identity.
        different: Number of non-target trials, with sides of two identities.
        identities: Number of distinct identities; 0 if you passed none.
        folds: Fold -> its accuracy, and the threshold, which is chosen on the other folds.
        accuracy_error: Standard error of `accuracy` over the folds; NaN without folds.
        notes: What you should know when you read the values.
        slices: Attribute -> metric -> error rates of its slices, for each metric with a threshold. Read them with
            `of_slices`.
        pair_counts: Numbers of both kinds of trials at a few hundred thresholds and in bins of the score, for plots.

    Examples:
        >>> from fewshot_callbacks import evaluate_trials
        >>> print(evaluate_trials([0.9, 0.8, 0.3, 0.7, 0.2, 0.1], [1, 1, 1, 0, 0, 0], metrics=("eer",)))
        6 trials, 3 target, 3 non-target
        eer                       0.3333
    """

    _known: ClassVar = TRIAL_METRICS

    values: dict[str, float]
    thresholds: dict[str, float]
    intervals: dict[str, Interval]
    confidence: float
    trials: int
    same: int
    different: int
    identities: int
    folds: dict[int | str, tuple[float, float]]
    accuracy_error: float
    notes: tuple[str, ...]
    slices: dict[str, dict[str, TrialSlices]]
    pair_counts: PairCounts = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return one line per value with its interval, and the notes."""
        head = f"{counted(self.trials, 'trial')}, {self.same:,} target, {self.different:,} non-target"
        return "\n".join([head, *self.lines(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def of_slices(self, attribute: str, metric: str | None = None) -> TrialSlices:
        """Return both error rates of each slice, at the threshold of a metric for all trials.

        A slice has the trials whose sides both have one value of the attribute. Trials whose sides have different values are
        in the slice "across". The intervals of a rate over all slices have the confidence of the report jointly
        (Bonferroni). They need identities, and treat the threshold as fixed.

        Args:
            attribute: A key of the `slices` that you passed to `evaluate_trials`.
            metric: A metric with a threshold; by default the first one in the report.

        Returns:
            `false_non_match_rate` and `false_match_rate`. Each maps a slice to its value, interval, number of mistakes and
            number of trials. `print` shows a table per rate, with the worst slice first.

        Raises:
            ValueError: If the report does not have the attribute, or the metric with a threshold.

        Examples:
            >>> scores = [0.9, 0.8, 0.3, 0.7, 0.2, 0.6, 0.1, 0.1]
            >>> ages = (["old", "young"] * 4, ["old"] * 7 + ["young"])
            >>> report = evaluate_trials(scores, [1, 0, 1, 0, 1, 0, 0, 0], slices={"age": ages})
            >>> print(report.of_slices("age", "tar@far0.01"))  # doctest: +ELLIPSIS
            At the threshold of tar@far0.01, 0.9000, all trials together have FNMR 0.6667 and FMR 0.0000.
              age    FNMR  interval  rejected  targets  identities
              old  0.6667                   2        3           0
            young                           0        0           0
               age     FMR  interval  accepted  non-targets  identities
               old  0.0000                   0            1           0
             young  0.0000                   0            1           0
            across  0.0000                   0            3           0
            The intervals of a rate have a joint confidence of 95 %. The worst of several slices looks worse than it is...
        """
        call = "TrialReport.of_slices"
        if attribute not in self.slices:
            known = ", ".join(map(repr, self.slices)) or "none"
            raise InputError(
                f"{call}: the report has no attribute {attribute!r}. Its attributes: {known}. Pass "
                f"slices={{{attribute!r}: values}} to evaluate_trials."
            )
        of_metrics = self.slices[attribute]
        if metric is None and of_metrics:
            metric = next(iter(of_metrics))
        if metric not in of_metrics:
            raise InputError(
                f"{call}: slices need a metric with a threshold. The report has {', '.join(of_metrics) or 'none'}"
                f"{'' if metric is None else f', not {metric!r}'}. Pass such a metric to evaluate_trials, e.g. "
                "'tar@far0.01'."
            )
        return of_metrics[metric]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (what is not finite becomes None)."""
        return self.tables() | {
            "thresholds": {name: or_none(value) for name, value in self.thresholds.items()},
            "folds": {
                str(fold): [or_none(accuracy), or_none(threshold)] for fold, (accuracy, threshold) in self.folds.items()
            },
            "accuracy_error": or_none(self.accuracy_error),
            **{name: getattr(self, name) for name in ("trials", "same", "different", "identities")},
            "slices": {
                attribute: {metric: slices.to_dict() for metric, slices in of_metrics.items()}
                for attribute, of_metrics in self.slices.items()
            },
            "notes": list(self.notes),
        }


@default_mode()
def evaluate_trials(
    scores: Any,
    same: Any,
    *,
    first: Any | None = None,
    second: Any | None = None,
    folds: Any | None = None,
    slices: Mapping[str, Any] | Any | None = None,
    metrics: Sequence[str] | None = None,
    miss_cost: Any = 1.0,
    false_match_cost: Any = 1.0,
    confidence: float = 0.95,
) -> TrialReport:
    """Return verification metrics of trials, that is, of listed pairs with one score per pair.

    A trial is a target trial if both sides have one identity, and otherwise a non-target trial. It is accepted if its score
    is at least the threshold. The false match rate FMR is the fraction of non-target trials that are accepted. The false
    non-match rate FNMR is the fraction of target trials that are rejected. All values are exact, equal scores are one
    threshold, and the order of the trials does not matter.

    - `eer`: the rate at which FMR equals FNMR. It is interpolated linearly if both jump at one score.
    - `min_dcf@0.01`: with p = 0.01, a = `miss_cost` and b = `false_match_cost`, the minimum over all thresholds of
      (a p FNMR + b (1 - p) FMR) / min(a p, b (1 - p)). It is at most 1, because accepting all and accepting none count.
    - `tar@far0.001`: 1 - FNMR at the lowest threshold with an FMR of at most 0.001.
    - `pair_auroc`: the area under the ROC curve. It equals P(s > t) + P(s = t) / 2 for the scores s of a random target
      trial and t of a random non-target trial. `evaluate_retrieval` has the same metric for all pairs.
    - `accuracy`: with `folds`, the mean over folds of the fraction of right decisions, at the best threshold of the other
      folds. If a whole interval of thresholds is best, its middle is taken.
    - `cllr`: (the mean of log2(1 + e^-s) over target trials + the mean of log2(1 + e^s) over non-target trials) / 2. The
      scores s must be natural log likelihood ratios.

    Args:
        scores: (trials,) finite numbers; larger means more similar. `trial_scores` computes them from embeddings.
        same: (trials,) booleans, or zeros and ones: whether both sides have one identity.
        first: (trials,) identity of the first side, integers or strings. Intervals need `first` and `second`.
        second: (trials,) identity of the second side.
        folds: (trials,) number or name of the fold of each trial, for `accuracy`.
        slices: Attribute -> integers or strings. Pass one value per trial, or a pair with one value per side, such as
            `{"age": (ages_of_first, ages_of_second)}`. `of_slices` of the report returns the error rates of each value. An
            attribute may have up to 30 values, or more with many identities: a tenth of their number.
        metrics: Keys of the metrics to report. By default `DEFAULT_TRIAL_METRICS`, and with folds also `accuracy`.
        miss_cost: Cost of a rejected target trial, for `min_dcf`.
        false_match_cost: Cost of an accepted non-target trial, for `min_dcf`.
        confidence: Confidence level of the intervals, in (0, 1).

    Returns:
        A frozen report. Its values are in [0, 1], except `cllr`, which is at least 0. Intervals need identities, because a
        jackknife leaves out one identity at a time, with all its trials.

    Raises:
        ValueError: If lengths or types do not fit, scores contain NaN or Inf, all trials or all trials of a fold are of one
            kind, `same` and the identities disagree, a metric does not exist, or an attribute has too many values.

    Examples:
        >>> scores, same = [0.9, 0.8, 0.3, 0.7, 0.2, 0.1], [1, 1, 1, 0, 0, 0]
        >>> report = evaluate_trials(scores, same, metrics=("eer", "tar@far0.01", "pair_auroc"))
        >>> print(report)  # doctest: +ELLIPSIS
        6 trials, 3 target, 3 non-target
        eer                       0.3333
        tar@far0.01               0.6667
        pair_auroc                0.8889
        A false match rate below 0.333 (1 / 3) cannot be measured with 3 non-target trials...
        >>> report.thresholds["tar@far0.01"]
        0.8
        >>> round(evaluate_trials(scores, same, folds=[0, 1, 2, 0, 1, 2])["accuracy"], 4)
        0.6667
    """
    normal_quantile(confidence)
    miss_cost = positive_number(_CALL, "miss_cost", miss_cost, "Pass a cost such as 1.0.")
    false_match_cost = positive_number(_CALL, "false_match_cost", false_match_cost, "Pass a cost such as 1.0.")
    values, kinds = _read(scores, same)
    people = _read_identities(first, second, kinds)
    fold_labels = None if folds is None else read_labels(folds, len(values), "folds", "scores", _CALL)
    requested = _requested(metrics, has_folds=fold_labels is not None)
    order = np.argsort(values)  # the only sort: the order of equal scores changes no count
    curve = Curve(values[order], kinds[order])
    masks_of_folds = {} if fold_labels is None else _folds(fold_labels, order, curve.same)
    attributes = read_slices(_CALL, slices, len(values), 0 if people is None else people.count)
    attributes = {name: attribute.in_order(order) for name, attribute in attributes.items()}
    trials = _TrialInputs(curve, miss_cost, false_match_cost, masks_of_folds, attributes)
    if people is not None:
        people = replace(people, first=people.first[order], second=people.second[order], same=curve.same)
    return _report(requested, trials, people, confidence)


def _requested(metrics: Sequence[str] | None, *, has_folds: bool) -> list[RequestedMetric]:
    """Return the requested metrics, or the default ones."""
    if metrics is None:
        metrics = (*DEFAULT_TRIAL_METRICS, "accuracy") if has_folds else DEFAULT_TRIAL_METRICS
    requested = requested_metrics(_CALL, metrics, TRIAL_METRICS)
    if not has_folds and "accuracy" in metrics:
        raise InputError(f"{_CALL}: accuracy needs folds. Pass folds= with the fold of each trial.")
    return requested


def _report(
    requested: Sequence[RequestedMetric], trials: _TrialInputs, people: Identities | None, confidence: float
) -> TrialReport:
    """Return the report.

    `trials` and `people` are in the order of the scores; `people` is None if the caller passed none.
    """
    curve = trials.curve
    values_of_metrics: dict[str, _Value] = {}
    intervals: dict[str, Interval] = {}
    for request in requested:
        assert request.metric.value is not None
        value: _Value = request.metric.value(trials, **request.parameters)
        values_of_metrics[request.key] = value
        if people is not None:
            intervals[request.key] = _interval(people, curve, value, request, confidence)
    of_folds = dict(values_of_metrics["accuracy"].folds) if "accuracy" in values_of_metrics else {}
    thresholds = {key: value.threshold for key, value in values_of_metrics.items() if not math.isnan(value.threshold)}
    return TrialReport(
        values={key: value.value for key, value in values_of_metrics.items()},
        thresholds=thresholds,
        intervals=intervals,
        confidence=confidence,
        trials=len(curve.scores),
        same=curve.targets,
        different=curve.nontargets,
        identities=0 if people is None else people.count,
        folds=of_folds,
        accuracy_error=_standard_error([accuracy for accuracy, _ in of_folds.values()]),
        notes=_notes(requested, curve, [key for key in intervals if values_of_metrics[key].weights is None]),
        slices={
            name: slices_of_trials(name, attribute, curve, people, thresholds, confidence)
            for name, attribute in trials.attributes.items()
        },
        pair_counts=curve.counts(),
    )


def _interval(
    people: Identities, curve: Curve, value: _Value, requested: RequestedMetric, confidence: float
) -> Interval:
    """Return the interval of a value; NaN if there are too few mistakes."""
    if value.weights is None:
        return UNKNOWN
    contributions = value.contributions
    if contributions is None:
        is_wrong = (curve.scores >= value.threshold) != curve.same
        contributions = is_wrong.astype(np.float64)
    top = math.inf if requested.metric.range is None else requested.metric.range[1]
    return people.interval(value.value, contributions, value.weights, top, confidence)


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; NaN for fewer than two values."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _notes(requested: Sequence[RequestedMetric], curve: Curve, without_interval: Sequence[str]) -> tuple[str, ...]:
    """Return notes on rates and intervals for which there are too few non-target trials."""
    rates = [request.parameters["p"] for request in requested if request.metric.value is _accepted_at]
    notes = note_of_rates("match", rates, curve.nontargets, "non-target trials")
    if not without_interval:
        return notes
    few = f"{', '.join(without_interval)}: no interval, because fewer than {FEWEST_MISTAKES} non-target trials are accepted."
    return (*notes, few)


def _read(scores: Any, same: Any) -> tuple[Float[np.ndarray, "trials"], Bool[np.ndarray, "trials"]]:
    """Return scores, and whether each trial is a target trial."""
    # PyTorch would round a list of numbers to float32.
    numbers = scores
    if isinstance(scores, list | tuple):
        with contextlib.suppress(TypeError, ValueError):  # anything but numbers is refused below
            numbers = np.asarray(scores, np.float64)
    arrays = as_tensor(numbers, "scores", _CALL), as_tensor(same, "same", _CALL)
    for name, value in zip(("scores", "same"), arrays, strict=True):
        if value.is_complex():
            raise InputError(f"{_CALL}: {name} contains complex numbers, which have no order. Pass real numbers.")
        if value.ndim != 1 or not len(value):
            raise InputError(
                f"{_CALL} needs {name} of shape (trials,), but got shape {tuple(value.shape)}. Pass one number per trial."
            )
    values, kinds = (value.cpu() for value in arrays)
    if len(values) != len(kinds):
        raise InputError(
            f"{_CALL}: there are {counted(len(values), 'score')}, but {len(kinds)} same. Pass one of each per trial."
        )
    bad = (~(values.double().abs() <= LARGEST)).nonzero()
    if len(bad):
        raise InputError(
            f"{_CALL}: {len(bad)} of {counted(len(values), 'score')} {verb(len(bad), 'is', 'are')} NaN, infinite or "
            f"beyond {LARGEST:g}, the first at index {int(bad[0])}. Find the cause, or drop these trials from all arguments."
        )
    other_kinds = ((kinds != 0) & (kinds != 1)).nonzero()
    if len(other_kinds):
        index = int(other_kinds[0])
        raise InputError(
            f"{_CALL}: same contains {kinds[index].item()} at index {index}. Pass True or 1 for target trials (both "
            "sides have one identity), and False or 0 for non-target trials."
        )
    is_target = kinds.bool().numpy()
    if is_target.all() or not is_target.any():
        kind, missing = ("target", "non-target") if is_target.all() else ("non-target", "target")
        number = len(is_target)
        fact = f"all {number} trials are {kind} trials" if number > 1 else f"the only trial is a {kind} trial"
        raise InputError(
            f"{_CALL}: {fact}, but every rate needs trials of both kinds. Add {missing} trials, or check how you computed "
            "`same`."
        )
    return values.double().numpy(), is_target


def _read_identities(first: Any, second: Any, same: Bool[np.ndarray, "trials"]) -> Identities | None:
    """Return the identities of both sides; None without identities."""
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise InputError(f"{_CALL}: only one of first and second was passed. Pass both, or neither.")
    sides = {"first": first, "second": second}
    identities = {name: read_labels(side, len(same), name, "scores", _CALL) for name, side in sides.items()}
    names, number = np.unique(torch.cat(encode(_CALL, identities)[0]).numpy(), return_inverse=True)
    first_numbers = number[: len(same)]
    second_numbers = number[len(same) :]
    wrong = np.flatnonzero((first_numbers == second_numbers) != same)
    if len(wrong):
        index = int(wrong[0])
        number_of_identities = "one" if first_numbers[index] == second_numbers[index] else "two"
        raise InputError(
            f"{_CALL}: in {len(wrong)} of {len(same)} trials `same` and the identities disagree, the first at index "
            f"{index}: same is {bool(same[index])}, but the number of identities is {number_of_identities}. Pass "
            "identities, such as names, instead of items."
        )
    return Identities(first_numbers, second_numbers, same, len(names))


def _folds(
    labels: Labels, order: Int[np.ndarray, "trials"], same: Bool[np.ndarray, "trials"]
) -> dict[int | str, Bool[np.ndarray, "trials"]]:
    """Return fold -> whether each trial is in it.

    `labels` are in the order of the caller. `order` and `same` are in the order of the result.
    """
    [numbers], names = encode(_CALL, {"folds": labels})
    codes = numbers.numpy()[order]
    folds: dict[int | str, Bool[np.ndarray, "trials"]] = {}
    for code in np.unique(codes).tolist():
        name = code if names is None else names[code]
        in_fold = codes == code
        size = np.count_nonzero(in_fold)
        targets = np.count_nonzero(same[in_fold])
        if targets in (0, size):
            kind = "target" if targets else "non-target"
            raise InputError(
                f"{_CALL}: all {size} trials of fold {name!r} are {kind} trials. Give each fold trials of both kinds. "
                "(LFW folds have 300 of each.)"
            )
        folds[name] = in_fold
    if len(folds) < 2:
        raise InputError(
            f"{_CALL}: folds has the single fold {next(iter(folds))!r}. Pass at least two folds, such as 0 to 9."
        )
    return folds
