"""`fewshot plan`: what an evaluation will cost."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, cast

from rich.console import Console
from rich.table import Table

from fewshot_callbacks.cli.options import Columns, Plan
from fewshot_callbacks.cli.stored_sets import read_sets
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.remote_cache import RemoteFile
from fewshot_callbacks.functional.retrieval import (
    EvaluationPlan,
    MeasuredEvaluation,
    measure_evaluation,
    plan_evaluation,
)
from fewshot_callbacks.functional.retrieval.cost import EmbeddingType
from fewshot_callbacks.storage import Shards
from fewshot_callbacks.storage.heads import array_axes
from fewshot_callbacks.storage.shard_files import ListedShards, list_shards
from fewshot_callbacks.storage.shards import read_vector_heads
from fewshot_callbacks.storage.stored_rows import StoredRows
from fewshot_callbacks.system.terminal import print_notes
from fewshot_callbacks.system.words import counted

# The time of an evaluation of one set, in matrix products of all pairs, from easy sets to hard ones:
# docs/research/measurements.md.
USUAL_RATIOS = (0.4, 2.0)
# A gallery in files is read to check rows, to score relevant pairs, to compare all pairs in bytes, and perhaps once more.
READS = 5
READING = "while they are compared: the longer of both counts; less where a quarter of the budget holds them"
# The largest number of components of the rows whose product is timed.
LONGEST_ROWS = 4096
# The number of bytes that are read to measure the speed of reading.
TIMED_BYTES = 2**26


class Sizes(NamedTuple):
    """The sizes of the sets of a plan. The gallery is None if all items are queries."""

    queries: int
    gallery: int | None
    dim: int
    dtype: str


class PlannedFiles(NamedTuple):
    """The files of a plan, and which of their vectors are those of all items."""

    # the name of the vectors of all items, or of the gallery; None to find it
    embeddings: str | None
    listed: ListedShards

    @property
    def bytes_to_fetch(self) -> int:
        """The bytes of the remote files that this machine has no copy of."""
        sizes = zip(self.listed.files, self.listed.sizes(), strict=True)
        return sum(size or 0 for file, size in sizes if isinstance(file, RemoteFile))

    def as_values(self, plan: EvaluationPlan) -> dict[str, float | None]:
        """Return plain values for JSON. The speed of reading is None before all files are on this machine."""
        speed = None
        if all(isinstance(file, Path) for file in self.listed.files):
            shards = Shards(self.listed, embeddings=self.embeddings)
            speed = reading_speed(shards) * plan.gallery_bytes / len(shards)
        read = READS * plan.gallery_bytes
        return {"bytes_to_fetch": self.bytes_to_fetch, "reads": READS, "bytes_read": read, "bytes_per_second": speed}


def run(options: Plan) -> None:
    """Print the plan.

    Raises:
        ValueError: Sizes are missing, or given together with files; or as `Shards` and `plan_evaluation` do.
    """
    _refuse_options_of_here(options)
    files = None
    if options.files is not None:
        files = _planned_files(options.files, options)
        sizes = _sizes_of_files(files, options)
    elif options.queries is None or options.dim is None:
        raise InputError("the number of queries or their dimension is missing. Pass --queries and --dim, or --files.")
    else:
        sizes = Sizes(options.queries, options.gallery, options.dim, options.dtype)
    plan = plan_evaluation(
        sizes.queries,
        sizes.queries if sizes.gallery is None else sizes.gallery,
        sizes.dim,
        memory_mb=options.memory_mb,
        max_queries=options.max_queries,
        dtype=cast(EmbeddingType, sizes.dtype),  # `plan_evaluation` refuses other types
    )
    read = {} if files is None else files.as_values(plan)
    measured = _measured(plan, options) if options.here else None
    if options.json:
        measurement = {} if measured is None else {"here": asdict(measured)}
        print(json.dumps(asdict(plan) | read | measurement, indent=2))
        return
    table = _table(plan, product_speed(sizes.dim), sizes, options, measured)
    _add_reading(table, read)
    Console().print(table)


def _add_reading(table: Table, read: Mapping[str, float | None]) -> None:
    """Add rows on what is fetched and read, given the values for JSON; none without files."""
    if read.get("bytes_to_fetch"):
        meaning = "once, before the evaluation; each process fetches its own files"
        table.add_row("copies of remote files", _bytes(read["bytes_to_fetch"] or 0), meaning)
    if read:
        size = read["bytes_read"] or 0
        speed = read["bytes_per_second"]
        size_and_time = _bytes(size) if speed is None else f"{_bytes(size)} in {_duration(size / speed)}"
        table.add_row("reading", size_and_time, f"all files about {READS} times, {READING}")


def _refuse_options_of_here(options: Plan) -> None:
    """Refuse options that change nothing."""
    for name, value in (("labels", options.labels), ("difficulty", options.difficulty)):
        if value is not None and not options.here:
            raise InputError(f"--{name} is for --here, which measures the time. Add --here, or leave out --{name}.")
    if options.difficulty is not None and options.files is not None:
        raise InputError("--difficulty is for embeddings that are generated. Leave it out beside --files.")
    if options.labels is not None and options.files is None:
        raise InputError("--labels names labels in files. Pass --files, or leave it out.")


def _measured(plan: EvaluationPlan, options: Plan) -> MeasuredEvaluation:
    """Return the time of the evaluation on this machine."""
    print("fewshot plan: evaluating smaller sets for about ten seconds ...", file=sys.stderr)
    if options.files is None:
        return measure_evaluation(plan, difficulty=options.difficulty)
    sets = read_sets(Path(options.files), Columns(embeddings=options.embeddings, labels=options.labels), ())
    missing = sets.missing("labels")
    if missing:
        raise InputError(
            f"{options.files} holds no {' and no '.join(map(repr, missing))}, which --here needs. Name the labels with "
            "--labels, or pass --queries and --dim in place of --files, which measures generated embeddings."
        )
    return measure_evaluation(plan, sets.queries, sets.get("query_labels"), sets.gallery, sets.get("gallery_labels"))


def _planned_files(files: str, options: Plan) -> PlannedFiles:
    """Return the files of all items, or of the gallery if a file has two sets; print notes on them."""
    if options.dim is not None or options.gallery is not None:
        raise InputError("--files says how many items of which dimension there are. Leave out --dim and --gallery.")
    listed = list_shards(files)
    print_notes(listed.notes)
    listed = listed._replace(files=listed.fetched()) if options.here else listed.with_copies()
    names = array_axes(listed.files[0]).keys()
    are_two_sets = options.embeddings is None and {"queries", "gallery"} <= names
    return PlannedFiles("gallery" if are_two_sets else options.embeddings, listed)


def _sizes_of_files(files: PlannedFiles, options: Plan) -> Sizes:
    """Return the number, the dimension and the number format of the items in files."""
    items = read_vector_heads(files.listed, files.embeddings)
    are_two_sets = options.embeddings is None and files.embeddings == "gallery"
    queries = options.queries
    if queries is None:
        queries = read_vector_heads(files.listed, "queries").rows if are_two_sets else items.rows
    is_one_set = not are_two_sets and queries == items.rows
    return Sizes(queries, None if is_one_set else items.rows, items.dim, str(items.dtype).removeprefix("torch."))


def reading_speed(shards: Shards) -> float:
    """Return the rows per second that are read from the middle of the files and converted, measured now."""
    rows = max(1, min(len(shards), int(TIMED_BYTES / (4 * shards.shape[1]))))
    start = (len(shards) - rows) // 2
    started = time.perf_counter()
    StoredRows(shards, math.inf).read(slice(start, start + rows))
    return rows / (time.perf_counter() - started)


def product_speed(dim: int) -> float:
    """Return the floating-point operations per second of a float32 matrix product on this machine, measured now."""
    import torch  # noqa: PLC0415 - the plan as JSON needs none

    # The time per operation does not grow with longer rows, and rows with many components would not fit into memory.
    dim = min(dim, LONGEST_ROWS)
    left = torch.randn(1024, dim)
    right = torch.randn(4096, dim)
    # The best of three products is taken: the first one also starts threads and touches new memory.
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        left @ right.T
        best = min(best, time.perf_counter() - started)
    return 2 * 1024 * 4096 * dim / best


def _table(
    plan: EvaluationPlan, speed: float, sizes: Sizes, options: Plan, measured: MeasuredEvaluation | None
) -> Table:
    drawn = "" if plan.queries == sizes.queries else f", drawn from {sizes.queries:,}"
    title = f"{counted(plan.queries, 'query')}{drawn} against {counted(plan.gallery, 'item')}, d = {plan.dim}"
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
    table.add_row("evaluation", *_evaluation(plan, speed, measured))
    table.add_row("embeddings", *_embeddings(plan, sizes, ", in the files" if options.files else ""))
    if plan.copy_bytes and not options.files:
        table.add_row("copies", _bytes(plan.copy_bytes), "in float32, which half precision is compared as")
    table.add_row("memory beyond them", *_memory(plan, options.memory_mb))
    table.add_row("matrix avoided", _bytes(plan.matrix_bytes), "what all similarities at once would take")
    table.add_row("tiles", f"{plan.tiles:,}", f"of up to {plan.tile[0]:,} x {plan.tile[1]:,} pairs")
    if plan.area_passes > 1:
        table.add_row(
            "passes",
            f"{plan.area_passes:,} more",
            "over all pairs with auc_pr or pair_auroc, if each query has 64 matches",
        )
    return table


def _evaluation(plan: EvaluationPlan, speed: float, measured: MeasuredEvaluation | None) -> tuple[str, str]:
    """Return the range of the time of an evaluation, and the origin of the range."""
    if measured is None:
        low, high = (_duration(plan.floating_point_operations / speed * ratio) for ratio in USUAL_RATIOS)
        return f"{low} to {high}", "as multiples of it were measured, from easy to hard; --here measures it"
    low, high = _duration(measured.low_seconds), _duration(measured.high_seconds)
    times = low if low == high else f"{low} to {high}"
    if not measured.is_extrapolated:
        return times, "measured on this machine just now, with all default metrics"
    largest = max(measured.samples, key=lambda sample: sample.gallery)
    meaning = (
        f"on this machine, from {counted(largest.queries, 'query')} against {counted(largest.gallery, 'item')} just now"
    )
    return times, meaning


def _memory(plan: EvaluationPlan, memory_mb: float | None) -> tuple[str, str]:
    """Return the bytes of memory beyond the embeddings, and their purpose."""
    if memory_mb == math.inf:
        return _bytes(plan.needed_bytes), "counters and tiles; more makes it faster, and there is no limit"
    if plan.memory_bytes < plan.least_bytes:
        meaning = (
            f"the least that this evaluation takes: the budget of {_bytes(plan.memory_bytes)} cannot be kept. Pass "
            f"--memory_mb {math.ceil(plan.least_bytes / 1e6)}"
        )
        return _bytes(plan.least_bytes), meaning
    size = f"{_bytes(plan.needed_bytes)} of {_bytes(plan.memory_bytes)}"
    return size, "counters and tiles, of the budget; the rest makes it faster"


def _embeddings(plan: EvaluationPlan, sizes: Sizes, place: str) -> tuple[str, str]:
    """Return the bytes of the embeddings, and a description of them. One set is counted once."""
    if sizes.gallery is None:  # one set
        meaning = f"one set, of queries that are the gallery, too, in {sizes.dtype}{place}"
        return _bytes(plan.gallery_bytes), meaning
    both = f"{_bytes(plan.query_bytes)} + {_bytes(plan.gallery_bytes)}"
    return both, f"queries and gallery in {sizes.dtype}{place}"


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
