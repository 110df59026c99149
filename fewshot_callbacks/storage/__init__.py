"""Embeddings that are read slice by slice: files of shards, and other arrays on disk.

An *array* of embeddings is any object with `shape`, (rows, dim); a NumPy or PyTorch `dtype`; and `[start:stop]`, which
returns these rows as an array or a tensor. NumPy arrays, tensors, memory maps, h5py and zarr data sets, and `Shards` are
arrays in this sense.
"""

from fewshot_callbacks.storage.row_subset import RowSubset
from fewshot_callbacks.storage.shards import Shards

__all__ = ["RowSubset", "Shards"]
