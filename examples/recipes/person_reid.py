"""Evaluate person re-identification, while training and afterwards.

A gallery image is ignored if it shows the query's person and comes from the
query's camera: it is neither a hit nor a miss. Images of other persons from
that camera count. The values equal the values of the usual evaluation loop,
which sorts each row.
"""

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import RetrievalMonitor, evaluate_retrieval

torch.manual_seed(0)
persons, cameras = 20, 4
centres = torch.randn(persons, 32)


def images(count):
    person, camera = (
        torch.randint(persons, (count,)),
        torch.randint(cameras, (count,)),
    )
    return TensorDataset(
        centres[person] + 1.5 * torch.randn(count, 32), person, camera
    )


class ReId(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Identity()  # your network

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pixels, person, camera = batch
        return {
            "embeddings": self.backbone(pixels),
            "labels": person,
            "person": person,
            "camera": camera,
        }


queries, gallery = images(60), images(400)
monitor = RetrievalMonitor(
    gallery=1,
    groups=("person", "camera"),
    metrics=("mAP", "minp", "recall@1", "recall@5", "recall@10"),
)
trainer = Trainer(
    callbacks=[monitor],
    logger=False,
    accelerator="cpu",
    enable_progress_bar=False,
)
trainer.validate(
    ReId(),
    [
        DataLoader(queries, batch_size=32),
        DataLoader(gallery, batch_size=32),
    ],
)

# The same without a Trainer: a group is one person and one camera.
(
    (query_embeddings, query_person, query_camera),
    (gallery_embeddings, gallery_person, gallery_camera),
) = queries.tensors, gallery.tensors
report = evaluate_retrieval(
    query_embeddings,
    query_person,
    gallery_embeddings,
    gallery_person,
    query_groups=query_person * cameras + query_camera,
    gallery_groups=gallery_person * cameras + gallery_camera,
    metrics=("mAP", "recall@1"),
)
assert report.mAP == monitor.report.mAP

# the usual evaluation loop, query by query
scores = (
    torch.nn.functional.normalize(query_embeddings)
    @ torch.nn.functional.normalize(gallery_embeddings).T
)
order = scores.argsort(dim=1, descending=True).numpy()
precisions, hits = [], []
for query in range(len(queries)):
    ranking = order[query]
    same_person = gallery_person.numpy()[ranking] == int(
        query_person[query]
    )
    same_camera = gallery_camera.numpy()[ranking] == int(
        query_camera[query]
    )
    relevant = same_person[~(same_person & same_camera)]
    if relevant.any():
        found = np.flatnonzero(relevant)
        precisions.append(
            np.mean(np.arange(1, len(found) + 1) / (found + 1))
        )
        hits.append(found[0] == 0)
print(f"mAP {report.mAP:.6f}, usual loop {np.mean(precisions):.6f}")
print(f"rank-1 {report['recall@1']:.6f}, usual loop {np.mean(hits):.6f}")
assert abs(report.mAP - np.mean(precisions)) < 1e-9
assert report["recall@1"] == np.mean(hits)
