"""Which pairs score highest: the first candidates of each query, and all pairs above a score."""

from fewshot_callbacks.engine.neighbours.nearest import nearest_items
from fewshot_callbacks.engine.neighbours.pairs_above import find_pairs_above

__all__ = ["find_pairs_above", "nearest_items"]
