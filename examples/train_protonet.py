"""Train a prototypical network on the glyphs, with J of every batch and exact retrieval metrics of every epoch.

Run it as it is:    python examples/train_protonet.py
It takes about a minute on a laptop, writes to runs/, and prints the result on unseen scripts.
"""

import argparse

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EpisodeProtocol,
    Episodes,
    FewShotDataModule,
    Glyphs,
    ProtoNet,
    RetrievalMonitor,
)

# ---------------------------------------------------------------------------------------------------------------------
# Settings: change them here, or on the command line (--head softmax --epochs 10).
head = "dr"  # "dr": distance-ratio head with a learnable exponent; "softmax": logits -d^2
backbone = "conv4"  # "conv4", "resnet18" or any nn.Module that returns (images, dim)
ways, shots, queries = 20, 1, 3  # per training episode
episodes = 40  # training episodes per epoch
epochs = 4
learning_rate = 1e-3
seed = 0
# ---------------------------------------------------------------------------------------------------------------------
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--head", choices=("dr", "softmax"), default=head)
parser.add_argument("--epochs", type=int, default=epochs)
parser.add_argument("--episodes", type=int, default=episodes)
options = parser.parse_args()

seed_everything(seed)

# A class is a character, its images are typefaces; validation and test have other scripts than training.
data = FewShotDataModule(Glyphs(), train=Episodes(ways, shots, queries, options.episodes), batch_size=512, seed=seed)

# Test episodes: 600 times 20-way 1-shot with 9 queries, drawn from a seeded list.
model = ProtoNet(
    backbone,
    options.head,
    in_channels=data.dataset.in_channels,
    shots=shots,
    learning_rate=learning_rate,
    evaluation=EpisodeProtocol(ways=20, shots=1, queries=9, episodes=600, seed=0),
)

best = ModelCheckpoint(monitor="val/mAP", mode="max", filename="best")
trainer = Trainer(
    max_epochs=options.epochs,
    callbacks=[
        DiscriminantRatioMonitor(prog_bar=False),  # train/J of every batch, val/J of every epoch, in the logs
        RetrievalMonitor(),  # val/mAP, val/recall@1, val/pair_f1, ... at the end of validation
        best,
    ],
    logger=CSVLogger("runs", name=f"protonet_{options.head}"),
    log_every_n_steps=1,
)
trainer.fit(model, data)
trainer.test(model, data, ckpt_path=best.best_model_path)
print(model.evaluation_results["test"])
