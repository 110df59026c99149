"""Exact ranks and threshold counts of all query-gallery pairs, in bounded memory; knows no metric. See README.md."""

from fewshot_callbacks.engine.budget import SHARE_OF_KEYS, choose_layout, least_bytes, rows_at_once
from fewshot_callbacks.engine.candidates import Candidates, find_candidates
from fewshot_callbacks.engine.codes.hamming_pass import HammingCounts, HammingPass
from fewshot_callbacks.engine.codes.packing import Codes, pack_codes
from fewshot_callbacks.engine.duplicates import row_numbers
from fewshot_callbacks.engine.neighbours.nearest import Nearest, nearest_items
from fewshot_callbacks.engine.neighbours.pairs_above import PairsAbove, pairs_above
from fewshot_callbacks.engine.open_pass import Compared, compare, open_pass
from fewshot_callbacks.engine.options import EngineOptions, Progress, engine_options
from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.first_counts import FirstCounts
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.pooled.refine import OpenQuestions, count_exactly, plan_recount
from fewshot_callbacks.engine.pooled.tally import Located
from fewshot_callbacks.engine.precision import full_precision
from fewshot_callbacks.engine.ranking_pass import RankingPass
from fewshot_callbacks.engine.ranks import BestMatches, RankBlock, ShardIndex
from fewshot_callbacks.engine.scores.products import ScoreTiles, Similarity, check_similarity
from fewshot_callbacks.engine.threads import computing_on

__all__ = [
    "SHARE_OF_KEYS",
    "BestMatches",
    "Candidates",
    "Codes",
    "Compared",
    "EngineOptions",
    "FirstCounts",
    "HammingCounts",
    "HammingPass",
    "Located",
    "Nearest",
    "OpenQuestions",
    "PairsAbove",
    "PooledCounts",
    "Progress",
    "RankBlock",
    "RankingPass",
    "Recount",
    "ScoreTiles",
    "ShardIndex",
    "Similarity",
    "ThresholdBins",
    "check_similarity",
    "choose_layout",
    "compare",
    "computing_on",
    "count_exactly",
    "engine_options",
    "find_candidates",
    "full_precision",
    "least_bytes",
    "nearest_items",
    "open_pass",
    "pack_codes",
    "pairs_above",
    "plan_recount",
    "row_numbers",
    "rows_at_once",
]
