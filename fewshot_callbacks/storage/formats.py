"""The supported file formats, by file extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fewshot_callbacks.storage.arrays import FileArrays
from fewshot_callbacks.storage.arrow import open_arrow
from fewshot_callbacks.storage.npy import open_npy
from fewshot_callbacks.storage.npz import open_npz
from fewshot_callbacks.storage.parquet import open_parquet
from fewshot_callbacks.storage.safetensors import open_safetensors

FORMATS: dict[str, Callable[[Path], FileArrays]] = {
    ".npy": open_npy,
    ".npz": open_npz,
    ".parquet": open_parquet,
    ".arrow": open_arrow,
    ".feather": open_arrow,
    ".safetensors": open_safetensors,
}
"""Extension in lower case -> function that opens a file and returns its arrays by name."""
