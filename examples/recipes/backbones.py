"""Train backbones of timm and torchvision on average precision.

The classifier of each backbone is replaced by a layer of 128 outputs.
"""

import timm
import torch
import torchvision
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import (
    ClassBalancedBatchSampler,
    EmbeddingModule,
    RetrievalMonitor,
    SoftAveragePrecisionLoss,
)

# weights="DEFAULT" downloads weights
resnet = torchvision.models.resnet18(weights=None)
# its output is the embedding
resnet.fc = nn.Linear(resnet.fc.in_features, 128)
# timm makes the layer, if you ask for 128 classes
from_timm = timm.create_model(
    "resnet10t", pretrained=False, num_classes=128
)

seed_everything(0)
labels = torch.arange(80) % 20
images = torch.rand(20, 3, 32, 32)[labels] + torch.rand(80, 3, 32, 32)
data = TensorDataset(images, labels)
sampler = ClassBalancedBatchSampler(
    labels, classes_per_batch=4, items_per_class=4
)
for name, backbone in {"torchvision": resnet, "timm": from_timm}.items():
    trainer = Trainer(
        max_epochs=1,
        callbacks=[RetrievalMonitor()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        EmbeddingModule(backbone, SoftAveragePrecisionLoss()),
        DataLoader(data, batch_sampler=sampler),
        DataLoader(data, batch_size=32),
    )
    print(f"{name}: mAP {trainer.callback_metrics['val/mAP']:.3f}")
