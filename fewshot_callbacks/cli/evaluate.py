"""`fewshot evaluate`: retrieval metrics of stored embeddings."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import sys
import zipfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fewshot_callbacks import __version__
from fewshot_callbacks.cli.options import COLUMNS, in_shell, metric_keys
from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.files.journal import Journal, journaling
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments
from fewshot_callbacks.functional.dynamics import without_nan
from fewshot_callbacks.functional.retrieval import (
    Relevance,
    RetrievalReport,
    Share,
    compare_reports,
    evaluate_retrieval,
    requested_metric,
)
from fewshot_callbacks.functional.retrieval.inputs import with_stored_arrays
from fewshot_callbacks.functional.statistics import UNKNOWN, Difference
from fewshot_callbacks.settings import RetrievalOptions, RetrievalSettings
from fewshot_callbacks.sources import RowSubset, Shards
from fewshot_callbacks.sources.shard_files import file_stamp, find_shards
from fewshot_callbacks.sources.stored_rows import StoredRows
from fewshot_callbacks.system.terminal import as_text, note, print_notes

# The arrays that commands read.
PER_ITEM = (
    *("embeddings", "labels", "ids", "query_ids", "query_groups", "paths", "label_names"),
    *("gallery", "gallery_labels", "gallery_ids", "gallery_groups", "gallery_paths"),
)
# The arrays that hold vectors, and may be larger than memory.
VECTORS = ("embeddings", "gallery")
SETTINGS = tuple(field.name for field in fields(RetrievalSettings))
Arrays = dict[str, Any]  # NumPy's; the vectors may be `Shards`
# Bytes: J of files is summed over pieces of a third of this size.
PIECES_OF_J = 2.0**28
# Accuracy of episodes -> why the difference of two may have no interval.
EPISODIC = {
    "accuracy": "of a single episode",
    "accuracy, other classes": "of different episodes, or of too few episodes or classes",
}
# The form of tables that hold all their columns in 80 characters.
NARROW: dict[str, Any] = {"title_style": "bold", "box": SIMPLE_HEAD, "collapse_padding": True}
COMPARED = (
    "difference: first minus second. Each query is compared with itself; the intervals are robust to the dependence of "
    "queries of one class."
)
# The key of a metric of all rows, which follows from no ranking.
DISCRIMINANT_RATIO = "J"


def run(options: Namespace) -> None:
    """Evaluate and print.

    Raises:
        ValueError: The options do not fit each other, or the files.
    """
    if options.per_class and options.against is not None and not options.json:
        raise ValueError(
            "with --against the values of classes are only printed as JSON. Add --json, or leave out --per_class."
        )
    wants_j = DISCRIMINANT_RATIO in metric_keys(options.metrics)
    options = Namespace(**vars(options) | {"metrics": metrics_of_retrieval(options.metrics)})
    needed = ("embeddings",) if options.judgements is not None else ("embeddings", "labels")
    arrays = read_arrays(options.file, options, needed)
    others = None if options.against is None else read_arrays(options.against, options, needed)
    if options.per_class and (options.judgements is not None or have_several_labels(arrays)):
        raise ValueError("--per_class needs one label for each item: judgements and several labels have no classes.")
    if wants_j:
        check_labels_for_j(arrays)
        check_labels_for_j(others)
    processes = joined_processes()
    if others is not None:
        check_same_items(arrays, others, options)
    other_report: RetrievalReport | None = None
    journal = None if options.resume is None else journal_of(options, processes, arrays, others)
    # The state is removed once all is printed.
    with journaling(journal):
        report = evaluate_arrays(arrays, options, processes)
        if others is not None:
            other_report = evaluate_arrays(others, options, processes)
        if processes.rank > 0:  # the first process prints
            return
        result = Result(report, moments_of_all(arrays) if wants_j else None)
        if others is None or other_report is None:
            print_result(result, options)
        else:
            print_both(result, Result(other_report, moments_of_all(others) if wants_j else None), options)


@dataclass(frozen=True)
class Result:
    """The result of a file: its report, and J.

    Args:
        report: The metrics of retrieval.
        moments: The moments of the classes, for J; None unless J was requested.
    """

    report: RetrievalReport
    moments: ClassMoments | None = None

    @property
    def j(self) -> float | None:
        """J of all rows; NaN if it is undefined, None unless it was requested."""
        return None if self.moments is None else float(self.moments.discriminant_ratio())

    def to_dict(self, options: Namespace) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = as_dict(self.report, options)
        return values if self.moments is None else values | without_nan({DISCRIMINANT_RATIO: self.j})


def print_result(result: Result, options: Namespace) -> None:
    """Print the result of a file, as JSON or as tables."""
    if options.json:
        print(json.dumps(result.to_dict(options), indent=2))
        return
    console = Console()
    report = result.report
    table = report_table(report, title=str(options.file))
    if result.moments is not None and result.j is not None:
        rows = int(result.moments.counts.sum())
        meaning = f"Scatter between classes over scatter within them, of all {rows:,} rows."
        if math.isnan(result.j):
            meaning += " It is undefined where no class has two rows, or all rows are equal."
        table.add_row(DISCRIMINANT_RATIO, as_number(result.j), "", meaning)
    console.print(table)
    if options.per_class:
        for classes in class_tables(report, console.width):
            console.print(classes)
    for message in report.messages:
        console.print(note(in_shell(message, "evaluate")))


def print_both(first: Result, second: Result, options: Namespace) -> None:
    """Print the comparison of two files, as JSON or as a table."""
    differences = compare_reports(first.report, second.report)
    if first.j is not None and second.j is not None:
        # J has no interval, so that its difference has none either.
        differences[DISCRIMINANT_RATIO] = Difference(first.j, second.j, UNKNOWN)
    if options.json:
        both = {"first": first.to_dict(options), "second": second.to_dict(options)}
        print(json.dumps(both | {"differences": differences_as_dict(differences)}, indent=2))
        return
    console = Console()
    title = f"{options.file} against {options.against}"
    console.print(comparison_table(differences, ("first", "second"), title, COMPARED))
    for file, result in ((options.file, first), (options.against, second)):
        for message in result.report.messages:
            console.print(note(f"{file}: {in_shell(message, 'evaluate')}"))


def metrics_of_retrieval(words: Sequence[str]) -> tuple[str, ...]:
    """Return the keys in the words of `--metrics`, without J.

    Raises:
        ValueError: If J is the only one.
    """
    keys = tuple(key for key in metric_keys(words) if key != DISCRIMINANT_RATIO)
    if not keys:
        raise ValueError("--metrics J needs a metric of retrieval beside it. Write --metrics mAP J.")
    return keys


def check_labels_for_j(arrays: Arrays | None) -> None:
    """Refuse J if a row has no label, or several.

    Args:
        arrays: The arrays of a file; None if there is no such file.
    """
    if arrays is None:
        return
    needed = ["labels", "gallery_labels"] if "gallery" in arrays else ["labels"]
    missing = [repr(name) for name in needed if name not in arrays]
    fact = f"the file has no {' and no '.join(missing)}" if missing else ""
    if have_several_labels(arrays):
        fact = "'labels' holds several"
    if fact:
        raise ValueError(f"J needs one label for each row, and {fact}. Leave {DISCRIMINANT_RATIO} out of --metrics.")


def journal_of(options: Namespace, processes: Processes, arrays: Arrays, others: Arrays | None) -> Journal:
    """Return the journal of an evaluation: it belongs to these files as they are, and to these settings.

    Vectors are known by the sizes and times of their files, since a digest of them would take as long as a pass over files
    that are larger than memory. The other arrays are known by their content.

    Raises:
        ValueError: The folder holds the state of another evaluation, or anything else; of all processes.
    """
    files = [file for file in (options.file, options.against) if file is not None]
    parts = {str(file): [[str(part), *file_stamp(part)] for part in find_shards(str(file)).files] for file in files}
    settings = {
        name: str(vars(options)[name])
        for name in (*SETTINGS, *COLUMNS, "unknown", "at_least")
        if vars(options).get(name) is not None
    }
    description: dict[str, Any] = {
        "files": hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16],
        "settings": settings,
        "processes": processes.count,
        "version": __version__,
    }
    for name in COLUMNS:
        column = vars(options).get(name)
        if column is not None and column.lower().endswith(".npy"):
            description[f"--{name}"] = _digest_of_files(find_shards(column).files)
    if options.judgements is not None:
        description["judgements"] = _digest_of_files([options.judgements])
    # Arrays may have any name, that of a setting as well.
    for place, arrays_of_file in ((options.file, arrays), (options.against, others or {})):
        for name, values in arrays_of_file.items():
            if name not in VECTORS:
                description[f"{name} in {place}"] = _digest_of_array(values)
    with processes.together():
        return Journal(options.resume, description, processes)


def _digest_of_files(files: Sequence[Path]) -> str:
    contents = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            contents.update(hashlib.file_digest(opened, "sha256").digest())
    return contents.hexdigest()[:16]


def _digest_of_array(values: Any) -> str:
    array = np.ascontiguousarray(values)
    content = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    # An array of objects, such as words of any length, holds their addresses.
    content.update(json.dumps(array.tolist(), default=str).encode() if array.dtype.hasobject else array.tobytes())
    return content.hexdigest()[:16]


def check_same_items(arrays: Arrays, others: Arrays, options: Namespace) -> None:
    """Refuse another file if its items are not those of the first.

    Raises:
        ValueError: Their labels differ, or those of their galleries; with judgements their ids.
    """
    has_judgements = vars(options).get("judgements") is not None
    for name in ("query_ids", "gallery_ids") if has_judgements else ("labels", "gallery_labels"):
        first = np.asarray(arrays.get(name, ()))
        second = np.asarray(others.get(name, ()))
        if not np.array_equal(first, second):
            raise ValueError(
                f"{options.file} holds {len(first):,} {name}, {options.against} {len(second):,}, and they are not the same "
                "in the same order. Embed the same items with both models."
            )


def evaluate_arrays(arrays: Arrays, options: Namespace, processes: Processes = ALONE) -> RetrievalReport:
    """Return the report of the arrays of a file, with the settings among the options; a bar shows the pairs done."""
    settings = {name: vars(options)[name] for name in SETTINGS if name in options}
    judgements = vars(options).get("judgements")
    settings["metrics"] = metric_keys(settings["metrics"])
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    # In a file or a pipe a bar is control characters.
    hidden = vars(options).get("json", False) or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("pairs", total=None)
        items: dict[str, Any]
        if judgements is not None:
            items = {"relevance": judged_relevance(arrays, options)}
        else:
            items = {"query_labels": arrays.get("labels"), "gallery_labels": arrays.get("gallery_labels")}
            items |= ids_of(arrays)
        items |= {name: arrays.get(name) for name in ("gallery", "query_groups", "gallery_groups")}
        queries = arrays["embeddings"]
        if processes.count > 1:
            queries, items = part_of_process(queries, items, processes)
        return evaluate_retrieval(
            queries,
            **items,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **cast(RetrievalOptions, settings),
        )


def ids_of(arrays: Arrays) -> Arrays:
    """Return the ids of a file as `evaluate_retrieval` takes them; a file may call those of one set `ids`."""
    if arrays.get("gallery") is not None:
        return {name: arrays.get(name) for name in ("query_ids", "gallery_ids")}
    return {"query_ids": arrays.get("ids", arrays.get("query_ids"))}


def first_of_each_id(arrays: Arrays) -> Arrays:
    """Return the arrays of one set with the first item of each id, without the ids; those of two sets as they are."""
    ids = ids_of(arrays)["query_ids"]
    if ids is None or arrays.get("gallery") is not None:
        return arrays
    if len(ids) != len(arrays["embeddings"]):
        raise ValueError(
            f"the file holds {len(ids):,} ids and {len(arrays['embeddings']):,} embeddings. Write one id for each item."
        )
    mask = _is_first(ids)
    chosen: Arrays = {}
    for name, values in arrays.items():
        if name in ("ids", "query_ids"):
            continue
        if isinstance(values, Shards | RowSubset):
            chosen[name] = RowSubset(values, mask)
        else:
            chosen[name] = values[mask] if name in PER_ITEM and name != "label_names" else values
    return chosen


def _is_first(ids: Any) -> NDArray[np.bool_]:
    """Return which items are the first of their id."""
    mask = np.zeros(len(ids), bool)
    mask[np.unique(ids, return_index=True)[1]] = True
    return mask


def judged_relevance(arrays: Arrays, options: Namespace) -> Relevance:
    """Return the relevance by the judgements for the queries of a file of embeddings.

    Raises:
        ValueError: If there is no such file, the arrays have no ids, or as `Relevance.from_judgements` does.
    """
    judgements: Path = options.judgements
    if not judgements.is_file():
        raise ValueError(
            f"{judgements} does not exist, or is no file. Pass --judgements with TREC's or BEIR's columns."
        )
    missing = [name for name in ("query_ids", "gallery_ids")[: 1 + ("gallery" in arrays)] if name not in arrays]
    if missing:
        raise ValueError(
            f"judgements name items by their ids, and the file has no {' and no '.join(map(repr, missing))}. Write them: "
            "numpy.savez(path, embeddings=..., query_ids=..., gallery=..., gallery_ids=...)."
        )
    ids = [arrays[name].tolist() for name in ("query_ids", "gallery_ids")[: 1 + ("gallery" in arrays)]]
    return Relevance.from_judgements(judgements, *ids, unknown=options.unknown, at_least=options.at_least)


def joined_processes() -> Processes:
    """Return the processes that torchrun or Slurm's srun has started, after joining them.

    Raises:
        ValueError: Slurm's variables do not fit each other.
    """
    # The script of a job, outside of srun, is one process, whatever the job may start.
    if "WORLD_SIZE" not in os.environ and {"SLURM_NTASKS", "SLURM_STEP_ID"} <= set(os.environ):
        join_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    import torch  # noqa: PLC0415 - as below

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
        atexit.register(torch.distributed.destroy_process_group)
    if torch.cuda.is_available():  # `--device cuda` is another one in each process of a node
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return all_processes()


def join_slurm() -> None:
    """Set the variables of torch.distributed from those of Slurm, as Lightning reads them."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # noqa: PLC0415 - takes a second

    try:
        slurm = SLURMEnvironment()
    except RuntimeError as error:
        raise ValueError(error) from error
    numbers = {"WORLD_SIZE": slurm.world_size(), "RANK": slurm.global_rank(), "LOCAL_RANK": slurm.local_rank()}
    of_main = {"MASTER_ADDR": slurm.main_address, "MASTER_PORT": slurm.main_port}
    os.environ |= {name: str(value) for name, value in (numbers | of_main).items()}


def part_of_process(queries: Any, arguments: dict[str, Any], processes: Processes) -> tuple[Any, dict[str, Any]]:
    """Return this process's part of the queries, and the arguments of `evaluate_retrieval` for its part and its share.

    Args:
        queries: All queries.
        arguments: Those for all queries and gallery items, with `gallery` among them; names of gallery arrays begin so.
        processes: All processes. Each holds neighbouring rows, about as many as the others.
    """
    query_rows = _rows_of_process(len(queries), processes)
    gallery_rows = query_rows
    if arguments["gallery"] is not None:
        gallery_rows = _rows_of_process(len(arguments["gallery"]), processes)
    parts: dict[str, Any] = {}
    for name, values in arguments.items():
        if values is None or name == "relevance":
            parts[name] = values
        else:
            parts[name] = _take_rows(values, gallery_rows if name.startswith("gallery") else query_rows)
    parts["share"] = Share(processes, _indices(query_rows), _indices(gallery_rows))
    return _take_rows(queries, query_rows), parts


def _rows_of_process(rows: int, processes: Processes) -> slice:
    """Return the rows that this process holds of so many."""
    return slice(rows * processes.rank // processes.count, rows * (processes.rank + 1) // processes.count)


def _take_rows(values: Any, rows: slice) -> Any:
    """Return neighbouring rows of an array, a list or rows on disk, which stay there."""
    if isinstance(values, Shards | RowSubset):
        is_taken = np.zeros(len(values), bool)
        is_taken[rows] = True
        return RowSubset(values, is_taken)
    return values[rows]


def _indices(rows: slice) -> NDArray[np.int64]:
    """Return the indices of neighbouring rows."""
    return np.arange(rows.start, rows.stop)


def read_arrays(file: Path, options: Namespace, needed: Sequence[str]) -> Arrays:
    """Return the arrays of an .npz file; of other files all but the vectors, which stay there.

    Raises:
        ValueError: As `load_arrays` and `Shards` do, and if there are neither labels nor judgements.
    """
    columns = {name: vars(options)[name] for name in COLUMNS if vars(options).get(name) is not None}
    if not columns and file.suffix.lower() == ".npz" and (file.is_file() or "*" not in file.name):
        return load_arrays(file, needed, by_option=True)
    shards = Shards(str(file), **columns)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # the first of several processes
        print_notes(shards.notes)
    if "labels" in needed and shards.labels is None:
        raise ValueError(
            f"{file}: nothing says where the labels are. Pass --labels with the name of an array or column, or "
            "--judgements."
        )
    queries, gallery, arrays = with_stored_arrays(shards, None, {}, labelled=True)
    arrays["labels"] = arrays.pop("query_labels", None)
    if "labels" not in needed:
        arrays["query_ids"] = queries.ids  # judgements name them
    arrays |= {"embeddings": queries, "gallery": gallery}
    return {name: values for name, values in arrays.items() if values is not None}


def load_arrays(file: Path, needed: Sequence[str] = ("embeddings", "labels"), *, by_option: bool = False) -> Arrays:
    """Return the arrays of an .npz file.

    Args:
        file: The file.
        needed: Names of the arrays that it must hold.
        by_option: Whether the command has options for their names, such as `--labels NAME`.

    Raises:
        ValueError: If it is no such file, or an array is missing; names those that are there.
    """
    how = f"Write one with numpy.savez(path, {', '.join(f'{name}=...' for name in needed)})."
    if not file.exists():
        raise ValueError(f"{file} does not exist. {how}")
    # `np.load` would open a single array as well. Of any other file its message would speak of pickles.
    if not file.is_file() or not zipfile.is_zipfile(file):
        raise ValueError(f"{file} is not an .npz file of plain arrays. {how}")
    arrays: Arrays = {}
    try:
        # A pickle can run any code, and files of embeddings are passed on.
        with np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = _plain_array(archive, name)
    except OSError:  # the disk failed, not the content
        raise
    except Exception as error:  # zipfile, zlib and NumPy promise no class of error for a damaged file
        what = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file} is damaged, or not an .npz file of plain arrays ({what}). {how}") from error
    missing = [name for name in needed if name not in arrays]
    if missing:
        fix = "Name the arrays when saving."
        if by_option:
            options = " and ".join(f"--{name}" for name in needed)
            fix = f"Pass {options} with their names, or name the arrays so when saving."
        there = ", ".join(map(repr, arrays)) or "nothing"
        raise ValueError(f"{file} holds {there}, but not {' and '.join(map(repr, missing))}. {fix} {how}")
    single = [name for name in PER_ITEM if name in arrays and arrays[name].ndim == 0]
    if single:
        raise ValueError(f"{' and '.join(map(repr, single))} of {file} is a single value, not one for each item. {how}")
    return arrays


def _plain_array(archive: Any, name: str) -> NDArray[Any]:
    """Return an array in the byte order of this machine."""
    try:
        array = archive[name]
    except Exception as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(array, np.ndarray):  # NumPy returns bytes if the header of an array is missing
        raise ValueError(f"{name} is no array")
    # PyTorch takes no other byte order.
    native: NDArray[Any] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native


def have_several_labels(arrays: Arrays) -> bool:
    """Return whether the items of a file have several labels each: zeros and ones, (items, labels)."""
    shape = np.shape(arrays.get("labels", ()))
    return len(shape) == 2 and shape[1] > 1


def moments_of_all(arrays: Arrays) -> ClassMoments:
    """Return the moments of the classes of all rows, of queries and gallery together.

    An item counts once, even if its id comes several times, or among the queries and in the gallery.
    """
    ids = ids_of(arrays)
    query_ids = ids["query_ids"]
    moments = moments_of(*_first_rows(arrays["embeddings"], arrays["labels"], query_ids))
    if "gallery" not in arrays:
        return moments
    counted = () if query_ids is None else query_ids
    gallery = _first_rows(arrays["gallery"], arrays["gallery_labels"], ids.get("gallery_ids"), counted)
    return moments.merge(moments_of(*gallery))


def _first_rows(rows: Any, labels: Any, ids: Any, counted: Any = ()) -> tuple[Any, Any]:
    """Return the first row of each id that is not counted yet, with its label; without ids all rows."""
    labels = np.asarray(labels)
    if ids is None:
        return rows, labels
    is_new = _is_first(ids)
    if len(counted):
        is_new &= ~np.isin(np.asarray(ids), np.asarray(counted))
    return rows[is_new] if isinstance(rows, np.ndarray) else RowSubset(rows, is_new), labels[is_new]


def moments_of(rows: Any, labels: Any) -> ClassMoments:
    """Return the moments of the classes of rows; rows in files are read piece by piece."""
    import torch  # noqa: PLC0415 - a missing file is reported before torch is loaded

    if isinstance(rows, np.ndarray):
        return ClassMoments.of(torch.as_tensor(rows), labels)
    moments = ClassMoments.nothing(rows.shape[1])
    for span, piece in StoredRows(rows, PIECES_OF_J).chunks():
        moments = moments.merge(ClassMoments.of(piece, labels[span]))
    return moments


def report_table(report: RetrievalReport, title: str) -> Table:
    """Return the table of a report for a screen."""
    table = Table(title=as_text(title), caption=_caption(report), title_style="bold", caption_justify="left")
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right", style="bold")
    table.add_column("95 % interval", justify="right")
    table.add_column("meaning", style="dim")
    for name, value in report.metrics().items():
        interval = report.intervals.get(name)
        span = "" if interval is None or math.isnan(interval.low) else f"{interval.low:.4f} to {interval.high:.4f}"
        table.add_row(name, as_number(value), span, as_text(_meaning(name, report)))
    return table


def as_number(value: float) -> str:
    """Return a value with four digits; n/a if it is undefined."""
    return "n/a" if math.isnan(value) else f"{value:.4f}"


def class_tables(report: RetrievalReport, width: int) -> list[Table]:
    """Return tables of the means of each class for a screen of this width: as many metrics as fit in each."""
    per_class = report.per_class()
    classes = sorted({label for values in per_class.values() for label in values})
    labels = max((as_text(label).cell_len for label in (*classes, "class")), default=0)
    # A value such as 0.1234 takes six characters, and each column two more to keep it from the next.
    beside = max(1, (width - labels - 2) // max((max(len(name), 6) + 2 for name in per_class), default=8))
    names = list(per_class)
    tables = []
    for start in range(0, len(names), beside):
        metrics = names[start : start + beside]
        table = Table(title=f"means of {len(classes):,} classes", **NARROW)
        for name in ("class", *metrics):
            table.add_column(name, justify="right", no_wrap=True)
        for label in classes:
            values = (per_class[metric].get(label, math.nan) for metric in metrics)
            table.add_row(as_text(label), *("" if math.isnan(value) else f"{value:.4f}" for value in values))
        tables.append(table)
    return tables


def comparison_table(
    differences: Mapping[str, Difference],
    names: Sequence[str],
    title: str,
    caption: str,
    *,
    earlier_first: bool = False,
) -> Table:
    """Return the table that compares two evaluations, for a screen.

    Args:
        differences: Metric -> the first evaluation minus the second.
        names: The names of the first evaluation and of the second.
        title: The line above the table.
        caption: The text below it. Reasons why rows have no interval follow.
        earlier_first: Show the second evaluation, which is subtracted, left of the first.
    """
    reasons = without_interval(differences)
    table = Table(
        title=as_text(title),
        caption=as_text(f"{caption} {reasons}".rstrip()),
        caption_justify="left",
        pad_edge=False,
        **NARROW,
    )
    table.add_column("metric", overflow="fold")
    order = (1, 0) if earlier_first else (0, 1)
    for name in (*(names[side] for side in order), "difference"):
        table.add_column(as_text(name), justify="right", style="bold" if name == "difference" else "", overflow="fold")
    table.add_column("its 95 % interval", justify="right", overflow="fold")
    table.add_column("beyond\nchance", overflow="fold")
    for name, difference in differences.items():
        *values, gain, interval, beyond = difference.in_words()
        cells = (*(values[side] for side in order), gain)
        table.add_row(name, *("n/a" if "nan" in cell else cell for cell in cells), interval, beyond)
    return table


def without_interval(differences: Mapping[str, Difference]) -> str:
    """Return a sentence on the metrics without an interval, and why they have none; nothing if each has one."""
    rows: dict[str, list[str]] = {}
    for name, difference in differences.items():
        if math.isnan(difference.interval.low):
            rows.setdefault(_why_without_interval(name, difference), []).append(name)
    if not rows:
        return ""
    said = [f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} {why}" for why, names in rows.items()]
    return f"No interval: {'; '.join(said)}."


def _why_without_interval(name: str, difference: Difference) -> str:
    if math.isnan(difference.value):
        return "undefined"
    if name == DISCRIMINANT_RATIO:
        return "one value of all rows"
    if name in EPISODIC:
        return EPISODIC[name]
    pooled = requested_metric(name).metric.source in ("pairs", "classes")
    return "one value of all pairs" if pooled else "of too few queries, classes or groups"


def differences_as_dict(differences: Mapping[str, Difference]) -> dict[str, Any]:
    """Return plain values for JSON, with null for NaN."""
    return {
        name: {
            "value": None if math.isnan(difference.value) else difference.value,
            "interval": [None if math.isnan(end) else end for end in difference.interval],
            "is_beyond_chance": None if math.isnan(difference.interval.low) else difference.is_beyond_chance,
        }
        for name, difference in differences.items()
    }


def as_dict(report: RetrievalReport, options: Namespace) -> dict[str, Any]:
    """Return a report as plain values for JSON, with the means of its classes if they were requested."""
    if not options.per_class:
        return report.to_dict()
    classes = {name: {str(label): mean for label, mean in of.items()} for name, of in report.per_class().items()}
    return report.to_dict() | {"per_class": classes}


def _meaning(name: str, report: RetrievalReport) -> str:
    """Return the meaning of a metric, and the threshold at which it was measured."""
    requested = requested_metric(name)
    where = ""
    if requested.metric.source == "classes":
        wanting = report.consistency[requested.parameters["p"]].wanting(3).items()
        named = ", ".join(f"{label} {threshold:.4f} (+{gain:.3f})" for label, (threshold, gain) in wanting)
        where = f" Classes that want another threshold: {named}." if named else ""
    elif "p" in requested.parameters:
        points: dict[float, Any] = {**report.at_precision, **report.at_false_match_rate}
        where = f" Threshold {points[requested.parameters['p']].threshold:.4f}."
    return report.meaning(name) + where


def _caption(report: RetrievalReport) -> str:
    classes = f" of {report.classes:,} classes" if report.classes else ""
    return (
        f"{report.queries:,} queries{classes} against {report.gallery:,} items, {report.similarity}; "
        f"{report.queries_without_match:,} without a match, {report.queries_with_ties:,} with ties; "
        f"{report.seconds:.1f} s"
    )
