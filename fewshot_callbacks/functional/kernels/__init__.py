"""Counting: how many candidates beat each of a query's relevant scores. Every kernel gives the same counts."""

from fewshot_callbacks.functional.kernels.reference import Counts, count_pairs, count_tile

__all__ = ["Counts", "count_pairs", "count_tile"]
