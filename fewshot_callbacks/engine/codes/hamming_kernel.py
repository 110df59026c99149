"""Counting how often two codes differ in how many bits, compiled for the CPU."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

RUN = 1024
"""Gallery items whose distances are held at once."""

_kernel = numba.njit(nogil=True, cache=True, error_model="numpy")


@intrinsic
def _ones(_: Any, word: Any) -> Any:
    """How many bits of a word are set: one instruction on most processors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = builder.module.declare_intrinsic("llvm.ctpop", [ir.IntType(64)])
        return builder.call(count, arguments)

    return types.uint64(types.uint64), generate


@_kernel
def count_distances(queries, gallery, first, last, begin, end, excluded, excluding, counts, relevant):
    """For each query, at how many bits' distance how many candidates are.

    Args:
        queries: (queries, words) codes of 64 bits a word.
        gallery: (words, gallery): neighbours in memory are compared with the same word.
        first: (queries,) position of the first candidate in the gallery.
        last: (queries,) end of that range, exclusive.
        begin: (queries,) position of the first relevant item, between these two.
        end: (queries,) end of that range, exclusive.
        excluded: (codes, queries) codes that a candidate of each query must not have.
        excluding: (codes, gallery) codes of each gallery item, compared with these.
        counts: (queries, bits + 1) filled with the number of all candidates.
        relevant: (queries, bits + 1) filled with the number of relevant ones.
    """
    distance = np.empty(RUN, np.int32)
    words, codes = queries.shape[1], excluded.shape[0]
    for i in range(queries.shape[0]):
        for start in range(first[i], last[i], RUN):
            length = min(RUN, last[i] - start)
            for j in range(length):
                distance[j] = _ones(queries[i, 0] ^ gallery[0, start + j])
            for w in range(1, words):
                for j in range(length):
                    distance[j] += _ones(queries[i, w] ^ gallery[w, start + j])
            for k in range(codes):
                for j in range(length):
                    if excluding[k, start + j] == excluded[k, i]:
                        distance[j] = -1
            for j in range(length):
                if distance[j] >= 0:
                    counts[i, distance[j]] += 1
                    if begin[i] <= start + j < end[i]:
                        relevant[i, distance[j]] += 1
