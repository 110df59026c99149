"""Re-identification: gallery images of the query's person from the query's own camera are left out.

Images of other persons from that camera stay. So the group of an image is its person and camera together: candidates of the
query's own group are neither hit nor miss. The values are those of the usual evaluation loop, which sorts each row.
"""

import numpy as np
import torch

from fewshot_callbacks import evaluate_retrieval

torch.manual_seed(0)
queries, gallery = 60, 400
persons, cameras = 20, 4
query_person, gallery_person = torch.randint(persons, (queries,)), torch.randint(persons, (gallery,))
query_camera, gallery_camera = torch.randint(cameras, (queries,)), torch.randint(cameras, (gallery,))
centres = torch.randn(persons, 32)
query_embeddings = centres[query_person] + 1.5 * torch.randn(queries, 32)
gallery_embeddings = centres[gallery_person] + 1.5 * torch.randn(gallery, 32)

report = evaluate_retrieval(
    query_embeddings,
    query_person,
    gallery_embeddings,
    gallery_person,
    query_groups=query_person * cameras + query_camera,
    gallery_groups=gallery_person * cameras + gallery_camera,
    metrics=("mAP", "recall@1", "recall@5", "recall@10"),
    label_groups=None,
)

# the usual evaluation, query by query
scores = torch.nn.functional.normalize(query_embeddings) @ torch.nn.functional.normalize(gallery_embeddings).T
order = scores.argsort(dim=1, descending=True).numpy()
precisions, hits = [], []
for query in range(queries):
    ranking = order[query]
    same_person = gallery_person.numpy()[ranking] == int(query_person[query])
    same_camera = gallery_camera.numpy()[ranking] == int(query_camera[query])
    relevant = same_person[~(same_person & same_camera)]
    if relevant.any():
        found = np.flatnonzero(relevant)
        precisions.append(np.mean(np.arange(1, len(found) + 1) / (found + 1)))
        hits.append(found[0] == 0)
print(f"mAP {report.mAP:.6f}, usual loop {np.mean(precisions):.6f}")
print(f"rank-1 {report['recall@1']:.6f}, usual loop {np.mean(hits):.6f}")
assert abs(report.mAP - np.mean(precisions)) < 1e-9
assert report["recall@1"] == np.mean(hits)
