"""The journal of `--resume`. It is only valid for unchanged files and settings."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fewshot_callbacks import __version__
from fewshot_callbacks.cli.options import Columns, Evaluate, Nearest
from fewshot_callbacks.cli.stored_sets import StoredSets
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.files.journal import Journal
from fewshot_callbacks.storage.shard_files import file_stamp, list_shards

# These arrays may be larger than memory.
VECTORS = ("queries", "gallery")


def journal_of(options: Evaluate, processes: Processes, all_sets: Sequence[StoredSets]) -> Journal | None:
    """Return the journal of an evaluation of these files with these settings; None without `--resume`.

    Each process describes what it reads: files of vectors by size and modification time, since hashing takes as long as
    a pass; other arrays by their content.
    """
    if options.resume is None:
        return None
    others = {"unknown": options.unknown, "at_least": options.at_least, "dims": options.dims, "codes": options.codes}
    training = {"train": options.train, "duplicates_from": options.duplicates_from}
    settings = asdict(options.settings) | others | training
    del settings["confidence"]  # the command has no option for it
    description = _description(settings, options.columns, processes, all_sets)
    if options.judgements is not None:
        description["judgements"] = _digest_of_files([options.judgements])
    with processes.together():
        return Journal(options.resume, description, processes)


def journal_of_search(options: Nearest, processes: Processes, all_sets: Sequence[StoredSets]) -> Journal | None:
    """Return the journal of a search for neighbours; see `journal_of`."""
    if options.resume is None:
        return None
    names = ("k", "queries", "seed", "similarity", "memory_mb")
    settings = {name: getattr(options, name) for name in names}
    description = _description(settings, options.columns, processes, all_sets)
    with processes.together():
        return Journal(options.resume, description, processes)


def _description(
    settings: Mapping[str, object], columns: Columns, processes: Processes, all_sets: Sequence[StoredSets]
) -> dict[str, Any]:
    """Return everything that the result, or the division into tiles, depends on."""
    description: dict[str, Any] = {
        "files": " and ".join(str(sets.file) for sets in all_sets),
        "processes": processes.count,
        "version": __version__,
    }
    passed = columns.passed()
    for name, value in {**settings, **passed}.items():
        if value is not None:
            description[f"--{name}"] = str(value)
    for sets in all_sets:
        description[f"content of {sets.file}"] = _stamps_of(sets.paths)
    for name, column in passed.items():
        if column.lower().endswith(".npy"):
            description[f"content of --{name}"] = _digest_of_files(list_shards(column).fetched())
    for sets in all_sets:
        for name, values in sets.arrays.items():
            if name not in VECTORS:
                description[f"{sets.name_in_file(name)} in {sets.file}"] = _digest_of_array(values)
    return description


def _stamps_of(files: Sequence[Path]) -> str:
    """Return the total size, the latest time, and a digest of all sizes and times."""
    stamps = [(str(file), *file_stamp(file)) for file in files]
    size = sum(stamp[1] for stamp in stamps)
    last_written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(stamp[2] for stamp in stamps) / 1e9))
    digest = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:8]
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    return f"{count} of {size:,} bytes, last written at {last_written}, digest {digest}"


def _digest_of_files(files: Sequence[Path]) -> str:
    contents = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            contents.update(hashlib.file_digest(opened, "sha256").digest())
    return contents.hexdigest()[:16]


def _digest_of_array(values: Any) -> str:
    array = np.ascontiguousarray(values)
    content = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    # The bytes of an array of objects are memory addresses.
    content.update(json.dumps(array.tolist(), default=str).encode() if array.dtype.hasobject else array.tobytes())
    return content.hexdigest()[:16]
