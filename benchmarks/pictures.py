"""Seconds that the pictures of one validation take, beside the evaluation itself.

    python benchmarks/pictures.py --items 2000 31000

Random images of 3 x 32 x 32 pixels are held in memory, and embeddings of 128 dimensions are looked up: what is timed is the
evaluation, the choice of queries, their neighbours, the drawing, and one PNG file for each picture.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings

import torch
from _embeddings import make
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import EmbeddingMap, RetrievalMonitor, RetrievalPanels, ScorePlots

PICTURES = {"RetrievalPanels": RetrievalPanels, "EmbeddingMap": EmbeddingMap, "ScorePlots": ScorePlots}


class LookedUp(LightningModule):
    """A module whose embeddings are known beforehand."""

    def validation_step(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the embeddings that the batch holds."""
        _, labels, embeddings = batch
        return {"embeddings": embeddings, "labels": labels}


def seconds(loader: DataLoader, pictures: type | None) -> tuple[float, float]:
    """Return the seconds of a validation, and those of them that the pictures took."""
    callbacks = [RetrievalMonitor()] + ([] if pictures is None else [pictures(max_share=None)])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            callbacks=callbacks, logger=False, accelerator="cpu", enable_progress_bar=False, default_root_dir=folder
        )
        started = time.perf_counter()
        trainer.validate(LookedUp(), loader, verbose=False)
        return time.perf_counter() - started, 0.0 if pictures is None else callbacks[1].seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[2000, 31_000])
    parser.add_argument("--rounds", type=int, default=3, help="the median of these is shown")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    table = Table("items", "validation", *PICTURES, title="seconds, median")
    for items in options.items:
        embeddings, labels = make(items, 128, "middling")
        images = torch.rand(items, 3, 32, 32)
        loader = DataLoader(TensorDataset(images, labels, embeddings), batch_size=500)
        alone = sorted(seconds(loader, None)[0] for _ in range(options.rounds))
        cells = [f"{alone[len(alone) // 2]:.1f}"]
        for pictures in PICTURES.values():
            found = sorted(seconds(loader, pictures)[1] for _ in range(options.rounds))
            cells.append(f"{found[len(found) // 2]:.1f}")
        table.add_row(f"{items:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
