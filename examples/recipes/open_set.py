"""Which logo is it, if it is one of ours? Open-set identification, with a threshold that is tried on other logos.

Marks in many typefaces stand for logos: two drawings of each enrolled mark are the gallery, and the queries are further
drawings of these, and of marks that nobody has enrolled.
"""

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from fewshot_callbacks import (
    ClassBalancedBatchSampler,
    Conv4,
    EmbeddingModule,
    Glyphs,
    SoftAveragePrecisionLoss,
    evaluate_identification,
    nearest,
)

seed_everything(0)
train, test = Glyphs("train"), Glyphs("val")
module = EmbeddingModule(Conv4(1), SoftAveragePrecisionLoss())
sampler = ClassBalancedBatchSampler(
    train.labels, classes_per_batch=16, items_per_class=4, batches=30
)
trainer = Trainer(
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, DataLoader(train, batch_sampler=sampler))

with torch.inference_mode():
    parts = [
        (module.eval()(images), labels)
        for images, labels in DataLoader(test, batch_size=512)
    ]
embeddings, labels = (torch.cat(part) for part in zip(*parts, strict=True))

# a third of the marks is ours, a third finds the threshold, a third tries it; of ours two drawings are enrolled
ours, others, strangers = (labels % 3 == part for part in range(3))
first = (
    torch.stack(
        [(labels[:n] == label).sum() for n, label in enumerate(labels)]
    )
    < 2
)
gallery, known = ours & first, ours & ~first

queries = known | others
report = evaluate_identification(
    embeddings[queries],
    labels[queries],
    embeddings[gallery],
    labels[gallery],
    metrics=(
        "recall@1",
        "tpir@fpir0.01",
        "tpir@fpir0.1",
        "tpir@fpir0.1_rank5",
    ),
)
print(report)

# what the threshold does with marks that it has never seen
threshold = report.thresholds["tpir@fpir0.1"]
found = nearest(embeddings[strangers], gallery=embeddings[gallery], k=1)
wrong = (found.scores[:, 0] >= threshold).double().mean()
print(
    f"accepted from {threshold:.4f}: {wrong:.1%} of the strangers, where 10 % were allowed of others"
)
