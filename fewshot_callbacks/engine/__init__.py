"""Exact ranks and threshold counts of all query-gallery pairs, in bounded memory, without metrics. See README.md."""

from fewshot_callbacks.engine.candidates import find_candidates
from fewshot_callbacks.engine.open_pass import PairCounts, Pass, open_pass, pair_counts
from fewshot_callbacks.engine.ranks import BestMatches, RankBlock

__all__ = ["BestMatches", "PairCounts", "Pass", "RankBlock", "find_candidates", "open_pass", "pair_counts"]
