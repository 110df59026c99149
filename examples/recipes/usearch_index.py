"""Measure what a usearch index loses.

The loss is split: how much comes from the int8 codes, and how much comes
from the graph.
"""

import numpy as np
from usearch.index import Index

from fewshot_callbacks import search_quality

generator = np.random.default_rng(0)
labels = np.arange(10_500) % 300
rows = (
    generator.standard_normal((300, 32))[labels]
    + generator.standard_normal((10_500, 32))
).astype(np.float32)
queries, gallery = rows[:500], rows[500:]


def int8_index():
    return Index(ndim=32, metric="cos", dtype="i8", expansion_search=32)


# usearch encodes queries in the same way as items.
def stored_rows(rows):
    index = int8_index()
    index.add(np.arange(len(rows)), rows)
    return np.asarray(index.get(np.arange(len(rows)))).astype(np.float32)


index = int8_index()
index.add(np.arange(len(gallery)), gallery)
matches = index.search(queries, 10)
# A query with fewer than ten matches has meaningless keys at the end.
found = np.where(
    np.arange(10) < np.asarray(matches.counts)[:, None],
    matches.keys.astype(np.int64),
    -1,
)
quality = search_quality(
    found,
    queries,
    gallery,
    query_labels=labels[:500],
    gallery_labels=labels[500:],
    stored=stored_rows(gallery),
    stored_queries=stored_rows(queries),
)
print(quality)
