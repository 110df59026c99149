"""`fewshot plan`: predicts the memory and time of an evaluation."""

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

# The time of an evaluation of one set, divided by the time of one matrix product of all pairs, for easy and hard sets
# (docs/research/measurements.md).
USUAL_RATIOS = (0.4, 2.0)
# A gallery in files is read to check rows, to score relevant pairs and to compare all pairs in int8, some of it again.
READS = 5
READING = "while they are compared, so the longer time counts; fewer if they fit into a quarter of the budget"
# The largest dimension of the timed matrix product.
LONGEST_ROWS = 4096
# Bytes that are read to measure the speed of reading.
TIMED_BYTES = 2**26


class Sizes(NamedTuple):
    """The sizes of the sets of a plan. `gallery` is None if the queries are also the gallery."""

    queries: int
    gallery: int | None
    dim: int
    dtype: str


class PlannedFiles(NamedTuple):
    """The files of a plan."""

    # the name of the array with all vectors, or with the gallery; None to find it
    embeddings: str | None
    listed: ListedShards

    @property
    def bytes_to_fetch(self) -> int:
        """The bytes of the remote files without a local copy."""
        sizes = zip(self.listed.files, self.listed.sizes(), strict=True)
        return sum(size or 0 for file, size in sizes if isinstance(file, RemoteFile))

    def as_values(self, plan: EvaluationPlan) -> dict[str, float | None]:
        """Return plain values for JSON. The speed of reading is None unless all files are on this machine."""
        speed = None
        if all(isinstance(file, Path) for file in self.listed.files):
            shards = Shards(self.listed, embeddings=self.embeddings)
            speed = reading_speed(shards) * plan.gallery_bytes / len(shards)
        read = READS * plan.gallery_bytes
        return {"bytes_to_fetch": self.bytes_to_fetch, "reads": READS, "bytes_read": read, "bytes_per_second": speed}


def run(options: Plan) -> None:
    """Print the plan."""
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
    """Add the rows about fetching and reading. `read` is empty without files."""
    if read.get("bytes_to_fetch"):
        meaning = "once, before the evaluation; each process fetches its own files"
        table.add_row("copies of remote files", _bytes(read["bytes_to_fetch"] or 0), meaning)
    if read:
        size = read["bytes_read"] or 0
        speed = read["bytes_per_second"]
        size_and_time = _bytes(size) if speed is None else f"{_bytes(size)} in {_duration(size / speed)}"
        table.add_row("reading", size_and_time, f"all files about {READS} times, {READING}")


def _refuse_options_of_here(options: Plan) -> None:
    """Raise an error for options without effect."""
    for name, value in (("labels", options.labels), ("difficulty", options.difficulty)):
        if value is not None and not options.here:
            raise InputError(
                f"--{name} only applies to --here, which measures the time. Add --here, or leave out --{name}."
            )
    if options.difficulty is not None and options.files is not None:
        raise InputError("--difficulty only applies to generated embeddings. Leave it out with --files.")
    if options.labels is not None and options.files is None:
        raise InputError("--labels only applies to --files. Pass --files, or leave out --labels.")


def _measured(plan: EvaluationPlan, options: Plan) -> MeasuredEvaluation:
    """Return the time of the evaluation on this machine."""
    print("fewshot plan: evaluating smaller sets for about ten seconds ...", file=sys.stderr)
    if options.files is None:
        return measure_evaluation(plan, difficulty=options.difficulty)
    sets = read_sets(Path(options.files), Columns(embeddings=options.embeddings, labels=options.labels), ())
    missing = sets.missing("labels")
    if missing:
        raise InputError(
            f"{options.files} has no {' and no '.join(map(repr, missing))}, which --here needs. Pass their name to "
            "--labels, or replace --files by --queries and --dim, which measures generated embeddings."
        )
    return measure_evaluation(plan, sets.queries, sets.get("query_labels"), sets.gallery, sets.get("gallery_labels"))


def _planned_files(files: str, options: Plan) -> PlannedFiles:
    """Return the files of all items, or of the gallery if there are two sets; print notes."""
    if options.dim is not None or options.gallery is not None:
        raise InputError(
            "--files already determines the number and dimension of the items. Leave out --dim and --gallery."
        )
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
    """Return the measured rows per second of reading and converting, in the middle of the files."""
    rows = max(1, min(len(shards), int(TIMED_BYTES / (4 * shards.shape[1]))))
    start = (len(shards) - rows) // 2
    started = time.perf_counter()
    StoredRows(shards, math.inf).read(slice(start, start + rows))
    return rows / (time.perf_counter() - started)


def product_speed(dim: int) -> float:
    """Return the measured floating-point operations per second of a float32 matrix product on this machine."""
    import torch  # noqa: PLC0415 - a plan as JSON does not need it

    # The time per operation does not grow with the dimension, and very long rows would not fit into memory.
    dim = min(dim, LONGEST_ROWS)
    left = torch.randn(1024, dim)
    right = torch.randn(4096, dim)
    # The best of three counts, since the first product also starts threads and touches new memory.
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
    """Return the predicted range of the time of an evaluation, and how it was obtained."""
    if measured is None:
        low, high = (_duration(plan.floating_point_operations / speed * ratio) for ratio in USUAL_RATIOS)
        return f"{low} to {high}", "from measured multiples of one product, for easy to hard sets; --here measures it"
    low, high = _duration(measured.low_seconds), _duration(measured.high_seconds)
    times = low if low == high else f"{low} to {high}"
    if not measured.is_extrapolated:
        return times, "measured now on this machine, with all default metrics"
    largest = max(measured.samples, key=lambda sample: sample.gallery)
    meaning = f"extrapolated from {counted(largest.queries, 'query')} against {counted(largest.gallery, 'item')}"
    return times, meaning


def _memory(plan: EvaluationPlan, memory_mb: float | None) -> tuple[str, str]:
    """Return the bytes of memory in addition to the embeddings, and their purpose."""
    if memory_mb == math.inf:
        return _bytes(plan.needed_bytes), "counters and tiles; there is no limit"
    if plan.memory_bytes < plan.least_bytes:
        meaning = (
            f"the minimum of this evaluation, which exceeds the budget of {_bytes(plan.memory_bytes)}. Pass "
            f"--memory_mb {math.ceil(plan.least_bytes / 1e6)}"
        )
        return _bytes(plan.least_bytes), meaning
    size = f"{_bytes(plan.needed_bytes)} of {_bytes(plan.memory_bytes)}"
    return size, "counters and tiles; the rest of the budget makes it faster"


def _embeddings(plan: EvaluationPlan, sizes: Sizes, place: str) -> tuple[str, str]:
    """Return the bytes of the embeddings, and a description. One set counts once."""
    if sizes.gallery is None:
        meaning = f"one set, both queries and gallery, in {sizes.dtype}{place}"
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
