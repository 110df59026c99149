"""The data module: which batches training, validation and test get, and which settings are refused."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from fewshot_callbacks import EpisodeProtocol, ProtoNet
from fewshot_callbacks.callbacks import GeneralizationGapMonitor
from fewshot_callbacks.data import FewShotDataModule, FewShotDataset, Glyphs, ImageFolder, LogoDet3K, PhotoTransform
from fewshot_callbacks.data.dataset import SPLITS, Batch, Split
from fewshot_callbacks.data.samplers import ClassBalanced, Episodes
from fewshot_callbacks.functional.episodes import sample_episodes
from tests.callbacks.models import trainer
from tests.data.trees import CLASSES_OF_FOLDERS as CLASSES
from tests.data.trees import PLAIN, all_items, save_image, write_folders
from tests.messages import missing_facts, refused

TINY = Episodes(ways=2, shots=1, queries=2, episodes=2)
PROTOCOL = EpisodeProtocol(ways=2, shots=1, queries=1, episodes=3, seed=5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folders(tmp_path)


def module(root: Path, folder: dict | None = None, **settings) -> FewShotDataModule:
    images = ImageFolder(root, **({"transform": PLAIN} | (folder or {})))
    return FewShotDataModule(images, **({"train": TINY, "evaluation": PROTOCOL, "batch_size": 3} | settings))


def joined(loader) -> Batch:
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    return images, labels


def test_training_batches_are_episodes_or_balanced_and_augmented_by_default(root: Path) -> None:
    for images, labels in module(root).train_dataloader():
        assert images.shape == (6, 3, 8, 8)
        assert labels.reshape(2, 3).unique(dim=1).shape == (2, 1)
    balanced = module(root, train=ClassBalanced(3, 2, batches=4)).train_dataloader()
    assert [labels.unique(return_counts=True)[1].tolist() for _, labels in balanced] == [[2, 2, 2]] * 4
    one, other = (module(root).images("train").batch([0, 5]) for _ in range(2))
    assert one[1].tolist() == [0, 1]
    assert not torch.equal(one[0], other[0])
    plain = module(root, augment=False).images("train")
    assert torch.equal(plain.batch([0, 5])[0], all_items(ImageFolder(root, transform=PLAIN))[0][[0, 5]])


def test_evaluation_images_come_once_in_order_as_tuples(root: Path) -> None:
    data = module(root)
    loaders = {"val": data.val_dataloader(), "test": data.test_dataloader()}
    for split, loader in (loaders | {"train": data.training_data_for_evaluation()}).items():
        batches = list(loader)
        assert [len(labels) for _, labels in batches] == ([3] * 4 if split == "train" else [3, 3, 2])
        assert all(isinstance(batch, tuple) for batch in batches)
        images, labels = joined(batches)
        expected = all_items(ImageFolder(root, split, transform=PLAIN))
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])


def test_episodic_evaluation_gives_fixed_episodes(root: Path) -> None:
    data = module(root, episodic_evaluation=True, val_episodes=2)
    assert len(list(data.val_dataloader())) == data.val_episodes == 2
    expected = sample_episodes(torch.arange(8) // 4, ways=2, shots=1, queries=1, episodes=3, seed=5)
    loader = data.test_dataloader()
    assert loader.batch_sampler.hash == expected.hash
    images, _ = all_items(data.images("test"))
    for _ in range(2):
        assert torch.equal(joined(loader)[0], images[expected.indices.flatten()])


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
def test_a_data_set_of_the_user_needs_two_methods_whichever_split_it_holds(held: Split) -> None:
    data = FewShotDataModule(Points(held), train=TINY, evaluation=PROTOCOL)
    data.check()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        images, labels = joined(loader)
        assert torch.equal(images[:, 0, 0, 0], labels.float())
    assert [data.images(split).class_names[2] for split in SPLITS] == ["train2", "val2", "test2"]


class Seen(Callback):
    """Keeps the batches that a module is given."""

    def __init__(self) -> None:
        self.train, self.val = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.train.append(batch[0])

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0) -> None:
        self.val.append(batch[0])


def fit(data: FewShotDataModule, *callbacks, resume: Path | None = None, **settings) -> Seen:
    seen, net = Seen(), ProtoNet(nn.Flatten(), evaluation=PROTOCOL)
    run = trainer(seen, *callbacks, **({"max_epochs": 2, "limit_val_batches": 0} | settings))
    run.fit(net, data, ckpt_path=resume)
    return seen


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the resumed run keeps no checkpoint
def test_only_training_batches_of_glyphs_are_augmented_and_runs_repeat(tmp_path: Path) -> None:
    def glyphs(**settings) -> FewShotDataModule:
        return FewShotDataModule(Glyphs(), train=Episodes(4, 1, 3, 3), batch_size=4000, **settings)

    def same(found: list[Tensor], expected: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    data = glyphs()
    every_epoch = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    one = fit(data, every_epoch, limit_val_batches=1.0, num_sanity_val_steps=1)
    assert [tuple(batch.shape) for batch in one.train] == [(16, 1, 32, 32)] * 6
    assert same(fit(data).train, one.train)
    assert same(fit(glyphs(num_workers=1)).train, one.train)
    assert same(one.val, [Glyphs("val").images.float() / 255] * 3)  # the sanity check included
    plain = fit(glyphs(augment=False), max_epochs=1)
    assert not torch.equal(plain.train[0], one.train[0])
    known = {image.numpy().tobytes() for image in Glyphs("train").images}
    assert all((image * 255).round().byte().numpy().tobytes() in known for image in plain.train[0])
    assert same(fit(glyphs(), resume=tmp_path / "epoch=0.ckpt").train, one.train[3:])


def test_a_generalization_gap_is_measured_and_a_checkpoint_holds_the_settings(tmp_path: Path) -> None:
    """The gap needs no argument; a logger and a checkpoint hold the settings of data and model, as plain values."""
    for split, classes in {"train": 5, "val": 4, "test": 2}.items():
        for number, i in itertools.product(range(classes), range(4)):
            save_image(tmp_path / split / f"{split}{number}" / f"{i}.png", (40 * number + i, 9 * i, 99))
    data = module(tmp_path, {"transform": PhotoTransform(image_size=16)})
    monitor = GeneralizationGapMonitor(classes=None, label_groups=2, strict=True)
    keeper = ModelCheckpoint(tmp_path / "kept", filename="one")
    logger = CSVLogger(tmp_path, name="log", version="")
    run = trainer(monitor, keeper, logger=logger, log_every_n_steps=1)
    run.fit(ProtoNet(shots=1, evaluation=PROTOCOL), data)
    assert (monitor.gap.classes, monitor.gap.items_per_class) == ((5, 4), (4, 4))
    content = torch.load(tmp_path / "kept" / "one.ckpt", weights_only=True)
    kept = content["datamodule_hyper_parameters"]["data"]
    assert (kept["dataset"], kept["train"]["ways"], kept["evaluation"]["episodes"]) == ("ImageFolder", 2, 3)
    assert "ImageFolder" in (tmp_path / "log" / "hparams.yaml").read_text()
    assert ProtoNet.load_from_checkpoint(tmp_path / "kept" / "one.ckpt").evaluation == PROTOCOL


@pytest.mark.parametrize(
    ("make", "settings", "facts"),
    [
        (FewShotDataModule, {"batch_size": 0}, (0, "batch_size >= 1")),
        (FewShotDataModule, {"num_workers": -1}, ("num_workers", -1, 0)),
        (FewShotDataModule, {"val_episodes": 0}, (0, "val_episodes >= 1")),
        (ClassBalanced, {"classes_per_batch": 4, "items_per_class": 1}, ("items_per_class=1", "items_per_class >= 2")),
        (PhotoTransform, {"image_size": 0}, (0, "image_size >= 1")),
        (PhotoTransform, {"resize": (96, 80)}, ("(96, 80)", "image_size", "resize >= 84")),
        (PhotoTransform, {"min_area": 0.0}, ("0.0", "0 < min_area <= 1")),
        (PhotoTransform, {"flip": 1.5}, (1.5, "0 <= flip <= 1")),
        (PhotoTransform, {"jitter": -0.1}, ("jitter", -0.1)),
        (PhotoTransform, {"std": (1.0, 0.0, 1.0)}, ("std", "(1.0, 0.0, 1.0)", "positive")),
        (Glyphs, {"split": "all"}, ("'all'", "'train'", "'val'", "'test'")),
        (Glyphs, {"size": 4}, (4, "size >= 8")),
        (Glyphs, {"min_faces": 0}, (0, "1 <= min_faces <= 16")),
        (LogoDet3K, {"root": "anywhere", "min_boxes": 0}, (0, "min_boxes >= 1")),
        (LogoDet3K, {"root": "anywhere", "val_share": 0.8}, (0.8, 0.2, "val_share >= 0", "test_share > 0")),
        (LogoDet3K, {"root": "anywhere", "val_share": float("nan")}, ("nan", "val_share >= 0")),
        (ImageFolder, {"memory_mb": float("nan")}, ("memory_mb", "nan", 0, 512)),
    ],
)
def test_wrong_settings_fail_in_the_constructor(as_users_run_it, make, settings, facts, root: Path) -> None:
    given = {ImageFolder: {"root": root}, FewShotDataModule: {"dataset": Points()}}.get(make, {})
    with refused(ValueError, *facts):
        make(**given, **settings)


def test_each_split_that_is_too_small_is_named_with_the_options_that_would_fit(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / CLASSES[split][0] / "3.png").unlink()
    data = module(root, train=Episodes(2, 1, 3), evaluation=EpisodeProtocol(2, 3, 1))
    train = ("train", "--data.train.ways 2", "--data.train.shots 1", "--data.train.queries 3", 4, "ant")
    train = (*train, "--data.train.queries <= 2")
    val = ("val", "--data.evaluation.ways 2", "--data.evaluation.shots 3", "--data.evaluation.queries 1", 4, "dog")
    val = (*val, "--data.evaluation.shots 1", "--data.evaluation.queries <= 2")
    for checked, facts, others in (
        ((), (*train, *val), ()),
        (("train",), train, ("val", "dog")),
        (("val", "test"), val, ("train", "ant")),
    ):
        with pytest.raises(ValueError, match="--data") as raised:
            data.check(*checked)
        message = str(raised.value)
        assert missing_facts(message, (*facts, *others)) == list(others)
        assert all(re.search(rf"'{name}'\D+3\b", message) for name in {"ant", "dog"} - set(others))  # its images
    data.check("test")
    unvalidated = module(root, {"val_folder": None}, evaluation=EpisodeProtocol(2, 3, 1))
    unvalidated.check("val", "test")
    assert unvalidated.val_dataloader() == []
    sizes = ("--data.train.classes_per_batch 2", "--data.train.items_per_class 4")
    with refused(ValueError, *sizes, "ant", "3 items", "--data.train.items_per_class <= 3"):
        module(root, train=ClassBalanced(2, 4)).check()


def test_a_validation_of_fewer_classes_than_the_test_has_ways_names_the_way_out(root: Path) -> None:
    data = module(root, evaluation=EpisodeProtocol(20, 1, 1))
    with refused(
        ValueError, "val", "20 classes", 2, "--data.evaluation.ways <= 2", "evaluation=EpisodeProtocol(ways=20"
    ):
        data.check("val")
