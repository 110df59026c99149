"""The data module: which batches of which split a training, a validation and a test are served, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from fewshot_callbacks import EpisodeProtocol, ProtoNet
from fewshot_callbacks.callbacks import GeneralizationGapMonitor
from fewshot_callbacks.data import (
    ClassBalanced,
    Episodes,
    FewShotDataModule,
    FewShotDataset,
    Glyphs,
    ImageFolder,
    LogoDet3K,
    PhotoTransform,
)
from fewshot_callbacks.data.dataset import SPLITS, Batch, Split
from fewshot_callbacks.functional.episodes import sample_episodes
from tests.data.trees import CLASSES_OF_FOLDERS as CLASSES
from tests.data.trees import PLAIN, draw, everything, write_folders

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
TINY = Episodes(ways=2, shots=1, queries=2, episodes=2)
PROTOCOL = EpisodeProtocol(ways=2, shots=1, queries=1, episodes=3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folders(tmp_path)


def module(root: Path, folder: dict | None = None, **settings) -> FewShotDataModule:
    images = ImageFolder(root, **({"transform": PLAIN} | (folder or {})))
    return FewShotDataModule(images, **({"train": TINY, "evaluation": PROTOCOL, "batch_size": 3} | settings))


def joined(loader) -> Batch:
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    return images, labels


# -------------------------------------------------------------------------------------------------------------- batches


def test_training_batches_are_episodes_augmented_unless_not_wanted(root: Path) -> None:
    for images, labels in module(root).train_dataloader():
        assert images.shape == (6, 3, 8, 8)
        assert labels.reshape(2, 3).unique(dim=1).shape == (2, 1)
    torch.manual_seed(1)
    one = module(root).images("train").batch([0, 5])
    torch.manual_seed(2)
    other = module(root).images("train").batch([0, 5])
    assert one[1].tolist() == [0, 1]
    assert not torch.equal(one[0], other[0])
    plain = module(root, augment=False).images("train")
    assert torch.equal(plain.batch([0, 5])[0], everything(ImageFolder(root, transform=PLAIN))[0][[0, 5]])


def test_class_balanced_batches(root: Path) -> None:
    data = module(root, train=ClassBalanced(3, 2, batches=4))
    batches = [labels for _, labels in data.train_dataloader()]
    assert [labels.unique(return_counts=True)[1].tolist() for labels in batches] == [[2, 2, 2]] * 4


def test_evaluation_images_come_once_in_order_as_tuples(root: Path) -> None:
    data = module(root)
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        batches = list(loader)
        assert [len(labels) for _, labels in batches] == [3, 3, 2]
        assert all(isinstance(batch, tuple) for batch in batches)
        images, labels = joined(batches)
        expected = everything(ImageFolder(root, split, transform=PLAIN))
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])
    training = joined(data.training_data_for_evaluation())
    assert torch.equal(training[0], everything(ImageFolder(root, transform=PLAIN))[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_episodic_evaluation_gives_fixed_episodes_for_any_number_of_workers(root: Path, workers: int) -> None:
    protocol = EpisodeProtocol(ways=2, shots=1, queries=1, episodes=3, seed=5)
    data = module(root, episodic_evaluation=True, evaluation=protocol, num_workers=workers, val_episodes=2 - workers)
    assert len(list(data.val_dataloader())) == data.val_episodes == 2 - workers
    expected = sample_episodes(torch.arange(8) // 4, ways=2, shots=1, queries=1, episodes=3, seed=5)
    loader = data.test_dataloader()
    assert loader.batch_sampler.hash == expected.hash
    images, _ = everything(data.images("test"))
    for _ in range(2):
        for (batch, _), episode in zip(loader, expected.indices, strict=True):
            assert torch.equal(batch, images[episode.flatten()])


class Points(FewShotDataset):
    """A data set of one's own: one pixel, whose colour is its class."""

    labels = torch.arange(12) % 3

    def __init__(self, split: Split = "train") -> None:
        self.class_names = tuple(f"{split}{label}" for label in range(3))

    def with_split(self, split: Split) -> "Points":
        return Points(split)

    def batch(self, indices) -> Batch:
        labels = self.labels[list(indices)]
        return labels.float().reshape(-1, 1, 1, 1).expand(-1, 3, 1, 1), labels


@pytest.mark.parametrize("held", SPLITS)
def test_a_data_set_of_ones_own_needs_two_methods_whichever_split_it_holds(held: Split) -> None:
    data = FewShotDataModule(Points(held), train=TINY, evaluation=PROTOCOL)
    data.check()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        images, labels = joined(loader)
        assert torch.equal(images[:, 0, 0, 0], labels.float())
    for split in SPLITS:
        assert data.images(split).class_names == (f"{split}0", f"{split}1", f"{split}2")


# -------------------------------------------------------------------------------------------------------- in a training


class Probe(LightningModule):
    """Keeps the batches it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_batches: list[Tensor] = []
        self.val_batches: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.train_batches.append(batch[0])
        return self.weight.square().sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_batches.append(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(
    data: FewShotDataModule,
    epochs: int = 2,
    folder: Path | None = None,
    resume: Path | None = None,
    validated: bool = False,
) -> Probe:
    probe = Probe()
    Trainer(
        **QUIET,
        max_epochs=epochs,
        logger=False,
        limit_val_batches=1.0 if validated else 0,
        callbacks=[] if folder is None else [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_checkpointing=folder is not None,
    ).fit(probe, data, ckpt_path=None if resume is None else str(resume))
    return probe


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")  # that is the intention
@pytest.mark.parametrize(("val_folder", "validated"), [("val", 8), (None, 0), ("test", 8)])
def test_validation_follows_the_folder(root: Path, val_folder: str | None, validated: int) -> None:
    probe = fit(module(root, {"val_folder": val_folder}), epochs=1, validated=True)
    sanity_check = 6 if validated else 0  # two batches
    assert sum(map(len, probe.val_batches)) == sanity_check + validated


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the resumed run keeps no checkpoint
def test_only_training_batches_of_glyphs_are_augmented_and_runs_repeat(tmp_path: Path) -> None:
    def glyphs(**settings) -> FewShotDataModule:
        return FewShotDataModule(Glyphs(), train=Episodes(4, 1, 3, 3), batch_size=4000, **settings)

    torch.manual_seed(1)
    data = glyphs()
    one, again, two = fit(data, folder=tmp_path, validated=True), fit(data), fit(glyphs(num_workers=1))
    assert [tuple(batch.shape) for batch in one.train_batches] == [(16, 1, 32, 32)] * 6
    for other in (again, two):
        assert all(torch.equal(a, b) for a, b in zip(one.train_batches, other.train_batches, strict=True))
    for seen in one.val_batches:  # the sanity check included
        assert torch.equal(seen, Glyphs("val").images.float() / 255)

    plain = fit(glyphs(augment=False))
    assert not torch.equal(plain.train_batches[0], one.train_batches[0])
    known = {image.numpy().tobytes() for image in Glyphs("train").images}
    assert all((image * 255).round().byte().numpy().tobytes() in known for image in plain.train_batches[0])

    resumed = fit(glyphs(), resume=tmp_path / "epoch=0.ckpt")
    assert len(resumed.train_batches) == 3
    assert all(torch.equal(a, b) for a, b in zip(resumed.train_batches, one.train_batches[3:], strict=True))


def test_a_gap_is_measured_and_settings_are_kept(tmp_path: Path) -> None:
    """The gap needs no argument; a logger and a checkpoint hold the settings of data and model, as plain values."""
    for split, classes in {"train": 5, "val": 4, "test": 2}.items():
        for number in range(classes):
            for i in range(4):
                draw(tmp_path / split / f"{split}{number}" / f"{i}.png", (40 * number + i, 9 * i, 99))
    data = module(tmp_path, {"transform": PhotoTransform(image_size=16)})
    monitor = GeneralizationGapMonitor(classes=None, label_groups=2, strict=True)
    keeper = ModelCheckpoint(tmp_path / "kept", filename="one")
    logger = CSVLogger(tmp_path, name="log", version="")
    model = ProtoNet(shots=1, evaluation=PROTOCOL)
    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[monitor, keeper], logger=logger, log_every_n_steps=1)
    trainer.fit(model, data)
    assert monitor.gap is not None
    assert (monitor.gap.classes, monitor.gap.items_per_class) == ((5, 4), (4, 4))
    content = torch.load(tmp_path / "kept" / "one.ckpt", weights_only=True)
    kept = content["datamodule_hyper_parameters"]["data"]
    assert (kept["dataset"], kept["train"]["ways"], kept["evaluation"]["episodes"]) == ("ImageFolder", 2, 3)
    assert "ImageFolder" in (tmp_path / "log" / "hparams.yaml").read_text()
    assert ProtoNet.load_from_checkpoint(tmp_path / "kept" / "one.ckpt").evaluation == PROTOCOL


# ------------------------------------------------------------------------------------------------------ what is refused


def module_of(**settings) -> FewShotDataModule:
    return FewShotDataModule(Points(), **settings)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (module_of, {"batch_size": 0}, "batch_size is 0"),
        (module_of, {"num_workers": -1}, "num_workers is -1"),
        (module_of, {"val_episodes": 0}, "val_episodes is 0"),
        (Episodes, {"ways": 0}, "ways is 0"),
        (Episodes, {"shots": 2.5}, "shots is 2.5; expected a whole number"),
        (ClassBalanced, {"classes_per_batch": 4, "items_per_class": 1}, "items_per_class=1"),
        (PhotoTransform, {"image_size": 0}, "image_size is 0"),
        (PhotoTransform, {"resize": 80}, "resize is 80, smaller than image_size 84"),
        (PhotoTransform, {"resize": (96, 80)}, "resize is (96, 80), smaller than image_size 84"),
        (PhotoTransform, {"min_area": 0.0}, "min_area is 0.0"),
        (PhotoTransform, {"flip": 1.5}, "flip is 1.5; it is a probability"),
        (PhotoTransform, {"jitter": -0.1}, "jitter is -0.1"),
        (PhotoTransform, {"std": (1.0, 0.0, 1.0)}, "std is (1.0, 0.0, 1.0); images are divided by it"),
        (Glyphs, {"split": "all"}, "There is no split 'all'. Use one of 'train', 'val', 'test'"),
        (Glyphs, {"size": 4}, "size is 4; glyphs cannot be distinguished below 8 pixels. Use size >= 8"),
        (Glyphs, {"min_faces": 0}, "min_faces is 0; there are 16 faces"),
        (LogoDet3K, {"root": "anywhere", "min_boxes": 0}, "min_boxes is 0"),
        (LogoDet3K, {"root": "anywhere", "val_share": 0.8}, "val_share is 0.8 and test_share 0.2; the rest is trained"),
        (LogoDet3K, {"root": "anywhere", "test_share": 0.0}, "test_share 0.0"),
        (LogoDet3K, {"root": "anywhere", "val_share": float("nan")}, "val_share is nan"),
        (ImageFolder, {"memory_mb": -1}, "memory_mb is -1. Use 0 to keep no decoded images, 512 for half a gigabyte."),
        (ImageFolder, {"memory_mb": float("nan")}, "memory_mb is nan."),
    ],
)
def test_wrong_settings_fail_in_the_constructor(as_users_run_it, make, settings: dict, words: str, root: Path) -> None:
    given = {"root": root} if make is ImageFolder else {}
    with pytest.raises(ValueError, match=re.escape(words)):
        make(**given, **settings)


def test_each_split_that_is_too_small_is_named_with_the_options_that_would_fit(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / CLASSES[split][0] / "3.png").unlink()
    settings = {"train": Episodes(2, 1, 3), "evaluation": EpisodeProtocol(2, 3, 1)}
    train = (
        "The train classes do not suffice for the requested episodes (--data.train.ways 2, --data.train.shots 1, "
        f"--data.train.queries 3): 2-way 1-shot with 3 queries needs 4 images per class; class '{CLASSES['train'][0]}' has "
        "3. Use --data.train.queries <= 2 or drop the class."
    )
    val = (
        "The val classes do not suffice for the requested episodes (--data.evaluation.ways 2, --data.evaluation.shots 3, "
        f"--data.evaluation.queries 1): 2-way 3-shot with 1 queries needs 4 images per class; class '{CLASSES['val'][0]}' "
        "has 3. Use --data.evaluation.shots 1 with --data.evaluation.queries <= 2 or drop the class."
    )
    for checked, expected in (((), f"{train} {val}"), (("train",), train), (("val", "test"), val)):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            module(root, **settings).check(*checked)
    module(root, **settings).check("test")
    module(root, {"val_folder": None}, **settings).check("val", "test")
    batches = module(root, train=ClassBalanced(2, 4))
    words = r"the requested batches \(--data.train.classes_per_batch 2, --data.train.items_per_class 4\): .* <= 3 or"
    with pytest.raises(ValueError, match=words):
        batches.check()
