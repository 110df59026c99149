"""Verification of listed trials, and open-set identification."""

from fewshot_callbacks.functional.verification.identification import (
    DEFAULT_IDENTIFICATION_METRICS,
    IDENTIFICATION_METRICS,
    IdentificationReport,
    evaluate_identification,
)
from fewshot_callbacks.functional.verification.lists import TrialList, read_trials
from fewshot_callbacks.functional.verification.scores import trial_scores
from fewshot_callbacks.functional.verification.slices import SliceRate, SliceRates, TrialSlices
from fewshot_callbacks.functional.verification.trials import (
    DEFAULT_TRIAL_METRICS,
    TRIAL_METRICS,
    TrialReport,
    evaluate_trials,
)

__all__ = [
    "DEFAULT_IDENTIFICATION_METRICS",
    "DEFAULT_TRIAL_METRICS",
    "IDENTIFICATION_METRICS",
    "TRIAL_METRICS",
    "IdentificationReport",
    "SliceRate",
    "SliceRates",
    "TrialList",
    "TrialReport",
    "TrialSlices",
    "evaluate_identification",
    "evaluate_trials",
    "read_trials",
    "trial_scores",
]
