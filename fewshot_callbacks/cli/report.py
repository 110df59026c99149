"""`fewshot report`: embeddings and images in, one HTML file out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser
from numpy.typing import NDArray
from rich.console import Console

from fewshot_callbacks._terminal import as_text, note, printable
from fewshot_callbacks.cli._options import OneLineErrors
from fewshot_callbacks.cli.evaluate import add_settings, evaluate_arrays, load_arrays, progress_bar
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.functional.retrieval.settings import meanings_of
from fewshot_callbacks.report import (
    Items,
    Model,
    ReportSettings,
    check_writable,
    pictures_of_files,
    write_report,
)
from fewshot_callbacks.report.items import find_images

# Settings of an evaluation that a report does not have, since it shows single queries.
LEFT_OUT = ("max_queries",)
Arrays = dict[str, NDArray[Any]]


def parser() -> ArgumentParser:
    """Make the options of `fewshot report`."""
    options = OneLineErrors(
        prog="fewshot report",
        description=(
            "Write one self-contained HTML file about embeddings: metrics with intervals, an adjustable threshold, "
            "the weakest classes, the worst queries with the items retrieved for them, items that may be mislabelled, "
            "and near duplicates. It opens in any browser. The .npz file is that of 'fewshot evaluate': 'embeddings' "
            "and 'labels', and optionally 'gallery' and 'gallery_labels', ids and groups. It may also hold 'paths' "
            "and 'gallery_paths', the image "
            "files of the items, and 'label_names', the name of each label 0, 1, 2, ..."
        ),
    )
    options.add_argument("file", type=Path, help="an .npz file, as numpy.savez writes it")
    options.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the HTML file to write")
    options.add_argument("--title", type=str, default="Retrieval report", help="title of the page")
    options.add_argument(
        "--images",
        type=Path | None,
        default=None,
        metavar="FOLDER",
        help=(
            "folder of the images of the items. With 'paths' in the file, the paths are relative to this folder "
            "(by default to the folder of the file). Otherwise its images are taken in the order of torchvision's "
            "ImageFolder: folders sorted by name, files sorted in each; without folders, files sorted by name"
        ),
    )
    options.add_argument(
        "--gallery_images", type=Path | None, default=None, metavar="FOLDER", help="the same for the gallery"
    )
    options.add_argument(
        "--against",
        type=Path | None,
        default=None,
        metavar="FILE",
        help=(
            "embeddings of the same items in the same order by a second model: shows metrics and failures of "
            "both, with the intervals of the differences"
        ),
    )
    options.add_argument(
        "--train",
        type=Path | None,
        default=None,
        metavar="FILE",
        help=(
            "embeddings of another split by the same model, such as the training set: finds near duplicates "
            "between the splits"
        ),
    )
    options.add_argument(
        "--train_images", type=Path | None, default=None, metavar="FOLDER", help="the same as --images for that split"
    )
    meanings = meanings_of(ReportSettings)
    for field in fields(ReportSettings):
        if field.name != "memory_mb":  # one for evaluation and searches
            kind = float if field.name in ("max_mb", "duplicates_from") else int
            options.add_argument(f"--{field.name}", type=kind, default=field.default, help=meanings.get(field.name, ""))
    add_settings(options, LEFT_OUT)
    return options


def run(arguments: Sequence[str]) -> None:
    """Evaluate, and write the report."""
    options = parser().parse_args(list(arguments))
    settings = ReportSettings(
        **{field.name: options[field.name] for field in fields(ReportSettings) if field.name in options}
    )
    console, errors = Console(), Console(stderr=True)
    check_writable(options.output)
    arrays = load_arrays(options.file)
    queries, gallery = items_of(arrays, options.file, options.images, options.gallery_images, settings)
    train = None
    if options.train is not None:
        train, _ = items_of(
            load_arrays(options.train), options.train, options.train_images, None, settings, "training items"
        )
        _check_same_dim(arrays, train, options)
    others = None if options.against is None else load_arrays(options.against)
    if others is not None:
        _check_same_items(arrays, others, options)
    with progress_bar(errors, hidden=not sys.stderr.isatty()) as progress:
        report = evaluate_arrays(arrays, options, progress)
    other = None
    if others is not None:
        with progress_bar(errors, hidden=not sys.stderr.isatty()) as progress:
            of_other = evaluate_arrays(others, options, progress)
        same, same_gallery = items_of(others, options.against, options.images, options.gallery_images, settings)
        other = Model(of_other, same, same_gallery, options.against.stem)
    written = write_report(
        options.output,
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
        console.print(note(sentence), soft_wrap=True)


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
    """Put the items of a file together with their images.

    Raises:
        ValueError: If the images are not as many as the items.
    """
    names = None
    if "label_names" in arrays:
        names = dict(enumerate(map(str, arrays["label_names"].tolist())))
    sets: list[Items | None] = []
    for start, key, labels, folder in (
        ("", "embeddings", "labels", images),
        ("gallery_", "gallery", "gallery_labels", gallery_images),
    ):
        if key not in arrays or labels not in arrays:
            sets.append(None)
            continue
        files = _files(arrays.get(f"{start}paths"), len(arrays[key]), file, folder, start)
        base = file.resolve().parent if folder is None else folder
        sets.append(
            Items(
                arrays[key],
                arrays[labels].tolist(),
                "gallery" if start else (name if "gallery" in arrays or name != "queries" else "items"),
                None if files is None else pictures_of_files(files, settings.thumbnail),
                None if files is None else [_below(path, base) for path in files],
                names,
                arrays.get("gallery_ids" if start else "query_ids"),
                arrays.get("gallery_groups" if start else "query_groups"),
            )
        )
    assert sets[0] is not None
    return sets[0], sets[1]


def _files(paths: NDArray[Any] | None, items: int, file: Path, folder: Path | None, start: str) -> list[Path] | None:
    """Return the image file of each item; None where nothing is known of them."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the folder that holds the images.")
    if paths is not None:
        found = _inside(file.parent if folder is None else folder, paths, file)
        where = f"'{start}paths' of {file} holds {len(found):,} files"
    elif folder is not None:
        listed = find_images(folder)
        found, skipped = listed.files, listed.what_was_skipped()
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
    """Find the files that an .npz file names, none of them outside the folder of the images.

    A report shows what it names, and whoever wrote the .npz file may not be the one who sends the report on.

    Raises:
        ValueError: A path leads out of the folder: it is absolute, or has `..`, or a link on it does.
    """
    top, found = os.path.realpath(base), []
    for name in paths.tolist():
        path = os.fsdecode(name) if isinstance(name, bytes) else str(name)
        try:
            real = os.path.realpath(os.path.join(top, path))
            inside = real != top and os.path.commonpath([top, real]) == top
        except ValueError:  # a name that no file can have, or that of another drive
            inside = False
        if not inside:
            raise ValueError(
                f"{file} names the image {path!r}, which does not lie in {base}. Pass the folder that holds all of "
                "them with --images, --gallery_images or --train_images."
            )
        found.append(base / path)
    return found


def _below(path: Path, base: Path) -> str:
    """Name a file from the folder of the images on."""
    return str(path.relative_to(base)) if path.is_relative_to(base) else path.name


def _check_same_items(arrays: Arrays, others: Arrays, options: Any) -> None:
    for name in ("labels", "gallery_labels"):
        one, other = (each.get(name) for each in (arrays, others))
        if (one is None) != (other is None) or (
            one is not None and other is not None and not np.array_equal(one, other)
        ):
            raise ValueError(
                f"{options.file} holds {0 if one is None else len(one):,} {name}, {options.against} "
                f"{0 if other is None else len(other):,}, and they are not the same in the same order. Embed the same items "
                "with both models."
            )


def _check_same_dim(arrays: Arrays, train: Items, options: Any) -> None:
    dims = [np.shape(rows)[-1] for rows in (arrays["embeddings"], train.embeddings)]
    if dims[0] != dims[1]:
        raise ValueError(
            f"{options.file} holds embeddings of {dims[0]} components, {options.train} of {dims[1]}. Embed both splits with "
            "the same model."
        )
