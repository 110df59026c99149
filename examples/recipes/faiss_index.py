"""What a faiss index loses: how much by its codes, and how much by the lists that it does not search."""

import faiss
import numpy as np

from fewshot_callbacks import search_quality

generator = np.random.default_rng(0)
labels = np.arange(10_500) % 300
rows = (
    generator.standard_normal((300, 32))[labels]
    + generator.standard_normal((10_500, 32))
).astype(np.float32)
faiss.normalize_L2(rows)  # so that the inner product is the cosine
queries, gallery = rows[:500], rows[500:]

index = faiss.index_factory(32, "IVF64,PQ16x6", faiss.METRIC_INNER_PRODUCT)
index.train(gallery)
index.add(gallery)
index.make_direct_map()
decoded = index.reconstruct_n(0, index.ntotal)  # what its codes stand for

for index.nprobe in (4, 64):  # how many of the 64 lists are searched
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
