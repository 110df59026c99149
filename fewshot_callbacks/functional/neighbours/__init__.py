"""Nearest neighbours, items whose label disagrees with their neighbours, and near duplicates."""

from fewshot_callbacks.functional.neighbours.near_duplicates import NearDuplicates, near_duplicates
from fewshot_callbacks.functional.neighbours.nearest import Neighbours, nearest
from fewshot_callbacks.functional.neighbours.suspects import Suspects, suspects

__all__ = ["NearDuplicates", "Neighbours", "Suspects", "near_duplicates", "nearest", "suspects"]
