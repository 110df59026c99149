"""Evaluate in the Hugging Face Trainer, with `compute_metrics`.

The function receives all embeddings and returns the values of the report.
"""

import torch
from torch import nn
from transformers import (
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTModel,
    set_seed,
)

from fewshot_callbacks import evaluate_retrieval


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        # ViTModel.from_pretrained("google/vit-base-patch16-224-in21k")
        # downloads weights
        self.vit = ViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, classes)

    def forward(self, pixel_values, labels):
        embeddings = self.vit(pixel_values=pixel_values).pooler_output
        loss = nn.functional.cross_entropy(
            self.classifier(embeddings), labels
        )
        # The Trainer collects every entry except the loss.
        return {"loss": loss, "embeddings": embeddings}


def retrieval(evaluation):
    return evaluate_retrieval(
        evaluation.predictions, evaluation.label_ids
    ).metrics()


set_seed(0)
labels = torch.arange(80) % 20
images = torch.rand(20, 3, 32, 32)[labels] + torch.rand(80, 3, 32, 32)
data = [
    {"pixel_values": image, "labels": label}
    for image, label in zip(images, labels, strict=True)
]
trainer = Trainer(
    model=Classifier(20),
    args=TrainingArguments(
        output_dir="runs",
        num_train_epochs=2,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
        save_strategy="best",
        metric_for_best_model="mAP",
        greater_is_better=True,
        report_to="none",
        use_cpu=True,
    ),
    train_dataset=data,
    eval_dataset=data,
    compute_metrics=retrieval,
)
trainer.train()
# every key begins with eval_
values = trainer.evaluate()
print(
    f"mAP {values['eval_mAP']:.3f}, "
    f"Recall@1 {values['eval_recall@1']:.3f}, "
    f"best {trainer.state.best_metric:.3f}"
)
