"""Evaluate with Accelerate, where loaders repeat samples.

Accelerate's loaders fill the last batch of every process with repeated
samples, and ids identify them. Run this in one process with
`python hugging_face_accelerate.py`, or in two with
`accelerate launch --cpu --num_processes 2 hugging_face_accelerate.py`.
Both print the same value.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.functional import Share
from fewshot_callbacks.metrics import all_processes


def main() -> None:
    torch.manual_seed(0)
    labels = torch.arange(233) % 20
    points = torch.eye(20)[labels] + 0.3 * torch.randn(233, 20)
    # the third tensor is the index, which identifies each sample
    data = TensorDataset(points, labels, torch.arange(233))

    accelerator = Accelerator(cpu=True)  # on GPUs: Accelerator()
    encoder, loader = accelerator.prepare(
        nn.Linear(20, 8), DataLoader(data, batch_size=16)
    )
    encoder.eval()
    batches = []
    with torch.no_grad():
        for inputs, classes, index in loader:
            batches.append(
                (encoder(inputs).cpu(), classes.cpu(), index.cpu())
            )
    embeddings, classes, index = (
        torch.cat(part) for part in zip(*batches, strict=True)
    )

    # Each process passes its own embeddings, and no process gathers
    # them all. Each sample counts once.
    report = evaluate_retrieval(
        embeddings, classes, query_ids=index, share=Share(all_processes())
    )
    accelerator.print(
        f"{report.queries} queries, recall@1 {report['recall@1']:.6f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
