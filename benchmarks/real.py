"""What an evaluation of REAL embeddings takes, as multiples of the bare float32 product of all pairs.

    apt-get install espeak-ng
    pip install resemblyzer "setuptools<81" magika onnx wordllama
    python benchmarks/real.py                                        # 8,000 items of each set
    python benchmarks/real.py --sets files paragraphs --items 20000 --threads 1

The networks come inside packages, the data are this machine's: see `_real_embeddings.py`. Made sets are in `_embeddings.py`.
A set whose package is missing has a line that says what to install. Embeddings are kept in the cache folder; the first run
takes minutes. Each evaluation is timed between two runs of the product, in the same process. Seconds and quotients are
medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import platformdirs
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from _real_embeddings import SOURCES, RealSet, load
from retrieval import Floor, best_tile, machine

from fewshot_callbacks import evaluate_retrieval

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


def share_of_copies(embeddings: torch.Tensor) -> float:
    """Return the share of the items whose row equals that of another item."""
    _, counts = np.unique(embeddings.numpy(), axis=0, return_counts=True)
    return float(counts[counts > 1].sum() / len(embeddings))


def timed(run: Callable[[], object], floor: Floor, rounds: int) -> tuple[float, float, float]:
    """Return seconds, seconds of the product before and after, and the quotient: medians over rounds."""
    seconds, products, quotients = [], [], []
    for _ in range(rounds):
        before = floor.best()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
        products.append((before + floor.best()) / 2)
        quotients.append(seconds[-1] / products[-1])
    return statistics.median(seconds), statistics.median(products), statistics.median(quotients)


def cells(data: RealSet, rounds: int) -> list[str]:
    """Return what the table says about a set, after its name."""
    embeddings, labels = data
    items, dim = embeddings.shape
    sizes = labels.unique(return_counts=True)[1].numpy()
    quantiles = ", ".join(f"{quantile:.0f}" for quantile in np.quantile(sizes, QUANTILES))
    floor = Floor(embeddings, best_tile(embeddings))
    # The first evaluation compiles.
    report = evaluate_retrieval(embeddings, labels)
    by_map, product, map_quotient = timed(
        lambda: evaluate_retrieval(embeddings, labels, metrics=["mAP"]), floor, rounds
    )
    by_default, _, default_quotient = timed(lambda: evaluate_retrieval(embeddings, labels), floor, rounds)
    return [
        *(
            f"{items:,}",
            str(dim),
            f"{len(sizes):,}",
            quantiles,
            f"{share_of_copies(embeddings):.3f}",
            f"{report.mAP:.3f}",
        ),
        *(f"{product:.3f}", f"{by_map:.2f}", f"{map_quotient:.2f}", f"{by_default:.2f}", f"{default_quotient:.2f}"),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = os.environ.get("FEWSHOT_CALLBACKS_CACHE") or platformdirs.user_cache_dir("fewshot_callbacks")
    parser.add_argument("--sets", nargs="+", choices=list(SOURCES), default=list(SOURCES), help="(default: all)")
    parser.add_argument("--items", type=int, default=8000, help="largest number of a set (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each evaluation (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (default: %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=Path(cache), help="folder of the embeddings (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    columns = ("set", "items", "dim", "classes", "sizes", "copies", "mAP", "product, s")
    table = Table(*columns, "mAP alone, s", "x product", "default metrics, s", "x product")
    notes = []
    for name in options.sets:
        source = SOURCES[name]
        missing = source.missing()
        if missing:
            notes.append(
                f"{name} ({source.what}): left out, since {', '.join(missing)} is missing. Run: {source.install}"
            )
            continue
        table.add_row(name, *cells(load(name, options.items, options.cache), options.rounds))
    console = Console(width=160)
    options.device, options.dim, options.repeats = "cpu", "as in the table", options.rounds
    console.print(machine(options))
    if table.row_count:
        console.print(table)
        console.print(f"sizes: quantiles {', '.join(map(str, QUANTILES))} of the items of a class", highlight=False)
    for note in notes:
        print(note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
