"""What `near_duplicates` and `nearest` cost, as multiples of the bare float32 product of all pairs.

    python benchmarks/near_duplicates.py                             # 4,000 and 31,730 items of 512 components
    python benchmarks/near_duplicates.py --items 8000 --difficulty random near-collapsed --threads 1

Each call is timed between two runs of the floor, in the same process: the product of all pairs in the tiles that suit this
machine best, each pair of two items twice. Cells are medians over rounds with the lowest and the highest. Embeddings are
those of `benchmarks/retrieval.py`, to which copies of every hundredth item with a little noise are added.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import DIFFICULTIES, make
from retrieval import Floor, best_tile

from fewshot_callbacks import near_duplicates, nearest


def with_copies(items: int, dim: int, difficulty: str) -> Tensor:
    embeddings, _ = make(items, dim, difficulty)
    copied = torch.arange(0, items - 1, 100)
    noise = torch.randn(len(copied), dim, generator=torch.Generator().manual_seed(1))
    embeddings[copied + 1] = embeddings[copied] + 0.001 * noise
    return torch.nn.functional.normalize(embeddings, dim=1)


def ratio(run: Callable[[], object], floor: Floor) -> tuple[float, float]:
    """Seconds, and as a multiple of the floor before and after."""
    before = floor.best()
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return seconds, 2 * seconds / (before + floor.best())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[4000, 31730], help="(default: 4000 31730)")
    parser.add_argument("--dim", type=int, default=512, help="components of an item (default: %(default)s)")
    parser.add_argument("--difficulty", nargs="+", choices=DIFFICULTIES, default=["well-trained", "middling", "random"])
    parser.add_argument("--min-score", type=float, default=0.98, help="lowest cosine of a pair (default: %(default)s)")
    parser.add_argument("--k", type=int, default=10, help="neighbours of each item (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each cell (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of torch (default: all)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    table = Table(
        "items", "embeddings", "pairs", "near_duplicates, s", "x floor", f"nearest, k={options.k}, s", "x floor"
    )
    for items in options.items:
        for difficulty in options.difficulty:
            embeddings = with_copies(items, options.dim, difficulty)
            floor = Floor(embeddings, best_tile(embeddings))
            pairs = near_duplicates(embeddings[:3000], min_score=options.min_score)  # compiles, here and in the library
            nearest(embeddings[:3000], k=options.k)
            cells = []
            for run in (
                lambda: near_duplicates(embeddings, min_score=options.min_score),  # noqa: B023
                lambda: nearest(embeddings, k=options.k),  # noqa: B023
            ):
                seconds, ratios = zip(*(ratio(run, floor) for _ in range(options.rounds)), strict=True)
                cells += [f"{statistics.median(seconds):.2f}"]
                cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            pairs = near_duplicates(embeddings, min_score=options.min_score)
            table.add_row(f"{items:,}", difficulty, f"{pairs.total:,}", *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
