"""Results in files: numbers and strings as JSON, arrays unchanged, and nothing that could be executed.

    result -> numbers and strings -> JSON -> the array `report` of an .npz file
           -> arrays                      -> its other arrays

A result is a tree of classes that its module lists, tuples, dictionaries, arrays, numbers and strings. Python writes a
finite float with enough digits to restore it. Other floats are written as their bits, because JSON cannot represent them.
The file has a checksum for each array.
"""

from __future__ import annotations

import io
import json
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_address, path_text, read_file, write_file

# Raise this with each change to the fields of a saved class, so that older versions of the package refuse the file.
FORMAT = 1
# The array with the JSON.
_ENTRY = "report"
# A zip file begins with these bytes.
_ZIP_MARK = b"PK"
# Errors that `zipfile`, `json` and the constructors of results raise for changed bytes.
_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, EOFError, OSError, RuntimeError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
)

Classes = Mapping[str, type[Any]]


def save(path: str | os.PathLike[str], result: Any, classes: Classes) -> None:
    """Write a result to a path or an address. An existing file is replaced once the new file is complete.

    Args:
        path: Path or address of the file.
        result: An instance of one of the classes.
        classes: Name -> class, for each class in the result.
    """
    write_file(path, to_bytes(result, classes))


def to_bytes(result: Any, classes: Classes) -> bytes:
    """Return the content of a file that stores the result."""
    arrays: dict[str, NDArray[Any]] = {}
    tree = {"format": FORMAT, "result": _encoded(result, arrays, classes)}
    text = np.frombuffer(json.dumps(tree, allow_nan=False).encode(), np.uint8)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **{_ENTRY: text}, **arrays)
    return content.getvalue()


def load(call: str, path: str | os.PathLike[str], kind: type[Any], classes: Classes) -> Any:
    """Return the result in a file."""
    with _opened(path) as file:
        return from_file(call, path_text(path), file, kind, classes)


def from_file(call: str, name: str, file: io.BufferedIOBase, kind: type[Any], classes: Classes) -> Any:
    """Return the result in an open file.

    `classes` has each class that the result may contain, by name.
    """
    if file.read(len(_ZIP_MARK)) != _ZIP_MARK:
        raise InputError(f"{call}: {name} is not a saved report. Pass a file that report.save has written.")
    try:
        arrays = _arrays_in(file)
        tree = json.loads(arrays.pop(_ENTRY).tobytes()) if _ENTRY in arrays else None
        if tree is not None and tree["format"] <= FORMAT:
            result = _decoded(tree["result"], arrays, classes)
    except _DAMAGE as error:
        raise InputError(
            f"{call}: {name} is damaged, or is not a saved report ({type(error).__name__}: {error}). Copy it again, or save "
            "the report again with report.save."
        ) from error
    if tree is None:
        raise InputError(
            f"{call}: {name} is an .npz archive of other arrays, not a saved report. Pass a file that report.save has "
            "written. fewshot evaluate FILE --save REPORT writes one from embeddings."
        )
    if tree["format"] > FORMAT:
        raise InputError(
            f"{call}: {name} was saved by a newer version of this package in format {tree['format']}, but this version "
            f"reads format {FORMAT}. Update fewshot_callbacks."
        )
    if not isinstance(result, kind):
        raise InputError(
            f"{call}: {name} does not contain a {kind.__name__}. Pass a file that report.save has written."
        )
    return result


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a zip file. Saved reports and all other .npz files are zip files."""
    with _opened(path) as file:
        return file.read(len(_ZIP_MARK)) == _ZIP_MARK


def is_saved(path: Path) -> bool:
    """Return whether a local file is a saved report, and not another .npz file or anything else."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return f"{_ENTRY}.npy" in archive.namelist()


def _opened(path: str | os.PathLike[str]) -> io.BufferedIOBase:
    """Return an open file for a path or an address."""
    return io.BytesIO(read_file(path)) if is_address(path) else Path(path_text(path)).open("rb")


def _arrays_in(file: io.BufferedIOBase) -> dict[str, NDArray[Any]]:
    """Return the arrays in an archive; empty if the JSON is missing, since other arrays may be large."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if f"{_ENTRY}.npy" not in names:
            return {}
        return {
            name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
            for name in names
        }


def _encoded(value: Any, arrays: dict[str, NDArray[Any]], classes: Classes) -> Any:
    """Return a value for JSON, and add its arrays to `arrays`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        name = f"array{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"tensor" if isinstance(value, Tensor) else "array": name}
    if isinstance(value, Mapping):
        entries = [[_encoded(key, arrays, classes), _encoded(entry, arrays, classes)] for key, entry in value.items()]
        return {"dict": entries}
    name = type(value).__name__
    if name in classes:
        members = _members(value).items()
        return {name: {member: _encoded(part, arrays, classes) for member, part in members}}
    if isinstance(value, tuple):
        return [_encoded(part, arrays, classes) for part in value]
    raise TypeError(f"a {name} cannot be saved. Add its class to the classes of saved results.")


def _members(value: Any) -> dict[str, Any]:
    """Return the fields of a named tuple or a dataclass."""
    if isinstance(value, tuple):
        named: Any = value
        return dict(named._asdict())
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _decoded(tree: Any, arrays: Mapping[str, NDArray[Any]], classes: Classes) -> Any:
    """Return the value that `_encoded` was given."""
    if isinstance(tree, list):
        return tuple(_decoded(part, arrays, classes) for part in tree)
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind in ("tensor", "array"):
        return torch.from_numpy(arrays[content]) if kind == "tensor" else arrays[content]
    if kind == "dict":
        return {_decoded(key, arrays, classes): _decoded(entry, arrays, classes) for key, entry in content}
    return classes[kind](**{member: _decoded(part, arrays, classes) for member, part in content.items()})
