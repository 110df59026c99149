"""`fewshot plan`: what an evaluation will cost."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from fewshot_callbacks.functional.retrieval import EvaluationPlan, plan_evaluation
from fewshot_callbacks.sources import Shards
from fewshot_callbacks.sources.stored_rows import StoredRows
from fewshot_callbacks.system.terminal import print_notes

# What an evaluation of one set takes, in matrix products of all pairs: benchmarks/README.md.
USUAL_RATIOS = (0.4, 2.0)
# Of a gallery in files: rows are checked, relevant pairs scored, all pairs compared in bytes, and perhaps once more.
READS = 5
READING = "while they are compared: the longer of both counts; less where a quarter of the budget holds them"
# Components of the rows of which a product is timed.
LONGEST_ROWS = 4096
# Which are read to see how fast that is.
TIMED_BYTES = 2**26


def run(options: Namespace) -> None:
    """Print the plan.

    Raises:
        ValueError: Sizes are missing, or given beside files; or as `Shards` and `plan_evaluation` do.
    """
    reading: dict[str, float] = {}
    if options.files is not None:
        if options.dim is not None or options.gallery is not None:
            raise ValueError("--files says how many items of which dimension there are. Leave out --dim and --gallery.")
        shards = Shards(options.files)
        print_notes(shards.notes)
        options.gallery, options.dim = shards.shape
        options.queries = options.queries or options.gallery
        options.dtype = str(shards.dtype).removeprefix("torch.")
    elif options.queries is None or options.dim is None:
        raise ValueError("the number of queries or their dimension is missing. Pass --queries and --dim, or --files.")
    plan = plan_evaluation(
        options.queries,
        options.queries if options.gallery is None else options.gallery,
        options.dim,
        memory_mb=options.memory_mb,
        max_queries=options.max_queries,
        dtype=options.dtype,
    )
    if options.files is not None:
        speed = reading_speed(shards) * plan.gallery_bytes / len(shards)
        reading = {"reads": READS, "bytes_read": READS * plan.gallery_bytes, "bytes_per_second": speed}
    if options.json:
        print(json.dumps(asdict(plan) | reading, indent=2))
        return
    speed = product_speed(options.dim)
    table = _table(plan, speed, options)
    if reading:
        seconds = _duration(reading["bytes_read"] / reading["bytes_per_second"])
        table.add_row(
            "reading", f"{_bytes(reading['bytes_read'])} in {seconds}", f"all files about {READS} times, {READING}"
        )
    Console().print(table)


def reading_speed(shards: Shards) -> float:
    """Rows per second that are read from the middle of the files and converted, measured just now."""
    rows = max(1, min(len(shards), int(TIMED_BYTES / (4 * shards.shape[1]))))
    middle, started = (len(shards) - rows) // 2, time.perf_counter()
    StoredRows(shards, math.inf).read(slice(middle, middle + rows))
    return rows / (time.perf_counter() - started)


def product_speed(dim: int) -> float:
    """Floating-point operations per second of a float32 matrix product on this machine, measured just now."""
    import torch  # noqa: PLC0415 - the plan as JSON required_extra none

    # Longer rows take no longer for an operation, and with many components both would not fit into memory.
    dim = min(dim, LONGEST_ROWS)
    left, right = torch.randn(1024, dim), torch.randn(4096, dim)
    # The best of three: the first one also starts threads and touches new memory.
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        left @ right.T
        best = min(best, time.perf_counter() - started)
    return 2 * 1024 * 4096 * dim / best


def _table(plan: EvaluationPlan, speed: float, options: Namespace) -> Table:
    drawn = "" if plan.queries == options.queries else f", drawn from {options.queries:,}"
    title = f"{plan.queries:,} queries{drawn} against {plan.gallery:,} items, d = {plan.dim}"
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("pairs", f"{plan.pairs:,}", "each is scored; nothing is truncated")
    table.add_row(
        "operations", f"{plan.floating_point_operations:.3g}", "of the matrix product, two for each component"
    )
    table.add_row(
        "matrix product",
        _duration(plan.floating_point_operations / speed),
        f"at the {speed / 1e9:.0f} GFLOP/s that this machine reached just now",
    )
    low, high = (_duration(plan.floating_point_operations / speed * ratio) for ratio in USUAL_RATIOS)
    table.add_row("evaluation", f"{low} to {high}", "as multiples of it were measured, from easy to hard (benchmarks/)")
    table.add_row("embeddings", *_embeddings(plan, options))
    if plan.copy_bytes and not options.files:
        table.add_row("copies", _bytes(plan.copy_bytes), "in float32, which half precision is compared as")
    needed = f"{_bytes(plan.needed_bytes)} of {_bytes(plan.memory_bytes)}"
    what = "counters and tiles, of the budget; the rest makes it faster"
    if options.memory_mb == math.inf:
        needed, what = _bytes(plan.needed_bytes), "counters and tiles; more makes it faster, and there is no limit"
    elif plan.memory_bytes < plan.least_bytes:
        needed = _bytes(plan.least_bytes)
        what = (
            f"the least that this evaluation takes: the budget of {_bytes(plan.memory_bytes)} cannot be kept. Pass "
            f"--memory_mb {math.ceil(plan.least_bytes / 1e6)}"
        )
    table.add_row("memory beyond them", needed, what)
    table.add_row("matrix avoided", _bytes(plan.matrix_bytes), "what all similarities at once would take")
    table.add_row("tiles", f"{plan.tiles:,}", f"of up to {plan.tile[0]:,} x {plan.tile[1]:,} pairs")
    return table


def _embeddings(plan: EvaluationPlan, options: Namespace) -> tuple[str, str]:
    """Write the bytes of the embeddings, and what these are; of one set once."""
    of_files = ", in the files" if options.files else ""
    if options.gallery is None or (options.files and options.queries == options.gallery):
        return _bytes(
            plan.gallery_bytes
        ), f"one set, of queries that are the gallery, too, in {options.dtype}{of_files}"
    both = f"{_bytes(plan.query_bytes)} + {_bytes(plan.gallery_bytes)}"
    return both, f"queries and gallery in {options.dtype}{of_files}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
