"""Seconds that the figures of one validation take, compared with the evaluation itself.

    python benchmarks/pictures.py --items 2000 31000

Random images of 3 x 32 x 32 pixels are in memory, and 128-dimensional embeddings are looked up. The benchmark times the
evaluation, the choice of queries, the search for their neighbours, the drawing, and writing one PNG file per figure. Seconds
are medians over rounds with minimum and maximum.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import make
from _results import Column, Results, add_file_option
from retrieval import spread

from fewshot_callbacks import EmbeddingMap, RetrievalMonitor, RetrievalPanels, ScorePlots

PICTURES = {"RetrievalPanels": RetrievalPanels, "EmbeddingMap": EmbeddingMap, "ScorePlots": ScorePlots}
COLUMNS = (
    Column("items", ",d"),
    Column("validation with `RetrievalMonitor`, seconds", ".1f"),
    *(Column(f"`{name}` adds, seconds", ".1f") for name in PICTURES),
)


class LookedUp(LightningModule):
    """A module that looks its embeddings up."""

    def validation_step(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the embeddings in the batch."""
        _, labels, embeddings = batch
        return {"embeddings": embeddings, "labels": labels}


def seconds(loader: DataLoader, pictures: type | None) -> tuple[float, float]:
    """Return the seconds of a validation, and the part that the figures took."""
    callbacks = [RetrievalMonitor()] + ([] if pictures is None else [pictures(max_share=None)])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            callbacks=callbacks, logger=False, accelerator="cpu", enable_progress_bar=False, default_root_dir=folder
        )
        started = time.perf_counter()
        trainer.validate(LookedUp(), loader, verbose=False)
        return time.perf_counter() - started, 0.0 if pictures is None else callbacks[1].schedule.watch.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[2000, 31_000])
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    add_file_option(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    with Results(COLUMNS, threads=options.threads, file=options.json) as results:
        for items in options.items:
            embeddings, labels = make(items, 128, "middling")
            images = torch.rand(items, 3, 32, 32)
            loader = DataLoader(TensorDataset(images, labels, embeddings), batch_size=500)
            alone = [seconds(loader, None)[0] for _ in range(options.rounds)]
            beside = [[seconds(loader, pictures)[1] for _ in range(options.rounds)] for pictures in PICTURES.values()]
            results.add(items, spread(alone), *map(spread, beside))


if __name__ == "__main__":
    main()
