"""Put wrong labels and duplicates into a data set, write its report, and count how many of them the report lists.

    python examples/report_of_glyphs.py                  # two minutes: two networks, 3 % wrong labels, 20 duplicates
    python examples/report_of_glyphs.py --quick          # half a minute, with a poorer embedding

Two Conv4 networks, one with the distance-ratio head and one with the softmax head, embed the test glyphs: scripts that are
not in the training set. Some labels are replaced by random ones, and slightly noisy copies of some images are added to the
validation glyphs. The report finds both without knowing about them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from PIL import Image
from torch import Tensor

from fewshot_callbacks import Episodes, FewShotDataModule, Glyphs, ProtoNet, near_duplicates, suspects
from fewshot_callbacks.cli import main as fewshot
from fewshot_callbacks.report import ReportSettings

NOISE = 6
"""Standard deviation of the noise of a copy, in levels of 255: hardly visible."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("report_of_glyphs"))
    parser.add_argument("--wrong", type=float, default=0.03, help="share of wrong labels")
    parser.add_argument("--copies", type=int, default=20, help="duplicates between the splits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="train for a few steps only")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(options.seed)
    test, other = Glyphs("test"), Glyphs("val")

    labels = np.array(test.class_names)[test.labels.numpy()]
    wrong = rng.choice(len(labels), round(options.wrong * len(labels)), replace=False)
    copied = rng.choice(len(labels), options.copies, replace=False)
    noise = torch.from_numpy(rng.normal(0, NOISE, (options.copies, *test.images.shape[1:])))
    copies = (test.images[copied] + noise).clamp(0, 255).to(torch.uint8)
    images = torch.cat([other.images, copies])
    other_labels = np.concatenate([np.array(other.class_names)[other.labels.numpy()], labels[copied]])
    for item in wrong:
        labels[item] = rng.choice(np.setdiff1d(test.class_names, labels[item]))

    files = {"test": save(test.images, options.output / "test"), "train": save(images, options.output / "train")}
    for head, epochs in (("dr", 4), ("softmax", 1)):
        network = train(head, 1 if options.quick else epochs, options)
        for split, pictures, names in (("test", test.images, labels), ("train", images, other_labels)):
            vectors = embed(network, pictures)
            np.savez(options.output / f"{head}_{split}.npz", embeddings=vectors, labels=names, paths=files[split])

    of = {name: str(options.output / f"{name}.npz") for name in ("dr_test", "dr_train", "softmax_test")}
    report = ["report", of["dr_test"], "--train", of["dr_train"], "--against", of["softmax_test"]]
    fewshot([*report, "--title", "Glyphs of unseen scripts", "-o", str(options.output / "report.html")])
    tell(options.output, set(wrong.tolist()), {(int(item), len(other.images) + i) for i, item in enumerate(copied)})


def train(head: str, epochs: int, options: argparse.Namespace) -> ProtoNet:
    """Train a Conv4 on 20-way episodes of the training scripts."""
    seed_everything(options.seed, verbose=False)
    episodes = 5 if options.quick else 60
    data = FewShotDataModule(Glyphs(), train=Episodes(20, queries=3, episodes=episodes), seed=options.seed)
    network = ProtoNet("conv4", head, in_channels=1, shots=1)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(network, data)
    return network.eval()


@torch.no_grad()
def embed(network: ProtoNet, images: Tensor) -> np.ndarray:
    """Embed images of levels 0 to 255."""
    return torch.cat([network.backbone(some.float() / 255) for some in images.split(512)]).numpy()


def save(images: Tensor, folder: Path) -> np.ndarray:
    """Write each image as a PNG file, and return the paths relative to the parent folder."""
    folder.mkdir(exist_ok=True)
    names = [f"{number:05d}.png" for number in range(len(images))]
    for name, image in zip(names, images.numpy(), strict=True):
        Image.fromarray(image[0]).save(folder / name)
    return np.array([f"{folder.name}/{name}" for name in names])


def tell(folder: Path, wrong: set[int], copied: set[tuple[int, int]]) -> None:
    """Print how many of the wrong labels and of the copies the report lists."""
    test, other = np.load(folder / "dr_test.npz"), np.load(folder / "dr_train.npz")
    settings = ReportSettings()
    found = suspects(test["embeddings"], test["labels"]).index.tolist()
    listed = found[: settings.suspects]
    print(
        f"Suspects: {len(found)} found, {len(listed)} listed, of which {len(wrong.intersection(listed))} are wrong labels; "
        f"there are {len(wrong)}."
    )
    near = near_duplicates(test["embeddings"], other["embeddings"], min_score=settings.duplicates_from)
    pairs = list(zip(near.first.tolist(), near.second.tolist(), strict=True))[: settings.duplicates]
    places = [place for place, pair in enumerate(pairs, start=1) if pair in copied]
    last = f"the last of them at place {places[-1]}" if places else "none of them a copy"
    print(
        f"Near duplicates: {near.total} pairs, {len(pairs)} listed, of which {len(places)} of {len(copied)} copies, {last}."
    )


if __name__ == "__main__":
    main()
