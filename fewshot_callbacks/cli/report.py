"""`fewshot report`: writes one HTML file about embeddings and their images."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from fewshot_callbacks.cli.evaluate import check_same_items, evaluate_sets, inputs_of
from fewshot_callbacks.cli.options import Report, in_shell
from fewshot_callbacks.cli.stored_sets import StoredSets, first_of_each_id, load_one_set, load_sets
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import paths_on_disk
from fewshot_callbacks.files.outputs import free_path, is_report, refuse_input
from fewshot_callbacks.functional.retrieval import RetrievalReport, evaluate_retrieval
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings, from_keywords
from fewshot_callbacks.report import Model, ReportItems, ReportSettings, check_writable, pictures_of_files, write_report
from fewshot_callbacks.report.items import find_images
from fewshot_callbacks.system.terminal import as_text, note, printable
from fewshot_callbacks.system.words import counted

UNNAMED = Path("report.html")


def run(options: Report) -> None:
    """Evaluate, and write the report."""
    report_settings = ReportSettings(**asdict(options.report))
    # The evaluation may take minutes, so a mistake is reported before it.
    refuse_input(_output(options.output), "-o", (options.file, options.against, options.train))
    check_writable(_output(options.output))
    sets = first_of_each_id(load_sets(options.file, slices=options.slices or ()))
    _refuse_several_labels(sets)
    queries, gallery = _items_of_both(sets, options)
    train = None if options.train is None else _training_items(sets, options.train, options)
    other_sets = None if options.against is None else first_of_each_id(load_sets(options.against))
    if other_sets is not None:
        check_same_items(sets, other_sets)
    settings = from_keywords(evaluate_retrieval, asdict(options.settings))
    report = evaluate_sets(*inputs_of(sets), settings)
    other = None if other_sets is None else _model(other_sets, options, settings)
    # Another program may have taken the name during the evaluation.
    output = _output(options.output)
    written = write_report(
        output,
        report,
        queries,
        gallery,
        train=train,
        other=other,
        title=options.title,
        name=options.file.stem,
        settings=report_settings,
    )
    console = Console()
    console.print(as_text(f"{_summary(report)} {written.path}, {written.size / 1e6:.1f} MB"), soft_wrap=True)
    if written.leakage is not None:
        console.print(as_text(written.leakage.in_words()), soft_wrap=True)
    for sentence in written.omissions:
        console.print(note(in_shell(sentence, "report")), soft_wrap=True)
    if options.output is None and output != UNNAMED:
        fact = f"{UNNAMED} exists and was not written by this command, so it was not replaced."
        console.print(note(f"{fact} To replace it, pass -o {UNNAMED}."), soft_wrap=True)


def _refuse_several_labels(sets: StoredSets) -> None:
    if sets.have_several_labels():
        raise InputError(
            f"a report needs one label per item, but the labels of {sets.file} have shape "
            f"{sets.arrays['query_labels'].shape}. Use fewshot evaluate for several labels per item."
        )


def _output(path: Path | None) -> Path:
    """Return the path of `-o`, or a name that is free or has an earlier report."""
    return free_path(UNNAMED, is_report) if path is None else path


def _summary(report: RetrievalReport) -> str:
    classes = "1 class" if report.classes == 1 else f"{report.classes:,} classes"
    return f"{counted(report.queries, 'query')}, {classes}, mAP {report.mAP:.4f}:"


def _model(sets: StoredSets, options: Report, settings: RetrievalSettings) -> Model:
    """Return the evaluation and the embeddings of the model of `--against`."""
    queries, gallery = _items_of_both(sets, options)
    return Model(evaluate_sets(*inputs_of(sets), settings), queries, gallery, sets.file.stem)


def _items_of_both(sets: StoredSets, options: Report) -> tuple[ReportItems, ReportItems | None]:
    """Return the queries of a file with their images, and its gallery; None without a gallery."""
    if sets.gallery is None:
        return _items(sets, "query", "items", options.images, options), None
    queries = _items(sets, "query", "queries", options.images, options)
    return queries, _items(sets, "gallery", "gallery", options.gallery_images, options)


def _training_items(sets: StoredSets, file: Path, options: Report) -> ReportItems:
    """Return the items of `--train`."""
    train = load_one_set(file)
    dim = np.shape(sets.queries)[-1]
    train_dim = np.shape(train.queries)[-1]
    if dim != train_dim:
        raise InputError(
            f"{options.file} has embeddings with {dim} components, but {file} has embeddings with {train_dim}. Embed both "
            "splits with the same model."
        )
    return _items(train, "query", "training items", options.train_images, options)


def _items(sets: StoredSets, side: str, name: str, images: Path | None, options: Report) -> ReportItems:
    """Return the items of one set with their images.

    `side` is "query" or "gallery". `images` is None for the folder of the file.
    """
    embeddings = sets.gallery if side == "gallery" else sets.queries
    files = _files(sets, side, len(embeddings), images)
    refuse_input(_output(options.output), "-o", files or ())
    base = sets.file.resolve().parent if images is None else images
    label_names = None
    if sets.label_names is not None:
        label_names = dict(enumerate(map(str, sets.label_names.tolist())))
    return ReportItems(
        embeddings,
        sets.arrays[f"{side}_labels"].tolist(),
        name,
        None if files is None else pictures_of_files(files, options.report.thumbnail, options.report.background),
        None if files is None else [_below(path, base) for path in files],
        label_names,
        sets.get(f"{side}_ids"),
        sets.get(f"{side}_groups"),
    )


def _files(sets: StoredSets, side: str, items: int, folder: Path | None) -> list[Path] | None:
    """Return the image file of each item of a side ("query" or "gallery"); None if there are no images.

    `items` is the number of items of the side. `folder` is None for the folder of the file.
    """
    if folder is not None and not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Pass the folder that contains the images.")
    name = f"{side}_paths"
    paths = sets.get(name)
    if paths is not None:
        files = _inside(sets.file.parent if folder is None else folder, paths, sets.file)
        found = f"{sets.name_in_file(name)!r} in {sets.file} lists {len(files):,} files"
    elif folder is not None:
        images = find_images(folder)
        files = images.files
        skipped = images.describe_skipped()
        found = f"{folder} contains {len(files):,} images" + (f" ({skipped})" if skipped else "")
        if skipped:
            print(f"note: {printable(folder)}: {skipped}.", file=sys.stderr)
    else:
        return None
    if len(files) != items:
        kind = "gallery items" if side == "gallery" else "embeddings"
        raise InputError(
            f"{found}, but {sets.file} contains {items:,} {kind}. Save {sets.name_in_file(name)!r} with the embeddings: the "
            "image file of each item, in the same order."
        )
    return files


def _inside(base: Path, paths: NDArray[Any], file: Path) -> list[Path]:
    """Return the image files that an .npz file lists. All are inside the folder of the images.

    The .npz file may be from another author, and could list private files.
    """
    names = [os.fsdecode(name) if isinstance(name, bytes) else str(name) for name in paths.tolist()]
    for name in names:
        if not _lies_in(base, name):
            raise InputError(
                f"{file} lists the image {name!r}, which is outside of {base}. Pass the folder that contains all images "
                "with --images, --gallery_images or --train_images."
            )
    files = [base / name for name in names]
    # The disk may spell a name differently, and this spelling may be a link.
    on_disk = {
        path: spelling
        for path, spelling in paths_on_disk(files, base).items()
        if _lies_in(base, spelling.relative_to(base))
    }
    return [on_disk.get(path, path) for path in files]


def _lies_in(base: Path, path: str | Path) -> bool:
    """Return whether a path is inside a folder after following its links."""
    folder = os.path.realpath(base)
    try:
        target = os.path.realpath(os.path.join(folder, path))
        return target != folder and os.path.commonpath([folder, target]) == folder
    except ValueError:  # an invalid name, or another drive
        return False


def _below(path: Path, base: Path) -> str:
    """Return the path of a file relative to the folder of the images."""
    return str(path.relative_to(base)) if path.is_relative_to(base) else path.name
