"""`fewshot compare` for saved reports: a table of differences, a ranking, or the number of classes that are needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePath

from rich.console import Console

from fewshot_callbacks.cli.evaluate import Result, print_both
from fewshot_callbacks.cli.options import Compare
from fewshot_callbacks.cli.tables import ranking_table
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_file, is_folder, path_text
from fewshot_callbacks.functional.retrieval import RetrievalReport, classes_needed, rank_reports
from fewshot_callbacks.functional.retrieval.saved_reports import is_archive


def are_saved_reports(paths: Sequence[Path]) -> bool:
    """Return whether all paths are saved reports or other .npz files; False if no path is one."""
    archives = [path for path in paths if is_file(path) and is_archive(path)]
    others = [path for path in paths if path not in archives]
    if archives and others:
        other = path_text(others[0])
        if not is_file(others[0]) and not is_folder(others[0]):
            raise FileNotFoundError(f"There is no {other}. Pass a file that 'fewshot evaluate --save' has written.")
        raise InputError(
            f"{path_text(archives[0])} is a saved report or another .npz file, and {other} is neither. Compare reports with "
            "reports, and runs with runs."
        )
    return bool(archives)


def compare_saved(paths: Sequence[Path], options: Compare) -> None:
    """Print a table of differences, a ranking, or the number of classes that are needed."""
    if not options.test:
        raise InputError("--test false is for runs, but these are saved reports. Leave it out.")
    files = [path_text(path) for path in paths]
    names = options.names or names_of_files(files)
    if len(set(names)) < len(names):
        raise InputError(f"--names {' '.join(names)}: two reports have the same name. Pass different names.")
    reports = [RetrievalReport.load(path) for path in paths]
    if options.difference is not None:
        _print_classes_needed(reports, options.difference, options.metric or "mAP", as_json=options.json)
        return
    if options.metric is None and len(reports) == 2:
        first, second = (Result(report) for report in reports)
        print_both(first, second, files, names, as_json=options.json)
        return
    ranking = rank_reports(dict(zip(names, reports, strict=True)), options.metric or "mAP")
    if options.json:
        print(json.dumps(ranking.to_dict(), indent=2))
    else:
        Console().print(ranking_table(ranking))


def _print_classes_needed(reports: Sequence[RetrievalReport], difference: float, metric: str, *, as_json: bool) -> None:
    """Print how many classes a test set needs to detect a difference."""
    if len(reports) != 2:
        raise InputError(f"--difference needs two reports, but there are {len(reports)}. Pass two.")
    first, second = reports
    needed = classes_needed(first, second, difference, metric)
    print(json.dumps(needed.to_dict(), indent=2) if as_json else needed)


def names_of_files(files: Sequence[str]) -> list[str]:
    """Return file names without extensions, or the paths if names would repeat.

    Examples:
        >>> names_of_files(["runs/june.report.npz", "july.npz"]), names_of_files(["a/june.npz", "b/june.npz"])
        (['june', 'july'], ['a/june.npz', 'b/june.npz'])
    """
    names = [PurePath(file).name.removesuffix(".npz").removesuffix(".report") for file in files]
    return names if len(set(names)) == len(names) else list(files)
