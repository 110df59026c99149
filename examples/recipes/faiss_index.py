"""Measure what a faiss index loses.

The loss is split: how much comes from the codes, and how much comes from
the lists that are not searched.
"""

import faiss
import numpy as np

from fewshot_callbacks import search_quality

generator = np.random.default_rng(0)
labels = np.arange(10_500) % 300
rows = (
    generator.standard_normal((300, 32))[labels]
    + generator.standard_normal((10_500, 32))
).astype(np.float32)
# The inner product is then the cosine.
faiss.normalize_L2(rows)
queries, gallery = rows[:500], rows[500:]

index = faiss.index_factory(32, "IVF64,PQ16x6", faiss.METRIC_INNER_PRODUCT)
index.train(gallery)
index.add(gallery)
index.make_direct_map()
# the vectors that the codes represent
decoded = index.reconstruct_n(0, index.ntotal)

# nprobe is the number of lists that are searched, out of 64.
for index.nprobe in (4, 64):
    _, found = index.search(queries, 10)
    quality = search_quality(
        found,
        queries,
        gallery,
        query_labels=labels[:500],
        gallery_labels=labels[500:],
        similarity="dot",
        stored=decoded,
    )
    print(f"nprobe={index.nprobe}\n{quality}\n")
