"""How long training waits for images, compared with the time of its steps.

    python benchmarks/image_loading.py
    python benchmarks/image_loading.py --images 1100 --episodes 20

The benchmark draws a folder of small PNG files and trains a ProtoNet (Conv4, 20-way 1-shot episodes with 5 queries) on it
with `ImageFolder`. The training process loads the images unless you pass `--workers`. Lightning's profiler measures how long
the loop waits for a batch, and how long a step takes. Figures are medians over the steps of an epoch. The later epochs, in
which nothing is read or decoded, are summarised by their median, minimum and maximum.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.profilers import SimpleProfiler
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import spread

from fewshot_callbacks import Episodes, FewShotDataModule, ImageFolder, ProtoNet
from fewshot_callbacks.data import PhotoTransform

COLUMNS = (
    Column("epoch"),
    Column("wait for a batch, ms", ".1f"),
    Column("step, ms", ".1f"),
    Column("wait / step", ".3f"),
)


def draw_folder(root: Path, images: int, per_class: int, side: int) -> None:
    """Draw classes of ellipses on a coloured background, in the folder layout that `ImageFolder` reads."""
    random = np.random.default_rng(0)
    for number in range(images):
        image = Image.new("RGB", (side, side), tuple(random.integers(256, size=3)))
        draw = ImageDraw.Draw(image)
        for _ in range(12):
            left, top, width, height = random.integers(side, size=4)
            draw.ellipse((left, top, left + width, top + height), tuple(random.integers(256, size=3)))
        folder = root / "train" / f"{number // per_class:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number % per_class:04d}.png")
    (root / "test").mkdir()
    for name in ("a", "b"):
        (root / "test" / name).mkdir()
        image.save(root / "test" / name / "0.png")


def waiting_and_steps(root: Path, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return for each epoch the median seconds that the loop waits for a batch, and the median seconds of a step."""
    seed_everything(0, verbose=False)
    data = FewShotDataModule(
        ImageFolder(root, transform=PhotoTransform(options.side), val_folder=None),
        train=Episodes(20, 1, 5, options.episodes),
        num_workers=options.workers,
    )
    profiler = SimpleProfiler()
    trainer = Trainer(
        accelerator="cpu", max_epochs=options.epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, profiler=profiler,
    )  # fmt: skip
    trainer.fit(ProtoNet("conv4", "dr"), data)
    waits = profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]
    steps = profiler.recorded_durations["run_training_batch"]
    each = options.episodes
    return [
        (statistics.median(waits[start : start + each]), statistics.median(steps[start : start + each]))
        for start in range(0, each * options.epochs, each)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4708)
    parser.add_argument("--per-class", type=int, default=22)
    parser.add_argument("--side", type=int, default=64, help="of an image, in pixels")
    parser.add_argument("--episodes", type=int, default=100, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    add_file_option(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    with (
        tempfile.TemporaryDirectory() as folder,
        Results(COLUMNS, threads=options.threads, file=options.json) as results,
    ):
        draw_folder(Path(folder), options.images, options.per_class, options.side)
        measured = waiting_and_steps(Path(folder), options)
        for name, epochs in (("first", measured[:1]), ("later: nothing is read or decoded", measured[1:])):
            if not epochs:
                continue
            waits = spread([1e3 * wait for wait, _ in epochs])
            steps = spread([1e3 * step for _, step in epochs])
            results.add(name, waits, steps, spread([wait / step for wait, step in epochs]))


if __name__ == "__main__":
    main()
