"""Counts of all pairs together, regardless of the query, at and between thresholds."""

from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.pooled.refine import OpenQuestions
from fewshot_callbacks.engine.pooled.tally import Located

__all__ = ["Located", "OpenQuestions", "Recount", "ThresholdBins"]
