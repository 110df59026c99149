"""Options for runs of seconds, the folder of the configurations, and images to train on: for tests of commands."""

from pathlib import Path

import numpy as np
from PIL import Image

CONFIGS = Path(__file__).parents[2] / "configs"
ONE_EPOCH = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
TINY = [*ONE_EPOCH, "--data.train.episodes=2", "--data.evaluation.episodes=5"]
TINY_BALANCED = [*ONE_EPOCH, "--data.train.batches=2"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]

MONITORS = """
trainer:
  callbacks:
    - class_path: fewshot_callbacks.callbacks.RetrievalMonitor
      init_args: {label_groups: null}
    - class_path: fewshot_callbacks.callbacks.DiscriminantRatioMonitor
    - class_path: fewshot_callbacks.callbacks.TrainingDynamicsMonitor
      init_args: {every_n_steps: 1}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val/mAP, mode: max, filename: best}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {filename: last}
"""


def write_images(root, classes=5, images=4):
    """Write noise around a grey for each class of each split, as ImageFolder reads it."""
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for number in range(classes):
            folder = root / split / f"{split}{number}"
            folder.mkdir(parents=True)
            for i in range(images):
                pixels = (40 * number + rng.integers(0, 40, (18, 18, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
