"""`fewshot report`: embeddings and images in, one HTML file out."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from fewshot_callbacks.cli.evaluate import (
    Arrays,
    check_same_items,
    evaluate_arrays,
    have_several_labels,
    load_arrays,
    without_repetitions,
)
from fewshot_callbacks.cli.options import in_shell
from fewshot_callbacks.files.names import paths_on_disk
from fewshot_callbacks.files.outputs import free_path, is_report, refuse_input
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.report import Items, Model, ReportSettings, check_writable, pictures_of_files, write_report
from fewshot_callbacks.report.items import find_images
from fewshot_callbacks.system.terminal import as_text, note, printable

# The name of a report without `-o`.
UNNAMED = Path("report.html")


def run(options: Namespace) -> None:
    """Evaluate, and write the report."""
    values = vars(options)
    names = [field.name for field in fields(ReportSettings) if field.name in values]
    settings = ReportSettings(**{name: values[name] for name in names})
    console = Console()
    # The evaluation may take minutes, so a mistake is reported before it.
    refuse_input(_output(options), "-o", (options.file, options.against, options.train))
    check_writable(_output(options))
    arrays = without_repetitions(load_arrays(options.file))
    if have_several_labels(arrays):
        raise ValueError(
            f"a report shows items with one label each, and the labels of {options.file} have shape "
            f"{arrays['labels'].shape}. For several labels for each item use fewshot evaluate."
        )
    queries, gallery = items_of(arrays, options.file, options.images, options.gallery_images, settings)
    train = None
    if options.train is not None:
        train, _ = items_of(
            load_arrays(options.train), options.train, options.train_images, None, settings, "training items"
        )
        _check_same_dim(arrays, train, options)
    others = None if options.against is None else without_repetitions(load_arrays(options.against))
    if others is not None:
        check_same_items(arrays, others, options)
    report = evaluate_arrays(arrays, options)
    other = None
    if others is not None:
        other_report = evaluate_arrays(others, options)
        other_queries, other_gallery = items_of(
            others, options.against, options.images, options.gallery_images, settings
        )
        other = Model(other_report, other_queries, other_gallery, options.against.stem)
    # The name is chosen again, since another program may have taken it during the evaluation.
    output = _output(options)
    written = write_report(
        output,
        report,
        queries,
        gallery,
        train=train,
        other=other,
        title=options.title,
        name=options.file.stem,
        settings=settings,
    )
    console.print(as_text(f"{_summary(report)} {written.path}, {written.size / 1e6:.1f} MB"), soft_wrap=True)
    for sentence in written.left_out:
        console.print(note(in_shell(sentence, "report")), soft_wrap=True)
    if options.output is None and output != UNNAMED:
        fact = f"{UNNAMED} holds something that this command has not written, and is left as it is."
        console.print(note(f"{fact} To replace it, pass -o {UNNAMED}."), soft_wrap=True)


def _output(options: Namespace) -> Path:
    """Return the path of `-o`, or else a name that replaces nothing but a report."""
    return free_path(UNNAMED, is_report) if options.output is None else options.output


def _summary(report: RetrievalReport) -> str:
    classes = "1 class" if report.classes == 1 else f"{report.classes:,} classes"
    return f"mAP {report.mAP:.4f} of {report.queries:,} queries, {classes}:"


def items_of(
    arrays: Arrays,
    file: Path,
    images: Path | None,
    gallery_images: Path | None,
    settings: ReportSettings,
    name: str = "queries",
) -> tuple[Items, Items | None]:
    """Return the queries of a file with their images, and its gallery; None without a gallery.

    Raises:
        ValueError: If the images are not as many as the items.
    """
    names = None
    if "label_names" in arrays:
        names = dict(enumerate(map(str, arrays["label_names"].tolist())))

    def items(start: str, key: str, folder: Path | None, side: str, name: str) -> Items:
        files = _files(arrays.get(f"{start}paths"), len(arrays[key]), file, folder, start)
        base = file.resolve().parent if folder is None else folder
        return Items(
            arrays[key],
            arrays[f"{start}labels"].tolist(),
            name,
            None if files is None else pictures_of_files(files, settings.thumbnail, settings.background),
            None if files is None else [_below(path, base) for path in files],
            names,
            arrays.get(f"{side}_ids"),
            arrays.get(f"{side}_groups"),
        )

    both = {"gallery", "gallery_labels"} <= arrays.keys()
    own = "items" if name == "queries" and "gallery" not in arrays else name
    queries = items("", "embeddings", images, "query", own)
    return queries, items("gallery_", "gallery", gallery_images, "gallery", "gallery") if both else None


def _files(paths: NDArray[Any] | None, items: int, file: Path, folder: Path | None, start: str) -> list[Path] | None:
    """Return the image file of each item; None if no files are named."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the folder that holds the images.")
    if paths is not None:
        found = _inside(file.parent if folder is None else folder, paths, file)
        where = f"'{start}paths' of {file} holds {len(found):,} files"
    elif folder is not None:
        listed = find_images(folder)
        found, skipped = listed.files, listed.describe_skipped()
        where = f"{folder} holds {len(found):,} images" + (f" ({skipped})" if skipped else "")
        if skipped:
            print(f"note: {printable(folder)}: {skipped}.", file=sys.stderr)
    else:
        return None
    if len(found) != items:
        raise ValueError(
            f"{where}, and {file} {items:,} {'gallery items' if start else 'embeddings'}. Save 'paths' with the "
            f"embeddings, the file of each in the same order."
        )
    return found


def _inside(base: Path, paths: NDArray[Any], file: Path) -> list[Path]:
    """Return the files that an .npz file names, none of them outside the folder of the images.

    A report shows what it names, and whoever wrote the .npz file may not be the one who sends the report on.

    Raises:
        ValueError: A path leads out of the folder: it is absolute, or has `..`, or a link on it does.
    """
    named = [os.fsdecode(name) if isinstance(name, bytes) else str(name) for name in paths.tolist()]
    outside = [path for path in named if not _lies_in(base, path)]
    if outside:
        raise ValueError(
            f"{file} names the image {outside[0]!r}, which does not lie in {base}. Pass the folder that holds all of "
            "them with --images, --gallery_images or --train_images."
        )
    files = [base / path for path in named]
    spelt = {
        name: there for name, there in paths_on_disk(files, base).items() if _lies_in(base, there.relative_to(base))
    }
    return [spelt.get(name, name) for name in files]


def _lies_in(base: Path, path: str | Path) -> bool:
    """Return whether a path leads to something in a folder; links on it are followed."""
    top = os.path.realpath(base)
    try:
        real = os.path.realpath(os.path.join(top, path))
        return real != top and os.path.commonpath([top, real]) == top
    except ValueError:  # a name that no file can have, or that of another drive
        return False


def _below(path: Path, base: Path) -> str:
    """Return the name of a file below the folder of the images."""
    return str(path.relative_to(base)) if path.is_relative_to(base) else path.name


def _check_same_dim(arrays: Arrays, train: Items, options: Namespace) -> None:
    dims = [np.shape(rows)[-1] for rows in (arrays["embeddings"], train.embeddings)]
    if dims[0] != dims[1]:
        raise ValueError(
            f"{options.file} holds embeddings of {dims[0]} components, {options.train} of {dims[1]}. Embed both splits with "
            "the same model."
        )
