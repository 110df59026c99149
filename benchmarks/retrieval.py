"""Compare exact mAP of several libraries on the same data: multiples of the bare product, seconds, memory, and the value.

    python benchmarks/retrieval.py                                  # 4,000 and 8,000 items, four difficulties, all rows
    python benchmarks/retrieval.py --items 31730 --rows floor ours argsort
    python benchmarks/retrieval.py --items 2000 --difficulty near-collapsed collapsed repeated
    python benchmarks/retrieval.py --scenario-a                     # 158,652 items of 3,000 classes, once

Each row runs in its own process, after a warm-up on a small set. Its time is divided by the time of the floor (the float32
product of all pairs, in the tiles that are fastest on this machine), measured right before and after it in the same process,
so that a busy machine slows both. The row of the floor is one run against the best of several. Memory is the peak memory of
the process during the call, minus the memory before it (embeddings, libraries and compiled code).

The benchmark prints a table for each set of embeddings, and at the end one table of all sets. That table has a line for each
number of items and each row, with the multiples of the product for each difficulty, the median seconds of the product, and
the peak memory (median, minimum and maximum over the difficulties). `--json` writes the last table, and all measurements
under "results".
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import DIFFICULTIES, make, parts
from _results import Cell, Column, Results, add_file_option

CLOSE = 1e-6
"""Values further than this from ours are marked."""


class UnavailableError(Exception):
    """A row that cannot run here; the text gives the reason."""


class Tile(NamedTuple):
    """The size of a tile of the product of all pairs."""

    rows: int
    columns: int


class Setting(NamedTuple):
    """Settings that a row may need in addition to the data."""

    budget_mb: float | None
    threads: int
    device: str
    progress: bool = False
    tile: Tile | None = None
    """tile in which the floor is computed"""


class Data(NamedTuple):
    """Unit vectors and their labels; each item is a query against all other items."""

    embeddings: Tensor
    labels: Tensor


Values = dict[str, float]
"""metric -> value: "mAP", "MAP@R" if it is known, and "GR@1" for Grouped Recall"""

Ready = Callable[[], Values]
"""the timed call, after imports and preparation"""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    prepare: Callable[[Data, Setting], Ready]
    bytes_per_pair: float = 0.0
    """measured bytes per pair; 0 if memory does not grow with the number of pairs"""
    most_items: int | None = None
    """larger sets run only with --all, because they take too long"""
    cuda: bool = False
    """runs on a GPU"""
    cpu: bool = True
    """runs on the CPU"""


# ------------------------------------------------------------------------------------------------------------ the floor


class Floor:
    """The product of all pairs in tiles that are overwritten; for very many pairs, a sample of the tiles."""

    def __init__(self, embeddings: Tensor, tile: Tile, pairs_at_most: int | None = None) -> None:
        self.embeddings, count = embeddings, len(embeddings)
        self.tile = Tile(min(tile.rows, count), min(tile.columns, count))
        tiles = [
            (rows, columns) for rows in parts(count, self.tile.rows) for columns in parts(count, self.tile.columns)
        ]
        if pairs_at_most is not None:
            few = max(1, round(pairs_at_most / (self.tile.rows * self.tile.columns)))
            tiles = tiles[:: -(-len(tiles) // few)]
        self.tiles = tiles
        self.share = sum((r.stop - r.start) * (c.stop - c.start) for r, c in tiles) / count**2
        self.out: Tensor | None = None

    def run(self) -> None:
        if self.out is None:
            self.out = self.embeddings.new_empty(self.tile.rows * self.tile.columns)
        for rows, columns in self.tiles:
            height, width = rows.stop - rows.start, columns.stop - columns.start
            out = self.out[: height * width].view(height, width)
            torch.mm(self.embeddings[rows], self.embeddings[columns].T, out=out)

    def seconds(self) -> float:
        return seconds(self.run, self.embeddings.device) / self.share

    def best(self, patience: float = 0.5) -> float:
        """Return the best of up to three runs that take at most `patience` seconds in total."""
        times = [self.seconds()]
        while len(times) < 3 and (len(times) + 1) * times[0] * self.share < patience:
            times.append(self.seconds())
        self.out = None
        return min(times)


def best_tile(embeddings: Tensor) -> Tile:
    """Return the tile in which this machine multiplies fastest; each is tried twice on up to 2**24 pairs."""
    count = len(embeddings)
    heights = [rows for rows in (256, 512, 1024, 2048, 4096) if rows <= count] or [count]
    widths = [columns for columns in (2048, 8192) if columns < count] + [count]
    tiles = [Tile(rows, columns) for rows in heights for columns in widths if rows * columns <= 2**27]
    floors = [Floor(embeddings, tile, pairs_at_most=2**24) for tile in tiles]
    floors[0].seconds()
    _, tile = min((floor.best(patience=0.3), floor.tile) for floor in floors)
    return tile


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------------- the rows


def product(dtype: torch.dtype, tf32: bool = False) -> Callable[[Data, Setting], Ready]:
    def prepare(data: Data, setting: Setting) -> Ready:
        embeddings = data.embeddings.to(dtype)
        floor = Floor(embeddings, setting.tile if setting.tile and dtype == torch.float32 else best_tile(embeddings))

        def run() -> Values:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            floor.run()
            floor.out = None
            torch.set_float32_matmul_precision("highest")
            return {}

        return run

    return prepare


def ours(two_sets: bool = False, more: Sequence[str] = (), **engine: Any) -> Callable[[Data, Setting], Ready]:
    """`evaluate_retrieval` with its default metrics, the given extra metrics and the given `engine_options`."""

    def prepare(data: Data, setting: Setting) -> Ready:
        from fewshot_callbacks import evaluate_retrieval  # noqa: PLC0415
        from fewshot_callbacks.engine.int8 import largest_exact_int8  # noqa: PLC0415
        from fewshot_callbacks.engine.options import engine_options  # noqa: PLC0415

        if engine.get("precision") == "int8" and not largest_exact_int8():
            raise UnavailableError("torch has no exact products of bytes here")
        options: dict[str, Any] = {}
        if more:
            options["metrics"] = (*inspect.signature(evaluate_retrieval).parameters["metrics"].default, *more)
        if setting.budget_mb is not None:
            options["memory_mb"] = setting.budget_mb
        if setting.device != "cpu":
            if "device" not in inspect.signature(evaluate_retrieval).parameters:
                raise UnavailableError("this version of evaluate_retrieval has no device=")
            options["device"] = setting.device
        if setting.progress:
            options["progress"] = _reporter()
        if two_sets:
            ids = torch.arange(len(data.labels))
            options |= {"gallery": data.embeddings.clone(), "gallery_labels": data.labels}
            options |= {"query_ids": ids, "gallery_ids": ids}

        def run() -> Values:
            with engine_options(**engine):
                report = evaluate_retrieval(data.embeddings, data.labels, **options)
            return {"mAP": report.mAP, "MAP@R": report["map@r"]}

        return run

    return prepare


def grouped(data: Data, setting: Setting) -> Ready:
    """Grouped Recall@1, which compares each item with the items of its group."""
    from fewshot_callbacks import grouped_recall  # noqa: PLC0415

    options: dict[str, Any] = {} if setting.budget_mb is None else {"memory_mb": setting.budget_mb}

    def run() -> Values:
        return {"GR@1": grouped_recall(data.embeddings, data.labels, label_groups=10, **options).at[1]}

    return run


def binary_codes(data: Data, setting: Setting) -> Ready:
    """The signs of the embeddings as binary codes, compared by Hamming distance."""
    from fewshot_callbacks import evaluate_retrieval  # noqa: PLC0415

    codes = data.embeddings > 0

    def run() -> Values:
        return {"mAP of codes": evaluate_retrieval(codes, data.labels, similarity="hamming").mAP}

    return run


def argsort(data: Data, setting: Setting) -> Ready:
    """Compute the mAP by sorting each row of scores, in chunks, as one would write it by hand."""
    embeddings, labels = data

    def run() -> Values:
        values, rank = [], torch.arange(1, len(labels), device=embeddings.device)
        for part in parts(len(labels), 512):
            here = torch.arange(part.start, part.stop, device=embeddings.device)
            scores = embeddings[part] @ embeddings.T
            scores[here - part.start, here] = -torch.inf
            found = labels[scores.argsort(dim=1, descending=True)[:, :-1]] == labels[part, None]
            values.append((found.cumsum(1) / rank * found).sum(1) / found.sum(1))
        return {"mAP": float(torch.cat(values).nanmean())}

    return run


def topk(data: Data, setting: Setting) -> Ready:
    """Compute MAP@R from the R nearest items of each row, in chunks, as one would write it by hand."""
    embeddings, labels = data

    def run() -> Values:
        values, relevant = [], labels.bincount()[labels] - 1
        most = int(relevant.max())
        rank = torch.arange(1, most + 1, device=embeddings.device)
        for part in parts(len(labels), 512):
            here = torch.arange(part.start, part.stop, device=embeddings.device)
            scores = embeddings[part] @ embeddings.T
            scores[here - part.start, here] = -torch.inf
            found = labels[scores.topk(most).indices] == labels[part, None]
            found &= rank <= relevant[part, None]
            values.append((found.cumsum(1) / rank * found).sum(1) / relevant[part])
        return {"MAP@R": float(torch.cat(values).nanmean())}

    return run


def metric_learning(k: str | None, torch_knn: bool = False) -> Callable[[Data, Setting], Ready]:
    """pytorch-metric-learning; its default search uses faiss."""
    name, metric = ("mean_average_precision", "mAP") if k is None else ("mean_average_precision_at_r", "MAP@R")

    def prepare(data: Data, setting: Setting) -> Ready:
        calculator_module = _needed("pytorch_metric_learning.utils.accuracy_calculator", "pytorch-metric-learning")
        search = None
        if torch_knn:
            distances = _needed("pytorch_metric_learning.distances", "pytorch-metric-learning")
            inference = _needed("pytorch_metric_learning.utils.inference", "pytorch-metric-learning")
            search = inference.CustomKNN(distances.CosineSimilarity(), batch_size=512)
        else:
            _needed("faiss", "faiss-cpu").omp_set_num_threads(setting.threads)
        calculator = calculator_module.AccuracyCalculator(
            include=(name,), k=k, device=torch.device("cpu"), knn_func=search
        )
        return lambda: {metric: calculator.get_accuracy(data.embeddings, data.labels)[name]}

    return prepare


def torchmetrics_map(data: Data, setting: Setting) -> Ready:
    metrics = _needed("torchmetrics.retrieval", "torchmetrics")
    embeddings, labels = data

    def run() -> Values:
        metric = metrics.RetrievalMAP(empty_target_action="skip")
        items = torch.arange(len(labels))
        for part in parts(len(labels), 512):
            # moved into (0, 1], because it never counts an item with a score <= 0 as relevant
            scores = (embeddings[part] @ embeddings.T).add_(1).div_(2)
            target = labels[part, None] == labels
            index = items[part, None].expand_as(scores)
            others = items[part, None] != items
            metric.update(scores[others], target[others], index[others])
        return {"mAP": float(metric.compute())}

    return run


def scikit_learn(data: Data, setting: Setting) -> Ready:
    average_precision_score = _needed("sklearn.metrics", "scikit-learn").average_precision_score
    embeddings, labels = data

    def run() -> Values:
        values, known = [], labels.numpy()
        for part in parts(len(labels), 512):
            scores = (embeddings[part] @ embeddings.T).numpy()
            for item, row in enumerate(scores, start=part.start):
                relevant = known == known[item]
                relevant[item] = False
                if relevant.any():
                    row[item] = -3.0  # ranked last and not relevant, so that it changes no precision at a relevant item
                    values.append(average_precision_score(relevant, row))
        return {"mAP": statistics.fmean(values)}

    return run


def open_metric_learning(data: Data, setting: Setting) -> Ready:
    """Its search over all other items, then its functional metrics."""
    search = _needed("oml.functional.knn", "open-metric-learning")
    metrics = _needed("oml.functional.metrics", "open-metric-learning")

    def run() -> Values:
        every = len(data.labels)
        ids = torch.arange(every)
        _, found, relevant = search.batched_knn(data.embeddings, ids, ids, top_n=every, labels_gt=data.labels)
        table = metrics.calc_retrieval_metrics(
            found, relevant, cmc_top_k=(), precision_top_k=(), map_top_k=(every,), verbose=False
        )
        return {"mAP": float(table["map"][every])}

    return run


ROWS = {
    row.name: row
    for row in (
        Row("floor", "float32 product of all pairs, best tiles", product(torch.float32), cuda=True),
        Row("floor-tf32", "TF32 product of all pairs", product(torch.float32, tf32=True), cuda=True, cpu=False),
        Row("floor-half", "bfloat16 product of all pairs", product(torch.bfloat16), cuda=True),
        Row("ours-auto", "evaluate_retrieval, default metrics", ours(), cuda=True),
        Row("ours-bytes", "evaluate_retrieval, products of bytes", ours(precision="int8")),
        Row("ours-float16", "evaluate_retrieval, products in float16", ours(precision="float16"), cuda=True, cpu=False),
        Row("ours-float32", "evaluate_retrieval, products in float32", ours(precision="float32"), cuda=True),
        Row("ours-float64", "evaluate_retrieval, products in float64", ours(precision="float64"), cuda=True),
        Row(
            "ours-opis", "evaluate_retrieval, and threshold consistency", ours(more=("opis@fmr0.1", "opis_gap@fmr0.1"))
        ),
        Row("ours-two-sets", "evaluate_retrieval, separate queries and gallery", ours(two_sets=True), cuda=True),
        Row("ours-plain", "evaluate_retrieval, counting by PyTorch operations, as on a GPU", ours(as_on_device=True)),
        Row("grouped", "only grouped_recall, groups of 10 classes", grouped),
        Row("codes", "evaluate_retrieval of the signs as binary codes", binary_codes),
        Row("argsort", "rows sorted in chunks, only mAP", argsort, cuda=True),
        Row("topk", "the R nearest of each row in chunks, only MAP@R", topk, cuda=True),
        Row("pml", "pytorch-metric-learning, k=None", metric_learning(None), 95, 20_000),
        Row(
            "pml-torch",
            "pytorch-metric-learning, k=None, its search in torch",
            metric_learning(None, torch_knn=True),
            110,
            20_000,
        ),
        Row("pml-max-bin", 'pytorch-metric-learning, k="max_bin_count", only MAP@R', metric_learning("max_bin_count")),
        Row("torchmetrics", "torchmetrics RetrievalMAP, only mAP", torchmetrics_map, 95, 20_000),
        Row("sklearn", "scikit-learn average_precision_score for each query", scikit_learn, 0, 20_000),
        Row("oml", "open-metric-learning, functional, only mAP", open_metric_learning, 36, 20_000),
    )
}

GROUPS = {
    "ours": [name for name in ROWS if name.startswith("ours")],
    "peers": ["pml", "pml-torch", "pml-max-bin", "torchmetrics", "sklearn", "oml"],
}


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        lacks = "" if missing == module.partition(".")[0] else f" (it lacks {missing})"
        raise UnavailableError(f"not installed: {package}{lacks}") from None


def _reporter() -> Callable[[int, int], None]:
    last = started = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 20:
            last = time.monotonic()
            say(f"    {done / total:.0%} after {last - started:.0f} s")

    return report


# --------------------------------------------------------------------------------------------------- one row, measured


class PeakMemory:
    """Peak MB of the process (or the GPU) inside the `with`, minus the memory before; None if unknown."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._before = device, 0.0
        self.mb: float | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device) / 1e6
            return self
        try:
            ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory still counts, and its reuse is not seen
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._before = _status_mb("VmRSS")
        except (OSError, AttributeError):  # not Linux
            self._before = float("nan")
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.mb = torch.cuda.max_memory_allocated(self.device) / 1e6 - self._before
        elif self._before == self._before:
            self.mb = max(0.0, _status_mb("VmHWM") - self._before)


def _status_mb(key: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def measure(
    row: Row, stored: dict[str, Any], setting: Setting, repeats: int, limit: float, sample: bool
) -> dict[str, Any]:
    """Return the seconds of a row, the ratio to the floor, the memory and the values."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(setting.threads)
    torch.set_float32_matmul_precision("highest")  # no TF32: the floor is float32, and so is argsort
    device = torch.device(setting.device)
    began = time.perf_counter()
    pairs_at_most = 2**28 if sample else None
    if row.name == "floor" and sample:
        embeddings = stored["data"].embeddings.to(device)
        floor = Floor(embeddings, stored["tile"] or best_tile(embeddings), pairs_at_most)
        floor.seconds()
        time_of = statistics.median(floor.seconds() for _ in range(3))
        note = f"from {floor.share:.1%} of the tiles"
        return {"ratio": 1.0, "seconds": time_of, "peak_mb": None, "values": {}, "tile": floor.tile, "note": note}

    def placed(data: Data) -> Data:  # ours takes embeddings on the CPU, where a user has them after predict
        return data if row.name.startswith("ours") else Data(data.embeddings.to(device), data.labels.to(device))

    is_ours = row.name.startswith("ours")
    for warm in stored["warm"] if is_ours else stored["warm"][:1]:
        row.prepare(placed(warm), setting._replace(progress=False))()
    if is_ours:
        # Sets with nearly random labels are multiplied in float32; small sets never are.
        from fewshot_callbacks.engine.options import engine_options  # noqa: PLC0415

        with engine_options(precision="float32"):
            row.prepare(placed(stored["warm"][0]), setting._replace(progress=False))()
    warm_seconds = time.perf_counter() - began
    data = placed(stored["data"])
    on_device = data.embeddings.to(device)
    tile = stored["tile"] or best_tile(on_device)
    floor = Floor(on_device, tile, pairs_at_most)
    run = row.prepare(data, setting._replace(tile=tile))
    taken: list[float] = []
    ratios: list[float] = []
    floors: list[float] = []
    peaks: list[float | None] = []
    values: Values = {}
    floor.best()
    while len(taken) < repeats and (not taken or time.perf_counter() - began + 1.5 * taken[-1] < limit):
        before = floor.best()
        with PeakMemory(device) as memory:
            started = time.perf_counter()
            values = run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started)
        floors.append(min(before, floor.best()))
        ratios.append(taken[-1] / floors[-1])
        peaks.append(memory.mb)
    return {
        "ratio": statistics.median(ratios),
        "seconds": statistics.median(taken),
        "peak_mb": max((peak for peak in peaks if peak is not None), default=None),
        "values": values,
        "tile": tile,
        "ratios": ratios,
        "floors": floors,
        "warm_up_seconds": warm_seconds,
    }


def attempt(row: Row, *arguments: Any) -> dict[str, Any]:
    """The measurement, or the reason why there is none."""
    try:
        return measure(row, *arguments)
    except UnavailableError as reason:
        return {"note": str(reason)}
    except MemoryError:
        return {"note": "out of memory"}
    except Exception as error:  # one row that fails must not end the others
        return {"note": f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]}


def child(options: argparse.Namespace) -> None:
    """Measure one row in this process and leave the result in a file."""
    stored = torch.load(options.data, weights_only=True)
    stored["data"], stored["warm"] = Data(*stored["data"]), [Data(*warm) for warm in stored["warm"]]
    stored["tile"] = Tile(*options.tile) if options.tile else None
    result = attempt(
        ROWS[options.row], stored, _setting(options), options.repeats, 0.6 * options.timeout, options.sample_floor
    )
    Path(options.result).write_text(json.dumps(result), encoding="utf-8")


def run_in_process_of_its_own(row: Row, folder: str, tile: Tile | None, options: argparse.Namespace) -> dict[str, Any]:
    result = Path(folder) / "result.json"
    result.unlink(missing_ok=True)
    command = [
        *(sys.executable, __file__, "--row", row.name, "--data", f"{folder}/data.pt", "--result", str(result)),
        *("--repeats", str(options.repeats), "--threads", str(options.threads), "--device", options.device),
        *("--timeout", str(options.timeout)),
        *(("--budget-mb", str(options.budget_mb)) if options.budget_mb is not None else ()),
        *(("--tile", *map(str, tile)) if tile else ()),
        *(("--sample-floor",) if options.sample_floor else ()),
    ]
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    environment = os.environ | dict.fromkeys(counts, str(options.threads)) | {"TQDM_DISABLE": "1"}
    # a separate session: on Ctrl-C this process ends the child and prints the results so far
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return {"note": f"over {options.timeout:g} s"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    if code == -signal.SIGKILL:
        return {"note": "killed by the system, most likely for its memory"}
    return {"note": f"ended with code {code}"}


# ------------------------------------------------------------------------------------------------------------ the table


def table(results: Sequence[dict[str, Any]], title: str) -> str:
    """Return the table in Markdown; a value that differs from ours by more than 1e-6 is marked."""
    lines = [
        f"### {title}",
        "",
        "| row | x floor | seconds | peak MB | mAP | what |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    reference: Values = next((r["values"] for r in results if r["row"].startswith("ours") and r.get("values")), {})
    for result in results:
        values, notes = result.get("values", {}), [ROWS[result["row"]].what]
        metric = next(iter(values), None)
        value = "" if metric is None else f"{values[metric]:.7f}"
        if metric == "MAP@R":
            value += " (MAP@R)"
        if metric is not None and metric in reference:
            apart = values[metric] - reference[metric]
            if result["row"].startswith("ours") and values != reference:
                notes.append(f"**not the value of the first of ours: {apart:+.1e}**")
            elif not abs(apart) <= CLOSE:
                notes.append(f"**{apart:+.1e} from ours**")
        if result.get("note"):
            notes.append(result["note"])
        ratio, taken, peak = (result.get(key) for key in ("ratio", "seconds", "peak_mb"))
        cells = [
            result["row"],
            "" if ratio is None else f"{ratio:.2f}",
            "" if taken is None else f"{taken:.3f}" if taken < 10 else f"{taken:.1f}",
            "" if peak is None else f"{peak:,.0f}",
            value,
            "; ".join(notes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pivot_columns(difficulties: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns of the table of all sets."""
    return (
        Column("items", ",d"),
        Column("dim", ",d"),
        Column("what"),
        *(Column(f"{difficulty}, x product", ".2f") for difficulty in difficulties),
        Column("product, seconds", ".2f"),
        Column("peak MB beyond the data", ",.0f"),
    )


def pivot_row(name: str, items: int, options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> list[Cell]:
    """Return the line of a row and a number of items: one quotient per difficulty, or the reason why there is none."""
    found = {r["difficulty"]: r for r in results if r["row"] == name and r["items"] == items}
    quotients: list[Cell] = []
    for difficulty in options.difficulty:
        result = found.get(difficulty, {})
        quotients.append(result.get("ratio", result.get("note")))
    products = [seconds for result in found.values() for seconds in result.get("floors", ())]
    peaks = [result["peak_mb"] for result in found.values() if result.get("peak_mb") is not None]
    product = statistics.median(products) if products else None
    return [items, options.dim, ROWS[name].what, *quotients, product, spread(peaks)]


def spread(values: Sequence[float]) -> Cell:
    """Return median, minimum and maximum; a single value as it is; None if there is no value."""
    if len(values) > 1:
        return statistics.median(values), min(values), max(values)
    return values[0] if values else None


def skipped(row: Row, items: int, options: argparse.Namespace) -> str | None:
    """Return the reason why this row is skipped, or None."""
    if options.device != "cpu" and not row.cuda:
        return "skipped: runs only on the CPU"
    if options.device == "cpu" and not row.cpu:
        return "skipped: runs only on a GPU"
    if options.all:
        return None
    gigabytes, free = row.bytes_per_pair * items**2 / 1e9, _free_gigabytes()
    if gigabytes > 0.7 * free:
        return f"skipped: would need {gigabytes:.0f} GB, and {free:.0f} GB are free; pass --all"
    if row.most_items is not None and items > row.most_items:
        return f"skipped above N = {row.most_items:,}; pass --all"
    return None


def _free_gigabytes() -> float:
    path = Path("/proc/meminfo")
    if not path.exists():
        return float("inf")
    return next(
        int(line.split()[1]) * 1024 / 1e9 for line in path.read_text().splitlines() if line.startswith("MemAvailable")
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def store(items: int, difficulty: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the data of one table, and small sets for the warm-up: a few whole classes, and a near-collapsed set."""
    say(f"making {items:,} items, {difficulty} ...")
    data = Data(*make(items, options.dim, difficulty, per_class=options.per_class, seed=options.seed))
    few = data.labels < 22  # two groups of ten labels, for Grouped Recall
    near = make(300, options.dim, "near-collapsed", per_class=12, seed=options.seed)
    return {"data": data, "warm": [Data(data.embeddings[few], data.labels[few]), Data(*near)]}


def benchmark(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Fill `results` and print a table for each set of embeddings."""
    for items in options.items:
        tile: Tile | None = None
        for difficulty in options.difficulty:
            title = f"N = {items:,}, {difficulty}"
            stored, here = store(items, difficulty, options), []
            try:
                with tempfile.TemporaryDirectory() as folder:
                    if not options.in_process:
                        plain = {"data": tuple(stored["data"]), "warm": [tuple(warm) for warm in stored["warm"]]}
                        torch.save(plain, f"{folder}/data.pt")
                        del stored
                    for number, name in enumerate(options.rows, start=1):
                        say(f"{title}: {number}/{len(options.rows)} {name}")
                        row = ROWS[name]
                        reason = skipped(row, items, options)
                        if reason is not None:
                            result: dict[str, Any] = {"note": reason}
                        elif options.in_process:
                            arguments = (_setting(options), options.repeats, options.timeout, options.sample_floor)
                            result = attempt(row, stored | {"tile": tile}, *arguments)
                        else:
                            result = run_in_process_of_its_own(row, folder, tile, options)
                        if tile is None and "tile" in result:
                            tile = Tile(*result["tile"])
                        here.append({"items": items, "difficulty": difficulty, "row": name} | result)
            finally:
                results.extend(here)
                if here:
                    size = f"; floor in tiles of {tile.rows:,} x {tile.columns:,}" if tile else ""
                    print(table(here, title + size), flush=True)


def _setting(options: argparse.Namespace) -> Setting:
    return Setting(options.budget_mb, options.threads, options.device, progress=options.sample_floor)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = "\n".join(f"  {row.name:15} {row.what}" for row in ROWS.values())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"rows:\n{names}\n" + "\n".join(f"  {name:15} {', '.join(rows)}" for name, rows in GROUPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--items", type=int, nargs="+", default=[4000, 8000], metavar="N")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--per-class", type=float, default=53, help="mean number of items per class")
    parser.add_argument(
        "--difficulty", nargs="+", choices=DIFFICULTIES, default=["well-trained", "middling", "hard", "random"]
    )
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *GROUPS], metavar="ROW", help="see below; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="fewer if they take more than 0.6 of the time limit")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-mb", type=float, help="memory_mb of evaluate_retrieval")
    parser.add_argument("--timeout", type=float, help="seconds for a row in total; default: 600, scenario A 7200")
    parser.add_argument("--all", action="store_true", help="also try rows that take very long or need much memory")
    add_file_option(parser)
    parser.add_argument(
        "--scenario-a",
        action="store_true",
        help="158,652 items of 3,000 classes, well-trained by default, once; the floor from a sample of its tiles",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="run all rows in this process: quick, but memory and order are unreliable; for tests",
    )
    for internal in ("--row", "--data", "--result"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--tile", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sample-floor", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.scenario_a:
        options.items, options.per_class, options.repeats = [158_652], 158_652 / 3000, 1
        options.sample_floor, options.timeout = True, options.timeout or 7200.0
        options.rows = options.rows or ["floor", "ours-auto"]
        if options.difficulty == parser.get_default("difficulty"):
            options.difficulty = ["well-trained"]
    options.timeout = options.timeout or 600.0
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device here, so nothing can be measured on one.")
    asked = options.rows or list(ROWS)
    options.rows = list(dict.fromkeys(name for entry in asked for name in GROUPS.get(entry, [entry])))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.row:
        child(options)
        return 0
    torch.set_num_threads(options.threads)
    results: list[dict[str, Any]] = []
    code = 0
    try:
        benchmark(options, results)
    except KeyboardInterrupt:
        say("interrupted: the results so far are above")
        code = 130
    if any(str(result.get("note", "")).startswith(("failed", "ended")) for result in results):
        code = code or 1
    print_pivot(options, results)
    return code


def print_pivot(options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    """Print the table of all sets, and write it with all measurements to the file of `--json`."""
    device = None if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    more = {"options": vars(options), "results": results}
    columns = pivot_columns(options.difficulty)
    with Results(columns, threads=options.threads, file=options.json, device=device, more=more) as pivot:
        for items in options.items:
            for name in options.rows:
                if any(result["row"] == name and result["items"] == items for result in results):
                    pivot.add(*pivot_row(name, items, options, results))


if __name__ == "__main__":
    sys.exit(main())
