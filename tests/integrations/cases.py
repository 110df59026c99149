"""Small models and tasks that are generated: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WORDS = [f"w{number}" for number in range(60)]


def static_model(dim: int = 16) -> Any:
    """Return a `SentenceTransformer` that embeds a text as the mean of random vectors of its words."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["?", *WORDS])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = np.random.default_rng(0).standard_normal((len(WORDS) + 1, dim)).astype(np.float32)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")


def retrieval_task(
    queries: int = 20, documents: int = 60
) -> tuple[dict[str, str], dict[str, str], dict[str, set[str]]]:
    """Return queries, corpus and relevant documents; no two texts are equal."""
    generator = np.random.default_rng(1)
    texts = [" ".join(generator.choice(WORDS, 8)) for _ in range(queries + documents)]
    corpus = {f"d{number}": text for number, text in enumerate(texts[queries:])}
    relevant = {f"q{number}": set(generator.choice(list(corpus), 1 + number % 4).tolist()) for number in range(queries)}
    return {f"q{number}": text for number, text in enumerate(texts[:queries])}, corpus, relevant


def embedded_items(items: int = 45) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(items) % 5
    return torch.randn(5, 6, generator=generator)[labels] + torch.randn(items, 6, generator=generator), labels


class Classifier(nn.Module):
    """Returns logits and, as they are, the embeddings that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, items: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(items)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits, "embeddings": items}


def trainer_on(items: tuple[Tensor, Tensor], compute_metrics: Any, folder: Path, **arguments: Any) -> Any:
    """Return a Trainer of Hugging Face that evaluates these items in batches of four."""
    from transformers import Trainer, TrainingArguments

    data = [{"items": item, "labels": label} for item, label in zip(*items, strict=True)]
    options = {"batch_eval_metrics": True, "per_device_eval_batch_size": 4, "report_to": "none", "use_cpu": True}
    return Trainer(
        model=Classifier(),
        args=TrainingArguments(output_dir=str(folder), **(options | arguments)),
        eval_dataset=data,
        compute_metrics=compute_metrics,
    )
