"""The gains of the validations of a fit, and their references, which checkpoints contain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

import torch

from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._watched_keys import Better
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import path_text
from fewshot_callbacks.functional.retrieval import RequestedMetric, RetrievalReport
from fewshot_callbacks.functional.retrieval.gain import Gain
from fewshot_callbacks.functional.retrieval.gain_reference import GainReference
from fewshot_callbacks.settings import NoFile

# `best` is the last validation that was significantly better than the reference before it.
Compare = Literal["best", "first"] | RetrievalReport | str | PathLike[str] | NoFile
CHECKPOINT_ENTRY = "fewshot_callbacks_gains"


class Gains:
    """Compares the validations of a fit with a reference.

    Args:
        compare: `best`, `first`, a report, or the path of a saved report.
    """

    def __init__(self, compare: Compare, confidence: float, owner: str) -> None:
        self.against: Literal["best", "first"] = "best" if compare == "best" else "first"
        self._saved = None if compare in ("best", "first") else _as_report(compare, owner)
        self._confidence = confidence
        self._owner = owner
        # end of the keys of a set -> its reference
        self._references: dict[str, GainReference] = {}

    @property
    def is_of_training(self) -> bool:
        """Whether the reference is a validation of this fit, not a saved report."""
        return self._saved is None

    @property
    def is_over_best(self) -> bool:
        """Whether a better validation becomes the reference."""
        return self.against == "best" and self.is_of_training

    def begin(self) -> None:
        """Begin a fit: forget the references of the previous fit."""
        self._references = {}

    def metric(self, metrics: Sequence[RequestedMetric]) -> RequestedMetric:
        """Return the metric that is compared: the first with a value for each query."""
        for requested in metrics:
            if requested.metric.is_of_queries:
                if self._saved is not None and requested.of_queries not in self._saved.per_query:
                    raise UsageError(
                        f"{self._owner}(compare=...): the saved report has no {requested.key} per query. Save a report of "
                        f"metrics=({requested.key!r}, ...), or put another metric first."
                    )
                return requested
        raise UsageError(
            f"{self._owner}(compare=...) needs a metric with a value for each query. Add one to metrics, such as mAP."
        )

    def compare(
        self, set_name: str, metric: RequestedMetric, report: RetrievalReport
    ) -> tuple[Gain | None, str | None]:
        """Return the gain of a validation, and a warning if the reference has other queries.

        If the queries have changed during a fit, the validation becomes the reference. With a saved report the gain is
        None.
        """
        reference = self._references.get(set_name)
        # A resumed fit may have another first metric.
        if reference is None or reference.metric != metric.key:
            reference = self._new_reference(set_name, metric)
        try:
            return reference.compare(report), None
        except InputError as error:
            if not self.is_of_training:
                return None, f"{error} The gain is NaN."
            gain = self._new_reference(set_name, metric).compare(report)
            return gain, f"{error} This validation is the new reference."

    def _new_reference(self, set_name: str, metric: RequestedMetric) -> GainReference:
        """Return an empty reference for a set, which replaces its earlier reference."""
        reference = GainReference(metric.key, self.against, self._confidence, self._saved)
        self._references[set_name] = reference
        return reference

    def better_of_names(self, metric: RequestedMetric) -> dict[str, Better]:
        """Return name -> which values are better."""
        better = metric.metric.better
        return dict.fromkeys(names_of_gain(metric.key), better) | {f"{metric.key}_reference": better}

    def state(self) -> dict[str, Any]:
        """Return the references as tensors, numbers and strings, for a checkpoint."""
        return {
            set_name: {
                "report": torch.frombuffer(bytearray(reference.report.to_bytes()), dtype=torch.uint8),
                "metric": reference.metric,
                "tries": reference.tries,
            }
            for set_name, reference in self._references.items()
            if reference.report is not None and self.is_of_training
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue with the references of a checkpoint."""
        for set_name, stored in state.items():
            report = RetrievalReport.from_bytes(stored["report"].numpy().tobytes())
            reference = GainReference(stored["metric"], self.against, self._confidence, report, stored["tries"])
            self._references[set_name] = reference


def names_of_gain(metric: str) -> tuple[str, str, str]:
    """Return the names of a gain and the ends of its interval."""
    return f"{metric}_gain", f"{metric}_gain_low", f"{metric}_gain_high"


def values_of_gain(metric: str, gain: Gain | None) -> dict[str, float]:
    """Return name -> logged value; NaN without a gain."""
    if gain is None:
        return dict.fromkeys((*names_of_gain(metric), f"{metric}_reference"), math.nan)
    values = (gain.value, gain.interval.low, gain.interval.high)
    return dict(zip(names_of_gain(gain.metric), values, strict=True)) | {f"{gain.metric}_reference": gain.reference}


def _as_report(compare: Any, owner: str) -> RetrievalReport:
    """Return `compare` if it is a report, or else the report in its file."""
    if isinstance(compare, RetrievalReport):
        return compare
    if not isinstance(compare, str | PathLike):
        raise InputError(
            f"{owner}(compare={compare!r}) is unknown. Pass 'best', 'first', a RetrievalReport, or the path of a saved one."
        )
    try:
        return RetrievalReport.load(compare)
    except OSError as error:
        raise InputError(
            f"{owner}(compare={path_text(compare)!r}): this file cannot be read ({error.strerror or error}). Pass 'best', "
            "'first', a RetrievalReport, or the path of a file that report.save wrote."
        ) from error
