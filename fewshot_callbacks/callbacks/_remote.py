"""Files in the folder of a run that is in a bucket or another remote store, as Lightning names it: s3://bucket/run."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from fewshot_callbacks.trainer.lightning import get_filesystem


def is_remote(folder: str) -> bool:
    """Return whether a folder is named by an address, such as s3://bucket/run.

    Examples:
        >>> is_remote("s3://bucket/run"), is_remote("runs/version_0")
        (True, False)
    """
    return "://" in folder


def upload(file: Path, address: str, is_replaceable: Callable[[Path], bool]) -> None:
    """Copy a file to an address, unless a file is there that is not to be replaced.

    Args:
        file: The file.
        address: Where it is copied to.
        is_replaceable: Returns whether a copy of the file at the address may be replaced.

    Raises:
        FileExistsError: If it may not be.
    """
    files = get_filesystem(address)
    if files.exists(address):
        with TemporaryDirectory() as folder:
            present = Path(folder) / file.name
            files.get(address, str(present))
            if not is_replaceable(present):
                raise FileExistsError(f"{address} is a file that this package has not written in this run")
    files.makedirs(posixpath.dirname(address), exist_ok=True)
    files.put(str(file), address)
