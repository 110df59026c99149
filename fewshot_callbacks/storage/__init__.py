"""Rows of embeddings that stay where they are: files of shards, and arrays that are read by slices.

An *array* of embeddings is whatever has three members: `shape`, which is (rows, dim); `dtype`, of NumPy or PyTorch; and
`[start:stop]`, which reads these rows as an array or a tensor. Arrays, tensors, memory maps, and data sets of h5py and zarr
are arrays as they are, and so are `Shards`.
"""

from fewshot_callbacks.storage.row_subset import RowSubset
from fewshot_callbacks.storage.shards import Shards

__all__ = ["RowSubset", "Shards"]
