"""Train a small network and log pictures: which queries fail, a map of the embedding, score plots.

    python examples/pictures.py                 # glyphs; a minute on a laptop
    python examples/pictures.py --data icons    # icons of installed themes, see examples/icons/README.md

It writes PNG files and a report to runs/pictures/. With `--docs docs/images` it also makes the pictures of
docs/callbacks/pictures.md.
"""

import argparse
import shutil
from pathlib import Path

import matplotlib
from icons import IconThemes
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from fewshot_callbacks import (
    EmbeddingMap,
    EpisodeProtocol,
    Episodes,
    FewShotDataModule,
    Glyphs,
    ProtoNet,
    ReportWriter,
    RetrievalMonitor,
    RetrievalPanels,
    ScorePlots,
)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", choices=("glyphs", "icons"), default="glyphs")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--episodes", type=int, default=40)
parser.add_argument("--docs", type=Path, help="folder for the figures of the documentation")
options = parser.parse_args()

seed_everything(0)
matplotlib.rcParams["savefig.dpi"] = 200  # pictures of 1,200 pixels are sharp on every screen
data = FewShotDataModule(
    IconThemes(size=48) if options.data == "icons" else Glyphs(),
    train=Episodes(ways=20, shots=1, queries=3, episodes=options.episodes),
    evaluation=EpisodeProtocol(ways=20, queries=5),  # the smallest classes of icons have six images
    batch_size=512,
)
names = data.images("val").class_names  # characters, or names of icons

trainer = Trainer(
    max_epochs=options.epochs,
    callbacks=[
        RetrievalMonitor(
            metrics=("mAP", *(f"recall@{k}" for k in (1, 2, 5, 10, 20, 50)), "recall@precision0.9", "fnmr@fmr0.001"),
        ),
        RetrievalPanels(worst=3, mistakes=3, sample=3, names=names, max_share=None),
        EmbeddingMap(classes=8, names=names, max_share=None),
        ScorePlots(names=names, max_share=None),
        ReportWriter("report.html", names=names, max_share=None),
    ],
    logger=CSVLogger("runs", name="pictures"),
    log_every_n_steps=10,
)
trainer.fit(
    ProtoNet("conv4", "dr", in_channels=data.dataset.in_channels, learning_rate=1e-3, evaluation=data.evaluation), data
)

folder = Path(trainer.logger.log_dir) / "pictures" / "val"
print(f"The pictures are in {folder}, the report is {Path(trainer.logger.log_dir) / 'report.html'}.")
if options.docs:
    for name in ("worst_queries", "confident_mistakes", "embedding_map", "score_histograms", "weakest_classes"):
        shutil.copy(sorted((folder / name).iterdir())[-1], options.docs / f"pictures_{name}.png")
