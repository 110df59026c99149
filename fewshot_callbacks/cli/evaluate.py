"""`fewshot evaluate`: retrieval metrics of stored embeddings."""

from __future__ import annotations

import glob
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fewshot_callbacks.cli.options import Columns, Evaluate, in_shell
from fewshot_callbacks.cli.processes import joined_processes, part_of_process
from fewshot_callbacks.cli.progress import progress_bar
from fewshot_callbacks.cli.resume import journal_of
from fewshot_callbacks.cli.stored_sets import StoredSets, are_first, read_sets, take_where
from fewshot_callbacks.cli.tables import (
    DISCRIMINANT_RATIO,
    as_number,
    class_tables,
    comparison_table,
    compression_tables,
    report_table,
    slice_gains_table,
    slices_table,
)
from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_address, path_text
from fewshot_callbacks.files.journal import journaling
from fewshot_callbacks.files.outputs import refuse_input
from fewshot_callbacks.files.remote_cache import local_copy
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments
from fewshot_callbacks.functional.dynamics import without_nan
from fewshot_callbacks.functional.items import EVERYTHING
from fewshot_callbacks.functional.leaks import Leakage, copy_score, leakage
from fewshot_callbacks.functional.retrieval import (
    CompressionReport,
    Relevance,
    RetrievalReport,
    Share,
    compare_reports,
    evaluate_retrieval,
)
from fewshot_callbacks.functional.retrieval.compression import Compression, costs_beside, headline_metrics
from fewshot_callbacks.functional.retrieval.gate import Requirement, read_requirement
from fewshot_callbacks.functional.retrieval.saved_reports import is_saved
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings, from_keywords, request_of, several
from fewshot_callbacks.functional.retrieval.slice_gains import compare_all_slices
from fewshot_callbacks.functional.statistics import UNKNOWN, Difference
from fewshot_callbacks.settings import ReportDefaults
from fewshot_callbacks.storage.stored_rows import StoredRows
from fewshot_callbacks.system.terminal import as_text, note, printable

FAILED = 3
# Bytes. J of files is summed over pieces of a third of this size.
PIECES_OF_J = 2.0**28
COMPARED = "Differences are per query. The intervals allow for dependence between queries of the same class."


def run(options: Evaluate) -> int:
    """Evaluate and print, and return the exit status: `FAILED` if a requirement is not met, else 0."""
    _check_options(options)
    keys = several(options.settings.metrics)
    wants_j = DISCRIMINANT_RATIO in keys
    options = replace(options, settings=replace(options.settings, metrics=metrics_of_retrieval(keys)))
    settings = from_keywords(evaluate_retrieval, asdict(options.settings))
    compression = compression_of(options.dims or (), options.codes or (), settings)
    requirements = _requirements_of(options, settings)
    processes = joined_processes()
    with processes.together():
        saved = _saved_report(options)
        all_sets = _read_files(options, processes, has_saved=saved is not None)
        train = _read_train(options, all_sets[0], processes)
        for sets in all_sets:
            compression.refuse_wide(sets.queries.shape[1])
        if wants_j:
            for sets in all_sets:
                check_labels_for_j(sets)
        if len(all_sets) > 1:
            check_same_items(*all_sets, kind="labels" if options.judgements is None else "ids", processes=processes)
        relevances = [judged_relevance(sets, options, processes) for sets in all_sets]
    journal = journal_of(options, processes, all_sets if train is None else [*all_sets, train])
    if journal is not None and journal.goes_on and processes.rank == 0:
        print(f"Resuming the evaluation from the state in {printable(options.resume)}.", file=sys.stderr)
    has_bar = not options.json
    # The state is removed after everything is printed.
    with journaling(journal):
        inputs = [inputs_of(sets, relevance, processes) for sets, relevance in zip(all_sets, relevances, strict=True)]
        reports = [evaluate_sets(*inputs_of_file, settings, has_bar=has_bar) for inputs_of_file in inputs]
        compressed = None
        if not compression.are_none:
            compressed = compress_sets(*inputs[0], reports[0], compression, settings, has_bar=has_bar)
        leaks = None
        if train is not None:
            leaks = _leakage_of(reports[0], all_sets[0], train, options, processes)
        if processes.rank > 0:  # the first process prints
            return 0
        results = [
            Result(report, moments_of_all(sets) if wants_j else None, compressed, leaks)
            for sets, report in zip(all_sets, reports, strict=True)
        ]
        if saved is not None:
            results.append(Result(saved))
        try:
            if options.save is not None:
                results[0].report.save(options.save)
        finally:  # a full disk must not hide the result of a long evaluation
            print_results(results, options)
        return print_failures(requirements, *(result.report for result in results))


def _check_options(options: Evaluate) -> None:
    """Refuse options that conflict."""
    if options.per_class and options.against is not None and not options.json:
        raise InputError(
            "--per_class together with --against is only available as JSON. Add --json, or leave out --per_class."
        )
    for name, value in (("at_least", options.at_least), ("unknown", options.unknown)):
        if value is not None and options.judgements is None:
            raise InputError(f"--{name} only applies to judgements. Pass --judgements FILE, or leave out --{name}.")
    if options.against is not None and (options.dims or options.codes):
        raise InputError("--dims and --codes compare forms of the embeddings of one file. Leave out --against.")
    if options.duplicates_from is not None and options.train is None:
        raise InputError(
            "--duplicates_from only applies to --train. Pass --train FILE, or leave out --duplicates_from."
        )
    if options.duplicates_from is not None and not 0 <= options.duplicates_from <= 1:
        raise InputError(
            f"--duplicates_from {options.duplicates_from:g} must be from 0 to 1. Pass a cosine such as 0.98."
        )
    if options.train is not None and options.against is not None:
        raise InputError("--train only works with the queries of one file. Leave out --against.")
    if options.save is not None:
        refuse_input(options.save, "--save", (options.file, options.judgements, options.against, options.train))


def _saved_report(options: Evaluate) -> RetrievalReport | None:
    """Return the report that `--against` names; None if it names embeddings, or nothing."""
    if options.against is None:
        return None
    # Other addresses are not fetched here, since they may name many files, or a large file of another kind.
    is_one_archive = options.against.suffix.lower() == ".npz" and not glob.has_magic(str(options.against))
    if is_one_archive or not is_address(options.against):
        file = local_copy(options.against)
        if file.is_file() and is_saved(file):
            return RetrievalReport.load(file)
    if options.save is not None:
        raise InputError(
            "--save writes one report, but --against with embeddings produces two. Save the report of each file in its own "
            "call, and pass --against a saved report."
        )
    return None


def _read_files(options: Evaluate, processes: Processes, *, has_saved: bool) -> list[StoredSets]:
    """Return the sets of the file, and of `--against` unless it is a saved report. *Collective*."""
    files = [options.file]
    if options.against is not None and not has_saved:
        files.append(options.against)
    needed = ("labels",) if options.judgements is None else ()
    # The other file has the same queries, so the slices are read once.
    slices: list[Sequence[str]] = [options.slices or (), ()]
    all_sets = [
        read_sets(file, options.columns, needed, names, processes) for file, names in zip(files, slices, strict=False)
    ]
    if options.per_class and (options.judgements is not None or all_sets[0].have_several_labels()):
        raise InputError(
            "--per_class needs one label per item. Leave it out with judgements or with several labels per item."
        )
    return all_sets


def _read_train(options: Evaluate, sets: StoredSets, processes: Processes) -> StoredSets | None:
    """Return the training items; None without `--train`. *Collective*."""
    if options.train is None:
        return None
    columns = Columns(embeddings=options.columns.embeddings, ids=options.columns.ids)
    train = read_sets(options.train, columns, (), processes=processes)
    if train.gallery is not None:
        raise InputError(
            f"{path_text(options.train)} contains queries and a gallery, but --train needs one set. Write it with "
            "numpy.savez(path, embeddings=...)."
        )
    dim, train_dim = (np.shape(file.queries)[-1] for file in (sets, train))
    if dim != train_dim:
        raise InputError(
            f"{path_text(options.file)} has embeddings with {dim} components, but {path_text(options.train)} has embeddings "
            f"with {train_dim}. Embed both splits with the same model."
        )
    return train


def _leakage_of(
    report: RetrievalReport, sets: StoredSets, train: StoredSets, options: Evaluate, processes: Processes
) -> Leakage:
    """Return which queries of a file have a copy in training, and the metrics without them. *Collective*."""
    queries = sets.rows_of_process("queries", processes)
    lowest = ReportDefaults.duplicates_from if options.duplicates_from is None else options.duplicates_from
    return leakage(
        report,
        queries,
        train.rows_of_process("queries", processes),
        query_ids=sets.rows_of_process("query_ids", processes),
        train_ids=train.rows_of_process("query_ids", processes),
        min_score=copy_score(lowest, report, queries.shape[1]),
        memory_mb=options.settings.memory_mb,
        share=Share(processes),
    )


@dataclass(frozen=True)
class Result:
    """The results for one file.

    Args:
        moments: The moments of the classes, for J; None unless J was requested.
        leakage: The queries that have a copy in training; None without `--train`.
    """

    report: RetrievalReport
    moments: ClassMoments | None = None
    compression: CompressionReport | None = None
    leakage: Leakage | None = None

    @property
    def j(self) -> float | None:
        """J of all rows; NaN if it is undefined, None if it was not requested."""
        return None if self.moments is None else float(self.moments.discriminant_ratio())

    def to_dict(self, *, per_class: bool) -> dict[str, Any]:
        """Return plain values for JSON; `per_class` adds the means of classes."""
        values = self.report.to_dict()
        if per_class:
            classes = self.report.per_class().items()
            values["per_class"] = {name: {str(label): mean for label, mean in of.items()} for name, of in classes}
        if self.moments is not None:
            values |= without_nan({DISCRIMINANT_RATIO: self.j})
        if self.compression is not None:
            values["compression"] = self.compression.to_dict()
        if self.leakage is not None:
            values["leakage"] = self.leakage.to_dict()
        return values


def print_results(results: Sequence[Result], options: Evaluate) -> None:
    """Print the result of a file, or its comparison with `--against`."""
    if options.against is None:
        print_result(results[0], options)
        return
    files = [path_text(options.file), path_text(options.against)]
    print_both(results[0], results[1], files, as_json=options.json, per_class=options.per_class)


def print_result(result: Result, options: Evaluate) -> None:
    """Print the result of a file, as JSON or as tables."""
    if options.json:
        print(json.dumps(result.to_dict(per_class=options.per_class), indent=2))
        return
    console = Console()
    report = result.report
    table = report_table(report, title=path_text(options.file))
    if result.moments is not None and result.j is not None:
        rows = int(result.moments.counts.sum())
        meaning = f"Scatter between classes divided by scatter within classes, over all {rows:,} rows."
        if math.isnan(result.j):
            meaning += " It is undefined if no class has two rows, or all rows are equal."
        empty = [""] * (len(table.columns) - 3)
        table.add_row(DISCRIMINANT_RATIO, as_number(result.j), *empty, meaning)
    console.print(table)
    if options.per_class:
        for classes in class_tables(report, console.width):
            console.print(classes)
    if report.sliced_metrics():
        for attribute in report.slices:
            console.print(slices_table(report.of_slices(attribute)))
    messages = list(report.messages)
    if result.compression is not None:
        for compressed in compression_tables(result.compression):
            console.print(compressed)
        messages += result.compression.notes
    if result.leakage is not None:
        console.print(as_text(result.leakage.in_words()), soft_wrap=True)
    for message in messages:
        console.print(note(in_shell(message, "evaluate")))


def print_both(
    first: Result,
    second: Result,
    files: Sequence[str],
    names: Sequence[str] = ("first", "second"),
    *,
    as_json: bool,
    per_class: bool = False,
) -> None:
    """Print the comparison of two files, as JSON or as a table.

    `files` are for the title and for notes, and `names` for the columns of the table. `per_class` adds the means of classes
    to the JSON.
    """
    differences = compare_reports(first.report, second.report)
    if first.j is not None and second.j is not None:
        # J has no interval, so its difference has none either.
        differences[DISCRIMINANT_RATIO] = Difference(first.j, second.j, UNKNOWN)
    slice_gains = compare_all_slices(first.report, second.report)
    if as_json:
        both = {"first": first.to_dict(per_class=per_class), "second": second.to_dict(per_class=per_class)}
        both["differences"] = differences_as_dict(differences)
        both["slice_gains"] = {gains.attribute: gains.to_dict() for gains in slice_gains}
        print(json.dumps(both, indent=2))
        return
    console = Console()
    title = " against ".join(files)
    caption = f"difference: {names[0]} minus {names[1]}. {COMPARED}"
    users_metrics = first.report.users_metrics
    console.print(comparison_table(differences, names, title, caption, users_metrics=users_metrics))
    for gains in slice_gains:
        console.print(slice_gains_table(gains))
    for file, result in zip(files, (first, second), strict=True):
        for message in result.report.messages:
            console.print(note(f"{file}: {in_shell(message, 'evaluate')}"))


def _requirements_of(options: Evaluate, settings: RetrievalSettings) -> list[Requirement]:
    """Return the requirements."""
    metrics = {requested.key: requested for requested in request_of(settings).reported}
    requirements = [read_requirement("evaluate_retrieval", text) for text in options.require or ()]
    for requirement in requirements:
        has_other = options.against is not None
        requirement.refuse_missing("evaluate_retrieval", metrics, options.slices or (), has_other=has_other)
    return requirements


def print_failures(
    requirements: Sequence[Requirement], report: RetrievalReport, against: RetrievalReport | None = None
) -> int:
    """Print one line for each requirement that a report fails, and return the exit status."""
    failures = [requirement.failure(report, against if requirement.is_gain else None) for requirement in requirements]
    lines = [failure for failure in failures if failure is not None]
    for line in lines:
        print(f"fewshot evaluate: {printable(line)}", file=sys.stderr)
    return FAILED if lines else 0


def metrics_of_retrieval(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of `--metrics` without J."""
    others = tuple(key for key in keys if key != DISCRIMINANT_RATIO)
    if not others:
        raise InputError("--metrics J needs a retrieval metric, too. Write --metrics mAP J.")
    return others


def check_labels_for_j(sets: StoredSets) -> None:
    """Raise an error unless each row has one label, which J needs."""
    missing = sets.missing("labels")
    if missing:
        fact = f"the file has no {' and no '.join(map(repr, missing))}"
    elif sets.have_several_labels():
        fact = f"{sets.name_in_file('query_labels')!r} has several per row"
    else:
        return
    raise InputError(f"J needs one label per row, but {fact}. Leave {DISCRIMINANT_RATIO} out of --metrics.")


def check_same_items(
    sets: StoredSets, others: StoredSets, *, kind: str = "labels", processes: Processes = ALONE
) -> None:
    """Raise an error if two files have different items. *Collective*.

    `kind` is "labels" or "ids".
    """
    for name in (f"query_{kind}", f"gallery_{kind}"):
        first = sets.column_of_all(name, processes)
        second = others.column_of_all(name, processes)
        if not np.array_equal(first, second):
            raise InputError(
                f"{sets.file} has {len(first):,} {sets.name_in_file(name)} and {others.file} has {len(second):,}, and they "
                "differ or have another order. Embed the same items in the same order with both models."
            )


def inputs_of(
    sets: StoredSets, relevance: Relevance | None = None, processes: Processes = ALONE
) -> tuple[Any, dict[str, Any]]:
    """Return this process's queries, and its other arguments of `evaluate_retrieval` without the settings."""
    arguments: dict[str, Any] = {name: sets.get(name) for name in ("gallery", "query_groups", "gallery_groups")}
    arguments["slices"] = sets.slices
    if relevance is None:
        names = ("query_labels", "gallery_labels", "query_ids", "gallery_ids")
        arguments |= {name: sets.get(name) for name in names}
    else:
        arguments["relevance"] = relevance
    if sets.is_part:
        return sets.queries, arguments | {"share": Share(processes)}
    if processes.count > 1:
        return part_of_process(sets.queries, arguments, processes)
    return sets.queries, arguments


def evaluate_sets(
    queries: Any, arguments: dict[str, Any], settings: RetrievalSettings, *, has_bar: bool = True
) -> RetrievalReport:
    """Return the report of the inputs of a file, and show a progress bar."""
    with progress_bar(is_wanted=has_bar) as progress:
        return evaluate_retrieval(queries, **arguments, progress=progress, **settings.arguments())


def compression_of(words: Sequence[str], codes: Sequence[str], settings: RetrievalSettings) -> Compression:
    """Return the compressed forms for the words of `--dims` and `--codes`."""
    # `Compression.checked` reports words that are not numbers.
    dims = [int(word) if word.isdecimal() else word for word in words]
    compression = Compression.checked("compression_costs", dims, codes, settings)
    compression.refuse_threshold(headline_metrics(request_of(settings).reported), settings)
    return compression


def compress_sets(
    queries: Any,
    arguments: dict[str, Any],
    report: RetrievalReport,
    compression: Compression,
    settings: RetrievalSettings,
    *,
    has_bar: bool,
) -> CompressionReport:
    """Return what compressed forms of the inputs of a file lose, and show a progress bar. *Collective*."""
    with progress_bar(is_wanted=has_bar) as progress:
        return costs_beside(
            report,
            compression,
            queries,
            {name: values for name, values in arguments.items() if name not in ("share", "slices")},
            settings=settings,
            metrics=headline_metrics(request_of(settings).reported),
            share=arguments.get("share", EVERYTHING),
            progress=progress,
        )


def judged_relevance(sets: StoredSets, options: Evaluate, processes: Processes = ALONE) -> Relevance | None:
    """Return the relevance judgements for the queries of all processes; None without `--judgements`. *Collective*."""
    judgements = options.judgements
    if judgements is None:
        return None
    if not judgements.is_file():
        raise InputError(
            f"{judgements} does not exist, or is not a file. Pass --judgements a file with the columns of TREC or BEIR."
        )
    missing = sets.missing("ids")
    if missing:
        form = "embeddings=..., ids=..."
        if sets.has_names_of_two:
            form = "queries=..., query_ids=..., gallery=..., gallery_ids=..."
        raise InputError(
            f"judgements refer to items by id, but the file has no {' and no '.join(map(repr, missing))}. Save them with "
            f"numpy.savez(path, {form})."
        )
    ids = [sets.column_of_all("query_ids", processes).tolist()]
    if sets.gallery is not None:
        ids.append(sets.column_of_all("gallery_ids", processes).tolist())
    at_least = 1.0 if options.at_least is None else options.at_least
    return Relevance.from_judgements(judgements, *ids, unknown=options.unknown or "error", at_least=at_least)


def moments_of_all(sets: StoredSets) -> ClassMoments:
    """Return the moments of the classes, over the rows of queries and gallery together.

    An item counts once by its id. One process reads all rows, because the last digits of a sum depend on the order of
    its terms.
    """
    if sets.whole is not None:
        sets = sets.whole()
    query_ids = sets.get("query_ids")
    moments = moments_of(*_first_rows(sets.queries, sets.get("query_labels"), query_ids))
    if sets.gallery is None:
        return moments
    counted = () if query_ids is None else query_ids
    gallery = _first_rows(sets.gallery, sets.get("gallery_labels"), sets.get("gallery_ids"), counted)
    return moments.merge(moments_of(*gallery))


def _first_rows(rows: Any, labels: Any, ids: Any, counted: Any = ()) -> tuple[Any, Any]:
    """Return the first row of each id that is not in `counted`, with its label; all rows if there are no ids."""
    labels = np.asarray(labels)
    if ids is None:
        return rows, labels
    is_new = are_first(ids)
    if len(counted):
        is_new &= ~np.isin(np.asarray(ids), np.asarray(counted))
    return take_where(rows, is_new), labels[is_new]


def moments_of(rows: Any, labels: Any) -> ClassMoments:
    """Return the moments of the classes of rows. Rows in files are read piece by piece."""
    if isinstance(rows, np.ndarray):
        return ClassMoments.of(torch.as_tensor(rows), labels)
    moments = ClassMoments.nothing(rows.shape[1])
    for span, piece in StoredRows(rows, PIECES_OF_J).chunks():
        moments = moments.merge(ClassMoments.of(piece, labels[span]))
    return moments


def differences_as_dict(differences: Mapping[str, Difference]) -> dict[str, Any]:
    """Return plain values for JSON, with null for NaN."""
    return {name: difference.to_dict() for name, difference in differences.items()}
