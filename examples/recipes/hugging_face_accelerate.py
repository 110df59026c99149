"""Accelerate: its loaders give some samples twice, so that the last batch is full in every process; ids tell which.

One process: `python hugging_face_accelerate.py`. Two: `accelerate launch --cpu --num_processes 2` and the file.
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
    data = TensorDataset(
        points, labels, torch.arange(233)
    )  # the third is the index, which names each sample

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

    # Each process passes what it has embedded. Nobody gathers all embeddings, and each sample counts once.
    report = evaluate_retrieval(
        embeddings, classes, query_ids=index, share=Share(all_processes())
    )
    accelerator.print(
        f"{report.queries} queries, recall@1 {report['recall@1']:.6f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
