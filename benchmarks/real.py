"""The cost of evaluating real embeddings, as multiples of the bare float32 product of all pairs.

    apt-get install espeak-ng
    pip install resemblyzer "setuptools<81" magika onnx wordllama
    python benchmarks/real.py                                        # 8,000 items of each set
    python benchmarks/real.py --sets files paragraphs voices --items 2000 8000 400 --threads 1

The networks are in packages, and the data are on this machine: see `_real_embeddings.py`. Synthetic sets are in
`_embeddings.py`. If the package of a set is missing, the benchmark prints what to install. Embeddings are kept in the cache
folder; the first run takes minutes. Each evaluation is timed between two runs of the product, in the same process. Quotients
are medians over rounds with minimum and maximum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from _real_embeddings import SOURCES, RealSet, add_cache_option, load
from _results import Cell, Column, Results, add_file_option
from retrieval import Floor, best_tile, spread

from fewshot_callbacks import evaluate_retrieval

COLUMNS = (
    Column("set"),
    Column("items", ",d"),
    Column("dim", "d"),
    Column("classes", ",d"),
    Column("items per class, median", ",.0f"),
    Column("largest", ",d"),
    Column("fraction of duplicates", ".3f"),
    Column("mAP", ".3f"),
    Column("product, seconds", ".3f"),
    Column("only mAP, x product", ".2f"),
    Column("default metrics, x product", ".2f"),
)


def share_of_copies(embeddings: torch.Tensor) -> float:
    """Return the fraction of items with a row that equals the row of another item."""
    _, counts = np.unique(embeddings.numpy(), axis=0, return_counts=True)
    return float(counts[counts > 1].sum() / len(embeddings))


def timed(run: Callable[[], object], floor: Floor, rounds: int) -> tuple[list[float], list[float]]:
    """Return for each round the seconds of the product before and after, and the run as a multiple of the product."""
    products = []
    quotients = []
    for _ in range(rounds):
        before = floor.best()
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        product = (before + floor.best()) / 2
        products.append(product)
        quotients.append(seconds / product)
    return products, quotients


def cells(data: RealSet, rounds: int) -> list[Cell]:
    """Return the cells of a set, after its name."""
    embeddings, labels = data
    items, dim = embeddings.shape
    sizes = labels.unique(return_counts=True)[1].numpy()
    floor = Floor(embeddings, best_tile(embeddings))
    # The first evaluation compiles.
    report = evaluate_retrieval(embeddings, labels)
    products, of_map = timed(lambda: evaluate_retrieval(embeddings, labels, metrics=["mAP"]), floor, rounds)
    _, of_default = timed(lambda: evaluate_retrieval(embeddings, labels), floor, rounds)
    return [
        items,
        dim,
        len(sizes),
        float(np.median(sizes)),
        int(sizes.max()),
        share_of_copies(embeddings),
        report.mAP,
        statistics.median(products),
        spread(of_map),
        spread(of_default),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(SOURCES), default=list(SOURCES), help="(default: all)")
    parser.add_argument(
        "--items",
        type=int,
        nargs="+",
        default=[8000],
        help="maximum number of items, for all sets or for each set in the order of --sets (default: 8000)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each evaluation (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (default: %(default)s)")
    add_cache_option(parser)
    add_file_option(parser)
    options = parser.parse_args(arguments)
    if len(options.items) == 1:
        options.items *= len(options.sets)
    if len(options.items) != len(options.sets):
        parser.error(
            f"--items has {len(options.items)} numbers for {len(options.sets)} sets. Give one, or one for each."
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    notes = []
    with Results(COLUMNS, threads=options.threads, file=options.json) as results:
        for name, items in zip(options.sets, options.items, strict=True):
            source = SOURCES[name]
            missing = source.missing()
            if missing:
                what = f"{name} ({source.what})"
                notes.append(f"{what}: left out, since {', '.join(missing)} is missing. Run: {source.install}")
                continue
            results.add(name, *cells(load(name, items, options.cache), options.rounds))
    print("", *notes, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
