"""The exact score of a pair, and fast products that approximate it with a proved bound."""

from fewshot_callbacks.engine.scores.compare import compare
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.scores.similarity import Similarity, check_similarity

__all__ = ["ScoreTiles", "Similarity", "check_similarity", "compare"]
