"""How much recall approximate faiss indices lose, and the cost of measuring it.

    pip install -e ".[bench]"
    python benchmarks/search_quality.py                                             # one thread
    python benchmarks/search_quality.py --items 20000 --queries 2000 --lists 128    # smaller

The benchmark searches the same unit vectors with a graph of the vectors (HNSW), lists of codes (IVF, PQ), and a graph of the
int8 codes of `compression_costs`. The table shows the processor seconds of building the index, of searching it, and of
`search_quality`, which includes the exact search and the label metrics. It also shows recall@k, the value that 1 % of the
queries do not exceed, and the loss in mAP@k with its two parts. The last row is the loss of the int8 codes according to
`compression_costs`. If `search_quality` gives another value or interval for it, the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch  # before faiss: each loads its own threading library

sys.path.insert(0, str(Path(__file__).parent))

import faiss
import numpy as np
from _results import Column, Results, add_file_option

from fewshot_callbacks import compression_costs, nearest, search_quality

COLUMNS = (
    Column("index"),
    Column("seconds to build", ".1f"),
    Column("to search", ".1f"),
    Column("to compare", ".1f"),
    Column("recall@k", ".4f"),
    Column("1 % of queries at most", ".2f"),
    Column("map@k, found - exact", "+.4f"),
    Column("by quantisation", "+.4f"),
    Column("by the index", "+.4f"),
)


class Sets(NamedTuple):
    """Queries and gallery with their labels."""

    queries: np.ndarray
    labels: np.ndarray
    gallery: np.ndarray
    gallery_labels: np.ndarray

    def named(self) -> dict[str, np.ndarray]:
        return {"query_labels": self.labels, "gallery_labels": self.gallery_labels}


def points(options: argparse.Namespace) -> Sets:
    """Return points around centres, scaled to length 1, in random order."""
    generator = np.random.default_rng(0)
    count = options.items + options.queries
    labels = generator.permutation(np.arange(count) % options.classes)
    rows = generator.standard_normal((options.classes, options.dim))[labels]
    rows = (rows + generator.standard_normal((count, options.dim))).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return Sets(rows[: options.queries], labels[: options.queries], rows[options.queries :], labels[options.queries :])


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and its processor seconds."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def int8_codes(rows: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return the int8 codes of `compression_costs` as floats: 255 steps over the range of each dimension."""
    low, high = gallery.min(axis=0), gallery.max(axis=0)
    codes: np.ndarray = np.clip(np.floor((rows - low) / ((high - low) / np.float32(255))), 0, 255) - 128
    return codes


class Index(NamedTuple):
    """An index, and how it is compared."""

    name: str
    queries: np.ndarray
    gallery: np.ndarray
    make: Callable[[], Any]
    settings: tuple[int, ...]
    # the setting that trades time for recall
    set_to: Callable[[Any, int], None]
    # decoded rows and queries, as arguments of `search_quality`; decoded rows do not have length 1
    stored: Callable[[Any], dict[str, Any]]


def set_ef_search(index: Any, value: int) -> None:
    index.hnsw.efSearch = value


def set_nprobe(index: Any, value: int) -> None:
    index.nprobe = value


def decoded(index: Any) -> dict[str, Any]:
    index.make_direct_map()
    return {"stored": index.reconstruct_n(0, index.ntotal), "similarity": "dot"}


def indices(sets: Sets, options: argparse.Namespace) -> Iterator[Index]:
    """Yield the indices."""
    codes = [int8_codes(rows, sets.gallery).astype(np.float32) for rows in (sets.queries, sets.gallery)]
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in codes]

    def graph() -> Any:
        return faiss.IndexHNSWFlat(options.dim, 32, faiss.METRIC_INNER_PRODUCT)

    def lists_of_codes() -> Any:
        index = faiss.index_factory(options.dim, f"IVF{options.lists},PQ16", faiss.METRIC_INNER_PRODUCT)
        index.do_polysemous_training = False  # it takes 25 seconds, for a filter that this search does not use
        return index

    probes = tuple(sorted({max(1, options.lists // 128), max(1, options.lists // 16), options.lists}))
    yield Index("HNSW32, efSearch", sets.queries, sets.gallery, graph, (64, 256), set_ef_search, lambda index: {})
    yield Index(
        f"IVF{options.lists},PQ16, nprobe", sets.queries, sets.gallery, lists_of_codes, probes, set_nprobe, decoded
    )
    yield Index(
        "HNSW32 of int8 codes, efSearch",
        unit[0],
        unit[1],
        graph,
        (256,),
        set_ef_search,
        lambda index: {"stored": codes[1], "stored_queries": codes[0]},
    )


def built(index: Index) -> Any:
    """Return a trained and filled faiss index."""
    made = index.make()
    if not made.is_trained:
        made.train(index.gallery)
    made.add(index.gallery)
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--queries", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="a multiple of 16 (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=2_000, help="(default: %(default)s)")
    parser.add_argument("--k", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--lists", type=int, default=1024, help="lists of the IVF index (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    add_file_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    sets = points(options)
    few = sets.gallery[:300]
    search_quality(np.zeros((300, 1), int), few, few, k=1)  # compiles
    with Results(COLUMNS, threads=options.threads, file=options.json) as results:
        _, seconds = timed(lambda: nearest(sets.queries, gallery=sets.gallery, k=options.k))
        results.add("none: exact search", None, seconds, None, 1.0, 1.0, 0.0, None, None)
        quality: Any = None
        for index in indices(sets, options):
            made, seconds_to_build = timed(lambda index=index: built(index))
            stored = index.stored(made)
            for setting in index.settings:
                index.set_to(made, setting)
                quality = add_row(results, index, made, setting, seconds_to_build, stored, sets, options)
        key = f"map@{options.k}_min"
        costs, seconds = timed(
            lambda: compression_costs(
                sets.queries, sets.labels, sets.gallery, sets.gallery_labels, codes="int8", metrics=("recall@1", key)
            )
        )
        known = costs.variants["int8"].differences
        results.add(
            "none: int8 codes, compression_costs", None, None, seconds, None, None, *[known[key].value] * 2, None
        )
    if any(known[name] != quality.quantisation[name] for name in known):
        raise SystemExit("The quantisation loss differs from the loss by compression_costs.")


def add_row(
    results: Results,
    index: Index,
    made: Any,
    setting: int,
    seconds_to_build: float,
    stored: dict[str, Any],
    sets: Sets,
    options: argparse.Namespace,
) -> Any:
    """Add the row of an index with a setting, and return its quality."""
    (_, found), seconds = timed(lambda: made.search(index.queries, options.k))
    quality, seconds_to_compare = timed(
        lambda: search_quality(found, sets.queries, sets.gallery, **sets.named(), **stored)
    )
    key = f"map@{options.k}_min"
    parts = [part[key].value if part else None for part in (quality.quantisation, quality.index)]
    results.add(
        f"{index.name} {setting}",
        seconds_to_build,
        seconds,
        seconds_to_compare,
        quality.recall[options.k],
        quality.percentile_1[options.k],
        quality.differences[key].value,
        *parts,
    )
    return quality


if __name__ == "__main__":
    main()
